"""The one room that knows the backend, PyTorch/XLA: scripts, models and the other rooms have all of it from here.

Names are the field's own. The device is started, seeded and described; a step is compiled and counted; tensors are
sent, placed on a mesh, and read back in shards. Where torch_xla is not installed, torch_compile.py has these names.
"""

import math
import os
import random
import re
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from tpu_utils.base.errors import CheckpointError, DeviceError, first_line
from tpu_utils.base.hardware import attached_chips
from tpu_utils.options.compiler_flags import flags_in_use
from tpu_utils.options.environment import choose_device

if TYPE_CHECKING:
    from tpu_utils.options.train_config import TrainConfig

# else model.to(device) makes two of a parameter that stands in two places, as tied weights do
torch.__future__.set_swap_module_params_on_conversion(True)
if find_spec("torch_xla"):
    import torch_xla
    import torch_xla.backends
    import torch_xla.core.xla_model as xm
    import torch_xla.core.xla_op_registry as xla_ops
    import torch_xla.debug.metrics as met
    import torch_xla.debug.profiler as xp
    import torch_xla.distributed.spmd as xs
    import torch_xla.experimental.stablehlo_custom_call as custom_call
    import torch_xla.runtime as xr

    DEVICE_TYPE = "xla"
    """Device type of tensors on the device, and its name in torch.autocast."""
    READS = ("Unexpected execution", "tensor_data")
    """What an error says of a step that reads a tensor."""
    MOVES = re.compile("copy_from|to_copy|to_cpu|detach|propagate|empty|scalar|view")
    IS_XLA, BACKEND, ON_CPU = True, f"torch_xla {torch_xla.__version__}", "XLA CPU backend: no TPU"
    current_device, set_mat_mul_precision = torch_xla.device, torch_xla.backends.set_mat_mul_precision
    # a device, those of all hosts, and the processes that have them
    device_type, global_ordinal = xr.device_type, xr.global_ordinal
    process_index, process_count, is_spmd, use_spmd = xr.process_index, xr.process_count, xr.is_spmd, xr.use_spmd
    device_count, wait_device_ops, sync = xr.global_runtime_device_count, xm.wait_device_ops, torch_xla.sync
    broadcast_master_param = xm.broadcast_master_param
    all_reduce = partial(xm.all_reduce, xm.REDUCE_SUM, pin_layout=False)  # the sum over the processes, on the devices
    # a mesh, and marks of how a tensor is sharded over it
    Mesh, mark_sharding = xs.Mesh, xs.mark_sharding
    mark_sharding_with_gradients = xs.mark_sharding_with_gradients
    get_global_mesh, set_global_mesh, wrap_if_sharded = xs.get_global_mesh, xs.set_global_mesh, xs.wrap_if_sharded
    sharding_spec = torch_xla._XLAC._get_xla_sharding_spec  # XLA's words; "": none
    # operations: a lowering of one's own, what XLA may not move across, the host's memory
    register, optimization_barrier_ = xla_ops.register, xm.optimization_barrier_
    place_to_host, place_to_device = custom_call.place_to_host, custom_call.place_to_device
    # the running seed of the device, and traces
    get_rng_state, set_rng_state = xm.get_rng_state, xm.set_rng_state
    start_trace, stop_trace = xp.start_trace, xp.stop_trace
    # The base class of xp.Trace and xp.StepTrace. Those also push a scope that names the operations inside, which would
    # make another graph, and StepTrace syncs at its end. TraceMe does neither; without a running trace it does nothing.
    TraceMe = torch_xla._XLAC.profiler.TraceMe
    if "PT_XLA_DEBUG_LEVEL" not in os.environ:  # else 30 lines on stderr before the one that says what a step reads
        os.environ.setdefault("PT_XLA_DEBUG_FILE", os.devnull)
    # of torch_xla about its own insides, and a save would print it in the middle of the run
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch_xla\.distributed\.spmd")


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
    torch.manual_seed(config.seed)
    seed_host(config.seed)
    set_rng_state(config.seed)
    return device, joined


replica_tried: ContextVar[Any] = ContextVar("replica_tried", default=None)
"""Which one of several replicas a step is tried as on the host, in a thread for each: first_step.Replica."""


def world_size() -> int:
    """Processes, each with a device, that run one program."""
    replica = replica_tried.get()
    return replica.count if replica else xr.world_size()


def devices_used() -> int:
    """Devices of all hosts that this run computes on."""
    return device_count() if is_spmd() else world_size()


def peak_flops() -> float | None:
    """Peak dense bf16 FLOP/s of devices_used(), or None where the chip is unknown (CPU)."""
    chips = attached_chips() if device_type() == "TPU" else []
    return devices_used() * chips[0].bf16_tflops * 1e12 / chips[0].devices_per_chip if chips else None


def device_memory(device: torch.device) -> dict[str, int] | None:
    """{"bytes_used", "bytes_limit", "peak_bytes_used"} of one device, or None where the runtime does not tell: on the
    CPU, and under SPMD, where torch_xla raises "MemoryInfo not supported for SPMD virtual device"."""
    if device_type() != "TPU" or is_spmd():
        return None
    return {name: int(value) for name, value in xm.get_memory_info(device).items()}


def print_banner(config: "TrainConfig", device: torch.device) -> None:
    """What this run runs on, before anything is compiled."""
    count, kind = device_count(), device_type()
    chips = attached_chips() if kind == "TPU" else []
    name = f"TPU {chips[0].name}" if chips else f"CPU ({ON_CPU})" if kind == "CPU" else kind
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
        options = (f"{name}={value}" for name, value in flags_in_use(config.tpu_options).items())
        print(f"compiler   {' '.join(options) or 'no options'}, and what torch_xla adds", flush=True)


def compile_step(function: Callable, begin: Callable[[], None] = lambda: None) -> Callable:
    """The function as one graph. An error of READS: it reads a tensor. begin: called once nothing before it pends."""
    from tpu_utils.device.batch_norm import average_as_pytorch  # torch_xla's are biased

    average_as_pytorch(DEVICE_TYPE)

    @wraps(function)
    def begun(*arguments, **keywords):
        begin()
        return function(*arguments, **keywords)

    return torch_xla.compile(begun, full_graph=True, name=function.__name__)


def graphs_compiled() -> int:
    """Programs compiled, or read from the compile cache, by this process so far."""
    return sum(met.counter_value(name) or 0 for name in ("UncachedCompile", "PersistentCacheHit"))


def operations_traced() -> int:
    """Operations on tensors of the device so far, but for those that move one or look at it."""
    names = (name for name in met.counter_names() if name.startswith("xla::") and not MOVES.search(name))
    return sum(met.counter_value(name) or 0 for name in names)


def operations_on_host() -> dict[str, int]:
    """How often operations that torch_xla has no lowering for were computed on the host so far, by name."""
    found = (name for name in met.counter_names() if name.startswith("aten::"))
    return {name: met.counter_value(name) for name in found if name != "aten::_local_scalar_dense"}  # .item()


def transfers_to_device() -> int:
    """Host-to-device transfers of this process so far, by torch_xla's own counter."""
    return (met.metric_data("TransferToDeviceTime") or [0])[0]


def transfers_from_device() -> int:
    """Device-to-host transfers of this process so far, by torch_xla's own counter."""
    return (met.metric_data("TransferFromDeviceTime") or [0])[0]


class BatchSharding:
    """Shards axis 0 of every tensor of a batch over mesh axes. A host reads `part` of `num_parts` of the rows.

    An xs.ShardingSpec fits tensors of one number of axes, and silently leaves others replicated (xla_spec).
    If rows are replicated over another mesh axis, torch_xla 2.9 cannot assemble them from several hosts (runtime check:
    "Minibatch sharding only supports sharding along the batch dimension"): then every host reads the whole batch.
    """

    def __init__(self, mesh: "Mesh", axes: tuple[str, ...]):
        self._mesh, self._axes = mesh, axes
        shards = math.prod(size for name, size in mesh.shape().items() if name in axes)
        self.minibatch = process_count() > 1 and shards == mesh.size()
        self.part, self.num_parts = (process_index(), process_count()) if self.minibatch else (0, 1)

    def xla_spec(self, tensor: torch.Tensor):
        spec = (self._axes,) + (None,) * (tensor.dim() - 1)
        return xs.ShardingSpec(self._mesh, spec, minibatch=self.minibatch).xla_spec(tensor)


def send(batch, device: torch.device, sharding: BatchSharding | None = None) -> list[torch.Tensor]:
    """Send a batch, a host array or a tuple of them: in one transfer, or when it is sharded in one for each array."""
    arrays = batch if isinstance(batch, tuple | list) else (batch,)
    tensors = [torch.from_numpy(array) if isinstance(array, np.ndarray) else array for array in arrays]
    return xm.send_cpu_data_to_device(tensors, device, sharding)


def pending_operation(tensor: torch.Tensor) -> str:
    """The operation that would compute it; prim::Constant: a host scalar of 0 or 1. "": it has its data."""
    text = torch_xla._XLAC._get_xla_tensor_debug_info(getattr(tensor, "global_tensor", tensor))
    line = next(line for line in text.splitlines() if line.startswith("IR: "))
    operation = re.search(r"\w+::\w+", line.rpartition("] ")[2])  # after [scope]; no match: "IR: None"
    return operation[0] if operation and operation[0] != "xla::device_data" else ""


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether its devices hold different shards of it."""
    sharded = xs.wrap_if_sharded(tensor)
    kinds = (xs.ShardingType.TILED, xs.ShardingType.PARTIAL)  # not REPLICATED: one whole copy each
    return isinstance(sharded, xs.XLAShardedTensor) and sharded.sharding_type in kinds


def put(target: torch.Tensor, value: torch.Tensor) -> None:
    """copy_ from the host to where the target is, sharded or not.

    Into a tensor with a sharding, copy_ is a traced operation: a graph of its own before step 1. So the sharding is
    cleared and marked again, by the private calls below xs.clear_sharding and xs.mark_sharding, which needs the mesh.
    """
    sharding = torch_xla._XLAC._get_xla_op_sharding(target) if target.device.type == DEVICE_TYPE else None
    if sharding is not None:
        torch_xla._XLAC._xla_clear_sharding(target)
    with torch.no_grad():
        target.copy_(value)
    if sharding is not None:
        torch_xla._XLAC._xla_mark_sharding(target, sharding)


def seed_host(*seed: int) -> None:
    """NumPy's and Python's own generators. They stand in no checkpoint, as libraries draw from them in threads: a run
    seeds them anew for each step."""
    np.random.seed(seed)
    random.seed(str(seed))


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


def init_process_group(tracing: bool) -> None:
    """This process among those that torchrun has started. tracing: as replica 0 of all devices of a slice."""
    import torch_xla.distributed.xla_backend  # registers the process group "xla" and init_method "xla://"

    if tracing:
        xm.set_replication(torch_xla.device(), xm.get_xla_supported_devices())
    if dist.is_torchelastic_launched():
        dist.init_process_group("xla", init_method="xla://")
    else:  # a replica alone: xla:// would listen on all addresses for others
        dist.init_process_group("xla", store=dist.HashStore(), rank=global_ordinal(), world_size=world_size())


def torch_compile_names() -> dict[str, Any]:
    """Names of this file as the torch.compile backend defines them."""
    from tpu_utils.device import torch_compile  # only where there is no torch_xla: a copy may go without

    return {name: value for name, value in vars(torch_compile).items() if not name.startswith("_")}


if not find_spec("torch_xla"):
    globals().update(torch_compile_names())
