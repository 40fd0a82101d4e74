"""What a step costs the host: metrics, logging and checks beside a bare loop, and the tracing of 12 layers.

Run:     python benchmarks/host_cost.py            # both
         python benchmarks/host_cost.py tracing    # docs/results/host_tracing.csv
Prints:  loop: milliseconds per step of simple_mnist_tpu.py and of a loop with the same arithmetic and nothing else, the
         median of rounds taken in turn in one process. The first step (compile), evaluation and checkpoints are left
         out.
         tracing: milliseconds from the call of a step to its return, which is when the device can begin.
"""

import argparse
import contextlib
import csv
import dataclasses
import io
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ["PJRT_DEVICE"] = "CPU"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import other_programs as peers
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

import simple_mnist_tpu
import transformer_tpu
from config import MnistConfig
from images.arrays import TrainBatches
from images.mnist import load_digits
from language.models.gpt import GPT
from language.options.shapes import ModelShape
from language.options.transformer_options import TransformerConfig
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.step.optim import learning_rates, make_optimizer

EPOCHS = 6
DEEP_GPT = ModelShape(12, 4, 64, 32, 128)  # small in everything that costs the device, 12 layers for the host


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


def compare_loops(rounds: int) -> None:
    config = MnistConfig(device="cpu", num_epochs=EPOCHS, max_shift=1, tensorboard=True)
    num_steps = EPOCHS * (1437 // config.global_batch_size)
    bare_loop(config, 3), our_loop(config, num_steps)  # warm up, compile
    taken = [(our_loop(config, num_steps), bare_loop(config, num_steps)) for _ in range(rounds)]
    ours, bare = (statistics.median(column) * 1e3 for column in zip(*taken, strict=True))
    ratios = sorted(a / b for a, b in taken)
    print(f"simple_mnist_tpu.py {ours:.2f} ms a step, bare loop {bare:.2f}: {statistics.median(ratios):.3f} x")
    print(f"{rounds} rounds of {num_steps} steps, {ratios[0]:.3f} to {ratios[-1]:.3f} x")


def our_step():
    device, config = torch_xla.device(), TransformerConfig()
    model = GPT(DEEP_GPT, torch.bfloat16)
    model.initialise(0)
    model = model.to(device)
    optimizer = transformer_tpu.build_optimizer(config, model)
    rates = learning_rates(dataclasses.replace(config, warmup_steps=0), 10_000).to(device)
    metrics = DeviceMetrics(["loss", "gradient_norm"], 50, device)
    return lambda tokens: transformer_tpu.train_step.compiled(model, optimizer, rates, metrics, tokens, config)


def usual_step():
    model = peers.StraightGPT(DEEP_GPT).to(torch_xla.device())
    model.tie()
    optimizer = peers.usual_adamw(model, capturable=True)
    return torch_xla.compile(partial(peers.usual_step, model, optimizer, autocast="xla"), full_graph=True)


def trace(rounds: int) -> None:
    """Prints docs/results/host_tracing.csv."""
    tokens, device = torch.zeros(2, DEEP_GPT.sequence_length + 1, dtype=torch.int32), torch_xla.device()
    steps = {"transformer_tpu.py": our_step(), "nanoGPT-style, autocast, capturable AdamW": usual_step()}
    seconds, traced = {name: [] for name in steps}, {}
    for number in range(5 + 4 * rounds):  # the first five compile
        for name, step in steps.items():
            xm.wait_device_ops()
            before, start = operations_traced(), time.perf_counter()
            step(tokens.to(device))
            seconds[name] += [1e3 * (time.perf_counter() - start)] * (number > 4)
            traced[name] = operations_traced() - before
    ours, table = statistics.median(seconds["transformer_tpu.py"]), csv.writer(sys.stdout, lineterminator="\n")
    table.writerow("program,operations traced,ms before the device has the step,smallest,largest,of ours".split(","))
    for name, ms in seconds.items():
        middle = statistics.median(ms)
        figures = [f"{value:.0f}" for value in (middle, min(ms), max(ms))]
        table.writerow([name, traced[name], *figures, f"{middle / ours:.2f}"])


def operations_traced() -> int:
    """Calls of torch_xla's operations in this process so far."""
    return sum(met.counter_value(name) for name in met.counter_names() if name.startswith("xla::"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="loop, tracing; both unless named")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    parts = {"loop": compare_loops, "tracing": trace}
    if wrong := [part for part in options.parts if part not in parts]:
        parser.error(f"{wrong[0]!r} is no part; expected {', '.join(parts)}")
    for part in options.parts or parts:
        parts[part](options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
