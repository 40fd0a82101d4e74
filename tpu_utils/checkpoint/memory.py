"""Checkpoints in the memory of the hosts: cheap to make often, and there when a process is lost, or a machine.

Each machine has the newest one in a folder of its own below --memory_dir, a file system in memory: a checkpoint like
one on disk, but for the shards that other machines have. Shards go to the next machine too, so one may be lost. A run
that begins again puts the checkpoint into its run directory, where it is checked and read as any other.

It counts if metrics.jsonl has its line, with the token of the process that wrote it: a machine that was away may come
back with one that the run has left behind, and from where the log has no lines nothing may go on.
"""

import contextlib
import os
import secrets
import shutil
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_utils.base.errors import InputError, SaveError
from tpu_utils.base.files import field_in, open_regular, read_json
from tpu_utils.base.process import Peers
from tpu_utils.base.restarts import memory_folder
from tpu_utils.base.writing import checksum_of, sync_folder
from tpu_utils.checkpoint import Checkpoints, remove
from tpu_utils.checkpoint.saved import read_marker
from tpu_utils.checkpoint.sharded_tensors import SHARED_FOLDER, shard_file, write_shards
from tpu_utils.checkpoint.state import INDEX_FILE, LONGEST_HEADER, WHOLE_FILE, HostCopy, write_marker
from tpu_utils.record.records import read_records

if TYPE_CHECKING:
    from tpu_utils.options.train_config import TrainConfig
    from tpu_utils.remote.wire import Link

BLOCK = 1 << 22  # bytes that go to another machine at a time
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "unknown")  # kinds of file systems


class MemoryCheckpoints(Checkpoints):
    """Used like Checkpoints. On every machine one process writes what is not sharded, not on the first one alone."""

    no_room = "give --save_memory_every 0, or another --memory_dir with room, and go on with --resume must"

    def __init__(self, run_dir: str, memory_dir: str, disk: Checkpoints):
        """run_dir: as --run_dir names it. disk: the run's checkpoints there. All processes must make it. Raises
        InputError, on all processes, where memory_dir is no folder, or ours in it may be another user's."""
        super().__init__(memory_folder(run_dir, memory_dir), 1, disk._peers)
        self._disk, self._own_disk = disk, True

        def make() -> None:
            try:
                make_private(self.folder)
            except OSError as error:
                raise InputError(
                    f"memory_dir {memory_dir}: {error.strerror}; expected a folder that is in memory, as /dev/shm is"
                ) from error

        self._peers.on_all(make)
        found = Path(memory_dir).stat()
        place = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), found.st_dev, found.st_ino]
        places = self._peers.gather(place)
        if (kind := kind_of_files(Path(memory_dir))) not in IN_MEMORY and self._peers.index == 0:
            print(f"warning: memory_dir {memory_dir} is on {kind}, which is not in memory", file=sys.stderr)
        self._marks = places.index(place) == self._peers.index  # the first process of this machine
        self._others_have_own = all(places.count(one) == 1 for one in places) and len(places) > 1
        self._ring: tuple[Link, Link] | None = None
        self.token = self._peers.from_first(lambda: secrets.token_hex(8))

    def copy(self, step: int, *arguments, **keywords) -> HostCopy:
        self.run_id = f"{self._disk.run_id}.{self.token}"
        self.wait()
        self.keep_newest()
        return super().copy(step, *arguments, **keywords)

    def keep_newest(self) -> None:
        """Remove the others. After wait(): every machine has it whole."""
        for old in self.steps()[:-1] if self._marks else ():
            remove(self.path(old))

    def clear(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _room_for(self, copy: HostCopy) -> int:
        """Where there is none yet, for the next one too; with shards, for about as much of the machine before."""
        shards = sum(shard.nbytes for shards in copy.shards.values() for shard in shards.values())
        both = super()._room_for(copy) + (shards if self._others_have_own else 0)
        return both if self.steps() else 2 * both

    # ----------------------------------------------------------------------------------------------------- written

    def _make(self, aside: Path, copy: HostCopy) -> None:
        make_private(self.folder)
        super()._make(aside, copy)

    def _prune(self, step: int, best: int | None) -> None:
        """Not yet: another machine may not have this one whole. keep_newest() does."""

    def _write(self, copy: HostCopy) -> None:
        """Runs in the thread. If nothing is sharded, without messages to other machines."""
        peers = self._peers_of_thread if copy.sharded else Peers()
        aside, own = self.folder / f".writing_{copy.step:08d}", None
        try:
            peers.on_all(lambda: self._make(aside, copy) if self._marks else None)
            if copy.sharded:
                own = write_shards(copy, aside, self.path(copy.step), self._peers.index, self._mirror)
            written = peers.gather(own) if copy.sharded else []
            if problems := [one["problem"] for one in written if "problem" in one]:
                raise OSError("; ".join(problems))
            if copy.sharded and self._others_have_own:
                peers.on_all(lambda: self._exchange(aside, written))
            if self._marks:
                elsewhere = {one["name"]: one["sums"]["bytes"] for one in written}
                self._finish(copy, aside, written, elsewhere if self._others_have_own else {})
            if self._disk._mirror and self._peers.index == 0:
                self._disk._mirror.send_logs()
        except (OSError, ValueError, SaveError) as error:
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
            problem = None
            while left:
                block = bytearray(min(left, BLOCK))
                before.receive_into(memoryview(block))
                left -= len(block)
                try:
                    file.write(block)
                except OSError as error:  # no room: all is received, else the giver would wait
                    problem = error
            given.result()
            if problem:
                raise problem

    # -------------------------------------------------------------------------------------------------- back again

    def bring_to_disk(self) -> int | None:
        """Put the newest checkpoint that the machines' memories have whole into the run directory, if it is newer than
        all there. Returns its step. All processes must call it. Raises SaveError where the disk does not take it. The
        memory is given back then, and where what it holds is of no use."""
        newest, tokens = self._peers.from_first(self._known)
        own = {str(s): found for s in self.steps() if (found := self._found(s, tokens.get(str(s)), newest))}
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
            for path in self.folder.iterdir():
                remove(path)
        return step

    def _known(self) -> tuple[int, dict[str, str]]:
        """What the first process knows: the newest step on disk, and {step: token} of newer checkpoints in memory. A
        step whose line a run has dropped again, because the checkpoint was damaged, is not on disk."""
        log = self._disk.folder.parent / "metrics.jsonl"
        lines = (line for _, _, line in read_records(log)) if log.exists() else ()
        tokens = {line["step"]: line.get("memory") for line in lines if line and line["kind"] == "checkpoint"}
        newest = max((step for step in self._disk.steps() if step in tokens), default=0)
        return newest, {str(step): token for step, token in tokens.items() if token and step > newest}

    def _found(self, step: int, token: str | None, newest: int) -> dict[str, Any] | None:
        """What this machine has of a checkpoint: its marker, and the names of the files that are "here" and whole.
        newest: the newest step on disk. A checkpoint that names a later one as the best does not count: that was lost
        while it was written, and the run has to come there again."""
        folder = self.path(step)
        try:
            marker = read_marker(folder)
            if not (token and self._disk.run_id) or marker["run"] != f"{self._disk.run_id}.{token}":
                return None
            here = []
            for name, sums in marker["files"].items():
                if (folder / name).exists():
                    with open_regular(folder / name, "a file of a checkpoint", follow=False) as file:
                        if checksum_of(file) == sums:
                            here.append(name)
                        else:
                            print(f"warning: {folder / name}, in memory, is damaged and not used", file=sys.stderr)
            best = read_json(folder / INDEX_FILE, "an index", LONGEST_HEADER)["values"].get("best")
        except (OSError, ValueError, KeyError, AttributeError):  # InputError too
            return None
        return None if best and best["step"] > newest else {"marker": marker, "here": here}

    def _put(self, step: int, marker: dict[str, Any], givers: dict[str, int]) -> None:
        """givers: by file, the process that puts it there. The marker comes last, as with every checkpoint."""
        disk, mirror, index = self._disk, self._disk._mirror, self._peers.index
        target, aside = disk.path(step), disk.folder / f".writing_{step:08d}"
        folder = target if mirror else aside

        def make() -> None:
            if index == 0 or mirror:
                disk.folder.mkdir(exist_ok=True)
                for old in (aside, target):
                    if old.exists():
                        remove(old)
                folder.mkdir()
            if mirror and index == 0:
                mirror.unmark(target)

        def put() -> None:
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

        try:
            self._peers.on_all(make)
            self._peers.on_all(put)
        except (OSError, ValueError, SaveError) as error:
            raise SaveError(f"the checkpoint of step {step}, in memory, could not be put on disk: {error}") from error

        def mark() -> None:
            sync_folder(folder)
            if not mirror:
                aside.rename(target)
                sync_folder(disk.folder)
            write_marker(target, step, disk.run_id, marker["files"])
            if mirror:
                mirror.put(target / "done")

        self._peers.from_first(mark)


def open_memory(config: "TrainConfig", run_dir: str, disk: Checkpoints) -> tuple[MemoryCheckpoints | None, int | None]:
    """(where this run keeps its checkpoints in memory, None with --save_memory_every 0; the step of one that was found
    there, or where the run kept them before, and is on disk now). All processes must call it."""
    # hosts may have memory_dirs of their own; config.json has that of the first, which says whether the run has moved
    before = disk._peers.from_first(lambda: field_in(disk.folder.parent / "config.json", "memory_dir", str) or "")
    moved = disk._peers.from_first(lambda: before not in ("", config.memory_dir))
    step = kept = None
    for place, keeps in [*[(before, False)] * moved, (config.memory_dir, config.save_memory_every > 0)]:
        if not (keeps or any(disk._peers.gather(is_private(memory_folder(run_dir, place))))):
            continue
        memory = MemoryCheckpoints(run_dir, place, disk)
        found = memory.bring_to_disk()
        step = found if found is not None else step  # only what is newer than all on disk is found
        if keeps:
            kept = memory
        else:
            memory.clear()
    return kept, step


def _givers(held: list[dict[str, Any]]) -> dict[str, int] | None:
    """{file: which process gives it}, where the processes together have all files of a checkpoint."""
    for index, found in enumerate(held):
        files = found["marker"].get("files", {})
        whole = {name: index for name in files if not name.startswith("shards_")}  # from one: they say the sums of all
        shards = {name: i for i in reversed(range(len(held))) for name in held[i]["here"] if name.startswith("shards_")}
        if files and whole.keys() <= set(found["here"]) and files.keys() <= whole.keys() | shards.keys():
            return {name: shards[name] for name in files if name in shards} | whole
    return None


def make_private(folder: Path) -> None:
    """Raises InputError where it is there already, and may hold what another user has written; OSError."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_private(folder):
        status = folder.lstat()
        raise InputError(
            f"{folder} is of user {status.st_uid} and has mode {status.st_mode & 0o7777:o}; expected a folder of this "
            "user alone (mode 700); remove it, or name another --memory_dir"
        )


def is_private(folder: Path) -> bool:
    """Whether it is there, a folder, and no other user can have written what it holds."""
    if not os.path.lexists(folder):
        return False
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def kind_of_files(folder: Path) -> str:
    """The kind of file system that a folder is on, as Linux names it."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    kinds = {line.split()[1]: line.split()[2] for line in lines}  # the last mount at a place is the one that is seen
    found = folder.resolve()
    return next((kinds[str(path)] for path in (found, *found.parents) if str(path) in kinds), "unknown")
