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

import torch
import torch_xla
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_xla.utils.checkpoint import checkpoint

from tpu_compiler.answer import ask_compiler, hand_over
from tpu_compiler.compile.cache import cache_of_environment
from tpu_compiler.compile.tracing import trace_step
from tpu_compiler.module.arguments import meta_inputs, model_flops, settings_of, sizes_of, to_bfloat16
from tpu_compiler.module.axes import batch_axes
from tpu_compiler.module.decode_step import answer_decode
from tpu_compiler.module.inputs import make_mesh, mark, shard, to_device_inputs
from tpu_compiler.module.kv_cache import decode_inputs
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
    shard(question, mesh, model, args, kwargs, notes)
    if question.mode == "decode":
        return answer_decode(question, level, topology, model, kwargs, cache_length, notes)
    forward = forward_of(question, level, model, args, kwargs, notes)
    output, counted = probe(question, lambda: forward(model, args, kwargs))
    flops = model_flops(counted, question, notes)
    if question.mode == "forward":
        del output
        step = forward_step
        arguments = (forward, model, args, kwargs)
        owners = (torch.nn.ModuleList([model]),)
    else:
        loss, targets = choose_loss(question, output, kwargs, device, notes)
        del output
        if mesh and targets is not None:
            mark(mesh, targets, batch_axes(mesh.axis_names), "the targets")
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
