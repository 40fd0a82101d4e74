"""What the compiler said, kept on disk: a compile of minutes is asked for once. No torch, no jax.

Two kinds of entry, each one compressed file, checked when it is read; a damaged one is as good as none. A line of JSON
comes first, then the text of a program as it is, so that no file can ask for much more memory than it has bytes:
program_KEY   what the compiler returned for a traced program. KEY: hash of the program, the roles, donation and
              shardings of its inputs, slice, compiler options, versions and FORMAT. A trace is the same, byte for byte,
              in every process.
answer_KEY    the report a script gave to a question, which saves the trace too. KEY: hash of every Python file that the
              script could import from its own folder, this project or PYTHONPATH, of its options, the folder it ran in,
              every installed package and the variables that XLA and Python read. The entry also holds the state of
              each file and folder that the script's settings name: where one has changed, it does not count.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import os
import re
import stat
import sys
import tempfile
import time
import types
import typing
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_utils.base.errors import InputError
from tpu_utils.base.files import open_regular, parse_json
from tpu_utils.options.virtual_slice import COMPILER_VARIABLE

FORMAT = 2
VARIABLE = "AOT_TPU_CACHE"
"""Names the folder; empty: no cache."""
MOST_BYTES = 2 << 30
"""Most bytes of all entries together. The ones that were not read for the longest time go first."""
LARGEST_TEXT = 1 << 28
LARGEST_JSON = 1 << 22
OWN_NAME = re.compile(r"(program|answer)_[0-9a-f]{40}\.json\.gz|aot_tpu_\w+\.writing")
"""Names of this cache's own files. No other file is touched, whatever folder the user names."""
MOST_FILES = 20_000
"""Limit of the search for Python files that a script may import. Above it only program_KEY entries are kept."""
READ_BY_LIBRARIES = ("XLA", "TPU_", "LIBTPU", "JAX", "PJRT", "PT_", "TORCH", "PYTHON", "CPU_NUM_DEVICES")
WRITTEN = ("memory_dir",)
"""Settings that name a folder which a run only writes to, as far as its program is concerned."""
OWN = ("AOT_TPU", "PYTHONHASHSEED", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY")
PROJECT = Path(__file__).resolve().parents[2]


class Cache:
    """Entries in one folder, which several processes may use at once."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES):
        """Raises InputError where nothing can be written, or others can write."""
        self.most_bytes = most_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder = folder = check_owner(folder, "compiled programs")
            with tempfile.NamedTemporaryFile(dir=folder, prefix="aot_tpu_", suffix=".writing") as probe:
                probe.write(b"\0" * 4096)
        except OSError as error:
            raise InputError(
                f"the compile cache cannot be written: {folder}: {error.strerror}; expected a folder with room; name "
                f"another one by --cache or {VARIABLE}, or give --no_cache"
            ) from error

    def read(self, name: str, kind: type) -> Any:
        """The entry as an instance of a dataclass. None where there is none, or none that can be used."""
        path = self.folder / f"{name}.json.gz"
        try:
            with open_regular(path, "an entry of the compile cache", follow=False) as file:
                status = os.fstat(file.fileno())
                if is_of_others(status) or status.st_size > LARGEST_TEXT:  # put there while others could write
                    return None
                content = file.read(status.st_size)
            with gzip.open(io.BytesIO(content)) as file:
                entry, text = parse_json(file.readline(LARGEST_JSON)), file.read(LARGEST_TEXT + 1)
            if not isinstance(entry, dict) or (entry.get("format"), entry.get("name")) != (FORMAT, name):
                return None
            if len(text) > LARGEST_TEXT:
                return None
            values = from_json(dict[str, Any], entry.get("values"))
            found = from_json(kind, values | ({"text": text.decode()} if text else {}))
            os.utime(path)  # used just now
            return found
        except (InputError, OSError, EOFError, ValueError, zlib.error):
            return None

    def write(self, name: str, record: Any) -> None:
        """Store a dataclass: a temporary file, then renamed. A full disk loses this entry alone, with a warning."""
        values = dataclasses.asdict(record)
        text = values.pop("text", "").encode()
        entry = {"format": FORMAT, "name": name, "values": values}
        aside = None
        try:
            content = gzip.compress(json.dumps(entry, default=str).encode() + b"\n" + text, 5, mtime=0)
            settings = dict(prefix="aot_tpu_", suffix=".writing", delete=False)
            with tempfile.NamedTemporaryFile(dir=self.folder, **settings) as file:
                aside = Path(file.name)
                file.write(content)
            aside.replace(self.folder / f"{name}.json.gz")
            self._trim()
        except OSError as error:
            if aside:
                aside.unlink(missing_ok=True)
            print(f"warning: not kept in the compile cache: {self.folder}: {error.strerror}", file=sys.stderr)

    def _trim(self) -> None:
        entries = []
        for path in (path for path in self.folder.iterdir() if OWN_NAME.fullmatch(path.name)):
            try:
                status = path.lstat()
            except FileNotFoundError:  # another process was faster
                continue
            if path.suffix == ".gz":
                entries.append((status.st_mtime, status.st_size, path))
            elif status.st_mtime < time.time() - 3600:  # left by a kill
                path.unlink(missing_ok=True)
        size = sum(size for _, size, _ in entries)
        for _, entry_size, path in sorted(entries):
            if size <= self.most_bytes:
                break
            path.unlink(missing_ok=True)
            size -= entry_size


def is_of_others(status: os.stat_result) -> bool:
    """Whether another user owns a file or folder, or can write it. Root can do all anyway; a link has no mode."""
    can_write = status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode)
    return status.st_uid not in (os.geteuid(), 0) or bool(can_write)


def check_owner(folder: Path, what: str) -> Path:
    """The folder without links on its way. Raises InputError where another user owns or can write it, or one that it
    is in, and could so put another in its place: what it holds is run, or believed. In a folder such as /tmp, with the
    sticky bit, nobody can rename what is another's. A folder that is not there yet: those that it will be in."""
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        if not place.exists():
            continue
        status, found = place.stat(), ""
        if status.st_uid not in ((os.geteuid(),) if place == folder else (os.geteuid(), 0)):
            found = f"belongs to user {status.st_uid}, and this is user {os.geteuid()}"
        elif status.st_mode & 0o022 and not (place != folder and status.st_mode & stat.S_ISVTX):
            found = f"can be written by other users (mode {status.st_mode & 0o777:o})"
        if found:
            raise InputError(
                f"{place} {found}: they could put {what} there; expected a folder that you alone can write, in such "
                "folders; chmod go-w it if it is yours, or name another"
            )
    return folder


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aot_tpu"


def cache_of_environment() -> Cache | None:
    """The cache in the folder that VARIABLE names, by default the user's. None if VARIABLE is empty, or the default
    folder cannot be written. Raises InputError if a named folder cannot be written."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    try:
        return Cache(Path(named) if named else default_folder())
    except InputError as error:
        if named:
            raise
        print(f"warning: {error}", file=sys.stderr)
        return None


def digest(*parts: Any) -> str:
    """A hash of the parts, bytes or JSON values, each preceded by its length."""
    total = hashlib.sha256()
    for part in (FORMAT, *parts):
        content = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        total.update(len(content).to_bytes(8, "little") + content)
    return total.hexdigest()[:40]


def question_key(script: str, topology: str, options: Sequence[str]) -> str | None:
    """The name of the entry for a script's report. None where there are too many files that it could import."""
    folders = [Path(script).resolve().parent, PROJECT]
    folders += [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    sources = python_files(list(dict.fromkeys(folders)))
    if sources is None:
        return None
    packages = sorted(info.name for path in sys.path for info in Path(path).glob("*.dist-info"))  # NAME-VERSION
    compiler = os.environ.get(COMPILER_VARIABLE, "")  # a newer one, in an environment of its own
    packages += sorted(info.name for info in Path(compiler).glob("lib/*/site-packages/*.dist-info")) if compiler else []
    variables = {n: v for n, v in os.environ.items() if n.startswith(READ_BY_LIBRARIES) and not n.startswith(OWN)}
    place = [compiler, str(Path(script).resolve()), str(Path.cwd()), sys.version, sys.prefix]
    return f"answer_{digest(place, topology, list(options), sources, packages, variables)}"


def python_files(folders: Sequence[Path]) -> dict[str, str] | None:
    """{path: hash} of every Python file below these folders. None for more than MOST_FILES files of any kind.

    Left out are hidden folders, those of environments and packages, and links to folders.
    """
    found, seen = {}, 0
    for folder in folders:
        for place, inner, files in os.walk(folder):
            inner[:] = [n for n in inner if not n.startswith(".") and n not in ("__pycache__", "site-packages")]
            inner[:] = [n for n in inner if not Path(place, n, "pyvenv.cfg").exists()]
            seen += len(files) + len(inner)
            if seen > MOST_FILES:
                return None
            for path in (Path(place, name) for name in files if name.endswith(".py")):
                try:
                    found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
                except OSError as error:  # a link to nothing, or not ours to read
                    found[str(path)] = str(error.strerror)
    return found


def watched(settings: dict, options: Sequence[str]) -> dict[str, str]:
    """{text: state} of every text in the settings and options of a script that names, or could name, a file or folder.

    State: size and time of the file; of a folder those of what is directly in it; empty where nothing is there.
    Folders of WRITTEN do not count: other programs write to /dev/shm all the time.
    """
    named = [(name.lstrip("-"), text or name) for name, _, text in (option.partition("=") for option in options)]
    texts = [v for name, v in (*named, *settings.items()) if v and name not in WRITTEN]
    return {text: state_of(text) for text in texts if isinstance(text, str) and not text.startswith("{")}


def state_of(text: str) -> str:
    try:
        path = Path(text)
        places = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
        return digest([[p.name, (s := p.stat()).st_size, s.st_mtime_ns] for p in places[: MOST_FILES // 10]])
    except (OSError, ValueError):
        return ""


def from_json(kind: Any, value: Any) -> Any:
    """value as kind: a dataclass, or a type of its fields. Raises ValueError where it is of another type."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = {field.name for field in dataclasses.fields(kind)}
        if not isinstance(value, dict) or set(value) != names:
            raise ValueError(f"expected the fields of {kind.__name__}")
        return kind(**{name: from_json(hints[name], v) for name, v in value.items()})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in inner:
            return None
        return from_json(next(k for k in inner if k is not types.NoneType), value)
    if kind is typing.Any:
        return value
    expected = {float: (int, float), tuple: (list,)}.get(origin or kind, (origin or kind,))
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r:.40} is no {kind}")
    if origin is dict:
        return {key: from_json(inner[1], v) for key, v in value.items()}
    if origin is list:
        return [from_json(inner[0], v) for v in value]
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[1:] == (Ellipsis,) else inner
        return tuple(from_json(k, v) for k, v in zip(kinds, value, strict=True))
    return value
