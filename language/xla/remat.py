"""Layers that are run again in the backward pass, and what is kept of their first run.

Shape suffixes: B batch, T time, D embedding width.
"""

import contextlib
import dataclasses

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tpu_utils.device import IS_XLA, optimization_barrier_, place_to_device, place_to_host

LEVELS = {"inputs": ("input",)}
LEVELS["attention"] = (*LEVELS["inputs"], "attention", "scale")
LEVELS["projections"] = (*LEVELS["attention"], "query", "key", "value")
LEVELS["residual"] = (*LEVELS["projections"], "residual")
LEVELS["products"] = (*LEVELS["residual"], "gate", "up")
"""The points of a layer whose values --remat_keep keeps, by the names that a model's layer() gives them."""


@dataclasses.dataclass(frozen=True)
class LayerExecution:
    """How a model runs its layers. points, of LEVELS: layers run again in the backward pass, and the values of these
    points are kept; None: all that autograd saves. on_host: the points whose values lie in the host's memory meanwhile,
    but for small ones. scan: all layers are one loop in the graph."""

    points: tuple[str, ...] | None = None
    on_host: tuple[str, ...] = ()
    scan: bool = False


class SavedActivations:
    """The values of a layer's points, in the order in which they come up.

    values: None while the layer runs the first time, and they are collected; else they are used instead of what is
    computed again, so that what computed it is no part of the program. offloaded: which of them lie on the host.
    """

    def __init__(self, execution: LayerExecution, values=None):
        self.execution, self.first = execution, values is None
        self.values, self.offloaded = list(values or []), []

    def __call__(self, point: str, value: torch.Tensor) -> torch.Tensor:
        if point not in self.execution.points:
            return value
        if self.first:
            self.put(point, value)
            return value
        return Instead.apply(value, self.values.pop(0))

    def heads(self, point: str, value_BTHK: torch.Tensor) -> torch.Tensor:
        """Kept with the heads first and the positions last, as the kernels of flash attention read them."""
        return self(point, value_BTHK.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def attention(self) -> tuple[torch.Tensor, ...] | None:
        """What attention takes as `saved`: (output, a value for each row) of its first run; (): this is the first run,
        which is to return them; None: they are not kept."""
        if "attention" not in self.execution.points:
            return None
        return () if self.first else (self.values.pop(0), self.values.pop(0))

    def keep_attention(self, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        """saved: what attention returns beside its output, for its second run."""
        if self.first and "attention" in self.execution.points:
            self.put("attention", saved[0])
            self.put("", saved[1])  # small: it stays here

    def put(self, point: str, value: torch.Tensor) -> None:
        self.offloaded.append(point in self.execution.on_host and point != "scale")
        self.values.append(place_to_host(value.detach()) if self.offloaded[-1] else value.detach())


def on_device(values, offloaded: list[bool]) -> list[torch.Tensor]:
    return [place_to_device(value) if is_away else value for value, is_away in zip(values, offloaded, strict=True)]


SAVE_NOTHING = SavedActivations(LayerExecution(points=()))


class Instead(torch.autograd.Function):
    """The kept value; its gradient is that of the one computed again."""

    @staticmethod
    def forward(ctx, computed, kept):
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


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
