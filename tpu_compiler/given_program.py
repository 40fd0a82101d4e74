"""Reads a program of another framework and asks the TPU compiler: the child process of given.compile_file.

Whatever the file is, it becomes the serialized HloModuleProto that a TPU VM would hand to libtpu, with what the file
says of devices, donation and shardings. Nothing in it runs.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
import time
from pathlib import Path

from tpu_compiler.answer import ask_compiler, hand_over
from tpu_compiler.compile.cache import cache_of_environment
from tpu_compiler.compile.compiling import OVERWRITTEN, UNREADABLE, hlo_of_stablehlo, hlo_of_text
from tpu_compiler.compile.newest_child import program_inputs
from tpu_compiler.compile.traced import Traced
from tpu_compiler.given import EXPECTED
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.files import open_regular
from tpu_utils.options.compiler_flags import (
    NO_WINDOWED_EINSUM,
    VARIABLE,
    flags_in_use,
    parse_compiler_options,
    set_flags,
)
from tpu_utils.options.variables import check_known
from tpu_utils.options.virtual_slice import COMPILER_VARIABLE, traceable_topology

HOW = (
    'jax: jax.jit(f).trace(...).lower(lowering_platforms=("tpu",)).as_text(debug_info=True); anything else: the file '
    "*.before_optimizations.txt that XLA_FLAGS=--xla_dump_to=DIR writes"
)
OPTIMIZED = r"^HloModule [^\n]*\bis_scheduled=true|\sfusion\(|\"estimated_cycles\""
CALLS_BACK = r'custom_call_target="[^"]*(?:python|callback)[^"]*"|\bis_host_transfer=true|\s(?:in|out)feed\('


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--hlo", required=True)
    parser.add_argument("--compile_for", required=True)
    parser.add_argument("--compiler_options", default="")
    given = parser.parse_args()
    topology = traceable_topology(given.compile_for)
    set_flags(parse_compiler_options(given.compiler_options))
    check_flags()
    traced = read_program(Path(given.hlo))
    notes = [f"{sum(traced.donated)} of {len(traced.donated)} inputs are overwritten (donated)"]
    if traced.partitions > 1:
        notes.append(f"sharded by {'Shardy' if traced.shardy else 'GSPMD'} over {traced.partitions} devices")
        if not flags_in_use(NO_WINDOWED_EINSUM):
            ((name, value),) = NO_WINDOWED_EINSUM.items()
            notes.append(f"libtpu chooses where collective matmul is; --compiler_options {name}={value} is for nowhere")
    settings = {"hlo": given.hlo, "compiler_options": os.environ.get(VARIABLE, "").strip()}
    result, text = ask_compiler(traced, topology, settings=settings, cache=cache_of_environment())
    return hand_over(traced, dataclasses.replace(result, notes=notes), text)


def check_flags() -> None:
    """Raises InputError for what libtpu would pass over, or end the process at."""
    names = {}
    for word in os.environ.get(VARIABLE, "").split():
        flag = re.fullmatch(r"--(\w+)(?:=(\S*))?", word)
        if not flag or ",--" in word:
            raise InputError(f"{VARIABLE} has {word:.60}; expected --NAME=VALUE, several separated by spaces")
        names[flag[1]] = flag[2] or ""
    newest = os.environ.get(COMPILER_VARIABLE)
    check_known(names, next(Path(newest).glob("lib/*/site-packages/libtpu/libtpu.so"), None) if newest else None)


def read_program(path: Path) -> Traced:
    """Raises InputError for whatever is no program, or one that cannot be compiled for a slice."""
    with open_regular(path, EXPECTED) as file:
        content = file.read()
    start = time.monotonic()
    is_binary = b"\0" in content[:4096] or content.startswith(b"ML\xef")
    text = "" if is_binary else content.decode(errors="replace")
    try:
        if begins := re.match(r"(\s*//[^\n]*\n)*\s*(?=HloModule\b)", text):
            text = text[begins.end() :]
            if re.search(OPTIMIZED, text, re.MULTILINE):
                raise InputError(f"{path} was optimized already; expected {EXPECTED}; {HOW}")
            hlo = hlo_of_text(text)
        else:
            hlo, text = hlo_of_stablehlo(content)
        with program_inputs(hlo) as (_, function):
            count = len(function.arguments)
            named = function.attributes  # a program may have none of results
            results = named["res_attrs"] if "res_attrs" in named else ()  # noqa: SIM401, it has no get()
            free_outputs = tuple("mhlo.sharding" not in {a.name for a in attributes} for attributes in results)
    except InputError:
        raise
    except UNREADABLE as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.endswith(":")]
        said = re.sub(r'^error: ("-":)?', "line ", lines[0]) if lines else type(error).__name__
        raise InputError(f"{path} cannot be read: {said:.200}; expected {EXPECTED}; {HOW}") from error
    if found := re.search(CALLS_BACK, text):
        raise InputError(
            f"{path} calls the host while it runs: {found[0].strip():.100}; expected a program that stays on the "
            "device; leave jax.debug, io_callback and prints out of the step"
        )
    header = text.partition("\n")[0]
    if said := re.search(r"\ballow_spmd_sharding_propagation_to_output=\{([a-z,]+)\}", header):
        free_outputs = tuple(word == "true" for word in said[1].split(","))
    donors = {int(n) for n in re.findall(r"\((\d+), \{[\d, ]*\}", "".join(re.findall(OVERWRITTEN, header)))}
    return Traced(
        hlo=hlo,
        roles=("inputs",) * count,
        donated=tuple(number in donors for number in range(count)),
        shardings=("",) * count,
        partitions=partitions_of(header, text),
        replicas=int((re.search(r"\breplica_count=(\d+)", header) or [0, 1])[1]),
        seconds=time.monotonic() - start,
        given=True,
        shardy="xla.sdy.meshes" in header,
        free_outputs=free_outputs or (True,),
    )


def partitions_of(header: str, text: str) -> int:
    """Devices that one program is sharded over: as its first line says, else as its mesh or its shardings do."""
    if said := re.search(r"\bnum_partitions=(\d+)", header):
        return int(said[1])
    found = [1]
    for mesh in re.findall(r"#sdy\.mesh<\[([^\]]*)\]", header):
        sizes = [int(size) for size in re.findall(r"=(\d+)", mesh)]
        found.append(math.prod(sizes))
    for iota in re.findall(r"<=\[([\d,]+)\]", text):
        found.append(math.prod(int(size) for size in iota.split(",")))
    return max(found)


if __name__ == "__main__":
    sys.exit(run_script(main))
