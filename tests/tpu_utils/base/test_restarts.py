"""A family of processes ends as one, whichever of them is lost first."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, environment_with, free_port, waits

from tpu_utils.base.restarts import memory_folder

# A child that starts another program and forks, as DataLoaders do; all are in its group.
CHILD = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "1000"])
if not os.fork():
    time.sleep(1000)
print(os.getpid(), flush=True)
time.sleep(float(sys.argv[1]))
"""
STARTER = """
import subprocess, sys, threading, time
from tpu_utils.base.restarts import ends_with_this
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
child = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE, **ends_with_this())
print(child.stdout.readline().decode(), flush=True)
child.communicate()  # until nobody has the pipe open
print("ended", flush=True)
time.sleep(1000)
"""


def alive_in(group: int) -> list[int]:
    """Processes of a group, without those that are dead and only not yet waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(") ")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def start(tmp_path, *words: str) -> tuple[subprocess.Popen, int]:
    """(the starter, the group of its child)."""
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, "-c", STARTER, str(tmp_path / "child.py"), *words]
    starter = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment_with({}))
    return starter, int(starter.stdout.readline())


@pytest.mark.parametrize("lost", ["starter", "child", "nobody"])
def test_a_process_that_is_lost_or_ends_takes_along_what_it_has_started(tmp_path, lost):
    starter, group = start(tmp_path, "0" if lost == "nobody" else "1000")
    if lost != "nobody":
        assert len(alive_in(group)) == 4  # the child, its two, and who waits for its end
        os.kill(starter.pid if lost == "starter" else group, signal.SIGKILL)
    waits(lambda: not alive_in(group), 60)  # killed; the kernel closes their files, the pipe too, before they are gone
    if lost != "starter":
        starter.stdout.readline()
        assert starter.stdout.readline() == "ended\n"
        starter.kill()
    starter.communicate()


COMPILES = """
import sys
from tpu_compiler.decide.search import run_script
run_script(["-c", f"import os, time; print(os.getpid(), file=open({sys.argv[1]!r}, 'w')); time.sleep(1000)"], {})
"""


def test_a_compile_ends_with_who_asked_for_it(tmp_path):
    """aot_tpu.py has each setting compiled by a child, which takes minutes and gigabytes."""
    file = tmp_path / "id"
    command = [sys.executable, "-c", COMPILES, str(file)]
    starter = subprocess.Popen(command, cwd=ROOT, env=environment_with({}), start_new_session=True)
    waits(lambda: file.exists() and file.read_text().endswith("\n"))
    group = os.getpgid(int(file.read_text()))
    starter.kill()
    starter.wait()
    waits(lambda: not alive_in(group), 60)


def test_a_signal_to_the_group_is_not_for_who_waits_for_its_end(tmp_path):
    """torchrun sends its signals so."""
    starter, group = start(tmp_path, "1000")
    (waiting,) = [pid for pid in alive_in(group) if "SigBlk:\tfffffffe" in Path(f"/proc/{pid}/status").read_text()]
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(waiting, number)
    starter.kill()
    starter.communicate()
    waits(lambda: not alive_in(group), 60)


def test_a_run_directory_whose_name_is_no_text_has_a_folder_in_memory_too():
    names = [memory_folder(f"/runs/{name}", "/dev/shm").name for name in ("a", "\xe9", "nam\udcffe")]
    assert len({*names}) == 3 and all(name.isascii() for name in names)


@pytest.mark.slow
def test_scripts_under_torchrun_end_with_it(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", f"--master_port={free_port()}"]
    command += ["ddp_mnist_tpu.py", "--device=cpu", "--num_epochs=1000", f"--run_dir={tmp_path / 'run'}"]
    with (tmp_path / "log").open("w") as log:
        torchrun = subprocess.Popen(command, cwd=ROOT, env=environment_with({}), stdout=log, stderr=log)
    waits(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or torchrun.poll() is not None)
    assert torchrun.poll() is None, (tmp_path / "log").read_text()
    (script,) = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    torchrun.kill()
    torchrun.wait()
    waits(lambda: not alive_in(int(script)), 60)
