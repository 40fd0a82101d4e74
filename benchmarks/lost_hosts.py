"""A training run on four pretended hosts that loses them again and again, and what each loss costs.

Run:     python benchmarks/lost_hosts.py --losses 100     # 11 kinds in turn; about 25 s each on two cores
Prints:  a table: the kind of loss, how often, seconds until the next checkpoint, and by cause what tools.keep_running
         counted (medians); then whether the last checkpoint and all losses have the bits of a run that lost nothing.
         Exit code 1 if they have not, or the run ended by itself.

XLA's client of the CPU knows no other process (tests/distributed_hosts.py): each host computes the whole batch on its
own device, and what the hosts say to each other stands for the collectives. The keepers, the meeting, the saves and the
kills are real.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from processes import ROOT, environment_with, free_port

from tpu_utils.restarts import newest_checkpoint

HOSTS = 4
TIME_LIMIT = 600.0
OPTIONS = ["--num_layers=1", "--num_heads=2", "--embedding_dim=32", "--sequence_length=16", "--num_steps=1000000"]
OPTIONS += ["--global_batch_size=4", "--warmup_steps=0", "--eval_every=20", "--eval_batches=1", "--log_every=10"]
OPTIONS += ["--save_every=10", "--device=cpu", "--no_tensorboard", "--scheduler=constant"]


class Ended(Exception):
    """The run ended by itself, or never got further."""


class Slice:
    """HOSTS keepers and their scripts in one run directory."""

    def __init__(self, folder: Path):
        self.folder, self.run_dir = folder, folder / "lost"
        self.port, self.meet_at = free_port(), free_port()
        self.keepers: dict[int, subprocess.Popen] = {}
        for index in range(HOSTS):
            self.start(index)

    def start(self, index: int) -> None:
        names = ",".join(["localhost"] * HOSTS)
        here = {"TPU_WORKER_ID": index, "TPU_WORKER_HOSTNAMES": names, "TPU_SKIP_MDS_QUERY": 1, "OMP_NUM_THREADS": 1}
        words = ["-m", "tools.keep_running", f"--port={self.port}", "--silent_minutes=1", "--most_failures=20", "--"]
        words += [*command_of(index, HOSTS, self.meet_at), *OPTIONS, f"--run_dir={self.run_dir}"]
        with (self.folder / f"host_{index}.log").open("ab") as log:
            self.keepers[index] = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=environment_with(here), stdout=log, stderr=log
            )

    def script(self, index: int) -> int:
        """Its process, once there is one."""
        keeper = self.keepers[index].pid
        (found,) = self.until(lambda: Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[:1])
        return int(found)

    def until(self, condition: Callable):
        deadline = time.monotonic() + TIME_LIMIT
        while not (found := condition()):
            if time.monotonic() > deadline or any(keeper.poll() is not None for keeper in self.keepers.values()):
                raise Ended({index: keeper.poll() for index, keeper in self.keepers.items()})
            time.sleep(0.01)
        return found

    def kill(self, index: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.script(index), signal.SIGKILL)

    def lose(self, index: int) -> None:
        """The machine: its keeper too. It comes back."""
        self.keepers[index].kill()
        self.keepers[index].wait()
        self.start(index)

    def is_saving(self) -> bool:
        return any(self.run_dir.glob("checkpoints/.writing_*"))

    def size(self) -> int:
        with contextlib.suppress(OSError):
            return (self.run_dir / "metrics.jsonl").stat().st_size
        return 0

    def restarts(self) -> list[dict]:
        with contextlib.suppress(OSError):
            text = (self.run_dir / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines() if '"restart"' in line]
        return []


def command_of(index: int, count: int, port: int) -> list[str]:
    return ["tests/transformer_hosts.py", str(index), str(count), str(port)]


def in_a_save(hosts: Slice) -> None:
    hosts.until(hosts.is_saving)
    hosts.kill(0)


def in_an_evaluation(hosts: Slice) -> None:
    """The step's own line is there, the evaluation's not yet: they are of the same step, every 20."""
    size, log = hosts.size(), hosts.run_dir / "metrics.jsonl"

    def begun() -> bool:
        lines = [line for line in log.read_bytes()[size:].split(b"\n")[:-1] if b'"train"' in line]
        return any(json.loads(line)["step"] % 20 == 0 for line in lines[-1:])

    hosts.until(begun)
    hosts.kill(2)


def in_the_meeting(hosts: Slice) -> None:
    """One is lost, and a second while the others wait for the first."""
    hosts.kill(1)
    before = len(hosts.restarts())
    hosts.until(lambda: len(hosts.restarts()) > before)
    pid = hosts.script(3)
    time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def twice_in_a_row(hosts: Slice) -> None:
    hosts.kill(2)
    time.sleep(1.0)
    hosts.kill(1)


def frozen(hosts: Slice) -> None:
    os.kill(hosts.script(3), signal.SIGSTOP)


def unreachable(hosts: Slice) -> None:
    """Nothing comes from this machine for a while, as where the network between two is closed."""
    script, keeper = hosts.script(1), hosts.keepers[1]
    for pid in (keeper.pid, script):
        os.kill(pid, signal.SIGSTOP)
    before = len(hosts.restarts())
    hosts.until(lambda: len(hosts.restarts()) > before)
    keeper.send_signal(signal.SIGCONT)


LOSSES: dict[str, Callable[[Slice], None]] = {
    "the script of one host": lambda hosts: hosts.kill(1),
    "the scripts of two hosts": lambda hosts: (hosts.kill(1), hosts.kill(2)),
    "the script of the first host": lambda hosts: hosts.kill(0),
    "a machine": lambda hosts: hosts.lose(2),
    "the first machine": lambda hosts: hosts.lose(0),
    "in a save": in_a_save,
    "in an evaluation": in_an_evaluation,
    "in the meeting": in_the_meeting,
    "twice in a row": twice_in_a_row,
    "frozen by SIGSTOP": frozen,
    "a machine that cannot be reached": unreachable,
}


def same_bits(whole: Path, lost: Path) -> list[str]:
    """What differs."""
    found = []
    last = [sorted(folder.glob("checkpoints/step_*"))[-1] for folder in (whole, lost)]
    if last[0].name != last[1].name:
        return [f"{last[0].name} and {last[1].name}"]
    for file in sorted(last[0].glob("*.safetensors")):
        if file.read_bytes() != (last[1] / file.name).read_bytes():
            found.append(file.name)
    losses = []
    for folder in (whole, lost):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append({(line["kind"], line["step"]): line.get("loss") for line in lines if line["kind"] == "train"})
    differing = [key for key in losses[0] if losses[0][key] != losses[1].get(key)]
    return found + [f"loss of step {step}" for _, step in differing[:5]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=len(LOSSES))
    options = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    causes: dict[str, list[dict]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        hosts = Slice(folder)
        try:
            hosts.until(lambda: newest_checkpoint(hosts.run_dir))
            for number in range(options.losses):
                name = list(LOSSES)[number % len(LOSSES)]
                told, began = len(hosts.restarts()), time.monotonic()
                LOSSES[name](hosts)
                if name != "the first machine":  # its keeper counts anew, and notes nothing of its own loss
                    hosts.until(lambda told=told: len(hosts.restarts()) > told)
                had = newest_checkpoint(hosts.run_dir)
                hosts.until(lambda had=had: newest_checkpoint(hosts.run_dir) > had)
                seconds[name].append(time.monotonic() - began)
                causes[name] += hosts.restarts()[told:]
                print(f"{number + 1:4} {name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
            hosts.keepers[1].send_signal(signal.SIGTERM)  # one of them: all agree on the step to stop after
            codes = [keeper.wait(TIME_LIMIT) for keeper in hosts.keepers.values()]
        except Ended as ended:
            print(f"the run ended by itself: {ended}", file=sys.stderr)
            for index in range(HOSTS):
                print((folder / f"host_{index}.log").read_text()[-2000:], file=sys.stderr)
            return 1
        finally:
            for keeper in hosts.keepers.values():
                keeper.kill()
        last = newest_checkpoint(hosts.run_dir)
        given = [word for word in OPTIONS if not word.startswith("--num_steps")]
        port, whole = free_port(), folder / "whole"
        plain = [
            subprocess.Popen(
                [sys.executable, *command_of(index, HOSTS, port), *given, f"--num_steps={last}", f"--run_dir={whole}"],
                cwd=ROOT,
                env=environment_with({"OMP_NUM_THREADS": 1}),
                stdout=subprocess.DEVNULL,
            )
            for index in range(HOSTS)
        ]
        assert [process.wait(10 * TIME_LIMIT) for process in plain] == [0] * HOSTS
        different = same_bits(whole, hosts.run_dir)
    print("| lost | times | s to the next checkpoint | restart | lost steps | silence |")
    print("|---|---|---|---|---|---|")
    for name, found in seconds.items():
        by_cause = [[line.get(cause, 0.0) for line in causes[name]] for cause in ("restart", "lost_steps", "silence")]
        cells = [f"{statistics.median(values or [0.0]):.1f}" for values in (found, *by_cause)]
        print(f"| {name} | {len(found)} | {' | '.join(cells)} |")
    print(f"\nexit codes {codes}; {last} steps; " + (f"DIFFERENT: {different}" if different else "the same bits"))
    return int(bool(different) or codes != [143] * HOSTS)


if __name__ == "__main__":
    sys.exit(main())
