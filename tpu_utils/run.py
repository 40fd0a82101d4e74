"""What every run has and no reader came for, behind the loop that a script owns.

    with Run(config) as run:                          # clock, watchdog, stop signals
        device = start_device(config)
        ...
        run.open(device, num_steps, ...)              # run directory, lock, newest checkpoint; says what it runs on
        run.restore(model=model, optimizer=optimizer, metrics=metrics)  # what a checkpoint holds; filled from it
        for step, batch in run.steps(batches):        # uploaded ahead of the step
            with run.one_graph("train", step, *batch):  # a second graph stops the run here
                train_step(...)
            if run.log_due(step):
                run.log(step)                         # the only read from the device between two log lines
            if run.save_due(step):
                run.save(step)
        return run.finish()                           # on disk and in the bucket; the exit code

Nothing here calls the training code, and the loop stands whole in the script.
"""

import contextlib
import secrets
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from config import LENGTHS, TrainConfig, as_json, defaults_of, free_on_resume
from optim import check_length
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.clock import Goodput, process_age, watch_for_stalls
from tpu_utils.device import device_memory, devices_used, peak_flops, print_banner
from tpu_utils.errors import CheckpointError, InputError, NonFiniteError, SaveError, never_fail_to_print
from tpu_utils.graphs import CompileWatch, raise_if_read
from tpu_utils.loader import BatchSharding, DeviceLoader, send
from tpu_utils.log import RunLog, print_summary
from tpu_utils.metrics import DeviceMetrics, Speed, finite_means, first_not_finite
from tpu_utils.peers import Peers
from tpu_utils.profile import Profile
from tpu_utils.run_dir import RunLock, check_same_run, is_finished, open_run_dir, run_id_in, write_config
from tpu_utils.saved import Saved, better
from tpu_utils.state import random_state, set_random_state, tensors_by_path
from tpu_utils.stop import StopRequest
from tpu_utils.storage import Mirror


class Run:
    """One training run of one process: see the top of this file for the order of the calls."""

    def __init__(self, config: TrainConfig):
        never_fail_to_print()  # run_script does it too, before the seconds of imports
        self.config, self.peers = config, Peers()
        self.run_dir = Path(config.run_dir)
        self.evaluation: dict[str, float] = {}
        """Fields of the last evaluation, also of one before a resumption."""
        self._goodput, self._stop, self._lock = Goodput(process_age()), StopRequest(), RunLock()
        self._stop_signal = 0
        self._parts: dict[str, Any] = {}
        self._metrics: DeviceMetrics | None = None
        self._graphs = CompileWatch()
        self._writers = contextlib.ExitStack()  # closed by finish(), or by an error

    def __enter__(self) -> "Run":
        watch_for_stalls(self._goodput, self.config.stall_seconds)
        return self

    def __exit__(self, *exception) -> None:
        with contextlib.ExitStack() as last:
            last.callback(self._stop.close)
            last.callback(self._lock.release)
            try:
                self._writers.__exit__(*exception)
            finally:
                if isinstance(sys.exc_info()[1], OSError | SaveError):
                    self._lock.check(self.run_dir)  # a folder that is gone is the reason, whoever noticed first

    def _check_run_dir(self) -> None:
        """Raises SaveError, on all processes, when the run directory is not the folder any more that was locked."""
        self.peers.from_first(lambda: self._lock.check(self.run_dir))

    # ------------------------------------------------------------------------------------------------ before the loop

    def open(
        self,
        device: torch.device,
        num_steps: int,
        data_crc32: int,
        data: str,
        *,
        examples: int,
        unit: str = "examples",
        flops: float | None = None,
        peers: Peers | None = None,
        sharding: BatchSharding | None = None,
    ) -> None:
        """Say what this runs on; make and lock the run directory; read the newest checkpoint, if it is to be resumed.

        num_steps: of the whole run. data_crc32: of the training data; a run is resumed on the data it began with.
        data: what the data is, in words; printed, and kept in config.json.
        examples: of one step over all devices; unit: what they are called, such as tokens; flops: of one, both passes.
        peers: the processes of this run. sharding: how a batch lies on the mesh.
        Raises InputError for a directory that is in use, holds another run, or cannot be written.
        """
        self._device, self.num_steps, self._sharding, self.peers = device, num_steps, sharding, peers or Peers()
        self._examples, self._unit, self._flops = examples, unit, flops
        self._stop.watch_metadata()
        self.first_step, self._saved, self._finished, self._best = 0, None, False, None
        self._steps_before = num_steps
        self._check_same_options()
        self.run_dir = Path(self.peers.from_first(lambda: str(open_run_dir(self.config, self._lock))))
        self._mirror = Mirror(self.config, self.run_dir, self.peers)  # uploads what a gs:// directory is to hold
        self.run_dir = self._mirror.folder  # in a bucket each process has its own
        folder, keep = self.run_dir / "checkpoints", self.config.keep_checkpoints
        self._run_id = self.peers.from_first(lambda: run_id_in(self.run_dir))  # "": a new run, or its file is damaged
        self._checkpoints = Checkpoints(folder, keep, self.peers, self._mirror, self._run_id)
        self._run = {**as_json(self.config), "data": data, "data_crc32": data_crc32}  # what a checkpoint belongs to
        if self.peers.index == 0 or xr.is_spmd():  # under SPMD every host says where it is
            print_banner(self.config, device)
        self.print(f"run        {'none: nothing runs' if self.config.compile_for else self._place}")
        if self.config.options_from:
            self.print(f"options    from {self.config.options_from}")
        if not self.config.compile_for:
            with self._goodput.phase("start_up" if self.config.resume == "never" else "restore"):
                self._saved = self._checkpoints.load_for_resume(self.config.resume)
        if self._saved:
            self._go_on_from(self._saved)
        self.print(f"data       {data}")
        self._run_id = self._checkpoints.run_id = self.peers.from_first(lambda: self._run_id or secrets.token_hex(8))
        self._step, self._logged = self.first_step, self.first_step - self.first_step % self.config.log_every

    def _check_same_options(self) -> None:
        """Raises InputError, on all processes, where some found the options of the run to resume and others did not."""
        found = self.peers.gather(bool(self.config.options_from))
        if len(set(found)) > 1:
            raise InputError(
                f"process {found.index(True)} reads its options from config.json of run_dir {self.config.run_dir}, but "
                f"process {found.index(False)} finds none there; give a folder that all hosts share, or gs://, or the "
                "same options with --preset on all of them"
            )

    def _go_on_from(self, saved: Saved) -> None:
        """Raises InputError where the checkpoint belongs to another run, or to another number of steps."""
        if {path.split("/")[0] for path in saved.entries} == {"model"}:
            raise CheckpointError(
                f"{saved.folder} holds weights alone, expected the state of a training too; train from the folder that "
                "they were imported from: --initial_weights in another --run_dir"
            )
        config, free = self.config, free_on_resume(type(self.config)) | {"data"}  # words; its CRC-32 must not change
        before = saved.values.get("num_steps")  # absent in older checkpoints: there it cannot change
        if before is not None and (type(before) is not int or not saved.step <= before < 2**53):
            raise CheckpointError(
                f"{saved.folder} is of step {saved.step} of {before!r:.50}; expected a number of steps; start anew in "
                "another --run_dir"
            )
        was = defaults_of(type(config)) | saved.value("config", dict)  # of a field that is newer its default
        check_same_run(self._run, was, free if before is None else free.union(LENGTHS))
        self._steps_before = before or self.num_steps
        check_length(config, self.num_steps, self._steps_before, saved.step)
        self.first_step, self._run_id = saved.step, self._run_id or saved.run_id
        self.print(f"resumed    after step {self.first_step} of {self.num_steps}")
        if config.keep_best and (best := saved.best()):
            there = self.peers.from_first(lambda: best["step"] in self._checkpoints.steps())
            self._best = best if there else None  # removed by hand
        if self.first_step == self.num_steps:
            self._finished = self.peers.from_first(lambda: is_finished(self.run_dir, self.num_steps))

    @property
    def _place(self) -> str:
        """The run directory as the user names it."""
        return self.config.run_dir or str(self.run_dir)

    def print(self, text: str) -> None:
        """Of the processes of a run only the first prints."""
        if self.peers.index == 0:
            print(text, flush=True)

    def restore(self, **parts: Any) -> None:
        """What a checkpoint holds beside the step: a model, an optimizer, whatever has a state_dict() of tensors.

        Where there is a checkpoint to go on from, the tensors are filled in place, each device its shard, whatever mesh
        or single device it was saved from. So they must be on their device, and sharded, before.
        metrics=: a DeviceMetrics, which log() and save() read.
        """
        self._parts, self._metrics = parts, parts.get("metrics")
        if self._saved:
            with self._goodput.phase("restore"):
                self._fill(parts)
        for part in parts.values():
            make_scalars_data(part)

    def _fill(self, parts: dict[str, Any]) -> None:
        """Every part from the checkpoint."""
        self._random = random_state()
        tensors = {name: _tensors_of(part) for name, part in parts.items()}
        self._checkpoints.restore(self._saved, {**tensors, "random": self._random})
        found = self._saved.value("evaluation", dict)
        self.evaluation = {name: value for name, value in found.items() if type(value) in (int, float)}
        if self._metrics:
            self._metrics.read(self.first_step, self.first_step)  # how many updates were skipped before

    def upload(self, batch) -> list[torch.Tensor]:
        """Host arrays to the device, axis 0 sharded as that of a training batch."""
        return send(batch, self._device, self._sharding)

    def compile_for(self, step: Callable, *arguments) -> int:
        """Compile step(*arguments) for the slice config.compile_for instead of running it. Returns the exit code."""
        from tpu_compiler.ask import compile_for  # only here: needs libtpu's compiler

        flops = self._flops and self._flops * self._examples
        sizes = dict(examples=self._examples, unit=self._unit, model_flops=flops)
        return compile_for(self.config.compile_for, step, *arguments, **sizes, settings=as_json(self.config))

    # ------------------------------------------------------------------------------------------------- around the loop

    def steps(self, batches) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """(step, batch on the device) from the first step after the checkpoint to the last, or to a stop signal.

        batches.batch(i): the host arrays of step i + 1, one array or a tuple; read and uploaded in a thread. close() of
        the batches, where there is one, is called at the end.
        Resumed when it was finished, a run does no step and writes nothing.
        """
        if self._finished:
            self._log = self._writers.enter_context(RunLog(self.run_dir, self.first_step, self.num_steps, False, True))
            return
        profile = Profile(self.config, self.run_dir, self.first_step, self.num_steps)
        self._check_run_dir()
        if self.peers.index == 0:
            write_config(self.run_dir, {**self._run, "run_id": self._run_id})  # from here on the directory holds a run
        self._stop_signal = self.peers.largest(self._stop.signal or 0)
        if self._stop_signal:
            return
        enter, config, silent = self._writers.enter_context, self.config, self.peers.index > 0
        enter(self._mirror)  # left last: it waits until all is in the bucket
        enter(self._checkpoints)
        steps = self.first_step, self.num_steps
        self._log = enter(RunLog(self.run_dir, *steps, config.tensorboard, silent, before=self._steps_before))
        enter(profile)
        self._writers.callback(getattr(batches, "close", lambda: None))  # after the loader, which reads them
        ahead = (batches.batch(index) for index in range(self.first_step, self.num_steps))
        loader = enter(DeviceLoader(ahead, self._device, config.prefetch_batches, self._goodput, self._sharding))
        self._speed = Speed(self._goodput, loader, self._unit, self._flops, peak_flops(devices_used()))
        self._graphs = CompileWatch()
        if self._saved:
            set_random_state(self._random)  # last, after all that may draw
        self._goodput.enter("step")
        for step, batch in enumerate(loader, self.first_step + 1):
            profile.before_step(step)
            yield step, batch
            self._step = step
            self._log.advance()
            if self._stop_signal:
                return

    def one_graph(self, kind: str, step: int, *inputs: torch.Tensor, count: int | None = None):
        """Around the call of a compiled step: its kind ("train", "eval", ...) may compile one graph in a whole run.

        inputs: what changes from step to step, named in the RecompileError that a second graph raises. count: examples
        of this step, for a step that has fewer than others.
        """
        return self._one_graph(sys._getframe(1), kind, step, inputs, count)

    @contextlib.contextmanager
    def _one_graph(self, caller: types.FrameType, kind: str, step: int, inputs, count: int | None) -> Iterator[None]:
        self._graphs.before(kind, caller)
        with self._goodput.phase(self._goodput.current if self._graphs.seen(kind) else "compile"):
            try:
                yield
            except RuntimeError as error:
                raise_if_read(error, kind, step)
                raise
        new = self._graphs.check(kind, step, inputs, caller)
        if not kind.startswith("train"):
            return
        if step == self.first_step + 1:
            self._speed.start()  # without the compile
        elif not new:  # a length that comes for the first time compiles later on; its time is compile's too
            self._speed.add(count or self._examples)

    def phase(self, name: str):
        """Around an evaluation: phase("evaluation"). Its seconds are not the training's, nor the other way round."""
        xm.wait_device_ops()  # steps still under way, which its first read would wait for
        return self._goodput.phase(name)

    def log_due(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == self.num_steps

    def log(self, step: int, **fields: float) -> None:
        """A train line: the means of the metrics over the steps since the last one, fields, and the throughput.

        Raises NonFiniteError, and SaveError for a save that failed behind the steps or a run directory that is gone.
        """
        self._check_run_dir()
        values = self._read_metrics(step)
        self._checkpoints.check()
        if self._metrics:
            fields = {**finite_means(values), "skipped_steps": self._metrics.skipped_steps, **fields}
        self._log.train(step, fields, self._speed.measure())
        self._logged = step

    def log_evaluation(self, step: int, **fields: float) -> None:
        """An eval line. With keep_best the fields need accuracy, of which the largest is the best, or validation_loss,
        of which the smallest is; all processes call it then, and a save is due at a step with a new best."""
        self._log.evaluation(step, **fields)
        self.evaluation = fields
        if self.config.keep_best:
            self._best = self.peers.from_first(lambda: better(self._best, step, fields))

    def save_due(self, step: int) -> bool:
        """Every save_every steps, at the last one, before a stop, and with keep_best after the best evaluation so far.

        Call it once a step, after the evaluation: processes agree in it.
        """
        if self.peers.count == 1 or step % self.config.log_every == 0:  # all processes stop after the same step
            self._stop_signal = self.peers.largest(self._stop.signal or 0)
        is_best = self._best is not None and self._best["step"] == step
        return bool(self._stop_signal) or is_best or step % self.config.save_every == 0 or step == self.num_steps

    def save(self, step: int) -> None:
        """A checkpoint of all that restore() was given. Waits for the copy to host memory; a thread writes it.

        Raises NonFiniteError, because a bad state is never saved, and SaveError for the save before or a run directory
        that is gone.
        """
        self._check_run_dir()
        self._read_metrics(step)
        parts = {name: part.state_dict() for name, part in self._parts.items()} | {"random": random_state()}
        values = {"config": self._run, "num_steps": self.num_steps, "evaluation": self.evaluation, "best": self._best}
        with self._goodput.phase("checkpoint"):
            copy = self._checkpoints.copy(step, parts, values, best=self._best and self._best["step"])
        self._log.checkpoint(step, wait_seconds=copy.wait_seconds)  # on disk before the step counts as done
        self._checkpoints.write(copy)  # behind the next steps

    def _read_metrics(self, step: int) -> dict:
        """{name: values of the steps after the last log line}, all finite unless such updates are skipped."""
        if not self._metrics:
            return {}
        values = self._metrics.read(self._logged, step)
        bad = first_not_finite(values)
        if bad is None or self.config.on_nonfinite == "skip":
            return values
        found = ", ".join(f"{name.replace('_', ' ')} {column[bad]:g}" for name, column in values.items())
        saved = self._checkpoints.newest()
        known = (
            "there is no checkpoint before it" if saved is None else f"the last checkpoint, of step {saved}, is finite"
        )
        again = "" if saved is None else " --resume must"
        raise NonFiniteError(
            f"step {self._logged + bad + 1}, of steps {self._logged + 1} to {step} read now, has {found}; expected "
            f"finite numbers; {known}; lower --learning_rate in another --run_dir, look at the data of that step, or "
            f"leave such updates out with{again} --on_nonfinite skip"
        )

    # ------------------------------------------------------------------------------------------------- after the loop

    @property
    def events(self):
        """TensorBoard's writer, None without one."""
        return self._log.events

    def last_checkpoint(self) -> Saved | None:
        """The last checkpoint. None for a run that is stopped, or was finished before, and on all processes but the
        first."""
        if self._stop_signal or self._finished:
            return None
        self._wait_for_last_save()
        return self._checkpoints.load("must") if self.peers.index == 0 else None

    def _wait_for_last_save(self) -> None:
        with self._goodput.phase("checkpoint"):
            self._checkpoints.wait()
        self._check_run_dir()
        self._goodput.enter("other")

    def finish(self, **results: float | None) -> int:
        """Wait until all is on disk and in the bucket; write summary.json, print the last lines. Returns the exit code:
        0 at the end of the run, 143 after SIGTERM or a notice of the VM, 130 after SIGINT, 129 after SIGHUP.

        results: what the summary tells beside what every run knows.
        """
        if self._finished:
            self._writers.close()
            self.print(f"finished   step {self._step} of {self.num_steps} was reached before; nothing to do")
            return 0
        if self._stop_signal:
            self._writers.close()
            self._check_run_dir()
            done = (
                f"saved after step {self._step}" if self._step else "before the first step: there was nothing to save"
            )
            self.print(f"stopped by {self._stop.reason(self._stop_signal)}, {done}")
            how = "must" if self._step else "auto"
            self.print(f"to go on, repeat the command with --run_dir {self._place} --resume {how}")
            return 128 + self._stop_signal
        self._wait_for_last_save()
        memory = device_memory(self._device)
        summary = {
            "steps": self._step,
            "train_graphs": self._graphs.compiled("train"),
            "eval_graphs": self._graphs.compiled("eval"),
            "host_to_device_uploads_per_step": self._speed.uploads_per_step,  # beside the batch
            "skipped_steps": self._metrics.skipped_steps if self._metrics else 0,
            "hbm_peak_bytes": memory and memory["peak_bytes_used"],  # of one device; None: unknown
            **results,
            **({"best_step": self._best and self._best["step"]} if self.config.keep_best else {}),
            "seconds": self._goodput.total(),
            "goodput": self._goodput.seconds,
        }
        self._log.summary(self._run, summary)
        self._writers.close()
        if self.peers.index == 0:
            print_summary(summary)
        return 0


def make_scalars_data(part: Any) -> None:
    """Tensors of no dimension, such as BatchNorm's count of batches, become inputs of the step's program.

    torch_xla makes a constant of a scalar 0 or 1 from the host (torch_xla/csrc/tensor.cpp, GetIrValueForTensor). As an
    operation that is still to be done it would be a graph before step 1, and step 2 would be another graph.
    """
    tensors = list(tensors_by_path(_tensors_of(part)).values())
    if isinstance(part, torch.nn.Module):
        tensors += part.buffers()  # also those that are not saved
    for tensor in tensors:
        if tensor.dim() == 0 and tensor.device.type == "xla":
            (tensor.data,) = send(tensor.detach().cpu(), tensor.device, None)


def _tensors_of(part: Any) -> dict[str, Any]:
    """The tensors themselves, to be filled in place: a module's state_dict would hold detached ones."""
    return part.state_dict(keep_vars=True) if isinstance(part, torch.nn.Module) else part.state_dict()
