"""A sequence that several devices share, along the mesh's axis "context": who holds which positions, and attention.

gather: queries stay; keys and values, of which a group of heads has one, are all-gathered along the axis, and their
gradients come back by a reduce-scatter. Under the causal mask late queries see more keys than early ones. So C devices
make 2 C pieces of the sequence, and device i holds pieces i and 2 C - 1 - i: each has the same work (Llama 3:
Grattafiori et al. 2024, section 3.3.2). ulysses: a device gives positions away for heads, by an all-to-all, attends
with its heads to whole sequences, and exchanges back (Jacobs et al. 2023); positions stay in order.

Shape suffixes: B batch, T time, S = T + 1; H heads of queries, G heads of keys and values, K head_dim; C devices along
the axis.
"""

from collections.abc import Callable
from functools import partial

import torch

from language.xla.loops import BATCH, from_local, sum_over, to_local
from tpu_utils.device import Mesh, mark_sharding_with_gradients


def size_of(mesh: Mesh | None) -> int:
    """Devices that share a sequence."""
    return 1 if mesh is None else mesh.shape()["context"]


def pieces_of(mesh: Mesh | None, way: str) -> int:
    """Into how many pieces a sequence is put into order: balanced(). 1: it stays in its own."""
    return 2 * size_of(mesh) if size_of(mesh) > 1 and way != "ulysses" else 1


def problem(config, tensor: int, devices: int) -> str | None:
    """Why this many devices cannot share the sequences of a TransformerConfig, whose heads `tensor` others share."""
    if devices == 1:
        if config.context_attention == "auto":
            return None
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


def balanced(x, pieces: int, axis: int = 0):
    """x with the pieces of an axis in the order in which devices hold them: first and last, second and last but one."""
    if pieces == 1:
        return x
    early, late = x.unflatten(axis, (2, pieces // 2, -1)).unbind(axis)
    return torch.stack([early, late.flip(axis)], axis + 1).flatten(axis, axis + 2)


def inputs_and_targets(model, tokens_BS):
    """(B, T) each, from one upload: an input token without a target is stored as ~token (bitwise not).

    A row is small beside its activations, so each device of the context axis receives all of it, and takes its
    positions here.
    """
    inputs = torch.where(tokens_BS < 0, -1 - tokens_BS, tokens_BS)[:, :-1]
    return model.hold_positions(inputs, 1), model.hold_positions(tokens_BS[:, 1:], 1)


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
    and values of all devices, (C, B, T / C, G, K)."""
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
    own = None if saved is None else [ToLocal.apply(x, mesh, spec(x)) for x in saved]
    q = ToLocal.apply(q_BTHK, mesh, here)
    out = attention(q, of_all(k_BTGK), of_all(v_BTGK), starts, own, window, here_T=positions)
    if saved == []:
        saved.extend(FromLocal.apply(x, mesh, spec(x)) for x in own)
    return FromLocal.apply(out, mesh, here)


def ulysses_attention(attention: Callable, mesh: Mesh, q_BTHK, k_BTGK, v_BTGK, starts_BT=None, saved=None, window=0):
    """attention() of whole sequences, of fewer heads."""
    by_position, by_head = (BATCH, "context", "tensor", None), (BATCH, None, ("tensor", "context"), None)

    def mark(x, *specs):
        for spec in specs:
            x = mark_sharding_with_gradients(x, mesh, spec)
        return x

    q, k, v = (mark(x, by_position, by_head) for x in (q_BTHK, k_BTGK, v_BTGK))
    return mark(attention(q, k, v, starts_BT, saved, window), by_head, by_position)


def context_parallel(attention: Callable, mesh: Mesh | None, way: str) -> Callable:
    """attention() on this mesh."""
    if size_of(mesh) == 1:
        return attention
    return partial(ulysses_attention if way == "ulysses" else all_gather_attention, attention, mesh)
