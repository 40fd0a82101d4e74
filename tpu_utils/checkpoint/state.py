"""A training state on its way to host memory and back: tensors by path, whole or as the shards of this process.

A tensor that is sharded over the devices of a mesh never has to be whole on any host: each process copies the shards on
its own devices, and gets the shards that its devices need, whatever mesh they were written from.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tpu_utils import device
from tpu_utils.checkpoint.tensor_files import Entry, Kind, kind_of, shard_name


def tensors_by_path(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors in a nesting of dicts, lists and tuples. The path joins keys and positions: state/0/exp_avg.

    Without an optimizer's param_groups: its numbers come from the options, the rate from the table. Raises TypeError
    for anything else that is no tensor, because it would be lost without a word.
    """
    if isinstance(state, torch.Tensor):
        return {path: state}
    if isinstance(state, dict):
        items = [(str(key), item) for key, item in state.items() if key != "param_groups"]
    elif isinstance(state, list | tuple):
        items = [(str(i), item) for i, item in enumerate(state)]
    elif state is None:
        return {}
    else:
        raise TypeError(
            f"{path} is {state!r}; a checkpoint holds tensors, so make it a tensor or compute it from the step"
        )
    found: dict[str, torch.Tensor] = {}
    for key, item in items:
        below = tensors_by_path(item, f"{path}/{key}" if path else key)
        if twice := found.keys() & below.keys():
            raise TypeError(f"two tensors of the state have the path {min(twice)}")
        found |= below
    return found


def num_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Over all devices, each value counted once."""
    return sum(kind_of(tensor).num_bytes for tensor in tensors.values())


@dataclass
class HostCopy:
    """A state as it was after `step`, in host memory: training may go on while it is written."""

    step: int
    values: dict[str, Any] = field(default_factory=dict)
    """What is no tensor, of JSON."""
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    """By path; empty on all processes but the first."""
    sharded: dict[str, Kind] = field(default_factory=dict)
    """The tensors that are sharded, the same on all processes."""
    shards: dict[str, dict[tuple[int, ...], torch.Tensor]] = field(default_factory=dict)
    """By path and offsets: the shards this process writes. Each shard is with one process."""
    wait_seconds: float = 0.0
    """How long the step loop waited: for the save before, and for this copy."""
    best: int | None = None
    """The step of the best checkpoint by then, which stays; None: only the newest do."""

    def shard_file(self) -> dict[str, torch.Tensor]:
        """The tensors in this process's file of shards."""
        return {
            shard_name(path, offsets): shard
            for path, shards in self.shards.items()
            for offsets, shard in shards.items()
        }

    def clear(self) -> None:
        """Give the memory back: the next copy would be a second one."""
        self.whole, self.shards = {}, {}


def copy_to_host(step: int, tensors: dict[str, torch.Tensor], values: dict[str, Any], first: bool = True) -> HostCopy:
    """Waits for the device. first: the process that writes what is not sharded."""
    copy = HostCopy(step, values)
    for path, tensor in tensors.items():
        shards = device.wrap_if_sharded(tensor).local_shards if device.is_sharded(tensor) else []
        if shards and shards[0].data.shape != tensor.shape:
            copy.sharded[path] = kind_of(tensor)
            own = (_unpadded(shard) for shard in shards if _is_mine(shard))
            copy.shards[path] = {offsets: values.contiguous() for offsets, values in own}
        elif first and shards:  # a mesh of one device
            copy.whole[path] = shards[0].data.contiguous()
        elif first:
            # a copy, also of what is on the host already: the next step may change it
            on_host = tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
            copy.whole[path] = on_host.contiguous()
    return copy


def _is_mine(shard) -> bool:
    """Whether this shard is written: it is replica 0 of equal ones, and more than padding."""
    return shard.replica_id == 0 and all(along.stop > along.start for along in shard.indices)


def _unpadded(shard) -> tuple[tuple[int, ...], torch.Tensor]:
    """(offsets, view of the values) of a shard. Only the last one along an axis has padding, behind its values."""
    values = shard.data[tuple(slice(0, along.stop - along.start) for along in shard.indices)]
    return tuple(along.start for along in shard.indices), values


def shards_by_path(copy: HostCopy, file: str) -> dict[str, list[dict[str, Any]]]:
    """What this process has written to its file, as it stands in the index."""
    return {
        path: [{"file": file, "offsets": list(o), "shape": list(shard.shape)} for o, shard in shards.items()]
        for path, shards in copy.shards.items()
    }


def merged_entries(copy: HostCopy, written: list[dict[str, list[dict[str, Any]]]]) -> dict[str, Entry]:
    """The index of a checkpoint. written: shards_by_path of all processes."""
    entries = {path: Entry(kind_of(tensor)) for path, tensor in copy.whole.items()}
    for path, kind in copy.sharded.items():
        shards = [shard for by_path in written for shard in by_path.get(path, [])]
        found = {tuple(shard["offsets"]): (shard["file"], tuple(shard["shape"])) for shard in shards}
        entries[path] = Entry(kind, found)
    return entries


# --------------------------------------------------------------------------------------------------------- back again


def put_sharded(target: torch.Tensor, read_into: Callable[[torch.Tensor, tuple[int, ...]], None]) -> None:
    """Fill a tensor that is sharded over devices. read_into(piece, offsets) fills a piece of it on the host."""
    wrapped = device.wrap_if_sharded(target)
    shards = wrapped.local_shards
    read: dict[tuple[int, ...], torch.Tensor] = {}  # devices that hold equal shards read them once
    for offsets, piece in map(_unpadded, shards):
        if offsets in read:
            piece.copy_(read[offsets])
        elif piece.numel():
            read_into(piece, offsets)
            read[offsets] = piece
    wrapped.load_local_shards_(shards)


@dataclass
class Beginning:
    """Where a run begins: after the last step of a checkpoint, or at its start."""

    num_steps_before: int
    """How many steps the run was to have when it was saved."""
    step: int = 0
    """Steps done."""
    run_id: str = ""
    evaluation: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    """The best evaluation so far, of a run that keeps it."""
    is_finished: bool = False
    restore: Callable[[dict[str, Any]], None] | None = None
    """Fills the tensors of these parts from the checkpoint; None: there is none to go on from."""


class Tracked:
    """What checkpoints hold of a run, by name: what has a state_dict() of tensors, a tensor, a nesting of tensors; and
    the state of random numbers."""

    def __init__(self, parts: dict[str, Any]):
        self.parts, self.metrics = parts, parts.get("metrics")
        """The DeviceMetrics among the parts, None without one."""

    def fill(self, restore: Callable[[dict[str, Any]], None]) -> None:
        """Fill every part in place by restore(parts). The generators are set later, by set_random_state()."""
        self._random = device.random_state()
        restore({name: _tensors_of(part) for name, part in self.parts.items()} | {"random": self._random})

    def set_random_state(self) -> None:
        """As fill() has read it."""
        device.set_random_state(self._random)

    def state(self) -> dict[str, Any]:
        """What a checkpoint of now holds."""
        states = {name: getattr(part, "state_dict", lambda part=part: part)() for name, part in self.parts.items()}
        return states | {"random": device.random_state()}

    def tensors(self) -> list[torch.Tensor]:
        """All that are saved, themselves."""
        return [one for part in self.parts.values() for one in tensors_by_path(_tensors_of(part)).values()]

    def make_inputs(self) -> None:
        """What steps write to comes in as it goes out, or step 2 would be another graph.

        Scalar tensors (), such as BatchNorm's num_batches_tracked, are sent: of a host scalar of 0 or 1 torch_xla makes
        a constant (torch_xla/csrc/tensor.cpp, GetIrValueForTensor), a pending operation and a graph before step 1. On a
        mesh what has no sharding is replicated: for an output without one XLA chooses it.
        """
        count = device.device_count() if device.is_spmd() else 0
        mesh = device.Mesh(range(count), (count,), ("all",)) if count else None
        modules = [part for part in self.parts.values() if isinstance(part, torch.nn.Module)]
        buffers = [one for module in modules for one in module.buffers()]  # also those that are not saved
        for tensor in {id(one): one for one in (*self.tensors(), *buffers)}.values():
            is_there = tensor.device.type == device.DEVICE_TYPE
            if is_there and tensor.dim() == 0:
                tensor.data = device.send(tensor.detach().cpu(), tensor.device)[0]
            if is_there and mesh and not device.sharding_spec(tensor):
                device.mark_sharding(tensor, mesh, (None,) * tensor.dim())


def _tensors_of(part: Any) -> Any:
    """The tensors themselves, to be filled in place: a module's state_dict would hold detached ones."""
    if isinstance(part, torch.nn.Module):
        return part.state_dict(keep_vars=True)
    return part.state_dict() if hasattr(part, "state_dict") else part
