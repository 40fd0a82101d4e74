"""For a module without a script: its inputs, the mesh, and how parameters and inputs are sharded over it."""

import fnmatch
import math
from collections.abc import Mapping

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from tpu_compiler.modules import Placement, Question
from tpu_utils.errors import InputError
from tpu_utils.fields import nearest
from tpu_utils.hardware import Topology

BATCH_AXES = ("data", "dp", "batch", "fsdp")
"""Axes of a mesh over which the inputs' first dimension is sharded when --shard does not say."""


def to_device_inputs(inputs, device):
    def move(value):
        return torch.empty_like(value, device=device) if isinstance(value, torch.Tensor) else value

    return {n: move(v) for n, v in inputs.items()} if isinstance(inputs, dict) else [move(v) for v in inputs]


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
    question: Question, mesh: xs.Mesh | None, tensor: torch.Tensor, axes: Mapping[int, tuple[str, ...]], name: str
) -> None:
    """Shard a tensor, where there is a mesh. Raises InputError where a dimension is not there, or cannot be divided."""
    if mesh is None:
        return
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


def placement_of(question: Question, name: str) -> Placement | None:
    """What --shard says of a parameter or an input: the first pattern that matches."""
    return next((p for p in question.placements if fnmatch.fnmatchcase(name, p.pattern)), None)


def shard(
    question: Question, mesh: xs.Mesh | None, model: torch.nn.Module, args: list, kwargs: dict, notes: list[str]
) -> None:
    """Mark parameters and inputs as --shard says. Raises InputError for a pattern that matches nothing, on one device
    too."""
    unused, count = {placement.pattern for placement in question.placements}, 0
    batch = batch_axes(mesh) if mesh else {}

    def axes_of(name: str, default: dict) -> dict[int, tuple[str, ...]]:
        if (placement := placement_of(question, name)) is None:
            return default
        unused.discard(placement.pattern)
        return {dimension: (axis,) for dimension, axis in placement.axes.items()}

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
    if mesh is None:
        return
    sizes = ", ".join(f"{n}={s}" for n, s in zip(mesh.axis_names, mesh.mesh_shape, strict=True))
    over = " x ".join(batch.get(0, ())) or "no axis"
    notes.append(f"mesh {sizes}: {count} of {len(names)} parameters sharded, the inputs' first dimension over {over}")
