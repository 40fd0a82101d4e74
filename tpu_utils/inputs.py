"""Files that come from outside: opened when they are files, read as far as they may go. Imports errors alone.

What does not fit raises InputError: found, expected, what to do.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tpu_utils.errors import InputError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path, expected: str) -> BinaryIO:
    """The file, opened to be read; links are followed. Raises InputError for what is missing or no regular file.

    A FIFO waits for a writer, a device need not end: neither is opened. expected: what the file should be, in words.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            raise InputError(
                f"{path} is {KINDS.get(kind, 'no regular file')}; expected {expected}, a regular file; check the path"
            )
        # O_NONBLOCK has no effect on a regular file; one that became a FIFO just now is not waited for
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise InputError(f"{path}: no such file; expected {expected}") from error
        raise InputError(f"{path} cannot be read: {error.strerror}; expected {expected}") from error


def file_size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def read_regular(path: Path, expected: str, max_bytes: int) -> bytes:
    """All of a regular file. Raises InputError for any other, and for one of more than max_bytes, which is not read."""
    with open_regular(path, expected) as file:
        size = file_size(file)
        if size > max_bytes:
            raise InputError(f"{path} has {size:,} bytes; expected {max_bytes:,} at most, {expected}")
        return file.read(size)


def lines_of(file: BinaryIO, longest: int) -> Iterator[bytes]:
    """Each line with its newline. Of one with `longest` bytes or more only the newline comes, so memory is bounded."""
    while line := file.readline(longest):
        if len(line) == longest:
            while line and not line.endswith(b"\n"):
                line = file.readline(longest)
            line = line[-1:]
        yield line


def parse_json(content: bytes) -> Any:
    """Raises ValueError for all that is no JSON in UTF-8, also for what is nested deeper than Python can go."""
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path, expected: str, max_bytes: int = 1 << 20) -> dict[str, Any]:
    """The JSON object in a file of at most max_bytes. Raises InputError for anything else."""
    content = read_regular(path, expected, max_bytes)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise InputError(f"{path} cannot be read as JSON: {error}; expected {expected}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}; expected a JSON object, {expected}")
    return value
