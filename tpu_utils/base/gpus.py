"""NVIDIA GPUs: which there are, and what their maker says of them. Imports no torch."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tpu_utils.base.errors import DeviceError, InputError


class GPU(NamedTuple):
    """name: what torch.cuda.get_device_name() gives, without its maker, as a pattern for all of it: a laptop's card, a
    part of one (MIG) or a chip with fewer units has another peak. bf16_tflops: dense; half of what source names with
    sparsity. None: it has no bfloat16. source: NVIDIA's, by its title."""

    name: str
    memory_gb: int
    bf16_tflops: float | None
    source: str


GPUS = (
    GPU("T4", 16, None, "T4 data sheet"),  # 65 TFLOP/s of float16
    GPU("L4", 24, 121, "L4 data sheet"),
    GPU("RTX 4090", 24, 165.2, "Ada GPU Architecture, appendix A"),  # with float32 sums
    GPU("A100-(SXM4|PCIE)-40GB", 40, 312, "A100 data sheet"),
    GPU("A100(-SXM4-80GB| 80GB PCIe)", 80, 312, "A100 data sheet"),
    GPU("H100 80GB HBM3", 80, 989, "H100 data sheet"),
    GPU("H100 PCIe", 80, 756, "H100 data sheet, PCIe"),
    GPU("H100 NVL", 94, 835, "H100 data sheet, NVL"),
    GPU("H200", 141, 989, "H200 data sheet"),
    GPU("H200 NVL", 141, 835, "H200 data sheet, NVL"),
    GPU("B200", 180, 2250, "DGX B200 data sheet"),  # an eighth of its figures
)
OLDEST_DRIVERS = {"12": 525, "13": 580}
"""Major number of the oldest driver for each major version of CUDA: NVIDIA's "CUDA Compatibility", minor versions."""


def gpu_named(name: str) -> GPU | None:
    """By what the driver calls it. None: not in the table."""
    return next((gpu for gpu in GPUS if re.fullmatch(f"((NVIDIA|Tesla|GeForce) )*{gpu.name}", name)), None)


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
    Raises InputError where torch_xla is installed, which has neither, DeviceError for a GPU that is not there."""
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
