"""What can end a run, the exit code it ends with, and output that cannot. Imports nothing of this project."""

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable


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
    """An output that never fails: what a closed terminal, a reader that left or a full disk refuses is lost."""

    lost: OSError | None = None
    """The last refusal, but for that of a reader that left: it has what it wanted."""

    def write(self, data) -> int:
        try:
            return super().write(data) or len(data)  # None: the reader does not keep up, and must not be waited for
        except BrokenPipeError:
            return len(data)
        except OSError as error:
            self.lost = error
            return len(data)


def never_fail_to_print() -> None:
    """From here on print(), bars, warnings and tracebacks of all threads go through an Output. Idempotent.

    Leaves a sys.stdout or sys.stderr alone that is not the interpreter's own, such as a notebook's.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # it was closed, and a file of the run would get its number
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
    """What an error of another library says, without the lines that only its authors read; its kind if it is silent."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def line_of(error: BaseException) -> str:
    """FILE:LINE (text) of the last line it passed that is not of an installed package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})"


def run_script(main: Callable[[], int], answers: bool = False) -> int:
    """Exit code of main: its own, 2 for an InputError, 1 for a TrainingError, each as a message without a traceback.

    Output that nobody takes ends nothing: what main is for is in files. answers: it is what main prints, so a disk that
    is too full for it is an error.
    """
    never_fail_to_print()
    try:
        code = main()
        output = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
        if answers and isinstance(output, Output) and output.lost:
            raise output.lost
        return code
    except (InputError, TrainingError, OSError) as error:  # OSError: the disk or the network gave up
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG  # no disk, but what the user gave
        return 2 if isinstance(error, InputError) or too_long else 1
