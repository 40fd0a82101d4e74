"""tools.keep_running: small scripts that are lost in every way, and a transformer on two hosts to the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import ROOT, Script, environment_with, free_port, waits

from tools import keep_running
from tools.keeping.attempt import compile_seconds_in
from tools.keeping.team import First, Other, State, Verdict, judge, state_in, verdict_in
from tpu_utils.base.errors import InputError
from tpu_utils.base.restarts import memory_folder, newest_checkpoint
from tpu_utils.remote.storage import working_folder
from tpu_utils.remote.wire import WireError

# Ten steps. Each waits until all hosts have come to it, as a collective does; host 0 logs and saves. A stop on one host
# stops all, as the training scripts agree on it. `faults_INDEX` has a line of Python an attempt: what it is lost by.
SCRIPT = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, names = Path(options["--run_dir"]), os.environ.get("TPU_WORKER_HOSTNAMES", "here").split(",")
index, count = int(os.environ.get("TPU_WORKER_ID", 0)), len(names)
log, faults = folder / "metrics.jsonl", folder / f"faults_{index}"
fault, _, later = (faults.read_text() if faults.exists() else "").partition("\\n")
faults.write_text(later)
saved = sorted(folder.glob("checkpoints/step_*/done"))
first = int(saved[-1].parent.name[5:]) if saved and options.get("--resume") == "auto" else 0
print("first", first, "of", count, options.get("--resume"), flush=True)
if fault == "early":
    sys.exit(1)
if log.is_fifo() or log.is_symlink():
    log.unlink()
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
here, stop = folder / f"at_{count}_{index}", folder / "stop"
# the others end at once; this one later, as its checkpoint may take longer
signal.signal(signal.SIGTERM, lambda *_: (stop.touch(), time.sleep(1.5)))
def at(other):  # of those that began where this one did: one of before may not have ended yet
    try:
        began, step = map(int, (folder / f"at_{count}_{other}").read_text().split())
    except FileNotFoundError:
        return 0
    return step if began == first else 0
for step in range(first + 1, 11):
    here.with_suffix(".new").write_text(f"{first} {step}")
    here.with_suffix(".new").replace(here)
    while min(map(at, range(count))) < step and not stop.exists():
        time.sleep(0.01)
    time.sleep(0.03)
    if stop.exists():
        sys.exit(143)
    if index == 0:
        began = dict(began_with=dict(compile=0.01)) if step == first + 1 else {}
        with log.open("a") as lines:
            lines.write(json.dumps(dict(kind="train", step=step, **began)) + "\\n")
    if step == first + 3:
        exec(fault)
    if index == 0:
        (folder / f"checkpoints/step_{step:08d}").mkdir(parents=True, exist_ok=True)
        (folder / f"checkpoints/step_{step:08d}/done").touch()
if index == 0:
    (folder / "summary.json").write_text(json.dumps(dict(steps=10, hosts=count)))
"""
KILLED = """open(log, "a").write('{"kind": "tra'); kill()"""
WAITS = "while not stop.exists(): time.sleep(0.01)"
IN_C = "ctypes.PyDLL(None).sleep(1000)"  # holds the interpreter, as a collective that waits for a lost host may
FROZEN = "os.kill(os.getpid(), signal.SIGSTOP)"
DEAF = "signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(1000)"
STUCK = ["--silent_minutes=0.05", "--most_failures=1000"]  # on a busy machine a start may take as long
MACHINE = "os.kill(os.getppid(), signal.SIGKILL); time.sleep(100)"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The command that keeps SCRIPT running in run/, with faults."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()

    def command(*faults: str, options=()) -> list[str]:
        (tmp_path / "run" / "faults_0").write_text("\n".join(faults))
        words = ["-m", "tools.keep_running", *options, "--", tmp_path / "script.py", "--run_dir", tmp_path / "run"]
        return [sys.executable, *map(str, words)]

    return command


def ended(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, env=environment_with({}), capture_output=True, text=True, timeout=300)


def children_of(process: subprocess.Popen) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_goes_on_from_the_newest_checkpoint_until_it_ends_well(kept, tmp_path):
    done = ended(kept(KILLED, "sys.exit(1)", "sys.exit(143)"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"first {step} of 1 auto" for step in (0, 2, 4, 6)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = summary["keep_running"]
    assert summary["steps"] == 10 and found["attempts"] == 4
    assert found["ended_by"] == ["killed by SIGKILL", "exit code 1", "exit code 143"]
    assert found["lost_seconds"].keys() == {"lost_steps", "silence", "waiting", "restart", "recompile"}
    assert found["lost_seconds"]["recompile"] >= 0.02, "what the two attempts said that logged, after the first"
    assert found["seconds"] > sum(found["lost_seconds"].values())
    restarts = [line for line in lines_of(tmp_path / "run") if line["kind"] == "restart"]
    reasons = [(2, 1, "killed by SIGKILL"), (4, 2, "exit code 1"), (6, 3, "exit code 143")]
    assert [(line["step"], line["attempt"], line["reason"]) for line in restarts] == reasons
    assert "kept       killed by SIGKILL; goes on in 1 s, from step 2" in done.stderr


def test_a_folder_that_is_not_as_it_was_costs_lines_and_not_the_run(kept, tmp_path):
    """The log a FIFO, then a link, then the lock a link; at the end a summary that is too large."""
    spoilt = ["log.unlink(); os.mkfifo(log)", "log.rename(folder / 'x'); log.symlink_to('x')"]
    spoilt += ["(folder / 'lock').unlink(); (folder / 'lock').symlink_to('y')"]
    command, run_dir = kept(*(f"{what}; kill()" for what in spoilt)), tmp_path / "run"
    (tmp_path / "script.py").write_text(SCRIPT.replace("steps=10", "steps=10, padding='x' * (1 << 21)"))
    done = ended(command)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"kept       no line in {run_dir}") == 3 and f"kept       not in {run_dir}" in done.stderr
    assert '"restart"' not in (run_dir / "x").read_text()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "fault, said",
    [(IN_C, "script.py"), pytest.param(FROZEN, "script.py", marks=SLOW), pytest.param(DEAF, None, marks=SLOW)],
)
def test_what_is_stuck_shows_where_and_is_ended(kept, tmp_path, fault, said):
    """Also where it holds the interpreter in C++, where no signal handler of Python's would run."""
    done = ended(kept(fault, options=STUCK))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["keep_running"]
    assert set(found["ended_by"]) == {"silent for 3 s"} and found["lost_seconds"]["silence"] >= 3
    if said:
        assert "Fatal Python error: Aborted" in done.stderr and f'{said}", line ' in done.stderr


def test_it_gives_up_where_no_attempt_gets_further(kept, tmp_path):
    done = ended(kept("early", "early", "early", options=["--most_failures", "2"]))
    assert done.returncode == 1
    said = "kept       exit code 1; given up: 2 in a row without a new checkpoint"
    assert done.stderr.splitlines()[-1] == said
    assert done.stdout.count("first") == 2


def test_of_a_run_in_a_bucket_the_working_folder_is_watched(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    working = working_folder("gs://bucket/run")
    working.parent.mkdir(parents=True)
    working.symlink_to(tmp_path / "run")  # SCRIPT knows no buckets
    command = kept(KILLED, options=["--most_failures", "1"])
    (tmp_path / "script.py").write_text(SCRIPT.replace('options["--run_dir"]', repr(str(tmp_path / "run"))))
    done = ended([word.replace(str(tmp_path / "run"), "gs://bucket/run") for word in command])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["first 0 of 1 auto", "first 2 of 1 auto"]
    assert "kept       ended after 2 attempts; seconds lost: lost_steps " in done.stderr
    assert "keep_running" not in (tmp_path / "run" / "summary.json").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_stops_the_script(kept, tmp_path, number):
    heard = dict(preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))  # a job in the background ignores SIGINT
    quiet = dict(stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(kept(WAITS), cwd=ROOT, env=environment_with({}), **quiet, **heard)
    waits(lambda: newest_checkpoint(tmp_path / "run" / "checkpoints") == 2 and len(lines_of(tmp_path / "run")) == 3)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "kept" not in said


def test_killed_it_leaves_nothing_behind(kept, tmp_path):
    process = subprocess.Popen(kept(WAITS), cwd=ROOT, env=environment_with({}))
    waits(lambda: newest_checkpoint(tmp_path / "run" / "checkpoints") == 2)
    (child,) = children_of(process)
    process.kill()
    process.wait()
    waits(lambda: not Path(f"/proc/{child}/exe").exists(), 60)


@pytest.mark.parametrize(
    "command, said",
    [
        ([], "found nothing after --; expected a training script"),
        (["nowhere.py", "--run_dir", "x"], "found nowhere.py after --"),
        (["simple_mnist_tpu.py", "--seed=1"], "found no --run_dir; a script that is started again goes on from"),
        (["simple_mnist_tpu.py", "--run_dri", "x"], r"found no --run_dir \(is --run_dri meant\?\); a script"),
        (["simple_mnist_tpu.py", "--run_dir", "--seed=1"], "--run_dir has no value; a script that is started again"),
    ],
)
def test_what_cannot_be_kept_running_is_refused(command, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match=said):
        keep_running.run_dir_of(command)


def test_a_damaged_line_says_nothing_of_compiling(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text("[" * 100_000 + '\n{"began_with": 3}\n{"began_with": {"compile": 2.5}}\n')
    assert compile_seconds_in(log, 0) == 2.5 and compile_seconds_in(log, log.stat().st_size) is None


# ------------------------------------------------------------------------------------------------------- several hosts
class Hosts:
    """Pretended ones, each with its own tools.keep_running."""

    def __init__(self, folder: Path, count: int, *options: str, faults=None, script=None):
        """faults: of the script, by the index of a host. script: by the index what a host runs; None: SCRIPT."""
        self.run_dir, self.count = folder / "run", count
        self.run_dir.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        for index, fault in (faults or {}).items():
            (self.run_dir / f"faults_{index}").write_text(fault)
        self.script = script or (lambda index: [folder / "script.py", "--run_dir", self.run_dir])
        self.command = [sys.executable, "-m", "tools.keep_running", f"--port={free_port()}", *options, "--"]
        self.running: dict[int, subprocess.Popen] = {}

    def start(self, *indices: int) -> None:
        for index in indices or range(self.count):
            names = ",".join(["localhost"] * self.count)
            here = {"TPU_WORKER_ID": index, "TPU_WORKER_HOSTNAMES": names, "TPU_SKIP_MDS_QUERY": 1}
            words = [*self.command, *map(str, self.script(index))]
            pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self.running[index] = subprocess.Popen(words, cwd=ROOT, env=environment_with(here, words), **pipes)

    def end(self, *codes: int) -> list[tuple[list[str], str]]:
        """Lines and errors of each, which end with these exit codes."""
        said = {index: process.communicate(timeout=300) for index, process in self.running.items()}
        assert [process.returncode for process in self.running.values()] == [*codes], said
        return [(out.splitlines(), err) for out, err in said.values()]

    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())


@pytest.mark.parametrize(
    "index, fault, reason",
    [
        (2, "sys.exit(1)", "host 2: exit code 1"),
        pytest.param(0, "sys.exit(7)", "host 0: exit code 7", marks=SLOW),
        pytest.param(1, FROZEN, "silent for 3 s", marks=SLOW),
    ],
)
def test_when_one_host_loses_its_script_all_begin_again_together(tmp_path, index, fault, reason):
    hosts = Hosts(tmp_path, 3, *(STUCK if fault == FROZEN else []), faults={index: fault})
    hosts.start()
    said = hosts.end(0, 0, 0)
    # host 0 may have saved step 3 by then
    lines = [out for out, _ in said]
    assert lines in [[["first 0 of 3 auto", f"first {step} of 3 auto"]] * 3 for step in (2, 3)]
    assert hosts.summary()["keep_running"]["ended_by"] == [reason]
    stuck = [err for i, (_, err) in enumerate(said) if i != index]
    assert all("Fatal Python error: Aborted" in err for err in stuck), "each says where it waited"


@SLOW
@pytest.mark.parametrize("index", [0, 2])
def test_a_lost_machine_is_waited_for(tmp_path, index):
    hosts = Hosts(tmp_path, 3, faults={index: MACHINE})
    hosts.start()
    lost = hosts.running[index]
    assert lost.wait(100) == -signal.SIGKILL
    hosts.start(index)
    last = [out[-1] for out, _ in hosts.end(0, 0, 0)]
    lost.communicate()
    assert last in [[f"first {step} of 3 auto"] * 3 for step in (2, 3)]
    summary = hosts.summary()
    assert summary["steps"] == 10
    assert index == 0 or summary["keep_running"]["ended_by"] == ["host 2: lost"], "host 0 keeps count, and began anew"


@SLOW
def test_without_a_host_an_elastic_run_goes_on_with_the_others(tmp_path):
    hosts = Hosts(tmp_path, 3, "--elastic", "--wait_seconds=10", faults={2: MACHINE})
    hosts.start()
    last = [out[-1] for out, _ in hosts.end(0, 0, -signal.SIGKILL)]
    assert last in [[f"first {step} of 2 auto"] * 2 + ["first 0 of 3 auto"] for step in (2, 3)]
    assert hosts.summary()["hosts"] == 2


@SLOW
def test_told_to_stop_on_one_host_all_stop(tmp_path):
    hosts = Hosts(tmp_path, 3, faults={1: "os.kill(os.getppid(), signal.SIGTERM)"})
    hosts.start()
    hosts.end(143, 143, 143)


@SLOW
def test_a_host_that_does_not_answer_is_lost_and_comes_back(tmp_path):
    hosts = Hosts(tmp_path, 3, faults={2: "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(1000)"})
    hosts.start()
    waits(lambda: (hosts.run_dir / "metrics.jsonl").exists())
    waits(lambda: any(line["kind"] == "restart" for line in lines_of(hosts.run_dir)))
    hosts.running[2].send_signal(signal.SIGCONT)
    hosts.end(0, 0, 0)
    assert hosts.summary()["keep_running"]["ended_by"] == ["host 2: lost"]


def test_hosts_that_do_not_come_are_named(tmp_path):
    hosts = Hosts(tmp_path, 3, "--wait_seconds=3")
    hosts.start(0, 1)
    (_, of_0), (_, of_1) = hosts.end(1, 1)
    assert "error: waited 3 s for host 2 (localhost); start the same command there" in of_0
    assert "error: waited 3 s for host 0 (localhost)" in of_1


@pytest.mark.parametrize(
    "states, verdict",
    [
        ({0: State(0), 1: State()}, None),
        ({0: State(0), 1: State(0)}, Verdict("host 0: exit code 0", 0)),
        ({0: State(1), 1: State(2)}, Verdict("host 1: exit code 2", 2)),
        ({0: State(stopping=True), 1: None}, Verdict("host 1: lost", 1)),
        ({0: State(143, stopping=True), 1: State()}, None),
        ({0: State(143, stopping=True), 1: State(0)}, Verdict("host 0: exit code 143", 143)),
        ({0: State(-15, stopping=True)}, Verdict("killed by SIGTERM", 143)),
        ({0: State(-35)}, Verdict("killed by signal 35", None)),
        ({0: State(silent=True, stopping=True)}, Verdict("silent for 9 s", 1, True)),
        ({0: State(silent=True), 1: State(1)}, Verdict("host 1: exit code 1", None)),
        ({0: State(silent=True), 1: State()}, Verdict("silent for 9 s", None, True)),
    ],
)
def test_who_decides_what(states, verdict):
    assert judge(states, 9.0) == verdict


def test_what_is_no_state_is_no_host():
    wrong = [None, 1, [], [True, 1, True], ["x", False, False], [None, False], {"code": 1}, ["x", 256, False]]
    wrong += [[-65, False, False], [256, False, False], [1e1, False, False], ["x", -1000, False], ["x", True, False]]
    for message in wrong:
        for read in (state_in, verdict_in):
            with pytest.raises(WireError):
                read(message)


@SLOW
def test_a_transformer_on_two_hosts_lost_twice_ends_with_the_bits_of_a_run_that_was_not(tmp_path):
    """Its script on one host, then the machine of the other, with what it had in memory: the run goes on from the
    memory of the one that is left. All that happens between hosts outside of XLA is real."""
    shape = ["--num_layers=1", "--num_heads=2", "--embedding_dim=32", "--sequence_length=16", "--num_steps=60"]
    shape += ["--global_batch_size=4", "--warmup_steps=0", "--eval_every=30", "--log_every=5", "--save_every=1000"]
    shape += ["--eval_batches=1", "--device=cpu", "--no_tensorboard", "--save_memory_every=5"]
    whole, ports = tmp_path / "whole", [free_port(), free_port()]

    def words_of(index: int, run_dir: Path, meet_at: int) -> list[str]:
        (tmp_path / f"memory_{index}").mkdir(exist_ok=True)
        words = ["tests/transformer_hosts.py", str(index), "2", str(meet_at), *shape, f"--run_dir={run_dir}"]
        return [*words, f"--memory_dir={tmp_path}/memory_{index}"]

    names = {"TPU_WORKER_HOSTNAMES": "localhost,localhost", "TPU_SKIP_MDS_QUERY": 1}
    for process in [Script(*words_of(i, whole, ports[0]), **names, TPU_WORKER_ID=i) for i in range(2)]:
        assert process.wait() == 0, process.text("err")
    hosts = Hosts(tmp_path, 2, script=lambda index: words_of(index, tmp_path / "run", ports[1]))
    lost = hosts.run_dir
    memories = [memory_folder(lost, tmp_path / f"memory_{index}") for index in range(2)]
    hosts.start()

    def newest() -> int:
        return newest_checkpoint(lost / "checkpoints", *memories)

    def has_saved(step: int) -> None:
        waits(lambda: newest() >= step or any(host.poll() is not None for host in hosts.running.values()))
        assert all(host.poll() is None for host in hosts.running.values()), hosts.end(0, 0)

    has_saved(5)
    os.kill(int(children_of(hosts.running[1])[0]), signal.SIGKILL)
    waits(lambda: any(line["kind"] == "restart" for line in lines_of(lost)))
    has_saved(newest() + 5)
    hosts.running[0].kill()
    hosts.running[0].communicate()
    shutil.rmtree(memories[0], ignore_errors=True)
    hosts.start(0)
    hosts.end(0, 0)
    assert len({line["memory"] for line in lines_of(lost) if "memory" in line}) == 3
    steps = [sorted(path.name for path in folder.glob("checkpoints/step_*")) for folder in (whole, lost)]
    assert steps[0] == ["step_00000060"] and len(steps[1]) >= 2, "one was in memory before"
    for file in sorted((whole / "checkpoints" / "step_00000060").glob("*.safetensors")):
        assert file.read_bytes() == (lost / "checkpoints" / "step_00000060" / file.name).read_bytes()
    losses = [{r["step"]: r["loss"] for r in lines_of(folder) if r["kind"] == "train"} for folder in (whole, lost)]
    assert losses[0] == losses[1] and len(losses[0]) == 12


def test_a_machine_that_comes_back_to_an_elastic_run_waits_for_the_next_start():
    """However long the others go on without it."""
    port, addresses = free_port(), ["localhost"] * 2
    back = Other(1, addresses, port, b"", 0.1, elastic=True)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(back.meet)
        try:
            with pytest.raises(TimeoutError):
                met.result(timeout=1)
            back.wait = 60.0  # for what host 0 says once it is there, however busy the machine is
            first = First(addresses, port, b"", 9.0, 60.0, True)
            assert first.meet() == met.result(timeout=60) == {}
        finally:
            back.elastic = False  # a failure ends, and does not wait for the thread without end
        first.tell(Verdict("exit code 0", 0))
        waits(lambda: back.exchange(State()) == Verdict("exit code 0", 0), 60)
