"""The one room that knows the backend: scripts, models and the other rooms have all of it from here.

Names are the field's own. The device is started, seeded and described; a step is compiled and counted; tensors are
sent, placed on a mesh, and read back in shards: by torch_xla (xla.py), or where that is not installed by torch's own
compiler (torch_compile.py).
"""

import random
import sys
from collections.abc import Callable
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpu_utils.base.errors import CheckpointError, DeviceError, first_line
from tpu_utils.options.environment import attached_chips, choose_device

# ruff: noqa: F405
if find_spec("torch_xla"):
    from tpu_utils.device.xla import *  # noqa: F403
else:
    from tpu_utils.device.torch_compile import *  # noqa: F403

if TYPE_CHECKING:
    from tpu_utils.options.train_config import TrainConfig

# else model.to(device) makes two of a parameter that stands in two places, as tied weights do
torch.__future__.set_swap_module_params_on_conversion(True)


def start_device(config: "TrainConfig", join: Callable[[], Any] = lambda: None) -> tuple[torch.device, Any]:
    """Choose, start and seed the XLA device; set the precision of matrix products. Returns it, and what join returned.

    join: use_spmd, or what joins a process group. It is called after the environment is settled and before a device
    is touched.
    Call it before anything touches a device: PJRT_DEVICE is read once. Raises DeviceError instead of falling back.
    """
    chosen = choose_device(config)
    if config.matmul_precision != "default":
        set_mat_mul_precision(config.matmul_precision)
    try:
        joined = join()
        device = current_device()
    except RuntimeError as error:
        raise DeviceError(
            f"the {chosen} device does not start: {first_line(error)}; is another process using it?"
        ) from error
    if (started := device_type().lower()) != chosen:
        raise DeviceError(
            f"asked for device {chosen}, the runtime started {started}; unset PJRT_DEVICE or pass --device"
        )
    choose_compiler(config.compile, config.deterministic)
    torch.manual_seed(config.seed)
    seed_host(config.seed)
    set_rng_state(config.seed)
    return device, joined


replica_tried: ContextVar[Any] = ContextVar("replica_tried", default=None)
"""Which one of several replicas a step is tried as on the host, in a thread for each: first_step.Replica."""


def world_size() -> int:
    """Processes, each with a device, that run one program."""
    replica = replica_tried.get()
    return replica.count if replica else replica_count()


def devices_used() -> int:
    """Devices of all hosts that this run computes on."""
    return device_count() if is_spmd() else world_size()


def peak_flops() -> float | None:
    """Peak dense bf16 FLOP/s of devices_used(), or None where the chip is unknown (CPU, another GPU)."""
    if name := device_name():
        from tpu_utils.base.gpus import gpu_named  # only on a GPU

        gpu = gpu_named(name)
        return gpu and gpu.bf16_tflops and devices_used() * gpu.bf16_tflops * 1e12
    chips = attached_chips() if device_type() == "TPU" else []
    return devices_used() * chips[0].bf16_tflops * 1e12 / chips[0].devices_per_chip if chips else None


def print_banner(config: "TrainConfig", device: torch.device) -> None:
    """What this run runs on, before anything is compiled."""
    count, kind = device_count(), device_type()
    chips = attached_chips() if kind == "TPU" else []
    name = f"TPU {chips[0].name}" if chips else f"CPU ({ON_CPU})" if kind == "CPU" else f"{kind} {device_name()}"
    used = devices_used()
    memory = device_memory(device)
    matmul = f", float32 matrix products at {config.matmul_precision} precision" if kind == "TPU" else ""
    unit = "host" if is_spmd() or used == 1 else "process"
    if config.compile_for:
        print(f"device     none: traced on the CPU, compiled for {config.compile_for}")
    else:
        print(f"device     {name}, {used} of {count} devices, {unit} {process_index()} of {process_count()}")
    if memory:
        print(f"memory     {memory['bytes_limit'] / 2**30:.2f} GiB per device")
    print(f"versions   torch {torch.__version__}, {BACKEND}, Python {sys.version.split()[0]}")
    print(f"precision  {config.precision}{matmul}", flush=True)
    if kind == "TPU" or config.compile_for:
        from tpu_utils.options.compiler_flags import flags_in_use  # only here

        options = (f"{name}={value}" for name, value in flags_in_use(config.tpu_options).items())
        print(f"compiler   {' '.join(options) or 'no options'}, and what torch_xla adds", flush=True)


def seed_host(*seed: int) -> None:
    """NumPy's and Python's own generators, and a GPU's. They stand in no checkpoint, as libraries draw from them in
    threads, and other devices have no place for a GPU's: a run seeds them anew for each step."""
    np.random.seed(seed)
    random.seed(str(seed))
    if DEVICE_TYPE == "cuda":
        torch.cuda.manual_seed(seed[0] << 32 | seed[-1])


def random_state() -> dict[str, torch.Tensor]:
    """The generators of torch that a script or a layer may draw from, of this host and of the device."""
    return {"torch": torch.get_rng_state(), "xla": torch.tensor([get_rng_state()], dtype=torch.uint64)}


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Raises CheckpointError when it is not what random_state() gives."""
    try:
        torch.set_rng_state(state["torch"])
    except RuntimeError as error:  # the bytes are no state of the generator
        raise CheckpointError(f"the checkpoint's random state is none: {error}; start in another --run_dir") from error
    set_rng_state(int(state["xla"].numpy()[0]))  # int() of a torch.uint64 overflows
