"""Files that survive whatever stops the machine. Imports nothing of this project."""

import errno
import os
import stat
import zlib
from pathlib import Path


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


def checksum_of(path: Path) -> dict[str, int]:
    """{"bytes", "crc32"} of a file."""
    return {"bytes": path.stat().st_size, "crc32": crc32_of(path)}


def crc32_of(path: Path) -> int:
    """Raises OSError for a FIFO or a device, which might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
