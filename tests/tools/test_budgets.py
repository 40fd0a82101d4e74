"""benchmarks/budgets.py: each kind of movement is seen and named. Nothing is compiled here; test_aot_tpu.py compiles
the rows of less than a minute."""

import copy
import csv
import dataclasses
import json
import re

import pytest
from processes import ROOT, run
from run_files import configured

from benchmarks import budgets, children
from benchmarks.budgets import Row
from language.mesh import choose_mesh
from language.options.transformer_options import TransformerConfig
from tpu_compiler.answer import expected_time
from tpu_compiler.estimate.report import PLAN_ERROR, Report
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import GIB, parse_topology

ROWS = budgets.read_rows()
VERSIONS = {"torch_xla": "2.9.0", "jax": "0.7.1", "libtpu": "0.0.21"}
FACTS = dict(topology="v5litepod-8", devices=8, program="", compiles=True, fits=True, reason="", limit_bytes=2**34)
FACTS |= dict(compiler_peak_bytes=10**9, estimated_ms=100.0, exposed_ms=2.0, communication_lower_bound_ms=5.0)
FACTS |= dict(operations_without_estimate={"copy": 90, "sort": 10}, trace_seconds=1.0, compile_seconds=9.0)
GATHERED = {"count": 1000, "bytes": 10**6, "sent_bytes": 1e6}
COLLECTIVES = {"all-reduce": {"count": 7, "bytes": 10**6, "sent_bytes": 2e6}, "all-gather": GATHERED}
REPORT = dataclasses.asdict(Report(**FACTS, collectives=COLLECTIVES, versions=VERSIONS).with_prediction())
KEPT = budgets.renewed(Row("mine", "train.py --width 8", "v5litepod-8"), REPORT)


def changed(path, value):
    """REPORT with another value at a path of names."""
    report = copy.deepcopy(REPORT)
    *above, name = path.split("/")
    place = report
    for key in above:
        place = place[key]
    place[name] = value
    return report


def test_the_table_of_slices_is_that_of_the_kept_figures(capsys):
    """8B on v6e-8: 15,259 steps of 1,022 to 1,069 ms on 8 chips."""
    assert budgets.main(["--slices"]) == 0
    printed = capsys.readouterr().out
    assert printed == (ROOT / "docs" / "results" / "which_slice.csv").read_text()
    (row,) = [row for row in csv.DictReader(printed.splitlines()) if row["model"] == "Llama 3.1 8B, 2,048 tokens"][1:]
    assert (row["slice"], row["chips"], row["chip-hours a billion tokens"]) == ("v6e-8", "8", "34.7 to 36.2")
    assert "4 layers" not in printed and "transformer_tpu.py" not in printed


def test_a_report_says_how_far_plans_are_from_compiled_steps(monkeypatch, capsys):
    """A plan has no price for what a vector unit does, nor for the start of an operation."""
    rows = list(csv.DictReader((ROOT / "docs" / "results" / "plans.csv").open()))
    compiled = {(r.name.removesuffix(f", {r.slice}"), r.slice): r.figures["predicted_ms"] for r in ROWS if r.figures}
    kept = [compiled[row["program"], row["slice"]] for row in rows]
    assert [float(row["ms compiled"]) for row in rows] == pytest.approx(kept, rel=1e-3)
    for short, words in ((False, "other steps compile to {:.1f} to {:.1f} times"), (True, " {:.0f} to {:.0f} times")):
        found = [float(row["compiled over plan"]) for row in rows if (float(row["ms compiled"]) < 1) == short]
        assert len(found) > 15 and words.format(min(found), max(found)) in PLAN_ERROR
    monkeypatch.setattr(budgets, "report_of", lambda *arguments, needs, cwd: {"predicted_ms": 50.0})
    budgets.print_plans([KEPT, dataclasses.replace(KEPT, ask="hf:config.json"), Row("new", "train.py", "v6e-1")])
    assert capsys.readouterr().out.splitlines()[1:] == ["mine,v5litepod-8,50,100,2.00"]


def test_every_row_can_still_be_asked():
    """One could not since a check of meshes came after it, and its figures were shown on."""
    for row in (row for row in ROWS if row.ask.startswith("transformer_tpu.py")):
        config = configured(TransformerConfig, [*row.options, f"--compile_for={row.slice}"])
        topology = parse_topology(row.slice)
        choose_mesh(config, topology.num_devices, topology.hardware.limit_gib * GIB)


def test_the_expected_time_of_a_compile_is_one_that_the_kept_rows_took():
    """All but one row, which a busy machine compiled."""
    longer = {}
    for row in (row for row in ROWS if row.ask.startswith("transformer_tpu.py") and not row.planned):
        config = configured(TransformerConfig, [*row.options, f"--compile_for={row.slice}"])
        said = expected_time({"layers": config.shape.num_layers, "scan_layers": config.scan_layers})
        minutes = int(re.search(r"up to (\d+) minutes", said)[1])
        if row.seconds > 60 * minutes:
            longer[row.name] = (row.seconds, minutes)
    assert longer == {"GPT-2 124M, plain attention, v5litepod-1": (696.3, 5)}
    said = "compiling 12 layers (--scan_layers compiles one of them), up to 5 "
    assert expected_time({"layers": 12}).startswith(said)
    assert expected_time({"layers": 32, "scan_layers": True}).startswith("compiling one of 32 layers, up to 7 minutes")
    assert expected_time({"layers": 0}) == expected_time({}) == ""


def test_what_is_kept_of_a_report():
    figures = dict(predicted_ms=100.0, predicted_ms_all_hidden=102.0, predicted_ms_nothing_hidden=105.0)
    figures |= dict(compiler_peak_bytes=10**9, operations_without_estimate=100)
    figures |= {"count of all-reduce": 7, "bytes of all-reduce": 10**6}
    assert KEPT.figures == figures | {"count of all-gather": 1000, "bytes of all-gather": 10**6}
    assert (KEPT.seconds, KEPT.versions) == (10.0, VERSIONS) and KEPT.fast and budgets.compared(KEPT, REPORT) == []


@pytest.mark.parametrize(
    "path, value, figure, was, change",
    [
        ("predicted_ms", 102.1, "predicted_ms", "100", "+2.1%"),
        ("predicted_ms", 97.9, "predicted_ms", "100", "-2.1%"),  # a gain as well
        ("predicted_ms_all_hidden", 110.0, "predicted_ms_all_hidden", "102", "+7.8%"),
        ("predicted_ms_nothing_hidden", 90.0, "predicted_ms_nothing_hidden", "105", "-14.3%"),
        ("compiler_peak_bytes", 1_030_000_000, "compiler_peak_bytes", "1,000,000,000", "+3.0%"),
        ("operations_without_estimate/sort", 13, "operations_without_estimate", "100", "+3.0%"),
        ("collectives/all-reduce/count", 8, "count of all-reduce", "7", "+14.3%"),
        ("collectives/all-reduce/bytes", 970_000, "bytes of all-reduce", "1,000,000", "-3.0%"),
        ("collectives/all-to-all", {"count": 1, "bytes": 4}, "count of all-to-all", "0", "new"),
        ("collectives", {"all-gather": GATHERED}, "count of all-reduce", "7", "gone"),
        ("collectives/all-gather/count", 1001, "count of all-gather", "1,000", "+0.1%"),
        ("predicted_ms", 101.9, "", "", ""),  # within the tolerance
        ("predicted_ms", 98.1, "", "", ""),
        ("compiler_peak_bytes", 985_000_000, "", "", ""),
        ("collectives/all-reduce/bytes", 1_015_000, "", "", ""),
        ("operations_without_estimate/sort", 12, "", "", ""),
        ("compile_seconds", 900.0, "", "", ""),
    ],
)
def test_each_kind_of_movement_is_seen_and_named(path, value, figure, was, change):
    moves = budgets.compared(KEPT, changed(path, value))
    if not figure:
        assert moves == []
        return
    (found,) = [cells for cells in moves if cells[1] == figure]
    assert {name.split(" of ")[-1] for _, name, *_ in moves} == {figure.split(" of ")[-1]}
    assert [found[0], found[2], found[4]] == ["mine", was, change]
    assert all(cell in budgets.table(moves) for cell in found)


def test_what_has_no_figures_or_those_of_another_compiler_is_not_compared():
    with pytest.raises(InputError, match=r"new has no figures yet; expected .*; give --renew"):
        budgets.compared(Row("new", "new.py", "v6e-8"), REPORT)
    other = changed("versions", VERSIONS | {"libtpu": "0.0.42"}) | {"predicted_ms": 1.0}
    with pytest.raises(InputError, match=r"found .*libtpu 0\.0\.42; .*libtpu 0\.0\.21.*expected.*--renew --all"):
        budgets.compared(KEPT, other)


# --------------------------------------------------------------------------------------------------------- the command
@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(reports, *options): exit code, what it says, what the file then holds, what was asked. reports: {script:
    report, or what aot_tpu.py says instead}; the file has a row each for kept.py, slow.py (slow) and new.py."""
    file = tmp_path / "budgets.json"
    slow = dataclasses.replace(KEPT, name="slow", ask="slow.py", slow=True, seconds=400.0)
    budgets.write_rows(file, [dataclasses.replace(KEPT, ask="kept.py"), slow, Row("new", "new.py", "v6e-8")])

    def answered(reports, *options):
        asked = []

        def answer_of(script, *command, cwd):
            assert cwd == tmp_path and command[-1] == "--json"
            asked.append(command[0])
            found = reports.get(command[0], REPORT)
            if isinstance(found, str):
                raise RuntimeError(found)
            return [found]

        monkeypatch.setattr(children, "answer_of", answer_of)
        code = budgets.main(["--file", str(file), *options])
        said = capsys.readouterr()
        return code, said.out + said.err, {row.name: row for row in budgets.read_rows(file)}, asked

    return answered


def test_a_check_without_movement_and_with(command):
    code, said, _, asked = command({}, "--only", "mine")
    assert code == 0 and "1 rows: 0 failed, 0 moved" in said and asked == ["kept.py"]
    code, said, rows, _ = command({"kept.py": changed("predicted_ms", 120.0)}, "--only", "mine")
    assert code == 1 and "| mine | predicted_ms | 100 | 120 | +20.0% |" in said and "--renew" in said
    assert rows["mine"].figures["predicted_ms"] == 100.0, "a check writes nothing"


def test_a_row_without_figures_fails_and_is_not_compiled(command):
    code, said, _, asked = command({})
    assert code == 1 and "failed: new: has no figures yet; give --renew" in said and asked == ["kept.py"]
    assert "left out: slow: takes long; give --all" in said


def test_rows_that_give_no_report_or_do_not_fit_fail_and_keep_their_figures(command):
    full = changed("fits", False) | {"reason": "Exceeded hbm capacity by 6.68G"}
    reports = {"kept.py": "error: no such script: kept.py", "slow.py": full}
    code, said, rows, asked = command(reports, "--all", "--renew")
    assert code == 1 and asked == ["kept.py", "slow.py", "new.py"]
    assert "failed: mine: error: no such script: kept.py" in said and "failed: slow: Exceeded hbm capacity" in said
    assert rows["mine"].figures == KEPT.figures and rows["new"].figures == KEPT.figures


def test_which_rows_are_asked_for(command):
    assert command({}, "--all", "--renew")[3] == ["kept.py", "slow.py", "new.py"]
    assert command({}, "--only", "s*", "--all")[3] == ["slow.py"]
    for pattern in ("nothing", "slow"):
        with pytest.raises(InputError, match=r"no row to ask for; expected --all, or .* such as of mine, slow, new"):
            command({}, "--only", pattern)


def test_renewing_writes_what_moved_and_a_second_time_nothing(command, tmp_path):
    reports = {"kept.py": changed("predicted_ms", 101.0) | {"compile_seconds": 70.0}}
    code, _, rows, _ = command(reports, "--renew")
    assert code == 0 and rows["mine"].figures["predicted_ms"] == 101.0 and not rows["mine"].fast
    assert rows["slow"].figures == KEPT.figures and rows["new"].seconds == 10.0
    before = (tmp_path / "budgets.json").read_bytes()
    busy = {"kept.py": reports["kept.py"] | {"compile_seconds": 500.0}}
    assert command(busy, "--renew")[0] == 0 and (tmp_path / "budgets.json").read_bytes() == before
    quiet = {"kept.py": reports["kept.py"] | {"compile_seconds": 50.0}}
    assert command(quiet, "--renew")[2]["mine"].fast


def test_renewing_with_another_compiler_compares_nothing(command):
    other = changed("versions", VERSIONS | {"libtpu": "0.0.42"}) | {"predicted_ms": 1.0}
    code, said, rows, _ = command({"kept.py": other}, "--renew", "--only", "mine")
    assert code == 0 and rows["mine"].versions["libtpu"] == "0.0.42" and "was" not in said


# ------------------------------------------------------------------------------------------------------------ the file
@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "expected a JSON object"),
        ("{}", "no file of budgets: 'rows'"),
        ('{"rows": [1]}', "no file of budgets"),
        ('{"rows": [{"name": "a", "ask": "a.py"}]}', "row a: expected a name, what to ask and a slice"),
        ('{"rows": [{"name": "a", "ask": "a.py", "slice": "v5e-1", "fast": 1}]}', "expected the fields of Row"),
        ('{"rows": [{"name": "a", "ask": "a.py", "slice": "v5e-1", "figures": {"ms": "1"}}]}', "'1' is no"),
        ('{"rows": [{"name": "a", "ask": "a.py", "slice": "v5e-1", "seconds": true}]}', "True is no"),
        ('{"rows": [{"name": "a", "ask": "\'a.py", "slice": "v5e-1"}]}', "No closing quotation"),
        (json.dumps({"rows": [{"name": "a", "ask": "a.py", "slice": "v5e-1"}] * 2}), "two rows are called a"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, message):
    file = tmp_path / "budgets.json"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        budgets.read_rows(file)
    assert str(file) in str(caught.value)


def test_the_file_here_is_as_written_and_its_rows_can_be_asked(tmp_path):
    budgets.write_rows(tmp_path / "same.json", ROWS)
    assert (tmp_path / "same.json").read_bytes() == budgets.FILE.read_bytes()
    for row in ROWS:
        target = row.command[0]
        assert target.startswith("hf:") or (ROOT / target.split(":")[0]).is_file(), row.name
        assert parse_topology(row.slice) and bool(row.figures) == bool(row.versions), row.name
    assert {row.fast for row in ROWS} == {True, False} and not any(row.fast and row.slow for row in ROWS)


def test_wrong_usage_is_one_message():
    done = run("benchmarks/budgets.py", "--file", "absent.json")
    assert done.returncode == 2 and done.stderr.startswith("error: absent.json: no such file; expected rows with name")
