"""python -m cluster COMMAND ..., or from any folder python PROJECT/cluster COMMAND ...: see command.py."""

import signal
import sys
from pathlib import Path

if not __package__:  # a folder was run: what is imported is below the project
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cluster.command import main
from tpu_utils.base.errors import run_script

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
sys.exit(run_script(lambda: main(sys.argv[1:])))
