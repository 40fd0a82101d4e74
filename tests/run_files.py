"""What a run has written, and a run in the tests' own process."""

import dataclasses
import io
import json
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from tpu_utils.base.writing import checksum_of
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.checkpoint.saved import read_checkpoint
from tpu_utils.checkpoint.state import HostCopy, kind_of
from tpu_utils.options.parsing import resolve, without_effect

TINY = ["--num_epochs=1", "--warmup_steps=2", "--channels=4", "--hidden_dim=16", "--log_every=1", "--device=cpu"]
TINY += ["--no_tensorboard"]
"""Options of simple_mnist_tpu.py: 22 steps of a small model."""


def in_process(*argv: object) -> int:
    """Exit code of simple_mnist_tpu.py for these options, in this process."""
    import simple_mnist_tpu
    from config import MnistConfig
    from tpu_utils.base.errors import run_script
    from tpu_utils.options.parsing import parse_command_line

    options = [str(argument) for argument in argv]
    return run_script(lambda: simple_mnist_tpu.train(parse_command_line(MnistConfig, "", options)))


def configured(kind: type, words: list[str]):
    """As parse_command_line() without its twentieth of a second: the fields are there, and values fit each other."""
    given, name = {}, ""
    for word in words:
        if word.startswith("--"):
            name, _, word = word[2:].partition("=")
        given[name] = word
    default, _ = resolve(kind, given.pop("preset", "quick_test"), given.get("optimization_level"))
    values = {name.removeprefix("no_"): not name.startswith("no_") for name, text in given.items() if not text}
    values |= {name: type(getattr(default, name))(text) for name, text in given.items() if text}
    config = dataclasses.replace(default, **values)
    assert without_effect(config, given) == []
    return config


def reader_of(checkpoints: Checkpoints) -> CheckpointReader:
    """A reader of the checkpoints that it writes, or another process has written."""
    return CheckpointReader(checkpoints.folder, checkpoints._peers, checkpoints._mirror, checkpoints.run_id)


def mark(folder: Path) -> None:
    """Makes a checkpoint's done marker fit its files, as anyone can write it."""
    marker = json.loads((folder / "done").read_bytes())
    files = [path for path in folder.iterdir() if path.name != "done"]
    marker["files"] = {path.name: checksum_of(io.BytesIO(path.read_bytes())) for path in files}
    (folder / "done").write_text(json.dumps(marker))


def state_in(folder: Path) -> dict:
    """All that a checkpoint folder holds, but for the options: tensors by path, results, step."""
    saved = read_checkpoint(folder)
    files = saved.files()
    tensors = {path: files.read(path) for path in saved.entries}
    return {"step": saved.step, "evaluation": saved.value("evaluation", dict), **tensors}


def part_of_state(step: int, index: int, count: int, rows: torch.Tensor, whole: bool) -> HostCopy:
    """What one of `count` processes saves: its share of the rows of a matrix, plus the step; whole: a vector too."""
    size = len(rows) // count
    copy = HostCopy(step, {"evaluation": {}}, {"model/whole": torch.ones(5) + step} if whole else {})
    copy.sharded = {"model/rows": kind_of(rows)}
    copy.shards = {"model/rows": {(index * size, 0): rows[index * size :][:size] + step}}
    return copy


def to_host(state):
    """The same nesting of dicts, lists and tuples with every tensor whole on the CPU."""
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value, state)


def read_lines(run_dir: Path) -> list[dict]:
    """The objects in a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that are whole, in any order."""
    return [int(path.parent.name[5:]) for path in run_dir.glob("checkpoints/step_*/done")]


def losses_in(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run_dir) if line["kind"] == "train"]


def files_of(run_dir: Path) -> dict:
    """Content and time of every file in a run directory but the lock, which names its last holder."""
    return {
        path.relative_to(run_dir): (path.stat().st_mtime_ns, path.read_bytes())
        for path in run_dir.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def summary_in(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def assert_identical(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))  # nan equals nan
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_identical(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_identical(x, y)
    else:
        assert a == b


TIMES = {"step_seconds", "examples_per_second", "tokens_per_second", "data_wait_seconds", "wait_seconds", "mfu"}
TIMES |= {"host_seconds", "began_with", "memory"}


def numbers(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl without their times."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in read_lines(run_dir)]
