"""The torch.compile backend: the names of tpu_utils.device where torch_xla is not installed.

Dynamo makes one graph of a step, its backward pass and the optimizer's update in it. Where torch_tpu has registered a
TPU, its backend compiles the graph; on an NVIDIA GPU inductor does, and the step is replayed as one CUDA graph
(gpu.py). On the CPU torch runs the graph operation by operation, unless inductor is asked for: that shows that a step
is one graph and what it computes, and nothing of a speed. A process has one device; of a language model torchrun starts
several (language/xla/shards.py). docs/torchtpu.md says what was tried.
"""

import math
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tpu_utils.base.errors import InputError


def _device_type() -> str:
    """As PJRT_DEVICE says, else a TPU that torch_tpu has found, else a GPU, else the CPU."""
    asked, found = os.environ.get("PJRT_DEVICE", ""), torch.accelerator.current_accelerator()
    if asked == "CPU" or found is None or not torch.accelerator.is_available():
        return "cpu"
    return found.type if found.type in ("tpu", "cuda") else "cpu"


DEVICE_TYPE = _device_type()
IS_GPU = DEVICE_TYPE == "cuda"
READ_ERROR_MARKERS = ()  # compile_step() says it itself
ON_CPU = "no TPU, no torch_xla: the one graph of torch.compile; its speed says nothing"
IS_XLA = False
BACKEND = "torch.compile"
TRACE_VIEWER = "open the newest .json file of {} in ui.perfetto.dev"

if not hasattr(torch._dynamo.config, "trace_autograd_ops"):  # what it computes by it is compared: against_eager.py
    raise ImportError(
        f"torch_xla is not installed, and torch {torch.__version__} takes no backward pass into a graph; expected "
        "torch_xla, of requirements.txt, or torch 2.13, of requirements-compile.txt, in an environment of its own"
    )


def choose_compiler(name: str, deterministic: bool) -> None:
    """name: inductor, eager or auto. deterministic: a GPU's kernels give the same bits each time."""
    from tpu_utils.device import dynamo  # not read beside torch_xla, as below

    dynamo.compiler = name
    if IS_GPU:
        from tpu_utils.device.gpu import prepare  # only for a GPU

        prepare(deterministic)


def device_type() -> str:
    return "GPU" if IS_GPU else DEVICE_TYPE.upper()


def device_name() -> str:
    """The model of a GPU, such as "NVIDIA H200"; empty for another device."""
    return torch.cuda.get_device_name() if IS_GPU else ""


def current_device() -> torch.device:
    """Raises InputError in a process of several that did not join the others: each would train alone."""
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        raise InputError(
            "torchrun has started this script, which has one device without torch_xla; expected transformer_tpu.py, "
            "or no torchrun"
        )
    return torch.device(DEVICE_TYPE)


def device_count() -> int:
    """Processes that this one has joined: each has one device."""
    return dist.get_world_size() if dist.is_initialized() else 1


def process_index() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


replica_count = process_count = device_count
global_ordinal = process_index


def is_spmd() -> bool:
    """No program is that of all devices."""
    return False


def wait_device_ops() -> None:
    if DEVICE_TYPE != "cpu":
        torch.accelerator.synchronize()


def device_memory(device: torch.device) -> dict[str, int] | None:
    """{"bytes_used", "bytes_limit", "peak_bytes_used"} of a GPU. torch_tpu 0.2.0 has no public name for what is in use.
    The comparison of a first call with eager PyTorch is not in the peak."""
    if not IS_GPU:
        return None
    used, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return dict(bytes_used=used, bytes_limit=torch.cuda.mem_get_info(device)[1], peak_bytes_used=peak)


def compile_step(function: Callable, begin: Callable = lambda: None, keep_rates: Callable = lambda _: None) -> Callable:
    """As dynamo.compile_step()."""
    from tpu_utils.device import dynamo

    return dynamo.compile_step(function, begin, keep_rates, DEVICE_TYPE)


def graphs_compiled() -> int:
    """Graphs that Dynamo has made in this process so far."""
    return counters["stats"]["unique_graphs"]


def operations_traced() -> int:
    """Nothing outside of a step is traced."""
    return 0


def operations_on_host() -> dict[str, int]:
    """A graph has none."""
    return {}


_sent = Counter()


def transfers_to_device() -> int:
    """Batches that send() has sent so far, of a mesh arrays. torch waits for other uploads: transfers_from_device()."""
    return _sent["transfers"]


def transfers_from_device() -> float:
    """Calls that waited for the GPU so far; nan where they are not counted."""
    if not IS_GPU:
        return float("nan")
    from tpu_utils.device.gpu import waits

    return waits().count


class Mesh:
    """Axes of devices, of which each process has one. Those but the first two have size 1."""

    def __init__(self, devices: np.ndarray, sizes: tuple[int, ...], axes: tuple[str, ...]):
        self.axis_names, self.mesh_shape, self.grid_axes = axes, sizes, axes[:2]
        self.grid = init_device_mesh(DEVICE_TYPE, sizes[:2], mesh_dim_names=axes[:2]) if len(devices) > 1 else None

    def __deepcopy__(self, memo: dict) -> "Mesh":
        return self  # one for the process, whatever is copied that knows it

    def size(self) -> int:
        return math.prod(self.mesh_shape)

    def shape(self) -> dict[str, int]:
        return dict(zip(self.axis_names, self.mesh_shape, strict=True))


class BatchSharding:
    """A process reads its own rows of a batch."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]):
        self.part, self.num_parts = process_index(), device_count()


def send(batch, device: torch.device, sharding: BatchSharding | None = None) -> list[torch.Tensor]:
    """A batch, a host array or a tuple of them, on the device."""
    arrays = batch if isinstance(batch, tuple | list) else (batch,)
    tensors = [torch.from_numpy(array) if isinstance(array, np.ndarray) else array for array in arrays]
    _sent["transfers"] += len(tensors) if sharding else 1
    if IS_GPU:
        from tpu_utils.device.gpu import upload

        return upload(tensors, device)
    return [tensor.to(device, non_blocking=DEVICE_TYPE == "tpu", copy=True) for tensor in tensors]


def pending_operation(tensor: torch.Tensor) -> str:
    """What stands outside of a step has been computed when it is called."""
    return ""


def sharding_spec(tensor: torch.Tensor) -> str:
    """DTensor's words; "": none."""
    return str(tensor.placements) if is_sharded(tensor) else ""


def register(name: str, function: Callable) -> Callable:
    """A lowering for XLA, which nobody here has."""

    def refused(*_: Any):
        raise InputError(f"{name} needs torch_xla, which is not installed")

    return refused


def wrap_if_sharded(tensor: torch.Tensor) -> Any:
    """A DTensor in the words of checkpoints: those of torch_xla's XLAShardedTensor."""
    from tpu_utils.device.local_shards import LocalShards  # only for several processes

    return LocalShards(tensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it lies on the devices of a mesh, in parts or whole on each."""
    return isinstance(tensor, DTensor)


def put(target: torch.Tensor, value: torch.Tensor) -> None:
    if is_sharded(target):
        wrap_if_sharded(target).put(value)
    else:
        with torch.no_grad():
            target.copy_(value)


def get_rng_state() -> int:
    """Stands in a checkpoint for the running seed of torch_xla, which begins with the run's."""
    return torch.initial_seed()


def TraceMe(name: str, **_: Any) -> AbstractContextManager:
    return torch.profiler.record_function(name)


_traces = []


def start_trace(folder: str) -> None:
    handler = torch.profiler.tensorboard_trace_handler(folder)
    _traces.append(torch.profiler.profile(on_trace_ready=handler))
    _traces[0].start()


def stop_trace() -> None:
    _traces.pop().stop()


def init_process_group(*_: Any, **__: Any) -> None:
    raise InputError("a process for each device needs torch_xla, which is not installed; run simple_mnist_tpu.py")


all_reduce = broadcast_master_param = sync = init_process_group
set_mat_mul_precision = torch.set_float32_matmul_precision


def nothing(*_: Any) -> None:
    """What XLA has to be told: of meshes and shardings (parameters are shards from the start: language/xla/shards.py),
    of an order, and of a seed (torch.manual_seed() has seeded the device, and steps draw nothing from it)."""


use_spmd = mark_sharding = get_global_mesh = set_global_mesh = optimization_barrier_ = set_rng_state = nothing


def unchanged(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """It stays as and where it is."""
    return tensor


place_to_host = place_to_device = mark_sharding_with_gradients = unchanged
