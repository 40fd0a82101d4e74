"""Would the prediction have chosen what the clock chose? Decisions that others measured on v6e, asked of this tool.

Run:     nice python benchmarks/decisions.py --out DIR
             compiles the settings of benchmarks/published/decisions.csv that are
             not yet in DIR/answers.csv, one at a time, and prints the scores of
             all that are; a stop loses one compile, the same command goes on
         python benchmarks/decisions.py --out DIR --only 'D01*' --kind batch
             these decisions alone; --minutes 30: begin no compile after that
         python benchmarks/decisions.py --out DIR --minutes 0 --tables DIR2
             compiles nothing; each decision that was asked becomes a row of
             DIR2/decisions.csv (docs/results/)
Exit:    0; 1 where a compile failed: it is said, and the rest go on; 2 wrong usage.

A decision is two settings, A and B, of a Llama 3 or Qwen3 of 8B, and what hardware said of both. Ours are
transformer_tpu.py at the same shape: the kernels, the cross entropy and the scheduler's flags differ. Measured programs
with weights and Adam's moments in bfloat16 (column state) are held to our memory less half of that state.

Unrolled programs are compiled with 1 and 3 layers, and the rest is a straight line through both.
"""

import argparse
import csv
import dataclasses
import fnmatch
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.hardware import GIB
from tpu_utils.base.writing import write_atomically

ROOT = Path(__file__).resolve().parent.parent
DECISIONS = ROOT / "benchmarks" / "published" / "decisions.csv"
ALWAYS = "transformer_tpu.py --dataset tokens --precision bfloat16 --attention flash"
LAYERS = {"llama3_8B": 32, "qwen3_8B": 36}
SHORT = (1, 3)
"""Layers of the two programs that stand for an unrolled one."""
TIE = 1.0
"""Percent of the measured change below which a decision counts for no sign."""
STRONG = 3.0


@dataclasses.dataclass(frozen=True)
class Decision:
    """Two settings and what was measured. rate: tokens/s a chip, "" where there is none; fits: yes, no or ""."""

    id: str
    kind: str
    slice: str
    state: str
    rate_a: str
    rate_b: str
    fits_a: str
    fits_b: str
    a: str  # options | NAME=VALUE ... of the compiler
    b: str
    setting_a: str
    setting_b: str
    source: str

    @property
    def measured(self) -> float | None:
        """Percent by which B makes more tokens a second than A."""
        return (float(self.rate_b) / float(self.rate_a) - 1) * 100 if self.rate_a and self.rate_b else None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What this tool said of one setting. ms: with communication, all hidden that the schedule hides; 0 if refused."""

    slice: str
    setting: str
    ms: float
    needed_gib: float
    state_gib: float
    limit_gib: float
    compiles: bool
    seconds: float

    def fits(self, state: str) -> bool:
        spared = self.state_gib / 2 if state == "bfloat16" else 0.0
        return self.needed_gib - spared <= self.limit_gib and (self.compiles or self.needed_gib > 0)


def option_of(setting: str, name: str) -> str:
    words = setting.split()
    return words[words.index(name) + 1]


def command_of(setting: str, slice_name: str, layers: int | None = None) -> list[str]:
    options, _, flags = setting.partition("|")
    command = ["aot_tpu.py", *ALWAYS.split(), *options.split(), "--topology", slice_name, "--json"]
    command += ["--num_layers", str(layers)] if layers else []
    return command + (["--compiler_options", flags.strip()] if flags else [])


def ask(setting: str, slice_name: str) -> Answer:
    """Compiles one setting. Raises RuntimeError with the last line that was said where there is no report."""
    start = time.monotonic()
    depth = LAYERS[option_of(setting, "--model_size")]
    short = () if "--scan_layers" in setting else SHORT
    reports = []
    for layers in short or (None,):
        command = [sys.executable, *command_of(setting, slice_name, layers)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not done.stdout.strip():
            raise RuntimeError((done.stderr.strip().splitlines() or ["nothing was said"])[-1])
        reports += json.loads(done.stdout)

    def at_depth(values: Sequence[float]) -> float:
        if not short:
            return values[0]
        return values[0] + (values[1] - values[0]) / (SHORT[1] - SHORT[0]) * (depth - SHORT[0])

    state = [r["memory"].get("parameters", 0) + r["memory"].get("optimizer_state", 0) for r in reports]
    return Answer(
        slice=slice_name,
        setting=setting,
        ms=round(at_depth([r["predicted_ms_all_hidden"] or 0.0 for r in reports]), 2),
        needed_gib=round(at_depth([r["peak_bytes"] / GIB for r in reports]), 3),
        state_gib=round(at_depth([size / GIB for size in state]), 3),
        limit_gib=reports[0]["limit_bytes"] / GIB,
        compiles=all(r["compiles"] for r in reports),
        seconds=round(time.monotonic() - start),
    )


def read_decisions(path: Path = DECISIONS) -> list[Decision]:
    with path.open(newline="") as file:
        return [Decision(**row) for row in csv.DictReader(file)]


def read_answers(path: Path) -> dict[tuple[str, str], Answer]:
    """By slice and setting. Raises InputError for a file that this command did not write."""
    if not path.exists():
        return {}
    found = {}
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                numbers = {n: float(row[n]) for n in ("ms", "needed_gib", "state_gib", "limit_gib", "seconds")}
                answer = Answer(row["slice"], row["setting"], compiles=row["compiles"] == "True", **numbers)
                found[answer.slice, answer.setting] = answer
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no table of answers: {error}; expected one that this command wrote") from error
    return found


def append(path: Path, answer: Answer) -> None:
    row = dataclasses.asdict(answer)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


def compile_missing(decisions: Iterable[Decision], path: Path, minutes: float) -> int:
    """How many settings could not be asked."""
    end, failed = time.monotonic() + 60 * minutes, 0
    known = read_answers(path)
    for slice_name, setting in dict.fromkeys((d.slice, s) for d in decisions for s in (d.a, d.b)):
        if (slice_name, setting) in known or time.monotonic() > end:
            continue
        print(f"{slice_name}: {setting}", file=sys.stderr, flush=True)
        try:
            append(path, ask(setting, slice_name))
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            failed += 1
    return failed


def compare(decision: Decision, known: dict[tuple[str, str], Answer]) -> dict | None:
    """A row of the table: measured and predicted change in percent, and who fits. None before both are asked."""
    pair = [known.get((decision.slice, setting)) for setting in (decision.a, decision.b)]
    if None in pair:
        return None
    predicted = None
    if all(answer.ms for answer in pair):
        tokens = [
            int(option_of(s, "--global_batch_size")) * int(option_of(s, "--sequence_length"))
            for s in (decision.a, decision.b)
        ]
        predicted = (tokens[1] / pair[1].ms / (tokens[0] / pair[0].ms) - 1) * 100
    row = dict(id=decision.id, kind=decision.kind, a=decision.setting_a, b=decision.setting_b)
    row |= dict(measured=decision.measured, predicted=predicted, setting_a=decision.a, setting_b=decision.b)
    for name, answer, said in zip("ab", pair, (decision.fits_a, decision.fits_b), strict=True):
        row |= {f"fits_{name}": said, f"fits_{name}_predicted": "yes" if answer.fits(decision.state) else "no"}
        row |= {f"gib_{name}": round(answer.needed_gib, 2), f"ms_{name}": answer.ms}
    return row


def score(rows: Sequence[dict]) -> str:
    """Share of right signs, of strong ones, of right fits, and the median difference of the changes in points."""
    timed = [r for r in rows if None not in (r["measured"], r["predicted"])]
    clear = [r for r in timed if abs(r["measured"]) >= TIE]
    strong = [r for r in clear if abs(r["measured"]) >= STRONG]
    # decisions share settings: each counts once
    fits = {(r[f"setting_{n}"], r[f"fits_{n}"]): r[f"fits_{n}"] == r[f"fits_{n}_predicted"] for r in rows for n in "ab"}
    fits = {key: right for key, right in fits.items() if key[1]}
    texts = [f"{len(rows)} decisions"]
    for name, group in (("right sign", clear), ("strong", strong)):
        right = sum(r["measured"] * r["predicted"] > 0 for r in group)
        texts.append(f"{name} {right} of {len(group)}")
    texts.append(f"right fit {sum(fits.values())} of {len(fits)}")
    if timed:
        points = statistics.median(abs(r["measured"] - r["predicted"]) for r in timed)
        texts.append(f"median difference {points:.1f} points")
    return ", ".join(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True)
    parser.add_argument("--tables", type=Path, metavar="DIR")
    parser.add_argument("--only", default="*", metavar="ID", help="a decision, or a pattern such as D01*")
    parser.add_argument("--kind", default="*")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    given = parser.parse_args()
    decisions = [
        d for d in read_decisions() if fnmatch.fnmatch(d.id, given.only) and fnmatch.fnmatch(d.kind, given.kind)
    ]
    if not decisions:
        raise InputError(f"no decision is {given.only} of kind {given.kind}; {DECISIONS.name} lists them")
    given.out.mkdir(parents=True, exist_ok=True)
    failed = compile_missing(decisions, given.out / "answers.csv", given.minutes)
    known = read_answers(given.out / "answers.csv")
    rows = [row for row in (compare(decision, known) for decision in decisions) if row]
    for kind in sorted({row["kind"] for row in rows}):
        print(f"{kind:<14} {score([row for row in rows if row['kind'] == kind])}")
    print(f"{'all':<14} {score(rows)}; {len(decisions) - len(rows)} not yet asked")
    if given.tables and rows:
        lines = [list(rows[0]), *([f"{v:.1f}" if isinstance(v, float) else v or "" for v in r.values()] for r in rows)]
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(lines)
        write_atomically(given.tables / "decisions.csv", file.getvalue().encode())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_script(main))
