"""What whoever starts a training script again has to know of it. Standard library alone."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path


def options_in(arguments: Sequence[str]) -> dict[str, str]:
    """{"run_dir": "runs/mine", ...} of a script's command line, in either spelling; "" for one without a value."""
    found = {}
    for index, word in enumerate(arguments):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            follows = "".join(arguments[index + 1 : index + 2])
            found[name.replace("-", "_")] = value if equals or follows.startswith("--") else follows
    return found


def to_go_on(arguments: Sequence[str]) -> list[str]:
    """The command line with --resume auto in place of its own --resume."""
    given, dropping = [], False
    for word in arguments:
        if word.startswith("--"):
            dropping = word.partition("=")[0] == "--resume"
        if not dropping:
            given.append(word)
    return [*given, "--resume", "auto"]


def memory_folder(run_dir: str | Path, memory_dir: str | Path) -> Path:
    """Where --save_memory_every keeps this run's checkpoint on this machine. run_dir: as --run_dir names it."""
    named = str(run_dir)
    place = named.rstrip("/") if named.startswith("gs://") else str(Path(named).resolve())
    return Path(memory_dir) / f"checkpoint_{os.geteuid()}_{hashlib.sha256(place.encode()).hexdigest()[:16]}"


def newest_checkpoint(*folders: Path) -> int:
    """The newest step in these folders of checkpoints; 0 where there is no complete one."""
    names = (path.parent.name for folder in folders for path in folder.glob("step_*/done"))
    return max((int(name[5:]) for name in names if re.fullmatch(r"step_[0-9]{8}", name)), default=0)
