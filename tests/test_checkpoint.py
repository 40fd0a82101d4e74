"""Checkpoints on their own: atomic, checked, behind the steps, never executed."""

import contextlib
import itertools
import json
import os
import pickle
import resource
import signal
import sys
import threading

import pytest
import torch
import torch_xla

import tpu_utils.checkpoint
from tpu_utils.checkpoint import Checkpoints, DamagedCheckpoint, load_model, read_checkpoint
from tpu_utils.errors import CheckpointError, NonFiniteError, SaveError
from tpu_utils.files import crc32_of


@pytest.fixture(scope="module")
def device():
    return torch_xla.device()


STATE = {"step": 3, "model": {"w": torch.arange(5.0)}, "nested": [torch.ones(2), ("a", None, 1.5)]}


def save(tmp_path, *steps, keep=3):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep)
    for step in steps:
        checkpoints.save(step, {**STATE, "step": step})
    return checkpoints


def test_checkpoint_round_trip_and_keep(tmp_path):
    checkpoints = save(tmp_path, 10, 20, 30, 40, keep=2)
    assert checkpoints.steps() == [30, 40]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_00000030", "step_00000040"]
    state = checkpoints.load_for_resume("auto")
    assert state["step"] == 40 and torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert state["nested"][1] == ("a", None, 1.5)
    assert checkpoints.load_for_resume("never") is None


def test_resume_where_there_is_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 3)
    assert checkpoints.load_for_resume("auto") is None
    with pytest.raises(CheckpointError, match="holds no complete checkpoint to go on from"):
        checkpoints.load_for_resume("must")


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = save(tmp_path, 10)
    checkpoints.save(10, {**STATE, "step": 10, "model": {"w": torch.zeros(1)}})
    assert torch.equal(checkpoints.load_for_resume("must")["model"]["w"], torch.zeros(1))


def test_a_folder_without_its_marker_is_not_a_checkpoint(tmp_path):
    checkpoints = save(tmp_path, 10, 20)
    (checkpoints.path(20) / "done").unlink()
    assert checkpoints.load_for_resume("must")["step"] == 10
    checkpoints.save(20, {**STATE, "step": 20})  # what the resumed run does
    assert checkpoints.load_for_resume("must")["step"] == 20


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def alter(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: truncate(folder / "state.pt"),
        lambda folder: alter(folder / "state.pt"),
        lambda folder: (folder / "state.pt").unlink(),
        lambda folder: (folder / "done").write_text("not json"),
        lambda folder: (folder / "done").write_text("[]"),
        lambda folder: (folder / "done").write_text("{}"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, damage, capsys):
    checkpoints = save(tmp_path, 10, 20)
    damage(checkpoints.path(20))
    assert checkpoints.load_for_resume("must")["step"] == 10
    assert "step_00000020" in capsys.readouterr().err
    damage(checkpoints.path(10))
    with pytest.raises(CheckpointError, match="no checkpoint can be used"):
        checkpoints.load_for_resume("auto")
    with pytest.raises(DamagedCheckpoint):
        read_checkpoint(checkpoints.path(10))


class Payload:
    """Unpickling it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "write", [lambda obj, path: torch.save(obj, path), lambda obj, path: path.write_bytes(pickle.dumps(obj))]
)
def test_a_pickle_with_code_in_it_is_refused_and_not_run(tmp_path, write):
    checkpoints = save(tmp_path, 10, 20)
    path = checkpoints.path(20) / "state.pt"
    write({"step": 20, "model": Payload(tmp_path / "owned")}, path)
    marker = {"step": 20, "bytes": path.stat().st_size, "crc32": crc32_of(path)}
    (checkpoints.path(20) / "done").write_text(json.dumps(marker))
    with pytest.raises(CheckpointError, match="nothing of it was run"):
        checkpoints.load_for_resume("auto")
    assert not (tmp_path / "owned").exists()


@contextlib.contextmanager
def a_full_disk():
    """No file of this process grows beyond 100 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


BIG = {"step": 20, "big": torch.zeros(100_000)}


def test_a_failed_save_leaves_the_earlier_checkpoints(tmp_path):
    checkpoints = save(tmp_path, 10)
    before = (checkpoints.path(10) / "state.pt").read_bytes()
    with (
        a_full_disk(),
        pytest.raises(SaveError, match=r"step 20 could not be written .* the checkpoints of steps \[10\] are intact"),
    ):
        checkpoints.save(20, BIG)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_00000010"]
    assert (checkpoints.path(10) / "state.pt").read_bytes() == before
    assert checkpoints.load_for_resume("must")["step"] == 10


def test_a_save_behind_the_steps_has_the_state_of_its_step(tmp_path, device):
    checkpoints = save(tmp_path)
    on_host, on_device = torch.zeros(3), torch.zeros(3).to(device)
    copy = checkpoints.copy(10, {"step": 10, "tensors": [on_host, on_device]})
    assert not checkpoints.folder.exists(), "the log line comes between the copy and the first byte of a checkpoint"
    assert copy.wait_seconds > 0
    checkpoints.write(copy)
    on_host.add_(1)
    on_device.add_(1)
    checkpoints.wait()
    assert all(torch.equal(tensor, torch.zeros(3)) for tensor in checkpoints.load_for_resume("must")["tensors"])
    assert copy.whole == {}, "or the next copy would be a second one in memory"


def test_one_save_is_under_way_at_a_time_and_the_loop_goes_on_meanwhile(tmp_path, monkeypatch):
    checkpoints, disk = save(tmp_path, 10), threading.Event()
    write_whole = tpu_utils.checkpoint.write_whole
    monkeypatch.setattr(tpu_utils.checkpoint, "write_whole", lambda *a: disk.wait() and write_whole(*a))
    checkpoints.write(checkpoints.copy(20, {**STATE, "step": 20}))
    checkpoints.check()
    assert checkpoints.steps() == [10]
    next_copy = threading.Thread(target=lambda: checkpoints.copy(30, {**STATE, "step": 30}))
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
        if where == "check":
            checkpoints.check()
        elif where == "copy":
            checkpoints.copy(30, {"step": 30})
        elif where == "wait":
            checkpoints.wait()
    checkpoints.wait()  # said once
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_00000010"]
    assert checkpoints.load_for_resume("must")["step"] == 10
    checkpoints.save(20, BIG)  # the disk has room again
    assert checkpoints.steps() == [10, 20]


def test_a_bug_in_the_thread_is_not_swallowed(tmp_path, monkeypatch):
    checkpoints = save(tmp_path)
    monkeypatch.setattr(tpu_utils.checkpoint, "write_whole", lambda *a: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(10, STATE)


def test_a_run_that_ends_with_an_error_still_finishes_its_save(tmp_path, capsys):
    checkpoints = save(tmp_path)
    with pytest.raises(NonFiniteError), checkpoints:
        checkpoints.write(checkpoints.copy(10, {**STATE, "step": 10}))
        raise NonFiniteError("step 11")
    assert checkpoints.load_for_resume("must")["step"] == 10
    with pytest.raises(NonFiniteError), checkpoints, a_full_disk():
        checkpoints.write(checkpoints.copy(20, BIG))
        checkpoints._thread.join()
        raise NonFiniteError("step 21")
    assert "error: checkpoint of step 20 could not be written" in capsys.readouterr().err


def test_too_little_space_is_said_before_anything_is_touched(tmp_path):
    checkpoints = save(tmp_path, 10)
    (checkpoints.folder / ".writing_00000005").mkdir()
    huge = torch.zeros(1).expand(2**58)  # 2**60 bytes, of which only the space check knows
    with pytest.raises(
        SaveError,
        match=r"step 20 needs [\d,]+ MiB, but [\d,]+ MiB are free at .*checkpoints; nothing was written.* \[10\]",
    ):
        checkpoints.save(20, {"step": 20, "big": huge})
    assert {path.name for path in checkpoints.folder.iterdir()} == {".writing_00000005", "step_00000010"}
    checkpoints.save(20, {"step": 20})
    assert {path.name for path in checkpoints.folder.iterdir()} == {"step_00000020", "step_00000010"}


def test_killed_at_any_moment_of_a_save_a_complete_checkpoint_is_left(tmp_path):
    """A child is killed at its first, second, ... access to files in the thread, until one comes through."""
    events = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
    left = []
    for moment in itertools.count(1):
        folder = tmp_path / str(moment)
        checkpoints = save(folder, 10, keep=1)
        child = os.fork()
        if child == 0:
            count = itertools.count(1)

            def hook(event, arguments, moment=moment, count=count):
                in_thread = threading.current_thread().name == "checkpoint"
                if in_thread and event in events and next(count) == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            try:
                checkpoints.save(20, {**STATE, "step": 20})
                os._exit(0)
            finally:
                os._exit(1)  # never back into pytest
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        state = checkpoints.load_for_resume("must")
        assert torch.equal(state["model"]["w"], STATE["model"]["w"])
        left.append(state["step"])
        checkpoints.save(20, {**STATE, "step": 20})  # what the resumed run does
        assert [path.name for path in checkpoints.folder.iterdir()] == ["step_00000020"]
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert left == sorted(left) and left[0] == 10 and left[-1] == 20 and len(left) > 8


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes():
    model = torch.nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"weight is float32\[2, 3\], was float32\[2, 4\]"):
        load_model(model, torch.nn.Linear(4, 2).state_dict())
    with pytest.raises(CheckpointError, match=r"bias is float32\[2\], was absent"):
        load_model(model, torch.nn.Linear(3, 2, bias=False).state_dict())
    assert torch.equal(model.weight, before)
