"""Training steps on one GPU: this project's on the torch.compile backend, and what users would write or pick instead.

GPT-2 124M, 8 layers of Llama 3.2 1B, ResNet-50.

Run:     python benchmarks/gpu.py --out gpu.json
         python benchmarks/gpu.py --rows 'gpt2_8.*'       # these rows; a wrong name prints all
         python benchmarks/gpu.py --device cpu --tiny     # a rehearsal; its times say nothing
Prints:  the card and the versions; a line of JSON for each row; a table; which goals are met.
Exit:    0; 1 where no row was measured. A row that fails, runs out of memory
         or of time, or lacks a package says so, and the rest go on.

Every program is a process of its own, one after the other. A number is the median of 3 groups of 20 steps, each ended
by one wait for the GPU. bfloat16 products, float32 weights, random tokens, AdamW, gradients clipped at norm 1; ResNet:
random pictures, SGD. MFU counts 6 N + 12 L d T FLOPs a token, of the shape that ours has, and three forward passes of a
picture, over the data sheet's dense bfloat16 peak.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import answer_of, parser_for
from language.options.llama_shape import MODEL_SIZES
from language.options.shapes import ModelShape
from tpu_utils.base.gpus import gpu_named
from tpu_utils.base.writing import write_atomically

TINY = dict(num_layers=2, num_heads=2, embedding_dim=64, sequence_length=64, vocab_size=500)
SHAPES = {
    "gpt2": MODEL_SIZES["124M"],
    "llama": dataclasses.replace(MODEL_SIZES["llama3_1B"], num_layers=8, sequence_length=2048),
}
TINY_SHAPES = {
    "gpt2": dataclasses.replace(MODEL_SIZES["124M"], **TINY),
    "llama": dataclasses.replace(MODEL_SIZES["llama_tiny"], vocab_size=500),
}
PICTURE_FLOPS = 3 * 2 * 4.09e9
"""A training step of ResNet-50 for one picture of 224 x 224: 4.09 G products and sums forward, as torchvision says."""
WAYS = {
    "ours": "this project",
    "ours_any_order": "this project, --no_deterministic",
    "nanogpt": "nanoGPT's way",
    "hugging_face": "Hugging Face",
    "jax": "plain JAX",
    "usual": "torchvision, the usual loop",
}
ROWS = ["gpt2_8.ours", "gpt2_8.nanogpt", "gpt2_32.ours", "gpt2_32.nanogpt", "llama_4.ours", "llama_4.hugging_face"]
ROWS += ["resnet_256.ours", "resnet_256.usual", "gpt2_8.jax", "gpt2_8.hugging_face", "gpt2_32.jax"]
ROWS += ["llama_4.jax", "gpt2_32.hugging_face", "gpt2_8.ours_any_order"]
"""Those of GOALS first: the others may find no time left."""
GOALS = (
    ("gpt2_8", "at most {} of nanoGPT's way", 0.80, "nanogpt"),
    ("gpt2_8", "at most {} ms a step", 15, "step_ms"),
    ("gpt2_32", "at most {} of nanoGPT's way", 0.85, "nanogpt"),
    ("gpt2_32", "MFU of at least {}", 0.50, "mfu"),
    ("llama_4", "at most {} of Hugging Face's", 0.95, "hugging_face"),
    ("resnet_256", "at most {} of the usual loop", 1.0, "usual"),
)
"""(task, words, limit, the way to compare step_ms with or a field of our row), for one H100 or H200."""
MOST_MEMORY = 1.1
"""A goal too: our peak over the smallest of the same task."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a process is asked for. ours: more options of this project's script."""

    row: str
    device: str
    tiny: bool
    folder: str
    ours: str

    @property
    def shape(self) -> ModelShape | None:
        """None: pictures for a ResNet-50."""
        return (TINY_SHAPES if self.tiny else SHAPES).get(self.row.partition("_")[0])

    @property
    def way(self) -> str:
        return self.row.partition(".")[2]

    @property
    def batch(self) -> int:
        batch = int(self.row.partition("_")[2].partition(".")[0])
        return max(2, batch // (4 if self.shape else 64)) if self.tiny else batch

    @property
    def side(self) -> int:
        """Pixels along a side of a picture."""
        return 32 if self.tiny else 224

    @property
    def size(self) -> str:
        return f"{self.batch} x {self.shape.sequence_length:,}" if self.shape else f"{self.batch} x {self.side}^2"

    @property
    def examples(self) -> int:
        """Tokens or pictures of a step."""
        return self.batch * (self.shape.sequence_length if self.shape else 1)

    @property
    def flops(self) -> float:
        """FLOPs of a token or picture."""
        return self.shape.flops_per_token if self.shape else PICTURE_FLOPS * (self.side / 224) ** 2

    @property
    def options(self) -> str:
        return f"{self.ours} --no_deterministic".strip() if self.way == "ours_any_order" else self.ours

    @property
    def steps(self) -> int:
        """Steps of a group."""
        return 2 if self.tiny else 20


def read_card() -> str:
    """NAME, DRIVER of the first GPU, as the driver tells it; "" for none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return (subprocess.run(query, capture_output=True, text=True).stdout.splitlines() or [""])[0]
    except OSError:  # there is no such program
        return ""


def versions() -> dict[str, str]:
    """{package: version} of those that are installed."""
    found = {}
    for name in ("torch", "triton", "torchvision", "transformers", "jax"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def command_of(task: Task) -> list[str]:
    return [__file__, "--one", json.dumps(dataclasses.asdict(task))]


def run_row(task: Task, environment: dict[str, str], limit: float) -> dict:
    """What a process of its own printed last, or why there is nothing: "skipped". What it has started ends with it."""
    try:
        return answer_of(*command_of(task), limit=limit, env=environment)
    except (RuntimeError, ValueError) as error:  # ValueError: what it printed last is no JSON
        return {"skipped": str(error)}


def row_of(task: Task, card: str, result: dict) -> dict:
    """What is printed of a row."""
    row = {"row": task.row, "size": task.size, "way": WAYS[task.way]} | result
    if "skipped" in result:
        return row
    row["step_ms"] = statistics.median(result["groups_ms"])
    row["per_second"] = task.examples / row["step_ms"] * 1e3
    row["tflops"] = row["per_second"] * task.flops / 1e12
    known = gpu_named(card.partition(", ")[0])
    row["mfu"] = row["tflops"] / known.bf16_tflops if known and task.device == "gpu" else None
    return row


def table(rows: list[dict]) -> str:
    heads = "row,batch,way,ms a step (groups),a second,TFLOP/s,MFU,peak GiB,reserved GiB,first step s,said".split(",")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    forms = {"per_second": ",.0f", "tflops": ".1f", "mfu": ".1%", "peak_gib": ".2f", "reserved_gib": ".2f"}
    forms["first_step_seconds"] = ".1f"
    for row in rows:
        cells = [row["row"].partition("_")[0], row["size"], row["way"]]
        if "skipped" in row:
            lines.append(f"| {' | '.join(cells)} | skipped: {row['skipped'].replace('|', '/')} |")
            continue
        cells += [f"{row['step_ms']:.1f} ({min(row['groups_ms']):.1f} to {max(row['groups_ms']):.1f})"]
        cells += ["-" if row[name] is None else format(row[name], form) for name, form in forms.items()]
        lines.append(f"| {' | '.join([*cells, row['said']])} |")
    return "\n".join(lines)


def verdicts(rows: list[dict]) -> list[str]:
    """A line for each of GOALS and each task's memory: the goal, what was measured, whether it is met."""
    found = {row["row"]: row for row in rows if "skipped" not in row}

    def measured(task: str, what: str) -> float | None:
        """what: a field of our row, or the way whose step is compared with ours."""
        ours, other = found.get(f"{task}.ours"), found.get(f"{task}.{what}")
        if ours is None or (other is None and what in WAYS):
            return None
        return ours["step_ms"] / other["step_ms"] if other else ours[what]

    lines = []
    for task, words, limit, what in GOALS:
        value = measured(task, what)
        is_met = value is not None and (value >= limit if what == "mfu" else value <= limit)
        lines.append(verdict(task, words.format(limit), value, is_met))
    for task in dict.fromkeys(name for name, *_ in GOALS):
        peaks = [row["peak_gib"] for name, row in found.items() if name.startswith(f"{task}.") and row["peak_gib"]]
        ours = measured(task, "peak_gib")
        share = ours / min(peaks) if ours and len(peaks) > 1 else None
        words = f"at most {MOST_MEMORY} of the least memory"
        lines.append(verdict(task, words, share, share is not None and share <= MOST_MEMORY))
    return lines


def verdict(task: str, goal: str, value: float | None, is_met: bool) -> str:
    said = "not measured" if value is None else f"{value:.2f}, {'met' if is_met else 'NOT met'}"
    return f"goal       {task}: {goal}: {said}"


def environment_of(device: str, caches: Path) -> dict[str, str]:
    """Variables of a child: where compilers keep what they have made, and the device that jax takes."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    kept = {name: str(caches.resolve() / name.lower()) for name in names} | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # one thread: several are slower on cores that others use too
    on_cpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | kept | (on_cpu if device == "cpu" else {})


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="NAME", help="names or patterns; default: all")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="of one program; default 300")
    parser.add_argument("--all_limit", type=float, default=480.0, metavar="SECONDS", help="of all; default 480")
    parser.add_argument("--ours", default="", metavar="OPTIONS", help="more options for this project's scripts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        from benchmarks import gpu_programs  # imports torch where the script does

        print(json.dumps(gpu_programs.measure(Task(**json.loads(given.one)))), flush=True)
        return 0
    names = [name for name in ROWS if any(fnmatch.fnmatch(name, pattern) for pattern in given.rows)]
    if not names:
        parser.error(f"--rows {' '.join(given.rows)} matches no row; expected some of {', '.join(ROWS)}")
    card, rows, end = read_card(), [], time.monotonic() + given.all_limit
    print(f"{card or 'no GPU'}; {', '.join(f'{name} {number}' for name, number in versions().items())}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of(given.device, Path(folder, "caches"))
        for task in (Task(name, given.device, given.tiny, folder, given.ours) for name in names):
            left = end - time.monotonic()
            result = {"skipped": f"no time left of {given.all_limit:g} s; ask for it by --rows"}
            if left > 0:
                result = run_row(task, environment, min(given.limit, left))
            rows.append(row_of(task, card, result))
            print(json.dumps(rows[-1]), flush=True)
            if given.out:  # so far
                report = {"card": card, "versions": versions(), "rows": rows}
                write_atomically(given.out, (json.dumps(report, indent=1) + "\n").encode())
    print(f"\n{table(rows)}", flush=True)
    if given.device == "gpu" and not given.tiny:
        print(*verdicts(rows), sep="\n", flush=True)
    return int(all("skipped" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
