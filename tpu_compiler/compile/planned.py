"""A program's plan, seconds after it was traced: its memory and its schedule. Imports neither torch nor jax.

libtpu plans memory in seconds; minutes go by until each operation has its machine code, with which its price comes. It
writes the plan down where xla_dump_to asks for it, and cannot be told to stop there: so it runs in a child process,
which is killed once the plan is written.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from tpu_compiler.compile.newest import asked_child
from tpu_compiler.compile.traced import Traced
from tpu_utils.base.hardware import Topology
from tpu_utils.options.compiler_flags import VARIABLE

PLAN_VARIABLE = "AOT_TPU_PLAN"
"""Set where a plan is asked for."""
PLAN = ".after_optimizations-buffer-assignment.txt"
LAST = ".after_optimizations_after_buffer_assignment.txt"  # of the texts before machine code is made
CODE_BYTES = {False: 100_000, True: 200_000}
"""Machine code of a fusion or kernel, by whether a flag gives it more on-chip memory, of which it makes larger tiles:
steps of Llama 3 8B, compiled whole by libtpu 0.0.21, had 82,000 without, 140,000 with 64 MiB, and 206,000 and 258,000
with 96."""
DEFAULT_KIB = 32_768
"""The limit of on-chip memory that libtpu 0.0.21 takes for v6e: a step planned with it is the same as without."""


def plan_program(python: Path, traced: Traced, topology: Topology) -> tuple[dict[str, Any], str]:
    """(answer, program text) as of compile_there(), without prices: {"error": message}, or the numbers of
    compiling.Compiled, of which program_bytes is an estimate and flops 0. python: of the environment with the compiler.
    """
    start = time.monotonic()
    with asked_child(python, traced, topology, f"dump/*{LAST}") as folder:
        plan = next(folder.glob(f"dump/*{PLAN}"), None)
        if plan is None:  # a refusal: what compiles has a plan
            return json.loads((folder / "answer.json").read_text()), ""
        text = plan.with_name(plan.name.replace(PLAN, ".after_optimizations.txt")).read_text()
        numbers = allocated_bytes(plan.read_text())
        kernels = len(re.findall(r"^ +(?:ROOT )?%?[\w.\-]+ = .*? (?:fusion|custom-call)\(", text, re.M))
        program = kernels * CODE_BYTES[has_more_memory(os.environ.get(VARIABLE, ""))]
        numbers |= dict(program_bytes=program, flops=0.0, seconds=time.monotonic() - start)
        return numbers, text


def has_more_memory(flags: str) -> bool:
    """Whether libtpu's flags give a kernel more on-chip memory than it has by itself."""
    limit = re.search(r"xla_tpu_scoped_vmem_limit_kib=(\d+)", flags)
    return bool(limit) and int(limit[1]) > DEFAULT_KIB


def allocated_bytes(plan: str) -> dict[str, int]:
    """peak_bytes, argument_bytes, output_bytes, temporary_bytes of libtpu's list of allocations: those of main memory,
    which are of no color. What is thread-local names arrays that a fusion is given: they have their place already."""
    sizes = dict.fromkeys(("argument_bytes", "output_bytes", "temporary_bytes"), 0)
    for line in re.findall(r"^allocation \d+: (.*)", plan, re.M):
        size = int(re.match(r"size (\d+)", line)[1])
        if " color " not in line and " thread-local" not in line:
            kind = "argument" if " parameter " in line else "output" if "maybe-live-out" in line else "temporary"
            sizes[f"{kind}_bytes"] += size
    return {"peak_bytes": sum(sizes.values()), **sizes}
