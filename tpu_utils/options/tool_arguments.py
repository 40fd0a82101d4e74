"""Arguments of the tools: by argparse, with the nearest name where one is misspelt, or by tyro. Imports no torch."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from tpu_utils.base.errors import InputError
from tpu_utils.options.fields import Range, marks, nearest, values_in

Config = TypeVar("Config")


def parse_options(kind: type[Config], description: str) -> Config:
    """A dataclass of options that is no subclass of Options, for command_line(). run_script() reads --debug itself.

    Raises InputError as check_bounds.
    """
    import tyro  # only here, as in parsing.py

    spec = sys.modules["__main__"].__spec__
    name = f"python -m {spec.name}" if spec else None  # None: called by its file
    description = f"{description.rstrip()}\n\n--debug shows the traceback of an error instead of its message alone."
    given = [word for word in sys.argv[1:] if word != "--debug"]
    found = tyro.cli(kind, prog=name, description=description, args=given, use_underscores=True)
    check_bounds(found)
    return found


def check_bounds(options: Any) -> None:
    """Raises InputError for values outside the Range of their field."""
    for name in (field.name for field in dataclasses.fields(options)):
        value = getattr(options, name)
        for mark in marks(type(options), name):
            if isinstance(mark, Range) and not all(number in mark for number in values_in(value)):
                raise InputError(f"{name} is {value}; expected {mark}".replace(" x ", f" {name} "))


def make_parser(tool: str, description: str) -> argparse.ArgumentParser:
    """The description is shown as it stands; no name of an option can be abbreviated."""
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {tool}", None, description, formatter_class=kind, allow_abbrev=False)


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str], hint: str = "") -> argparse.Namespace:
    """What the parser understands. An unknown argument ends the process with exit code 2, the name that is nearest, and
    the hint."""
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [f"--{name}" for name in vars(given)]
        parser.error(f"unknown argument {unknown[0]}{nearest(unknown[0].partition('=')[0], names)}{hint}")
    return given
