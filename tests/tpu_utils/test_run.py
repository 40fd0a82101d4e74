"""Run as a script of one's own uses it: other data, another loss, no DeviceMetrics, its own options."""

import json
import signal

import pytest
from processes import ROOT, Script, waits
from run_files import losses_in, read_lines, summary_in

OWN = '''
"""Fit a line."""
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from config import FREE, Range, TrainConfig
from tpu_utils.options.environment import command_line


@dataclass(frozen=True)
class LineConfig(TrainConfig):
    """What is fitted."""

    slope: Annotated[float, Range("(0, inf)")] = 2.0
    """Slope of the line."""
    num_steps: Annotated[int, Range("[1, inf)")] = 30
    """Steps of the run."""
    gate: Annotated[str, FREE] = ""
    """A file that the data of step 16 waits for. Changes nothing."""
    sizes: tuple[int, ...] = (3, 4)
    """Changes nothing, but a run is resumed with equal ones."""

    presets = {"narrow": {}, "wide": {"global_batch_size": 128}}


if __name__ == "__main__":
    config = command_line(LineConfig, __doc__, lambda config: None)

import torch

from tpu_utils.base.errors import run_script
from tpu_utils.step.graphs import one_graph
from tpu_utils.step.optim import make_optimizer
from tpu_utils.run import Run


class Line:
    unit, description = "points", "points of a line"

    def __init__(self, config):
        self.config, self.num_steps = config, config.num_steps

    def fingerprint(self):
        return 0

    def batch(self, index):
        while index == 15 and self.config.gate and not Path(self.config.gate).exists():
            time.sleep(0.01)
        random = np.random.default_rng((self.config.seed, index))
        x = random.standard_normal((self.config.global_batch_size, 1)).astype(np.float32)
        return x, self.config.slope * x + 1


@one_graph
def train_step(model, optimizer, x, y):
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(config):
    with Run(config, train_step) as run:
        line = Line(config)
        run.open(line, line)
        model = torch.nn.Linear(1, 1).to(run.device)
        optimizer = make_optimizer(config, model.parameters())
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor([0.1]).to(run.device)
        run.track(model=model, optimizer=optimizer)
        for step, (x, y) in run.steps(line):
            loss = train_step(model, optimizer, x, y)
            if run.log_due(step):
                run.log(step, loss=loss.item())
            if run.save_due(step):
                run.save(step)
        return run.finish(slope=model.weight.item())


if __name__ == "__main__":
    sys.exit(run_script(lambda: train(config)))
'''
OPTIONS = ["--optimizer=adam", "--log_every=1", "--save_every=10", "--no_tensorboard", "--device=cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "line.py").write_text(OWN)
    for name in ("config.py", "tpu_utils"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def line(folder, run_dir, *options) -> Script:
    return Script("line.py", *OPTIONS, "--run_dir", run_dir, *options, folder=folder)


@pytest.fixture(scope="module")
def whole(folder):
    run = line(folder, folder / "whole")
    assert run.wait() == 0, run.text("err")
    assert run.text("out").splitlines()[-3].startswith("result     slope "), run.text("out")
    return folder / "whole"


def test_it_has_what_every_run_has(whole):
    summary = summary_in(whole)
    assert (summary["steps"], summary["train_graphs"], summary["eval_graphs"]) == (30, 1, 0)
    assert summary["host_to_device_uploads_per_step"] == 0 and 0 < summary["slope"] < 3
    lines = [line for line in read_lines(whole) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[0]["points_per_second"] is None and lines[1]["points_per_second"] > 0
    config = json.loads((whole / "config.json").read_text())
    assert (config["slope"], config["preset"], config["data"]) == (2.0, "narrow", "points of a line")


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_it_resumes_bit_identical(folder, whole, tmp_path, number, code):
    """Stopped while step 16 waits for its data."""
    run_dir, gate = tmp_path / "run", tmp_path / "gate"
    run = line(folder, run_dir, "--gate", gate)
    waits(lambda: (run_dir / "metrics.jsonl").exists() and len(losses_in(run_dir)) == 15, alive=run)
    waits((run_dir / "checkpoints" / "step_00000010" / "done").exists, alive=run)  # written behind the steps
    run.send_signal(number)
    gate.touch()
    assert run.wait() == code, run.text("err")
    assert not (run_dir / "summary.json").exists()
    again = line(folder, run_dir, "--resume=must")
    assert again.wait() == 0 and "resumed    after step 1" in again.text("out"), again.text("err")
    assert losses_in(run_dir) == losses_in(whole)
    first, second = summary_in(whole), summary_in(run_dir)
    assert second["slope"] == first["slope"]
    assert "restore" not in first["goodput"] and second["goodput"]["restore"] > 0


def test_what_it_was_trained_with_must_be_repeated(folder, whole):
    run = line(folder, whole, "--resume=must", "--slope=3")
    assert run.wait() == 2 and "slope is 3.0, was 2.0" in run.text("err")
    run = line(folder, whole, "--resume=must", "--gate=x", "--preset=wide", "--global_batch_size=64")
    assert run.wait() == 0 and "resumed    after step 30 of 30" in run.text("out"), run.text("err")
    assert run.text("out").count("data       points of a line\n") == 1
    assert len(losses_in(whole)) == 30


def test_an_error_in_the_loop_leaves_everything_closed(folder, tmp_path):
    """The message, exit code 1, and the run directory free for the next."""
    broken = OWN.replace("run.log(step, loss=loss.item())", "run.log(step, loss=loss.item()); 1 / (step - 15)")
    (folder / "broken.py").write_text(broken)
    run = Script("broken.py", *OPTIONS, "--run_dir", tmp_path / "run", folder=folder)
    assert run.wait() == 1 and "ZeroDivisionError" in run.text("err")
    assert (tmp_path / "run" / "checkpoints" / "step_00000010" / "done").exists()
    again = line(folder, tmp_path / "run", "--resume=must")
    assert again.wait() == 0 and "resumed    after step 10" in again.text("out"), again.text("err")
