"""The tensors of a checkpoint, read from its files. Files are data.

Before a tensor is read, the header of every file has to fit its size exactly, and the index has to fit the headers
exactly: no tensor twice, missing, unknown, or in shards that do not make up the whole. So no tensor can ask for more
memory than its file has bytes.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tpu_utils.base.files import file_size, open_regular, parse_json
from tpu_utils.checkpoint.sharded_tensors import check_complete, shard_name
from tpu_utils.checkpoint.state import DTYPES, LONGEST_HEADER, WHOLE_FILE, Entry, Kind


def _numbers(value: Any) -> tuple[int, ...]:
    """A shape or offsets. Raises ValueError."""
    if type(value) is not list or len(value) > 16 or not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise ValueError(f"{str(value)[:100]} is no shape")
    return tuple(value)


def _kind(value: Any, keys: set[str]) -> Kind:
    if type(value) is not dict or value.keys() != keys:
        raise ValueError(f"an entry has {str(value)[:100]}, expected {sorted(keys)}")
    if type(value["dtype"]) is not str or value["dtype"] not in DTYPES:
        raise ValueError(f"{str(value['dtype'])[:100]} is no type of tensors")
    return Kind(_numbers(value["shape"]), DTYPES[value["dtype"]])


def read_header(path: Path) -> dict[str, Kind]:
    """The tensors of a file of safetensors. Raises ValueError unless they fill it exactly, without gap or overlap."""
    with open_regular(path, "tensors", follow=False) as file:
        size = file_size(file)
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise ValueError(f"{path.name} has {size} bytes and announces a header of {length}")
        header = parse_json(file.read(length))
    if type(header) is not dict:
        raise ValueError(f"the header of {path.name} is a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    kinds, spans = {}, []
    for name, entry in header.items():
        kinds[name] = kind = _kind(entry, {"dtype", "shape", "data_offsets"})
        spans.append(begin_end := _numbers(entry["data_offsets"]))
        if len(begin_end) != 2 or begin_end[1] - begin_end[0] != kind.num_bytes:
            raise ValueError(f"{name[:100]} in {path.name} is {kind} and lies at {list(begin_end)}")
    ends = [0, *(end for _, end in sorted(spans))]
    if [begin for begin, _ in sorted(spans)] != ends[:-1] or ends[-1] != size - 8 - length:
        raise ValueError(f"the tensors in {path.name} do not fill it")
    try:
        with safe_open(path, framework="pt"):  # the library has to agree, now and not at the first read
            return kinds
    except SafetensorError as error:
        raise ValueError(f"{path.name} cannot be opened: {error}") from error


def parse_index(index: Any) -> dict[str, Entry]:
    """What index_as_json made. Raises ValueError for anything else."""
    if type(index) is not dict:
        raise ValueError(f"the index is a {type(index).__name__}, expected an object")
    entries: dict[str, Entry] = {}
    for path, said in index.items():
        sharded = type(said) is dict and "shards" in said
        entries[path] = entry = Entry(_kind(said, {"dtype", "shape", "shards"} if sharded else {"dtype", "shape"}))
        if not sharded:
            continue
        if type(said["shards"]) is not list or not said["shards"]:
            raise ValueError(f"{path[:100]} has no list of shards")
        form = {"file": str, "offsets": list, "shape": list}
        for shard in said["shards"]:
            if type(shard) is not dict or {name: type(value) for name, value in shard.items()} != form:
                raise ValueError(f"a shard of {path[:100]} is {str(shard)[:100]}")
            offsets, shape = _numbers(shard["offsets"]), _numbers(shard["shape"])
            if len(offsets) != len(entry.kind.shape) or len(shape) != len(offsets) or offsets in entry.shards:
                raise ValueError(f"a shard of {path[:100]} at {list(offsets)} has {list(shape)} or stands there twice")
            entry.shards[offsets] = shard["file"], shape
        check_complete(path, entry)
    return entries


def check_files(folder: Path, entries: dict[str, Entry], files: Iterable[str]) -> None:
    """Raises ValueError, OSError unless these files hold exactly what the index says."""
    expected: dict[tuple[str, str], Kind] = {}  # (file, name in it)
    for path, entry in entries.items():
        if not entry.shards:
            expected[WHOLE_FILE, path] = entry.kind
        for offsets, (file, shape) in entry.shards.items():
            expected[file, shard_name(path, offsets)] = Kind(shape, entry.kind.dtype)
    found = {
        (file, name): kind
        for file in files
        if file.endswith(".safetensors")
        for name, kind in read_header(folder / file).items()
    }
    if found != expected:
        differing = [key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)]
        file, name = min(differing)
        have, want = (str(kinds.get((file, name), "absent")) for kinds in (found, expected))
        raise ValueError(f"{name[:100]} in {file[:100]} is {have}, the index says {want}")


class TensorFiles:
    """Reads the tensors of a folder whose index fits its files. Each file is mapped when it is first needed."""

    def __init__(self, folder: Path, entries: dict[str, Entry], fetch: Callable[[str], None] | None = None):
        """fetch: brings a file of this name into the folder, before it is mapped."""
        self._folder = folder
        self._entries = entries
        self._fetch = fetch
        self._opened = {}

    def read(self, path: str) -> torch.Tensor:
        """A whole tensor on the CPU, in memory of its own."""
        kind = self._entries[path].kind
        tensor = torch.empty(kind.shape, dtype=kind.dtype)
        self.read_into(tensor, path, (0,) * len(kind.shape))
        return tensor

    def read_into(self, target: torch.Tensor, path: str, offsets: tuple[int, ...]) -> None:
        """Fill target, on the CPU, with the part of a tensor that begins at these offsets and has target's shape."""
        entry = self._entries[path]
        if not entry.shards:
            target.copy_(self._slice(WHOLE_FILE, path, offsets, target.shape))
            return
        for begins, (file, sizes) in entry.shards.items():
            low = [max(a, b) for a, b in zip(begins, offsets, strict=True)]
            high = [min(a + m, b + n) for a, m, b, n in zip(begins, sizes, offsets, target.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                extent = [b - a for a, b in zip(low, high, strict=True)]
                within = [a - b for a, b in zip(low, begins, strict=True)]
                into = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, offsets, extent, strict=True))
                target[into].copy_(self._slice(file, shard_name(path, begins), within, extent))

    def _slice(self, file: str, name: str, offsets, shape) -> torch.Tensor:
        if file not in self._opened:
            if self._fetch:
                self._fetch(file)
            self._opened[file] = safe_open(self._folder / file, framework="pt")
        tensor = self._opened[file].get_tensor(name)  # mapped memory: what is not touched is not read
        return tensor[tuple(slice(begin, begin + n) for begin, n in zip(offsets, shape, strict=True))]
