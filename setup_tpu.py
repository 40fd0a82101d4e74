"""Can this machine train with PyTorch/XLA, on a TPU or on the CPU backend?
And if not, what to do about it?

Run:     python setup_tpu.py                     # whatever this machine has
         python setup_tpu.py --device cpu        # no TPU wanted
         python setup_tpu.py --device tpu --bucket gs://my-bucket/runs
         python setup_tpu.py --aot v5litepod-8   # also ask the TPU compiler
Expect:  one line per check (ok, warn, fail, skip) and, below a problem, the
         command that fixes it; --json for machines.
Exit:    0 nothing failed, 1 something failed, 2 wrong usage.

Imports the standard library alone, here and in what it takes of tpu_utils/: it
runs where nothing is installed, on Python 3.10 or newer; an older one is told
what to install. torch_xla is tried in child processes with a time limit: a
wrong flag aborts the child, not the report. Nothing is killed or installed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

PYTHON = os.path.relpath(sys.executable) if Path.cwd() in Path(sys.executable).parents else sys.executable
PIP = f"{PYTHON} -m pip"  # the pip of this very Python: a bare `pip` may belong to another one than the .venv's
# A Python that fits, where the machine has none: of Ubuntu 22.04 and Debian 12. torch_xla wants its shared library too.
NEW_PYTHON = "sudo apt-get install -y python3.11-venv libpython3.11 && python3.11 -m venv .venv"
INSTALL = ".venv/bin/python -m pip install -r requirements.txt"
STALE_VARIABLES = {  # beside those that tpu_utils/options/variables.py refuses
    "XRT_*": "read by nobody: XRT is gone",
    "TPU_NUM_DEVICES": "read by nobody since 2.5; TPU_VISIBLE_CHIPS selects chips",
    "XLA_*_FP16": "read by nobody",
    "PT_XLA_DEBUG": "deprecated; use PT_XLA_DEBUG_LEVEL",
    "XLA_PERSISTENT_CACHE_PATH": "torch_xla writes programs there, and compiles them again: pytorch/xla#9094",
}
SSH = "gcloud compute tpus tpu-vm ssh NAME --zone ZONE"
GO_TO_TPU = f"{SSH}  # creating one: docs/tpu_vm.md"
NOTICES = {  # key of the VM's metadata: what to do once it has another value than NONE or FALSE
    "preempted": "gcloud compute tpus queued-resources delete REQUEST --zone ZONE --force  # then create it again",
    "maintenance-event": "gcloud compute tpus tpu-vm describe NAME --zone ZONE  # until it is READY again",
}
DOCKER_RUN = "docker run --privileged --net=host --shm-size=16G --ulimit memlock=-1 IMAGE"
SURROUNDINGS = {  # name: variables of which one says so. Kaggle first: its image is made from Colab's
    "Kaggle": ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_DATA_PROXY_TOKEN"),
    "Colab": ("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION"),
    "Kubernetes": ("KUBERNETES_SERVICE_HOST",),
}
GET_TPU = {  # how a program gets the chip where somebody else starts the machine
    "Kaggle": "in the notebook's menu: Settings > Accelerator > TPU",
    "Colab": "in the notebook's menu: Runtime > Change runtime type > TPU",
    "Kubernetes": "in the pod's YAML: resources: {limits: {google.com/tpu: 4}}, securityContext: {privileged: true}",
    "container": DOCKER_RUN,
}
GIB = 2**30
HERE = str(Path(__file__).resolve().parent)
CALL = "import sys; sys.path.insert(0, sys.argv[1]); import setup_tpu; getattr(setup_tpu, sys.argv[2])(sys.argv[3])"
# One line of the report. status: ok, warn, fail, skip; fix: the command to run after a warn or a fail.
Check = namedtuple("Check", "name status finding fix", defaults=("",))


def judge(name: str, good: bool, finding: str, fix: str, serious: bool = True) -> Check:
    """The finding either way; the fix unless it is `good`. What is not `serious` is a warning."""
    return Check(name, "ok", finding) if good else Check(name, "fail" if serious else "warn", finding, fix)


# ---------------------------------------------------------------- Python and packages, read from their metadata


def installed_versions(search_path: list) -> dict:
    """{distribution name: version}; nothing is imported. The first on the path is the one Python would import."""
    versions: dict = {}
    for found in importlib.metadata.distributions(path=search_path):
        with contextlib.suppress(Exception):  # a half-removed package fails in many ways, and is not installed
            name = re.sub(r"[-_.]+", "_", found.metadata["Name"]).lower()
            versions.setdefault(name, found.metadata["Version"] or "unknown")
    return versions


def nearest_versions(installed: Mapping):
    """The set to compare with: the one torch_xla belongs to, else the one torch belongs to, else the newest."""
    from tpu_utils.base.versions import SUPPORTED_VERSIONS

    for name in ("torch_xla", "torch"):
        for versions in SUPPORTED_VERSIONS:
            if fnmatch(installed.get(name, "").split("+")[0], getattr(versions, name)):
                return versions
    return SUPPORTED_VERSIONS[0]


def check_python(version: tuple, installed: Mapping) -> Check:
    """3.10 has a torch_xla 2.9.0, but no jax 0.7.1, without which there are no Pallas kernels and no --aot. 3.13 has no
    libtpu 0.0.21, which torch_xla 2.9.0 asks for; it has 0.0.21.1, and Colab has that."""
    expected, found = nearest_versions(installed), ".".join(map(str, version[:3]))
    limits = expected.python[0], (3, 13) if installed.get("libtpu") == "0.0.21.1" else expected.python[1]
    first, last = (".".join(map(str, limit)) for limit in limits)
    finding = f"found {found}; torch_xla {expected.torch_xla}, jax and libtpu need {first} to {last}: docs/tpu_vm.md"
    return judge("python", limits[0] <= tuple(version[:2]) <= limits[1], finding, f"{NEW_PYTHON} && {INSTALL}")


def check_package(name: str, installed: Mapping, needed: bool) -> Check:
    """One of torch, torch_xla, torchvision, libtpu, jax. One that is not `needed` may be missing, never mismatched."""
    versions, found = nearest_versions(installed), installed.get(name)
    expected, fix = getattr(versions, name), f"{PIP} install {versions.requirements}"
    if name == "torch_xla" and "torch_tpu" in installed:
        fix = f"{PIP} uninstall -y torch_tpu && {fix}"
        what = f"without torch_xla {expected}, which these scripts need: docs/torchtpu.md says what runs so"
        what = "beside torch_xla; the two cannot share an environment" if found else what
        finding = f"torch_tpu {installed['torch_tpu']} is installed {what}"
        return Check(name, "fail", finding, fix)
    if not found:
        return judge(name, False, f"not installed, expected {expected}", fix, needed)
    fits = fnmatch(found.split("+")[0], expected)  # 2.9.0+cpu is 2.9.0
    beside = "" if fits else f" beside torch_xla {installed.get('torch_xla', '(not installed)')}"
    return judge(name, fits, f"found {found}{beside}, expected {expected}", fix)


def runs_by_torch(installed: Mapping) -> bool:
    """Whether this is an environment of requirements-compile.txt: scripts are compiled by torch itself."""
    numbers = re.match(r"(\d+)\.(\d+)", installed.get("torch", ""))
    return "torch_xla" not in installed and numbers is not None and tuple(map(int, numbers.groups())) >= (2, 11)


def check_gpu(dev_root: Path, installed: Mapping, limit: float) -> Check:
    """The driver of an NVIDIA GPU, torch's CUDA, whether they fit, and memory that others hold."""
    from tpu_utils.base.gpus import OLDEST_DRIVERS, cuda_version

    if not any(dev_root.glob("nvidia[0-9]*")):
        return Check("gpu", "skip", "no NVIDIA GPU (/dev/nvidia0)")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=limit, check=True).stdout
        name, driver, *mib = answer.splitlines()[0].split(", ")
        used, total = (float(number) / 1024 for number in mib)
        major = int(driver.partition(".")[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return Check("gpu", "fail", f"its driver does not answer nvidia-smi: {error}", "sudo dmesg | grep -i nvidia")
    finding = f"{name}, driver {driver}, {used:.1f} of {total:.0f} GiB in use"
    if not runs_by_torch(installed):
        return Check("gpu", "ok", f"{finding}; only the torch.compile backend uses it: docs/torchtpu.md")
    if not (cuda := cuda_version()):
        fix = f"{PIP} install --force-reinstall torch=={installed['torch'].split('+')[0]}"
        return Check("gpu", "fail", f"{finding}; torch {installed['torch']} is built without CUDA", fix)
    finding += f"; torch {installed['torch']} has CUDA {cuda}"
    if major < (oldest := OLDEST_DRIVERS.get(cuda.partition(".")[0], 0)):
        fix = f"nvidia-smi  # update this driver to {oldest} or newer, or install a torch of an older CUDA"
        return Check("gpu", "fail", f"{finding}, which needs driver {oldest} or newer", fix)
    return judge("gpu", used < 1, finding, "nvidia-smi  # says which process holds its memory", serious=False)


def check_tensorflow(installed: Mapping, wants_tpu: bool) -> Check:
    """The full tensorflow brings a TPU runtime of its own, which fights over the chip; tensorflow-cpu does not."""
    fix = f"{PIP} uninstall -y tensorflow && {PIP} install tensorflow-cpu"
    if "tensorflow" not in installed:
        return Check("tensorflow", "ok", "not installed, so nothing else loads libtpu")
    finding = f"tensorflow {installed['tensorflow']} is installed beside torch_xla; both would load libtpu"
    return judge("tensorflow", False, finding, fix, wants_tpu)


def check_libtpu(environment: Mapping, search_path: list, installed: Mapping, wants_tpu: bool, limit: float) -> Check:
    """Open what torch_xla would load in a child process: a truncated file kills the process that opens it."""
    places = [Path(p or ".") / name for name in ("torch_xla/lib", "libtpu") for p in search_path]
    library = next((place / "libtpu.so" for place in places if (place / "libtpu.so").is_file()), None)
    fix = f"{PIP} install --force-reinstall --no-deps libtpu=={nearest_versions(installed).libtpu.rstrip('*')}"
    if named := environment.get("TPU_LIBRARY_PATH"):
        library, fix = Path(named), "unset TPU_LIBRARY_PATH"
    if library is None:
        finding = "no libtpu.so found; without it neither a TPU nor --aot works"
        return judge("libtpu.so", False, finding, fix, wants_tpu or "libtpu" in installed)
    source = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).GetPjrtApi"
    _, died = run_child(["-I", "-c", source, str(library)], environment, limit)
    return judge("libtpu.so", not died, f"{library} " + (f"cannot be loaded: {died}" if died else "loads"), fix)


# ---------------------------------------------------------------- the chip and the cloud: bus, nodes, holder, hosts


def check_chips(chips: list, device: str, where: str) -> Check:
    """chips: those on the PCI bus that these scripts know. Others of Google's are network cards, disks, older TPUs."""
    from tpu_utils.base.hardware import GENERATIONS
    from tpu_utils.options.environment import GOOGLE_PCI_VENDOR

    if chips:
        return Check("tpu chips", "ok", f"{len(chips)} on the PCI bus: {', '.join({chip.name for chip in chips})}")
    finding = f"none of {', '.join(GENERATIONS)} on the PCI bus (vendor {GOOGLE_PCI_VENDOR})"
    if device == "tpu":
        return Check("tpu chips", "fail", finding, GET_TPU[where] if where in SURROUNDINGS else GO_TO_TPU)
    fix = f"{PYTHON} setup_tpu.py --device cpu  # if the CPU is what you want"
    return judge("tpu chips", device == "cpu", f"{finding}: programs will run on the CPU", fix, serious=False)


def may_open(path: Path, uid: int) -> bool:
    """May this user read and write `path`? Worked out from the mode, so that it can be asked for any user."""
    status = path.stat()
    shift = 6 if status.st_uid == uid else 3 if status.st_gid in (os.getgid(), *os.getgroups()) else 0
    return uid == 0 or (status.st_mode >> shift) & 0o6 == 0o6


def check_device_nodes(dev_root: Path, chips: list, uid: int, where: str) -> Check:
    """/dev/accel* (older images) or /dev/vfio/<number> (newer ones), one per chip, open to this user."""
    if not chips:
        return Check("device nodes", "skip", "no TPU chip on the PCI bus")
    vfio = sorted(dev_root.glob("vfio/[0-9]*"))
    nodes = sorted(dev_root.glob("accel[0-9]*")) + vfio
    if len(nodes) < len(chips):
        finding = f"{len(chips)} chips but {len(nodes)} nodes under {dev_root} (accel*, vfio/*)"
        return Check("device nodes", "fail", finding, GET_TPU.get(where, "sudo reboot"))
    nodes += dev_root.glob("vfio/vfio") if vfio else ()  # the control node of them all
    closed = [str(node) for node in nodes if not may_open(node, uid)]
    fix = GET_TPU.get(where, f"sudo chmod a+rw {' '.join(closed)}").replace("IMAGE", "--user root IMAGE")
    finding = f"user {uid} may not open {', '.join(closed)}" if closed else f"{len(nodes)}, open to user {uid}"
    return judge("device nodes", not closed, finding, fix)


def check_locked_memory(dev_root: Path, chips: list, allowed: int, where: str) -> Check:
    """libtpu locks memory for chips behind /dev/vfio (Google's documentation of GKE; not tried); a login often may lock
    a few MiB. allowed: bytes, of RLIMIT_MEMLOCK; -1 is any number of them."""
    if not chips or not list(dev_root.glob("vfio/[0-9]*")):
        return Check("locked memory", "skip", "no TPU chip behind /dev/vfio")
    good = allowed == resource.RLIM_INFINITY or allowed >= GIB
    finding = "enough" if good else f"programs may lock up to {allowed / 2**20:,.4g} MiB, expected at least 1 GiB"
    shell = "sudo prlimit --memlock=unlimited:unlimited --pid $$  # in a systemd unit: LimitMEMLOCK=infinity"
    return judge("locked memory", good, finding, GET_TPU.get(where, shell), serious=False)


def check_holder(proc_root: Path, lock_file: Path, chips: list, uid: int, wants_tpu: bool, where: str) -> Check:
    """Which process has a TPU node or libtpu's lock file open. It is named, never killed; the file is never deleted."""
    if not chips:
        return Check("tpu holder", "skip", "no TPU chip on the PCI bus")
    holders, hidden = {}, "; processes outside the container are not visible" if where else ""
    for folder in proc_root.glob("[0-9]*"):
        try:
            targets = [str(link.readlink()) for link in (folder / "fd").iterdir()]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except PermissionError:
            hidden = "; processes of other users can only be looked into with sudo"
            continue
        except OSError:  # the process ended while we looked
            continue
        held = [t for t in targets if t == str(lock_file) or re.match(r"/dev/(accel|vfio/)\d+$", t)]
        if held:
            holders[folder.name] = f"pid {folder.name} ({command[:80]}) has {held[0]} open"
    if holders:
        fix = f"kill {' '.join(holders)}  # once you know whose work it is"
        return judge("tpu holder", False, "; ".join(holders.values()), fix, wants_tpu)
    if lock_file.exists() and not may_open(lock_file, uid):
        finding = f"{lock_file} belongs to user {lock_file.stat().st_uid}, and libtpu will not start for user {uid}"
        return judge("tpu holder", False, finding, f"sudo chmod a+rw {lock_file}", wants_tpu)
    return Check("tpu holder", "ok", f"no process seen to hold the TPU{hidden}")


def find_surroundings(root: Path, environment: Mapping) -> str:
    """ "Kaggle", "Colab", "Kubernetes", "container", or "" for a machine of one's own."""
    named = (name for name, variables in SURROUNDINGS.items() if any(environment.get(v) for v in variables))
    marked = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    return next(named, "container" if marked else "")


def check_hosts(chips: list, environment: MutableMapping, where: str) -> Check:
    """How many hosts there are and which one this is, as a run finds it; and which of the others is silent. Sets in
    `environment` what a run sets there for torch_xla, which would ask the metadata server again."""
    from tpu_utils.base.errors import DeviceError, InputError
    from tpu_utils.remote.hosts import settle_hosts

    if not chips:
        return Check("hosts", "skip", "no TPU chip on the PCI bus")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            index, names = settle_hosts(chips, environment)
    except (DeviceError, InputError) as error:
        finding, _, fix = str(error).partition("; ")
        return Check("hosts", "fail", finding, fix)
    if len(names) == 1:
        return Check("hosts", "ok", said.getvalue().strip().partition(" ")[2].strip() or "1, this is index 0")
    silent = find_silent([name for i, name in enumerate(names) if i != index])
    finding = f"{len(names)}, this is index {index}; "
    if not silent:
        return Check("hosts", "ok", f"{finding}start programs on all hosts at once (gcloud ... ssh --worker=all)")
    finding += "silent, or behind a firewall: "
    finding += ", ".join(f"index {names.index(name)}, {name} ({why})" for name, why in silent.items())
    fix = f"{SSH} --worker={names.index(next(iter(silent)))}"
    return Check("hosts", "warn", finding, "kubectl get pods -o wide" if where == "Kubernetes" else fix)


def find_silent(names: list, port: int = 22, limit: float = 2.0) -> dict:
    """{host: why} of those that do not answer at ssh's port, all asked at once. A refused connection is an answer. A
    name that takes a second more than the limit to resolve counts as silent; its thread is left behind."""
    said = dict.fromkeys(names, f"does not resolve within {limit + 1:g} s")

    def ask(name: str) -> None:
        try:
            socket.create_connection((name, port), timeout=limit).close()
            said[name] = ""
        except OSError as error:
            said[name] = "" if isinstance(error, ConnectionRefusedError) else str(error)

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit + 1
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    return {name: said[name] for name in names if said[name]}


def check_notices(wants_tpu: bool) -> Check:
    """Is this machine about to go? The keys that a run watches too."""
    from tpu_utils.remote.hosts import SILENT_SECONDS, ask_server

    answered = False
    for key, fix in NOTICES.items() if wants_tpu else ():
        reply = ask_server(key, SILENT_SECONDS)
        value = reply.value.decode(errors="replace").strip().upper()
        if reply.code == 200 and value not in ("NONE", "FALSE"):
            finding = f"{key} = {value:.80}: this machine is about to go; a run saves, and goes on with --resume auto"
            return Check("notices", "warn", finding, fix)
        answered = answered or reply.code == 200
    return Check("notices", *(("ok", "no preemption, no maintenance") if answered else ("skip", "nobody to ask")))


def check_memory(proc_root: Path, sys_root: Path, least_gib: float) -> Check:
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", (proc_root / "meminfo").read_text(), re.MULTILINE))
    total, available = (int(fields[key]) / 2**20 for key in ("MemTotal", "MemAvailable"))
    finding, limit = f"{total:.1f} GiB, {available:.1f} available", sys_root / "fs/cgroup/memory.max"
    allowed = int(limit.read_text()) / GIB if limit.is_file() and limit.read_text().strip() != "max" else total
    finding += f", limited to {allowed:.1f} by cgroup" if allowed < total else ""
    good = min(available, allowed) >= least_gib
    return judge("memory", good, f"{finding}, expected {least_gib:g} free", "ps aux --sort=-rss | head")


def check_shared_memory(dev_root: Path, least_gib: float, where: str) -> Check:
    """Data-loader workers (of images.examples alone) hand over batches there; docker's 64 MB end them by a signal."""
    folder = dev_root / "shm"
    size = shutil.disk_usage(folder).total / GIB if folder.is_dir() else 0
    pod = f"in the pod's YAML: a volume emptyDir: {{medium: Memory}}, mounted at {folder}"
    fix = {"container": DOCKER_RUN, "Kubernetes": pod}.get(where, f"sudo mount -o remount,size=16G {folder}")
    finding = f"{folder} has {size:.2f} GiB, expected at least {least_gib:g} for data-loader workers"
    return judge("shared memory", size >= least_gib, finding, fix, serious=False)


def check_container(proc_root: Path, sys_root: Path, where: str, wants_tpu: bool) -> Check:
    """libtpu maps the chip's registers, and the hosts of a slice meet over the network of the machine."""
    if where != "container":
        return Check("container", "skip", f"{where} grants chip and network" if where else "not inside one")
    faults, status = [], (proc_root / "self/status").read_text()
    if not int(re.search(r"CapBnd:\s*(\w+)", status)[1], 16) >> 21 & 1:  # CAP_SYS_ADMIN, which --privileged leaves
        faults.append("not privileged (it cannot open a TPU)")
    if not list(sys_root.glob("class/net/*/device")):  # a network card; docker's own network has virtual ones only
        faults.append("not on the network of the host (no network card in sight)")
    if faults and not wants_tpu:
        return Check("container", "skip", f"{' and '.join(faults)}, which only a TPU needs")
    finding = " and ".join(faults) or "privileged, on the network of the host"
    return judge("container", not faults, finding, DOCKER_RUN)


def check_environment(environment: Mapping, device: str, chips: list) -> tuple:
    """(check, names that a run refuses: with them it would not start, compute other numbers, or not use the TPU)."""
    from tpu_utils.base.errors import InputError
    from tpu_utils.options.variables import check_variables

    refused, stale, has = {}, {}, "TPU" if chips else "CPU"
    if device != "cpu" and environment.get("PJRT_DEVICE", has).upper() not in ("", has):
        refused["PJRT_DEVICE"] = f"PJRT_DEVICE={environment['PJRT_DEVICE']}, but this machine has a {has}"
    if environment.get("PYTHONSAFEPATH"):
        refused["PYTHONSAFEPATH"] = "PYTHONSAFEPATH hides what lies beside a script: No module named 'config'"
    for name, value in environment.items():
        if whys := [why for pattern, why in STALE_VARIABLES.items() if fnmatch(name, pattern)]:
            stale[name] = f"{name}={value} ({whys[0]})"
            continue
        try:
            check_variables({name: value}, "cpu")
        except InputError as error:
            refused[name] = str(error)
    finding = "; ".join([*refused.values(), *stale.values()]) or "none that a run refuses, none that is stale"
    fix = f"unset {' '.join([*refused, *stale])}"
    return judge("environment", not (refused or stale), finding, fix, bool(refused)), refused


# ---------------------------------------------------------------- child processes, as the parent sees them


def run_child(arguments: list, environment: Mapping, limit: float) -> tuple:
    """Run Python: ({name: Check} it reported in lines "@@ [name, status, finding, fix]", why it died or "")."""
    try:
        done = subprocess.run([sys.executable, *arguments], env=dict(environment), capture_output=True, timeout=limit)
        code, stdout, stderr = done.returncode, done.stdout, done.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        code, stdout, stderr = None, error.stdout or b"", f"no answer within {limit:g} s"
    lines = stdout.decode(errors="replace").splitlines()
    reports = [Check(*json.loads(line[3:])) for line in lines if line.startswith("@@ ")]
    # why: XLA's error and fatal lines, else the last line (of a traceback), else the signal
    fatal = re.findall(r"^\d{4}-\S+ \S+ [EF] \S+\] *(.*)", stderr, re.MULTILINE)[:2] or stderr.strip().splitlines()[-1:]
    died = " ".join(fatal)[:400] or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
    return {report.name: report for report in reports}, "" if code == 0 else died


def ask_child(function: str, argument: str, names: list, environment: Mapping, limit: float, fix: str) -> list:
    """The checks `names`, as one of the functions below reports them. Where it dies is a failure, the rest skipped."""
    results, died = run_child(["-c", CALL, HERE, function, argument], environment, limit)
    for i, name in enumerate([name for name in names if name not in results]):
        failed = Check(name, "fail", died or "the child process ended without a report")
        results[name] = Check(name, "skip", "not reached") if i else failed
    if lacking := re.search(r"libpython(3\.\d+)\.so", died):  # Debian's python3 runs without it, torch_xla does not
        fix = f"sudo apt-get install -y libpython{lacking[1]}"
    elif re.search("XLA_FLAGS|Flag parsing", died):
        fix = "unset XLA_FLAGS"
    elif died.startswith("no answer"):
        fix = f"{PYTHON} setup_tpu.py --time_limit {4 * limit:g}  # several hosts: start it on all of them at once"
    return [c._replace(fix=c.fix or fix) if c.status == "fail" else c for c in map(results.get, names)]


def check_work(device: str, environment: Mapping, installed: Mapping, limit: float, chips: list) -> list:
    names = ["import", "matrix product", "training step", "all-reduce"]
    if "torch_xla" not in installed:
        return [Check(name, "skip", "torch_xla is not installed") for name in names]
    if device == "tpu" and not chips:  # libtpu would look for one until the time limit
        return [Check(name, "skip", "no TPU chip on the PCI bus") for name in names]
    tried = environment if device == "auto" else {**environment, "PJRT_DEVICE": device.upper()}
    reinstall = f"{PIP} install --force-reinstall {nearest_versions(installed).requirements}"
    return ask_child("child_work", "", names, tried, limit, reinstall)


def check_aot(target: str, environment: Mapping, limit: float) -> Check:
    """The same training step through the compiler in libtpu, with no TPU attached."""
    if not target:
        return Check("aot", "skip", "not asked for (--aot v5litepod-8)")
    fix = f"{PIP} install {nearest_versions({}).requirements}"  # the set tpu_compiler is written for
    (check,) = ask_child("child_aot", target, ["aot"], environment, limit, fix)
    return check._replace(finding=f"{target}: {check.finding}")


def check_bucket(bucket: str, installed: Mapping, environment: Mapping, limit: float) -> Check:
    """May the credentials of this machine write to gs://bucket? One request, which creates nothing."""
    if not bucket:
        return Check("bucket", "skip", "none given (--bucket gs://...)")
    if "google_cloud_storage" not in installed:
        return Check("bucket", "fail", "google-cloud-storage is not installed", f"{PIP} install google-cloud-storage")
    name, login = bucket.split("/")[2], "gcloud auth application-default login"
    (check,) = ask_child("child_bucket", name, ["bucket"], environment, limit, login)
    if "NotFound" in check.finding:
        return Check("bucket", "fail", f"gs://{name} does not exist", f"gcloud storage buckets create gs://{name}")
    return check._replace(finding=f"gs://{name}: {check.finding}")


def tell(check: Check) -> None:
    """Report from a child to its parent, at once: the next thing done may abort the process."""
    print("\n@@ " + json.dumps(check), flush=True)


@contextlib.contextmanager
def piece(name: str) -> Iterator[None]:
    """What goes wrong inside is the finding of this check, whatever it is; the next piece is still tried."""
    try:
        yield
    except Exception as error:
        tell(Check(name, "fail", f"{type(error).__name__}: {str(error).strip()[:300]}"))


def tiny_step(devices: int) -> tuple:
    """(training step, model): two layers, the batch sharded over `devices`. step() returns the loss, on the device."""
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs

    torch.manual_seed(0)
    device = torch_xla.device()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # keeps no state, so the first step is like the others
    inputs, labels = torch.randn(16 * devices, 64).to(device), torch.randint(10, (16 * devices,)).to(device)
    if devices > 1:
        mesh = xs.Mesh(np.arange(devices), (devices,), ("data",))
        xs.mark_sharding(inputs, mesh, ("data", None))
        xs.mark_sharding(labels, mesh, ("data",))
        for parameter in model.parameters():  # else they come out of step 1 annotated, and step 2 is a second graph
            xs.mark_sharding(parameter, mesh, (None,) * parameter.dim())
    torch_xla.sync()  # the uploads, so that the step starts from data on the device

    def step() -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # gradients alive at sync would be outputs of the program
        return loss.detach()

    return step, model


def child_work(_: str) -> None:
    """Import torch_xla, then every piece of real work, one report each."""
    gc.disable()  # the imports free next to nothing: saves a tenth of their time
    began = time.monotonic()
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.debug.metrics as metrics
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    devices, kind = xr.global_runtime_device_count(), xr.device_type()
    versions = f"torch {torch.__version__}, torch_xla {torch_xla.__version__}"
    tell(Check("import", "ok", f"{versions}: {devices} {kind} device(s), {time.monotonic() - began:.1f} s"))
    if devices > 1:
        xr.use_spmd()  # one program for all of them
    device = torch_xla.device()
    with piece("matrix product"):
        left, right = np.random.default_rng(0).standard_normal((2, 256, 256)).astype(np.float32)
        found = (torch.from_numpy(left).to(device) @ torch.from_numpy(right).to(device)).cpu().numpy()
        error = np.abs(found - left @ right).max() / np.abs(left @ right).max()
        allowed = 1e-5 if kind == "CPU" else 2e-2  # a TPU multiplies float32 in one bfloat16 pass by default
        finding = f"256 x 256 differs from numpy by {error:.1e}, expected at most {allowed:.0e}"
        tell(judge("matrix product", error <= allowed, finding, ""))
    with piece("training step"):
        step, _ = tiny_step(devices)
        before, losses = metrics.metric_data("CompileTime") or (0,), []
        for _ in range(3):
            losses.append(step())
            torch_xla.sync()
        graphs = metrics.metric_data("CompileTime")[0] - before[0]
        first, last = losses[0].item(), losses[-1].item()
        if graphs != 1:
            raise RuntimeError(f"3 training steps compiled {graphs} graphs, expected 1")
        finding = f"3 steps, 1 compile, loss {first:.4f} -> {last:.4f}"
        tell(judge("training step", last < first, finding if last < first else f"{finding}, expected to fall", ""))
    with piece("all-reduce"):
        if devices == 1:
            tell(Check("all-reduce", "skip", "one device"))
        else:
            values = torch.arange(devices, dtype=torch.float32).to(device)
            xs.mark_sharding(values, xs.Mesh(np.arange(devices), (devices,), ("data",)), ("data",))
            found, expected = values.sum().item(), devices * (devices - 1) / 2
            finding = "right" if found == expected else f"{found}, expected {expected}"
            tell(judge("all-reduce", found == expected, f"the sum over {devices} devices is {finding}", ""))
    if kind == "CPU":  # a TPU is released in good order; here that would only cost seconds
        os._exit(0)


def child_aot(target: str) -> None:
    """Trace the training step on as many virtual CPU devices as the slice has, and compile it with the TPU compiler."""
    from tpu_utils.options.virtual_slice import prepare_environment

    topology = prepare_environment(target)  # before torch_xla is imported
    import torch_xla.runtime as xr

    from tpu_compiler.ask import ask_compiler
    from tpu_compiler.compile.tracing import trace_step

    devices = topology.num_devices
    if devices > 1:
        xr.use_spmd()
    step, model = tiny_step(devices)
    compiled, _ = ask_compiler(trace_step(step, owners=[model]), topology)
    if not compiled.fits:
        raise RuntimeError(compiled.reason)
    reduces = int(compiled.collectives.get("all-reduce", {"count": 0})["count"])
    finding = f"compiles for {topology.compiler_name}, {devices} devices, {reduces} all-reduce to sum the gradients"
    tell(judge("aot", reduces or devices == 1, f"{finding}, {compiled.compile_seconds:.1f} s", ""))
    os._exit(0)  # nothing to release


def child_bucket(name: str) -> None:
    """Ask which of the permissions a run directory needs these credentials have on gs://name."""
    from google.cloud import storage

    needed = [f"storage.objects.{action}" for action in ("create", "get", "list", "delete")]
    bucket = storage.Client(project="unused").bucket(name)  # asking for permissions takes no project
    lacking = ", ".join(sorted(set(needed) - set(bucket.test_iam_permissions(needed, timeout=10))))
    grant = f"gcloud storage buckets add-iam-policy-binding gs://{name} --role=roles/storage.objectAdmin --member=YOU"
    finding = f"these credentials lack {lacking}" if lacking else "may be read and written"
    tell(judge("bucket", not lacking, finding, grant))


# ---------------------------------------------------------------- the report


def diagnose(options: argparse.Namespace, environment: Mapping, root: Path, search_path: list) -> Iterator[Check]:
    """Every check, in the order of the report. Where installing into this Python cannot help, the fix is another."""
    installed = installed_versions(search_path)
    elsewhere = check_python(sys.version_info, installed).fix
    if "torch_tpu" in installed and "torch_xla" not in installed:  # it needs another torch: leave it alone
        elsewhere = f"{PYTHON} -m venv .venv_xla && {INSTALL.replace('.venv', '.venv_xla')}"
    for check in look(options, environment, root, search_path, installed):
        yield check._replace(fix=elsewhere) if elsewhere and PIP in check.fix else check


def look(
    options: argparse.Namespace, environment: Mapping, root: Path, search_path: list, installed: Mapping
) -> Iterator[Check]:
    """What waits for a network or a child process waits at the same time."""
    from tpu_utils.options.environment import attached_chips

    sys_root, dev_root, proc_root = (root / name for name in ("sys", "dev", "proc"))
    limit, uid, device = options.time_limit, os.getuid(), options.device
    chips, where = attached_chips(sys_root / "bus/pci/devices"), find_surroundings(root, environment)
    wants_tpu = device == "tpu" or (device == "auto" and bool(chips))
    variables, refused = check_environment(environment, device, chips)
    usable = {name: value for name, value in environment.items() if name not in refused}
    # before any child of ours may open the chip
    holder = check_holder(proc_root, root / "tmp/libtpu_lockfile", chips, uid, wants_tpu, where)
    hosts = check_hosts(chips, usable, where)
    with ThreadPoolExecutor() as pool:
        asked_notices = pool.submit(check_notices, wants_tpu)
        asked_libtpu = pool.submit(check_libtpu, environment, search_path, installed, wants_tpu, limit)
        asked_bucket = pool.submit(check_bucket, options.bucket, installed, environment, limit)
        asked_work = pool.submit(check_work, device, usable, installed, limit, chips)
        asked_aot = pool.submit(check_aot, options.aot, usable, limit)
        if runs_by_torch(installed) and not wants_tpu:
            finding = f"{installed['torch']}, without torch_xla: the torch.compile backend, docs/torchtpu.md"
            yield Check("torch", "ok", finding)
        else:
            needed = ("torch", "torch_xla", "libtpu") if wants_tpu else ("torch", "torch_xla")
            yield check_python(sys.version_info, installed)
            for name in ("torch", "torch_xla", "torchvision", "libtpu", "jax"):
                yield check_package(name, installed, name in needed)
        yield check_gpu(dev_root, installed, limit)
        yield check_tensorflow(installed, wants_tpu)
        yield asked_libtpu.result()
        yield check_chips(chips, device, where)
        yield check_device_nodes(dev_root, chips, uid, where)
        yield check_locked_memory(dev_root, chips, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], where)
        yield holder
        yield Check("surroundings", "ok", where or ("TPU VM" if chips else "a plain machine"))
        yield hosts
        yield asked_notices.result()
        yield check_memory(proc_root, sys_root, least_gib=2)
        yield check_shared_memory(dev_root, 1, where)
        yield check_container(proc_root, sys_root, where, wants_tpu)
        yield variables
        yield asked_bucket.result()
        yield from asked_work.result()
        yield asked_aot.result()


def read_options(arguments: list) -> argparse.Namespace:
    """Both --snake_case and --kebab-case; anything unknown ends with exit code 2 and the nearest name."""
    from tpu_utils.options.tool_arguments import parse_arguments
    from tpu_utils.options.virtual_slice import traceable_topology

    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("auto", "cpu", "tpu"), default="auto", help="what programs should run on")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--aot", default="", metavar="SLICE", help="compile a training step for it, e.g. v5litepod-8")
    parser.add_argument("--bucket", default="", metavar="gs://NAME", help="check the credentials for this bucket")
    names = ("--time_limit", "--time-limit")
    parser.add_argument(*names, type=float, default=60.0, metavar="SECONDS", help="for a child (default 60)")
    options = parse_arguments(parser, arguments)
    if options.bucket and not re.match(r"gs://[a-z0-9][\w.-]+(/|$)", options.bucket):
        parser.error(f"--bucket {options.bucket}: expected gs://NAME or gs://NAME/FOLDER")
    if options.time_limit <= 0:
        parser.error(f"--time_limit {options.time_limit:g}: expected more than 0 seconds")
    try:
        traceable_topology(options.aot or "v4-8")
    except ValueError as error:
        parser.error(f"--aot: {error}")
    return options


def main() -> int:
    if not Path(HERE, "tpu_utils").is_dir():
        print("error: tpu_utils/, which setup_tpu.py reads, is not beside it; run it in the clone", file=sys.stderr)
        return 2
    sys.path += [] if HERE in sys.path else [HERE]  # python -I, and PYTHONSAFEPATH, leave it out
    if sys.version_info < (3, 10):  # noqa: UP036, it does not read the rest of tpu_utils
        print(*check_python(sys.version_info, {})[1:], sep="\n", file=sys.stderr)
        return 1
    options = read_options(sys.argv[1:])
    began = time.monotonic()
    checks = []
    for check in diagnose(options, os.environ, Path("/"), sys.path):
        checks.append(check)
        if not options.json:
            fix = f"\n{'':22}fix: {check.fix}" if check.fix else ""
            print(f"{check.status:4}  {check.name:16}{check.finding}{fix}", flush=True)
    counts = {status: sum(c.status == status for c in checks) for status in ("ok", "warn", "fail", "skip")}
    seconds = round(time.monotonic() - began, 1)
    if options.json:
        report = {"ok": not counts["fail"], "device": options.device, "seconds": seconds, "counts": counts}
        print(json.dumps({**report, "checks": [c._asdict() for c in checks]}, indent=1))
    else:
        print(", ".join(f"{n} {status}" for status, n in counts.items()) + f" in {seconds} s")
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet into `| head`
    sys.exit(main())
