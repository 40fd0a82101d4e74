"""Two option sets, or two commits, of a script: what each line costs in the one and in the other."""

import contextlib
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpu_compiler.decide.search import ScriptError, compile_script, option_name, with_option
from tpu_compiler.estimate.reading import list_collectives, parse_program, read_cycles, source_of
from tpu_compiler.estimate.report import ESTIMATE_LABEL, LABEL, Report
from tpu_compiler.estimate.rules import ruled_ms
from tpu_compiler.estimate.schedule import exposed_ms
from tpu_utils.base.hardware import GIB, parse_topology

MOST_LINES = 25
"""Most lines of a table; the rest is summed up in one row."""


def take_sides(argv: list[str]) -> tuple[list[str], tuple[str, str] | None]:
    """(argv without --diff A B, (A, B)). argparse would take an A or B that begins with dashes for an option."""
    if "--diff" not in argv:
        return argv, None
    place = argv.index("--diff")
    sides = argv[place + 1 : place + 3]
    if len(sides) < 2:
        return argv, None  # argparse says what is missing
    return argv[:place] + argv[place + 3 :], (sides[0], sides[1])


def compare(script: str, topology: str, options: Sequence[str], a: str, b: str) -> str:
    """The two sides compiled and set side by side. A side is options ('--remat', or '' for none more) or a commit.

    Raises ValueError for what is no commit, and ScriptError where one side does not compile.
    """
    answers = []
    for which, name in (("A", a), ("B", b)):
        said = f"side {which} of --diff, {name or 'no more options'}"
        with side(script, options, name) as (path, all_options), tempfile.TemporaryDirectory() as folder:
            try:
                report = compile_script(str(path), topology, all_options, program_dir=folder)
            except ScriptError as error:
                raise ScriptError(f"{said}: {error}", error.exit_code) from None
            if not report.compiles:
                raise ScriptError(f"{said}: {report.reason}", 1)
            (text,) = (file.read_text() for file in Path(folder).iterdir())
            answers.append((report, text))
    return format_difference((a or "(as given)", b or "(as given)"), *answers)


@contextlib.contextmanager
def side(script: str, options: Sequence[str], name: str) -> Iterator[tuple[Path, list[str]]]:
    """The script and options of one side. A commit is checked out as a git worktree while the block runs."""
    if not name or name.startswith("-"):
        for word in shlex.split(name):
            if word.startswith("--"):
                field = option_name(word).removeprefix("no_")
                options = with_option(with_option(options, field, None), f"no_{field}", None)
        yield Path(script), [*options, *shlex.split(name)]
        return
    folder = Path(script).resolve().parent
    top = git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        raise ValueError(f"--diff {name!r:.60}: {folder} is in no git repository; expected options such as '--remat'")
    commit = git(folder, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
    if commit is None:
        raise ValueError(
            f"--diff {name!r:.60}: no such commit in {top}; expected a commit, or options such as '--remat'"
        )
    place = Path(script).resolve().relative_to(Path(top).resolve())
    with tempfile.TemporaryDirectory() as parent:
        tree = Path(parent, "tree")
        try:
            if git(folder, "worktree", "add", "--detach", str(tree), commit) is None:
                raise ValueError(f"--diff {name!r:.60}: git worktree add failed; is there room in {parent}?")
            if not (tree / place).is_file():
                raise ValueError(f"--diff {name!r:.60}: there is no {place} in that commit")
            yield tree / place, list(options)
        finally:
            git(folder, "worktree", "remove", "--force", str(tree))


def git(folder: Path, *command: str) -> str | None:
    """What git says; None when it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ValueError("--diff of commits needs git, which is not installed") from error
    return None if done.returncode else done.stdout.strip()


def format_difference(names: tuple[str, str], a: tuple[Report, str], b: tuple[Report, str]) -> str:
    """Memory by role, milliseconds and collectives by source line of two compiled programs, the largest difference
    first."""
    reports, programs = (a[0], b[0]), (parse_program(a[1]), parse_program(b[1]))
    topology = parse_topology(reports[0].topology)
    clock = topology.hardware.clock_ghz
    lines = [f"{reports[0].topology}: A is {names[0]}", f"{' ' * len(reports[0].topology)}  B is {names[1]}", ""]
    roles = [{name: size / GIB for name, size in r.memory.items()} | {"needed": r.peak_bytes / GIB} for r in reports]
    lines += table("memory per device, GiB", *roles, ".3f")
    totals = []
    for r, program in zip(reports, programs, strict=True):  # ruled_ms anew: an older commit's report may lack it
        rule = ruled_ms(program, topology)
        totals.append({"predicted": r.estimated_ms + rule, "  estimate": r.estimated_ms, "  counted by rule": rule})
        totals[-1]["communication, at least"] = r.communication_lower_bound_ms
        totals[-1]["  of it not hidden, at least"] = exposed_ms(program, topology, r.devices)
    lines += table("milliseconds of a step", *totals, ".3f")
    cycles = [{line: c / clock / 1e6 for line, c in read_cycles(p)[0].items()} for p in programs]
    lines += table("milliseconds by source line", *cycles, ".3f")
    sent = [collectives_by_line(p, r.devices) for p, r in zip(programs, reports, strict=True)]
    counts, bytes_sent = zip(*sent, strict=True)
    lines += table("collectives by source line, how many", *counts, "d")
    lines += table("MB a device sends for them, at least", *bytes_sent, ".1f")
    return "\n".join([*lines, f"milliseconds of a step: {LABEL}", f"by source line: {ESTIMATE_LABEL}"])


def collectives_by_line(computations: dict, devices: int) -> tuple[Counter, Counter]:
    """({'all-reduce, gpt.py:12 backward': count}, {the same: MB a device sends}) of one step."""
    counts, megabytes = Counter(), Counter()
    for operation, kind, count, _, sent in list_collectives(computations, devices):
        name = f"{kind}, {source_of(operation)}"
        counts[name] += count
        megabytes[name] += count * sent / 1e6
    return counts, megabytes


def table(title: str, a: dict[str, float], b: dict[str, float], form: str) -> list[str]:
    """Rows of A, B and the difference, the largest first; without the rows in which nothing differs."""
    rows = [(name, a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys([*a, *b])]
    shown = lambda x: format(x, form)  # noqa: E731
    differing = [row for row in rows if shown(row[1]) != shown(row[2])]
    if not differing:
        return [f"{title}: no difference"] if rows else [f"{title}: none"]
    differing.sort(key=lambda row: (-abs(row[2] - row[1]), row[0]))
    kept, rest = differing[:MOST_LINES], differing[MOST_LINES:]
    if rest:
        kept.append((f"{len(rest)} others", sum(row[1] for row in rest), sum(row[2] for row in rest)))
    text = [[name, shown(x), shown(y), format(y - x, "+" + form)] for name, x, y in kept]
    text.insert(0, [title, "A", "B", "B - A"])
    widths = [max(len(row[i]) for row in text) for i in range(4)]
    lines = []
    for name, *columns in text:
        aligned = [f"  {column:>{width}}" for column, width in zip(columns, widths[1:], strict=True)]
        lines.append("".join([name.ljust(widths[0]), *aligned]).rstrip())
    return [*lines, ""]
