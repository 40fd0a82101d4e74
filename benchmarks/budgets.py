"""What the TPU compiler predicts of presets and headline programs, kept in a file: what moved since? Nothing runs.

Run:     python benchmarks/budgets.py
             compiles every row of benchmarks/budgets.json but the slow ones, one
             at a time, and compares; --all: the slow ones too
         python benchmarks/budgets.py --only '*mnist*'       # rows whose name matches
         python benchmarks/budgets.py --renew                # writes what it finds
         python benchmarks/budgets.py --file FILE
             rows of your own; their commands run in the folder of the file
         python benchmarks/budgets.py --slices
             compiles nothing: docs/results/which_slice.csv, of the kept figures
         python benchmarks/budgets.py --plans
             plans every compiled row of a script: docs/results/plans.csv
Exit:    0 nothing moved; 1 something moved, has no figures yet or does not fit; 2
         wrong usage, or figures of another compiler.

A row moved where milliseconds, memory, bytes of collectives or the number of
operations without an estimate are more than 2 % from the file's, up or down, or
a count of collectives differs at all. A gain is to be renewed as well, so that
the file's history shows it. Answers come from the compile cache where nothing
changed, so a check that broke off goes on where it was (docs/search.md).
"""

import dataclasses
import fnmatch
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import ROOT, as_csv, parser_for, report_of
from language.options.transformer_options import TransformerConfig
from tpu_compiler.compile.cache import from_json
from tpu_compiler.estimate.report import markdown
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.files import read_json
from tpu_utils.base.hardware import GIB, parse_topology
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.parsing import parse_command_line

FILE = ROOT / "benchmarks" / "budgets.json"
TOLERANCE = 0.02
"""Share of the kept figure. A count of collectives may not differ."""
FAST = 60
"""Seconds to trace and compile."""
MEASURES = ("predicted_ms", "predicted_ms_all_hidden", "predicted_ms_nothing_hidden", "compiler_peak_bytes")
EXPECTED = 'rows with name, ask and slice: {"rows": [{"name": "mine", "ask": "train.py", "slice": "v5litepod-1"}]}'


@dataclasses.dataclass(frozen=True)
class Row:
    """A program, and what was predicted of it when the file was renewed."""

    name: str
    ask: str  # aot_tpu.py's arguments, but the slice; with --plan it is planned, not compiled
    slice: str
    slow: bool = False  # left out without --all
    figures: dict[str, float] = dataclasses.field(default_factory=dict)  # as figures_of; empty: never renewed
    seconds: float = 0.0  # to trace and compile; the fewest that this took
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    traced: str = ""  # the report's: the figures are of this program, and need no other compile while it is traced

    @property
    def command(self) -> list[str]:
        return [*shlex.split(self.ask), "--topology", self.slice]

    @property
    def planned(self) -> bool:
        return "--plan" in self.command

    @property
    def options(self) -> list[str]:
        """Those of the script."""
        return [word for word in shlex.split(self.ask)[1:] if word != "--plan"]

    @property
    def fast(self) -> bool:
        return bool(self.figures) and self.seconds < FAST and not self.planned


def read_rows(path: Path = FILE) -> list[Row]:
    """Raises InputError for anything that is no file of budgets."""
    try:
        rows = [from_json(Row, dataclasses.asdict(Row("", "", "")) | row) for row in read_json(path, EXPECTED)["rows"]]
        names = [row.name for row in rows]
        for row in rows:
            if not (row.name and shlex.split(row.ask) and row.slice):
                raise ValueError(f"row {row.name}: expected a name, what to ask and a slice")
            if names.count(row.name) > 1:
                raise ValueError(f"two rows are called {row.name}")
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no file of budgets: {error}; expected {EXPECTED}") from error
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A figure a line, and nothing that says no more than its default."""
    default = dataclasses.asdict(Row("", "", ""))
    kept = [{n: v for n, v in dataclasses.asdict(row).items() if v != default[n]} for row in rows]
    write_atomically(path, (json.dumps({"rows": kept}, indent=1) + "\n").encode())


def figures_of(report: dict[str, Any]) -> dict[str, float]:
    """What is kept of a report: MEASURES, and of each kind of collective how many and their bytes, of one device."""
    found = {name: report[name] for name in MEASURES}
    found["operations_without_estimate"] = sum(report["operations_without_estimate"].values())
    for kind, numbers in sorted(report["collectives"].items()):
        found |= {f"count of {kind}": numbers["count"], f"bytes of {kind}": numbers["bytes"]}
    return {name: float(f"{v:.6g}") if name.endswith("ms") or "_ms_" in name else int(v) for name, v in found.items()}


def compared(row: Row, report: dict[str, Any]) -> list[list[str]]:
    """What moved: row, figure, was, is, change. Raises InputError where no figures are kept, or another compiler's."""
    if not row.figures:
        raise InputError(f"{row.name} has no figures yet; expected those of a renewed row; give --renew")
    if report["versions"] != row.versions:
        was, now = (", ".join(f"{n} {v}" for n, v in found.items()) for found in (row.versions, report["versions"]))
        raise InputError(
            f"{row.name}: found {now}; the kept figures are of {was}, and those of two compilers cannot be compared; "
            "expected the same versions: install them, or renew the file: --renew --all"
        )
    now, moves = figures_of(report), []
    for name in dict.fromkeys([*row.figures, *now]):
        was, is_now = row.figures.get(name, 0), now.get(name, 0)
        if abs(is_now - was) > (0 if name.startswith("count of") else TOLERANCE * was):
            change = f"{is_now / was - 1:+.1%}" if was and is_now else "gone" if was else "new"
            moves.append([row.name, name, f"{was:,.10g}", f"{is_now:,.10g}", change])
    return moves


def table(moves: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown([["row", "figure", "was", "is", "change"], *moves]))


def print_slices(rows: Sequence[Row]) -> None:
    """As CSV what a billion tokens takes of each whole language model and slice; presets are left out. Milliseconds
    of planned rows are those of the roofline."""
    header = ["model", "slice", "chips", "sequences x tokens", "GiB a chip", "ms with communication"]
    lines = [[*header, "chip-hours a billion tokens", "s to compile"]]
    for row in rows:
        script = shlex.split(row.ask)[0]
        is_a_part = row.name.startswith(script) or "--num_layers" in row.options
        if script != "transformer_tpu.py" or is_a_part or not row.figures:
            continue
        config = parse_command_line(TransformerConfig, "", [*row.options, "--compile_for", row.slice])
        topology = parse_topology(row.slice)
        chips = topology.num_chips
        steps = 1e9 / (config.global_batch_size * config.shape.sequence_length)
        times = [row.figures[f"predicted_ms_{name}_hidden"] for name in ("all", "nothing")]
        lines.append(
            [
                row.name.removesuffix(f", {row.slice}"),
                row.slice,
                chips,
                f"{config.global_batch_size} x {config.shape.sequence_length}",
                f"{row.figures['compiler_peak_bytes'] / GIB:.2f} of {topology.hardware.limit_gib:.2f}",
                " to ".join(dict.fromkeys(f"{ms:.0f}" for ms in times)),
                " to ".join(dict.fromkeys(f"{steps * ms / 3.6e6 * chips:.3g}" for ms in times)),
                "planned" if row.planned else f"{row.seconds:.0f}",
            ]
        )
    print(as_csv(lines), end="")


def print_plans(rows: Sequence[Row]) -> None:
    """As CSV, of each row that was compiled, the milliseconds of its plan and how many times as long the compiled step
    takes."""
    print("program,slice,ms by plan,ms compiled,compiled over plan", flush=True)
    for row in rows:
        if row.planned or not row.figures or not row.ask.split()[0].endswith(".py"):
            continue
        planned = report_of(*row.command, "--plan", needs="fits", cwd=ROOT)["predicted_ms"]
        compiled = row.figures["predicted_ms"]
        name = row.name.removesuffix(f", {row.slice}")
        figures = [f"{planned:.4g}", f"{compiled:.4g}", f"{compiled / planned:.2f}"]
        print(as_csv([[name, row.slice, *figures]]), end="", flush=True)


def renewed(row: Row, report: dict[str, Any]) -> Row:
    """The row with what a report says. Of the same figures the fewest seconds are kept: a busy machine takes longer."""
    found = dict(figures=figures_of(report), versions=report["versions"], traced=report["traced"])
    seconds = round(report["trace_seconds"] + report["compile_seconds"], 1)
    if (row.figures, row.versions) == (found["figures"], found["versions"]):
        seconds = min(seconds, row.seconds)
    return dataclasses.replace(row, **found, seconds=seconds)


def check(path: Path, rows: Sequence[Row], chosen: Sequence[Row], renew: bool) -> int:
    """Ask for the chosen rows, in the file's order, and say what moved; renew: write each as soon as it is known."""
    folder = ROOT if path.resolve() == FILE else path.resolve().parent
    moves, failed, written, rows = [], {}, 0, {row.name: row for row in rows}
    for row in chosen:
        if not (row.figures or renew):
            failed[row.name] = "has no figures yet; give --renew"
            continue
        print(f"{row.name}: python aot_tpu.py {shlex.join(row.command)}", file=sys.stderr, flush=True)
        try:
            report = report_of(*row.command, needs="fits", cwd=folder)
        except RuntimeError as error:
            failed[row.name] = str(error)
            continue
        if row.versions == report["versions"] or not renew:
            moves += compared(row, report)
        if renew and (new := renewed(row, report)) != row:
            rows[row.name], written = new, written + 1
            write_rows(path, list(rows.values()))
    if moves:
        print(table(moves))
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")
    moved = len({name for name, *_ in moves})
    print(f"{len(chosen)} rows: {len(failed)} failed, {moved} moved by more than 2 % or in a count of collectives")
    if renew:
        print(f"{written} written to {path}")
    elif moved:
        print("where that is meant, write it: the same command with --renew")
    return 1 if failed or (moved and not renew) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--file", type=Path, default=FILE, help="default: benchmarks/budgets.json")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="rows whose name matches")
    parser.add_argument("--all", action="store_true", help="the slow rows too")
    parser.add_argument("--renew", action="store_true", help="write what is found into the file")
    parser.add_argument("--slices", action="store_true", help="print what a billion tokens takes, by model and slice")
    parser.add_argument("--plans", action="store_true", help="print plans beside compiled steps")
    arguments = parser.parse_args(argv)
    rows = read_rows(arguments.file)
    if arguments.slices:
        print_slices(rows)
        return 0
    if arguments.plans:
        print_plans(rows)
        return 0
    chosen = [row for row in rows if fnmatch.fnmatchcase(row.name, arguments.only)]
    for row in (row for row in chosen if row.slow and not arguments.all):
        print(f"left out: {row.name}: takes long; give --all", file=sys.stderr)
    chosen = [row for row in chosen if arguments.all or not row.slow]
    if not chosen:
        said = ", ".join(row.name for row in rows[:3])
        raise InputError(f"no row to ask for; expected --all, or a pattern of --only that matches, such as of {said}")
    return check(arguments.file, rows, chosen, arguments.renew)


if __name__ == "__main__":
    sys.exit(run_script(main, answers=True))
