"""What a device holds of a model and a batch.

On the torch.compile backend there is a process for each device, which does in torch's own words what torch_xla's SPMD
does by itself: docs/torchtpu.md. A parameter is a DTensor over the axes data and fsdp of the mesh. A layer gathers its
weights, and runs on the rows of its own process as on one device; autograd takes gradients back to the shards by a
reduce-scatter. Under torch_xla each of these functions gives back what it is given.

Along the mesh's axis "context" devices share sequences, on torch_xla alone: context_attention.py.

Shape suffixes: B batch, T time, S = T + 1.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tpu_utils.base.errors import InputError
from tpu_utils.base.process import Peers
from tpu_utils.device import DEVICE_TYPE, IS_XLA, Mesh, mark_sharding, process_index, world_size

if TYPE_CHECKING:
    from language.options.transformer_options import TransformerConfig

if not IS_XLA:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def meet(config: "TransformerConfig") -> Peers | None:
    """Join the processes that torchrun has started. None: there are none."""
    if not dist.is_torchelastic_launched():
        return None
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # one machine: they are to listen on no other address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}.get(DEVICE_TYPE, "tpu_dist"))
    from tpu_utils.remote.meeting import meet_replicas  # only where there are several

    return meet_replicas(dist.get_rank(), world_size(), config.peers_timeout)


def check_torch_compile(config: "TransformerConfig", sizes: tuple[int, ...]) -> None:
    """Raises InputError for what needs torch_xla. sizes: of the mesh."""
    several = max(sizes) > 1
    for name, found, expected in (
        ("attention", config.attention == "flash", "plain"),
        ("scan_layers", config.scan_layers, "--no_scan_layers"),
        ("loss_parts", config.loss_parts > 1, "1"),
        ("sample_every", several and config.sample_every, "0, or one device"),
        ("remat_keep", config.remat_keep != "inputs", "inputs"),
        ("remat_all_but", config.remat_all_but, "0"),
        ("offload", config.offload != "nothing", "nothing"),
        ("mesh", max(sizes[2:]) > 1, "DATAxFSDPx1"),
        ("number of experts", several and config.num_experts, "a model without, or one device"),
    ):
        if found:
            value = getattr(config, name, config.num_experts)
            raise InputError(f"{name} is {value}, which needs torch_xla, and it is not installed; expected {expected}")


def distribute(model: torch.nn.Module, mesh: Mesh | None, partition_spec: Callable) -> None:
    """Keep a shard of each parameter, by partition_spec(name, parameter). Call it before the optimizer is made."""
    if mesh is None or IS_XLA:  # mark_sharding() does it there
        return
    for name, parameter in list(model.named_parameters()):
        spec = [(axis,) if isinstance(axis, str) else axis or () for axis in partition_spec(name, parameter)]
        placements = [next((Shard(i) for i, over in enumerate(spec) if a in over), Replicate()) for a in mesh.grid_axes]
        # every process has the whole of it: none is sent
        shards = distribute_tensor(parameter.detach(), mesh.grid, placements, src_data_rank=None)
        module, _, own = name.rpartition(".")
        shards = torch.nn.Parameter(shards, requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(module), own, shards)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter, whole. Its gradient is a sum over the rows of this process alone."""
    if IS_XLA or not isinstance(tensor, DTensor):
        return tensor
    axes = range(tensor.device_mesh.ndim)
    return tensor.redistribute(placements=[Replicate() for _ in axes]).to_local(
        grad_placements=[Partial() for _ in axes]
    )


def sharded_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What every device has computed alike of a parameter's shape, as shards of it."""
    if IS_XLA or not isinstance(parameter, DTensor):
        return value
    grid = parameter.device_mesh
    whole = DTensor.from_local(value, grid, [Replicate() for _ in range(grid.ndim)], run_check=False)
    return whole.redistribute(placements=parameter.placements)


def first_row(batch: torch.Tensor) -> int:
    """The number in the global batch of the first row of a batch."""
    return 0 if IS_XLA else process_index() * len(batch)


def total(value: torch.Tensor, mesh: Mesh | None) -> torch.Tensor:
    """The sum over the devices of a value that each has of its own rows, or of its own shard."""
    if mesh is None or IS_XLA:
        return value
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh.grid, [Partial() for _ in mesh.grid_axes], run_check=False)
    return value.full_tensor()


def rows_of_all(rows: torch.Tensor, mesh: Mesh | None) -> torch.Tensor:
    """(B, ...) of all devices, for every host to read."""
    if mesh is None:
        return rows
    if IS_XLA:
        mark_sharding(rows, mesh, (None,) * rows.dim())
        return rows
    return DTensor.from_local(rows, mesh.grid, [Shard(0) for _ in mesh.grid_axes], run_check=False).full_tensor()


# ------------------------------------------------------------------------------------- sequences that devices share


def size_of(mesh: Mesh | None) -> int:
    """Devices that share a sequence."""
    return 1 if mesh is None else mesh.shape()["context"]


def pieces_of(mesh: Mesh | None, way: str) -> int:
    """Into how many pieces a sequence is put into order: balanced(). 1: it stays in its own."""
    return 2 * size_of(mesh) if size_of(mesh) > 1 and way != "ulysses" else 1


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
