"""What benchmarks share: the command line, programs that answer in JSON, the compiler's reports, tables as CSV."""

import argparse
import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tpu_utils.record.records import read_records

ROOT = Path(__file__).resolve().parent.parent


def parser_for(docstring: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def answer_of(*arguments: object, **settings: Any) -> Any:
    """The JSON that `python ARGUMENTS` prints, alone or in its last line. settings: of subprocess.run.

    Raises RuntimeError with the reason where there is none: the line of its error, else the last that it said.
    """
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, **{"cwd": ROOT, "capture_output": True, "text": True} | settings)
    text = done.stdout.strip()
    if text not in ("", "[]") and (text[0] in "[{" or done.returncode == 0):
        return json.loads(text if text[0] in "[{" else text.splitlines()[-1])
    said = done.stderr.strip().splitlines() or ["it said nothing"]
    raise RuntimeError(next((line for line in said if line.startswith("error: ")), said[-1]))


def report_of(*arguments: str, needs: str, **settings: Any) -> dict[str, Any]:
    """What aot_tpu.py says of one program on one slice. Raises RuntimeError unless its field `needs` is true."""
    (report,) = answer_of(ROOT / "aot_tpu.py", *arguments, "--json", **settings)
    if not report[needs]:
        raise RuntimeError(report["reason"] or f"it is not what it needs to be: {needs}")
    return report


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl so far."""
    path = run_dir / "metrics.jsonl"
    return [line for _, _, line in read_records(path) if line] if path.exists() else []


def unequal_files(one: Path, other: Path, *patterns: str) -> list[str]:
    """Names of the files of these patterns that do not stand in both folders with the same bytes."""
    found = {str(path.relative_to(folder)) for folder in (one, other) for at in patterns for path in folder.glob(at)}
    contents = {
        name: [(folder / name).read_bytes() if (folder / name).is_file() else None for folder in (one, other)]
        for name in sorted(found)
        if not (one / name).is_dir()
    }
    return [name for name, (a, b) in contents.items() if a is None or a != b]
