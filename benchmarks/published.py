"""Our prediction beside times that others have published: tables in docs/results/ and a picture. Nothing runs.

Run:     nice python benchmarks/published.py --out DIR
             compiles every row of benchmarks/published/rows.json that is not
             yet in DIR, one at a time, and prints tables of all that are, as CSV;
             writes DIR/results.json and DIR/published.png
         python benchmarks/published.py --out DIR --only 'product*'
             these rows alone; --all: those too that take more than 10 minutes
         python benchmarks/published.py --out DIR --compiler newest
             asks the newest compiler alone, into DIR/newest, and prints its error
             beside the installed one's, for the rows that DIR has of that
         python benchmarks/published.py --results benchmarks/published/results.json
             the tables from what is kept; compiles nothing. With --tables DIR they
             become files (docs/results/), with --picture FILE the picture. With
             --compiler newest from benchmarks/published/newest.json
Exit:    0; 1 where a row failed: it is said, and the rest go on; 2 wrong usage.
"""

import argparse
import csv
import dataclasses
import fnmatch
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib.figure import Figure

from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.files import read_json
from tpu_utils.base.hardware import GIB, parse_topology
from tpu_utils.base.versions import TESTED_VERSIONS
from tpu_utils.base.writing import write_atomically

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "published" / "rows.json"
KEPT = ("devices", "compiles", "fits", "reason", "limit_bytes", "compiler_peak_bytes", "peak_bytes", "estimated_ms")
KEPT += ("ruled_ms", "predicted_ms", "predicted_ms_all_hidden", "predicted_ms_nothing_hidden", "predicted_mfu")
KEPT += ("communication_lower_bound_ms", "operations_without_estimate", "compile_seconds", "versions")
"""Fields of a report that results.json keeps."""
PER_COMPILER = (
    "predicted_ms",
    "estimated_ms",
    "ruled_ms",
    "fits",
    "compiler_peak_bytes",
    "compile_seconds",
    "versions",
)
"""Fields of these that newest.json keeps, for each of the two compilers."""
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


def asked(row: Row, folder: Path, again: bool, compiler: Sequence[str] = ()) -> str:
    """Puts the report of a row into the folder, unless it is there for this command. Returns what failed, or "".

    compiler: options that choose it."""
    command = [*row.command, *compiler]
    file = folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', row.key)}.json"
    if file.exists() and not again and json.loads(file.read_text())["command"] == [*command, row.flags]:
        return ""
    print(f"{row.key}: python {' '.join(command)}", file=sys.stderr, flush=True)
    variables = os.environ | ({"LIBTPU_INIT_ARGS": row.flags} if row.flags else {})
    line = [sys.executable, *command, "--json"]
    done = subprocess.run(line, cwd=ROOT, env=variables, capture_output=True, text=True)
    reports = json.loads(done.stdout) if done.stdout.strip() else []
    if not reports or not reports[0]["compiles"]:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return reports[0]["reason"] if reports else last
    record = {"key": row.key, "command": [*command, row.flags], "report": reports[0]}
    write_atomically(file, json.dumps(record, indent=1).encode())
    return ""


def results(folder: Path) -> dict[str, dict]:
    """{key of a row: what KEPT names of its report}, of all rows in the folder."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.name != "results.json"]
    return {record["key"]: {name: record["report"][name] for name in KEPT} for record in records}


def both(folder: Path) -> dict[str, dict[str, dict | None]]:
    """{key of a row: {"newest": what PER_COMPILER names, "installed": the same, or None where that was not asked}}."""
    old, new = results(folder), results(folder / "newest")
    # for a chip that the installed one does not know, the folder has another one's answer
    old = {key: found for key, found in old.items() if found["versions"]["libtpu"] == TESTED_VERSIONS["libtpu"]}
    few = lambda found: found and {name: found[name] for name in PER_COMPILER}  # noqa: E731
    return {key: {"installed": few(old.get(key)), "newest": few(found)} for key, found in new.items()}


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


def table_of_both(rows: Iterable[Row], found: dict[str, dict]) -> list[list[str]]:
    """The error of each row by the installed and by the newest compiler."""
    versions = next(iter(found.values()))["newest"]["versions"]
    heads = [f"clock / predicted, libtpu {libtpu}" for libtpu in (TESTED_VERSIONS["libtpu"], versions["libtpu"])]
    lines = [["what", "slice", "clock ms", *heads]]
    for row in (row for row in rows if row.key in found):
        ratios = [f"{ratio(row, one):.2f}" if one else "" for one in map(found[row.key].get, ("installed", "newest"))]
        lines.append([row.what, row.slice, milliseconds(row.clock_ms), *ratios])
    return lines


def errors_of_both(rows: Iterable[Row], found: dict[str, dict]) -> list[list[str]]:
    """For the rows that both compilers answered: median clock / predicted, and the value farthest from 1."""
    groups = {}
    for row in (row for row in rows if row.key in found and found[row.key]["installed"]):
        groups.setdefault(row.kind, []).append([ratio(row, found[row.key][name]) for name in ("installed", "newest")])
    lines = [["of", "rows", "installed: median", "farthest from 1", "newest: median", "farthest from 1"]]
    for kind in (kind for kind in KINDS if kind in groups):
        cells = [kind, str(len(groups[kind]))]
        for values in zip(*groups[kind], strict=True):
            farthest = max(values, key=lambda value: abs(math.log(value)))
            cells += [f"{statistics.median(values):.2f}", f"{farthest:.2f}"]
        lines.append(cells)
    return lines


def as_csv(lines: list[list[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()


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
    axes.fill_between(
        ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="#d9d9d9", label="20 % to either side"
    )
    for name, pairs in sorted(groups.items()):
        axes.scatter(*zip(*pairs, strict=True), s=28, alpha=0.8, label=f"{name}, {len(pairs)} rows", zorder=3)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="predicted by the TPU compiler and our rule, ms", ylabel="published clock, ms")
    axes.set_title("Step times that others published, and what is predicted here for our program", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="compile into this folder what is not yet in it")
    where.add_argument("--results", type=Path, metavar="FILE", help="compile nothing, read this results.json")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="default: DIR/published.png of --out DIR")
    parser.add_argument("--tables", type=Path, metavar="DIR", help="write the tables into this folder too, as .csv")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="rows whose name, label and slice match")
    parser.add_argument("--all", action="store_true", help="the slow rows too")
    parser.add_argument(
        "--compiler", choices=("installed", "newest"), default="installed", help="whose error is computed"
    )
    parser.add_argument("--again", action="store_true", help="ask again for rows that are there")
    arguments = parser.parse_args()
    rows = [row for row in read_rows() if fnmatch.fnmatch(row.key, arguments.only)]
    if not rows:
        parser.error(f"--only {arguments.only!r} matches no row; they are called {read_rows()[0].key!r} and so on")
    failed, newest = {}, arguments.compiler == "newest"
    if newest and arguments.picture:
        parser.error("--picture has no effect with --compiler newest")
    if arguments.out:
        folder = arguments.out / "newest" if newest else arguments.out
        compiler = ["--compiler", "newest_alone"] if newest else []
        folder.mkdir(parents=True, exist_ok=True)
        for row in rows:
            if row.slow and not arguments.all:
                print(f"left out: {row.key}: takes more than 10 minutes; give --all", file=sys.stderr)
            elif reason := asked(row, folder, arguments.again, compiler):
                failed[row.key] = reason
                print(f"failed: {row.key}: {reason}", file=sys.stderr, flush=True)
        found = both(arguments.out) if newest else results(arguments.out)
        write_atomically(folder / "results.json", (json.dumps(found, indent=1) + "\n").encode())
    else:
        found = read_json(arguments.results, "the results that --out wrote")
        first = next(iter(found.values()), None)
        if not isinstance(first, dict) or ("newest" in first) != newest:
            of = "of --compiler newest" if newest else "of the installed compiler"
            raise InputError(f"{arguments.results} holds other results; expected those {of}")
    if not found.keys() & {row.key for row in rows}:
        print("no row is compiled yet", file=sys.stderr)
        return 1
    prefix, makers = ("newest_", (table_of_both, errors_of_both)) if newest else ("", (table, errors))
    for name, make in zip(("published", "published_errors"), makers, strict=True):
        text = as_csv(make(rows, found))
        print(text)
        if arguments.tables:
            write_atomically(arguments.tables / f"{prefix}{name}.csv", text.encode())
    if not newest and (place := arguments.picture or (arguments.out and arguments.out / "published.png")):
        picture(rows, found, place)
    for key, reason in failed.items():
        print(f"failed: {key}: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_script(main))
