"""Which token shards one run of tools.prepare_data has written: OUTPUT_shards.json beside them. Imports no torch.

The file says that shards are being written before the first one is, and is replaced when all are there. So training
sees a preparation that was killed, and shards that an earlier or another one left. Shards without it are read as such.
"""

import fnmatch
import json
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from tpu_utils.base.errors import InputError
from tpu_utils.base.files import file_size, open_regular, read_json
from tpu_utils.base.writing import write_atomically

SHARD = re.compile(r"(.+)_(?:train|val)_\d{6,}\.bin")
EXPECTED = "the list of shards that tools.prepare_data has written"
LARGEST = 1 << 26  # bytes of it
ENDS = 1 << 12  # bytes at each end of a shard that identify it, beside its size


def shards_with(prefix: str) -> list[Path]:
    names = ((path, SHARD.fullmatch(path.name)) for path in sorted(Path(prefix).parent.iterdir()))
    return [path for path, found in names if found and found[1] == Path(prefix).name]


def begin_preparation(prefix: str) -> BinaryIO:
    """Say that shards are being written, and remove those of an earlier preparation with this prefix. Returns the list
    of shards, locked until it is closed. Raises InputError for shards that came from elsewhere, and where another
    process writes some."""
    from tpu_utils.base.new_folder import take_lock  # only here: training writes none

    list_of_shards, earlier = path_of(prefix), shards_with(prefix)
    if earlier and not list_of_shards.exists():
        raise InputError(
            f"{earlier[0]} is there without {list_of_shards.name}, {len(earlier)} such shards; expected none, or those "
            "of an earlier preparation, which are replaced; remove them, or choose another --output"
        )
    if list_of_shards.exists():
        with list_of_shards.open("rb") as held:
            take_lock(held.fileno(), list_of_shards)
    write_atomically(list_of_shards, json.dumps({"complete": False}).encode())
    held = list_of_shards.open("rb")
    take_lock(held.fileno(), list_of_shards)
    for path in earlier:
        path.unlink()
    return held


def abandon_preparation(prefix: str) -> None:
    """Remove all of a preparation that cannot be ended: it would take the room that the next one needs."""
    for path in (*shards_with(prefix), path_of(prefix)):
        path.unlink()


def end_preparation(prefix: str, paths: list[Path], facts: dict[str, Any]) -> None:
    """All shards are written. facts: what they were made of, for whoever reads the file."""
    found = {"complete": True, **facts, "shards": {path.name: identity(path) for path in paths}}
    write_atomically(path_of(prefix), json.dumps(found, indent=1).encode())


def path_of(prefix: str) -> Path:
    return Path(f"{prefix}_shards.json")


def identity(path: Path) -> dict[str, int]:
    """Size, and CRC-32 of both ends: shards of equal size are the rule."""
    with open_regular(path, "a file of data") as file:
        size = file_size(file)
        ends = file.read(ENDS)
        file.seek(max(0, size - ENDS))
        return {"bytes": size, "crc32": zlib.crc32(file.read(ENDS), zlib.crc32(ends))}


def check_preparations(pattern: Path, paths: list[Path]) -> None:
    """Raises InputError where the shards that a pattern matches are not those of a preparation that has ended."""
    shards: dict[str, dict[str, Path]] = {}
    for path in paths:
        if found := SHARD.fullmatch(path.name):
            shards.setdefault(found[1], {})[path.name] = path
    for prefix, own in sorted(shards.items()):
        if (list_of_shards := path_of(str(pattern.parent / prefix))).exists():
            check_one(list_of_shards, own, pattern.name)


def check_one(list_of_shards: Path, own: dict[str, Path], pattern: str) -> None:
    found = read_json(list_of_shards, EXPECTED, LARGEST)
    shards = found.get("shards")
    if found.get("complete") is not True or not isinstance(shards, dict):
        raise InputError(
            f"{list_of_shards}: these shards are still being written, or their preparation was stopped; expected all "
            "of them; run tools.prepare_data again"
        )
    missing = [name for name in fnmatch.filter(shards, pattern) if name not in own]
    changed = [name for name, path in own.items() if shards.get(name) != identity(path)]
    for names, problem in ((missing, "is missing"), (changed, "is of another preparation")):
        if names:
            raise InputError(
                f"{list_of_shards.parent / names[0]} {problem} ({len(names)} such shards); expected those of "
                f"{list_of_shards.name}; copy all of them again, or run tools.prepare_data again"
            )
