"""Read and write llm.c's GPT-2 weights and debug states.

Run:     python -m tools.convert_llmc describe gpt2_124M.bin
         python -m tools.convert_llmc check gpt2.bin gpt2_debug_state.bin
             compares loss, logits and gradients
         python -m tools.convert_llmc export RUN_DIR model.bin [bf16] [best]
             writes the newest checkpoint of a run, or its best one
"""

import math
import os
import sys
from pathlib import Path

from language.options.llama_shape import LlamaShape
from language.options.shapes import ModelShape
from tpu_utils.base.errors import InputError, run_script


def parse(arguments: list[str]) -> list[str]:
    """COMMAND FILE ...; or the process ends here, with help or with one message."""
    if arguments in (["--help"], ["-h"]):
        print(__doc__)
        sys.exit(0)
    allowed = {"describe": (2,), "check": (3,), "export": (3, 4, 5)}
    ways = [[], ["bf16"], ["best"], ["bf16", "best"]]
    if not arguments or len(arguments) not in allowed.get(arguments[0], ()) or arguments[3:] not in ways:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    for path in arguments[1 : 3 if arguments[0] == "check" else 2]:
        try:
            Path(path).stat()
        except OSError as error:
            problem = "no such file or folder" if isinstance(error, FileNotFoundError) else error.strerror
            print(f"error: {path}: {problem}; expected what --help says", file=sys.stderr)
            sys.exit(2)
    return arguments


if __name__ == "__main__":  # a wrong option or file is answered before the seconds that the next imports take
    arguments = parse(sys.argv[1:])
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # all is computed on the host; left unset, torch_xla warns

import torch

from language.models.layers import stack_layers
from language.weights import llmc_weights
from language.weights.run_weights import read_run
from language.weights.weight_loading import check_finite


def export(run_dir: Path, path: Path, dtype: torch.dtype, checkpoint: str = "newest") -> None:
    """Write the newest or the best checkpoint of a run."""
    config, saved = read_run(run_dir, checkpoint)
    if isinstance(config.shape, LlamaShape):
        raise InputError(
            f"{run_dir} is of the Llama family; expected a GPT, which llm.c has; see tools.convert_hf --help"
        )
    weights = saved.part("model").items()
    tensors = {name: check_finite(value.to(dtype), f"{saved.folder}: {name}, as {dtype}") for name, value in weights}
    llmc_weights.write_model(path, config.shape, stack_layers(tensors), dtype)
    print(f"{path}: step {saved.step}, {config.shape}, {dtype}")


def check_state(shape: ModelShape, tensors: dict[str, torch.Tensor], expected: llmc_weights.DebugState) -> int:
    """Print how far this project's model is from a debug state. 0 if they agree, 1 if not."""
    found = llmc_weights.compute_debug_state(shape, tensors, expected.tokens, expected.targets)
    print(f"loss {found.loss:.6f}, expected {expected.loss:.6f}")
    worst = 0.0
    for name, difference in llmc_weights.differences(found, expected).items():
        print(f"{difference:10.2e}  {name}")
        worst = math.inf if math.isnan(difference) else max(worst, difference)
    limit = 1e-2  # a state may come from hardware that multiplies in TF32
    print(f"{'agrees' if worst <= limit else 'DIFFERS'}: largest relative difference {worst:.2e}, limit {limit}")
    return 0 if worst <= limit else 1


def main(arguments: list[str]) -> int:
    command, path = arguments[0], Path(arguments[1])
    if command == "export":
        dtype = torch.bfloat16 if "bf16" in arguments[3:] else torch.float32
        export(path, Path(arguments[2]), dtype, "best" if "best" in arguments[3:] else "newest")
        return 0
    shape, tensors = llmc_weights.read_model(path)
    print(f"{shape}, {llmc_weights.number_of_values(shape):,} values of {next(iter(tensors.values())).dtype}")
    if command == "describe":
        return 0
    return check_state(shape, tensors, llmc_weights.read_debug_state(Path(arguments[2]), shape))


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(arguments), answers=True))
