"""benchmarks/published.py: its rows are well-formed, a cheap one compiles, and the page says what the data says."""

import dataclasses
import json
import math

import pytest
from processes import ROOT, run

from benchmarks import published
from language.transformer_options import TransformerConfig
from tpu_compiler.modules import parse_question
from tpu_utils.hardware import parse_topology
from tpu_utils.options import parse_command_line

ROWS = published.read_rows()
PAGE = (ROOT / "docs" / "published.md").read_text()
RESULTS = json.loads((ROOT / "benchmarks" / "published" / "results.json").read_text())


def test_a_row_says_where_its_clock_comes_from():
    assert len({row.key for row in ROWS}) == len(ROWS) >= 20
    assert {row.generation for row in ROWS} >= {"v4", "v5e", "v5p", "v6e", "TPU7x"}
    for row in ROWS:
        assert row.clock_ms > 0 and math.isfinite(row.clock_ms), row.key
        assert all(getattr(row, name).strip() for name in ("source", "measured", "software", "differs")), row.key
        assert not any("|" in str(value) or "{" in str(value) for value in dataclasses.asdict(row).values()), row.key


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_a_command_parses_and_fits_its_slice(row, monkeypatch):
    """Its config.json too, which TransformerConfig reads."""
    monkeypatch.chdir(ROOT)
    program, target, *options = row.command
    devices = parse_topology(row.slice).num_devices
    assert program == "aot_tpu.py" and options[-2:] == ["--topology", row.slice]
    if target == "transformer_tpu.py":
        config = parse_command_line(TransformerConfig, "", [*options[:-2], "--compile_for", row.slice])
        data, fsdp, tensor = map(int, config.mesh.split("x"))
        assert data * fsdp * tensor == devices and config.global_batch_size % (data * fsdp) == 0
        assert config.shape.sequence_length == config.sequence_length
    elif ":" in target:
        assert parse_question(target, options[:-2], row.slice).mode == "forward"
    else:
        assert (ROOT / target).exists() and options[:2] == ["--compiler", "newest"]


def test_page_and_data_are_the_same():
    """`python benchmarks/published.py --results benchmarks/published/results.json` prints what stands in the page."""
    assert RESULTS.keys() <= {row.key for row in ROWS}
    for text in (published.table(ROWS, RESULTS), published.errors(ROWS, RESULTS), published.sources(ROWS, RESULTS)):
        assert text in PAGE


def test_a_row_that_fails_is_said_and_the_rest_go_on(tmp_path, monkeypatch, capsys):
    """And a second call asks for nothing that is there."""
    commands = []

    def answer(line, **_):
        commands.append(line)
        report = dict.fromkeys(published.KEPT, 1.0) | {"reason": "too large"}
        output = json.dumps([report | {"compiles": "Copy" not in str(line)}])
        return published.subprocess.CompletedProcess(line, 0, output, "")

    monkeypatch.setattr(published.subprocess, "run", answer)
    monkeypatch.setattr(published.sys, "argv", ["published.py", "--out", str(tmp_path), "--only", "*v6e-1"])
    assert published.main() == 1
    said = capsys.readouterr()
    assert "failed: copy of 33.5 MB, trace, v6e-1: too large" in said.err and "product" in said.out
    assert (tmp_path / "published.png").stat().st_size > 1000
    asked = len(commands)
    assert asked == 3 and published.main() == 1 and len(commands) == asked + 1  # the copy alone, which failed


@pytest.mark.slow
def test_the_cheapest_row_from_its_command_to_its_ratio(tmp_path):
    done = run("benchmarks/published.py", "--out", tmp_path, "--only", "copy of*")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "results.json").read_text()).values()
    (row,) = [row for row in ROWS if row.name.startswith("copy of")]
    assert found["fits"] and found["versions"]["libtpu"]
    assert math.isfinite(published.ratio(row, found)) and 0.1 < published.ratio(row, found) < 10
    assert published.table([row], found={row.key: found}) in done.stdout
