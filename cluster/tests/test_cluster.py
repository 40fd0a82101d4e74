"""python -m cluster: its messages, and real runs on a real Ray of several nodes on this machine."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from processes import QUICKLY_COMPILED, ROOT, environment_with, run
from ray_nodes import Nodes, below, listening
from reports import a_report
from run_files import assert_identical, losses_in, saved_steps, state_in

from cluster import admission, command
from cluster.command import check_run, parse
from tpu_utils.base.errors import run_script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="LOUD: Ray is not installed: pip install -r cluster/requirements.txt",
)
SHOW = """
import json, os, sys, time
names = ("TPU_", "PJRT", "CPU_NUM", "RAY_", "OMP_", "PYTHONPATH", "MY_")
print("SAYS", json.dumps({k: v for k, v in os.environ.items() if k.startswith(names)}), flush=True)
print("FOLDER", os.getcwd(), sorted(os.listdir(".")), flush=True)
open("mine", "w").close()
end = time.monotonic() + float(os.environ.get("MY_SECONDS", "0"))
while time.monotonic() < end and not os.path.exists(os.environ.get("MY_END", "")):
    time.sleep(0.05)
sys.exit(int(os.environ.get("MY_CODE", "0")))
"""


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "nobody_tpu.py"], "no such script"),
        (["run", "setup_tpu.py", "--slice", "v5litepod-7"], "no v5e slice of 7 chips"),
        (["run", "setup_tpu.py", "--name", "a/b"], "--name is 'a/b'"),
        (["run", "setup_tpu.py", "--env", "NOT_SET_HERE"], "NOT_SET_HERE: not set here"),
        (["run", "setup_tpu.py", "--retries", "-1"], "--retries is -1"),
        (["run", "setup_tpu.py", "--working_dir", "tests"], "no such script"),
        (["run", "setup_tpu.py", "--plain", "--slice", "v5litepod-16"], "has 4 hosts, and this machine is one"),
        (["run", "setup_tpu.py", "--plain", "--detach"], "--detach needs a shared cluster"),
        (["run", "setup_tpu.py", "--plain", "--address", "http://127.0.0.1:9"], "nobody answers at http://127.0.0.1:9"),
        (["run", "setup_tpu.py", "--plain", "--address", "http://[x"], "is not understood"),
        (["list"], "name it by --address"),
    ],
)
def test_bad_input_is_one_message(arguments, message, monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(ROOT)
    assert run_script(lambda: command.main(arguments)) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("error: ") and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "options, note",
    [
        ("mine.py", "one without them wants --plain"),
        ("mine.py --plain", ""),
        ("simple_mnist_tpu.py --chips 2", "leave the others idle"),
        ("simple_mnist_tpu.py --chips 1", ""),
        *((f"{name}_tpu.py --chips 4", "") for name in "distributed_mnist ddp_mnist resnet_cifar transformer".split()),
    ],
)
def test_what_a_script_would_not_understand_or_use_is_noted(options, note, monkeypatch, capsys, tmp_path):
    """With a storage set, a script gets --run_dir and --resume."""
    (tmp_path / "mine.py").write_text("print(1)")
    folder = tmp_path if "mine" in options else ROOT
    check_run(parse(["run", *options.split()]), folder)
    said = capsys.readouterr().out
    assert note in said and bool(note) == bool(said)


def test_a_typo_gets_the_nearest_option(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["run", "setup_tpu.py", "--chisp", "2"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "did you mean --chips? (the script's own options come after --)" in said


def test_without_ray_it_says_how_to_get_it(tmp_path):
    """-S: a Python without site-packages."""
    (tmp_path / "s.py").write_text("")
    line = [sys.executable, "-S", "-m", "cluster", "run", "s.py"]
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2 and "pip install -r cluster/requirements.txt" in done.stderr, done.stderr


def test_what_does_not_fit_is_refused_before_it_is_queued(monkeypatch, capsys):
    asked = []

    def answer(script, topology, options):
        asked.append((Path(script).name, topology, options))
        return a_report(topology=topology, compiles=False, fits=False, peak_bytes=20 << 30, limit_bytes=16 << 30)

    monkeypatch.setattr(admission, "compile_script", answer)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(ROOT)
    options = ["--width", "9", "--resume", "auto", "--device", "cpu"]
    code = run_script(lambda: command.main(["run", "tests/tiny_training.py", "--slice", "v5litepod-4", "--", *options]))
    said = capsys.readouterr().err
    assert code == 2 and asked == [("tiny_training.py", "v5litepod-4", ["--width", "9"])]
    assert "does not fit" in said and "nothing was queued" in said


@pytest.mark.slow
def test_alone_it_feels_like_running_the_script(tmp_path):
    """Its code, its folder, its chips; Ray listens on 127.0.0.1 alone, in a folder of this user's alone, and leaves
    nothing behind."""
    (tmp_path / "show.py").write_text(SHOW + "\n")
    before = set(Path("/tmp").glob("tpu_ray_*"))
    line = [sys.executable, str(ROOT / "cluster"), "run", "show.py", "--chips", "2", "--plain"]
    line += ["--env", "MY_CODE", "--env", "MY_SECONDS"]
    given = environment_with({"MY_CODE": 7, "MY_SECONDS": 3})
    process = subprocess.Popen(line, cwd=tmp_path, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said, addresses = "", set()
    for text in process.stdout:
        said += text
        if text.startswith("FOLDER"):
            addresses = listening(below(process.pid))
            (place,) = set(Path("/tmp").glob("tpu_ray_*")) - before
            assert place.stat().st_mode & 0o777 == 0o700
    assert process.wait(600) == 7, (said, process.stderr.read())
    variables = json.loads(re.search(r"SAYS (.*)", said)[1])
    assert variables["CPU_NUM_DEVICES"] == "2" and not any(name.startswith(("RAY_", "OMP_")) for name in variables)
    assert f"FOLDER {tmp_path}" in said
    assert not set(Path("/tmp").glob("tpu_ray_*")) - before
    assert addresses and addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, addresses


MNIST = ["--warmup_steps=2", "--save_every=5", "--channels=4", "--hidden_dim=16", "--device=cpu"]
LANGUAGE = ["--num_steps=12", "--warmup_steps=1", "--eval_batches=1", "--global_batch_size=8", "--save_every=4"]
LANGUAGE += ["--num_layers=1", "--num_heads=4", "--embedding_dim=32", "--sequence_length=32"]
# No transformer on 2: over exactly two virtual devices on two cores XLA:CPU does not repeat its own bits.
RUNS = {  # name: (user, chips, script and options); show.py holds its chips and trains nothing
    "s4": ("alice", 4, ["show.py"]),
    "s2": ("alice", 2, ["show.py"]),
    "d4": ("bob", 4, ["distributed_mnist_tpu.py", *MNIST, "--num_epochs=2"]),
    "t4": ("carol", 4, ["transformer_tpu.py", *LANGUAGE]),
}


@pytest.fixture(scope="module")
def cluster():
    nodes = Nodes(XLA_FLAGS=QUICKLY_COMPILED)  # as the runs beside it: their bits are compared
    try:
        nodes.add("a", 4)
        nodes.add("b", 4)
        yield nodes
    finally:
        nodes.close()


@pytest.fixture(scope="module")
def show(tmp_path_factory):
    folder = tmp_path_factory.mktemp("show")
    (folder / "show.py").write_text(SHOW)
    for name in ("cluster", "tpu_utils"):  # packages of their own with our names
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('this is not the one')")
    return folder


def by_itself(folder: Path, chips: int, words: list[str]) -> Path:
    """The run directory that the same script ends with without a cluster."""
    run_dir = folder / f"{words[0]}_by_itself"
    place = dict(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=chips, XLA_FLAGS=QUICKLY_COMPILED)
    done = run(*words, "--run_dir", run_dir, **place)
    assert done.returncode == 0, done.stderr
    return run_dir


def assert_same(*run_dirs: Path) -> None:
    """The last checkpoint, bit for bit, and every loss."""
    assert_identical(*(state_in(max((folder / "checkpoints").glob("step_*"))) for folder in run_dirs))
    found, expected = map(losses_in, run_dirs)
    assert found == expected


def chips_in_use(events: list[dict]) -> list[int]:
    """After each event. Fails where two runs have the same chip."""
    held, counts = {}, []
    for event in events:
        if event["what"] == "starts":
            held[event["name"]] = {(node, chip) for node, chips in event["places"] for chip in chips}
        elif event["what"] in ("ends", "lost"):
            held.pop(event["name"], None)
        taken = [chip for chips in held.values() for chip in chips]
        assert len(taken) == len(set(taken)), event
        counts.append(len(taken))
    return counts


@pytest.mark.slow
def test_three_users_submit_four_runs_at_once(cluster, show, tmp_path):
    """All finish, on disjoint chips, never more than there are; each that trains is bit-identical to the script run
    alone."""
    clients = {}
    trained = {name: run for name, run in RUNS.items() if run[2] != ["show.py"]}
    for name, (user, chips, words) in RUNS.items():
        options = ["--name", name, "--user", user, "--chips", chips]
        options += ["--storage", tmp_path, "--no_check"] if name in trained else ["--plain", "--env", "MY_SECONDS"]
        options += ["--detach"] if user == "carol" else []
        place = {} if name in trained else dict(folder=show, MY_SECONDS=2)
        clients[name] = cluster.start("run", words[0], *options, "--", *words[1:], **place)
    references = {name: by_itself(tmp_path, chips, words) for name, (_, chips, words) in trained.items()}  # meanwhile
    for name, process in clients.items():
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, (out, err)
        assert ("result" if name in trained else "SAYS") in out or RUNS[name][0] == "carol", (out, err)
    cluster.wait_for(lambda: sum(event["what"] == "ends" for event in cluster.state()["events"]) >= len(RUNS))
    events = cluster.state()["events"]
    assert max(chips_in_use(events)) <= 8
    assert not any(event["what"] == "lost" for event in events)
    for name, reference in references.items():
        assert_same(tmp_path / name, reference)
    listed = json.loads(cluster.run("list", "--json").stdout)
    found = {run["name"]: (run["user"], run["state"]) for run in listed}
    assert {name: found[name] for name in RUNS} == {name: (user, "done") for name, (user, *_) in RUNS.items()}


def enters(folder: Path) -> bool:
    """Whether another user of this machine can."""
    other = dict(user=65534, group=65534, extra_groups=[])
    return subprocess.run(["ls", str(folder)], capture_output=True, **other).returncode == 0


@pytest.mark.exhaustive
def test_a_cluster_whose_files_others_can_change_gets_nothing(cluster, show):
    """A user of the machine without the token renamed a waiting run's unpacked code, and theirs ran as Ray's user."""
    nodes = Nodes(is_open=True)
    try:
        nodes.add("a", 1)
        done = nodes.run("run", "show.py", "--plain", "--name", "x", folder=show)
        assert done.returncode == 2, (done.stdout, done.stderr)
        assert f"its other users can enter or rename {nodes.folder}/r, where Ray has its files" in done.stderr
        listed = nodes.run("list", "--json")
        assert listed.returncode == 0 and json.loads(listed.stdout) == [], listed.stderr
        if os.geteuid() == 0:
            assert enters(nodes.folder / "r") and not enters(cluster.folder / "r")
    finally:
        nodes.close()


@pytest.mark.slow
def test_a_run_sees_its_own_chips_and_files_and_no_secret_is_shown(cluster, show, tmp_path):
    secret = "hush-5up3r"
    options = ["--plain", "--env", "MY_SECRET", "--env", "MY_SECONDS", "--env", "MY_END", "--chips", 2]
    end = tmp_path / "end"
    place = dict(folder=show, MY_SECONDS=600, MY_END=end)
    first = cluster.start("run", "show.py", *options, "--name", "own1", MY_SECRET=secret, **place)
    second = cluster.start("run", "show.py", *options, "--name", "own2", MY_SECRET="other", **place)
    cluster.wait_for(lambda: {"own1", "own2"} <= {run["name"] for run in cluster.state()["running"]})
    end.touch()
    outputs = [process.communicate(timeout=600) for process in (first, second)]
    assert all("SAYS" in out for out, _ in outputs), outputs
    says = [json.loads(re.search(r"SAYS (.*)", out)[1]) for out, _ in outputs]
    assert [said["MY_SECRET"] for said in says] == [secret, "other"]
    assert {said["CPU_NUM_DEVICES"] for said in says} == {"2"}
    assert not any(name.startswith(("RAY_", "OMP_", "PYTHONPATH")) for said in says for name in said)
    folders = [re.search(r"FOLDER (\S+) (.*)", out).groups() for out, _ in outputs]
    assert folders[0][0] != folders[1][0] and {files for _, files in folders} == {"['cluster', 'show.py', 'tpu_utils']"}
    assert not any(Path(folder).exists() for folder, _ in folders)
    places = [e["places"] for e in cluster.state()["events"] if e["name"] in ("own1", "own2") and e["what"] == "starts"]
    assert places[0] != places[1]
    shown = cluster.run("list", "--json").stdout + cluster.run("top", "--json").stdout
    header = {"Authorization": f"Bearer {cluster.token}"}
    asked = urllib.request.Request(f"{cluster.address}/api/jobs/", headers=header)
    shown += urllib.request.urlopen(asked, timeout=20).read().decode()
    assert "own1" in shown and secret not in shown and "other" not in re.sub(r"\w*other\w+|\w+other\w*", "", shown)


def pids_of(cluster, name: str, text: str) -> list[int]:
    """Processes of a host with this text in their commands. "--run_dir" finds the script alone: its guard, and the
    process that waits for its end, have the script's command in theirs."""
    found = {pid: args for pid, args in cluster.children(name).items() if text in args}
    return [pid for pid, args in found.items() if text != "--run_dir" or "cluster.guard" not in args]


def host_of(cluster, name: str) -> str:
    """Which host has the run: by its folder in the command of its guard."""
    found = [host for host in ("a", "b") if pids_of(cluster, host, f"tpu_cluster_{name}_")]
    return found[0] if found else ""


@pytest.mark.slow
def test_killed_workers_nodes_and_clients_cost_nothing(cluster, show, tmp_path):
    """kill -9 of clients while they follow and while they wait, of the script, of Ray's worker, of a host."""
    words = ["simple_mnist_tpu.py", *MNIST, "--num_epochs=60", "--keep_checkpoints=2"]
    options = ["--storage", tmp_path, "--chips", 1, "--no_check", "--retries", 5]
    client = cluster.start("run", words[0], *options, "--name", "killed", "--", *words[1:])

    def step() -> int:
        return max(saved_steps(tmp_path / "killed"), default=0)

    def starts() -> int:
        return sum(e["what"] == "starts" and e["name"] == "killed" for e in cluster.state()["events"])

    def comes_back(kill, what) -> None:
        before, had = step(), starts()
        kill(what)
        cluster.wait_for(lambda: starts() > had)
        cluster.wait_for(lambda: step() > before)

    cluster.wait_until("killed", "running")
    plain_run = ["run", "show.py", "--plain", "--env", "MY_SECONDS", "--env", "MY_END", "--chips", 4]
    end = tmp_path / "end"
    holder = cluster.start(*plain_run, "--name", "holder", folder=show, MY_SECONDS=600, MY_END=end)
    cluster.wait_until("holder", "running")
    queued = cluster.start(*plain_run, "--name", "queued", folder=show, MY_SECONDS=0, MY_END=end)
    cluster.wait_until("queued", "waiting")
    for process in (client, queued):
        process.kill()
        process.communicate()
    end.touch()
    cluster.wait_for(lambda: step() >= 5)
    for of_process in ("--run_dir", "HostProcess"):
        pids = pids_of(cluster, cluster.wait_for(lambda: host_of(cluster, "killed")), of_process)
        comes_back(lambda pid: os.kill(pid, signal.SIGKILL), pids[-1])
    lost = cluster.wait_for(lambda: host_of(cluster, "killed"))
    comes_back(cluster.kill, lost)
    followed = cluster.run("logs", "-f", "killed")
    assert followed.returncode == 0, followed.stdout
    assert followed.stdout.count("starting again") == 3 and "resumed" in followed.stdout.lower(), followed.stdout
    assert holder.wait(600) == 0
    cluster.add(lost, 4)
    assert cluster.run("logs", "-f", "queued").returncode == 0
    assert_same(tmp_path / "killed", by_itself(tmp_path, 1, words))


@pytest.mark.exhaustive
def test_a_killed_driver_ends_its_run_and_gives_its_chips_back(cluster, show):
    options = ["run", "show.py", "--plain", "--name", "driven", "--chips", 4, "--env", "MY_SECONDS"]
    client = cluster.start(*options, folder=show, MY_SECONDS=300)
    cluster.wait_for(lambda: host_of(cluster, "driven"))
    drivers = [pid for pid, args in cluster.children("head").items() if "-m cluster.driver" in args]
    os.kill(drivers[-1], signal.SIGKILL)  # the only run that there is
    out, err = client.communicate(timeout=300)
    assert client.returncode == 1, (out, err)
    cluster.wait_for(lambda: not host_of(cluster, "driven"))
    cluster.wait_for(lambda: not any(run["name"] == "driven" for run in cluster.state()["running"]))
    again = cluster.run(*options, folder=show, MY_SECONDS=0)
    assert again.returncode == 0, (again.stdout, again.stderr)


@pytest.mark.exhaustive
def test_the_scripts_own_end_is_final_and_a_notice_moves_the_run(cluster, show):
    options = ["run", "show.py", "--plain", "--env", "MY_CODE", "--retries", 1]
    started = {code: cluster.start(*options, folder=show, MY_CODE=code) for code in (1, 2, 143)}
    said = {code: process.communicate(timeout=300)[0] for code, process in started.items()}
    assert {code: process.returncode for code, process in started.items()} == {1: 1, 2: 2, 143: 1}
    assert said[1].count("placed") == said[2].count("placed") == 1, said
    nodes = re.findall(r"placed .*?\((\w+)\)", said[143])
    assert "the machine gave notice" in said[143] and len(nodes) == 2 and nodes[0] != nodes[1], said[143]


@pytest.mark.slow
def test_bad_input_on_a_cluster_is_one_message(cluster, show):
    held = cluster.start(
        "run", "show.py", "--plain", "--name", "held", "--env", "MY_SECONDS", folder=show, MY_SECONDS=600
    )
    cluster.wait_until("held", "running")

    def refused(*arguments, **variables) -> str:
        done = cluster.run("run", "show.py", *arguments, folder=show, **variables)
        assert done.returncode == 2, (done.stdout, done.stderr)
        assert done.stderr.count("error: ") == 1, done.stderr
        return done.stderr

    assert "has nowhere 8 chips" in refused("--plain", "--chips", 8)
    assert "name 'held' is in use" in refused("--plain", "--name", "held")
    assert "no --storage" in refused()
    assert "refuses this token" in refused("--plain", RAY_AUTH_TOKEN="0" * 64)
    stopped = cluster.run("stop", "held")
    assert stopped.returncode == 0
    assert held.wait(300) == 143
    large = show / "large.bin"
    with large.open("wb") as file:
        file.truncate(10 << 30)
    assert "largest: large.bin 10,240 MiB" in refused("--plain", "--name", "held")
    large.unlink()
    assert "SAYS" in cluster.run("logs", "held").stdout, "what was refused has not deleted the earlier run"


@pytest.mark.exhaustive
def test_four_hosts_start_together_or_not_at_all(cluster, show, tmp_path):
    """A pretended v5litepod-16. Real collectives over hosts are not to be had on CPUs: the script shows its variables.
    One of its hosts has another torch, which the second run is told."""
    slice_of = dict(slice_name="slice-a", kind="v5litepod-16", shape="4x4")
    for worker in (0, 1, 2):
        cluster.add(f"w{worker}", 4, worker=worker, **slice_of)
    options, end = ["--plain", "--slice", "v5litepod-16", "--env", "MY_SECONDS", "--env", "MY_END"], tmp_path / "end"
    short = dict(folder=show, MY_SECONDS=0, MY_END=end)
    incomplete = cluster.run("run", "show.py", *options, **short)
    assert incomplete.returncode == 2 and "nowhere a whole v5litepod-16" in incomplete.stderr
    cluster.add("w3", 4, worker=3, **slice_of)
    first = cluster.start("run", "show.py", *options, "--name", "first", folder=show, MY_SECONDS=600, MY_END=end)
    cluster.wait_until("first", "running")
    second = cluster.start("run", "show.py", *options, "--name", "second", **short)
    cluster.wait_until("second", "waiting")
    end.touch()
    out, err = first.communicate(timeout=300)
    waited, failed = second.communicate(timeout=300)
    assert first.returncode == 0 and second.returncode == 0, (out, err, waited, failed)
    says = {int(host): json.loads(text) for host, text in re.findall(r"host (\d)  SAYS (.*)", out)}
    assert {host: said["TPU_WORKER_ID"] for host, said in says.items()} == {i: str(i) for i in range(4)}
    assert {said["TPU_ACCELERATOR_TYPE"] for said in says.values()} == {"v5litepod-16"}
    assert all(len(said["TPU_WORKER_HOSTNAMES"].split(",")) == 4 for said in says.values())
    assert "1 of 1 waiting; for a whole v5litepod-16: 4 hosts x 4 chips" in waited
    order = [(e["what"], e["name"]) for e in cluster.state()["events"] if e["name"] in ("first", "second")]
    assert order.index(("ends", "first")) < order.index(("starts", "second"))
    other = tmp_path / "torch-2.8.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n")
    cluster.kill("w3")
    cluster.add("w3", 4, worker=3, **slice_of, PYTHONPATH=tmp_path)
    cluster.wait_for(lambda: sum(host["kind"] != "" for host in cluster.top()["hosts"]) == 4)
    third = cluster.run("run", "show.py", *options, **short)
    assert third.returncode == 2 and "has torch 2.8.0, expected 2.9.0 as here" in third.stdout + third.stderr, third
