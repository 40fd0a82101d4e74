"""Runs transformer_tpu.py's train() for several option lists in one process: one start of the runtime, many runs.

python transformer_worker.py FOLDER '[["name", "--option", "value", ...], ...]'   # a run directory FOLDER/name each
A name FROM/TO first makes TO a copy of the run FROM as it was before its last checkpoint. With the option --spare the
model has a parameter that no output needs.
"""

import json
import shutil
import sys
from pathlib import Path

import torch

import transformer_tpu
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import run_script
from tpu_utils.options.parsing import parse_command_line

build_model = transformer_tpu.build_model


def build_with_spare(config, mesh, device, *rest, **options):
    model = build_model(config, mesh, device, *rest, **options)
    model.spare_weight = torch.nn.Parameter(torch.ones(3).to(device))
    return model


for name, *options in json.loads(sys.argv[2]):
    if "/" in name:
        old, name = name.split("/")
        *_, last = sorted(path.name for path in Path(sys.argv[1], old, "checkpoints").iterdir())
        ignored = shutil.ignore_patterns(last, "summary.json")
        shutil.copytree(f"{sys.argv[1]}/{old}", f"{sys.argv[1]}/{name}", ignore=ignored)
    transformer_tpu.build_model = build_with_spare if "--spare" in options else build_model
    options = [option for option in options if option != "--spare"]
    arguments = ["--no_tensorboard", *options, "--run_dir", f"{sys.argv[1]}/{name}"]
    code = run_script(
        lambda arguments=arguments: transformer_tpu.train(parse_command_line(TransformerConfig, "", arguments))
    )
    if code:
        sys.exit(code)
