"""What every run needs beside the training itself. The script owns the loop, and calls in this order:

with Run(config, train_step, eval_step) as run:  # device, clock, watchdog, stop signals
    run.open(batches, dataset, flops)            # run directory, lock, newest checkpoint; says what it runs on
    run.track(model=model, optimizer=optimizer, metrics=metrics)  # what a checkpoint holds; filled from it
    for step, batch in run.steps(batches):       # uploaded ahead of the step, which @one_graph has made
        log_due and log, log_evaluation, save_due and save  # the only reads from the device
    return run.finish()                          # on disk and in the bucket; the exit code
"""

import contextlib
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

import tpu_utils
from tpu_utils import device
from tpu_utils.base.errors import NonFiniteError, SaveError, never_fail_to_print
from tpu_utils.base.process import Goodput, Peers, watch_for_stalls
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.state import Beginning, Tracked
from tpu_utils.options.parsing import as_json, write_config
from tpu_utils.record.log import RunLog, print_summary
from tpu_utils.record.metrics import finite_means, first_not_finite
from tpu_utils.record.run_dir import RunDir
from tpu_utils.step.graphs import OneGraph, StepWatch

if TYPE_CHECKING:
    from tpu_utils.checkpoint.memory import MemoryCheckpoints
    from tpu_utils.options.train_config import TrainConfig
    from tpu_utils.record.speed import Speed
    from tpu_utils.trial.unsaved import Unsaved


class Run:
    """One training run of one process: see the top of this file for the order of the calls."""

    def __init__(
        self,
        config: "TrainConfig",
        *steps: OneGraph,
        hosts: Peers | None = None,
        join: Callable[[], Peers | None] = lambda: None,
    ):
        """steps: all that the run calls, the training step first. hosts: the processes of this run, one for each host.

        join: starts SPMD (use_spmd) or joins a process group; called before a device is touched. May return the
        processes of the run.
        """
        never_fail_to_print()  # run_script does it too, before the seconds of imports
        self.config, self.peers, self._join = config, hosts or Peers(), join
        self.evaluation: dict[str, float] = {}  # the last one, also one before a resumption
        self.examples: tuple | None = None
        """From check_model(): a few examples to try a step on, the script's evaluate(), the model, its FLOPs."""
        self._goodput = Goodput(tpu_utils.STARTED, device.TraceMe)
        self._stop, self._stop_signal = device.StopRequest(), 0
        self._watch = StepWatch(steps, self._goodput)
        self._writers = contextlib.ExitStack()  # closed by finish(), or by an error
        self._dir: RunDir | None = None
        self._memory: MemoryCheckpoints | None = None  # for --save_memory_every
        self._step_in_memory = 0  # the last one that save_due() said so of
        self._speed: Speed | None = None  # while there are steps
        self._unsaved: Unsaved | None = None  # from the first step on

    def __enter__(self) -> "Run":
        watch_for_stalls(self._goodput, self.config.stall_seconds)
        try:
            self.device, peers = device.start_device(self.config, self._join)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self.peers = peers or self.peers
        return self

    def __exit__(self, *exception) -> None:
        with contextlib.ExitStack() as last:
            last.callback(self._stop.close)
            last.callback(self._watch.end)
            if self._dir:
                last.callback(self._dir.close)
            try:
                self._writers.__exit__(*exception)
            finally:
                if self._dir and isinstance(sys.exc_info()[1], OSError | SaveError):
                    self._dir.check_own()  # a folder that is gone is the cause: raise that

    # ------------------------------------------------------------------------------------------------ before the loop

    def open(self, batches, dataset, flops: float | None = None, sharding: device.BatchSharding | None = None) -> None:
        """Say what this runs on; make and lock the run directory; read the newest checkpoint, if it is to be resumed.

        batches: has num_steps, of the whole run. Optional: unit, what is counted ("examples"); count(batch), how many
        over all devices (global_batch_size); position(step), of JSON, of a stream, and seek(step, those of all
        processes). dataset: has description, which is printed and kept in config.json, and fingerprint(), which must
        be the same on resume. Optional: loss_floor. flops: of one example or token, forward and backward. sharding: of
        a batch over the mesh. Raises InputError for a directory in use, of another run, or that cannot be written.
        """
        config, self.num_steps, self._sharding, self._flops = self.config, batches.num_steps, sharding, flops
        self._unit = getattr(batches, "unit", "examples")
        self._count = getattr(batches, "count", lambda batch: config.global_batch_size)
        self._position = getattr(batches, "position", None)
        self._loss_floor = getattr(dataset, "loss_floor", None)
        self._stop.watch_metadata()
        if self.peers.count > 1:
            from tpu_utils.options.stored import check_same_options  # only here

            check_same_options(config, self.peers)
        self._dir = RunDir(self.peers)
        self._dir.open(config)
        folder, run_id = self._dir.folder / "checkpoints", self._dir.run_id
        self._shown_place = config.run_dir or str(self._dir.folder)  # as the user names it
        self._checkpoints = Checkpoints(folder, config.keep_checkpoints, self.peers, self._dir.mirror, run_id)
        # what a checkpoint belongs to
        self._run = {**as_json(config), "data": dataset.description, "data_crc32": dataset.fingerprint()}
        if self.peers.index == 0 or device.is_spmd():  # under SPMD every host says where it is
            device.print_banner(config, self.device)
        self.print(f"run        {'none: nothing runs' if config.compile_for else self._shown_place}")
        if config.options_from:
            self.print(f"options    from {config.options_from}")
        self._begun = Beginning(self.num_steps)
        if not config.compile_for:
            from tpu_utils.base.restarts import memory_folder  # only here

            held = os.path.lexists(memory_folder(self._shown_place, config.memory_dir))
            if self.peers.largest(int(bool(config.save_memory_every or run_id or held))):
                from tpu_utils.checkpoint.memory import open_memory  # not for a new run that saves on disk alone

                self._memory, step = open_memory(config, self._shown_place, self._checkpoints)
                if step is not None:
                    self.print(f"memory     held the checkpoint of step {step}: it is in the run directory now")
        if config.resume != "never" and not config.compile_for:
            from tpu_utils.checkpoint.resume import find_beginning  # only for a run that is to go on

            with self._goodput.phase("restore"):
                self._begun = find_beginning(config, self._run, self.num_steps, self._dir, self.peers, batches)
        if self._begun.restore:
            self.print(f"resumed    after step {self.first_step} of {self.num_steps}")
        self.print(f"data       {dataset.description}")
        self._checkpoints.run_id = self.peers.from_first(lambda: run_id or self._begun.run_id or secrets.token_hex(8))
        self._best = self._begun.best
        self._step, self._logged = self.first_step, self.first_step - self.first_step % config.log_every

    @property
    def first_step(self) -> int:
        """Steps done before this process."""
        return self._begun.step

    def print(self, text: str) -> None:
        """Print on the first process of the run only."""
        if self.peers.index == 0:
            print(text, flush=True)

    def track(self, **parts: Any) -> None:
        """What a checkpoint holds beside the step: a model, an optimizer, whatever has a state_dict() of tensors, or a
        tensor that steps write to.

        Where there is a checkpoint to go on from, the tensors are filled in place, each device its shard, whatever mesh
        or single device it was saved from. Move and shard them before; the rest is replicated on a mesh.
        metrics=: a DeviceMetrics, which log() and save() read.
        """
        self._tracked = Tracked(parts)
        if self._begun.restore:
            with self._goodput.phase("restore"):
                self._tracked.fill(self._begun.restore)
            self.evaluation = self._begun.evaluation
            if self._tracked.metrics:
                self._tracked.metrics.read(self.first_step, self.first_step)  # how many updates were skipped before
        self._tracked.make_inputs()

    # ------------------------------------------------------------------------------------------------- around the loop

    def steps(self, batches) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """(step, batch on the device) from the first step after the checkpoint to the last, or to a stop signal.

        batches.batch(i): the host arrays of step i + 1, one or a tuple, read and uploaded in a thread; close(), if they
        have one, is called at the end. A finished run that is resumed does no step and writes nothing.
        """
        from tpu_utils.record.speed import Speed, Transfers  # only here: a run that does no step needs it not

        config, folder, span = self.config, self._dir.folder, (self.first_step, self.num_steps)
        if config.compile_for:
            yield 1, self._ask_compiler(batches)
            return
        enter = self._writers.enter_context
        if self._begun.is_finished:
            self._log = enter(RunLog(folder, *span, False, True))
            return
        if config.profile_steps:
            from tpu_utils.record.profile import Profile  # only here

            profile = Profile(config, folder, *span)
        self._dir.check()
        if self.peers.index == 0:  # from here on the directory holds a run
            write_config(folder, {**self._run, "run_id": self._checkpoints.run_id})
        self._stop_signal = self.peers.largest(self._stop.signal or 0)
        if self._stop_signal:
            return
        for place in filter(None, (self._dir.mirror, self._checkpoints, self._memory)):
            enter(place)  # the mirror is left last: it waits until all is in the bucket
        silent, before = self.peers.index > 0, self._begun.num_steps_before
        self._log = enter(RunLog(folder, *span, config.tensorboard, silent, before=before))
        if config.profile_steps:
            enter(profile)
        self._writers.callback(getattr(batches, "close", lambda: None))  # once the loader has ended
        if not hasattr(batches, "seek"):  # a stream moves on with each batch that it gives
            from tpu_utils.trial.unsaved import check_pure  # only here: a run that does no step needs it not

            check_pure(batches, self.first_step)
        ahead = (batches.batch(index) for index in range(*span))
        loader = enter(device.DeviceLoader(ahead, self.device, config.prefetch_batches, self._goodput, self._sharding))
        transfers = Transfers(loader.uploads_beside_batches, self.print, config.strict)
        self._writers.callback(transfers.close)
        self._speed = Speed(self._goodput, transfers, self._unit, self._flops, device.peak_flops())
        self._watch.begin(self.first_step, self._speed.step_done, self._before_step, self._after_step)
        if self._begun.restore:
            self._tracked.set_random_state()  # last, after all that may draw
        self._goodput.enter("step")
        for step, batch in enumerate(loader, self.first_step + 1):
            if config.profile_steps:
                profile.before_step(step)
            device.seed_host(config.seed, step)
            self._speed.count_of_step, self._batch, self._under_way = self._count(batch), batch, step
            yield step, batch
            self._step = step
            self._log.advance()
            if self._stop_signal:
                return

    def _ask_compiler(self, batches) -> list[torch.Tensor]:
        """With --compile_for the step is compiled, not run. Returns its batch."""
        batch = device.send(batches.batch(0), self.device, self._sharding)
        count = self._count(batch)
        sizes = dict(examples=count, unit=self._unit, model_flops=self._flops and self._flops * count)
        self._watch.ask(topology=self.config.compile_for, **sizes, settings=as_json(self.config))
        return batch

    def _before_step(self, step: OneGraph, arguments: tuple, keywords: dict[str, Any], named: dict[str, Any]) -> None:
        if self._unsaved is None:
            from tpu_utils.trial.unsaved import Unsaved  # only here: a run that does no step needs them not

            self._unsaved = Unsaved(self._tracked)
            if self.examples and not (device.is_spmd() and device.process_count() > 1):  # else no host has all shards
                from tpu_utils.trial.first_step import check_training, trace_evaluation

                generators = device.random_state()
                with self._goodput.phase("start_up"):
                    trace_evaluation(self)
                    check_training(self, step, arguments, keywords, self._batch, self._unsaved)
                device.set_random_state(generators)
        self._unsaved.before(step, named)

    def _after_step(self, step: OneGraph, named: dict[str, Any], result: Any, is_training: bool) -> None:
        if self._unsaved:
            self._unsaved.after(step, named, result, is_training, self._batch)

    @contextlib.contextmanager
    def in_plain_pytorch(self, where: torch.device | None = None) -> Iterator[None]:
        """Steps that are called inside run as they are written, on tensors of the host, or of where."""
        before, self.device, self._watch.is_plain = self.device, where or torch.device("cpu"), True
        try:
            yield
        finally:
            self.device, self._watch.is_plain = before, False

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around an evaluation: its seconds and uploads are not training's. If it fails, the steps before are saved."""
        if self._watch.is_plain:
            yield
            return
        device.wait_device_ops()  # finish the dispatched steps: else the seconds of these would count for this phase
        with self._goodput.phase(name), self._speed.transfers.left_out() if self._speed else contextlib.nullcontext():
            try:
                yield
            except Exception:  # whatever it is, it is raised again
                if self._speed and self.peers.count == 1:  # where there are several, the others may not come here
                    self.print(f"saved      after step {self._under_way}, where the {name} fails")
                    self.save(self._under_way)
                raise

    def log_due(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == self.num_steps

    def log(self, step: int, **fields: float) -> None:
        """A train line: the means of the metrics over the steps since the last one, fields, and the throughput. Raises
        NonFiniteError, and SaveError if a save in the background has failed or the run directory is gone."""
        self._dir.check()
        values = self._read_metrics(step)
        for place in filter(None, (self._checkpoints, self._memory)):
            place.check()
        if metrics := self._tracked.metrics:
            fields = {**finite_means(values), "skipped_steps": metrics.skipped_steps, **fields}
        speed = self._speed.measure()
        if self._logged <= self.first_step:  # the first line of this process
            speed["began_with"] = self._goodput.until_now("start_up", "restore", "compile")
        self._log.train(step, fields, speed)
        self._logged = step

    def log_evaluation(self, step: int, **fields: float) -> None:
        """An eval line; with an accuracy, the best one so far is added. keep_best compares accuracy (the largest is the
        best) or validation_loss (the smallest), and the fields need one of them. All processes must then call this, and
        a save is due at a step with a new best. Raises NonFiniteError for a loss, as the next step would."""
        if "accuracy" in fields:
            fields["best_accuracy"] = max(fields["accuracy"], self.evaluation.get("best_accuracy", 0.0))
        self._log.evaluation(step, **fields)
        bad = [f"{name} {fields[name]}" for name in fields if name.endswith("loss") and not math.isfinite(fields[name])]
        if bad and self.config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"the evaluation after step {step} has {bad[0]}; expected a finite number; lower --learning_rate"
            )
        self.evaluation = fields
        if self.config.keep_best:
            from tpu_utils.checkpoint.saved import better  # only here

            self._best = self.peers.from_first(lambda: better(self._best, step, fields))

    def log_samples(self, step: int, graphs: int, samples: Iterable[tuple[str, str]]) -> None:
        """A sample line for each (prompt, text). graphs: compiled for them, which are not the next step's."""
        self._watch.total += graphs
        for prompt, text in samples:
            self._log.sample(step, prompt=prompt, text=text, graphs=graphs)

    def save_due(self, step: int) -> bool:
        """Every save_every steps, at the last one, before a stop, and with keep_best after the best evaluation so far;
        every save_memory_every steps, for a checkpoint in memory.

        Call it once a step, after the evaluation: processes agree in it.
        """
        if self.peers.count == 1 or step % self.config.log_every == 0:  # all processes stop after the same step
            self._stop_signal = self.peers.largest(self._stop.signal or 0)
        is_best = self._best is not None and self._best["step"] == step
        if self._stop_signal or is_best or step % self.config.save_every == 0 or step == self.num_steps:
            return True
        in_memory = self._memory is not None and step % self.config.save_memory_every == 0
        self._step_in_memory = step if in_memory else 0
        return in_memory

    def save(self, step: int) -> None:
        """A checkpoint of all that track() was given, in memory if save_due() has said so of this step alone, else on
        disk. Waits for the copy to host memory; a thread writes it.

        Raises NonFiniteError, because a bad state is never saved, and SaveError for the save before or a run directory
        that is gone.
        """
        self._dir.check()
        with self._speed.transfers.left_out():
            self._read_metrics(step)
        if self._unsaved:
            self._unsaved.check()
        values = {"config": self._run, "num_steps": self.num_steps, "evaluation": self.evaluation, "best": self._best}
        values |= {"position": self.peers.gather(self._position(step))} if self._position else {}
        in_memory = self._memory is not None and step == self._step_in_memory
        place, token = (self._memory, {"memory": self._memory.token}) if in_memory else (self._checkpoints, {})
        with self._goodput.phase("checkpoint"), self._speed.transfers.left_out():
            best = self._best and self._best["step"]
            copy = place.copy(step, self._tracked.state(), values, best=best)
        self._log.checkpoint(step, wait_seconds=copy.wait_seconds, **token)  # on disk before the step counts as done
        place.write(copy)  # behind the next steps

    def _read_metrics(self, step: int) -> dict:
        """{name: values of the steps after the last log line}, all finite unless such updates are skipped."""
        if not self._tracked.metrics:
            return {}
        values = self._tracked.metrics.read(self._logged, step)
        bad = first_not_finite(values)
        if bad is None or self.config.on_nonfinite == "skip":
            return values
        found = ", ".join(f"{name.replace('_', ' ')} {column[bad]:g}" for name, column in values.items())
        saved = self._checkpoints.newest()
        known = "there is no checkpoint before it" if saved is None else f"the last checkpoint is of step {saved}"
        again = "" if saved is None else " --resume must"
        raise NonFiniteError(
            f"step {self._logged + bad + 1}, of steps {self._logged + 1} to {step} read now, has {found}; expected "
            f"finite numbers; {known}; lower --learning_rate in another --run_dir, look at the data of that step, or "
            f"leave such updates out with{again} --on_nonfinite skip"
        )

    # ------------------------------------------------------------------------------------------------- after the loop

    def finish(self, **results: float | None) -> int:
        """Wait until all is on disk and in the bucket; write summary.json, print the last lines. Returns the exit code:
        0 at the end of the run, 143 after SIGTERM or a notice of the VM, 130 after SIGINT, 129 after SIGHUP.

        results: what the summary tells beside the last evaluation and what every run knows.
        """
        if self._begun.is_finished:
            self._close()
            self.print(f"finished   step {self._step} of {self.num_steps} was reached before; nothing to do")
            return 0
        if self._stop_signal:
            self._close()
            self._dir.check()
            done, how = f"saved after step {self._step}", "must"
            if not self._step:
                done, how = "before the first step: there was nothing to save", "auto"
            self.print(f"stopped by {self._stop.reason(self._stop_signal)}, {done}")
            self.print(f"to go on, repeat the command with --run_dir {self._shown_place} --resume {how}")
            return 128 + self._stop_signal
        with self._goodput.phase("checkpoint"):
            self._checkpoints.wait()
        self._dir.check()
        self._goodput.enter("other")
        memory, metrics = device.device_memory(self.device), self._tracked.metrics
        summary = {
            "steps": self._step,
            "train_graphs": self._watch.graphs(training=True),
            "eval_graphs": self._watch.graphs(training=False),
            **self._speed.transfers.per_step,
            "skipped_steps": metrics.skipped_steps if metrics else 0,
            "hbm_peak_bytes": memory and memory["peak_bytes_used"],  # on one device; None: unknown
            **{"test_accuracy" if name == "accuracy" else name: value for name, value in self.evaluation.items()},
            "loss_floor": self._loss_floor,
            **results,
            **({"best_step": self._best and self._best["step"]} if self.config.keep_best else {}),
            "seconds": self._goodput.total(),
            "goodput": self._goodput.seconds,
        }
        self._log.summary(self._run, summary)
        self._close()
        if self.peers.index == 0:
            print_summary(summary)
        return 0

    def _close(self) -> None:
        """All is on disk when it returns."""
        self._writers.close()
        if self._memory:
            self._memory.clear()
