"""tools.keep_running: a small script that is lost in every way, and MNIST to the same bits."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, environment_with, run, waits

from tools import keep_running
from tpu_utils.errors import InputError
from tpu_utils.restarts import newest_checkpoint, options_in, to_go_on

# Ten steps of 50 ms, each logged and saved. What it is lost by stands in the file `faults`, one line an attempt.
SCRIPT = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(options["--run_dir"])
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
faults = (folder / "faults").read_text().split("\\n") if (folder / "faults").exists() else []
fault = faults.pop(0) if faults else ""
(folder / "faults").write_text("\\n".join(faults))
saved = sorted(folder.glob("checkpoints/step_*/done"))
first = int(saved[-1].parent.name[5:]) if saved and options.get("--resume") == "auto" else 0
print("first", first, options.get("--resume"), flush=True)
if fault == "early":
    sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
for step in range(first + 1, 11):
    time.sleep(0.05)
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(dict(kind="train", step=step)) + "\\n")
    if step == first + 3 and fault:
        if fault == "killed":
            with (folder / "metrics.jsonl").open("a") as log:
                log.write('{"kind": "tra')
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "in C":
            ctypes.PyDLL(None).sleep(1000)  # holds the interpreter, as a collective that waits for a lost host may
        if fault == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "deaf":
            signal.signal(signal.SIGABRT, signal.SIG_IGN)
            time.sleep(1000)
        if fault == "waits":
            time.sleep(1000)
        sys.exit(int(fault))
    (folder / f"checkpoints/step_{step:08d}").mkdir(exist_ok=True)
    (folder / f"checkpoints/step_{step:08d}/done").touch()
(folder / "summary.json").write_text(json.dumps(dict(steps=10)))
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The command that keeps SCRIPT running in run/, with faults."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()

    def command(*faults: str, options=()) -> list[str]:
        (tmp_path / "run" / "faults").write_text("\n".join(faults))
        words = ["-m", "tools.keep_running", *options, "--", tmp_path / "script.py", "--run_dir", tmp_path / "run"]
        return [sys.executable, *map(str, words)]

    return command


def ended(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, env=environment_with({}), capture_output=True, text=True, timeout=300)


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_goes_on_from_the_newest_checkpoint_until_it_ends_well(kept, tmp_path):
    done = ended(kept("killed", "1", "143"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["first 0 None", "first 2 auto", "first 4 auto", "first 6 auto"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = summary["keep_running"]
    assert summary["steps"] == 10 and found["attempts"] == 4
    assert found["ended_by"] == ["killed by SIGKILL", "exit code 1", "exit code 143"]
    assert found["lost_seconds"].keys() == {"lost_steps", "silence", "waiting", "restart"}
    restarts = [line for line in lines_of(tmp_path / "run") if line["kind"] == "restart"]
    assert [(line["step"], line["attempt"], line["reason"]) for line in restarts] == [
        (2, 1, "killed by SIGKILL"), (4, 2, "exit code 1"), (6, 3, "exit code 143")
    ]  # fmt: skip
    assert "kept       killed by SIGKILL; goes on from step 2 in 1 s" in done.stderr


@pytest.mark.parametrize("fault, said", [("in C", "script.py"), ("frozen", "script.py"), ("deaf", None)])
def test_what_is_stuck_shows_where_and_is_ended(kept, tmp_path, monkeypatch, fault, said):
    """Also where it holds the interpreter in C++, where no signal handler of Python's would run."""
    done = ended(kept(fault, options=["--silent_minutes", "0.03"]))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["keep_running"]
    assert found["ended_by"] == ["silent for 2 s"] and found["lost_seconds"]["silence"] >= 1.8
    if said:
        assert "Fatal Python error: Aborted" in done.stderr and f'{said}", line ' in done.stderr


def test_it_gives_up_where_no_attempt_gets_further(kept, tmp_path):
    done = ended(kept("early", "early", "3", "early", "early", "early", options=["--most_failures", "2"]))
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1] == "kept       exit code 1; given up: 2 attempts, and no checkpoint after step 0"
    )
    assert done.stdout.count("first") == 2


def test_refused_options_are_not_tried_again(kept):
    done = ended(kept("2"))
    assert done.returncode == 2 and done.stdout.count("first") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_stops_the_script(kept, tmp_path, number):
    process = subprocess.Popen(kept("waits"), cwd=ROOT, env=environment_with({}), stderr=subprocess.PIPE, text=True)
    waits(lambda: newest_checkpoint(tmp_path / "run") == 2 and len(lines_of(tmp_path / "run")) == 3)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "kept" not in said


def test_killed_it_leaves_nothing_behind(kept, tmp_path):
    process = subprocess.Popen(kept("waits"), cwd=ROOT, env=environment_with({}))
    waits(lambda: newest_checkpoint(tmp_path / "run") == 2)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    waits(lambda: not Path(f"/proc/{child}/exe").exists(), 60)


@pytest.mark.parametrize(
    "command, said",
    [
        ([], "found nothing after --; expected a training script"),
        (["nowhere.py", "--run_dir", "x"], "found nowhere.py after --"),
        (["simple_mnist_tpu.py"], "--run_dir is ''; expected a folder"),
        (["simple_mnist_tpu.py", "--run_dir", "gs://bucket/run"], "--run_dir is 'gs://bucket/run'; expected a folder"),
    ],
)
def test_what_cannot_be_kept_running_is_refused(command, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match=said):
        keep_running.Keeper(command, 5, 60.0)


def test_a_command_line_that_goes_on():
    given = ["--preset", "production", "--resume=never", "--run-dir=a b", "--no_download", "--seed", "3"]
    assert options_in(given) == dict(preset="production", resume="never", run_dir="a b", no_download="", seed="3")
    assert to_go_on(given) == [*given[:2], *given[3:], "--resume", "auto"]
    assert to_go_on(["--resume", "must", "--seed", "3"]) == ["--seed", "3", "--resume", "auto"]


@pytest.mark.slow
def test_mnist_lost_twice_ends_with_the_bits_of_a_run_that_was_not(tmp_path):
    options = ["--num_epochs=3", "--channels=4", "--hidden_dim=16", "--save_every=10", "--log_every=5", "--device=cpu"]
    options += ["--warmup_steps=2", "--no_tensorboard"]
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    assert run("simple_mnist_tpu.py", *options, "--run_dir", whole).returncode == 0
    command = [sys.executable, "-m", "tools.keep_running", "--", "simple_mnist_tpu.py", *options, f"--run_dir={lost}"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment_with({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for step in (10, 30):
        waits(lambda step=step: newest_checkpoint(lost) >= step or process.poll() is not None)
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    found = json.loads((lost / "summary.json").read_text())["keep_running"]
    assert found["attempts"] >= 2 and set(found["ended_by"]) == {"killed by SIGKILL"}
    last = [sorted(folder.glob("checkpoints/step_*"))[-1] for folder in (whole, lost)]
    assert last[0].name == last[1].name
    for file in sorted(last[0].glob("*.safetensors")):
        assert file.read_bytes() == (last[1] / file.name).read_bytes()
    losses = [
        {line["step"]: line["loss"] for line in lines_of(folder) if line["kind"] == "train"} for folder in (whole, lost)
    ]
    assert losses[0] == losses[1]
