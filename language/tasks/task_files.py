"""Questions as JSON lines or parquet, and what stands in them. Imports no torch."""

import re
from collections.abc import Sequence
from pathlib import Path

from language.data.stream_files import open_parquet
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import file_size, open_regular, parse_json, read_regular

LARGEST_FILE = 1 << 28  # bytes, of parquet unpacked too; MMLU has 7 million, the largest of CORE's some 20
MOST_QUESTIONS = 1 << 20
REMEDY = "download it again"


def read_records(path: Path, expected: str) -> list[tuple[str, dict]]:
    """(file and line or row, the record) of each line of JSON, or of each row where the name ends in .parquet. Raises
    InputError for anything else, and for a file of none."""
    return read_rows(path, expected) if path.suffix == ".parquet" else read_lines(path, expected)


def read_rows(path: Path, expected: str) -> list[tuple[str, dict]]:
    """Records of a parquet file: Hugging Face's hub keeps data sets so."""
    import pyarrow  # only here: it takes a third of a second

    with open_regular(path, f"{expected}, parquet") as opened:
        if (size := file_size(opened)) > LARGEST_FILE:
            raise InputError(f"{path} has {size:,} bytes; expected {LARGEST_FILE:,} at most, {expected}")
        if opened.read(4) != b"PAR1":
            raise InputError(f"{path}: {size:,} bytes, begins with no parquet; expected {expected}; {REMEDY}")
        records, unpacked = [], 0
        try:
            found = open_parquet(opened, str(path), size, f"expected {expected}; {REMEDY}")
            if not 0 < (count := found.metadata.num_rows) <= MOST_QUESTIONS:
                raise InputError(f"{path}: {count:,} rows; expected 1 to {MOST_QUESTIONS:,} questions")
            if len(set(names := found.schema_arrow.names)) < len(names):
                raise InputError(f"{path}: two columns have one name; expected {expected}")
            for batch in found.iter_batches(1, use_threads=False):  # many rows may be one value of a dictionary
                records += batch.to_pylist()
                unpacked += size_of(records[-1])
                if unpacked > LARGEST_FILE or len(records) > MOST_QUESTIONS:
                    raise InputError(
                        f"{path}: more than {LARGEST_FILE:,} bytes or {MOST_QUESTIONS:,} rows when it is unpacked; "
                        f"expected {expected}"
                    )
        except InputError:
            raise
        except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"{path}: damaged behind row {len(records)}: {said:.200}; expected {expected}; {REMEDY}"
            ) from error
    if len(records) != count:
        raise InputError(f"{path} has {len(records)} rows, and describes {count}; expected {expected}; {REMEDY}")
    return [(f"{path}, row {number}", record) for number, record in enumerate(records, 1)]


def size_of(value) -> int:
    """Bytes of the texts in a record, about."""
    if isinstance(value, dict | list):
        return 16 + sum(map(size_of, value.values() if isinstance(value, dict) else value))
    return 16 + len(value) if isinstance(value, str | bytes) else 16


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
    lines = [line.rpartition("]") for line in written.strip().replace(" [title]", ". ").split("\n")]
    # behind the last ] of a line none is closed: each of a million [ would be looked through to its end
    return "\n".join(re.sub(r"\[.*?\]", "", head + end) + rest for head, end, rest in lines).replace("  ", " ")
