"""The run directory: made, locked, and proved to belong to this run."""

import datetime
import fcntl
import os
import socket
import sys
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_utils.base.errors import InputError, SaveError
from tpu_utils.base.process import Peers
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.train_config import TrainConfig

if TYPE_CHECKING:
    from tpu_utils.remote.storage import Mirror


class RunLock:
    """One run at a time in a run directory: an flock on the folder itself, and one on its file `lock`.

    The folder's lock stays when the file is deleted or replaced. The file names the holder. It is locked too because a
    network file system may lock a folder on this host alone, or not at all: NFS wants a descriptor that can write, and
    answers EBADF, EINVAL or ENOLCK. The kernel releases both at any death, so what is left never blocks.
    Of the processes of one run only the first takes it.
    """

    patience_seconds = 2.0  # how long to try: for a holder that was killed and is not yet gone

    def __init__(self):
        self._descriptors: list[int] = []

    def release(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def acquire(self, run_dir: Path) -> None:
        """Raises InputError naming the holder."""
        name, deadline, without = run_dir / "lock", time.monotonic() + self.patience_seconds, []
        for path, flags in ((run_dir, os.O_RDONLY), (name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)):
            self._descriptors.append(os.open(path, flags, 0o666))
            while isinstance(error := _flock(self._descriptors[-1]), BlockingIOError | PermissionError):
                if time.monotonic() > deadline:
                    self.release()
                    raise InputError(
                        f"run_dir {run_dir} is in use by {_holder(name)}; expected no other run there; wait for it or "
                        "stop it, or choose another --run_dir"
                    )
                time.sleep(0.05)
            without += [error] if error else []
        if len(without) == 2:
            print(
                f"warning: run_dir {run_dir} is on a file system without locks ({error.strerror}): a second run there "
                "would not be refused",
                file=sys.stderr,
            )
        os.ftruncate(self._descriptors[-1], 0)
        os.write(self._descriptors[-1], f"pid {os.getpid()} on host {socket.gethostname()}\n".encode())

    def check(self, run_dir: Path) -> None:
        """Raises SaveError unless the path still leads to the folder that is locked, in a process that holds the lock.
        The open descriptor keeps the folder's inode from being given to a new folder."""
        if not self._descriptors:
            return
        try:
            if os.path.samestat(os.fstat(self._descriptors[0]), run_dir.stat()):
                return
            found = "another folder"
        except FileNotFoundError:
            found = "nothing"
        except OSError as error:
            found = error.strerror
        raise SaveError(
            f"run_dir {run_dir} is gone: found {found} there, expected the folder that this run has locked; it was "
            "removed, moved or unmounted; put it back (not needed for a run in a bucket) and go on with --resume must, "
            "or start anew in another --run_dir"
        )


def _flock(descriptor: int) -> OSError | None:
    """None once it is locked; BlockingIOError, on NFS also PermissionError, while another holds it; else: no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


def _holder(name: Path) -> str:
    """Who holds the lock, as its file says, which may be gone."""
    try:
        return name.read_text(errors="replace").strip() or "another process"
    except OSError:
        return "another process"


def open_run_dir(config: TrainConfig, lock: RunLock | None = None) -> Path:
    """The run directory, made, locked and proved writable; of a gs:// directory the local folder that a Mirror uploads.
    Raises InputError where it cannot be written, is in use by another run, or already holds one."""
    now = datetime.datetime.now()
    run_dir = Path(config.run_dir or f"runs/{config.preset}_{now:%Y%m%d_%H%M%S_%f}")
    if config.compile_for:
        return run_dir  # nothing runs, nothing is written
    if config.run_dir.startswith("gs://"):
        from tpu_utils.remote.storage import open_bucket_dir  # only here: nothing else needs the storage's client

        run_dir = open_bucket_dir(config.run_dir, config.resume)
        if lock:
            lock.acquire(run_dir)
        return run_dir
    if config.resume == "must" and not run_dir.exists():
        raise InputError(f"{run_dir} holds no complete checkpoint to go on from: it does not exist; check --run_dir")
    events = run_dir / "tensorboard"  # traces are written below it, in plugins/profile/TIME
    for inner in chain((run_dir / "checkpoints", events), events.rglob("*")):
        if inner.is_symlink():  # in a directory that came from elsewhere: a run deletes and writes there
            raise InputError(f"{inner} is a link, expected a folder; give the directory it leads into as --run_dir")
    try:
        run_dir.resolve().mkdir(parents=True, exist_ok=True)  # a link to what is not there yet leads there
        if lock:
            lock.acquire(run_dir)
        held = (run_dir / "config.json").exists() or any((run_dir / "checkpoints").glob("step_*/done"))
        if config.resume == "never" and held:
            raise InputError(
                f"run_dir {run_dir} already holds a run; choose another, or continue it with --resume auto"
            )
        write_atomically(run_dir / "writable", b"")
        (run_dir / "writable").unlink()
    except OSError as error:
        raise InputError(
            f"run_dir {run_dir} cannot be written: {error.strerror}; choose another with --run_dir"
        ) from error
    return run_dir


class RunDir:
    """The directory of a run, as its processes use it."""

    def __init__(self, peers: Peers):
        self._peers, self._lock, self.folder = peers, RunLock(), Path()
        self.mirror: Mirror | None = None  # keeps a bucket equal to the folder, where run_dir is a gs:// address
        self.run_id = ""  # id of the run in the folder; "": there is none yet, or config.json is damaged

    def open(self, config: TrainConfig) -> None:
        """Make and lock it. Raises InputError, on all processes, as open_run_dir does."""
        self.folder = Path(self._peers.from_first(lambda: str(open_run_dir(config, self._lock))))
        if config.run_dir.startswith("gs://") and not config.compile_for:
            from tpu_utils.remote.storage import Mirror  # only here

            self.mirror = Mirror(config.run_dir, config.resume, self.folder, self._peers)
            self.folder = self.mirror.folder  # each process has its own
        self.run_id = self._peers.from_first(self._read_run_id)

    def _read_run_id(self) -> str:
        if not (self.folder / "config.json").exists():
            return ""
        from tpu_utils.base.files import field_in  # only where there is a run

        return field_in(self.folder / "config.json", "run_id", str) or ""

    def check(self) -> None:
        """Raises SaveError, on all processes, when the path no longer leads to the folder that was locked."""
        self._peers.from_first(self.check_own)

    def check_own(self) -> None:
        """As check(), in this process alone."""
        self._lock.check(self.folder)

    def close(self) -> None:
        self._lock.release()
