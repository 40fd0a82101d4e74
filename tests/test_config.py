"""Presets, bounds, the command line."""

import dataclasses
import json
import re
from typing import Annotated

import numpy as np
import pytest
from processes import ROOT, run

from config import (
    LEVELS,
    PRESETS,
    DistributedMnistConfig,
    MnistConfig,
    Range,
    TransformerConfig,
    free_on_resume,
    marks,
    parse_command_line,
    parse_profile_steps,
    presets_of,
    resolve,
)
from tpu_utils.errors import InputError


def parse(*argv: str) -> MnistConfig:
    return parse_command_line(MnistConfig, "test", list(argv))


def test_every_preset_is_valid_and_no_preset_sets_a_field_of_a_level():
    owned = {field for fields in LEVELS.values() for field in fields}
    for config_class in (MnistConfig, DistributedMnistConfig, TransformerConfig):
        presets = presets_of(config_class)
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
        (["--preset"], "Missing value"),
    ],
)
def test_mistakes_are_answered_with_exit_code_2(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    words = re.sub(r"[\s│|]+", " ", capsys.readouterr().err)
    assert said in words


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--num_epochs", "0"], "num_epochs is 0; expected 1 or more"),
        (["--learning_rate", "nan"], "learning_rate is nan; expected a finite number above 0"),
        (["--momentum", "1"], "momentum is 1.0; expected 0 <= momentum < 1"),
        (["--log_every", "1000001"], "log_every is 1000001; expected 1 <= log_every <= 1000000"),
        (["--profile_steps", "13:10"], "FIRST:LAST"),
        (["--resume", "must"], "name the folder of the run to resume with --run_dir"),
        (["--compile_for", "v5litepod-9"], "compile_for: .* nearest is v5litepod-8"),
    ],
)
def test_values_that_cannot_work_are_refused(argv, said):
    with pytest.raises(InputError, match=said):
        parse(*argv)


@dataclasses.dataclass(frozen=True)
class OwnConfig(MnistConfig):
    dropout: Annotated[float, Range("[0, 1)")] = 0.1
    """Share of the hidden values set to 0."""


def test_a_configuration_of_ones_own_needs_no_registration(capsys):
    config = parse_command_line(OwnConfig, "", ["--preset", "development", "--dropout", "0.5"])
    assert (config.dropout, config.dataset) == (0.5, "mnist")
    with pytest.raises(InputError, match=r"dropout is 1\.0; expected 0 <= dropout < 1"):
        parse_command_line(OwnConfig, "", ["--dropout", "1"])
    with pytest.raises(SystemExit):
        parse_command_line(OwnConfig, "", ["--help"])
    said = capsys.readouterr().out
    assert "own options" in said and "Share of the hidden values set to 0." in said


def test_all_problems_are_named_at_once():
    with pytest.raises(InputError, match=r"(?s)seed is -1.*weight_decay is inf.*log_every is 0"):
        MnistConfig(seed=-1, log_every=0, weight_decay=float("inf"))


def test_profile_steps():
    assert parse_profile_steps("10:13") == (10, 13)
    assert parse_profile_steps("") == (-1, -1)
    for wrong in ("10", "10:", "a:b", "5:5", "-1:3"):
        with pytest.raises(InputError):
            parse_profile_steps(wrong)


def test_config_py_prints_every_preset_and_where_each_value_came_from():
    table, as_json = run("config.py"), run("config.py", "--json")
    assert table.returncode == as_json.returncode == 0, table.stderr + as_json.stderr
    assert "MnistConfig --preset production: valid" in table.stdout
    value = json.loads(as_json.stdout)["MnistConfig"]["production"]
    assert value["num_epochs"] == {"value": 10, "source": "preset production"}
    assert value["precision"] == {"value": "float32", "source": "level balanced"}
    assert value["momentum"]["source"] == "default"
    assert run("config.py", "--jsn").returncode == 2


def test_what_shapes_the_computation_is_not_free_on_resume():
    """The marks stand beside the fields; what a resumption must repeat is held here, by name."""
    shaping = {"seed", "dataset", "global_batch_size", "optimizer", "learning_rate", "momentum", "adam_beta1"}
    shaping |= {"adam_beta2", "weight_decay", "scheduler", "warmup_steps", "decay_every", "decay_factor", "precision"}
    shaping |= {"decay_fraction", "final_learning_rate_fraction", "matmul_precision", "log_every"}
    mnist = shaping | {"num_epochs", "max_shift", "channels", "hidden_dim"}
    text = shaping | {"train_data", "validation_data", "document_separator", "bucketed", "model_size", "num_layers"}
    text |= {"num_heads", "embedding_dim", "sequence_length", "vocab_size", "num_steps", "gradient_accumulation_steps"}
    text |= {"clip_gradient_norm", "eval_every", "eval_batches", "dropout"}
    expected = {MnistConfig: mnist, DistributedMnistConfig: mnist, TransformerConfig: text}
    for config_class, names in expected.items():
        assert {field.name for field in dataclasses.fields(config_class)} - free_on_resume(config_class) == names


def test_every_number_has_bounds():
    for config_class in (MnistConfig, DistributedMnistConfig, TransformerConfig):
        for field in dataclasses.fields(config_class):
            if isinstance(field.default, int | float) and not isinstance(field.default, bool):
                assert any(isinstance(mark, Range) for mark in marks(field)), field.name


def test_requirements_pin_what_must_match():
    lines = (ROOT / "requirements.txt").read_text()
    assert re.search(r"^torch==2\.9\.0$", lines, re.M) and re.search(r"^torch_xla\[tpu,pallas\]==2\.9\.0", lines, re.M)


@pytest.mark.parametrize("name", ["run_dir", "data_dir", "compile_cache", "document_separator"])
def test_options_that_are_no_text_are_refused(name):
    """What a command line hands over for bytes that are no UTF-8; TensorBoard could not write it later."""
    with pytest.raises(InputError, match=rf"{name} is 'a.udcff'; expected UTF-8 text"):
        parse_command_line(TransformerConfig, "", [f"--{name}", "a\udcff"])


@pytest.mark.parametrize(
    "changed, said",
    [
        (dict(num_epochs="3"), "num_epochs is '3'; expected int"),
        (dict(num_epochs=True), "num_epochs is True; expected int"),
        (dict(learning_rate=None), "learning_rate is None; expected float"),
        (dict(tensorboard=1), "tensorboard is 1; expected bool"),
        (dict(run_dir=7), "run_dir is 7; expected str"),
        (dict(dataset="other"), "dataset is 'other'; expected one of digits, mnist, synthetic"),
        (dict(device=[]), "device is .*; expected one of auto, tpu, cpu"),
    ],
)
def test_values_of_another_type_are_refused(changed, said):
    with pytest.raises(InputError, match=said):
        MnistConfig(**changed)


def test_numbers_of_numpy_are_numbers():
    assert MnistConfig(num_epochs=np.int64(3), learning_rate=np.float32(0.5), weight_decay=0).num_epochs == 3
