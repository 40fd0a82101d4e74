"""What a compiler computes is compared with the function as it is written, whatever the compiler is."""

import copy
import re

import pytest
import torch
from torch import nn

from config import MnistConfig
from tpu_utils.base.errors import InputError
from tpu_utils.device.against_eager import first_call
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.step.optim import make_optimizer


def step(model, optimizer, metrics, x, lost=0, left=False, added=0.0):
    """lost: how many layers get no gradient."""
    hidden = model[:lost](x).detach() if lost else x
    loss = (model[lost:](hidden) - 1).square().mean()
    loss.backward()
    optimizer.step()
    if not left:
        optimizer.zero_grad(set_to_none=True)
    metrics.record(loss + added)
    return loss.detach()


def setting(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    if optimizer == "torch's sgd":
        made = torch.optim.SGD(model.parameters(), 0.1)
    else:
        made = make_optimizer(MnistConfig(optimizer=optimizer, learning_rate=0.01), model.parameters())
    return model, made, DeviceMetrics(["loss"], 4, torch.device("cpu")), torch.randn(6, 4)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "torch's sgd"])
@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(), None),
        (dict(lost=1), r"of model.0.weight by 0, expected \d.* \(norms\), and \d more tensors are off; use another"),
        (dict(left=True), r"gradients left behind of model.\d.\w+ by \d.*, expected 0 .*; use zero_grad"),
        (dict(added=1.0), r"changes metrics.values by \d.*, expected \d.* \(norms\), and 0 more"),
    ],
)
def test_the_first_call_is_that_of_pytorch_or_refused(optimizer, wrong, said):
    """Dropout draws the same in both."""
    given = setting(optimizer)

    def compiled(*arguments):
        return step(*arguments, **wrong)

    if said:
        with pytest.raises(InputError, match=f"torch.compile of torch .* computes something else of step .*{said}"):
            first_call(step, compiled, given, {})
        return
    alone = copy.deepcopy(given)
    generator = torch.get_rng_state()
    expected = step(*alone)
    torch.set_rng_state(generator)
    assert torch.equal(first_call(step, compiled, given, {}), expected)
    assert all(map(torch.equal, given[0].state_dict().values(), alone[0].state_dict().values()))


def test_averages_of_batch_norm_and_a_result_are_compared():
    def biased(model, x):
        result = model(x)
        model.running_var.mul_(0.5)
        return result

    x = torch.randn(8, 4)
    with pytest.raises(InputError, match=re.escape("changes running_var of model.running_var by")):
        first_call(lambda model, x: model(x), biased, (nn.BatchNorm1d(4), x), {})
    with pytest.raises(InputError, match=r"changes result.loss by 2.82.*, expected 0 "):
        first_call(lambda x: {"loss": x * 0}, lambda x: {"loss": x * 0 + 0.5}, (x,), {})


def test_noise_is_no_difference():
    """The gradient of a bias before BatchNorm is a rounding error, which differs between compilers."""

    def step(model, scale=1e-9):
        with torch.no_grad():
            model.weight.add_(1.0)
            model.bias.add_(scale)

    model = nn.Linear(4, 1)
    nn.init.zeros_(model.bias)
    first_call(step, lambda model: step(model, -2e-9), (model,), {})


def deep_step(model, optimizer, x, exact=False, lost=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
        hidden = model[0](x)
        loss = (model[1:](hidden.detach() if lost else hidden).float() - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def test_rounding_to_16_bits_is_let_through_and_a_lost_gradient_is_not():
    """Through 16 layers of BatchNorm the gradients in bfloat16 are far from those in float32, which is right too."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(16)]
    model, x = nn.Sequential(*layers), torch.randn(32, 16)
    moved = make_optimizer(MnistConfig(optimizer="sgd", learning_rate=1e-3), model.parameters())
    first_call(deep_step, lambda *given: deep_step(*given, exact=True), (*copy.deepcopy((model, moved)), x), {})
    with pytest.raises(InputError, match=r"of model.0.0.\w+ by 0, expected \d"):
        first_call(deep_step, lambda *given: deep_step(*given, lost=True), (*copy.deepcopy((model, moved)), x), {})


def test_a_model_from_elsewhere_is_not_trained_twice(capsys):
    model, calls = nn.Linear(2, 2), []

    def step(x):
        calls.append(x)
        return model(x)

    first_call(step, step, (torch.ones(1, 2),), {})
    assert len(calls) == 1 and "step is not compared with eager PyTorch: model is no" in capsys.readouterr().out
