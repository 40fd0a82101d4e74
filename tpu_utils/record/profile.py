"""Traces of some steps, for TensorBoard's profile tab."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_utils.base.errors import InputError
from tpu_utils.device import TRACE_VIEWER, TraceMe, start_trace, stop_trace, wait_device_ops

if TYPE_CHECKING:
    from tpu_utils.options.train_config import TrainConfig


class Profile:
    """Traces the steps of config.profile_steps into run_dir/tensorboard: xplane, read by the xprof plugin, or without
    torch_xla JSON."""

    def __init__(self, config: "TrainConfig", run_dir: Path, first_step: int, num_steps: int):
        self._first, self._last = config.profile_range
        self._folder, self._running, self._step = run_dir / "tensorboard", False, contextlib.ExitStack()
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
        self._step.close()
        if step == self._first:
            self._folder.mkdir(parents=True, exist_ok=True)
            start_trace(str(self._folder))
            self._running = True
        if step == self._last:
            self._stop()
        if self._running:
            # _r: the profiler groups by these events, with step_num as the number of the step
            self._step.enter_context(TraceMe("train", step_num=step, _r=1))

    def _stop(self) -> None:
        self._step.close()
        if self._running:
            wait_device_ops()  # the traced steps may still be running
            stop_trace()
            self._running = False
            print(f"trace of steps {self._first} to {self._last - 1}: {TRACE_VIEWER.format(self._folder)}")
