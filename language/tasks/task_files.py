"""Questions as JSON lines or parquet, and what stands in them. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from language.data.stream_files import open_parquet, refuse_other_json
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import file_size, lines_of, open_regular, parse_json

LARGEST_FILE = 1 << 28  # bytes, of parquet unpacked too; MMLU has 7 million, the largest of CORE's some 20
LONGEST_LINE = 1 << 24
MOST_QUESTIONS = 1 << 20
REMEDY = "download it again"


def file_of(folder: Path, split: str) -> Path:
    """The file of a split, with any of the names that the hub has. Raises InputError for none, and for several."""
    named = [file for file in (folder / f"{split}.jsonl", folder / f"{split}.parquet") if file.exists()]
    found = [*named, *sorted(folder.glob(f"{split}-*.parquet"))]
    if len(found) > 1:
        raise InputError(f"{folder} has {found[0].name} and {found[1].name}; expected one file of {split}; remove one")
    if not found:
        raise InputError(f"{folder} has no {split}.jsonl, nor .parquet; expected one of them")
    return found[0]


def read_records(path: Path, expected: str) -> list[tuple[str, dict]]:
    """(file and line or row, the record) of each line of JSON, or of each row where the name ends in .parquet. Raises
    InputError for anything else, and for a file of none."""
    records, unpacked = [], 0
    with open_regular(path, expected) as file:
        if (size := file_size(file)) > LARGEST_FILE:
            raise InputError(f"{path} has {size:,} bytes; expected {LARGEST_FILE:,} at most, {expected}")
        for record in (rows_of if path.suffix == ".parquet" else lines_of_json)(file, path, size, expected):
            records.append(record)
            unpacked += size_of(record[1])
            if unpacked > LARGEST_FILE or len(records) > MOST_QUESTIONS:
                raise InputError(
                    f"{path}: more than {LARGEST_FILE:,} bytes or {MOST_QUESTIONS:,} questions when it is unpacked; "
                    f"expected {expected}"
                )
    if not records:
        raise InputError(f"{path}: no question; expected {expected}")
    return records


def rows_of(file: BinaryIO, path: Path, size: int, expected: str) -> Iterator[tuple[str, dict]]:
    """Records of a parquet file: Hugging Face's hub keeps data sets so."""
    import pyarrow  # only here: it takes a third of a second

    if file.read(4) != b"PAR1":
        raise InputError(f"{path}: {size:,} bytes, begins with no parquet; expected {expected}; {REMEDY}")
    number = 0
    try:
        found = open_parquet(file, str(path), size, f"expected {expected}; {REMEDY}")
        if (count := found.metadata.num_rows) > MOST_QUESTIONS:
            raise InputError(f"{path}: {count:,} rows; expected at most {MOST_QUESTIONS:,} questions")
        if len(set(names := found.schema_arrow.names)) < len(names):
            raise InputError(f"{path}: two columns have one name; expected {expected}")
        for batch in found.iter_batches(1, use_threads=False):  # many rows may be one value of a dictionary
            number += 1
            yield f"{path}, row {number}", batch.to_pylist()[0]
    except InputError:
        raise
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: damaged behind row {number}: {said:.200}; expected {expected}; {REMEDY}") from error
    if number != count:
        raise InputError(f"{path} has {number} rows, and describes {count}; expected {expected}; {REMEDY}")


def size_of(value) -> int:
    """Bytes of the texts in a record, about."""
    if isinstance(value, dict | list):
        return 16 + sum(map(size_of, value.values() if isinstance(value, dict) else value))
    return 16 + len(value) if isinstance(value, str | bytes) else 16


def lines_of_json(file: BinaryIO, path: Path, size: int, expected: str) -> Iterator[tuple[str, dict]]:
    """The JSON object of each line."""
    refuse_other_json(file, str(path))
    for number, line in enumerate(lines_of(file, LONGEST_LINE), 1):
        try:
            if not line.strip():
                raise ValueError(f"it is empty, or longer than {LONGEST_LINE:,} bytes")
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError(f"it is {type(record).__name__}")
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}; expected {expected}, a JSON object a line") from error
        yield f"{path}, line {number}", record
