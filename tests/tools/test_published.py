"""benchmarks/published.py: its rows are well-formed, a cheap one compiles, and the tables say what the data says."""

import dataclasses
import json
import math

import pytest
from processes import ROOT, run

from benchmarks import published
from language.options.transformer_options import TransformerConfig
from tpu_compiler.estimate.report import ERROR
from tpu_compiler.module.programs import parse_question
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import parse_topology
from tpu_utils.options.parsing import parse_command_line

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
    said = ", ".join(
        f"{name} {percent(min(ratios[name])):+d} to {percent(max(ratios[name])):+d} %" for name in generations
    )
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
        config = parse_command_line(TransformerConfig, "", [*options[:-2], "--compile_for", row.slice])
        data, fsdp, *others = map(int, config.mesh.split("x"))
        assert data * fsdp * math.prod(others) == devices and config.global_batch_size % (data * fsdp) == 0
        assert config.shape.sequence_length == config.sequence_length
    elif ":" in target:
        assert parse_question(target, options[:-2], row.slice).mode == "forward"
    else:
        assert (ROOT / target).exists()
    assert ("newest" in row.command) == parse_topology(row.slice).hardware.newest_only


@pytest.mark.parametrize("file, options", [("results.json", []), ("newest.json", ["--compiler", "newest"])])
def test_tables_and_data_are_the_same(file, options, tmp_path, monkeypatch):
    """The page's commands with --tables docs/results write them."""
    assert json.loads((KEPT / file).read_text()).keys() <= {row.key for row in ROWS}
    line = ["published.py", "--results", str(KEPT / file), "--tables", str(tmp_path), *options]
    monkeypatch.setattr(published.sys, "argv", line)
    assert published.main() == 0
    made = sorted(tmp_path.iterdir())
    assert len(made) == 2
    for path in made:
        assert path.read_text() == (TABLES / path.name).read_text()


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


def test_the_newest_compiler_is_asked_alone_and_kept_apart(tmp_path, monkeypatch, capsys):
    """Beside it stands what the installed one said, in the folder that is there already."""
    rows = [row for row in ROWS if row.key in RESULTS and row.name.startswith(("copy of", "product of"))]
    for row in rows:
        record = {"key": row.key, "command": [], "report": RESULTS[row.key]}
        (tmp_path / f"{ROWS.index(row)}.json").write_text(json.dumps(record))
    commands = []

    def answer(line, **_):
        commands.append(line)
        report = next(iter(RESULTS.values())) | {"predicted_ms": 0.1, "versions": {"libtpu": "0.0.52"}}
        return published.subprocess.CompletedProcess(line, 0, json.dumps([report]), "")

    monkeypatch.setattr(published.subprocess, "run", answer)
    for pattern in ("copy of*", "product of*,*1024*", "copy of*"):
        asked = ["published.py", "--out", str(tmp_path), "--only", pattern, "--compiler", "newest"]
        monkeypatch.setattr(published.sys, "argv", asked)
        assert published.main() == 0
    assert [line[-3:-1] for line in commands] == [["--compiler", "newest_alone"]] * 2
    assert not (tmp_path / "results.json").exists() and not (tmp_path / "published.png").exists()
    found = json.loads((tmp_path / "newest" / "results.json").read_text())
    (copy,) = [row for row in rows if row.name.startswith("copy of")]
    assert found[copy.key]["installed"] == {name: RESULTS[copy.key][name] for name in published.PER_COMPILER}
    assert found[copy.key]["newest"]["predicted_ms"] == 0.1
    assert found["product of square matrices, bfloat16, 1024, tpu7x-2"]["installed"] is None
    assert f'"{copy.name}, trace",v6e-1,0.0494,0.49,0.49' in capsys.readouterr().out
    assert ["copy", "1", "0.49", "0.49", "0.49", "0.49"] in published.errors_of_both(ROWS, found)


@pytest.mark.parametrize(
    "file, options, said",
    [
        ("nowhere.json", [], "no such file"),
        ("benchmarks/published/results.json", ["--compiler", "newest"], "expected those of --compiler newest"),
        ("benchmarks/published/newest.json", [], "expected those of the installed compiler"),
    ],
)
def test_other_results_are_refused(file, options, said, monkeypatch):
    monkeypatch.setattr(published.sys, "argv", ["published.py", "--results", str(ROOT / file), *options])
    with pytest.raises(InputError, match=said):
        published.main()


@pytest.mark.exhaustive
def test_the_cheapest_row_from_its_command_to_its_ratio(tmp_path):
    done = run("benchmarks/published.py", "--out", tmp_path, "--only", "copy of*")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "results.json").read_text()).values()
    (row,) = [row for row in ROWS if row.name.startswith("copy of")]
    assert found["fits"] and found["versions"]["libtpu"]
    assert math.isfinite(published.ratio(row, found)) and 0.1 < published.ratio(row, found) < 10
    assert published.as_csv(published.table([row], {row.key: found})) in done.stdout
