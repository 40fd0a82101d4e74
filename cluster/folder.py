"""The working folder: what Ray would upload of it, how much that is, and the largest entries if it is too much."""

import os
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = (".git", ".venv*", "venv", "__pycache__", ".pytest_cache", ".ruff_cache", "*.egg-info", "/runs", "/data")
LEFT_OUT += ("/datasets", "/exported", "/calibration", "/checkpoints", "node_modules")
"""Never uploaded, in the syntax of .gitignore; a .gitignore or .rayignore in the folder adds to it."""
MOST_MIB = 64
MOST_FILES = 20_000
MIB = 2**20


def uploaded(folder: Path, excludes: list[str]) -> Iterator[tuple[Path, int]]:
    """(file, its size) of all that Ray uploads of a folder: by Ray's own rules, in Ray's own code.

    That is a private interface of Ray 2.60.0 (ray._private.runtime_env.packaging), used nowhere else.
    """
    from ray._private.runtime_env.packaging import _get_excludes, get_excludes_from_ignore_files

    def walk(path: Path, rules: list) -> Iterator[tuple[Path, int]]:
        rules = rules + get_excludes_from_ignore_files(path, include_gitignore=True)
        for inner in sorted(path.iterdir()):
            if any(rule(inner) for rule in rules):
                continue
            if inner.is_dir():
                yield from walk(inner, rules)
            elif inner.is_file():
                yield inner, inner.stat().st_size

    yield from walk(folder, [_get_excludes(folder, excludes)])


def check_folder(folder: Path, most_mib: float = MOST_MIB) -> list[str]:
    """The excludes for Ray. Raises ValueError where too much would be uploaded, with the largest entries named."""
    excludes, total, files = list(LEFT_OUT), 0, 0
    by_entry: dict[str, int] = {}
    for path, size in uploaded(folder, excludes):
        total, files = total + size, files + 1
        inner = path.relative_to(folder)
        name = inner.parts[0] + (os.sep if len(inner.parts) > 1 else "")
        by_entry[name] = by_entry.get(name, 0) + size
        if files > MOST_FILES:
            break
    if total > most_mib * MIB or files > MOST_FILES:
        largest = sorted(by_entry.items(), key=lambda item: -item[1])[:5]
        shown = ", ".join(f"{name} {size / MIB:,.0f} MiB" for name, size in largest)
        found = f"{total / MIB:,.0f} MiB" if files <= MOST_FILES else f"more than {MOST_FILES:,} files"
        raise ValueError(
            f"working folder {folder} holds {found}, expected code: at most {most_mib:g} MiB; largest: {shown}; add "
            "what is no code to .gitignore or .rayignore, name another --working_dir, or raise --most_mib"
        )
    return excludes
