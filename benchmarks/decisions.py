"""Would the prediction have chosen what the clock chose? Decisions that others measured on v6e, asked of this tool.

Run:     python benchmarks/decisions.py
             asks of each setting of benchmarks/published/decisions.csv whether it
             fits and how long its step takes by roofline, seconds each, keeps both in
             answers.csv beside it, and prints the scores of all
         nice python benchmarks/decisions.py --compile --minutes 30
             compiles those that fit, minutes each: their prices are the compiler's;
             begins no compile after 30 minutes; a stop loses one
         python benchmarks/decisions.py --only 'D01*' --kind batch
             these decisions alone
         nice python benchmarks/decisions.py --programs WIKI
             asks of the very programs that were measured, with all their flags: those of
             84 decisions are in WIKI, a clone of
             github.com/vlasenkoalexey/tpu_performance_autoresearch_wiki, and are run up to
             their first step (wiki_step.py: what it needs, and what differs)
         nice python benchmarks/decisions.py --newest
             plans the first 20 whose layers are loops with the newest compiler too
             (aot_tpu.py --compiler newest), keeps both in answers_newest.csv, and
             prints both scores
         python benchmarks/decisions.py --minutes 0 --tables docs/results --picture docs/decisions.png
             compiles nothing; writes decisions.csv, a row for each decision that was
             asked, decisions_scores.csv, and the measured over the predicted change;
             with --newest decisions_newest.csv and its scores, with --programs
             decisions_programs.csv and its scores
Exit:    0; 1 where a compile failed: it is said, and the rest go on; 2 wrong usage.

A decision is two settings, A and B, of a Llama 3 or Qwen3 of 8B, and what hardware said of both. Ours are
transformer_tpu.py at the same shape, or bfloat16_state.py, where theirs has weights, Adam's moments and gradients in
bfloat16: the kernels and the scheduler's flags differ. D055 to D084 and D166 to D185 ran with collective matmul, the
compiler's default, and so do ours; D085 to D125 may have, and are asked without.

Unrolled programs are planned with 2 and 8 layers, or compiled with 1 and 3, and the rest is a straight line through
both. One third of the decisions, by a hash of their names, is held out: no rate or correction may be made from them,
and the scores of both parts are printed.
"""

import argparse
import csv
import dataclasses
import fnmatch
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import ROOT, answer_of, as_csv, parser_for, reason_in
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.hardware import GIB
from tpu_utils.base.writing import write_atomically

DECISIONS = ROOT / "benchmarks" / "published" / "decisions.csv"
ANSWERS = DECISIONS.with_name("answers.csv")
BY_BOTH = DECISIONS.with_name("answers_newest.csv")
"""Answers of both compilers, priced by the same rules: those of ANSWERS may be priced anew."""
WIKI = "https://github.com/vlasenkoalexey/tpu_performance_autoresearch_wiki"
RUNS = DECISIONS.with_name("runs.csv")
ANSWERS_OF_RUNS = DECISIONS.with_name("answers_runs.csv")
ALWAYS = "--dataset tokens --precision bfloat16 --attention flash"
BFLOAT16_STATE = "bfloat16_state.py"
LAYERS = {"llama3_8B": 32, "qwen3_8B": 36}
COMPILER, ROOFLINE, NEWEST = "compiler", "roofline", "newest compiler's roofline"
SHORT = {COMPILER: (1, 3), ROOFLINE: (2, 8), NEWEST: (2, 8)}
"""Layers of the two programs that stand for an unrolled one: as many as its time allows."""
BY_NEWEST = 20
"""Decisions that the newest compiler is asked about."""
TIE = 1.0
"""Percent of the measured change below which a decision counts for no sign."""
STRONG = 3.0


@dataclasses.dataclass(frozen=True)
class Decision:
    """Two settings and what was measured. rate: tokens/s a chip, "" where there is none; fits: yes, no or ""."""

    id: str
    kind: str
    slice: str
    rate_a: str
    rate_b: str
    fits_a: str
    fits_b: str
    a: str  # perhaps BFLOAT16_STATE, options | NAME=VALUE ... of the compiler
    b: str
    run_a: str  # of RUNS; "" where its program is not published
    run_b: str
    setting_a: str
    setting_b: str
    source: str
    reason: str  # why the prediction is wrong, as far as known; "" where it is right, or nobody knows
    reason_of_runs: str  # as before, of the prediction for run_a and run_b

    @property
    def measured(self) -> float | None:
        """Percent by which B makes more tokens a second than A."""
        return (float(self.rate_b) / float(self.rate_a) - 1) * 100 if self.rate_a and self.rate_b else None


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was measured: a program at a commit, what it was started with, and the flags of libtpu."""

    run: str
    program: str
    commit: str
    variables: str
    options: str
    flags: str
    gib: str  # of memory that it took, or needed where it did not fit; "" where that is not said
    differs: str  # what the published program does not have
    note: str  # where all this is written

    @property
    def given(self) -> dict[str, str]:
        return dict(option.removeprefix("--").split("=") for option in self.options.split())


@dataclasses.dataclass(frozen=True)
class Answer:
    """What this tool said of one setting. by: one of SHORT. ms: with communication, all hidden that can be."""

    slice: str
    setting: str
    by: str
    ms: float
    needed_gib: float
    limit_gib: float
    seconds: float

    @property
    def fits(self) -> bool:
        return 0 < self.needed_gib <= self.limit_gib


def option_of(setting: str, name: str) -> str:
    words = setting.split()
    return words[words.index(name) + 1]


def tokens_of(setting: str) -> float:
    """Tokens of a step, of a run for each chip."""
    if run := read_runs().get(setting):
        rows = int(run.given["batch_size"]) / int(run.given.get("tp_parallelism", 1))
        return rows * int(run.given["seqlen"])
    return int(option_of(setting, "--global_batch_size")) * int(option_of(setting, "--sequence_length"))


def command_of(setting: str, slice_name: str, layers: int | None = None) -> list[str]:
    options, _, flags = setting.partition("|")
    others = options.startswith(BFLOAT16_STATE)
    script = f"benchmarks/{BFLOAT16_STATE}" if others else "transformer_tpu.py"
    words = [*ALWAYS.split(), *options.removeprefix(BFLOAT16_STATE).split()]
    command = ["aot_tpu.py", script, *words, "--topology", slice_name, "--json"]
    command += ["--num_layers", str(layers)] if layers else []
    return command + (["--compiler_options", flags.strip()] if flags else [])


def ask(setting: str, slice_name: str, by: str) -> Answer:
    """Plans or compiles one setting. Raises RuntimeError with the reason where there is no report."""
    start = time.monotonic()
    depth = LAYERS[option_of(setting, "--model_size")]
    short = () if "--scan_layers" in setting else SHORT[by]
    reports = []
    for layers in short or (None,):
        command = command_of(setting, slice_name, layers)
        command += ["--plan", "--no_cache"] * (by != COMPILER) + ["--compiler", "newest_alone"] * (by == NEWEST)
        reports += answer_of(*command)

    def at_depth(values: Sequence[float]) -> float:
        if not short:
            return values[0]
        return values[0] + (values[1] - values[0]) / (short[1] - short[0]) * (depth - short[0])

    return Answer(
        slice=slice_name,
        setting=setting,
        by=by,
        ms=round(at_depth([r["predicted_ms_all_hidden"] or 0.0 for r in reports]), 2),
        needed_gib=round(at_depth([r["peak_bytes"] / GIB for r in reports]), 3),
        limit_gib=reports[0]["limit_bytes"] / GIB,
        seconds=round(time.monotonic() - start),
    )


def ask_program(wiki: Path, name: str, slice_name: str, by: str) -> Answer:
    """Plans one of RUNS. Raises RuntimeError with the reason where there is no report."""
    start, run = time.monotonic(), read_runs()[name]
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", wiki, "archive", run.commit, run.program], capture_output=True)
        if archive.returncode:
            raise RuntimeError(f"{wiki} has no {run.program} at {run.commit}: {archive.stderr.decode().strip():.200}")
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        file = Path(folder, "step.mlir")
        variables = dict(word.split("=") for word in run.variables.split())
        command = [sys.executable, "benchmarks/wiki_step.py", Path(folder, run.program), file, *run.options.split()]
        traced = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
        if not file.exists():
            raise RuntimeError(f"{name} was not traced: {reason_in(traced.stderr)}")
        command = ["aot_tpu.py", "--hlo", file, "--topology", slice_name, "--plan", "--no_cache", "--json"]
        (report,) = answer_of(*command, "--compiler_options", run.flags)
    return Answer(
        slice=slice_name,
        setting=name,
        by=by,
        ms=round(report["predicted_ms_all_hidden"] or 0.0, 2),
        needed_gib=round(report["peak_bytes"] / GIB, 3),
        limit_gib=report["limit_bytes"] / GIB,
        seconds=round(time.monotonic() - start),
    )


def read_decisions() -> list[Decision]:
    with DECISIONS.open(newline="") as file:
        return [Decision(**row) for row in csv.DictReader(file)]


@cache
def read_runs() -> dict[str, Run]:
    with RUNS.open(newline="") as file:
        return {row["run"]: Run(**row) for row in csv.DictReader(file)}


def of_runs(decisions: Iterable[Decision]) -> list[Decision]:
    """Those whose programs are published, asked of them."""
    return [
        dataclasses.replace(d, a=d.run_a, b=d.run_b, reason=d.reason_of_runs) for d in decisions if d.run_a and d.run_b
    ]


def read_answers(path: Path) -> dict[tuple[str, str, str], Answer]:
    """By slice, setting and who priced it. Raises InputError for a file that this command did not write."""
    if not path.exists():
        return {}
    found = {}
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if "setting" not in (reader.fieldnames or ()):
                raise ValueError("its first line names no setting")
            for row in reader:
                numbers = {n: float(row[n]) for n in ("ms", "needed_gib", "limit_gib", "seconds")}
                answer = Answer(row["slice"], row["setting"], row["by"], **numbers)
                found[answer.slice, answer.setting, answer.by] = answer
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


def ask_missing(
    decisions: Iterable[Decision], path: Path, minutes: float, by: str, ask: Callable[[str, str, str], Answer] = ask
) -> int:
    """How many settings could not be asked. Those that do not fit by their plan are not compiled."""
    end = time.monotonic() + 60 * minutes
    failed, known = 0, read_answers(path)
    for key in dict.fromkeys((d.slice, s) for d in decisions for s in (d.a, d.b)):
        plan = known.get((*key, ROOFLINE))
        in_vain = by == COMPILER and plan and plan.needed_gib > plan.limit_gib
        if (*key, by) in known or in_vain or time.monotonic() > end:
            continue
        print(": ".join(key), file=sys.stderr, flush=True)
        try:
            append(path, ask(key[1], key[0], by))
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            failed += 1
    return failed


def compare(
    decision: Decision, known: dict[tuple[str, str, str], Answer], planned_by: str = ROOFLINE, first: str = COMPILER
) -> dict | None:
    """A row of the table: measured and predicted change in percent, and who fits by their plans. The prices of `first`
    where it has one of both settings, else those of the plans. None before both are planned."""
    pairs = {
        by: [known.get((decision.slice, setting, by)) for setting in (decision.a, decision.b)]
        for by in (first, planned_by)
    }
    if None in pairs[planned_by]:
        return None
    by = first if all(answer and answer.ms for answer in pairs[first]) else planned_by
    tokens = [tokens_of(s) for s in (decision.a, decision.b)]
    predicted = (tokens[1] / pairs[by][1].ms / (tokens[0] / pairs[by][0].ms) - 1) * 100
    row = dict(id=decision.id, kind=decision.kind, a=decision.setting_a, b=decision.setting_b)
    row |= dict(measured=decision.measured, predicted=predicted, by=by, setting_a=decision.a, setting_b=decision.b)
    fits = (decision.fits_a, decision.fits_b)
    for name, answer, plan, said in zip("ab", pairs[by], pairs[planned_by], fits, strict=True):
        row |= {f"fits_{name}": said, f"fits_{name}_predicted": "yes" if plan.fits else "no"}
        row |= {f"gib_{name}": round(plan.needed_gib, 2), f"ms_{name}": answer.ms}
        if run := read_runs().get(plan.setting):
            row[f"gib_{name}_measured"] = run.gib
    return row | dict(reason=decision.reason)


def is_held_out(decision_id: str) -> bool:
    """Whether a decision is of the third that no rate or correction is made from."""
    return hashlib.sha256(decision_id.encode()).digest()[0] % 3 == 0


def is_code_known(row: dict) -> bool:
    """Whether the code of both runs is published, and known to be what ran: not matched to an image by its date."""
    unknown = ("code is not published", "code is matched by date")
    return not any(words in read_runs()[row[f"setting_{name}"]].differs for name in "ab" for words in unknown)


SIGNS = ("right sign", "of", "right sign, strong", "of", "right choice, strong")
SCORES = ("decisions", *SIGNS, "right fits", "of", "median points apart")


def chosen(row: dict) -> float:
    """Above 0: B by its prediction, below: A. What does not fit by its plan is not chosen, however fast."""
    fits_a, fits_b = (row[f"fits_{name}_predicted"] == "yes" for name in "ab")
    return row["predicted"] if fits_a == fits_b else fits_b - fits_a


def score(rows: Sequence[dict]) -> list[str]:
    """What SCORES names. Signs and choices: of changes measured as TIE or more, strong: STRONG or more. A setting's fit
    counts once in however many decisions it stands."""
    timed = [r for r in rows if None not in (r["measured"], r["predicted"])]
    fits = {(r[f"setting_{n}"], r[f"fits_{n}"]): r[f"fits_{n}"] == r[f"fits_{n}_predicted"] for r in rows for n in "ab"}
    fits = [right for (_, said), right in fits.items() if said]
    cells = [len(rows)]
    for least in (TIE, STRONG):
        clear = [r for r in timed if abs(r["measured"]) >= least]
        cells += [sum(r["measured"] * r["predicted"] > 0 for r in clear), len(clear)]
    cells.append(sum(r["measured"] * chosen(r) > 0 for r in clear))
    cells += [sum(fits), len(fits)]
    apart = [abs(r["measured"] - r["predicted"]) for r in timed]
    return [*map(str, cells), f"{statistics.median(apart):.1f}" if apart else ""]


def beside_newest(decisions: Sequence[Decision], known: dict[tuple[str, str, str], Answer]) -> dict[str, list]:
    """Lines of two tables: each decision that both compilers planned, by the installed one's plans and the newest
    one's; and both scores."""
    pairs = [[compare(d, known, by, by) for by in (ROOFLINE, NEWEST)] for d in decisions]
    pairs = [pair for pair in pairs if None not in pair]
    kept = ("predicted", "fits_a_predicted", "gib_a", "ms_a", "fits_b_predicted", "gib_b", "ms_b")
    told = ("id", "kind", "a", "b", "measured", "fits_a", "fits_b")
    lines = [[*told, *(f"{name}{of}" for of in ("", " newest") for name in kept)]]
    for pair in pairs:
        cells = [pair[0][name] for name in told] + [row[name] for row in pair for name in kept]
        lines.append([f"{v:.1f}" if isinstance(v, float) else v or "" for v in cells])
    scores = [[by, *score([pair[i] for pair in pairs])] for i, by in enumerate((ROOFLINE, NEWEST))]
    return {"decisions_newest.csv": lines, "decisions_newest_scores.csv": [["by", *SCORES], *scores]}


def picture(rows: Iterable[dict], file: Path) -> None:
    """A dot a decision: the change that was measured over the one predicted, in percent."""
    figure = Figure(figsize=(6, 5.5), layout="constrained")
    axes = figure.add_subplot()
    groups = {}
    for row in (row for row in rows if None not in (row["measured"], row["predicted"])):
        groups.setdefault(row["kind"], []).append((row["predicted"], row["measured"]))
    ends = [end(value for pairs in groups.values() for pair in pairs for value in pair) for end in (min, max)]
    ends = (ends[0] - 3, ends[1] + 3)
    axes.plot(ends, ends, color="black", linewidth=0.8, label="as predicted")
    for edges in ((ends[0], 0), (0, ends[1])):  # the same sign
        axes.fill_between(edges, *((0, 0), (edges[0] or edges[1],) * 2), color="#e8f0e8", linewidth=0)
    for number, (name, pairs) in enumerate(sorted(groups.items())):
        marker = "o^"[number // 10]  # there are ten colors
        axes.scatter(*zip(*pairs, strict=True), s=28, alpha=0.8, marker=marker, label=f"{name}, {len(pairs)}", zorder=3)
    axes.axhline(0, color="grey", linewidth=0.6)
    axes.axvline(0, color="grey", linewidth=0.6)
    axes.set(xlim=ends, ylim=ends, aspect="equal", xlabel="predicted change of tokens/s, %", ylabel="measured, %")
    axes.set_title("Setting B for setting A on v6e-8; green: the same sign", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)


def tell(decisions: Sequence[Decision], known: dict[tuple[str, str, str], Answer], given: argparse.Namespace) -> None:
    """Prints the scores; writes the tables and the picture that are asked for."""
    rows = [row for row in (compare(decision, known) for decision in decisions) if row]
    kinds = sorted({row["kind"] for row in rows})
    scores = [[kind, *score([row for row in rows if row["kind"] == kind])] for kind in kinds]
    scores = [["kind", *SCORES], *scores, ["all", *score(rows)]]
    for name, held_out in (("used", False), ("held out", True)):
        scores.append([name, *score([row for row in rows if is_held_out(row["id"]) == held_out])])
    if any(row["by"] == COMPILER for row in rows):
        planned = (compare(decision, known, first=ROOFLINE) for decision in decisions)
        scores.append(["by plans alone", *score([row for row in planned if row])])
    if given.programs:
        for name, is_known in (("code known", True), ("code not known", False)):
            scores.append([name, *score([row for row in rows if is_code_known(row) == is_known])])
    print(as_csv(scores), end="")
    if len(rows) < len(decisions):
        print(f"not asked yet: {len(decisions) - len(rows)} of {len(decisions)} decisions", file=sys.stderr)
    if given.tables and rows:
        lines = [list(rows[0]), *([f"{v:.1f}" if isinstance(v, float) else v or "" for v in r.values()] for r in rows)]
        name = "decisions_programs" if given.programs else "decisions"
        write_atomically(given.tables / f"{name}.csv", as_csv(lines).encode())
        write_atomically(given.tables / f"{name}_scores.csv", as_csv(scores).encode())
    if given.picture and rows:
        picture(rows, given.picture)


def main() -> int:
    parser = parser_for(__doc__)
    help_text = f"default: {ANSWERS.name}; with --newest {BY_BOTH.name}, with --programs {ANSWERS_OF_RUNS.name}"
    parser.add_argument("--answers", type=Path, metavar="FILE", help=help_text)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--programs", type=Path, metavar="WIKI")
    parser.add_argument("--tables", type=Path, metavar="DIR")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    parser.add_argument("--only", default="*", metavar="ID", help="a decision, or a pattern such as D01*")
    parser.add_argument("--kind", default="*")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    given = parser.parse_args()
    answers = given.answers or (BY_BOTH if given.newest else ANSWERS_OF_RUNS if given.programs else ANSWERS)
    decisions = [
        d for d in read_decisions() if fnmatch.fnmatch(d.id, given.only) and fnmatch.fnmatch(d.kind, given.kind)
    ]
    for folder in filter(None, (given.tables, answers.parent, given.picture and given.picture.parent)):
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder; make it, or choose another")
    if not decisions:
        raise InputError(f"no decision is {given.only} of kind {given.kind}; {DECISIONS.name} lists them")
    if given.newest:
        decisions = [d for d in decisions if all("--scan_layers" in setting for setting in (d.a, d.b))][:BY_NEWEST]
        failed = sum(ask_missing(decisions, answers, given.minutes, by) for by in (ROOFLINE, NEWEST))
        for name, lines in beside_newest(decisions, read_answers(answers)).items():
            print(as_csv(lines), end="")
            if given.tables:
                write_atomically(given.tables / name, as_csv(lines).encode())
        return 1 if failed else 0
    if given.programs:
        decisions = of_runs(decisions)
        if given.minutes and not (given.programs / "wiki").is_dir() and not (given.programs / "refs").is_dir():
            raise InputError(f"{given.programs} is no clone; expected one of {WIKI}: git clone {WIKI}")
        failed = ask_missing(decisions, answers, given.minutes, ROOFLINE, partial(ask_program, given.programs))
    else:
        failed = ask_missing(decisions, answers, given.minutes, COMPILER if given.compile else ROOFLINE)
    tell(decisions, read_answers(answers), given)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_script(main))
