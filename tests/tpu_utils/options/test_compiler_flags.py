"""The TPU compiler's options: the same on a TPU VM and when it is asked ahead of time."""

import json
import tempfile
from pathlib import Path

import pytest
import torch_xla
from processes import ROOT, run

from config import MnistConfig
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import GENERATIONS
from tpu_utils.options import environment
from tpu_utils.options.compiler_flags import NO_WINDOWED_EINSUM, VARIABLE, parse_compiler_options
from tpu_utils.options.compiler_flags import torch_xla_flags as our_table
from tpu_utils.options.environment import choose_device
from tpu_utils.options.train_config import TrainConfig

(THRESHOLD,) = NO_WINDOWED_EINSUM


@pytest.mark.parametrize("generation, number", [("v4", 4), ("v5e", 5), ("v5p", 5), ("v6e", 6)])
def test_ahead_of_time_the_compiler_gets_what_torch_xla_would_add(monkeypatch, generation, number):
    monkeypatch.setattr("torch_xla._internal.tpu.version", lambda: number)
    monkeypatch.setenv(VARIABLE, "")
    torch_xla._setup_libtpu_flags()
    assert parse_compiler_options(environment.os.environ[VARIABLE]) == our_table(generation)


@pytest.mark.parametrize(
    "device, words, windowed, expected",
    [
        ("tpu", "", False, f"--{THRESHOLD}=1000000"),
        ("tpu", "-b=2 --a", False, f"-b=2 --a --{THRESHOLD}=1000000"),
        ("tpu", "--a=1", True, "--a=1"),
        ("tpu", f"-{THRESHOLD}=8 --a", False, f"-{THRESHOLD}=8 --a"),  # the user's own
        ("cpu", "--a=1", False, "--a=1"),
    ],
)
def test_a_run_on_a_tpu_tells_libtpu_once_and_never_over_the_user(monkeypatch, device, words, windowed, expected):
    monkeypatch.setattr(environment, "attached_chips", lambda: [GENERATIONS["v5e"]])
    monkeypatch.setattr("tpu_utils.remote.hosts.settle_hosts", lambda chips: None)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv(VARIABLE, words)
    for _ in range(2):
        assert choose_device(MnistConfig(device=device, windowed_einsum=windowed)) == device
        assert environment.os.environ[VARIABLE] == expected


@pytest.mark.parametrize("text", ["xla_a", "xla_a=", "=1", "a b=1", "xla_a==1", "xla_a=1;b=2=3"])
def test_refused_before_libtpu_would_abort(text):
    with pytest.raises(InputError, match=r"compiler_options has .*; expected NAME=VALUE"):
        TrainConfig(compiler_options=text)


def test_an_option_that_libtpu_does_not_have():
    wrong = "--compiler_options=xla_tpu_scoped_vmem_limit_kb=1"
    done = run("simple_mnist_tpu.py", "--compile_for=v5litepod-1", wrong)
    assert done.returncode == 2 and "_limit_kb, which this libtpu does not have" in done.stderr
    assert "did you mean xla_tpu_scoped_vmem_limit_kib?" in done.stderr


@pytest.mark.slow
def test_the_options_reach_the_compiler():
    given = ("--compile_for=v5litepod-1", "--compiler_options=xla_tpu_scoped_vmem_limit_kib=x")
    done = run("simple_mnist_tpu.py", *given, "--channels=1", "--hidden_dim=1", "--global_batch_size=1")
    assert done.returncode == 1 and "Illegal value 'x'" in done.stdout + done.stderr
    assert f"compiler   {THRESHOLD}=1000000 xla_tpu_scoped_vmem_limit_kib=x" in done.stdout


@pytest.mark.slow
def test_without_windowed_einsum_no_chain_of_sends():
    options = ("--mesh=1x8x1", "--embedding_dim=256", "--num_heads=2", "--sequence_length=256", "--num_layers=1")
    options += ("--vocab_size=512", "--precision=bfloat16", "--compile_for=v5litepod-8")
    found = []
    for more in ("--no_windowed_einsum", "--windowed_einsum"):
        with tempfile.TemporaryDirectory() as folder:
            run(ROOT / "transformer_tpu.py", *options, more, AOT_TPU_OUTPUT=folder, AOT_TPU_PLAN="1")
            report = json.loads(Path(folder, "report.json").read_text())
        found.append(report["collectives"].get("collective-permute", {}).get("count", 0))
    assert found[0] == 0 < found[1]
