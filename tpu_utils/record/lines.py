"""At which lines something happens that is counted: imported once it has happened where it should not."""

import atexit
import collections
import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tpu_utils.base.errors import is_own

HERE = str(Path(__file__).parent.parent) + os.sep


class LineWatch:
    """Finds the lines at which counts grow.

    Python calls back at every line of code that is neither of an installed package nor of this folder, and what was
    counted since the last line is that line's: torch_xla sends a value when an operation asks for it. Programs are the
    same as without this.
    """

    def __init__(self, counts: dict[str, Callable[[], float]]):
        self.counts = counts
        self._line: tuple[str, int] | None = None
        self.forget()

    def forget(self) -> None:
        """Nothing was found so far."""
        self._found = {kind: collections.Counter() for kind in self.counts}
        self._before = {kind: count() for kind, count in self.counts.items()}

    def start(self) -> bool:
        """Whether lines are watched from now on: not under a debugger or a coverage tool, which use the callback."""
        if sys.gettrace():
            return False
        for frame in _frames():
            frame.f_trace = self._in_theirs
        self.forget()
        self._move_to(sys._getframe())
        sys.settrace(self._on_call)
        atexit.register(sys.settrace, None)  # modules are taken apart after that
        return True

    def stop(self) -> None:
        sys.settrace(None)
        for frame in _frames():
            frame.f_trace = None

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Around what does not count."""
        sys.settrace(None)
        self._move_to(sys._getframe())
        yield
        self._before = {kind: count() for kind, count in self.counts.items()}
        sys.settrace(self._on_call)

    def lines(self, kind: str) -> list[tuple[int, str]]:
        """(how often, FILE:LINE (text)), the most frequent first."""
        self._move_to(sys._getframe())
        return [
            (times, f"{os.path.relpath(file)}:{number} ({linecache.getline(file, number).strip()})")
            for (file, number), times in self._found[kind].most_common(5)
        ]

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Callable | None:
        return self._in_theirs if _is_theirs(frame) else None

    def _in_theirs(self, frame: FrameType, event: str, _: Any) -> Callable:
        self._move_to(frame.f_back if event == "return" else frame)
        return self._in_theirs

    def _move_to(self, frame: FrameType | None) -> None:
        now = {kind: count() for kind, count in self.counts.items()}
        for kind, number in now.items():
            if number > self._before[kind] and self._line:
                self._found[kind][self._line] += number - self._before[kind]
        while frame and not _is_theirs(frame):
            frame = frame.f_back
        self._line, self._before = frame and (frame.f_code.co_filename, frame.f_lineno), now


def _is_theirs(frame: FrameType) -> bool:
    """Whether its code is of a script, a model, or anything that is neither installed nor of this folder."""
    file = frame.f_code.co_filename
    return is_own(file) and not file.startswith(HERE)


def _frames() -> Iterator[FrameType]:
    """Frames of the calls under way that run such code, the innermost first."""
    frame = sys._getframe(1)
    while frame:
        if _is_theirs(frame):
            yield frame
        frame = frame.f_back
