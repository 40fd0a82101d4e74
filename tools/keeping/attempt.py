"""One start of a training script, and what it costs when it is lost."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_utils.base.errors import InputError
from tpu_utils.base.files import open_regular, parse_json
from tpu_utils.base.restarts import ends_with_this, newest_checkpoint

STACKS_SECONDS = 5.0
"""For a stuck script to print where its threads stand; Python's handler needs a fraction of a second."""
MOST_BYTES = 1 << 20  # most bytes of the log to read at once


class Attempt:
    """`python SCRIPT OPTIONS`, started. Times are of time.monotonic()."""

    def __init__(self, command: list[str], run_dir: Path, saves: Sequence[Path], environment: Mapping[str, str]):
        """saves: where its checkpoints are, on disk and in memory."""
        self.child = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *command],
            env=os.environ | dict(environment),
            **ends_with_this(),  # nothing may hold the chips
        )
        self.log = run_dir / "metrics.jsonl"
        self.saves = saves
        self.began = time.monotonic()
        self.newest = {folder: newest_checkpoint(folder) for folder in saves}  # what was there before
        self.logged: float | None = None
        """When its first line came: what is before is starting up, restoring and compiling."""
        self.saved: float | None = None  # when its newest checkpoint was complete
        self.moved = self.began  # when it last logged or saved
        self.ended = False
        self.compiled: float | None = None  # seconds that it compiled before its first steps, once it has said so
        self._seen = self._state()

    def _state(self) -> tuple[int, int]:
        """(bytes logged, newest checkpoint): what changes when a script moves."""
        size = 0
        with contextlib.suppress(OSError):
            size = self.log.stat().st_size
        return size, newest_checkpoint(*self.saves)

    def has_saved(self) -> bool:
        return any(newest_checkpoint(folder) > before for folder, before in self.newest.items())

    def look(self) -> int | None:
        """Its exit code, None while it runs; or minus the signal that killed it."""
        now, (size, saved) = time.monotonic(), self._state()
        if size > self._seen[0]:
            self.logged = self.logged or now
            if self.compiled is None:
                self.compiled = compile_seconds_in(self.log, self._seen[0])
        if saved > self._seen[1]:
            self.saved = now
        if (size, saved) != self._seen:
            self._seen, self.moved = (size, saved), now
        if (code := self.child.poll()) is not None:
            self._end_group()
        return code

    def pass_on(self, number: int) -> None:
        """A signal, to the script alone."""
        if self.child.poll() is None:
            self.child.send_signal(number)

    def end(self) -> None:
        """End it, stuck or not, and what it has started. By SIGABRT: faulthandler prints the stacks, and the process
        dies. A frozen one has to be woken for that."""
        if self.child.poll() is None:
            for number in (signal.SIGABRT, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    self.child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(STACKS_SECONDS)
            if self.child.poll() is None:
                self.child.kill()
                self.child.wait()
        self._end_group()

    def _end_group(self) -> None:
        """What it has started, at once when it has ended: later its number may be that of another group."""
        if not self.ended:
            self.ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)

    def lost_seconds(self, is_first: bool, silent: bool) -> dict[str, float]:
        """By cause. The first start is no loss; work since the newest checkpoint is."""
        now = time.monotonic()
        working = self.moved if silent else now
        start_up_ends = min(self.logged or working, working)
        compiled = min(self.compiled or 0.0, start_up_ends - self.began)
        restart = {"restart": start_up_ends - self.began - compiled, "recompile": compiled}
        lost = {} if is_first and self.logged else restart
        lost["lost_steps"] = max(0.0, working - max(self.saved or 0.0, start_up_ends))
        return lost | {"silence": now - working}


def compile_seconds_in(log: Path, offset: int) -> float | None:
    """What the first train line of a process says, among the lines from this byte on; None where it is not there."""
    with contextlib.suppress(OSError, InputError), open_regular(log, "the lines of a run", follow=False) as file:
        file.seek(offset)
        for line in file.read(MOST_BYTES).split(b"\n"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return float(parse_json(line)["began_with"]["compile"])
    return None
