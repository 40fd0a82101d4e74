"""The programs that benchmarks/gpu.py measures this project's scripts against, and how they are measured.

A program is a step, how to wait for the steps before, and what it holds of the device's memory. Each gets batches of
the same shapes from host memory, pictures from the device's.
"""

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import other_programs as peers
import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from gpu import Case, Task

GROUPS = 3
WARM_UP = 10
FEW = 2
"""Steps of the warm-up of a rehearsal."""
BATCHES = 4
SGD = dict(lr=0.1, momentum=0.9)
GIB = 2**30


@dataclasses.dataclass
class Program:
    step: Callable[[], Any]
    """Starts a step; its result is on the device."""
    wait: Callable[[], Any]
    """Returns when all steps so far are done."""
    compiled: Callable[[], Any]
    """Called once, after the first step: forget the memory that compiling took."""
    memory: Callable[[], dict[str, float | None]]
    said: Callable[[], str]
    loss: Callable[[Any], float] = float
    """Of the result of the last step."""


def run(task: "Task") -> dict:
    build = {"nanogpt": nanogpt, "hugging_face": hugging_face, "jax": plain_jax, "plain": plain_resnet}[task.way]
    return measured(build(task), task)


def wait_for_turn() -> None:
    """Stop this process, all of its threads, until benchmarks/gpu.py has it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def measured(program: Program, task: "Task") -> dict:
    """Milliseconds a step of each group, seconds of the first step, memory."""
    start = time.perf_counter()
    result = program.step()
    program.wait()
    first = time.perf_counter() - start
    program.compiled()
    wait_for_turn()
    for _ in range(FEW if task.tiny else WARM_UP):
        result = program.step()
    program.wait()
    groups = []
    for _ in range(GROUPS):
        start = time.perf_counter()
        for _ in range(task.steps):
            result = program.step()
        program.wait()
        groups.append(1e3 * (time.perf_counter() - start) / task.steps)
    found = {"first_step_seconds": first, "groups_ms": groups, "loss": program.loss(result), "said": program.said()}
    return found | program.memory()


# ---------------------------------------------------------------------------------------------------------- PyTorch


def torch_device(task: "Task") -> torch.device:
    if task.device == "gpu" and not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU")
    return torch.device("cuda" if task.device == "gpu" else "cpu")


def torch_program(step: Callable[[], torch.Tensor], device: torch.device, said: str) -> Program:
    """reserved_gib: what torch holds of the device at the end, with the pools of CUDA graphs."""
    on_gpu = device.type == "cuda"

    def forget() -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def memory() -> dict[str, float | None]:
        if not on_gpu:
            return {"peak_gib": None, "reserved_gib": None}
        return {
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.memory_reserved() / GIB,
        }

    wait = torch.cuda.synchronize if on_gpu else lambda: None
    return Program(step, wait, forget if on_gpu else lambda: None, memory, lambda: said)


def compiler_of(device: torch.device) -> str:
    """On the CPU inductor would compile C++ for minutes."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def random_tokens(case: "Case", length: int) -> list[np.ndarray]:
    """Batches (B, length) int32."""
    random = np.random.default_rng(0)
    return [random.integers(case.shape.vocab_size, size=(case.batch, length), dtype=np.int32) for _ in range(BATCHES)]


def initialise(module: nn.Module) -> None:
    """GPT-2's: a first loss is the logarithm of the vocabulary."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def usual_steps(
    model: nn.Module, loss_of: Callable, device: torch.device, batches: list, optimizer, clip: float | None
) -> Callable[[], torch.Tensor]:
    """A step as nanoGPT has it: autocast, backward pass, clipping, the optimizer, no gradients left."""
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        batch = [part.to(device, non_blocking=True) for part in batches[count % len(batches)]]
        count += 1
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(*batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def language_program(task: "Task", model: nn.Module, loss_of: Callable, batches: list, said: str) -> Program:
    """The recipe of all language models here. The batches lie in pinned memory."""
    device = torch_device(task)
    torch.set_float32_matmul_precision("high")  # as nanoGPT's allow_tf32
    optimizer = peers.usual_adamw(model, fused=True)
    if device.type == "cuda":
        batches = [[part.pin_memory() for part in batch] for batch in batches]
    step = usual_steps(model, loss_of, device, batches, optimizer, peers.GPT_RECIPE.clip)
    return torch_program(step, device, f"torch.compile(model), {compiler_of(device)}, autocast, fused AdamW; {said}")


class NanoGPT(peers.StraightGPT):
    """Its forward pass gives the loss, which is compiled with the model."""

    def forward(self, tokens_BT, targets_BT):
        logits = super().forward(tokens_BT)
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def nanogpt(task: "Task") -> Program:
    device = torch_device(task)
    with device:
        model = NanoGPT(task.case.shape).apply(initialise)
    compiled = torch.compile(model, backend=compiler_of(device))
    tokens = [torch.from_numpy(batch).long() for batch in random_tokens(task.case, task.case.shape.sequence_length + 1)]
    batches = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]
    return language_program(task, model, compiled, batches, "vocabulary padded")


def hugging_face(task: "Task") -> Program:
    """The loss is the model's own, of labels=; the last token of a row has no target."""
    device = torch_device(task)
    shape = task.case.shape
    kind = peers.HuggingFaceLlama if hasattr(shape, "num_kv_heads") else peers.HuggingFaceGPT
    with device:
        model = kind(shape, "sdpa").model.train()
    compiled = torch.compile(model, backend=compiler_of(device))
    batches = [(torch.from_numpy(batch).long(),) for batch in random_tokens(task.case, shape.sequence_length)]

    def loss_of(tokens_BT):
        return compiled(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss

    return language_program(task, model, loss_of, batches, "sdpa")


class Classifier(nn.Module):
    """torchvision's ResNet-50 and its loss: images (B, 3, H, W) uint8, labels (B,) -> ()."""

    def __init__(self):
        import torchvision

        super().__init__()
        self.model = torchvision.models.resnet50()

    def forward(self, images, labels):
        logits = self.model(images.float() / 64 - 2)
        return F.cross_entropy(logits.float(), labels)


def resnet_and_pictures(case: "Case", device: torch.device) -> tuple[Classifier, torch.Tensor, torch.Tensor]:
    """The model, one batch of images and its labels, all on the device; what has 4 dimensions is channels_last."""
    torch.manual_seed(0)
    images = torch.randint(256, (case.batch, 3, case.image_size, case.image_size), dtype=torch.uint8)
    labels = torch.randint(1000, (case.batch,))
    model = Classifier().to(memory_format=torch.channels_last)
    return model.to(device), images.to(memory_format=torch.channels_last).to(device), labels.to(device)


def plain_resnet(task: "Task") -> Program:
    device = torch_device(task)
    torch.set_float32_matmul_precision("high")
    model, images, labels = resnet_and_pictures(task.case, device)
    compiled = torch.compile(model, backend=compiler_of(device))
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    step = usual_steps(model, compiled, device, [(images, labels)], optimizer, None)
    return torch_program(step, device, f"torch.compile(model), {compiler_of(device)}, autocast, channels_last")


# -------------------------------------------------------------------------------------------------------------- JAX


def jax_update(shape, parameters, implementation: str) -> tuple[Callable, Any]:
    """(the jitted step, the optimizer's state). implementation: of jax.nn.dot_product_attention."""
    import jax

    optax = import_module("optax")  # no other file here needs it
    recipe = peers.GPT_RECIPE
    decays = jax.tree.map(lambda parameter: parameter.ndim >= 2, parameters)
    adamw = optax.adamw(recipe.learning_rate, *recipe.betas, weight_decay=recipe.weight_decay, mask=decays)
    optimizer = optax.chain(optax.clip_by_global_norm(recipe.clip), adamw)
    attention = partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    loss_of = partial(peers.jax_gpt_loss, num_heads=shape.num_heads, dtype="bfloat16", attention=attention)

    def update(parameters, state, tokens_BS):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, tokens_BS)
        changes, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, changes), state, loss

    return jax.jit(update, donate_argnums=(0, 1)), optimizer.init(parameters)


def plain_jax(task: "Task") -> Program:
    """Attention by cuDNN, by XLA where that does not compile."""
    import jax

    if jax.default_backend() != task.device:
        sys.exit(f"error: jax runs on {jax.default_backend()}, expected {task.device}")
    shape = task.case.shape
    batches = random_tokens(task.case, shape.sequence_length + 1)
    state: list[Any] = []
    said: list[str] = []
    count = 0

    def compile_first() -> Callable:
        parameters = peers.jax_gpt_parameters(shape)
        for implementation in ("cudnn", "xla"):
            update, optimizer_state = jax_update(shape, parameters, implementation)
            try:
                compiled = update.lower(parameters, optimizer_state, batches[0]).compile()
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if implementation == "xla":
                    raise
                said.append(f"no cuDNN attention ({str(error).strip().splitlines()[0][:80]})")
                continue
            state.extend([parameters, optimizer_state, compiled])
            said.append(f"dot_product_attention, {implementation}")
            break
        return state.pop()

    def step():
        nonlocal count
        if not count:
            step.compiled = compile_first()
        *state[:], loss = step.compiled(*state, batches[count % BATCHES])
        count += 1
        return loss

    def memory() -> dict[str, float | None]:
        found = jax.devices()[0].memory_stats() or {}
        peak = found.get("peak_bytes_in_use")
        return {"peak_gib": peak and peak / GIB, "reserved_gib": None}  # reserved: a share of the card, by default

    return Program(step, lambda: jax.block_until_ready(state), lambda: None, memory, lambda: "; ".join(said))
