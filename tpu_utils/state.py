"""A training state on its way to files and back: copied to the host, written, checked, read. Nothing of it is executed.

A tensor that is sharded over the devices of a mesh never has to be whole on any host: each process copies and writes
the shards on its own devices, with torch.distributed.checkpoint (DCP) and torch_xla's planners, and reads the shards
that its devices need, whatever mesh they were written from. Everything else is one file of torch.save, where a tensor
on the meta device (shape and type, no values) stands for each that is sharded.
"""

import contextlib
import io
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.distributed.spmd as xs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner
from torch_xla.experimental.distributed_checkpoint._helpers import _CpuShards  # the planner takes no other host copy

from tpu_utils.errors import CheckpointError
from tpu_utils.peers import Peers

# of DCP and torch_xla about their own insides, and a save would print them in the middle of the run
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch_xla\.distributed\.spmd")


def map_tensors(value: Any, function: Callable[[str, torch.Tensor], Any], path: str = "") -> Any:
    """The same nesting of dicts, lists and tuples with function(path, tensor) for each tensor.

    The path joins keys and positions: optimizer/state/0/exp_avg.
    """
    if isinstance(value, torch.Tensor):
        return function(path, value)
    below = f"{path}/" if path else ""
    if isinstance(value, dict):
        return {key: map_tensors(item, function, f"{below}{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function, f"{below}{i}") for i, item in enumerate(value))
    return value


def tensors_by_path(state: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    map_tensors(state, found.__setitem__)
    return found


def to_host(value: Any) -> Any:
    """The same nesting of dicts, lists and tuples with every tensor whole on the CPU: what torch.save may write."""
    return map_tensors(value, lambda _, tensor: tensor.detach().cpu())


def num_bytes(state: Any) -> int:
    """Bytes of all tensors, over all devices, each counted once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_by_path(state).values())


# ------------------------------------------------------------------------------------------------------ to the host


class _HostShard(xs.XLAShard):
    """A shard on the host without padding."""

    @property
    def unpadded_data(self) -> torch.Tensor:
        return self.data


@dataclass
class HostCopy:
    """A state as it was after `step`, in host memory: training may go on while it is written."""

    step: int
    whole: dict[str, Any]
    """The state, a meta tensor for each that is sharded; empty on all processes but the first."""
    sharded: dict[str, _CpuShards]
    """By path: the shards this process writes. All processes have the same paths; each shard is with one of them."""
    wait_seconds: float = 0.0
    """How long the step loop waited: for the save before, and for this copy."""


def copy_to_host(step: int, state: dict[str, Any], first: bool = True) -> HostCopy:
    """Waits for the device. first: the process that writes what is not sharded."""
    sharded: dict[str, _CpuShards] = {}

    def copy(path: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if not is_sharded(tensor):
            if not first:
                return None
            # a copy, also of what is on the host already: the next step may change it
            return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
        shards = xs.wrap_if_sharded(tensor).local_shards
        if shards[0].data.shape == tensor.shape:  # a mesh of one device
            return shards[0].data
        sharded[path] = _CpuShards([_on_host(s) for s in shards if _is_mine(s)], tensor.shape)
        return torch.empty_like(tensor, device="meta")

    whole = map_tensors(state, copy)
    return HostCopy(step, whole if first else {}, sharded)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether its devices hold different parts of it."""
    sharded = xs.wrap_if_sharded(tensor)
    kinds = (xs.ShardingType.TILED, xs.ShardingType.PARTIAL)  # not REPLICATED: one whole copy each
    return isinstance(sharded, xs.XLAShardedTensor) and sharded.sharding_type in kinds


def _is_mine(shard: xs.XLAShard) -> bool:
    """Of equal shards the first is written (SPMDSavePlanner would drop them all), and none that is padding alone."""
    return shard.replica_id == 0 and all(part.stop > part.start for part in shard.indices)


def _on_host(shard: xs.XLAShard) -> _HostShard:
    data = shard.data[tuple(slice(0, part.stop - part.start) for part in shard.indices)]
    return _HostShard(data.contiguous(), shard.indices, shard.shard_device, shard.replica_id)


# --------------------------------------------------------------------------------------------------------- to files


class HashedFile(io.RawIOBase):
    """What is written to `file`, and the size and CRC-32 of it: known without reading it again."""

    def __init__(self, file: BinaryIO):
        self._file, self.size, self.crc32 = file, 0, 0

    def write(self, data) -> int:
        written = self._file.write(data)
        self.size, self.crc32 = self.size + written, zlib.crc32(data, self.crc32)
        return written

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Leaves the file to whom it belongs."""

    @property
    def checksum(self) -> dict[str, int]:
        return {"bytes": self.size, "crc32": self.crc32}


def write_whole(path: Path, state: dict[str, Any]) -> dict[str, int]:
    """torch.save, on disk when it returns. Size and CRC-32 of the file."""
    with path.open("wb") as file:
        hashed = HashedFile(file)
        torch.save(state, hashed)
        file.flush()
        os.fsync(file.fileno())
    return hashed.checksum


class _HashedFiles(FileSystem):
    """DCP's access to files; remembers the checksums of those it wrote, by their final name."""

    def __init__(self):
        self.checksums: dict[str, dict[str, int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as file:
            hashed = HashedFile(file)
            yield hashed
        self.checksums[Path(path).name.removesuffix(".tmp")] = hashed.checksum


class _Writer(dcp.FileSystemWriter):
    def __init__(self, folder: Path, shapes: dict[str, torch.Size]):
        super().__init__(folder)
        self.fs, self._shapes = _HashedFiles(), shapes

    def finish(self, metadata: Metadata, results) -> None:
        for path, shape in self._shapes.items():
            check_complete(path, shape, metadata)
        super().finish(metadata, results)


def check_complete(path: str, shape: torch.Size, metadata: Metadata) -> None:
    """Raises RuntimeError unless the shards make up the whole tensor: DCP would read the rest as whatever was there."""
    tensor = metadata.state_dict_metadata.get(path)
    found = sum(chunk.sizes.numel() for chunk in tensor.chunks) if tensor else 0
    if found != shape.numel():
        raise RuntimeError(f"the shards of {path} hold {found} values, expected {shape.numel()}")


def write_sharded(folder: Path, sharded: dict[str, _CpuShards], peers: Peers) -> dict[str, dict[str, int]]:
    """Each process writes its shards; all return size and CRC-32 of every file. Raises RuntimeError on all alike."""
    writer = _Writer(folder, {path: shards.global_shape for path, shards in sharded.items()})
    try:
        alone = peers.count == 1
        planner, group = SPMDSavePlanner(), None if alone else peers.group
        dcp.save(sharded, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    except CheckpointException as error:  # a BaseException: no handler for Exception would see it
        raise RuntimeError(_reasons(error)) from error
    return {name: found for files in peers.gather(writer.fs.checksums) for name, found in files.items()}


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"process {i}: {failure[0]}" for i, failure in sorted(error.failures.items()))


# ------------------------------------------------------------------------------------------------------- from files


def read_whole(path: Path) -> dict[str, Any]:
    """What write_whole wrote, on the CPU. Raises CheckpointError for anything but tensors and plain values."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no pickle can make the unpickler raise anything
        raise _foreign(path) from error


class _MetadataUnpickler(pickle.Unpickler):
    """DCP keeps its index as a pickle and reads it with pickle.load, which runs whatever it says. This one makes the
    classes of an index of tensors and nothing else; pickled objects (BytesStorageMetadata) are not among them."""

    _ALLOWED = {  # noqa: RUF012
        "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata TensorProperties _MEM_FORMAT_ENCODING "
        "ChunkStorageMetadata MetadataIndex StorageMeta",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.serialization": "_get_layout",
        "torch": "Size",
        "pathlib": "PosixPath",
    }

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in self._ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in the index of a checkpoint")


class _Reader(dcp.FileSystemReader):
    """files: those of the checkpoint, by name. Raises CheckpointError for an index that is not one of write_sharded."""

    def __init__(self, folder: Path, files: list[str]):
        super().__init__(folder)
        self._files = files

    def read_metadata(self, *args, **kwargs) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            for name, tensor in metadata.state_dict_metadata.items():
                check_complete(name, tensor.size, metadata)
            for info in metadata.storage_data.values():
                if info.relative_path not in self._files or info.transform_descriptors:
                    raise ValueError(f"it refers to {info.relative_path!r} {info.transform_descriptors or ''}")
        except Exception as error:  # an altered pickle fails in any way there is; nothing in it has run
            raise _foreign(path) from error
        return metadata


def read_sharded(folder: Path, files: list[str], targets: dict[str, torch.Tensor]) -> None:
    """Fill tensors with what write_sharded wrote under these paths: whole ones on the CPU, or sharded over any devices.

    Of a tensor that is sharded, only the shards of this process's devices are read. Raises CheckpointError.
    """
    reader = _Reader(folder, files)
    index = reader.read_metadata().state_dict_metadata
    for path, target in targets.items():
        found = (index[path].size, index[path].properties.dtype) if path in index else "absent"
        if found != (target.shape, target.dtype):
            raise CheckpointError(f"{path} in {folder} is {found}, expected {(target.shape, target.dtype)}")
    try:
        dcp.load(dict(targets), storage_reader=reader, planner=SPMDLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read: {_reasons(error)}; start anew in another --run_dir") from error


def put(target: torch.Tensor, value: torch.Tensor) -> None:
    """copy_ from the host to where the target is, sharded or not.

    Into a tensor with a sharding copy_ is an operation: a graph of its own before step 1. So the sharding is taken off
    and put on again, by the private calls under xs.clear_sharding and xs.mark_sharding, which would want the mesh.
    """
    sharding = torch_xla._XLAC._get_xla_op_sharding(target) if target.device.type == "xla" else None
    if sharding is not None:
        torch_xla._XLAC._xla_clear_sharding(target)
    with torch.no_grad():
        target.copy_(value)
    if sharding is not None:
        torch_xla._XLAC._xla_mark_sharding(target, sharding)


def _foreign(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a checkpoint of these scripts: it holds more than tensors and plain values, and nothing of "
        "it was run; remove it, or choose another --run_dir"
    )
