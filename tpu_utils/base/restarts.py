"""What whoever starts a training script, once or again, has to know of it. Standard library alone."""

import contextlib
import ctypes
import hashlib
import os
import re
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def ends_with_this() -> dict[str, Any]:
    """Arguments of subprocess.Popen for a child that ends when this process does, however it ends, with all that the
    child has started. It leads a session: Ctrl-C comes to it through this process alone."""
    return dict(start_new_session=True, preexec_fn=partial(end_with, os.getpid()))


def end_with(starter: int | None = None) -> None:
    """The kernel kills this process, the leader of its group, when the one that started it ends; and when this process
    has ended, of that or by itself, the rest of the group is killed.

    Call it between fork and exec, or before there are threads. A process that it forks waits for the end of this one.
    starter: its id; it may have ended already. None: unknown.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    leader = os.getpid()
    if starter not in (None, os.getppid()):
        os.kill(leader, signal.SIGKILL)
    # a signal to the group is not for the process that waits, from its first instruction
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        return
    for descriptor in sorted(Path("/proc/self/fd").iterdir()):  # others wait for the end of a pipe, or for a lock
        with contextlib.suppress(OSError):  # the one that lists them
            os.close(int(descriptor.name))
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    while os.getppid() == leader:  # asked first, too: it may have ended before
        signal.sigwait([signal.SIGUSR1])
    os.killpg(leader, signal.SIGKILL)


def end_with_torchrun() -> None:
    """In a script that torchrun may have started, before there are threads."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getpgrp() == os.getpid():  # and not by what torchrun has started
        end_with()


def options_in(arguments: Sequence[str]) -> dict[str, str]:
    """{"run_dir": "runs/mine", ...} of a script's command line, in either spelling; "" for one without a value."""
    found = {}
    for index, word in enumerate(arguments):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            follows = "".join(arguments[index + 1 : index + 2])
            found[name.replace("-", "_")] = value if equals or follows.startswith("--") else follows
    return found


def to_go_on(arguments: Sequence[str]) -> list[str]:
    """The command line with --resume auto in place of its own --resume."""
    given, dropping = [], False
    for word in arguments:
        if word.startswith("--"):
            dropping = word.partition("=")[0] == "--resume"
        if not dropping:
            given.append(word)
    return [*given, "--resume", "auto"]


def memory_folder(run_dir: str | Path, memory_dir: str | Path) -> Path:
    """Where --save_memory_every keeps this run's checkpoint on this machine. run_dir: as --run_dir names it."""
    named = str(run_dir)
    place = named.rstrip("/") if named.startswith("gs://") else str(Path(named).resolve())
    return Path(memory_dir) / f"checkpoint_{os.geteuid()}_{hashlib.sha256(os.fsencode(place)).hexdigest()[:16]}"


def newest_checkpoint(*folders: Path) -> int:
    """The newest step in these folders of checkpoints; 0 where there is no complete one."""
    names = (path.parent.name for folder in folders for path in folder.glob("step_*/done"))
    return max((int(name[5:]) for name in names if re.fullmatch(r"step_[0-9]{8}", name)), default=0)
