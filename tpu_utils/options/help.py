"""Which options --help shows. Imported where help is asked for alone, and imports no torch."""

import contextlib
import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from tpu_utils.base.errors import InputError
from tpu_utils.options.fields import Seldom, marks, no_effect

HELP = ("-h", "--help")
MORE = "{} more options: --help all; those of another choice: --optimizer sgd --help"


def is_shown(config: Any, name: str) -> bool:
    """Whether a field has an effect in this configuration, and is needed often, or set, or beside one that is set."""
    seldom = [mark for mark in marks(type(config), name) if isinstance(mark, Seldom)]
    besides = {name, *(other for mark in seldom for other in mark.beside)}
    is_set = any(getattr(config, field.name) != field.default for field in fields(config) if field.name in besides)
    return no_effect(config, name) is None and (is_set or not seldom)


def chosen(default: Any, words: Sequence[str], read: Callable[..., dict[str, Any]]) -> Any:
    """The configuration that these words make; the default where they are no command line.

    Options that do not fit each other, such as LoRA without weights to adapt, are no reason against their help.
    """
    unchecked = type("Unchecked", (type(default),), {"problems": lambda self: []})
    with contextlib.suppress(SystemExit, InputError), contextlib.redirect_stderr(io.StringIO()):
        return unchecked(**read(words))
    return default


def show_help(default: Any, argv: Sequence[str], read: Callable[..., dict[str, Any]]) -> NoReturn:
    """Print the options of a first run and of what argv chooses, or all options for `--help all`, and exit.

    default: the configuration where argv gives no more than a preset or a run to resume. read(words, hidden): the
    fields that these words give; of `--help` it prints all but the hidden ones, and exits.
    """
    hidden = set()
    if not {(word, "all") for word in HELP} & {*itertools.pairwise(argv)}:
        config = chosen(default, [word for word in argv if word not in HELP], read)
        hidden = {field.name for field in fields(config) if not is_shown(config, field.name)}
    try:
        read(["--help"], hidden)
    finally:
        if hidden:
            print(MORE.format(len(hidden)))
