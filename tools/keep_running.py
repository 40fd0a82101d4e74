"""Keep a training run going on this machine: start its script again, from its newest checkpoint, whenever it ends.

Run:     python -m tools.keep_running -- transformer_tpu.py --preset production --run_dir runs/mine
         python -m tools.keep_running --silent_minutes 10 -- SCRIPT OPTIONS

The script is started again where it failed, was killed, or logged nothing and saved nothing for --silent_minutes; then
it prints where every thread stands (also in C++ code: Python's faulthandler), and is killed. It is not started again
where it ended well or refused its options (exit code 2), nor after a SIGTERM, SIGINT or SIGHUP to this command, which
passes them on.

Each end is a line of kind restart in RUN_DIR/metrics.jsonl, with the reason and the seconds that it cost. At the end
summary.json has them by cause, of all attempts: keep_running.

It keeps the script of one host. On a slice of several hosts a script waits for the others: its silence alone ends it.
"""

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tpu_utils.errors import InputError, run_script
from tpu_utils.fields import parse_arguments
from tpu_utils.files import read_json, write_atomically
from tpu_utils.restarts import newest_checkpoint, options_in, to_go_on
from tpu_utils.run_dir import RunLock

LOOK_SECONDS = 0.2
STACKS_SECONDS = 5.0
"""For a stuck script to print where its threads stand; Python's handler needs a fraction of a second."""
LONGEST_WAIT = 60.0
PR_SET_PDEATHSIG = 1


@dataclass
class Attempt:
    """One start of the script. Times are of time.monotonic()."""

    began: float
    logged: float | None = None
    """When its first line came: what is before is starting up, restoring and compiling."""
    saved: float | None = None
    """When its newest checkpoint was complete."""
    moved: float = 0.0
    """When it last logged or saved."""
    reason: str = ""
    code: int = 0
    lost: dict[str, float] = field(default_factory=dict)
    """Seconds by cause."""

    def account(self, now: float, is_first: bool, silent: bool) -> None:
        """What its end costs. The first start is no loss; work since the newest checkpoint is."""
        working = self.moved if silent else now
        start_up_ends = min(self.logged or working, working)
        if not is_first or self.logged is None:
            self.lost["restart"] = start_up_ends - self.began
        self.lost["lost_steps"] = max(0.0, working - max(self.saved or 0.0, start_up_ends))
        self.lost["silence"] = now - working


class Keeper:
    """Starts one script again and again. stop: the signal that this command got, or 0."""

    def __init__(self, command: list[str], most_failures: int, silent_seconds: float):
        """Raises InputError for a command that cannot be kept running."""
        if not command or not command[0].endswith(".py") or not Path(command[0]).is_file():
            found = command[0] if command else "nothing"
            raise InputError(f"found {found} after --; expected a training script and its options: -- SCRIPT OPTIONS")
        run_dir = options_in(command[1:]).get("run_dir", "")
        if not run_dir or run_dir.startswith("gs://"):
            raise InputError(
                f"--run_dir is {run_dir!r}; expected a folder: a script that is started again goes on from its "
                "checkpoints there; name one with --run_dir"
            )
        self.command, self.run_dir = command, Path(run_dir)
        self.most_failures, self.silent_seconds = most_failures, silent_seconds
        self.child: subprocess.Popen | None = None
        self.stop = 0
        self.attempts: list[Attempt] = []
        self.lost: dict[str, float] = {}

    def hear(self, number: int, frame) -> None:
        self.stop = self.stop or number
        if self.child and self.child.poll() is None:
            self.child.send_signal(number)

    def start(self) -> None:
        script, *options = self.command
        options = to_go_on(options) if self.attempts else options
        libc = ctypes.CDLL(None)
        self.child = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", script, *options],
            start_new_session=True,  # what it starts is reached as a group; Ctrl-C comes through this process
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # nothing may hold the chips
        )
        self.attempts.append(Attempt(time.monotonic(), moved=time.monotonic()))

    def state(self) -> tuple:
        """What changes when the script logs or saves."""
        size = 0
        with contextlib.suppress(OSError):
            size = (self.run_dir / "metrics.jsonl").stat().st_size
        return size, newest_checkpoint(self.run_dir)

    def watch(self) -> None:
        """Until the script has ended, or was killed for its silence."""
        attempt, (size, saved), silent = self.attempts[-1], self.state(), False
        while self.child.poll() is None and not silent:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            found_size, found_saved = self.state()
            if found_size > size:
                attempt.logged = attempt.logged or now
            if found_saved > saved:
                attempt.saved = now
            if (found_size, found_saved) != (size, saved):
                size, saved, attempt.moved = found_size, found_saved, now
            silent = now - attempt.moved > self.silent_seconds and not self.stop
        if silent:
            self.end_stuck()
        attempt.code = self.child.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)  # what it left behind
        attempt.account(time.monotonic(), len(self.attempts) == 1, silent)
        code = attempt.code
        attempt.reason = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if silent:
            attempt.reason = f"silent for {self.silent_seconds:.0f} s"

    def end_stuck(self) -> None:
        """SIGABRT: faulthandler prints the stacks, and the process dies; frozen, it has to be woken for that."""
        for number in (signal.SIGABRT, signal.SIGCONT):
            os.killpg(self.child.pid, number)
        try:
            self.child.wait(STACKS_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()

    def note(self, step: int) -> None:
        """A line in metrics.jsonl, after what the script had written whole."""
        attempt = self.attempts[-1]
        seconds = {name: round(value, 3) for name, value in attempt.lost.items()}
        line = dict(kind="restart", step=step, attempt=len(self.attempts), reason=attempt.reason, **seconds)
        path, lock = self.run_dir / "metrics.jsonl", RunLock()
        if not path.exists():
            return
        lock.acquire(self.run_dir)
        try:
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            write_atomically(path, whole + json.dumps(line).encode() + b"\n")
        finally:
            lock.release()

    def add(self, lost: dict[str, float]) -> None:
        for name, seconds in lost.items():
            self.lost[name] = self.lost.get(name, 0.0) + seconds

    def run(self) -> int:
        """The script's exit code at its last end; 1 where it failed too often without getting further."""
        failures = 0
        while True:
            before = newest_checkpoint(self.run_dir)
            self.start()
            self.watch()
            attempt = self.attempts[-1]
            if attempt.code == 0:
                # of the end that is no loss; of the start that was none the first time
                self.add({"restart": attempt.lost.get("restart", 0.0)} if len(self.attempts) > 1 else {})
                self.summarise()
                return 0
            if self.stop or attempt.code == 2:
                return attempt.code if attempt.code > 0 else 128 - attempt.code
            step = newest_checkpoint(self.run_dir)
            failures = 0 if step > before else failures + 1
            self.add(attempt.lost)
            self.note(step)
            if failures >= self.most_failures:
                print(
                    f"kept       {attempt.reason}; given up: {failures} attempts, and no checkpoint after step {step}",
                    file=sys.stderr,
                )
                return 1
            wait = min(LONGEST_WAIT, 2.0**failures)
            print(f"kept       {attempt.reason}; goes on from step {step} in {wait:.0f} s", file=sys.stderr, flush=True)
            began = time.monotonic()
            while time.monotonic() < began + wait and not self.stop:
                time.sleep(LOOK_SECONDS)
            self.add({"waiting": time.monotonic() - began})
            if self.stop:
                return 128 + self.stop

    def summarise(self) -> None:
        path = self.run_dir / "summary.json"
        if len(self.attempts) == 1 or not path.exists():
            return
        seconds = {name: round(value, 3) for name, value in self.lost.items()}
        reasons = [attempt.reason for attempt in self.attempts[:-1]]
        kept = dict(attempts=len(self.attempts), ended_by=reasons, lost_seconds=seconds)
        summary = read_json(path, "the summary of a run") | dict(keep_running=kept)
        write_atomically(path, json.dumps(summary, indent=2).encode())
        shown = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
        print(f"kept       ended after {len(self.attempts)} attempts; seconds lost: {shown}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.keep_running", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--most_failures", type=int, default=5,
        help="ends after so many attempts in a row without a new checkpoint (default 5)",
    )  # fmt: skip
    parser.add_argument(
        "--silent_minutes", type=float, default=30.0,
        help="longer than a compile, an evaluation and the steps between two log lines take (default 30)",
    )  # fmt: skip
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    given = parse_arguments(parser, arguments[:at])
    if given.most_failures < 1 or not given.silent_minutes > 0:
        raise InputError("--most_failures and --silent_minutes are numbers above 0")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a stuck script is ended by SIGABRT: no gigabytes on the disk
    keeper = Keeper(arguments[at + 1 :], given.most_failures, 60 * given.silent_minutes)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, keeper.hear)
    return keeper.run()


if __name__ == "__main__":
    sys.exit(run_script(main))
