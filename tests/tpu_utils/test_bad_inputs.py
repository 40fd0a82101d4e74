"""Generated bad inputs: each is refused in words (InputError, TrainingError, exit code 2) or read correctly.

Never another exception, never a change on disk. The examples are the same in every run (derandomize).
"""

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import DEEP, mutated, mutated_json, no_hang
from run_files import assert_identical, files_of, mark, reader_of, state_in
from test_checkpoint import alter, as_link, truncate

from config import DistributedMnistConfig, MnistConfig
from images.arrays import check_divisible, num_steps_of
from language.mesh import choose_mesh
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError, TrainingError
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.resume import check_same_run
from tpu_utils.checkpoint.state import tensors_by_path
from tpu_utils.device import random_state, set_random_state
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.options.stored import free_on_resume
from tpu_utils.step.optim import learning_rates


def generated(count):
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


def assert_clear(message: str, *names: str) -> None:
    """It says where, what was found or expected, and what to do."""
    assert len(message) > 30 and any(name in message for name in names), message
    said = "expect|invalid|unrecognized|could not|must|truncated|longer|matches no|starts with"  # found and expected
    said += "|choose|use |lower|anew|check |copy the run again"  # what to do
    assert re.search(said, message, re.IGNORECASE), message


# ------------------------------------------------------------------------------------------------ (a) command lines
NUMBERS = [
    *("0", "-1", "1", "2", "63", "1000000007", "99999999999999999999999", "-5000000000", "0x10", "1_000", " 7", "٣"),
    *("nan", "inf", "-inf", "1e-320", "1e39", "1e308", "1e999", "-0.0", "0.5", "1.", ".", "1,5", "1e", "NaN"),
]
WORDS = [
    *("", " ", "auto", "never", "must", "tpu", "Tpu", "adamw", "digits", "tokens", "synthetic", "[/bold]", "[red]"),
    *("{}", "%s", "None", "True", "null", "../..", "10:13", "13:10", "::", "1x1x1", "0x1x1", "2x2", "1x1x99999999999"),
    *("v5e-8", "v5litepod-7", "v5e:0x0", "v9-8", "0xv5e-8", "v5p-3", "v4-0", "x" * 300, "é", "雪", "🙂", "wsd", "step"),
]
value = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.text(st.characters(codec="ascii", exclude_characters="\0"))
)


@st.composite
def command_lines(draw):
    config_class = draw(st.sampled_from([MnistConfig, DistributedMnistConfig, TransformerConfig]))
    names = draw(st.lists(st.sampled_from(list(config_class.__dataclass_fields__)), min_size=1, max_size=3))
    argv = [f"--{name}={draw(value)}" for name in names]
    if draw(st.integers(0, 9)) == 0:
        argv = [draw(value), *argv]
    return config_class, [argument for argument in argv if argument not in ("-h", "--help")]


def settle(config) -> None:
    """What a script works out from its configuration before it touches a device or much memory."""
    if isinstance(config, TransformerConfig):
        choose_mesh(config, 1, None)
        num_steps = config.num_steps
    else:
        check_divisible(config, 1)
        num_steps = num_steps_of(config, 1437, config.dataset)[1]
    rates = learning_rates(config, num_steps)
    assert rates.shape == (num_steps,) and torch.isfinite(rates).all() and (rates > 0).all()
    torch.Generator().manual_seed(config.seed)
    assert config.log_every <= 10**7, "the ring of values on the device has this many rows"


@generated(90)
@given(command_lines())
def test_command_lines(case):
    config_class, argv = case
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            config = parse_command_line(config_class, "", argv)
    except SystemExit as stop:
        assert stop.code == 2, said.getvalue()
        words = re.sub(r"[\s│|╭╮╰╯─]+", " ", said.getvalue())
        names = [argument[2:].partition("=")[0] for argument in argv if argument.startswith("--")]
        assert_clear(words, *names, *argv, "nrecognized")
        return
    except InputError as error:
        assert_clear(str(error), *config_class.__dataclass_fields__)
        return
    try:
        settle(config)
    except (InputError, TrainingError) as error:
        assert_clear(str(error), *config_class.__dataclass_fields__, "vocabulary")


# -------------------------------------------------------------------------------------------------- (b) checkpoints
RUN = {"seed": 0, "learning_rate": 0.1, "preset": "quick_test"}


def state(step: int) -> dict:
    weights = {"bias": torch.full((5,), float(step)), "weight": torch.full((5, 4), step - 0.5)}
    return {"model": weights, "optimizer": {"state": [weights]}, "random": random_state()}


def restore(folder: Path) -> dict:
    """As Run does it. The step, the results, and every tensor by its path."""
    reader = reader_of(Checkpoints(folder, 3, run_id="ours"))
    saved = reader.load_for_resume("must")
    check_same_run(RUN, saved.value("config", dict), free_on_resume(MnistConfig))
    targets = state(0)
    reader.restore(saved, targets)
    set_random_state(targets["random"])
    return {"step": saved.step, "evaluation": saved.value("evaluation", dict), **tensors_by_path(targets)}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A folder with the checkpoints of steps 10 and 20, and their states."""
    folder, states = tmp_path_factory.mktemp("intact"), {}
    for step in (10, 20):
        values = {"config": RUN, "evaluation": {"accuracy": 0.5}}
        at = Checkpoints(folder, 3, run_id="ours").save(step, state(step), values)
        states[step] = state_in(at)
    return folder, states


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def damages(folder: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """(file of a checkpoint, what makes a damaged one of it)."""
    for seed, name in enumerate(("state.safetensors", "state.json", "done")):
        content = (folder / name).read_bytes()
        yield from ((name, damage) for damage in (Path.unlink, as_fifo, as_link, truncate, alter))
        contents = list(mutated(content, 25, seed))
        if name != "state.safetensors":
            contents += [*mutated_json(json.loads(content), 50, seed), b"[]", b"{}", DEEP.encode()]
        yield from ((name, partial(Path.write_bytes, data=damaged)) for damaged in contents)


def test_checkpoints(intact, tmp_path):
    """Every second time both of a run. The marker fits a damaged index, as anyone can write it."""
    original, states = intact
    for number, (name, damage) in enumerate(damages(original / "step_00000020")):
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        for step in (10, 20) if number % 2 else (20,):
            at = folder / f"step_{step:08d}"
            damage(at / name)
            if name == "state.json" and isinstance(damage, partial):
                mark(at)
        before, warnings = files_of(folder), io.StringIO()
        try:
            with no_hang(), contextlib.redirect_stderr(warnings):
                found = restore(folder)
            assert_identical(found, states[found["step"]] | {"evaluation": found["evaluation"]})
            if found["step"] == 10:
                assert damage is Path.unlink or "step_00000020" in warnings.getvalue(), "what was passed over is named"
        except (InputError, TrainingError) as error:
            assert_clear(str(error), "step_000000", "checkpoint", "this is not the run")
        assert files_of(folder) == before, "a refused or resumed checkpoint is left as it is"
