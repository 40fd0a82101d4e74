"""A question about a program that another framework wrote: StableHLO or HLO, from a file. No torch, no jax.

The file may be anybody's, so only a child process reads more of it than its size: given_program.py.
"""

import argparse
import os
from pathlib import Path

from tpu_compiler.decide.search import ScriptError, compile_script
from tpu_compiler.estimate.report import Report
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import open_regular

CHILD = Path(__file__).with_name("given_program.py")
EXPECTED = "a program before XLA optimizes it, as StableHLO or HLO text"
MOST_BYTES = 1 << 28
"""Text of the largest program: weights that a program holds as constants belong into its arguments."""


def check_file(path: Path) -> None:
    """Raises InputError for what is no file, empty or too large."""
    with open_regular(path, EXPECTED) as file:
        size = os.fstat(file.fileno()).st_size
    if not size:
        raise InputError(f"{path} is empty; expected {EXPECTED}")
    if size > MOST_BYTES:
        raise InputError(
            f"{path} has {size / 2**20:,.0f} MiB; expected {EXPECTED}, of at most {MOST_BYTES >> 20} MiB; make arrays "
            "that it holds as constants arguments of the function"
        )


def take_flags(words: list[str]) -> tuple[str, list[str]]:
    """(the compiler's options, NAME=VALUE ...; the other words) of a command line with --hlo."""
    if not any(word.partition("=")[0] == "--hlo" for word in words):
        return "", words
    joined = []
    for word in words:
        if joined[-1:] == ["--compiler_options"]:  # its value may begin with dashes
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--compiler_options", action="append", default=[])
    found, others = parser.parse_known_args(joined)
    return " ".join(found.compiler_options), others


def compile_file(path: str, topology: str, program_dir: str | None, flags: str) -> Report:
    """The report of a program for one slice. Raises ScriptError after a child that said why itself."""
    options = [f"--hlo={Path(path).resolve()}", f"--compiler_options={flags}"]
    try:
        return compile_script(str(CHILD), topology, options, program_dir)
    except ScriptError as error:  # the file is what was asked about, and a damaged one can end the child by a signal
        raise ScriptError(str(error).replace(str(CHILD), path), error.exit_code, error.is_said) from error
