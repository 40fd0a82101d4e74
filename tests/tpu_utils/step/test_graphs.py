"""A second graph stops the run and says why, and so it does for a function without a run."""

import contextlib

import pytest
import torch
import torch_xla
from processes import ROOT, run

from config import MnistConfig
from tpu_utils.base.errors import InputError, RecompileError
from tpu_utils.checkpoint.state import Tracked
from tpu_utils.run import Run
from tpu_utils.step.graphs import one_graph


@pytest.fixture(scope="module")
def device():
    return torch_xla.device()


def calls(step, arguments) -> None:
    """Call a step in a run of its own, once for each tuple of arguments."""
    with Run(MnistConfig(), step):
        for each in arguments:
            step(*each)


# what changes: (the step, its arguments in each call, what is said)
CHANGES = {
    "a shape": (
        lambda x: (x * 3).sum(),
        [(torch.ones(size),) for size in (8, 8, 5)],
        r"^step 3 compiled graph 2 of step, .*: x was float32\[8\], is float32\[5\]",
    ),
    "a number, and 0 and 1 are baked into the graph": (
        lambda x, scale, unchanged: x * scale,
        [(torch.ones(8), float(number), 5) for number in range(3)],
        r"^step 2 compiled graph 2 of step, expected 1: no argument changed its shape or dtype, so look.*"
        r"among the arguments that changed now, and not before: scale 0.0 -> 1.0$",
    ),
    "the bound of a slice, which was computed on the host": (
        lambda x, length: x[:length].sum(),
        [(torch.ones(8), torch.tensor(length)) for length in (3, 3, 4)],
        r"^step 3 compiled graph 2 .* for the scalar length \(give it the shape \(1,\)\), for a tensor in x\[:n\]",
    ),
    "a learning rate that is a Python number": (
        lambda x, optimizer: x * optimizer.param_groups[0]["lr"],
        [(torch.ones(11), torch.optim.SGD([torch.zeros(1)], lr)) for lr in (0.0, 0.1)],
        r"optimizer.param_groups\[0\]\['lr'\] 0.0 -> 0.1",
    ),
    "a number in a tuple, beside a counter": (
        lambda x, options, number: x * options[1],
        [(torch.ones(9), ("a name", float(number == 8)), number) for number in range(5, 9)],
        r"changed now, and not before: options\[1\] 0.0 -> 1.0$",
    ),
    # it was sent in each call, and shares the place of its equal from then on
    "a number that meets another number of the program": (
        lambda x, scale: x * scale + x / 0.375,
        [(torch.ones(10), scale) for scale in (0.1, 0.2, 0.3125, 0.375)],
        r"step 4 compiled graph 2 .*that change in each call, .*: scale 0.3\d* -> 0.375$",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_second_graph_stops_the_run_and_says_what_changed(device, name):
    function, arguments, said = CHANGES[name]
    function.__name__ = "step"
    sent = [[x.to(device) if isinstance(x, torch.Tensor) else x for x in each] for each in arguments]
    with pytest.raises(RecompileError, match=said):
        calls(one_graph(function), sent)


def tripling():
    """A step of its own."""

    @one_graph
    def step(x):
        return x * 3

    return step


@pytest.mark.parametrize("is_tried", [True, False])
def test_a_line_that_fails_on_the_device_alone_is_named(device, is_tried):
    """torch_xla has no gradient of slogdet. Where the step has not run on the host, the mistake may be its own."""

    @one_graph
    def step(x):
        torch.linalg.slogdet(x)[1].backward()

    step.is_tried = is_tried
    error, said = RuntimeError, "proper Tensor"
    if is_tried:
        error, said = InputError, r"step runs on the host, and fails on the device in call 1: .* at .*:\d+ \(torch.lin"
    with pytest.raises(error, match=said):
        step((3 * torch.eye(4)).to(device).requires_grad_())


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
    for size in (12, 13, 12):  # by itself, without a run
        step(torch.ones(size, 7).to(device), 2.0)


OUTSIDE = (
    "operations on device tensors before step {} of step, outside of it{}, became a graph of their own, expected none"
)


def reads_a_slice(x):
    return x[0, 0].item()


def computes_what_nobody_reads(x):
    return [x.abs()]


@pytest.mark.parametrize("extra, every", [(reads_a_slice, 3), (computes_what_nobody_reads, 1)])
def test_operations_in_the_loop_are_named_by_their_line(device, extra, every):
    """Each is a program beside the step: found when it comes again, however rarely."""
    step, kept, x = tripling(), [], torch.ones(every + 1, 6).to(device)
    line = extra.__code__.co_firstlineno + 1
    where = rf", at \S*test_graphs.py:{line} \(return .*\)"
    with Run(MnistConfig(), step), pytest.raises(RecompileError, match=OUTSIDE.format(every + 1, where)):
        for number in range(1, 10):
            step(x)
            if number % every == 0:
                kept.append(extra(x))


def test_an_operation_that_comes_once_is_said_at_the_end(device):
    step, x = tripling(), torch.ones(2, 7).to(device)
    with Run(MnistConfig(), step) as run:
        for number in range(4):
            step((x + 2) * 0.5 if number == 2 else x)
        with pytest.raises(RecompileError, match=OUTSIDE.format(3, "")):
            run._watch.graphs(training=True)


def test_what_is_read_as_it_is_makes_no_graph(device):
    step, x = tripling(), torch.ones(2, 8).to(device)
    with Run(MnistConfig(), step) as run:
        assert [step(x).cpu().sum().item() for _ in range(3)] == [48.0] * 3
        assert run._watch.graphs(training=True) == 1


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
        Tracked({"model": model}).make_inputs()
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


def computed(size: int) -> Scaled:
    """Its buffer is the result of an operation, which may still be to be done."""
    model = Scaled(size).to(torch_xla.device())
    model.scale = model.scale * 0.5
    return model


class Late(Scaled):
    def forward(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", x.detach() * 0)
        self.seen.add_(x)
        return super().forward(x)


def test_what_the_messages_on_buffers_advise_works(device):
    on_host, settled, registered = Scaled(24), computed(25), Late(27)
    on_host.scale = on_host.scale * 0.5
    torch_xla.sync()
    registered.register_buffer("seen", torch.zeros(27))
    for model in (on_host, settled, registered):  # one after the other: scalars on their way are a graph of their own
        assert steps_with(model.to(device)) is model, "it raises RecompileError for a second graph"


class Growing(Scaled):
    def forward(self, x):
        self.scale = torch.cat([self.scale, x])
        return super().forward(self.scale)


class Remembering(Scaled):
    def __init__(self, size: int):
        super().__init__(size)
        self.means = []

    def forward(self, x):
        y = super().forward(x) + sum(self.means)
        self.means = [*self.means, y.detach().mean()]
        return y


class Fading(Scaled):
    """A rate that ends at zero, and a count of calls that is no part of the program."""

    def __init__(self, size: int):
        super().__init__(size)
        self.rate, self.calls = 0.5, 0

    def forward(self, x):
        self.calls += 1
        self.rate = 0.5 if self.calls < 4 else 0.0
        return super().forward(x) if self.rate == 0 else super().forward(x) * 3


# what a module keeps or changes: (its class, a size that no other program has, what is said)
MODULES = {
    "a buffer computed on the device": (computed, 23, r"before step 1 .*; model.scale \(aten::mul\) was still to be"),
    "a buffer that a step creates": (Late, 26, r"step 2 .*: buffer model.seen \(float32\[26\]\) was created in a step"),
    "a buffer that grows": (Growing, 28, r": model.scale was float32\[28\], is float32\[56\] in the step after"),
    "a list that grows": (Remembering, 30, r"model\.means was of 0 items, is of 1 items in the step after: that is"),
    "a number that changes": (Fading, 31, r": model\.rate was 0\.5, is 0\.0 in the step after: that is"),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_keeps_or_changes_is_named(device, name):
    kind, size, said = MODULES[name]
    with pytest.raises(RecompileError, match=said):
        steps_with(kind(size).to(device))


def test_scalars_of_a_module_that_the_run_does_not_know_are_named(device):
    with pytest.raises(RecompileError, match=r"; model.count, model.share, model.temperature is a scalar, .*track"):
        steps_with(Scaled(22).to(device), tracked=False)


def test_a_layer_that_is_frozen_or_put_into_eval_mode_later_is_named(device):
    model = torch.nn.Sequential(torch.nn.Linear(29, 3), torch.nn.BatchNorm1d(3)).to(device)
    Tracked({"model": model}).make_inputs()
    x = torch.ones(4, 29).to(device)

    @one_graph
    def step(model, x):
        return model(x).square().sum()

    with Run(MnistConfig(), step):
        step(model, x)
        model[1].eval()
        model[0].weight.requires_grad_(False)
        with pytest.raises(RecompileError, match=r"model\.0\.weight was in training, is in eval mode or frozen"):
            step(model, x)


# --------------------------------------------------------------------------------- a function by itself, without a run
def test_a_function_by_itself_that_reads_what_has_its_value_is_stopped(device):
    """torch_xla computes nothing for it, so there is neither a second graph nor an error."""
    scale = torch.ones(5).to(device)

    @one_graph
    def step(x):
        return x * scale.tolist()[0]

    with pytest.raises(RecompileError, match=r"^step reads a tensor inside the compiled function in call 1; expected"):
        step(torch.ones(5).to(device))


@pytest.mark.parametrize("is_given", [True, False])
def test_what_a_function_by_itself_has_from_around_it_is_named_too(device, is_given):
    """State that a step creates, in an optimizer that is an argument or not."""
    model = torch.nn.Linear(14, 2 + is_given).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)

    def update(x, optimizer):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step = one_graph(update if is_given else lambda x: update(x, optimizer))
    given = (torch.ones(4, 14).to(device), *([optimizer] if is_given else []))
    with pytest.raises(RecompileError, match=r"call 2 .*: optimizer has 2 tensors of state and had 0 before its first"):
        for _ in range(2):
            step(*given)


@pytest.mark.parametrize("in_run", [False, True])
def test_a_function_whose_tensors_are_on_the_host_is_refused(in_run):
    @one_graph
    def step(x):
        return x

    expected = r"step gets no tensor on the device \(xla\); expected .*Run\(config, step, ...\)"
    with Run(MnistConfig()) if in_run else contextlib.nullcontext(), pytest.raises(InputError, match=expected):
        step(torch.ones(1))


SCRIPT = """import torch
import torch_xla
from torch import nn

from tpu_utils.step.graphs import one_graph

device = torch_xla.device()
model = nn.Linear(32, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

@one_graph
def train_step(x, labels):
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss

x, labels = torch.randn(100, 32), torch.randint(4, (100,))
for start in range(0, 100, 32):
    loss = train_step(x[start:start + 32].to(device), labels[start:start + 32].to(device))
    print((loss * 2).item())  # a graph of its own, and no concern of the step
"""
READING = SCRIPT.replace("    loss.backward()", "    print(loss)\n    loss.backward()")


@pytest.mark.parametrize(
    "script, printed, said",
    [
        (SCRIPT, 3, "call 4 compiled graph 2 of train_step, expected 1: x was float32[32, 32], is float32[4, 32]"),
        (READING, 0, "train_step reads a tensor inside the compiled function in call 1, at {}:14 (print(loss)); exp"),
    ],
)
def test_a_script_of_anybody_has_it_by_two_lines(tmp_path, script, printed, said):
    """The last line of the traceback says it, and torch_xla's own text does not stand before it."""
    path = tmp_path / "mine.py"
    path.write_text(script)
    done = run(path, PYTHONPATH=ROOT, PJRT_DEVICE="CPU")
    assert (done.returncode, len(done.stdout.splitlines())) == (1, printed), done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"tpu_utils.base.errors.RecompileError: {said.format(path)}")
    before, _, traceback = done.stderr.partition("Traceback")
    assert len(before.splitlines()) <= 1 and len(traceback.splitlines()) < 25
