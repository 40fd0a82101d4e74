"""A pretended cluster on one machine: real processes of Ray, a raylet for each host."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from processes import DEVICE_VARIABLES, ROOT, free_port


def below(top: int) -> dict[int, str]:
    """{pid: command} of all processes that this one has started, and they in turn."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(top).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found[process.pid] = " ".join(process.cmdline())
    return found


def listening(pids) -> set[str]:
    """Addresses at which these processes take TCP connections."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = psutil.Process(pid).net_connections("tcp")
            found |= {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return found


class Nodes:
    """A head without chips, and the hosts that add() makes. close() ends all of it. is_open: Ray's folder is not in one
    of its user's alone."""

    def __init__(self, is_open: bool = False, **variables):
        self.folder = Path(tempfile.mkdtemp(prefix="rn_", dir="/tmp"))  # short: Ray makes sockets below it
        self.folder.chmod(0o755 if is_open else 0o700)
        self.token = secrets.token_hex(32)
        names = [name for name in os.environ if not name.startswith("RAY_") and name not in DEVICE_VARIABLES]
        kept = {name: os.environ[name] for name in names}
        ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_USAGE_STATS_ENABLED": "0"}
        ours |= {"XDG_CACHE_HOME": str(self.folder / "cache"), "RAY_ENABLE_IPV6": "0"}
        ours |= {"RAY_health_check_period_ms": "1000"}  # a host that does not answer five times is lost
        ours |= {"PATH": f"{Path(sys.executable).parent}:{kept['PATH']}"}
        self.environment = kept | ours | {name: str(value) for name, value in variables.items()}
        self.gcs, self.port = free_port(), free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen] = {}
        head = ["--head", f"--port={self.gcs}", f"--dashboard-port={self.port}", "--dashboard-host=127.0.0.1"]
        self._start("head", [*head, "--num-cpus=2", f"--temp-dir={self.folder}/r"], {})
        self._there("head")
        # resolved once: every worker of Ray that starts removes this link and makes it again (ray._private.node)
        self.session = (self.folder / "r" / "session_latest").resolve()

    def _start(self, name: str, options: list[str], variables: dict[str, str]) -> None:
        command = [str(Path(sys.executable).parent / "ray"), "start", *options, "--block", "--disable-usage-stats"]
        self.processes[name] = subprocess.Popen(
            # each its own port: without an agent that listens a head takes no jobs
            [*command, "--object-store-memory=100000000", f"--dashboard-agent-listen-port={free_port()}"],
            env=self.environment | variables,
            stdout=(self.folder / f"{name}.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _there(self, name: str) -> None:
        log = self.folder / f"{name}.log"
        started = self.processes[name]
        self.wait_for(lambda: "Ray runtime started" in log.read_text() or started.poll() is not None, log)
        assert started.poll() is None, log.read_text()

    def wait_for(self, condition, log: Path | None = None, seconds: float = 300):
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, log.read_text() if log else "waited too long"
            time.sleep(0.05)
        return found

    def wait_until(self, name: str, what: str) -> None:
        """what: running or waiting."""
        self.wait_for(lambda: any(run["name"] == name for run in self.state()[what]))

    def add(self, name: str, chips: int, slice_name="", worker=0, kind="", shape="", **variables) -> None:
        """A host. With slice_name a worker of a pretended slice: the variables and labels that Ray reads."""
        resources, labels = {"TPU": chips}, []
        if slice_name:
            variables |= {"TPU_NAME": slice_name, "TPU_WORKER_ID": worker, "TPU_ACCELERATOR_TYPE": kind}
            variables |= {"TPU_TOPOLOGY": shape}
            resources |= {slice_name: 1} | ({f"TPU-{kind}-head": 1} if worker == 0 else {})
            text = f"ray.io/tpu-slice-name={slice_name},ray.io/tpu-worker-id={worker},"
            labels = [f"--labels={text}ray.io/tpu-topology={shape},ray.io/tpu-pod-type={kind}"]
        options = [f"--address=127.0.0.1:{self.gcs}", "--num-cpus=1", f"--resources={json.dumps(resources)}", *labels]
        self._start(name, options, {key: str(value) for key, value in variables.items()})
        self._there(name)  # two at once on one machine take each other's sockets

    def children(self, name: str) -> dict[int, str]:
        """{pid: command} of all processes below a host's `ray start`."""
        return below(self.processes[name].pid)

    def kill(self, name: str) -> None:
        """kill -9 of a host: its raylet and all that it started go, as with the power of a machine."""
        pids = [self.processes[name].pid, *self.children(name)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes.pop(name).wait()

    def close(self) -> None:
        for name in [name for name in self.processes if name != "head"] + ["head"]:
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, *arguments: object, folder: Path = ROOT, **variables) -> subprocess.Popen:
        """`python -m cluster ARGUMENTS` against this cluster, under way."""
        environment = self.environment | {"RAY_ADDRESS": self.address} | {k: str(v) for k, v in variables.items()}
        pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        command = [sys.executable, str(ROOT / "cluster"), *map(str, arguments)]
        return subprocess.Popen(command, cwd=folder, env=environment, **pipe)

    def run(
        self, *arguments: object, folder: Path = ROOT, timeout: float = 600, **variables
    ) -> subprocess.CompletedProcess:
        process = self.start(*arguments, folder=folder, **variables)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def top(self) -> dict:
        return json.loads(self.run("top", "--json").stdout)

    def state(self) -> dict:
        """What the queue wrote last."""
        path = self.session / "logs" / "tpu_cluster.json"
        return json.loads(path.read_text()) if path.exists() else {"running": [], "waiting": [], "events": []}
