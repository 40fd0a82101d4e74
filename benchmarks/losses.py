"""20 losses of three scripts by torch.compile, on the CPU and on a GPU, beside those of torch_xla on the CPU.

Run:     python benchmarks/losses.py --python .venv-compile/bin/python
         python benchmarks/losses.py --python .venv-compile/bin/python --gpu
Prints:  CSV: the last loss of torch_xla; the largest relative difference of 20 losses from torch_xla's; and, to judge
         bfloat16 by, that of torch_xla's own float32.
Exit:    0; 1 where a run fails or float32 is further off than TOLERANCE.

This Python has torch_xla; the other one is an environment of requirements-compile.txt.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import ROOT, as_csv, logged, parser_for

TOLERANCE = 1e-5
COMMON = "--log_every 1 --warmup_steps 5 --no_tensorboard"
SCRIPTS = {
    # of 7 million activations one is 9e-9, and its sign, so its gradient, is rounding: 4 channels
    "simple_mnist_tpu.py": "--dataset digits --num_epochs 1 --global_batch_size 70 --channels 4",
    # at a rate of 0.1 BatchNorm makes rounding grow: 4e-5, where plain PyTorch's float32 is 1e-5 off its float64
    "resnet_cifar_tpu.py": "--dataset stripes --depth 8 --width 8 --num_epochs 1 --global_batch_size 200"
    " --learning_rate 0.02",
    "transformer_tpu.py": "--num_steps 20 --global_batch_size 8",
}
"""What runs 20 steps."""


def losses(python: str, script: str, precision: str, device: str, compiler: str) -> list[float]:
    """The losses of a run of its own. Raises CalledProcessError."""
    options = f"{SCRIPTS[script]} {COMMON} --precision {precision} --device {device}".split()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PJRT", "XLA"))}
    if device == "cpu":
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        command = [python, ROOT / script, *options, "--run_dir", folder]
        command += ["--compile", compiler] if compiler else []
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        return [line["loss"] for line in logged(Path(folder)) if line["kind"] == "train"]


def apart(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--python", required=True, metavar="FILE", help="of an environment with the other torch")
    parser.add_argument("--gpu", action="store_true", help="its runs on one NVIDIA GPU too")
    given = parser.parse_args()
    ways = {"CPU eager": ("cpu", "eager"), "CPU inductor": ("cpu", "inductor")}
    ways |= {"GPU inductor": ("gpu", "inductor")} if given.gpu else {}
    rows, is_same = [["script", "precision", "steps", "loss of XLA:CPU", *ways, "XLA:CPU float32"]], True
    for script in SCRIPTS:
        in_float32 = losses(sys.executable, script, "float32", "cpu", "")
        for precision in ("float32", "bfloat16"):
            own = in_float32 if precision == "float32" else losses(sys.executable, script, precision, "cpu", "")
            off = [apart(losses(given.python, script, precision, *way), own) for way in ways.values()]
            is_same &= precision != "float32" or max(off) <= TOLERANCE
            found = [f"{value:.0e}".replace("e-0", "e-") for value in [*off, apart(in_float32, own)]]
            rows.append([script, precision, len(own), f"{own[-1]:.4f}", *found])
            print(*rows[-1], file=sys.stderr, flush=True)
    print(as_csv(rows), end="")
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
