"""A training script with the patience of a test: python tests/bucket_worker.py SCRIPT OPTIONS..."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tpu_utils.remote import storage

storage.REQUEST_SECONDS = 40.0
storage.LOG_SECONDS = 0.5
limits = storage.limits
storage.limits = lambda s: (found := limits(s)) | {"retry": found["retry"].with_delay(initial=0.05, maximum=0.5)}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
