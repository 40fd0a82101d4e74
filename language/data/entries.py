"""Which files of data there are: patterns, folders and links, the same file twice. Imports no torch."""

import filecmp
import functools
import os
import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

from language.data.preparations import identity
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import file_size, open_regular

FEWEST_OTHER_FILES = 32  # files that a run has open beside its data, at least
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
    """The paths in a folder, sorted, without hidden ones: what editors, Git and downloads put there is no data. Raises
    InputError for a link out of it: which files a model is trained on is for the user to say, not for whoever made the
    folder. And for the root of all folders, which would take hours to list."""
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
    tell_copies(folder, [path for path in found if path.is_file() and path.stat().st_size])
    return found


def tell_copies(folder: Path, paths: list[Path]) -> None:
    """Says how many files are the same as another one of them: NAME (1), NAME - Copy."""
    first: dict[str, Path] = {}
    others = [first.setdefault(str(identity(path)), path) for path in paths]
    pairs = [(path, other) for path, other in zip(paths, others, strict=True) if path != other]
    copies = [path.name for path, other in pairs if filecmp.cmp(path, other, shallow=False)]
    if copies:
        tell_once(f"twice      {len(copies)} files in {folder} are copies of others there, such as {copies[0]}")


HIDDEN = r"(?s)\..*|.+~|#.+#|~\$.+|.+\.(bak|orig|crdownload)|desktop\.ini|Thumbs\.db|__MACOSX|_SUCCESS"
"""Names that begin with a dot, and what editors, Windows, macOS, browsers and Spark put beside data."""


def is_hidden(name: str) -> bool:
    """Whether a path within a folder has a part with such a name."""
    return any(re.fullmatch(HIDDEN, part) for part in name.split("/"))


@functools.cache  # a run looks at its files when its options are checked, and again when it begins
def tell_once(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


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
        f"{what} in train_data and in validation_data; expected it in one of them; choose a --train_data without it"
    )
