"""The scripts on the torch.compile backend, where torch_xla is not installed: docs/torchtpu.md, "With a chip".

Each returns figures, or raises TrainingError: not kept.
"""

from functools import partial
from typing import Any

from tools.on_chip.bench import Bench, Cannot, compare, hold, last_object, losses_in, results_in
from tools.on_chip.promises import BAND, TINY, resume

ROUNDED = 1e-2
"""Losses of 20 steps whose products are rounded to bfloat16, beside those of the CPU."""
IMAGES = "--num_epochs=1 --log_every=1 --warmup_steps=2"
DIGITS = f"{IMAGES} --dataset=synthetic --global_batch_size=200"
LANGUAGE = f"{TINY} --num_steps=20 --log_every=1"

FIND = """
import json, torch
found = torch.accelerator.current_accelerator()
print(json.dumps({"device": found.type if found else "cpu", "torch": torch.__version__}))
"""
# `torchrun OPTIONS`; on a TPU VM torch_tpu first says which process gets which chip
LAUNCH = """
import sys, torch
from torch.distributed.run import main
if torch.accelerator.current_accelerator() and torch.accelerator.current_accelerator().type == "tpu":
    torch.tpu.distributed.set_tpu_launch_env()
main(sys.argv[1:])
"""


def find(bench: Bench) -> dict[str, Any]:
    """import torch has registered the chip. Else none was found, or TORCH_DEVICE_BACKEND_AUTOLOAD is 0."""
    found = last_object(bench.child("road device", ["-c", FIND]))
    hold(bench.machine.device in (found["device"], "cpu"), f"torch's accelerator is {found['device']}, expected tpu")
    return found


def losses_of(bench: Bench, name: str, script: str, options: str, device: str = "") -> list[float]:
    """Losses of a run with one graph for training and one for evaluation. device: if not the one that is measured."""
    summary, lines = bench.train(f"road {name}", script, options, device)
    graphs = summary["train_graphs"], summary["eval_graphs"]
    hold(
        graphs == (1, 1), f"{script} had {graphs[0]} graphs for training and {graphs[1]} for evaluation, expected 1, 1"
    )
    return losses_in(lines)


def beside_the_cpu(bench: Bench, name: str, script: str, options: str, allowed: float = ROUNDED) -> dict[str, Any]:
    own, cpu = (losses_of(bench, f"{name} {device}", script, options, device) for device in ("", "cpu"))
    return compare(own, cpu, allowed)


def processes(bench: Bench) -> dict[str, Any]:
    """A process for each device, parameters as shards, has the losses of one device."""
    count = bench.machine.num_devices
    if count == 1:
        raise Cannot("one device: nothing to compare; on the CPU CPU_NUM_DEVICES=4 makes four processes")
    options = f"{LANGUAGE} --matmul_precision=highest"
    one, run_dir = losses_of(bench, "alone", "transformer_tpu.py", options), bench.run_dir("road processes")
    command = bench.training("transformer_tpu.py", f"{options} --mesh=1x{count}x1", run_dir)
    bench.child("road processes", ["-c", LAUNCH, "--standalone", f"--nproc_per_node={count}", *command])
    return compare(one, losses_in(results_in(run_dir)[1]), BAND) | {"devices": count}


MNIST = partial(beside_the_cpu, script="simple_mnist_tpu.py")
CIFAR = partial(beside_the_cpu, script="resnet_cifar_tpu.py")
TORCH_COMPILE = dict(
    device=find,
    digits=partial(MNIST, name="digits", options=DIGITS),
    digits_exact=partial(MNIST, name="digits exact", options=f"{DIGITS} --matmul_precision=highest", allowed=BAND),
    images=partial(CIFAR, name="images", options=f"{IMAGES} --depth=8 --width=8 --global_batch_size=500"),
    language=partial(beside_the_cpu, name="language", script="transformer_tpu.py", options=LANGUAGE),
    processes=processes,
    resume=resume,
)
"""In the order they are tried."""
