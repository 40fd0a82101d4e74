"""Checkpoints in the hosts' memory: a lost process goes on from them, and a lost machine from those of the others."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from processes import run, start, waits
from run_files import assert_identical, in_process, numbers, read_lines, state_in
from test_peers import together

from config import MnistConfig
from tools.keep_running import MEMORY_DIR
from tpu_utils.base.errors import InputError, SaveError
from tpu_utils.base.process import Peers
from tpu_utils.base.restarts import memory_folder, newest_checkpoint
from tpu_utils.base.writing import checksum_of
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.memory import MemoryCheckpoints, kind_of_files, open_memory
from tpu_utils.checkpoint.saved import read_checkpoint
from tpu_utils.checkpoint.state import HostCopy, kind_of
from tpu_utils.options.stored import run_id_in

TINY = ["--warmup_steps=2", "--channels=4", "--hidden_dim=16", "--learning_rate=3e-3", "--max_shift=0", "--log_every=7"]
TINY += ["--device=cpu", "--no_tensorboard", "--save_every=1000", "--num_epochs=2", "--save_memory_every=5"]


def killed(run_dir: Path, memory: Path, *options: object, after: int = 15, number: int = signal.SIGKILL) -> Path:
    """A run that has a checkpoint in memory of step `after` or later when it is killed. Returns its folder there."""
    words = [*TINY, f"--memory_dir={memory}", f"--run_dir={run_dir}", "--resume=auto", *options]
    process = start("simple_mnist_tpu.py", *words)
    folder = memory_folder(str(run_dir), str(memory))
    waits(lambda: newest_checkpoint(folder) >= after, alive=process)
    process.send_signal(number)
    process.wait()
    return folder


def go_on(run_dir: Path, memory: Path, *options: object) -> subprocess.CompletedProcess:
    """In a process like that of the run that was killed: bits are compared."""
    words = [f"--run_dir={run_dir}", f"--memory_dir={memory}", "--resume=auto", TINY[1]]  # which says how to compile
    return run("simple_mnist_tpu.py", *words, *options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run, never killed."""
    folder = tmp_path_factory.mktemp("whole")
    assert go_on(folder / "run", folder, *TINY).returncode == 0
    assert not list(folder.glob("checkpoint_*")), "the memory is given back at the end"
    return folder / "run"


@pytest.fixture(scope="module")
def lost_once(tmp_path_factory):
    """Killed where two whole checkpoints lie in memory: a kill may also meet the removal of the older one."""
    for _ in range(20):
        folder = tmp_path_factory.mktemp("lost")
        (folder / "memory").mkdir()
        steps = list(killed(folder / "run", folder / "memory").iterdir())
        if len(steps) == 2 and all({"done", "state.json"} <= {path.name for path in step.iterdir()} for step in steps):
            return folder
    raise AssertionError("20 kills, and none left two whole checkpoints in memory")


@pytest.fixture
def lost(lost_once, tmp_path):
    """(run directory, folder in memory, memory_dir) of a run that was killed: copies, at their own places."""
    shutil.copytree(lost_once / "run", tmp_path / "run")
    (tmp_path / "memory").mkdir()
    (found,) = (lost_once / "memory").iterdir()
    folder = memory_folder(str(tmp_path / "run"), str(tmp_path / "memory"))
    shutil.copytree(found, folder)
    options = json.loads((tmp_path / "run" / "config.json").read_text())
    named = json.dumps(options | {"memory_dir": str(tmp_path / "memory")})
    (tmp_path / "run" / "config.json").write_text(named)
    return tmp_path / "run", folder, tmp_path / "memory"


def end_state(run_dir: Path) -> dict:
    return state_in(max((run_dir / "checkpoints").glob("step_*")))


# --------------------------------------------------------------------------------------------------------- one machine
def make_strays(folder: Path, step: int) -> None:
    """What is no checkpoint, by names that are, from this step on."""
    folder.mkdir(exist_ok=True)
    for name in ("stray", ".writing_stray", "step_00000003"):
        (folder / name).write_text("a file, no folder")
    targets = {"step_00000004": "step_00000004", ".writing_00000006": "nothing", "a\nline": "/dev/zero"}
    for name, target in targets.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / f"step_{step:08d}")
    (folder / f"step_{step + 1:08d}").mkdir()
    os.mkfifo(folder / f"step_{step + 1:08d}" / "done")


def test_a_killed_run_goes_on_from_memory_to_the_same_bits(lost, whole):
    run_dir, folder, memory = lost
    assert not list(run_dir.glob("checkpoints/step_*")) and folder.stat().st_mode & 0o777 == 0o700
    newest = newest_checkpoint(folder)
    make_strays(folder, newest + 1)
    make_strays(run_dir / "checkpoints", 1)
    output = go_on(run_dir, memory).stdout
    assert f"memory     held the checkpoint of step {newest}:" in output
    assert f"resumed    after step {newest} of" in output
    assert_identical(end_state(run_dir), end_state(whole))
    assert numbers(run_dir) == numbers(whole)
    assert not list(memory.iterdir()), "given back"
    lines = [line for line in read_lines(run_dir) if line["kind"] == "checkpoint"]
    assert [line["step"] for line in lines if "memory" in line] == list(range(5, 44, 5))
    tokens = {line["memory"] for line in lines if "memory" in line}
    assert len(tokens) == 2, "one of each process"


@pytest.mark.parametrize("option", ["--save_memory_every=0", "--memory_dir={}"])
def test_what_the_killed_run_had_in_memory_is_used_whatever_this_one_keeps_there(lost, whole, tmp_path, option):
    """As the message says of a memory that is full: --save_memory_every 0, or another --memory_dir."""
    run_dir, folder, _ = lost
    (tmp_path / "other").mkdir()
    newest = newest_checkpoint(folder)
    option = option.format(tmp_path / "other")
    done = run("simple_mnist_tpu.py", f"--run_dir={run_dir}", "--resume=must", TINY[1], option)
    assert done.returncode == 0 and f"memory     held the checkpoint of step {newest}:" in done.stdout, done.stderr
    assert f"resumed    after step {newest} of" in done.stdout
    assert not folder.exists() and not list((tmp_path / "other").iterdir())
    assert_identical(end_state(run_dir), end_state(whole))


def test_a_folder_of_another_user_is_passed_over_by_a_run_that_keeps_none(lost, capsys):
    run_dir, folder, memory = lost
    folder.chmod(0o755)
    disk = Checkpoints(run_dir / "checkpoints", 3, run_id=run_id_in(run_dir))
    config = MnistConfig(save_memory_every=0, memory_dir=str(memory))
    assert open_memory(config, str(run_dir), disk) == (None, None) and folder.exists()


def test_a_stop_saves_on_disk_and_gives_the_memory_back(tmp_path):
    (tmp_path / "memory").mkdir()
    folder = killed(tmp_path / "run", tmp_path / "memory", number=signal.SIGTERM)
    assert not folder.exists() and newest_checkpoint(tmp_path / "run" / "checkpoints") >= 15


def newest_file(folder: Path) -> Path:
    return folder / f"step_{newest_checkpoint(folder):08d}" / "state.safetensors"


def bring(run_dir: Path, memory: Path) -> tuple[int | None, Checkpoints]:
    disk = Checkpoints(run_dir / "checkpoints", 3, run_id=run_id_in(run_dir))
    return MemoryCheckpoints(str(run_dir), str(memory), disk).bring_to_disk(), disk


def test_what_is_damaged_is_named_and_the_one_before_it_used(lost, capsys):
    run_dir, folder, memory = lost
    content = bytearray(newest_file(folder).read_bytes())
    content[-1] ^= 1
    newest_file(folder).write_bytes(content)
    damaged, older = newest_file(folder), sorted(folder.iterdir())[0]
    step, disk = bring(run_dir, memory)
    assert f"{damaged}, in memory, is damaged and not used" in capsys.readouterr().err
    assert step == int(older.name[5:]) and disk.steps() == [step]


def saved_on_disk(run_dir: Path, step: int, logged: bool = True) -> None:
    (run_dir / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (run_dir / "checkpoints" / f"step_{step:08d}" / "done").touch()
    if logged:
        with (run_dir / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(dict(kind="checkpoint", step=step)) + "\n")


@pytest.mark.parametrize("saved", [4, 6])
def test_a_best_one_that_was_lost_while_it_was_written_is_reached_again(lost, saved):
    """The best one, of step 5, is newer than all on disk. Where it is not, it was removed there by hand."""
    run_dir, folder, memory = lost
    for path in folder.iterdir():
        index = json.loads((path / "state.json").read_text())
        index["values"]["best"] = dict(step=5, field="accuracy", value=0.5)
        (path / "state.json").write_text(json.dumps(index))
        marker = json.loads((path / "done").read_text())
        with (path / "state.json").open("rb") as file:
            marker["files"]["state.json"] = checksum_of(file)
        (path / "done").write_text(json.dumps(marker))
    saved_on_disk(run_dir, saved)
    newest = newest_checkpoint(folder)
    step, _ = bring(run_dir, memory)
    assert step == (newest if saved == 6 else None)


@pytest.mark.parametrize("what", ["truncated", "no marker", "another run", "no line", "another token", "no config"])
def test_what_is_not_whole_or_not_of_this_run_is_not_used(lost, what):
    run_dir, folder, memory = lost
    newest = newest_checkpoint(folder)
    older = sorted(folder.iterdir())[0]
    if what == "truncated":
        os.truncate(newest_file(folder), 100)
    elif what == "no marker":
        (newest_file(folder).parent / "done").unlink()
    elif what == "another run":
        marker = json.loads((newest_file(folder).parent / "done").read_text())
        (newest_file(folder).parent / "done").write_text(json.dumps(marker | {"run": "other." + marker["run"][-16:]}))
    elif what == "no config":
        (run_dir / "config.json").unlink()
    else:
        lines = read_lines(run_dir)
        for line in lines:
            if what == "another token" and line["step"] == newest and "memory" in line:
                line["memory"] = "0" * 16
        kept = [line for line in lines if what == "another token" or line["step"] < newest]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    used = int(older.name[5:]) if what != "no config" else None
    step, disk = bring(run_dir, memory)
    assert step == used and disk.steps() == ([used] if used else []) and not list(folder.iterdir())


@pytest.mark.parametrize("logged", [True, False])
def test_a_newer_one_on_disk_is_taken_while_its_line_is_in_the_log(lost, logged):
    """A run that fell back from a damaged one has dropped its line."""
    run_dir, folder, memory = lost
    saved_on_disk(run_dir, 999, logged)
    newest = newest_checkpoint(folder)
    step, disk = bring(run_dir, memory)
    assert step == (None if logged else newest) and 999 in disk.steps() and not list(folder.iterdir())


@pytest.mark.parametrize("what", ["mode", "link", "file", "owner", "no folder"])
def test_a_folder_that_others_could_have_made_is_refused(tmp_path, capsys, what):
    memory = tmp_path / "memory"
    memory.mkdir()
    folder = memory_folder(str(tmp_path / "run"), str(memory))
    expected = "expected a folder of this user alone (mode 700); remove it, or name another --memory_dir"
    if what == "mode":
        folder.mkdir()
        folder.chmod(0o755)
    elif what == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    elif what == "file":
        folder.touch(0o700)
    elif what == "owner":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        folder.mkdir(mode=0o700)
        os.chown(folder, 65534, -1)
    else:
        memory.rmdir()
        expected = "No such file or directory; expected a folder that is in memory, as /dev/shm is"
    assert in_process(*TINY, f"--run_dir={tmp_path}/run", f"--memory_dir={memory}") == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_no_room_in_memory_is_said_before_anything_is_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr("tpu_utils.checkpoint.has_room", lambda folder, size: "memory" not in str(folder))
    assert in_process(*TINY, f"--run_dir={tmp_path}/run", f"--memory_dir={tmp_path}/memory") == 1
    said = "nothing was written, the checkpoints of steps [] are intact; give --save_memory_every 0, or another"
    assert said in capsys.readouterr().err


def test_who_starts_a_run_again_looks_where_it_saves():
    assert MnistConfig().memory_dir == MEMORY_DIR
    assert memory_folder("runs/a", "/x") == memory_folder(str(Path("runs/a").resolve()) + "/", "/x")
    assert memory_folder("gs://bucket/a", "/x") == memory_folder("gs://bucket/a/", "/x") != memory_folder("a", "/x")


# ---------------------------------------------------------------------------------------------------- several machines
class Machines:
    """So many processes, here threads, each with a memory of its own; one shared run directory."""

    def __init__(self, folder: Path, run, count: int):
        self.folder, self.run, self.count = folder, run, count
        (folder / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
        for index in range(count):
            (folder / f"memory_{index}").mkdir(exist_ok=True)

    def memory_of(self, index: int) -> Path:
        return memory_folder(str(self.folder / "run"), str(self.folder / f"memory_{index}"))

    def lose(self, index: int) -> None:
        shutil.rmtree(self.memory_of(index))

    def make(self, peers: Peers) -> MemoryCheckpoints:
        disk = Checkpoints(self.folder / "run" / "checkpoints", 3, peers, run_id="ours")
        return MemoryCheckpoints(str(self.folder / "run"), str(self.folder / f"memory_{peers.index}"), disk)

    def save(self, *steps: int, sharded: bool = True) -> None:
        def save(peers: Peers) -> None:
            memory = self.make(peers)
            for step in steps:
                memory.run_id = f"ours.{memory.token}"
                memory.keep_newest()
                memory.write(copy_of(step, peers, sharded, memory._marks))
                memory.wait()
                if peers.index == 0:
                    with (self.folder / "run" / "metrics.jsonl").open("a") as log:
                        log.write(json.dumps(dict(kind="checkpoint", step=step, memory=memory.token)) + "\n")

        self.run(save)

    def bring(self) -> list[int | None]:
        return self.run(lambda peers: self.make(peers).bring_to_disk())


def copy_of(step: int, peers: Peers, sharded: bool, first: bool) -> HostCopy:
    """State (8, count * 2) float32, of which each process has two columns; and a small tensor that all have."""
    copy = HostCopy(step, {"step": step})
    state = torch.arange(16.0 * peers.count).reshape(8, -1) + step
    if first:
        copy.whole = {"model/small": torch.full((3,), float(step))}
    if sharded:
        copy.sharded = {"model/large": kind_of(state)}
        copy.shards = {"model/large": {(0, 2 * peers.index): state[:, 2 * peers.index : 2 * peers.index + 2].clone()}}
    elif first:
        copy.whole["model/large"] = state
    return copy


@pytest.mark.parametrize("sharded, lost", [(True, [0]), (True, [1, 3]), (False, []), (False, [2])])
def test_lost_machines_cost_nothing_that_the_others_have(tmp_path, sharded, lost):
    with together(4) as on_all:
        machines = Machines(tmp_path, on_all, 4)
        machines.save(10, 20, 30, sharded=sharded)
        for index in range(4):
            kept = sorted(path.name for path in machines.memory_of(index).iterdir())
            assert kept == ["step_00000020", "step_00000030"]
        for index in lost:
            machines.lose(index)
        assert machines.bring() == [30] * 4
        saved = read_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000030", "ours")
        files = saved.files()
        assert torch.equal(files.read("model/large"), torch.arange(64.0).reshape(8, -1) + 30)
        assert torch.equal(files.read("model/small"), torch.full((3,), 30.0))
        assert not any(list(machines.memory_of(index).iterdir()) for index in range(4) if index not in lost)
        assert machines.bring() == [None] * 4


def test_two_neighbours_lost_leave_what_is_on_disk(tmp_path):
    with together(4) as on_all:
        machines = Machines(tmp_path, on_all, 4)
        machines.save(10)
        machines.lose(1)
        machines.lose(2)
        assert machines.bring() == [None] * 4, "the shards of machine 1 were there alone"
        assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_the_newest_that_is_whole_is_taken(tmp_path):
    """One machine was lost while it wrote: of step 20 its shards are nowhere, of step 10 they are with the next."""
    with together(3) as on_all:
        machines = Machines(tmp_path, on_all, 3)
        machines.save(10, 20)
        for index in (1, 2):
            (machines.memory_of(index) / "step_00000020" / "shards_00001.safetensors").unlink()
        assert machines.bring() == [10] * 3


def test_what_a_machine_brings_back_that_was_away_is_not_taken(tmp_path):
    """The others have gone on without it, from an earlier step, and are not yet at that one again."""
    with together(3) as on_all:
        machines = Machines(tmp_path, on_all, 3)
        machines.save(20, sharded=False)
        shutil.copytree(machines.memory_of(2), tmp_path / "away")
        for index in range(3):
            machines.lose(index)
        (tmp_path / "run" / "metrics.jsonl").unlink()
        machines.save(10, sharded=False)
        shutil.rmtree(machines.memory_of(2))
        shutil.copytree(tmp_path / "away", machines.memory_of(2))
        assert machines.bring() == [10] * 3


def test_where_the_run_directory_is_not_shared_it_is_said(tmp_path):
    with together(3) as on_all:
        machines = Machines(tmp_path, on_all, 3)
        machines.save(10)
        elsewhere = Machines(tmp_path / "elsewhere", on_all, 3)

        def bring(peers: Peers):
            memory = machines.make(peers)
            if peers.index:
                memory._disk.folder = elsewhere.folder / "run" / "checkpoints"
            try:
                return memory.bring_to_disk()
            except SaveError as error:
                return str(error)

        found = on_all(bring)
        for said in found:
            assert "process 1: it sees no" in said and "needs a --run_dir that all of them share" in said
        assert list(machines.memory_of(0).iterdir()), "it is not given back: nothing is lost"


def test_a_memory_dir_that_lacks_on_one_machine_is_said_by_all(tmp_path):
    with together(2) as on_all:
        machines = Machines(tmp_path, on_all, 2)
        (tmp_path / "memory_1").rmdir()

        def make(peers: Peers):
            try:
                return machines.make(peers)
            except InputError as error:
                return str(error)

        assert all("memory_1: No such file or directory" in said for said in on_all(make))


def test_a_memory_dir_that_is_on_a_disk_is_said(tmp_path, capsys, monkeypatch):
    kinds = {line.split()[1]: line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}
    assert kind_of_files(Path("/dev/shm")) == kinds.get("/dev/shm", kind_of_files(Path("/dev"))), "the nearest mount"
    assert kind_of_files(Path("/proc/self")) == "proc"
    monkeypatch.setattr("tpu_utils.checkpoint.memory.kind_of_files", lambda folder: "ext4")
    MemoryCheckpoints(str(tmp_path / "run"), str(tmp_path), Checkpoints(tmp_path / "run", 3))
    assert capsys.readouterr().err == f"warning: memory_dir {tmp_path} is on ext4, which is not in memory\n"


def test_room_is_for_two_and_never_for_three(tmp_path, monkeypatch):
    """Said at the first one, and what is old goes before the next is copied."""
    asked = []
    monkeypatch.setattr("tpu_utils.checkpoint.has_room", lambda folder, size: asked.append(size) or True)
    (tmp_path / "memory").mkdir()
    memory = MemoryCheckpoints(str(tmp_path / "run"), str(tmp_path / "memory"), Checkpoints(tmp_path / "run", 3))
    for step in (10, 20, 30, 40):
        copy = memory.copy(step, {"model": {"weight": torch.zeros(1 << 20)}})
        assert len(memory.steps()) <= 1
        memory.write(copy)
        memory.wait()
    assert memory.steps() == [30, 40]
    assert [int(size / 2**22) for size in asked] == [2, 1, 1, 1]


class Full:
    """A file that takes nothing."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()

    def write(self, content):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["making the folder", "the shards of the machine before"])
def test_a_machine_without_room_ends_the_save_on_all_at_once(tmp_path, monkeypatch, where):
    """Nobody waits for another: that would be half an hour."""
    with together(3) as on_all:
        machines, opened = Machines(tmp_path, on_all, 3), Path.open
        full = machines.memory_of(1) / ".writing_00000010" / "shards_00000.safetensors"

        def opens(path: Path, *arguments, **keywords):
            file = opened(path, *arguments, **keywords)
            return Full(file) if path == full else file

        if where != "making the folder":
            monkeypatch.setattr(Path, "open", opens)

        def save(peers: Peers) -> str:
            memory = machines.make(peers)
            memory.run_id = f"ours.{memory.token}"
            if where == "making the folder" and peers.index == 1:
                memory._make = lambda *_: Full(None).write(b"")
            try:
                memory.write(copy_of(10, peers, True, memory._marks))
                memory.wait()
            except SaveError as error:
                return str(error)
            return "saved"

        for said in on_all(save):
            assert "could not be kept in memory" in said
            assert "process 1: [Errno 28] No space left on device" in said
        assert not any(list(machines.memory_of(index).glob("step_*")) for index in range(3))
