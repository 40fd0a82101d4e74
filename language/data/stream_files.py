"""Files of documents, read one document after another: parquet, and JSON lines, plain, gzip or zstd. Imports no torch.

A file is on disk or in a bucket, where it is read in ranges and never as a whole. Memory does not follow what a file
holds: a line longer than LONGEST bytes is refused unread, so a compressed file that never ends is one message.
"""

import codecs
import contextlib
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from language.data.entries import check_apart, entries_of, is_hidden, matching, refuse_overlap, size_of, tell_once
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import open_regular, parse_json, read_regular

LONGEST = 1 << 24  # bytes of a line, and of a document; the longest of FineWeb has less than 2 MiB
LONGEST_FOOTER = 1 << 26  # bytes of the description at the end of a parquet file
LONGEST_LIST = 1 << 24  # bytes of a list of files
SAMPLE = 1 << 12  # bytes at each end of a file that identify it, beside name and size
BLOCK = 1 << 22  # bytes of one request to a bucket
ROWS = 64  # rows of a parquet file that are in memory as text, at most
BATCH_BYTES = 1 << 28  # that these take, where one of them alone takes less
EXPECTED = "documents: .parquet, .jsonl or .json, the last two also with .gz or .zst"
NAMES = re.compile(r"\.(?:(parquet)|(?:jsonl|json|ndjson)(?:\.(gz|zst))?)$")
SKIPPABLE = tuple(bytes([byte]) + b"\x2a\x4d\x18" for byte in range(0x50, 0x60))  # frames that pzstd begins with
BEGINNINGS = {"parquet": b"PAR1", "gz": b"\x1f\x8b", "zst": (b"\x28\xb5\x2f\xfd", *SKIPPABLE)}
OTHER_FORMS = (
    (rb"\x1f\x8b", "is packed by gzip", "gzip -dc"),
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "is packed by zstd", "zstd -dc"),
    (
        rb"PAR1",
        "is parquet",
        "python -c \"import pandas; print(pandas.read_parquet('FILE').to_json(orient='records', lines=True))\"",
    ),
    (rb"\xff\xfe|\xfe\xff", "is UTF-16", "iconv --from-code UTF-16 --to-code UTF-8"),
    (rb"\[", "is one JSON array", "jq --compact-output '.[]'"),
    (rb"\{[ \t\r]*\n", "has objects of several lines", "jq --compact-output ."),
)
"""How a file begins that is not one JSON object a line, what it is, and what makes lines of it."""


@dataclass(frozen=True)
class StreamFile:
    """A file, and what it was like when the run began."""

    name: str  # its path, or gs://BUCKET/OBJECT
    size: int
    generation: int = 0  # generation number of an object: new content under the same name has another
    crc32c: str = ""  # CRC32C checksum of an object, as Cloud Storage has it

    @property
    def kind(self) -> str:
        """parquet, gz, zst; "" for plain JSON lines."""
        found = NAMES.search(self.name)
        return found[1] or found[2] or ""

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Raises InputError where it is not the file that the run began with, at its end as at its beginning."""
        if self.name.startswith("gs://"):
            from tpu_utils.remote.storage import open_object  # only here: nothing else needs the storage's client

            with open_object(self.name, self.generation, BLOCK) as file:
                yield file
            return
        with open_regular(Path(self.name), EXPECTED) as file:
            self._check_size()
            try:
                yield file
            finally:  # whatever went wrong: a line that is half written is no damage
                self._check_size()

    def _check_size(self) -> None:
        if (size := Path(self.name).stat().st_size) != self.size:
            raise InputError(
                f"{self.name} has {size:,} bytes now, {self.size:,} when the run began: it is being written; expected "
                "files that are whole; begin once they are, or leave it out with --stream_damaged skip"
            )

    def fingerprint(self) -> bytes:
        """Name without folders, size, and both ends, or the checksum of an object. Raises InputError."""
        said = f"{self.name.rpartition('/')[2]} {self.size} {self.crc32c}".encode()
        if self.crc32c:
            return said
        with self.opened() as file:
            begins = file.read(SAMPLE)
            file.seek(max(0, self.size - SAMPLE))
            ends = file.read(SAMPLE)
        return said + begins + ends


# ------------------------------------------------------------------------------------------------------- which files


def list_files(names: str, data_dir: str) -> list[StreamFile]:
    """The files that --train_data names: a file, a folder, a pattern, gs://, or a .txt with one of these a line. Sorted
    within a pattern, in the order of the list. Raises InputError for names that lead nowhere."""
    if names.endswith(".txt"):
        path = Path(data_dir, names)
        content = read_regular(path, "a list of files", LONGEST_LIST).removeprefix(codecs.BOM_UTF8)
        lines = content.decode(errors="surrogateescape").splitlines()
        entries = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if nested := [entry for entry in entries if entry.endswith(".txt")]:
            raise InputError(f"{path} names {nested[0]}; expected {EXPECTED}; write its lines into one list")
    else:
        entries = [names]
    with ThreadPoolExecutor(16) as pool:  # a listing of a bucket is a request
        found = [file for files in pool.map(lambda entry: files_of(entry, data_dir), entries) for file in files]
    if not found:
        raise InputError(f"{names}: names no file; expected {EXPECTED}")
    if len(twice := {file.name if file.crc32c else os.path.realpath(file.name) for file in found}) < len(found):
        raise InputError(f"{names}: names {len(found) - len(twice)} files twice; expected each once; mend the list")
    if odd := [file.name for file in found if not NAMES.search(file.name)]:
        raise InputError(f"{odd[0]}: expected {EXPECTED}; name a pattern such as '*.parquet'")
    return found


def files_of(entry: str, data_dir: str) -> list[StreamFile]:
    if entry.startswith("gs://"):
        return objects_of(entry)
    path = Path(data_dir, entry)
    paths = entries_of(path, (p for p in path.rglob("*") if p.is_file())) if path.is_dir() else matching(path)
    if not paths:
        raise InputError(f"{path}: matches no file; expected {EXPECTED}")
    return [StreamFile(str(one), size_of(one)) for one in paths]


def objects_of(url: str) -> list[StreamFile]:
    """Files behind the URL of one object, a folder, or a pattern; a * matches no slash."""
    from tpu_utils.remote.storage import START_SECONDS, connect, list_objects, named_errors

    bucket_name, _, pattern = url.removeprefix("gs://").partition("/")
    fixed = re.match(r"[^*?]*", pattern)[0]
    wanted = re.escape(pattern).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    wanted = f"{wanted.rstrip('/')}/.*" if fixed == pattern and not NAMES.search(pattern) else wanted
    with named_errors("{} cannot be listed", url):
        blobs = list_objects(connect(f"gs://{bucket_name}")[0], fixed, START_SECONDS).values()
    found = sorted((blob for blob in blobs if re.fullmatch(wanted, blob.name)), key=lambda blob: blob.name)
    named = "" if not fixed or fixed.endswith("/") else "_"  # the part of a name that the user began is none to hide
    visible = [blob for blob in found if not is_hidden(named + blob.name.removeprefix(fixed))]
    if len(visible) < len(found):
        tell_once(f"left out   {len(found) - len(visible)} hidden objects of {url}")
    if not visible:
        raise InputError(f"{url}: matches no object; expected {EXPECTED}")
    return [StreamFile(f"gs://{bucket_name}/{blob.name}", blob.size, blob.generation, blob.crc32c) for blob in visible]


def check_no_overlap(training: list[StreamFile], validation: list[StreamFile]) -> None:
    """Raises InputError for a file that is in both, under another name too."""
    local, local_validation = ([Path(one.name) for one in files if not one.crc32c] for files in (training, validation))
    check_apart(local, local_validation)
    objects = {(file.size, file.crc32c): file.name for file in training if file.crc32c and file.size}
    for file in validation:
        if other := objects.get((file.size, file.crc32c)):
            refuse_overlap(other, file.name)


def fingerprint_of(files: list[StreamFile]) -> int:
    """CRC-32 of names, sizes and ends of files, in their order."""
    with ThreadPoolExecutor(16) as pool:
        return zlib.crc32(b"".join(pool.map(StreamFile.fingerprint, files)))


# ------------------------------------------------------------------------------------------------------- what they hold


def read_documents(file: StreamFile, field: str, first: int = 0) -> Iterator[str | InputError]:
    """The text of each document from number `first` on; for one that is damaged, the InputError that says why. Raises
    InputError where nothing more can be read. PassingError: a bucket does not answer."""
    read = 0
    try:
        with file.opened() as opened:
            begins = opened.peek(4)
            if other := [kind for kind, marks in BEGINNINGS.items() if begins.startswith(marks) and kind != file.kind]:
                raise InputError(f"{file.name}: begins as .{other[0]} does; expected what its name says; rename it")
            if not begins.startswith(BEGINNINGS.get(file.kind, b"")) or not file.size:
                raise InputError(f"{file.name}: {file.size:,} bytes, begins with no {file.kind or 'JSON'}; {REMEDY}")
            texts = rows_of if file.kind == "parquet" else lines_of_json
            for text in texts(opened, file, field, first):
                yield text
                read += 1
    except InputError:
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:  # raised by gzip, and by pyarrow
        said = " ".join(str(error).split()) or type(error).__name__
        if "too much memory" in said:  # zstd's words: a frame names the window that it needs
            raise InputError(
                f"{file.name}: its zstd window is larger than 128 MiB, as zstd --long=31 makes it; expected --long=27 "
                "at most; zstd -d --long=31 FILE, and compress it again"
            ) from error
        raise InputError(f"{file.name}: damaged behind document {first + read}: {said:.200}; {REMEDY}") from error


REMEDY = "copy it again, or leave out what is damaged with --stream_damaged skip"


def lines_of_json(opened: BinaryIO, file: StreamFile, field: str, first: int) -> Iterator[str | InputError]:
    """A document is a line that is not blank."""
    number = -1
    line_number = 0
    blank = 0
    with decompressed(opened, file.kind) as lines:
        refuse_other_json(lines, file.name)
        while line := lines.readline(LONGEST + 1):
            line_number += 1
            if len(line) > LONGEST:
                raise InputError(f"{file.name}: line {line_number} has more than {LONGEST:,} bytes; {REMEDY}")
            if line.isspace():
                blank += 1
                line_number += pass_blank(lines) if blank % 64 == 0 else 0
                continue
            number, blank = number + 1, 0
            if number >= first:
                yield text_of_line(line, f"{file.name}: line {line_number}", field)


def refuse_other_json(file: io.BufferedReader, name: str) -> None:
    """Raises InputError for a file of JSON that is not one object a line. The file is at its beginning, and stays."""
    begins = file.peek(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip()
    for pattern, found, command in OTHER_FORMS:
        if re.match(pattern, begins):
            raise InputError(f"{name} {found}; expected one JSON object a line; {command} FILE > LINES")


def pass_blank(lines: BinaryIO) -> int:
    """Go to what is not blank, a block at a time: a few bytes of zstd are millions of lines. Returns how many."""
    passed = 0
    while block := lines.peek(1):
        size = len(block) - len(block.lstrip())
        passed += lines.read(size).count(b"\n")
        if size < len(block):
            break
    return passed


def text_of_line(line: bytes, where: str, field: str) -> str | InputError:
    try:
        found = parse_json(line)
    except ValueError as error:
        return InputError(f"{where} is no JSON: {error!s:.100}; {REMEDY}")
    if isinstance(found, dict) and isinstance(text := found.get(field, 0), str | None):
        return checked(text, where)
    has = type(found).__name__
    if isinstance(found, dict):
        has = ", ".join(f"{key}: {type(value).__name__}" for key, value in list(found.items())[:8]) or "nothing"
    return InputError(f"{where} has {has:.200}; expected an object with {field}: str; name another --text_field")


def too_long(where: str, size: int) -> InputError:
    return InputError(f"{where} has {size:,} bytes; expected {LONGEST:,}; {REMEDY}")


def checked(text: Any, where: str) -> str | InputError:
    if not isinstance(text, str):
        return InputError(f"{where} has no text (null); {REMEDY}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return InputError(f"{where} has half a surrogate pair; expected UTF-8 text; {REMEDY}")
    return text if size <= LONGEST else too_long(where, size)


def decompressed(opened: BinaryIO, kind: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if kind == "gz":
        return gzip.open(opened)
    if kind == "zst":
        import pyarrow  # only here: it reads zstd too, so no package for that is needed

        return io.BufferedReader(pyarrow.CompressedInputStream(opened, "zstd"), 1 << 18)
    return contextlib.nullcontext(opened)


def open_parquet(opened: BinaryIO, name: str, size: int, remedy: str):
    """pyarrow's ParquetFile. Raises InputError where its description is not at its end, and what pyarrow raises."""
    import pyarrow.parquet  # only here

    opened.seek(max(0, size - 8))
    footer = opened.read(8)
    if footer[4:] != b"PAR1" or int.from_bytes(footer[:4], "little") > min(size, LONGEST_FOOTER):
        raise InputError(f"{name}: ends without the footer of parquet; {remedy}")
    opened.seek(0)
    return pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=1 << 20)


def rows_of(opened: BinaryIO, file: StreamFile, field: str, first: int) -> Iterator[str | InputError]:
    """A document is a row. Row groups before `first` are passed over unread."""
    import pyarrow  # only here
    from pyarrow import compute

    found = open_parquet(opened, file.name, file.size, REMEDY)
    kinds = [column.type for column in found.schema_arrow if column.name == field]
    kinds = [kind.value_type if pyarrow.types.is_dictionary(kind) else kind for kind in kinds]
    if len(kinds) != 1 or kinds[0] not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        has = ", ".join(f"{column.name}: {column.type}" for column in list(found.schema_arrow)[:8])
        once = ", once" if kinds[1:] else ""
        raise InputError(
            f"{file.name} has the columns {has:.200}; expected {field}: string{once}; name another --text_field"
        )
    number = 0
    for group in range(found.num_row_groups):
        described = found.metadata.row_group(group)
        end = number + described.num_rows
        if end <= first:
            number = end
            continue
        where = partial("{}: row {} (row group {})".format, file.name)
        columns = [described.column(column) for column in range(described.num_columns)]
        size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == field)
        if size > LONGEST * (end - number):  # values that a dictionary has count once
            for row in range(max(number, first), end):  # unread: what is longest in it is in memory as a whole
                yield too_long(where(row + 1, group + 1), size // (end - number))
            number = end
            continue
        rows = min(ROWS, max(1, BATCH_BYTES // max(size, 1)))  # each may be the longest value, which is there once
        for batch in found.iter_batches(rows, [group], [field], use_threads=False):
            column = batch.column(field)  # by its name: a.b is a part of a column a, too
            if column.type not in (pyarrow.string(), pyarrow.large_string()):
                column = column.cast(pyarrow.large_string())
            for text, size in zip(column, compute.binary_length(column).to_pylist(), strict=True):
                if number >= first:
                    here = where(number + 1, group + 1)
                    yield too_long(here, size) if (size or 0) > LONGEST else checked(text.as_py(), here)
                number += 1
        if number != end:
            raise InputError(f"{file.name}: row group {group + 1} ends at row {number}, not {end}; {REMEDY}")
