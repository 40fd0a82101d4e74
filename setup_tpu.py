"""Examine this machine: can it train with PyTorch/XLA, on a TPU or on the CPU backend, and if not, what to do.

Run:     python setup_tpu.py                          # whatever this machine has
         python setup_tpu.py --device cpu             # no TPU wanted
         python setup_tpu.py --device tpu --bucket gs://my-bucket/runs
         python setup_tpu.py --aot v5litepod-8        # also ask the TPU compiler, no TPU needed
Expect:  one line per check (ok, warn, fail, skip) and, below a problem, the command that fixes it.
         Exit code 0 nothing failed, 1 something failed, 2 wrong usage. --json prints the same for machines.

Only the standard library is imported here, so this runs where nothing is installed, on any Python from 3.8 on.
torch_xla is tried in child processes with a time limit: a wrong flag or a mismatched library aborts the child,
never the report.
Nothing on the machine is changed: no process is killed, no lock file deleted, nothing installed.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

GIB = 2**30
GO_TO_TPU = "gcloud compute tpus tpu-vm ssh NAME --zone ZONE"
DOCKER_RUN = "docker run --privileged --net=host --shm-size=16G IMAGE"


class VersionPair(NamedTuple):
    """Releases that work together. Versions are fnmatch patterns, `pip` is what `pip install` is given."""

    torch: str
    torch_xla: str
    torchvision: str
    libtpu: str
    jax: str
    python: tuple  # first and last supported (major, minor)
    pip: str


# THE table of supported versions, newest first; the tests hold requirements.txt to its first row.
SUPPORTED_PAIRS = (
    VersionPair(
        *("2.9.0", "2.9.0", "0.24.*", "0.0.21", "0.7.1"),
        python=((3, 10), (3, 13)),
        pip="torch==2.9.0 'torch_xla[tpu,pallas]==2.9.0' torchvision==0.24.0",
    ),
    VersionPair(
        *("2.8.*", "2.8.*", "0.23.*", "0.0.17", "0.6.2"),
        python=((3, 11), (3, 13)),
        pip="torch==2.8.0 'torch_xla[tpu,pallas]==2.8.1' torchvision==0.23.0",
    ),
)

TPU_VENDOR = "0x1ae0"
TPU_PCI_IDS = {  # as torch_xla/_internal/tpu.py counts them; other Google devices are network cards and disks
    "0x0027": "v2/v3",
    "0x0056": "test",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "TPU7x",
}
METADATA_URL = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
AOT_TOPOLOGIES = {  # gcloud name: (name libtpu knows, chips per host, devices)
    "v4-8": ("v4:2x2x1", (2, 2, 1), 8),
    "v5litepod-1": ("v5e:1x1", (1, 1, 1), 1),
    "v5litepod-4": ("v5e:2x2", (2, 2, 1), 4),
    "v5litepod-8": ("v5e:2x4", (2, 4, 1), 8),
    "v5litepod-16": ("v5e:4x4", (2, 2, 1), 16),
    "v5p-8": ("v5p:2x2x1", (2, 2, 1), 4),
    "v6e-4": ("v6e:2x2", (2, 2, 1), 4),
    "v6e-8": ("v6e:2x4", (2, 4, 1), 8),
    "v6e-16": ("v6e:4x4", (2, 2, 1), 16),
}
BFLOAT16 = "turns float32 into bfloat16 behind torch's back; use torch.autocast('xla')"
# Variables that do nothing, or something nobody expects: (pattern, is it harmful, why)
STALE_VARIABLES = (
    ("XRT_*", False, "read by nobody: XRT is gone"),
    ("TPU_NUM_DEVICES", False, "read by nobody since 2.5; TPU_VISIBLE_CHIPS selects chips"),
    ("XLA_USE_FP16", False, "read by nobody"),
    ("XLA_DOWNCAST_FP16", False, "read by nobody"),
    ("PT_XLA_DEBUG", False, "deprecated; use PT_XLA_DEBUG_LEVEL"),
    ("XLA_USE_BF16", True, BFLOAT16),
    ("XLA_DOWNCAST_BF16", True, BFLOAT16),
    ("XLA_USE_SPMD", True, "puts every process into SPMD mode; scripts call torch_xla.runtime.use_spmd()"),
)


class Check(NamedTuple):
    """One line of the report. `status` is ok, warn, fail or skip; warn and fail carry the command that fixes it."""

    name: str
    status: str
    finding: str
    fix: str = ""


# ---------------------------------------------------------------- Python and packages, read from their metadata


def check_python(version: tuple, installed: Mapping) -> Check:
    """`version` is (major, minor, micro)."""
    pair, found = nearest_pair(installed), ".".join(map(str, version[:3]))
    first, last = pair.python
    if first <= tuple(version[:2]) <= last:
        return Check("python", "ok", found)
    expected = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    fix = "python3.11 -m venv .venv && . .venv/bin/activate"
    return Check("python", "fail", f"found {found}, torch_xla {pair.torch_xla} needs {expected}", fix)


def installed_versions(search_path: list) -> dict:
    """{distribution name: version} without importing anything; an unreadable version is "unknown"."""
    versions: dict = {}
    for distribution in importlib.metadata.distributions(path=search_path):
        try:
            name, version = distribution.metadata["Name"], distribution.metadata["Version"]
        except Exception:  # metadata of a half-removed package: whatever it raises, it names no package
            continue
        if name:  # the first on the path is the one Python would import
            versions.setdefault(re.sub(r"[-_.]+", "_", name).lower(), version or "unknown")
    return versions


def nearest_pair(installed: Mapping) -> VersionPair:
    """The row to compare with: the one torch_xla belongs to, else the one torch belongs to, else the newest."""
    for name in ("torch_xla", "torch"):
        for pair in SUPPORTED_PAIRS:
            if fnmatch(installed.get(name, "").split("+")[0], getattr(pair, name)):
                return pair
    return SUPPORTED_PAIRS[0]


def check_package(name: str, installed: Mapping, needed: bool) -> Check:
    """One of torch, torch_xla, torchvision, libtpu, jax. One that is not `needed` may be missing, never mismatched."""
    pair = nearest_pair(installed)
    expected, fix = getattr(pair, name), f"pip install {pair.pip}"
    if name not in installed:
        return Check(name, "fail" if needed else "warn", f"not installed, expected {expected}", fix)
    found = installed[name]
    if name == "torch_xla" and "torch_tpu" in installed:
        return Check(name, "fail", "torch_tpu is installed beside torch_xla; the two cannot share an environment", fix)
    if not fnmatch(found.split("+")[0], expected):  # 2.9.0+cpu is 2.9.0
        beside = "" if name == "torch_xla" else f" beside torch_xla {installed.get('torch_xla', '(not installed)')}"
        return Check(name, "fail", f"found {found}{beside}, expected {expected}", fix)
    return Check(name, "ok", found)


def check_tensorflow(installed: Mapping, wants_tpu: bool) -> Check:
    """The full tensorflow brings a TPU runtime of its own; tensorflow-cpu does not."""
    if "tensorflow" not in installed:
        return Check("tensorflow", "ok", "no full tensorflow beside torch_xla")
    finding = f"tensorflow {installed['tensorflow']} beside torch_xla: both load libtpu and can fight over the chip"
    fix = "pip uninstall -y tensorflow && pip install tensorflow-cpu"
    return Check("tensorflow", "fail" if wants_tpu else "warn", finding, fix)


def find_libtpu(environment: Mapping, search_path: list) -> Path | None:
    """The libtpu.so torch_xla would load: TPU_LIBRARY_PATH, else the one inside torch_xla, else package libtpu."""
    if environment.get("TPU_LIBRARY_PATH"):
        return Path(environment["TPU_LIBRARY_PATH"])
    for inside in ("torch_xla/lib/libtpu.so", "libtpu/libtpu.so"):
        for folder in search_path:
            if (Path(folder or ".") / inside).is_file():
                return Path(folder or ".") / inside
    return None


def check_libtpu_loads(
    library: Path | None, environment: Mapping, installed: Mapping, wants_tpu: bool, time_limit: float
) -> Check:
    """Open the library in a child process: a truncated file kills the process that opens it."""
    fix = f"pip install --force-reinstall --no-deps libtpu=={nearest_pair(installed).libtpu}"
    if environment.get("TPU_LIBRARY_PATH"):
        fix = "unset TPU_LIBRARY_PATH"
    if library is None:
        finding = "no libtpu.so found; without it neither a TPU nor --aot works"
        return Check("libtpu.so", "fail" if wants_tpu or "libtpu" in installed else "warn", finding, fix)
    if not library.is_file():
        return Check("libtpu.so", "fail", f"TPU_LIBRARY_PATH says {library}, which is not a file", fix)
    source = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).GetPjrtApi"
    child = run_child([sys.executable, "-I", "-c", source, str(library)], environment, time_limit)
    if child.died:
        return Check("libtpu.so", "fail", f"{library} cannot be loaded: {child.died}", fix)
    return Check("libtpu.so", "ok", f"{library} loads ({library.stat().st_size / 2**20:.0f} MiB)")


# ---------------------------------------------------------------- the chip: bus, nodes, who holds it


def find_chips(sys_root: Path) -> list:
    """Kinds of the TPU chips on the PCI bus, e.g. ["v5e", "v5e"]; the same rule torch_xla uses to pick its device."""
    chips = []
    for vendor in sorted(sys_root.glob("bus/pci/devices/*/vendor")):
        device = vendor.with_name("device")
        if vendor.read_text().strip() == TPU_VENDOR and device.is_file():
            chips += [TPU_PCI_IDS[i] for i in [device.read_text().strip()] if i in TPU_PCI_IDS]
    return chips


def check_chips(chips: list, wants_tpu: bool) -> Check:
    if chips:
        return Check("tpu chips", "ok", f"{len(chips)} on the PCI bus: {', '.join(sorted(set(chips)))}")
    finding = f"none on the PCI bus (vendor {TPU_VENDOR})"
    if not wants_tpu:
        return Check("tpu chips", "skip", finding)
    return Check("tpu chips", "fail", f"{finding}: not a TPU VM", GO_TO_TPU)


def check_pjrt_device(device: str, environment: Mapping, chips: list, libtpu_found: bool) -> Check:
    """Which device torch_xla will choose in a program started from this shell, and why."""
    chosen = environment.get("PJRT_DEVICE")
    if chosen is not None:
        why = f"PJRT_DEVICE={chosen} is set"
    elif environment.get("PJRT_SELECT_DEFAULT_DEVICE") == "0":
        chosen, why = "", "PJRT_DEVICE is not set and PJRT_SELECT_DEFAULT_DEVICE=0 forbids choosing one"
    elif chips and libtpu_found:
        chosen, why = "TPU", "a TPU chip and libtpu were found"
    else:
        chosen, why = "CPU", "no TPU chip was found" if not chips else "libtpu was not found"
    if device == "cpu":
        return Check("pjrt device", "ok", f"CPU as asked for (without --device cpu {chosen or 'none'}: {why})")
    if chosen not in ("TPU", "CPU"):
        finding = f"{why}; expected TPU or CPU"
        return Check("pjrt device", "fail", finding, f"export PJRT_DEVICE={'TPU' if chips else 'CPU'}")
    if chosen == "CPU" and (chips or device == "tpu"):
        fix = (
            "export PJRT_DEVICE=TPU"
            if "is set" in why
            else f"pip install {SUPPORTED_PAIRS[0].pip}"
            if chips
            else GO_TO_TPU
        )
        return Check("pjrt device", "fail", f"programs would silently run on the CPU: {why}", fix)
    if chosen == "TPU" and not chips:
        return Check("pjrt device", "fail", f"{why}, but this machine has no TPU chip", "export PJRT_DEVICE=CPU")
    if chosen == "CPU":
        finding = f"programs will run on the CPU: {why}"
        return Check("pjrt device", "warn", finding, "python setup_tpu.py --device cpu  # if the CPU is what you want")
    return Check("pjrt device", "ok", f"{chosen}: {why}")


def may_open(path: Path, uid: int, groups: set) -> bool:
    """May this user open `path` for reading and writing? Worked out from the mode, so it can be asked for any user."""
    status = path.stat()
    if uid == 0:
        return True
    shift = 6 if status.st_uid == uid else 3 if status.st_gid in groups else 0
    return (status.st_mode >> shift) & 0o6 == 0o6


def check_device_nodes(dev_root: Path, chips: list, uid: int, groups: set, container: str) -> Check:
    """/dev/accel* (older images) or /dev/vfio/<number> (newer ones), one per chip, open to this user."""
    if not chips:
        return Check("device nodes", "skip", "no TPU chip on the PCI bus")
    nodes = [p for p in [*dev_root.glob("accel*"), *dev_root.glob("vfio/*")] if re.search(r"\d$", p.name)]
    if len(nodes) < len(chips):
        fix = DOCKER_RUN if container else "sudo reboot"
        finding = f"{len(chips)} chips but {len(nodes)} nodes under {dev_root} (accel*, vfio/*)"
        return Check("device nodes", "fail", finding, fix)
    control = [p for p in [dev_root / "vfio" / "vfio"] if p.exists() and any(n.parent.name == "vfio" for n in nodes)]
    closed = [str(p) for p in sorted(nodes + control) if not may_open(p, uid, groups)]
    if closed:
        finding = f"user {uid} may not open {', '.join(closed)}"
        fix = DOCKER_RUN.replace("IMAGE", "--user root IMAGE") if container else f"sudo chmod a+rw {' '.join(closed)}"
        return Check("device nodes", "fail", finding, fix)
    return Check("device nodes", "ok", f"{', '.join(str(p) for p in sorted(nodes))} open to user {uid}")


def check_holder(proc_root: Path, lock_file: Path, chips: list, uid: int, wants_tpu: bool, container: str) -> Check:
    """Which process has a TPU node or libtpu's lock file open. It is named, never killed; the file is never deleted."""
    if not chips:
        return Check("tpu holder", "skip", "no TPU chip on the PCI bus")
    holders, unreadable = {}, 0
    for folder in proc_root.glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        try:
            targets = [os.readlink(link) for link in (folder / "fd").iterdir()]  # noqa: PTH115, readlink() is new in 3.9
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except PermissionError:
            unreadable += 1
            continue
        except OSError:  # the process ended while we looked
            continue
        held = [t for t in targets if t == str(lock_file) or re.match(r"/dev/(accel|vfio/)\d+$", t)]
        if held:
            holders[int(folder.name)] = f"pid {folder.name} ({command[:80]}) has {held[0]} open"
    if holders:
        finding = "; ".join(text for _, text in sorted(holders.items()))
        fix = f"kill {' '.join(map(str, sorted(holders)))}  # once you know whose work it is"
        return Check("tpu holder", "fail" if wants_tpu else "warn", finding, fix)
    if lock_file.exists() and not may_open(lock_file, uid, {os.getgid()}):
        owner = lock_file.stat().st_uid
        finding = f"{lock_file} belongs to user {owner} and user {uid} may not open it, so libtpu will not start"
        return Check("tpu holder", "fail" if wants_tpu else "warn", finding, f"sudo chmod a+rw {lock_file}")
    hidden = f"; {unreadable} processes of other users can only be looked into with sudo" if unreadable else ""
    beyond = "; processes outside the container are not visible" if container else ""
    return Check("tpu holder", "ok", f"no process seen to hold the TPU{hidden}{beyond}")


# ---------------------------------------------------------------- the cloud: metadata, hosts, bucket


def read_metadata(base_url: str, seconds: float) -> dict:
    """The two attributes torch_xla asks for, or {"error": why not}. Both are needed on a TPU VM."""
    found = {}
    for key in ("tpu-env", "worker-network-endpoints"):
        request = urllib.request.Request(base_url + key, headers={"Metadata-Flavor": "Google"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as reply:
                found[key] = reply.read().decode(errors="replace")
        except (OSError, ValueError) as error:  # HTTPError and URLError are OSErrors
            return {"error": f"{key}: {error}"}
    return found


def check_metadata(environment: Mapping, metadata: Mapping, wants_tpu: bool) -> Check:
    """With a chip on the bus, `import torch_xla` itself asks the metadata server and fails without an answer."""
    if environment.get("TPU_SKIP_MDS_QUERY"):
        missing = [v for v in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID") if not environment.get(v)]
        if wants_tpu and missing:
            finding = f"TPU_SKIP_MDS_QUERY is set, but not {' and '.join(missing)}"
            return Check("metadata", "fail", finding, "unset TPU_SKIP_MDS_QUERY")
        return Check("metadata", "ok", "not asked: TPU_SKIP_MDS_QUERY is set")
    if "error" not in metadata:
        kind = re.search(r"ACCELERATOR_TYPE:\s*'?([^'\n]+)", metadata["tpu-env"])
        return Check("metadata", "ok", f"reachable, accelerator {kind[1] if kind else 'not named'}")
    if not wants_tpu:
        return Check("metadata", "skip", "not reachable, not needed without a TPU")
    fix = f"{DOCKER_RUN}  # outside a container: start this on a TPU VM"
    return Check("metadata", "fail", f"the metadata server gave no TPU attributes ({metadata['error']})", fix)


def check_hosts(environment: Mapping, metadata: Mapping) -> Check:
    """How many hosts the slice has and which one this is."""
    if environment.get("TPU_SKIP_MDS_QUERY") or "error" in metadata:
        names = [n for n in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if n]
        index = environment.get("CLOUD_TPU_TASK_ID", environment.get("TPU_WORKER_ID", ""))
        if not names and not index:
            return Check("hosts", "skip", "nothing says there is more than this one")
    else:
        names = metadata["worker-network-endpoints"].split(",")
        match = re.search(r"WORKER_ID:\s*'?(\w*)", metadata["tpu-env"])
        index = match[1] if match else ""
    hosts = max(len(names), 1)
    if not index.isdigit() or int(index) >= hosts:
        finding = f"host index {index!r}, expected a number from 0 to {hosts - 1}, one for each of {hosts} hosts"
        return Check("hosts", "fail", finding, "export TPU_WORKER_ID=0  # the position in TPU_WORKER_HOSTNAMES")
    note = "" if hosts == 1 else "; start programs on all hosts at once (gcloud ... ssh --worker=all)"
    return Check("hosts", "ok", f"{hosts}, this is index {index}{note}")


def check_bucket(bucket: str, installed: Mapping, environment: Mapping, time_limit: float) -> Check:
    """May the credentials of this machine write to gs://bucket? One request, which creates nothing."""
    if not bucket:
        return Check("bucket", "skip", "none given (--bucket gs://...)")
    if "google_cloud_storage" not in installed:
        return Check("bucket", "fail", "google-cloud-storage is not installed", "pip install google-cloud-storage")
    name = bucket[len("gs://") :].split("/")[0]
    child = run_child(child_command("child_bucket", name), environment, time_limit)
    if "bucket" in child.results:
        return child.results["bucket"]
    login = "gcloud auth application-default login"
    if "NotFound" in child.died:
        return Check("bucket", "fail", f"gs://{name} does not exist", f"gcloud storage buckets create gs://{name}")
    return Check("bucket", "fail", f"gs://{name}: {child.died}", login)


# ---------------------------------------------------------------- memory, environment, cache, container


def check_memory(proc_root: Path, sys_root: Path, least_gib: float) -> Check:
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", (proc_root / "meminfo").read_text(), re.MULTILINE))
    total, available = (int(fields.get(k, 0)) / 2**20 for k in ("MemTotal", "MemAvailable"))
    finding = f"{total:.1f} GiB, {available:.1f} available"
    limit = sys_root / "fs" / "cgroup" / "memory.max"
    text = limit.read_text().strip() if limit.is_file() else "max"
    if text.isdigit() and int(text) < total * GIB:
        available, finding = min(available, int(text) / GIB), f"{finding}, limited to {int(text) / GIB:.1f} by cgroup"
    if available < least_gib:
        return Check("memory", "fail", f"{finding}, expected {least_gib:g} free", "ps aux --sort=-rss | head")
    return Check("memory", "ok", finding)


def check_shared_memory(dev_root: Path, least_gib: float, wants_tpu: bool, container: str) -> Check:
    """Data-loader workers hand over batches through /dev/shm; docker's default of 64 MB ends them with a bus error."""
    folder, status = dev_root / "shm", "fail" if wants_tpu else "warn"
    fix = DOCKER_RUN if container else f"sudo mount -o remount,size=16G {folder}"
    if not folder.is_dir():
        return Check("shared memory", status, f"{folder} does not exist", fix)
    size = shutil.disk_usage(folder).total / GIB
    if size < least_gib:
        return Check("shared memory", status, f"{folder} is {size:.2f} GiB, expected at least {least_gib:g}", fix)
    return Check("shared memory", "ok", f"{folder} is {size:.1f} GiB")


def check_environment(environment: Mapping) -> Check:
    """Variables from older releases: dead ones mislead the reader, live ones change the numbers."""
    dead, harmful = {}, {}
    for name, value in sorted(environment.items()):
        for pattern, is_harmful, why in STALE_VARIABLES:
            if fnmatch(name, pattern) and not (is_harmful and value.lower() in ("", "0", "false")):
                (harmful if is_harmful else dead)[name] = f"{name}={value} ({why})"
    count = environment.get("CPU_NUM_DEVICES", "1")
    if not count.isdigit() or int(count) == 0:
        harmful["CPU_NUM_DEVICES"] = f"CPU_NUM_DEVICES={count} (expected a number of devices, 1 or more)"
    if dead or harmful:
        finding = "; ".join([*harmful.values(), *dead.values()])
        return Check("environment", "fail" if harmful else "warn", finding, f"unset {' '.join([*harmful, *dead])}")
    return Check("environment", "ok", "no stale variable set")


def check_xla_flags(environment: Mapping, installed: Mapping, time_limit: float) -> Check:
    """XLA aborts the process at an unknown flag. Only the library knows its flags: a child is asked."""
    flags = environment.get("XLA_FLAGS", "").strip()
    if not flags:
        return Check("xla flags", "ok", "XLA_FLAGS is not set")
    if "torch_xla" not in installed:
        return Check("xla flags", "skip", f"XLA_FLAGS={flags} cannot be tried: torch_xla is not installed")
    # What `import torch_xla` makes of the variable, without the seconds the rest of the import takes. The CPU
    # client reads the same flags, so the TPU stays untouched. _exit: no client to shut down in good order.
    source = "import os, torch, _XLAC; _XLAC._init_computation_client(); os._exit(0)"
    tried = {**environment, "PJRT_DEVICE": "CPU", "XLA_FLAGS": f"{flags} --xla_cpu_enable_fast_math=false"}
    tried.pop("CPU_NUM_DEVICES", None)  # has a check of its own
    child = run_child([sys.executable, "-c", source], tried, time_limit)
    if not child.died:
        return Check("xla flags", "ok", flags)
    if not re.search("XLA_FLAGS|Flag parsing", child.died):  # torch itself does not load: not the fault of the flags
        return Check("xla flags", "skip", f"XLA_FLAGS={flags} cannot be tried: {child.died}")
    unknown = set(re.sub(r".*in XLA_FLAGS:", "", child.died).split())
    kept = " ".join(f for f in flags.split() if f not in unknown) if "Unknown flag" in child.died else ""
    fix = f"export XLA_FLAGS='{kept}'" if kept else "unset XLA_FLAGS"
    moved = " ".join(f for f in flags.split() if f in unknown and f.startswith("--xla_tpu"))
    if moved:  # flags of the TPU compiler have a variable of their own
        fix += f" && export LIBTPU_INIT_ARGS='{' '.join([*environment.get('LIBTPU_INIT_ARGS', '').split(), moved])}'"
    return Check("xla flags", "fail", f"would abort every program: {child.died}", fix)


def check_compile_cache(folder: str) -> Check:
    """The persistent compile cache must be a folder this user can write to."""
    if not folder:
        return Check("compile cache", "skip", "none given (--compile_cache DIR or XLA_PERSISTENT_CACHE_PATH)")
    existing = Path(folder).absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent  # nothing is created: the nearest folder that exists must be writable
    try:
        with tempfile.TemporaryFile(dir=str(existing)):
            pass
    except OSError as error:
        finding = f"{folder} is not writable: {existing}: {error.strerror}"
        return Check("compile cache", "fail", finding, "export XLA_PERSISTENT_CACHE_PATH=$HOME/.cache/torch_xla")
    return Check("compile cache", "ok", f"{folder} is writable")


def find_container(root: Path, environment: Mapping) -> str:
    """ "kubernetes", "container" or "" on a plain machine."""
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    return "container" if any((root / f).exists() for f in (".dockerenv", "run/.containerenv")) else ""


def check_container(proc_root: Path, sys_root: Path, container: str, wants_tpu: bool) -> Check:
    """libtpu maps the chip's registers, and the hosts of a slice meet over the network of the machine."""
    if container != "container":
        reason = "on kubernetes the device plugin grants chip and network" if container else "not inside one"
        return Check("container", "skip", reason)
    bounding = re.search(r"CapBnd:\s*([0-9a-f]+)", (proc_root / "self" / "status").read_text())
    faults = []
    if not bounding or not int(bounding[1], 16) >> 21 & 1:  # CAP_SYS_ADMIN, which docker takes without --privileged
        faults.append("not privileged (it cannot open a TPU)")
    # a network card has a device behind it; the virtual pair of a bridged container has none
    if not any((card / "device").exists() for card in sys_root.glob("class/net/*")):
        faults.append("not on the network of the host (no network card in sight)")
    if not faults:
        return Check("container", "ok", "privileged, on the network of the host")
    if not wants_tpu:
        return Check("container", "skip", f"{' and '.join(faults)}, which only a TPU needs")
    return Check("container", "fail", " and ".join(faults), DOCKER_RUN)


# ---------------------------------------------------------------- real work, in child processes


class Child(NamedTuple):
    """What a child process left: {name: Check} it reported, why it died ("" when it did not), whether out of time."""

    results: dict
    died: str
    timed_out: bool = False


def last_words(stderr: str) -> str:
    """The line that says why a process died: XLA's error and fatal lines, else the last line (the exception)."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [re.sub(r"^\S+ \S+ [EF] \S+\] ", "", line) for line in lines if re.match(r"\d{4}-\S+ \S+ [EF] ", line)]
    return " ".join(fatal[:2] or lines[-1:])[:400]


def run_child(command: list, environment: Mapping, time_limit: float) -> Child:
    """Run `command` and read the "@@ [name, status, finding, fix]" lines it prints; what it reported survives it."""
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, timeout=time_limit)
        code, stdout, stderr = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        code, stdout, stderr = None, error.stdout or b"", error.stderr or b""
    reported = [json.loads(line[3:]) for line in stdout.decode(errors="replace").splitlines() if line[:3] == "@@ "]
    results = {row[0]: Check(*row) for row in reported}
    if code is None:
        return Child(results, f"no answer within {time_limit:g} s", timed_out=True)
    if code == 0:
        return Child(results, "")
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Child(results, last_words(stderr.decode(errors="replace")) or how)


def child_command(function: str, *arguments: str) -> list:
    """Run one of the child functions below in a fresh interpreter."""
    folder = str(Path(__file__).resolve().parent)
    source = f"import sys; sys.path.insert(0, {folder!r}); import setup_tpu; setup_tpu.{function}(*sys.argv[1:])"
    return [sys.executable, "-c", source, *arguments]


def tell(name: str, status: str, finding: str, fix: str = "") -> None:
    """Report from a child to its parent, at once: the next thing done may abort the process."""
    print("\n@@ " + json.dumps([name, status, finding, fix]), flush=True)


def tiny_step(devices: int) -> tuple:
    """A two-layer network on `torch_xla.device()` and its training step, batch sharded over `devices`.

    Returns (step, parameters); step() returns the loss, still on the device.
    """
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs

    torch.manual_seed(0)
    device = torch_xla.device()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # keeps no state, so the first step is like the others
    inputs = torch.randn(16 * devices, 64).to(device)  # (batch, features)
    labels = torch.randint(10, (16 * devices,)).to(device)
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

    return step, list(model.parameters())


def try_matrix_product(devices: int) -> str:
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    left, right = np.random.default_rng(0).standard_normal((2, 256, 256)).astype(np.float32)
    expected = left @ right
    found = (torch.from_numpy(left).to(torch_xla.device()) @ torch.from_numpy(right).to(torch_xla.device())).cpu()
    error = float(np.abs(found.numpy() - expected).max() / np.abs(expected).max())
    allowed = 1e-5 if xr.device_type() == "CPU" else 2e-2  # a TPU multiplies float32 in one bfloat16 pass by default
    if not error <= allowed:
        raise RuntimeError(f"256 x 256 differs from numpy by {error:.1e}, expected at most {allowed:.0e}")
    return f"256 x 256 agrees with numpy to {error:.1e}"


def try_training_step(devices: int) -> str:
    import torch_xla
    import torch_xla.debug.metrics as metrics

    step, _ = tiny_step(devices)
    before = (metrics.metric_data("CompileTime") or (0,))[0]
    losses = []
    for _ in range(3):
        losses.append(step())
        torch_xla.sync()
    compiles = (metrics.metric_data("CompileTime") or (0,))[0] - before
    first, last = losses[0].item(), losses[-1].item()
    if compiles != 1:
        raise RuntimeError(f"3 training steps compiled {compiles} graphs, expected 1")
    if not last < first:
        raise RuntimeError(f"the loss went from {first:.4f} to {last:.4f} in 3 steps, expected it to fall")
    return f"3 steps, 1 compile, loss {first:.4f} -> {last:.4f}"


def try_all_reduce(devices: int) -> str:
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs

    if devices == 1:
        return ""
    values = torch.arange(devices, dtype=torch.float32).to(torch_xla.device())
    xs.mark_sharding(values, xs.Mesh(np.arange(devices), (devices,), ("data",)), ("data",))
    found, expected = values.sum().item(), devices * (devices - 1) / 2
    if found != expected:
        raise RuntimeError(f"the sum over {devices} devices is {found}, expected {expected}")
    return f"the sum over {devices} devices is right"


def child_work() -> None:
    """Import torch_xla, then every piece of real work, one report each."""
    began = time.monotonic()
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    devices = xr.global_runtime_device_count()
    if devices > 1:
        xr.use_spmd()  # one program for all of them
    found = f"torch {torch.__version__}, torch_xla {torch_xla.__version__}: {devices} {xr.device_type()} device(s)"
    tell("import", "ok", f"{found}, {time.monotonic() - began:.1f} s")
    for name, work in WORK.items():
        try:
            finding = work(devices)
        except Exception as error:  # whatever it is, it is this check's finding, and the next check still runs
            tell(name, "fail", f"{type(error).__name__}: {str(error).strip()[:300]}")
        else:
            tell(name, "ok" if finding else "skip", finding or "one device")
    if xr.device_type() == "CPU":  # a TPU is released in good order; here that would only cost seconds
        os._exit(0)


WORK = {"matrix product": try_matrix_product, "training step": try_training_step, "all-reduce": try_all_reduce}


def check_work(device: str, environment: Mapping, installed: Mapping, time_limit: float) -> list:
    """The checks of child_work; what it did not reach is a failure once, then skipped."""
    names = ["import", *WORK]
    if "torch_xla" not in installed:
        return [Check(name, "skip", "torch_xla is not installed") for name in names]
    tried = dict(environment)
    if device != "auto":
        tried["PJRT_DEVICE"] = device.upper()
    child = run_child(child_command("child_work"), tried, time_limit)
    reinstall = f"pip install --force-reinstall {nearest_pair(installed).pip}"
    slow = f"python setup_tpu.py --time_limit {4 * time_limit:g}  # several hosts: start it on all of them at once"
    checks, reason = [], child.died or "the child process ended without a report"
    if lacking := re.search(r"libpython(3\.\d+)\.so", reason):  # Debian's python3 runs without it, torch_xla does not
        reinstall = f"sudo apt-get install -y libpython{lacking[1]}"
    for name in names:
        if name in child.results:
            found = child.results[name]
            checks.append(found._replace(fix=reinstall) if found.status == "fail" else found)
        elif any(c.status == "fail" and c.finding == reason for c in checks):
            checks.append(Check(name, "skip", "not reached"))
        else:
            checks.append(Check(name, "fail", reason, slow if child.timed_out else reinstall))
    return checks


def child_aot(topology: str, chips_per_host: str, devices: str) -> None:
    """Trace the training step on the CPU, sharded over `devices`, and compile it with the TPU compiler.

    The minimum that proves the compiler works here; aot_tpu.py does this for real scripts, with memory and figures,
    and this function should call it once it can compile a step of its caller.
    """
    import numpy as np
    import torch_xla
    import torch_xla.runtime as xr
    from jax._src import compiler
    from jax._src.interpreters.mlir import make_ir_context
    from jax.experimental import topologies
    from jax.extend.mlir import hlo_to_stablehlo, ir
    from jaxlib._jax import CompileOptions, DeviceAssignment, DeviceList

    count = int(devices)
    if count > 1:
        xr.use_spmd()
    step, parameters = tiny_step(count)
    hlo = torch_xla._XLAC._get_xla_tensors_hlo_proto([step(), *parameters])
    bounds = json.loads(chips_per_host)
    described = topologies.get_topology_desc(topology, platform="tpu", chips_per_host_bounds=bounds).devices
    if len(described) != count:
        raise RuntimeError(f"{topology} has {len(described)} devices, expected {count}")
    options = CompileOptions()
    options.num_replicas, options.num_partitions = 1, count
    build = options.executable_build_options
    build.num_replicas, build.num_partitions, build.use_spmd_partitioning = 1, count, count > 1
    build.use_shardy_partitioner = False  # torch_xla writes GSPMD annotations
    build.allow_spmd_sharding_propagation_to_output = [True]
    build.device_assignment = DeviceAssignment.create(np.array([[d.id for d in described]]))
    began = time.monotonic()
    with make_ir_context():
        module = ir.Module.parse(hlo_to_stablehlo(hlo))
        devices_list, client = DeviceList(tuple(described)), described[0].client
        compiled = compiler.backend_compile_and_load(client, module, devices_list, options, [])
    seconds = time.monotonic() - began
    reduces = len(re.findall(r"= .* all-reduce(?:-start)?\(", compiled.hlo_modules()[0].to_string()))
    if count > 1 and not reduces:
        raise RuntimeError(f"the program for {count} devices holds no all-reduce: the gradients would not be summed")
    tell("aot", "ok", f"the step compiles for {topology}, {count} devices, {reduces} all-reduce, {seconds:.1f} s")


def check_aot(target: str, environment: Mapping, installed: Mapping, time_limit: float) -> Check:
    """The same training step through the compiler in libtpu, with no TPU attached."""
    if not target:
        return Check("aot", "skip", "not asked for (--aot v5litepod-8)")
    fix = f"pip install {nearest_pair(installed).pip}"
    missing = [name for name in ("torch_xla", "libtpu", "jax") if name not in installed]
    if missing:
        return Check("aot", "fail", f"needs {', '.join(missing)}, not installed", fix)
    topology, chips_per_host, devices = AOT_TOPOLOGIES[target]
    # No metadata server is asked, and the lock file of a running program is respected by not holding any chip.
    tried = {**environment, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    tried.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
    tried.update(TPU_ACCELERATOR_TYPE="v5litepod-1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    child = run_child(child_command("child_aot", topology, json.dumps(chips_per_host), str(devices)), tried, time_limit)
    if "aot" in child.results:
        return child.results["aot"]
    return Check("aot", "fail", f"{target}: {child.died or 'the child process ended without a report'}", fix)


def child_bucket(name: str) -> None:
    """Ask which of the permissions a run directory needs these credentials have on gs://name."""
    from google.cloud import storage

    needed = ["storage.objects.create", "storage.objects.get", "storage.objects.list", "storage.objects.delete"]
    bucket = storage.Client(project="unused").bucket(name)  # asking for permissions takes no project
    missing = sorted(set(needed) - set(bucket.test_iam_permissions(needed, timeout=10)))
    if missing:
        grant = (
            f"gcloud storage buckets add-iam-policy-binding gs://{name} --role=roles/storage.objectAdmin --member=YOU"
        )
        tell("bucket", "fail", f"gs://{name}: these credentials lack {', '.join(missing)}", grant)
    else:
        tell("bucket", "ok", f"gs://{name} may be read and written")


# ---------------------------------------------------------------- the report


def diagnose(options: argparse.Namespace, environment: Mapping, root: Path, search_path: list) -> Iterator[Check]:
    """Every check, in the order of the report."""
    sys_root, dev_root, proc_root = root / "sys", root / "dev", root / "proc"
    limit, uid, groups = options.time_limit, os.getuid(), {*os.getgroups(), os.getgid()}
    installed, chips = installed_versions(search_path), find_chips(sys_root)
    wants_tpu = options.device == "tpu" or (options.device == "auto" and bool(chips))
    container, libtpu = find_container(root, environment), find_libtpu(environment, search_path)
    # before any child of ours may open the chip
    holder = check_holder(proc_root, root / "tmp" / "libtpu_lockfile", chips, uid, wants_tpu, container)
    with ThreadPoolExecutor() as pool:  # what waits for a network or a child process waits at the same time
        waiting_metadata = pool.submit(read_metadata, METADATA_URL, 2.0)
        waiting_libtpu = pool.submit(check_libtpu_loads, libtpu, environment, installed, wants_tpu, limit)
        waiting_bucket = pool.submit(check_bucket, options.bucket, installed, environment, limit)
        flags = check_xla_flags(environment, installed, limit)
        usable = {k: v for k, v in environment.items() if k != "XLA_FLAGS" or flags.status == "ok"}
        waiting_work = pool.submit(check_work, options.device, usable, installed, limit)
        waiting_aot = pool.submit(check_aot, options.aot, usable, installed, limit)

        yield check_python(sys.version_info, installed)
        yield check_package("torch", installed, needed=True)
        yield check_package("torch_xla", installed, needed=True)
        yield check_package("torchvision", installed, needed=False)
        yield check_package("libtpu", installed, needed=wants_tpu)
        yield check_package("jax", installed, needed=False)
        yield check_tensorflow(installed, wants_tpu)
        yield waiting_libtpu.result()
        yield check_pjrt_device(options.device, environment, chips, libtpu is not None)
        yield check_chips(chips, wants_tpu)
        yield check_device_nodes(dev_root, chips, uid, groups, container)
        yield holder
        metadata = waiting_metadata.result()
        yield check_metadata(environment, metadata, wants_tpu)
        yield check_hosts(environment, metadata)
        yield check_memory(proc_root, sys_root, least_gib=2)
        yield check_shared_memory(dev_root, 1, wants_tpu, container)
        yield check_container(proc_root, sys_root, container, wants_tpu)
        yield check_environment(environment)
        yield flags
        yield check_compile_cache(options.compile_cache or environment.get("XLA_PERSISTENT_CACHE_PATH", ""))
        yield waiting_bucket.result()
        yield from waiting_work.result()
        yield waiting_aot.result()


def parse_arguments(arguments: list) -> argparse.Namespace:
    """Both --snake_case and --kebab-case; anything unknown ends with exit code 2 and the nearest name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = ["--help"]

    def option(name: str, **settings) -> None:
        names.append(name)
        parser.add_argument(name, **settings)

    option("--device", choices=("auto", "cpu", "tpu"), default="auto", help="what programs should run on")
    option("--json", action="store_true", help="one JSON object instead of lines")
    option("--aot", default="", metavar="TYPE", help=f"TPU compiler check for one of {', '.join(AOT_TOPOLOGIES)}")
    option("--bucket", default="", metavar="gs://NAME", help="check the credentials for this bucket")
    option("--compile_cache", default="", metavar="DIR", help="check that this compile cache can be written")
    option("--time_limit", type=float, default=60.0, metavar="SECONDS", help="for each child process (default 60)")
    # --time-limit=5 and --time_limit=5 are the same option; values keep their dashes
    parts = [a.partition("=") for a in arguments]
    plain = [(n.replace("-", "_").replace("__", "--", 1) if n[:2] == "--" else n) + e + v for n, e, v in parts]
    options, unknown = parser.parse_known_args(plain)
    if unknown:
        near = difflib.get_close_matches(unknown[0].partition("=")[0], names, n=1)
        parser.error(f"unknown option {unknown[0]}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
    if options.aot and options.aot not in AOT_TOPOLOGIES:
        near = difflib.get_close_matches(options.aot, AOT_TOPOLOGIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"--aot {options.aot}: expected one of {', '.join(AOT_TOPOLOGIES)}{hint}")
    if options.bucket and not re.match(r"gs://[a-z0-9][\w.-]+(/|$)", options.bucket):
        parser.error(f"--bucket {options.bucket}: expected gs://NAME or gs://NAME/FOLDER")
    if options.time_limit <= 0:
        parser.error(f"--time_limit {options.time_limit:g}: expected more than 0 seconds")
    return options


def main() -> int:
    options, began, checks = parse_arguments(sys.argv[1:]), time.monotonic(), []
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
    sys.exit(main())
