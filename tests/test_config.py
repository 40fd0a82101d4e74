"""Presets, the command line, optimizers and schedules."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, run

from config import (
    FREE_ON_RESUME,
    LEVELS,
    PRESETS,
    InputError,
    MnistConfig,
    learning_rates,
    make_optimizer,
    num_steps_of,
    parse_command_line,
    parse_profile_steps,
    resolve,
)


def parse(*argv: str) -> MnistConfig:
    return parse_command_line(MnistConfig, "test", list(argv))


def test_every_preset_is_valid_and_no_preset_sets_a_field_of_a_level():
    owned = {field for fields in LEVELS.values() for field in fields}
    for config_class, presets in PRESETS.items():
        assert set(presets) >= {"quick_test", "development", "production", "distributed"}
        for name, values in presets.items():
            config, sources = resolve(config_class, name)
            assert not owned & set(values)
            assert all(getattr(config, field) == value for field, value in values.items())
            assert all(sources[field] == f"preset {name}" for field in values)


def test_later_sources_win():
    assert parse().learning_rate == PRESETS[MnistConfig]["quick_test"]["learning_rate"]
    assert parse("--preset", "production").num_epochs == 10
    assert parse("--preset=production", "--num-epochs", "3").num_epochs == 3
    assert parse("--optimization-level", "aggressive").precision == "bfloat16"
    assert parse("--optimization_level", "aggressive", "--precision", "float32").precision == "float32"
    assert parse("--no_tensorboard").tensorboard is False


def test_every_field_can_be_set_in_both_spellings():
    for field in dataclasses.fields(MnistConfig):
        for option in (f"--{field.name}", "--" + field.name.replace("_", "-")):
            value = getattr(MnistConfig(), field.name)
            argv = [option] if isinstance(value, bool) else [option, str(value) or "x:y"]
            examples = {"profile_steps": "2:5", "dataset": "mnist", "compile_for": "v5e-8"}
            if field.name in examples:
                argv = [option, examples[field.name]]
            assert isinstance(parse(*argv), MnistConfig)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--learnin_rate", "1"], "--learning_rate"),
        (["--preset", "prodction"], "production"),
        (["--learning_rate", "fast"], "could not convert"),
        (["--num_epochs", "0"], "num_epochs is 0; expected 1 or more"),
        (["--learning_rate", "nan"], "learning_rate is nan; expected a finite number above 0"),
        (["--momentum", "1"], "momentum is 1.0; expected 0 <= momentum < 1"),
        (["--profile_steps", "13:10"], "FIRST:LAST"),
        (["--resume", "must"], "--run_dir"),
        (["--preset"], "Missing value"),
    ],
)
def test_mistakes_are_answered_with_exit_code_2(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    words = re.sub(r"[\s│|]+", " ", capsys.readouterr().err)
    assert said in words


def test_all_problems_are_named_at_once():
    with pytest.raises(InputError, match=r"(?s)log_every is 0.*seed is -1.*weight_decay is inf"):
        MnistConfig(seed=-1, log_every=0, weight_decay=float("inf"))


def test_profile_steps():
    assert parse_profile_steps("10:13") == (10, 13)
    assert parse_profile_steps("") == (-1, -1)
    for wrong in ("10", "10:", "a:b", "5:5", "-1:3"):
        with pytest.raises(InputError):
            parse_profile_steps(wrong)


def test_steps_of_a_run():
    assert num_steps_of(MnistConfig(global_batch_size=64, num_epochs=3), 200) == (3, 9)
    with pytest.raises(InputError, match=r"global_batch_size is 64 .* choose at most 63"):
        num_steps_of(MnistConfig(global_batch_size=64), 63)
    with pytest.raises(InputError, match="warmup_steps is 9 but the run has 9 steps"):
        num_steps_of(MnistConfig(global_batch_size=64, num_epochs=3, warmup_steps=9), 200)


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


def test_config_py_prints_every_preset_and_where_each_value_came_from():
    table, as_json = run("config.py"), run("config.py", "--json")
    assert table.returncode == as_json.returncode == 0, table.stderr + as_json.stderr
    assert "MnistConfig --preset production: valid" in table.stdout
    value = json.loads(as_json.stdout)["MnistConfig"]["production"]
    assert value["num_epochs"] == {"value": 10, "source": "preset production"}
    assert value["precision"] == {"value": "float32", "source": "level balanced"}
    assert value["momentum"]["source"] == "default"
    assert run("config.py", "--jsn").returncode == 2


def test_fields_that_are_free_on_resume_exist():
    names = {field.name for config_class in PRESETS for field in dataclasses.fields(config_class)}
    assert names >= FREE_ON_RESUME


def test_requirements_pin_what_must_match():
    lines = (ROOT / "requirements.txt").read_text()
    assert re.search(r"^torch==2\.9\.0$", lines, re.M) and re.search(r"^torch_xla\[tpu,pallas\]==2\.9\.0", lines, re.M)
