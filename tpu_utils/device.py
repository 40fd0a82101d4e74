"""The device a run is on, the hosts it is on with, and the way its batches go there."""

import datetime
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.backends
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla._internal import tpu

from config import InputError, TrainConfig
from tpu_utils.errors import DeviceError


class Generation(NamedTuple):
    """One TPU chip. Source: cloud.google.com/tpu/docs, system architecture; PCI ids: torch_xla/_internal/tpu.py."""

    name: str
    pci_id: str
    hbm_gib: int
    bf16_tflops: float
    """Peak dense bf16 TFLOP/s of the chip."""
    devices_per_chip: int = 1


GENERATIONS = (
    Generation("v4", "0x005e", 32, 275),
    Generation("v5e", "0x0063", 16, 197),
    Generation("v5p", "0x0062", 95, 459),
    Generation("v6e", "0x006f", 32, 918),
    Generation("TPU7x", "0x0076", 192, 2307, devices_per_chip=2),
)
GOOGLE_PCI_VENDOR = "0x1ae0"


def attached_chips(pci_root: Path = Path("/sys/bus/pci/devices")) -> list[Generation]:
    """The TPU chips on this host's PCI bus."""
    by_id = {generation.pci_id: generation for generation in GENERATIONS}
    chips = []
    for vendor in sorted(pci_root.glob("*/vendor")):
        if vendor.read_text().strip() == GOOGLE_PCI_VENDOR:
            chip = by_id.get((vendor.parent / "device").read_text().strip())
            chips += [chip] if chip else []
    return chips


def choose_device(config: TrainConfig) -> str:
    """Settle "tpu" or "cpu", and how many devices, in the environment: it is read once, when a device is first touched.

    Idempotent, and inherited by child processes. Raises DeviceError instead of falling back.
    """
    chips = attached_chips()
    chosen = config.device
    if config.compile_for:  # traced on virtual CPU devices, compiled for the slice
        from aot_tpu import prepare_environment

        if not torch_xla._XLAC._xla_runtime_is_initialized():
            try:
                prepare_environment(config.compile_for)
            except ValueError as error:
                raise InputError(f"compile_for: {error}") from error
        return "cpu"
    if chosen == "auto":
        chosen = os.environ.get("PJRT_DEVICE", "TPU" if chips else "CPU").lower()
    if chosen == "tpu" and not chips:
        raise DeviceError(
            f"preset {config.preset} runs on tpu, but this machine has no TPU chip (PCI vendor {GOOGLE_PCI_VENDOR}); "
            "run it on a TPU VM, or add --device cpu"
        )
    os.environ["PJRT_DEVICE"] = chosen.upper()
    if num_virtual_devices := getattr(config, "num_virtual_devices", 0):
        if chosen != "cpu":
            raise InputError(
                f"num_virtual_devices is {num_virtual_devices} but the device is {chosen}; add --device cpu"
            )
        os.environ["CPU_NUM_DEVICES"] = str(num_virtual_devices)
    return chosen


def start_device(config: TrainConfig, join: Callable[[], None] = lambda: None) -> torch.device:
    """Choose, start and seed the XLA device; set matrix product precision and the compile cache.

    join: makes this process part of something larger, xr.use_spmd or a process group. It is called when the
    environment is settled and no device has been touched: neither may come later.
    Call it before anything touches a device: PJRT_DEVICE is read once. Raises DeviceError instead of falling back.
    """
    chosen = choose_device(config)
    if config.matmul_precision != "default":
        torch_xla.backends.set_mat_mul_precision(config.matmul_precision)
    cache = compile_cache_dir(config)
    try:
        if cache:
            xr.initialize_cache(str(cache))  # must precede every computation
        join()
        device = torch_xla.device()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise DeviceError(f"the {chosen} device does not start: {reason}; is another process using it?") from error
    if (started := xr.device_type().lower()) != chosen:
        raise DeviceError(
            f"asked for device {chosen}, the runtime started {started}; unset PJRT_DEVICE or pass --device"
        )
    torch.manual_seed(config.seed)
    xm.set_rng_state(config.seed)
    return device


def compile_cache_dir(config: TrainConfig) -> Path | None:
    """Where compiled programs are kept between runs, or None.

    Only on TPU: XLA:CPU writes entries that a later process may be unable to read back.
    """
    if not config.compile_cache or os.environ.get("PJRT_DEVICE") != "TPU":
        return None
    folder = Path("~/.cache/torch_xla_programs" if config.compile_cache == "auto" else config.compile_cache)
    # set by torchrun and by torch_xla.launch
    local_process = os.environ.get("LOCAL_RANK", os.environ.get("PJRT_LOCAL_PROCESS_RANK"))
    return (folder / f"process_{local_process}" if local_process else folder).expanduser()  # one folder per process


def peak_flops(num_devices: int) -> float | None:
    """Peak dense bf16 FLOP/s of num_devices devices, or None where the chip is unknown (CPU)."""
    chips = attached_chips() if xr.device_type() == "TPU" else []
    return num_devices * chips[0].bf16_tflops * 1e12 / chips[0].devices_per_chip if chips else None


def device_memory(device: torch.device) -> dict[str, int] | None:
    """{"bytes_used", "bytes_limit", "peak_bytes_used"} of one device, or None where the runtime does not tell (CPU)."""
    if xr.device_type() != "TPU":
        return None
    return {name: int(value) for name, value in xm.get_memory_info(device).items()}


def print_banner(config: TrainConfig, device: torch.device) -> None:
    """What this run runs on, before anything is compiled."""
    count, kind = xr.global_runtime_device_count(), xr.device_type()
    chips = attached_chips() if kind == "TPU" else []
    name = f"TPU {chips[0].name}" if chips else "CPU (XLA CPU backend: no TPU)" if kind == "CPU" else kind
    used = count if xr.is_spmd() else xr.world_size()
    memory = device_memory(device)
    cache = compile_cache_dir(config)
    matmul = f", float32 matrix products at {config.matmul_precision} precision" if kind == "TPU" else ""
    unit = "host" if xr.is_spmd() or used == 1 else "process"
    print(f"device     {name}, {used} of {count} devices, {unit} {xr.process_index()} of {xr.process_count()}")
    if memory:
        print(f"memory     {memory['bytes_limit'] / 2**30:.2f} GiB per device")
    print(f"versions   torch {torch.__version__}, torch_xla {torch_xla.__version__}, Python {sys.version.split()[0]}")
    print(f"precision  {config.precision}{matmul}")
    print(f"cache      {cache or 'no compile cache' + (' (used on TPU only)' if kind != 'TPU' else '')}", flush=True)


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

    def again(self) -> "Peers":
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
