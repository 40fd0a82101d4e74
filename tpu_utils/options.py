"""The command line of a training script, typed by its configuration; on a resumption the run's own options.

Imports no torch: a wrong option is answered at once.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar, get_args

import tyro

from config import LEVELS, WITHOUT_EFFECT, TrainConfig, defaults_of, free_on_resume, names_a_place, presets_of, resolve
from tpu_utils.errors import InputError
from tpu_utils.fields import declaring, field_doc, hints_of, nearest, plain
from tpu_utils.run_dir import read_config

Config = TypeVar("Config", bound=TrainConfig)


def parse_command_line(config_class: type[Config], description: str, argv: list[str] | None = None) -> Config:
    """The configuration of this run. Prints help or the mistake and exits (0 or 2) when there is no run to do.

    Accepts --snake_case and --kebab-case. An unknown option is answered with the nearest names.
    Raises InputError for values that cannot work.
    """
    argv = sys.argv[1:] if argv is None else argv
    presets = list(presets_of(config_class))
    names = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    names.add_argument("--preset")
    names.add_argument("--optimization_level", "--optimization-level")
    names.add_argument("--run_dir", "--run-dir")
    names.add_argument("--resume")
    names.add_argument("--peers_secret", "--peers-secret")
    try:
        chosen = names.parse_known_args(argv)[0]
    except argparse.ArgumentError:
        chosen = names.parse_args([])  # an option without its value: tyro says so below
    preset = chosen.preset if chosen.preset in presets else presets[0]
    if chosen.preset not in (None, preset) and not {"-h", "--help"} & set(argv):
        raise InputError(
            f"preset is {chosen.preset!r:.60}; expected one of {', '.join(presets)}{nearest(chosen.preset, presets)}"
        )
    # tyro refuses the other names below
    level = chosen.optimization_level if chosen.optimization_level in LEVELS else None
    default, _ = resolve(config_class, preset, level)
    run_dir = chosen.run_dir or default.run_dir
    if chosen.preset is None and chosen.resume in ("auto", "must") and run_dir and names_a_place(run_dir):
        stored = resolve_stored(config_class, run_dir, chosen.resume, level, chosen.peers_secret)
        default = stored or default
    if default.options_from:
        description += f"\n\nOptions that are not given are those in {default.options_from}."
    flat = (tyro.conf.OmitArgPrefixes,)
    groups = tyro.cli(option_groups(default), args=argv, description=description, use_underscores=True, config=flat)
    values = {name: value for group in vars(groups).values() for name, value in vars(group).items()}
    config, options = config_class(**values), (word[2:].partition("=")[0] for word in argv if word.startswith("--"))
    if problems := without_effect(config, {option.replace("-", "_") for option in options}):
        raise InputError("\n".join(problems))
    object.__setattr__(config, "options_from", default.options_from)
    return config


def without_effect(config: TrainConfig, given: Iterable[str]) -> list[str]:
    """Of the options on a command line those that change nothing beside the others, as sentences."""
    problems, hints = [], hints_of(type(config))
    for name, (other, values) in WITHOUT_EFFECT.items():
        value = getattr(config, name, "")
        off = value is False or value == ""  # --no_download, --hellaswag ""
        if name not in given or off or getattr(config, other, None) not in values:
            continue
        works = [value for value in get_args(plain(hints[other])) if value not in values]
        remedy = f"choose --{other} {' or '.join(works)}, or leave" if works else "leave"
        problems.append(f"--{name} has no effect: {other} is {getattr(config, other)!s:.60}; {remedy} --{name} out")
    return problems


OF_THE_PROCESS = ("run_dir", "resume", "compile_for", "profile_steps", "debug", "download")
"""Fields of one process alone. What fetches data is no business of a folder that others may make."""
BESIDE_OPTIONS = {"run_id", "data", "data_crc32"}
"""What config.json holds of the run beside its options."""


def resolve_stored(
    config_class: type[Config], run_dir: str, resume: str, level: str | None = None, secret: str | None = None
) -> Config | None:
    """The configuration of the run that run_dir holds, to be resumed; None where it holds no config.json.

    level replaces the run's optimization level. secret: the peers_secret that was given, None without one. A field that
    the file does not have yet takes its default. Raises InputError, naming the file, for anything but options that this
    script can have written.
    """
    name, found = read_config(run_dir)
    if found is None:
        return None
    defaults, free = defaults_of(config_class), free_on_resume(config_class)
    instead = "check --run_dir, or give all options again with --preset"
    foreign = sorted(found.keys() - defaults.keys() - free - BESIDE_OPTIONS)
    if foreign or "preset" not in found:
        said = f"has {', '.join(f'{other!r:.40}' for other in foreign[:5])}" if foreign else "names no preset"
        raise InputError(f"{name} {said}; expected the options of this script ({config_class.__name__}); {instead}")
    of_the_run = defaults.keys() - set(OF_THE_PROCESS)
    if "peers_secret" in defaults and found.get("peers_secret") and secret is None:  # no folder says what is secret
        raise InputError(f"{name} is of a run with a peers_secret; expected --peers_secret again, or '' for none")
    values = defaults | {field: found[field] for field in of_the_run & found.keys()}
    values = {field: tuple(value) if isinstance(value, list) else value for field, value in values.items()}
    if level is not None:
        values |= {"optimization_level": level, **LEVELS[level]}
    try:
        config = config_class(**values | {"run_dir": run_dir, "resume": resume})
    except InputError as error:
        problems = str(error).replace("\n", "; ")
        raise InputError(f"{name} holds options that cannot work: {problems}; {instead}") from error
    new = [f"{field} {defaults[field]!r}" for field in defaults if field in of_the_run - found.keys() - free]
    object.__setattr__(config, "options_from", name + (f" (not in it: {', '.join(new)})" if new else ""))
    return config


def option_groups(config: TrainConfig) -> type:
    """A dataclass of dataclasses for tyro, whose help has a group of options for each class that declares fields."""
    kind, declared = type(config), declaring(type(config))
    choices = {**hints_of(kind), "preset": Literal[tuple(kind.presets)]}
    groups = []
    for base in (base for base in reversed(kind.__mro__) if base in declared.values()):
        members = [
            (name, Annotated[plain(choices[name]), tyro.conf.arg(help=field_doc(kind, name))], getattr(config, name))
            for name, where in declared.items()
            if where is base
        ]
        name = re.sub("(Options|Config)$", "", base.__name__)
        title = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
        written = "" if base.__doc__.startswith(f"{base.__name__}(") else base.__doc__  # dataclasses make one up
        group = dataclasses.make_dataclass(title, members, frozen=True, namespace={"__doc__": written})
        groups.append((title, group, dataclasses.field(default=group())))
    return dataclasses.make_dataclass("Options", groups)
