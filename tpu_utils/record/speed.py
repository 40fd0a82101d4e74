"""How fast the steps of a run are, and what they send to the device beside their batches, and read from it."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tpu_utils.base.errors import TrainingError
from tpu_utils.base.process import Goodput
from tpu_utils.device import transfers_from_device
from tpu_utils.record.log import BESIDE

if TYPE_CHECKING:
    from tpu_utils.record.lines import LineWatch

UPLOADS, READS = BESIDE
ADVICE = {
    UPLOADS: "a Python number that changes is sent in every step, and where it equals 0, 1 or another number of the "
    "step it becomes a second graph: make it a tensor on the device",
    READS: "there the host waits until the device has done all steps sent so far, and on a TPU the device then has "
    "nothing to do until the next one arrives: keep the value on the device, or read it beside run.log()",
}
MOST_STEPS = 100  # steps that are watched line by line, which costs the host time, in a run that is not strict
STRICT = "; --strict allows none: leave it out to go on, more slowly"


class Speed:
    """Throughput between two log lines: the phases step and data_wait, without compile, evaluation and checkpoint."""

    def __init__(self, goodput: Goodput, transfers: "Transfers", unit: str, flops: float | None, peak: float | None):
        """unit: what is counted, examples or tokens. flops: of one of them. peak: FLOP/s of all devices, or None."""
        self._goodput, self.transfers, self._unit, self._flops, self._peak = goodput, transfers, unit, flops, peak
        self.count_of_step = 0  # examples or tokens of the step under way
        self._started = False

    def start(self) -> None:
        """Count from now."""
        self._started = True
        self._goodput.total()  # settles the running phase
        self._steps, self._count, self._seconds, self._busy = 0, 0, dict(self._goodput.seconds), self._goodput.busy
        self.transfers.start()

    def step_done(self, compiled: bool) -> None:
        """Call it after each step; the first starts the count. compiled: the step was compiled, and is not counted."""
        if not self._started:
            self.start()
        elif not compiled:
            self._steps, self._count = self._steps + 1, self._count + self.count_of_step
        self.transfers.step_done(compiled)

    def measure(self) -> dict[str, float | None]:
        """Fields of a train line for the steps since start() or the last measure(). All None when there were none.
        host_seconds: CPU time of the loop's thread for a step. If it is as long as the step, the device waits for the
        host."""
        steps, count, before, busy = self._steps, self._count, self._seconds, self._busy
        transfers = self.transfers.measure(steps)
        self.start()
        rate = f"{self._unit}_per_second"
        if not steps:
            return dict.fromkeys(("step_seconds", rate, "mfu", "data_wait_seconds", "host_seconds"))
        data_wait = (self._seconds["data_wait"] - before["data_wait"]) / steps
        seconds = (self._seconds["step"] - before["step"]) / steps + data_wait
        per_second = count / steps / seconds
        mfu = per_second * self._flops / self._peak if self._flops and self._peak else None
        found = {"step_seconds": seconds, rate: per_second, "mfu": mfu, "data_wait_seconds": data_wait}
        return found | {"host_seconds": (self._busy - busy) / steps} | transfers


class Transfers:
    """Counts what steps send to the device beside their batches, and what they and the loop around them read from it;
    says at which lines, each kind once."""

    def __init__(self, uploads: Callable[[], float], say: Callable[[str], None], is_strict: bool):
        """uploads: transfers so far, but for batches. is_strict: a line that transfers something is an error."""
        self._counts = dict(zip(BESIDE, (uploads, transfers_from_device), strict=True))
        self._out, self._held = dict.fromkeys(BESIDE, 0), None
        self.per_step: dict[str, float | None] = dict.fromkeys(BESIDE)
        """For the summary: uploads since the last log line, reads where there were most; None: not known."""
        self._unnamed = {name: functools.partial(self._count, name) for name in BESIDE}
        if math.isnan(self._count(READS)):  # the backend does not count
            self._unnamed = {}
        self._say, self._is_strict, self._watch, self._watched = say, is_strict, None, 0
        self.start()

    def _count(self, name: str) -> float:
        return (self._counts[name]() if self._held is None else self._held[name]) - self._out[name]

    def start(self) -> None:
        """Count from now: a log line may read."""
        self._begin = {name: self._count(name) for name in BESIDE}
        self._steps, self._reads, self._uploads = 0, self._begin[READS], self._begin[UPLOADS]
        if self._watch:
            self._watch.forget()

    def close(self) -> None:
        """After the last step: lines are no longer looked at."""
        if self._watch:
            self._watch.stop()
            self._watch = None

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Around what is no step, such as an evaluation: transfers there are not counted."""
        if self._held:
            yield
            return
        self._held = before = {name: count() for name, count in self._counts.items()}
        yield
        self._out = {name: out + self._counts[name]() - before[name] for name, out in self._out.items()}
        self._held = None

    def measure(self, steps: int) -> dict[str, float]:
        """Fields of a log line, for those of which there were any in so many steps."""
        found = {
            UPLOADS: (self._count(UPLOADS) - self._begin[UPLOADS]) / max(steps, 1),
            # up to the last step: behind it, the log line and what stands beside it may read
            READS: (self._reads - self._begin[READS]) / max(self._steps - 1, 1),
        }
        if steps and not math.isnan(found[READS]):
            self.per_step = found | {READS: max(found[READS], self.per_step[READS] or 0.0)}
        return {name: number for name, number in found.items() if number > 0}

    def step_done(self, compiled: bool) -> None:
        """Call it after each step. compiled: the step was, so it has sent its constants. Raises TrainingError for a
        transfer, if that is to stop the run."""
        self._steps, self._reads = self._steps + 1, self._count(READS)
        some = self._reads > self._begin[READS] and READS in self._unnamed
        is_asked = compiled or self._is_strict or self._steps == 2 or self.per_step[UPLOADS]
        if UPLOADS in self._unnamed and is_asked:  # not always: it waits for a batch that is sent
            before, self._uploads = self._uploads, self._count(UPLOADS)
            some |= self._uploads > before and not compiled
        if self._watch and compiled:
            self._watch.forget()
        elif self._watch:
            self._name_lines(self._watch)
            self._watched += 1
            if self._watched > MOST_STEPS and not self._is_strict:
                self._unnamed = {}
                self.close()
        elif self._unnamed and (some or self._is_strict):
            from tpu_utils.record.lines import LineWatch  # only for a run that has any, or may have none

            self._watch = LineWatch(dict(self._unnamed))
            if not self._watch.start():
                self._watch = None
                if some and self._is_strict:
                    raise TrainingError(f"steps transfer more than their batches{STRICT}")

    def _name_lines(self, watch: "LineWatch") -> None:
        found = {name: lines for name in watch.counts if (lines := watch.lines(name))}
        for name, lines in found.items():
            texts = [f"{times} of this step at {where}" for times, where in lines]
            if self._is_strict:
                watch.stop()
                raise TrainingError(f"{BESIDE[name]} beside the batch, {', '.join(texts)}: {ADVICE[name]}{STRICT}")
            for text in [*texts, ADVICE[name]]:
                self._say(f"{BESIDE[name]:10} {text}")
            del self._unnamed[name]
        if found:
            self.close()
