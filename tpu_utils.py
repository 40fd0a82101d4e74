"""What several training scripts call, in the order they call it: device, metrics, checkpoint.

    device = start_device(config)                     # one XLA device, or DeviceError; print_banner says what it is
    loader = DeviceLoader(batches, device, ...)       # uploads ahead of the step
    metrics = DeviceMetrics(["loss"], ...)            # values of each step stay on the device until a log line
    checkpoints = Checkpoints(run_dir / ...)          # atomic, checked, never executed

Exceptions: InputError (config.py) is the user's to mend and exits with 2; every TrainingError exits with 1.
"""

import contextlib
import datetime
import json
import math
import multiprocessing
import os
import pickle
import queue
import shlex
import shutil
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.backends
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla._internal import tpu
from tqdm import tqdm

from config import FREE_ON_RESUME, InputError, TrainConfig


class TrainingError(RuntimeError):
    """The run cannot go on, and it is not the input's fault. Scripts exit with code 1."""


class DeviceError(TrainingError):
    """The device asked for is not there, or another process holds it."""


class RecompileError(TrainingError):
    """A second graph was compiled where one was promised."""


class NonFiniteError(TrainingError):
    """The loss is infinite or not a number."""


class SaveError(TrainingError):
    """A checkpoint could not be written. The earlier ones are untouched."""


class CheckpointError(InputError):
    """A checkpoint on disk cannot be used: cut short, altered, foreign, or of another model."""


def run_script(main: Callable[[], int]) -> int:
    """Exit code of main: its own, 2 for an InputError, 1 for a TrainingError, each as a message without a traceback."""
    try:
        return main()
    except (InputError, TrainingError, OSError) as error:  # OSError: the disk or the network gave up
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


# ---------------------------------------------------------------------------------------------------------- device


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
            prepare_environment(config.compile_for)
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
        self.index, self.count, self._group = index, count, group

    def largest(self, value: int) -> int:
        """The largest value that any process gave."""
        if self.count == 1:
            return value
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
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
        dist.broadcast_object_list(outcome, src=0, group=self._group, device=torch.device("cpu"))
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


class BatchSharding:
    """Cuts axis 0 of every tensor of a batch over a mesh axis; on several hosts each gives its own rows.

    An xs.ShardingSpec is for one rank alone and leaves tensors of other ranks replicated without a word (xla_spec).
    """

    minibatch = True  # what this process sends is its part of the batch, not the whole

    def __init__(self, mesh: xs.Mesh, axis: str):
        self._mesh, self._axis = mesh, axis

    def xla_spec(self, tensor: torch.Tensor):
        spec = (self._axis,) + (None,) * (tensor.dim() - 1)
        return xs.ShardingSpec(self._mesh, spec, minibatch=True).xla_spec(tensor)


class DeviceLoader:
    """Sends batches to the device ahead of the step, in a thread, one transfer a batch.

    torch_xla's MpDeviceLoader does the same, but an error of the reader ends its iteration as if the data were over
    (parallel_loader.py, _loader_worker: finally without except), and it holds the first batch back until a whole group
    of prefetched batches is read (_get_batch). Here the error reaches the training loop.

    batches: iterable of tuples of host tensors. goodput: gets the time the loop waits for data. input_sharding: a
    BatchSharding, or None.
    """

    def __init__(self, batches: Iterable, device: torch.device, prefetch: int, goodput: "Goodput", input_sharding=None):
        self._batches, self._device, self._sharding, self._goodput = batches, device, input_sharding, goodput
        self._queue: queue.Queue = queue.Queue(maxsize=prefetch)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._sent = 0
        self._thread = threading.Thread(target=self._send, name="device loader", daemon=True)

    def _send(self) -> None:
        try:
            for batch in self._batches:
                with self._lock, torch.no_grad():
                    on_device = xm.send_cpu_data_to_device(list(batch), self._device, self._sharding)
                    self._sent += 1
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
        """Transfers to the device so far that were not a batch of this loader."""
        with self._lock:
            return transfers_to_device() - self._sent


class StopRequest:
    """The first SIGTERM or SIGINT asks for a checkpoint at the next step boundary; a second one stops at once.

    relay: a file through which a process that only started the replicas passes the signal on to them. It is idempotent
    where forwarding is not: a terminal, or systemd, signals parent and children alike.
    """

    def __init__(self, relay: Path | None = None):
        self._signal: int | None = None
        self._relay = relay
        if threading.current_thread() is threading.main_thread():  # torch_xla.launch runs replicas in other threads
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._request)

    def _request(self, number: int, frame) -> None:
        if self._signal and self._relay:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + number)
        self._signal = number
        if self._relay:
            write_atomically(self._relay, str(number).encode())
        else:
            signal.signal(number, signal.SIG_DFL)

    @property
    def signal(self) -> int | None:
        """Number of the signal that asked to stop, or None."""
        if self._signal is None and self._relay and self._relay.exists():
            self._signal = int(self._relay.read_text())
        return self._signal

    @property
    def exit_code(self) -> int:
        """143 after SIGTERM, 130 after SIGINT, 0 without a signal."""
        return 128 + self.signal if self.signal else 0


# --------------------------------------------------------------------------------------------------------- metrics


def transfers_to_device() -> int:
    """Host-to-device transfers of this process so far, by torch_xla's own counter."""
    return (met.metric_data("TransferToDeviceTime") or [0])[0]


def transfers_from_device() -> int:
    """Device-to-host transfers of this process so far, by torch_xla's own counter."""
    return (met.metric_data("TransferFromDeviceTime") or [0])[0]


def graphs_compiled() -> int:
    """Programs compiled, or read from the compile cache, by this process so far."""
    return sum(met.counter_value(name) or 0 for name in ("UncachedCompile", "PersistentCacheHit"))


class CompileWatch:
    """Attributes every compiled graph to a kind of step ("train", "eval"); stops the run at a kind's second graph."""

    def __init__(self):
        self._total = graphs_compiled()
        self._inputs: dict[str, list[str]] = {}
        self._graphs: dict[str, int] = {}

    def compiled(self, kind: str) -> int:
        """Graphs compiled for this kind of step."""
        return self._graphs.get(kind, 0)

    def check(self, kind: str, step: int, inputs: Iterable[torch.Tensor]) -> None:
        """Call it after a step of this kind. Reads counters of the host only. Raises RecompileError."""
        shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs]
        before, self._inputs[kind] = self._inputs.get(kind, shapes), shapes
        total = graphs_compiled()
        self._graphs[kind] = self.compiled(kind) + total - self._total
        self._total = total
        if self._graphs[kind] > 1:
            changed = [
                f"input {i} was {a}, is {b}" for i, (a, b) in enumerate(zip(before, shapes, strict=True)) if a != b
            ]
            reason = "; ".join(changed) or (
                "no input changed its shape: look for a Python number that differs between steps, or for state that "
                "was created inside the step; PT_XLA_DEBUG_LEVEL=2 shows the line"
            )
            raise RecompileError(
                f"step {step} compiled graph {self._graphs[kind]} of the {kind} step, expected 1: {reason}"
            )


class DeviceMetrics:
    """The values of the last `capacity` steps in one device tensor (capacity, len(names)) float32, and the step count.

    record() is traced into the compiled step and read() is the only transfer to the host, so logging every n steps
    costs one small read every n steps. Capacity is the number of steps between two reads.
    """

    def __init__(self, names: list[str], capacity: int, device: torch.device):
        self.names, self.capacity = names, capacity
        # made on the host and sent: made on the device, each would be a graph of its own
        self.step = torch.zeros(1, dtype=torch.int32).to(device)  # (1,): a host scalar () would become a constant
        self.values = torch.zeros(capacity, len(names)).to(device)
        self._slots = torch.arange(capacity, dtype=torch.int32).to(device)

    def record(self, *values: torch.Tensor) -> None:
        """Write this step's scalars, one per name, and count the step. Inside the compiled step only."""
        row = torch.stack([value.detach().float() for value in values])
        here = (self._slots == self.step % self.capacity)[:, None]
        self.values.copy_(torch.where(here, row, self.values))
        self.step.add_(1)

    def read(self, first_step: int, last_step: int) -> dict[str, np.ndarray]:
        """The values of steps first_step to last_step - 1, at most capacity, oldest first. Waits for the device."""
        rows = self.values.cpu().numpy()[np.arange(first_step, last_step) % self.capacity]
        return {name: rows[:, column] for column, name in enumerate(self.names)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"step": self.step, "values": self.values}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def check_finite(losses: np.ndarray, steps_before: int, checkpoints: "Checkpoints") -> None:
    """Raises NonFiniteError naming the first step whose loss is not finite. losses[0] is of step steps_before + 1."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise NonFiniteError(
            f"the loss of step {steps_before + int(bad[0]) + 1} is {losses[bad[0]]}, expected a finite number; lower "
            f"--learning_rate, or look at the data of that step; checkpoints before it: steps {checkpoints.steps()}"
        )


class Goodput:
    """Every second since the start belongs to exactly one phase; phases nest, and the inner one gets the time."""

    def __init__(self):
        phases = ("start_up", "compile", "data_wait", "step", "evaluation", "checkpoint", "other")
        self.seconds = dict.fromkeys(phases, 0.0)
        self._stack, self._since = ["start_up"], time.perf_counter()

    def _settle(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def enter(self, name: str) -> None:
        """From here on, time that no inner phase takes belongs to this one."""
        self._settle()
        self._stack = [name]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._settle()
        self._stack.append(name)
        try:
            yield
        finally:
            self._settle()
            self._stack.pop()

    def total(self) -> float:
        """Seconds since the start: the sum of all phases."""
        self._settle()
        return sum(self.seconds.values())


class Speed:
    """Throughput between two log lines: the phases step and data_wait, without compile, evaluation and checkpoint."""

    def __init__(self, goodput: Goodput, loader: DeviceLoader, global_batch_size: int, flops: int, peak: float | None):
        """flops: of one step, over all devices. peak: FLOP/s of all devices, or None."""
        self._goodput, self._loader, self._flops, self._peak = goodput, loader, flops, peak
        self._global_batch_size = global_batch_size
        self.uploads_per_step: float | None = None
        """Transfers to the device beside the batches, per step since the last measurement; None before the first."""

    def start(self, step: int) -> None:
        """Count from after this step."""
        self._goodput.total()  # settles the running phase
        self._step, self._seconds = step, dict(self._goodput.seconds)
        self._uploads = self._loader.uploads_beside_batches()

    def measure(self, step: int) -> dict[str, float | None]:
        """Fields of a train line for the steps since start() or the last measure(). All None when there were none."""
        before_step, before, before_uploads = self._step, self._seconds, self._uploads
        self.start(step)
        if step == before_step:
            return dict.fromkeys(("step_seconds", "examples_per_second", "mfu", "data_wait_seconds"))
        steps = step - before_step
        self.uploads_per_step = (self._uploads - before_uploads) / steps
        data_wait = (self._seconds["data_wait"] - before["data_wait"]) / steps
        seconds = (self._seconds["step"] - before["step"]) / steps + data_wait
        return {
            "step_seconds": seconds,
            "examples_per_second": self._global_batch_size / seconds,
            "mfu": self._flops / seconds / self._peak if self._peak else None,
            "data_wait_seconds": data_wait,
        }


class RunLog:
    """metrics.jsonl, TensorBoard, the progress bar and the printed lines of a run.

    On resume, lines and events after first_step are dropped: they will be written again.
    silent: of several processes all but the first; it writes and prints nothing.
    """

    def __init__(self, run_dir: Path, first_step: int, num_steps: int, tensorboard: bool, silent: bool = False):
        self._silent = silent
        self._path = Path(os.devnull) if silent else run_dir / "metrics.jsonl"
        if self._path.is_file():
            kept = [line for line in self._path.read_bytes().splitlines(True) if _step_of_line(line) <= first_step]
            write_atomically(self._path, b"".join(kept))
        self._file = self._path.open("a", buffering=1)
        self._events = None
        if tensorboard and not silent:
            from torch.utils.tensorboard import SummaryWriter  # a second of imports

            self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
        # a terminal gets a bar on stderr; a pipe or a file gets the lines alone
        self._bar = tqdm(
            total=num_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=silent or not sys.stderr.isatty(),
        )

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()
        self._file.close()
        if self._events:
            self._events.close()

    def advance(self) -> None:
        """One step was dispatched: moves the bar, waits for nothing."""
        self._bar.update()

    def train(self, step: int, **fields: float | None) -> None:
        """A train line. fields: loss, learning_rate and those of Speed.measure()."""
        self.write("train", step, **fields)
        text = f"step {step:6d}/{self._bar.total}  loss {fields['loss']:.4f}"
        if "gradient_norm" in fields:
            text += f"  norm {fields['gradient_norm']:.3f}"
        text += f"  lr {fields['learning_rate']:.2e}"
        if fields["step_seconds"] is not None:
            unit = "tokens" if "tokens_per_second" in fields else "examples"
            text += f"  {fields['step_seconds'] * 1e3:.1f} ms/step  {fields[f'{unit}_per_second']:.0f} {unit}/s"
            text += f"  data wait {fields['data_wait_seconds'] * 1e3:.1f} ms"
        if fields["mfu"] is not None:
            text += f"  mfu {fields['mfu']:.1%}"
        self._print(text)

    def evaluation(self, step: int, **fields: float) -> None:
        self.write("eval", step, **fields)
        self._print(
            f"step {step:6d}/{self._bar.total}  " + "  ".join(f"{name} {value:.4f}" for name, value in fields.items())
        )

    def checkpoint(self, step: int) -> None:
        """Write it before saving: all lines are then on disk before a checkpoint says that their steps are done."""
        self.write("checkpoint", step)
        if not self._silent:
            os.fsync(self._file.fileno())

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """One JSON object; numbers also go to TensorBoard under kind/name. Non-finite numbers become null in JSON."""
        record = {"kind": kind, "step": step}
        for name, value in fields.items():
            is_number = isinstance(value, int | float)
            record[name] = None if is_number and not math.isfinite(value) else value
            if self._events and is_number:
                self._events.add_scalar(f"{kind}/{name}", value, step)
        self._file.write(json.dumps(record) + "\n")

    def _print(self, line: str) -> None:
        if self._silent:
            return
        self._bar.write(line)  # above the bar on a terminal, a plain line elsewhere
        sys.stdout.flush()


def _step_of_line(line: bytes) -> float:
    """The step of a metrics.jsonl line; infinity for a line that a kill cut short."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


class Profile:
    """Traces the steps of config.profile_steps into run_dir/tensorboard (xplane, read by the xprof plugin)."""

    def __init__(self, config: TrainConfig, run_dir: Path, first_step: int, num_steps: int):
        self._first, self._last = config.profile_range
        self._folder, self._running = run_dir / "tensorboard", False
        if config.profile_steps and not first_step < self._first < self._last <= num_steps + 1:
            raise InputError(
                f"profile_steps is {config.profile_steps}; choose among the steps this run does, "
                f"{first_step + 1} to {num_steps}"
            )

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exception) -> None:
        self._stop()

    def before_step(self, step: int) -> None:
        if step == self._first:
            self._folder.mkdir(parents=True, exist_ok=True)
            xp.start_trace(str(self._folder))
            self._running = True
        if step == self._last:
            self._stop()

    def _stop(self) -> None:
        if self._running:
            xm.wait_device_ops()  # the traced steps may still be running
            xp.stop_trace()
            self._running = False
            print(
                f"trace of steps {self._first} to {self._last - 1}: tensorboard --logdir {self._folder} (tab Profile)"
            )


# ------------------------------------------------------------------------------------------------------ checkpoint


def write_atomically(path: Path, content: bytes) -> None:
    """The file has the old content or the new one, never a part, whenever the machine stops."""
    aside = path.with_name(path.name + ".writing")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_run_dir(config: TrainConfig) -> Path:
    """The run directory, made and proved writable. Raises InputError where it is not, or already holds a run."""
    now = datetime.datetime.now()
    run_dir = Path(config.run_dir or f"runs/{config.preset}_{now:%Y%m%d_%H%M%S_%f}")
    if config.compile_for:
        return run_dir  # nothing runs, nothing is written
    if config.resume == "must" and not run_dir.exists():
        raise InputError(
            f"resume is must, but {run_dir} holds no complete checkpoint: it does not exist; check --run_dir"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if config.resume == "never" and (run_dir / "config.json").exists():
            raise InputError(
                f"run_dir {run_dir} already holds a run; choose another, or continue it with --resume auto"
            )
        write_atomically(run_dir / "writable", b"")
        (run_dir / "writable").unlink()
    except OSError as error:
        raise InputError(
            f"run_dir {run_dir} cannot be written: {error.strerror}; choose another with --run_dir"
        ) from error
    return run_dir


def check_same_run(config: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises InputError if a field that shapes the computation is not what the checkpoint was made with."""
    names = sorted((config.keys() | saved.keys()) - FREE_ON_RESUME)
    changed = [f"{n} is {config.get(n)!r}, was {saved.get(n)!r}" for n in names if config.get(n) != saved.get(n)]
    if changed:
        raise InputError(
            f"this is not the run the checkpoint belongs to: {'; '.join(changed)}; repeat the old values, "
            "or start anew in another --run_dir"
        )


def to_host(value: Any) -> Any:
    """The same nesting of dicts, lists and tuples with every tensor on the CPU: what torch.save may write."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_host(item) for item in value)
    return value


class Checkpoints:
    """step_00001200/state.pt and a `done` marker with its size and CRC-32; the newest `keep` of them.

    A step is written aside, synced, renamed and only then marked: a folder without its marker is not a checkpoint.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return sorted(int(path.parent.name[5:]) for path in self.folder.glob("step_????????/done"))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Returns the folder written. Raises SaveError; then the earlier checkpoints are as they were."""
        state, target, aside = to_host(state), self.path(step), self.folder / f".writing_{step:08d}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            with (aside / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            marker = {"step": step, "bytes": (aside / "state.pt").stat().st_size, "crc32": crc32_of(aside / "state.pt")}
            sync_folder(aside)
            if target.exists():  # a kill left it without its marker, or a resumed run comes past it again
                self._remove(target)
            aside.rename(target)
            sync_folder(self.folder)
            write_atomically(target / "done", json.dumps(marker).encode())
            for old in self.steps()[: -self.keep]:
                self._remove(self.path(old))
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            shutil.rmtree(aside, ignore_errors=True)
            free = shutil.disk_usage(self.folder.parent).free / 2**20
            raise SaveError(
                f"checkpoint of step {step} could not be written to {target}: {error}; {free:.0f} MiB are free there; "
                f"the checkpoints of steps {self.steps()} are intact"
            ) from error
        return target

    @staticmethod
    def _remove(folder: Path) -> None:
        (folder / "done").unlink(missing_ok=True)  # first of all: half a folder must not look complete
        shutil.rmtree(folder)

    def load_for_resume(self, resume: str) -> dict[str, Any] | None:
        """State of the newest complete checkpoint, on the CPU; None when a new run is to begin.

        resume is never, auto or must. A damaged checkpoint is named and the one before it is used. Raises
        CheckpointError when all are damaged, when one holds anything but tensors and plain values, or when there is
        none and resume is must.
        """
        if resume == "never":
            return None
        problems = []
        for step in reversed(self.steps()):
            try:
                return read_checkpoint(self.path(step))
            except DamagedCheckpoint as error:
                problems.append(str(error))
                print(f"warning: {error}; trying the checkpoint before it", file=sys.stderr)
        if problems:
            raise CheckpointError(
                "no checkpoint can be used: " + "; ".join(problems) + "; start anew in another --run_dir"
            )
        if resume == "must":
            raise CheckpointError(f"resume is must, but {self.folder} holds no complete checkpoint; check --run_dir")
        return None


class DamagedCheckpoint(CheckpointError):
    """Its bytes are not those that were written."""


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The state in a checkpoint folder, on the CPU. Never runs what the file says: weights_only.

    Raises DamagedCheckpoint for other bytes than were written, CheckpointError for foreign content.
    """
    path = folder / "state.pt"
    try:
        marker = json.loads((folder / "done").read_text())
        found = {"bytes": path.stat().st_size, "crc32": crc32_of(path)}
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {error}") from error
    for name, value in found.items():
        if not isinstance(marker, dict) or marker.get(name) != value:
            expected = marker.get(name) if isinstance(marker, dict) else None
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: {name} is {value}, its done marker says {expected}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of these scripts: it holds more than tensors and plain values, and nothing of "
            "it was run; remove it, or choose another --run_dir"
        ) from error
    if not isinstance(state, dict) or "step" not in state:
        raise CheckpointError(
            f"{path} is not a checkpoint of these scripts: found {type(state).__name__} without a step"
        )
    return state


def crc32_of(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def load_model(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """load_state_dict that says in words what differs. Raises CheckpointError before anything is changed."""
    own = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    other = {name: tuple(t.shape) for name, t in saved.items()}
    changed = [
        f"{n} is {own.get(n, 'absent')}, was {other.get(n, 'absent')}"
        for n in sorted(own | other)
        if own.get(n) != other.get(n)
    ]
    if changed:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(changed[:3])}; give the options it was made with, "
            "or start anew in another --run_dir"
        )
    model.load_state_dict(saved)


def random_state() -> dict[str, Any]:
    """Every generator that a script or a layer may draw from on this host and device."""
    return {"torch": torch.get_rng_state(), "xla": xm.get_rng_state()}


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    xm.set_rng_state(state["xla"])
