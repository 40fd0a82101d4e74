"""Optimizers and schedules, held to PyTorch's."""

import numpy as np
import pytest
import torch

from config import MnistConfig
from optim import learning_rates, make_optimizer


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine", "step"])
@pytest.mark.parametrize("warmup_steps", [0, 10])
def test_schedules(scheduler, warmup_steps):
    config = MnistConfig(scheduler=scheduler, warmup_steps=warmup_steps, learning_rate=0.5, decay_every=30)
    rates = learning_rates(config, 100).numpy()
    assert rates.shape == (100,) and rates.dtype == np.float32
    assert (rates > 0).all() and np.isclose(rates.max(), 0.5)
    if warmup_steps:
        np.testing.assert_allclose(rates[:10], 0.5 * np.arange(1, 11) / 10, rtol=1e-6)
    middle = warmup_steps + (100 - warmup_steps) // 2
    expected = {"constant": 0.5, "linear": 0.25, "cosine": 0.25, "step": 0.25}[scheduler]
    np.testing.assert_allclose(rates[middle], expected, rtol=1e-6)


def test_a_step_schedule_that_underflows_stays_above_zero():
    rates = learning_rates(MnistConfig(scheduler="step", decay_every=1, decay_factor=0.1), 400)
    assert (rates > 0).all()


@pytest.mark.parametrize(
    "config, reference",
    [
        (MnistConfig(optimizer="sgd", weight_decay=0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
        (MnistConfig(optimizer="sgd", momentum=0.0), lambda p: torch.optim.SGD(p, 0.1)),
        (MnistConfig(optimizer="adam", weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1)),
        (MnistConfig(optimizer="adamw", weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1)),
    ],
)
def test_optimizers_are_those_of_pytorch(config, reference):
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizers = [make_optimizer(config, ours.parameters()), reference(theirs.parameters())]
    for factor in (1.0, 0.5, 0.25):
        x = torch.randn(5, 4)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.1 * factor
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)
