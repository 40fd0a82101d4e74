"""What a checkpoint holds: tensors of a training state by path, in host memory and in files of safetensors.
An index in JSON says what is where. What is sharded over devices: sharded_tensors.py."""

import json
import math
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tpu_utils import device
from tpu_utils.base.errors import InputError
from tpu_utils.base.writing import checksum_of, write_atomically

DTYPES = {"BOOL": torch.bool, "BF16": torch.bfloat16}
DTYPES |= {f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)}
DTYPES |= {f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)}
DTYPES |= {f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WHOLE_FILE, INDEX_FILE = "state.safetensors", "state.json"
FORMAT = 2
"""Format of files in a step's folder. Format 1 was a pickle, which torch 2.9 does not read safely (CVE-2026-24747)."""
LONGEST_HEADER = 16 * 2**20  # bytes of a file's header, or of an index


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


class StepFolders:
    """The checkpoints in a folder, by step."""

    folder: Path

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return sorted(step for step, path in step_folders(self.folder) if (path / "done").exists())


def kind_of(tensor: torch.Tensor) -> Kind:
    return Kind(tuple(tensor.shape), tensor.dtype)


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


def write_index(folder: Path, step: int, values: dict[str, Any], entries: dict[str, Entry]) -> dict[str, int]:
    """state.json of a checkpoint. Its size and CRC-32. Raises OSError, also for one that nobody would read back."""
    index = {"format": FORMAT, "step": step, "values": values, "tensors": index_as_json(entries)}
    content = json.dumps(index).encode()
    if len(content) > LONGEST_HEADER:
        raise OSError(f"its index has {len(content):,} bytes, expected {LONGEST_HEADER:,} at most")
    write_atomically(folder / INDEX_FILE, content)
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def write_marker(folder: Path, step: int, run_id: str, files: dict[str, dict[str, int]]) -> None:
    """The done marker: from here on it is a checkpoint. files: size and CRC-32 of each."""
    marker = {"format": FORMAT, "run": run_id, "step": step, "files": files}
    write_atomically(folder / "done", json.dumps(marker).encode())


def tensors_by_path(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors in a nesting of dicts, lists and tuples. The path joins keys and positions: state/0/exp_avg. Without
    an optimizer's param_groups: its numbers come from the options, the rate from the table. Raises TypeError for
    anything else that is no tensor, because it would be lost without a word."""
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


@dataclass
class HostCopy:
    """A state as it was after `step`, in host memory: training may go on while it is written."""

    step: int
    values: dict[str, Any] = field(default_factory=dict)  # what is no tensor, of JSON
    whole: dict[str, torch.Tensor] = field(default_factory=dict)  # by path; empty on all processes but the first
    sharded: dict[str, Kind] = field(default_factory=dict)  # the tensors that are sharded, the same on all processes
    shards: dict[str, dict[tuple[int, ...], torch.Tensor]] = field(default_factory=dict)
    """By path and offsets: the shards this process writes. Each shard is with one process."""
    wait_seconds: float = 0.0  # how long the step loop waited: for the save before, and for this copy
    best: int | None = None  # the step of the best checkpoint by then, which stays; None: only the newest do

    def clear(self) -> None:
        """Give the memory back: the next copy would be a second one."""
        self.whole, self.shards = {}, {}


@dataclass
class Beginning:
    """Where a run begins: after the last step of a checkpoint, or at its start."""

    num_steps_before: int  # how many steps the run was to have when it was saved
    step: int = 0  # steps done
    run_id: str = ""
    evaluation: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None  # the best evaluation so far, of a run that keeps it
    is_finished: bool = False
    restore: Callable[[dict[str, Any]], None] | None = None
    """Fills the tensors of these parts from the checkpoint; None: there is none to go on from."""


class Tracked:
    """What checkpoints hold, by name: what has a state_dict(), a tensor, a nesting of these; and random numbers."""

    def __init__(self, parts: dict[str, Any]):
        self.parts, self.metrics = parts, parts.get("metrics")  # the DeviceMetrics among the parts, None without one
        for path, tensor in tensors_by_path({name: _tensors_of(part) for name, part in parts.items()}).items():
            if tensor.dtype not in NAMES:
                raise InputError(
                    f"{path} is {tensor.dtype}, which a checkpoint cannot hold; expected another type, such as "
                    "torch.view_as_real of it, or a buffer with persistent=False, which is not saved"
                )

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
