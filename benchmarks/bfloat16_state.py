"""transformer_tpu.py with weights, gradients and Adam's moments in bfloat16, as many programs of others have them.

For benchmarks/decisions.py, which plans it; losses of such a run are not what the script's are.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transformer_tpu
from language.options.transformer_options import TransformerConfig
from language.sequences import check_files
from tpu_utils.base.errors import run_script
from tpu_utils.options.environment import command_line

build_model = transformer_tpu.build_model


def in_bfloat16(*arguments, **options):
    """What build_model gives; the optimizer's state takes the dtype of the weights."""
    return build_model(*arguments, **options).to(torch.bfloat16)


if __name__ == "__main__":
    transformer_tpu.build_model = in_bfloat16
    config = command_line(TransformerConfig, __doc__, check_files)
    sys.exit(run_script(lambda: transformer_tpu.train(config)))
