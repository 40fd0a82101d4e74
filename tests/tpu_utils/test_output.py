"""What is printed and not taken: a reader that went away, a terminal that closed, a full disk. Training goes on."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, environment_with, run, start, waits
from run_files import TINY, read_lines, summary_in

from tpu_utils.base.errors import run_script

# python -c BREAK HOW NUMBERS OPTIONS...: simple_mnist_tpu.py with these descriptors broken before its first line, or
# with its own terminal or pipe at the path HOW
BREAK = """
import os, pty, runpy, sys
how, numbers = sys.argv[1], map(int, sys.argv[2].split(","))
if how.startswith("/"):
    os.setsid()  # the first terminal that a session opens to read and write is its own
    mine = os.open(how, os.O_RDWR if how.startswith("/dev/pts") else os.O_WRONLY)
else:
    other, mine = os.pipe() if how == "no reader" else pty.openpty()
    os.close(other)
for number in numbers:
    os.dup2(mine, number)
sys.argv = ["simple_mnist_tpu.py", *sys.argv[3:]]
sys.path.insert(0, os.getcwd())
runpy.run_path("simple_mnist_tpu.py", run_name="__main__")
"""


def assert_whole(run_dir):
    """Every line of a run with the options TINY is on disk, and so is its end."""
    assert [line["step"] for line in read_lines(run_dir) if line["kind"] == "train"] == list(range(1, 23))
    assert summary_in(run_dir)["steps"] == 22 and (run_dir / "checkpoints" / "step_00000022" / "done").exists()


@pytest.mark.parametrize("how", ["/dev/full", "closed terminal"])
def test_a_run_whose_output_nobody_takes_ends_as_ever(tmp_path, how):
    run_dir = tmp_path / "run"
    done = run("-c", BREAK, how, "1", *TINY, "--run_dir", run_dir)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert_whole(run_dir)


def test_a_reader_that_goes_away_in_the_middle_ends_no_run(tmp_path):
    """As `| head -1` does."""
    os.mkfifo(tmp_path / "pipe")
    script = start("-c", BREAK, tmp_path / "pipe", "1", *TINY, "--run_dir", tmp_path / "run")
    with (tmp_path / "pipe").open() as reader:
        assert reader.readline().startswith("device ")
    assert script.wait() == 0
    assert_whole(tmp_path / "run")


@pytest.mark.parametrize("how", ["/dev/full", "no reader", "closed terminal"])
def test_an_error_that_nobody_can_read_keeps_its_exit_code(tmp_path, how):
    (tmp_path / "config.json").write_text("{}")
    assert run("-c", BREAK, how, "1,2", *TINY, "--run_dir", tmp_path).returncode == 2


@pytest.mark.slow
def test_outputs_that_are_closed_at_the_start_stay_out_of_the_runs_files(tmp_path):
    """A file that the run opens would otherwise get the number of stdout or stderr, and what the runtime prints."""
    command = [sys.executable, "simple_mnist_tpu.py", *TINY, "--run_dir", str(tmp_path / "run")]
    shell = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *command]
    assert subprocess.run(shell, cwd=ROOT, env=environment_with({}), timeout=600).returncode == 0
    assert_whole(tmp_path / "run")


TOOL = "import sys; from tpu_utils.base.errors import run_script\n"
TOOL += "sys.exit(run_script(lambda: print('an answer in M\\xfcnchen') or 0, **eval(sys.argv[1])))"


def tool(output: int, encoding="utf-8", **options) -> tuple[int, str]:
    """(exit code, errors) of a script that prints a line to this descriptor and ends."""
    command = [sys.executable, "-c", TOOL, repr(options)]
    settings = dict(cwd=ROOT, env=environment_with({"PYTHONUNBUFFERED": "", "PYTHONIOENCODING": encoding}))
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=600, **settings)
    return done.returncode, done.stderr


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("to", ["no reader", "full disk", "full pipe"])
def test_output_that_is_lost_is_no_error_but_an_answer_that_the_disk_does_not_take(to, answers):
    """Who reads a part has what he wants."""
    reader, output = os.pipe()
    if to == "no reader":
        os.close(reader)
    elif to == "full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        os.set_blocking(output, False)
        os.write(output, b"." * 2**20)  # as much as goes in
    code, said = tool(output, answers=answers)
    if to == "full disk" and answers:
        assert code == 1 and said.startswith("error: [Errno 28] No space left on device; make room there"), said
    else:
        assert (code, said) == (0, "")
    os.close(output)


def test_what_the_terminal_cannot_show_is_shown_escaped():
    """The name of a run directory, for one."""
    reader, output = os.pipe()
    assert tool(output, encoding="ascii") == (0, "")
    assert os.read(reader, 1000) == b"an answer in M\\xfcnchen\n"
    os.close(reader), os.close(output)


def test_a_lost_terminal_stops_a_run_saved(tmp_path):
    run_dir = tmp_path / "run"
    ours, theirs = pty.openpty()
    script = start("-c", BREAK, os.ttyname(theirs), "0,1,2", *TINY, "--num_epochs=500", "--run_dir", run_dir)
    shown = b""

    def at_step_3():
        nonlocal shown
        shown += os.read(ours, 10_000)
        return b"step      3/" in shown

    waits(at_step_3, alive=script)
    os.close(theirs)
    os.close(ours)
    assert script.wait() == 128 + signal.SIGHUP
    (saved,) = (run_dir / "checkpoints").iterdir()
    last = read_lines(run_dir)[-1]
    assert (last["kind"], last["step"]) == ("checkpoint", int(saved.name[5:])) and (saved / "done").exists()


def test_a_file_that_a_loader_misses_is_named_with_the_line(capsys):
    assert run_script(lambda: len(Path("absent/rows.npy").read_bytes())) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: [Errno 2] No such file or directory: 'absent/rows.npy', at ")
    assert "test_output.py:" in said and said.count("\n") == 1


@pytest.mark.parametrize("chosen", ["", "1"])
def test_no_color_is_respected_where_an_option_is_wrong(chosen):
    mine, other = pty.openpty()
    command = [sys.executable, "simple_mnist_tpu.py", "--learnin_rate", "1"]
    variables = environment_with({}) | {"TERM": "xterm-256color", "NO_COLOR": chosen}
    script = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=other, stderr=other)
    os.close(other)
    said = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(mine, 4096):
            said += part
    os.close(mine)
    assert script.wait() == 2 and b"--learning_rate" in said
    assert (b"\x1b[" in said) == (not chosen), said


def raises(error: Exception):
    raise error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(28, "No space left on device"), 1, "No space left on device; make room there, or write elsewhere"),
        (OSError(122, "Disk quota exceeded", "x"), 1, "Disk quota exceeded: 'x'; make room there"),
        (OSError(40, "Too many levels of symbolic links", "x"), 2, "Too many levels of symbolic links: 'x'"),
        (OSError(20, "Not a directory", "x"), 2, "Not a directory: 'x'; choose another path\n"),
        (OSError(17, "File exists", "x"), 2, "File exists: 'x'; choose another path\n"),
        (OSError(30, "Read-only file system", "x"), 1, "Read-only file system: 'x'; choose another path\n"),
        (OSError(5, "Input/output error"), 1, "Input/output error"),
    ],
)
def test_what_the_system_refuses_is_said_in_a_line(capsys, error, code, said):
    assert run_script(lambda: raises(error)) == code
    assert said in capsys.readouterr().err


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="there Path.resolve() does not raise")
def test_a_link_to_itself_is_named(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert run_script(lambda: bool((tmp_path / "loop").resolve())) == 2
    assert f"Too many levels of symbolic links: '{tmp_path / 'loop'}'; choose" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="of another kind"):
        run_script(lambda: raises(RuntimeError("of another kind")))
