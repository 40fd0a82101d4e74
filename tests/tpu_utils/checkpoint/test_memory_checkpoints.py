"""Checkpoints in the hosts' memory: a lost process goes on from them, and a lost machine from those of the others."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from processes import run, start, waits
from run_files import assert_identical, in_process, mark, numbers, part_of_state, read_lines, state_in
from test_checkpoint import alter, truncate
from test_peers import outcome, together

from config import MnistConfig
from tools.keep_running import MEMORY_DIR
from tpu_utils.base.errors import InputError, SaveError
from tpu_utils.base.files import field_in
from tpu_utils.base.process import Peers
from tpu_utils.base.restarts import memory_folder, newest_checkpoint
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.memory import MemoryCheckpoints, kind_of_files, open_memory
from tpu_utils.checkpoint.state import HostCopy

TINY = ["--warmup_steps=2", "--channels=4", "--hidden_dim=16", "--learning_rate=3e-3", "--max_shift=0", "--log_every=7"]
TINY += ["--device=cpu", "--no_tensorboard", "--save_every=1000", "--num_epochs=2", "--save_memory_every=5"]


# python -c HELD GATE OPTIONS...: simple_mnist_tpu.py, whose step 21 waits until there is a file GATE
HELD = """
import pathlib, sys, time
import simple_mnist_tpu
from config import MnistConfig
from tpu_utils.options.parsing import parse_command_line
gate = pathlib.Path(sys.argv.pop(1))
class Held(simple_mnist_tpu.TrainBatches):
    def batch(self, index):
        while index == 20 and not gate.exists():
            time.sleep(0.01)
        return super().batch(index)
simple_mnist_tpu.TrainBatches = Held
sys.exit(simple_mnist_tpu.train(parse_command_line(MnistConfig, "", sys.argv[1:])))
"""


def killed(run_dir: Path, memory: Path, number: int) -> Path:
    """A run that gets this signal when it has the checkpoints of steps 15 and 20 in memory. Its folder there."""
    gate = run_dir.with_name("gate")
    words = [*TINY, f"--memory_dir={memory}", f"--run_dir={run_dir}", "--resume=auto"]
    process = start("-c", HELD, gate, *words)
    folder = memory_folder(str(run_dir), str(memory))
    waits(lambda: newest_checkpoint(folder) == 20, alive=process)
    process.send_signal(number)
    gate.touch()
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
    folder = tmp_path_factory.mktemp("lost")
    (folder / "memory").mkdir()
    killed(folder / "run", folder / "memory", signal.SIGKILL)
    return folder


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


def test_a_killed_run_goes_on_from_memory_to_the_same_bits(lost, whole, tmp_path):
    """With another --memory_dir, as the message says of a memory that is full."""
    run_dir, folder, memory = lost
    (tmp_path / "other").mkdir()
    assert not list(run_dir.glob("checkpoints/step_*")) and folder.stat().st_mode & 0o777 == 0o700
    make_strays(folder, 21)
    make_strays(run_dir / "checkpoints", 1)
    output = go_on(run_dir, tmp_path / "other").stdout
    assert "memory     held the checkpoint of step 20:" in output and "resumed    after step 20 of" in output
    assert_identical(end_state(run_dir), end_state(whole))
    assert numbers(run_dir) == numbers(whole)
    assert not list(memory.iterdir()) and not list((tmp_path / "other").iterdir()), "given back"
    lines = [line for line in read_lines(run_dir) if line["kind"] == "checkpoint" and "memory" in line]
    assert [line["step"] for line in lines] == list(range(5, 44, 5))
    assert len({line["memory"] for line in lines}) == 2, "a token of each process"


@pytest.mark.parametrize("every, mode, is_used", [(5, 0o700, True), (0, 0o700, True), (0, 0o755, False)])
def test_what_the_killed_run_had_in_memory_is_used_also_by_one_that_keeps_none(lost, every, mode, is_used):
    """A folder of another user is passed over by it."""
    run_dir, folder, memory = lost
    folder.chmod(mode)
    disk = Checkpoints(run_dir / "checkpoints", 3, run_id=field_in(run_dir / "config.json", "run_id", str) or "")
    kept, step = open_memory(MnistConfig(save_memory_every=every, memory_dir=str(memory)), str(run_dir), disk)
    assert step == (20 if is_used else None) and disk.steps() == [20] * is_used
    assert (kept is not None, folder.exists()) == (every > 0, every > 0 or not is_used)


def test_a_stop_saves_on_disk_and_gives_the_memory_back(tmp_path):
    (tmp_path / "memory").mkdir()
    folder = killed(tmp_path / "run", tmp_path / "memory", signal.SIGTERM)
    assert not folder.exists() and newest_checkpoint(tmp_path / "run" / "checkpoints") >= 20


def bring(run_dir: Path, memory: Path) -> tuple[int | None, list[int]]:
    """(step of the checkpoint that was brought, the steps on disk then)."""
    disk = Checkpoints(run_dir / "checkpoints", 3, run_id=field_in(run_dir / "config.json", "run_id", str) or "")
    return MemoryCheckpoints(str(run_dir), str(memory), disk).bring_to_disk(), disk.steps()


def saved_on_disk(run_dir: Path, step: int, logged: bool = True) -> None:
    (run_dir / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (run_dir / "checkpoints" / f"step_{step:08d}" / "done").touch()
    if logged:
        with (run_dir / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(dict(kind="checkpoint", step=step)) + "\n")


@pytest.mark.parametrize("saved, expected", [(4, None), (6, 20)])
def test_a_best_one_that_was_lost_while_it_was_written_is_reached_again(lost, saved, expected):
    """The best one, of step 5, is newer than all on disk. Where it is not, it was removed there by hand."""
    run_dir, folder, memory = lost
    for path in folder.iterdir():
        index = json.loads((path / "state.json").read_text())
        index["values"]["best"] = dict(step=5, field="accuracy", value=0.5)
        (path / "state.json").write_text(json.dumps(index))
        mark(path)
    saved_on_disk(run_dir, saved)
    assert bring(run_dir, memory)[0] == expected


@pytest.mark.parametrize(
    "what", ["altered", "truncated", "no marker", "another run", "no line", "another token", "no config"]
)
def test_what_is_not_whole_or_not_of_this_run_is_not_used(lost, capsys, what):
    run_dir, folder, memory = lost
    newest, log = folder / "step_00000020", run_dir / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    (line,) = [line for line in lines if "memory" in (said := json.loads(line)) and said["step"] == 20]
    if what == "altered":
        alter(newest / "state.safetensors")
    elif what == "truncated":
        truncate(newest / "state.safetensors")
    elif what == "no marker":
        (newest / "done").unlink()
    elif what == "another run":
        marker = json.loads((newest / "done").read_text())
        (newest / "done").write_text(json.dumps(marker | {"run": "other." + marker["run"][-16:]}))
    elif what == "no config":
        (run_dir / "config.json").unlink()
    else:
        other = json.dumps(json.loads(line) | {"memory": "0" * 16}) + "\n"
        log.write_text(log.read_text().replace(line, other if what == "another token" else ""))
    used = 15 if what != "no config" else None
    assert bring(run_dir, memory) == (used, [used] if used else []) and not list(folder.iterdir())
    is_named = f"{newest}/state.safetensors, in memory, is damaged and not used" in capsys.readouterr().err
    assert is_named == (what in ("altered", "truncated"))


@pytest.mark.parametrize("logged", [True, False])
def test_a_newer_one_on_disk_is_taken_while_its_line_is_in_the_log(lost, logged):
    """A run that fell back from a damaged one has dropped its line."""
    run_dir, folder, memory = lost
    saved_on_disk(run_dir, 999, logged)
    assert bring(run_dir, memory) == ((None, [999]) if logged else (20, [20, 999])) and not list(folder.iterdir())


@pytest.mark.parametrize("what", ["mode", "link", "file", "owner", "no folder"])
def test_a_folder_that_others_could_have_made_is_refused(tmp_path, what):
    folder = memory_folder(str(tmp_path / "run"), str(tmp_path))
    expected, memory = "expected a folder of this user alone .* remove it, or name another --memory_dir", tmp_path
    if what == "mode":
        folder.mkdir(mode=0o755)
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
        expected, memory = "No such file or directory; expected a folder that is in memory", tmp_path / "absent"
    with pytest.raises(InputError, match=expected):
        MemoryCheckpoints(str(tmp_path / "run"), str(memory), Checkpoints(tmp_path / "run", 3))


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
                memory.write(copy_of(step, peers, memory._marks, sharded))
                memory.wait()
                if peers.index == 0:
                    with (self.folder / "run" / "metrics.jsonl").open("a") as log:
                        log.write(json.dumps(dict(kind="checkpoint", step=step, memory=memory.token)) + "\n")

        self.run(save)

    def bring(self) -> list[int | None]:
        return self.run(lambda peers: self.make(peers).bring_to_disk())


@pytest.fixture
def make_machines(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda count: Machines(tmp_path, stack.enter_context(together(count)), count)


def copy_of(step: int, peers: Peers, first: bool, sharded: bool = True) -> HostCopy:
    """State of two rows a process, which are sharded or whole; and a small tensor that all have."""
    rows = torch.arange(4.0 * peers.count).reshape(-1, 2)
    copy = part_of_state(step, peers.index, peers.count, rows, first)
    if not sharded:
        copy.sharded, copy.shards = {}, {}
        copy.whole |= {"model/rows": rows + step} if first else {}
    return copy


@pytest.mark.parametrize("sharded, lost", [(True, [0]), (True, [1, 3]), (False, []), (False, [2])])
def test_lost_machines_cost_nothing_that_the_others_have(tmp_path, make_machines, sharded, lost):
    machines = make_machines(4)
    machines.save(10, 20, 30, sharded=sharded)
    for index in range(4):
        kept = sorted(path.name for path in machines.memory_of(index).iterdir())
        assert kept == ["step_00000020", "step_00000030"]
    for index in lost:
        machines.lose(index)
    assert machines.bring() == [30] * 4
    state = state_in(tmp_path / "run" / "checkpoints" / "step_00000030")
    assert torch.equal(state["model/rows"], torch.arange(16.0).reshape(8, 2) + 30)
    assert torch.equal(state["model/whole"], torch.full((5,), 31.0))
    assert not any(list(machines.memory_of(index).iterdir()) for index in range(4) if index not in lost)
    assert machines.bring() == [None] * 4


def test_the_newest_that_is_whole_is_taken(make_machines):
    """One machine was lost while it wrote: of step 20 its shards are nowhere, of step 10 they are with the next."""
    machines = make_machines(3)
    machines.save(10, 20)
    for index in (1, 2):
        (machines.memory_of(index) / "step_00000020" / "shards_00001.safetensors").unlink()
    assert machines.bring() == [10] * 3
    machines.save(30)
    machines.lose(1)
    machines.lose(2)  # with the shards of machine 1
    assert machines.bring() == [None] * 3, "what is on disk is all"


def test_what_a_machine_brings_back_that_was_away_is_not_taken(tmp_path, make_machines):
    """The others have gone on without it, from an earlier step, and are not yet at that one again."""
    machines = make_machines(3)
    machines.save(20, sharded=False)
    shutil.copytree(machines.memory_of(2), tmp_path / "away")
    for index in range(3):
        machines.lose(index)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    machines.save(10, sharded=False)
    shutil.rmtree(machines.memory_of(2))
    shutil.copytree(tmp_path / "away", machines.memory_of(2))
    assert machines.bring() == [10] * 3


@pytest.mark.parametrize("count", [1, 3])
def test_a_bucket_that_takes_nothing_on_one_machine_is_said_by_all(make_machines, count):
    machines = make_machines(count)
    machines.save(10)

    class Full:
        folder = machines.folder

        def unmark(self, folder):
            """There is none."""

        def put(self, path):
            raise SaveError(f"{path.name} could not be uploaded")

    def bring(peers: Peers):
        memory = machines.make(peers)
        memory._disk._mirror = Full()
        return outcome(memory.bring_to_disk)

    for said in machines.run(bring):
        assert isinstance(said, SaveError) and "in memory, could not be put on disk" in str(said), said
    assert list(machines.memory_of(0).iterdir()), "it is not given back: nothing is lost"


def test_where_the_run_directory_is_not_shared_it_is_said(tmp_path, make_machines):
    machines = make_machines(3)
    machines.save(10)
    elsewhere = Machines(tmp_path / "elsewhere", machines.run, 3)

    def bring(peers: Peers):
        memory = machines.make(peers)
        if peers.index:
            memory._disk.folder = elsewhere.folder / "run" / "checkpoints"
        return outcome(memory.bring_to_disk)

    for said in machines.run(bring):
        assert isinstance(said, SaveError) and "process 1: it sees no" in str(said)
        assert "needs a --run_dir that all of them share" in str(said)
    assert list(machines.memory_of(0).iterdir()), "it is not given back: nothing is lost"


def test_a_memory_dir_that_lacks_on_one_machine_is_said_by_all(tmp_path, make_machines):
    machines = make_machines(2)
    (tmp_path / "memory_1").rmdir()
    for said in machines.run(lambda peers: outcome(machines.make, peers)):
        assert isinstance(said, InputError) and "memory_1: No such file or directory" in str(said)


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


@pytest.mark.parametrize("where", ["making the folder", "the shards of the machine before"])
def test_a_machine_without_room_ends_the_save_on_all_at_once(tmp_path, make_machines, monkeypatch, where):
    """Nobody waits for another: that would be half an hour."""
    machines = make_machines(3)
    opened = Path.open
    full = machines.memory_of(1) / ".writing_00000010" / "shards_00000.safetensors"

    def opens(path: Path, *arguments, **keywords):
        return opened(Path("/dev/full"), "wb", buffering=0) if path == full else opened(path, *arguments, **keywords)

    def no_room(*_):
        raise OSError(28, "No space left on device")

    if where != "making the folder":
        monkeypatch.setattr(Path, "open", opens)

    def save(peers: Peers) -> None:
        memory = machines.make(peers)
        memory.run_id = f"ours.{memory.token}"
        if where == "making the folder" and peers.index == 1:
            memory._make = no_room
        memory.write(copy_of(10, peers, memory._marks))
        memory.wait()

    for said in machines.run(lambda peers: outcome(save, peers)):
        assert isinstance(said, SaveError) and "could not be kept in memory" in str(said)
        assert "process 1: [Errno 28] No space left on device" in str(said)
    assert not any(list(machines.memory_of(index).glob("step_*")) for index in range(3))
