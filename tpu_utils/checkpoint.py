"""The checkpoints of a run directory: atomic, checked, and nothing but data: safetensors and JSON."""

import json
import os
import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch_xla.core.xla_model as xm

from tpu_utils.errors import CheckpointError, DamagedCheckpoint, SaveError
from tpu_utils.files import checksum_of, sync_folder, write_atomically
from tpu_utils.inputs import file_size, open_regular, parse_json, read_regular
from tpu_utils.peers import Peers
from tpu_utils.state import (
    HostCopy,
    copy_to_host,
    is_sharded,
    merged_entries,
    num_bytes,
    put,
    put_sharded,
    shards_by_path,
    tensors_by_path,
)
from tpu_utils.storage import Mirror
from tpu_utils.tensor_files import (
    LONGEST_HEADER,
    WHOLE_FILE,
    Entry,
    Kind,
    TensorFiles,
    check_complete,
    check_files,
    index_as_json,
    kind_of,
    one_thread,
    parse_index,
    write_tensors,
)

FORMAT = 2
"""Of the files below a step folder. Format 1 was a pickle, which torch 2.9 does not read safely (CVE-2026-24747)."""
LAST_WITH_FORMAT_1 = "37bab4b"
"""The commit of this project that still reads it."""
INDEX_FILE = "state.json"
SHARED_FOLDER = "a run whose state is sharded over several hosts needs a --run_dir that all of them share"


class Checkpoints:
    """step_00001200/ with state.safetensors, a file of shards for each process that has some, their index state.json,
    and a `done` marker with the run, the step, and the size and CRC-32 of each file; the newest `keep` of them.

    A step is written aside, synced, renamed and only then marked: a folder without its marker is not a checkpoint.
    The loop waits for the copy to host memory alone, one thread does the rest; at most one save is under way:

        copy = checkpoints.copy(step, parts, values)  # raises what went wrong with the save before
        checkpoints.write(copy)                       # at once
        checkpoints.check()                           # now and then: raises SaveError if a save has failed
        checkpoints.wait()                            # the last save is on disk

    As a context manager it waits at the end, whatever happened. With several peers every process makes all these calls
    alike, on a folder that all of them see.
    """

    def __init__(
        self, folder: Path, keep: int, peers: Peers | None = None, mirror: Mirror | None = None, run_id: str = ""
    ):
        """mirror: of the run directory, for one in a bucket. run_id: of the run that the checkpoints belong to."""
        self.folder, self.keep, self._mirror, self.run_id = folder, keep, mirror, run_id
        self._peers = peers or Peers()
        self._peers_of_thread = self._peers.with_own_links()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *exception) -> None:
        if kind is None:
            self.wait()
            return
        self._join()
        if self._failure:  # the run ends with another error; this one must not go unsaid
            print(f"error: {self._failure}", file=sys.stderr)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return sorted(step for step, path in self._folders() if (path / "done").exists())

    def _folders(self) -> list[tuple[int, Path]]:
        """Those of steps. Links and odd names are somebody else's: neither read nor removed."""
        found = self.folder.iterdir() if self.folder.is_dir() else []
        return [(step, path) for path in found if (step := step_of_folder(path)) is not None]

    def newest(self) -> int | None:
        """The step of the newest one, None without any. Waits for the save under way, whose failure is raised later.

        All processes must call it.
        """

        def ended() -> int | None:
            self._join()
            return max(self.steps(), default=None)

        return self._peers.from_first(ended)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def save(self, step: int, parts: dict[str, Any], values: dict[str, Any] | None = None) -> Path:
        """Copy, write and wait. Returns the folder written. Raises SaveError; the earlier checkpoints are intact."""
        self.write(self.copy(step, parts, values))
        self.wait()
        return self.path(step)

    def copy(self, step: int, parts: dict[str, Any], values: dict[str, Any] | None = None) -> HostCopy:
        """The state in host memory, once the save before is on disk. Raises its SaveError, or one for lack of space.

        parts: nestings of tensors, by name. values: what is no tensor, of JSON.
        """
        started = time.perf_counter()
        self.wait()
        tensors = tensors_by_path(parts)
        self._peers.from_first(lambda: self._check_space(step, num_bytes(tensors)))
        copy = copy_to_host(step, tensors, values or {}, first=self._peers.index == 0)
        copy.wait_seconds = time.perf_counter() - started
        return copy

    def write(self, copy: HostCopy) -> None:
        """Begin to write it; wait() or the next copy() waits for the end. The copy is used up."""
        if self._peers.index == 0 or copy.sharded:  # what is not sharded is written by the first process alone
            # no daemon: a run that ends with an error elsewhere still finishes its save
            self._thread = threading.Thread(target=self._write_and_keep_error, args=(copy,), name="checkpoint")
            self._thread.start()

    def check(self) -> None:
        """Waits for nothing. Raises, on all processes, what went wrong with a save."""
        self._peers.from_first(self._raise_failure)
        self._raise_failure()

    def wait(self) -> None:
        """The last save is on disk, or in the bucket, when it returns. Raises SaveError if it is not."""
        self._join()
        self.check()
        if self._mirror:
            self._mirror.wait()

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure:
            raise failure

    def _check_space(self, step: int, state_bytes: int) -> None:
        """Before anything is touched: a disk that fills up in the middle of a save takes other programs down too."""
        needed = state_bytes + state_bytes // 50 + 2**20  # with headers and the index
        folder = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not has_room(folder, needed):
            raise SaveError(
                f"checkpoint of step {step} needs {needed / 2**20:,.0f} MiB, but {room(folder)} at "
                f"{folder}; nothing was written, the checkpoints of steps {self.steps()} are intact; make room there, "
                "or move the run to a larger disk, and go on with --resume must"
            )

    def _write_and_keep_error(self, copy: HostCopy) -> None:
        try:
            self._write(copy)
        except BaseException as error:  # whatever it is: the loop raises it
            self._failure = error
        finally:
            copy.clear()

    def _write(self, copy: HostCopy) -> None:
        """In the thread. Without anything sharded on the first process alone: no message goes between them."""
        peers = self._peers_of_thread if copy.sharded else Peers()
        aside = self.folder / f".writing_{copy.step:08d}"
        try:
            peers.from_first(lambda: self._make(aside))
            written = peers.gather(self._write_shards(aside, copy, peers.index)) if copy.sharded else []
            if problems := [one["problem"] for one in written if "problem" in one]:
                raise OSError("; ".join(problems))
            peers.from_first(lambda: self._finish(copy, aside, written))
        except (OSError, ValueError, SaveError) as error:
            if peers.index == 0:
                shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, SaveError):  # said by the first process, or of the bucket
                raise
            raise SaveError(
                f"checkpoint of step {copy.step} could not be written to {self.path(copy.step)}: {error}; "
                f"{room(self.folder.parent)} there; the checkpoints of steps {self.steps()} are intact"
            ) from error

    @staticmethod
    def _write_shards(aside: Path, copy: HostCopy, index: int) -> dict[str, Any]:
        """What this process has to say of its file of shards; a problem too, because the others wait to hear."""
        name = f"shards_{index:05d}.safetensors"
        if not aside.is_dir():
            return {"problem": f"process {index} sees no {aside}; {SHARED_FOLDER}"}
        try:
            sums = write_tensors(aside / name, copy.shard_file())
        except OSError as error:
            return {"problem": f"process {index}: {error}"}
        return {"name": name, "sums": sums, "shards": shards_by_path(copy, name)}

    def _make(self, aside: Path) -> None:
        for left_by_a_kill in self.folder.glob(".writing_*"):
            shutil.rmtree(left_by_a_kill)
        self.folder.mkdir(exist_ok=True)  # without its parents: a run directory that is gone is not made again
        aside.mkdir()

    def _finish(self, copy: HostCopy, aside: Path, written: list[dict[str, Any]]) -> None:
        """On the first process, when all shards are on disk: the rest, the marker, and away with the oldest."""
        target = self.path(copy.step)
        files = {one["name"]: one["sums"] for one in written}
        for name, expected in files.items():
            size = (aside / name).stat().st_size if (aside / name).exists() else "absent"
            if size != expected["bytes"]:
                raise OSError(f"{name} is {size} here, its process wrote {expected['bytes']} bytes; {SHARED_FOLDER}")
        entries = merged_entries(copy, [one["shards"] for one in written])
        for path in copy.sharded:
            check_complete(path, entries[path])
        if self._mirror:
            self._mirror.wait()  # pruning must not take files away that are on their way up
        files[WHOLE_FILE] = write_tensors(aside / WHOLE_FILE, copy.whole)
        index = {"format": FORMAT, "step": copy.step, "values": copy.values, "tensors": index_as_json(entries)}
        write_atomically(aside / INDEX_FILE, json.dumps(index).encode())
        with (aside / INDEX_FILE).open("rb") as file:
            files[INDEX_FILE] = checksum_of(file)
        marker = {"format": FORMAT, "run": self.run_id, "step": copy.step, "files": files}
        sync_folder(aside)
        if target.exists():  # a kill left it without its marker, or a resumed run comes past it again
            self._remove(target)
        aside.rename(target)
        sync_folder(self.folder)
        write_atomically(target / "done", json.dumps(marker).encode())
        self._prune(copy.step)
        if self._mirror:
            self._mirror.send(target, self.keep)

    def _prune(self, step: int) -> None:
        """Remove what is older than the newest `keep` up to this step, whose files have just been read back.

        Of later steps only what a resumed run has not come past again is here: it fell back because they are damaged.
        """
        kept = [other for other in self.steps() if other <= step][-self.keep :]
        for other, folder in self._folders():
            if other < step and other not in kept:  # also what a kill left without its marker
                self._remove(folder)

    @staticmethod
    def _remove(folder: Path) -> None:
        (folder / "done").unlink(missing_ok=True)  # first of all: half a folder must not look complete
        shutil.rmtree(folder)

    def load_for_resume(self, resume: str) -> "Saved | None":
        """The newest complete checkpoint; None when a new run is to begin. All processes must call it.

        resume is never, auto or must. A damaged checkpoint is named and the one before it is used. Raises
        CheckpointError when all are damaged, or when there is none and resume is must.
        """
        saved: Saved | None = None

        def load() -> dict[str, Any] | None:
            nonlocal saved
            saved = self.load(resume)
            return saved and {"step": saved.step, "run": saved.run_id, "values": saved.values, "tensors": saved.index()}

        found = self._peers.from_first(load)
        if found is None or self._peers.index == 0:
            return saved
        step, entries = found["step"], parse_index(found["tensors"])
        return Saved(self.path(step), step, found["run"], found["values"], entries)

    def load(self, resume: str) -> "Saved | None":
        """As load_for_resume, for one process by itself."""
        if resume == "never":
            return None
        problems = []
        for step in reversed(self.steps()):
            try:
                if self._mirror:
                    self._mirror.fetch(self.path(step), sizes_of_files(self.path(step)))
                return read_checkpoint(self.path(step), self.run_id)
            except DamagedCheckpoint as error:
                problems.append(str(error))
                print(f"warning: {error}; trying the checkpoint before it", file=sys.stderr)
        if problems:
            raise CheckpointError(
                "no checkpoint can be used: " + "; ".join(problems) + "; start anew in another --run_dir"
            )
        if resume == "must":
            raise CheckpointError(f"{self.folder} holds no complete checkpoint to go on from; check --run_dir")
        return None

    def restore(self, saved: "Saved", parts: dict[str, Any]) -> None:
        """Fill the tensors in parts, nestings as they were saved. All processes must call it.

        They keep their place: one that is sharded gets each device's shard, whatever mesh or single device it was saved
        from. Raises CheckpointError before anything is changed if names, shapes or types differ.
        """
        wanted = tensors_by_path(parts)
        found = {path: entry.kind for path, entry in saved.entries.items() if path.split("/")[0] in parts}
        check_alike({path: kind_of(tensor) for path, tensor in wanted.items()}, found)
        with one_thread():
            self._fill(wanted, saved)

    def _fill(self, wanted: dict[str, torch.Tensor], saved: "Saved") -> None:
        files = saved.files()
        for path, tensor in wanted.items():
            if saved.entries[path].shards and is_sharded(tensor):
                put_sharded(tensor, lambda part, offsets, path=path: files.read_into(part, path, offsets))
            elif saved.entries[path].shards:
                put(tensor, files.read(path))
            else:  # in a file that the first process alone may have
                kind = saved.entries[path].kind
                own = self._peers.index == 0
                value = files.read(path) if own else torch.empty(kind.shape, dtype=kind.dtype)
                self._peers.tensor_from_first(value)
                put(tensor, value)


@dataclass
class Saved:
    """A checkpoint whose files have been checked. The tensors are read when they are asked for."""

    folder: Path
    step: int
    run_id: str
    values: dict[str, Any]
    entries: dict[str, Entry]

    def files(self) -> TensorFiles:
        return TensorFiles(self.folder, self.entries)

    def index(self) -> dict[str, Any]:
        return index_as_json(self.entries)

    def value(self, name: str, kind: type) -> Any:
        """One of the values. Raises CheckpointError when there is none of this kind."""
        if not isinstance(self.values.get(name), kind):
            raise CheckpointError(
                f"{self.folder} has {sorted(self.values)}, expected {name} too, a {kind.__name__}; it is of another "
                "script or version: start anew in another --run_dir"
            )
        return self.values[name]

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


def step_of_folder(path: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for a link, or any other name."""
    found = re.fullmatch(r"step_([0-9]{8})", path.name)
    return int(found[1]) if found and path.is_dir() and not path.is_symlink() else None


def room(folder: Path) -> str:
    """What is left on the disk, in words: it may have room for bytes and none for another file."""
    found = os.statvfs(folder)
    free = f"{found.f_bavail * found.f_frsize / 2**20:,.0f} MiB are free"
    return free if has_room(folder, 0) else f"{free} and no inode is left for another file"


def has_room(folder: Path, num_bytes: int) -> bool:
    """For so many bytes in a handful of files."""
    found = os.statvfs(folder)
    inodes = found.f_files == 0 or found.f_favail >= 8  # 0: a file system that does not count them
    return inodes and found.f_bavail * found.f_frsize >= num_bytes


def read_checkpoint(folder: Path, run_id: str = "") -> Saved:
    """What a checkpoint folder holds. run_id: the run it must be of, when that is known.

    Every byte is checked before a tensor is mapped. Raises DamagedCheckpoint, and CheckpointError for one in the format
    of before.
    """
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
                sums = checksum_of(file) if size == expected["bytes"] else {"bytes": size}
            for quantity, value in sums.items():
                if value != expected[quantity]:
                    said = f"its done marker says {expected[quantity]}"
                    raise ValueError(f"{name} has other content: {quantity} is {value}, {said}")
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
        if not re.fullmatch(rf"{WHOLE_FILE}|{INDEX_FILE}|shards_[0-9]{{5}}\.safetensors", name):
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


def load_model(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """load_state_dict on the host that says in words what differs. Raises CheckpointError before anything changes."""
    own, other = ({name: kind_of(value) for name, value in state.items()} for state in (model.state_dict(), saved))
    check_alike(own, other)
    model.load_state_dict(saved)


def random_state() -> dict[str, torch.Tensor]:
    """Every generator that a script or a layer may draw from on this host and device."""
    return {"torch": torch.get_rng_state(), "xla": torch.tensor([xm.get_rng_state()], dtype=torch.uint64)}


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Raises CheckpointError when it is not what random_state() gives."""
    try:
        torch.set_rng_state(state["torch"])
    except RuntimeError as error:  # the bytes are no state of the generator
        raise CheckpointError(
            f"the checkpoint's random state is none: {error}; start anew in another --run_dir"
        ) from error
    xm.set_rng_state(int(state["xla"].numpy()[0]))  # int() of a torch.uint64 overflows
