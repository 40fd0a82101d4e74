"""metrics.jsonl, read back: by a run that is resumed, and by what draws it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpu_utils.base.files import lines_of, open_regular, parse_json

LONGEST_LINE = 1 << 20  # bytes of a line in metrics.jsonl; the scripts' have a few hundred
LARGEST_STEP = 1 << 53  # larger whole numbers are not exact in every reader of JSON


def read_records(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """(number, bytes, object) of each line of metrics.jsonl, one at a time; None is the object of a damaged line.

    Raises InputError when it is no regular file.
    """
    with open_regular(path, "the lines a run has logged") as file:
        for number, line in enumerate(lines_of(file, LONGEST_LINE), 1):
            try:
                record = parse_json(line)
            except ValueError:
                record = None
            step = record.get("step") if isinstance(record, dict) else None
            # bool is an int to isinstance
            whole = type(step) is int and 0 <= step <= LARGEST_STEP and isinstance(record.get("kind"), str)
            yield number, line, record if whole else None


class DamagedLines:
    """Counts the damaged lines of a file, for one warning."""

    def __init__(self, path: Path):
        self._path, self._count, self._first = path, 0, []

    def add(self, number: int) -> None:
        self._count += 1
        if len(self._first) < 8:
            self._first.append(str(number))

    def warn(self) -> None:
        if self._count:
            lines, others = "line" if self._count == 1 else "lines", " and others" if self._count > 8 else ""
            are = "is" if self._count == 1 else "are"
            print(
                f"warning: {self._path}: {self._count:,} damaged {lines} {are} left out ({lines} "
                f"{', '.join(self._first)}{others}); expected JSON objects with kind and step, as a run logs them",
                file=sys.stderr,
            )


def lines_to_keep(path: Path, first_step: int, num_steps: int) -> bytearray:
    """The lines up to first_step, byte for byte; a warning names those that no run of num_steps can have written."""
    kept, damaged = bytearray(), DamagedLines(path)
    for number, line, record in read_records(path):
        if not line.endswith(b"\n"):
            break  # a kill left it unfinished
        if record is None or record["step"] > num_steps:
            damaged.add(number)
        elif record["step"] <= first_step:
            kept += line
    damaged.warn()
    return kept
