"""Runs transformer_tpu.py's train() for several option lists in one process: one start of the runtime, many runs.

python transformer_worker.py FOLDER '[["name", "--option", "value", ...], ...]'   # a run directory FOLDER/name each
"""

import json
import sys

import transformer_tpu
from config import TransformerConfig
from tpu_utils.errors import run_script
from tpu_utils.options import parse_command_line

for name, *options in json.loads(sys.argv[2]):
    arguments = [*options, "--run_dir", f"{sys.argv[1]}/{name}", "--no_tensorboard"]
    code = run_script(
        lambda arguments=arguments: transformer_tpu.train(parse_command_line(TransformerConfig, "", arguments))
    )
    if code:
        sys.exit(code)
