"""The device a run is on: started, seeded, and described."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch_xla
import torch_xla.backends
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from tpu_utils.compiler_flags import flags_in_use
from tpu_utils.environment import choose_device
from tpu_utils.errors import DeviceError, first_line
from tpu_utils.hardware import attached_chips

if TYPE_CHECKING:
    from config import TrainConfig


def start_device(config: "TrainConfig", join: Callable[[], Any] = lambda: None) -> tuple[torch.device, Any]:
    """Choose, start and seed the XLA device; set the precision of matrix products. Returns it, and what join returned.

    join: xr.use_spmd, or what joins a process group. It is called after the environment is settled and before a device
    is touched.
    Call it before anything touches a device: PJRT_DEVICE is read once. Raises DeviceError instead of falling back.
    """
    chosen = choose_device(config)
    if config.matmul_precision != "default":
        torch_xla.backends.set_mat_mul_precision(config.matmul_precision)
    try:
        joined = join()
        device = torch_xla.device()
    except RuntimeError as error:
        raise DeviceError(
            f"the {chosen} device does not start: {first_line(error)}; is another process using it?"
        ) from error
    if (started := xr.device_type().lower()) != chosen:
        raise DeviceError(
            f"asked for device {chosen}, the runtime started {started}; unset PJRT_DEVICE or pass --device"
        )
    torch.manual_seed(config.seed)
    xm.set_rng_state(config.seed)
    return device, joined


def devices_used() -> int:
    """Devices of all hosts that this run computes on."""
    return xr.global_runtime_device_count() if xr.is_spmd() else xr.world_size()


def peak_flops(num_devices: int) -> float | None:
    """Peak dense bf16 FLOP/s of num_devices devices, or None where the chip is unknown (CPU)."""
    chips = attached_chips() if xr.device_type() == "TPU" else []
    return num_devices * chips[0].bf16_tflops * 1e12 / chips[0].devices_per_chip if chips else None


def device_memory(device: torch.device) -> dict[str, int] | None:
    """{"bytes_used", "bytes_limit", "peak_bytes_used"} of one device, or None where the runtime does not tell: on the
    CPU, and under SPMD, where torch_xla raises "MemoryInfo not supported for SPMD virtual device"."""
    if xr.device_type() != "TPU" or xr.is_spmd():
        return None
    return {name: int(value) for name, value in xm.get_memory_info(device).items()}


def print_banner(config: "TrainConfig", device: torch.device) -> None:
    """What this run runs on, before anything is compiled."""
    count, kind = xr.global_runtime_device_count(), xr.device_type()
    chips = attached_chips() if kind == "TPU" else []
    name = f"TPU {chips[0].name}" if chips else "CPU (XLA CPU backend: no TPU)" if kind == "CPU" else kind
    used = devices_used()
    memory = device_memory(device)
    matmul = f", float32 matrix products at {config.matmul_precision} precision" if kind == "TPU" else ""
    unit = "host" if xr.is_spmd() or used == 1 else "process"
    if config.compile_for:
        print(f"device     none: traced on the CPU, compiled for {config.compile_for}")
    else:
        print(f"device     {name}, {used} of {count} devices, {unit} {xr.process_index()} of {xr.process_count()}")
    if memory:
        print(f"memory     {memory['bytes_limit'] / 2**30:.2f} GiB per device")
    print(f"versions   torch {torch.__version__}, torch_xla {torch_xla.__version__}, Python {sys.version.split()[0]}")
    print(f"precision  {config.precision}{matmul}", flush=True)
    if kind == "TPU" or config.compile_for:
        options = (f"{name}={value}" for name, value in flags_in_use(config.tpu_options).items())
        print(f"compiler   {' '.join(options) or 'no options'}, and what torch_xla adds", flush=True)
