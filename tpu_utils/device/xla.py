"""The torch_xla backend: what scripts, models and the other rooms use of it, by torch_xla's own names and by functions.
torch_compile.py has the same names for torch's own compiler."""

# ruff: noqa: F401 (tpu_utils.device has them from here)

import math
import os
import re
import warnings
from collections.abc import Callable
from functools import partial, wraps

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
from torch_xla import device as current_device
from torch_xla import sync
from torch_xla.backends import set_mat_mul_precision
from torch_xla.core.xla_model import (
    broadcast_master_param,
    get_rng_state,
    optimization_barrier_,
    set_rng_state,
    wait_device_ops,
)
from torch_xla.core.xla_op_registry import register
from torch_xla.debug.profiler import start_trace, stop_trace
from torch_xla.distributed.spmd import (
    Mesh,
    get_global_mesh,
    mark_sharding,
    mark_sharding_with_gradients,
    set_global_mesh,
    wrap_if_sharded,
)
from torch_xla.experimental.stablehlo_custom_call import place_to_device, place_to_host
from torch_xla.runtime import device_type, global_ordinal, is_spmd, process_count, process_index, use_spmd
from torch_xla.runtime import global_runtime_device_count as device_count
from torch_xla.runtime import world_size as replica_count

DEVICE_TYPE = "xla"
"""Device type of tensors on the device, and its name in torch.autocast."""
READ_ERROR_MARKERS = ("Unexpected execution", "tensor_data")
"""What an error says of a step that reads a tensor."""
MOVES = re.compile("copy_from|to_copy|to_cpu|detach|propagate|empty|scalar|view")
"""Operations that move a tensor or look at it."""
IS_XLA = True
BACKEND = f"torch_xla {torch_xla.__version__}"
ON_CPU = "XLA CPU backend: no TPU"
TRACE_VIEWER = "tensorboard --logdir {} (tab Profile)"

all_reduce = partial(xm.all_reduce, xm.REDUCE_SUM, pin_layout=False)
"""Sum over the processes, on the devices."""
sharding_spec = torch_xla._XLAC._get_xla_sharding_spec
"""How a tensor is sharded, in XLA's words; "": not."""
# The base class of xp.Trace and xp.StepTrace. Those also push a scope that names the operations inside, which would
# make another graph, and StepTrace syncs at its end. TraceMe does neither; without a running trace it does nothing.
TraceMe = torch_xla._XLAC.profiler.TraceMe

if "PT_XLA_DEBUG_LEVEL" not in os.environ:  # else 30 lines on stderr before the one that says what a step reads
    os.environ.setdefault("PT_XLA_DEBUG_FILE", os.devnull)
# torch_xla warns of its own insides, and a save would print that in the middle of the run
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch_xla\.distributed\.spmd")


def choose_compiler(name: str, deterministic: bool) -> None:
    """XLA, whose kernels are deterministic: choose_device() has refused another one."""


def device_name() -> str:
    """Empty: a TPU is known by its place on the PCI bus (environment.attached_chips)."""
    return ""


def device_memory(device: torch.device) -> dict[str, int] | None:
    """{"bytes_used", "bytes_limit", "peak_bytes_used"} of one device, or None where the runtime does not tell: on the
    CPU, and under SPMD, where torch_xla raises "MemoryInfo not supported for SPMD virtual device"."""
    if device_type() != "TPU" or is_spmd():
        return None
    return {name: int(value) for name, value in xm.get_memory_info(device).items()}


def compile_step(function: Callable, begin: Callable = lambda: None, keep_rates: Callable | None = None) -> Callable:
    """The function as one graph. begin: called once nothing before it pends. keep_rates: torch_compile.py needs it. An
    error of the graph that has READ_ERROR_MARKERS is of a step that reads a tensor."""
    from tpu_utils.device.as_pytorch import average_as_pytorch, elu_as_pytorch  # torch_xla's are other numbers

    average_as_pytorch(DEVICE_TYPE)
    elu_as_pytorch()

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
    names = (name for name in met.counter_names() if name.startswith("aten::"))
    return {name: met.counter_value(name) for name in names if name != "aten::_local_scalar_dense"}  # .item()


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

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]):
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
    sharded = wrap_if_sharded(tensor)
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


def init_process_group(tracing: bool) -> None:
    """This process among those that torchrun has started. tracing: as replica 0 of all devices of a slice."""
    from torch_xla.distributed import xla_backend  # registers the process group "xla" and init_method "xla://"

    if tracing:
        xm.set_replication(current_device(), xm.get_xla_supported_devices())
    if dist.is_torchelastic_launched():
        dist.init_process_group("xla", init_method="xla://")
    else:  # a replica alone: xla:// would listen on all addresses for others
        dist.init_process_group("xla", store=dist.HashStore(), rank=global_ordinal(), world_size=replica_count())
    if tracing:  # no other replica runs: what replica 0 broadcasts, it has
        dist.group.WORLD.broadcast = lambda tensors, options: xla_backend._ret_work(tensors)
