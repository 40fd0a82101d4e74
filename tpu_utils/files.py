"""Files that survive whatever stops the machine. Imports nothing of this project."""

import contextlib
import os
import shutil
import zlib
from collections.abc import Iterator
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


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A new folder beside target, which gets target's name when the block has ended well: all of it or nothing.

    target is absent or an empty folder. Raises OSError.
    """
    target = target.resolve()
    aside = target.with_name(f".writing_{target.name}")
    if aside.exists():  # left by a kill
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    try:
        yield aside
        sync_folder(aside)
        aside.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


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
