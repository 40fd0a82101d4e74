"""What several test files use: the real data beside the checkout, and what a run has written."""

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("AOT_TPU_CACHE", "")  # what a test compiles is compiled
os.environ.setdefault("PJRT_DEVICE", "CPU")  # before the import, which would choose it with a warning
# of the tests' own process: a third of the time to compile, slower steps, the same float32; scripts have it not
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
import torch
import torch_xla
from processes import ROOT
from torch.utils._pytree import tree_map

from tpu_utils.saved import read_checkpoint

# the longest first: of two workers none is left alone with one of them at the end
LONGEST = (
    "cluster_tpu",
    "aot_tpu",
    "transformer_tpu",
    "distributed",
    "simple_mnist",
    "docs",
    "calibrate_tpu",
    "aot_modules",
    "torture",
    "web",
    "onnx",
    "storage",
    "transformer_parity",
    "nonfinite",
)


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="session", autouse=True)
def xla_runtime():
    """Started before any test runs a backward pass: autograd counts the devices at its first one, and never again
    (torch/csrc/autograd/engine.cpp, start_device_threads), so a pass on plain CPU tensors would leave none for XLA."""
    torch_xla.device()


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """10,000 training and 5,000 test digits of the real MNIST, in torchvision's layout."""
    folder = ROOT.parent / "shared" / "data" / "mnist"
    if not folder.exists():
        pytest.skip("real MNIST digits are not beside this checkout (../shared/data/mnist)")
    return folder


def in_process(*argv: object) -> int:
    """Exit code of simple_mnist_tpu.py for these options, in this process."""
    import simple_mnist_tpu
    from config import MnistConfig
    from tpu_utils.errors import run_script
    from tpu_utils.options import parse_command_line

    options = [str(argument) for argument in argv]
    return run_script(lambda: simple_mnist_tpu.train(parse_command_line(MnistConfig, "", options)))


def state_in(folder: Path) -> dict:
    """All that a checkpoint folder holds, but for the options: tensors by path, results, step."""
    saved = read_checkpoint(folder)
    files = saved.files()
    tensors = {path: files.read(path) for path in saved.entries}
    return {"step": saved.step, "evaluation": saved.value("evaluation", dict), **tensors}


def to_host(state):
    """The same nesting of dicts, lists and tuples with every tensor whole on the CPU."""
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value, state)


def read_lines(run_dir: Path) -> list[dict]:
    """The objects in a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


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
