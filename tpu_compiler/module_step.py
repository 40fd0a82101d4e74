"""Makes a step of one module without weights and asks the TPU compiler: the child process of modules.compile_module.

A process can look like one slice only, so each slice and level is a process of its own.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import inspect
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # of a script it is the script's folder
os.environ.setdefault("PJRT_DEVICE", "CPU")  # before the import, which would choose it with a warning

import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode
from torch_xla.utils.checkpoint import checkpoint

from config import TrainConfig
from optim import make_optimizer, step_optimizer
from tpu_compiler.ask import ask_compiler, hand_over
from tpu_compiler.cache import cache_of_environment
from tpu_compiler.environment import prepare_environment
from tpu_compiler.hardware import Topology
from tpu_compiler.module_build import build, place_of, step_aside, to_device
from tpu_compiler.modules import Question, parse_question
from tpu_compiler.report import Report
from tpu_compiler.tracing import settle, trace_step
from tpu_utils.errors import InputError, first_line, run_script
from tpu_utils.fields import nearest

BATCH_AXES = ("data", "dp", "batch", "fsdp")
"""Axes of a mesh over which the inputs' first dimension is sharded when --shard does not say."""


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--target", required=True)
    parser.add_argument("--at", required=True, help="the level")
    parser.add_argument("--compile_for", required=True)
    given, options = parser.parse_known_args()
    question = parse_question(given.target, options, given.compile_for)
    step_aside()
    return answer(question, given.at, prepare_environment(given.compile_for))


def answer(question: Question, level: str, topology: Topology) -> int:
    notes: list[str] = []
    model = build(question, notes)
    args, kwargs = meta_inputs(question, model)
    if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in model.parameters()):
        probe(question, lambda: model(*args, **kwargs))  # a lazy module learns its shapes from its first inputs
    model.train(question.mode == "train")
    cache_length = 0
    if question.mode == "decode":
        args, kwargs, cache_length = decode_inputs(question, model, kwargs or dict(enumerate(args)))
    elif getattr(getattr(model, "config", None), "use_cache", None):
        model.config.use_cache = False
        notes.append("use_cache of its configuration is turned off: no key-value cache is made")
    if level != "conservative" and question.mode != "train":
        model = model.to(torch.bfloat16)
        args, kwargs = ([to_bfloat16(a) for a in args], {name: to_bfloat16(a) for name, a in kwargs.items()})
        notes.append("weights and inputs in bfloat16, no float32 masters to keep")
    if level == "conservative":
        notes.append("float32 tensors, which a TPU multiplies in one pass of bfloat16 by default")
    sizes = sizes_of(question, args, kwargs)

    mesh = make_mesh(question, topology)
    device = torch_xla.device()
    model = to_device(model, device)
    args, kwargs = to_device_inputs(args, device), to_device_inputs(kwargs, device)
    if mesh:
        shard(question, mesh, model, args, kwargs, notes)
    if question.mode == "decode":
        return answer_decode(question, level, topology, model, kwargs, cache_length, notes)
    forward = forward_of(question, level, model, args, kwargs, notes)
    output, counted = probe(question, lambda: forward(model, args, kwargs))
    flops = model_flops(counted, question, notes)
    if question.mode == "forward":
        del output
        step, arguments, owners = forward_step, (forward, model, args, kwargs), (torch.nn.ModuleList([model]),)
    else:
        loss, targets = choose_loss(question, output, kwargs, device, notes)
        del output
        if mesh and targets is not None:
            mark(question, mesh, targets, batch_axes(mesh), "the targets")
        if level == "aggressive":
            recompute_blocks(model, notes)
        optimizer = optimizer_of(question, model, topology)
        rate = torch.empty(1, device=device)
        step, arguments = train_step, (forward, loss, model, optimizer, rate, targets, args, kwargs)
        owners = (torch.nn.ModuleList([model]), optimizer)
    traced = in_words(question, lambda: trace_step(step, *arguments, owners=owners))
    sizes |= dict(model_flops=flops, settings=settings_of(question), cache=cache_of_environment())
    result, text = ask_compiler(traced, topology, **sizes)
    return hand_over(traced, dataclasses.replace(result, level=level, notes=notes), text)


# -------------------------------------------------------------------------------------------------- inputs and sharding


def meta_inputs(question: Question, model: torch.nn.Module) -> tuple[list, dict]:
    """The inputs as forward takes them, tensors without memory. Raises InputError for a name it does not take."""
    signature = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind == p.VAR_KEYWORD for p in signature)
    args, kwargs = [], {}
    for given in question.inputs:
        value = (
            torch.empty(given.shape, dtype=getattr(torch, given.dtype), device="meta") if given.dtype else given.value
        )
        if not given.name:
            args.append(value)
        elif given.name in names or takes_all:
            kwargs[given.name] = value
        else:
            raise InputError(
                f"inputs: forward of {question.target} takes no {given.name!r}; expected one of {', '.join(names)}"
                f"{nearest(given.name, names)}"
            )
    return args, kwargs


def to_device_inputs(inputs, device):
    def move(value):
        return torch.empty_like(value, device=device) if isinstance(value, torch.Tensor) else value

    return {n: move(v) for n, v in inputs.items()} if isinstance(inputs, dict) else [move(v) for v in inputs]


def to_bfloat16(value):
    return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def sizes_of(question: Question, args: list, kwargs: dict) -> dict:
    """examples of a step and their unit: tokens where the first tensor has whole numbers of (batch, time)."""
    first = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
    if first.dim() == 2 and not first.is_floating_point():
        return dict(examples=first.numel(), unit="tokens")
    return dict(examples=first.shape[0] if first.dim() else 1)


def settings_of(question: Question) -> dict:
    inputs = [f"{i.name}={i.dtype}{list(i.shape)}" if i.dtype else f"{i.name}={i.value!r}" for i in question.inputs]
    fields = dict(target=question.target, inputs=inputs, mode=question.mode, mesh=question.mesh)
    return fields | (dict(optimizer=question.optimizer, loss=question.loss) if question.mode == "train" else {})


def make_mesh(question: Question, topology: Topology) -> xs.Mesh | None:
    count, sizes = topology.num_devices, question.mesh
    asked = math.prod(sizes.values())
    if sizes and asked != count:
        said = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(
            f"mesh: {said} has {asked} devices and {topology.name} has {count}; expected sizes whose product is {count}"
        )
    if count == 1:
        return None
    sizes = sizes or {"data": count}
    xr.use_spmd()
    mesh = xs.Mesh(np.arange(count), tuple(sizes.values()), tuple(sizes))
    xs.set_global_mesh(mesh)
    return mesh


def batch_axes(mesh: xs.Mesh) -> dict[int, tuple[str, ...]]:
    axes = tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES)
    return {0: axes} if axes else {}


def mark(
    question: Question, mesh: xs.Mesh, tensor: torch.Tensor, axes: Mapping[int, tuple[str, ...]], name: str
) -> None:
    """Shard a tensor. Raises InputError where a dimension is not there, or cannot be divided."""
    sizes = dict(zip(mesh.axis_names, mesh.mesh_shape, strict=True))
    for dimension, along in axes.items():
        parts = math.prod(sizes[axis] for axis in along)
        if dimension >= tensor.dim():
            raise InputError(f"shard: {name} has the shape {list(tensor.shape)}, and so no dimension {dimension}")
        if tensor.shape[dimension] % parts:
            raise InputError(
                f"shard: dimension {dimension} of {name}, {list(tensor.shape)}, cannot be divided by {parts} "
                f"({' x '.join(along)}); expected a multiple of {parts}; shard another dimension "
                f"(AXIS@NUMBER) or none (-)"
            )
    xs.mark_sharding(tensor, mesh, tuple(axes.get(dimension) for dimension in range(tensor.dim())))


def shard(
    question: Question, mesh: xs.Mesh, model: torch.nn.Module, args: list, kwargs: dict, notes: list[str]
) -> None:
    """Mark parameters and inputs as --shard says. Raises InputError for a pattern that matches nothing."""
    unused, count = {placement.pattern for placement in question.placements}, 0
    batch = batch_axes(mesh)

    def axes_of(name: str, default: dict) -> dict[int, tuple[str, ...]]:
        for placement in question.placements:
            if fnmatch.fnmatchcase(name, placement.pattern):
                unused.discard(placement.pattern)
                return {dimension: (axis,) for dimension, axis in placement.axes.items()}
        return default

    names = [name for name, _ in model.named_parameters()]
    inputs = {str(place): a for place, a in enumerate(args)} | kwargs
    for name, tensor in inputs.items():
        if isinstance(tensor, torch.Tensor) and tensor.dim():
            one_for_all = question.mode == "decode" and name == "position"
            mark(question, mesh, tensor, axes_of(name, {} if one_for_all else batch), f"the input {name}")
    for name, parameter in model.named_parameters():
        axes = axes_of(name, {})
        count += bool(axes)
        mark(question, mesh, parameter, axes, name)
    for buffer in model.buffers():
        mark(question, mesh, buffer, {}, "")
    for pattern in unused:
        raise InputError(
            f"shard: {pattern!r} matches no parameter of {question.target}; it has {', '.join(names[:8])}"
            f"{', ...' if len(names) > 8 else ''}{nearest(pattern, names)}"
        )
    sizes = ", ".join(f"{n}={s}" for n, s in zip(mesh.axis_names, mesh.mesh_shape, strict=True))
    over = " x ".join(batch.get(0, ())) or "no axis"
    notes.append(f"mesh {sizes}: {count} of {len(names)} parameters sharded, the inputs' first dimension over {over}")


# ---------------------------------------------------------------------------------------------------------- the step


def forward_of(
    question: Question, level: str, model: torch.nn.Module, args: list, kwargs: dict, notes: list
) -> Callable:
    """The module's forward at the precision of the level: (model, args, kwargs) -> output."""

    def plain(model, args, kwargs):
        return model(*args, **kwargs)

    def autocast(model, args, kwargs):
        with torch.autocast("xla", dtype=torch.bfloat16):
            return model(*args, **kwargs)

    def cast(model, args, kwargs):
        weights = {name: to_bfloat16(parameter) for name, parameter in model.named_parameters()}
        args, kwargs = [to_bfloat16(a) for a in args], {name: to_bfloat16(a) for name, a in kwargs.items()}
        return torch.func.functional_call(model, weights, tuple(args), kwargs)

    if level == "conservative" or question.mode != "train":
        return plain
    try:
        probe(question, lambda: autocast(model, args, kwargs))
    except InputError as error:
        if "dtype" not in str(error).lower() and "scalar type" not in str(error).lower():
            raise
        notes.append(f"bfloat16: weights cast in each step, because under torch.autocast {first_line(error):.120}")
        return cast
    notes.append('bfloat16: torch.autocast("xla"), float32 weights')
    return autocast


@torch_xla.compile(full_graph=True, name="train_step")
def train_step(forward, loss, model, optimizer, rate, targets, args, kwargs):
    value = loss(forward(model, args, kwargs), targets)
    value.backward()
    step_optimizer(optimizer, rate, None, "stop")
    optimizer.zero_grad(set_to_none=True)
    return value.detach()


@torch_xla.compile(full_graph=True, name="forward_step")
def forward_step(forward, model, args, kwargs):
    with torch.no_grad():
        return forward(model, args, kwargs)


def main_output(output) -> tuple[str, torch.Tensor | None]:
    """(its name, the tensor) that a loss is made of: logits, last_hidden_state, or the first one of floats."""
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return name, value
    leaves = list(output.values()) if isinstance(output, Mapping) else tree_leaves(output)
    floats = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    return "the output", next(floats, None)


def own_loss(output):
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else None
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def choose_loss(
    question: Question, output, kwargs: dict, device, notes: list[str]
) -> tuple[Callable, torch.Tensor | None]:
    """(loss of output and targets, targets made from the output's shape)."""
    name, found = main_output(output)
    own = own_loss(output)
    if question.loss == "own" or (question.loss == "auto" and isinstance(own, torch.Tensor)):
        if not isinstance(own, torch.Tensor):
            raise InputError(
                f"loss is own, and {question.target} returns no .loss; expected one, or a scalar; give its labels "
                "among --inputs, or choose --loss cross_entropy or mse"
            )
        notes.append("loss: the module's own")
        return lambda output, _: own_loss(output).float().view(()), None
    if found is None:
        raise InputError(f"{question.target} returns no tensor of floats, so no loss can be made; expected --loss own")
    shape = list(found.shape)
    kind = question.loss
    if kind == "auto":
        kind = "cross_entropy" if name == "logits" or (name == "the output" and found.dim() in (2, 4)) else "mse"
    if kind == "cross_entropy" and found.dim() < 2:
        raise InputError(f"loss is cross_entropy and {name} has the shape {shape}; expected (batch, classes) or more")
    if kind == "mse":
        notes.append(f"loss: mse of {name} {shape} and targets of its shape")
        return lambda output, targets: F.mse_loss(main_output(output)[1].float(), targets), torch.empty(
            shape, device=device
        )
    classes = found.dim() - 1 if found.dim() == 3 else 1
    target_shape = [size for dimension, size in enumerate(shape) if dimension != classes]
    notes.append(f"loss: cross_entropy of {name} {shape}, dimension {classes} the classes")

    def cross_entropy(output, targets):
        logits = main_output(output)[1].float()
        if logits.dim() == 3:
            logits, targets = logits.flatten(0, 1), targets.flatten()
        return F.cross_entropy(logits, targets)

    return cross_entropy, torch.empty(target_shape, dtype=torch.int64, device=device)


def optimizer_of(question: Question, model: torch.nn.Module, topology: Topology) -> torch.optim.Optimizer:
    """As the training scripts make it, its state there, and sharded as its parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InputError(f"{question.target} has no parameter to train; expected --mode forward")
    optimizer = make_optimizer(TrainConfig(optimizer=question.optimizer, compile_for=topology.name), parameters)
    if topology.num_devices > 1:
        for parameter, state in optimizer.state.items():
            sharding = torch_xla._XLAC._get_xla_op_sharding(parameter)
            for tensor in state.values():
                if sharding is not None and tensor.shape == parameter.shape:
                    torch_xla._XLAC._xla_mark_sharding(tensor, sharding)
    return optimizer


def recompute_blocks(model: torch.nn.Module, notes: list[str]) -> None:
    """Keep the inputs of repeated blocks alone, and compute the rest again in the backward pass."""
    blocks: list[tuple[str, torch.nn.Module]] = []
    for name, module in model.named_modules():
        children = (
            list(module.named_children()) if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) else []
        )
        kinds = [type(child) for _, child in children]
        for child_name, child in children:
            place = f"{name}.{child_name}" if name else child_name
            inside = any(place.startswith(f"{outer}.") for outer, _ in blocks)
            if kinds.count(type(child)) > 1 and next(child.children(), None) is not None and not inside:
                blocks.append((place, child))
    counting = [
        name for name, b in blocks if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in b.modules())
    ]
    if not blocks or counting:
        why = (
            f"{counting[0]} has BatchNorm, whose averages would move twice" if counting else "it has no repeated blocks"
        )
        notes.append(f"nothing is recomputed, so this is balanced: {why}")
        return
    for _, block in blocks:
        block.forward = recomputed(block.forward)
    notes.append(f"{len(blocks)} blocks ({blocks[0][0]} to {blocks[-1][0]}) are recomputed in the backward pass")


def recomputed(forward: Callable) -> Callable:
    def run(*args, **kwargs):
        leaves, layout = tree_flatten((args, kwargs))
        structure = []  # of the result: autograd sees tensors one by one

        def flat(*leaves):
            args, kwargs = tree_unflatten(list(leaves), layout)
            results, made = tree_flatten(forward(*args, **kwargs))
            structure[:] = [made, [None if isinstance(r, torch.Tensor) else (r,) for r in results]]
            return tuple(r for r in results if isinstance(r, torch.Tensor))

        # a call on each, without effect: by it trace_step learns which block its backward pass belongs to
        tensors = iter([t.requires_grad_() if t.requires_grad else t for t in checkpoint(flat, *leaves)])
        made, constants = structure
        return tree_unflatten([next(tensors) if c is None else c[0] for c in constants], made)

    return run


# ------------------------------------------------------------------------------------------------ what cannot be traced


def probe(question: Question, run: Callable) -> tuple[object, int]:
    """(what run() returns, with shapes and no values; FLOPs of its products and convolutions, of all devices).

    Raises InputError for what XLA cannot trace.
    """

    def counted() -> tuple[object, int]:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            result = run()
        return result, counter.get_total_flops()

    return in_words(question, counted)


def model_flops(forward: int, question: Question, notes: list[str]) -> float | None:
    """FLOPs of a step from those of the forward pass: three times as many for training."""
    times = 3 if question.mode == "train" else 1
    said = ", times 3 for a training step" if times == 3 else ""
    notes.append(f"model FLOPs: {forward:.3g}, the products and convolutions of the forward pass{said}")
    return float(forward * times) or None


def in_words(question: Question, run: Callable):
    """run(), whose failure is the module's, and said so. Nothing is executed within."""
    met.clear_counters()
    allowed = torch_xla._XLAC._get_allow_execution()
    torch_xla._XLAC._set_allow_execution(False)
    try:
        with quiet_errors():
            result = run()
    except InputError:
        raise
    except Exception as error:
        if fallen := fallen_back():
            raise InputError(f"{question.target} cannot run as one XLA program: {fallen} {place_of(error)}") from error
        raise InputError(
            f"{question.target} fails with these inputs: {type(error).__name__}: {first_line(error)} {place_of(error)}"
        ) from error
    finally:
        torch_xla._XLAC._set_allow_execution(allowed)
    if (fallen := fallen_back()) and "reads" not in fallen:
        raise InputError(f"{question.target} cannot run as one XLA program: {fallen}")
    return result


def fallen_back() -> str:
    """What torch_xla left to the host since its counters were cleared, in words; "" for nothing."""
    names = [name.removeprefix("aten::") for name in met.counter_names() if name.startswith("aten::")]
    lacking = [name for name in names if name not in ("_local_scalar_dense", "item", "is_nonzero")]
    if lacking:
        return f"XLA has no operation for {', '.join(f'aten::{name}' for name in lacking)}, which runs on the host"
    return "it reads the value of a tensor on the host (an if, .item(), .tolist() or print)" if names else ""


@contextlib.contextmanager
def quiet_errors() -> Iterator[None]:
    """PyTorch/XLA writes pages about an execution that is refused to stderr; shown only when nothing was raised."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
            sys.stderr.flush()
            os.dup2(kept, 2)
            file.seek(0)
            sys.stderr.write(file.read().decode(errors="replace"))
        finally:
            os.dup2(kept, 2)
            os.close(kept)


# ------------------------------------------------------------------------------------------------------------ decoding


def decode_inputs(question: Question, model: torch.nn.Module, inputs: dict) -> tuple[list, dict, int]:
    """One token of each sequence, its position, and the length of the cache: that of the input."""
    tokens = next((a for a in inputs.values() if isinstance(a, torch.Tensor)), None)
    config = getattr(model, "config", None)
    if not (hasattr(model, "get_output_embeddings") and hasattr(config, "num_hidden_layers")):
        raise InputError(
            f"mode is decode, and {question.target} is a {type(model).__name__}; expected a causal model of "
            "transformers, whose static cache is known; ask about another by --mode forward, with its cache among "
            "--inputs"
        )
    causal = any(word in type(model).__name__ for word in ("CausalLM", "LMHead"))
    if getattr(config, "is_encoder_decoder", False) or not causal:
        raise InputError(f"mode is decode, and {type(model).__name__} is not a causal language model; expected one")
    if len(inputs) != 1 or tokens.dim() != 2 or tokens.is_floating_point():
        raise InputError("mode decode takes one input, such as input_ids=int32[BATCH,LENGTH_OF_THE_CACHE]")
    batch, length = tokens.shape
    kwargs = dict(tokens=torch.empty(batch, 1, dtype=tokens.dtype, device="meta"))
    return [], kwargs | dict(position=torch.empty(1, dtype=torch.int64, device="meta")), length


def cache_of(model: torch.nn.Module, length: int):
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def decode_forward(model, cache, tokens, position):
    return model(
        input_ids=tokens,
        past_key_values=cache,
        cache_position=position,
        position_ids=position.view(1, 1),
        use_cache=True,
    ).logits


@torch_xla.compile(full_graph=True, name="decode_step")
def decode_step(model, cache, tokens, position):
    with torch.no_grad():
        return decode_forward(model, cache, tokens, position)[:, -1].argmax(-1)


def answer_decode(
    question: Question,
    level: str,
    topology: Topology,
    model: torch.nn.Module,
    inputs: dict,
    length: int,
    notes: list[str],
) -> int:
    cache = cache_of(model, length)
    _, counted = probe(question, lambda: decode_forward(model, cache, **inputs))  # makes the tensors of the cache
    flops = model_flops(counted, question, notes)
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    mesh = xs.get_global_mesh()
    for tensor in held if mesh else ():
        mark(question, mesh, tensor, batch_axes(mesh), "the key-value cache")
    settle()
    owners = (torch.nn.ModuleList([model]),)
    traced = in_words(question, lambda: trace_step(decode_step, model, cache, **inputs, owners=owners))
    batch = inputs["tokens"].shape[0]
    result, text = ask_compiler(
        traced,
        topology,
        examples=batch,
        unit="tokens",
        model_flops=flops,
        settings=settings_of(question),
        cache=cache_of_environment(),
    )
    cache_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
    if result.compiles:
        result = dataclasses.replace(result, decode=what_binds(result, topology, model, cache_bytes, length, flops))
        seconds = result.decode["expected_ms"] / 1e3
        result = dataclasses.replace(result, estimated_per_second=batch / seconds)
    notes.append(f"decode: one token of {batch} sequences, key-value cache for {length} tokens of each")
    return hand_over(traced, dataclasses.replace(result, level=level, notes=notes), text)


def what_binds(
    result: Report, topology: Topology, model: torch.nn.Module, cache_bytes: int, length: int, flops: float | None
) -> dict:
    """What a step must read at the chip's memory bandwidth, against the matrix unit's peak and the compiler's estimate.

    Of an embedding that is no output layer too, a row for each sequence is read: it is left out.
    """
    hardware, devices = topology.hardware, topology.num_devices
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    unread = 0 if tied else embedding.weight.numel() * embedding.weight.element_size()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    parameters = result.memory["parameters"] * (1 - unread / whole)
    mesh = xs.get_global_mesh()
    sizes = dict(zip(mesh.axis_names, mesh.mesh_shape, strict=True)) if mesh else {}
    parts = math.prod(sizes[axis] for axis in batch_axes(mesh).get(0, ())) if mesh else 1
    read = parameters + cache_bytes / parts
    memory_ms = read / hardware.memory_gb_per_s / 1e6 * hardware.devices_per_chip
    matrix_ms = (flops or 0) / devices / hardware.bf16_tflops / 1e9 * hardware.devices_per_chip
    times = {"memory": memory_ms, "matrix unit": matrix_ms}
    bound = max(times, key=times.get)
    expected = max(result.estimated_ms or 0, memory_ms, matrix_ms)
    return dict(
        cache_bytes=cache_bytes, cache_length=length, read_bytes=int(read), memory_ms=memory_ms, matrix_ms=matrix_ms,
        bound_by=bound, expected_ms=expected,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_script(main))
