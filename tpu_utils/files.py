"""Files that survive whatever stops the machine. Imports nothing of this project."""

import errno
import json
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO


def write_atomically(path: Path, content: bytes) -> None:
    """The file has the old content or the new one, never a part, whenever the machine stops."""
    aside = path.with_name(path.name + ".writing")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, follow: bool = True) -> BinaryIO:
    """Open for reading what is a regular file: a FIFO would wait for ever, a device never end.

    follow: a symbolic link that the user names is followed; one in a folder that came from elsewhere is not.
    Raises OSError.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def inside(folder: Path, name: str) -> Path:
    """The path below folder of a name that came from elsewhere: an object of a bucket, an entry of a list.

    Raises ValueError for a name that could lead out of the folder, by its parts or by a symbolic link on the way.
    """
    parts = name.split("/")
    if not all(re.fullmatch(r"[\w.-]{1,200}", part, re.ASCII) and part.strip(".") for part in parts):
        raise ValueError(f"{name[:200]!r} is no name inside a folder")
    path = folder.joinpath(*parts)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} leads out of {folder} through a symbolic link")
    return path


def parse_json(content: bytes) -> Any:
    """Of JSON from elsewhere. Raises ValueError for what is none, nests too deeply, or has a key twice in an object."""
    try:
        return json.loads(content.decode(), object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def checksum_of(path: Path, follow: bool = True) -> dict[str, int]:
    """{"bytes", "crc32"} of a regular file."""
    size = checksum = 0
    with open_regular(path, follow) as file:
        while block := file.read(1 << 22):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}
