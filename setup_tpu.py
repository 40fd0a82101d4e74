"""Can this machine train with PyTorch/XLA, on a TPU or on the CPU backend?
And if not, what to do about it?

Run:     python setup_tpu.py                     # whatever this machine has
         python setup_tpu.py --device cpu        # no TPU wanted
         python setup_tpu.py --device tpu --bucket gs://my-bucket/runs
         python setup_tpu.py --aot v5litepod-8   # also ask the TPU compiler
Expect:  one line per check (ok, warn, fail, skip) and, below a problem, the
         command that fixes it; --json for machines.
Exit:    0 nothing failed, 1 something failed, 2 wrong usage.

Only the standard library is imported here: this runs where nothing is
installed, on any Python from 3.8 on. torch_xla is tried in child processes with
a time limit: a wrong flag aborts the child, never the report. No process is
killed, no lock file deleted, nothing installed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import importlib.metadata
import json
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import namedtuple
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

# Releases that work together: five fnmatch patterns, the first and last Python, what `pip install` is given.
VersionPair = namedtuple("VersionPair", "torch torch_xla torchvision libtpu jax python pip")
PYTHON = os.path.relpath(sys.executable) if Path.cwd() in Path(sys.executable).parents else sys.executable
PIP = f"{PYTHON} -m pip"  # the pip of this very Python: a bare `pip` may belong to another one than the .venv's
SET = "torch=={} 'torch_xla[tpu,pallas]=={}' torchvision=={}"
# A Python that fits, where the machine has none: of Ubuntu 22.04 and Debian 12. torch_xla wants its shared library too.
NEW_PYTHON = "sudo apt-get install -y python3.11-venv libpython3.11 && python3.11 -m venv .venv"
INSTALL = ".venv/bin/python -m pip install -r requirements.txt"
# THE table of supported versions, newest first; the tests hold requirements.txt to it.
SUPPORTED_PAIRS = (
    VersionPair(
        "2.9.0", "2.9.0", "0.24.*", "0.0.21*", "0.7.1", ((3, 11), (3, 12)), SET.format("2.9.0", "2.9.0", "0.24.0")
    ),
    VersionPair(
        "2.8.*", "2.8.*", "0.23.*", "0.0.17", "0.6.2", ((3, 11), (3, 13)), SET.format("2.8.0", "2.8.1", "0.23.0")
    ),
)
TPU_VENDOR = "0x1ae0"  # Google; its devices that are not in the next table are network cards and disks
TPU_PCI_IDS = {"0x0027": "v2/v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "TPU7x"}
STALE_VARIABLES = (  # (pattern, does it change or end what is computed, why)
    ("XRT_*", False, "read by nobody: XRT is gone"),
    ("TPU_NUM_DEVICES", False, "read by nobody since 2.5; TPU_VISIBLE_CHIPS selects chips"),
    ("XLA_*_FP16", False, "read by nobody"),
    ("PT_XLA_DEBUG", False, "deprecated; use PT_XLA_DEBUG_LEVEL"),
    (
        "XLA_PERSISTENT_CACHE_PATH",
        False,
        "torch_xla 2.8 and 2.9 write each program there, fail to load it and compile it again: time and disk for "
        "nothing, pytorch/xla#9094",
    ),
    ("XLA_*_BF16", True, "turns float32 into bfloat16 behind torch's back; use torch.autocast('xla')"),
    ("XLA_USE_32BIT_LONG", True, "makes 32 bits of whole numbers of 64, which ends a run in a crash"),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", True, "multiplies float32 less exactly than a run says"),
    ("*DNN*_DEFAULT_FPMATH_MODE", True, "multiplies float32 less exactly than a run says"),
    ("TORCHINDUCTOR_*_MATH*", True, "makes compiled code reorder sums and leave out what is not finite"),
    (
        "PYTHONSAFEPATH",
        True,
        "Python does not find what lies beside a script: No module named 'config'",
    ),
    ("XLA_*_SPMD", True, "puts every process into SPMD mode; scripts call torch_xla.runtime.use_spmd()"),
)
METADATA_URL = "http://metadata.google.internal/computeMetadata/v1/instance/"
METADATA_KEYS = ("tpu-env", "worker-network-endpoints")  # what torch_xla asks for
NOTICES = (  # (key of the metadata, its values that mean that this machine is about to go, what to do)
    (
        "preempted",
        ("TRUE",),
        "gcloud compute tpus queued-resources delete REQUEST --zone ZONE --force"
        "  # then create it again; a run goes on with --resume auto",
    ),
    (
        "maintenance-event",
        ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
        "gcloud compute tpus tpu-vm describe NAME --zone ZONE"
        "  # until it is READY again; a run saves at the notice, and goes on with --resume auto",
    ),
)
SSH = "gcloud compute tpus tpu-vm ssh NAME --zone ZONE"
GO_TO_TPU = f"{SSH}  # creating one: docs/tpu_vm.md"
DOCKER_RUN = "docker run --privileged --net=host --shm-size=16G --ulimit memlock=-1 IMAGE"
SURROUNDINGS = {  # name: variables of which one says so. Kaggle first: its image is made from Colab's
    "Kaggle": ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_DATA_PROXY_TOKEN"),
    "Colab": ("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION"),
    "GKE": ("KUBERNETES_SERVICE_HOST",),
}
GET_TPU = {  # how a program gets the chip where somebody else starts the machine
    "Kaggle": "in the notebook's menu: Settings > Accelerator > TPU",
    "Colab": "in the notebook's menu: Runtime > Change runtime type > TPU",
    "GKE": "in the pod's YAML: resources: {limits: {google.com/tpu: CHIPS}}, securityContext: {privileged: true}",
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


def nearest_pair(installed: Mapping) -> VersionPair:
    """The row to compare with: the one torch_xla belongs to, else the one torch belongs to, else the newest."""
    for name in ("torch_xla", "torch"):
        for pair in SUPPORTED_PAIRS:
            if fnmatch(installed.get(name, "").split("+")[0], getattr(pair, name)):
                return pair
    return SUPPORTED_PAIRS[0]


def check_python(version: tuple, installed: Mapping) -> Check:
    """3.10 has a torch_xla 2.9.0, but no jax 0.7.1, without which there are no Pallas kernels and no --aot.

    3.13 has no libtpu 0.0.21, which torch_xla 2.9.0 asks for; it has 0.0.21.1, and Colab has that.
    """
    pair, found = nearest_pair(installed), ".".join(map(str, version[:3]))
    limits = pair.python[0], (3, 13) if installed.get("libtpu") == "0.0.21.1" else pair.python[1]
    first, last = (".".join(map(str, limit)) for limit in limits)
    fits = limits[0] <= tuple(version[:2]) <= limits[1]
    finding = f"found {found}, torch_xla {pair.torch_xla} with its jax and libtpu needs {first} to {last}"
    beside = "  # or Docker, or uv: docs/tpu_vm.md"
    return judge("python", fits, finding, f"{NEW_PYTHON} && {INSTALL}{beside}")


def check_package(name: str, installed: Mapping, needed: bool) -> Check:
    """One of torch, torch_xla, torchvision, libtpu, jax. One that is not `needed` may be missing, never mismatched."""
    pair, found = nearest_pair(installed), installed.get(name)
    expected, fix = getattr(pair, name), f"{PIP} install {pair.pip}"
    if name == "torch_xla" and "torch_tpu" in installed:
        fix = f"{PIP} uninstall -y torch_tpu && {fix}"
        finding = f"torch_tpu {installed['torch_tpu']} is installed " + (
            "beside torch_xla; the two cannot share an environment"
            if found
            else f"without torch_xla; these scripts need torch_xla {expected}: docs/torchtpu.md says what runs so"
        )
        return Check(name, "fail", finding, fix)
    if not found:
        return judge(name, False, f"not installed, expected {expected}", fix, needed)
    fits = fnmatch(found.split("+")[0], expected)  # 2.9.0+cpu is 2.9.0
    beside = "" if fits else f" beside torch_xla {installed.get('torch_xla', '(not installed)')}"
    return judge(name, fits, f"found {found}{beside}, expected {expected}", fix)


def fix_elsewhere(version: tuple, installed: Mapping) -> str:
    """What to do instead of installing into this Python, where that cannot work; "" where it can."""
    if "torch_tpu" in installed and "torch_xla" not in installed:  # it needs another torch: leave it alone
        return f"{PYTHON} -m venv .venv_xla && {INSTALL.replace('.venv', '.venv_xla')}"
    return check_python(version, installed).fix.partition("  #")[0]


def runs_by_torch(installed: Mapping) -> bool:
    """Whether this is an environment of requirements-compile.txt: scripts are compiled by torch itself."""
    numbers = re.match(r"(\d+)\.(\d+)", installed.get("torch", ""))
    return "torch_xla" not in installed and numbers is not None and tuple(map(int, numbers.groups())) >= (2, 11)


def check_gpu(dev_root: Path, search_path: list, installed: Mapping, limit: float) -> Check:
    """The driver of an NVIDIA GPU, the CUDA that torch was built with, and memory that others hold."""
    if not any(dev_root.glob("nvidia[0-9]*")):
        return Check("gpu", "skip", "no NVIDIA GPU (/dev/nvidia0)")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=limit, check=True).stdout
        name, driver, *mib = answer.splitlines()[0].split(", ")
        used, total = (float(number) / 1024 for number in mib)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return Check("gpu", "fail", f"its driver does not answer nvidia-smi: {error}", "sudo dmesg | grep -i nvidia")
    finding = f"{name}, driver {driver}, {used:.1f} of {total:.0f} GiB in use"
    if not runs_by_torch(installed):
        return Check("gpu", "ok", f"{finding}; only the torch.compile backend uses it: docs/torchtpu.md")
    texts = [file.read_text() for path in search_path if (file := Path(path or ".", "torch/version.py")).is_file()]
    cuda = texts and re.search(r"^cuda.*= '([\d.]+)'", texts[0], re.MULTILINE)
    if not cuda:
        fix = f"{PIP} install --force-reinstall torch=={installed['torch'].split('+')[0]}"
        return Check("gpu", "fail", f"{finding}; torch {installed['torch']} is built without CUDA", fix)
    finding += f"; torch {installed['torch']} is built with CUDA {cuda[1]}"
    return judge("gpu", used < 1, finding, "nvidia-smi  # says which process holds its memory", serious=False)


def check_tensorflow(installed: Mapping, wants_tpu: bool) -> Check:
    """The full tensorflow brings a TPU runtime of its own, which fights over the chip; tensorflow-cpu does not."""
    fix = f"{PIP} uninstall -y tensorflow && {PIP} install tensorflow-cpu"
    if "tensorflow" not in installed:
        return Check("tensorflow", "ok", "not installed, so nothing else loads libtpu")
    finding = f"tensorflow {installed['tensorflow']} is installed beside torch_xla; both would load libtpu"
    return judge("tensorflow", False, finding, fix, wants_tpu)


def find_libtpu(environment: Mapping, search_path: list) -> Path | None:
    """The libtpu.so torch_xla would load: TPU_LIBRARY_PATH, else the one inside torch_xla, else package libtpu."""
    if environment.get("TPU_LIBRARY_PATH"):
        return Path(environment["TPU_LIBRARY_PATH"])
    places = (Path(p or ".") / i for i in ("torch_xla/lib/libtpu.so", "libtpu/libtpu.so") for p in search_path)
    return next((place for place in places if place.is_file()), None)


def check_libtpu(library: Path, environment: Mapping, installed: Mapping, wants_tpu: bool, limit: float) -> Check:
    """Open the library in a child process: a truncated file kills the process that opens it."""
    fix = f"{PIP} install --force-reinstall --no-deps libtpu=={nearest_pair(installed).libtpu.rstrip('*')}"
    if environment.get("TPU_LIBRARY_PATH"):
        fix = "unset TPU_LIBRARY_PATH"
    if library is None:
        finding = "no libtpu.so found; without it neither a TPU nor --aot works"
        return judge("libtpu.so", False, finding, fix, wants_tpu or "libtpu" in installed)
    if not library.is_file():
        return Check("libtpu.so", "fail", f"TPU_LIBRARY_PATH says {library}, which is not a file", fix)
    source = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).GetPjrtApi"
    _, died = run_child(["-I", "-c", source, str(library)], environment, limit)
    return judge("libtpu.so", not died, f"{library} " + (f"cannot be loaded: {died}" if died else "loads"), fix)


# ---------------------------------------------------------------- the chip and the cloud: bus, nodes, holder, hosts


def find_chips(sys_root: Path) -> list:
    """Kinds of the TPU chips on the PCI bus, e.g. ["v5e", "v5e"]; the rule by which torch_xla picks its device."""
    folders = sorted(sys_root.glob("bus/pci/devices/*"))
    ids = [[(folder / name).read_text().strip() for name in ("vendor", "device")] for folder in folders]
    return [TPU_PCI_IDS[device] for vendor, device in ids if vendor == TPU_VENDOR and device in TPU_PCI_IDS]


def accelerator_type(chips: list) -> str:
    """The TPU_ACCELERATOR_TYPE of one host with these chips: ["v5e"] is v5litepod-1; other generations count cores."""
    if not chips:
        return ""
    name = {"v2/v3": "v3", "v5e": "v5litepod", "TPU7x": "tpu7x"}.get(chips[0], chips[0])
    return f"{name}-{len(chips) * (1 if chips[0] in ('v5e', 'v6e') else 2)}"


def check_chips(chips: list, wants_tpu: bool, where: str) -> Check:
    if chips or wants_tpu:
        kinds = ", ".join(sorted(set(chips))) or "no TPU is attached"
        found = f"{len(chips) or 'none'} on the PCI bus (vendor {TPU_VENDOR}): {kinds}"
        fix = GO_TO_TPU if where == "container" else GET_TPU.get(where, GO_TO_TPU)
        if "v2/v3" in chips:
            newer = "gcloud compute tpus accelerator-types list --zone ZONE  # what else there is: docs/tpu_vm.md"
            return judge("tpu chips", False, f"{found}; these scripts know v4 and later", newer, wants_tpu)
        return judge("tpu chips", bool(chips), found, fix)
    return Check("tpu chips", "skip", f"none on the PCI bus (vendor {TPU_VENDOR})")


def check_pjrt_device(device: str, environment: Mapping, chips: list, libtpu_found: bool) -> Check:
    """Which device torch_xla will choose in a program started from this shell, and why."""
    chosen, fix = environment.get("PJRT_DEVICE"), f"export PJRT_DEVICE={'TPU' if chips else 'CPU'}"
    if chosen is not None:
        why = f"PJRT_DEVICE={chosen} is set"
    elif environment.get("PJRT_SELECT_DEFAULT_DEVICE") == "0":
        chosen, why = "none", "PJRT_DEVICE is not set and PJRT_SELECT_DEFAULT_DEVICE=0 forbids choosing one"
    elif chips and libtpu_found:
        chosen, why = "TPU", "a TPU chip and libtpu were found"
    else:
        chosen, why = "CPU", "libtpu was not found" if chips else "no TPU chip was found"
        fix = f"{PIP} install {SUPPORTED_PAIRS[0].pip}"
    if device == "cpu":
        return Check("pjrt device", "ok", f"CPU as asked for (without --device cpu {chosen}: {why})")
    if device == "tpu" and not chips:
        return Check("pjrt device", "skip", "no TPU chip was found: see tpu chips")
    if chosen == "TPU":
        why = f"TPU: {why}" if chips else f"{why}, but this machine has no TPU chip"
        return judge("pjrt device", bool(chips), why, fix)
    if chosen != "CPU":
        return Check("pjrt device", "fail", f"{why}; expected TPU or CPU", fix)
    if chips:
        return Check("pjrt device", "fail", f"programs would silently run on the CPU: {why}", fix)
    fix = f"{PYTHON} setup_tpu.py --device cpu  # if the CPU is what you want"
    return Check("pjrt device", "warn", f"programs will run on the CPU: {why}", fix)


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
    names = ", ".join(closed or map(str, nodes))
    finding = f"user {uid} may not open {names}" if closed else f"{names} open to user {uid}"
    return judge("device nodes", not closed, finding, fix)


def check_locked_memory(dev_root: Path, chips: list, allowed: int, where: str) -> Check:
    """libtpu locks the memory that it gives to chips behind /dev/vfio (Google's documentation of GKE; not tried).

    allowed: bytes, of RLIMIT_MEMLOCK; -1 is any number of them. A login and a systemd service often have a few MiB.
    """
    if not chips or not list(dev_root.glob("vfio/[0-9]*")):
        return Check("locked memory", "skip", "no TPU chip behind /dev/vfio")
    found = "without limit" if allowed == resource.RLIM_INFINITY else f"up to {allowed / 2**20:,.4g} MiB"
    finding = f"programs may lock memory {found}, expected at least 1 GiB"
    shell = "sudo prlimit --memlock=unlimited:unlimited --pid $$  # in a systemd unit: LimitMEMLOCK=infinity"
    good = allowed == resource.RLIM_INFINITY or allowed >= GIB
    return judge("locked memory", good, finding, GET_TPU.get(where, shell), serious=False)


def check_holder(proc_root: Path, lock_file: Path, chips: list, uid: int, wants_tpu: bool, where: str) -> Check:
    """Which process has a TPU node or libtpu's lock file open. It is named, never killed; the file is never deleted."""
    if not chips:
        return Check("tpu holder", "skip", "no TPU chip on the PCI bus")
    holders, hidden = {}, "; processes outside the container are not visible" if where else ""
    for folder in proc_root.glob("[0-9]*"):
        try:
            targets = [os.readlink(link) for link in (folder / "fd").iterdir()]  # noqa: PTH115, readlink() is new in 3.9
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
    """ "Kaggle", "Colab", "GKE", "container", or "" for a machine of one's own."""
    named = (name for name, variables in SURROUNDINGS.items() if any(environment.get(v) for v in variables))
    marked = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    return next(named, "container" if marked else "")


def ask_metadata(url: str) -> str:
    """Raises OSError, which URLError and HTTPError are, for a server that is absent, silent, or has no such key."""
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on the VM's own link
    with direct.open(request, timeout=2) as reply:
        return reply.read().decode(errors="replace")


def check_cloud(environment: Mapping, base_url: str, chips: list, where: str, wants_tpu: bool) -> tuple:
    """(four checks, variables that a host without metadata adds to the environment of its programs).

    On a TPU VM `import torch_xla` asks the metadata server what TPU this is. Colab, Kaggle and GKE say it in variables.
    One host without a word about others is one host.
    """
    names = [name for name in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    index = environment.get("CLOUD_TPU_TASK_ID", environment.get("TPU_WORKER_ID", ""))
    said = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": accelerator_type(chips * (len(names) or 1))}
    said.update({} if len(names) > 1 else {"TPU_WORKER_ID": "0"})
    lacking = {name: value for name, value in said.items() if value and not environment.get(name)}
    finding, fix = "not asked: TPU_SKIP_MDS_QUERY is set", "unset TPU_SKIP_MDS_QUERY"
    finding += f", but not {' and '.join(lacking)}" if lacking else ""
    knows_tpu = knows_no_other = False
    if not environment.get("TPU_SKIP_MDS_QUERY"):
        try:
            tpu_env, hosts = (ask_metadata(base_url + f"attributes/{key}") for key in METADATA_KEYS)
        except OSError as error:
            finding, fix = f"the metadata server gave no TPU attributes ({error})", GET_TPU.get(where, GO_TO_TPU)
            knows_no_other = getattr(error, "code", 0) == 404  # it answers, and tells of none
        else:
            names = [host.split(":")[-1] for host in hosts.split(",") if host]
            lacking = {}
            knows_tpu = True
            index = re.search(r"WORKER_ID:\s*'?(\w*)|$", tpu_env)[1] or ""
            kind = re.search(r"ACCELERATOR_TYPE:\s*'?([^'\n]+)|$", tpu_env)[1] or "not named"
            finding = f"reachable, accelerator {kind}"
    needed = " ".join(f"{name}={value}" for name, value in lacking.items())
    is_alone = len(names) <= 1 and (where in SURROUNDINGS or knows_no_other)
    if lacking and is_alone:
        finding += f"; one host without word of others needs {needed}, which our scripts set"
    elif where in SURROUNDINGS:
        fix = f"export {needed}"
    metadata = judge("metadata", not lacking or is_alone, finding, fix)
    if not knows_tpu and not (wants_tpu and chips):
        why = "not needed without a TPU" if chips else "no TPU chip on the PCI bus"
        metadata = Check("metadata", "skip", why)
    place = where or ("TPU VM" if knows_tpu else "a plain machine")
    place = "Kubernetes" if place == "GKE" and not names and not index else place
    notices = check_notices(base_url if wants_tpu else "")
    checks = [Check("surroundings", "ok", place), metadata, check_hosts(names, index, where), notices]
    return checks, lacking if is_alone else {}


def check_hosts(names: list, index: str, where: str) -> Check:
    """How many hosts there are, which one this is, and which of the others is silent. names: or addresses, in order."""
    if not names and not index:
        return Check("hosts", "skip", "nothing says there is more than this one")
    hosts = len(names) or 1
    index = index or ("0" if hosts == 1 else "")
    if not index.isdigit() or int(index) >= hosts:
        finding = f"host index {index!r}, expected a number from 0 to {hosts - 1}, one for each of {hosts} hosts"
        return Check("hosts", "fail", finding, "export TPU_WORKER_ID=0  # the position in TPU_WORKER_HOSTNAMES")
    if hosts == 1:
        return Check("hosts", "ok", "1, this is index 0")
    silent = find_silent([name for i, name in enumerate(names) if i != int(index)])
    if not silent:
        finding = f"{hosts}, this is index {index}; start programs on all hosts at once (gcloud ... ssh --worker=all)"
        return Check("hosts", "ok", finding)
    said = ", ".join(f"index {names.index(name)}, {name} ({why})" for name, why in silent.items())
    finding = f"{hosts}, this is index {index}; silent, or behind a firewall: {said}"
    fix = "kubectl get pods -o wide" if where == "GKE" else f"{SSH} --worker={names.index(next(iter(silent)))}"
    return Check("hosts", "warn", finding, fix)


def find_silent(names: list, port: int = 22, limit: float = 2.0) -> dict:
    """{host: why} of those that do not answer, all asked at once. A refused connection is an answer.

    None of our programs listens before a run; ssh does on a TPU VM. A name that takes a second more than the limit to
    resolve counts as silent, and its thread is left behind.
    """
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


def check_notices(base_url: str) -> Check:
    """Is this machine about to go? The keys that a run watches too."""
    answered = False
    for key, values, fix in NOTICES if base_url else ():
        try:
            value = ask_metadata(base_url + key).strip().upper()
        except OSError as error:
            if hasattr(error, "code"):  # there is a server, without this key
                continue
            break
        if value in values:
            return Check("notices", "warn", f"{key} = {value}: this machine is about to go", fix)
        answered = True
    return Check("notices", *(("ok", "no preemption, no maintenance") if answered else ("skip", "nobody to ask")))


# ---------------------------------------------------------------- memory, container, environment


def check_memory(proc_root: Path, sys_root: Path, least_gib: float) -> Check:
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", (proc_root / "meminfo").read_text(), re.MULTILINE))
    total, available = (int(fields[key]) / 2**20 for key in ("MemTotal", "MemAvailable"))
    finding, limit = f"{total:.1f} GiB, {available:.1f} available", sys_root / "fs/cgroup/memory.max"
    allowed = int(limit.read_text()) / GIB if limit.is_file() and limit.read_text().strip() != "max" else total
    finding += f", limited to {allowed:.1f} by cgroup" if allowed < total else ""
    good = min(available, allowed) >= least_gib
    return judge("memory", good, f"{finding}, expected {least_gib:g} free", "ps aux --sort=-rss | head")


def check_shared_memory(dev_root: Path, least_gib: float, where: str) -> Check:
    """Data-loader workers hand over batches through /dev/shm; docker's default of 64 MB ends them with a bus error.

    A warning: of these scripts only a copy with the workers of images.examples has any.
    """
    folder = dev_root / "shm"
    size = shutil.disk_usage(folder).total / GIB if folder.is_dir() else 0
    found = (
        f"is {size:.2f} GiB" if size else "does not exist"
    ) + f", expected at least {least_gib:g} for data-loader workers"
    fix = DOCKER_RUN if where == "container" else f"sudo mount -o remount,size=16G {folder}"
    if where == "GKE":
        fix = f"in the pod's YAML: a volume emptyDir: {{medium: Memory}}, mounted at {folder}"
    return judge("shared memory", size >= least_gib, f"{folder} {found}", fix, serious=False)


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


def check_environment(environment: Mapping) -> Check:
    """Variables from older releases: dead ones mislead the reader, live ones change the numbers."""
    stale = {}
    harmful = False
    count = environment.get("CPU_NUM_DEVICES", "1")
    for name, value in sorted(environment.items()):
        for pattern, changes_numbers, why in STALE_VARIABLES:
            if fnmatch(name, pattern) and not (changes_numbers and value.lower() in ("", "0", "false", "strict")):
                stale[name], harmful = f"{name}={value} ({why})", harmful or changes_numbers
    if not re.fullmatch("[0-9]{1,3}", count) or not 0 < int(count) < 128:
        stale["CPU_NUM_DEVICES"], harmful = f"CPU_NUM_DEVICES={count} (expected a number of devices, 1 to 127)", True
    finding = "; ".join(stale.values()) or "no stale variable set"
    return judge("environment", not stale, finding, f"unset {' '.join(stale)}", harmful)


def check_user(uid: int, environment: Mapping) -> Check:
    """torch asks for the user's name when it is imported, and raises where there is none."""
    try:
        name = next((environment[v] for v in ("LOGNAME", "USER", "LNAME", "USERNAME") if environment.get(v)), "")
        return Check("user", "ok", name or pwd.getpwuid(uid).pw_name)
    except KeyError:
        finding = f"user id {uid} has no name, as in some containers: `import torch` fails; the scripts here set USER"
        return Check("user", "warn", finding, f"export USER=uid_{uid}")


def check_xla_flags(environment: Mapping, installed: Mapping, limit: float) -> Check:
    """XLA aborts the process at an unknown flag. Only the library knows its flags: a child is asked."""
    flags = environment.get("XLA_FLAGS", "").split()
    if not flags or "torch_xla" not in installed:
        reason = f"XLA_FLAGS={' '.join(flags)} cannot be tried: torch_xla is not installed"
        return Check("xla flags", "skip", reason) if flags else Check("xla flags", "ok", "XLA_FLAGS is not set")
    # What `import torch_xla` makes of the variable, without the seconds the rest of the import takes. The CPU
    # client reads the same flags, so the TPU stays untouched. _exit: no client to shut down in good order.
    source = "import os, torch, _XLAC; _XLAC._init_computation_client(); os._exit(0)"
    tried = {**environment, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
    tried["XLA_FLAGS"] = " ".join([*flags, "--xla_cpu_enable_fast_math=false"])  # which torch_xla adds
    _, died = run_child(["-c", source], tried, limit)
    if died and not re.search("XLA_FLAGS|Flag parsing", died):  # torch does not load: not the fault of the flags
        return Check("xla flags", "skip", f"XLA_FLAGS={' '.join(flags)} cannot be tried: {died}")
    unknown = died.partition("Unknown flag in XLA_FLAGS:")[2].split()  # XLA names them all
    kept = " ".join(f for f in flags if unknown and f not in unknown)
    fix = f"export XLA_FLAGS='{kept}'" if kept else "unset XLA_FLAGS"
    moved = [f for f in unknown if f.startswith("--xla_tpu")]  # those have a variable of their own
    if moved:
        fix += f" && export LIBTPU_INIT_ARGS='{' '.join([*environment.get('LIBTPU_INIT_ARGS', '').split(), *moved])}'"
    return judge("xla flags", not died, f"would abort every program: {died}" if died else " ".join(flags), fix)


# ---------------------------------------------------------------- child processes, as the parent sees them


def run_child(arguments: list, environment: Mapping, limit: float) -> tuple:
    """Run Python: ({name: Check} it reported in lines "@@ [name, status, finding, fix]", why it died or "")."""
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, timeout=limit)
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
    elif died.startswith("no answer"):
        fix = f"{PYTHON} setup_tpu.py --time_limit {4 * limit:g}  # several hosts: start it on all of them at once"
    return [c._replace(fix=c.fix or fix) if c.status == "fail" else c for c in map(results.get, names)]


def check_work(device: str, environment: Mapping, installed: Mapping, limit: float, chips: list) -> list:
    names = ["import", "matrix product", "training step", "all-reduce"]
    reason = "" if "torch_xla" in installed else "torch_xla is not installed"
    if device == "tpu" and not chips:  # libtpu would look for one until the time limit
        reason = reason or "no TPU chip on the PCI bus"
    if reason:
        return [Check(name, "skip", reason) for name in names]
    tried = environment if device == "auto" else {**environment, "PJRT_DEVICE": device.upper()}
    reinstall = f"{PIP} install --force-reinstall {nearest_pair(installed).pip}"
    return ask_child("child_work", "", names, tried, limit, reinstall)


def check_aot(target: str, environment: Mapping, installed: Mapping, limit: float) -> Check:
    """The same training step through the compiler in libtpu, with no TPU attached."""
    if not target or not Path(__file__).with_name("tpu_compiler").is_dir():
        reason = "tpu_compiler/, which asks the compiler, is not beside setup_tpu.py"
        return Check("aot", "skip", reason if target else "not asked for (--aot v5litepod-8)")
    fix = f"{PIP} install {SUPPORTED_PAIRS[0].pip}"  # the pair tpu_compiler is written for
    missing = [name for name in ("torch_xla", "libtpu", "jax") if name not in installed]
    if missing:
        return Check("aot", "fail", f"needs {', '.join(missing)}, not installed", fix)
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


# ---------------------------------------------------------------- what runs inside a child process


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
    """Every check, in the order of the report."""
    installed = installed_versions(search_path)
    elsewhere = fix_elsewhere(sys.version_info, installed)
    for check in look(options, environment, root, search_path, installed):
        yield check._replace(fix=elsewhere) if elsewhere and PIP in check.fix else check


def look(
    options: argparse.Namespace, environment: Mapping, root: Path, search_path: list, installed: Mapping
) -> Iterator[Check]:
    """What waits for a network or a child process waits at the same time."""
    sys_root = root / "sys"
    dev_root = root / "dev"
    proc_root = root / "proc"
    lock_file = root / "tmp/libtpu_lockfile"
    limit = options.time_limit
    uid = os.getuid()
    device = options.device
    chips, libtpu = find_chips(sys_root), find_libtpu(environment, search_path)
    wants_tpu, where = device == "tpu" or (device == "auto" and bool(chips)), find_surroundings(root, environment)
    # before any child of ours may open the chip
    holder = check_holder(proc_root, lock_file, chips, uid, wants_tpu, where)
    with ThreadPoolExecutor() as pool:
        asked_cloud = pool.submit(check_cloud, environment, METADATA_URL, chips, where, wants_tpu)
        asked_libtpu = pool.submit(check_libtpu, libtpu, environment, installed, wants_tpu, limit)
        asked_bucket = pool.submit(check_bucket, options.bucket, installed, environment, limit)
        flags, user = check_xla_flags(environment, installed, limit), check_user(uid, environment)
        usable = {k: v for k, v in environment.items() if k != "XLA_FLAGS" or flags.status == "ok"}
        if user.status != "ok":
            usable["USER"] = f"uid_{uid}"
        if chips:  # torch_xla's import asks for the slice wherever there are some
            usable.update(asked_cloud.result()[1])
        asked_work = pool.submit(check_work, device, usable, installed, limit, chips)
        asked_aot = pool.submit(check_aot, options.aot, usable, installed, limit)
        if runs_by_torch(installed) and not wants_tpu:
            finding = f"{installed['torch']}, without torch_xla: the torch.compile backend, docs/torchtpu.md"
            yield Check("torch", "ok", finding)
        else:
            needed = ("torch", "torch_xla", "libtpu") if wants_tpu else ("torch", "torch_xla")
            yield check_python(sys.version_info, installed)
            for name in ("torch", "torch_xla", "torchvision", "libtpu", "jax"):
                yield check_package(name, installed, name in needed)
        yield check_gpu(dev_root, search_path, installed, limit)
        yield check_tensorflow(installed, wants_tpu)
        yield asked_libtpu.result()
        yield check_pjrt_device(device, environment, chips, libtpu is not None)
        yield check_chips(chips, wants_tpu, where)
        yield check_device_nodes(dev_root, chips, uid, where)
        yield check_locked_memory(dev_root, chips, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], where)
        yield holder
        yield from asked_cloud.result()[0]
        yield check_memory(proc_root, sys_root, least_gib=2)
        yield check_shared_memory(dev_root, 1, where)
        yield check_container(proc_root, sys_root, where, wants_tpu)
        yield check_environment(environment)
        yield user
        yield flags
        yield asked_bucket.result()
        yield from asked_work.result()
        yield asked_aot.result()


def parse_arguments(arguments: list) -> argparse.Namespace:
    """Both --snake_case and --kebab-case; anything unknown ends with exit code 2 and the nearest name."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("auto", "cpu", "tpu"), default="auto", help="what programs should run on")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--aot", default="", metavar="SLICE", help="compile a training step for it, e.g. v5litepod-8")
    parser.add_argument("--bucket", default="", metavar="gs://NAME", help="check the credentials for this bucket")
    parser.add_argument("--time_limit", type=float, default=60.0, metavar="SECONDS", help="for a child (default 60)")
    parts = [argument.partition("=") for argument in arguments]  # --time-limit=5 is --time_limit=5
    plain = [("--" + n[2:].replace("-", "_") if n[:2] == "--" else n) + e + v for n, e, v in parts]
    options, unknown = parser.parse_known_args(plain)
    if unknown:
        names = ["--help", *(f"--{name}" for name in vars(options))]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], names, n=1)
        parser.error(f"unknown option {unknown[0]}; " + (f"did you mean {near[0]}?" if near else "see --help"))
    if options.bucket and not re.match(r"gs://[a-z0-9][\w.-]+(/|$)", options.bucket):
        parser.error(f"--bucket {options.bucket}: expected gs://NAME or gs://NAME/FOLDER")
    if options.time_limit <= 0:
        parser.error(f"--time_limit {options.time_limit:g}: expected more than 0 seconds")
    if options.aot:
        look_up = "import sys; sys.path.insert(0, sys.argv[1]); from tpu_utils.options.virtual_slice import *; "
        look_up += "prepare_environment(sys.argv[2])"
        _, died = run_child(["-c", look_up, HERE, options.aot], os.environ, options.time_limit)
        near = difflib.get_close_matches(options.aot, re.split("[ ,]+", died.partition(";")[2]), n=1)
        if died.startswith("ValueError"):
            parser.error(f"--aot: {died}" + (f"; did you mean {near[0]}?" if near else ""))
    return options


def main() -> int:
    options = parse_arguments(sys.argv[1:])
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
