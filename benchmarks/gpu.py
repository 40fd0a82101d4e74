"""Training steps of GPT-2 124M on one GPU: this project's by torch.compile, and what users would write instead.

Run:     python benchmarks/gpu.py --out gpu.json
         python benchmarks/gpu.py --rows 'gpt2_8.*'       # these rows; --list prints all names
         python benchmarks/gpu.py --device cpu --tiny     # a rehearsal; its times say nothing
Prints:  the card and the versions; a line of JSON for each row; a table; which goals are met.
Exit:    0; 1 where no row was measured. A row that fails, runs out of memory
         or of time, or lacks a package says so, and the rest go on.

Every program is a process of its own, one after the other. A number is the median of 3 groups of 20 steps, each ended
by one wait for the GPU. bfloat16 products, float32 weights, random tokens, AdamW, gradients clipped at norm 1. MFU
counts 6 N + 12 L d T FLOPs a token, of the shape that ours has, over the data sheet's dense bfloat16 peak.
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
from tpu_compiler.estimate.report import markdown
from tpu_utils.base.gpus import gpu_named
from tpu_utils.base.writing import write_atomically

SHAPE = MODEL_SIZES["124M"]
TINY = dataclasses.replace(SHAPE, num_layers=2, num_heads=2, embedding_dim=64, sequence_length=64, vocab_size=500)
WAYS = {
    "ours": "this project",
    "ours_any_order": "this project, --no_deterministic",
    "nanogpt": "nanoGPT's way",
    "hugging_face": "Hugging Face",
    "jax": "plain JAX",
}
ROWS = ["gpt2_8.ours", "gpt2_8.nanogpt", "gpt2_32.ours", "gpt2_32.nanogpt", "gpt2_8.jax", "gpt2_8.hugging_face"]
ROWS += ["gpt2_32.jax", "gpt2_32.hugging_face", "gpt2_8.ours_any_order"]
"""TASK.WAY, where a task ends with its batch. Those of GOALS first: the others may find no time left."""
GOALS = (
    ("gpt2_8", "at most {} of nanoGPT's way", 0.80, "nanogpt"),
    ("gpt2_8", "at most {} ms a step", 15, "step_ms"),
    ("gpt2_32", "at most {} of nanoGPT's way", 0.85, "nanogpt"),
    ("gpt2_32", "MFU of at least {}", 0.50, "mfu"),
    ("gpt2_8", "at most {} of the least memory", 1.1, "peak_gib"),
    ("gpt2_32", "at most {} of the least memory", 1.1, "peak_gib"),
)
"""(task, words, limit, the way to compare step_ms with or a field of our row), for one H100 or H200."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a process is asked for."""

    row: str
    device: str
    tiny: bool
    folder: str

    @property
    def shape(self) -> ModelShape:
        return TINY if self.tiny else SHAPE

    @property
    def way(self) -> str:
        return self.row.partition(".")[2]

    @property
    def batch(self) -> int:
        batch = int(self.row.partition("_")[2].partition(".")[0])
        return batch // 4 if self.tiny else batch

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.shape.sequence_length

    @property
    def script(self) -> list[str]:
        """This project's, with the option of its way."""
        return ["transformer_tpu.py", *["--no_deterministic"] * (self.way == "ours_any_order")]

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
    for name in ("torch", "triton", "transformers", "jax"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def command_of(task: Task) -> list[str]:
    return [__file__, "--one", json.dumps(dataclasses.asdict(task))]


def row_of(task: Task, card: str, result: dict) -> dict:
    """What is printed of a row."""
    row = {"row": task.row, "size": f"{task.batch} x {task.shape.sequence_length:,}", "way": WAYS[task.way]} | result
    if "skipped" in result:
        return row
    row["step_ms"] = statistics.median(result["groups_ms"])
    row["per_second"] = task.tokens / row["step_ms"] * 1e3
    row["tflops"] = row["per_second"] * task.shape.flops_per_token / 1e12
    known = gpu_named(card.partition(", ")[0])
    row["mfu"] = row["tflops"] / known.bf16_tflops if known and task.device == "gpu" else None
    return row


def table(rows: list[dict]) -> str:
    heads = "batch,way,ms a step (groups),a second,TFLOP/s,MFU,peak GiB,reserved GiB,first step s,said".split(",")
    forms = {"per_second": ",.0f", "tflops": ".1f", "mfu": ".1%", "peak_gib": ".2f", "reserved_gib": ".2f"}
    forms["first_step_seconds"] = ".1f"
    lines = [heads]
    for row in rows:
        if "skipped" in row:
            cells = ["-"] * (len(forms) + 1) + [f"skipped: {row['skipped'].replace('|', '/')}"]
        else:
            cells = [f"{row['step_ms']:.1f} ({min(row['groups_ms']):.1f} to {max(row['groups_ms']):.1f})"]
            cells += ["-" if row[name] is None else format(row[name], form) for name, form in forms.items()]
            cells.append(row["said"])
        lines.append([row["size"], row["way"], *cells])
    return "\n".join(markdown(lines))


def verdicts(rows: list[dict]) -> list[str]:
    """A line for each of GOALS: the goal, what was measured, whether it is met."""
    found = {row["row"]: row for row in rows if "skipped" not in row}

    def measured(task: str, what: str) -> float | None:
        ours, other = found.get(f"{task}.ours"), found.get(f"{task}.{what}")
        if ours is None or (other is None and what in WAYS):
            return None
        if what == "peak_gib":
            peaks = [row[what] for name, row in found.items() if name.startswith(f"{task}.") and row[what]]
            return ours[what] / min(peaks) if ours[what] and len(peaks) > 1 else None
        return ours["step_ms"] / other["step_ms"] if other else ours[what]

    lines = []
    for task, words, limit, what in GOALS:
        value = measured(task, what)
        if value is None:
            said = "not measured"
        else:
            is_met = value >= limit if what == "mfu" else value <= limit
            said = f"{value:.2f}, {'met' if is_met else 'NOT met'}"
        lines.append(f"goal       {task}: {words.format(limit)}: {said}")
    return lines


def environment_of(device: str, caches: str) -> dict[str, str]:
    """Variables of a child: where compilers keep what they have made, and the device that jax takes."""
    kept = {name: f"{caches}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    kept["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # one thread: several are slower on cores that others use too
    on_cpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | kept | (on_cpu if device == "cpu" else {})


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="NAME", help="names or patterns; default: all")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="of one program; default 300")
    parser.add_argument("--all_limit", type=float, default=480.0, metavar="SECONDS", help="of all; default 480")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        from benchmarks import gpu_programs  # imports torch where the script does

        print(json.dumps(gpu_programs.measure(Task(**json.loads(given.one)))), flush=True)
        return 0
    wanted = [pattern for patterns in given.rows for pattern in patterns.split(",")]
    names = [name for name in ROWS if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)]
    if not names:
        parser.error(f"--rows {' '.join(wanted)} matches no row; expected some of {', '.join(ROWS)}")
    if given.list:
        print(*names, sep="\n")
        return 0
    card, rows, end = read_card(), [], time.monotonic() + given.all_limit
    print(f"{card or 'no GPU'}; {', '.join(f'{name} {number}' for name, number in versions().items())}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of(given.device, folder)
        for task in (Task(name, given.device, given.tiny, folder) for name in names):
            left = end - time.monotonic()
            try:
                if left <= 0:
                    raise RuntimeError(f"no time left of {given.all_limit:g} s; ask for it by --rows")
                result = answer_of(*command_of(task), env=environment, limit=min(given.limit, left))
            except RuntimeError as error:
                result = {"skipped": str(error)}
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
