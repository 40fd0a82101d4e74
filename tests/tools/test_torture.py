"""benchmarks/torture.py: its comparison sees a difference, and a few kills of a script leave none."""

import json

import pytest
import torch

from benchmarks import torture
from benchmarks.children import unequal_files
from benchmarks.torture import differences
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.record.log import BESIDE

STATE = {"model": {"w": torch.tensor([1.0, float("nan")])}}
LINES = [
    {"kind": "train", "step": 11, "loss": 2.0, "step_seconds": 0.1},
    {"kind": "eval", "step": 11, "accuracy": 0.5},
    {"kind": "checkpoint", "step": 66},
]


def write_run(folder, state=STATE, lines=LINES, accuracy=0.5, run_dir="a", step=66, **summary):
    values = {"config": {"run_dir": run_dir}, "evaluation": {"accuracy": accuracy}}
    folder.mkdir()
    Checkpoints(folder / "checkpoints", keep=1).save(step, state, values)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(
        json.dumps({"seconds": 1.0, "test_loss": 1.0, **dict.fromkeys(BESIDE, 0.0), **summary})
    )
    return folder


def test_only_times_and_extra_checkpoints_may_differ(tmp_path):
    reference = write_run(tmp_path / "reference")
    lines = [{**LINES[0], "step_seconds": 9.9}, {"kind": "checkpoint", "step": 11, "wait_seconds": 0.1}, *LINES[1:]]
    by_process = {"seconds": 7.0, **dict.fromkeys(BESIDE)}  # None: its last process counted no step
    assert differences(write_run(tmp_path / "same", STATE, lines, run_dir="b", **by_process), reference) == []


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(state={"model": {"w": torch.tensor([1.0000001, float("nan")])}}), "model/w of the last"),
        (dict(accuracy=0.25), "evaluation of the last checkpoint differs"),
        (dict(lines=[LINES[0], *LINES]), "metrics.jsonl has twice: [('train', 11)]"),
        (dict(lines=LINES[1:]), "metrics.jsonl lacks"),
        (dict(lines=[LINES[1], LINES[0], LINES[2]]), "another order"),
        (dict(lines=[{**LINES[0], "loss": 2.5}, *LINES[1:]]), "'loss': 2.5"),
        (dict(test_loss=2.0), "test_loss of summary.json is 2.0, expected 1.0"),
        (dict(step=65), "the last checkpoint is step_00000065"),
    ],
)
def test_a_difference_is_seen(tmp_path, change, said):
    reference = write_run(tmp_path / "reference")
    found = differences(write_run(tmp_path / "other", **change), reference)
    assert any(said in problem for problem in found), found


def test_files_that_are_not_the_same_in_two_folders_are_named(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, content in ((one, "a"), (other, "b")):
        (folder / "kept" / "inner").mkdir(parents=True)
        (folder / "kept" / "same").write_text("c")
        (folder / "kept" / "changed").write_text(content)
        (folder / "kept" / f"only_in_{folder.name}").touch()
    assert unequal_files(one, other, "kept/*") == ["kept/changed", "kept/only_in_one", "kept/only_in_other"]


@pytest.mark.slow
def test_four_kills_leave_no_trace(capsys):
    """With parameters and data sharded; test_make_it_yours.py has one device."""
    assert torture.main(["--kills=4", "--variants=fsdp_4,transformer_2x2x2"]) == 0, capsys.readouterr().out
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(tuple(torture.VARIANTS))]
    assert sum(int(row[-2]) for row in rows) == 4 and all(row[-1] == "yes" for row in rows)
