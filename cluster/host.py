"""The process of one host: an actor that holds the host's chips, and runs the unchanged script on them."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import cluster
import tpu_utils
from cluster.folder import digest_of
from cluster.slices import COUNTED
from tpu_utils.options.environment import attached_chips

BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Chips of one process along each axis. 1 and 2: as Ray's own; 4 and 8: as tpu_utils/remote/hosts.py has them."""
COMPARED = ("torch", "torch_xla", "libtpu", "jax")
DEVICE_VARIABLES = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
DEVICE_VARIABLES += ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_PROCESS_ADDRESSES")
DEVICE_VARIABLES += ("TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID")
"""Variables that say which devices a process has: removed before device_variables() sets its own."""
MOST_BYTES = 8 << 20
"""Most bytes of output that wait for the driver; a script that prints more has to wait until they are read."""


def versions() -> dict[str, str]:
    """Python's, and those of the packages that must be the same everywhere, as far as they are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in COMPARED:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name).split("+")[0]
    return found


def device_variables(
    chips: Sequence[int], of_host: int, tpu: bool, kind: str, index: int, addresses: Sequence[str]
) -> dict[str, str]:
    """What the environment of a process says of its devices.

    chips: its own. of_host: all on the host. tpu: the host has real ones; else they are virtual devices of the CPU.
    kind: accelerator type of the host's slice. index, addresses: this host among those of the run.
    """
    shown = ",".join(map(str, chips))
    family, _, size = kind.rpartition("-")
    each = COUNTED.get("tpu7x" if family == "v7x" else family, 1)
    if len(addresses) > 1:  # a whole slice: as its metadata server says, with which tpu_utils/remote/hosts.py compares
        found = {"TPU_WORKER_ID": str(index), "TPU_WORKER_HOSTNAMES": ",".join(addresses), "TPU_ACCELERATOR_TYPE": kind}
        if not tpu:
            found["TPU_VISIBLE_CHIPS"] = shown
    elif tpu and len(chips) == of_host and size == str(of_host * each):
        found = {}  # all chips of a slice of one host: found without variables
    else:
        found = {
            "TPU_VISIBLE_CHIPS": shown,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[len(chips)],
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_WORKER_ID": "0",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_SKIP_MDS_QUERY": "1",  # the metadata would speak of the whole slice
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock is one for the host; the chips of the others are not visible
        }
        if family:
            found["TPU_ACCELERATOR_TYPE"] = f"{family}-{len(chips) * each}"
    if not tpu:
        found |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(len(chips))}
    return found


def clean_environment() -> dict[str, str]:
    """The environment that Ray was started in, without RAY_*. A worker's own has more, such as OMP_NUM_THREADS=1."""
    content = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    pairs = [entry.decode(errors="surrogateescape").partition("=") for entry in content.split(b"\0") if b"=" in entry]
    return {name: value for name, _, value in pairs if not name.startswith("RAY_") and name not in DEVICE_VARIABLES}


class HostProcess:
    """One run on one host. Methods are called by the driver, several at a time (max_concurrency)."""

    def __init__(self):
        self.script: subprocess.Popen | None = None
        self.changed = threading.Condition()
        self.output = []
        self.size = 0
        self.code: int | None = None

    def facts(self) -> dict:
        import ray

        from cluster.probe import open_to_others  # only here: it imports Ray

        context = ray.get_runtime_context()
        found = {"node": context.get_node_id(), "versions": versions(), "tpu": bool(attached_chips())}
        return found | {"open": open_to_others(Path(context.get_temp_dir()))}

    def start(self, name: str, folder: str, code: str, command: list[str], variables: Mapping[str, str]) -> str:
        """Run `python COMMAND`. folder: to run in; empty: a copy of the uploaded folder code, named by its digest.
        Returns why it does not start; "" where it does."""
        made = ""
        if not folder:
            made = tempfile.mkdtemp(prefix=f"tpu_cluster_{name}_")
            shutil.copytree(code, made, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            Path(made).chmod(0o700)  # only for this user: copytree gave it the mode of what it copied
            if digest_of(Path(made)) != code.partition("_")[0]:
                shutil.rmtree(made)
                return f"the code on host {socket.gethostname()} is not what was submitted; look who can write there"
        # -P: a folder named cluster in the code of the run is not ours
        guarded = [sys.executable, "-P", "-m", "cluster.guard"]
        read_code, write_code = os.pipe()
        # Ray unpacks each of the two packages to a folder of its own
        packages = {str(Path(module.__file__).resolve().parent.parent) for module in (cluster, tpu_utils)}
        environment = clean_environment() | dict(variables) | {"PYTHONUNBUFFERED": "1"}
        inner = environment.get("PYTHONPATH")
        # PYTHONPATH has this project for the guard, not for the script
        script = ["env", *([f"PYTHONPATH={inner}"] if inner else ["-u", "PYTHONPATH"]), sys.executable, *command]
        self.script = subprocess.Popen(
            [*guarded, str(write_code), made, *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder or made,
            env=environment | {"PYTHONPATH": os.pathsep.join(sorted(packages))},
            pass_fds=[write_code],
        )
        os.close(write_code)
        threading.Thread(target=self._collect, args=(read_code,), daemon=True).start()
        return ""

    def _collect(self, read_code: int) -> None:
        while part := os.read(self.script.stdout.fileno(), 1 << 16):
            with self.changed:
                self.changed.wait_for(lambda: self.size < MOST_BYTES)
                self.output.append(part)
                self.size += len(part)
                self.changed.notify_all()
        said = os.read(read_code, 100)
        self.script.wait()
        with self.changed:
            self.code = int(said) if said else -signal.SIGKILL  # the guard was killed, and the script with it
            self.changed.notify_all()

    def follow(self, seconds: float) -> tuple[bytes, int | None]:
        """What it has printed since the last call, and its exit code once it has ended. Waits so long for either."""
        with self.changed:
            self.changed.wait_for(lambda: self.output or self.code is not None, seconds)
            text = b"".join(self.output)
            self.output = []
            self.size = 0
            self.changed.notify_all()
            return text, self.code

    def signal(self, number: int) -> None:
        """To the script and what it has started."""
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self.script.stdin.write(bytes([number]))
            self.script.stdin.flush()
