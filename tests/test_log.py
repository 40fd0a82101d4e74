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

from processes import ROOT

from tpu_utils.log import RunLog, print_summary


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


BAR = """
import sys, time
from pathlib import Path
from tpu_utils.log import RunLog
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
    print_summary(good | dict(skipped_steps=3, host_to_device_uploads_per_step=1.0))
    said = capsys.readouterr().out.splitlines()
    assert said[2] == "skipped    3 of 44 updates, which were not finite"
    assert said[3] == "uploads    1.0 a step beside the batch; expected 0" and len(said) == 5
