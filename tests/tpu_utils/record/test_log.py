"""metrics.jsonl, the progress bar, the last lines."""

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest
from mutations import DEEP, NO_OBJECT, NOT_JSON, at_most, make_irregular, mutated, no_hang
from processes import ROOT

from tpu_utils.base.errors import InputError
from tpu_utils.record.log import RunLog, print_summary


def test_log_drops_what_a_resumed_run_will_write_again(tmp_path):
    with RunLog(tmp_path, 0, 100, tensorboard=False) as log:
        for step in (10, 20, 30):
            log.write("train", step, loss=1.0 / step, mfu=None)
        log.write("train", 40, loss=float("nan"))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "st')  # a kill in mid-line
    assert json.loads(path.read_text().splitlines()[3])["loss"] is None
    with RunLog(tmp_path, 20, 100, tensorboard=False) as log:
        log.write("train", 30, loss=0.5)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]


STEPS = b'{"kind": "train", "step": %d, "loss": 1.5}\n{"kind": "checkpoint", "step": %d, "wait_seconds": 0.1}\n'
LINES = b"".join(STEPS % (step, step) for step in range(10, 60, 10))


def resume(folder: Path, content: bytes, first_step: int = 30) -> bytes:
    """What a run that resumes at this step leaves of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    path.write_bytes(content)
    with RunLog(folder, first_step, 100, tensorboard=False):
        pass
    return path.read_bytes()


BAD_STEPS = [b'"7"', b"null", b"true", b"7.0", b"NaN", b"-1", b"[]", b"101", b"1" * 30, b"9" * 5000, DEEP.encode()]
BAD_LINES = [line for line in [*NOT_JSON, *NO_OBJECT] if line]
BAD_LINES += [b'{"kind": "train", "step": %s}' % step for step in BAD_STEPS]
BAD_LINES += [b'{"kind": "train"}', b'{"step": 7}', b'{"kind": 7, "step": 7}']
BAD_LINES += [b'{"kind": "train", "step": 7, "x": "\xff"}']
BAD_LINES += ['{"kind": "train", "step": 7}'.encode("utf-16-le")]


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda bad: repr(bad[:40]))
def test_a_bad_line_is_reported_and_the_others_stay_as_they_are(tmp_path, capsys, bad):
    kept = b'{"step":10,  "kind":"train","loss":NaN, "mine":"\\ud800"}\r\n' + STEPS % (20, 30)
    content = kept + bad + b"\n" + STEPS % (30, 40) + b'{"kind": "train", "st'  # a kill in mid-line
    assert resume(tmp_path, content) == kept + (STEPS % (30, 40)).splitlines(True)[0]
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert f"{tmp_path}/metrics.jsonl: damaged lines are left out: 1, the first 4;" in said


def test_many_bad_lines_are_one_warning(tmp_path, capsys):
    assert resume(tmp_path, b"x\n" * 1000 + LINES, 50) == LINES
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "damaged lines are left out: 1,000, the first 1, 2, 3, 4, 5, 6, 7, 8;" in said
    assert resume(tmp_path, LINES + b"x", 50) == LINES and resume(tmp_path, b"", 50) == b""
    assert capsys.readouterr().err == ""


def test_no_damage_of_metrics_keeps_a_run_from_resuming(tmp_path):
    intact = [line for line in LINES.splitlines(True) if json.loads(line)["step"] <= 30]
    for content in mutated(LINES, 300):
        left = re.findall(rb"[^\n]*\n", resume(tmp_path, content))
        found = re.findall(rb"[^\n]*\n", content)
        assert [line for line in left if line in intact] == [line for line in found if line in intact], content
        for line in left:
            assert line in found
            record = json.loads(line)
            assert type(record["step"]) is int and 0 <= record["step"] <= 30 and isinstance(record["kind"], str)


def test_a_line_without_end_takes_no_memory(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(STEPS % (10, 20))
        file.seek(300 << 20, os.SEEK_CUR)
        file.write(b"\n" + STEPS % (30, 40))
    with at_most(8 << 20), RunLog(tmp_path, 30, 100, tensorboard=False):
        pass
    assert path.read_bytes() == STEPS % (10, 20) + (STEPS % (30, 40)).splitlines(True)[0]
    assert ": 1, the first 3;" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["FIFO", "folder", "character device"])
def test_metrics_that_are_no_file_are_refused(tmp_path, kind):
    make_irregular(tmp_path / "metrics.jsonl", kind)
    with no_hang(), pytest.raises(InputError, match=f"metrics.jsonl is a {kind}; expected"):
        RunLog(tmp_path, 0, 100, tensorboard=False)


BAR = """
import sys, time
from pathlib import Path
from tpu_utils.record.log import RunLog
values = dict(loss=1.0, gradient_norm=1.0, skipped_steps=0, learning_rate=1e-3, mine=0.123456)
speed = dict(step_seconds=0.1, examples_per_second=1.0, data_wait_seconds=0.0, mfu=None)
with RunLog(Path(sys.argv[1]), 99990, 99999, tensorboard=False) as log:
    for step in range(99991, 100000):
        log.advance()
        time.sleep(0.11)  # tqdm draws ten times a second at most
        if step % 4 == 0:
            log.train(step, values, speed)
"""


def on_a_terminal(columns: int, command: str) -> str:
    """What a shell command writes to a terminal of this width that is its own."""
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execvp("bash", ["bash", "-c", command])
    written = b""
    with contextlib.suppress(OSError):  # EIO: the last process has closed it
        while part := os.read(terminal, 65536):
            written += part
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0, written.decode()
    return written.decode()


def test_the_bar_fits_a_narrow_terminal(tmp_path):
    (tmp_path / "bar.py").write_text(BAR)
    written = on_a_terminal(40, f"set -m; {sys.executable} {tmp_path}/bar.py {tmp_path}")
    frames = [frame for frame in re.split(r"[\r\n]+", written) if "%|" in frame]
    assert len(frames) > 5
    for frame in frames:
        assert re.fullmatch(r"[ \d]{3}%\|.+\| \d+/99999 \[[\d:]+<[\d:?]+\]", frame), frame
        assert len(frame) <= 40
    assert "99999/99999" in frames[-1]


def test_a_background_job_has_no_bar_on_its_terminal(tmp_path):
    (tmp_path / "bar.py").write_text(BAR.replace("0.11", "0.01"))
    written = on_a_terminal(80, f"set -m; {sys.executable} {tmp_path}/bar.py {tmp_path} & wait")
    line = "step  99996/99999  loss 1.0000  norm 1.000  lr 1.00e-03  mine 0.1235  100.0 ms/step  1 examples/s"
    assert line in written and "%|" not in written


def test_the_last_lines_say_what_should_not_have_been(capsys):
    good = dict(steps=44, train_graphs=1, eval_graphs=1, skipped_steps=0, host_to_device_uploads_per_step=0.0)
    good |= dict(test_accuracy=0.5, loss_floor=None, seconds=3.0, goodput={"step": 2.0, "other": 1.0})
    print_summary(good)
    said = "result     test accuracy 0.5000\ngraphs     1 train, 1 eval\nseconds    3.0: step 2.0, other 1.0\n"
    assert capsys.readouterr().out == said
    print_summary(good | dict(hbm_peak_bytes=3 << 29))
    assert "\nmemory     at most 1.50 GiB per device\n" in capsys.readouterr().out
    print_summary(good | dict(skipped_steps=3, host_to_device_uploads_per_step=1.0))
    said = capsys.readouterr().out.splitlines()
    assert said[2] == "skipped    3 of 44 updates, which were not finite"
    assert said[3].startswith("uploads    1 a step beside the batch: the numbers are right, but") and len(said) == 5


def test_a_disk_without_room_for_tensorboard_costs_one_warning(tmp_path, capfd):
    """Its thread once died with a traceback, and the run ended with exit code 1 after its last step."""
    with RunLog(tmp_path, 0, 100, tensorboard=True) as log, Path("/dev/full").open("wb") as full:
        log.evaluation(1, accuracy=0.5)
        for opened in Path("/proc/self/fd").iterdir():
            if "tfevents" in str(opened.resolve()):
                os.dup2(full.fileno(), int(opened.name))
        for step in range(2, 40):
            log.evaluation(step, accuracy=0.6)
        log.summary({"seed": 1}, {"steps": 39, "loss": 0.1, "goodput": {"step": 1.0}})
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "warning: no more events for TensorBoard in" in said and "No space left" in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 39


def test_tensorboard_sees_a_resumed_run_as_one_and_what_it_was(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, accuracy in ((0, 0.25), (20, 0.5)):
        with RunLog(tmp_path, first_step, 100, tensorboard=True) as log:
            for step in range(first_step + 1, 31):
                log.evaluation(step, accuracy=accuracy)
            if first_step:
                log.summary({"mine": 1}, {"steps": 30, "loss": 0.125, "goodput": {"step": 1.5}})
    assert not [path for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()], "one run, one folder"
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    shown = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert shown.pop("eval/accuracy") == [(step, 0.25 if step <= 20 else 0.5) for step in range(1, 31)]
    of_the_end = {"summary/steps": 30, "summary/loss": 0.125, "goodput_seconds/step": 1.5}
    assert shown == {tag: [(30, value)] for tag, value in of_the_end.items()}
    contents = {tag: data.plugin_data.content for tag, data in found.summary_metadata.items()}
    assert b"mine" in contents["_hparams_/session_start_info"]
    assert b"summary/loss" in contents["_hparams_/experiment"]
