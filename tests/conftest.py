"""What several test files use: the real data beside the checkout, and running a script the way a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("PJRT_DEVICE", "CPU")  # before the import, which would choose it with a warning
import torch_xla

ROOT = Path(__file__).resolve().parent.parent


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


def run(*arguments, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` in the repository, output captured as text."""
    env = {**os.environ, **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def read_lines(run_dir: Path) -> list[dict]:
    """The objects in a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
