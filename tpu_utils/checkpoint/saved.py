"""A checkpoint in its folder: every byte is checked, then its tensors are read on demand."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpu_utils.base.errors import CheckpointError, DamagedCheckpoint, InputError
from tpu_utils.base.files import file_size, open_regular, parse_json, read_regular
from tpu_utils.base.writing import checksum_of
from tpu_utils.checkpoint.state import FORMAT, INDEX_FILE, LONGEST_HEADER, WHOLE_FILE, Entry, Kind, step_of_folder
from tpu_utils.checkpoint.tensor_reading import TensorFiles, check_files, parse_index

BEST_IS_LARGEST = {"accuracy": True, "validation_loss": False}
"""Evaluations are compared by the first of these fields that they have; True: the largest value is the best."""
LAST_WITH_FORMAT_1 = "37bab4b"  # the commit of this project that still reads it


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


@dataclass
class Saved:
    """A checkpoint whose files have been checked. The tensors are read when they are asked for."""

    folder: Path
    step: int
    run_id: str
    values: dict[str, Any]
    entries: dict[str, Entry]
    fetch: Callable[[str], None] | None = None
    """Brings a file of this name into the folder before it is first read; None: all are there."""

    def files(self) -> TensorFiles:
        return TensorFiles(self.folder, self.entries, self.fetch)

    def value(self, name: str, kind: type) -> Any:
        """One of the values. Raises CheckpointError when there is none of this kind."""
        if not isinstance(self.values.get(name), kind):
            raise CheckpointError(
                f"{self.folder} has {sorted(self.values)}, expected {name} too, a {kind.__name__}; it is of another "
                "script or version: start anew in another --run_dir"
            )
        return self.values[name]

    def best(self) -> dict[str, Any] | None:
        """The best evaluation up to this step, as better() gave it; None for a run that keeps none. Raises
        CheckpointError for anything else."""
        best = self.values.get("best")
        if best is None:
            return None
        form = {"step": int, "field": str, "value": float}
        fits = type(best) is dict and {name: type(value) for name, value in best.items()} == form
        if not (fits and 0 <= best["step"] <= self.step and best["field"] in BEST_IS_LARGEST):
            raise CheckpointError(
                f"{self.folder} names {best!r:.100} as the best evaluation; expected step, field and value of one; "
                "start anew in another --run_dir"
            )
        return best

    def part(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one part, whole on the CPU, by their path in it. Raises CheckpointError if there are none."""
        files = self.files()
        with one_thread():
            found = {path: files.read(path) for path in self.entries if path.split("/")[0] == name}
        if not found:
            parts = sorted({path.split("/")[0] for path in self.entries})
            raise CheckpointError(
                f"{self.folder} has {parts}, expected {name} too; it is of another script or version: start anew in "
                "another --run_dir"
            )
        return {path.removeprefix(f"{name}/"): tensor for path, tensor in found.items()}


def read_checkpoint(folder: Path, run_id: str = "") -> Saved:
    """What a checkpoint folder holds. run_id: the run it must be of, when that is known. Every byte is checked before a
    tensor is mapped. Raises DamagedCheckpoint, and CheckpointError for one in format 1."""
    if (folder / "state.pt").exists():
        raise CheckpointError(
            f"checkpoint {folder} is in format 1, a pickle, which is not read because its bytes could corrupt memory "
            f"(CVE-2026-24747); finish that run with commit {LAST_WITH_FORMAT_1} of these scripts, or start anew in "
            "another --run_dir"
        )
    try:
        marker = read_marker(folder)
        if run_id and marker["run"] != run_id:
            raise ValueError(f"it is of run {marker['run'][:50]!r}, this is run {run_id}")
        for name, expected in marker["files"].items():
            with open_regular(folder / name, "a file of a checkpoint", follow=False) as file:
                size = file_size(file)  # before all of it is read
                found = checksum_of(file) if size == expected["bytes"] else {"bytes": size}
            if found != expected:
                raise ValueError(f"{name} has other content: {found}, its done marker says {expected}")
        index = _read_json(folder / INDEX_FILE)
        if type(index) is not dict or index.keys() != {"format", "step", "values", "tensors"}:
            raise ValueError(f"{INDEX_FILE} is no index of a checkpoint")
        if (index["format"], index["step"]) != (FORMAT, marker["step"]) or type(index["values"]) is not dict:
            raise ValueError(f"{INDEX_FILE} has step {index['step']!r} and format {index['format']!r}")
        entries = parse_index(index["tensors"])
        check_files(folder, entries, marker["files"])
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {error}") from error
    return Saved(folder, marker["step"], marker["run"], index["values"], entries)


def read_marker(folder: Path) -> dict[str, Any]:
    """The done marker. Raises ValueError unless it has its form, names this folder's step and this folder's files."""
    marker = _read_json(folder / "done")
    form = {"format": int, "run": str, "step": int, "files": dict}
    if type(marker) is not dict or {name: type(value) for name, value in marker.items()} != form:
        raise ValueError("its done marker has another form")
    if marker["format"] != FORMAT or marker["step"] != step_of_folder(folder):
        raise ValueError(f"its done marker is of step {marker['step']} in format {marker['format']}")
    for name, sums in marker["files"].items():
        if not re.fullmatch(rf"{re.escape(WHOLE_FILE)}|{re.escape(INDEX_FILE)}|shards_[0-9]{{5}}\.safetensors", name):
            raise ValueError(f"its done marker names the file {name[:100]!r}")
        if type(sums) is not dict or {n: type(v) for n, v in sums.items()} != {"bytes": int, "crc32": int}:
            raise ValueError(f"its done marker has no size and CRC-32 of {name}")
    if not {WHOLE_FILE, INDEX_FILE} <= marker["files"].keys():
        raise ValueError("its done marker does not name all files")
    return marker


def sizes_of_files(folder: Path) -> dict[str, int]:
    """By name, as the done marker says; nothing where that is damaged."""
    try:
        return {name: sums["bytes"] for name, sums in read_marker(folder)["files"].items()}
    except (OSError, ValueError):
        return {}


def _read_json(path: Path) -> Any:
    content = read_regular(path, "a checkpoint's own JSON", LONGEST_HEADER, follow=False)
    try:
        return parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error


def check_alike(wanted: dict[str, Kind], found: dict[str, Kind]) -> None:
    """Raises CheckpointError, in words, unless both have the same names, shapes and types."""
    changed = [
        f"{name} is {wanted.get(name, 'absent')}, was {found.get(name, 'absent')}"
        for name in sorted(wanted | found)
        if wanted.get(name) != found.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(changed[:3])}; give the options it was made with "
            "(and run the version of the scripts that made it), or start anew in another --run_dir"
        )


def better(best: dict[str, Any] | None, step: int, fields: dict[str, float]) -> dict[str, Any] | None:
    """The better of the best evaluation so far and this one: its step, the field that was compared, and its value. Of
    equal values the earlier is the best; one that is not finite never is. Raises InputError without such a field."""
    name = next((name for name in BEST_IS_LARGEST if name in fields), None)
    if name is None:
        raise InputError(
            f"keep_best needs an evaluation with {' or '.join(BEST_IS_LARGEST)}; found {', '.join(fields)}; log one of "
            "the two, or give --no_keep_best"
        )
    value, sign = float(fields[name]), 1 if BEST_IS_LARGEST[name] else -1
    known = best is not None and best["field"] == name
    if not math.isfinite(value) or (known and sign * value <= sign * best["value"]):
        return best
    return {"step": step, "field": name, "value": value}
