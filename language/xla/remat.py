"""Layers that are run again in the backward pass, one by one or as a loop, and what is kept of their first run.

Shape suffixes: B batch, T time, D embedding width; L layers.
"""

import contextlib
import dataclasses
from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from language.xla.loops import loop_in_graph
from tpu_utils.device import IS_XLA, optimization_barrier_, place_to_device, place_to_host

LEVELS = {"inputs": ("input",)}
LEVELS["attention"] = (*LEVELS["inputs"], "attention", "scale")
LEVELS["projections"] = (*LEVELS["attention"], "query", "key", "value")
LEVELS["residual"] = (*LEVELS["projections"], "residual")
LEVELS["products"] = (*LEVELS["residual"], "gate", "up")
"""The points of a layer whose values --remat_keep keeps, by the names that a model's block gives them."""


@dataclasses.dataclass(frozen=True)
class Saving:
    """What is kept of a layer for the backward pass. points: of LEVELS; None: all that autograd saves and that has
    values for each position. on_host: those that lie in the host's memory meanwhile, but for small ones."""

    points: tuple[str, ...] | None = None
    on_host: tuple[str, ...] = ()


class SavedActivations:
    """The values of a layer's points, in the order in which they come up.

    values: None while the layer runs the first time, and they are collected; else they are used instead of what is
    computed again, so that what computed it is no part of the program. offloaded: which of them lie on the host.
    """

    def __init__(self, saving: Saving, values=None):
        self.saving, self.first = saving, values is None
        self.values, self.offloaded = list(values or []), []

    def __call__(self, point: str, value: torch.Tensor) -> torch.Tensor:
        if point not in self.saving.points:
            return value
        if self.first:
            self.put(point, value)
            return value
        return Instead.apply(value, self.values.pop(0))

    def heads(self, point: str, value_BTHK: torch.Tensor) -> torch.Tensor:
        """Kept with the heads first and the positions last, as the kernels of flash attention read them."""
        return self(point, value_BTHK.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def attention(self, attend: Callable) -> torch.Tensor:
        """attend(saved)'s output. saved: an empty list receives it and a value for each row; a full one gives them."""
        if "attention" not in self.saving.points:
            return attend(None)
        saved = [] if self.first else [self.values.pop(0), self.values.pop(0)]
        out = attend(saved)
        if self.first:
            self.put("attention", saved[0])
            self.put("", saved[1])  # small: it stays here
        return out

    def put(self, point: str, value: torch.Tensor) -> None:
        self.offloaded.append(point in self.saving.on_host and point != "scale")
        self.values.append(place_to_host(value.detach()) if self.offloaded[-1] else value.detach())


def on_device(values, offloaded: list[bool]) -> list[torch.Tensor]:
    return [place_to_device(value) if is_away else value for value, is_away in zip(values, offloaded, strict=True)]


SAVE_NOTHING = SavedActivations(Saving(points=()))


class Instead(torch.autograd.Function):
    """The kept value; its gradient is that of the one computed again."""

    @staticmethod
    def forward(ctx, computed, kept):
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def forward_layer(run, saving: Saving, needed, x_BTD, *values):
    """(outputs, what is kept for the backward pass, x first) of run(x, values, kept)."""
    kept = SavedActivations(saving)
    kept.put("input", x_BTD)
    x, *values = leaves([x_BTD, *values], needed)
    if saving.points is None:
        hooks = saved_tensors_hooks(lambda t: kept.put("", t) if is_per_position(t, x) else None, lambda _: None)
        with torch.enable_grad(), hooks:
            return [out.detach() for out in run(x, values, SAVE_NOTHING)], kept
    with torch.no_grad():
        return run(x, values, kept), kept


def backward_layer(run, saving: Saving, needed, grads, values, kept: SavedActivations):
    """(gradient of x, [those of the values that need one]): runs the layer again. Autograd, or the layer, takes what is
    kept instead of what is computed again."""
    x, *values = leaves([kept.values.pop(0), *values], needed)
    hooks = saved_tensors_hooks(lambda t: kept.values.pop(0) if is_per_position(t, x) else t, lambda t: t)
    everything = saving.points is None
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
    def forward(ctx, run, saving, x_BTD, *values):
        ctx.run, ctx.saving, ctx.needed = run, saving, (True, *ctx.needs_input_grad[3:])
        outs, kept = forward_layer(run, saving, ctx.needed, x_BTD, *values)
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
        found, gradients = backward_layer(
            ctx.run, ctx.saving, ctx.needed, grads, values, SavedActivations(ctx.saving, kept)
        )
        gradients = iter(gradients)
        return None, None, found, *(next(gradients) if is_needed else None for is_needed in ctx.needed[1:])


def run_again(run, saving: Saving, x_BTD, *values):
    """run(x, values), and again in the backward pass."""
    if IS_XLA:
        return RematLayer.apply(run, saving, x_BTD, *values)
    # the torch.compile backend: Dynamo takes no hooks of autograd into a graph, and knows this one
    return checkpoint(run, x_BTD, values, use_reentrant=False)


class ScannedLayers(torch.autograd.Function):
    """All layers as one loop in the graph, whose size is that of one layer.

    torch_xla's scan with gradients traces a layer by AOTAutograd, which decomposes einsum: its loops take 1.6 times the
    cycles (GPT-2 124M, v5e, libtpu 0.0.21's estimate). Here both loops are traced like the rest of the step. The
    backward loop runs a layer again and takes its gradients; unused results of that run are not in the program.
    Attention scores are recomputed: writing them into a stacked tensor takes longer.
    """

    @staticmethod
    def forward(ctx, run, saving, x_BTD, *stacked):
        """stacked: (L, ...) each."""
        ctx.run, ctx.saving, ctx.needed = run, saving, (True, *ctx.needs_input_grad[3:])

        def one_layer(carry, values):
            if not any(ctx.needs_input_grad):
                out, *routing = run(*carry, values)
                ctx.given = len(routing)
                return [out], routing
            (out, *routing), kept = forward_layer(run, saving, ctx.needed, *carry, *values)
            ctx.offloaded, ctx.given = kept.offloaded, len(routing)
            return [out], [*routing, *kept.values]

        (out,), found = loop_in_graph(one_layer, [x_BTD], list(stacked))
        ctx.save_for_backward(*stacked, *found[ctx.given :])
        return out, *found[: ctx.given]

    @staticmethod
    def backward(ctx, grad, *of_routing):
        tensors, count, given = ctx.saved_tensors, len(ctx.needed) - 1, ctx.given

        def one_layer(carry, rows):
            grads, rows = [*carry, *rows[:given]], rows[given:]
            kept = SavedActivations(ctx.saving, on_device(rows[count:], ctx.offloaded))
            grad_x, gradients = backward_layer(ctx.run, ctx.saving, ctx.needed, grads, rows[:count], kept)
            return [grad_x], gradients

        (grad,), found = loop_in_graph(one_layer, [grad], [*of_routing, *tensors], reverse=True)
        found = iter(found)
        return None, None, grad, *(next(found) if is_needed else None for is_needed in ctx.needed[1:])


def leaves(tensors, needed) -> list[torch.Tensor]:
    """The tensors, detached, as leaves of a new autograd graph. needed: which of them get a gradient."""
    return [t.detach().requires_grad_(on) for t, on in zip(tensors, needed, strict=True)]


def is_per_position(t, x_BTD) -> bool:
    """Whether it has values for each position, (B, T, ...), and is not x_BTD: no weight, and no attention score."""
    return t is not x_BTD and t.shape[:2] == x_BTD.shape[:2]
