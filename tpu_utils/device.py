"""The device a run is on: started, seeded, and described."""

import sys
from collections.abc import Callable

import numpy as np
import torch
import torch_xla
import torch_xla.backends
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch.utils.flop_counter import FlopCounterMode

from config import TrainConfig
from tpu_compiler.flags import flags_in_use
from tpu_compiler.hardware import attached_chips
from tpu_utils.environment import choose_device
from tpu_utils.errors import DeviceError, InputError, first_line, line_of


def start_device(config: TrainConfig, join: Callable[[], None] = lambda: None) -> torch.device:
    """Choose, start and seed the XLA device; set the precision of matrix products.

    join: makes this process part of something larger, xr.use_spmd or a process group. It is called when the
    environment is settled and no device has been touched: neither may come later.
    Call it before anything touches a device: PJRT_DEVICE is read once. Raises DeviceError instead of falling back.
    """
    chosen = choose_device(config)
    if config.matmul_precision != "default":
        torch_xla.backends.set_mat_mul_precision(config.matmul_precision)
    try:
        join()
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
    return device


def devices_used() -> int:
    """Devices of all hosts that this run computes on."""
    return xr.global_runtime_device_count() if xr.is_spmd() else xr.world_size()


def check_replicated(model: torch.nn.Module) -> None:
    """Raises InputError for layers whose statistics would be those of one replica's part of the batch."""
    kinds = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.instancenorm._InstanceNorm)
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds) and module.training]
    found = [
        f"{name} ({type(module).__name__})"
        for name, module in norms
        if isinstance(module, kinds[0]) or module.track_running_stats
    ]
    if found and xr.world_size() > 1:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise InputError(
            f"strategy ddp has {xr.world_size()} replicas, and in each {', '.join(found[:3])}{more} would have the "
            "statistics of its own part of the batch, and buffers unlike the others'; use --strategy spmd, where "
            "they are over the global batch, or a norm over each example, such as GroupNorm"
        )


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


def print_banner(config: TrainConfig, device: torch.device) -> None:
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


def check_model(
    build: Callable[[], torch.nn.Module],
    images: np.ndarray,
    labels: np.ndarray,
    num_classes: int | None,
    regression: bool = False,
) -> int:
    """Run the model both ways on a few examples, by PyTorch and without memory, before anything is compiled.

    Returns the FLOPs of the matrix work in the forward and backward pass of one example. images, labels: of the
    training set, as a batch has them. num_classes: of labels that are classes. regression: the script's loss is of
    targets that are floats, so num_classes is None; a loss of classes would truncate them. Raises InputError when the
    model does not take such images, or does not have an output for each class.
    """
    shape = f"{images.dtype} {images.shape}"
    if regression != (num_classes is None):
        kind, loss = ("targets", "classes") if num_classes is None else ("classes", "targets")
        raise InputError(
            f"labels are {labels.dtype}, {kind}, but the loss of this script is of {loss}; expected whole numbers from "
            "0 on for classes, floats for a regression; convert the labels, or change the loss and the accuracy, and "
            f"give check_model regression={not regression}"
        )
    try:
        with torch.device("meta"):
            model = build()
            inputs = torch.from_numpy(images).to("meta")
        with FlopCounterMode(display=False) as counter:
            outputs = model(inputs)
            if isinstance(outputs, torch.Tensor):
                outputs.sum().backward()
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:  # torchvision asserts sizes
        if "meta tensors" in str(error):
            raise InputError(
                f"the model reads a tensor at {line_of(error)}; expected none of .item(), print(tensor), if on a "
                "tensor in forward: inside a compiled step nothing is read"
            ) from error
        raise InputError(
            f"the model does not take a batch of images {shape}: {first_line(error)}; expected one for "
            "the images of the data set, pictures with channels first; change one of them; --debug shows the line"
        ) from error
    if not isinstance(outputs, torch.Tensor):
        raise InputError(
            f"the model returns {type(outputs).__name__} for images {shape}; expected a tensor of logits; return "
            "that, of a Hugging Face model output.logits"
        )
    found, kind = f"the model returns {tuple(outputs.shape)} for images {shape}", f"labels {labels.shape}"
    if num_classes is not None and (outputs.ndim < 2 or outputs.shape[1] < num_classes):
        raise InputError(
            f"{found}, but labels go up to {num_classes - 1}; expected logits for {num_classes} classes along axis 1 "
            "(labels that begin at 1: subtract 1)"
        )
    if num_classes is not None and outputs.shape[:1] + outputs.shape[2:] != labels.shape:
        raise InputError(
            f"{found}, but {kind}; expected a label for each row of logits; reshape the labels (one-hot: argmax(1))"
        )
    if num_classes is None and outputs.shape != labels.shape and outputs.squeeze().shape == labels.squeeze().shape:
        # a loss would compare each with each
        raise InputError(f"{found}, but {kind}; expected the same shape; reshape one of the two")
    return counter.get_total_flops() // len(images)
