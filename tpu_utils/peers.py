"""The processes of one run: how the hosts of a slice meet before the TPU starts, and what they agree on later."""

import datetime
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch_xla._internal import tpu

from config import TrainConfig
from tpu_utils.environment import choose_device
from tpu_utils.errors import DeviceError


def meet_hosts(config: TrainConfig) -> "Peers":
    """This process among those of the run, one for each host of the TPU slice; one alone on the CPU.

    Call it before start_device. Raises DeviceError naming the hosts that are missing.
    """
    index, addresses = tpu_hosts() if choose_device(config) == "tpu" else (0, ["localhost"])
    return wait_for_peers(index, addresses, config.peers_timeout)


def tpu_hosts() -> tuple[int, list[str]]:
    """(index of this host, addresses of all hosts of the TPU slice), from the VM's metadata: no device is touched."""
    try:
        return tpu.worker_id(), tpu.get_worker_ips()
    except (OSError, KeyError, TypeError) as error:
        raise DeviceError(
            f"the hosts of this TPU slice are not known: {error!r}; run on a TPU VM, or set TPU_SKIP_MDS_QUERY=1, "
            "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES"
        ) from error


def wait_for_peers(index: int, addresses: list[str], seconds: float, port: int = 12356) -> "Peers":
    """Meet the other hosts before the TPU is started: it would wait for them for ever, without a word.

    The default process group is theirs afterwards (gloo). Raises DeviceError naming the hosts that are missing.
    """
    count = len(addresses)
    if count == 1:
        return Peers()
    print(
        f"host       {index} of {count}, waiting up to {seconds:g} s for the others at {addresses[0]}:{port}",
        flush=True,
    )
    names, deadline = [f"host_{i}" for i in range(count)], time.monotonic() + seconds
    missing = [0]  # the others are known to be there or not once the first one answers
    try:
        limit = datetime.timedelta(seconds=seconds)
        store = dist.TCPStore(addresses[0], port, count, is_master=index == 0, timeout=limit, wait_for_workers=False)
        store.set(names[index], "here")
        while missing := [i for i, name in enumerate(names) if not store.check([name])]:
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"{count - len(missing)} of {count} hosts answered")
            time.sleep(0.1)
    except dist.DistError as error:
        names = ", ".join(f"host {i} ({addresses[i]})" for i in missing)
        command = f"--worker=all --command={shlex.quote(shlex.join(['python3', *sys.argv]))}"
        raise DeviceError(
            f"host {index} of {count} waited {seconds:g} s for {names}: {str(error).splitlines()[0]}; start the same "
            f"command on all workers:\n  gcloud compute tpus tpu-vm ssh NAME --zone ZONE {command}"
        ) from error
    dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=limit)
    return Peers(index, count)


class Peers:
    """What the processes of one run must agree on, through the hosts' network and never through the devices.

    index, count: of this process. group: a gloo process group, or None for the default one. One process needs neither.
    """

    def __init__(self, index: int = 0, count: int = 1, group=None):
        self.index, self.count, self.group = index, count, group

    def with_own_group(self) -> "Peers":
        """The same processes over a group of their own, for a thread: it would mix its messages with the others'.

        All processes must call it.
        """
        return Peers(self.index, self.count, dist.new_group(backend="gloo")) if self.count > 1 else self

    def gather(self, value: Any) -> list[Any]:
        """What every process gave, in the order of their indices, on all of them."""
        values = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def largest(self, value: int) -> int:
        """The largest value that any process gave."""
        if self.count == 1:
            return value
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return int(values[0])

    def from_first(self, function: Callable[[], Any]) -> Any:
        """What function returned on the first process, the only one to call it; its exception is raised on all."""
        if self.count == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.index == 0:
            try:
                outcome[0] = function()
            except Exception as error:  # whatever it is: the others wait to hear
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.group, device=torch.device("cpu"))
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
