"""Our prediction beside times that others have published: tables in docs/results/ and a picture. Nothing runs.

Run:     nice python benchmarks/published.py --out DIR
             compiles every row of benchmarks/published/rows.json that is not
             yet in DIR, one at a time, and prints tables of all that are, as CSV;
             writes DIR/results.json and DIR/published.png
         python benchmarks/published.py --out DIR --only 'product*'
             these rows alone; --all: those too that take more than 10 minutes
         python benchmarks/published.py --results benchmarks/published/results.json
             the tables from what is kept; compiles nothing. With --tables DIR they
             become files (docs/results/), with --picture FILE the picture
Exit:    0; 1 where a row failed: it is said, and the rest go on; 2 wrong usage.
"""

import dataclasses
import fnmatch
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib.figure import Figure

from benchmarks.children import ROOT, as_csv, parser_for, report_of
from tpu_utils.base.errors import run_script
from tpu_utils.base.files import read_json
from tpu_utils.base.hardware import GIB, parse_topology
from tpu_utils.base.writing import write_atomically

ROWS = ROOT / "benchmarks" / "published" / "rows.json"
KEPT = ("devices", "compiles", "fits", "reason", "limit_bytes", "compiler_peak_bytes", "peak_bytes", "estimated_ms")
KEPT += ("ruled_ms", "predicted_ms", "predicted_ms_all_hidden", "predicted_ms_nothing_hidden", "predicted_mfu")
KEPT += ("communication_lower_bound_ms", "operations_without_estimate", "compile_seconds", "versions")
"""Fields of a report that results.json keeps."""
KINDS = ("training step", "product", "copy")


@dataclasses.dataclass(frozen=True)
class Row:
    """A published time and the command that asks for ours."""

    name: str
    slice: str
    clock_ms: float
    source: str  # repository and file
    measured: str  # by whom, and what
    software: str
    differs: str  # our program from what was measured
    ask: str  # aot_tpu.py's arguments, but the slice
    label: str = ""
    options: str = ""  # more of ask
    flags: str = ""  # LIBTPU_INIT_ARGS
    slow: bool = False  # more than 10 minutes on 2 cores

    @property
    def what(self) -> str:
        return ", ".join(part for part in (self.name, self.label) if part)

    @property
    def key(self) -> str:
        return f"{self.what}, {self.slice}"

    @property
    def kind(self) -> str:
        return next((kind for kind in KINDS if self.name.startswith(kind)), KINDS[0])

    @property
    def generation(self) -> str:
        return parse_topology(self.slice).generation

    @property
    def command(self) -> list[str]:
        return ["aot_tpu.py", *self.ask.split(), *self.options.split(), "--topology", self.slice]


def read_rows(path: Path = ROWS) -> list[Row]:
    """A group of the file says what its rows share; a row adds to it or replaces it."""
    groups = json.loads(path.read_text())
    shared = [{name: value for name, value in group.items() if name != "rows"} for group in groups]
    return [Row(**(said | own)) for said, group in zip(shared, groups, strict=True) for own in group["rows"]]


def asked(row: Row, folder: Path) -> str:
    """Puts the report of a row into the folder, unless it is there for this command. Returns what failed, or ""."""
    command = [*row.command, row.flags]
    file = folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', row.key)}.json"
    if file.exists() and json.loads(file.read_text())["command"] == command:
        return ""
    print(f"{row.key}: python {' '.join(row.command)}", file=sys.stderr, flush=True)
    variables = os.environ | ({"LIBTPU_INIT_ARGS": row.flags} if row.flags else {})
    try:
        report = report_of(*row.command[1:], needs="compiles", env=variables)
    except RuntimeError as error:
        return str(error)
    record = {"key": row.key, "command": command, "report": report}
    write_atomically(file, json.dumps(record, indent=1).encode())
    return ""


def results(folder: Path) -> dict[str, dict]:
    """{key of a row: what KEPT names of its report}, of all rows in the folder."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.name != "results.json"]
    return {record["key"]: {name: record["report"][name] for name in KEPT} for record in records}


def ratio(row: Row, found: dict) -> float:
    """The clock over our prediction: below 1 where the step was faster than we say."""
    return row.clock_ms / found["predicted_ms"]


def milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3f}" if value >= 1 else f"{value:.3g}"


def table(rows: Iterable[Row], found: dict[str, dict]) -> list[list[str]]:
    head = ["what", "slice", "clock ms", "predicted ms", "clock / predicted", "of it by rule, ms"]
    head += ["with communication, all hidden, ms", "nothing hidden, ms", "GiB of a device"]
    lines = [[*head, "source", "measured", "software and settings", "what differs in our program"]]
    for row in rows:
        if (r := found.get(row.key)) is None:
            continue
        ends = [milliseconds(r[f"predicted_ms_{end}_hidden"]) for end in ("all", "nothing")]
        memory = min(r["compiler_peak_bytes"] or r["peak_bytes"], r["peak_bytes"]) / GIB
        over = "" if r["fits"] else f", over {r['limit_bytes'] / GIB:.2f}"
        cells = [row.what, row.slice, milliseconds(row.clock_ms), milliseconds(r["predicted_ms"])]
        cells += [f"{ratio(row, r):.2f}", milliseconds(r["ruled_ms"])]
        cells += ends if r["communication_lower_bound_ms"] else ["", ""]
        cells += [f"{memory:.2f}{over}", row.source, row.measured, row.software, row.differs]
        lines.append(cells)
    return lines


def errors(rows: Iterable[Row], found: dict[str, dict]) -> list[list[str]]:
    """Clock / predicted: median, smallest and largest, for each kind of row by generation and over all."""
    ratios = {}
    for row in (row for row in rows if row.key in found):
        for generation in (row.generation, "all"):
            ratios.setdefault((row.kind, generation), []).append(ratio(row, found[row.key]))
    lines = [["of", "generation", "rows", "median of clock / predicted", "smallest", "largest"]]
    for (kind, generation), values in sorted(ratios.items(), key=lambda pair: (KINDS.index(pair[0][0]), pair[0][1])):
        figures = statistics.median(values), min(values), max(values)
        lines.append([kind, generation, str(len(values)), *(f"{figure:.2f}" for figure in figures)])
    return lines


def picture(rows: Iterable[Row], found: dict[str, dict], file: Path) -> None:
    """A dot a row: the published clock over our prediction, both logarithmic."""
    figure = Figure(figsize=(7.5, 6.5), layout="constrained")
    axes = figure.add_subplot()
    groups = {}
    for row in (row for row in rows if row.key in found):
        groups.setdefault(row.generation, []).append((found[row.key]["predicted_ms"], row.clock_ms))
    values = [value for pairs in groups.values() for pair in pairs for value in pair]
    ends = (10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values))))
    axes.plot(ends, ends, color="black", linewidth=0.8, label="clock = prediction")
    low, high = ([factor * end for end in ends] for factor in (0.8, 1.2))
    axes.fill_between(ends, low, high, color="#d9d9d9", label="20 % to either side")
    for name, pairs in sorted(groups.items()):
        axes.scatter(*zip(*pairs, strict=True), s=28, alpha=0.8, label=f"{name}, {len(pairs)} rows", zorder=3)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="predicted by the TPU compiler and our rule, ms", ylabel="published clock, ms")
    axes.set_title("Step times that others published, and what is predicted here for our program", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = parser_for(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="compile into this folder what is not yet in it")
    where.add_argument("--results", type=Path, metavar="FILE", help="compile nothing, read this results.json")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="default: DIR/published.png of --out DIR")
    parser.add_argument("--tables", type=Path, metavar="DIR", help="write the tables into this folder too, as .csv")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="rows whose name, label and slice match")
    parser.add_argument("--all", action="store_true", help="the slow rows too")
    arguments = parser.parse_args()
    rows = [row for row in read_rows() if fnmatch.fnmatch(row.key, arguments.only)]
    if not rows:
        parser.error(f"--only {arguments.only!r} matches no row; they are called {read_rows()[0].key!r} and so on")
    failed = {}
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for row in rows:
            if row.slow and not arguments.all:
                print(f"left out: {row.key}: takes more than 10 minutes; give --all", file=sys.stderr)
            elif reason := asked(row, arguments.out):
                failed[row.key] = reason
                print(f"failed: {row.key}: {reason}", file=sys.stderr, flush=True)
        found = results(arguments.out)
        write_atomically(arguments.out / "results.json", (json.dumps(found, indent=1) + "\n").encode())
    else:
        found = read_json(arguments.results, "the results that --out wrote")
    if not found.keys() & {row.key for row in rows}:
        print("no row is compiled yet", file=sys.stderr)
        return 1
    for name, make in (("published", table), ("published_errors", errors)):
        text = as_csv(make(rows, found))
        print(text)
        if arguments.tables:
            write_atomically(arguments.tables / f"{name}.csv", text.encode())
    if place := arguments.picture or (arguments.out and arguments.out / "published.png"):
        picture(rows, found, place)
    for key, reason in failed.items():
        print(f"failed: {key}: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_script(main))
