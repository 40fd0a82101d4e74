"""The tensors of a checkpoint in files: safetensors, with an index in JSON that says what is where.

Files are data. Before a tensor is read, the header of every file has to fit its size exactly, and the index has to fit
the headers exactly: no tensor twice, missing, unknown, or in shards that do not make up the whole. So no tensor can ask
for more memory than its file has bytes.
"""

import contextlib
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tpu_utils.files import checksum_of
from tpu_utils.inputs import file_size, open_regular, parse_json

DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32},
    **{"I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WHOLE_FILE = "state.safetensors"
LONGEST_HEADER = 16 * 2**20
"""Bytes of a file's header, or of an index."""


@dataclass(frozen=True)
class Kind:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Entry:
    """What the index says of one tensor."""

    kind: Kind
    shards: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Offsets of each shard: (file, shape). Empty for a tensor that is whole in state.safetensors."""


def kind_of(tensor: torch.Tensor) -> Kind:
    return Kind(tuple(tensor.shape), tensor.dtype)


def shard_name(path: str, offsets: Iterable[int]) -> str:
    """The name of a shard in its file."""
    return f"{path}@{','.join(map(str, offsets))}"


# --------------------------------------------------------------------------------------------------------- writing


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """A file of safetensors, on disk when it returns. Its size and CRC-32. Raises OSError."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(str(error)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library gives it to its owner alone
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return checksum_of(file)


def stream_tensors(
    path: Path,
    kinds: dict[str, Kind],
    tensors: Iterator[tuple[str, torch.Tensor]],
    metadata: dict[str, str] | None = None,
) -> dict[str, int]:
    """As write_tensors, one tensor after another: takes as many (name, tensor) as kinds has, in its order.

    Raises ValueError for a tensor that is not the next one, OSError.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, kind in kinds.items():
        begin, end = end, end + kind.num_bytes
        header[name] = {"dtype": NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)  # values begin at a multiple of their size
    front = len(content).to_bytes(8, "little") + content
    size, checksum = len(front), zlib.crc32(front)
    with path.open("xb") as file:
        file.write(front)
        for wanted, (name, tensor) in zip(kinds.items(), tensors, strict=False):
            if (name, kind_of(tensor)) != wanted:
                raise ValueError(f"{name} is {kind_of(tensor)}, expected {wanted[0]} as {wanted[1]}")
            values = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            file.write(values)
            size, checksum = size + len(values), zlib.crc32(values, checksum)
        file.flush()
        os.fsync(file.fileno())
    if size != len(front) + end:
        raise ValueError(f"{path.name} has {size} bytes, expected {len(front) + end}")
    return {"bytes": size, "crc32": checksum}


def index_as_json(entries: dict[str, Entry]) -> dict[str, Any]:
    index = {}
    for path, entry in entries.items():
        index[path] = {"dtype": NAMES[entry.kind.dtype], "shape": list(entry.kind.shape)}
        if entry.shards:
            shards = [{"file": f, "offsets": list(o), "shape": list(s)} for o, (f, s) in entry.shards.items()]
            index[path]["shards"] = shards
    return index


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


# --------------------------------------------------------------------------------------------------------- reading


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
    """What a file of safetensors holds. Raises ValueError unless its parts fill the file, in no other way than one."""
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
        for shard in said["shards"]:
            if (
                type(shard) is not dict
                or shard.keys() != {"file", "offsets", "shape"}
                or type(shard["file"]) is not str
            ):
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
        places = [place for place in found.keys() | expected.keys() if found.get(place) != expected.get(place)]
        file, name = min(places)
        have, want = (str(kinds.get((file, name), "absent")) for kinds in (found, expected))
        raise ValueError(f"{name[:100]} in {file[:100]} is {have}, the index says {want}")


class TensorFiles:
    """Reads the tensors of a folder whose index fits its files. Each file is mapped when it is first needed."""

    def __init__(self, folder: Path, entries: dict[str, Entry], fetch: Callable[[str], None] | None = None):
        """fetch: brings a file of this name into the folder, before it is mapped."""
        self._folder, self._entries, self._fetch, self._opened = folder, entries, fetch, {}

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
        tensor = self._opened[file].get_tensor(name)  # of mapped memory: what is not touched is not read
        return tensor[tuple(slice(begin, begin + n) for begin, n in zip(offsets, shape, strict=True))]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch shares a copy of even 0.4 MB among its threads. Where XLA's threads have the cores, each copy waits for its
    turn: 10 ms for one of 0.1."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
