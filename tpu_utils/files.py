"""Files that survive whatever stops the machine. Imports nothing of this project."""

import os
import zlib
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes) -> None:
    """The file has the old content or the new one, never a part, whenever the machine stops."""
    aside = path.with_name(path.name + ".writing")
    aside.unlink(missing_ok=True)  # left by a kill; or put there by whoever made the folder: a link would be followed
    with aside.open("xb") as file:
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


def checksum_of(file: BinaryIO) -> dict[str, int]:
    """{"bytes", "crc32"} of the rest of an open file."""
    size = checksum = 0
    while block := file.read(1 << 22):
        size, checksum = size + len(block), zlib.crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}
