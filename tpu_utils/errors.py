"""What can end a run, and the exit code it ends with. Imports nothing of this project."""

import errno
import io
import sys
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


class CheckpointError(InputError):
    """A checkpoint on disk cannot be used: truncated, altered, foreign, or of another model."""


def run_script(main: Callable[[], int]) -> int:
    """Exit code of main: its own, 2 for an InputError, 1 for a TrainingError, each as a message without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does it: a name or prompt that is no text can be printed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return main()
    except (InputError, TrainingError, OSError) as error:  # OSError: the disk or the network gave up
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG  # no disk, but what the user gave
        return 2 if isinstance(error, InputError) or too_long else 1
