"""Asks the TPU compiler whether a run's step fits, before it takes a place in the queue. The answer is kept on disk."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tpu_compiler.decide.search import ScriptError, compile_script, with_option
from tpu_compiler.estimate.report import format_report
from tpu_utils.base.errors import InputError
from tpu_utils.options.virtual_slice import VersionError, check_private_interfaces

NOT_ASKED = ("run_dir", "resume", "compile_for", "device", "num_virtual_devices", "profile_steps")
"""Left out of the question: these do not change the step, but would miss the cached answer."""


def admit(script: Path, arguments: Sequence[str], kind: str) -> str:
    """One line that says what the compiler answered. Raises InputError with the report where the step does not fit."""
    for name in NOT_ASKED:
        arguments = with_option(arguments, name, None)
    without = "; --no_check leaves the compiler out"
    try:
        check_private_interfaces()
        report = compile_script(str(script), kind, arguments)
    except (ScriptError, VersionError, ValueError) as error:
        raise InputError(f"admission: {error}{without}") from error
    if not report.fits:
        print(format_report(report), file=sys.stderr)
        raise InputError(f"{script.name} does not fit {kind}: nothing was queued; the report is above{without}")
    where = "kept from before" if report.from_cache else f"asked for {report.asked_seconds:.0f} s"
    return f"{kind}: fits, {report.memory_text} a device ({where})"
