"""A second graph stops the run and says why; counts of what the device did."""

import pytest
import torch
import torch_xla

from config import MnistConfig
from tpu_utils.checkpoint.state import Tracked
from tpu_utils.errors import RecompileError
from tpu_utils.graphs import one_graph
from tpu_utils.run import Run


@pytest.fixture(scope="module")
def device():
    return torch_xla.device()


def calls(step, arguments) -> None:
    """Of a step in a run of its own, one for each tuple of arguments."""
    with Run(MnistConfig(), step):
        for each in arguments:
            step(*each)


def test_a_second_graph_stops_the_run_and_says_which_argument_changed(device):
    @one_graph
    def step(x):
        return (x * 3).sum()

    with pytest.raises(
        RecompileError, match=r"^step 3 compiled graph 2 of step, .*: x was float32\[8\], is float32\[5\]"
    ):
        calls(step, [(torch.ones(size).to(device),) for size in (8, 8, 5)])


def test_a_step_that_may_have_a_graph_for_each_shape_has_one_for_each(device):
    @one_graph(each_shape=True)
    def step(x, scale):
        return (x * 5 * scale).sum()

    sizes = [torch.ones(size, 7).to(device) for size in (8, 6, 8, 6)]
    with Run(MnistConfig(), step) as run:
        for x in sizes:
            step(x, 2.0)
        assert run._watch.graphs(training=True) == 2
        with pytest.raises(RecompileError, match=r"step 5 compiled graph 2 of step, .*: scale 2.0 -> 1.0$"):
            step(sizes[0], 1.0)


def test_a_step_that_is_no_step_of_the_run_is_refused(device):
    @one_graph
    def step(x):
        return x

    with Run(MnistConfig()), pytest.raises(RuntimeError, match=r"step is no step of a run; expected Run\(config, step"):
        step(torch.ones(1).to(device))


def test_a_number_that_changes_between_steps_is_a_second_graph_and_is_named(device):
    @one_graph
    def step(x, scale, unchanged):
        return x * scale

    x = torch.ones(8).to(device)
    with pytest.raises(RecompileError) as caught:
        calls(step, [(x, float(number), 5) for number in range(3)])  # 0 and 1 are baked into the graph
    said = str(caught.value)
    assert said.startswith(
        "step 2 compiled graph 2 of step, expected 1: no argument changed its shape or dtype, so look"
    )
    assert said.endswith("among the arguments that changed now, and not before: scale 0.0 -> 1.0")


@pytest.mark.parametrize(
    "bad, cause",
    [(1, "is its first call, so operations on device tensors before it"), (2, "between the steps")],
)
def test_operations_on_device_tensors_outside_the_step_are_said(device, bad, cause):
    """Before the first step nothing else can be the cause; later they are one of the causes that are named."""

    @one_graph
    def step(x):
        return x * 3

    x = torch.ones(2, bad + 4).to(device)  # of its own shape, or its step is compiled already
    with pytest.raises(RecompileError, match=f"step {bad} compiled graph 2 .*{cause}"):
        calls(step, (((x + bad) * 0.5 if number == bad else x,) for number in range(1, 4)))


def test_a_number_in_a_tuple_is_named_and_counters_are_left_out(device):
    @one_graph
    def step(x, options, number):
        return x * options[1]

    x = torch.ones(9).to(device)
    with pytest.raises(RecompileError, match=r"changed now, and not before: options\[1\] 0.0 -> 1.0$"):
        calls(step, [(x, ("a name", float(number == 8)), number) for number in range(5, 9)])


def test_a_learning_rate_that_is_a_python_number_is_named(device):
    weight = torch.nn.Parameter(torch.ones(4).to(device))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.ones(4).to(device)
    torch_xla.sync()  # a graph of its own, before the run: no step's

    @one_graph
    def step(optimizer):
        with torch.no_grad():
            for group in optimizer.param_groups:
                weight.add_(weight.grad * group["lr"])

    with (
        pytest.raises(RecompileError, match=r"optimizer.param_groups\[0\]\['lr'\] 0.0 -> 0.1"),
        Run(MnistConfig(), step),
    ):
        for optimizer.param_groups[0]["lr"] in (0.0, 0.1):
            step(optimizer)


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


def steps_with(model, tracked=True) -> torch.nn.Module:
    """Four steps of a model on the device, as a script calls them. tracked: what run.track() does for its modules."""
    if tracked:
        Tracked({"model": model}).make_scalars_data()
    x = torch.ones(len(model.scale)).to(torch_xla.device())

    @one_graph
    def step(model, x):
        with torch.no_grad():
            model.temperature.copy_(model(x).sum() * 0.5)

    calls(step, [(model, x)] * 4)
    return model


def test_scalars_of_a_module_are_data_of_one_program(device):
    """Integers and floats, 0 and 1, buffers that are saved and those that are not, parameters."""
    model = steps_with(Scaled(21).to(device))
    assert (model.count.item(), model.share.item()) == (4, 0.5**4)


def test_scalars_of_a_module_that_the_run_does_not_know_are_named(device):
    with pytest.raises(RecompileError, match=r"; model.count, model.share, model.temperature is a scalar, .*track"):
        steps_with(Scaled(22).to(device), tracked=False)


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
        assert steps_with(model) is model, "it raises RecompileError for a second graph"


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
