"""Arguments of the tools that argparse reads, with the nearest name where one is misspelt. Imports no torch."""

import argparse
from collections.abc import Sequence

from tpu_utils.options.fields import nearest


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str], hint: str = "") -> argparse.Namespace:
    """What the parser understands. An unknown argument ends the process with exit code 2, the name that is nearest, and
    the hint."""
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [f"--{name}" for name in vars(given)]
        parser.error(f"unknown argument {unknown[0]}{nearest(unknown[0].partition('=')[0], names)}{hint}")
    return given
