"""JSON lines of questions, and what stands in them. Imports no torch."""

import re
from collections.abc import Sequence
from pathlib import Path

from tpu_utils.errors import InputError
from tpu_utils.files import parse_json, read_regular

LARGEST_FILE = 1 << 28  # bytes; MMLU has 7 million, the largest of CORE's some 20
MOST_QUESTIONS = 1 << 20


def read_lines(path: Path, expected: str) -> list[tuple[str, dict]]:
    """(file and line, the JSON object) of each line. Raises InputError for anything else, and for a file of none."""
    lines = read_regular(path, f"{expected}, one JSON object a line", LARGEST_FILE).removesuffix(b"\n").split(b"\n")
    if len(lines) > MOST_QUESTIONS:
        raise InputError(f"{path}: {len(lines):,} lines; expected at most {MOST_QUESTIONS:,} questions")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError(f"it is {type(record).__name__}")
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}; expected {expected}, a JSON object a line") from error
        found.append((f"{path}, line {number}", record))
    return found


def text(record: dict, name: str) -> str:
    """A field that is text. Raises ValueError for another one."""
    value = record.get(name)
    if not isinstance(value, str):
        raise ValueError(f"expected {name}, a text")
    value.encode()  # raises for a lone surrogate, a ValueError too
    return value


def texts(record: dict, name: str) -> list[str]:
    """A field that is a list of one text or more."""
    values = record.get(name)
    if not isinstance(values, list) or not 1 <= len(values) <= 64:
        raise ValueError(f"expected {name}, a list of 1 to 64 texts")
    return [text({name: value}, name) for value in values]


def member(record: dict, name: str, allowed: Sequence) -> int:
    """Where the value of a field, a text or a whole number, stands among those allowed."""
    names, value = list(map(str, allowed)), record.get(name)
    if type(value) not in (str, int) or str(value) not in names:
        raise ValueError(f"{name} is {value!r:.60}; expected {' or '.join(names)}")
    return names.index(str(value))


def tidied(written: str) -> str:
    """HellaSwag's texts without WikiHow's marks in brackets: preprocess() of lm-evaluation-harness."""
    written = written.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", written).replace("  ", " ")
