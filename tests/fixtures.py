"""Fixtures and settings of all tests; each folder of tests has them by its conftest.py."""

import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import QUICKLY_COMPILED, ROOT, run

os.environ.setdefault("AOT_TPU_CACHE", "")  # what a test compiles is compiled
os.environ.setdefault("PJRT_DEVICE", "CPU")  # before the import, which would choose it with a warning
os.environ.setdefault("XLA_FLAGS", QUICKLY_COMPILED)
import torch
import torch_xla

torch.set_num_threads(1)  # as the scripts that tests start

# the longest first: of two workers none is left alone with one of them at the end
LONGEST = "cluster lessons torch_compile_backend docs storage aot_tpu any_slice transformer_tpu evaluate distributed"
LONGEST += " simple_mnist keep_running generate given_program context families experts speedrun gpu_benchmark"
LONGEST += " compiler_flags samples calibrate aot_modules torture page onnx make_it_yours memory_checkpoints setup_tpu"
LONGEST += " fine_tuning nonfinite"


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish():
    gc.freeze()  # no collection, and no trace that looks for its tensors, goes through what was imported


@pytest.fixture(scope="session", autouse=True)
def xla_runtime():
    """Started before any test runs a backward pass: autograd counts the devices at its first one, and never again
    (torch/csrc/autograd/engine.cpp, start_device_threads), so a pass on plain CPU tensors would leave none for XLA."""
    torch_xla.device()


@pytest.fixture
def forked(monkeypatch):
    """compile_script() without the seconds of a start."""
    from tpu_compiler.decide import search  # only here

    def run_script(command, variables, seconds=None):
        done = run(*command, **variables)
        print(done.stderr, end="", file=sys.stderr)
        return done.returncode

    monkeypatch.setattr(search, "run_script", run_script)


@pytest.fixture
def xla_is_forked(monkeypatch):
    """XLA is asked of its flags without the seconds of a start."""
    from tpu_utils.options import variables  # only here

    def fork(command, env, **_):
        return run(*command[1:], **{name: env[name] for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS")})

    monkeypatch.setattr(variables, "subprocess", SimpleNamespace(run=fork))


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """10,000 training and 5,000 test digits of the real MNIST, in torchvision's layout."""
    folder = ROOT.parent / "shared" / "data" / "mnist"
    if not folder.exists():
        pytest.skip("real MNIST digits are not beside this checkout (../shared/data/mnist)")
    return folder
