"""Files of weights that no run has in memory: written one tensor after another."""

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tpu_utils.checkpoint.state import INDEX_FILE, NAMES, WHOLE_FILE, Entry, Kind, kind_of, write_index, write_marker


def stream_tensors(
    path: Path,
    kinds: dict[str, Kind],
    tensors: Iterator[tuple[str, torch.Tensor]],
    metadata: dict[str, str] | None = None,
) -> dict[str, int]:
    """As write_tensors, one tensor after another: takes as many (name, tensor) as kinds has, in its order. Raises
    ValueError for a tensor that is not the next one, OSError."""
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
        for wanted in kinds.items():  # zip would hold a tensor while the next one is made
            name, tensor = next(tensors, ("", torch.empty(0)))
            if (name, kind_of(tensor)) != wanted:
                raise ValueError(f"{name} is {kind_of(tensor)}, expected {wanted[0]} as {wanted[1]}")
            values = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            file.write(values)
            size, checksum = size + len(values), zlib.crc32(values, checksum)
            del tensor, values
        file.flush()
        os.fsync(file.fileno())
    if size != len(front) + end:
        raise ValueError(f"{path.name} has {size} bytes, expected {len(front) + end}")
    return {"bytes": size, "crc32": checksum}


def write_checkpoint(
    folder: Path,
    step: int,
    run_id: str,
    values: dict[str, Any],
    kinds: dict[str, Kind],
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """A checkpoint of weights that no run has in memory: (path, tensor) one after another, in the order of kinds.
    folder: a new one. The marker comes last. Raises OSError."""
    folder.mkdir(parents=True)
    sums = {WHOLE_FILE: stream_tensors(folder / WHOLE_FILE, kinds, tensors)}
    sums[INDEX_FILE] = write_index(folder, step, values, {path: Entry(kind) for path, kind in kinds.items()})
    write_marker(folder, step, run_id, sums)
