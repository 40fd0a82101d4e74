"""One start of a training script, and what it costs when it is lost."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tpu_utils.restarts import newest_checkpoint

STACKS_SECONDS = 5.0
"""For a stuck script to print where its threads stand; Python's handler needs a fraction of a second."""
PR_SET_PDEATHSIG = 1


class Attempt:
    """`python SCRIPT OPTIONS`, started. Times are of time.monotonic()."""

    def __init__(self, command: list[str], run_dir: Path, environment: Mapping[str, str]):
        libc = ctypes.CDLL(None)
        self.child = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *command],
            env=os.environ | dict(environment),
            start_new_session=True,  # what it starts is reached as a group; Ctrl-C comes through this process
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # nothing may hold the chips
        )
        self.run_dir, self.began = run_dir, time.monotonic()
        self.first_step = newest_checkpoint(run_dir)
        """It goes on from there."""
        self.logged: float | None = None
        """When its first line came: what is before is starting up, restoring and compiling."""
        self.saved: float | None = None
        """When its newest checkpoint was complete."""
        self.moved = self.began
        """When it last logged or saved."""
        self._seen = self._state()

    def _state(self) -> tuple[int, int]:
        """(bytes logged, newest checkpoint): what changes when a script moves."""
        size = 0
        with contextlib.suppress(OSError):
            size = (self.run_dir / "metrics.jsonl").stat().st_size
        return size, newest_checkpoint(self.run_dir)

    def look(self) -> int | None:
        """Its exit code, None while it runs; or minus the signal that killed it."""
        now, (size, saved) = time.monotonic(), self._state()
        if size > self._seen[0]:
            self.logged = self.logged or now
        if saved > self._seen[1]:
            self.saved = now
        if (size, saved) != self._seen:
            self._seen, self.moved = (size, saved), now
        return self.child.poll()

    def end(self) -> None:
        """End it, stuck or not, and what it has started.

        By SIGABRT: faulthandler prints the stacks, and the process dies. A frozen one has to be woken for that.
        """
        if self.child.poll() is None:
            for number in (signal.SIGABRT, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    self.child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(STACKS_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def lost_seconds(self, is_first: bool, silent: bool) -> dict[str, float]:
        """By cause. The first start is no loss; work since the newest checkpoint is."""
        now = time.monotonic()
        working = self.moved if silent else now
        start_up_ends = min(self.logged or working, working)
        lost = {} if is_first and self.logged else {"restart": start_up_ends - self.began}
        lost["lost_steps"] = max(0.0, working - max(self.saved or 0.0, start_up_ends))
        return lost | {"silence": now - working}
