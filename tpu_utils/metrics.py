"""What a run says of itself: counters, values of each step, time, log lines, traces."""

import ast
import contextlib
import json
import linecache
import math
import os
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
from tqdm import tqdm

from config import InputError, TrainConfig
from tpu_utils.checkpoint import Checkpoints, write_atomically
from tpu_utils.errors import NonFiniteError, RecompileError

if TYPE_CHECKING:
    from tpu_utils.loader import DeviceLoader

# The base of xp.Trace and xp.StepTrace, which would also name the operations after it, hence make another graph while a
# trace runs, and the latter syncs at its end. Without a running trace it does nothing.
TraceMe = torch_xla._XLAC.profiler.TraceMe


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
        self._numbers: dict[str, dict[tuple, Any]] = {}
        self._changed: dict[str, set[tuple]] = {}
        self._graphs: dict[str, int] = {}

    def compiled(self, kind: str) -> int:
        """Graphs compiled for this kind of step."""
        return self._graphs.get(kind, 0)

    def check(self, kind: str, step: int, inputs: Sequence[torch.Tensor]) -> None:
        """Call it right after a step of this kind, in the function that calls the step. Raises RecompileError.

        Reads counters of the host and the caller's Python numbers: those that changed are what may have become part of
        the program.
        """
        caller = sys._getframe(1)
        shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs]
        before, self._inputs[kind] = self._inputs.get(kind, shapes), shapes
        total = graphs_compiled()
        first, self._graphs[kind] = kind not in self._graphs, self.compiled(kind) + total - self._total
        self._total = total
        numbers = _numbers_in(caller)
        numbers_before, self._numbers[kind] = self._numbers.get(kind, numbers), numbers
        different = {name for name, value in numbers.items() if numbers_before.get(name, value) != value}
        always, self._changed[kind] = self._changed.get(kind, set()), different  # step itself, and other counters
        if self._graphs[kind] > 1:
            names = {id(value): name for name, value in caller.f_locals.items()}
            changed = [
                f"{names.get(id(t), f'input {i}')} was {a}, is {b}"
                for i, (t, a, b) in enumerate(zip(inputs, before, shapes, strict=True))
                if a != b
            ]
            if first:
                changed = [
                    "this is its first call, so operations on device tensors before it became a graph of their own; "
                    "do them inside the step, or on the host before the tensor is sent"
                ]
            elif not changed:
                values = [
                    f"{name[0]}{''.join(f'[{key!r}]' for key in name[1:])} {numbers_before[name]!r} -> {value!r}"
                    for name, value in numbers.items()
                    if name in different - always
                ]
                changed = [
                    "no input changed its shape or dtype, so look for a Python number that is part of the program "
                    "(0, 1, sizes, positions and dims are; make it a tensor on the device), for an operation on device "
                    "tensors between the steps (move it into the step), or for state that was created inside the step; "
                    "numbers among the variables there (one written in the call itself is not seen) that changed now, "
                    f"and not before: {', '.join(values) or 'none'}"
                ]
            raise RecompileError(
                f"step {step} compiled graph {self._graphs[kind]} of the {kind} step, expected 1, called at "
                f"{_statement_before(caller)}: {'; '.join(changed)}"
            )


def _numbers_in(frame: types.FrameType) -> dict[tuple, Any]:
    """Python numbers among a function's variables, in tuples and lists there, and in optimizers' groups, by path."""
    found = {}
    for name, value in frame.f_locals.items():
        if isinstance(value, (int, float)):  # bool is an int
            found[name,] = value
        elif isinstance(value, (tuple, list)):
            found |= {(name, i): one for i, one in enumerate(value[:100]) if isinstance(one, (int, float))}
        elif isinstance(value, torch.optim.Optimizer):
            for i, group in enumerate(value.param_groups):
                for key, option in group.items():
                    if isinstance(option, (int, float)):
                        found[f"{name}.param_groups", i, key] = option
    return found


def _statement_before(frame: types.FrameType) -> str:
    """file:line and the text of the last statement before the line that a frame is at: the call of the step."""
    path, here, last = frame.f_code.co_filename, frame.f_lineno, None
    lines = linecache.getlines(path)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Expr | ast.Assign) and node.end_lineno < here:
            last = max(last, node, key=lambda one: one.end_lineno) if last else node
    if last is None:  # without its source, for example typed into a prompt
        return f"{path}:{here}"
    text = ast.unparse(last)
    return f"{path}:{last.lineno} ({text if len(text) <= 120 else text[:117] + '...'})"


class DeviceMetrics:
    """The values of the last `capacity` steps in one device tensor (capacity, len(names) + 1) float32, the step count
    and how many updates were skipped so far, which is also the last column: exact up to 2 ** 24.

    record() is traced into the compiled step and read() is the only transfer to the host, so logging every n steps
    costs one small read every n steps. Capacity is the number of steps between two reads.
    """

    def __init__(self, names: list[str], capacity: int, device: torch.device):
        self.names, self.capacity = names, capacity
        # made on the host and sent: made on the device, each would be a graph of its own
        self.step = torch.zeros(1, dtype=torch.int32).to(device)  # (1,): a host scalar () would become a constant
        self.skipped = torch.zeros(1, dtype=torch.int32).to(device)
        self.values = torch.zeros(capacity, len(names) + 1).to(device)
        self._slots = torch.arange(capacity, dtype=torch.int32).to(device)
        self.skipped_steps = 0
        """Updates skipped since the start of the run, as of the last read()."""

    def record(self, *values: torch.Tensor, skipped: torch.Tensor | None = None) -> None:
        """Write this step's scalars, one per name, and count the step. Inside the compiled step only.

        skipped: () bool on the device, whether this step's update was skipped.
        """
        if skipped is not None:
            self.skipped.add_(skipped.int())
        row = torch.stack([value.detach().float() for value in (*values, self.skipped[0])])
        here = (self._slots == self.step % self.capacity)[:, None]
        self.values.copy_(torch.where(here, row, self.values))
        self.step.add_(1)

    def read(self, first_step: int, last_step: int) -> dict[str, np.ndarray]:
        """The values of steps first_step to last_step - 1, at most capacity, oldest first; with none of them it only
        brings skipped_steps up to date. Waits for the device."""
        values = self.values.cpu().numpy()
        self.skipped_steps = int(values[(last_step - 1) % self.capacity, -1])
        rows = values[np.arange(first_step, last_step) % self.capacity]
        return {name: rows[:, column] for column, name in enumerate(self.names)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"step": self.step, "skipped": self.skipped, "values": self.values}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
        self.skipped_steps = int(state["skipped"])


def check_finite(values: dict[str, np.ndarray], steps_before: int, checkpoints: Checkpoints, on_nonfinite: str) -> None:
    """Raises NonFiniteError naming the first step with a value that is not finite; not when such steps are skipped.

    values: {name: (steps,)} as DeviceMetrics.read gives them; the first is of step steps_before + 1.
    """
    finite = np.isfinite(np.stack(list(values.values())))
    if on_nonfinite == "skip" or finite.all():
        return
    bad = int(np.flatnonzero(~finite.all(0))[0])
    found = ", ".join(f"{name.replace('_', ' ')} {column[bad]:g}" for name, column in values.items())
    saved = checkpoints.newest()
    go_on = "there is no checkpoint before it" if saved is None else f"the last checkpoint, of step {saved}, is finite"
    again = "" if saved is None else " --resume must"
    raise NonFiniteError(
        f"step {steps_before + bad + 1}, of steps {steps_before + 1} to {steps_before + finite.shape[1]} read now, has "
        f"{found}; expected finite numbers; {go_on}; lower --learning_rate in another --run_dir, look at the data of "
        f"that step, or leave such updates out with{again} --on_nonfinite skip"
    )


def finite_means(values: dict[str, np.ndarray]) -> dict[str, float]:
    """The mean of each column over the steps whose values are all finite: those that were not skipped. nan for none."""
    taken = np.isfinite(np.stack(list(values.values()))).all(0)
    return {name: float(column[taken].mean()) if taken.any() else math.nan for name, column in values.items()}


def process_age() -> float:
    """Seconds that this process lives: the interpreter and seconds of imports are a part of a run too."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # clock ticks after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


class Goodput:
    """Every second since the start belongs to exactly one phase; phases nest, and the inner one gets the time.

    changes: how often a phase began or ended, which is what watch_for_stalls calls progress.
    In a trace of --profile_steps a phase is an event on the host, `phase evaluation` and so on.
    """

    def __init__(self, age: float = 0.0):
        """age: seconds before now that belong to start_up, process_age() in a script."""
        phases = ("start_up", "compile", "data_wait", "step", "evaluation", "checkpoint", "other")
        self.seconds = dict.fromkeys(phases, 0.0)
        self._stack, self._since = ["start_up"], time.perf_counter() - age
        self.changes = 0

    @property
    def current(self) -> str:
        return self._stack[-1]

    def _settle(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def enter(self, name: str) -> None:
        """From here on, time that no inner phase takes belongs to this one."""
        self._settle()
        self._stack, self.changes = [name], self.changes + 1

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._settle()
        self._stack.append(name)
        self.changes += 1
        try:
            with TraceMe(f"phase {name}"):
                yield
        finally:
            self._settle()
            self._stack.pop()
            self.changes += 1

    def total(self) -> float:
        """Seconds since the start: the sum of all phases."""
        self._settle()
        return sum(self.seconds.values())


class Speed:
    """Throughput between two log lines: the phases step and data_wait, without compile, evaluation and checkpoint."""

    def __init__(
        self, goodput: Goodput, loader: "DeviceLoader", global_batch_size: int, flops: int, peak: float | None
    ):
        """flops: of one step, over all devices. peak: FLOP/s of all devices (float), or None."""
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
        # a terminal gets a bar on stderr; a pipe or a file gets the lines alone, and so does a job in the background,
        # whose bar would be drawn over that of the one in front
        self._bar = tqdm(
            total=num_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            # steps per second stand in the lines; without them 40 columns are enough for a day and 99,999 steps
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
            disable=silent or not _in_front_of_a_terminal(),
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
        """A train line. fields: loss, gradient_norm, skipped_steps, learning_rate and those of Speed.measure()."""
        self.write("train", step, **fields)
        text = f"step {step:6d}/{self._bar.total}  loss {fields['loss']:.4f}"
        text += f"  norm {fields['gradient_norm']:.3f}"
        if fields["skipped_steps"]:
            text += f"  skipped {fields['skipped_steps']}"
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

    def checkpoint(self, step: int, **fields: float) -> None:
        """A checkpoint line. fields: wait_seconds of the step loop.

        Call it before the checkpoint is written: all lines are on disk before a checkpoint says their steps are done.
        """
        self.write("checkpoint", step, **fields)
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


def _in_front_of_a_terminal() -> bool:
    """Whether stderr is a terminal, and this process is not one of its background jobs."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:  # the terminal of another session: it has no jobs of ours
        return True


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
        self._folder, self._running, self._step = run_dir / "tensorboard", False, None
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
        self._end_step()
        if step == self._first:
            self._folder.mkdir(parents=True, exist_ok=True)
            xp.start_trace(str(self._folder))
            self._running = True
        if step == self._last:
            self._stop()
        if self._running:
            # _r: the profiler groups by these events, with step_num as the number of the step
            self._step = TraceMe("train", step_num=step, _r=1)
            self._step.__enter__()

    def _end_step(self) -> None:
        if self._step:
            self._step.__exit__(None, None, None)
            self._step = None

    def _stop(self) -> None:
        self._end_step()
        if self._running:
            xm.wait_device_ops()  # the traced steps may still be running
            xp.stop_trace()
            self._running = False
            print(
                f"trace of steps {self._first} to {self._last - 1}: tensorboard --logdir {self._folder} (tab Profile)"
            )
