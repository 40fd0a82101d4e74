"""metrics.jsonl, read back: by a run that is resumed, and by what draws it."""

import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tpu_utils.base.files import lines_of, open_regular, parse_json

LONGEST_LINE = 1 << 20  # bytes of a line in metrics.jsonl; the scripts' have a few hundred
LARGEST_STEP = 1 << 53  # larger whole numbers are not exact in every reader of JSON
LARGEST_NUMBER = 1e300  # the sum of a few larger ones overflows


def read_records(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """(number, bytes, object) of each line of metrics.jsonl, one at a time; None is the object of a damaged line.
    Raises InputError when it is no regular file."""
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
            lines = ", ".join(self._first)
            print(
                f"warning: {self._path}: damaged lines are left out: {self._count:,}, the first {lines}; expected JSON "
                "objects with kind and step, as a run logs them",
                file=sys.stderr,
            )


def as_numbers(value: object, ndim: int) -> np.ndarray:
    """A number, with ndim 1 or 2 a row or a table of them; nan for null. Raises ValueError for what no run writes."""
    try:
        found = np.array(value, np.float64)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"{value!r:.60} is no number") from error
    if found.ndim != ndim or (np.abs(found) > LARGEST_NUMBER).any():
        raise ValueError(f"{value!r:.60} is no number, or too large")
    return found


def read_curves(path: Path, fields: dict[str, int]) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """(steps, values) of these fields, by kind and name. Each step stands once, in order: its last line counts. fields:
    the number of dimensions of each. Nothing else is kept, 16 bytes a number, however long the file. A line where one
    is no number, or a table of another shape than before, is damaged; a warning names these lines."""
    columns, shapes, damaged = {}, {}, DamagedLines(path)
    for place, _, record in read_records(path):
        try:
            if record is None:
                raise ValueError("no line of a run")
            found = {name: as_numbers(record[name], fields[name]) for name in fields.keys() & record.keys()}
            if any(shapes.setdefault(name, value.shape) != value.shape for name, value in found.items()):
                raise ValueError("another shape than before")
        except ValueError:
            damaged.add(place)
            continue
        for name, value in found.items():
            empty = (array("q"), [] if fields[name] else array("d"))
            steps, values = columns.setdefault((record["kind"], name), empty)
            steps.append(record["step"])
            values.append(value)
    damaged.warn()
    curves = {}
    for key, (steps, values) in columns.items():
        once, last = np.unique(np.asarray(steps)[::-1], return_index=True)
        curves[key] = once, np.asarray(values)[::-1][last]
    return curves


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
