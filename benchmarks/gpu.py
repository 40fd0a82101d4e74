"""Training steps on one GPU: this project's on the torch.compile backend, and what users would write or pick instead.

Run:     python benchmarks/gpu.py --out gpu.json
             every row: GPT-2 124M, Llama 3.2 1B with 8 layers, ResNet-50
         python benchmarks/gpu.py --rows 'gpt2_8.*' resnet.ours
             these rows; --list prints all names
         python benchmarks/gpu.py --jobs 1
             compiles each program alone too: then its seconds are its own
         python benchmarks/gpu.py --device cpu --tiny
             a rehearsal; its times say nothing
Prints:  the card and the versions; a line of JSON for each row; a table.
Exit:    0; 1 where no row was measured. A row that fails, runs out of memory
         or of time, or lacks a package says so, and the rest go on.

Every program is a process of its own. Programs compile beside each other and wait for their turn; each is measured
alone.

A number is the median of 3 groups of 20 steps, each ended by one wait for the GPU. bfloat16 products, float32 weights,
random tokens. Language models: AdamW, gradients clipped at norm 1. MFU counts 6 N + 12 L d T FLOPs a token, of the
shape that ours has, over the data sheet's dense bfloat16 peak; of ResNet-50 three forward passes.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from language.options.llama_shape import MODEL_SIZES
from language.options.shapes import ModelShape
from tpu_utils.base.gpus import gpu_named
from tpu_utils.base.writing import write_atomically

MEMORY_SHARE = 0.9
"""Programs compile beside each other that need at most this share of the card's memory."""
GIB_OUTSIDE = 0.7
"""Of a process, beside what its framework counts: the driver's context and the libraries."""
EXCEPTION = re.compile(r"error: |[\w.]+(Error|Exception|Interrupt)\b")
RESNET_FLOPS = 3 * 2 * 4.09e9
"""Of a training step for one picture of 224 x 224: 4.09 G products and sums forward, as torchvision states."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained. shape: of a language model; None: ResNet-50."""

    title: str
    batch: int
    shape: ModelShape | None = None
    image_size: int = 0

    @property
    def size(self) -> str:
        if self.shape is None:
            return f"{self.batch} x {self.image_size} x {self.image_size}"
        return f"{self.batch} x {self.shape.sequence_length:,}"

    @property
    def unit(self) -> str:
        return "pictures" if self.shape is None else "tokens"

    @property
    def count(self) -> int:
        """Tokens or pictures of a step."""
        return self.batch * (self.shape.sequence_length if self.shape else 1)

    @property
    def flops(self) -> float:
        """Of a step."""
        if self.shape is None:
            return self.batch * RESNET_FLOPS * (self.image_size / 224) ** 2
        return self.count * self.shape.flops_per_token


@dataclasses.dataclass(frozen=True)
class Task:
    """What a process is asked for."""

    row: str
    device: str
    tiny: bool
    folder: str
    ours: str

    @property
    def case(self) -> Case:
        return (TINY_CASES if self.tiny else CASES)[self.row.partition(".")[0]]

    @property
    def way(self) -> str:
        return self.row.partition(".")[2]

    @property
    def options(self) -> str:
        """Of our script, beside those of the case."""
        return f"{self.ours} --no_deterministic".strip() if self.way == "ours_any_order" else self.ours

    @property
    def steps(self) -> int:
        """Of a group."""
        return 2 if self.tiny else 20


GPT2 = MODEL_SIZES["124M"]
LLAMA = dataclasses.replace(MODEL_SIZES["llama3_1B"], num_layers=8, sequence_length=2048)
CASES = {
    "gpt2_8": Case("GPT-2 124M", 8, GPT2),
    "gpt2_32": Case("GPT-2 124M", 32, GPT2),
    "llama": Case("Llama 3.2 1B, 8 layers", 4, LLAMA),
    "resnet": Case("ResNet-50", 256, image_size=224),
}
SMALL = dict(num_layers=2, num_heads=2, embedding_dim=64, sequence_length=64, vocab_size=500)
TINY_CASES = {
    "gpt2_8": Case("tiny GPT", 2, dataclasses.replace(GPT2, **SMALL)),
    "gpt2_32": Case("tiny GPT", 4, dataclasses.replace(GPT2, **SMALL)),
    "llama": Case("tiny Llama", 2, dataclasses.replace(MODEL_SIZES["llama_tiny"], vocab_size=500)),
    "resnet": Case("ResNet-50", 4, image_size=32),
}
WAYS = {
    "ours": "this project",
    "ours_any_order": "this project, --no_deterministic",
    "nanogpt": "nanoGPT's way",
    "hugging_face": "Hugging Face",
    "jax": "plain JAX, optax",
    "plain": "torchvision, usual loop",
}
ROWS = {
    "gpt2_8.ours": 13,
    "gpt2_8.ours_any_order": 13,
    "gpt2_8.nanogpt": 8,
    "gpt2_8.hugging_face": 11,
    "gpt2_8.jax": 10,
    "gpt2_32.ours": 40,
    "gpt2_32.nanogpt": 18,
    "gpt2_32.hugging_face": 40,
    "gpt2_32.jax": 40,
    "llama.ours": 50,
    "llama.hugging_face": 36,
    "resnet.ours": 24,
    "resnet.plain": 20,
}
"""GiB that each may need, roughly and rather too much: how many fit beside each other."""


@dataclasses.dataclass(frozen=True)
class Card:
    """name "": there is none, or no driver."""

    name: str = ""
    driver: str = ""
    gib: float = 0.0

    @property
    def tflops(self) -> float | None:
        known = gpu_named(self.name)
        return known and known.bf16_tflops


def read_card() -> Card:
    """The first GPU, as the driver tells it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except OSError:  # there is no such program
        return Card()
    fields = lines[0].split(", ") if lines else []
    return Card(fields[0], fields[1], float(fields[2]) / 1024) if len(fields) == 3 else Card()


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in ("torch", "triton", "torchvision", "transformers", "jax", "optax"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def command_of(task: Task) -> list[str]:
    return [sys.executable, __file__, "--one", json.dumps(dataclasses.asdict(task))]


class Child:
    """One program in a process and a session of its own, so that what it starts ends with it."""

    def __init__(self, task: Task, environment: dict[str, str]):
        self.task = task
        self.began = time.monotonic()
        self.was_killed = False
        self._output = Path(task.folder, f"{task.row}.stdout")
        self._errors = Path(task.folder, f"{task.row}.stderr")
        command = command_of(task)
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=errors, env=environment, start_new_session=True
            )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def is_busy(self) -> bool:
        """Neither ended nor stopped, which it does when it has compiled (gpu_programs.wait_for_turn)."""
        if self.has_ended():
            return False
        state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "T"

    def go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """With all that it has started."""
        self.was_killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def result(self) -> dict:
        """What it has printed last, or why there is nothing: "skipped"."""
        errors = self._errors.read_text(errors="replace")
        lines = self._output.read_text(errors="replace").strip().splitlines()
        if self._process.returncode == 0 and lines:
            return json.loads(lines[-1])
        print(f"{self.task.row}:", *errors.splitlines()[-25:], sep="\n    ", file=sys.stderr, flush=True)
        return {"skipped": reason_in(errors) or f"exit code {self._process.returncode}, and it said nothing"}


def reason_in(errors: str) -> str:
    """The last line of an exception, else the last line. Without the frame that tyro draws around a wrong option."""
    plain = [re.sub(r"[^ -~]", "", line).rstrip() for line in errors.splitlines()]
    lines = [line for line in plain if line.strip(" -")]
    named = [line for line in lines if EXCEPTION.match(line)]
    return (named or lines or [""])[-1].strip()[:200]


def waves_of(names: list[str], jobs: int, gib: float, tiny: bool) -> list[list[str]]:
    """Rows that are compiled beside each other: as many as fit into the memory, the largest first."""
    waves: list[list[str]] = []
    for name in sorted(names, key=lambda name: -ROWS[name]):
        for wave in waves:
            taken = sum(ROWS[other] + GIB_OUTSIDE for other in [*wave, name])
            if len(wave) < jobs and (taken <= gib or tiny):
                wave.append(name)
                break
        else:
            waves.append([name])
    return waves


def run_wave(tasks: list[Task], environment: dict[str, str], limit: float) -> Iterator[tuple[Task, dict]]:
    """(task, its result), each when it has ended. All compile beside each other and stop themselves; when none compiles
    any more, one after the other goes on and is measured. limit: seconds of one, but for those that it waits."""
    children = [Child(task, environment) for task in tasks]
    try:
        while any(child.is_busy() for child in children) and time.monotonic() < children[0].began + limit:
            time.sleep(0.1)
        for child in children:
            if child.is_busy():
                child.kill()
                yield child.task, {"skipped": f"not compiled after {limit:g} s"}
        for child in [child for child in children if not child.was_killed]:
            child.go_on()
            began = time.monotonic()
            while not child.has_ended() and time.monotonic() < began + limit:
                time.sleep(0.05)
            is_late = not child.has_ended()
            child.kill()
            yield child.task, {"skipped": f"killed after {limit:g} s"} if is_late else child.result()
    finally:
        for child in children:
            child.kill()


def row_of(task: Task, card: Card, result: dict) -> dict:
    """What is printed of a row."""
    case = task.case
    row = {"row": task.row, "model": case.title, "size": case.size, "way": WAYS[task.way]} | result
    if "skipped" in result:
        return row
    milliseconds = statistics.median(result["groups_ms"])
    seconds = milliseconds / 1e3
    row |= {"step_ms": milliseconds, f"{case.unit}_per_second": case.count / seconds}
    row["tflops"] = case.flops / seconds / 1e12
    row["mfu"] = row["tflops"] / card.tflops if card.tflops and task.device == "gpu" else None
    return row


def figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(rows: list[dict]) -> str:
    heads = ["model", "batch", "way", "step, ms (groups)", "a second", "TFLOP/s", "MFU", "peak GiB", "reserved GiB"]
    heads += ["first step, s", "said"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["model"], row["size"], row["way"]]
        if "skipped" in row:
            lines.append(f"| {' | '.join(cells)} | skipped: {row['skipped'].replace('|', '/')} |")
            continue
        rate = next(f"{row[name]:,.0f} {name.split('_')[0]}" for name in row if name.endswith("_per_second"))
        groups = [f"{value:.1f}" for value in (min(row["groups_ms"]), max(row["groups_ms"]))]
        cells += [f"{row['step_ms']:.1f} ({' to '.join(groups)})", rate, f"{row['tflops']:.1f}"]
        cells += [figure(row["mfu"], ".1%"), figure(row["peak_gib"], ".2f"), figure(row["reserved_gib"], ".2f")]
        cells += [f"{row['first_step_seconds']:.1f}"]
        lines.append(f"| {' | '.join([*cells, row['said']])} |")
    return "\n".join(lines)


def environment_of(device: str, caches: Path) -> dict[str, str]:
    """Of a child: where compilers keep what they have made, and the device that jax takes."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    kept = {name: str(caches.resolve() / name.lower()) for name in names} | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # one thread: several are slower on cores that others use too
    on_cpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | kept | (on_cpu if device == "cpu" else {})


def one(task: Task) -> int:
    """Run a program in this process and print its result as JSON."""
    if task.way.startswith("ours"):
        import gpu_ours  # imports torch where the script does

        measured = gpu_ours.run_script(task) if task.case.shape else gpu_ours.run_resnet(task)
    else:
        import gpu_programs

        measured = gpu_programs.run(task)
    print(json.dumps(measured), flush=True)
    return 0


def measure(arguments: argparse.Namespace, names: list[str], card: Card, folder: Path) -> list[dict]:
    """Prints each row, and writes all so far to --out."""
    environment = environment_of(arguments.device, arguments.caches or folder / "caches")
    rows = []
    for wave in waves_of(names, arguments.jobs, MEMORY_SHARE * card.gib, arguments.tiny):
        tasks = [Task(name, arguments.device, arguments.tiny, str(folder), arguments.ours) for name in wave]
        for task, result in run_wave(tasks, environment, arguments.limit):
            rows.append(row_of(task, card, result))
            print(json.dumps(rows[-1]), flush=True)
            if arguments.out:
                report = {
                    "card": dataclasses.asdict(card),
                    "versions": versions(),
                    "jobs": arguments.jobs,
                    "rows": rows,
                }
                write_atomically(arguments.out, (json.dumps(report, indent=1) + "\n").encode())
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="NAME", help="names or patterns; default: all")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models and pictures")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="programs that compile beside each other"
    )
    parser.add_argument("--limit", type=float, default=180.0, metavar="SECONDS", help="of one program; default 180")
    parser.add_argument("--caches", type=Path, metavar="DIR", help="keep the compilers' caches here")
    parser.add_argument("--ours", default="", metavar="OPTIONS", help="more options for this project's scripts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return one(Task(**json.loads(arguments.one)))
    wanted = [pattern for patterns in arguments.rows for pattern in patterns.split(",")]
    names = [name for name in ROWS if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)]
    if not names:
        parser.error(f"--rows {' '.join(wanted)} matches no row; expected some of {', '.join(ROWS)}")
    if arguments.list:
        print(*names, sep="\n")
        return 0
    card = read_card()
    shown = f"{card.name}, driver {card.driver}, {card.gib:.0f} GiB" if card.name else "no GPU"
    print(f"{shown}; {', '.join(f'{name} {number}' for name, number in versions().items())}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments, names, card, Path(folder))
    rows.sort(key=lambda row: names.index(row["row"]))
    print(f"\n{table(rows)}\n\nThe first step compiles, beside up to {arguments.jobs - 1} other programs.", flush=True)
    return int(all("skipped" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
