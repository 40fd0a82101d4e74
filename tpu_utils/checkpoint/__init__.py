"""The checkpoints of a run directory, written: atomic, checked, and nothing but data: safetensors and JSON.
loading.py reads them."""

import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpu_utils import device
from tpu_utils.base.errors import SaveError
from tpu_utils.base.process import Peers
from tpu_utils.base.writing import sync_folder
from tpu_utils.checkpoint.state import (
    INDEX_FILE,
    NAMES,
    WHOLE_FILE,
    Entry,
    HostCopy,
    StepFolders,
    kind_of,
    step_folders,
    tensors_by_path,
    write_index,
    write_marker,
    write_tensors,
)

if TYPE_CHECKING:
    from tpu_utils.remote.storage import Mirror


class Checkpoints(StepFolders):
    """step_00001200/ with state.safetensors, a file of shards for each process that has some, their index state.json,
    and a `done` marker with the run, the step, and the size and CRC-32 of each file; the newest `keep` of them, and the
    best one where a run keeps it.

    A step is written aside, synced, renamed and only then marked: a folder without its marker is not a checkpoint.
    The loop waits for the copy to host memory alone, one thread does the rest; at most one save is under way:

        copy = checkpoints.copy(step, parts, values)  # raises what went wrong with the save before
        checkpoints.write(copy)                       # at once
        checkpoints.check()                           # now and then: raises SaveError if a save has failed
        checkpoints.wait()                            # the last save is on disk

    As a context manager it waits at the end, whatever happened. With several peers every process makes all these calls
    alike, on a folder that all of them see; where the mirror is of a bucket, on one that nobody else needs to see.
    """

    no_room = "make room there, or move the run to a larger disk, and go on with --resume must"  # what to do about it

    def __init__(
        self, folder: Path, keep: int, peers: Peers | None = None, mirror: "Mirror | None" = None, run_id: str = ""
    ):
        """mirror: of the run directory, for one in a bucket. run_id: of the run that the checkpoints belong to."""
        self.folder, self.keep, self._mirror, self.run_id = folder, keep, mirror, run_id
        self._peers = peers or Peers()
        self._own_disk, self._marks = mirror is not None, self._peers.index == 0
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

    def newest(self) -> int | None:
        """The step of the newest one, None without any. Waits for the save under way, whose failure is raised later.
        All processes must call it."""
        self._join()
        return self._peers.from_first(lambda: max(self.steps(), default=None))

    def save(self, step: int, parts: dict[str, Any], values: dict[str, Any] | None = None) -> Path:
        """Copy, write and wait. Returns the folder written. Raises SaveError; the earlier checkpoints are intact."""
        self.write(self.copy(step, parts, values))
        self.wait()
        return self.path(step)

    def copy(
        self, step: int, parts: dict[str, Any], values: dict[str, Any] | None = None, best: int | None = None
    ) -> HostCopy:
        """The state in host memory, once the save before is on disk. Raises its SaveError, or one for lack of space.

        parts: nestings of tensors, by name. values: what is no tensor, of JSON. best: a step whose checkpoint stays,
        this one's or an earlier one's. It belongs to the copy: while this is written, the loop may find a better one.
        """
        started = time.perf_counter()
        self.wait()
        tensors = tensors_by_path(parts)
        if odd := [f"{path} is {tensor.dtype}" for path, tensor in tensors.items() if tensor.dtype not in NAMES]:
            raise SaveError(f"{odd[0]}, which a checkpoint cannot hold; nothing was written; save it as another type")
        if not self._own_disk:
            in_all = sum(kind_of(tensor).num_bytes for tensor in tensors.values())  # each value once
            self._peers.from_first(lambda: self._check_space(step, in_all))
        copy = copy_to_host(step, tensors, values or {}, first=self._marks)
        if self._own_disk:  # each process writes its own part there
            self._peers.on_all(lambda: self._check_space(step, self._room_for(copy)))
        copy.best = best
        copy.wait_seconds = time.perf_counter() - started
        return copy

    def write(self, copy: HostCopy) -> None:
        """Begin to write it; wait() or the next copy() waits for the end. The copy is used up."""
        if self._marks or copy.sharded:  # what is not sharded is written by the first process alone
            # no daemon: a run that ends with an error elsewhere still finishes its save
            self._thread = threading.Thread(target=self._write_and_keep_error, args=(copy,), name="checkpoint")
            self._thread.start()

    def check(self) -> None:
        """Waits for nothing. Raises, on all processes, what went wrong with a save."""
        failure = self._failure
        said = [one for one in self._peers.gather(failure and (str(failure) or repr(failure))) if one]
        if failure:
            self._failure = None
            raise failure
        if said:  # by another process
            raise SaveError(str(said[0]))

    def wait(self) -> None:
        """The last save is on disk, or in the bucket, when it returns. Raises SaveError if it is not."""
        self._join()
        self.check()
        if self._mirror:
            with self._peers.patient():
                self._peers.from_first(self._mirror.wait)  # the first process uploads

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None

    def _check_space(self, step: int, state_bytes: int) -> None:
        """Before anything is touched: a disk that fills up in the middle of a save takes other programs down too."""
        needed = state_bytes + state_bytes // 50 + 2**20  # with headers and the index
        folder = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not has_room(folder, needed):
            raise SaveError(
                f"checkpoint of step {step} needs {needed / 2**20:,.0f} MiB, but {room(folder)} at "
                f"{folder}; nothing was written, the checkpoints of steps {self.steps()} are intact; {self.no_room}"
            )

    def _room_for(self, copy: HostCopy) -> int:
        """Bytes that this process is to write."""
        own = [*copy.whole.values(), *(shard for shards in copy.shards.values() for shard in shards.values())]
        return sum(tensor.nbytes for tensor in own)

    def _write_and_keep_error(self, copy: HostCopy) -> None:
        try:
            self._write(copy)
        except BaseException as error:  # whatever it is: the loop raises it
            self._failure = error
        finally:
            copy.clear()

    def _write(self, copy: HostCopy) -> None:
        """Runs in the thread. If nothing is sharded, on the first process alone and without messages to the others."""
        peers = self._peers_of_thread if copy.sharded else Peers()
        aside = self.folder / f".writing_{copy.step:08d}"
        try:
            peers.from_first(lambda: self._make(aside, copy))
            written = []
            if copy.sharded:
                from tpu_utils.checkpoint.sharded_tensors import write_shards

                own = write_shards(copy, aside, self.path(copy.step), self._peers.index, self._mirror)
                with peers.patient():
                    written = peers.gather(own)
            if problems := [one["problem"] for one in written if "problem" in one]:
                raise OSError("; ".join(problems))
            in_bucket = {one["name"]: one["sums"]["bytes"] for one in written[1:]} if self._mirror else {}
            peers.from_first(lambda: self._finish(copy, aside, written, in_bucket))
        except (OSError, ValueError, SaveError) as error:
            if peers.index == 0:
                shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, SaveError):  # said by the first process, or of the bucket
                raise
            intact = f"; the checkpoints of steps {self.steps()} are intact" if self._peers.index == 0 else ""
            raise SaveError(
                f"checkpoint of step {copy.step} could not be written to {self.path(copy.step)}: {error}; "
                f"{room(self.folder.parent)} there{intact}"
            ) from error

    def _make(self, aside: Path, copy: HostCopy) -> None:
        for left_by_a_kill in self.folder.glob(".writing_*"):
            remove(left_by_a_kill)
        self.folder.mkdir(exist_ok=True)  # without its parents: a run directory that is gone is not made again
        aside.mkdir()
        if self._mirror and copy.sharded:
            self._mirror.unmark(self.path(copy.step))  # others are about to upload their parts

    def _finish(self, copy: HostCopy, aside: Path, written: list[dict[str, Any]], elsewhere: dict[str, int]) -> None:
        """When all shards are written: write the rest and the marker, remove the oldest steps. elsewhere: files of
        other processes that need not be in this folder, and their bytes."""
        target = self.path(copy.step)
        files = {one["name"]: one["sums"] for one in written}
        entries = {path: Entry(kind_of(tensor)) for path, tensor in copy.whole.items()}
        if copy.sharded:
            from tpu_utils.checkpoint.sharded_tensors import sharded_entries

            entries |= sharded_entries(copy, aside, written, elsewhere)
        if self._mirror:
            self._mirror.wait()  # pruning must not take files away that are on their way up
        files[WHOLE_FILE] = write_tensors(aside / WHOLE_FILE, copy.whole)
        files[INDEX_FILE] = write_index(aside, copy.step, copy.values, entries)
        sync_folder(aside)
        if target.exists():  # left unmarked by a kill, or of this run before it was resumed
            remove(target)
        aside.rename(target)
        sync_folder(self.folder)
        write_marker(target, copy.step, self.run_id, files)
        self._prune(copy.step, copy.best)
        if self._mirror:
            self._mirror.send(target, self.keep, copy.best, elsewhere)

    def _prune(self, step: int, best: int | None) -> None:
        """Remove all before the newest `keep` up to this step, except best. This step's files were just read back.
        Later steps stay: they are damaged ones that a resumed run fell back from, and it has not reached them again."""
        kept = {best, *[other for other in self.steps() if other <= step][-self.keep :]}
        for other, folder in step_folders(self.folder):
            if other < step and other not in kept:  # also what a kill left without its marker
                remove(folder)


def remove(folder: Path) -> None:
    """Delete a checkpoint, whole or not. Of a link or a file in its place, that alone."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
    else:
        (folder / "done").unlink(missing_ok=True)  # first of all: half a folder must not look complete
        shutil.rmtree(folder)


def room(folder: Path) -> str:
    """What is left on the disk, in words: it may have room for bytes and none for another file."""
    found = os.statvfs(folder)
    free = f"{found.f_bavail * found.f_frsize / 2**20:,.0f} MiB are free"
    return free if has_room(folder, 0) else f"{free} and no inode is left for another file"


def has_room(folder: Path, num_bytes: int) -> bool:
    """Whether so many bytes fit there, in a handful of files."""
    found = os.statvfs(folder)
    inodes = found.f_files == 0 or found.f_favail >= 8  # 0: a file system that does not count them
    return inodes and found.f_bavail * found.f_frsize >= num_bytes


def copy_to_host(step: int, tensors: dict[str, torch.Tensor], values: dict[str, Any], first: bool = True) -> HostCopy:
    """Waits for the device. first: the process that writes what is not sharded."""
    copy = HostCopy(step, values)
    for path, tensor in tensors.items():
        shards = device.wrap_if_sharded(tensor).local_shards if device.is_sharded(tensor) else []
        if shards and shards[0].data.shape != tensor.shape:
            from tpu_utils.checkpoint.sharded_tensors import own_shards

            copy.sharded[path], copy.shards[path] = kind_of(tensor), own_shards(shards)
        elif first and shards:  # a mesh of one device
            copy.whole[path] = shards[0].data.contiguous()
        elif first:
            # a copy, also of what is on the host already: the next step may change it
            on_host = tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
            copy.whole[path] = on_host.contiguous()
    return copy
