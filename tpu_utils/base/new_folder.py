"""A new folder, or several files of one, that is there whole or not at all. Imports errors.py and files.py of ours."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from tpu_utils.base.errors import InputError, SaveError
from tpu_utils.base.writing import sync_folder, write_atomically


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A new folder beside target, which gets target's name when the block has ended well.

    target is absent or an empty folder. Until then the new one is called .writing_NAME_ and 16 digits of chance, as no
    folder of a user's is, and this process holds its lock: one without a lock was left by a kill, and is removed.
    Raises InputError where another process writes the target, or has written it meanwhile; SaveError for a full disk;
    OSError.
    """
    target = target.resolve()
    aside, unnamed = (target.with_name(f".{kind}_{target.name}_{secrets.token_hex(8)}") for kind in ("writing", "new"))
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    unnamed.mkdir()
    lock = os.open(unnamed, os.O_RDONLY)
    try:
        take_lock(lock, target)
        unnamed.rename(aside)  # only now it can be taken for a leftover
        yield aside
        sync_folder(aside)
        try:
            aside.rename(target)
        except OSError as error:
            raise InputError(
                f"{target} cannot take the place of {aside}: {error.strerror}; expected none, or an empty folder; "
                "another process may have written it meanwhile; choose another target"
            ) from error
        sync_folder(target.parent)
    except BaseException as error:
        for folder in (aside, unnamed):
            shutil.rmtree(folder, ignore_errors=True)
        said = str(error) if isinstance(error, OSError) else ""  # shutil.Error has the words alone
        for full in (os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)):
            if full in said:
                raise SaveError(
                    f"{target} cannot be written: {full}; nothing is left of it; make room there, or choose another"
                ) from error
        raise
    finally:
        os.close(lock)


def write_together(folder: Path, contents: dict[str, bytes]) -> None:
    """Files of a folder, in place of earlier ones: all, or none where the disk lacks room. The first one comes last.
    Raises InputError where another process writes into the folder."""
    is_new, aside = not folder.exists(), folder / ".writing"
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        take_lock(lock, folder)
        shutil.rmtree(aside, ignore_errors=True)  # left by a kill
        aside.mkdir()
        try:
            for name, content in contents.items():
                write_atomically(aside / name, content)
            (folder / next(iter(contents))).unlink(missing_ok=True)  # a kill in between leaves no mixture of two
            for name in reversed(contents):
                (aside / name).replace(folder / name)
            sync_folder(folder)
        finally:
            shutil.rmtree(aside)
            if is_new and not any(folder.iterdir()):
                folder.rmdir()
    finally:
        os.close(lock)


def remove_leftovers(target: Path) -> None:
    """What killed processes have left of target. Raises InputError where one that lives is writing it."""
    for old in target.parent.iterdir():
        if not re.fullmatch(rf"\.writing_{re.escape(target.name)}_[0-9a-f]{{16}}", old.name):
            continue
        try:
            lock = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, with its process; or a link or a file, which no process has left
            continue
        try:
            if take_lock(lock, target):
                shutil.rmtree(old)
        finally:
            os.close(lock)


def take_lock(descriptor: int, target: Path) -> bool:
    """Take its lock; False on a file system without locks. Raises InputError where another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"{target} is being written by another process; wait for it, or choose another target"
        ) from error
    except OSError:
        return False
    return True
