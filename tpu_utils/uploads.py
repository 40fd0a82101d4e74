"""Which lines of a step send values to the device: imported once a log line has seen such transfers."""

import collections
import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from tpu_utils.errors import is_own


@contextlib.contextmanager
def lines_that_upload(count: Callable[[], int], say: Callable[[str], None]) -> Iterator[None]:
    """Says after what runs inside, the Python code of one step, which lines sent something to the device.

    count: transfers so far. Python calls back at every line of code that is not of an installed package, and transfers
    since the last line are those of that line: torch_xla sends a value when an operation asks for it. The program is
    the same as without this. Left out under a debugger or a coverage tool, which use the same callback.
    """
    if sys.gettrace():
        yield
        return
    found: collections.Counter[tuple[str, int]] = collections.Counter()
    line, before = None, count()

    def move_to(frame: FrameType | None) -> None:
        nonlocal line, before
        now = count()
        if now > before and line:
            found[line] += now - before
        while frame and not is_own(frame.f_code.co_filename):
            frame = frame.f_back
        line, before = frame and (frame.f_code.co_filename, frame.f_lineno), now

    def in_own(frame: FrameType, event: str, _):
        move_to(frame.f_back if event == "return" else frame)
        return in_own

    sys.settrace(lambda frame, event, _: in_own if is_own(frame.f_code.co_filename) else None)
    try:
        yield
    finally:
        sys.settrace(None)
        move_to(None)
        for (file, number), transfers in found.most_common(5):
            where = f"{os.path.relpath(file)}:{number} ({linecache.getline(file, number).strip()})"
            say(f"uploads    {transfers} of this step at {where}")
