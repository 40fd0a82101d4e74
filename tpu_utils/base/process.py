"""One process of a run: where its seconds go, a watchdog that tells when nothing moves, and the other processes.

Imports nothing of this project, and no torch. Peers is a run of one process, LinkedPeers of remote/meeting.py one of
several, which must agree on some things.
"""

import contextlib
import faulthandler
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Goodput:
    """Every second since the start belongs to exactly one phase; phases nest, and the inner one gets the time.

    changes: how often its seconds were told apart, as at each begin and end; watch_for_stalls calls that progress.
    In a trace of --profile_steps a phase is an event on the host, `phase evaluation` and so on.
    """

    def __init__(self, start: float | None = None, trace: Callable[[str], Any] = contextlib.nullcontext):
        """start: when start_up began, by time.perf_counter(); None: now. trace: a context, an event of that name."""
        self._trace = trace
        phases = ("start_up", "compile", "data_wait", "step", "evaluation", "checkpoint", "other")
        self.seconds = dict.fromkeys(phases, 0.0)  # others are added as they come
        self.busy = 0.0
        """CPU seconds of this thread in phase step: what the host had to do, without waiting for the device."""
        now = time.perf_counter()
        self._stack, self._since, self._cpu = ["start_up"], now if start is None else start, time.thread_time()
        self.changes = 0

    @property
    def current(self) -> str:
        return self._stack[-1]

    def _settle(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self._since
        self.busy += cpu - self._cpu if self.current == "step" else 0.0
        self._since, self._cpu, self.changes = now, cpu, self.changes + 1

    def enter(self, name: str) -> None:
        """From here on, time that no inner phase takes belongs to this one."""
        self._settle()
        self._stack = [name]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._settle()
        self._stack.append(name)
        try:
            with self._trace(f"phase {name}"):
                yield
        finally:
            self._settle()
            self._stack.pop()

    def until_now(self, *phases: str) -> dict[str, float]:
        return {phase: round(self.seconds.get(phase, 0.0), 3) for phase in phases}

    def total(self) -> float:
        """Seconds since the start: the sum of all phases."""
        self._settle()
        return sum(self.seconds.values())


STALL_HINTS = {  # by Goodput's phase
    "start_up": "does another process hold the TPU (setup_tpu.py names it)? has the run started on all hosts?",
    "restore": "can the checkpoint in --run_dir still be read? has the run started on all hosts?",
    "compile": "a large model may compile for long; has the run started on all hosts?",
    "data_wait": "can the data source (--data_dir, its disk or network) still be read?",
    "checkpoint": "can the disk of --run_dir still be written? do the other hosts still run?",
}
OTHER_STALL = "do the other hosts still run (a step waits for all of them)? is the TPU lost or held (setup_tpu.py)?"


def watch_for_stalls(goodput: Goodput, stall_seconds: float) -> None:
    """Print where every thread stands, once per stall, when a run makes no progress for stall_seconds; 0: never.
    Progress is what Goodput sees: a batch read, a step or evaluation batch sent off, a save begun or ended. Start-up
    and compiling may take six times as long. It ends nothing: what the run waits for may still come."""
    if stall_seconds > 0:
        # no reference to goodput: the thread ends with the run
        arguments = (weakref.ref(goodput), stall_seconds)
        threading.Thread(target=_watch_for_stalls, args=arguments, name="watchdog", daemon=True).start()


def _watch_for_stalls(ref: weakref.ref, stall_seconds: float) -> None:
    changes, since, told = None, time.monotonic(), False
    while True:
        goodput, now = ref(), time.monotonic()
        moved = goodput is None or goodput.changes != changes  # None: the run has come to its end
        if moved and told:
            print(f"stall      over after {now - since:.0f} s", file=sys.stderr, flush=True)
        if goodput is None:
            return
        if moved:
            changes, since, told = goodput.changes, now, False
        phase = goodput.current
        del goodput  # while this sleeps the run may end
        limit = stall_seconds * (6 if phase in ("start_up", "restore", "compile") else 1)
        if now - since > limit and not told:
            told, hint = True, STALL_HINTS.get(phase, OTHER_STALL)
            text = f"no progress for {limit:g} s in phase {phase}, and the run goes on waiting; check: {hint}"
            print(f"stall      {text} Where every thread stands:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        time.sleep(min(1, stall_seconds / 4))


class Peers:
    """The processes of a run, and what they must agree on. In this class there is one process. index: of this process.
    count: of all. All processes make the same calls in the same order."""

    index, count = 0, 1

    def with_own_links(self) -> "Peers":
        """The same processes over new connections, for a thread: on shared ones messages of two threads would mix. All
        processes must call it."""
        return self

    def patient(self) -> contextlib.AbstractContextManager:
        """Allow more time to the calls inside: another process moves a checkpoint over the network or a slow disk."""
        return contextlib.nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """All-gather on the hosts: the JSON values that the processes gave, in the order of their indices."""
        return [value]

    def largest(self, value: int) -> int:
        """The largest value that any process gave."""
        return value

    def on_all(self, action: Callable[[], None]) -> None:
        """Do this on every process. Raises on all of them what fails on one: nobody waits for another."""
        action()

    def from_first(self, function: Callable[[], Any]) -> Any:
        """Broadcast: only the first process calls function; all return its result, of JSON, or raise its exception."""
        return function()

    def tensor_from_first(self, tensor: "torch.Tensor") -> None:
        """Broadcast the first process's values into this host tensor, contiguous, of one shape and type on all."""
