"""NVIDIA GPUs: which there are, and what their maker says of them. Imports no torch."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tpu_utils.base.errors import DeviceError, InputError


class GPU(NamedTuple):
    """bf16_tflops: dense, NVIDIA's data sheet or architecture paper of the card; where that names the figure with
    sparsity, half of it. None: it has no bfloat16. pattern: of torch.cuda.get_device_name()."""

    pattern: str
    memory_gib: int
    bf16_tflops: float | None


GPUS = (
    GPU("T4", 16, None),  # 65 TFLOP/s of float16
    GPU("L4", 24, 121),
    GPU("RTX 4090", 24, 165.2),  # with float32 sums: Ada paper, appendix A
    GPU("A100.*40GB", 40, 312),
    GPU("A100", 80, 312),
    GPU("H100 PCIe", 80, 756),
    GPU("H100 NVL", 94, 835),
    GPU("H100", 80, 989),
    GPU("H200", 141, 989),
    GPU("B200", 180, 2250),
)
"""The first pattern that fits counts."""
OLDEST_DRIVERS = {"12": 525, "13": 580}
"""Major number of the oldest driver for each major version of CUDA: NVIDIA's "CUDA Compatibility", minor versions."""


def gpu_named(name: str) -> GPU | None:
    """By what the driver calls it. None: not in the table."""
    return next((gpu for gpu in GPUS if re.search(rf"\b{gpu.pattern}\b", name)), None)


def has_gpu(environment: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """Whether a driver of NVIDIA's shows this process a GPU; of Windows' Linux (WSL) it is /dev/dxg."""
    is_hidden = environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return not is_hidden and ((devices / "dxg").exists() or any(devices.glob("nvidia[0-9]*")))


def cuda_version() -> str:
    """CUDA that the installed torch was built for, such as "13.0"; "": none, and no torch."""
    torch = find_spec("torch")
    if torch is None or not torch.origin:
        return ""
    written = re.search(r"^cuda\b.* = '([\d.]+)'", Path(torch.origin).with_name("version.py").read_text(), re.MULTILINE)
    return written.group(1) if written else ""


def gpu_or_cpu(chosen: str, compiler: str, environment: Mapping[str, str]) -> str:
    """The device where there is no TPU: "gpu" or "cpu" of "auto", and what else was chosen. compiler: of --compile.

    Raises InputError where torch_xla is installed, which has neither, DeviceError for a GPU that is not there.
    """
    if chosen == "auto" and compiler == "auto" and not has_gpu(environment):
        return "cpu"
    by_xla = find_spec("torch_xla") is not None
    if by_xla and (chosen == "gpu" or compiler != "auto"):
        what = "device is gpu" if chosen == "gpu" else f"compile is {compiler}"
        raise InputError(
            f"{what}, but torch_xla is installed, which runs on TPU and CPU and has its own compiler; take an "
            "environment of requirements-compile.txt, or leave it out"
        )
    if chosen == "auto":
        return "gpu" if not by_xla and cuda_version() else "cpu"
    if chosen == "gpu" and not has_gpu(environment):
        raise DeviceError(
            "device is gpu, but no driver shows an NVIDIA GPU (/dev/nvidia0; CUDA_VISIBLE_DEVICES may hide it); run "
            "nvidia-smi, or add --device cpu"
        )
    if chosen == "gpu" and not cuda_version():
        raise DeviceError(
            "device is gpu, but the torch that is installed is built without CUDA; install that of "
            "requirements-compile.txt from PyPI, or add --device cpu"
        )
    return chosen
