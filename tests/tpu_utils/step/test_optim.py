"""Optimizers and schedules, held to PyTorch's."""

import copy
import shutil
from pathlib import Path

import averaged
import numpy as np
import pytest
import torch
from processes import run
from run_files import assert_identical, state_in, summary_in

from config import MnistConfig
from tpu_utils.base.errors import InputError
from tpu_utils.checkpoint.resume import check_length
from tpu_utils.device.dynamo import settle
from tpu_utils.step.average import update_average
from tpu_utils.step.optim import keep_rate_ratios, learning_rates, make_optimizer, step_optimizer


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
    underflow = MnistConfig(scheduler=scheduler, warmup_steps=warmup_steps, decay_every=1, decay_factor=0.1)
    assert (learning_rates(underflow, 400) > 0).all()


@pytest.mark.parametrize(
    "scheduler, before, now, done, refused",
    [
        *((scheduler, 100, now, 60, None) for scheduler in ("constant", "step") for now in (60, 99, 101, 10**5)),
        *((scheduler, 100, 100, 60, None) for scheduler in ("linear", "cosine", "wsd")),
        *((scheduler, 100, 200, 10, None) for scheduler in ("linear", "cosine", "wsd")),  # warm-up alone is done
        ("linear", 100, 200, 60, r"with scheduler linear the learning rates from step 12 on .* repeat the old"),
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


@pytest.mark.parametrize("name, momentum", [("sgd", 0.9), ("sgd", 0.0), ("adam", 0.9), ("adamw", 0.9)])
def test_optimizers_and_their_groups_are_those_of_pytorch_under_a_scheduler(name, momentum):
    torch.manual_seed(0)
    config = MnistConfig(optimizer=name, momentum=momentum, learning_rate=0.1, weight_decay=0.1, scheduler="cosine")
    kind = dict(sgd=torch.optim.SGD, adam=torch.optim.Adam, adamw=torch.optim.AdamW)[name]
    options = dict(lr=0.1, weight_decay=0.1) | ({"momentum": momentum} if name == "sgd" else {})
    ours = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    theirs = copy.deepcopy(ours)

    def groups(model):
        own = {"betas": (0.5, 0.9)} if name != "sgd" else {"momentum": 0.5}
        return [
            {"params": model[0].parameters(), "lr": 1e-3},
            {"params": model[1].parameters(), "weight_decay": 0.0, **own},
            {"params": model[2].parameters(), "lr": 0.0},
        ]

    optimizer, reference = make_optimizer(config, groups(ours)), kind(groups(theirs), **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(reference, 6)
    for rate in learning_rates(config, 6):
        x = torch.randn(5, 4)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().sum().backward()
        step_optimizer(optimizer, rate[None], torch.tensor(True), "skip")
        reference.step()
        scheduler.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "groups, change, said",
    [
        ({"nesterov": True}, None, "group 0 has nesterov True, which SGD does not know; expected some of lr, momentum"),
        ({"lr": -1.0}, None, "group 0 has lr -1"),
        ({"lr": float("nan")}, None, "group 0 has lr nan"),
        ({}, lambda o: torch.optim.lr_scheduler.StepLR(o, 1), "a scheduler of torch.optim.lr_scheduler has this"),
    ],
)
def test_what_a_group_cannot_keep_is_refused_by_name(groups, change, said):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(InputError, match=said):
        optimizer = make_optimizer(MnistConfig(optimizer="sgd"), [{"params": model.parameters(), **groups}])
        if change:
            change(optimizer)
        step_optimizer(optimizer, torch.tensor([0.1]), torch.tensor(True), "skip")


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_scalar_parameter_is_trained_with_a_rate_on_the_device(name):
    """The rate is (1,) there, and so is the count of steps."""
    scalar = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = make_optimizer(MnistConfig(optimizer=name, weight_decay=0.1), [scalar])
    optimizer.param_groups[0]["lr"] = torch.tensor([0.5])
    scalar.grad = torch.tensor(1.0)
    optimizer.step()
    # gradient and decay of SGD; AdamW's first step is the rate, and its decay
    assert scalar.item() == pytest.approx({"sgd": 1 - 0.5 * 1.1, "adamw": 1 - 0.5 - 0.05}[name], rel=1e-6)


@pytest.fixture(scope="module")
def averaged_run(tmp_path_factory):
    """(run directory, the model's state after each step)"""
    folder, seen = tmp_path_factory.mktemp("averaged") / "run", []
    assert averaged.train(folder, "never", seen) == 0
    return folder, seen


def average_in(run_dir) -> dict[str, torch.Tensor]:
    state = state_in(run_dir / "checkpoints" / "step_00000016")
    return {path.removeprefix("average/"): value for path, value in state.items() if path.startswith("average/")}


def test_the_average_of_weights_is_what_numpy_computes_and_costs_no_upload(averaged_run):
    folder, seen = averaged_run
    summary = summary_in(folder)
    assert (summary["train_graphs"], summary["host_to_device_uploads_per_step"]) == (1, 0)
    expected = {name: value.numpy() for name, value in averaged.build().state_dict().items()}
    for t, state in enumerate(seen):
        decay = min(averaged.DECAY, (1 + t) / (10 + t))
        for name, value in state.items():
            mean = decay * expected[name].astype(np.float64) + (1 - decay) * value.numpy().astype(np.float64)
            expected[name] = mean if value.is_floating_point() else value.numpy()
    found = average_in(folder)
    assert found.keys() == expected.keys() and found["1.num_batches_tracked"].item() == averaged.STEPS
    for name, value in found.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=2e-6, atol=1e-7, err_msg=name)


def test_a_run_with_an_average_resumes_bit_identical_on_one_device_and_on_a_mesh(averaged_run, tmp_path):
    """And has the same average on both."""
    one, four = averaged_run[0], tmp_path / "four"
    last = Path("checkpoints", "step_00000016")

    def train_on_four(run_dir, resume) -> int:
        done = run("tests/averaged.py", 4, run_dir, resume)
        assert done.returncode == 0, done.stderr
        summary = summary_in(run_dir)
        assert (summary["train_graphs"], summary["host_to_device_uploads_per_step"]) == (1, 0)
        return done.returncode

    train_on_four(four, "never")
    for whole, train in ((one, averaged.train), (four, train_on_four)):
        resumed = tmp_path / f"{whole.name}_resumed"
        shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns(last.name))
        assert train(resumed, "must") == 0
        assert_identical(state_in(whole / last), state_in(resumed / last))
    average = average_in(four)
    for name, value in average_in(one).items():
        np.testing.assert_allclose(average[name].numpy(), value.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_an_average_that_is_no_copy_is_refused():
    model, step = torch.nn.Linear(4, 3), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="shares a tensor with model"):
        update_average(model, model, 0.9, step)
    with pytest.raises(ValueError, match="has other parameters or buffers than model"):
        update_average(torch.nn.Linear(4, 2), model, 0.9, step)


def test_before_step_1_groups_have_what_a_step_leaves_there():
    """A tensor for each rate of its own, one for all others: else torch.compile's second step is another graph."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], **own} for own in ({}, {"lr": 1e-4}, {"lr": 1e-4}, {})]
    optimizer = make_optimizer(MnistConfig(learning_rate=1e-2), groups)
    settle(optimizer, keep_rate_ratios)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates[0] is rates[3] and len({id(rate) for rate in rates}) == 3
    assert torch.cat(rates).tolist() == pytest.approx([1e-2, 1e-4, 1e-4, 1e-2])
