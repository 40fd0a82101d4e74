"""Files to be read: opened only if they are regular files, and read up to a size limit. writing.py writes them.

A file from outside that does not fit raises InputError: found, expected, what to do. Imports only errors.py of ours.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tpu_utils.base.errors import InputError

Field = TypeVar("Field")
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
}
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def open_regular(path: Path, expected: str, follow: bool = True) -> BinaryIO:
    """The file, opened to be read. Raises InputError for what is missing or no regular file. A FIFO waits for a writer,
    a device need not end: neither is opened. expected: what the file should be, in words. follow: a link that the user
    names is followed; one in a folder that came from elsewhere is not."""
    never = 0 if follow else os.O_NOFOLLOW
    try:
        kind = stat.S_IFMT(path.stat(follow_symlinks=follow).st_mode)
        if kind != stat.S_IFREG:
            raise InputError(
                f"{path} is {KINDS.get(kind, 'no regular file')}; expected {expected}, a regular file; check the path"
            )
        # O_NONBLOCK has no effect on a regular file; one that became a FIFO just now is not waited for
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | never | os.O_NONBLOCK))  # noqa: SIM115
        try:
            begins = file.peek()  # only a read says of some files in /proc that they cannot be read
        except OSError:
            file.close()
            raise
    except OSError as error:
        found = ": no such file" if error.errno == errno.ENOENT else f" cannot be read: {error.strerror}"
        raise InputError(f"{path}{found}; expected {expected}") from error
    if begins.startswith(LFS_POINTER):
        file.close()
        raise InputError(f"{path} is a pointer that Git LFS left in its place; expected {expected}; run git lfs pull")
    return file


def file_size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def read_regular(path: Path, expected: str, max_bytes: int, follow: bool = True) -> bytes:
    """All of a regular file. Raises InputError for any other, and for one of more than max_bytes, which is not read."""
    with open_regular(path, expected, follow) as file:
        size = file_size(file)
        if size > max_bytes:
            raise InputError(f"{path} has {size:,} bytes; expected {max_bytes:,} at most, {expected}")
        return file.read(size)


def lines_of(file: BinaryIO, longest: int) -> Iterator[bytes]:
    """Each line with its newline. A line of `longest` bytes or more comes as its newline alone: memory is bounded."""
    while line := file.readline(longest):
        if len(line) == longest:
            while line and not line.endswith(b"\n"):
                line = file.readline(longest)
            line = line[-1:]
        yield line


def parse_json(content: bytes) -> Any:
    """Raises ValueError for all that is no JSON in UTF-8, for a key that stands twice in one object, and for what is
    nested deeper than Python can go. A byte order mark in front is passed over."""
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def inside(folder: Path, name: str) -> Path:
    """The path below folder of a name that came from elsewhere: an object of a bucket, an entry of a list. Raises
    ValueError for a name that could lead out of the folder, by its parts or by a symbolic link on the way."""
    parts = name.split("/")
    if not all(re.fullmatch(r"[\w.-]{1,200}", part, re.ASCII) and part.strip(".") for part in parts):
        raise ValueError(f"{name[:200]!r} is no name inside a folder")
    path = folder.joinpath(*parts)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} leads out of {folder} through a symbolic link")
    return path


def read_json(path: Path, expected: str, max_bytes: int = 1 << 20) -> dict[str, Any]:
    """The JSON object in a file of at most max_bytes. Raises InputError for anything else."""
    return parse_object(read_regular(path, expected, max_bytes), str(path), expected)


def field_in(path: Path, name: str, kind: type[Field]) -> Field | None:
    """What the JSON object in a file of a run has by this name. None where the file is absent or damaged, which will be
    written again, or the value is of another kind."""
    try:
        found = read_json(path, "a JSON object").get(name)
    except InputError:
        return None
    return found if type(found) is kind else None


def parse_object(content: bytes, name: str, expected: str) -> dict[str, Any]:
    """The JSON object that a file of this name holds. Raises InputError for anything else."""
    try:
        value = parse_json(content)
    except ValueError as error:
        raise InputError(f"{name} cannot be read as JSON: {error}; expected {expected}") from error
    if not isinstance(value, dict):
        raise InputError(f"{name} holds {type(value).__name__}; expected a JSON object, {expected}")
    return value
