"""What keeps a run from harm: the lock of a run directory, the watchdog, notices of the VM, early stops."""

import gc
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, read_lines
from test_simple_mnist import in_process

import simple_mnist_tpu
import tpu_utils.guards
from config import InputError
from tpu_utils import Goodput, RunLock, StopRequest, read_checkpoint, watch_for_stalls

TINY = ["--num_epochs=1", "--warmup_steps=2", "--channels=4", "--hidden_dim=16", "--log_every=1", "--device=cpu"]
TINY += ["--no_tensorboard"]


@pytest.fixture
def signals():
    """The handlers as they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------------------- lock


def test_a_second_run_in_the_same_directory_is_refused_and_names_the_first(tmp_path, capsys):
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
    del lock
    assert in_process(*TINY, "--run_dir", run_dir, "--resume=auto") == 0
    assert in_process(*TINY, "--run_dir", run_dir, "--resume=auto") == 0, "a run that ended holds nothing"


HOLDER = "import sys, time; from pathlib import Path; from tpu_utils import RunLock; lock = RunLock()\n"
HOLDER += "lock.acquire(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"


def test_a_killed_holder_holds_nothing(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(InputError, match=rf"run_dir {tmp_path} is in use by pid {process.pid} on host"):
        RunLock().acquire(tmp_path, patience_seconds=0)
    process.kill()  # and no waiting for its end
    lock = RunLock()
    lock.acquire(tmp_path)
    assert (tmp_path / "lock").read_text() == f"pid {os.getpid()} on host {socket.gethostname()}\n"
    process.communicate()


def test_a_file_system_without_locks_is_said(tmp_path, capsys, monkeypatch):
    def no_locks(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(tpu_utils.guards.fcntl, "flock", no_locks)
    RunLock().acquire(tmp_path)
    assert "a second run there would not be refused" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- watchdog


def stalls_in(text):
    return [line for line in text.splitlines() if line.startswith("stall")]


def test_a_stuck_data_iterator_is_shown_and_the_run_goes_on(tmp_path, capfd, monkeypatch):
    batches_of = simple_mnist_tpu.TrainBatches
    stuck = threading.Event()

    class Stuck(batches_of):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number == 8:
                    wait_for_a_disk_that_does_not_answer(stuck)
                yield batch

    def wait_for_a_disk_that_does_not_answer(event):
        event.wait()

    monkeypatch.setattr(simple_mnist_tpu, "TrainBatches", Stuck)
    seen = []

    def release():
        deadline = time.monotonic() + 60
        while "wait_for_a_disk" not in "".join(seen) and time.monotonic() < deadline:
            time.sleep(0.1)
            seen.append(capfd.readouterr().err)
        time.sleep(2.5)  # twice as long again: said once all the same
        stuck.set()

    releaser = threading.Thread(target=release)
    releaser.start()
    assert in_process(*TINY, "--run_dir", tmp_path / "run", "--stall_seconds=1") == 0
    releaser.join()
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "watchdog":
            thread.join(timeout=30)
    text = "".join(seen) + capfd.readouterr().err
    said = [line for line in stalls_in(text) if "data_wait" in line]
    assert len(said) == 1 and "no progress for 1 s" in said[0] and "--data_dir" in said[0]
    assert "simple_mnist_tpu.py" in text, "the main thread's stack is there too"
    assert "stall      over after" in text


def test_no_stall_where_there_is_progress_and_none_when_off(capfd):
    busy, off = Goodput(), Goodput()
    watch_for_stalls(busy, 1)
    watch_for_stalls(off, 0)
    for goodput in (busy, off):
        goodput.enter("step")
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        with busy.phase("evaluation"):
            time.sleep(0.02)
    assert not stalls_in(capfd.readouterr().err)
    busy.enter("compile")  # may take six times as long
    time.sleep(2.5)
    assert not stalls_in(capfd.readouterr().err)


def test_the_watchdog_ends_with_the_run():
    goodput = Goodput()
    watch_for_stalls(goodput, 0.2)
    assert "watchdog" in [thread.name for thread in threading.enumerate()]
    watchers = [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    del goodput
    gc.collect()
    for thread in watchers:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in watchers)


# ---------------------------------------------------------------------------------------------- metadata of the VM


class MetadataServer(http.server.ThreadingHTTPServer):
    """The metadata server's protocol: the header it wants and gives, ETag, waiting for a change."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("localhost", 0), Answer)
        self.values, self.changed = {"maintenance-event": "NONE", "preempted": "FALSE"}, threading.Condition()
        self.asked = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path, _, query = self.path.partition("?")
        key = path.removeprefix("/computeMetadata/v1/instance/")
        options = dict(pair.split("=") for pair in query.split("&")) if query else {}
        self.server.asked.append((key, options))
        if self.headers.get("Metadata-Flavor") != "Google" or key not in self.server.values:
            self.send_error(403)
            return
        with self.server.changed:
            if options.get("wait_for_change") == "true":
                known = options["last_etag"]
                self.server.changed.wait_for(
                    lambda: etag(self.server.values[key]) != known, float(options["timeout_sec"])
                )
            value = self.server.values[key]
        self.send_response(200)
        for name, text in (("Metadata-Flavor", "Google"), ("ETag", etag(value)), ("Content-Length", len(value))):
            self.send_header(name, str(text))
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, *arguments):
        pass


def etag(value):
    return f"{sum(value.encode()):016x}"


@pytest.fixture
def metadata(monkeypatch):
    server = MetadataServer()
    monkeypatch.setenv("GCE_METADATA_HOST", f"localhost:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://localhost:1")  # not for this server
    yield server
    server.shutdown()
    server.server_close()


def waits(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize(
    "key, value",
    [
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE"),
        ("preempted", "TRUE"),
    ],
)
def test_a_notice_asks_to_stop_like_sigterm(metadata, signals, capsys, key, value):
    stop = StopRequest()
    stop.watch_metadata()
    assert waits(lambda: len([options for _, options in metadata.asked if options]) == 2), "one waits for each key"
    assert stop.signal is None
    metadata.set(key, value)
    assert waits(lambda: stop.signal) == signal.SIGTERM
    assert f"{key} = {value}: stopping at the next step boundary" in capsys.readouterr().out
    asked = [options for name, options in metadata.asked if name == key]
    assert (
        asked[0] == {}
        and asked[1]["wait_for_change"] == "true"
        and asked[1]["last_etag"] == etag("NONE" if key == "maintenance-event" else "FALSE")
    )


def test_a_run_under_a_notice_saves_says_so_and_ends_with_143(metadata, tmp_path, capsys, monkeypatch):
    batches_of, requests = simple_mnist_tpu.TrainBatches, []

    class Kept(StopRequest):
        def __init__(self):
            super().__init__()
            requests.append(self)

    class Announced(batches_of):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number == 6:
                    metadata.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
                    assert waits(lambda: requests[0].signal)  # the notice takes its way
                yield batch

    monkeypatch.setattr(simple_mnist_tpu, "StopRequest", Kept)
    monkeypatch.setattr(simple_mnist_tpu, "TrainBatches", Announced)
    run_dir = tmp_path / "run"
    assert in_process(*TINY, "--run_dir", run_dir) == 143
    out = capsys.readouterr().out
    assert "stopped by maintenance notice maintenance-event = TERMINATE_ON_HOST_MAINTENANCE, saved after step" in out
    assert f"repeat the command with --run_dir {run_dir} --resume must" in out
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert 0 < read_checkpoint(saved)["step"] < 22


@pytest.mark.parametrize("host", ["localhost:1", "no.such.host.invalid"])
def test_no_metadata_server_no_effect_no_noise(monkeypatch, signals, capfd, host):
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    stop = StopRequest()
    stop.watch_metadata()
    time.sleep(0.5)
    assert stop.signal is None and capfd.readouterr() == ("", "")


def test_an_answer_that_is_not_googles_is_no_notice(monkeypatch, metadata, signals, capfd):
    """A portal that answers every address with a page of its own."""
    metadata.values = {"maintenance-event": "TRUE", "preempted": "<html>"}
    stop = StopRequest()
    stop.watch_metadata()
    assert waits(lambda: len(metadata.asked) >= 2)
    time.sleep(0.2)
    assert stop.signal is None and capfd.readouterr() == ("", "")


def test_without_tpu_and_variable_nobody_asks(monkeypatch, signals):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    before = threading.active_count()
    StopRequest().watch_metadata()
    assert threading.active_count() == before


# -------------------------------------------------------------------------------------------------------- early stop


def test_a_stop_before_the_first_step_compiles_nothing_and_tells_how_to_go_on(tmp_path, capsys, monkeypatch):
    load = simple_mnist_tpu.load_dataset

    def signalled(config):
        os.kill(os.getpid(), signal.SIGTERM)
        return load(config)

    monkeypatch.setattr(simple_mnist_tpu, "load_dataset", signalled)
    run_dir = tmp_path / "run"
    assert in_process(*TINY, "--run_dir", run_dir) == 143
    out = capsys.readouterr().out
    assert "stopped by signal 15, before the first step: there was nothing to save" in out
    assert f"--run_dir {run_dir} --resume auto" in out and not (run_dir / "metrics.jsonl").exists()
    monkeypatch.setattr(simple_mnist_tpu, "load_dataset", load)
    assert in_process(*TINY, "--run_dir", run_dir, "--resume=auto") == 0


def test_a_stop_during_evaluation_lets_it_end_then_saves(tmp_path, capsys, monkeypatch):
    """On several hosts an evaluation can only be given up together; so it is finished, and its line is on disk."""
    evaluate = simple_mnist_tpu.eval_step

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(simple_mnist_tpu, "eval_step", evaluate)
        return evaluate(*arguments)

    monkeypatch.setattr(simple_mnist_tpu, "eval_step", signalled)
    run_dir = tmp_path / "run"
    options = [*TINY, "--num_epochs=2", "--eval_batch_size=100", "--run_dir", run_dir]
    assert in_process(*options) == 143
    lines = read_lines(run_dir)
    assert [line["kind"] for line in lines if line["step"] == 22] == ["train", "eval", "checkpoint"]
    assert lines[-1]["step"] == 22 and "saved after step 22" in capsys.readouterr().out


def test_all_hosts_of_a_transformer_stop_after_the_same_step_and_one_writes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    run_dir = tmp_path / "run"
    options = ["--num_layers=1", "--num_heads=2", "--embedding_dim=32", "--sequence_length=16", "--num_steps=100000"]
    options += ["--global_batch_size=4", "--warmup_steps=0", "--eval_every=100000", "--log_every=5", "--eval_batches=1"]
    options += ["--device=cpu", "--no_tensorboard", f"--run_dir={run_dir}"]
    command = [sys.executable, "tests/transformer_hosts.py"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    hosts = [
        subprocess.Popen([*command, str(index), "2", str(port), *options], cwd=ROOT, **pipes) for index in range(2)
    ]
    assert waits(lambda: (run_dir / "metrics.jsonl").exists() and len(read_lines(run_dir)) >= 2, seconds=120)
    hosts[1].send_signal(signal.SIGTERM)  # one of them alone
    outputs = [host.communicate(timeout=60) for host in hosts]
    assert [host.returncode for host in hosts] == [143, 143], outputs
    (saved,) = (run_dir / "checkpoints").iterdir()
    step = int(saved.name[5:])
    assert step % 5 == 0 and f"saved after step {step}" in outputs[0][0]
    lines = read_lines(run_dir)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(5, step + 1, 5))
    assert "step " not in outputs[1][0], "the second host writes no lines"
