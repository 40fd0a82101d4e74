"""The one room that knows the backend: scripts, models and the other rooms have all of it from here.

Names are the field's own. The device is started, seeded and described; a step is compiled and counted; tensors are
sent, placed on a mesh, and read back in shards: by torch_xla (xla.py), or where that is not installed by torch's own
compiler (torch_compile.py).
"""

import contextlib
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpu_utils.base.errors import CheckpointError, DeviceError, first_line
from tpu_utils.base.process import Goodput
from tpu_utils.options.environment import attached_chips, choose_device

# ruff: noqa: F405
if find_spec("torch_xla"):
    from tpu_utils.device.xla import *  # noqa: F403
else:
    from tpu_utils.device.torch_compile import *  # noqa: F403

if TYPE_CHECKING:
    from tpu_utils.options.train_config import TrainConfig


def _swap_tensors(old: torch.Tensor, new: torch.Tensor, swap: Callable = torch.utils.swap_tensors) -> None:
    """With the hooks of the old one and those of its attributes that the new one has not, which torch 2.9 swaps away
    (torch/utils/__init__.py)."""
    attributes, hooks, after = dict(vars(old)), old._backward_hooks, old._post_accumulate_grad_hooks
    swap(old, new)
    vars(old).update(attributes | vars(old))
    old._backward_hooks, old._post_accumulate_grad_hooks = hooks, after


# else model.to(device) makes two of a parameter that stands in two places, as tied weights do
torch.__future__.set_swap_module_params_on_conversion(True)
torch.utils.swap_tensors = _swap_tensors


def start_device(config: "TrainConfig", join: Callable[[], Any] = lambda: None) -> tuple[torch.device, Any]:
    """Choose, start and seed the XLA device; set the precision of matrix products. Returns it, and what join returned.

    join: use_spmd, or what joins a process group, once the environment is settled and before a device is touched.
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


class DeviceLoader:
    """Sends batches to the device ahead of the step, in a thread, one transfer a batch, on a mesh one a tensor.

    torch_xla's MpDeviceLoader does the same, but an error of the reader ends its iteration as if the data were over
    (parallel_loader.py, _loader_worker: finally without except), and it holds the first batch back until a whole group
    of prefetched batches is read (_get_batch). Here the error reaches the training loop.

    batches: of host arrays, as send() takes them. goodput: gets the time the loop waits for data.
    """

    def __init__(
        self,
        batches: Iterable,
        device: torch.device,
        prefetch: int,
        goodput: Goodput,
        sharding: BatchSharding | None = None,
    ):
        self._batches, self._device, self._sharding, self._goodput = batches, device, sharding, goodput
        self._queue: queue.Queue = queue.Queue(maxsize=prefetch)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._sent = 0
        self._thread = threading.Thread(target=self._send, name="device loader", daemon=True)

    def _send(self) -> None:
        try:
            for batch in self._batches:
                with self._lock, torch.no_grad():
                    on_device = send(batch, self._device, self._sharding)
                    self._sent += len(on_device) if self._sharding else 1  # sharded tensors are sent one by one
                if not self._put(on_device):
                    return
            self._put(StopIteration())
        except Exception as error:  # whatever it is, __next__ raises it in the training loop
            self._put(error)

    def _put(self, item) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return True
        return False

    def __enter__(self) -> "DeviceLoader":
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._closed.set()  # and wait: a process that ends under a transfer aborts
        self._thread.join()

    def __iter__(self) -> "DeviceLoader":
        return self

    def __next__(self) -> list[torch.Tensor]:
        with self._goodput.phase("data_wait"):
            item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def uploads_beside_batches(self) -> int:
        """Transfers to the device so far that were not of a batch of this loader."""
        with self._lock:
            return transfers_to_device() - self._sent


ECHO_SECONDS = 1.0
"""A signal within so long after the first is the same request: Ctrl-C reaches a launcher too, which hands it on."""


class StopRequest:
    """The first SIGTERM, SIGINT or SIGHUP asks for a checkpoint at the next step boundary; a later one stops at once.

    Later: SIGTERM or SIGINT, ECHO_SECONDS after the first or more. SIGHUP says that the terminal is gone. It hurries
    nothing, and where it is ignored at the start, as under nohup, it stays ignored.
    """

    def __init__(self):
        self._signal: int | None = None
        self._signalled = 0.0
        self._notice: str | None = None
        hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
        signals = signal.SIGTERM, signal.SIGINT, *hang_up
        self._handlers = {number: signal.signal(number, self._request) for number in signals}

    def close(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._signalled = number, now
        elif number != signal.SIGHUP and now - self._signalled >= ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    @property
    def signal(self) -> int | None:
        """Number of the signal that asked to stop, or None. A notice of the metadata server counts as SIGTERM."""
        return self._signal or (signal.SIGTERM.value if self._notice else None)

    def watch_metadata(self) -> None:
        """Heed notices of maintenance and preemption: on TPU, or where Google's GCE_METADATA_HOST is set."""
        if device_type() == "TPU" or os.environ.get("GCE_METADATA_HOST"):
            from tpu_utils.remote.notices import watch_metadata  # only here

            watch_metadata(self.notice)

    def notice(self, text: str) -> None:
        """Ask to stop because the machine is about to go."""
        self._notice = self._notice or text
        print(f"notice     {text}: stopping at the next step boundary", flush=True)

    def reason(self, number: int) -> str:
        """Why the run ends. number: of the signal, which another process may have got."""
        return signal.Signals(number).name if self._signal or not self._notice else self._notice
