"""docs/tpu_vm.md: what its commands do on the VM is done here, with sudo, apt, pip and sleep pretended."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import ROOT, Script
from test_docs import commands_of

from config import DistributedMnistConfig, MnistConfig
from language.options.transformer_options import TransformerConfig
from tools.keep_running import run_dir_of
from tpu_utils.base.restarts import to_go_on
from tpu_utils.options.parsing import parse_command_line

PAGE = ROOT / "docs" / "tpu_vm.md"
HERE = (  # how the commands begin that tests of this file do
    r"gcloud compute tpus tpu-vm ssh .*(apt-get|setup_tpu|distributed_mnist_tpu|train.service|transformer_tpu|nohup)",
    r".venv/bin/python -m tools.keep_running",
    r"python3 -m pip install --user uv|mkdir -p .venv|ln -sf",
)


def on_the_vm(word: str) -> str:
    """The --command of the one gcloud line of the page that holds `word`."""
    (command,) = [text for text, _ in commands_of(PAGE) if text.startswith("gcloud") and word in text]
    return next(part for part in shlex.split(command) if part.startswith("--command=")).removeprefix("--command=")


@pytest.fixture
def vm(tmp_path, monkeypatch):
    """A home folder of a VM and run(command): what ssh would do there. sudo writes into `units` and `calls` instead."""
    home, tools = tmp_path / "home", tmp_path / "tools"
    for folder in (home, tools, tmp_path / "units"):
        folder.mkdir()
    monkeypatch.chdir(home)

    def tool(name: str, script: str) -> Path:
        path = tools / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\necho {Path(name).name} $* >> {tmp_path}/calls\n{script}\n")
        path.chmod(0o755)
        return path

    def run(command: str, **variables) -> subprocess.CompletedProcess:
        environment = dict(os.environ, HOME=str(home), USER="somebody", PATH=f"{tools}:{os.environ['PATH']}")
        settings = dict(capture_output=True, text=True, env={**environment, **variables}, timeout=60)
        return subprocess.run(["bash", "-c", command], **settings)

    tool("sudo", f'if [ $1 = tee ]; then exec tee "{tmp_path}/units/$(basename $2)"; fi')

    def python(script: str) -> Path:
        """In place of the checkout's Python."""
        path = home / "tpu-examples/.venv/bin/python"
        path.parent.mkdir(parents=True)
        path.symlink_to(tool("python", script))
        return path

    run.tool, run.python, run.home, run.folder = tool, python, home, tmp_path
    run.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    return run


def test_every_line_is_done_here_or_excused_by_the_page():
    for text, reason in commands_of(PAGE):
        assert reason or any(re.match(pattern, text, re.S) for pattern in HERE), text


def test_the_setup(vm):
    """clone, venv, pip, then the doctor, on a fresh VM and once more; what fails is the exit code."""
    origin = vm.folder / "origin"
    origin.mkdir()
    shutil.copy(ROOT / "requirements.txt", origin)
    git = f"git -C {origin} -c user.name=n -c user.email=e"
    assert vm(f"git init -q {origin} && {git} add . && {git} commit -qm first").returncode == 0
    pip, doctor = vm.tool("venv/pip", "cat $4; exit $FAILS"), vm.tool("venv/python", "exit $FAILS")
    vm.tool("python3.11", f"mkdir -p $3/bin && cp {pip} {doctor} $3/bin")
    command = on_the_vm("apt-get").replace("GIT_URL", str(origin))
    for text in ("first", "second"):
        with (origin / "requirements.txt").open("a") as file:
            file.write(f"# {text}\n")
        assert vm(f"{git} commit -qam {text}").returncode == 0
        done = vm(command, FAILS="0")
        assert done.returncode == 0, done.stderr
        assert "torch_xla[tpu,pallas]==2.9.0" in done.stdout  # pip was given the clone's requirements.txt,
        assert f"# {text}" in done.stdout  # and that of today
    assert [call for call in vm.calls() if "apt-get" in call][1].endswith("install -y python3.11-venv libpython3.11")
    assert vm(command, FAILS="1").returncode == 1
    vm.tool("python3.11", "exit 1")
    assert vm(command, FAILS="0").returncode == 1
    assert vm(on_the_vm("setup_tpu.py"), FAILS="1").returncode == 1
    assert vm.calls()[-1] == "python setup_tpu.py --device tpu"


@pytest.mark.slow
def test_training_lines(vm):
    """The line trains: with its own words in its own folder, but for the device and the data."""
    vm.python("echo $PWD")
    done = vm(on_the_vm("--preset distributed --download'"))
    assert done.stdout.strip() == str(vm.home / "tpu-examples")
    words = vm.calls()[-1].split()[1:]
    parse_command_line(DistributedMnistConfig, "", words[1:])  # nothing is misspelt or without effect
    words.remove("--download")
    without = ["--device=cpu", "--dataset=digits", "--num_epochs=1", "--warmup_steps=2"]
    process = Script(ROOT / words[0], *words[1:], *without, folder=vm.folder)
    assert process.wait() == 0, process.text("err")
    assert (vm.folder / "runs/mnist_distributed/summary.json").exists()


def test_the_service(vm):
    """The unit that the page writes: what it runs, when it goes on and when it gives up."""
    python = vm.python("")
    done = vm(on_the_vm("train.service"))
    assert done.returncode == 0, done.stderr
    verbs = ("daemon-reload", "enable train", "reset-failed train", "restart train")
    assert vm.calls()[1:] == [f"sudo systemctl {verb}" for verb in verbs]
    text = (vm.folder / "units/train.service").read_text()
    unit = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert (unit["Restart"], unit["RestartPreventExitStatus"], unit["User"]) == ("on-failure", "2", "somebody")
    launcher, *keeper, script = unit["ExecStart"].split()[:5]
    assert (launcher, unit["WorkingDirectory"]) == (str(python), str(vm.home / "tpu-examples"))
    assert keeper == ["-m", "tools.keep_running", "--"] and (ROOT / script).exists()
    words = unit["ExecStart"].split()[5:]
    parse_command_line(DistributedMnistConfig, "", [word.replace("BUCKET", "bucket") for word in words])
    assert "--run_dir gs://" in unit["ExecStart"]
    assert unit["LimitMEMLOCK"] == "infinity"
    if shutil.which("systemd-analyze"):  # exits with 0 whatever it says
        said = vm(f"systemd-analyze verify {vm.folder}/units/train.service")
        assert said.stderr == "" == said.stdout


def test_lines_for_scripts_are_understood():
    (line,) = [text for text, _ in commands_of(PAGE) if text.startswith(".venv/bin/python -m tools.keep_running")]
    _, _, _, _, script, *words = line.split()
    assert run_dir_of([str(ROOT / script), *words]) == Path("runs/mine")
    parse_command_line(MnistConfig, "", to_go_on(words))
    _, script, *words = on_the_vm("transformer_tpu.py").partition(" && ")[2].split()
    config = parse_command_line(TransformerConfig, "", [word.replace("BUCKET", "bucket") for word in words])
    assert (script, config.preset, config.model_size) == ("transformer_tpu.py", "distributed", "1558M")


def test_the_calibration(vm):
    """ssh comes back while it runs: nothing of it holds the streams of the shell that started it."""
    go = f"until [ -e {vm.folder}/go ]; do /bin/sleep 0.05; done; echo measured; echo > {vm.folder}/gone"
    vm.python(go)
    assert vm(on_the_vm("nohup")).returncode == 0  # it would not return before `go` is there
    (vm.folder / "go").touch()
    assert vm(f"until [ -e {vm.folder}/gone ]; do /bin/sleep 0.05; done").returncode == 0
    assert vm.calls() == ["python -m tools.calibrate"]
    assert (vm.home / "tpu-examples/calibration.log").read_text() == "measured\n"


def test_libpython(vm):
    """The link leads to the library of the Python that the environment was made with, twice as well as once."""
    library = vm.home / "python/lib/libpython3.11.so.1.0"
    library.parent.mkdir(parents=True)
    library.write_text("the library")
    (vm.home / ".venv/bin").mkdir(parents=True)
    (vm.home / ".venv/bin/python").symlink_to(vm.tool("python", f"echo {vm.home}/python"))
    commands = [text for text, _ in commands_of(PAGE) if text.startswith(("mkdir -p .venv", "ln -sf"))]
    for _ in range(2):
        done = vm(" && ".join(commands))
        assert done.returncode == 0, done.stderr
    linked = vm.home / ".venv/lib/python3.11/site-packages/torch_xla/lib/libpython3.11.so.1.0"
    assert linked.read_text() == "the library"


@pytest.mark.slow
def test_gcloud_knows_every_command_and_option(tmp_path):
    """It reads a command line before it asks who you are; with a settings folder of its own it knows nobody."""
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not installed")
    (tmp_path / "secret").write_text("it reads this one")
    pages = [PAGE.with_name(name) for name in (PAGE.name, "colab_kaggle_gke.md", "many_devices.md")]
    commands = [text for page in pages for text, _ in commands_of(page)]
    for command in [command for command in commands if command.startswith("gcloud")]:
        environment = dict(os.environ, CLOUDSDK_CONFIG=str(tmp_path), CLOUDSDK_CORE_DISABLE_PROMPTS="1")
        environment.update(CLOUDSDK_CORE_PROJECT="nobodys", CLOUDSDK_COMPUTE_ZONE="us-west4-a")
        settings = dict(capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
        said = subprocess.run(shlex.split(command.replace("PROJECT", "nobodys")), **settings).stderr
        assert re.search(r"Updated property|active account|credentials|login", said), f"{command}\n{said}"
