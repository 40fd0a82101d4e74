"""Attention over a sequence that several devices share, along the mesh's axis "context".

gather: queries stay; keys and values, of which a group of heads has one, are all-gathered along the axis, and their
gradients come back by a reduce-scatter. Under the causal mask late queries see more keys than early ones. So C devices
make 2 C pieces of the sequence, and device i holds pieces i and 2 C - 1 - i: each has the same work (Llama 3:
Grattafiori et al. 2024, section 3.3.2). ulysses: a device gives positions away for heads, by an all-to-all, attends
with its heads to whole sequences, and exchanges back (Jacobs et al. 2023); positions stay in order.

Shape suffixes: B batch, T time, H heads of queries, G heads of keys and values, K head_dim; C devices along
the axis.
"""

from collections.abc import Callable
from functools import partial

import torch

from language.xla.loops import BATCH, from_local, sum_over, to_local
from language.xla.shards import balanced, size_of
from tpu_utils.device import Mesh, mark_sharding_with_gradients


class ToLocal(torch.autograd.Function):
    """A device's shard of x, which the partitioner then leaves alone, with all that is computed of it. over: an axis of
    the mesh whose devices have the same values, and give back gradients of their own, which are added up."""

    @staticmethod
    def forward(ctx, x, mesh, spec, over=None):
        ctx.mesh, ctx.spec, ctx.over = mesh, spec, over
        return to_local(x, mesh, spec)

    @staticmethod
    def backward(ctx, grad):
        if ctx.over is None:
            return from_local(grad, ctx.mesh, ctx.spec), None, None, None
        return sum_over(ctx.over, grad, ctx.mesh, ctx.spec), None, None, None


class FromLocal(torch.autograd.Function):
    """The tensor whose shards the devices hold."""

    @staticmethod
    def forward(ctx, shard, mesh, spec):
        ctx.mesh, ctx.spec = mesh, spec
        return from_local(shard, mesh, spec)

    @staticmethod
    def backward(ctx, grad):
        return to_local(grad, ctx.mesh, ctx.spec), None, None


def all_gather_attention(attention: Callable, mesh: Mesh, q_BTHK, k_BTGK, v_BTGK, starts_BT=None, saved=None, window=0):
    """attention(), run by each device by itself: with its own queries and their positions, (T / C,) int32, and the keys
    and values of all devices, (C, B, T / C, G, K). saved, and what is returned beside the output: as causal_attention()
    has them."""
    devices, here = size_of(mesh), (BATCH, "context", "tensor", None)

    def of_all(x_BTGK):
        x = x_BTGK.flatten(2).unflatten(1, (devices, -1)).movedim(1, 0)  # torch_xla shards no more than 5 axes
        # marked before the gather, and so after its gradient's sum: a reduce-scatter
        x = mark_sharding_with_gradients(x, mesh, ("context", BATCH, None, "tensor"))
        return ToLocal.apply(x, mesh, (None, BATCH, None, "tensor"), "context").unflatten(-1, (-1, x_BTGK.shape[-1]))

    def spec(x):
        """Sharding of a saved tensor: (B, T, G, R, ...) of plain attention, (B, H, ..., T) of flash attention."""
        return (BATCH, "context", "tensor", None, None) if x.dim() == 5 else (BATCH, "tensor", None, "context")

    positions = torch.arange(q_BTHK.shape[1], dtype=torch.int32, device=q_BTHK.device)
    positions = ToLocal.apply(balanced(positions, 2 * devices), mesh, ("context",))
    starts = None if starts_BT is None else ToLocal.apply(starts_BT, mesh, (BATCH, "context"))
    window = ToLocal.apply(window, mesh, ()) if isinstance(window, torch.Tensor) else window
    own = saved and tuple(ToLocal.apply(x, mesh, spec(x)) for x in saved)
    q = ToLocal.apply(q_BTHK, mesh, here)
    out, own = attention(q, of_all(k_BTGK), of_all(v_BTGK), starts, own, window, here_T=positions)
    if saved == ():  # elsewhere nobody reads it, and each conversion is an operation of the program
        saved = tuple(FromLocal.apply(x, mesh, spec(x)) for x in own)
    return FromLocal.apply(out, mesh, here), saved


def ulysses_attention(attention: Callable, mesh: Mesh, q_BTHK, k_BTGK, v_BTGK, starts_BT=None, saved=None, window=0):
    """attention() of whole sequences, of fewer heads on each device."""
    by_position, by_head = (BATCH, "context", "tensor", None), (BATCH, None, ("tensor", "context"), None)

    def mark(x, *specs):
        for spec in specs:
            x = mark_sharding_with_gradients(x, mesh, spec)
        return x

    q, k, v = (mark(x, by_position, by_head) for x in (q_BTHK, k_BTGK, v_BTGK))
    out, saved = attention(q, k, v, starts_BT, saved, window)
    return mark(out, by_head, by_position), saved


def context_parallel(attention: Callable, mesh: Mesh, way: str) -> Callable:
    """attention() on a mesh with a context axis."""
    return partial(ulysses_attention if way == "ulysses" else all_gather_attention, attention, mesh)


def problem(config, tensor: int, devices: int) -> str | None:
    """Why this many devices cannot share the sequences of a TransformerConfig, whose heads `tensor` others share."""
    if devices == 1:
        return (
            f"context_attention is {config.context_attention}, but the mesh has no context axis; leave it out, or give "
            "--mesh DATAxFSDPxTENSORxCONTEXT"
        )
    if config.scan_layers and not config.remat:  # what autograd saves of a device's part cannot be stacked
        return (
            f"scan_layers is on and remat is off, but the context axis of the mesh is {devices}, where a loop over the "
            "layers needs --remat; give it, or leave --scan_layers out"
        )
    length, heads = config.shape.sequence_length, config.shape.num_cached_heads
    if config.context_attention == "ulysses":
        if heads % (tensor * devices):
            return (
                f"context_attention is ulysses, but tensor x context ({tensor} x {devices}) does not divide the "
                f"{heads} heads of keys and values; choose gather, or another --mesh"
            )
        unit, why = devices, "the context axis"
    else:
        unit, why = 2 * devices, "two pieces for each device of the context axis"
        if config.attention == "flash":
            unit, why = 128 * unit, f"{why}, of 128 positions or a multiple for flash attention"
    shortest = 128 if config.bucketed else length
    if length % unit or shortest % unit:
        bucket = f" and the {shortest} of the shortest bucket" if shortest < length else ""
        return (
            f"sequence_length ({length}){bucket} must be divisible by {unit}: {why} ({devices}); "
            f"try {-(-length // unit) * unit}{', without --bucketed' if bucket else ''}, or another --mesh"
        )
    return None


def words(way: str) -> str:
    """What a run says of how its devices share a sequence."""
    if way == "ulysses":
        return "sequences shared by ulysses: a device attends with some heads to all positions"
    return "sequences shared by gather: a device has its queries, and keys and values of all, whatever the heads"
