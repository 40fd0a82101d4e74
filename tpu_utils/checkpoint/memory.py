"""Checkpoints in the memory of the hosts: cheap to make often, and there when a process is lost, or a machine.

Each machine has the newest one in a folder of its own below --memory_dir, a file system in memory: a checkpoint like
one on disk, but for the shards that other machines have. Shards go to the next machine too, so one may be lost. A run
that begins again puts the checkpoint into its run directory, where it is checked and read as any other.

It counts if metrics.jsonl has its line, with the token of the process that wrote it: a machine that was away may come
back with one that the run has left behind, and from where the log has no lines nothing may go on.
"""

import json
import os
import secrets
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_utils.checkpoint import SHARED_FOLDER, Checkpoints, remove
from tpu_utils.checkpoint.saved import read_marker
from tpu_utils.checkpoint.state import HostCopy
from tpu_utils.checkpoint.tensor_files import WHOLE_FILE, shard_file, steps_in
from tpu_utils.errors import InputError, SaveError
from tpu_utils.files import sync_folder, write_atomically
from tpu_utils.peers import Peers
from tpu_utils.records import read_records
from tpu_utils.restarts import memory_folder

if TYPE_CHECKING:
    from tpu_utils.remote.wire import Link

BLOCK = 1 << 22  # bytes that go to another machine at a time


class MemoryCheckpoints(Checkpoints):
    """Used like Checkpoints. On every machine one process writes what is not sharded, not on the first one alone."""

    no_room = "give --save_memory_every 0, or another --memory_dir with room, and go on with --resume must"

    def __init__(self, run_dir: str, memory_dir: str, disk: Checkpoints):
        """run_dir: as --run_dir names it. disk: the run's checkpoints there. All processes must make it.

        Raises InputError, on all processes, where memory_dir is no folder, or ours in it may be another user's.
        """
        super().__init__(memory_folder(run_dir, memory_dir), 1, disk._peers)
        self._disk, self._own_disk = disk, True
        problem, place = None, None
        try:
            check_private(self.folder)
            found = Path(memory_dir).stat()
            place = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), found.st_dev, found.st_ino]
        except InputError as error:
            problem = str(error)
        except OSError as error:
            problem = f"memory_dir {memory_dir}: {error.strerror}; expected a folder that is in memory, as /dev/shm is"
        places = self._peers.gather([problem, place])
        for said, _ in places:
            if said:
                raise InputError(said)
        self._marks = places.index([None, place]) == self._peers.index  # the first process of this machine
        self._others_have_own = all(places.count(one) == 1 for one in places) and len(places) > 1
        self._ring: tuple[Link, Link] | None = None
        self.token = self._peers.from_first(lambda: secrets.token_hex(8))

    def copy(self, step: int, *arguments, **keywords) -> HostCopy:
        self.run_id = f"{self._disk.run_id}.{self.token}"
        return super().copy(step, *arguments, **keywords)

    def clear(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # ----------------------------------------------------------------------------------------------------- written

    def _make(self, aside: Path, copy: HostCopy) -> None:
        """Every machine has its newest one whole by now: the older ones go."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        check_private(self.folder)
        for old in (*self.folder.glob(".writing_*"), *map(self.path, self.steps()[:-1])):
            remove(old)
        aside.mkdir()

    def _prune(self, step: int, best: int | None) -> None:
        """Not yet: another machine may not have this one whole."""

    def _write(self, copy: HostCopy) -> None:
        """Runs in the thread. If nothing is sharded, without messages to other machines."""
        peers = self._peers_of_thread if copy.sharded else Peers()
        aside, own = self.folder / f".writing_{copy.step:08d}", None
        try:
            peers.gather(None)  # every process has written the checkpoint before
            if self._marks:
                self._make(aside, copy)
            peers.gather(None)  # the folder is there
            own = self._write_shards(aside, copy) if copy.sharded else None
            written = peers.gather(own) if copy.sharded else []
            if problems := [one["problem"] for one in written if "problem" in one]:
                raise OSError("; ".join(problems))
            if copy.sharded and self._others_have_own:
                self._exchange(aside, written)
            if self._marks:
                elsewhere = {one["name"]: one["sums"]["bytes"] for one in written}
                self._finish(copy, aside, written, elsewhere if self._others_have_own else {})
            if self._disk._mirror and self._peers.index == 0:
                self._disk._mirror.send_logs()
        except (OSError, ValueError) as error:
            if self._marks:
                shutil.rmtree(aside, ignore_errors=True)
            raise SaveError(
                f"checkpoint of step {copy.step} could not be kept in memory, at {self.folder}: {error}; those on disk "
                f"are intact; if that is full, {self.no_room}"
            ) from error

    def _exchange(self, aside: Path, written: list[dict[str, Any]]) -> None:
        """Give this machine's shards to the next one, and keep those of the one before."""
        self._ring = self._ring or self._peers_of_thread.ring()
        after, before = self._ring
        own, other = (shard_file(index % self._peers.count) for index in (self._peers.index, self._peers.index - 1))

        def give() -> None:
            with (aside / own).open("rb") as file:
                while block := file.read(BLOCK):
                    after.send_bytes(block)

        with ThreadPoolExecutor(1) as pool, (aside / other).open("xb") as file:
            given, left = pool.submit(give), written[self._peers.index - 1]["sums"]["bytes"]
            while left:
                block = bytearray(min(left, BLOCK))
                before.receive_into(memoryview(block))
                left -= file.write(block)
            given.result()

    # -------------------------------------------------------------------------------------------------- back again

    def bring_to_disk(self) -> int | None:
        """Put the newest checkpoint that the machines' memories have whole into the run directory, if it is newer than
        all there. Returns its step. All processes must call it. Raises SaveError where the disk does not take it.

        The memory is given back then, and where what it holds is of no use.
        """
        known = self._peers.from_first(self._known)
        own = {str(step): found for step in self.steps() if (found := self._found(step, known.get(str(step))))}
        have = self._peers.gather(own)  # by process
        step = None
        for candidate in sorted({int(step) for of_one in have for step in of_one}, reverse=True):
            held = [of_one.get(str(candidate), {"marker": {}, "here": []}) for of_one in have]
            if givers := _givers(held):
                step = candidate
                self._put(step, held[givers[WHOLE_FILE]]["marker"], givers)
                break
        self._peers.gather(None)  # nobody reads there any more
        if self._marks:
            self.clear()
        return step

    def _known(self) -> dict[str, str]:
        """Of the first process: {step: token} of the run's checkpoints in memory that are newer than those on disk."""
        log, newest = self._disk.folder.parent / "metrics.jsonl", max(steps_in(self._disk.folder), default=0)
        lines = (line for _, _, line in read_records(log) if line and "memory" in line) if log.exists() else ()
        return {str(line["step"]): line["memory"] for line in lines if line["step"] > newest}

    def _found(self, step: int, token: str | None) -> dict[str, Any] | None:
        """What this machine has of a checkpoint: its marker, and the names of the files that are "here"."""
        folder = self.path(step)
        try:
            marker = read_marker(folder)
        except (OSError, ValueError, InputError):
            return None
        if not self._disk.run_id or marker["run"] != f"{self._disk.run_id}.{token}":
            return None
        here = [name for name, sums in marker["files"].items() if _size(folder / name) == sums["bytes"]]
        return {"marker": marker, "here": here}

    def _put(self, step: int, marker: dict[str, Any], givers: dict[str, int]) -> None:
        """givers: by file, the process that puts it there. The marker comes last, as with every checkpoint."""
        disk, mirror, index = self._disk, self._disk._mirror, self._peers.index
        target, aside = disk.path(step), disk.folder / f".writing_{step:08d}"
        folder = target if mirror else aside
        if index == 0 or mirror:
            disk.folder.mkdir(exist_ok=True)
            for old in (aside, target):
                if old.exists():
                    remove(old)
            folder.mkdir()
        if mirror and index == 0:
            mirror.unmark(target)
        self._peers.gather(None)
        problem = None
        try:
            for path in self.path(step).glob("*.*"):  # own files, whatever names another process says
                if givers.get(path.name) != index:
                    continue
                if not folder.is_dir():
                    raise OSError(f"it sees no {folder}; {SHARED_FOLDER}")
                with path.open("rb") as source, (folder / path.name).open("xb") as file:
                    shutil.copyfileobj(source, file, BLOCK)
                    file.flush()
                    os.fsync(file.fileno())
                if mirror:
                    mirror.put(folder / path.name)
        except (OSError, SaveError) as error:
            problem = f"process {index}: {error}"
        if problems := [said for said in self._peers.gather(problem) if said]:
            raise SaveError(f"the checkpoint of step {step}, kept in memory, could not be put on disk: {problems[0]}")

        def mark() -> None:
            sync_folder(folder)
            if not mirror:
                aside.rename(target)
                sync_folder(disk.folder)
            write_atomically(target / "done", json.dumps({**marker, "run": disk.run_id}).encode())
            if mirror:
                mirror.put(target / "done")

        self._peers.from_first(mark)


def _givers(held: list[dict[str, Any]]) -> dict[str, int] | None:
    """{file: which process gives it}, where the processes together have all files of a checkpoint."""
    for index, found in enumerate(held):
        files = found["marker"].get("files", {})
        whole = {name: index for name in files if not name.startswith("shards_")}  # of one: they say the sums of all
        shards = {name: i for i in reversed(range(len(held))) for name in held[i]["here"] if name.startswith("shards_")}
        if files and whole.keys() <= set(found["here"]) and files.keys() <= whole.keys() | shards.keys():
            return {name: shards[name] for name in files if name in shards} | whole
    return None


def check_private(folder: Path) -> None:
    """Raises InputError for a folder that is there and may hold what another user has written."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InputError(
            f"{folder} is of user {status.st_uid} and has mode {status.st_mode & 0o7777:o}; expected a folder of this "
            "user alone (mode 700); remove it, or name another --memory_dir"
        )


def _size(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None
