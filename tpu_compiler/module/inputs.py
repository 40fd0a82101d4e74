"""For a module without a script: its inputs, the mesh, and the shardings of parameters and inputs, by torch_xla."""

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from tpu_compiler.module.axes import Axes, axes_of_all, check_axes, mesh_sizes
from tpu_compiler.module.programs import Question
from tpu_utils.base.hardware import Topology


def to_device_inputs(inputs, device):
    def move(value):
        return torch.empty_like(value, device=device) if isinstance(value, torch.Tensor) else value

    return {n: move(v) for n, v in inputs.items()} if isinstance(inputs, dict) else [move(v) for v in inputs]


def make_mesh(question: Question, topology: Topology) -> xs.Mesh | None:
    if not (sizes := mesh_sizes(question, topology)):
        return None
    xr.use_spmd()
    mesh = xs.Mesh(np.arange(topology.num_devices), tuple(sizes.values()), tuple(sizes))
    xs.set_global_mesh(mesh)
    return mesh


def mark(mesh: xs.Mesh, tensor: torch.Tensor, axes: Axes, name: str) -> None:
    """Shard a tensor. Raises InputError where a dimension is not there, or cannot be divided."""
    check_axes(dict(zip(mesh.axis_names, mesh.mesh_shape, strict=True)), tensor.shape, axes, name)
    xs.mark_sharding(tensor, mesh, tuple(axes.get(dimension) for dimension in range(tensor.dim())))


def shard(
    question: Question, mesh: xs.Mesh | None, model: torch.nn.Module, args: list, kwargs: dict, notes: list[str]
) -> None:
    """Mark parameters and inputs as --shard says. Raises InputError for a pattern that matches nothing, on one device
    too."""
    sizes = dict(zip(mesh.axis_names, mesh.mesh_shape, strict=True)) if mesh else {}
    of_inputs, of_parameters = axes_of_all(question, sizes, model, args, kwargs, notes)
    if mesh is None:
        return
    inputs = {str(place): a for place, a in enumerate(args)} | kwargs
    for name, axes in of_inputs.items():
        if inputs[name].dim():
            mark(mesh, inputs[name], axes, f"the input {name}")
    for name, parameter in model.named_parameters():
        mark(mesh, parameter, of_parameters[name], name)
    for buffer in model.buffers():
        mark(mesh, buffer, {}, "")
