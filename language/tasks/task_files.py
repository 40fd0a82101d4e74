"""Questions as JSON lines or parquet, and what stands in them. Imports no torch."""

from pathlib import Path

from language.data.stream_files import open_parquet
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import file_size, open_regular, parse_json, read_regular

LARGEST_FILE = 1 << 28  # bytes, of parquet unpacked too; MMLU has 7 million, the largest of CORE's some 20
MOST_QUESTIONS = 1 << 20
REMEDY = "download it again"


def file_of(folder: Path, split: str) -> Path:
    """The file of a split, with any of the names that the hub has. Raises InputError for none, and for several."""
    named = [file for file in (folder / f"{split}.jsonl", folder / f"{split}.parquet") if file.exists()]
    found = [*named, *sorted(folder.glob(f"{split}-*.parquet"))]
    if len(found) > 1:
        raise InputError(
            f"{folder} has {found[0].name} and {found[1].name}; expected one file of {split}; move one away"
        )
    if not found:
        raise InputError(f"{folder} has no {split}.jsonl, nor .parquet; expected one of them")
    return found[0]


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
