"""Runs a training script up to its first step, which is compiled for a TPU slice instead of taken.

    python -m tpu_compiler.of_script SCRIPT --compile_for v5litepod-8 [script options]

`python SCRIPT --compile_for v5litepod-8` becomes this: the script's own folder knows nothing of the compiler.
"""

import os
import runpy
import sys
from pathlib import Path

from tpu_utils.options.environment import UNDER_COMPILER


def run(arguments: list[str]) -> int:
    """arguments: SCRIPT and its options. Returns the exit code: 0 fits, 1 does not; a script that ends before a first
    step ends with its own."""
    os.environ[UNDER_COMPILER] = "1"
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except Exception as error:  # FirstStep cannot be named yet: its module imports torch
        return compile_first_step(error)
    return 0


def compile_first_step(error: Exception) -> int:
    """error: what the script raised. Raises it again unless it is the first step of its run."""
    from tpu_utils.step.graphs import FirstStep  # the script has settled the environment, and imported torch, by now

    if not isinstance(error, FirstStep):
        raise error
    from tpu_compiler.ask import compile_for
    from tpu_compiler.compile.compiling import lower_pallas_for
    from tpu_utils.base.errors import run_script

    facts = dict(error.facts)
    topology = facts.pop("topology")

    def ask() -> int:
        if facts["settings"].get("attention") == "flash":  # its kernels are lowered as the step is traced
            lower_pallas_for(topology)
        return compile_for(topology, error.step, *error.arguments, **error.keywords, **facts)

    return run_script(ask)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
