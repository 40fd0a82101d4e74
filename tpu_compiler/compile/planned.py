"""Memory alone: what a program needs, seconds after it was traced. Imports neither torch nor jax.

libtpu plans memory in seconds; minutes go by until each operation has its machine code, with which its price comes. It
writes the plan down where xla_dump_to asks for it, and cannot be told to stop there: so it runs in a child process,
which is killed once the plan is written.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tpu_compiler.compile.newest import CHILD, child_environment, write_request
from tpu_utils.base.errors import TrainingError
from tpu_utils.base.hardware import Topology

MEMORY_VARIABLE = "AOT_TPU_MEMORY"
"""Set where memory alone is asked for."""
CODE_BYTES = 200_000
"""Machine code of a fusion or kernel. Of the models of 1 to 8 billion parameters that were compiled whole, libtpu
0.0.21's had 75,000 to 200,000."""


def planned_memory(
    python: Path, hlo: bytes, topology: Topology, options: dict[str, str], **request: Any
) -> tuple[dict[str, Any], str]:
    """(answer, program text) as of compile_there(), without prices: {"error": message}, or the numbers of
    compiling.Compiled, of which program_bytes is an estimate and flops 0. python: of the environment with the compiler.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_request(folder, hlo, topology, options, request)
        with (folder / "said.txt").open("w+") as said:
            child = subprocess.Popen(
                [str(python), "-P", str(CHILD), work],
                env=child_environment(),
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            try:
                plan = None
                while plan is None and child.poll() is None:
                    time.sleep(0.1)
                    # libtpu writes this last of those that it writes before it makes code
                    plan = next(folder.glob("dump/*.after_optimizations_after_buffer_assignment.txt"), None)
            finally:
                child.kill()
                child.wait()
            plan = next(folder.glob("dump/*.after_optimizations-buffer-assignment.txt"), None)
            if plan is None:
                answer = folder / "answer.json"
                if answer.is_file() and "error" in (said_instead := json.loads(answer.read_text())):
                    return said_instead, ""
                said.seek(0)
                print(said.read()[-2000:], file=sys.stderr)
                raise TrainingError(f"the compiler ended with code {child.returncode}; its own message is above")
        text = plan.with_name(plan.name.replace("-buffer-assignment", "")).read_text()
        numbers = allocated_bytes(plan.read_text())
        kernels = len(re.findall(r"^ +(?:ROOT )?%?[\w.\-]+ = .*? (?:fusion|custom-call)\(", text, re.M))
        numbers |= dict(program_bytes=kernels * CODE_BYTES, flops=0.0, seconds=time.monotonic() - start)
        return numbers, text


def allocated_bytes(plan: str) -> dict[str, int]:
    """peak_bytes, argument_bytes, output_bytes, temporary_bytes of libtpu's list of allocations: those of main memory,
    which are of no color."""
    sizes = dict.fromkeys(("argument_bytes", "output_bytes", "temporary_bytes"), 0)
    for line in re.findall(r"^allocation \d+: (.*)", plan, re.M):
        size = int(re.match(r"size (\d+)", line)[1])
        if " color " not in line:
            kind = "argument" if " parameter " in line else "output" if "maybe-live-out" in line else "temporary"
            sizes[f"{kind}_bytes"] += size
    return {"peak_bytes": sum(sizes.values()), **sizes}
