"""Device, metrics and checkpoint utilities on their own."""

import contextlib
import fcntl
import itertools
import json
import os
import pickle
import pty
import re
import resource
import signal
import struct
import sys
import termios
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from conftest import ROOT

import tpu_utils
from config import InputError, MnistConfig
from tpu_utils import (
    CheckpointError,
    Checkpoints,
    CompileWatch,
    DamagedCheckpoint,
    DeviceError,
    DeviceLoader,
    DeviceMetrics,
    Goodput,
    NonFiniteError,
    RecompileError,
    RunLog,
    SaveError,
    TrainingError,
    attached_chips,
    check_finite,
    check_same_run,
    finite_means,
    load_model,
    open_run_dir,
    read_checkpoint,
    run_script,
    start_device,
    transfers_from_device,
    write_atomically,
)


@pytest.fixture(scope="module")
def device():
    return torch_xla.device()


# ---------------------------------------------------------------------------------------------------------- device


def fake_pci(root, *devices):
    for number, (vendor, device) in enumerate(devices):
        folder = root / f"0000:00:{number:02x}.0"
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")


def test_chips_are_found_on_the_pci_bus(tmp_path):
    fake_pci(tmp_path, ("0x1ae0", "0x0063"), ("0x8086", "0x0063"), ("0x1ae0", "0x0042"), ("0x1ae0", "0x0063"))
    assert [chip.name for chip in attached_chips(tmp_path)] == ["v5e", "v5e"]  # 0x0042 is Google's network card
    assert attached_chips(tmp_path / "absent") == []


def test_a_preset_made_for_tpu_refuses_another_device():
    with pytest.raises(DeviceError, match=r"preset production runs on tpu, but .* add --device cpu"):
        start_device(MnistConfig(preset="production", device="tpu"))


def test_a_runtime_that_started_another_device_is_noticed(monkeypatch):
    monkeypatch.setattr(xr, "device_type", lambda: "NEURON")
    with pytest.raises(DeviceError, match="asked for device cpu, the runtime started neuron"):
        start_device(MnistConfig(device="cpu"))


class Reader:
    """Batches 0, 1, 2, ... and an error at the end, if there is one."""

    def __init__(self, count, error=None):
        self.count, self.error = count, error

    def __iter__(self):
        for number in range(self.count):
            yield torch.full((3,), float(number)), torch.full((2,), number)
        if self.error:
            raise self.error


def test_loader_keeps_order_and_counts_other_uploads(device):
    with DeviceLoader(Reader(7), device, 2, Goodput()) as loader:
        before = loader.uploads_beside_batches()
        assert [int(a[0]) for a, _ in loader] == list(range(7))
        assert loader.uploads_beside_batches() == before
        torch.ones(3).to(device)
        assert loader.uploads_beside_batches() == before + 1


def test_an_error_of_the_reader_reaches_the_loop_after_the_batches_before_it(device):
    seen = []
    with (
        pytest.raises(InputError, match="shard 3"),
        DeviceLoader(Reader(3, InputError("shard 3")), device, 2, Goodput()) as loader,
    ):
        for a, _ in loader:
            seen.append(int(a[0]))
    assert seen == [0, 1, 2]


def test_leaving_early_ends_the_thread(device):
    with DeviceLoader(Reader(1000), device, 2, Goodput()) as loader:
        next(loader)
    assert not loader._thread.is_alive()


# --------------------------------------------------------------------------------------------------------- metrics


def test_metrics_keep_the_last_steps_on_the_device(device):
    metrics = DeviceMetrics(["loss", "norm"], 4, device)
    graphs, reads = CompileWatch(), transfers_from_device()
    sources = [torch.tensor([float(i), 10.0 * i]).to(device) for i in range(1, 7)]
    for step, source in enumerate(sources, 1):
        with torch_xla.compile(full_graph=True, name="record"):
            metrics.record(source[0], source[1])
        graphs.check("train", step, [source])
    assert transfers_from_device() == reads and graphs.compiled("train") == 1
    values = metrics.read(2, 6)
    np.testing.assert_array_equal(values["loss"], [3, 4, 5, 6])
    np.testing.assert_array_equal(values["norm"], [30, 40, 50, 60])
    assert transfers_from_device() == reads + 1
    other = DeviceMetrics(["loss", "norm"], 4, device)
    other.load_state_dict(tpu_utils.to_host(metrics.state_dict()))
    np.testing.assert_array_equal(other.read(4, 6)["loss"], [5, 6])


def test_a_second_graph_stops_the_run_and_says_which_input_changed(device):
    graphs = CompileWatch()

    def step(x):
        with torch_xla.compile(full_graph=True, name="step"):
            return (x * 3).sum()

    for number, size in ((1, 8), (2, 8), (3, 5)):
        x = torch.ones(size).to(device)
        step(x)
        if size == 8:
            graphs.check("train", number, [x])
    with pytest.raises(RecompileError, match=r"step 3 compiled graph 2 .*: x was float32\[8\], is float32\[5\]"):
        graphs.check("train", 3, [x])


def test_a_number_that_changes_between_steps_is_a_second_graph_and_is_named(device):
    graphs, x = CompileWatch(), torch.ones(8).to(device)

    @torch_xla.compile(full_graph=True, name="step")
    def step(x, scale):
        return x * scale

    with pytest.raises(RecompileError) as caught:
        for number in range(3):
            scale, unchanged = float(number), 5  # 0 and 1 are baked into the graph
            y = step(x, scale)  # THE CALL
            graphs.check("train", number, [x])
            del y
    assert unchanged
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, line in enumerate(lines, 1) if line.endswith("# THE CALL"))
    assert re.search(
        rf"step 1 compiled graph 2 of the train step, expected 1, called at .*test_tpu_utils.py:{line} "
        r"\(y = step\(x, scale\)\): no input changed its shape or dtype, so look for a Python number",
        str(caught.value),
    )
    assert str(caught.value).endswith("changed now, and not before: number 0 -> 1, scale 0.0 -> 1.0")


def test_operations_on_device_tensors_outside_the_step_are_said(device):
    """Before the first step nothing else can be the cause; later they are one of the causes that are named."""

    @torch_xla.compile(full_graph=True, name="step")
    def step(x):
        return x * 3

    for bad, cause in ((5, "is its first call, so operations on device tensors before it"), (6, "between the steps")):
        graphs, x = CompileWatch(), torch.ones(2, bad).to(device)  # of its own shape, or its step is compiled already
        with pytest.raises(RecompileError, match=f"step {bad} compiled graph 2 .*{cause}"):
            for number in range(5, 9):
                batch = (x + bad) * 0.5 if number == bad else x
                step(batch)
                graphs.check("train", number, [batch])


def test_a_number_in_a_tuple_is_named_and_counters_are_left_out(device):
    graphs, x = CompileWatch(), torch.ones(9).to(device)

    @torch_xla.compile(full_graph=True, name="step")
    def step(x, name, scale):
        return x * scale

    with pytest.raises(RecompileError, match=r"changed now, and not before: options\[1\] 0.0 -> 1.0$"):
        for number in range(5, 9):
            options = ("a name", float(number == 8))  # 0 and 1 are baked into the graph
            y = step(x, *options)
            graphs.check("train", number, [x])
            del y


def test_a_learning_rate_that_is_a_python_number_is_named(device):
    graphs = CompileWatch()
    weight = torch.nn.Parameter(torch.ones(4).to(device))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.ones(4).to(device)
    torch_xla.sync()
    graphs.check("other", 0, [])

    @torch_xla.compile(full_graph=True, name="step")
    def step():
        with torch.no_grad():
            for group in optimizer.param_groups:
                weight.add_(weight.grad * group["lr"])

    with pytest.raises(RecompileError, match=r"optimizer.param_groups\[0\]\['lr'\] 0.0 -> 0.1"):
        for number, optimizer.param_groups[0]["lr"] in enumerate((0.0, 0.1)):
            step()
            graphs.check("train", number, [weight])


def test_non_finite_losses_name_the_first_step(tmp_path):
    checkpoints = save(tmp_path, 10, 20)
    good, bad = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 2.0, np.nan, np.inf])
    check_finite({"loss": good}, 40, checkpoints, "stop")
    check_finite({"loss": good[:0]}, 40, checkpoints, "stop")
    check_finite({"loss": bad}, 40, checkpoints, "skip")
    found = r"step 43, of steps 41 to 44 read now, has loss 3, gradient norm nan; .* checkpoint, of step 20, is finite"
    with pytest.raises(NonFiniteError, match=found):
        check_finite({"loss": good, "gradient_norm": bad}, 40, checkpoints, "stop")


def test_means_are_over_the_steps_that_were_not_skipped():
    values = {"loss": np.array([1.0, 2.0, 3.0]), "gradient_norm": np.array([np.inf, 4.0, 6.0])}
    assert finite_means(values) == {"loss": 2.5, "gradient_norm": 5.0}
    assert np.isnan(finite_means({"loss": np.array([np.nan])})["loss"])


def test_goodput_sums_to_wall_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    goodput = Goodput(age=6.0)
    clock[0] += 1
    goodput.enter("step")
    clock[0] += 2
    with goodput.phase("evaluation"):
        clock[0] += 5
        with goodput.phase("data_wait"):
            clock[0] += 3
        clock[0] += 0.5
    clock[0] += 4
    assert goodput.total() == 6 + 1 + 2 + 5 + 3 + 0.5 + 4 == sum(goodput.seconds.values())
    seconds = {name: seconds for name, seconds in goodput.seconds.items() if seconds}
    assert seconds == {"start_up": 7, "step": 6, "evaluation": 5.5, "data_wait": 3}


def test_log_drops_what_a_resumed_run_will_write_again(tmp_path):
    with RunLog(tmp_path, 0, 100, tensorboard=False) as log:
        for step in (10, 20, 30):
            log.write("train", step, loss=1.0 / step, mfu=None)
        log.write("train", 40, loss=float("nan"))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "st')  # a kill in mid-line
    assert json.loads(path.read_text().splitlines()[3])["loss"] is None
    with RunLog(tmp_path, 20, 100, tensorboard=False) as log:
        log.write("train", 30, loss=0.5)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]


BAR = """
import sys, time
from pathlib import Path
from tpu_utils import RunLog
fields = dict(loss=1.0, gradient_norm=1.0, skipped_steps=0, learning_rate=1e-3, step_seconds=0.1)
fields |= dict(examples_per_second=1.0, data_wait_seconds=0.0, mfu=None)
with RunLog(Path(sys.argv[1]), 99990, 99999, tensorboard=False) as log:
    for step in range(99991, 100000):
        log.advance()
        time.sleep(0.11)  # tqdm draws ten times a second at most
        if step % 4 == 0:
            log.train(step, **fields)
"""


def on_a_terminal(columns: int, command: str) -> str:
    """What a shell command writes to a terminal of this width that is its own."""
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execvp("bash", ["bash", "-c", command])
    written = b""
    with contextlib.suppress(OSError):  # EIO: the last process has closed it
        while part := os.read(terminal, 65536):
            written += part
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0, written.decode()
    return written.decode()


def test_the_bar_fits_a_narrow_terminal(tmp_path):
    (tmp_path / "bar.py").write_text(BAR)
    written = on_a_terminal(40, f"set -m; {sys.executable} {tmp_path}/bar.py {tmp_path}")
    frames = [frame for frame in re.split(r"[\r\n]+", written) if "%|" in frame]
    assert len(frames) > 5
    for frame in frames:
        assert re.fullmatch(r"[ \d]{3}%\|.+\| \d+/99999 \[[\d:]+<[\d:?]+\]", frame), frame
        assert len(frame) <= 40
    assert "99999/99999" in frames[-1]


def test_a_background_job_has_no_bar_on_its_terminal(tmp_path):
    (tmp_path / "bar.py").write_text(BAR.replace("0.11", "0.01"))
    written = on_a_terminal(80, f"set -m; {sys.executable} {tmp_path}/bar.py {tmp_path} & wait")
    assert "step  99996/99999" in written and "%|" not in written


# ------------------------------------------------------------------------------------------------------ checkpoint

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


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def alter(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: cut(folder / "state.pt"),
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
    marker = {"step": 20, "bytes": path.stat().st_size, "crc32": tpu_utils.crc32_of(path)}
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


def test_another_run_is_not_continued():
    saved = {"seed": 0, "learning_rate": 0.1, "log_every": 20, "run_dir": "a"}
    check_same_run({**saved, "run_dir": "b"}, saved)
    with pytest.raises(InputError, match=r"learning_rate is 0.2, was 0.1; seed is 1, was 0; repeat"):
        check_same_run({**saved, "learning_rate": 0.2, "seed": 1}, saved)


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes():
    model = torch.nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"weight is \(2, 3\), was \(2, 4\)"):
        load_model(model, torch.nn.Linear(4, 2).state_dict())
    with pytest.raises(CheckpointError, match=r"bias is \(2,\), was absent"):
        load_model(model, torch.nn.Linear(3, 2, bias=False).state_dict())
    assert torch.equal(model.weight, before)


def test_run_directories(tmp_path):
    assert open_run_dir(MnistConfig(run_dir=str(tmp_path / "a" / "b"))).is_dir()
    write_atomically(tmp_path / "a" / "b" / "config.json", b"{}")
    with pytest.raises(InputError, match="already holds a run"):
        open_run_dir(MnistConfig(run_dir=str(tmp_path / "a" / "b")))
    assert open_run_dir(MnistConfig(run_dir=str(tmp_path / "a" / "b"), resume="auto")).is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        open_run_dir(MnistConfig(run_dir=str(tmp_path / "file" / "run")))


def test_exit_codes_and_messages(capsys, monkeypatch):
    def fail(error):
        raise error

    monkeypatch.setattr("sys.argv", ["script"])
    assert run_script(lambda: 143) == 143
    assert run_script(lambda: fail(InputError("bad value"))) == 2
    assert run_script(lambda: fail(TrainingError("went wrong"))) == 1
    assert capsys.readouterr().err == "error: bad value\nerror: went wrong\n"
    monkeypatch.setattr("sys.argv", ["script", "--debug"])
    with pytest.raises(InputError):
        run_script(lambda: fail(InputError("bad value")))
