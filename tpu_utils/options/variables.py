"""Variables of the environment that torch_xla, XLA and libtpu read, checked before they do. Imports no torch."""

import functools
import mmap
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tpu_utils.base.errors import InputError
from tpu_utils.options.fields import nearest

MOST_DEVICES = 127
"""Most devices of one process: autograd counts them in 8 bits."""
OFF = ("", "0", "false", "strict")
SWITCHES = {
    "XLA_USE_BF16": "makes bfloat16 of what the run calls float32; unset it, or choose --precision bfloat16",
    "XLA_USE_32BIT_LONG": "makes 32 bits of whole numbers of 64, which ends a run in a crash; unset it",
    "XLA_USE_SPMD": "makes other programs of the steps; unset it: scripts start SPMD themselves",
}
INEXACT_MATH = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
INEXACT_MATH += ("TORCHINDUCTOR_USE_FAST_MATH", "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG")
SWITCHES |= dict.fromkeys(INEXACT_MATH, "makes products and sums less exact than the run says; unset it")
SWITCHES["XLA_DOWNCAST_BF16"] = SWITCHES["XLA_USE_BF16"]
SWITCHES["XLA_AUTO_SPMD"] = SWITCHES["XLA_USE_SPMD"]
"""What a variable does, and what to do about it, where it is set to anything but OFF."""
NUMBERS = {
    "CPU_NUM_DEVICES": (1, MOST_DEVICES),
    **dict.fromkeys(("PJRT_LOCAL_PROCESS_COUNT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), (1, 1 << 20)),
    **dict.fromkeys(("PJRT_LOCAL_PROCESS_RANK", "RANK", "LOCAL_RANK", "GROUP_RANK"), (0, 1 << 20)),
}
"""The least and the largest whole number that a variable may have."""
DEVICES = ("", "cpu", "tpu", "gpu")
LEAST_MAPPED = 7 << 30
"""Bytes: the smallest run here maps 6.4 GiB, and has 1 GiB in memory."""
INEXACT = re.compile(r"xla_cpu_enable_fast_\w+")
"""Flags of XLA that let it reorder sums and leave out what is not finite."""
COMMON = re.compile(
    r"--xla_(backend_optimization_level=[0-3]|cpu_(enable_fast_math|use_fusion_emitters)=(true|false)|dump_to=\S+)"
)
"""Flags that XLA has, with values that it takes: it is not asked for them, which takes seconds."""


def check_address_space() -> None:
    """Raises InputError where this process may map less than torch and torch_xla do."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_MAPPED:
        raise InputError(
            f"this process may map {limit:,} bytes of memory, and torch would not load, or XLA abort; expected "
            f"{LEAST_MAPPED:,} or more, most of which is never used; run ulimit -v unlimited first, or ask who set it"
        )


def check_variables(environment: Mapping[str, str], device: str, options: Mapping[str, str] | None = None) -> None:
    """Raises InputError for a value that changes numbers behind the printed precision, or ends the run by a signal.

    device: as --device has it; "auto" asks PJRT_DEVICE. options: of the TPU's compiler, which libtpu must have.
    """
    check_address_space()
    for name, effect in SWITCHES.items():
        own = name.endswith("_SPMD") and "torch_xla" in sys.modules  # whose use_spmd() sets it
        if (value := environment.get(name, "")).lower() not in OFF and not own:
            raise InputError(f"the environment has {name}={value:.50}, which {effect}")
    for name, (least, most) in NUMBERS.items():
        value = environment.get(name, str(least))
        if not re.fullmatch("[0-9]{1,9}", value) or not least <= int(value) <= most:
            raise InputError(
                f"the environment has {name}={value:.50}; expected a whole number from {least} to {most}; unset it, or "
                "correct it"
            )
    named = environment.get("PJRT_DEVICE", "")
    if device == "auto" and named.lower() not in DEVICES:
        raise InputError(
            f"the environment has PJRT_DEVICE={named:.50}; expected CPU, TPU or GPU; unset it, or correct it"
        )
    if cache := environment.get("XLA_PERSISTENT_CACHE_PATH"):
        try:
            Path(cache).mkdir(parents=True, exist_ok=True)  # as torch_xla does
        except OSError as error:
            raise InputError(
                f"the environment has XLA_PERSISTENT_CACHE_PATH={cache:.200}: {error.strerror}; expected a folder that "
                "can be written; unset it: torch_xla cannot read what it keeps there"
            ) from error
    check_flags(environment.get("XLA_FLAGS", ""))
    check_known(options or {})


@functools.cache
def check_flags(text: str) -> None:
    """Raises InputError for flags of XLA at which it would abort the process, and for inexact ones."""
    if text.split() and not text.lstrip().startswith("--"):
        raise InputError(
            f"XLA_FLAGS begins with {text:.80}, which XLA takes for the name of a file; with what torch_xla adds "
            "behind it XLA would abort; expected flags, the first with -- in front"
        )
    words = [word for word in text.split() if word.startswith("--")]  # XLA passes over others
    for word in words:
        name, _, value = word[2:].partition("=")
        if INEXACT.fullmatch(name) and value.lower() not in ("0", "false"):
            raise InputError(
                f"XLA_FLAGS has {word:.80}, which changes numbers behind the precision that a run prints; leave it out"
            )
    if not all(map(COMMON.fullmatch, words)) and (refusal := refusal_of_xla(text)):
        raise InputError(
            f"XLA_FLAGS is {text:.200}, at which XLA would abort: {refusal:.200}; correct it, or leave it out; options "
            "of the TPU's compiler belong in --compiler_options"
        )


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


def check_known(options: Mapping[str, str], library: Path | None = None) -> None:
    """Raises InputError for options that libtpu does not have; they would end the process when it is loaded. library:
    its file, by default the installed one's."""
    if library is None:
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
