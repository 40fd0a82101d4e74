"""Variables of the environment: what changes numbers behind the printed precision, or ends a run by a signal."""

import signal
import subprocess
import sys

import pytest
from processes import ROOT, environment_with, run

from config import MnistConfig
from tpu_utils.base.errors import InputError
from tpu_utils.options import variables
from tpu_utils.options.environment import command_line
from tpu_utils.options.variables import SWITCHES, check_variables

WITHOUT_TORCH_XLA = {name: module for name, module in sys.modules.items() if name != "torch_xla"}
REFUSED = [
    *((name, "1", f"{name}=1, which makes ") for name in SWITCHES),
    ("XLA_USE_BF16", "yes", "XLA_USE_BF16=yes, which makes bfloat16 of what the run calls float32; unset"),
    *(("CPU_NUM_DEVICES", value, "expected a whole number from 1 to 127") for value in ("0", "-1", "128", "1e1", "")),
    ("CPU_NUM_DEVICES", "1000000", "CPU_NUM_DEVICES=1000000; expected a whole number from 1 to 127; unset it"),
    ("CPU_NUM_DEVICES", "\u0663", "expected a whole number"),  # a digit, but none of C's
    ("PJRT_LOCAL_PROCESS_COUNT", "x", "expected a whole number from 1 to"),
    ("WORLD_SIZE", "two", "WORLD_SIZE=two; expected a whole number"),
    ("LOCAL_RANK", "-1", "LOCAL_RANK=-1; expected a whole number from 0 to"),
    ("XLA_PERSISTENT_CACHE_PATH", "/dev/null/cache", "/dev/null/cache: Not a directory; expected a folder"),
    ("PJRT_DEVICE", "cuda", "PJRT_DEVICE=cuda; expected CPU, TPU or GPU"),
    ("XLA_FLAGS", "xla_dump_to=/tmp", "XLA_FLAGS begins with xla_dump_to=/tmp, which XLA takes for the name of a file"),
    ("XLA_FLAGS", "/etc/hostname", "expected flags, the first with -- in front"),
    ("DNNL_DEFAULT_FPMATH_MODE", "BF16", "DNNL_DEFAULT_FPMATH_MODE=BF16, which makes products and sums less exact"),
    ("XLA_FLAGS", "--xla_tpu_a=1", "Unknown flag in XLA_FLAGS: --xla_tpu_a=1; correct it, or leave it out; options of"),
    ("XLA_FLAGS", "--xla_backend_optimization_level=9x", "XLA would abort: Couldn't interpret value 9x for flag"),
    ("XLA_FLAGS", "--xla_step_marker_location=here", "--xla_step_marker_location=here, at which XLA would abort: Flag"),
    ("XLA_FLAGS", "--xla_cpu_enable_fast_math", "which changes numbers behind the precision"),
    ("XLA_FLAGS", "--xla_dump_to=/tmp --xla_cpu_enable_fast_min_max=true", "--xla_cpu_enable_fast_min_max=true, which"),
]


@pytest.mark.parametrize(("name", "value", "said"), REFUSED)
def test_what_is_refused_before_torch_xla_reads_it(xla_is_forked, monkeypatch, name, value, said):
    monkeypatch.setattr(variables.sys, "modules", WITHOUT_TORCH_XLA)
    with pytest.raises(InputError) as refused:
        check_variables({name: value}, "auto")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "given, device",
    [
        ({}, "auto"),
        (dict.fromkeys(SWITCHES, "0") | {"PJRT_DEVICE": ""}, "auto"),
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT", "XLA_FLAGS": " --xla_dump_to=/tmp"}, "auto"),
        ({"CPU_NUM_DEVICES": "127", "PJRT_DEVICE": "cpu", "WORLD_SIZE": "4", "RANK": "3"}, "auto"),
        ({"XLA_FLAGS": "--xla_cpu_enable_fast_math=false --xla_backend_optimization_level=0 flags_in_a_file"}, "auto"),
        ({"XLA_FLAGS": "--xla_allow_excess_precision=false --xla_force_host_platform_device_count=2"}, "auto"),
        ({"PJRT_DEVICE": "cuda"}, "cpu"),  # a device that is given is not asked of the variable
        ({"XLA_USE_SPMD": "1"}, "auto"),  # torch_xla itself sets it
    ],
)
def test_what_is_not(xla_is_forked, given, device):
    assert "torch_xla" in sys.modules
    check_variables(given, device)


def test_a_limit_of_memory_under_which_torch_does_not_load():
    limited = "ulimit -v 3000000 && exec python simple_mnist_tpu.py --device cpu".replace("python", sys.executable)
    done = subprocess.run(["bash", "-c", limited], cwd=ROOT, env=environment_with({}), capture_output=True, text=True)
    assert done.returncode == 2 and "this process may map 3,072,000,000 bytes of memory" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["simple_mnist_tpu.py", "tools.generate"])
def test_a_command_refuses_them_before_anything_is_compiled(script, tmp_path):
    options = ["--run_dir", tmp_path / "run"] if script.endswith("_tpu.py") else ["--hf", tmp_path]
    done = run(script, *options, XLA_USE_BF16=1)
    assert done.returncode == 2 and "XLA_USE_BF16=1, which makes bfloat16" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "before, after", [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)]
)
def test_ctrl_c_during_the_imports_has_no_traceback(monkeypatch, before, after):
    """A shell says 130 then. What runs in the background under nohup goes on ignoring it."""
    monkeypatch.setattr("sys.argv", ["simple_mnist_tpu.py", "--device=cpu"])
    handler = signal.signal(signal.SIGINT, before)
    try:
        assert command_line(MnistConfig, "", lambda config: None).device == "cpu"
        assert signal.getsignal(signal.SIGINT) == after
    finally:
        signal.signal(signal.SIGINT, handler)
