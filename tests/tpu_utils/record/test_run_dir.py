"""The run directory: its lock, whose run it holds, whether it can be written."""

import errno
import fcntl
import os
import shutil
import socket
import stat

import pytest
from processes import start, waits
from run_files import TINY, in_process

import simple_mnist_tpu
import tpu_utils.record.run_dir
from config import MnistConfig
from tpu_utils.base.errors import InputError
from tpu_utils.base.writing import write_atomically
from tpu_utils.record.run_dir import RunLock, open_run_dir
from tpu_utils.run import Run


def test_a_second_run_in_the_same_directory_is_refused_and_names_the_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(RunLock, "patience_seconds", 0.0)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    lock = RunLock()
    lock.acquire(run_dir)
    for resume in ("never", "auto"):
        assert in_process(*TINY, "--run_dir", run_dir, f"--resume={resume}") == 2
        error = capsys.readouterr().err
        assert f"is in use by pid {os.getpid()} on host {socket.gethostname()}" in error and error.count("\n") == 1
    assert [path.name for path in run_dir.iterdir()] == ["lock"], "the refused run changed nothing"
    (run_dir / "config.json").write_text("{}")
    assert in_process(*TINY, "--run_dir", run_dir) == 2
    assert "is in use by pid" in capsys.readouterr().err, "not: already holds a run, go on with --resume"
    (run_dir / "config.json").unlink()
    lock.release()
    assert in_process(*TINY, "--run_dir", run_dir, "--resume=auto") == 0
    RunLock().acquire(run_dir)  # a run that ended holds nothing


@pytest.mark.parametrize(
    "leave, holder",
    [
        (lambda lock: None, "another process"),
        (lambda lock: lock.write_text("pid 1 on host elsewhere\n"), "pid 1 on host elsewhere"),
        (lambda lock: lock.mkdir(), "another process"),
    ],
)
def test_a_lock_file_that_is_gone_lets_no_second_run_in(tmp_path, monkeypatch, leave, holder):
    monkeypatch.setattr(RunLock, "patience_seconds", 0.0)
    first = RunLock()
    first.acquire(tmp_path)
    (tmp_path / "lock").unlink()
    leave(tmp_path / "lock")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=f"is in use by {holder};"):
        RunLock().acquire(tmp_path)
    assert sorted(tmp_path.iterdir()) == before, "the refused run changed nothing"
    first.release()


@pytest.mark.parametrize("answer", [None, errno.EBADF, errno.EINVAL, errno.ENOLCK])
def test_where_a_folders_lock_is_this_hosts_alone_or_none_its_file_is_locked(tmp_path, capsys, monkeypatch, answer):
    """As over NFS."""
    flock = fcntl.flock

    def flock_files_only(file, operation):
        if not stat.S_ISDIR(os.fstat(file).st_mode):
            flock(file, operation)
        elif answer:
            raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(tpu_utils.record.run_dir.fcntl, "flock", flock_files_only)
    monkeypatch.setattr(RunLock, "patience_seconds", 0.0)
    first = RunLock()
    first.acquire(tmp_path)
    with pytest.raises(InputError, match=f"is in use by pid {os.getpid()} on host"):
        RunLock().acquire(tmp_path)
    first.release()
    RunLock().acquire(tmp_path)
    assert capsys.readouterr().err == ""


HOLDER = "import sys, time; from pathlib import Path; from tpu_utils.record.run_dir import RunLock; lock = RunLock()\n"
HOLDER += "lock.acquire(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"


def test_a_killed_holder_holds_nothing(tmp_path, monkeypatch):
    process = start("-c", HOLDER, tmp_path)
    waits(lambda: process.text("out") == "held\n", alive=process)
    with monkeypatch.context() as hasty:
        hasty.setattr(RunLock, "patience_seconds", 0.0)
        with pytest.raises(InputError, match=rf"run_dir {tmp_path} is in use by pid {process.pid} on host"):
            RunLock().acquire(tmp_path)
    monkeypatch.setattr(RunLock, "patience_seconds", 600.0)  # what a killed process takes on a busy machine
    process.kill()  # and no waiting for its end
    lock = RunLock()
    lock.acquire(tmp_path)
    assert (tmp_path / "lock").read_text() == f"pid {os.getpid()} on host {socket.gethostname()}\n"
    process.wait()


def test_a_file_system_without_locks_is_said(tmp_path, capsys, monkeypatch):
    def no_locks(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(tpu_utils.record.run_dir.fcntl, "flock", no_locks)
    RunLock().acquire(tmp_path)
    assert "a second run there would not be refused" in capsys.readouterr().err


def remove(run_dir):
    shutil.rmtree(run_dir)


def replace(run_dir):
    """What a path leads to after an unmount, too: the folder below."""
    shutil.rmtree(run_dir)
    run_dir.mkdir()


def move(run_dir):
    run_dir.rename(run_dir.with_name("moved"))


@pytest.mark.parametrize(
    "change, options, found",
    [
        (remove, [], "nothing"),
        (replace, ["--log_every=100", "--save_every=10"], "another folder"),
        (move, [], "nothing"),
    ],
)
def test_a_run_whose_folder_is_gone_ends_with_the_reason(tmp_path, capsys, monkeypatch, change, options, found):
    run_dir = tmp_path / "run"

    class Batches(simple_mnist_tpu.TrainBatches):
        def batch(self, index):
            if index == 6:
                change(run_dir)
            return super().batch(index)

    monkeypatch.setattr(simple_mnist_tpu, "TrainBatches", Batches)
    assert in_process(*TINY, "--run_dir", run_dir, *options) == 1
    output, error = capsys.readouterr()
    assert f"error: run_dir {run_dir} is gone: found {found} there" in error and error.count("\n") == 1
    assert "seconds " not in output
    assert not run_dir.exists() or not list(run_dir.iterdir()), "nothing was written to a folder that is not its own"
    if change is move:
        monkeypatch.undo()
        run_dir.with_name("moved").rename(run_dir)
        assert in_process(*TINY, "--run_dir", run_dir, "--resume=auto") == 0, "nothing is broken"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("before", ["evaluate", "finish"])
def test_a_folder_that_goes_away_at_the_end_is_the_reason_too(tmp_path, capsys, monkeypatch, before):
    """Neither TensorBoard's complaint, which has lines left to write, nor that of a save that is under way."""
    owner = simple_mnist_tpu if before == "evaluate" else Run
    function = getattr(owner, before)

    def moved(*arguments):
        if (tmp_path / "run").exists():  # not while evaluate is tried before step 1
            move(tmp_path / "run")
        return function(*arguments)

    monkeypatch.setattr(owner, before, moved)
    assert in_process(*TINY, "--tensorboard", "--run_dir", tmp_path / "run") == 1
    assert f"error: run_dir {tmp_path / 'run'} is gone: found " in capsys.readouterr().err


def opened(run_dir, resume="never", lock=None):
    return open_run_dir(MnistConfig(run_dir=str(run_dir), resume=resume), lock)


def test_run_directories(tmp_path):
    run_dir = tmp_path / "a" / "b"
    assert opened(run_dir).is_dir()
    write_atomically(run_dir / "config.json", b"{}")
    with pytest.raises(InputError, match="already holds a run"):
        opened(run_dir)
    assert opened(run_dir, "auto").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        opened(tmp_path / "file" / "run")
    (tmp_path / "link").symlink_to("elsewhere")
    assert opened(tmp_path / "link").is_dir() and (tmp_path / "elsewhere").is_dir()
    # checkpoints without options are a run too: a new one would prune them as its own steps pass theirs
    (tmp_path / "checkpoints" / "step_00000010").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000010" / "done").touch()
    with pytest.raises(InputError, match="already holds a run"):
        opened(tmp_path)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    """In a folder that came from elsewhere: what it leads to would be overwritten."""
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(InputError, match="cannot be written"):
        opened(tmp_path, lock=RunLock())
    assert (tmp_path / "precious").read_text() == "years of work"


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "tensorboard/plugins/profile/2026"])
def test_a_run_writes_and_deletes_nothing_behind_a_link(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    inner = tmp_path / "run" / name
    inner.parent.mkdir(parents=True)
    inner.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=rf"{inner} is a link, expected a folder; give the directory it leads into"):
        opened(tmp_path / "run", "auto")
