"""The options of a run that is to go on, from its config.json. Imports no torch."""

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from tpu_utils.base.errors import InputError
from tpu_utils.base.files import parse_object, read_json
from tpu_utils.base.process import Peers
from tpu_utils.options.compiler_flags import SAFE_FLAG
from tpu_utils.options.fields import FREE, marks

OPTIONS = "the options of a run, as a training script wrote them; check --run_dir, or give all options with --preset"
MOST_BYTES = 1 << 20
"""Most bytes of config.json; those of the scripts have one or two thousand."""
RUN_LENGTH_FIELDS = ("num_steps", "num_epochs")
"""Fields that a resumption may change where the steps done keep their learning rates."""
NEVER_RESUMED = {"run_dir", "resume", "compile_for", "profile_steps", "debug", "download"}
"""A resumed run does not take these from config.json: a folder made by others must not start a download."""
NON_OPTION_KEYS = {"run_id", "data", "data_crc32"}
"""Keys of config.json that are no options."""

Config = TypeVar("Config")  # a subclass of Options, of parsing.py


def free_on_resume(kind: type) -> set[str]:
    """Names of the fields marked FREE, in this class or in another script's: one may resume the run of another."""
    return {field.name for field in dataclasses.fields(kind) if FREE in marks(kind, field.name)} | kind.free_elsewhere


def defaults_of(kind: type) -> dict[str, Any]:
    """The default of every field, as a file would give it."""
    return json.loads(json.dumps({field.name: field.default for field in dataclasses.fields(kind)}))


def resolve_stored(kind: type[Config], run_dir: str, resume: str, level: str | None = None) -> Config | None:
    """The configuration of the run that run_dir holds, to be resumed; None where it holds no config.json.

    level replaces the run's optimization level. A field that the file does not have yet takes its default.
    Raises InputError, naming the file, for anything but options that this script can have written.
    """
    name, found = read_config(run_dir)
    if found is None:
        return None
    found, defaults, free = kind.carry_over(found), defaults_of(kind), free_on_resume(kind)
    instead = "check --run_dir, or give all options again with --preset"
    foreign = sorted(found.keys() - defaults.keys() - free - NON_OPTION_KEYS)
    if foreign or "preset" not in found:
        said = f"has {', '.join(f'{other!r:.40}' for other in foreign[:5])}" if foreign else "names no preset"
        raise InputError(f"{name} {said}; expected the options of this script ({kind.__name__}); {instead}")
    of_the_run = defaults.keys() - NEVER_RESUMED
    values = defaults | {field: found[field] for field in of_the_run & found.keys()}
    values = {field: tuple(value) if isinstance(value, list) else value for field, value in values.items()}
    if level is not None:
        values |= {"optimization_level": level, **kind.levels[level]}
    try:
        config = kind(**values | {"run_dir": run_dir, "resume": resume})
    except InputError as error:
        problems = str(error).replace("\n", "; ")
        raise InputError(f"{name} holds options that cannot work: {problems}; {instead}") from error
    new = [f"{field} {defaults[field]!r}" for field in defaults if field in of_the_run - found.keys() - free]
    object.__setattr__(config, "options_from", name + (f" (not in it: {', '.join(new)})" if new else ""))
    return config


def check_given_again(stored: Any, given: argparse.Namespace) -> None:
    """Raises InputError where a folder would choose which file is a secret, or what libtpu reads and writes."""
    bad = ["a peers_secret"] if given.peers_secret is None and getattr(stored, "peers_secret", "") else []
    if given.compiler_options is None:
        words = getattr(stored, "compiler_options", "").split()
        bad += [f"compiler_options {w:.80}" for w in words if not re.fullmatch(SAFE_FLAG, w.removeprefix("--"))]
    if bad:
        again = f"--{bad[0].removeprefix('a ').split()[0]} again, or '' for none"
        raise InputError(f"{stored.run_dir}/config.json is of a run with {bad[0]}; expected {again}")


def read_config(run_dir: str) -> tuple[str, dict[str, Any] | None]:
    """(its name, what it holds) of the config.json of a folder or a gs:// directory; None where there is none.

    Raises InputError for one that is damaged.
    """
    name = f"{run_dir.rstrip('/')}/config.json"
    if run_dir.startswith("gs://"):
        from tpu_utils.remote.storage import read_object  # only here

        content = read_object(run_dir, "config.json", OPTIONS, MOST_BYTES)
        return name, None if content is None else parse_object(content, name, OPTIONS)
    return name, read_json(Path(name), OPTIONS, MOST_BYTES) if os.path.lexists(name) else None


def check_same_options(config: Any, peers: Peers) -> None:
    """Raises InputError, on all processes, where some found the options of the run to resume and others did not."""
    found = peers.gather(bool(config.options_from))
    if len(set(found)) > 1:
        raise InputError(
            f"process {found.index(True)} reads its options from config.json of run_dir {config.run_dir}, but "
            f"process {found.index(False)} finds none there; give a folder that all hosts share, or gs://, or the "
            "same options with --preset on all of them"
        )
