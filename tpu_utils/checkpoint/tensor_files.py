"""The tensors of a checkpoint in files: safetensors, with an index in JSON that says what is where. Written here."""

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tpu_utils.base.files import checksum_of

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WHOLE_FILE, INDEX_FILE = "state.safetensors", "state.json"
FORMAT = 2
"""Format of files in a step's folder. Format 1 was a pickle, which torch 2.9 does not read safely (CVE-2026-24747)."""
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


def step_of_folder(path: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for a link, or any other name."""
    found = re.fullmatch(r"step_([0-9]{8})", path.name)
    return int(found[1]) if found and path.is_dir() and not path.is_symlink() else None


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each checkpoint. Links and other names are not ours: they are neither read nor removed."""
    found = folder.iterdir() if folder.is_dir() else []
    return [(step, path) for path in found if (step := step_of_folder(path)) is not None]


def steps_in(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, oldest first."""
    return sorted(step for step, path in step_folders(folder) if (path / "done").exists())


def kind_of(tensor: torch.Tensor) -> Kind:
    return Kind(tuple(tensor.shape), tensor.dtype)


def shard_file(index: int) -> str:
    """The file with the shards of a process."""
    return f"shards_{index:05d}.safetensors"


def shard_name(path: str, offsets: Iterable[int]) -> str:
    """The name of a shard in its file."""
    return f"{path}@{','.join(map(str, offsets))}"


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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch copies with one thread. By default it divides even a copy of 0.4 MB among its threads, which wait
    for cores that XLA's threads hold: 10 ms for a copy of 0.1 ms."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
