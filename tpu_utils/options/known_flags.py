"""Which options libtpu and XLA have: the library itself is asked. Imported where a user gives some."""

import mmap
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tpu_utils.base.errors import InputError
from tpu_utils.options.fields import nearest


def refusal_of_xla(flags: str) -> str:
    """What XLA says of flags at which it would abort the process; empty where it takes them, or is not installed.

    Only the library knows its flags and their values: a child is asked, which takes the seconds of torch's import.
    """
    library = find_spec("torch_xla")
    if not library:
        return ""
    source = "import os, torch_xla; torch_xla.devices(); os._exit(0)"
    tried = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "XLA_FLAGS": flags}
    there = Path(library.origin).parent.parent  # the first folder that the child imports from
    done = subprocess.run([sys.executable, "-c", source], cwd=there, env=tried, capture_output=True, errors="replace")
    said = re.search(r"(Couldn't interpret|Unknown flag|Flag parsing)[^\n]*", done.stderr)
    return said[0] if said and done.returncode else ""


def check_known(options: Mapping[str, str]) -> None:
    """Raises InputError for options that libtpu does not have; they would end the process when it is loaded."""
    spec = find_spec("libtpu")
    library = Path(os.environ.get("TPU_LIBRARY_PATH") or (Path(spec.origin).parent / "libtpu.so" if spec else ""))
    if not options or not library.is_file():
        return
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for name in options:
            if text.find(b"\0%s\0" % name.encode()) < 0:  # its flags are C strings of the library
                known = {match[1].decode() for match in re.finditer(rb"\0(xla_[a-z0-9_]{4,80})(?=\0)", text)}
                raise InputError(
                    f"compiler_options has {name}, which this libtpu does not have; expected one of its own"
                    f"{nearest(name, known)}"
                )
