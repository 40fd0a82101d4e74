"""Options of a script: frozen dataclasses with presets, checked, and the command line that they make. Imports no torch.

The last one wins: a field's default, the preset, or config.json of a resumed run, the level, the command line.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from tpu_utils.base.errors import InputError
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.fields import (
    check_class,
    check_values,
    declaring,
    field_doc,
    hints_of,
    nearest,
    no_effect,
    plain,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of every configuration: each field is an option of the command line."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"quick_test": {}}  # the defaults of the fields
    """For each name that --preset takes, the fields it sets. The first one is taken when none is named."""
    levels: ClassVar[dict[str, dict[str, Any]]] = {}
    """The same for --optimization_level. No preset sets a field that a level owns."""
    free_elsewhere: ClassVar[frozenset[str]] = frozenset()
    """Options that config.json may hold beside the fields: of other scripts and older versions, all of them FREE."""
    options_from = ""  # no annotation, so no field: the config.json that gave the other options

    def __post_init__(self):
        if problems := [*check_class(type(self))] or check_values(self) or self.problems():
            raise InputError("\n".join(problems))

    def problems(self) -> list[str]:
        """What else can be known to be wrong before data is read, as sentences: found, expected, what to do."""
        return []

    @classmethod
    def carry_over(cls, found: dict[str, Any]) -> dict[str, Any]:
        """What an older version wrote into config.json, with the options of this one."""
        return found


Config = TypeVar("Config", bound=Options)


def as_json(config: Options) -> dict[str, Any]:
    """The fields as JSON gives them back: tuples become lists, NumPy's numbers Python's."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=lambda number: number.item()))


def presets_of(kind: type[Options]) -> dict[str, dict[str, Any]]:
    """The presets of a class, checked. Raises InputError for a class or a preset that would not do what it says."""
    problems, presets = [*check_class(kind)], kind.presets
    if not presets or not all(isinstance(values, dict) for values in presets.values()):
        problems.append(f"{kind.__name__}.presets is {presets!r:.60}; expected {{name: {{field: value}}}}")
    elif not problems:
        names, owned = declaring(kind), {name for values in kind.levels.values() for name in values}
        for preset, name in ((preset, name) for preset, values in presets.items() for name in values):
            if name not in names or name == "preset":
                problems.append(f"preset {preset}: {name} is no field of {kind.__name__}{nearest(name, names)}")
            elif name in owned:
                problems.append(
                    f"preset {preset} sets {name}, which belongs to optimization_level; set that, or drop it"
                )
    if problems:
        raise InputError("\n".join(problems))
    return presets


def resolve(kind: type[Config], preset: str, level: str | None = None) -> tuple[Config, dict[str, str]]:
    """The preset's configuration and, for each field, where its value came from.

    The class earlier in the MRO wins: a default that a subclass redeclares wins over the presets and the level of its
    parents. In one class the preset wins over the default. level: from the command line, so it replaces the preset's,
    and always sets its fields. Raises KeyError for an unknown preset or level.
    """
    values: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(kind)}
    sources = dict.fromkeys(values, "default")

    def take(chosen: dict[str, Any], source: str) -> None:
        values.update(chosen)
        sources.update(dict.fromkeys(chosen, source))

    chosen, order = presets_of(kind)[preset], {n: kind.__mro__.index(base) for n, base in declaring(kind).items()}
    # the farthest class that has this very preset: a subclass may reuse its parent's
    stated_by = max(i for i, base in enumerate(kind.__mro__) if vars(base).get("presets", {}).get(preset) is chosen)
    take({n: v for n, v in chosen.items() if order[n] >= stated_by}, f"preset {preset}")
    take({"preset": preset}, f"preset {preset}")
    if level is not None:
        take({"optimization_level": level}, "command line")
    if kind.levels:
        of_level, source = kind.levels[values["optimization_level"]], f"level {values['optimization_level']}"
        if level is None:
            of_level = {n: v for n, v in of_level.items() if order[n] >= order["optimization_level"]}
        take(of_level, source)
    return kind(**values), sources


def parse_command_line(kind: type[Config], description: str, argv: list[str] | None = None) -> Config:
    """The configuration of this run. Prints help or the mistake and exits (0 or 2) when there is no run to do.

    Accepts --snake_case and --kebab-case. An unknown option is answered with the nearest names.
    Raises InputError for values that cannot work.
    """
    import tyro  # only here: presets are read where nothing is installed but Python

    if os.environ.get("NO_COLOR"):  # no-color.org; tyro looks at TERM alone
        os.environ["TERM"] = "dumb"
    argv = sys.argv[1:] if argv is None else argv
    presets = list(presets_of(kind))
    names = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("preset", "optimization_level", "run_dir", "resume", "peers_secret", "compiler_options"):
        names.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
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
    level = chosen.optimization_level if chosen.optimization_level in kind.levels else None
    default, _ = resolve(kind, preset, level)
    run_dir = chosen.run_dir or default.run_dir
    if chosen.preset is None and chosen.resume in ("auto", "must") and run_dir and names_a_place(run_dir):
        from tpu_utils.options.stored import check_given_again, resolve_stored  # only for a run that may go on

        stored = resolve_stored(kind, run_dir, chosen.resume, level)
        if stored:
            check_given_again(stored, chosen)
            default = stored
    if default.options_from:
        description += f"\n\nOptions that are not given are those in {default.options_from}."

    def read(words: Sequence[str], hidden: Collection[str] = ()) -> dict[str, Any]:
        flat, kinds = (tyro.conf.OmitArgPrefixes,), option_groups(default, hidden)
        groups = tyro.cli(kinds, args=words, description=description, use_underscores=True, config=flat)
        return {name: value for group in vars(groups).values() for name, value in vars(group).items()}

    if {"-h", "--help"} & set(argv):
        from tpu_utils.options.help import show_help  # only here

        show_help(default, argv, read)
    config, given = kind(**read(argv)), (word[2:].partition("=")[0] for word in argv if word.startswith("--"))
    if problems := without_effect(config, {option.replace("-", "_") for option in given}):
        raise InputError("\n".join(problems))
    object.__setattr__(config, "options_from", default.options_from)
    return config


def without_effect(config: Options, given: Iterable[str]) -> list[str]:
    """The options given on the command line that have no effect because of another one, as sentences. Values of a
    preset, and a subclass's own values, are never refused."""
    problems, hints = [], hints_of(type(config))
    for name in (field.name for field in dataclasses.fields(config) if field.name in given):
        is_off = getattr(config, name) is False or getattr(config, name) == ""  # --no_download, --train_data ""
        if is_off or (mark := no_effect(config, name)) is None:
            continue
        other, value = mark.other, getattr(config, mark.other)
        works = " or ".join(c for c in get_args(plain(hints.get(other))) if isinstance(c, str) and c not in mark)
        why = f"belongs to {other} {works}, but" if works else "has no effect:"
        remedy = f"choose --{other} {works}, or leave" if works else "leave"
        problems.append(f"--{name} {why} {other} is {value!s:.60}; {remedy} --{name} out")
    return problems


def names_a_place(run_dir: str) -> bool:
    """Whether it is a local folder or gs://BUCKET/FOLDER, and no other address."""
    folder_in_bucket = r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/(?!\.\.?(/|$))[\w.=+-]+)+/?"
    return not re.match(r"\w+:/", run_dir) or re.fullmatch(folder_in_bucket, run_dir) is not None


def write_config(run_dir: Path, run: dict[str, Any]) -> None:
    """config.json: from here on the directory holds a run."""
    write_atomically(run_dir / "config.json", json.dumps(run, indent=2).encode())


def option_groups(config: Options, hidden: Collection[str] = ()) -> type:
    """A dataclass of dataclasses for tyro, whose help has a group of options for each class, but for those hidden."""
    import tyro  # only here

    kind = type(config)
    declared = {name: base for name, base in declaring(kind).items() if name not in hidden}
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
        # its own help too, or tyro looks for it through the source of dataclasses, a half of its time
        groups.append((title, Annotated[group, tyro.conf.arg(help=written)], dataclasses.field(default=group())))
    return dataclasses.make_dataclass("Options", groups)
