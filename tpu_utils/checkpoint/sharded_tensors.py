"""Tensors that are sharded over devices, in checkpoints: imported where there are some.

None has to be whole on any host: each process copies the shards on its own devices, and gets the shards that its
devices need, whatever mesh they were written from.
"""

import itertools
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpu_utils import device
from tpu_utils.checkpoint.state import Entry, HostCopy, write_tensors

if TYPE_CHECKING:
    from tpu_utils.remote.storage import Mirror

SHARED_FOLDER = "a run whose state is sharded over several hosts needs a --run_dir that all of them share, or gs://"


def shard_file(index: int) -> str:
    """The file with the shards of a process."""
    return f"shards_{index:05d}.safetensors"


def shard_name(path: str, offsets: Iterable[int]) -> str:
    """The name of a shard in its file."""
    return f"{path}@{','.join(map(str, offsets))}"


def own_shards(shards: list) -> dict[tuple[int, ...], torch.Tensor]:
    """Those of a tensor that this process writes, by offsets."""
    own = (unpadded(shard) for shard in shards if _is_mine(shard))
    return {offsets: values.contiguous() for offsets, values in own}


def _is_mine(shard) -> bool:
    """Whether this shard is written: it is replica 0 of equal ones, and more than padding."""
    return shard.replica_id == 0 and all(along.stop > along.start for along in shard.indices)


def unpadded(shard) -> tuple[tuple[int, ...], torch.Tensor]:
    """(offsets, view of the values) of a shard. Only the last one along an axis has padding, behind its values."""
    values = shard.data[tuple(slice(0, along.stop - along.start) for along in shard.indices)]
    return tuple(along.start for along in shard.indices), values


def write_shards(copy: HostCopy, aside: Path, target: Path, index: int, mirror: "Mirror | None") -> dict[str, Any]:
    """Write this process's shards. Returns file, checksums and index, or the problem: the others wait for it. aside,
    target: the checkpoint's folder while it is written, and after. index: of this process."""
    name, apart = shard_file(index), mirror and index > 0
    folder = target if apart else aside  # in the bucket the marker alone says what is complete
    tensors, index_of_own = {}, {}
    try:
        for path, shards in copy.shards.items():
            tensors |= {shard_name(path, offsets): shard for offsets, shard in shards.items()}
            index_of_own[path] = [{"file": name, "offsets": list(o), "shape": list(s.shape)} for o, s in shards.items()]
        if apart:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            return {"problem": f"process {index} sees no {folder}; {SHARED_FOLDER}"}
        sums = write_tensors(folder / name, tensors)
        if apart:
            mirror.put(folder / name)
    except Exception as error:  # whatever it is: the others wait to hear
        return {"problem": f"process {index}: {error or type(error).__name__}"}
    finally:
        if apart:
            shutil.rmtree(folder, ignore_errors=True)
    return {"name": name, "sums": sums, "shards": index_of_own}


def sharded_entries(copy: HostCopy, aside: Path, written: list[dict], elsewhere: dict[str, int]) -> dict[str, Entry]:
    """The index of what is sharded. written: what write_shards() gave, of all processes. elsewhere: names of files that
    need not be in the folder. Raises OSError for a file that is not all there, ValueError for shards that are not."""
    for name, expected in ((one["name"], one["sums"]) for one in written):
        size = (aside / name).stat().st_size if (aside / name).exists() else "absent"
        if size != expected["bytes"] and name not in elsewhere:
            raise OSError(f"{name} is {size} here, its process wrote {expected['bytes']} bytes; {SHARED_FOLDER}")
    entries = {}
    for path, kind in copy.sharded.items():
        shards = [shard for one in written for shard in one["shards"].get(path, [])]
        found = {tuple(shard["offsets"]): (shard["file"], tuple(shard["shape"])) for shard in shards}
        entries[path] = Entry(kind, found)
        check_complete(path, entries[path])
    return entries


def put_sharded(target: torch.Tensor, read_into: Callable[[torch.Tensor, tuple[int, ...]], None]) -> None:
    """Fill a tensor that is sharded over devices. read_into(piece, offsets) fills a piece of it on the host."""
    wrapped = device.wrap_if_sharded(target)
    shards = wrapped.local_shards
    read: dict[tuple[int, ...], torch.Tensor] = {}  # devices that hold equal shards read them once
    for offsets, piece in map(unpadded, shards):
        if offsets in read:
            piece.copy_(read[offsets])
        elif piece.numel():
            read_into(piece, offsets)
            read[offsets] = piece
    wrapped.load_local_shards_(shards)


def check_complete(path: str, entry: Entry) -> None:
    """Raises ValueError unless the shards make up the whole tensor, each value once: they have to form a grid."""
    whole = entry.kind.shape
    edges = [sorted({offsets[axis] for offsets in entry.shards}) for axis in range(len(whole))]
    ends = [dict(itertools.pairwise([*begins, size])) for begins, size in zip(edges, whole, strict=True)]
    expected = {
        begins: tuple(end[begin] - begin for end, begin in zip(ends, begins, strict=True))
        for begins in itertools.islice(itertools.product(*edges), len(entry.shards) + 1)
    }
    found = {offsets: shape for offsets, (_, shape) in entry.shards.items()}
    if found != expected or any(starts[0] != 0 for starts in edges) or min(map(min, found.values()), default=1) < 1:
        held = sum(math.prod(shape) for shape in found.values())
        raise ValueError(f"the shards of {path} hold {held} values, expected {math.prod(whole)}, each of them once")
