"""The doctor: whole machines, pretended, on each of which one thing is broken; then the script as users run it.

A fix is tried where a test can try it: the check is ok after it. Of others the words are held that make them work.
"""

import ast
import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
from metadata_server import metadata_server

import setup_tpu
from setup_tpu import Check
from tpu_utils.base.hardware import GENERATIONS
from tpu_utils.base.versions import SUPPORTED_VERSIONS
from tpu_utils.options.environment import GOOGLE_PCI_VENDOR

SCRIPT = Path(setup_tpu.__file__)
INSTALLED = {"torch": "2.9.0", "torch_xla": "2.9.0", "torchvision": "0.24.0", "libtpu": "0.0.21", "jax": "0.7.1"}
OLDER = {"torch": "2.8.0+cpu", "torch_xla": "2.8.1", "torchvision": "0.23.0", "libtpu": "0.0.17", "jax": "0.6.2"}
PATIENT = 600
"""Seconds for a child that is to answer: only a hang meets them, however busy the machine is."""
V5E = GENERATIONS["v5e"]


def assert_check(check: Check, status: str, *words: str, fix: str = "") -> None:
    """words: in its finding; fix: in its fix, which a check has where something is wrong."""
    assert check.status == status, check
    for word in words:
        assert word in check.finding, check
    assert fix in check.fix and bool(check.fix) == (status in ("warn", "fail")), check


def shell(fix: str, environment: dict | None = None) -> dict:
    """What is in the environment after the command, run without sudo."""
    script = f"{fix.replace('sudo ', '')} && env -0"
    done = subprocess.run(["bash", "-ec", script], env=environment, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.split("\0")[:-1])


def after_pip(installed: dict, fix: str) -> dict:
    """What the pip commands of a fix leave installed; with torch_xla the libtpu and jax that it asks for."""
    installed = dict(installed)
    for words in map(shlex.split, fix.split(" && ")):
        assert words[1:3] == ["-m", "pip"], fix
        for word in words[4:]:
            name, _, version = re.sub(r"\[.*\]", "", word).partition("==")
            if "uninstall" in words:
                installed.pop(name, None)
            elif version:
                installed[name] = version.replace("*", "0")
    (row,) = (row for row in SUPPORTED_VERSIONS if fnmatch(installed["torch_xla"], row.torch_xla))
    return installed | {"libtpu": row.libtpu.rstrip("*"), "jax": row.jax}


def clean_environment(*python_path: Path, **variables: str) -> dict:
    kept = {k: v for k, v in os.environ.items() if not re.match("XLA_|PJRT_|TPU_|CPU_NUM|XRT_|PT_XLA|PYTHON", k)}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, python_path)), **variables}


def package(folder: Path, **sources: str) -> Path:
    """Write modules, dots as double underscores: package(p, torch="...", google__cloud="...")."""
    for name, source in sources.items():
        path = folder.joinpath(*name.split("__"))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(source)
    return folder


def dist_info(folder: Path, name: str, version: str) -> Path:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def pci_device(sys_root: Path, slot: str, vendor: str, device: str) -> None:
    folder = sys_root / "bus" / "pci" / "devices" / slot
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "device").write_text(device + "\n")


# ---------------------------------------------------------------- whole machines, pretended

COLAB, KAGGLE = {"COLAB_RELEASE_TAG": "release-colab_2026"}, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
KAGGLE |= COLAB | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"}  # its image is made from Colab's
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TPU_SKIP_MDS_QUERY": "true"}
KUBERNETES |= {"TPU_ACCELERATOR_TYPE": "v5litepod-32", "TPU_WORKER_HOSTNAMES": ",".join(f"pod-{i}" for i in range(4))}

ACCEL, VFIO = (" ".join(f"{name}{i}" for i in range(8)) for name in ("accel", "vfio/"))
VFIO += " vfio/vfio"


class Machine:
    """A healthy v5litepod-8 VM with everything installed; each test breaks one thing."""

    def __init__(self, root: Path, pages: dict, monkeypatch):
        self.root, self.pages, self.monkeypatch, self.environment = root, pages, monkeypatch, {}
        self.installed, self.version, self.device = dict(INSTALLED), (3, 11, 7), "auto"
        self.silent, self.locked, self.shared_memory = set(), resource.RLIM_INFINITY, 2**33
        pages["tpu-env"] = "ACCELERATOR_TYPE: 'v5litepod-8'\nWORKER_ID: '0'\n"
        pages["worker-network-endpoints"] = "t1v-n-0:uid:10.0.0.1"
        pages |= {"preempted": "FALSE", "maintenance-event": "NONE"}
        for i in range(8):
            pci_device(root / "sys", f"0000:00:0{i}.0", GOOGLE_PCI_VENDOR, V5E.pci_id)
        (root / "sys/class/net/ens8/device").mkdir(parents=True)
        for name in ("dev/shm", "dev/vfio", "proc/self", "tmp"):
            (root / name).mkdir(parents=True)
        self.nodes(ACCEL)
        self.memory(available=190)
        self.capabilities("000001ffffffffff")

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def memory(self, available: int) -> None:
        self.write("proc/meminfo", f"MemTotal: {200 << 20} kB\nMemAvailable: {available << 20} kB\n")

    def capabilities(self, bits: str) -> None:
        self.write("proc/self/status", f"CapBnd:\t{bits}\n")

    def nodes(self, names: str, mode: int = 0o666) -> None:
        """In place of those that there are."""
        for node in (*self.root.glob("dev/accel*"), *self.root.glob("dev/vfio/*")):
            node.unlink()
        for name in names.split():
            (self.root / "dev" / name).touch()
            (self.root / "dev" / name).chmod(mode)

    def vfio(self, locked: int = resource.RLIM_INFINITY) -> None:
        self.nodes(VFIO)
        self.locked = locked

    def in_container(self, **environment: str) -> None:
        """With variables of the environment it is somebody's, without metadata."""
        (self.root / ".dockerenv").touch()
        self.environment |= environment
        if environment:
            self.pages.clear()

    def unprivileged(self) -> None:
        self.in_container()
        self.capabilities("00000000a80425fb")  # docker's default

    def without_chips(self, device: str = "tpu") -> None:
        """Only a network card of Google's, another maker's device, and a TPU that the scripts do not know, a v3."""
        shutil.rmtree(self.root / "sys/bus")
        self.device = device
        for i, (vendor, kind) in enumerate([(GOOGLE_PCI_VENDOR, "0x0042"), ("0x8086", "0x0063")]):
            pci_device(self.root / "sys", f"0000:00:0{i}.0", vendor, kind)
        pci_device(self.root / "sys", "0000:00:04.0", GOOGLE_PCI_VENDOR, "0x0027")

    def busy(self, target: str) -> None:
        (self.root / "proc/4242/fd").mkdir(parents=True)
        (self.root / "proc/4242/cmdline").write_bytes(b"python\0train.py\0--steps=9\0")
        (self.root / "proc/4242/fd/7").symlink_to(target)

    def lock(self, mode: int = 0o666) -> Path:
        file = self.root / "tmp/libtpu_lockfile"
        file.touch()
        file.chmod(mode)
        return file

    def four_hosts(self, index: int, silent: str = "") -> None:
        self.pages["tpu-env"] = f"ACCELERATOR_TYPE: 'v5litepod-16'\nWORKER_ID: '{index}'\n"
        self.pages["worker-network-endpoints"] = ",".join(f"host-{i}:uid:10.0.0.{i}" for i in range(4))
        for i in range(4, 8):  # a host of several has 4 chips
            shutil.rmtree(self.root / f"sys/bus/pci/devices/0000:00:0{i}.0")
        self.silent = {silent}

    def as_pod(self, index: int, silent: str = "") -> None:
        self.in_container(**KUBERNETES, TPU_WORKER_ID=str(index))
        self.silent = {silent}

    def install(self, version: tuple = (3, 11, 7), **installed: str) -> None:
        """Only these, into this Python."""
        self.version, self.installed = version, installed

    def try_fix(self, fix: str) -> bool:
        """Whether it could be tried here."""
        if fix.startswith("sudo chmod"):
            shell(fix)
        elif fix.startswith("unset"):
            self.environment = shell(fix, self.environment | {"PATH": os.environ["PATH"]})
        elif fix.startswith(setup_tpu.PIP):
            self.installed = after_pip(self.installed, fix)
        else:
            return False
        return True

    def doctor(self) -> dict[str, Check]:
        """The whole report. No child is started: this machine computes rightly once the doctor lets it."""
        packages = self.root / "packages"
        shutil.rmtree(packages, ignore_errors=True)
        for name, version in self.installed.items():
            dist_info(packages, name, version)
        if "libtpu" in self.installed:
            package(packages, libtpu="").joinpath("libtpu/libtpu.so").touch()
        connect = socket.create_connection

        def connect_or_not(address, timeout=None, *rest, **named):
            if address[0] in self.silent:
                raise TimeoutError("timed out")
            if address[1] == 22:
                raise ConnectionRefusedError
            return connect(address, timeout, *rest, **named)

        def child(arguments, environment, limit):
            if "child_work" in arguments:
                self.child_environment = environment
            names = ("import", "matrix product", "training step", "all-reduce")
            return {name: Check(name, "ok", "") for name in names}, ""

        of_process = resource.getrlimit

        def limits(which):
            return (self.locked, self.locked) if which == resource.RLIMIT_MEMLOCK else of_process(which)

        options = setup_tpu.read_options(["--device", self.device])
        user = os.getuid() + 1  # who has none of these files
        with self.monkeypatch.context() as patch:
            patch.setattr(setup_tpu, "run_child", child)
            patch.setattr(socket, "create_connection", connect_or_not)
            patch.setattr(os, "getuid", lambda: user)
            patch.setattr(sys, "version_info", self.version)
            patch.setattr(resource, "getrlimit", limits)
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=self.shared_memory))
            checks = list(setup_tpu.diagnose(options, self.environment, self.root, [str(packages)]))
        return {check.name: check for check in checks}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    with metadata_server() as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        yield Machine(tmp_path, server.pages, monkeypatch)


NEW_PYTHON = "python3.11 -m venv .venv && .venv/bin/python -m pip install -r requirements.txt"
ELSEWHERE = "-m venv .venv_xla && .venv_xla/bin/python -m pip install -r requirements.txt"
XLA = "torch_xla[tpu,pallas]==2.9.0"
MACHINES = {  # what is broken -> (status, words of its finding, and of its fix) of every check that is no "ok"
    "healthy v5litepod-8, whose chips need no locked memory": (
        lambda m: setattr(m, "locked", 1),
        {"surroundings": ("ok", "TPU VM", ""), "hosts": ("ok", "1, this is index 0", "")},
    ),
    "Python 3.10, as the VM's image brings it": (
        lambda m: m.install((3, 10, 13)),
        {"python": ("fail", "found 3.10.13; torch_xla 2.9.0, jax and libtpu need 3.11 to 3.12", NEW_PYTHON)}
        | dict.fromkeys(("torch", "torch_xla", "libtpu"), ("fail", "not installed", NEW_PYTHON))
        | dict.fromkeys(("torchvision", "jax"), ("warn", "not installed", NEW_PYTHON))
        | {"libtpu.so": ("fail", "no libtpu.so found", NEW_PYTHON)},
    ),
    "Python 3.13": (lambda m: m.install((3, 13, 0), **INSTALLED), {"python": ("fail", "found 3.13.0", NEW_PYTHON)}),
    "Python 3.13, as Colab has it": (lambda m: m.install((3, 13, 0), **INSTALLED | {"libtpu": "0.0.21.1"}), {}),
    "the set before, for the CPU": (lambda m: m.install((3, 13, 0), **OLDER), {}),
    "no TPU wanted": (
        lambda m: (m.without_chips("cpu"), m.unprivileged(), m.install(**INSTALLED | {"tensorflow": "2.19.0"})),
        {"tensorflow": ("warn", "tensorflow 2.19.0 is installed beside torch_xla", "uninstall -y tensorflow")},
    ),
    "no TPU wanted, and no libtpu": (
        lambda m: (m.without_chips("cpu"), m.installed.pop("libtpu")),
        {"libtpu": ("warn", "not installed", XLA), "libtpu.so": ("warn", "no libtpu.so found", "libtpu==0.0.21")},
    ),
    "packages beside a torch_xla of another release": (
        lambda m: m.installed.update(torch="2.8.0", torchvision="0.19.0", libtpu="0.0.17", jax="0.8.0"),
        {
            "torch": ("fail", "found 2.8.0 beside torch_xla 2.9.0, expected 2.9.0", "torch==2.9.0"),
            "torchvision": ("fail", "found 0.19.0 beside torch_xla 2.9.0, expected 0.24.*", XLA),
            "libtpu": ("fail", "found 0.0.17 beside torch_xla 2.9.0, expected 0.0.21", XLA),
            "jax": ("fail", "found 0.8.0 beside torch_xla 2.9.0, expected 0.7.1", XLA),
        },
    ),
    "torch_xla of a release that is not known": (
        lambda m: m.installed.update(torch_xla="2.7.0"),
        {"torch_xla": ("fail", "found 2.7.0", XLA)},
    ),
    "chips busy on a spot VM that is taken back": (
        lambda m: (m.busy("/dev/accel0"), m.pages.update(preempted="TRUE")),
        {
            "tpu holder": ("fail", "pid 4242 (python train.py --steps=9) has /dev/accel0", "kill 4242 "),
            "notices": ("warn", "preempted = TRUE: this machine is about to go", "queued-resources delete"),
        },
    ),
    "chips behind vfio busy, and just enough locked memory": (
        lambda m: (m.vfio(2**30), m.busy("/dev/vfio/1")),
        {"tpu holder": ("fail", "has /dev/vfio/1 open", "kill 4242 ")},
    ),
    "libtpu's lock held": (
        lambda m: m.busy(str(m.lock())),
        {"tpu holder": ("fail", "libtpu_lockfile open", "kill 4242 ")},
    ),
    "no permission for chips and libtpu's lock": (
        lambda m: (m.nodes(ACCEL, 0o644), m.lock(0o600)),  # may be read
        {
            "device nodes": ("fail", "may not open", "chmod a+rw"),
            "tpu holder": ("fail", "libtpu_lockfile belongs to user", "chmod a+rw"),
        },
    ),
    "no permission for vfio's control node, and little locked memory": (
        lambda m: (m.vfio(2**23), (m.root / "dev/vfio/vfio").chmod(0o600)),
        {
            "device nodes": ("fail", "vfio/vfio", "chmod a+rw"),
            "locked memory": ("warn", "up to 8 MiB, expected at least 1 GiB", "prlimit --memlock=unlimited"),
        },
    ),
    "no nodes": (lambda m: m.nodes(""), {"device nodes": ("fail", "8 chips but 0 nodes", "sudo reboot")}),
    "4 hosts with one silent": (
        lambda m: m.four_hosts(1, silent="10.0.0.3"),
        {"hosts": ("warn", "4, this is index 1; silent, or behind a firewall: index 3, 10.0.0.3", "ssh NAME")},
    ),
    "maintenance announced, little memory by a cgroup, a compile cache set": (
        lambda m: (
            m.pages.update({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}),
            m.write("sys/fs/cgroup/memory.max", f"{2**30}\n"),
            m.environment.update(XLA_PERSISTENT_CACHE_PATH="/tmp/cache"),
        ),
        {
            "notices": ("warn", "maintenance-event = TERMINATE_ON", "tpu-vm describe"),
            "memory": ("fail", "limited to 1.0 by cgroup", "ps aux"),
            "environment": ("warn", "and compiles them again", "unset XLA_PERSISTENT_CACHE_PATH"),
        },
    ),
    "torch_tpu beside torch_xla": (
        lambda m: m.installed.update(torch_tpu="0.2.0"),
        {"torch_xla": ("fail", "torch_tpu 0.2.0 is installed beside torch_xla", "uninstall -y torch_tpu &&")},
    ),
    "torch_tpu alone": (
        lambda m: m.install(torch="2.11.0", torch_tpu="0.2.0", libtpu="0.0.21"),
        {"torch_xla": ("fail", "without torch_xla 2.9.0, which these scripts need: docs/torchtpu.md", ELSEWHERE)}
        | {"torch": ("fail", "found 2.11.0", ELSEWHERE)}
        | dict.fromkeys(("torchvision", "jax"), ("warn", "not installed", ELSEWHERE)),
    ),
    "Colab": (
        lambda m: m.in_container(**COLAB),
        {"surroundings": ("ok", "Colab", ""), "hosts": ("ok", "0 of 1: neither", "")},
    ),
    "no chips, and none asked for": (
        lambda m: m.without_chips("auto"),
        {"tpu chips": ("warn", "programs will run on the CPU", "--device cpu")},
    ),
    "container on a machine without chips": (
        lambda m: (m.in_container(), m.without_chips()),
        {"tpu chips": ("fail", f"none of {', '.join(GENERATIONS)} on the PCI bus", "gcloud")},
    ),
    "Colab, with no TPU chosen": (
        lambda m: (m.in_container(**COLAB), m.without_chips()),
        {"tpu chips": ("fail", "none of v4", "Runtime > Change runtime type > TPU")},
    ),
    "Kaggle, with its tensorflow": (
        lambda m: (m.in_container(**KAGGLE), m.installed.update(tensorflow="2.19.0")),
        {"tensorflow": ("fail", "tensorflow 2.19.0 is installed beside torch_xla", "uninstall -y tensorflow")}
        | {"surroundings": ("ok", "Kaggle", ""), "hosts": ("ok", "1, this is index 0", "")},
    ),
    "GKE pod": (
        lambda m: m.as_pod(index=3),
        {"surroundings": ("ok", "Kubernetes", ""), "hosts": ("ok", "4, this is index 3", "")},
    ),
    "GKE pod, another is silent": (
        lambda m: m.as_pod(index=0, silent="pod-2"),
        {"hosts": ("warn", "index 2, pod-2 (timed out)", "kubectl get pods")},
    ),
    "GKE pod, index outside the list of hosts": (
        lambda m: m.as_pod(index=4),
        {"hosts": ("fail", "this host has index 4", "set TPU_WORKER_ID")},
    ),
    "GKE pod, little memory of some kinds": (
        lambda m: (m.as_pod(index=0), m.vfio(1), shutil.rmtree(m.root / "dev/shm")),
        {
            "locked memory": ("warn", "expected at least 1 GiB", "privileged: true"),
            "shared memory": ("warn", "has 0.00 GiB", "emptyDir"),
        },
    ),
    "container without --privileged": (
        lambda m: (m.unprivileged(), m.nodes("")),
        {
            "device nodes": ("fail", "8 chips but 0 nodes", "docker run --privileged"),
            "container": ("fail", "not privileged", "docker run --privileged"),
        },
    ),
    "container with little memory of some kinds": (
        lambda m: (m.in_container(), m.vfio(2**23), setattr(m, "shared_memory", 2**26)),
        {
            "locked memory": ("warn", "up to 8 MiB", "--ulimit memlock=-1"),
            "shared memory": ("warn", "has 0.06 GiB, expected at least 1", "docker run"),
        },
    ),
    "container of another user, on a network of its own": (
        lambda m: (m.in_container(), m.nodes(ACCEL, 0o600), shutil.rmtree(m.root / "sys/class")),
        {
            "device nodes": ("fail", "may not open", "--user root IMAGE"),
            "container": ("fail", "not on the network of the host", "--net=host"),
        },
    ),
    "little memory": (
        lambda m: (m.memory(available=1), setattr(m, "shared_memory", 2**26)),
        {
            "memory": ("fail", "200.0 GiB, 1.0 available, expected 2 free", "ps aux"),
            "shared memory": ("warn", "has 0.06 GiB", "mount -o remount,size=16G"),
        },
    ),
}


@pytest.mark.parametrize(("broken", "expected"), MACHINES.values(), ids=MACHINES)
def test_machine(machine, capsys, broken, expected):
    """The finding and the fix of what is broken, and nothing else is complained of. A fix is a command of a shell;
    where it can be tried here, the check is ok after it."""
    broken(machine)
    before = machine.root.joinpath("tmp/libtpu_lockfile").exists()
    checks = machine.doctor()
    found = {name: check for name, check in checks.items() if check.status in ("warn", "fail")}
    assert found.keys() == {name for name, (status, *_) in expected.items() if status != "ok"}, found
    for name, (status, words, fix) in expected.items():
        assert_check(checks[name], status, words, fix=fix)
    for name in found:
        if not found[name].fix.startswith(("in the ", "name all")):
            subprocess.run(["bash", "-nc", found[name].fix], check=True)
    assert machine.root.joinpath("tmp/libtpu_lockfile").exists() == before
    if tried := [name for name in found if machine.try_fix(found[name].fix)]:
        cured = machine.doctor()
        assert [cured[name].status for name in tried] == ["ok"] * len(tried)
    assert not capsys.readouterr().out
    if "hosts" in expected and COLAB.items() <= machine.environment.items():  # what torch_xla would ask a server for
        assert machine.child_environment["TPU_ACCELERATOR_TYPE"] == "v5litepod-8"


# ---------------------------------------------------------------- Python and packages


def test_requirements_pin_the_first_supported_set():
    lines = [line.partition("#")[0].strip() for line in SCRIPT.with_name("requirements.txt").read_text().splitlines()]
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for name, word in (("torch", "torch"), ("torch_xla", "torch_xla[tpu,pallas]"), ("torchvision", "torchvision")):
        assert fnmatch(pinned[word], getattr(SUPPORTED_VERSIONS[0], name))


def test_only_the_standard_library_at_module_level_and_syntax_of_old_pythons():
    """An old Python reads the doctor, and of tpu_utils what says which Python to install; 3.10 reads the rest."""
    for name in ("setup_tpu.py", "tpu_utils/__init__.py", "tpu_utils/base/versions.py"):
        tree = ast.parse((SCRIPT.parent / name).read_text(), feature_version=(3, 8))
        imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        roots = {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).split(".")[0] for n in imports}
        assert roots <= sys.stdlib_module_names
    source = f"import sys; sys.path.append({str(SCRIPT.parent)!r}); import setup_tpu; setup_tpu.read_options([]);"
    source += "from tpu_utils.remote import hosts; from tpu_utils.options import variables; import tpu_utils.base.gpus"
    subprocess.run([sys.executable, "-ISc", source], check=True)


def test_a_python_that_does_not_read_tpu_utils_is_told_which_to_install(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 8, 10))
    assert setup_tpu.main() == 1
    said = capsys.readouterr().err
    assert "found 3.8.10" in said and "need 3.11 to 3.12" in said and "python3.11 -m venv" in said


def test_doctor_copied_alone(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    command = [sys.executable, tmp_path / SCRIPT.name, "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: tpu_utils/, which setup_tpu.py reads") and done.stderr.count("\n") == 1


def test_versions_come_from_metadata_even_of_broken_installs(tmp_path):
    dist_info(tmp_path / "first", "torch", "2.8.0")
    dist_info(tmp_path / "second", "torch", "2.9.0")
    dist_info(tmp_path / "second", "torch-xla", "2.9.0")
    (tmp_path / "second" / "libtpu-0.0.21.dist-info").mkdir()
    found = setup_tpu.installed_versions([str(tmp_path / "first"), str(tmp_path / "second")])
    assert found == {"torch": "2.8.0", "torch_xla": "2.9.0"}


H200 = "NVIDIA H200, 580.159.04, 512, 143771"


@pytest.mark.parametrize(
    ("answer", "installed", "cuda", "status", "said"),
    [
        (H200, {"torch": "2.11.0"}, "13.0", "ok", "0.5 of 140 GiB in use; torch 2.11.0 has CUDA 13.0"),
        (H200.replace("580", "570"), {"torch": "2.11.0"}, "13.0", "fail", "CUDA 13.0, which needs driver 580 or newer"),
        (H200.replace("580", "570"), {"torch": "2.11.0"}, "12.8", "ok", "has CUDA 12.8"),
        (H200, {"torch": "2.11.0+cpu"}, "", "fail", "torch 2.11.0+cpu is built without CUDA"),
        (H200, INSTALLED, "", "ok", "driver 580.159.04, 0.5 of 140 GiB in use; only the torch.compile backend uses"),
        (H200.replace("512", "90000"), {"torch": "2.13.0"}, "13.0", "warn", "87.9 of 140 GiB in use"),
        ("No devices were found", {"torch": "2.13.0"}, "13.0", "fail", "its driver does not answer nvidia-smi"),
    ],
)
def test_a_gpu(answer, installed, cuda, status, said, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("tpu_utils.base.gpus.cuda_version", lambda: cuda)
    assert setup_tpu.check_gpu(tmp_path, installed, PATIENT).status == "skip"
    (tmp_path / "nvidia0").touch()
    assert_check(setup_tpu.check_gpu(tmp_path, installed, PATIENT), status, said)


def test_broken_libtpu(tmp_path):
    library = package(tmp_path, libtpu="") / "libtpu" / "libtpu.so"
    library.write_bytes(b"half a download")
    check = setup_tpu.check_libtpu({}, [str(tmp_path)], INSTALLED, False, PATIENT)
    assert_check(check, "fail", f"{library} cannot be loaded", fix="libtpu==0.0.21")
    assert_check(setup_tpu.check_libtpu({}, [], {}, True, PATIENT), "fail", "no libtpu.so found", fix="libtpu==0.0.21")
    environment = {"TPU_LIBRARY_PATH": str(tmp_path / "gone.so")}
    check = setup_tpu.check_libtpu(environment, [str(tmp_path)], INSTALLED, False, PATIENT)
    assert_check(check, "fail", "gone.so cannot be loaded", "No such file", fix="unset TPU_LIBRARY_PATH")


def test_silent_hosts():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_server(("127.0.0.2", 0)) as open_one:
        port = full.getsockname()[1]
        with contextlib.ExitStack() as stack:
            waiting = [stack.enter_context(socket.socket()) for _ in range(3)]
            for one in waiting:  # nobody accepts: the next connection gets no answer
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            names = ["127.0.0.1", "127.0.0.3", "no.such.name.invalid"]
            silent = setup_tpu.find_silent(names, port, limit=0.1)
        assert set(silent) == {"127.0.0.1", "no.such.name.invalid"}, "a refused connection is an answer"
        assert silent["127.0.0.1"] == "timed out"
        assert not setup_tpu.find_silent(["127.0.0.2"], open_one.getsockname()[1], limit=5)


def test_a_name_that_takes_long_to_resolve_is_not_waited_for(monkeypatch):
    resolved = threading.Event()

    def slow(*_, **__):
        resolved.wait()
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", slow)
    assert setup_tpu.find_silent(["slow"], limit=-0.9) == {"slow": "does not resolve within 0.1 s"}
    resolved.set()


FAKE_STORAGE = """
class NotFound(Exception): pass
class DefaultCredentialsError(Exception): pass
class Client:
    def __init__(self, project): pass
    def bucket(self, name): return self
    def test_iam_permissions(self, wanted, timeout): {body}
"""
LACKING = "return [w for w in wanted if 'create' not in w]"
NO_CREDENTIALS = "raise DefaultCredentialsError('no credentials were found')"


@pytest.mark.parametrize(
    ("body", "status", "words", "fix"),
    [
        ("return wanted", "ok", "may be read and written", ""),
        (LACKING, "fail", "lack storage.objects.create", "buckets add-iam-policy-binding gs://b "),
        ("raise NotFound('404 POST b')", "fail", "gs://b does not exist", "buckets create gs://b"),
        (NO_CREDENTIALS, "fail", "no credentials were found", "application-default login"),
    ],
)
def test_bucket(tmp_path, body, status, words, fix):
    fake = package(tmp_path, google="", google__cloud="", google__cloud__storage=FAKE_STORAGE.format(body=body))
    have = {"google_cloud_storage": "3"}
    check = setup_tpu.check_bucket("gs://b/runs", have, clean_environment(fake), PATIENT)
    assert_check(check, status, "gs://b", words, fix=fix)


def test_a_bucket_without_the_library_and_without_credentials():
    check = setup_tpu.check_bucket("gs://b", {}, {}, PATIENT)
    assert_check(check, "fail", "not installed", fix="install google-cloud-storage")
    environment = clean_environment(GOOGLE_APPLICATION_CREDENTIALS="/nonexistent/key.json")
    check = setup_tpu.check_bucket("gs://some-bucket", {"google_cloud_storage": "3"}, environment, PATIENT)
    assert_check(check, "fail", "DefaultCredentialsError", "/nonexistent/key.json", fix="application-default login")


# ---------------------------------------------------------------- the environment


@pytest.mark.parametrize(
    ("name", "value", "status", "words"),
    [
        ("XRT_TPU_CONFIG", "localservice;0", "warn", "XRT is gone"),
        ("XLA_DOWNCAST_FP16", "1", "warn", "read by nobody"),
        ("PT_XLA_DEBUG", "1", "warn", "use PT_XLA_DEBUG_LEVEL"),
        ("PYTHONSAFEPATH", "1", "fail", "No module named 'config'"),
        ("CPU_NUM_DEVICES", "four", "fail", "expected a whole number"),
        ("XLA_FLAGS", "--xla_tpu_x=1", "fail", "belong in --compiler_options"),
        ("XLA_USE_BF16", "1", "fail", "XLA_USE_BF16=1, which makes"),
        ("PJRT_DEVICE", "GPU", "fail", "PJRT_DEVICE=GPU, but this machine has a CPU"),
    ],
)
def test_a_variable_that_is_refused_or_stale(name, value, status, words):
    """What tpu_utils/options/variables.py refuses, and more. The fix leaves it out; so does what is tried."""
    given = {"HOME": "/", "PT_XLA_DEBUG_LEVEL": "1", name: value}
    check, refused = setup_tpu.check_environment(given, "auto", [])
    assert_check(check, status, name, words)
    assert set(refused) == ({name} if status == "fail" else set())
    cured = shell(check.fix, given | {"PATH": os.environ["PATH"]})
    assert setup_tpu.check_environment(cured, "auto", [])[0].status == "ok"


def test_silent_runs_on_the_cpu_of_a_machine_with_a_tpu():
    for device, status in (("auto", "fail"), ("tpu", "fail"), ("cpu", "ok")):
        assert setup_tpu.check_environment({"PJRT_DEVICE": "CPU"}, device, [V5E])[0].status == status


# ---------------------------------------------------------------- real work, on backends that are broken


def work(*python_path: Path, device: str = "cpu", limit: float = PATIENT, chips: tuple = (V5E,)) -> list[Check]:
    return setup_tpu.check_work(device, clean_environment(*python_path), INSTALLED, limit, list(chips))


FLAG_REFUSED = """2026-01-01 00:00:00.1: E external/f.cc:109] Couldn't interpret value maybe for flag xla_known.
2026-01-01 00:00:00.1: F external/x.cc:220] Check failed: Flag parsing failed.
usage: --xla_known=maybe
"""
NO_PYTHON = "libpython3.11.so.1.0: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("source", "words", "fix"),
    [
        ("os.write(2, b'2026-01-01 0:0:0.1: F a.cc:1] Check failed: chip'); os.abort()", "chip", "--force-reinstall"),
        (f"os.write(2, {FLAG_REFUSED.encode()!r}); os.abort()", "Couldn't interpret value maybe", "unset XLA_FLAGS"),
        (f"raise ImportError({NO_PYTHON!r})", NO_PYTHON, "apt-get install -y libpython3.11"),  # Debian's python3
    ],
)
def test_an_import_that_aborts(tmp_path, source, words, fix):
    first, *rest = work(package(tmp_path, torch="", torch_xla=f"import os\n{source}"))
    assert_check(first, "fail", words, fix=fix)
    assert [(c.status, c.finding) for c in rest] == [("skip", "not reached")] * 3


def test_an_import_that_hangs(tmp_path):
    fake = package(tmp_path, torch="import time; time.sleep(60)", torch_xla="")
    assert_check(work(fake, limit=1)[0], "fail", "no answer within 1 s", fix="--time_limit 4 ")
    checks = work(fake, device="tpu", limit=1, chips=())
    assert {(check.status, check.finding) for check in checks} == {("skip", "no TPU chip on the PCI bus")}


def test_work_on_a_backend_that_computes_wrongly(tmp_path):
    """Plain torch dressed up as torch_xla: two devices, a graph per step, a matrix unit that is off by one."""
    fake = package(
        tmp_path,
        torch_xla="import torch\n__version__ = 'fake'\ndevice = lambda: torch.device('cpu')\ngraphs = 0\n"
        "def sync():\n    global graphs; graphs += 1\n"
        "torch.Tensor.cpu = lambda self: self + 1\n",
        torch_xla__runtime="use_spmd = lambda: None\nglobal_runtime_device_count = lambda: 2\n"
        "device_type = lambda: 'CPU'\n",
        torch_xla__distributed="",
        torch_xla__distributed__spmd="Mesh = lambda *a: None\n"
        "def mark_sharding(t, mesh, spec):\n    if t.dim() == 1 and t.is_floating_point(): t.data += 1\n",
        torch_xla__debug="",
        torch_xla__debug__metrics="import torch_xla\nmetric_data = lambda name: (torch_xla.graphs,)\n",
    )
    checks = work(fake)
    assert checks[0].status == "ok"
    assert_check(checks[1], "fail", "differs from numpy by", "expected at most 1e-05", fix="--force-reinstall")
    assert_check(checks[2], "fail", "3 training steps compiled 3 graphs, expected 1", fix="--force-reinstall")
    assert_check(checks[3], "fail", "the sum over 2 devices is 3.0, expected 1.0", fix="--force-reinstall")


def test_aot_that_dies(tmp_path):
    fake = package(tmp_path, torch="raise ImportError('undefined symbol: x')")
    check = setup_tpu.check_aot("v5litepod-8", clean_environment(fake), PATIENT)
    assert_check(check, "fail", "v5litepod-8: ", "undefined symbol: x")
    assert after_pip({}, check.fix) == INSTALLED


def test_what_a_child_reported_survives_its_death():
    source = 'import os; print(\'@@ ["a", "ok", "fine", ""]\', flush=True); os.abort()'
    child = setup_tpu.run_child(["-c", source], os.environ, PATIENT)
    assert child == ({"a": Check("a", "ok", "fine")}, "killed by SIGABRT")


# ---------------------------------------------------------------- the script, as users run it


def run_doctor(*arguments: str, environment: dict, python: tuple = (sys.executable,)):
    patient = [f"--time_limit={PATIENT}"] if "--json" in arguments else []
    command = [*python, str(SCRIPT), *arguments, *patient]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * PATIENT)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def report(done) -> dict:
    return {c["name"]: Check(**c) for c in json.loads(done.stdout)["checks"]}


def test_healthy_machine_as_json():
    done = run_doctor(
        "--device=cpu", "--json", "--aot", "v5litepod-8", environment=clean_environment(CPU_NUM_DEVICES="2")
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert list(found) == ["ok", "device", "seconds", "counts", "checks"]
    assert found["ok"] is True and found["device"] == "cpu" and found["counts"]["fail"] == 0
    assert all(set(c) == {"name", "status", "finding", "fix"} for c in found["checks"])
    assert all(bool(c["fix"]) == (c["status"] in ("warn", "fail")) for c in found["checks"])
    checks = report(done)
    assert checks["matrix product"].status == "ok"
    assert_check(checks["training step"], "ok", "3 steps, 1 compile")
    assert_check(checks["all-reduce"], "ok", "the sum over 2 devices is right")
    assert_check(checks["aot"], "ok", "v5e:2x4, 8 devices", "all-reduce")


def test_nothing_installed():
    done = run_doctor("--device", "cpu", environment={}, python=(sys.executable, "-I", "-S"))
    assert done.returncode == 1 and not done.stderr
    assert re.search(r"^fail  torch_xla +not installed, expected 2.9.0\n +fix: .* install ", done.stdout, re.M)
    assert re.search(r"^skip  training step +torch_xla is not installed$", done.stdout, re.M)


def test_torch_28_beside_torch_xla_29(tmp_path):
    dist_info(tmp_path, "torch", "2.8.0")
    package(tmp_path, torch="raise ImportError('_XLAC.so: undefined symbol: _ZN3c10')")  # what the mismatch does
    done = run_doctor("--device=cpu", "--json", environment=clean_environment(tmp_path))
    assert done.returncode == 1
    checks = report(done)
    assert_check(checks["torch"], "fail", "found 2.8.0 beside torch_xla 2.9.0", fix="torch==2.9.0")
    assert_check(checks["import"], "fail", "undefined symbol", fix="--force-reinstall")
    assert checks["training step"].status == "skip"


@pytest.mark.slow
def test_a_broken_libtpu_and_nonsense_flags_leave_the_cpu_at_work(tmp_path):
    (tmp_path / "libtpu.so").write_bytes(b"\x7fELF but not for long")
    environment = clean_environment(TPU_LIBRARY_PATH=str(tmp_path / "libtpu.so"), XLA_FLAGS="--nonsense")
    done = run_doctor("--device=cpu", "--aot=v5litepod-8", "--json", environment=environment)
    assert done.returncode == 1
    checks = report(done)
    assert_check(checks["libtpu.so"], "fail", "cannot be loaded", fix="unset TPU_LIBRARY_PATH")
    assert checks["aot"].status == "fail"
    assert_check(checks["environment"], "fail", "XLA_FLAGS is --nonsense", fix="unset XLA_FLAGS")
    assert checks["training step"].status == "ok"  # tried without the flags


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devcie", "cpu"], "unknown argument --devcie; did you mean --device?"),
        (["--time-limti=5"], "did you mean --time_limit?"),
        (["--device", "gpu"], "invalid choice: 'gpu'"),
        (["--aot", "v5litepod8"], "expected a TPU slice such as v5litepod-8"),
        (["--aot", "v5litepod-7"], "nearest is v5litepod-8"),
        (["--bucket", "my-bucket"], "expected gs://NAME"),
        (["--time-limit=0"], "expected more than 0 seconds"),
        (["--time_limit=0"], "expected more than 0 seconds"),
    ],
)
def test_wrong_usage(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["setup_tpu.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        setup_tpu.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and words in err and not out


# ---------------------------------------------------------------- the image (built for real by .ci/build_image)


def test_dockerfile_runs_the_doctor_and_never_probes_the_tpu():
    lines = SCRIPT.with_name("Dockerfile").read_text().splitlines()
    instructions = [line for line in lines if re.match("[A-Z]+ ", line)]
    assert instructions[:2] == ["ARG BASE_IMAGE=debian:bookworm-slim", "FROM ${BASE_IMAGE}"]
    assert instructions[-2:] == ["USER trainer", 'CMD ["python", "setup_tpu.py"]']
    assert not [line for line in instructions if line.startswith("HEALTHCHECK")]


def test_build_stage_says_loudly_that_it_cannot_build(tmp_path):
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    stage = SCRIPT.with_name(".ci") / "build_image"
    done = subprocess.run([str(stage)], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and not done.stdout
    assert "*** THE IMAGE WAS NOT BUILT: it needs root ***" in done.stderr
