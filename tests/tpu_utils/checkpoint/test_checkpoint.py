"""Checkpoints on their own: atomic, checked, behind the steps, nothing but data."""

import itertools
import math
import os
import shutil
import signal
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch_xla
from mutations import a_full_disk
from run_files import reader_of
from torch import nn

import tpu_utils.checkpoint
from tpu_utils.base.errors import CheckpointError, DamagedCheckpoint, InputError, NonFiniteError, SaveError
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.state import Tracked


@pytest.fixture(scope="module")
def device():
    return torch_xla.device()


STATE = {"model": {"w": torch.arange(5.0)}, "nested": [torch.ones(2), (None, torch.zeros(0, 3), torch.tensor(7))]}
VALUES = {"config": {"seed": 3}, "evaluation": {"loss": float("nan")}}
FILES = ["done", "state.json", "state.safetensors"]


def save(tmp_path, *steps, keep=3):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep)
    for step in steps:
        checkpoints.save(step, STATE, VALUES)
    return checkpoints


def test_checkpoint_round_trip_and_keep(tmp_path):
    checkpoints = save(tmp_path, 10, 20, 30, 40, keep=2)
    assert checkpoints.steps() == [30, 40]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_00000030", "step_00000040"]
    assert sorted(path.name for path in checkpoints.path(40).iterdir()) == FILES
    assert len({path.stat().st_mode for path in checkpoints.path(40).iterdir()}) == 1, "who may read one may read all"
    saved = reader_of(checkpoints).load_for_resume("auto")
    assert saved.step == 40 and torch.equal(saved.part("model")["w"], STATE["model"]["w"])
    assert saved.part("nested").keys() == {"0", "1/1", "1/2"} and saved.part("nested")["1/2"] == 7
    assert saved.value("config", dict) == {"seed": 3} and math.isnan(saved.value("evaluation", dict)["loss"])
    with pytest.raises(CheckpointError, match="has \\['model', 'nested'\\], expected optimizer too"):
        saved.part("optimizer")
    assert reader_of(checkpoints).load_for_resume("never") is None
    nothing = reader_of(Checkpoints(tmp_path / "nothing", 3))
    assert nothing.load_for_resume("auto") is None
    with pytest.raises(CheckpointError, match="holds no complete checkpoint; check the name"):
        nothing.load_for_resume("must")


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step():
    model = nn.Module()
    model.register_buffer("rope", torch.polar(torch.ones(2), torch.ones(2)))
    with pytest.raises(InputError, match=r"^model/rope is torch.complex64, which a checkpoint cannot hold; expected"):
        Tracked({"model": model})
    model.register_buffer("rope", model.rope, persistent=False)
    Tracked({"model": model})


def test_a_folder_without_its_marker_is_not_a_checkpoint(tmp_path):
    checkpoints = save(tmp_path, 10, 20)
    (checkpoints.path(20) / "done").unlink()
    assert reader_of(checkpoints).load_for_resume("must").step == 10
    checkpoints.save(20, STATE)  # what the resumed run does
    assert reader_of(checkpoints).load_for_resume("must").step == 20


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def alter(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def as_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def test_a_checkpoint_in_the_format_of_before_is_refused_by_name_and_not_opened(tmp_path):
    checkpoints = save(tmp_path, 10)
    old = checkpoints.folder / "step_00000020"
    old.mkdir()
    os.mkfifo(old / "state.pt")  # whoever opens it hangs
    (old / "done").write_text('{"step": 20, "bytes": 1, "crc32": 1}')
    with pytest.raises(CheckpointError, match=r"step_00000020 is in format 1, .* with commit [0-9a-f]{7} of these"):
        reader_of(checkpoints).load_for_resume("auto")


def test_a_folder_under_another_name_is_not_that_step(tmp_path, capsys):
    """A backup that was copied to a later step, two folders that were swapped."""
    checkpoints = save(tmp_path, 10, 20)
    shutil.copytree(checkpoints.path(10), checkpoints.path(99))
    assert reader_of(checkpoints).load_for_resume("must").step == 20
    assert "step_00000099 is damaged: its done marker is of step 10" in capsys.readouterr().err
    shutil.rmtree(checkpoints.path(99))
    checkpoints.path(10).rename(tmp_path / "aside")
    checkpoints.path(20).rename(checkpoints.path(10))
    (tmp_path / "aside").rename(checkpoints.path(20))
    with pytest.raises(CheckpointError, match="no checkpoint can be used"):
        reader_of(checkpoints).load_for_resume("auto")


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path, capsys):
    ours, theirs = (Checkpoints(tmp_path / name, 3, run_id=name) for name in ("ours", "theirs"))
    ours.save(10, STATE)
    theirs.save(20, STATE)
    shutil.copytree(theirs.path(20), ours.path(20))
    assert reader_of(ours).load_for_resume("must").step == 10
    assert "it is of run 'theirs', this is run ours" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newest_checkpoint_never_costs_a_good_one(tmp_path, keep):
    """The run falls back from 30 to 20, and saves again on its way."""
    checkpoints = save(tmp_path, 10, 20, 30, keep=9)
    checkpoints.keep = keep
    alter(checkpoints.path(30) / "state.safetensors")
    assert reader_of(checkpoints).load_for_resume("must").step == 20
    checkpoints.save(25, STATE)
    assert checkpoints.steps() == [20, 25, 30][2 - keep :]
    assert reader_of(checkpoints).load_for_resume("must").step == 25
    checkpoints.save(30, STATE)
    assert reader_of(checkpoints).load_for_resume("must").step == 30 and len(checkpoints.steps()) == keep


def test_links_and_odd_names_are_neither_read_nor_removed(tmp_path):
    """A prune that stumbled over one ended the run."""
    checkpoints, precious = save(tmp_path, 10), tmp_path / "precious"
    shutil.copytree(checkpoints.path(10), precious)
    odd = [checkpoints.folder / name for name in ("step_abcdefgh", "step_00000099.bak", "step_1")]
    for path in odd:
        shutil.copytree(precious, path)
    (checkpoints.folder / "step_00000001").symlink_to(precious)
    (checkpoints.folder / "step_00000099").symlink_to(precious)
    (checkpoints.folder / "step_00000020").symlink_to(precious)  # where the next one belongs
    (checkpoints.folder / ".writing_00000020").symlink_to(precious)
    (checkpoints.folder / "step_00000002").write_text("a file")
    checkpoints.keep = 1
    checkpoints.save(20, STATE)
    assert checkpoints.steps() == [20] and reader_of(checkpoints).load_for_resume("must").step == 20
    assert sorted(path.name for path in precious.iterdir()) == FILES and all(path.is_dir() for path in odd)


BIG = {"big": torch.zeros(100_000)}


def test_a_save_behind_the_steps_has_the_state_of_its_step(tmp_path, device):
    checkpoints = save(tmp_path)
    on_host, on_device = torch.zeros(3), torch.zeros(3).to(device)
    copy = checkpoints.copy(10, {"tensors": [on_host, on_device]})
    assert not checkpoints.folder.exists(), "the log line comes between the copy and the first byte of a checkpoint"
    assert copy.wait_seconds > 0
    checkpoints.write(copy)
    on_host.add_(1)
    on_device.add_(1)
    checkpoints.wait()
    found = reader_of(checkpoints).load_for_resume("must").part("tensors")
    assert len(found) == 2 and all(torch.equal(tensor, torch.zeros(3)) for tensor in found.values())
    assert copy.whole == {}, "or the next copy would be a second one in memory"


def test_one_save_is_under_way_at_a_time_and_the_loop_goes_on_meanwhile(tmp_path, monkeypatch):
    checkpoints, disk = save(tmp_path, 10), threading.Event()
    write_tensors = tpu_utils.checkpoint.write_tensors
    monkeypatch.setattr(tpu_utils.checkpoint, "write_tensors", lambda *a: disk.wait() and write_tensors(*a))
    checkpoints.write(checkpoints.copy(20, STATE))
    checkpoints.check()
    assert checkpoints.steps() == [10]
    next_copy = threading.Thread(target=lambda: checkpoints.copy(30, STATE))
    next_copy.start()
    assert next_copy.is_alive()  # and will be: the disk does not move
    disk.set()
    next_copy.join()
    assert checkpoints.steps() == [10, 20]


@pytest.mark.parametrize("where", ["check", "copy", "wait", "end"])
def test_a_save_that_failed_behind_the_steps_is_raised_in_the_loop(tmp_path, where):
    checkpoints = save(tmp_path, 10)
    with pytest.raises(SaveError, match=r"step 20 could not be written .* of steps \[10\] are intact"), checkpoints:
        with a_full_disk():
            checkpoints.write(checkpoints.copy(20, BIG))
            checkpoints._thread.join()
        if where != "end":
            getattr(checkpoints, where)(*[30, {}] if where == "copy" else [])
    checkpoints.wait()  # said once
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_00000010"]
    assert reader_of(checkpoints).load_for_resume("must").step == 10
    checkpoints.save(20, BIG)  # the disk has room again
    assert checkpoints.steps() == [10, 20]


def test_a_bug_in_the_thread_is_not_swallowed(tmp_path, monkeypatch):
    checkpoints = save(tmp_path)
    monkeypatch.setattr(tpu_utils.checkpoint, "write_tensors", lambda *a: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(10, STATE)


def test_a_run_that_ends_with_an_error_still_finishes_its_save(tmp_path, capsys):
    checkpoints = save(tmp_path)
    with pytest.raises(NonFiniteError), checkpoints:
        checkpoints.write(checkpoints.copy(10, STATE))
        raise NonFiniteError("step 11")
    assert reader_of(checkpoints).load_for_resume("must").step == 10
    with pytest.raises(NonFiniteError), checkpoints, a_full_disk():
        checkpoints.write(checkpoints.copy(20, BIG))
        checkpoints._thread.join()
        raise NonFiniteError("step 21")
    assert "error: checkpoint of step 20 could not be written" in capsys.readouterr().err


def test_too_little_space_is_said_before_anything_is_touched(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 10)
    (checkpoints.folder / ".writing_00000005").mkdir()
    huge = torch.zeros(1).expand(2**58)  # 2**60 bytes, of which only the space check knows
    with pytest.raises(SaveError, match=r"step 20 needs [\d,]+ MiB, but [\d,]+ MiB are free at .*checkpoints"):
        checkpoints.save(20, {"big": huge})
    no_inode = SimpleNamespace(f_files=100, f_favail=0, f_bavail=4096, f_frsize=4096)
    with monkeypatch.context() as full, pytest.raises(SaveError, match="16 MiB are free and no inode is left for an"):
        full.setattr(os, "statvfs", lambda folder: no_inode)
        checkpoints.save(20, STATE)
    assert {path.name for path in checkpoints.folder.iterdir()} == {".writing_00000005", "step_00000010"}
    checkpoints.save(20, {})
    assert {path.name for path in checkpoints.folder.iterdir()} == {"step_00000020", "step_00000010"}


def killed_in_thread(moment: int, save) -> bool:
    """Whether a child that saves was killed, at its moment-th access to files in the thread, before it came through."""
    events = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
    child = os.fork()
    if child == 0:
        count = itertools.count(1)

        def hook(event, arguments):
            in_thread = threading.current_thread().name == "checkpoint"
            if in_thread and event in events and next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            save()
            os._exit(0)
        finally:
            os._exit(1)  # never back into pytest
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def save_with_best(checkpoints, step, best_step):
    best = {"step": best_step, "field": "accuracy", "value": best_step / 100}
    checkpoints.write(checkpoints.copy(step, STATE, VALUES | {"best": best}, best=best_step))
    checkpoints.wait()


def test_the_best_stays_until_a_better_one_is_complete(tmp_path):
    """Each save names the best one by then; while it is written the loop may have found another."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    for step, best_step, left in [(10, 10, [10]), (20, 10, [10, 20]), (30, 10, [10, 30]), (40, 40, [40])]:
        save_with_best(checkpoints, step, best_step)
        assert checkpoints.steps() == left and reader_of(checkpoints).load_best().step == best_step
    shutil.rmtree(checkpoints.path(40))
    save_with_best(checkpoints, 50, 40)
    with pytest.raises(CheckpointError, match=r"step_00000040, the best checkpoint, is not there"):
        reader_of(checkpoints).load_best()


def test_a_damaged_best_checkpoint_is_never_replaced_by_another(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    for step in (10, 20):
        save_with_best(checkpoints, step, 10)
    alter(checkpoints.path(10) / "state.safetensors")
    with pytest.raises(DamagedCheckpoint, match="step_00000010 is damaged"):
        reader_of(checkpoints).load_best()


def test_killed_at_any_moment_of_a_save_a_complete_and_a_best_checkpoint_are_left(tmp_path):
    """A child is killed at its first, second, ... access to files in the thread, until one comes through."""
    before, left = Checkpoints(tmp_path / "before", 1), []
    for step in (10, 20):
        save_with_best(before, step, 10)
    for moment in itertools.count(1):
        checkpoints = Checkpoints(shutil.copytree(before.folder, tmp_path / str(moment)), 1)
        killed = killed_in_thread(moment, partial(save_with_best, checkpoints, 30, 30))
        saved = reader_of(checkpoints).load_for_resume("must")
        assert torch.equal(saved.part("model")["w"], STATE["model"]["w"])
        left.append((saved.step, reader_of(checkpoints).load_best().step))
        save_with_best(checkpoints, 30, 30)  # what the resumed run does
        assert [path.name for path in checkpoints.folder.iterdir()] == ["step_00000030"]
        if not killed:
            break
    assert left == sorted(left) and set(left) == {(20, 10), (30, 30)} and len(left) > 8


@pytest.mark.parametrize(
    "other, said",
    [
        (torch.nn.Linear(4, 2), r"weight is float32\[2, 3\], was float32\[2, 4\]"),
        (torch.nn.Linear(3, 2, bias=False), r"bias is float32\[2\], was absent"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path, other, said):
    checkpoints, model = Checkpoints(tmp_path, 1), torch.nn.Linear(3, 2)
    checkpoints.save(1, {"model": other.state_dict()})
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=said):
        reader_of(checkpoints).restore(reader_of(checkpoints).load("must"), {"model": model.state_dict()})
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    "state, error, said",
    [
        ({"scheduler": {"last_epoch": 3}}, TypeError, "scheduler/last_epoch is 3; a checkpoint holds tensors"),
        ({"a": {"b": torch.zeros(1)}, "a/b": torch.zeros(1)}, TypeError, "two tensors of the state have the path a/b"),
        ({"w": torch.zeros(3, dtype=torch.complex64)}, SaveError, r"w is torch\.complex64, which a checkpoint cannot"),
    ],
)
def test_what_a_checkpoint_would_lose_is_refused_before_anything_is_written(tmp_path, state, error, said):
    checkpoints = save(tmp_path, 10)
    with pytest.raises(error, match=said):
        checkpoints.save(20, state)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_00000010"]
