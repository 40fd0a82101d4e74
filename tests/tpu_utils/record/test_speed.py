"""Where the seconds of a step go; what it sends and reads beside its batch is counted, and named by its lines."""

import itertools
import re
import sys
import time

import pytest
import torch
import torch_xla
from run_files import in_process, losses_in, summary_in
from torch import nn

import simple_mnist_tpu
from tpu_utils.base.errors import TrainingError
from tpu_utils.base.process import Goodput
from tpu_utils.device import compile_step, transfers_to_device
from tpu_utils.record.log import BESIDE
from tpu_utils.record.speed import READS, UPLOADS, Speed, Transfers
from tpu_utils.run import Run

OPTIONS = ["--device=cpu", "--num_epochs=1", "--no_tensorboard", "--warmup_steps=2", "--max_shift=0"]
OPTIONS += ["--log_every=4", "--save_every=99", "--global_batch_size=128", "--channels=4", "--hidden_dim=25"]


class Recurrent(nn.Module):
    """Reads a picture row by row."""

    def __init__(self, image_size: int, channels: int, hidden_dim: int):
        super().__init__()
        self.calls = itertools.count()
        self.rnn, self.head = nn.LSTM(image_size, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, images):
        calls = next(self.calls) if self.training else 0
        states, _ = self.rnn(images.float() / 16)
        scaled = states[:, -1] * (2 + self.training / (2 + calls))
        return self.head(scaled)


def test_the_lines_that_send_something_are_named_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simple_mnist_tpu, "ConvNet", Recurrent)
    assert in_process("--run_dir", tmp_path / "run", *OPTIONS) == 0
    said = capsys.readouterr().out.splitlines()
    one, other = [line for line in said if " of this step at " in line]
    assert said.index(one) < next(number for number, line in enumerate(said) if "step      4/11" in line)
    assert one.startswith("uploads    24 of this step at ") and "states, _ = self.rnn(images.float()" in one
    assert other.startswith("uploads    1 of this step at ") and "scaled = states[:, -1] * (2" in other
    assert len([line for line in said if line.startswith("uploads    25 a step beside the batch")]) == 1
    assert [line.rpartition("  ")[2] for line in said if " ms/step " in line][-1] == "uploads 25/step"
    summary = summary_in(tmp_path / "run")
    assert (summary["train_graphs"], summary[UPLOADS], summary[READS]) == (1, 25, 0)
    assert len(losses_in(tmp_path / "run")) == 3


def test_a_step_that_compiled_counts_neither_in_time_nor_in_tokens(monkeypatch):
    """A length of sequences that comes for the first time inside a log window compiles there."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    goodput = Goodput()
    speed = Speed(goodput, Transfers(lambda: 0, print, False), "tokens", flops=10.0, peak=1000.0)
    goodput.enter("step")
    speed.start()
    for seconds, tokens, compiled in ((0.5, 100, False), (9.0, 50, True), (0.25, 50, False), (0.75, 150, False)):
        with goodput.phase("compile" if compiled else "step"):
            clock[0] += seconds
        speed.count_of_step = tokens
        speed.step_done(compiled)
    found = speed.measure()
    assert speed.measure() == dict.fromkeys(found), "no step since"
    assert 0 < found.pop("host_seconds") < 1
    assert found == {"step_seconds": 0.5, "tokens_per_second": 200.0, "mfu": 2.0, "data_wait_seconds": 0.0}


# ----------------------------------------------------------------------------------------------------------- transfers
@compile_step
def advance(x):
    return x + 1


def reads_all(x, step):
    x.cpu()


def prints(x, step):
    print(x)


def reads_now_and_then(x, step):
    if step % 3 == 0:
        x.item()


def sends(x, step):
    torch.tensor([step, 2.5]).to(x.device)


def does_nothing(x, step):
    pass


def a_loop(body, say=print, is_strict=False, beside_a_log_line=does_nothing):
    """Twelve steps as a run does them, with a log line after every sixth. Returns its counts."""
    transfers = Transfers(transfers_to_device, say, is_strict)
    x = torch.ones(1).to(torch_xla.device())
    advance(x)
    transfers.start()
    fields = []
    for step in range(1, 13):
        x = advance(x)
        transfers.step_done(False)
        body(x, step)
        if step % 6 == 0:
            beside_a_log_line(x, step)
            fields.append(transfers.measure(6))
            transfers.start()
        with transfers.left_out():
            x.item()
            torch.ones(1).to(x.device)
    assert sys.gettrace() is None or is_strict
    return transfers.per_step, fields


@pytest.fixture
def no_trace():
    yield
    sys.settrace(None)


@pytest.mark.parametrize(
    "body, kind, per_step",
    [
        (reads_all, READS, 1.0),
        (prints, READS, 1.0),
        (reads_now_and_then, READS, 0.2),
        (sends, UPLOADS, 1.0),
    ],
)
def test_transfers_of_a_loop_are_counted_and_their_line_is_named_once(no_trace, body, kind, per_step):
    said, word = [], BESIDE[kind]
    counted, fields = a_loop(body, said.append)
    assert counted == {UPLOADS: 0.0, READS: 0.0} | {kind: per_step}
    assert fields[1] == {kind: per_step}
    line = body.__code__.co_firstlineno
    where = rf"1 of this step at \S*test_speed.py:({line + 1}|{line + 2}) \((x|print\(x\)|torch.tensor\(\[step).*\)"
    assert len(said) == 2 and re.fullmatch(rf"{word:10} {where}", said[0]), said
    assert said[1].startswith(f"{word:10} ")
    with pytest.raises(TrainingError, match=rf"{word} beside the batch, {where}: .*; --strict allows none"):
        a_loop(body, is_strict=True)


@pytest.mark.parametrize("is_strict", [False, True])
def test_what_stands_beside_a_log_line_may_read(no_trace, is_strict):
    counted, fields = a_loop(does_nothing, pytest.fail, is_strict, beside_a_log_line=reads_all)
    assert counted == {UPLOADS: 0.0, READS: 0.0} and fields == [{}, {}]


def test_under_a_debugger_strict_stops_without_a_line(no_trace):
    sys.settrace(lambda *_: None)
    with pytest.raises(TrainingError, match="steps transfer more than their batches; --strict allows none"):
        a_loop(reads_all, is_strict=True)


def test_a_backend_that_does_not_count_says_nothing(monkeypatch):
    monkeypatch.setattr("tpu_utils.record.speed.transfers_from_device", lambda: float("nan"))
    transfers = Transfers(lambda: float("nan"), pytest.fail, True)
    for _ in range(4):
        transfers.step_done(False)
    assert transfers.measure(4) == {} and transfers.per_step == dict.fromkeys(BESIDE)
    assert sys.gettrace() is None


def test_constants_of_a_step_that_compiles_are_no_uploads(no_trace):
    """A shape that comes for the first time inside a log window; the step after it sends nothing."""
    sent = [0]
    transfers = Transfers(lambda: sent[0], pytest.fail, False)
    for compiled in (False, True, False, False):
        sent[0] += compiled
        transfers.step_done(compiled)
        assert sys.gettrace() is None


def test_lines_are_looked_for_in_a_hundred_steps_at_most(no_trace):
    sent = [0]
    transfers = Transfers(lambda: sent[0], pytest.fail, False)
    transfers.step_done(False)
    sent[0] = 1
    looked = [bool(transfers.step_done(False) or sys.gettrace()) for _ in range(150)]
    assert looked == [True] * 101 + [False] * 49


class Reading(Run):
    """Its loop reads in every step."""

    def log_due(self, step: int) -> bool:
        self._tracked.metrics.step.cpu()
        return super().log_due(step)


@pytest.mark.parametrize("reads", [False, True])
def test_a_strict_run_stops_where_it_reads_and_else_is_the_same(tmp_path, monkeypatch, capsys, reads):
    monkeypatch.setattr(simple_mnist_tpu, "Run", Reading if reads else Run)
    code = in_process("--run_dir", tmp_path / "run", *OPTIONS, "--strict", "--save_every=3")
    said = capsys.readouterr()
    if reads:
        assert code == 1 and "(self._tracked.metrics.step.cpu())" in said.err, said.err
        return
    summary = summary_in(tmp_path / "run")
    assert (code, summary[UPLOADS], summary[READS]) == (0, 0, 0), said.err
    assert in_process("--run_dir", tmp_path / "other", *OPTIONS) == 0
    assert losses_in(tmp_path / "other") == losses_in(tmp_path / "run")
