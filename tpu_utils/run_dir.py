"""The run directory: made, locked, and proved to belong to this run."""

import datetime
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from config import TrainConfig
from tpu_utils.errors import InputError
from tpu_utils.files import open_regular, parse_json, write_atomically
from tpu_utils.storage import open_bucket_dir


class RunLock:
    """One run at a time in a run directory: an flock on its file `lock`.

    The kernel releases it at any death, so a stale file never blocks. Of the processes of one run only the first takes
    it.
    """

    patience_seconds = 2.0
    """How long to try: for a holder that was killed and is not yet gone."""

    def __init__(self):
        self._file: TextIO | None = None

    def release(self) -> None:
        if self._file:
            self._file.close()

    def acquire(self, run_dir: Path) -> None:
        """Raises InputError naming the holder."""
        self._file, deadline = (run_dir / "lock").open("a+"), time.monotonic() + self.patience_seconds
        while not self._try(run_dir):
            if time.monotonic() > deadline:
                self._file.seek(0)
                holder = self._file.read().strip() or "another process"
                self._file.close()
                raise InputError(
                    f"run_dir {run_dir} is in use by {holder}; expected no other run there; wait for it or stop it, or "
                    "choose another --run_dir"
                )
            time.sleep(0.05)
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()} on host {socket.gethostname()}\n")
        self._file.flush()

    def _try(self, run_dir: Path) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the second is what NFS may say
            return False
        except OSError as error:
            print(
                f"warning: run_dir {run_dir} is on a file system without locks ({error.strerror}): a second run there "
                "would not be refused",
                file=sys.stderr,
            )
        return True


def open_run_dir(config: TrainConfig, lock: RunLock | None = None) -> Path:
    """The run directory, made, locked and proved writable; of a gs:// directory the local folder that a Mirror uploads.

    Raises InputError where it cannot be written, is in use by another run, or already holds one.
    """
    now = datetime.datetime.now()
    run_dir = Path(config.run_dir or f"runs/{config.preset}_{now:%Y%m%d_%H%M%S_%f}")
    if config.compile_for:
        return run_dir  # nothing runs, nothing is written
    if config.run_dir.startswith("gs://"):
        run_dir = open_bucket_dir(config.run_dir, config.resume)
        if lock:
            lock.acquire(run_dir)
        return run_dir
    if config.resume == "must" and not run_dir.exists():
        raise InputError(f"{run_dir} holds no complete checkpoint to go on from: it does not exist; check --run_dir")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if lock:
            lock.acquire(run_dir)
        if config.resume == "never" and (run_dir / "config.json").exists():
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


def check_same_run(config: dict[str, Any], saved: dict[str, Any], free: set[str]) -> None:
    """Raises InputError if a field that shapes the computation is not what the checkpoint was made with.

    free: names of the fields that may differ.
    """
    names = sorted((config.keys() | saved.keys()) - free)
    changed = [f"{n} is {config.get(n)!r}, was {saved.get(n)!r}" for n in names if config.get(n) != saved.get(n)]
    if changed:
        raise InputError(
            f"this is not the run the checkpoint belongs to: {'; '.join(changed)}; repeat the old values, "
            "or start anew in another --run_dir"
        )


def run_id_in(run_dir: Path) -> str:
    """Of the run that a directory holds; its checkpoints name it too. "" for none, or when config.json is damaged."""
    try:
        with open_regular(run_dir / "config.json") as file:
            found = parse_json(file.read(2**20))
    except (OSError, ValueError):
        return ""
    run_id = found.get("run_id") if isinstance(found, dict) else None
    return run_id if isinstance(run_id, str) else ""


def write_config(run_dir: Path, run: dict[str, Any]) -> None:
    """config.json: from here on the directory holds a run."""
    write_atomically(run_dir / "config.json", json.dumps(run, indent=2).encode())
