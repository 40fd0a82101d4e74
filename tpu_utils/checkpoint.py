"""The checkpoints of a run directory: atomic, checked, never executed."""

import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch_xla.core.xla_model as xm

from tpu_utils.errors import CheckpointError, SaveError
from tpu_utils.files import checksum_of, sync_folder, write_atomically
from tpu_utils.peers import Peers
from tpu_utils.state import (
    HostCopy,
    copy_to_host,
    is_sharded,
    map_tensors,
    num_bytes,
    put,
    read_sharded,
    read_whole,
    tensors_by_path,
    write_sharded,
    write_whole,
)
from tpu_utils.storage import Mirror


class Checkpoints:
    """step_00001200/ with state.pt, the files of what is sharded over devices, and a `done` marker with the size and
    CRC-32 of each; the newest `keep` of them.

    A step is written aside, synced, renamed and only then marked: a folder without its marker is not a checkpoint.
    The loop waits for the copy to host memory alone, one thread does the rest; at most one save is under way:

        copy = checkpoints.copy(step, state)     # raises what went wrong with the save before
        checkpoints.write(copy)                  # at once
        checkpoints.check()                      # now and then: raises SaveError if a save has failed
        checkpoints.wait()                       # the last save is on disk

    As a context manager it waits at the end, whatever happened. With several peers every process makes all these calls
    alike, on a folder that all of them see.
    """

    def __init__(self, folder: Path, keep: int, peers: Peers | None = None, mirror: Mirror | None = None):
        """mirror: of the run directory, for one in a bucket."""
        self.folder, self.keep, self._mirror = folder, keep, mirror
        self._peers = peers or Peers()
        self._peers_of_thread = self._peers.with_own_group()
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
        return sorted(int(path.parent.name[5:]) for path in self.folder.glob("step_????????/done"))

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

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Copy, write and wait. Returns the folder written. Raises SaveError; the earlier checkpoints are intact."""
        self.write(self.copy(step, state))
        self.wait()
        return self.path(step)

    def copy(self, step: int, state: dict[str, Any]) -> HostCopy:
        """The state in host memory, once the save before is on disk. Raises its SaveError, or one for lack of space."""
        started = time.perf_counter()
        self.wait()
        self._peers.from_first(lambda: self._check_space(step, num_bytes(state)))
        copy = copy_to_host(step, state, first=self._peers.index == 0)
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
        needed = state_bytes + state_bytes // 50 + 2**20  # with what torch.save adds
        folder = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise SaveError(
                f"checkpoint of step {step} needs {needed / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB are free at "
                f"{folder}; nothing was written, the checkpoints of steps {self.steps()} are intact; make room there, "
                "or move the run to a larger disk, and go on with --resume must"
            )

    def _write_and_keep_error(self, copy: HostCopy) -> None:
        try:
            self._write(copy)
        except BaseException as error:  # whatever it is: the loop raises it
            self._failure = error
        finally:
            copy.whole, copy.sharded = {}, {}  # or the next copy would be a second one in memory

    def _write(self, copy: HostCopy) -> None:
        """In the thread. Without anything sharded on the first process alone: no message goes between them."""
        peers = self._peers_of_thread if copy.sharded else Peers()
        aside = self.folder / f".writing_{copy.step:08d}"
        try:
            peers.from_first(lambda: self._make(aside))
            files = write_sharded(aside, copy.sharded, peers) if copy.sharded else {}
            peers.from_first(lambda: self._finish(copy, aside, files))
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            if peers.index == 0:
                shutil.rmtree(aside, ignore_errors=True)
            free = shutil.disk_usage(self.folder.parent).free / 2**20
            raise SaveError(
                f"checkpoint of step {copy.step} could not be written to {self.path(copy.step)}: {error}; "
                f"{free:,.0f} MiB are free there; the checkpoints of steps {self.steps()} are intact"
            ) from error

    def _make(self, aside: Path) -> None:
        for left_by_a_kill in self.folder.glob(".writing_*"):
            shutil.rmtree(left_by_a_kill)
        aside.mkdir(parents=True)

    def _finish(self, copy: HostCopy, aside: Path, files: dict[str, dict[str, int]]) -> None:
        """On the first process, when all shards are on disk: the rest, the marker, and away with the oldest."""
        target = self.path(copy.step)
        for name, expected in files.items():
            size = (aside / name).stat().st_size if (aside / name).exists() else "absent"
            if size != expected["bytes"]:
                raise RuntimeError(
                    f"{name} is {size} here, its process wrote {expected['bytes']} bytes; a run whose state is "
                    "sharded over several hosts needs a --run_dir that all of them share"
                )
        if self._mirror:
            self._mirror.wait()  # pruning must not take files away that are on their way up
        marker = {"step": copy.step, **write_whole(aside / "state.pt", copy.whole), "cut": files}
        sync_folder(aside)
        if target.exists():  # a kill left it without its marker, or a resumed run comes past it again
            self._remove(target)
        aside.rename(target)
        sync_folder(self.folder)
        write_atomically(target / "done", json.dumps(marker).encode())
        kept = {self.path(step) for step in self.steps()[-self.keep :]}
        for folder in set(self.folder.glob("step_????????")) - kept:  # also what a kill left without its marker
            self._remove(folder)
        if self._mirror:
            self._mirror.send(target, self.keep)

    @staticmethod
    def _remove(folder: Path) -> None:
        (folder / "done").unlink(missing_ok=True)  # first of all: half a folder must not look complete
        shutil.rmtree(folder)

    def load_for_resume(self, resume: str, whole: bool = True) -> dict[str, Any] | None:
        """State of the newest complete checkpoint, on the CPU; None when a new run is to begin.

        resume is never, auto or must. whole=False: see read_checkpoint; restore() gets the rest. A damaged checkpoint
        is named and the one before it is used. Raises CheckpointError when all are damaged, when one holds anything but
        tensors and plain values, or when there is none and resume is must.
        """
        if resume == "never":
            return None
        problems = []
        for step in reversed(self.steps()):
            try:
                if self._mirror:
                    self._mirror.fetch(self.path(step))
                return read_checkpoint(self.path(step), whole)
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

    def restore(self, saved: dict[str, Any], targets: dict[str, Any]) -> None:
        """Fill the tensors in targets, a nesting as in saved, which is what load_for_resume returned, whole or not.

        They keep their place: one that is sharded gets each device's shard, whatever mesh or single device it was saved
        from. Raises CheckpointError before anything is changed if names, shapes or types differ.
        """
        wanted = tensors_to_restore(targets)
        found = tensors_to_restore({name: saved.get(name) for name in targets})
        check_alike(wanted, found)
        # shards go to the devices one by one; a tensor that every device holds whole goes by way of a whole one here
        from_files = {
            path: tensor if is_sharded(tensor) else torch.empty_like(tensor, device="cpu")
            for path, tensor in wanted.items()
            if found[path].is_meta
        }
        if from_files:
            folder = self.path(saved["step"])
            read_sharded(folder, list(_marker(folder)), from_files)
        found |= from_files
        for path, tensor in wanted.items():
            if found[path] is not tensor:
                put(tensor, found[path])


class DamagedCheckpoint(CheckpointError):
    """Its bytes are not those that were written."""


def _marker(folder: Path) -> dict[str, Any]:
    """Size and CRC-32 of every file, by name, as the done marker says. Raises OSError and what a bad marker makes."""
    marker = json.loads((folder / "done").read_text())
    return {"state.pt": {name: marker.get(name) for name in ("bytes", "crc32")}, **marker.get("cut", {})}


def read_checkpoint(folder: Path, whole: bool = True) -> dict[str, Any]:
    """The state in a checkpoint folder, on the CPU. Nothing that the files say is run.

    whole=False: of tensors that were sharded over devices only shapes and types, on the meta device. Every byte is
    checked all the same. Raises DamagedCheckpoint for bytes that changed, CheckpointError for foreign content.
    """
    try:
        files = _marker(folder)
        sums = {name: (expected, checksum_of(folder / name)) for name, expected in files.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {error}") from error
    for name, (expected, found) in sums.items():
        for quantity, value in found.items():
            if expected.get(quantity) != value:
                raise DamagedCheckpoint(
                    f"checkpoint {folder / name} is damaged: {quantity} is {value}, its done marker says "
                    f"{expected.get(quantity)}"
                )
    state = read_whole(folder / "state.pt")
    if not isinstance(state, dict) or "step" not in state:
        raise CheckpointError(
            f"{folder} is not a checkpoint of these scripts: found {type(state).__name__} without a step, expected a "
            "dict with one; remove it, or choose another --run_dir"
        )
    for name, kind in (("step", int), ("config", dict), ("model", dict)):
        if name in state and not isinstance(state[name], kind):
            raise CheckpointError(
                f"{folder} is not a checkpoint of these scripts: {name} is {kind_of(state[name])}, expected "
                f"{kind.__name__}; remove it, or choose another --run_dir"
            )
    sharded: dict[str, torch.Tensor] = {}
    if whole:
        state = map_tensors(
            state, lambda path, t: sharded.setdefault(path, torch.empty_like(t, device="cpu")) if t.is_meta else t
        )
    if sharded:
        read_sharded(folder, list(files), sharded)
    return SavedState(state)


class SavedState(dict):
    """What a checkpoint holds. Raises CheckpointError, not KeyError, for what it does not."""

    def __missing__(self, name: str) -> Any:
        raise CheckpointError(
            f"the checkpoint of step {self.get('step')} has {sorted(map(str, self))}, expected {name} too; it is of "
            "another script or version: start anew in another --run_dir"
        )


def tensors_to_restore(state: Any) -> dict[str, torch.Tensor]:
    """By path. Without an optimizer's param_groups: its numbers come from the options, the rate from the table."""
    return {path: tensor for path, tensor in tensors_by_path(state).items() if "/param_groups/" not in path}


def check_alike(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Raises CheckpointError, in words, unless both have the same names, shapes and types."""
    own, other = ({name: kind_of(tensor) for name, tensor in state.items()} for state in (wanted, found))
    changed = [
        f"{name} is {own.get(name, 'absent')}, was {other.get(name, 'absent')}"
        for name in sorted(own | other)
        if own.get(name) != other.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(changed[:3])}; give the options it was made with "
            "(and run the version of the scripts that made it), or start anew in another --run_dir"
        )


def kind_of(value: Any) -> str:
    """What must be equal for one value to stand for another."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def load_model(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """load_state_dict on the host that says in words what differs. Raises CheckpointError before anything changes."""
    check_alike(model.state_dict(), tensors_by_path(saved))
    model.load_state_dict(saved)


def random_state() -> dict[str, Any]:
    """Every generator that a script or a layer may draw from on this host and device."""
    return {"torch": torch.get_rng_state(), "xla": xm.get_rng_state()}


def set_random_state(state: Any) -> None:
    """Raises CheckpointError when it is not what random_state() gives."""
    own = {name: kind_of(value) for name, value in random_state().items()}
    other = {name: kind_of(value) for name, value in state.items()} if isinstance(state, dict) else kind_of(state)
    if own != other:
        raise CheckpointError(
            f"the checkpoint's random state is {other}, expected {own}; start anew in another --run_dir"
        )
    torch.set_rng_state(state["torch"])
    xm.set_rng_state(state["xla"])
