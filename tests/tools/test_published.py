"""benchmarks/published.py: its rows are well-formed, a cheap one compiles, and the tables say what the data says."""

import dataclasses
import json
import math

import pytest
from processes import ROOT
from run_files import configured

from benchmarks import children, published
from language.options.transformer_options import TransformerConfig
from tpu_compiler.estimate.report import ERROR
from tpu_compiler.module.programs import parse_question
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import parse_topology

ROWS = published.read_rows()
KEPT = ROOT / "benchmarks" / "published"
TABLES = ROOT / "docs" / "results"
RESULTS = json.loads((KEPT / "results.json").read_text())


def test_a_row_says_where_its_clock_comes_from():
    assert len({row.key for row in ROWS}) == len(ROWS) >= 20
    assert {row.generation for row in ROWS} >= {"v4", "v5e", "v5p", "v6e", "TPU7x"}
    for row in ROWS:
        assert row.clock_ms > 0 and math.isfinite(row.clock_ms), row.key
        assert all(getattr(row, name).strip() for name in ("source", "measured", "software", "differs")), row.key
        assert not any("|" in str(value) or "{" in str(value) for value in dataclasses.asdict(row).values()), row.key


def test_the_error_that_a_report_prints_is_that_of_the_steps():
    ratios = {}
    for row in (row for row in ROWS if row.kind == "training step" and row.key in RESULTS):
        ratios.setdefault(row.generation, []).append(published.ratio(row, RESULTS[row.key]))
    every = [value for values in ratios.values() for value in values]

    def percent(value):
        return round(100 * (value - 1))

    generations = [name for name in ("v4", "v5e", "v5p", "v6e", "TPU7x") if name in ratios]
    spans = [[percent(end(ratios[name])) for end in (min, max)] for name in generations]
    said = ", ".join("{} {:+d} to {:+d} %".format(name, *span) for name, span in zip(generations, spans, strict=True))
    span = f"{-percent(min(every))} % below to {percent(max(every))} % above"
    expected = f"real time of {len(every)} published steps was {span} the prediction: {said};"
    assert ERROR.startswith(expected) and len(ratios) == len(generations) >= 4


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_a_command_parses_and_fits_its_slice(row, monkeypatch):
    """Its config.json too, which TransformerConfig reads."""
    monkeypatch.chdir(ROOT)
    program, target, *options = [word for word in row.command if word not in ("--compiler", "newest")]
    devices = parse_topology(row.slice).num_devices
    assert program == "aot_tpu.py" and options[-2:] == ["--topology", row.slice]
    if target == "transformer_tpu.py":
        config = configured(TransformerConfig, [*options[:-2], f"--compile_for={row.slice}"])
        data, fsdp, *others = map(int, config.mesh.split("x"))
        assert data * fsdp * math.prod(others) == devices and config.global_batch_size % (data * fsdp) == 0
        assert config.shape.sequence_length == config.sequence_length
    elif ":" in target:
        assert parse_question(target, options[:-2], row.slice).mode == "forward"
    else:
        assert (ROOT / target).exists()
    assert ("newest" in row.command) == parse_topology(row.slice).hardware.newest_only


def test_tables_and_data_are_the_same(tmp_path, monkeypatch):
    """The page's command with --tables docs/results writes them."""
    assert RESULTS.keys() <= {row.key for row in ROWS}
    line = ["published.py", "--results", str(KEPT / "results.json"), "--tables", str(tmp_path)]
    monkeypatch.setattr(published.sys, "argv", line)
    assert published.main() == 0
    made = sorted(tmp_path.iterdir())
    assert len(made) == 2
    for path in made:
        assert path.read_text() == (TABLES / path.name).read_text()


def test_a_row_that_fails_is_said_and_the_rest_go_on(tmp_path, monkeypatch, capsys):
    """And a second call asks for nothing that is there."""
    commands = []

    def answer_of(*command, **_):
        commands.append(command)
        return [dict.fromkeys(published.KEPT, 1.0) | {"reason": "too large", "compiles": "Copy" not in str(command)}]

    monkeypatch.setattr(children, "answer_of", answer_of)
    monkeypatch.setattr(published.sys, "argv", ["published.py", "--out", str(tmp_path), "--only", "*v6e-1"])
    assert published.main() == 1
    said = capsys.readouterr()
    assert "failed: copy of 33.5 MB, trace, v6e-1: too large" in said.err and "product" in said.out
    assert (tmp_path / "published.png").stat().st_size > 1000
    asked = len(commands)
    assert asked == 3 and published.main() == 1 and len(commands) == asked + 1  # the copy alone, which failed


def test_results_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(published.sys, "argv", ["published.py", "--results", str(ROOT / "nowhere.json")])
    with pytest.raises(InputError, match="no such file"):
        published.main()
