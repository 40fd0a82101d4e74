"""Keep a training run going: start its script again, from its newest checkpoint, whenever it is lost.

Run:     python -m tools.keep_running -- transformer_tpu.py --preset production --run_dir runs/mine
         python -m tools.keep_running --silent_minutes 10 -- SCRIPT OPTIONS

The script is started again where it failed, was killed, or logged nothing and saved nothing for --silent_minutes; then
it prints where every thread stands (also in C++ code: Python's faulthandler), and is killed. It is not started again
where it ended well or refused its options (exit code 2), nor after a SIGTERM, SIGINT or SIGHUP to this command, which
passes them on. Every start is given --resume auto; a --resume of yours counts for the first.

On a slice of several hosts the same command runs on all of them, with a --run_dir that they share or in a bucket. When
one script or host is lost, all scripts end, and begin again together. Host 0 decides; where it is lost, the others wait
for it.

Each end is a line of kind restart in RUN_DIR/metrics.jsonl, with the reason and the seconds that it cost. At the end
summary.json has them by cause, of all attempts: keep_running. Of a run in a bucket they are printed alone.
"""

import argparse
import difflib
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from tools.keeping.attempt import Attempt
from tools.keeping.team import Alone, First, Other, State, Verdict
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.files import read_json
from tpu_utils.base.restarts import memory_folder, newest_checkpoint, options_in, to_go_on
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.environment import attached_chips
from tpu_utils.options.tool_arguments import make_parser, parse_arguments
from tpu_utils.record.records import LONGEST_LINE
from tpu_utils.record.run_dir import RunLock

LOOK_SECONDS = 0.2
LONGEST_WAIT = 60.0
MEMORY_DIR = "/dev/shm"  # the scripts' default too
NUMBERS = (  # name, type, default, least and most of an option, and its help
    ("most_failures", int, 5, 1, 10**6, "ends after so many attempts in a row without a new checkpoint"),
    ("silent_minutes", float, 30, 1e-3, 1e6, "more than compiling, evaluating, the steps between two log lines take"),
    ("wait_seconds", float, 300, 1e-3, 1e9, "for the other hosts, before each attempt"),
    ("port", int, 12357, 1, 65535, "where host 0 listens, to the slice's hosts alone; the scripts meet at 12356"),
)


def run_dir_of(command: list[str]) -> Path:
    """The run directory; of one in a bucket the folder that host 0 works in. Raises InputError for a command that
    cannot be kept running."""
    if not command or not command[0].endswith(".py") or not Path(command[0]).is_file():
        found = command[0] if command else "nothing"
        raise InputError(
            f"found {found} after --; expected a training script that is here, and its options: -- SCRIPT OPTIONS"
        )
    options = options_in(command[1:])
    if not (run_dir := options.get("run_dir", "")):
        near = difflib.get_close_matches("run_dir", options, 1)
        found = "--run_dir has no value" if "run_dir" in options else "found no --run_dir"
        hint = f" (is --{near[0]} meant?)" if near and near[0] != "run_dir" else ""
        raise InputError(f"{found}{hint}; a script that is started again goes on from its checkpoints there; name it")
    if not run_dir.startswith("gs://"):
        return Path(run_dir)
    from tpu_utils.remote.storage import working_folder  # only here: nothing else needs buckets

    return working_folder(run_dir)


class Keeper:
    """Starts one script again and again, together with the other hosts."""

    def __init__(self, command: list[str], team: Alone, most_failures: int, silent_seconds: float):
        self.command = command
        self.run_dir = run_dir_of(command)
        self.team = team
        options, self.began = options_in(command[1:]), time.monotonic()
        memory = memory_folder(options["run_dir"], options.get("memory_dir") or MEMORY_DIR)
        self.saves = [self.run_dir / "checkpoints", memory]
        # another start empties the folder of a run in a bucket: what is written here would not stay
        self.writes = team.decides and not options["run_dir"].startswith("gs://")
        self.most_failures, self.silent_seconds = most_failures, silent_seconds
        self.attempt: Attempt | None = None
        self.signals: list[int] = []  # heard, to be passed on
        self.stopping = False
        self.count, self.failures = 0, 0
        self.reasons: list[str] = []
        self.lost: Counter[str] = Counter()  # seconds by cause

    def on_signal(self, number: int, frame) -> None:
        """A signal is the script's; where none runs, it is the end."""
        if not self.attempt:
            raise SystemExit(128 + number)
        self.stopping = True
        self.signals.append(number)

    def run(self) -> int:
        """The exit code: the script's own at its last end, 1 where it failed too often without getting further."""
        while True:
            began = time.monotonic()
            variables = self.team.meet()
            if self.count:
                self.lost.update({"waiting": time.monotonic() - began})
            script, *options = self.command
            if self.count or "resume" not in options_in(options):  # also after this command itself was lost
                options = to_go_on(options)
            self.count += 1
            self.attempt = Attempt([script, *options], self.run_dir, self.saves, variables)
            verdict = self.watch()
            attempt = self.attempt
            attempt.end()
            self.attempt = None  # only now: a signal before that would leave what it has started
            if self.stopping and verdict.code is None:  # told so while it was ended
                verdict = verdict._replace(code=1)
            lost = attempt.lost_seconds(self.count == 1, verdict.silent)
            if verdict.code == 0 and self.count > 1:  # its end loses nothing, its start does
                self.lost.update({name: lost[name] for name in ("restart", "recompile")})
                self.summarise()
            if verdict.code is None:
                self.lost.update(lost)
                self.log_restart(verdict.reason, lost)
                self.pause(verdict)
                continue
            if self.failures >= self.most_failures:
                self.log_restart(verdict.reason, lost)
                self.say(f"{verdict.reason}; given up: {self.failures} in a row without a new checkpoint")
            return verdict.code

    def watch(self) -> Verdict:
        """Until the attempt is over, on all hosts."""
        attempt, verdict = self.attempt, None
        while not verdict:
            code = attempt.look()
            waited = time.monotonic() - attempt.moved
            silent = self.team.decides and code is None and waited > self.silent_seconds  # host 0 logs and saves
            heard = len(self.signals)
            verdict = self.team.exchange(State(code, silent, self.stopping))
            # only after host 0 was told: the scripts stop together, and an end that nobody was told of is a loss
            for number in self.signals[:heard]:
                attempt.pass_on(number)
            del self.signals[:heard]
            if not verdict:
                time.sleep(LOOK_SECONDS)
        if self.team.decides:
            moved = attempt.has_saved()
            if verdict.code is None:
                self.failures = 0 if moved else self.failures + 1
                if self.failures >= self.most_failures:
                    verdict = verdict._replace(code=1)
            self.team.tell(verdict)
        return verdict

    def pause(self, verdict: Verdict) -> None:
        wait, began = min(LONGEST_WAIT, 2.0**self.failures), time.monotonic()
        self.say(f"{verdict.reason}; goes on in {wait:.0f} s, from step {newest_checkpoint(*self.saves)}")
        time.sleep(wait)
        self.lost.update({"waiting": time.monotonic() - began})

    def say(self, what: str) -> None:
        if self.team.decides:
            print(f"kept       {what}", file=sys.stderr, flush=True)

    def log_restart(self, reason: str, lost: dict[str, float]) -> None:
        """A line in metrics.jsonl, after what the script had written whole."""
        path, lock = self.run_dir / "metrics.jsonl", RunLock()
        self.reasons.append(reason)
        if not self.writes or not path.exists():
            return
        seconds = {name: round(value, 3) for name, value in lost.items()}
        line = dict(kind="restart", step=newest_checkpoint(*self.saves), attempt=self.count, reason=reason, **seconds)
        try:
            lock.acquire(self.run_dir)
            append_line(path, json.dumps(line).encode())
        except (InputError, OSError) as error:  # a full disk, somebody else's lock: the run matters more than its line
            self.say(f"no line in {path}: {error}")
        finally:
            lock.release()

    def summarise(self) -> None:
        path = self.run_dir / "summary.json"
        seconds = {name: round(value, 3) for name, value in self.lost.items()}
        if self.writes and path.exists():
            total = round(time.monotonic() - self.began, 3)
            kept = dict(attempts=self.count, seconds=total, ended_by=self.reasons, lost_seconds=seconds)
            try:
                summary = read_json(path, "the summary of a run") | dict(keep_running=kept)
                write_atomically(path, json.dumps(summary, indent=2).encode())
            except (InputError, OSError) as error:  # it ended well all the same
                self.say(f"not in {path}: {error}")
        shown = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
        self.say(f"ended after {self.count} attempts; seconds lost: {shown}")


def append_line(path: Path, line: bytes) -> None:
    """After the last whole line, without reading those before. Raises OSError, also for a link or a FIFO."""
    with open(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        start = max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE)
        file.seek(start)
        end = start + file.read().rfind(b"\n") + 1
        file.truncate(end)
        file.seek(end)
        file.write(line + b"\n")


def find_team(given: argparse.Namespace, command: list[str]) -> Alone:
    """Raises InputError, DeviceError where it is not to be found out which hosts there are."""
    silent_seconds, chips = 60 * given.silent_minutes, attached_chips()
    if not chips and not os.environ.get("TPU_WORKER_HOSTNAMES"):
        return Alone(silent_seconds)
    from tpu_utils.remote.hosts import read_secret, settle_hosts  # only here: nothing else asks the VM's metadata

    index, addresses = settle_hosts(chips, dict(os.environ))  # a copy: the script settles its own
    if len(addresses) == 1:
        return Alone(silent_seconds)
    secret = read_secret(options_in(command[1:]).get("peers_secret", ""))
    if index == 0:
        return First(addresses, given.port, secret, silent_seconds, given.wait_seconds, given.elastic)
    return Other(index, addresses, given.port, secret, given.wait_seconds, given.elastic)


def main() -> int:
    parser = make_parser("tools.keep_running", __doc__)
    for name, kind, default, _, _, text in NUMBERS:
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default {default:g})")
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="after --wait_seconds go on with the hosts that are there; the script is told of these alone",
    )
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    given, command = parse_arguments(parser, arguments[:at]), arguments[at + 1 :]
    for name, _, _, least, most, _ in NUMBERS:
        if not least <= getattr(given, name) <= most:
            raise InputError(f"--{name} is {getattr(given, name):g}; expected a number from {least:g} to {most:g}")
    run_dir_of(command)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a stuck script is ended by SIGABRT: no gigabytes on the disk
    keeper = Keeper(command, find_team(given, command), given.most_failures, 60 * given.silent_minutes)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, keeper.on_signal)
    return keeper.run()


if __name__ == "__main__":
    sys.exit(run_script(main))
