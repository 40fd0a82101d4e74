"""A newer compiler as second opinion: an environment of its own, and the child process that compiles there.

torch_xla 2.9.0 pins libtpu 0.0.21. Newer ones understand its programs too, and some chips only they know. Imports
neither torch nor jax. Programs, requests and answers pass through files, as bytes and JSON.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpu_compiler.compile import cache
from tpu_compiler.compile.cache import check_owner, is_of_others
from tpu_compiler.compile.traced import Traced
from tpu_utils.base.errors import InputError, TrainingError
from tpu_utils.base.files import read_json
from tpu_utils.base.hardware import GIB, Topology
from tpu_utils.base.new_folder import written_aside
from tpu_utils.options.virtual_slice import LIBTPU_VARIABLES

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements-newest-compiler.txt"
CHILD = Path(__file__).with_name("newest_child.py")
VERSIONS = "versions.json"  # in the environment's folder, written last
SIZES = "downloads 0.29 GB, takes 1.1 GB of disk"
NEEDED_GIB = 2.0


class NewestError(TrainingError):
    """The environment cannot be made, or its compiler ended without an answer."""


def default_folder() -> Path:
    """One folder for each set of pinned versions. Raises InputError where the requirements file is missing."""
    if not REQUIREMENTS.is_file():
        raise InputError(f"--compiler newest: {REQUIREMENTS} is missing; copy it beside aot_tpu.py")
    pins = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    return cache.default_folder().with_name("tpu_compiler") / f"newest-{pins}"


def make_environment(folder: Path, say: Callable[[str], None]) -> Path:
    """The folder of the newer compiler, which is installed there once, whole or not at all. say: announces the install.

    Raises InputError for a folder of something else, a full disk or too old a Python, NewestError where pip fails.
    """
    folder = check_owner(folder, "a program")
    if not (folder / VERSIONS).is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(
                f"{folder} holds something else than a newer compiler; give an empty folder as --compiler_dir"
            )
        if sys.version_info < (3, 11):
            raise InputError(f"--compiler newest: {_pins()[0]} needs Python 3.11; found {sys.version.split()[0]}")
        try:
            _make(folder, say)
        except OSError as error:
            raise InputError(
                f"--compiler newest: {error}; give a folder that can be written as --compiler_dir"
            ) from error
        check_owner(folder, "a program")
    check_contents(folder)
    environment_versions(folder)
    return folder


def _make(folder: Path, say: Callable[[str], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / GIB
    if free < NEEDED_GIB:
        raise InputError(f"{folder.parent} has {free:.1f} GiB free; expected {NEEDED_GIB}; give --compiler_dir")
    with open(f"{folder}.lock", "a", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it: then it is there when we get here
        if not (folder / VERSIONS).is_file():
            say(f"making an environment for {', '.join(_pins())} in {folder}: once, {SIZES}")
            before = os.umask(0o022)  # others write nowhere in it
            try:
                with written_aside(folder) as aside:
                    _install(aside)
                    say(index_says(aside))
            finally:
                os.umask(before)


def check_contents(folder: Path) -> None:
    """Raises InputError for an environment in which something is another user's, or can be written by one: it was put
    there while the folder was open to others."""
    for place, inner, files in os.walk(folder):
        for path in (Path(place, name) for name in (*inner, *files)):
            if is_of_others(path.lstat()):
                raise InputError(
                    f"{path} is another user's, or one can write it; expected all of {folder} to be yours alone; "
                    f"delete {folder}, and it is made again"
                )


def _pins() -> list[str]:
    """jax's first, then libtpu's."""
    return re.findall(r"^(?:jax|libtpu)==\S+", REQUIREMENTS.read_text(), re.M)


def index_says(folder: Path) -> str:
    """A sentence: whether the package index has a newer libtpu than the pinned one. The environment's pip asks it."""
    newest = re.match(r"libtpu \(([\w.]+)\)", _pip(folder, "index", "versions", "libtpu").stdout)
    date = re.search(r"\d{4}-\d\d-\d\d", REQUIREMENTS.read_text())
    pinned = f"{_pins()[-1]} of {REQUIREMENTS.name} was the newest on the package index on {date and date[0]}"
    if not newest:
        return f"{pinned}; what is the newest now, pip does not say"
    if f"libtpu=={newest[1]}" == _pins()[-1]:
        return f"{pinned}, and is the newest now"
    return f"{pinned}; the newest now is {newest[1]}, not tried: pinned there, the slow tests try it"


def _pip(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    return subprocess.run(command, capture_output=True, text=True)


def _install(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    done = _pip(folder, "install", "-q", "-r", str(REQUIREMENTS))
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()[-300:]]
        raise NewestError(f"--compiler newest: pip cannot install {REQUIREMENTS.name}: {said[-1]}")
    versions = dict(pin.split("==") for pin in _pins())
    (folder / VERSIONS).write_text(json.dumps(versions))


def environment_versions(folder: Path) -> dict[str, str]:
    """{"jax": ..., "libtpu": ...} of an environment. Raises InputError for a folder that is none."""
    found = read_json(folder / VERSIONS, "the versions of a newer compiler")
    if set(found) != {"jax", "libtpu"} or not all(re.fullmatch(r"[\w.+]{1,40}", str(v)) for v in found.values()):
        raise InputError(
            f"{folder / VERSIONS} holds {found!r:.100}; expected versions of jax and libtpu; delete {folder}"
        )
    return found


def child_environment() -> dict[str, str]:
    """Variables of a process that compiles without torch_xla: its import leaves the path of its own libtpu there, and
    another XLA ends at a flag that it does not have."""
    ours = ("PYTHON", "TPU_LIBRARY_PATH", "PTXLA_", "XLA_FLAGS")
    return LIBTPU_VARIABLES | {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def slice_of(topology: Topology) -> dict[str, Any]:
    """What newest_child.py asks libtpu for a slice's devices with."""
    slices = {"num_slices": topology.num_slices} if topology.num_slices > 1 else {}
    options = dict(topology.hardware.compiler_options) | slices
    return dict(topology=topology.compiler_name, chips_per_host=topology.chips_per_host, slice=options)


def request_of(traced: Traced, topology: Topology) -> dict[str, Any]:
    """What newest_child.py compiles a program for."""
    said = ("partitions", "replicas", "donated", "shardings", "given", "shardy", "free_outputs")
    return slice_of(topology) | {name: getattr(traced, name) for name in said}


@contextlib.contextmanager
def asked_child(python: Path, traced: Traced, topology: Topology, until: str = "") -> Iterator[Path]:
    """The folder in which newest_child.py, run by this Python, has left its answer. until: it is stopped once there is
    a file of this pattern. Raises NewestError where it left neither."""
    with tempfile.TemporaryDirectory() as work, Path(work, "said.txt").open("w+") as said:
        folder = Path(work)
        (folder / "program.pb").write_bytes(traced.hlo)
        (folder / "request.json").write_text(json.dumps(request_of(traced, topology)))
        command = [str(python), "-P", str(CHILD), work]
        try:
            child = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL, stderr=said)
        except OSError as error:
            raise NewestError(f"{python} does not start: {error}; delete its environment to make it again") from error
        try:
            while child.poll() is None and not (until and any(folder.glob(until))):
                time.sleep(0.1)
        finally:
            child.kill()
            child.wait()
        if not (folder / "answer.json").is_file() and not (until and any(folder.glob(until))):
            said.seek(0)
            print(said.read()[-2000:], file=sys.stderr)
            raise NewestError(f"the compiler ended with code {child.returncode}; its own message is above")
        yield folder


def compile_there(python: Path, traced: Traced, topology: Topology) -> tuple[dict[str, Any], str]:
    """(answer, program text) of another environment's compiler. answer: {"error": message}, or the numbers of
    compiling.Compiled. Raises NewestError when there is no answer."""
    with asked_child(python, traced, topology) as folder:
        answer = json.loads((folder / "answer.json").read_text())
        return answer, "" if "error" in answer else (folder / "program.txt").read_text()
