"""Which files of data there are: patterns, folders and links, the same file twice. Imports no torch."""

import codecs
import filecmp
import functools
import io
import os
import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

from tpu_utils.base.errors import InputError
from tpu_utils.base.files import file_size, open_regular

FEWEST_OTHER_FILES = 32
"""Files that a run has open beside its data, at least."""
OTHER_FILES = 1024


def allow_open_files(count: int, what: str) -> None:
    """Raise this process's own limit of open files by so many. Raises InputError where the machine's is lower."""
    needed, unlimited = len(list(Path("/dev/fd").iterdir())) + count, resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != unlimited and hard < needed + FEWEST_OTHER_FILES:
        raise InputError(
            f"{what} are {count:,} files to keep open, but this machine allows a process {hard:,}, others included; "
            "expected fewer and longer ones (tools.prepare_data --shard_tokens), or a higher limit: ulimit -Hn, of "
            "docker --ulimit nofile=NUMBER"
        )
    if soft != unlimited and soft < needed + OTHER_FILES:
        wanted = needed + OTHER_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == unlimited else min(wanted, hard), hard))


def matching(pattern: Path) -> list[Path]:
    """The file of this name; or those that its last part matches as a pattern, sorted."""
    if os.path.lexists(pattern):
        return [pattern]
    try:
        found = list(pattern.parent.glob(pattern.name))
    except ValueError:  # empty, or with ** inside a name: no pattern to pathlib
        return []
    return entries_of(pattern.parent, found)


def entries_of(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """The paths in a folder, sorted, without hidden ones: what editors, Git and downloads put there is no data.

    Raises InputError for a link out of it: which files a model is trained on is for the user to say, not for whoever
    made the folder. And for the root of all folders, which would take hours to list.
    """
    if folder.resolve() == folder.resolve().parent:
        raise InputError(f"{folder} holds every file of this machine; expected a folder of data")
    every = sorted(paths)
    found = [path for path in every if not is_hidden(str(path.relative_to(folder)))]
    if len(found) < len(every):
        tell_once(f"left out   {len(every) - len(found)} hidden files in {folder}")
    for path in found:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"{path} is a link to {path.resolve()}, expected files within {folder}; copy the folder with "
                "cp --recursive --dereference, or name the folder that it leads to"
            )
    return found


def is_hidden(name: str) -> bool:
    """Whether a path within a folder has a part that begins with a dot, or is an editor's copy: NAME~ or #NAME#."""
    return any(re.fullmatch(r"(?s)\..*|.+~|#.+#", part) for part in name.split("/"))


@functools.cache  # a run looks at its files when its options are checked, and again when it begins
def tell_once(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def refuse_other_json(file: io.BufferedReader, name: str) -> None:
    """Raises InputError for a file of JSON that is not one object a line. The file is at its beginning, and stays."""
    begins = file.peek(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip()
    found = command = ""
    if begins.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        found, command = "is UTF-16", "iconv --from-code UTF-16 --to-code UTF-8"
    elif begins.startswith(b"["):
        found, command = "is one JSON array", "jq --compact-output '.[]'"
    elif re.match(rb"\{[ \t\r]*\n", begins):
        found, command = "has objects of several lines", "jq --compact-output ."
    if found:
        raise InputError(f"{name} {found}; expected one JSON object a line; {command} FILE > LINES")


def check_apart(training: Iterable[Path], validation: Iterable[Path]) -> None:
    """Raises InputError for a file that is in both, by a link or as a copy too."""
    by_size: dict[int, list[Path]] = {}
    for path in training:
        by_size.setdefault(size_of(path), []).append(path)
    by_size.pop(0, None)
    for path in validation:
        for other in by_size.get(size_of(path), ()):
            if path.samefile(other) or filecmp.cmp(path, other, shallow=False):
                refuse_overlap(str(other), str(path))


def size_of(path: Path) -> int:
    with open_regular(path, "a file of data") as file:
        return file_size(file)


def refuse_overlap(training: str, validation: str) -> None:
    what = f"{validation} is" if training == validation else f"{training} is the same as {validation},"
    raise InputError(
        f"{what} in train_data and in validation_data; expected text for validation that is not trained on; choose a "
        "--train_data without it"
    )
