"""Files written so that they survive a crash, and their checksums."""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """The file has the old content or the new one, never a part, whenever the machine stops or the disk is full."""
    aside = path.with_name(path.name + ".writing")
    aside.unlink(missing_ok=True)  # left by a kill; or put there by whoever made the folder: a link would be followed
    try:
        with aside.open("xb") as file:
            file.writelines([content] if isinstance(content, bytes | bytearray) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write does not say of what
        raise
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum_of(file: BinaryIO) -> dict[str, int]:
    """{"bytes", "crc32"} of the rest of an open file."""
    size = checksum = 0
    while block := file.read(1 << 22):
        size, checksum = size + len(block), zlib.crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}
