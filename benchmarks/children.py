"""What benchmarks share: the command line, programs that answer in JSON, the compiler's reports, tables as CSV."""

import argparse
import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tpu_utils.record.records import read_records

ROOT = Path(__file__).resolve().parent.parent
EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")


def parser_for(docstring: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def answer_of(*arguments: object, limit: float | None = None, **settings: Any) -> Any:
    """The JSON that `python ARGUMENTS` prints, alone or in its last line. What it has started ends with it.

    settings: of subprocess.Popen.
    Raises RuntimeError with the reason where there is none, or not within `limit` seconds.
    """
    command = [sys.executable, *map(str, arguments)]
    given = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    child = subprocess.Popen(command, **given | settings)
    try:
        text, errors = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"killed after {limit:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    text = text.strip()
    if text not in ("", "[]") and (text[0] in "[{" or child.returncode == 0):
        return json.loads(text if text[0] in "[{" else text.splitlines()[-1])
    print(*errors.splitlines()[-25:], sep="\n    ", file=sys.stderr, flush=True)
    raise RuntimeError(reason_in(errors) or f"exit code {child.returncode}, and it said nothing")


def reason_in(errors: str) -> str:
    """The first line of an error that is said, else the last one of an exception, else the last one. Without the frame
    that tyro draws around a wrong option."""
    plain = [re.sub(r"[^ -~]", "", line).rstrip() for line in errors.splitlines()]
    lines = [line for line in plain if line.strip(" -")]
    said = [line for line in lines if line.startswith("error: ")][:1]
    raised = [line for line in lines if EXCEPTION.match(line)]
    return (said or raised or lines or [""])[-1].strip()[:300]


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
