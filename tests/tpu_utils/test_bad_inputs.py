"""200 generated bad inputs: each is refused in words (InputError, TrainingError, exit code 2) or read correctly.

Never another exception, never a change on disk. The examples are the same in every run (derandomize).
"""

import contextlib
import io
import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_files import assert_identical, reader_of, state_in, to_host
from test_checkpoint_sharded import mark

from config import DistributedMnistConfig, MnistConfig
from images.arrays import check_divisible, num_steps_of
from language.data.tokens import TokenShards
from language.mesh import choose_mesh
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError, TrainingError
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.resume import check_same_run
from tpu_utils.checkpoint.state import tensors_by_path
from tpu_utils.device import random_state, set_random_state
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.options.stored import free_on_resume
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.step.optim import learning_rates, make_optimizer


def generated(count):
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


def contents(folder: Path) -> dict:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outcome(function):
    """(what it returned, None), or (None, the message it was refused with)."""
    try:
        return function(), None
    except (InputError, TrainingError) as error:
        return None, str(error)


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
    _, refused = outcome(lambda: settle(config))
    if refused:
        assert_clear(refused, *config_class.__dataclass_fields__, "vocabulary")


# -------------------------------------------------------------------------------------------------- (b) checkpoints

RUN = {"seed": 0, "learning_rate": 0.1, "preset": "quick_test"}


def parts(hidden: int = 5):
    torch.manual_seed(hidden)
    model = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.Linear(hidden, 3))
    optimizer = make_optimizer(MnistConfig(), model.parameters())
    return model, optimizer, DeviceMetrics(["loss"], 4, torch.device("cpu"))


def parts_of(model, optimizer, metrics, **more) -> dict:
    named = dict(model=model.state_dict(keep_vars=True), optimizer=optimizer.state_dict(), metrics=metrics.state_dict())
    return named | more


def save(folder: Path, step: int, model, optimizer, metrics) -> None:
    values = {"config": RUN, "evaluation": {"accuracy": 0.5}}
    Checkpoints(folder, 3, run_id="ours").save(step, parts_of(model, optimizer, metrics, random=random_state()), values)


def restore(folder: Path) -> dict:
    """As Run does it. The step, the results, and every tensor by its path."""
    checkpoints = Checkpoints(folder, 3, run_id="ours")
    saved = reader_of(checkpoints).load_for_resume("must")
    model, optimizer, metrics = parts()
    check_same_run(RUN, saved.value("config", dict), free_on_resume(MnistConfig))
    targets = parts_of(model, optimizer, metrics, random=random_state())
    reader_of(checkpoints).restore(saved, targets)
    set_random_state(targets["random"])
    return {"step": saved.step, "evaluation": saved.value("evaluation", dict), **to_host(tensors_by_path(targets))}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A folder with the checkpoints of steps 10 and 20, and their states."""
    folder, states = tmp_path_factory.mktemp("intact"), {}
    model, optimizer, metrics = parts()
    for step in (10, 20):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(step)
        save(folder, step, model, optimizer, metrics)
        states[step] = state_in(folder / f"step_{step:08d}")
    return folder, states


FILES = ("state.safetensors", "state.json")
PATHS = ("model/0.weight", "optimizer/state/0/exp_avg", "optimizer/state/0/count", "metrics/values", "metrics/step")
PATHS += ("random/torch", "random/xla")
OTHERS = [None, 7, "text", [], {}, True, -1, 1.5, 2**70, [[]], "../../x", "nan"]
MARKERS = [b"{}", b"[]", b"3", b'"x"', b"null", b"[" * 9999, b"\xff\xfe"]
FIELDS = ("step", "run", "format", "files")
damages = st.one_of(
    st.tuples(st.just("flip"), st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255)),
    st.tuples(st.just("truncate"), st.sampled_from(FILES), st.floats(0, 1, exclude_max=True)),
    st.tuples(st.just("append"), st.sampled_from(FILES), st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("raw"), st.sampled_from(FILES), st.binary(max_size=200)),
    st.tuples(st.just("marker"), st.one_of(st.binary(max_size=30), st.sampled_from(MARKERS))),
    st.tuples(st.just("marker field"), st.sampled_from(FIELDS), st.sampled_from(OTHERS)),
    st.tuples(st.just("missing"), st.sampled_from(["done", *FILES])),
    st.tuples(st.just("index"), st.sampled_from(["step", "values", "tensors", "format"]), st.sampled_from(OTHERS)),
    st.tuples(st.just("tensor"), st.sampled_from(PATHS), st.sampled_from(["dtype", "shape"]), st.sampled_from(OTHERS)),
    st.tuples(st.just("drop"), st.sampled_from(PATHS)),
    st.tuples(st.just("value"), st.sampled_from(["config", "evaluation"]), st.sampled_from(OTHERS)),
    st.tuples(st.just("other model"), st.sampled_from([1, 4, 6])),
)


def damage(folder: Path, kind: str, *how) -> None:
    """Every file gets the size and CRC-32 it has then in the marker, as anyone can write them, where it says so."""
    if kind == "missing":
        (folder / how[0]).unlink()
    elif kind == "marker":
        (folder / "done").write_bytes(how[0])
    elif kind == "marker field":
        marker = json.loads((folder / "done").read_text())
        (folder / "done").write_text(json.dumps({**marker, how[0]: how[1]}))
    elif kind in ("flip", "truncate", "append", "raw"):
        path = folder / how[0]
        content = bytearray(path.read_bytes())
        if kind == "flip":
            content[int(how[1] * len(content))] ^= how[2]
        changed = {"truncate": lambda: content[: int(how[1] * len(content))], "append": lambda: content + how[1]}
        path.write_bytes(changed.get(kind, lambda: how[1] if kind == "raw" else content)())
        if kind == "raw":
            mark(folder)
    elif kind == "other model":
        step = int(folder.name[5:])
        shutil.rmtree(folder)
        save(folder.parent, step, *parts(how[0]))
    else:
        index = json.loads((folder / "state.json").read_text())
        if kind == "index":
            index[how[0]] = how[1]
        elif kind == "tensor":
            index["tensors"][how[0]][how[1]] = how[2]
        elif kind == "value":
            index["values"][how[0]] = how[1]
        else:
            del index["tensors"][how[0]]
        (folder / "state.json").write_text(json.dumps(index))
        mark(folder)


@generated(110)
@given(damages, st.booleans())
def test_checkpoints(intact, how, both):
    original, states = intact
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoints"
        shutil.copytree(original, folder)
        for step in (10, 20) if both else (20,):
            damage(folder / f"step_{step:08d}", *how)
        before, warnings = contents(folder), io.StringIO()
        with contextlib.redirect_stderr(warnings):
            found, refused = outcome(lambda: restore(folder))
        assert contents(folder) == before, "a refused or resumed checkpoint is left as it is"
        if refused:
            assert_clear(refused, "step_000000", "checkpoint", "this is not the run")
        else:
            assert_identical(found, states[found["step"]] | {"evaluation": found["evaluation"]})
            if found["step"] == 10:
                assert how[0] == "missing" or "step_00000020" in warnings.getvalue(), "what was passed over is named"


# ------------------------------------------------------------------------------------------------- (c) token shards

VOCAB_SIZE, T, ROWS = 257, 4, 2
words = st.one_of(st.integers(-(2**31), 2**31 - 1), st.sampled_from([0, 1, 7, 60, 20240520, 20240801, 20240522]))
changes = st.one_of(
    st.tuples(st.just("header"), st.integers(0, 2), words),
    st.tuples(st.just("header"), st.integers(3, 255), words),
    st.tuples(st.just("magic"), words, words),
    st.tuples(st.just("truncate"), st.integers(0, 1023 + 120)),
    st.tuples(st.just("append"), st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("token"), st.integers(0, 59), st.integers(0, 65535)),
    st.tuples(st.just("whole"), st.binary(max_size=1200)),
    st.tuples(st.just("short"), st.integers(0, 12)),
    st.tuples(st.just("folder")),
    st.tuples(st.just("absent")),
)


def change(path: Path, kind: str, *how) -> None:
    header, tokens = np.zeros(256, "<i4"), np.arange(60).astype("<u2")
    header[:3] = 20240520, 1, 60
    if kind == "header":
        header[how[0]] = how[1]
    elif kind == "magic":
        header[:2] = how
    elif kind == "token":
        tokens[how[0]] = how[1]
    elif kind == "short":
        tokens, header[2] = tokens[: how[0]], how[0]
    content = header.tobytes() + tokens.tobytes()
    if kind == "truncate":
        content = content[: how[0]]
    elif kind in ("append", "whole"):
        content = content + how[0] if kind == "append" else how[0]
    if kind == "folder":
        path.mkdir()
    elif kind != "absent":
        path.write_bytes(content)


@generated(40)
@given(changes, st.booleans())
def test_token_shards(how, second):
    """second: the damaged shard comes after an intact one, so that its tokens are checked as they are read."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if second:
            change(folder / "a.bin", "intact")
        change(folder / "b.bin", *how)
        before = contents(folder)

        def read():
            source = TokenShards(str(folder / ("*.bin" if second else "b.bin")), VOCAB_SIZE, T, ROWS)
            return [source.batch(step) for step in range(source.batches_per_epoch)]

        batches, refused = outcome(read)
        assert contents(folder) == before
        if refused:
            assert_clear(refused, "b.bin", "*.bin")
            return
        files = [path for path in sorted(folder.glob("*.bin")) if path.is_file()]
        tokens = [np.frombuffer(path.read_bytes()[1024:], "<u2") for path in files]
        expected = [
            shard[start + row * T : start + row * T + T + 1]
            for shard in tokens
            for start in range(0, (len(shard) - 1) // (ROWS * T) * ROWS * T, ROWS * T)
            for row in range(ROWS)
        ]
        np.testing.assert_array_equal(np.concatenate(batches), np.stack(expected))
        assert max(map(int, np.concatenate(tokens))) < VOCAB_SIZE or second
