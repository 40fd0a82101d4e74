"""Scripts as users run them, without the seconds of their imports: forked from a process that has torch and torch_xla.

run() and start() fork; what a start itself does is tested with a Python of its own, by run(cold=True). A forked script
is a process like any other: its own environment, output, signals and exit code, and nothing of this project imported.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = [
    *("torch", "torch_xla", "torch_xla.runtime", "torch_xla.distributed.spmd", "torch_xla.distributed.xla_backend"),
    *("torch_xla.experimental.scan", "torch_xla.debug.profiler", "safetensors.torch"),
    *("torch.utils.tensorboard", "torch.utils.tensorboard.summary", "torch.utils.flop_counter", "functorch.compile"),
    *("torch.nn.parallel", "jax", "jax.experimental.topologies", "numpy", "tyro", "tqdm"),
    *("sklearn.datasets", "sklearn.model_selection", "matplotlib.figure", "google.cloud.storage"),
]
os.environ["JAX_PLATFORMS"] = "cpu"  # jax reads it when it is imported, which is before the fork
# what says which device a process has: a script decides that for itself
DEVICE_VARIABLES = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS", "XLA_USE_SPMD")
DEVICE_VARIABLES += ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")  # jax sets these when a test asks the TPU compiler
_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(PRELOADED)


@atexit.register
def _kill_what_is_left() -> None:
    """Scripts that a failed test left behind. multiprocessing would send SIGTERM and wait, and they may wait too."""
    for process in multiprocessing.active_children():
        process.kill()


COMPILED = "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"
"""XLA_FLAGS of scripts: XLA's CPU backend compiles in less than half of the time, and steps are as fast."""
QUICKLY_COMPILED = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""Where compiling is most of a run: 12 steps of a tiny transformer take 7 CPU-seconds, 19 at level 1 with emitters; an
epoch of digits with 4 channels 0.9 instead of 1.7. Convolutions of many channels are slower."""


def environment_with(changes: dict[str, object], arguments: Sequence = ()) -> dict[str, str]:
    """arguments: the command line; a language model and a convolution of few channels are compiled quickly."""
    kept = {name: value for name, value in os.environ.items() if name not in DEVICE_VARIABLES}
    flags = (
        QUICKLY_COMPILED
        if any(re.search("transformer|^--channels|^--width", str(argument)) for argument in arguments)
        else COMPILED
    )
    return kept | {"XLA_FLAGS": flags} | {name: str(value) for name, value in changes.items()}


def _child(arguments: list[str], environment: dict[str, str], folder: str, out: str, err: str) -> None:
    """In the forked process: become `python ARGUMENTS`.

    With one thread for torch's own operations: models are small, two workers have two cores, and threads that wait for
    each other keep them busy. A training of a few steps, whose step is tried in plain PyTorch, takes 2.9 CPU-seconds
    instead of 5.5.
    """
    torch.set_num_threads(1)
    gc.freeze()  # of 620,000 objects that came with the imports a trace finds no tensor, so it need not ask them
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests"))]
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(":") if path]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, folder)
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif is_module(arguments[0]):
        sys.argv = arguments
        sys.path.insert(0, folder)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def is_module(name: str) -> bool:
    """tools.generate is run as `python -m tools.generate`, with or without the -m."""
    return not name.endswith(".py") and not name.startswith("-")


class Script:
    """A running script, with the part of subprocess.Popen's interface that tests use.

    output: a file for all that it prints; without one text() has what it prints.
    """

    def __init__(self, *arguments, folder: Path = ROOT, output: Path | None = None, **environment):
        self._made = tempfile.TemporaryDirectory(prefix="script_", ignore_cleanup_errors=True)  # gone with this object
        self._texts = {name: output or Path(self._made.name, name) for name in ("out", "err")}
        self.arguments = [str(argument) for argument in (arguments[1:] if arguments[0] == "-m" else arguments)]
        files = [str(path) for path in self._texts.values()]
        settings = (self.arguments, environment_with(environment, self.arguments), str(folder), *files)
        self._process = _forking.Process(target=_child, args=settings, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def text(self, which: str) -> str:
        """What it has written so far. which: out or err."""
        return self._texts[which].read_text(errors="replace") if self._texts[which].exists() else ""

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = 600) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self.arguments, timeout, self.text("out"), self.text("err"))
        return self._process.exitcode

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        self.wait(timeout)
        return self.text("out"), self.text("err")

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, as for Popen
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def start(*arguments, **environment) -> Script:
    """`python ARGUMENTS` in the repository, under way."""
    return Script(*arguments, **environment)


def run(*arguments, timeout: float = 600, cold: bool = False, **environment) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` in the repository, its output as text. cold: by a Python that has imported nothing yet."""
    if cold:
        arguments = ("-m", *arguments) if is_module(str(arguments[0])) else arguments
        command = [sys.executable, *map(str, arguments)]
        one_thread = {"OMP_NUM_THREADS": "1"} | environment  # as in _child
        settings = dict(cwd=ROOT, env=environment_with(one_thread, arguments), capture_output=True, text=True)
        return subprocess.run(command, timeout=timeout, **settings)
    script = Script(*arguments, **environment)
    out, err = script.communicate(timeout)
    return subprocess.CompletedProcess(script.arguments, script.returncode, out, err)


_given_ports: set[int] = set()


def free_port() -> int:
    """One that this process was not given before: whoever gets a port opens it later, and until then it looks free."""
    while True:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        if port not in _given_ports:
            _given_ports.add(port)
            return port


def waits(condition, seconds: float = 600, alive: Script | None = None):
    """What condition() returned once it was true. Fails after so long, or when the script that is to bring it about has
    ended: a limit that only a hang meets, however busy the machine is."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert alive is None or alive.poll() is None or condition(), (alive.text("out"), alive.text("err"))
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    return found
