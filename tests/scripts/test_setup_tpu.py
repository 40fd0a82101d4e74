"""The doctor: every check made to fail by the roots and environment it is given, then the script as users run it."""

import ast
import contextlib
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from metadata_server import metadata_server

import setup_tpu
from setup_tpu import SUPPORTED_PAIRS, Check, VersionPair
from tpu_utils.base import hardware

SCRIPT = Path(setup_tpu.__file__)
INSTALLED = {"torch": "2.9.0", "torch_xla": "2.9.0", "torchvision": "0.24.0", "libtpu": "0.0.21", "jax": "0.7.1"}
PATIENT = 600
"""Seconds for a child that is to answer: only a hang meets them, however busy the machine is."""
PIP_29 = f"{setup_tpu.PIP} install torch==2.9.0 'torch_xla[tpu,pallas]==2.9.0' torchvision==0.24.0"
PIP_28 = f"{setup_tpu.PIP} install torch==2.8.0 'torch_xla[tpu,pallas]==2.8.1' torchvision==0.23.0"
NO_TORCH_TPU = f"{setup_tpu.PIP} uninstall -y torch_tpu"
NEW_PYTHON = (
    "sudo apt-get install -y python3.11-venv libpython3.11 && python3.11 -m venv .venv "
    "&& .venv/bin/python -m pip install -r requirements.txt"
)
DOCKER = "docker run --privileged --net=host --shm-size=16G --ulimit memlock=-1 IMAGE"
GO_TO_TPU = "gcloud compute tpus tpu-vm ssh NAME --zone ZONE  # creating one: docs/tpu_vm.md"


def assert_check(check: Check, status: str, *words: str, fix: str = "") -> None:
    assert check.status == status, check
    for word in words:
        assert word in check.finding, check
    assert check.fix == fix


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


# ---------------------------------------------------------------- Python and packages


def test_the_table_is_what_requirements_pin():
    lines = SCRIPT.with_name("requirements.txt").read_text().splitlines()
    pinned = {line.partition("#")[0].strip() for line in lines}
    assert set(SUPPORTED_PAIRS[0].pip.replace("'", "").split()) <= pinned
    second = next(line for line in lines if "second supported pair" in line)
    assert SUPPORTED_PAIRS[1].pip.replace("'", "") in second
    assert SUPPORTED_PAIRS[0].torch == "2.9.0" and isinstance(SUPPORTED_PAIRS[1], VersionPair)


def test_the_other_tables_agree():
    """The doctor runs alone, so it holds a copy of what it needs of the one table of generations."""
    known = {generation.pci_id: generation.name for generation in hardware.GENERATIONS.values()}
    assert {i: kind for i, kind in setup_tpu.TPU_PCI_IDS.items() if kind != "v2/v3"} == known
    assert setup_tpu.TPU_VENDOR == hardware.GOOGLE_PCI_VENDOR


def test_only_the_standard_library_at_module_level_and_syntax_of_old_pythons():
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 8))
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    roots = {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).split(".")[0] for n in imports}
    assert roots <= sys.stdlib_module_names


def test_python_version():
    assert_check(setup_tpu.check_python((3, 11, 7), {}), "ok", "3.11.7")
    fix = NEW_PYTHON + "  # or Docker, or uv: docs/tpu_vm.md"
    assert_check(
        setup_tpu.check_python((3, 10, 13), {}), "fail", "3.10.13", "2.9.0 with", "needs 3.11 to 3.12", fix=fix
    )
    assert_check(setup_tpu.check_python((3, 13, 0), {}), "fail", "found 3.13.0", fix=fix)
    assert_check(setup_tpu.check_python((3, 13, 0), {"libtpu": "0.0.21.1"}), "ok", "3.11 to 3.13")  # as Colab has it
    older = {"torch_xla": "2.8.1"}
    assert_check(setup_tpu.check_python((3, 10, 1), older), "fail", "2.8.* with its jax and libtpu needs 3.11", fix=fix)


def test_versions_come_from_metadata_even_of_broken_installs(tmp_path):
    dist_info(tmp_path / "first", "torch", "2.8.0")
    dist_info(tmp_path / "second", "torch", "2.9.0")
    dist_info(tmp_path / "second", "torch-xla", "2.9.0")
    (tmp_path / "second" / "libtpu-0.0.21.dist-info").mkdir()
    found = setup_tpu.installed_versions([str(tmp_path / "first"), str(tmp_path / "second")])
    assert found == {"torch": "2.8.0", "torch_xla": "2.9.0"}


@pytest.mark.parametrize(
    ("name", "changed", "words", "fix"),
    [
        ("torch", {"torch": "2.8.0"}, ("found 2.8.0 beside torch_xla 2.9.0", "expected 2.9.0"), PIP_29),
        ("torch_xla", {"torch_xla": "2.7.0"}, ("found 2.7.0", "expected 2.9.0"), PIP_29),
        ("torch_xla", {"torch_tpu": "0.1"}, ("torch_tpu 0.1 is installed beside",), f"{NO_TORCH_TPU} && {PIP_29}"),
        ("torchvision", {"torchvision": "0.19.0"}, ("found 0.19.0", "expected 0.24.*"), PIP_29),
        ("libtpu", {"libtpu": "0.0.17"}, ("found 0.0.17", "expected 0.0.21"), PIP_29),
        ("jax", {"jax": "0.8.0"}, ("found 0.8.0", "expected 0.7.1"), PIP_29),
        ("jax", {"torch": "2.8.0", "torch_xla": "2.8.1"}, ("found 0.7.1", "expected 0.6.2"), PIP_28),
    ],
)
def test_mismatched_package(name, changed, words, fix):
    assert_check(setup_tpu.check_package(name, INSTALLED | changed, needed=True), "fail", *words, fix=fix)


H200 = "NVIDIA H200, 580.159.04, 512, 143771"


@pytest.mark.parametrize(
    "answer, installed, build, status, said",
    [
        (
            H200,
            {"torch": "2.11.0+cu130"},
            "cuda: Optional[str] = '13.0'",
            "ok",
            "0.5 of 140 GiB in use; torch 2.11.0+cu",
        ),
        (H200, {"torch": "2.11.0+cpu"}, "cuda: Optional[str] = None", "fail", "torch 2.11.0+cpu is built without CUDA"),
        (H200, INSTALLED, "", "ok", "driver 580.159.04, 0.5 of 140 GiB in use; only the torch.compile backend uses it"),
        (H200.replace("512", "90000"), {"torch": "2.13.0"}, "cuda: str = '13.0'", "warn", "87.9 of 140 GiB in use"),
        ("No devices were found", {"torch": "2.13.0"}, "", "fail", "its driver does not answer nvidia-smi"),
    ],
)
def test_a_gpu(answer, installed, build, status, said, tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"{build}\n")
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert setup_tpu.check_gpu(tmp_path, [str(tmp_path)], installed, PATIENT).status == "skip"
    (tmp_path / "nvidia0").touch()
    found = setup_tpu.check_gpu(tmp_path, [str(tmp_path)], installed, PATIENT)
    assert found.status == status and said in found.finding, found


def test_missing_and_matching_packages():
    assert_check(setup_tpu.check_package("torch_xla", {}, needed=True), "fail", "not installed", fix=PIP_29)
    assert_check(setup_tpu.check_package("jax", {}, needed=False), "warn", "not installed", fix=PIP_29)
    assert_check(setup_tpu.check_package("torch", INSTALLED | {"torch": "2.9.0+cpu"}, needed=True), "ok", "2.9.0+cpu")
    older = {"torch": "2.8.0", "torch_xla": "2.8.1"}
    assert_check(setup_tpu.check_package("torch_xla", older, needed=True), "ok", "2.8.1")


def test_full_tensorflow():
    fix = f"{setup_tpu.PIP} uninstall -y tensorflow && {setup_tpu.PIP} install tensorflow-cpu"
    found = {"tensorflow": "2.19.0"}
    assert_check(
        setup_tpu.check_tensorflow(found, wants_tpu=True), "fail", "tensorflow 2.19.0 is installed beside", fix=fix
    )
    assert setup_tpu.check_tensorflow(found, wants_tpu=False).status == "warn"
    assert setup_tpu.check_tensorflow({"tensorflow_cpu": "2.19.0"}, wants_tpu=True).status == "ok"


def test_broken_libtpu(tmp_path):
    reinstall = f"{setup_tpu.PIP} install --force-reinstall --no-deps libtpu==0.0.21"
    library = package(tmp_path, libtpu="") / "libtpu" / "libtpu.so"
    library.write_bytes(b"half a download")
    assert setup_tpu.find_libtpu({}, [str(tmp_path)]) == library
    check = setup_tpu.check_libtpu(library, {}, INSTALLED, False, PATIENT)
    assert_check(check, "fail", f"{library} cannot be loaded", fix=reinstall)

    check = setup_tpu.check_libtpu(None, {}, {}, True, PATIENT)
    assert_check(check, "fail", "no libtpu.so found", fix=reinstall)

    environment = {"TPU_LIBRARY_PATH": str(tmp_path / "gone.so")}
    gone = setup_tpu.find_libtpu(environment, [str(tmp_path)])
    check = setup_tpu.check_libtpu(gone, environment, INSTALLED, False, PATIENT)
    assert_check(check, "fail", "TPU_LIBRARY_PATH says", "not a file", fix="unset TPU_LIBRARY_PATH")


# ---------------------------------------------------------------- the chip


def pci_device(sys_root: Path, slot: str, vendor: str, device: str) -> None:
    folder = sys_root / "bus" / "pci" / "devices" / slot
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "device").write_text(device + "\n")


def test_chips_on_the_bus(tmp_path):
    pci_device(tmp_path, "0000:00:04.0", "0x1ae0", "0x0042")  # Google's network card
    pci_device(tmp_path, "0000:00:05.0", "0x8086", "0x0063")
    check = setup_tpu.check_chips(setup_tpu.find_chips(tmp_path), True, "")
    assert_check(check, "fail", "none on the PCI bus (vendor 0x1ae0)", fix=GO_TO_TPU)
    pci_device(tmp_path, "0000:00:06.0", "0x1ae0", "0x0063")
    pci_device(tmp_path, "0000:00:07.0", "0x1ae0", "0x0063")
    check = setup_tpu.check_chips(setup_tpu.find_chips(tmp_path), True, "")
    assert_check(check, "ok", "2 on the PCI bus (vendor 0x1ae0): v5e")


def test_chips_that_the_scripts_do_not_know_are_named(tmp_path):
    pci_device(tmp_path, "0000:00:06.0", "0x1ae0", "0x0027")
    chips = setup_tpu.find_chips(tmp_path)
    check = setup_tpu.check_chips(chips, True, "")
    fix = "gcloud compute tpus accelerator-types list --zone ZONE  # what else there is: docs/tpu_vm.md"
    assert_check(check, "fail", "v2/v3; these scripts know v4 and later", fix=fix)
    assert setup_tpu.check_chips(chips, False, "").status == "warn"


@pytest.mark.parametrize(
    ("device", "environment", "chips", "libtpu", "words", "fix"),
    [
        ("auto", {"PJRT_DEVICE": "CPU"}, ["v5e"], True, "PJRT_DEVICE=CPU is set", "export PJRT_DEVICE=TPU"),
        ("tpu", {"PJRT_DEVICE": "CPU"}, ["v5e"], True, "silently run on the CPU", "export PJRT_DEVICE=TPU"),
        ("auto", {}, ["v5e"], False, "libtpu was not found", PIP_29),
        ("auto", {"PJRT_DEVICE": "TPU"}, [], True, "this machine has no TPU chip", "export PJRT_DEVICE=CPU"),
        ("auto", {"PJRT_DEVICE": "GPU"}, [], True, "PJRT_DEVICE=GPU is set; expected", "export PJRT_DEVICE=CPU"),
        ("auto", {"PJRT_SELECT_DEFAULT_DEVICE": "0"}, ["v4"], True, "forbids choosing", "export PJRT_DEVICE=TPU"),
    ],
)
def test_pjrt_device_refused(device, environment, chips, libtpu, words, fix):
    assert_check(setup_tpu.check_pjrt_device(device, environment, chips, libtpu), "fail", words, fix=fix)


def test_pjrt_device_chosen():
    assert_check(setup_tpu.check_pjrt_device("auto", {}, ["v5e"], True), "ok", "TPU: a TPU chip and libtpu were found")
    assert setup_tpu.check_pjrt_device("auto", {}, [], True).status == "warn"
    assert setup_tpu.check_pjrt_device("cpu", {}, ["v5e"], True).status == "ok"
    assert_check(setup_tpu.check_pjrt_device("tpu", {}, [], True), "skip", "see tpu chips")  # which fails, once


def test_device_nodes(tmp_path):
    def check(container=""):
        return setup_tpu.check_device_nodes(tmp_path, ["v5e", "v5e"], os.getuid() + 1, container)

    assert_check(check(), "fail", "2 chips but 0 nodes", fix="sudo reboot")
    assert_check(check("container"), "fail", "2 chips but 0 nodes", fix=DOCKER)
    for i in range(2):
        (tmp_path / f"accel{i}").touch(0o600)
    names = f"{tmp_path}/accel0 {tmp_path}/accel1"
    assert_check(check(), "fail", "may not open", names.replace(" ", ", "), fix=f"sudo chmod a+rw {names}")
    assert (
        check("container").fix
        == "docker run --privileged --net=host --shm-size=16G --ulimit memlock=-1 --user root IMAGE"
    )
    for i in range(2):
        (tmp_path / f"accel{i}").chmod(0o666)
    assert_check(check(), "ok", "accel0", "open to user")


def test_vfio_nodes_need_the_control_node_too(tmp_path):
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "0").touch(0o666)
    (tmp_path / "vfio" / "0").chmod(0o666)
    (tmp_path / "vfio" / "vfio").touch(0o600)
    check = setup_tpu.check_device_nodes(tmp_path, ["v6e"], os.getuid() + 1, "")
    assert_check(check, "fail", "vfio/vfio", fix=f"sudo chmod a+rw {tmp_path}/vfio/vfio")


def test_locked_memory(tmp_path):
    def check(allowed: int, where: str = "", chips: tuple = ("v6e",)) -> Check:
        return setup_tpu.check_locked_memory(tmp_path, list(chips), allowed, where)

    (tmp_path / "accel0").touch()
    assert check(0).status == "skip"
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "0").touch()
    assert check(0, chips=()).status == "skip"
    fix = "sudo prlimit --memlock=unlimited:unlimited --pid $$  # in a systemd unit: LimitMEMLOCK=infinity"
    assert_check(check(2**23), "warn", "up to 8 MiB, expected at least 1 GiB", fix=fix)
    assert "--ulimit memlock=-1" in check(2**23, "container").fix and "privileged: true" in check(2**23, "GKE").fix
    assert check(2**30).status == "ok"
    assert_check(check(resource.RLIM_INFINITY), "ok", "without limit")


@pytest.mark.parametrize("node", ["/dev/accel0", "/dev/vfio/1", "LOCK"])
def test_process_that_holds_the_tpu_is_named(tmp_path, node):
    lock = tmp_path / "libtpu_lockfile"
    lock.touch()
    (tmp_path / "proc" / "4242" / "fd").mkdir(parents=True)
    (tmp_path / "proc" / "4242" / "cmdline").write_bytes(b"python\0train.py\0--steps=9\0")
    (tmp_path / "proc" / "4242" / "fd" / "7").symlink_to(lock if node == "LOCK" else node)
    check = setup_tpu.check_holder(tmp_path / "proc", lock, ["v5e"], os.getuid(), True, "")
    fix = "kill 4242  # once you know whose work it is"
    assert_check(check, "fail", "pid 4242 (python train.py --steps=9)", "open", fix=fix)
    assert lock.exists()


def test_lock_file_of_another_user(tmp_path):
    lock = tmp_path / "libtpu_lockfile"
    lock.touch(0o600)
    check = setup_tpu.check_holder(tmp_path / "proc", lock, ["v5e"], os.getuid() + 1, True, "")
    assert_check(check, "fail", f"belongs to user {os.getuid()}", fix=f"sudo chmod a+rw {lock}")
    lock.chmod(0o666)
    check = setup_tpu.check_holder(tmp_path / "proc", lock, ["v5e"], os.getuid() + 1, True, "")
    assert_check(check, "ok", "no process seen to hold the TPU")


# ---------------------------------------------------------------- the cloud


@pytest.fixture
def metadata():
    """The pages of a metadata server, and its address."""
    with metadata_server() as server:
        yield server.pages, server.url


def four_hosts(pages: dict, index: object = 1) -> None:
    pages["tpu-env"] = f"ACCELERATOR_TYPE: 'v5litepod-16'\nWORKER_ID: '{index}'\n"
    pages["worker-network-endpoints"] = ",".join(f"host-{i}:uid:10.0.0.{i}" for i in range(4))


def cloud(environment: dict, url: str, where: str = "", wants_tpu: bool = True) -> tuple[dict[str, Check], dict]:
    checks, added = setup_tpu.check_cloud(environment, url, ["v5e"] * 8, where, wants_tpu)
    return {check.name: check for check in checks}, added


def test_metadata_that_is_not_there(metadata):
    _, url = metadata
    alone = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "0", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
    words = "one host without word of others needs "
    words += "TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_WORKER_ID=0"
    checks, added = cloud({}, url)
    assert_check(checks["metadata"], "ok", "404", words)
    assert checks["hosts"].status == "skip" and added == alone
    for where in ("Colab", "Kaggle", "GKE"):
        checks, added = cloud({}, "http://127.0.0.1:9/", where)
        assert_check(checks["metadata"], "ok", "refused", words)
        assert checks["surroundings"].finding == ("Kubernetes" if where == "GKE" else where) and added == alone

    checks, added = cloud({}, "http://127.0.0.1:9/")  # a TPU VM has one: nobody knows whether there are other hosts
    assert_check(checks["metadata"], "fail", "refused", fix=GO_TO_TPU)
    assert not added
    assert_check(cloud({}, "http://127.0.0.1:9/", "container")[0]["metadata"], "fail", "refused", fix=DOCKER)
    assert cloud({}, "http://127.0.0.1:9/", wants_tpu=False)[0]["metadata"].status == "skip"
    several = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "2", "TPU_ACCELERATOR_TYPE": "v5litepod-16"}
    checks, added = cloud(several, url, "GKE")
    assert_check(checks["metadata"], "fail", "404", fix="export TPU_SKIP_MDS_QUERY=1")
    assert not added


def test_metadata_replaced_by_variables():
    checks, _ = cloud({"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "0"}, "http://127.0.0.1:9/")
    words = ("not asked", "but not TPU_ACCELERATOR_TYPE")
    assert_check(checks["metadata"], "fail", *words, fix="unset TPU_SKIP_MDS_QUERY")


def test_host_index_out_of_range(metadata):
    pages, url = metadata
    fix = "export TPU_WORKER_ID=0  # the position in TPU_WORKER_HOSTNAMES"
    for variables in ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "2"}, {"TPU_WORKER_HOSTNAMES": "a,b"}):
        assert_check(cloud(variables, url)[0]["hosts"], "fail", "expected a number from 0 to 1", fix=fix)
    four_hosts(pages, index=7)
    assert_check(cloud({}, url)[0]["hosts"], "fail", "host index '7'", "0 to 3", fix=fix)


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


@pytest.mark.parametrize(
    ("variables", "marked", "where"),
    [
        ({}, False, ""),
        ({}, True, "container"),
        ({"COLAB_RELEASE_TAG": "release-colab_20261101"}, True, "Colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "made from"}, True, "Kaggle"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False, "GKE"),
    ],
)
def test_surroundings(tmp_path, variables, marked, where):
    if marked:
        (tmp_path / ".dockerenv").touch()
    assert setup_tpu.find_surroundings(tmp_path, variables) == where


FAKE_STORAGE = """
class NotFound(Exception): pass
class DefaultCredentialsError(Exception): pass
class Client:
    def __init__(self, project): pass
    def bucket(self, name): return self
    def test_iam_permissions(self, wanted, timeout): {body}
"""


@pytest.mark.parametrize(
    ("body", "status", "words", "fix"),
    [
        ("return wanted", "ok", "may be read and written", ""),
        (
            "return [w for w in wanted if 'create' not in w]",
            "fail",
            "lack storage.objects.create",
            "gcloud storage buckets add-iam-policy-binding gs://b --role=roles/storage.objectAdmin --member=YOU",
        ),
        ("raise NotFound('404 POST b')", "fail", "gs://b does not exist", "gcloud storage buckets create gs://b"),
        (
            "raise DefaultCredentialsError('no credentials were found')",
            "fail",
            "no credentials were found",
            "gcloud auth application-default login",
        ),
    ],
)
def test_bucket(tmp_path, body, status, words, fix):
    fake = package(tmp_path, google="", google__cloud="", google__cloud__storage=FAKE_STORAGE.format(body=body))
    have = {"google_cloud_storage": "3"}
    check = setup_tpu.check_bucket("gs://b/runs", have, clean_environment(fake), PATIENT)
    assert_check(check, status, "gs://b", words, fix=fix)


def test_bucket_without_the_library():
    check = setup_tpu.check_bucket("gs://b", {}, {}, PATIENT)
    assert_check(check, "fail", "not installed", fix=f"{setup_tpu.PIP} install google-cloud-storage")


def test_bucket_with_the_real_library_and_no_credentials():
    environment = clean_environment(GOOGLE_APPLICATION_CREDENTIALS="/nonexistent/key.json")
    check = setup_tpu.check_bucket("gs://some-bucket", {"google_cloud_storage": "3"}, environment, 40)
    fix = "gcloud auth application-default login"
    assert_check(check, "fail", "DefaultCredentialsError", "/nonexistent/key.json", fix=fix)


# ---------------------------------------------------------------- memory, environment, container


def test_memory(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:   8388608 kB\n")
    assert_check(setup_tpu.check_memory(tmp_path, tmp_path, 2), "ok", "16.0 GiB, 8.0 available")
    fix = "ps aux --sort=-rss | head"
    assert_check(setup_tpu.check_memory(tmp_path, tmp_path, 9), "fail", "expected 9 free", fix=fix)
    (tmp_path / "fs" / "cgroup").mkdir(parents=True)
    (tmp_path / "fs" / "cgroup" / "memory.max").write_text(f"{2**30}\n")
    assert_check(setup_tpu.check_memory(tmp_path, tmp_path, 2), "fail", "limited to 1.0 by cgroup", fix=fix)


def test_shared_memory(tmp_path):
    mount = f"sudo mount -o remount,size=16G {tmp_path}/shm"
    check = setup_tpu.check_shared_memory(tmp_path, 1, "")
    assert_check(check, "warn", "does not exist", fix=mount)
    (tmp_path / "shm").mkdir()
    check = setup_tpu.check_shared_memory(tmp_path, 1e6, "")
    assert_check(check, "warn", "expected at least 1e+06", fix=mount)
    assert setup_tpu.check_shared_memory(tmp_path, 1e6, "container").fix == DOCKER


def test_container(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("CapBnd:\t00000000a80425fb\n")  # docker's default
    (tmp_path / "class" / "net" / "eth0").mkdir(parents=True)
    check = setup_tpu.check_container(tmp_path, tmp_path, "container", wants_tpu=True)
    assert_check(check, "fail", "not privileged", "not on the network of the host", fix=DOCKER)
    assert setup_tpu.check_container(tmp_path, tmp_path, "container", wants_tpu=False).status == "skip"
    (tmp_path / "self" / "status").write_text("CapBnd:\t000001ffffffffff\n")
    check = setup_tpu.check_container(tmp_path, tmp_path, "container", wants_tpu=True)
    assert_check(check, "fail", "not on the network of the host", fix=DOCKER)
    assert "privileged" not in check.finding
    (tmp_path / "class" / "net" / "eth0" / "device").mkdir()
    check = setup_tpu.check_container(tmp_path, tmp_path, "container", wants_tpu=True)
    assert_check(check, "ok", "privileged, on the network of the host")


@pytest.mark.parametrize(
    ("name", "value", "status", "words"),
    [
        ("XRT_TPU_CONFIG", "localservice;0", "warn", "XRT is gone"),
        ("TPU_NUM_DEVICES", "4", "warn", "TPU_VISIBLE_CHIPS selects chips"),
        ("XLA_USE_FP16", "1", "warn", "read by nobody"),
        ("XLA_DOWNCAST_FP16", "1", "warn", "read by nobody"),
        ("PT_XLA_DEBUG", "1", "warn", "use PT_XLA_DEBUG_LEVEL"),
        ("XLA_PERSISTENT_CACHE_PATH", "/tmp/cache", "warn", "fail to load it and compile it again: time and disk"),
        ("XLA_USE_BF16", "1", "fail", "behind torch's back"),
        ("XLA_DOWNCAST_BF16", "1", "fail", "behind torch's back"),
        ("XLA_USE_SPMD", "1", "fail", "use_spmd()"),
        ("PYTHONSAFEPATH", "1", "fail", "No module named 'config'"),
        ("CPU_NUM_DEVICES", "four", "fail", "expected a number of devices"),
    ],
)
def test_stale_variable(name, value, status, words):
    check = setup_tpu.check_environment({"HOME": "/", name: value})
    assert_check(check, status, f"{name}={value}", words, fix=f"unset {name}")


def test_harmless_variables():
    live = {"XLA_USE_BF16": "0", "TPU_VISIBLE_CHIPS": "0", "TPU_PROCESS_BOUNDS": "1,1,1", "CPU_NUM_DEVICES": "4"}
    assert setup_tpu.check_environment(live).status == "ok"


def abort_with(*lines: str) -> str:
    return f"import os\ndef _init_computation_client():\n    os.write(2, {chr(10).join(lines).encode()!r}); os.abort()"


@pytest.mark.parametrize(
    ("flags", "lines", "words", "fix"),
    [
        (
            "--xla_dump_to=/d --nonsense",
            ["2026-01-01 00:00:00.1: F external/x.cc:234] Unknown flag in XLA_FLAGS: --nonsense"],
            "would abort every program: Unknown flag in XLA_FLAGS: --nonsense",
            "export XLA_FLAGS='--xla_dump_to=/d'",
        ),
        (
            "--xla_tpu_x=1",
            ["2026-01-01 00:00:00.1: F external/x.cc:234] Unknown flag in XLA_FLAGS: --xla_tpu_x=1"],
            "--xla_tpu_x=1",
            "unset XLA_FLAGS && export LIBTPU_INIT_ARGS='--a=1 --xla_tpu_x=1'",
        ),
        (
            "--xla_known=maybe",
            [
                "2026-01-01 00:00:00.1: E external/f.cc:109] Couldn't interpret value maybe for flag xla_known.",
                "2026-01-01 00:00:00.1: F external/x.cc:220] Check failed: Flag parsing failed.",
                "usage: --xla_known=maybe",
            ],
            "Couldn't interpret value maybe for flag xla_known.",
            "unset XLA_FLAGS",
        ),
    ],
)
def test_xla_flags_that_would_abort(tmp_path, flags, lines, words, fix):
    fake = package(tmp_path, torch="", _XLAC=abort_with(*lines))
    environment = clean_environment(fake, XLA_FLAGS=flags, LIBTPU_INIT_ARGS="--a=1")
    assert_check(setup_tpu.check_xla_flags(environment, INSTALLED, PATIENT), "fail", words, fix=fix)


def test_xla_flags_that_cannot_be_tried(tmp_path):
    fake = package(tmp_path, torch="raise ImportError('no libtorch')")
    check = setup_tpu.check_xla_flags(clean_environment(fake, XLA_FLAGS="--a"), INSTALLED, PATIENT)
    assert_check(check, "skip", "cannot be tried", "no libtorch")
    assert setup_tpu.check_xla_flags({"XLA_FLAGS": "--a"}, {}, PATIENT).status == "skip"


# ---------------------------------------------------------------- real work, on backends that are broken

REINSTALL = PIP_29.replace(" install ", " install --force-reinstall ", 1)


def test_work_that_aborts_or_hangs(tmp_path):
    fatal = "import os\nos.write(2, b'2026-01-01 0:0:0.1: F a.cc:1] Check failed: chip'); os.abort()"
    fake = package(tmp_path / "abort", torch="", torch_xla=fatal)
    first, *rest = setup_tpu.check_work("tpu", clean_environment(fake), INSTALLED, PATIENT, ["v5e"])
    assert_check(first, "fail", "Check failed: chip", fix=REINSTALL)
    assert [(c.status, c.finding) for c in rest] == [("skip", "not reached")] * 3

    fake = package(tmp_path / "hang", torch="import time; time.sleep(60)", torch_xla="")
    first, *_ = setup_tpu.check_work("tpu", clean_environment(fake), INSTALLED, 1, ["v5e"])
    fix = f"{setup_tpu.PYTHON} setup_tpu.py --time_limit 4  # several hosts: start it on all of them at once"
    assert_check(first, "fail", "no answer within 1 s", fix=fix)
    checks = setup_tpu.check_work("tpu", clean_environment(fake), INSTALLED, 1, [])
    assert {(check.status, check.finding) for check in checks} == {("skip", "no TPU chip on the PCI bus")}


def test_debian_python_without_its_shared_library(tmp_path):
    message = "libpython3.11.so.1.0: cannot open shared object file: No such file or directory"
    fake = package(tmp_path, torch="", torch_xla=f"raise ImportError({message!r})")
    first, *_ = setup_tpu.check_work("cpu", clean_environment(fake), INSTALLED, PATIENT, ["v5e"])
    assert_check(first, "fail", message, fix="sudo apt-get install -y libpython3.11")


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
    checks = setup_tpu.check_work("cpu", clean_environment(fake), INSTALLED, PATIENT, ["v5e"])
    assert checks[0].status == "ok"
    assert_check(checks[1], "fail", "differs from numpy by", "expected at most 1e-05", fix=REINSTALL)
    assert_check(checks[2], "fail", "3 training steps compiled 3 graphs, expected 1", fix=REINSTALL)
    assert_check(checks[3], "fail", "the sum over 2 devices is 3.0, expected 1.0", fix=REINSTALL)


def test_aot_without_its_packages():
    check = setup_tpu.check_aot("v5litepod-8", {}, {"torch_xla": "2.9.0"}, PATIENT)
    assert_check(check, "fail", "needs libtpu, jax, not installed", fix=PIP_29)


def test_doctor_copied_alone(tmp_path):
    (tmp_path / "setup_tpu.py").write_text(SCRIPT.read_text())
    source = "import setup_tpu; print(*setup_tpu.check_aot('v5litepod-8', {}, {}, 20))"
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
    assert done.stdout.startswith("aot skip tpu_compiler/, which asks the compiler, is not beside setup_tpu.py")


def test_aot_that_dies(tmp_path):
    fake = package(tmp_path, torch="raise ImportError('undefined symbol: x')")
    check = setup_tpu.check_aot("v5litepod-8", clean_environment(fake), INSTALLED, PATIENT)
    assert_check(check, "fail", "v5litepod-8: ", "undefined symbol: x", fix=PIP_29)


def test_what_a_child_reported_survives_its_death():
    source = 'import os; print(\'@@ ["a", "ok", "fine", ""]\', flush=True); os.abort()'
    child = setup_tpu.run_child(["-c", source], os.environ, PATIENT)
    assert child == ({"a": Check("a", "ok", "fine")}, "killed by SIGABRT")


# ---------------------------------------------------------------- whole machines, pretended

GCLOUD = "gcloud compute tpus"
DELETE = f"{GCLOUD} queued-resources delete REQUEST --zone ZONE --force  # then create it again"
NOTICE_FIXES = {
    "preempted": f"{DELETE}; a run goes on with --resume auto",
    "maintenance-event": f"{GCLOUD} tpu-vm describe NAME --zone ZONE"
    "  # until it is READY again; a run saves at the notice, and goes on with --resume auto",
}
COLAB, KAGGLE = {"COLAB_RELEASE_TAG": "release-colab_20261101-060000_RC00"}, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
GKE = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TPU_SKIP_MDS_QUERY": "true", "TPU_ACCELERATOR_TYPE": "v5litepod-32"}
GKE["TPU_WORKER_HOSTNAMES"] = ",".join(f"job-0-{i}.svc" for i in range(4))
ELSEWHERE = f"{setup_tpu.PYTHON} -m venv .venv_xla && .venv_xla/bin/python -m pip install -r requirements.txt"
COLAB_MENU = "in the notebook's menu: Runtime > Change runtime type > TPU"


class Machine:
    """A healthy v5litepod-8 VM with everything installed; each test breaks one thing."""

    def __init__(self, root: Path, pages: dict):
        self.root, self.pages, self.environment = root, pages, {}
        self.installed, self.version, self.uid, self.device = dict(INSTALLED), (3, 11, 7), 1000, "auto"
        self.silent, self.reports = set(), {}
        pages["tpu-env"] = "ACCELERATOR_TYPE: 'v5litepod-8'\nWORKER_ID: '0'\n"
        pages["worker-network-endpoints"] = "t1v-n-0:uid:10.0.0.1"
        pages |= {"preempted": "FALSE", "maintenance-event": "NONE"}
        for i in range(8):
            pci_device(root / "sys", f"0000:00:0{i}.0", "0x1ae0", "0x0063")
        (root / "sys/class/net/ens8/device").mkdir(parents=True)
        (root / "dev/shm").mkdir(parents=True)
        self.nodes = [root / f"dev/accel{i}" for i in range(8)]
        for node in self.nodes:
            node.touch()
            node.chmod(0o666)
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/meminfo").write_text("MemTotal: 200000000 kB\nMemAvailable: 190000000 kB\n")
        (root / "proc/self/status").write_text("CapBnd:\t000001ffffffffff\n")

    def no_metadata(self) -> None:
        self.pages.clear()

    def no_chips(self) -> None:
        shutil.rmtree(self.root / "sys/bus")

    def in_container(self, privileged: bool = True) -> None:
        (self.root / ".dockerenv").touch()
        if not privileged:
            (self.root / "proc/self/status").write_text("CapBnd:\t00000000a80425fb\n")
            for node in self.nodes:
                node.unlink()

    def doctor(self, monkeypatch, url: str) -> dict[str, Check]:
        """The whole report. No child is started: this machine computes rightly once the doctor lets it."""
        packages = self.root / "packages"
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
            self.child_environment = environment
            names = ("import", "matrix product", "training step", "all-reduce")
            return {name: Check(name, "ok", "") for name in names}, ""

        monkeypatch.setattr(setup_tpu, "METADATA_URL", url)
        monkeypatch.setattr(setup_tpu, "run_child", child)
        monkeypatch.setattr(socket, "create_connection", connect_or_not)
        monkeypatch.setattr(os, "getuid", lambda: self.uid)
        monkeypatch.setattr(sys, "version_info", self.version)
        options = setup_tpu.parse_arguments(["--device", self.device])
        checks = list(setup_tpu.diagnose(options, self.environment, self.root, [str(packages)]))
        return {check.name: check for check in checks}


def break_busy(machine: Machine) -> None:
    (machine.root / "proc/4242/fd").mkdir(parents=True)
    (machine.root / "proc/4242/cmdline").write_bytes(b"python\0train.py\0")
    (machine.root / "proc/4242/fd/7").symlink_to("/dev/accel0")


def break_nodes(machine: Machine) -> None:
    for node in machine.nodes:
        node.chmod(0o600)


def break_host(machine: Machine) -> None:
    four_hosts(machine.pages)
    machine.silent = {"10.0.0.3"}


def python_310(machine: Machine) -> None:
    machine.version, machine.installed = (3, 10, 13), {}


def only_torch_tpu(machine: Machine) -> None:
    machine.installed = {"torch": "2.11.0", "torch_tpu": "0.2.0", "libtpu": "0.0.21"}


def colab(machine: Machine) -> None:
    machine.environment = dict(COLAB)
    machine.no_metadata()
    machine.in_container()


def colab_without_tpu(machine: Machine) -> None:
    colab(machine)
    machine.no_chips()
    machine.device = "tpu"


def container_without_tpu(machine: Machine) -> None:
    machine.in_container()
    machine.no_metadata()
    machine.no_chips()
    machine.device = "tpu"


def kaggle(machine: Machine) -> None:
    machine.environment = {**KAGGLE, "TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"}
    machine.no_metadata()
    machine.in_container()
    machine.installed["tensorflow"] = "2.19.0"


def gke(machine: Machine, index: int = 4) -> None:
    machine.environment = {**GKE, "TPU_WORKER_ID": str(index)}
    machine.no_metadata()
    machine.in_container()


def silent_pod(machine: Machine) -> None:
    gke(machine, index=0)
    machine.silent = {"job-0-2.svc"}


MACHINES = [  # what is broken -> every check that is no "ok": (status, words of its finding, its fix)
    ("healthy v5litepod-8", lambda m: None, {}),
    (
        "Python 3.10, as the VM's image brings it",
        python_310,
        {"python": ("fail", "found 3.10.13, torch_xla 2.9.0 with its jax and libtpu needs 3.11 to 3.12", NEW_PYTHON)}
        | dict.fromkeys(("torch", "torch_xla", "libtpu"), ("fail", "not installed", NEW_PYTHON))
        | dict.fromkeys(("torchvision", "jax"), ("warn", "not installed", NEW_PYTHON))
        | {"libtpu.so": ("fail", "no libtpu.so found", NEW_PYTHON)}
        | {"pjrt device": ("fail", "libtpu was not found", NEW_PYTHON)},
    ),
    (
        "chips busy",
        break_busy,
        {"tpu holder": ("fail", "pid 4242 (python train.py) has /dev/accel0 open", "kill 4242  # once you know")},
    ),
    (
        "no permission",
        break_nodes,
        {"device nodes": ("fail", "user 1000 may not open", "sudo chmod a+rw {root}/dev/accel0 {root}/dev/accel1 ")},
    ),
    (
        "4 hosts with one silent",
        break_host,
        {
            "hosts": (
                "warn",
                "4, this is index 1; silent, or behind a firewall: index 3, 10.0.0.3 (timed out)",
                f"{GCLOUD} tpu-vm ssh NAME --zone ZONE --worker=3",
            )
        },
    ),
    (
        "a spot VM that is taken back",
        lambda m: m.pages.update(preempted="TRUE"),
        {"notices": ("warn", "preempted = TRUE: this machine is about to go", NOTICE_FIXES["preempted"])},
    ),
    (
        "maintenance announced",
        lambda m: m.pages.update({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}),
        {"notices": ("warn", "maintenance-event = TERMINATE_ON", NOTICE_FIXES["maintenance-event"])},
    ),
    (
        "compile cache set",
        lambda m: m.environment.update(XLA_PERSISTENT_CACHE_PATH="/tmp/cache"),
        {"environment": ("warn", "fail to load it and compile it again", "unset XLA_PERSISTENT_CACHE_PATH")},
    ),
    (
        "torch_tpu beside torch_xla",
        lambda m: m.installed.update(torch_tpu="0.2.0"),
        {"torch_xla": ("fail", "torch_tpu 0.2.0 is installed beside torch_xla", f"{NO_TORCH_TPU} && {PIP_29}")},
    ),
    (
        "torch_tpu alone",
        only_torch_tpu,
        {"torch_xla": ("fail", "without torch_xla; these scripts need torch_xla 2.9.0: docs/torchtpu.md", ELSEWHERE)}
        | {"torch": ("fail", "found 2.11.0", ELSEWHERE)}
        | dict.fromkeys(("torchvision", "jax"), ("warn", "not installed", ELSEWHERE)),
    ),
    ("Colab", colab, {}),
    (
        "container on a machine without chips",
        container_without_tpu,
        {"tpu chips": ("fail", "no TPU is attached", GO_TO_TPU)},
    ),
    (
        "Colab, with no TPU chosen",
        colab_without_tpu,
        {"tpu chips": ("fail", "no TPU is attached", COLAB_MENU)},
    ),
    (
        "Kaggle, with its tensorflow",
        kaggle,
        {
            "tensorflow": (
                "fail",
                "tensorflow 2.19.0 is installed beside torch_xla",
                f"{setup_tpu.PIP} uninstall -y tensorflow && {setup_tpu.PIP} install tensorflow-cpu",
            )
        },
    ),
    ("GKE pod", lambda m: gke(m, index=3), {}),
    (
        "GKE pod, another is silent",
        silent_pod,
        {"hosts": ("warn", "index 2, job-0-2.svc (timed out)", "kubectl get pods -o wide")},
    ),
    (
        "GKE pod, index outside the list of hosts",
        gke,
        {"hosts": ("fail", "host index '4', expected a number from 0 to 3", "export TPU_WORKER_ID=0  # the position")},
    ),
    (
        "container without --privileged",
        lambda m: m.in_container(privileged=False),
        {
            "device nodes": ("fail", "8 chips but 0 nodes", DOCKER),
            "container": ("fail", "not privileged", DOCKER),
        },
    ),
    (
        "libtpu of another release",
        lambda m: m.installed.update(libtpu="0.0.17"),
        {"libtpu": ("fail", "found 0.0.17 beside torch_xla 2.9.0, expected 0.0.21", PIP_29)},
    ),
]


@pytest.mark.parametrize(("broken", "expected"), [m[1:] for m in MACHINES], ids=[m[0] for m in MACHINES])
def test_machine(tmp_path, monkeypatch, metadata, broken, expected):
    """The finding and the fix of what is broken, and nothing else is complained of."""
    pages, url = metadata
    machine = Machine(tmp_path, pages)
    broken(machine)
    checks = machine.doctor(monkeypatch, url)
    found = {name: check for name, check in checks.items() if check.status in ("warn", "fail")}
    assert found.keys() == expected.keys(), found
    for name, (status, words, fix) in expected.items():
        assert found[name].status == status and words in found[name].finding, found[name]
        assert found[name].fix.startswith(fix.format(root=tmp_path)), found[name].fix


@pytest.mark.parametrize(
    ("broken", "name", "index"),
    [
        (lambda m: None, "TPU VM", "0"),
        (colab, "Colab", None),
        (kaggle, "Kaggle", "0"),
        (lambda m: gke(m, 3), "GKE", "3"),
    ],
)
def test_surroundings_are_named_and_a_host_alone_goes_on(tmp_path, monkeypatch, metadata, broken, name, index):
    pages, url = metadata
    machine = Machine(tmp_path, pages)
    broken(machine)
    checks = machine.doctor(monkeypatch, url)
    assert_check(checks["surroundings"], "ok", name)
    assert_check(checks["hosts"], "ok" if index else "skip", f"index {index}" if index else "nothing says")
    if name in ("Colab", "Kaggle"):  # what `import torch_xla` would ask the metadata server for
        assert_check(checks["metadata"], "ok", "one host without word of others", "TPU_ACCELERATOR_TYPE=v5litepod-8")
        assert machine.child_environment["TPU_ACCELERATOR_TYPE"] == "v5litepod-8"


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
    assert re.search(
        rf"^fail  torch_xla +not installed, expected 2.9.0\n +fix: {re.escape(PIP_29)}$", done.stdout, re.M
    )
    assert re.search(r"^skip  training step +torch_xla is not installed$", done.stdout, re.M)


def test_torch_28_beside_torch_xla_29(tmp_path):
    dist_info(tmp_path, "torch", "2.8.0")
    package(tmp_path, torch="raise ImportError('_XLAC.so: undefined symbol: _ZN3c10')")  # what the mismatch does
    done = run_doctor("--device=cpu", "--json", environment=clean_environment(tmp_path))
    assert done.returncode == 1
    checks = report(done)
    assert_check(checks["torch"], "fail", "found 2.8.0 beside torch_xla 2.9.0", fix=PIP_29)
    assert_check(checks["import"], "fail", "undefined symbol", fix=REINSTALL)
    assert checks["training step"].status == "skip"


@pytest.mark.slow
def test_broken_libtpu_end_to_end(tmp_path):
    (tmp_path / "libtpu.so").write_bytes(b"\x7fELF but not for long")
    environment = clean_environment(TPU_LIBRARY_PATH=str(tmp_path / "libtpu.so"))
    done = run_doctor("--device=cpu", "--aot=v5litepod-8", "--json", environment=environment)
    assert done.returncode == 1
    checks = report(done)
    assert_check(checks["libtpu.so"], "fail", "cannot be loaded", fix="unset TPU_LIBRARY_PATH")
    assert checks["aot"].status == "fail"
    assert checks["training step"].status == "ok"  # the CPU backend does without


@pytest.mark.slow
def test_nonsense_xla_flags_end_to_end():
    done = run_doctor("--device=cpu", "--json", environment=clean_environment(XLA_FLAGS="--nonsense"))
    assert done.returncode == 1
    checks = report(done)
    assert_check(checks["xla flags"], "fail", "Unknown flag in XLA_FLAGS: --nonsense", fix="unset XLA_FLAGS")
    assert checks["training step"].status == "ok"  # tried without the flags


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devcie", "cpu"], "unknown option --devcie; did you mean --device?"),
        (["--time-limti=5"], "did you mean --time_limit?"),
        (["--device", "gpu"], "invalid choice: 'gpu'"),
        (["--aot", "v5litepod8"], "did you mean v5litepod-8?"),
        (["--aot", "v5litepod-7"], "nearest is v5litepod-8"),
        (["--bucket", "my-bucket"], "expected gs://NAME"),
        (["--time-limit=0"], "expected more than 0 seconds"),
        (["--time_limit=0"], "expected more than 0 seconds"),
    ],
)
def test_wrong_usage(arguments, words):
    done = run_doctor(*arguments, environment=clean_environment())
    assert done.returncode == 2 and words in done.stderr and not done.stdout


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


def test_a_user_without_a_name(tmp_path):
    """torch raises there when it is imported; the children of the doctor are told a name."""
    assert_check(setup_tpu.check_user(0, {}), "ok", "root")
    assert_check(setup_tpu.check_user(54321, {"USER": "me"}), "ok", "me")
    assert_check(setup_tpu.check_user(54321, {"USER": ""}), "warn", "54321 has no name", fix="export USER=uid_54321")
