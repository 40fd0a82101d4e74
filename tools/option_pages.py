"""Writes docs/options/SCRIPT.csv: the options of each training script, as --help all has them.

Run:     python -m tools.option_pages
"""

import csv
import importlib
import io
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Literal, get_args, get_origin

from tpu_utils.base.errors import run_script
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.fields import FREE, NoEffect, Range, declaring, field_doc, hints_of, marks, plain
from tpu_utils.options.tool_arguments import make_parser

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "options"
CONFIGURATIONS = {
    "simple_mnist_tpu": "config:MnistConfig",
    "distributed_mnist_tpu": "config:DistributedMnistConfig",
    "ddp_mnist_tpu": "config:DdpMnistConfig",
    "resnet_cifar_tpu": "images.cifar_config:CifarConfig",
    "transformer_tpu": "language.options.transformer_options:TransformerConfig",
}
COLUMNS = ("group", "option", "default", "values", "meaning", "free to change on resume")


def values_of(kind: type, name: str) -> str:
    """What a field may be, in words."""
    if name == "preset":
        return ", ".join(kind.presets)
    hint = plain(hints_of(kind)[name])
    found = [str(mark) for mark in marks(kind, name) if isinstance(mark, Range)]
    if get_origin(hint) is Literal:
        found.append(", ".join(str(value) or "(empty)" for value in get_args(hint)))
    elif not found:
        found.append(getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint))
    return ", ".join(found)


def row_of(kind: type, field: Field) -> tuple[str, ...]:
    """A row of the table, in the order of COLUMNS."""
    group = (declaring(kind)[field.name].__doc__ or "").strip().splitlines()[0]
    meaning = field_doc(kind, field.name)
    without = [mark for mark in marks(kind, field.name) if isinstance(mark, NoEffect)]
    for mark in without:
        choices = get_args(plain(hints_of(kind).get(mark.other, str)))
        told = [str(value) for value in mark.values if value in choices or not choices]
        if told or not mark.values:
            meaning += f" No effect with --{mark.other} {' or '.join(told) or 'given'}."
    first, *_ = kind.presets.values()  # which is taken by default
    default = first.get(field.name, field.default)
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    free = "yes" if FREE in marks(kind, field.name) else "no"
    return group, f"--{field.name}", "" if default is None else str(default), values_of(kind, field.name), meaning, free


def page_of(script: str) -> str:
    """The table of a script as CSV. Defaults are those of its first preset."""
    module, name = CONFIGURATIONS[script].split(":")
    kind = getattr(importlib.import_module(module), name)
    rows = [row_of(kind, field) for field in fields(kind)]
    groups = list(dict.fromkeys(group for group, *_ in rows))  # a field that a script redeclares changes its group
    rows.sort(key=lambda row: groups.index(row[0]))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
    return text.getvalue()


def main() -> int:
    make_parser("tools.option_pages", __doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for script in CONFIGURATIONS:
        write_atomically(FOLDER / f"{script}.csv", page_of(script).encode())
        print(f"docs/options/{script}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, answers=True))
