"""A second graph stops the run and says why; counts of what the device did."""

import re
from pathlib import Path

import pytest
import torch
import torch_xla

from config import MnistConfig
from tpu_utils.errors import RecompileError
from tpu_utils.run import Run, make_scalars_data


@pytest.fixture(scope="module")
def device():
    return torch_xla.device()


@pytest.fixture
def run():
    """A run whose graphs count from now on."""
    with Run(MnistConfig()) as run:
        yield run


def test_a_second_graph_stops_the_run_and_says_which_input_changed(device, run):
    def step(x):
        with torch_xla.compile(full_graph=True, name="step"):
            return (x * 3).sum()

    with pytest.raises(RecompileError, match=r"step 3 compiled graph 2 .*: x was float32\[8\], is float32\[5\]"):
        for number, size in ((1, 8), (2, 8), (3, 5)):
            x = torch.ones(size).to(device)
            with run.one_graph("test", number, x):
                step(x)


def test_a_number_that_changes_between_steps_is_a_second_graph_and_is_named(device, run):
    x = torch.ones(8).to(device)

    @torch_xla.compile(full_graph=True, name="step")
    def step(x, scale):
        return x * scale

    with pytest.raises(RecompileError) as caught:
        for number in range(3):
            scale, unchanged = float(number), 5  # 0 and 1 are baked into the graph
            with run.one_graph("test", number, x):
                y = step(x, scale)  # THE CALL
            del y
    assert unchanged
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, line in enumerate(lines, 1) if line.endswith("# THE CALL"))
    assert re.search(
        rf"step 1 compiled graph 2 of the test step, expected 1, called at .*test_graphs.py:{line} "
        r"\(y = step\(x, scale\)\): no input changed its shape or dtype, so look for a Python number",
        str(caught.value),
    )
    assert str(caught.value).endswith("changed now, and not before: number 0 -> 1, scale 0.0 -> 1.0")


@pytest.mark.parametrize(
    "bad, cause",
    [(5, "is its first call, so operations on device tensors before it"), (6, "between the steps")],
)
def test_operations_on_device_tensors_outside_the_step_are_said(device, run, bad, cause):
    """Before the first step nothing else can be the cause; later they are one of the causes that are named."""

    @torch_xla.compile(full_graph=True, name="step")
    def step(x):
        return x * 3

    x = torch.ones(2, bad).to(device)  # of its own shape, or its step is compiled already
    with pytest.raises(RecompileError, match=f"step {bad} compiled graph 2 .*{cause}"):
        for number in range(5, 9):
            batch = (x + bad) * 0.5 if number == bad else x
            with run.one_graph("test", number, batch):
                step(batch)


def test_a_number_in_a_tuple_is_named_and_counters_are_left_out(device, run):
    x = torch.ones(9).to(device)

    @torch_xla.compile(full_graph=True, name="step")
    def step(x, name, scale):
        return x * scale

    with pytest.raises(RecompileError, match=r"changed now, and not before: options\[1\] 0.0 -> 1.0$"):
        for number in range(5, 9):
            options = ("a name", float(number == 8))  # 0 and 1 are baked into the graph
            with run.one_graph("test", number, x):
                y = step(x, *options)
            del y


def test_a_learning_rate_that_is_a_python_number_is_named(device):
    weight = torch.nn.Parameter(torch.ones(4).to(device))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.ones(4).to(device)
    torch_xla.sync()  # a graph of its own, before the run: no step's

    @torch_xla.compile(full_graph=True, name="step")
    def step():
        with torch.no_grad():
            for group in optimizer.param_groups:
                weight.add_(weight.grad * group["lr"])

    with (
        pytest.raises(RecompileError, match=r"optimizer.param_groups\[0\]\['lr'\] 0.0 -> 0.1"),
        Run(MnistConfig()) as run,
    ):
        for number, optimizer.param_groups[0]["lr"] in enumerate((0.0, 0.1)):
            with run.one_graph("test", number, weight):
                step()


class Scaled(torch.nn.Module):
    """Scalars of every kind, all 0 or 1, and a buffer with a dimension."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("scale", torch.full((size,), 2.0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("share", torch.tensor(1.0), persistent=False)
        self.temperature = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        self.count.add_(1)
        self.share.mul_(0.5)
        return x * self.scale * self.temperature + self.count * self.share


def steps_with(model, kept=True) -> torch.nn.Module:
    """Four steps of a model on the device, as a script calls them. kept: what run.restore() does for its modules."""
    if kept:
        make_scalars_data(model)
    x = torch.ones(len(model.scale)).to(torch_xla.device())

    @torch_xla.compile(full_graph=True, name="step")
    def step(model, x):
        with torch.no_grad():
            model.temperature.copy_(model(x).sum() * 0.5)

    with Run(MnistConfig()) as run:
        for number in range(1, 5):
            with run.one_graph("test", number, x):
                step(model, x)
    return model


def test_scalars_of_a_module_are_data_of_one_program(device):
    """Integers and floats, 0 and 1, buffers that are saved and those that are not, parameters."""
    model = steps_with(Scaled(21).to(device))
    assert (model.count.item(), model.share.item()) == (4, 0.5**4)


def test_scalars_of_a_module_that_the_run_does_not_know_are_named(device):
    with pytest.raises(RecompileError, match=r"; model.count, model.share, model.temperature is a scalar, .*restore"):
        steps_with(Scaled(22).to(device), kept=False)


def test_a_buffer_computed_on_the_device_is_named(device):
    model = Scaled(23).to(device)
    model.scale = model.scale * 0.5
    with pytest.raises(
        RecompileError, match=r"step 1 .* before it became .*; model.scale \(aten::mul\) was still to be"
    ):
        steps_with(model)


def test_what_the_message_on_a_computed_buffer_advises_works(device):
    on_host, settled = Scaled(24), Scaled(25).to(device)
    on_host.scale = on_host.scale * 0.5
    settled.scale = settled.scale * 0.5
    torch_xla.sync()
    for model in (on_host.to(device), settled):
        steps_with(model)


class Late(Scaled):
    def forward(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", x.detach() * 0)
        self.seen.add_(x)
        return super().forward(x)


def test_a_buffer_that_a_step_creates_is_named_and_what_the_message_advises_works(device):
    with pytest.raises(RecompileError, match=r"step 2 .*: buffer model.seen \(float32\[26\]\) was created in a step"):
        steps_with(Late(26).to(device))
    model = Late(27)
    model.register_buffer("seen", torch.zeros(27))
    steps_with(model.to(device))


class Growing(Scaled):
    def forward(self, x):
        self.scale = torch.cat([self.scale, x])
        return super().forward(self.scale)


def test_a_buffer_that_grows_is_named(device):
    with pytest.raises(
        RecompileError, match=r": model.scale was float32\[28\], is float32\[56\] in the step after: give"
    ):
        steps_with(Growing(28).to(device))
