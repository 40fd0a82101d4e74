"""What a step changes and no checkpoint holds is named; what is saved, derived or handed over anew is let through."""

import contextlib
import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from config import MnistConfig
from tpu_utils.base.errors import InputError
from tpu_utils.checkpoint.state import Tracked
from tpu_utils.step.graphs import OneGraph
from tpu_utils.step.optim import make_optimizer
from tpu_utils.trial.unsaved import Unsaved, check_pure


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Queue(nn.Linear):
    """A memory bank: persistent or not, or a plain attribute that is written to or replaced."""

    def __init__(self, kind: str):
        super().__init__(2, 2)
        self.kind, bank = kind, torch.zeros(4, 2)
        if kind in ("buffer", "lost buffer"):
            self.register_buffer("bank", bank, persistent=kind == "buffer")
        else:
            self.bank = bank

    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            if self.kind == "replaced":
                self.bank = torch.cat([y.detach()[:1], self.bank[:-1]])
            elif self.kind == "derived":
                self.bank = self.weight * 2
            else:
                self.bank.add_(1)
        if self.kind == "derived":
            self.bank = self.weight * 2  # as weight_norm of torch before parametrizations: with a grad_fn
        return y


class Buffer:
    """An object of the user's own."""

    def __init__(self, draws=None):
        self.values, self.draws = [torch.zeros(2)], draws

    def add(self, x):
        self.values.append(x.detach().mean(0))
        if self.draws:
            self.draws.random()


class Saved(Buffer):
    def state_dict(self):
        return {"mean": torch.stack(self.values).mean(0)}


class Lookahead(torch.optim.SGD):
    """Slow weights, and how often there was a step, beside the state."""

    def __init__(self, counts: bool):
        super().__init__([torch.zeros(2)])
        self.slow, self.count, self.counts = [torch.zeros(2)], 0, counts

    def add(self, x):
        self.slow[0].add_(1)
        self.count += self.counts


def updates(name):
    """A step that moves an average, or writes to a tensor, beside the model."""

    def step(model, x, **others):
        model(x).square().mean().backward()
        other = others[name]
        with torch.no_grad():
            if isinstance(other, nn.Module):
                for old, new in zip(other.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
            elif isinstance(other, torch.Tensor):
                other.add_(1)
            elif isinstance(other, dict):
                other["count"] += 1
            elif isinstance(other, np.ndarray):
                other += 1
            else:
                other.add(x)

    return step


def trains(model, x, **_):
    model(x).square().mean().backward()


STARTED, OWN, DRAWN = Buffer(), np.random.default_rng(0), np.random.default_rng(0)


def uses_global(model, x):
    trains(model, x)
    STARTED.add(x)


linear = nn.Linear(2, 2)
# name: (model, what else the step is given, the step, what is tracked beside the model, what is said)
CASES = {
    "nothing else": (nn.Linear(2, 2), {}, trains, (), None),
    "an average": (linear, {"ema": copy.deepcopy(linear)}, updates("ema"), (), r"ema\.(weight|bias) \(float32"),
    "an average, saved": (linear, {"ema": copy.deepcopy(linear)}, updates("ema"), ("ema",), None),
    "a tensor": (linear, {"center": torch.zeros(2)}, updates("center"), (), r"center \(float32\[2\]\).*center=center"),
    "a tensor, saved": (linear, {"center": torch.zeros(2)}, updates("center"), ("center",), None),
    "a frozen teacher": (linear, {"teacher": copy.deepcopy(linear)}, trains, (), None),
    "a counter": (Counting(2, 2), {}, trains, (), r"model\.calls \(1 -> 2\).*register_buffer\('calls', torch.zeros\(1"),
    "a counter in a dict": (linear, {"state": {"count": 1.0}}, updates("state"), (), r"state\['count'\] \(2.0 -> 3.0"),
    "an array": (linear, {"mean": np.zeros(3)}, updates("mean"), (), r"mean \(an array\)"),
    "a buffer": (Queue("buffer"), {}, trains, (), None),
    "a buffer that is not saved": (Queue("lost buffer"), {}, trains, (), r"model\.bank \(float32\[4, 2\]\)"),
    "an attribute written to": (Queue("attribute"), {}, trains, (), r"model\.bank"),
    "an attribute replaced": (Queue("replaced"), {}, trains, (), r"model\.bank"),
    "computed from the weights": (Queue("derived"), {}, trains, (), None),
    "a list that grows": (linear, {"bank": Buffer()}, updates("bank"), (), r"bank\.values\[\d\]"),
    "an object with a state_dict": (linear, {"bank": Saved()}, updates("bank"), ("bank",), None),
    "a generator": (linear, {"bank": Buffer(DRAWN)}, updates("bank"), (), r"bank\.draws \(a Generator"),
    "a generator of Python's": (linear, {"bank": Buffer(random.Random(0))}, updates("bank"), (), r"draws \(a Random\)"),
    "an optimizer's own tensor": (linear, {"best": Lookahead(False)}, updates("best"), ("best",), r"best\.slow\[0\]"),
    "an optimizer's count": (linear, {"best": Lookahead(True)}, updates("best"), ("best",), r"best\.count \(1 -> 2"),
    "a global": (linear, {}, uses_global, (), r"STARTED\.values"),
}


@pytest.mark.parametrize("name", CASES)
def test_state_that_no_checkpoint_holds_is_named(name):
    model, others, function, saved, said = CASES[name]
    optimizer = make_optimizer(MnistConfig(), model.parameters())
    tracked = Tracked({"model": model, "optimizer": optimizer} | {name: others[name] for name in saved})
    unsaved, step = Unsaved(tracked), OneGraph(function)
    step.__name__ = "train_step"

    def steps():
        for _ in range(2):
            batch = torch.randn(3, 2)  # another tensor in each step
            named = step.named((model, batch), {}) | others
            unsaved.before(step, named)
            result = function(model, batch, **others)
            optimizer.step()
            optimizer.zero_grad()
            unsaved.after(step, named, result, True, [batch])

    if said is None:
        steps()
        return unsaved.check()
    with pytest.raises(InputError, match=f"(?s)train_step works with .*{said}"):
        steps()


def test_what_a_step_returns_and_gets_again_is_named():
    unsaved, step = Unsaved(Tracked({})), SimpleNamespace(__wrapped__=trains, __name__="train_step")
    carried = torch.zeros(2)
    unsaved.after(step, {"state": torch.zeros(2)}, (None, {"next": carried}), True, [])
    with pytest.raises(InputError, match=r"gets state from its last call.*state\.copy_.*run\.track\(state=state"):
        unsaved.before(step, {"state": carried})


def test_an_average_that_the_loop_moves_is_found_where_it_is_evaluated():
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    unsaved = Unsaved(Tracked({"model": model}))
    train, evaluate = (SimpleNamespace(__wrapped__=trains, __name__=n) for n in ("train_step", "eval_step"))
    unsaved.after(train, {"model": model}, None, True, [])
    unsaved.after(evaluate, {"model": average}, None, False, [])
    unsaved.check()
    with torch.no_grad():
        average.weight.lerp_(model.weight, 0.5)
    with pytest.raises(InputError, match=r"eval_step works with model\.weight"):
        unsaved.check()


def test_what_a_forward_pass_keeps_aside_is_no_state():
    """The loss that balances experts: each step computes it from parameters, an evaluation without gradients."""
    model = Queue("derived")
    unsaved, step = Unsaved(Tracked({"model": model})), SimpleNamespace(__wrapped__=trains, __name__="train_step")
    for _ in range(2):
        unsaved.before(step, {"model": model})
        trains(model, torch.randn(3, 2))
        unsaved.after(step, {"model": model}, None, True, [])
    model.bank = torch.zeros(4, 2)
    unsaved.check()


def test_a_number_that_the_loop_computes_is_no_state():
    unsaved, step = Unsaved(Tracked({})), SimpleNamespace(__wrapped__=trains, __name__="train_step")
    weights = {"beta": 0.0}
    for beta in (0.1, 0.2):  # computed from the step, so a resumed run computes it too
        weights["beta"] = beta
        unsaved.before(step, {"beta": beta, "weights": weights})
        unsaved.after(step, {"beta": beta, "weights": weights}, None, True, [])
    unsaved.check()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("is_used", [True, False])
def test_a_rate_that_the_loop_sets_and_the_step_overwrites_is_named(is_used, in_place):
    optimizer = make_optimizer(MnistConfig(), nn.Linear(2, 2).parameters())
    (group,) = optimizer.param_groups
    unsaved, step = Unsaved(Tracked({})), SimpleNamespace(__wrapped__=trains, __name__="train_step")
    refused = pytest.raises(InputError, match=r'optimizer\.param_groups\[0\]\["lr"\], which the loop has set, has no')
    with contextlib.nullcontext() if is_used else refused:
        for number in range(4):
            unsaved.before(step, {"optimizer": optimizer})
            if not is_used or number == 0:
                group["lr"] = torch.ones(1)  # by the step
            unsaved.after(step, {"optimizer": optimizer}, None, True, [])
            if number == 2:
                group["lr"] = group["lr"].mul_(0.1) if in_place else torch.zeros(1)  # by the loop


@pytest.mark.parametrize(
    "read, said",
    [
        (lambda index: np.random.default_rng([0, index]).random(3), None),
        (lambda index: (np.arange(3), np.random.rand(2)), "differs in array 1"),
        (lambda index: (torch.rand(2),), "differs in array 0"),
        (lambda index: OWN.random(3), "np.random.default_rng"),
        (lambda index: [np.array([random.random()])], "a resumed run would train on other data"),
        (lambda index: np.array([np.nan, 1.0]), None),
    ],
)
def test_a_batch_is_a_function_of_its_index(read, said):
    before = np.random.get_state()[1].tolist()
    if said is None:
        check_pure(SimpleNamespace(batch=read), 3)
    else:
        with pytest.raises(InputError, match=said):
            check_pure(SimpleNamespace(batch=read), 3)
    assert np.random.get_state()[1].tolist() == before
