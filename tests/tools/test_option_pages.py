"""docs/options/: every option of each script, as python -m tools.option_pages writes it."""

import csv
import dataclasses
import importlib
import io
import itertools
import re

import pytest
from processes import ROOT, run

from tools.option_pages import COLUMNS, CONFIGURATIONS, FOLDER, page_of


@pytest.mark.parametrize("script", CONFIGURATIONS)
def test_the_page_is_the_one_that_the_command_writes(script):
    text = (FOLDER / f"{script}.csv").read_text()
    assert text == page_of(script)
    module, name = CONFIGURATIONS[script].split(":")
    kind = getattr(importlib.import_module(module), name)
    header, *rows = csv.reader(io.StringIO(text))
    assert tuple(header) == COLUMNS
    assert sorted(row[1] for row in rows) == sorted(f"--{field.name}" for field in dataclasses.fields(kind))
    assert all(group and values and meaning and free in ("yes", "no") for group, _, _, values, meaning, free in rows)
    groups = [row[0] for row in rows]
    assert len(list(itertools.groupby(groups))) == len(set(groups)), "rows of a group stand together"


def test_every_script_has_a_page():
    scripts = {path.stem for path in ROOT.glob("*_tpu.py")} - {"aot_tpu", "setup_tpu"}
    assert scripts == CONFIGURATIONS.keys() == {path.stem for path in FOLDER.iterdir()}
    linked = (ROOT / "docs" / "environment.md").read_text()
    assert all(f"](options/{script}.csv)" in linked for script in scripts)


def test_defaults_are_those_of_the_help():
    """Where the words of both are the same: numbers and choices of the default preset."""
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", run("simple_mnist_tpu.py", "--help", "all").stdout).split())
    table = csv.DictReader(io.StringIO(page_of("simple_mnist_tpu")))
    rows = [row for row in table if re.fullmatch(r"[\w.]+", row["default"])]
    assert len(rows) > 20
    for row in rows:
        assert re.search(rf"{row['option']}\b.*?\(default: {re.escape(row['default'])}\)", said), row["option"]
