"""Errors that can end a run, their exit codes, and output that never raises. Imports nothing of this project."""

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable

OTHERS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, KeyError, AttributeError, ZeroDivisionError)
OTHERS += (UserWarning,)
"""What code of a copy raises when it is tried; UserWarning: where a warning is made an error."""


class InputError(ValueError):
    """What the user gave cannot work: an option, a data file, a run directory. Scripts exit with code 2."""


class TrainingError(RuntimeError):
    """The run cannot go on, and it is not the input's fault. Scripts exit with code 1."""


class DeviceError(TrainingError):
    """The device asked for is not there, or another process holds it."""


class RecompileError(TrainingError):
    """A second graph was compiled where one was promised."""


class NonFiniteError(TrainingError):
    """A loss or a gradient is infinite or not a number."""


class SaveError(TrainingError):
    """A checkpoint could not be written. The earlier ones are untouched."""


class PassingError(TrainingError):
    """Something outside did not answer, or not yet: a bucket, a network. The same command may work later."""


class CheckpointError(InputError):
    """A checkpoint on disk cannot be used: truncated, altered, foreign, or of another model."""


class DamagedCheckpoint(CheckpointError):
    """Its bytes are not those that were written, or do not fit together."""


class Output(io.FileIO):
    """An output stream that never raises: what a closed terminal, a closed pipe or a full disk refuses is dropped."""

    lost: OSError | None = None
    """The error of the last failed write. A closed pipe does not count: its reader has what it wanted."""

    def write(self, data) -> int:
        try:
            return super().write(data) or len(data)  # None: a full non-blocking pipe; drop it, do not wait
        except OSError as error:
            self.lost = self.lost if isinstance(error, BrokenPipeError) else error
            return len(data)


def never_fail_to_print() -> None:
    """From here on print(), bars, warnings and tracebacks of all threads go through an Output. Idempotent. Leaves a
    sys.stdout or sys.stderr alone that is not the interpreter's own, such as a notebook's."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # 0, 1 or 2 was closed: no file of the run may get that
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        encoding, errors = "utf-8", "strict"
        if stream:  # None: it was closed
            encoding, errors = stream.encoding, stream.errors
            with contextlib.suppress(OSError):
                stream.flush()
        if errors == "strict":  # a name that this encoding has no letters for is shown escaped
            errors = "backslashreplace"
        buffer = io.BufferedWriter(Output(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(buffer, encoding, errors, line_buffering=True))


def first_line(error: BaseException) -> str:
    """The first line of another library's error message; the name of the error's class if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_own(file: str) -> bool:
    """Whether this source file is neither Python's own nor that of an installed package."""
    return "site-packages" not in file and not file.startswith((os.__file__.removesuffix("os.py"), "<"))


def line_of(error: BaseException) -> str:
    """FILE:LINE (text) of the innermost line of the traceback that is not Python's, a package's or a torch mode's."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if is_own(frame.filename) and not frame.name.startswith("__torch_")] or frames
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})"


def run_script(main: Callable[[], int], answers: bool = False) -> int:
    """Exit code of main: its own, 2 for an InputError, 1 for a TrainingError, each as a message without a traceback.
    Lost output is no error, because the results are in files. answers: the result is what main prints, so losing it to
    a full disk is an error."""
    never_fail_to_print()
    try:
        code = main()
        output = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
        if answers and isinstance(output, Output) and output.lost:
            raise output.lost
        return code
    except (InputError, MemoryError, OSError, RuntimeError) as error:  # OSError: the disk or the network gave up
        if str(error).startswith("Symlink loop from"):  # Path.resolve(), until Python 3.13
            error = OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(error).split("'")[1])
        if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
            error = TrainingError(f"the host has too little memory: {first_line(error)}; choose smaller sizes")
        if "--debug" in sys.argv or not isinstance(error, InputError | TrainingError | OSError):
            raise
        what = f", at {line_of(error)}" if isinstance(error, FileNotFoundError) else ""  # by whom else is not known
        kind = error.errno if isinstance(error, OSError) else None
        of_a_path = kind in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EEXIST)  # that the user gave
        if of_a_path or kind == errno.EROFS:
            what = "; choose another path"
        elif kind in (errno.ENOSPC, errno.EDQUOT):
            what = "; make room there, or write elsewhere, and repeat the command"
        print(f"error: {error}{what}", file=sys.stderr)
        return 2 if isinstance(error, InputError) or of_a_path else 1
