"""Optimizers and schedules, held to PyTorch's."""

import numpy as np
import pytest
import torch

from config import MnistConfig
from optim import check_length, learning_rates, make_optimizer
from tpu_utils.errors import InputError


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
    "scheduler, before, now, done, refused",
    [
        *((scheduler, 100, now, 60, None) for scheduler in ("constant", "step") for now in (60, 99, 101, 10**5)),
        *((scheduler, 100, 100, 60, None) for scheduler in ("linear", "cosine", "wsd")),
        *((scheduler, 100, 200, 10, None) for scheduler in ("linear", "cosine", "wsd")),  # warm-up alone is done
        (
            "linear",
            100,
            200,
            60,
            r"with scheduler linear the learning rates from step 12 on .* repeat the old --num_epochs",
        ),
        ("cosine", 100, 200, 60, r"has done 60, and with scheduler cosine the learning rates from step 12 on"),
        ("wsd", 100, 200, 81, None),  # the decay over 20 steps begins at 1: step 81 has the whole rate
        ("wsd", 100, 200, 82, r"rates from step 82 on .* a checkpoint of step 81 or before could go on"),
        ("wsd", 200, 100, 82, r"rates from step 82 on"),
        ("constant", 100, 59, 60, r"has done 60 steps and is now to have 59; expected 60 or more; .* --num_epochs"),
    ],
)
def test_a_length_may_change_while_the_rates_of_the_steps_done_do_not(scheduler, before, now, done, refused):
    config = MnistConfig(scheduler=scheduler, warmup_steps=10, decay_every=30)
    same = now >= done and (learning_rates(config, before)[:done] == learning_rates(config, now)[:done]).all()
    assert same == (refused is None), "what it is about"
    if refused is None:
        check_length(config, now, before, done)
        return
    with pytest.raises(InputError, match=refused):
        check_length(config, now, before, done)


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
