"""What a step costs the host: simple_mnist_tpu.py beside a loop with the same arithmetic and nothing else.

Run:     python benchmarks/host_cost.py [--rounds 7]
Prints:  milliseconds per step of both, the median of rounds taken in turn in one process. The first step (compile),
         evaluation and checkpoints are left out.
"""

import contextlib
import dataclasses
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["PJRT_DEVICE"] = "CPU"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm

import simple_mnist_tpu
from benchmarks.children import parser_for
from config import MnistConfig
from images.arrays import TrainBatches
from images.mnist import load_digits
from tpu_utils.step.optim import make_optimizer

EPOCHS = 6


def bare_loop(config: MnistConfig, num_steps: int) -> float:
    """Seconds per step of the plainest loop."""
    device = torch_xla.device()
    model = simple_mnist_tpu.ConvNet(8, config.channels, config.hidden_dim).to(device)
    optimizer = make_optimizer(config, model.parameters())
    optimizer.param_groups[0]["lr"] = torch.tensor([config.learning_rate]).to(device)
    batches = TrainBatches(load_digits(), config)
    for step in range(num_steps):
        images, labels = (torch.from_numpy(array).to(device) for array in batches.batch(step))
        with torch_xla.compile(full_graph=True, name="bare"):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(images), labels.long()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step == 0:
            xm.wait_device_ops()
            start = time.perf_counter()
    xm.wait_device_ops()
    return (time.perf_counter() - start) / (num_steps - 1)


def our_loop(config: MnistConfig, num_steps: int) -> float:
    """Seconds per step of train(): all that goodput books as step or data wait."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        simple_mnist_tpu.train(dataclasses.replace(config, run_dir=folder))
        goodput = json.loads((Path(folder) / "summary.json").read_text())["goodput"]
    return (goodput["step"] + goodput["data_wait"]) / (num_steps - 1)


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    config = MnistConfig(device="cpu", num_epochs=EPOCHS, max_shift=1, tensorboard=True)
    num_steps = EPOCHS * (1437 // config.global_batch_size)
    bare_loop(config, 3), our_loop(config, num_steps)  # warm up, compile
    taken = [(our_loop(config, num_steps), bare_loop(config, num_steps)) for _ in range(rounds)]
    ours, bare = (statistics.median(column) * 1e3 for column in zip(*taken, strict=True))
    ratios = sorted(a / b for a, b in taken)
    print(f"simple_mnist_tpu.py {ours:.2f} ms a step, bare loop {bare:.2f}: {statistics.median(ratios):.3f} x")
    print(f"{rounds} rounds of {num_steps} steps, {ratios[0]:.3f} to {ratios[-1]:.3f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
