"""A training run on four pretended hosts that loses them again and again, and what each loss costs.

Run:     python benchmarks/lost_hosts.py --losses 100     # 12 kinds in turn; about 30 s each on two cores
         python benchmarks/lost_hosts.py --elastic 5      # a machine that stays away: on with three, then four again
Prints:  docs/results/lost_machines.csv: the kind of loss, how often, seconds until the next checkpoint, and by cause
         what tools.keep_running counted (medians); then whether the last checkpoint and all losses have the bits of a
         run that lost nothing.
         With --elastic the mesh changes: how far the losses are from that run's.
         Exit code 1 if they differ (by more than 1e-5 with --elastic), or the run ended by itself.

XLA's client of the CPU knows no other process (tests/transformer_hosts.py): each host computes the whole batch on the
two devices of each host, and what the hosts say to each other stands for the collectives. The keepers, the meeting, the
saves on disk and in memory, and the losses are real.
"""

import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from processes import environment_with, free_port

from benchmarks.children import ROOT, as_csv, logged, parser_for, unequal_files
from tpu_utils.base.restarts import memory_folder, newest_checkpoint

HOSTS = 4
TIME_LIMIT = 600.0
OPTIONS = ["--num_layers=1", "--num_heads=2", "--embedding_dim=32", "--sequence_length=16", "--num_steps=1000000"]
OPTIONS += ["--global_batch_size=24", "--warmup_steps=0", "--eval_every=10", "--eval_batches=1", "--log_every=10"]
OPTIONS += ["--device=cpu", "--no_tensorboard", "--scheduler=constant", "--learning_rate=1e-4"]
HERE = {"TPU_SKIP_MDS_QUERY": 1, "OMP_NUM_THREADS": 1, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
"""Many processes on few cores: one thread each, and a third of the seconds to compile."""
SAVES = ["--save_every=50", "--save_memory_every=5"]
THROUGH = "127.0.0.9"
"""Where host 1 finds host 0: a connection that can be closed."""


class Ended(Exception):
    """The run ended by itself, or never got further."""


class Network:
    """Between host 1 and host 0. Closed, it takes everything and hands nothing on."""

    def __init__(self, *ports: int):
        self.is_open = threading.Event()
        self.is_open.set()
        for port in ports:
            listener = socket.create_server((THROUGH, port))
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection(("localhost", port))
            except OSError:  # nobody listens yet
                near.close()
                continue
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._hand_on, args=pair, daemon=True).start()

    def _hand_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                self.is_open.wait()
                target.sendall(content)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Slice:
    """HOSTS keepers and their scripts in one run directory; each host has a memory of its own."""

    def __init__(self, folder: Path, elastic: bool):
        self.folder, self.run_dir, self.elastic = folder, folder / "lost", elastic
        self.port, self.meet_at = free_port(), free_port()
        self.network = Network(self.port, self.meet_at)
        self.keepers: dict[int, subprocess.Popen] = {}
        for index in range(HOSTS):
            self.start(index)

    def memory_of(self, index: int) -> Path:
        return self.folder / f"memory_{index}"

    def start(self, index: int) -> None:
        self.memory_of(index).mkdir(exist_ok=True)
        names = ",".join([THROUGH if index == 1 else "localhost", *["localhost"] * (HOSTS - 1)])
        here = HERE | {"TPU_WORKER_ID": index, "TPU_WORKER_HOSTNAMES": names}
        words = ["-m", "tools.keep_running", f"--port={self.port}", "--silent_minutes=1", "--most_failures=20"]
        words += ["--elastic", "--wait_seconds=20"] if self.elastic else []
        words += ["--", "tests/transformer_hosts.py", str(index), str(HOSTS), str(self.meet_at), "--devices_per_host=2"]
        words += [*OPTIONS, *SAVES, f"--run_dir={self.run_dir}", f"--memory_dir={self.memory_of(index)}"]
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
        """The machine: its keeper and its memory too."""
        self.keepers[index].kill()
        self.keepers.pop(index).wait()
        shutil.rmtree(self.memory_of(index), ignore_errors=True)  # its script may still be ending

    def newest(self) -> int:
        return newest_checkpoint(
            self.run_dir / "checkpoints", *(memory_folder(self.run_dir, self.memory_of(i)) for i in range(HOSTS))
        )

    def further(self) -> None:
        """Until there is another checkpoint, on disk or in memory."""
        before = self.newest()
        self.until(lambda: self.newest() > before)

    def is_saving(self) -> bool:
        places = (self.run_dir / "checkpoints", memory_folder(self.run_dir, self.memory_of(0)))
        return any(found for place in places for found in place.glob(".writing_*"))

    def restarts(self) -> list[dict]:
        return [line for line in logged(self.run_dir) if line["kind"] == "restart"]

    def restarted(self, lose: Callable[[], object]) -> None:
        """Lose something, and wait until the restart is in the log."""
        before = len(self.restarts())
        lose()
        self.until(lambda: len(self.restarts()) > before)


def in_a_save(hosts: Slice) -> None:
    hosts.until(hosts.is_saving)
    hosts.kill(0)


def in_an_evaluation(hosts: Slice) -> None:
    """The step's own line is there, the evaluation's not yet."""
    log = hosts.run_dir / "metrics.jsonl"
    size = log.stat().st_size
    hosts.until(lambda: b'"train"' in log.read_bytes()[size:])
    hosts.kill(2)


def in_the_meeting(hosts: Slice) -> None:
    """One is lost, and a second while the others wait for the first."""
    hosts.restarted(lambda: hosts.kill(1))
    pid = hosts.script(3)
    time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def twice_in_a_row(hosts: Slice) -> None:
    hosts.kill(2)
    time.sleep(1.0)
    hosts.kill(1)


def frozen_machine(hosts: Slice) -> None:
    script, keeper = hosts.script(1), hosts.keepers[1]
    hosts.restarted(lambda: [os.kill(pid, signal.SIGSTOP) for pid in (keeper.pid, script)])
    keeper.send_signal(signal.SIGCONT)


def network_closed(hosts: Slice) -> None:
    """Between host 1 and host 0, until both have given the other up."""
    hosts.restarted(hosts.network.is_open.clear)
    hosts.network.is_open.set()


def machine_away(hosts: Slice) -> None:
    """The others go on without it; it is there again when another script is lost."""
    hosts.restarted(lambda: hosts.lose(2))
    hosts.further()
    hosts.start(2)
    hosts.further()
    hosts.restarted(lambda: hosts.kill(1))


LOSSES: dict[str, Callable[[Slice], None]] = {
    "the script of one host": lambda hosts: hosts.kill(1),
    "the scripts of two hosts": lambda hosts: (hosts.kill(1), hosts.kill(2)),
    "the script of the first host": lambda hosts: hosts.kill(0),
    "a machine": lambda hosts: (hosts.lose(2), hosts.start(2)),
    "the first machine": lambda hosts: (hosts.lose(0), hosts.start(0)),
    "in a save": in_a_save,
    "in an evaluation": in_an_evaluation,
    "in the meeting": in_the_meeting,
    "twice in a row": twice_in_a_row,
    "frozen by SIGSTOP": lambda hosts: os.kill(hosts.script(3), signal.SIGSTOP),
    "a frozen machine": frozen_machine,
    "the network between two": network_closed,
}


def losses_of(run_dir: Path) -> dict[int, float]:
    lines = [line for line in logged(run_dir) if line["kind"] == "train"]
    losses = {line["step"]: line["loss"] for line in lines}
    assert len(losses) == len(lines), "a step stands there twice"
    return losses


def differences(whole: Path, lost: Path) -> list[str]:
    """Checkpoint files whose bytes differ between the two runs, and up to 9 steps whose losses do."""
    last = [sorted(folder.glob("checkpoints/step_*"))[-1] for folder in (whole, lost)]
    if last[0].name != last[1].name:
        return [f"{last[0].name} and {last[1].name}"]
    found = unequal_files(*last, "*.safetensors")
    ours, theirs = losses_of(whole), losses_of(lost)
    return found + [f"loss of step {step}" for step in sorted(ours | theirs) if ours.get(step) != theirs.get(step)][:9]


def run_whole(run_dir: Path, steps: int) -> None:
    """The same program, on one host that has all devices, and loses nothing."""
    command = [sys.executable, "tests/transformer_hosts.py", "0", "1", "0", f"--devices_per_host={2 * HOSTS}"]
    command += [*OPTIONS, f"--num_steps={steps}", f"--run_dir={run_dir}"]  # the last one of an option counts
    subprocess.run(command, cwd=ROOT, env=environment_with(HERE), stdout=subprocess.DEVNULL, check=True)


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--losses", type=int, default=len(LOSSES))
    parser.add_argument("--elastic", type=int, default=0, metavar="N", help="N machines that stay away, and no others")
    options = parser.parse_args()
    kinds = {"a machine stays away": machine_away} if options.elastic else LOSSES
    lost: dict[str, list[tuple[float, int]]] = defaultdict(list)  # seconds; lines of kind restart before it
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        folder = Path(made)
        hosts = Slice(folder, bool(options.elastic))
        try:
            hosts.until(hosts.newest)
            for number in range(options.elastic or options.losses):
                name = list(kinds)[number % len(kinds)]
                told, began = len(hosts.restarts()), time.monotonic()
                if name == "the first machine":  # its keeper counts anew, and notes nothing of its own loss
                    kinds[name](hosts)
                else:
                    hosts.restarted(lambda name=name: kinds[name](hosts))
                hosts.further()
                lost[name].append((time.monotonic() - began, told))
                print(f"{number + 1:4} {name}: {lost[name][-1][0]:.1f} s", file=sys.stderr, flush=True)
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
        last, restarts = newest_checkpoint(hosts.run_dir / "checkpoints"), hosts.restarts()
        run_whole(folder / "whole", last)
        if options.elastic:
            ours, theirs = losses_of(folder / "whole"), losses_of(hosts.run_dir)
            farthest = max(abs(ours[step] - theirs[step]) for step in ours)
            good, said = farthest <= 1e-5 and ours.keys() == theirs.keys(), f"losses within {farthest:.1e}"
        else:
            different = differences(folder / "whole", hosts.run_dir)
            good, said = not different, f"DIFFERENT: {different}" if different else "the same bits"
    table = [["lost", "times", "s to the next checkpoint", "restart", "recompile", "lost steps", "silence"]]
    # the line of a loss has the steps lost by it; the start after it stands in the line of the next loss
    places = dict(restart=1, recompile=1, lost_steps=0, silence=0)
    for name, found in lost.items():
        columns = [[seconds for seconds, _ in found]]
        for cause, later in places.items():
            lines = [line for _, told in found for line in restarts[told + later : told + later + 1]]
            columns.append([line[cause] for line in lines if cause in line])
        table.append([name, len(found), *(f"{statistics.median(values or [0.0]):.1f}" for values in columns)])
    print(as_csv(table), end="")
    print(f"\nexit codes {codes}; {last} steps; {said}", file=sys.stderr)
    return int(not good or codes != [143] * HOSTS)


if __name__ == "__main__":
    sys.exit(main())
