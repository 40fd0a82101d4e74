"""Layers that are run again in the backward pass.

Shape suffixes: B batch, T time, D embedding width.
"""

import contextlib

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from language.xla.saved_activations import SAVE_NOTHING, LayerExecution, SavedActivations
from tpu_utils.device import IS_XLA, optimization_barrier_, place_to_device


def on_device(values, offloaded: list[bool]) -> list[torch.Tensor]:
    return [place_to_device(value) if is_away else value for value, is_away in zip(values, offloaded, strict=True)]


def forward_layer(run, execution: LayerExecution, needed, x_BTD, *values):
    """(outputs, what is kept for the backward pass, x first) of run(x, values, kept)."""
    kept = SavedActivations(execution)
    kept.put("input", x_BTD)
    x, *values = leaves([x_BTD, *values], needed)
    if execution.points is None:
        hooks = saved_tensors_hooks(lambda t: kept.put("", t) if is_per_position(t, x) else None, lambda _: None)
        with torch.enable_grad(), hooks:
            return [out.detach() for out in run(x, values, SAVE_NOTHING)], kept
    with torch.no_grad():
        return run(x, values, kept), kept


def backward_layer(run, execution: LayerExecution, needed, grads, values, kept: SavedActivations):
    """(gradient of x, [those of the values that need one]): runs the layer again. Autograd, or the layer, takes what is
    kept instead of what is computed again."""
    x, *values = leaves([kept.values.pop(0), *values], needed)
    hooks = saved_tensors_hooks(lambda t: kept.values.pop(0) if is_per_position(t, x) else t, lambda t: t)
    everything = execution.points is None
    with torch.enable_grad(), hooks if everything else contextlib.nullcontext():
        outs = run(x, values, SAVE_NOTHING if everything else kept)
    grad_x, *gradients = torch.autograd.grad(outs, [t for t in (x, *values) if t.requires_grad], grads)
    return grad_x, gradients


class RematLayer(torch.autograd.Function):
    """A layer that is run again in the backward pass.

    XLA's common subexpression elimination would merge torch.utils.checkpoint's second run with the first. The barrier
    prevents that, as in torch_xla's checkpoint, which cannot choose what is kept. What lies on the host comes back
    before the barrier, beside the layers after this one.
    """

    @staticmethod
    def forward(ctx, run, execution, x_BTD, *values):
        ctx.run, ctx.execution, ctx.needed = run, execution, (True, *ctx.needs_input_grad[3:])
        outs, kept = forward_layer(run, execution, ctx.needed, x_BTD, *values)
        ctx.offloaded = kept.offloaded
        ctx.save_for_backward(*values, *kept.values)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        tensors, count, given = ctx.saved_tensors, len(ctx.needed) - 1, len(grads)
        tensors = *grads, *tensors[:count], *on_device(tensors[count:], ctx.offloaded)
        behind = [t.clone() for t in tensors]  # clones: the barrier is in place
        optimization_barrier_(behind)
        grads, values, kept = behind[:given], behind[given : given + count], behind[given + count :]
        kept = SavedActivations(ctx.execution, kept)
        found, gradients = backward_layer(ctx.run, ctx.execution, ctx.needed, grads, values, kept)
        gradients = iter(gradients)
        return None, None, found, *(next(gradients) if is_needed else None for is_needed in ctx.needed[1:])


def run_again(run, execution: LayerExecution, x_BTD, *values):
    """run(x, values), and again in the backward pass."""
    if IS_XLA:
        return RematLayer.apply(run, execution, x_BTD, *values)
    # the torch.compile backend: Dynamo takes no hooks of autograd into a graph, and knows this one
    return checkpoint(run, x_BTD, values, use_reentrant=False)


def leaves(tensors, needed) -> list[torch.Tensor]:
    """The tensors, detached, as leaves of a new autograd graph. needed: which of them get a gradient."""
    return [t.detach().requires_grad_(on) for t, on in zip(tensors, needed, strict=True)]


def is_per_position(t, x_BTD) -> bool:
    """Whether it has values for each position, (B, T, ...), and is not x_BTD: no weight, and no attention score."""
    return t is not x_BTD and t.shape[:2] == x_BTD.shape[:2]
