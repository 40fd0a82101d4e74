"""What ends a run early: notices of the VM; signals before the first step, in an evaluation, on one host, twice."""

import os
import signal
import threading
import time

import pytest
from metadata_server import etag, metadata_server
from processes import free_port, run, start, waits
from run_files import TINY, in_process, read_lines, saved_steps, summary_in

import simple_mnist_tpu
import tpu_utils.device
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.device import StopRequest


@pytest.fixture
def stop():
    request = StopRequest()
    yield request
    request.close()


def test_a_hang_up_asks_to_stop_unless_it_was_ignored_before():
    """Under nohup it is."""
    first = signal.getsignal(signal.SIGHUP)
    for before, expected in ((signal.SIG_IGN, None), (lambda *_: None, signal.SIGHUP)):
        signal.signal(signal.SIGHUP, before)
        request = StopRequest()
        signal.raise_signal(signal.SIGHUP)
        assert request.signal == expected
        request.close()
        assert signal.getsignal(signal.SIGHUP) == before
    signal.signal(signal.SIGHUP, first)


# python -c TWICE SECOND NUMBER SECOND NUMBER...: signals at these seconds of the clock that a StopRequest reads
TWICE = """
import signal, sys, types
import tpu_utils.device
stop, clock = tpu_utils.device.StopRequest(), types.SimpleNamespace()
tpu_utils.device.time = clock
for second, number in zip(map(float, sys.argv[1::2]), map(int, sys.argv[2::2])):
    clock.monotonic = lambda: second
    signal.raise_signal(number)
print(stop.signal)
"""


@pytest.mark.parametrize(
    "signals, ends",
    [
        ([(7, signal.SIGTERM), (7.002, signal.SIGTERM)], False),
        ([(7, signal.SIGINT), (7.9, signal.SIGTERM)], False),  # Ctrl-C reaches a launcher too, which hands it on
        ([(7, signal.SIGTERM), (8, signal.SIGTERM)], True),
        ([(7, signal.SIGINT), (7.5, signal.SIGINT), (9, signal.SIGINT)], True),
        ([(7, signal.SIGHUP), (9, signal.SIGTERM)], True),
        ([(7, signal.SIGINT), (60, signal.SIGHUP), (70, signal.SIGHUP)], False),  # nobody is at the terminal any more
    ],
)
def test_a_second_signal_stops_at_once_when_it_is_no_echo_of_the_first(signals, ends):
    done = run("-c", TWICE, *(word for second, number in signals for word in (second, int(number))))
    if ends:
        assert (done.returncode, done.stdout) == (-signals[-1][1], "")
    else:
        assert (done.returncode, done.stdout) == (0, f"{int(signals[0][1])}\n"), done.stderr


@pytest.fixture
def metadata(monkeypatch):
    with metadata_server(maintenance_event="NONE", preempted="FALSE") as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        monkeypatch.setenv("http_proxy", "http://localhost:1")  # not for this server
        yield server


@pytest.mark.parametrize(
    "key, before, notice",
    [
        ("maintenance-event", "NONE", "TERMINATE_ON_HOST_MAINTENANCE"),
        ("maintenance-event", "NONE", "MIGRATE_ON_HOST_MAINTENANCE"),
        ("preempted", "FALSE", "TRUE"),
    ],
)
def test_a_notice_asks_to_stop_like_sigterm(metadata, stop, capsys, key, before, notice):
    stop.watch_metadata()
    assert waits(lambda: len([options for _, options in metadata.asked if options]) == 2), "one waits for each key"
    assert stop.signal is None
    metadata.set(key, notice)
    assert waits(lambda: stop.signal) == signal.SIGTERM
    assert f"{key} = {notice}: stopping at the next step boundary" in capsys.readouterr().out
    questions = [options for name, options in metadata.asked if name == key]
    waiting = next(options for options in questions if options)
    assert questions[0] == {} and (waiting["wait_for_change"], waiting["last_etag"]) == ("true", etag(before))


def test_a_run_under_a_notice_saves_says_so_and_ends_with_143(metadata, tmp_path, capsys, monkeypatch):
    requests = []

    class Kept(StopRequest):
        def __init__(self):
            super().__init__()
            requests.append(self)

    class Announced(simple_mnist_tpu.TrainBatches):
        def batch(self, step):
            if step == 6:
                metadata.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
                waits(lambda: requests[0].signal)  # the notice takes its way
            return super().batch(step)

    monkeypatch.setattr(tpu_utils.device, "StopRequest", Kept)
    monkeypatch.setattr(simple_mnist_tpu, "TrainBatches", Announced)
    run_dir = tmp_path / "run"
    assert in_process(*TINY, "--run_dir", run_dir) == 143
    out = capsys.readouterr().out
    assert "stopped by maintenance notice maintenance-event = TERMINATE_ON_HOST_MAINTENANCE, saved after step" in out
    assert f"repeat the command with --run_dir {run_dir} --resume must" in out
    (saved,) = saved_steps(run_dir)
    assert 0 < saved < 22


@pytest.mark.parametrize("host", ["localhost:1", "no.such.host.invalid", "a portal", "none"])
def test_no_metadata_server_no_effect_no_noise(metadata, monkeypatch, stop, capfd, host):
    """A portal answers every address with a page of its own. Without TPU and variable nobody is asked."""
    before = threading.active_count()
    if host == "a portal":
        metadata.flavor = "portal"
        metadata.pages = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}
    elif host == "none":
        monkeypatch.delenv("GCE_METADATA_HOST")
    else:
        monkeypatch.setenv("GCE_METADATA_HOST", host)
    stop.watch_metadata()
    assert (threading.active_count() == before) == (host == "none")
    waits(lambda: host != "a portal" or len(metadata.asked) >= 2)
    time.sleep(0.2)
    assert stop.signal is None and capfd.readouterr() == ("", "")


def test_a_stop_before_the_first_step_compiles_nothing_and_tells_how_to_go_on(tmp_path, capsys, monkeypatch):
    load = simple_mnist_tpu.load_dataset

    def signalled(config):
        os.kill(os.getpid(), signal.SIGTERM)
        return load(config)

    monkeypatch.setattr(simple_mnist_tpu, "load_dataset", signalled)
    run_dir = tmp_path / "run"
    assert in_process(*TINY, "--run_dir", run_dir) == 143
    out = capsys.readouterr().out
    assert "stopped by SIGTERM, before the first step: there was nothing to save" in out
    assert f"--run_dir {run_dir} --resume auto" in out and not (run_dir / "metrics.jsonl").exists()
    monkeypatch.setattr(simple_mnist_tpu, "load_dataset", load)
    assert in_process(*TINY, "--run_dir", run_dir, "--resume=auto") == 0


def test_a_stop_during_evaluation_lets_it_end_then_saves(tmp_path, capsys, monkeypatch):
    """On several hosts an evaluation can only be given up together; so it is finished, and its line is on disk."""
    step = simple_mnist_tpu.eval_step
    evaluate = step.compiled

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(step, "compiled", evaluate)
        return evaluate(*arguments)

    monkeypatch.setattr(step, "compiled", signalled)
    run_dir = tmp_path / "run"
    options = [*TINY, "--num_epochs=2", "--eval_batch_size=100", "--run_dir", run_dir]
    assert in_process(*options) == 143
    lines = read_lines(run_dir)
    assert [line["kind"] for line in lines if line["step"] == 22] == ["train", "eval", "checkpoint"]
    assert lines[-1]["step"] == 22 and "saved after step 22" in capsys.readouterr().out


@pytest.mark.slow
def test_all_hosts_of_a_transformer_stop_after_the_same_step_and_one_writes(tmp_path):
    """And go on together with the options of the run, to another number of steps, and with one best evaluation."""
    port, run_dir = free_port(), tmp_path / "run"
    options = ["--num_layers=1", "--num_heads=2", "--embedding_dim=32", "--sequence_length=16", "--num_steps=100000"]
    options += ["--global_batch_size=4", "--warmup_steps=0", "--eval_every=100000", "--log_every=5", "--eval_batches=1"]
    options += ["--device=cpu", "--no_tensorboard", f"--run_dir={run_dir}", "--scheduler=constant"]
    hosts = [start("tests/transformer_hosts.py", index, 2, port, *options) for index in range(2)]
    waits(lambda: (run_dir / "metrics.jsonl").exists() and len(read_lines(run_dir)) >= 2, alive=hosts[0])
    hosts[1].send_signal(signal.SIGTERM)  # one of them alone
    outputs = [host.communicate() for host in hosts]
    assert [host.returncode for host in hosts] == [143, 143], outputs
    (saved,) = (run_dir / "checkpoints").iterdir()
    step = int(saved.name[5:])
    assert step % 5 == 0 and f"saved after step {step}" in outputs[0][0]
    lines = read_lines(run_dir)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(5, step + 1, 5))
    assert "step " not in outputs[1][0], "the second host writes no lines"
    options = [f"--run_dir={run_dir}", "--resume=must", "--keep_best", f"--num_steps={step + 7}"]
    port = free_port()
    hosts = [start("tests/transformer_hosts.py", index, 2, port, *options) for index in range(2)]
    outputs = [host.communicate() for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert f"options    from {run_dir}/config.json\nresumed    after step {step} of {step + 7}" in outputs[0][0]
    assert summary_in(run_dir)["best_step"] == CheckpointReader(run_dir / "checkpoints").load_best().step == step + 7
