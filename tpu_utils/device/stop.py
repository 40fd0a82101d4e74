"""What ends a run early: signals, and notices of the VM."""

import os
import signal
import time

from tpu_utils.device import device_type

ECHO_SECONDS = 1.0
"""A signal within so long after the first is the same request: Ctrl-C reaches a launcher too, which hands it on."""


class StopRequest:
    """The first SIGTERM, SIGINT or SIGHUP asks for a checkpoint at the next step boundary; a later one stops at once.

    Later: SIGTERM or SIGINT, ECHO_SECONDS after the first or more. SIGHUP says that the terminal is gone. It hurries
    nothing, and where it is ignored at the start, as under nohup, it stays ignored.
    """

    def __init__(self):
        self._signal: int | None = None
        self._signalled = 0.0
        self._notice: str | None = None
        hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
        signals = signal.SIGTERM, signal.SIGINT, *hang_up
        self._handlers = {number: signal.signal(number, self._request) for number in signals}

    def close(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._signalled = number, now
        elif number != signal.SIGHUP and now - self._signalled >= ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    @property
    def signal(self) -> int | None:
        """Number of the signal that asked to stop, or None. A notice of the metadata server counts as SIGTERM."""
        return self._signal or (signal.SIGTERM.value if self._notice else None)

    def watch_metadata(self) -> None:
        """Heed notices of maintenance and preemption: on TPU, or where Google's GCE_METADATA_HOST is set."""
        if device_type() == "TPU" or os.environ.get("GCE_METADATA_HOST"):
            from tpu_utils.remote.notices import watch_metadata  # only here

            watch_metadata(self.notice)

    def notice(self, text: str) -> None:
        """Ask to stop because the machine is about to go."""
        self._notice = self._notice or text
        print(f"notice     {text}: stopping at the next step boundary", flush=True)

    def reason(self, number: int) -> str:
        """Why the run ends. number: of the signal, which another process may have got."""
        return signal.Signals(number).name if self._signal or not self._notice else self._notice
