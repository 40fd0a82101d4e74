"""Kill the training scripts at random moments, resume them until they are done, and compare the ends bit by bit.

Run:     python benchmarks/torture.py --kills 50 --seed 0
         python benchmarks/torture.py --kills 10 --variants simple,spmd_8
Prints:  a table: what ran, the signal, the phase it hit, how many, and whether the run ended like one that was never
         stopped: parameters, optimizer state and random state of the last checkpoint, every line of metrics.jsonl but
         its times, summary.json. Exit code 1 if anything differs, 0 otherwise.

A kill is aimed at start-up, a step, a save, a prune or an evaluation; what it hit is read from what the run has
written by then. Every restart is the same command with --resume auto, right after it. The models are tiny: starting
takes most of the time.
"""

import collections
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from documents import write_corpus
from processes import Script
from run_files import numbers, saved_steps, state_in, summary_in

from benchmarks.children import logged, parser_for
from tpu_utils.record.log import BESIDE

OPTIONS = ["--device=cpu", "--no_tensorboard", "--resume=auto", "--warmup_steps=2", "--log_every=11", "--save_every=5"]
OPTIONS += ["--keep_checkpoints=1"]  # so that every save prunes
MNIST = ["--num_epochs=6", "--global_batch_size=128", "--channels=4", "--hidden_dim=16", "--max_shift=2"]
MNIST += ["--eval_batch_size=60"]  # 66 steps, 6 evaluations
GPT = ["--num_layers=1", "--num_heads=2", "--embedding_dim=32", "--sequence_length=16", "--global_batch_size=16"]
GPT += ["--num_steps=66", "--eval_every=11", "--eval_batches=5"]
RESNET = ["--depth=8", "--width=2", "--num_epochs=6", "--global_batch_size=372"]
VARIANTS = {
    "simple": ["simple_mnist_tpu.py", *MNIST],
    "ddp_1": ["ddp_mnist_tpu.py", *MNIST],
    "spmd_4": ["distributed_mnist_tpu.py", *MNIST, "--num_virtual_devices=4"],
    "spmd_8": ["distributed_mnist_tpu.py", *MNIST, "--num_virtual_devices=8"],
    "fsdp_4": ["distributed_mnist_tpu.py", *MNIST, "--num_virtual_devices=4", "--shard_parameters"],
    "resnet_4": ["resnet_cifar_tpu.py", *RESNET, "--num_virtual_devices=4"],
    "transformer_2x2x2": ["transformer_tpu.py", *GPT, "--mesh=2x2x2"],
    "stream": ["transformer_tpu.py", *GPT, "--dataset=stream", "--train_data=part_*", "--stream_window=10"],
}
NUM_STEPS, EVAL_EVERY, KILLS_PER_RUN, TIME_LIMIT = 66, 11, 8, 300
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
AIMS = ("start-up", "step", "save", "prune", "evaluation")
PLANS = [(number, aim) for number in SIGNALS for aim in AIMS]
DIFFER_BY_PROCESS = {"seconds", "goodput", "train_graphs", "eval_graphs", "hbm_peak_bytes", *BESIDE}


class Run:
    """A training process and what it has written so far."""

    def __init__(self, variant: str, run_dir: Path):
        self.run_dir, self.output = run_dir, run_dir.with_suffix(".log")
        self.done = max(saved_steps(run_dir), default=0)
        options = [*VARIANTS[variant], *OPTIONS, f"--run_dir={run_dir}"]
        options += [f"--data_dir={run_dir.parent}"] if variant == "stream" else []
        devices = {"CPU_NUM_DEVICES": "8"} if variant.startswith("transformer") else {}
        self.output.write_bytes(b"")
        self.process = Script(*options, output=self.output, **devices)
        self.started = time.monotonic()

    def phase(self) -> str:
        """What the run is doing, as far as its files tell."""
        lines = logged(self.run_dir)
        if "\nrun  " not in self.output.read_text(errors="replace"):
            return "start-up"
        if any(self.run_dir.glob("checkpoints/.writing_*")) and lines and lines[-1]["kind"] == "checkpoint":
            return "save"
        new = [line for line in lines if line["step"] > self.done]
        if not new:
            return "first steps"
        if new[-1]["kind"] == "checkpoint" and new[-1]["step"] not in saved_steps(self.run_dir):
            return "save"
        if len(list(self.run_dir.glob("checkpoints/step_*"))) > 1:  # one is kept
            return "prune"
        if new[-1]["kind"] == "train" and new[-1]["step"] % EVAL_EVERY == 0:
            return "evaluation"
        return "step"

    def aimed(self, aim: str, target: int, delay: float) -> bool:
        """Whether the moment of the kill has come."""
        if aim == "start-up":
            return time.monotonic() - self.started > delay
        reached = max([line["step"] for line in logged(self.run_dir)] + saved_steps(self.run_dir), default=0)
        if reached < target or reached <= self.done:
            return False
        return self.phase() == aim or aim == "step"

    def end(self) -> int | None:
        """Its exit code; None where it has not ended within TIME_LIMIT, and was killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(TIME_LIMIT)

    def text(self) -> str:
        return self.output.read_text(errors="replace")[-3000:]


def bits(value) -> object:
    """A value that is equal exactly where every bit is, nan included."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.contiguous().numpy().tobytes()
    return repr(value)


def differences(run_dir: Path, reference: Path) -> list[str]:
    """What of a finished run is not as in the reference, in words; empty when they are equal."""
    found = []
    folders = [max(folder.glob("checkpoints/step_*/done")).parent for folder in (reference, run_dir)]
    expected, state = map(state_in, folders)
    if folders[0].name != folders[1].name:
        found.append(f"the last checkpoint is {folders[1].name}, expected {folders[0].name}")
    found += [
        f"{key} of the last checkpoint differs"
        for key in sorted(state.keys() | expected.keys())
        if bits(state.get(key)) != bits(expected.get(key))
    ]
    lines, expected_lines = numbers(run_dir), numbers(reference)
    places = [(line["kind"], line["step"]) for line in lines]
    if twice := [place for place, count in collections.Counter(places).items() if count > 1]:
        found.append(f"metrics.jsonl has twice: {twice[:3]}")
    saves = {line["step"] for line in expected_lines if line["kind"] == "checkpoint"}
    lines = [line for line in lines if line["kind"] != "checkpoint" or line["step"] in saves]  # a stop saves too
    if lines != expected_lines:
        missing = [line for line in expected_lines if line not in lines]
        extra = [line for line in lines if line not in expected_lines]
        found.append(f"metrics.jsonl lacks {missing[:2]}, has {extra[:2]} instead, or has another order")
    summaries = [summary_in(folder) for folder in (reference, run_dir)]
    for key in sorted((summaries[0].keys() | summaries[1].keys()) - DIFFER_BY_PROCESS):
        if summaries[0].get(key) != summaries[1].get(key):
            found.append(f"{key} of summary.json is {summaries[1].get(key)}, expected {summaries[0].get(key)}")
    return found


def kill_once(variant: str, run_dir: Path, plan: tuple, draw: random.Random, start_up: float):
    """Start or resume the run and kill it once. (signal, phase hit); None when it was done before; str: a complaint.

    plan: signal, aim. start_up: seconds from the start of a process to its first step.
    """
    run, (number, aim) = Run(variant, run_dir), plan
    target = run.done + draw.randint(1, max(1, (NUM_STEPS - run.done) // 3))
    delay = draw.uniform(0, start_up) if aim == "start-up" else draw.uniform(0, 0.3 if aim == "step" else 0.004)
    while run.process.poll() is None and not run.aimed(aim, target, delay):
        time.sleep(0.001)
        if time.monotonic() - run.started > TIME_LIMIT:
            run.process.kill()
            return f"no end within {TIME_LIMIT} s: {run.text()}"
    if aim != "start-up":
        time.sleep(delay)
    phase = run.phase()
    finished = run.process.poll() is not None
    run.process.send_signal(number)
    code = run.end()
    if finished or code == 0:
        return None if code == 0 else f"ended with exit code {code} before any signal: {run.text()}"
    expected = {-number, 128 + number}
    if code not in expected and "KeyboardInterrupt" not in run.text():  # Python's own answer before the script has one
        return f"exit code {code} after {number.name}, expected one of {sorted(expected)}: {run.text()}"
    return number.name, phase


def finish(variant: str, run_dir: Path) -> str | None:
    """Let the run go to its end. Returns a complaint, or None."""
    run = Run(variant, run_dir)
    code = run.end()
    return None if code == 0 else f"exit code {code}, expected 0: {run.text()}"


def torture(variant: str, kills: int, folder: Path, draw: random.Random) -> tuple[dict, list[str]]:
    """({(signal, phase): [kills, identical]}, complaints) of this many kills of one variant."""
    reference, table, complaints = folder / "reference", {}, []
    started = time.time()
    if complaint := finish(variant, reference):
        return {}, [f"{variant}, never stopped: {complaint}"]
    start_up = (reference / "config.json").stat().st_mtime - started  # it is written just before the first step
    attempt, plans = 0, []
    while kills > 0:
        attempt += 1
        run_dir, hits, finished = folder / f"run_{attempt}", [], False
        while len(hits) < min(kills, KILLS_PER_RUN) and not finished:
            plans = plans or draw.sample(PLANS, len(PLANS))  # each once before any comes again
            hit = kill_once(variant, run_dir, plans.pop(), draw, start_up)
            if isinstance(hit, str):
                return table, [*complaints, f"{variant}: {hit}"]
            hits += [hit] if hit else []
            finished = hit is None
        kills -= len(hits)
        found = [complaint] if (complaint := finish(variant, run_dir)) else differences(run_dir, reference)
        complaints += [f"{variant}, {run_dir.name}, after {hits}: {problem}" for problem in found]
        for hit in hits:
            count, same = table.get(hit, (0, True))
            table[hit] = (count + 1, same and not found)
        shutil.rmtree(run_dir, ignore_errors=bool(found))
    return table, complaints


def main(argv: list[str] | None = None) -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--kills", type=int, default=50, help="in all, shared among the variants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"some of {', '.join(VARIANTS)}")
    options = parser.parse_args(argv)
    names = options.variants.split(",")
    if options.kills < len(names) or not set(names) <= VARIANTS.keys():
        parser.error(f"expected variants among {', '.join(VARIANTS)} and at least one kill for each")
    complaints, seconds = [], time.monotonic()
    print(f"{'what':18} {'signal':8} {'phase hit':12} {'kills':>5} identical")
    for index, name in enumerate(names):
        share = options.kills // len(names) + (index < options.kills % len(names))
        with tempfile.TemporaryDirectory() as folder:
            if name == "stream":
                write_corpus(Path(folder), 8, 60)
            table, found = torture(name, share, Path(folder), random.Random(f"{options.seed} {name}"))
        for (number, phase), (count, same) in sorted(table.items()):
            print(f"{name:18} {number:8} {phase:12} {count:5} {'yes' if same else 'NO'}", flush=True)
        for complaint in found:
            print(complaint, flush=True)
        complaints += found
    print(f"{'differences found' if complaints else 'all ended bit-identical'}, {time.monotonic() - seconds:.0f} s")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
