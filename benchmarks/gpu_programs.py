"""The programs that benchmarks/gpu.py measures: transformer_tpu.py as users run it, ResNet-50 in our step, others.

Each gets batches of the same shapes from host memory. torch is imported where a program needs it: the script of ours
imports it itself.
"""

import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.children import ROOT, logged
from language.data.llmc_files import write_token_shard
from language.options.hf_config import hugging_face_config
from language.options.llama_shape import LlamaShape

if TYPE_CHECKING:
    from benchmarks.gpu import Task

GROUPS = 3
WARM_UP = 10
FEW = 2
"""Steps of the warm-up of a rehearsal."""
BATCHES = 4
MOST_LINES = 60
"""Log lines of our run, each of Task.steps steps. It is ended before."""
GIB = 2**30
RESNET_RATE = 0.1


def measure(task: "Task") -> dict:
    """Milliseconds a step of each group, seconds of the first step, loss, memory, what is to be said of it."""
    if task.shape and task.way.startswith("ours"):
        return run_script(task)
    programs = {"nanogpt": nanogpt, "hugging_face": hugging_face, "jax": plain_jax}
    programs |= {"ours": our_resnet, "usual": usual_resnet}
    step, wait, said, memory = programs[task.way](task)
    start = time.perf_counter()
    loss = step()
    wait()
    found = {"first_step_seconds": time.perf_counter() - start, "groups_ms": []}
    memory(True)
    for _ in range(FEW if task.tiny else WARM_UP):
        step()
    wait()
    for _ in range(GROUPS):
        start = time.perf_counter()
        for _ in range(task.steps):
            loss = step()
        wait()
        found["groups_ms"].append(1e3 * (time.perf_counter() - start) / task.steps)
    return found | {"loss": float(loss), "said": said()} | memory(False)


def random_tokens(task: "Task", length: int) -> list[np.ndarray]:
    """Batches (B, length) int32."""
    random = np.random.default_rng(0)
    return [random.integers(task.shape.vocab_size, size=(task.batch, length), dtype=np.int32) for _ in range(BATCHES)]


def memory_of_torch(forget: bool) -> dict[str, float | None]:
    """peak_gib, reserved_gib: torch's count, with the pools of CUDA graphs. forget: what compiling took."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {"peak_gib": None, "reserved_gib": None}
    if forget:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "reserved_gib": torch.cuda.memory_reserved() / GIB}


# ------------------------------------------------------------------------------------------------------------- ours


def command_of(task: "Task", folder: Path) -> list[str]:
    """transformer_tpu.py and its options, in the shape of the task."""
    shape = task.shape
    options: dict[str, Any] = dict(device=task.device, run_dir=folder / "run", data_dir=folder, precision="bfloat16")
    size = "124M"
    if isinstance(shape, LlamaShape):
        size = "llama_tiny" if task.tiny else "llama3_1B"
    options |= dict(dataset="tokens", train_data="train.bin", validation_data="validation.bin", model_size=size)
    options |= dict(num_layers=shape.num_layers, num_heads=shape.num_heads, embedding_dim=shape.embedding_dim)
    options |= dict(sequence_length=shape.sequence_length, vocab_size=shape.vocab_size, global_batch_size=task.batch)
    options |= dict(num_steps=MOST_LINES * task.steps, warmup_steps=task.steps, learning_rate=6e-4)
    options |= dict(log_every=task.steps, eval_every=10**6, eval_batches=1, save_every=10**6)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [str(ROOT / "transformer_tpu.py"), *words, "--no_tensorboard", *task.options.split()]


def train_lines(run_dir: Path) -> list[dict]:
    return [line for line in logged(run_dir) if line["kind"] == "train"]


def watch(task: "Task", run_dir: Path) -> None:
    """Reads the run's log beside it. Ends this process once the lines are there: neither the last evaluation nor the
    last checkpoint is measured. The first step is that of `began_with`, the comparison with eager PyTorch in it."""
    while not (before := train_lines(run_dir)):
        time.sleep(0.05)
    memory_of_torch(forget=True)
    left_out = len(before) + 1  # one may have been written meanwhile
    while len(lines := train_lines(run_dir)) < left_out + GROUPS:
        time.sleep(0.05)
    lines = lines[: left_out + GROUPS]
    found = {"first_step_seconds": lines[0]["began_with"]["compile"], "loss": lines[-1]["loss"]}
    found["groups_ms"] = [1e3 * line["step_seconds"] for line in lines[left_out:]]
    said = " ".join(["transformer_tpu.py", *task.options.split()])
    found["said"] = f"{said}; of a step {1e3 * lines[-1]['data_wait_seconds']:.1f} ms wait for data"
    print(json.dumps(found | memory_of_torch(forget=False)), flush=True)
    os._exit(0)


def run_script(task: "Task") -> dict:
    """transformer_tpu.py in this process, as by its command line. The watch ends it; this returns for an error."""
    folder = Path(task.folder, task.row)
    folder.mkdir()
    for seed, name in enumerate(("train.bin", "validation.bin")):
        tokens = np.random.default_rng(seed).integers(task.shape.vocab_size, size=BATCHES * task.examples + 1)
        write_token_shard(folder / name, tokens, task.shape.vocab_size)
    sys.argv = command_of(task, folder)
    sys.path[0] = str(ROOT)  # as for a script that is called by its file
    watcher = threading.Thread(target=watch, args=(task, folder / "run"), daemon=True)
    watcher.start()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    watcher.join()
    raise AssertionError("the watch ends the process")


# ---------------------------------------------------------------------------------------------------------- PyTorch


def usual_program(task: "Task", build: Callable, loss_of: Callable, length: int, said: str) -> tuple:
    """(step, wait, said, memory) as nanoGPT has them: autocast, backward pass, clipping, the optimizer, no gradients
    left; batches in pinned memory. build() makes the model; loss_of(compiled model, tokens (B, length)) the loss.
    length 0: a ResNet, whose pictures lie on the device, and SGD without clipping."""
    import torch

    from benchmarks import other_programs as peers

    if task.device == "gpu" and not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU")
    on_gpu = task.device == "gpu"
    device = torch.device("cuda" if on_gpu else "cpu")
    backend = "inductor" if on_gpu else "aot_eager"  # on the CPU inductor would compile C++ for minutes
    torch.set_float32_matmul_precision("high")  # as nanoGPT's allow_tf32
    with device:
        model = build()
    compiled = torch.compile(model, backend=backend)
    if length:
        optimizer = peers.usual_adamw(model, fused=True)
        batches = [torch.from_numpy(batch).long() for batch in random_tokens(task, length)]
        batches = [batch.pin_memory() for batch in batches] if on_gpu else batches
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=RESNET_RATE, momentum=0.9, fused=True)
        model = model.to(memory_format=torch.channels_last)
        batches = [pictures(task, device)] * BATCHES
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        batch = batches[count % BATCHES]
        count += 1
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(compiled, batch.to(device, non_blocking=True) if length else batch)
        loss.backward()
        if length:
            torch.nn.utils.clip_grad_norm_(model.parameters(), peers.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    wait = torch.cuda.synchronize if on_gpu else lambda: None
    return step, wait, lambda: f"torch.compile(model), {backend}, autocast, fused optimizer; {said}", memory_of_torch


def nanogpt(task: "Task") -> tuple:
    import torch
    import torch.nn.functional as F

    from benchmarks import other_programs as peers

    class NanoGPT(peers.StraightGPT):
        """Its forward pass gives the loss, which is compiled with the model."""

        def forward(self, tokens_BT, targets_BT):
            return F.cross_entropy(super().forward(tokens_BT).flatten(0, 1), targets_BT.flatten())

    def initialise(module) -> None:
        """GPT-2's: a first loss is the logarithm of the vocabulary."""
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)

    def loss_of(model, tokens):
        return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    build = lambda: NanoGPT(task.shape).apply(initialise)  # noqa: E731
    return usual_program(task, build, loss_of, task.shape.sequence_length + 1, "vocabulary padded")


def hugging_face(task: "Task") -> tuple:
    """The loss is the model's own, of labels=; the last token of a row has no target."""
    from benchmarks import other_programs as peers

    def loss_of(model, tokens):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def build():
        if not isinstance(task.shape, LlamaShape):
            return peers.HuggingFaceGPT(task.shape, "sdpa").model.train()
        import transformers

        config = transformers.AutoConfig.for_model(**hugging_face_config(task.shape))
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()

    return usual_program(task, build, loss_of, task.shape.sequence_length, "sdpa")


# ----------------------------------------------------------------------------------------------------------- ResNet


def pictures(task: "Task", device) -> tuple:
    """Images (B, 3, H, W) uint8 in the order of channels_last, and labels (B,)."""
    import torch

    images = torch.randint(256, (task.batch, 3, task.side, task.side), dtype=torch.uint8)
    return images.to(memory_format=torch.channels_last).to(device), torch.randint(1000, (task.batch,)).to(device)


def loss_of_pictures(model, batch):
    import torch.nn.functional as F

    images, labels = batch
    return F.cross_entropy(model(images.float() / 64 - 2).float(), labels)


def resnet_of(task: "Task"):
    from torchvision.models import resnet18, resnet50

    return resnet18() if task.tiny else resnet50()


def usual_resnet(task: "Task") -> tuple:
    return usual_program(task, lambda: resnet_of(task), loss_of_pictures, 0, "channels_last")


def our_resnet(task: "Task") -> tuple:
    """torchvision's model in a step like that of resnet_cifar_tpu.py."""
    import torch

    from images.cifar_config import CifarConfig
    from tpu_utils.device import DEVICE_TYPE, start_device, wait_device_ops
    from tpu_utils.options.parsing import parse_command_line
    from tpu_utils.step.graphs import one_graph
    from tpu_utils.step.optim import learning_rates, make_optimizer, step_optimizer

    options = f"--device {task.device} --optimizer sgd --learning_rate {RESNET_RATE} --momentum 0.9 --weight_decay 0"
    config = parse_command_line(CifarConfig, "", [*options.split(), *task.options.split()])

    @one_graph
    def train_step(model, optimizer, rates, count, batch, config):
        with torch.autocast(DEVICE_TYPE, torch.bfloat16):
            loss = loss_of_pictures(model, batch)
        loss.backward()
        step_optimizer(optimizer, rates.index_select(0, count), torch.isfinite(loss), config.on_nonfinite)
        optimizer.zero_grad(set_to_none=True)
        count.add_(1)
        return loss.detach()

    device, _ = start_device(config)
    model = resnet_of(task).to(memory_format=torch.channels_last).to(device)
    optimizer = make_optimizer(config, model.parameters())
    batch = pictures(task, device)
    rates, count = learning_rates(config, 1000).to(device), torch.zeros(1, dtype=torch.int32).to(device)

    def step():
        return train_step.compiled(model, optimizer, rates, count, batch, config)

    said = " ".join(["a step of ours, channels_last", *task.options.split()])
    return step, wait_device_ops, lambda: said, memory_of_torch


# -------------------------------------------------------------------------------------------------------------- JAX


def plain_jax(task: "Task") -> tuple:
    """Attention by cuDNN, by XLA where that does not compile."""
    import jax

    from benchmarks import other_programs as peers

    if jax.default_backend() != task.device:
        sys.exit(f"error: jax runs on {jax.default_backend()}, expected {task.device}")
    batches = random_tokens(task, task.shape.sequence_length + 1)
    initial, loss = peers.jax_gpt_parameters, partial(peers.jax_gpt_loss, num_heads=task.shape.num_heads)
    if isinstance(task.shape, LlamaShape):
        initial, loss = peers.jax_llama_parameters, partial(peers.jax_llama_loss, shape=task.shape)
    said: list[str] = []
    state: list[Any] = []
    compiled, count = None, 0

    def compile_first(implementation: str) -> Callable:
        attention = partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
        loss_of = partial(loss, dtype="bfloat16", attention=attention)
        step = jax.jit(partial(peers.jax_step, loss_of), donate_argnums=(0, 1))
        try:
            found = step.lower(*state, batches[0]).compile()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if implementation == "xla":
                raise
            said.append(f"no cuDNN attention ({str(error).strip().splitlines()[0][:80]})")
            return compile_first("xla")
        said.append(f"dot_product_attention, {implementation}")
        return found

    def step():
        nonlocal compiled, count
        if not count:
            parameters = initial(task.shape)
            state[:] = parameters, peers.jax_state(parameters)
            compiled = compile_first("cudnn")
        *state[:], _, loss = compiled(*state, batches[count % BATCHES])
        count += 1
        return loss

    def memory(forget: bool) -> dict[str, float | None]:
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return {"peak_gib": peak and peak / GIB, "reserved_gib": None}  # reserved: a share of the card, by default

    return step, lambda: jax.block_until_ready(state), lambda: "; ".join(said), memory
