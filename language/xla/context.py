"""A sequence that several devices share, along the mesh's axis "context": who holds which positions.

context_attention.py has their attention, and the order that it wants.

Shape suffixes: B batch, T time, S = T + 1.
"""

import torch

from tpu_utils.device import Mesh


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
