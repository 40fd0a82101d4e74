"""Writes docs/options/SCRIPT.md: all options of each training script, with default and meaning, as --help all has them.

Run:     python -m tools.option_pages
"""

import argparse
import importlib
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tpu_utils.base.errors import run_script
from tpu_utils.base.files import write_atomically
from tpu_utils.options.fields import FREE, NoEffect, Range, declaring, field_doc, hints_of, marks, plain

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "options"
CONFIGURATIONS = {
    "simple_mnist_tpu": "config:MnistConfig",
    "distributed_mnist_tpu": "config:DistributedMnistConfig",
    "ddp_mnist_tpu": "config:DdpMnistConfig",
    "resnet_cifar_tpu": "config:CifarConfig",
    "transformer_tpu": "language.options.transformer_options:TransformerConfig",
}
HEAD = """# Options of `{script}.py`

Written by `python -m tools.option_pages`. Defaults are those of the preset `{preset}`; `python config.py` prints all
presets. *Free*: may differ between a run and its resumption.
"""


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


def first_preset(kind: type) -> dict[str, Any]:
    """What the preset that is taken by default changes."""
    return next(iter(kind.presets.values()))


def row_of(kind: type, field: Field) -> str:
    """A row of the table: option, default, what it may be, meaning."""
    meaning = field_doc(kind, field.name)
    without = [mark for mark in marks(kind, field.name) if isinstance(mark, NoEffect)]
    for mark in without:
        choices = get_args(plain(hints_of(kind).get(mark.other, str)))
        told = [str(value) for value in mark.values if value in choices or not choices]
        if told or not mark.values:
            meaning += f" No effect with `--{mark.other}` {' or '.join(told) or 'given'}."
    if FREE in marks(kind, field.name):
        meaning += " *Free.*"
    default = first_preset(kind).get(field.name, field.default)
    default = "" if default in (None, "", ()) else _shown(default)
    cells = (f"`--{field.name}`", default and f"`{default}`", values_of(kind, field.name), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _shown(default: Any) -> str:
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def page_of(script: str) -> str:
    """The page of a script: a table for each class that declares options."""
    module, name = CONFIGURATIONS[script].split(":")
    kind = getattr(importlib.import_module(module), name)
    groups: dict[type, list[str]] = {}
    for field in fields(kind):
        groups.setdefault(declaring(kind)[field.name], []).append(row_of(kind, field))
    lines = [HEAD.format(script=script, preset=next(iter(kind.presets)))]
    for declared, rows in groups.items():
        title = (declared.__doc__ or declared.__name__).strip().splitlines()[0]
        lines += [f"## {title}", "| option | default | values | meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for script in CONFIGURATIONS:
        write_atomically(FOLDER / f"{script}.md", page_of(script).encode())
        print(f"docs/options/{script}.md")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, answers=True))
