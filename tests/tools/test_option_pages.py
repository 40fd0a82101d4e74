"""docs/options/: every option of each script, as python -m tools.option_pages writes it."""

import dataclasses
import importlib
import re

import pytest
from processes import ROOT, run

from tools.option_pages import CONFIGURATIONS, FOLDER, page_of


@pytest.mark.parametrize("script", CONFIGURATIONS)
def test_the_page_is_the_one_that_the_command_writes(script):
    text = (FOLDER / f"{script}.md").read_text()
    assert text == page_of(script)
    module, name = CONFIGURATIONS[script].split(":")
    kind = getattr(importlib.import_module(module), name)
    rows = dict(re.findall(r"^\| `--(\w+)` \|.*?\|.*?\| (.*) \|$", text, re.M))
    assert rows.keys() == {field.name for field in dataclasses.fields(kind)}
    assert all(meaning.strip() for meaning in rows.values())


def test_every_script_has_a_page():
    scripts = {path.stem for path in ROOT.glob("*_tpu.py")} - {"aot_tpu", "setup_tpu"}
    assert scripts == CONFIGURATIONS.keys() == {path.stem for path in FOLDER.glob("*.md")}


def test_defaults_are_those_of_the_help():
    """Where the words of both are the same: numbers and choices of the default preset."""
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", run("simple_mnist_tpu.py", "--help", "all").stdout).split())
    for name, default in re.findall(r"^\| `--(\w+)` \| `([\w.]+)` \|", page_of("simple_mnist_tpu"), re.M):
        assert re.search(rf"--{name}\b.*?\(default: {re.escape(default)}\)", said), name
