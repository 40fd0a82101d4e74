"""For a module without a script: the axes of the mesh over which each parameter and input is sharded. No torch_xla."""

import fnmatch
import math
from collections.abc import Iterable, Mapping

import torch

from tpu_compiler.module.programs import Placement, Question
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import Topology
from tpu_utils.options.fields import nearest

BATCH_AXES = ("data", "dp", "batch", "fsdp")
"""Axes of a mesh over which the inputs' first dimension is sharded when --shard does not say."""
Axes = Mapping[int, tuple[str, ...]]
"""{dimension: the axes of the mesh over which it is sharded}."""


def mesh_sizes(question: Question, topology: Topology) -> dict[str, int]:
    """{axis: size}, empty on one device. Raises InputError for a mesh that the slice is not."""
    count, sizes = topology.num_devices, question.mesh
    asked = math.prod(sizes.values())
    if sizes and asked != count:
        said = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(
            f"mesh: {said} has {asked} devices and {topology.name} has {count}; expected sizes whose product is {count}"
        )
    return (sizes or {"data": count}) if count > 1 else {}


def batch_axes(names: Iterable[str]) -> Axes:
    axes = tuple(axis for axis in names if axis in BATCH_AXES)
    return {0: axes} if axes else {}


def check_axes(sizes: Mapping[str, int], shape: Iterable[int], axes: Axes, name: str) -> None:
    """Raises InputError where a dimension is not there, or cannot be divided."""
    shape = list(shape)
    for dimension, along in axes.items():
        parts = math.prod(sizes[axis] for axis in along)
        if dimension >= len(shape):
            raise InputError(f"shard: {name} has the shape {shape}, and so no dimension {dimension}")
        if shape[dimension] % parts:
            raise InputError(
                f"shard: dimension {dimension} of {name}, {shape}, cannot be divided by {parts} "
                f"({' x '.join(along)}); expected a multiple of {parts}; shard another dimension "
                f"(AXIS@NUMBER) or none (-)"
            )


def placement_of(question: Question, name: str) -> Placement | None:
    """What --shard says of a parameter or an input: the first pattern that matches."""
    return next((p for p in question.placements if fnmatch.fnmatchcase(name, p.pattern)), None)


def axes_of_all(
    question: Question, sizes: Mapping[str, int], model: torch.nn.Module, args: list, kwargs: dict, notes: list[str]
) -> tuple[dict[str, Axes], dict[str, Axes]]:
    """The axes of each tensor among the inputs, by name or place, and of each parameter, as --shard says.

    Raises InputError for a pattern that matches nothing, on one device too.
    """
    unused = {placement.pattern for placement in question.placements}
    batch = batch_axes(sizes)

    def axes_of(name: str, tensor: torch.Tensor, default: Axes, said: str) -> Axes:
        axes, placement = default, placement_of(question, name)
        if placement is not None:
            unused.discard(placement.pattern)
            axes = {dimension: (axis,) for dimension, axis in placement.axes.items()}
        if sizes:
            check_axes(sizes, tensor.shape, axes, said)
        return axes

    of_inputs = {}
    for name, value in ({str(place): a for place, a in enumerate(args)} | kwargs).items():
        if isinstance(value, torch.Tensor):
            one_for_all = question.mode == "decode" and name == "position"
            default = {} if one_for_all else batch
            of_inputs[name] = axes_of(name, value, default, f"the input {name}") if value.dim() else {}
    of_parameters = {name: axes_of(name, p, {}, name) for name, p in model.named_parameters()}
    for pattern in unused:
        names = list(of_parameters)
        raise InputError(
            f"shard: {pattern!r} matches no parameter of {question.target}; it has {', '.join(names[:8])}"
            f"{', ...' if len(names) > 8 else ''}{nearest(pattern, names)}"
        )
    if sizes:
        said, count = ", ".join(f"{n}={s}" for n, s in sizes.items()), sum(map(bool, of_parameters.values()))
        over = " x ".join(batch.get(0, ())) or "no axis"
        sharded = f"{count} of {len(of_parameters)} parameters sharded"
        notes.append(f"mesh {said}: {sharded}, the inputs' first dimension over {over}")
    return of_inputs, of_parameters
