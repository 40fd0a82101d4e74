"""The working folder: what is uploaded of it, how much that is, and the largest entries if it is too much."""

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from tpu_utils.base.errors import InputError

LEFT_OUT = (".git", ".venv*", "venv", "__pycache__", ".pytest_cache", ".ruff_cache", "*.egg-info", "/runs", "/data")
LEFT_OUT += ("/datasets", "/exported", "/calibration", "/checkpoints", "node_modules")
"""Never uploaded, in the syntax of .gitignore; a .gitignore or .rayignore in the folder adds to it."""
SECRETS = (".env", ".env.*", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.p12", "*.pfx", "*.key")
SECRETS += (".netrc", ".pypirc", ".npmrc", ".git-credentials", ".ssh", ".aws", ".gnupg", ".kaggle", "kaggle.json")
SECRETS += ("id_*_sk", "*.ppk", "*.jks", "*.keystore", "*credentials*.json", "*service*account*.json")
"""Names that files and folders with secrets have, in lower case: not uploaded either, and said."""
MOST_MIB = 64
MOST_FILES = 20_000
MIB = 2**20


def uploaded(folder: Path, excludes: list[str]) -> Iterator[tuple[Path, int]]:
    """(file, its size) of all that Ray would upload of a folder: by Ray's own rules, in Ray's own code.

    That is a private interface of Ray 2.60.0 (ray._private.runtime_env.packaging), used nowhere else. Raises InputError
    for a link that leads out of the folder, to a folder that it is in, or to what is left out of it: Ray would follow
    it. So too for a list of patterns with a byte order mark, which Ray takes for a part of the first pattern.
    """
    from ray._private.runtime_env.packaging import _get_excludes, get_excludes_from_ignore_files

    left_out = _get_excludes(folder, excludes)

    def stays_here(target: Path) -> bool:
        """Whether Ray leaves out what a link leads to: it is outside the folder, or excluded."""
        inner = [place for place in (target, *target.parents) if place.is_relative_to(folder) and place != folder]
        return not target.is_relative_to(folder) or any(left_out(place) for place in inner)

    def walk(path: Path, rules: list) -> Iterator[tuple[Path, int]]:
        for patterns in (path / ".gitignore", path / ".rayignore"):
            if patterns.is_file() and patterns.read_bytes()[:3] == b"\xef\xbb\xbf":
                raise InputError(f"{patterns} begins with a byte order mark, expected plain UTF-8; save it without")
        rules = rules + get_excludes_from_ignore_files(path, include_gitignore=True)
        for inner in sorted(path.iterdir()):
            if any(rule(inner) for rule in rules):
                continue
            target = inner.resolve()
            if inner.is_symlink() and (stays_here(target) or inner.is_relative_to(target)):
                raise InputError(
                    f"{inner} is a link to {target}, whose files would be uploaded; expected links to what is "
                    f"uploaded of {folder}; add it to .rayignore, or put a copy in its place"
                )
            if inner.is_dir():
                yield from walk(inner, rules)
            elif inner.is_file():
                yield inner, inner.stat().st_size

    yield from walk(folder, [left_out])


def ignored_by_git(folder: Path) -> list[str]:
    """What git leaves out, as patterns: by .git/info/exclude and the user's own excludes too, which Ray does not read.
    Nothing where there is no git, or no work tree of it."""
    # a folder of somebody else's may name a program there, which git would run
    ask = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), "ls-files", "-z"]
    ask += ["--others", "--ignored", "--exclude-standard", "--directory"]
    try:
        done = subprocess.run(ask, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    return ["/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", name) for name in names]


@dataclasses.dataclass(frozen=True)
class Code:
    """What is uploaded of a working folder."""

    folder: Path
    files: list[Path]
    secrets: list[str]
    """Left out, because secrets have such names."""

    def copy(self, target: Path) -> None:
        """The files alone, without links."""
        for path in self.files:
            copied = target / path.relative_to(self.folder)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)


def digest_of(folder: Path) -> str:
    """A hash of all files below a folder, and their names."""
    total = hashlib.sha256()
    files = (path for path in folder.rglob("*") if path.is_file())
    for name, path in sorted((str(path.relative_to(folder)), path) for path in files):
        total.update(f"{len(os.fsencode(name))} ".encode() + os.fsencode(name))
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def check_folder(folder: Path, most_mib: float = MOST_MIB) -> Code:
    """Raises InputError as uploaded() does, and where too much would be uploaded, with the largest entries named."""
    folder = folder.resolve()
    total = 0
    kept = list[Path]()
    by_entry = dict[str, int]()
    secrets = dict[str, None]()
    for path, size in uploaded(folder, [*LEFT_OUT, *ignored_by_git(folder)]):
        inner = path.relative_to(folder)
        leads_to = path.resolve().relative_to(folder)  # what a link shows may have another name
        places = (inner, *inner.parents, leads_to, *leads_to.parents)
        named = [place for place in places if any(fnmatch(place.name.lower(), name) for name in SECRETS)]
        if named:
            secrets[str(named[-1])] = None
            continue
        total += size
        kept.append(path)
        name = inner.parts[0] + (os.sep if len(inner.parts) > 1 else "")
        by_entry[name] = by_entry.get(name, 0) + size
        if len(kept) > MOST_FILES:
            break
    if total > most_mib * MIB or len(kept) > MOST_FILES:
        largest = sorted(by_entry.items(), key=lambda item: -item[1])[:5]
        shown = ", ".join(f"{name} {size / MIB:,.0f} MiB" for name, size in largest)
        found = f"{total / MIB:,.0f} MiB" if len(kept) <= MOST_FILES else f"more than {MOST_FILES:,} files"
        raise InputError(
            f"working folder {folder} holds {found}, expected code: at most {most_mib:g} MiB; largest: {shown}; add "
            "what is no code to .gitignore or .rayignore, name another --working_dir, or raise --most_mib"
        )
    return Code(folder, kept, list(secrets))
