"""This project's programs for benchmarks/gpu.py: transformer_tpu.py as users run it; ResNet-50 in a step of ours."""

import dataclasses
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from language.data.llmc_files import GPT2_TOKENS, LLAMA3_TOKENS, MOST_SHORT_TOKENS, TOKEN_FORMATS, header_of

if TYPE_CHECKING:
    from gpu import Case, Task

ROOT = Path(__file__).resolve().parent.parent
GROUPS = 3
MOST_LINES = 60
"""Log lines of the run, each of Task.steps steps. It is ended before."""
BATCHES = 4
GIB = 2**30


def write_tokens(path: Path, case: "Case", seed: int) -> None:
    """A shard of random tokens in llm.c's format, as long as BATCHES batches."""
    magic = GPT2_TOKENS if case.shape.vocab_size <= MOST_SHORT_TOKENS else LLAMA3_TOKENS
    version, kind, *_ = TOKEN_FORMATS[magic]
    tokens = np.random.default_rng(seed).integers(case.shape.vocab_size, size=BATCHES * case.count + 1, dtype=kind)
    with path.open("wb") as file:
        file.write(header_of(magic, version, len(tokens)))
        file.write(tokens.tobytes())


def command_of(task: "Task", folder: Path) -> list[str]:
    """transformer_tpu.py and its options. The model is GPT-2's or Llama's, in the shape of the case."""
    case = task.case
    shape = case.shape
    is_llama = hasattr(shape, "num_kv_heads")
    size = ("llama_tiny" if task.tiny else "llama3_1B") if is_llama else "124M"
    options: dict[str, Any] = dict(device=task.device, run_dir=folder / "run", data_dir=folder, precision="bfloat16")
    options |= dict(dataset="tokens", train_data="train.bin", validation_data="validation.bin")
    options |= dict(model_size=size, num_layers=shape.num_layers, num_heads=shape.num_heads)
    options |= dict(embedding_dim=shape.embedding_dim, sequence_length=shape.sequence_length)
    options |= dict(vocab_size=shape.vocab_size, global_batch_size=case.batch, log_every=task.steps)
    options |= dict(num_steps=MOST_LINES * task.steps, warmup_steps=task.steps, learning_rate=6e-4)
    options |= dict(eval_every=10**6, eval_batches=1, save_every=10**6)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [str(ROOT / "transformer_tpu.py"), *words, "--no_tensorboard", *task.options.split()]


def train_lines(path: Path) -> list[dict]:
    """The whole train lines of a metrics.jsonl that is being written."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def memory_of_torch(forget: bool = False) -> dict[str, float | None]:
    """peak_gib: torch's count, in which the run leaves out what it wants to. forget: give back what is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {"peak_gib": None, "reserved_gib": None}
    if forget:
        torch.cuda.empty_cache()
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "reserved_gib": torch.cuda.memory_reserved() / GIB}


def watch(task: "Task", path: Path) -> None:
    """Reads the run's log beside it. Ends this process once the lines are there: neither the last evaluation nor the
    last checkpoint is measured. The first step is that of `began_with`, the comparison with eager PyTorch in it."""
    while not (before := train_lines(path)):
        time.sleep(0.05)
    memory_of_torch(forget=True)
    os.kill(os.getpid(), signal.SIGSTOP)  # waits for its turn, as gpu_programs.py does
    left_out = len(before) + 2  # one may have been written meanwhile, and one has the wait in it
    while len(lines := train_lines(path)) < left_out + GROUPS:
        time.sleep(0.05)
    lines = lines[: left_out + GROUPS]
    groups = [1e3 * line["step_seconds"] for line in lines[left_out:]]
    wait = 1e3 * lines[-1]["data_wait_seconds"]
    found = {"first_step_seconds": lines[0]["began_with"]["compile"], "groups_ms": groups, "loss": lines[-1]["loss"]}
    options = f" {task.options}" if task.options else ""
    found["said"] = f"transformer_tpu.py{options}; of a step {wait:.1f} ms wait for data"
    print(json.dumps(found | memory_of_torch()), flush=True)
    os._exit(0)


def run_script(task: "Task") -> dict:
    """transformer_tpu.py in this process, as by its command line. The watch ends it; this returns for an error."""
    folder = Path(task.folder, task.row)
    folder.mkdir()
    write_tokens(folder / "train.bin", task.case, 1)
    write_tokens(folder / "validation.bin", task.case, 2)
    sys.argv = command_of(task, folder)
    sys.path[0] = str(ROOT)  # as for a script that is called by its file
    watcher = threading.Thread(target=watch, args=(task, folder / "run" / "metrics.jsonl"), daemon=True)
    watcher.start()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    watcher.join()
    raise AssertionError("the watch ends the process")


def run_resnet(task: "Task") -> dict:
    """torchvision's ResNet-50 in a step like that of resnet_cifar_tpu.py."""
    import gpu_programs
    import torch

    from images.cifar_config import CifarConfig
    from tpu_utils.device import start_device, wait_device_ops
    from tpu_utils.options.parsing import parse_command_line
    from tpu_utils.record.metrics import DeviceMetrics
    from tpu_utils.step.graphs import one_graph
    from tpu_utils.step.optim import gradient_norm, learning_rates, make_optimizer, step_optimizer

    options = f"--device {task.device} --optimizer sgd --learning_rate 0.1 --momentum 0.9 --precision bfloat16"
    config = parse_command_line(CifarConfig, "", [*options.split(), *task.options.split()])

    @one_graph
    def train_step(model, optimizer, rates, metrics, images, labels, config):
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = model(images, labels)
        loss.backward()
        norm = gradient_norm(model.parameters())
        rate = rates.index_select(0, metrics.step)
        step_optimizer(optimizer, rate, torch.isfinite(loss + norm), config.on_nonfinite)
        optimizer.zero_grad(set_to_none=True)
        metrics.record(loss, norm)

    device, _ = start_device(config)
    model, images, labels = gpu_programs.resnet_and_pictures(task.case, device)
    optimizer = make_optimizer(config, model.parameters())
    rates = learning_rates(config, 1000).to(device)
    metrics = DeviceMetrics(["loss", "gradient_norm"], task.steps, device)
    wait_device_ops()

    def step():
        train_step.compiled(model, optimizer, rates, metrics, images, labels, config)

    def loss(_: None) -> float:
        steps = int(metrics.step.item())
        return float(metrics.read(steps - 1, steps)["loss"][0])

    said = " ".join(["@one_graph, autocast, channels_last", *task.options.split()])
    program = gpu_programs.torch_program(step, device, said)
    return gpu_programs.measured(dataclasses.replace(program, wait=wait_device_ops, loss=loss), task)
