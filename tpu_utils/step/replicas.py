"""A process for each device: replicas that torchrun starts, whose gradients DistributedDataParallel averages.

The private interfaces of torch that DDP needs are here.
"""

import os
import shlex
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tpu_utils.base.errors import InputError
from tpu_utils.base.process import Peers
from tpu_utils.device import (
    IS_XLA,
    all_reduce,
    broadcast_master_param,
    global_ordinal,
    init_process_group,
    replica_tried,
    sync,
    world_size,
)
from tpu_utils.options.environment import attached_chips, choose_device

if TYPE_CHECKING:
    from tpu_utils.options.train_config import TrainConfig


def check_launched(config: "TrainConfig") -> None:
    """Raises InputError unless each device of this host has a process of its own, started by torchrun."""
    if not IS_XLA:
        raise InputError("DDP needs torch_xla, which is not installed; use simple_mnist_tpu.py or transformer_tpu.py")
    if choose_device(config) == "cpu":
        found = max(int(os.environ.get(name, 1)) for name in ("CPU_NUM_DEVICES", "WORLD_SIZE"))
        if found > 1 and not config.compile_for:
            raise InputError(
                f"ddp_mnist_tpu.py has {found} virtual CPU devices, but the XLA CPU client cannot run collectives "
                "between replicas; use distributed_mnist_tpu.py for many virtual devices, or one device"
            )
        return
    num_devices = sum(chip.devices_per_chip for chip in attached_chips())
    if num_devices > 1 and not dist.is_torchelastic_launched():
        raise InputError(
            f"DDP needs a process for each of this host's {num_devices} devices, found one; start it with\n"
            f"  torchrun --standalone --nproc_per_node={num_devices} {shlex.join(sys.argv)}"
        )


def join_replicas(config: "TrainConfig") -> Peers:
    """Become one replica among those that torchrun has started. Returns the processes of the run."""
    init_process_group(tracing=bool(config.compile_for))
    if config.compile_for or world_size() == 1:
        return Peers()
    from tpu_utils.remote.meeting import meet_replicas  # only where there are several

    return meet_replicas(global_ordinal(), world_size(), config.peers_timeout)


def over_replicas(value: torch.Tensor) -> torch.Tensor:
    """The sum over the replicas, on the devices. Of a tensor on the host itself, or the sum over the replicas that a
    step is tried as: check_model() tries steps there."""
    if replica := replica_tried.get():
        return replica.sum(value)
    is_alone = world_size() == 1 or value.device.type == "cpu"
    return value if is_alone else all_reduce(value)


def mean_over_replicas(value: torch.Tensor) -> torch.Tensor:
    """As over_replicas(), divided by their number: as DDP does with gradients."""
    return over_replicas(value) / world_size()


def replicate(model: nn.Module, tracing: bool) -> DistributedDataParallel:
    """Same weights on all replicas, and gradients that are averaged as the backward pass produces them.

    tracing: no other replica runs, so nothing may be exchanged. Raises InputError for layers whose statistics would be
    those of one replica's part of the batch.
    """
    batch_norm, either = nn.modules.batchnorm._BatchNorm, nn.modules.batchnorm._NormBase  # InstanceNorm is the other
    found = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, either) and module.training
        if isinstance(module, batch_norm) or module.track_running_stats
    ]
    if found and world_size() > 1:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise InputError(
            f"there are {world_size()} replicas, and in each {', '.join(found[:3])}{more} would have the "
            "statistics of its own part of the batch, and buffers unlike the others'; use distributed_mnist_tpu.py, "
            "where they are over the global batch, or a norm over each example, such as GroupNorm"
        )
    if not tracing:
        broadcast_master_param(model)
    # init_sync would compare shapes through the host; views of the buckets would be other graphs in steps 1 and 2
    replica = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False, gradient_as_bucket_view=False)
    # after one backward pass the reducer would agree on new buckets through the host, in the middle of a compiled step
    replica.reducer._push_all_rebuilt_params()
    replica.reducer._rebuild_buckets()
    if not tracing:
        sync()  # the buckets exist now, for step 1 as for all others
    return replica
