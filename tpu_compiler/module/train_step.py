"""Makes a step of one module without weights and asks the TPU compiler: the child process of modules.compile_module.

A process can look like one slice only, so each slice and level is a process of its own.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # Python puts a script's own folder there
os.environ.setdefault("PJRT_DEVICE", "CPU")  # before the import, which would choose it with a warning

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch_xla.utils.checkpoint import checkpoint

from tpu_compiler.answer import ask_compiler, hand_over
from tpu_compiler.compile.cache import cache_of_environment
from tpu_compiler.compile.tracing import settle, trace_step
from tpu_compiler.module import kv_cache
from tpu_compiler.module.arguments import meta_inputs, model_flops, prepare, settings_of, sizes_of, to_bfloat16
from tpu_compiler.module.axes import Axes, axes_of_all, batch_axes, check_axes, mesh_sizes
from tpu_compiler.module.loss import choose_loss
from tpu_compiler.module.model import build, step_aside, to_device
from tpu_compiler.module.probing import in_words, probe
from tpu_compiler.module.programs import Question, question_of_child
from tpu_utils.base.errors import InputError, first_line, run_script
from tpu_utils.base.hardware import Topology
from tpu_utils.options.train_config import TrainConfig
from tpu_utils.options.virtual_slice import prepare_environment
from tpu_utils.step.optim import make_optimizer, step_optimizer


def main() -> int:
    question, level, compile_for = question_of_child()
    step_aside()
    return answer(question, level, prepare_environment(compile_for))


def answer(question: Question, level: str, topology: Topology) -> int:
    notes: list[str] = []
    model = build(question, notes)
    args, kwargs = meta_inputs(question, model)
    if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in model.parameters()):
        probe(question, lambda: model(*args, **kwargs))  # a lazy module learns its shapes from its first inputs
    args, kwargs, length = prepare(question, level, model, args, kwargs, notes)
    sizes = sizes_of(question, args, kwargs)

    mesh = mesh_sizes(question, topology)
    if mesh:
        xr.use_spmd()
        xs.set_global_mesh(xs.Mesh(np.arange(topology.num_devices), tuple(mesh.values()), tuple(mesh)))
    device = torch_xla.device()
    model = to_device(model, device)
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device=device), (args, kwargs))
    shard(question, mesh, model, args, kwargs, notes)
    owners = [torch.nn.ModuleList([model])]
    axes: Axes = {}
    held = []
    if question.mode == "decode":
        kv_cache.attend_in_groups(model, notes)
        cache = kv_cache.cache_of(model, length)
        output, counted = probe(
            question, lambda: kv_cache.decode_forward(model, cache, **kwargs)
        )  # creates the cache's tensors
        held = kv_cache.tensors_of(cache)
        axes = kv_cache.cache_axes(question, mesh, model, held[0].shape[1])
        if mesh:
            check_axes(mesh, held[0].shape, axes, "the key-value cache")
            for tensor in held:
                mark(tensor, axes)
        settle()
        owners.append(held)  # else the mark is lost: the cache once lay whole on each device
        step, arguments = decode_step, (model, cache, kwargs["tokens"], kwargs["position"])
    else:
        forward = forward_of(question, level, model, args, kwargs, notes)
        output, counted = probe(question, lambda: forward(model, args, kwargs))
        step, arguments = forward_step, (forward, model, args, kwargs)
    flops = model_flops(counted, question, model, notes)
    if question.mode == "train":
        loss, targets = choose_loss(question, output, kwargs, device, notes)
        if mesh and targets is not None:
            check_axes(mesh, targets.shape, batch_axes(mesh), "the targets")
            mark(targets, batch_axes(mesh))
        if level == "aggressive":
            recompute_blocks(model, notes)
        owners.append(optimizer_of(question, model, topology))
        rate = torch.empty(1, device=device)
        step, arguments = train_step, (forward, loss, model, owners[-1], rate, targets, args, kwargs)
    del output
    traced = in_words(question, lambda: trace_step(step, *arguments, owners=owners))
    sizes |= dict(model_flops=flops, settings=settings_of(question), cache=cache_of_environment())
    result, text = ask_compiler(traced, topology, **sizes)
    if question.mode == "decode":
        result = kv_cache.with_cache(result, model, held, axes, mesh, kwargs["tokens"], length, flops)
    return hand_over(traced, dataclasses.replace(result, level=level, notes=[*notes, *result.notes]), text)


def mark(tensor: torch.Tensor, axes: Axes) -> None:
    xs.mark_sharding(tensor, xs.get_global_mesh(), tuple(axes.get(dimension) for dimension in range(tensor.dim())))


def shard(question: Question, mesh: dict, model: torch.nn.Module, args: list, kwargs: dict, notes: list[str]) -> None:
    """Mark parameters and inputs as --shard says. Raises InputError for a pattern that matches nothing, on one device
    too."""
    of_inputs, of_parameters = axes_of_all(question, mesh, model, args, kwargs, notes)
    if not mesh:
        return
    inputs = {str(place): a for place, a in enumerate(args)} | kwargs
    for name, axes in of_inputs.items():
        if inputs[name].dim():
            mark(inputs[name], axes)
    for name, parameter in model.named_parameters():
        mark(parameter, of_parameters[name])
    for buffer in model.buffers():
        mark(buffer, {})


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
        weights, args, kwargs = to_bfloat16((dict(model.named_parameters()), args, kwargs))
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


@torch_xla.compile(full_graph=True, name="decode_step")
def decode_step(model, cache, tokens, position):
    with torch.no_grad():
        return kv_cache.decode_forward(model, cache, tokens, position)[:, -1].argmax(-1)


def optimizer_of(question: Question, model: torch.nn.Module, topology: Topology) -> torch.optim.Optimizer:
    """The optimizer of the training scripts. Its state exists already, and is sharded like the parameters."""
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
    """Activation checkpointing: keep only the inputs of repeated blocks, recompute the rest in the backward pass."""
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
        structure = []  # pytree of the result: checkpoint passes flat tensors
        # checkpoint's result requires a gradient only if an input does; the first block's inputs do not, so add one
        needs_gradient = torch.zeros((), device=torch_xla.device(), requires_grad=True)

        def flat(_, *leaves):
            args, kwargs = tree_unflatten(list(leaves), layout)
            results, made = tree_flatten(forward(*args, **kwargs))
            structure[:] = [made, [None if isinstance(r, torch.Tensor) else (r,) for r in results]]
            return tuple(r for r in results if isinstance(r, torch.Tensor))

        # requires_grad_() changes nothing; it is a torch call, at which trace_step ties the backward node to its block
        results = checkpoint(flat, needs_gradient, *leaves)
        tensors = iter([t.requires_grad_() if t.requires_grad else t for t in results])
        made, constants = structure
        return tree_unflatten([next(tensors) if c is None else c[0] for c in constants], made)

    return run


if __name__ == "__main__":
    sys.exit(run_script(main))
