"""Which options libtpu and XLA have, read from the library itself; imported where a user gives some."""

import difflib
import mmap
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tpu_utils.base.errors import InputError


def xla_has(name: str) -> bool:
    """Whether a C string of XLA's library ends with this name, as its flags do. True where there is no library."""
    spec = find_spec("torch_xla")
    library = next(Path(spec.origin).parent.parent.glob("_XLA*.so"), None) if spec else None
    if library is None:
        return True
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(b"%s\0" % name.encode()) >= 0


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
                near = difflib.get_close_matches(name, known, n=1)
                raise InputError(
                    f"compiler_options has {name}, which this libtpu does not have; expected one of its own"
                    + (f"; did you mean {near[0]}?" if near else "")
                )
