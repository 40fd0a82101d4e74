"""The watchdog: a run without progress is shown, once."""

import gc
import subprocess
import sys
import threading
import time

import pytest
from processes import ROOT, waits
from run_files import TINY, in_process

import simple_mnist_tpu
import tpu_utils
import tpu_utils.base.process
from tpu_utils.base.process import Goodput, watch_for_stalls


def stalls_in(text):
    return [line for line in text.splitlines() if line.startswith("stall")]


def wait_for_a_disk_that_does_not_answer(stuck):
    stuck.wait()


def test_a_stuck_data_iterator_is_shown_and_the_run_goes_on(tmp_path, capfd, monkeypatch):
    stuck, seen = threading.Event(), []

    class Stuck(simple_mnist_tpu.TrainBatches):
        def batch(self, step):
            if step == 8:
                wait_for_a_disk_that_does_not_answer(stuck)
            return super().batch(step)

    def release():
        waits(lambda: seen.append(capfd.readouterr().err) or "wait_for_a_disk" in "".join(seen))
        stuck.set()

    monkeypatch.setattr(simple_mnist_tpu, "TrainBatches", Stuck)
    releaser = threading.Thread(target=release)
    releaser.start()
    assert in_process(*TINY, "--run_dir", tmp_path / "run", "--stall_seconds=1") == 0
    releaser.join()
    join_watchdogs()
    text = "".join(seen) + capfd.readouterr().err
    said = [line for line in stalls_in(text) if "data_wait" in line]
    assert len(said) == 1 and "no progress for 1 s" in said[0] and "--data_dir" in said[0]
    assert "simple_mnist_tpu.py" in text, "the main thread's stack is there too"
    assert "stall      over after" in text


def join_watchdogs() -> None:
    gc.collect()
    for thread in [thread for thread in threading.enumerate() if thread.name == "watchdog"]:
        thread.join(timeout=30)
        assert not thread.is_alive()


class Clock:
    """Stands for the time module in the watchdog's thread: a sleep ends at once, and then something happens."""

    def __init__(self, goodput, happens, looks):
        self.now, self.goodput, self.happens, self.looks = 0.0, goodput, happens, looks

    def monotonic(self):
        return self.now

    perf_counter = thread_time = monotonic

    def sleep(self, seconds):
        self.now, self.looks = self.now + seconds, self.looks - 1
        self.happens(self.goodput)

    def ref(self):
        """As a weak reference to the goodput: None once the run is over."""
        return self.goodput if self.looks else None


def touch(goodput):
    with goodput.phase("evaluation"):
        pass


@pytest.mark.parametrize(
    "phase, happens, stalls",
    [
        ("step", touch, []),
        ("compile", lambda goodput: None, []),  # may take six times as long
        ("step", lambda goodput: None, ["no progress for 10 s in phase step", "over after 50 s"]),  # said once
    ],
)
def test_what_is_a_stall(phase, happens, stalls, monkeypatch, capfd):
    goodput = Goodput()
    goodput.enter(phase)
    clock = Clock(goodput, happens, looks=50)
    monkeypatch.setattr(tpu_utils.base.process, "time", clock)
    tpu_utils.base.process._watch_for_stalls(clock.ref, 10)
    said = stalls_in(capfd.readouterr().err)
    assert len(said) == len(stalls) and all(text in line for text, line in zip(stalls, said, strict=True)), said


def test_the_watchdog_ends_with_the_run_and_zero_seconds_are_none():
    goodput = Goodput()
    before = threading.active_count()
    watch_for_stalls(goodput, 0)
    assert threading.active_count() == before
    watch_for_stalls(goodput, 0.2)
    assert "watchdog" in [thread.name for thread in threading.enumerate()]
    del goodput
    join_watchdogs()


def test_start_up_counts_from_the_interpreter_and_not_from_the_process():
    """A shell that works first and then becomes Python by exec keeps its process, and with it that one's age."""
    imports = "import tpu_utils; print(tpu_utils.STARTED)"
    becomes = f"os.execv(sys.executable, [sys.executable, '-c', {imports!r}])"
    works_first = f"import os, sys, time; print(time.perf_counter(), flush=True); {becomes}"
    done = subprocess.run([sys.executable, "-c", works_first], capture_output=True, text=True, cwd=ROOT, check=True)
    before, started = map(float, done.stdout.split())
    assert before < started < time.perf_counter()
