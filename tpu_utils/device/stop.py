"""What ends a run early: signals, and notices of the VM."""

import http.client
import os
import signal
import threading
import time
import urllib.request
import weakref

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
        """Heed notices of maintenance and preemption in the background: on TPU, or where GCE_METADATA_HOST is set.

        Google's client libraries read the same variable. A server that is silent or absent has no effect.
        """
        if device_type() == "TPU" or os.environ.get("GCE_METADATA_HOST"):
            for key in NOTICES:
                # no reference to self: the thread ends when nobody can ask any more
                arguments = (weakref.ref(self), key)
                threading.Thread(target=_watch_metadata, args=arguments, name=f"metadata {key}", daemon=True).start()

    def notice(self, text: str) -> None:
        """Ask to stop because the machine is about to go."""
        self._notice = self._notice or text
        print(f"notice     {text}: stopping at the next step boundary", flush=True)

    def reason(self, number: int) -> str:
        """Why the run ends. number: of the signal, which another process may have got."""
        return signal.Signals(number).name if self._signal or not self._notice else self._notice


# key of the VM's metadata -> its values that mean that this machine is about to go. A TPU cannot be migrated alive.
# Source: cloud.google.com/compute/docs/metadata/getting-live-migration-notice and .../instances/create-use-spot.
NOTICES = {
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
    "preempted": ("TRUE",),
}


def _watch_metadata(ref: weakref.ref, key: str, wait_seconds: int = 60, pause_seconds: float = 5) -> None:
    """Ask the metadata server for instance/key again and again, each time waiting there for a change."""
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    url, query = f"http://{host}/computeMetadata/v1/instance/{key}", ""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on the VM's own link
    while ref() is not None:
        started = time.monotonic()
        try:
            request = urllib.request.Request(url + query, headers={"Metadata-Flavor": "Google"})
            with direct.open(request, timeout=wait_seconds + 10) as answer:
                google = answer.headers.get("Metadata-Flavor") == "Google"
                value, etag = answer.read(1000).decode().strip().upper(), answer.headers.get("ETag", "0")
        except (OSError, ValueError, http.client.HTTPException):  # no such server, or not now: nothing to be said
            google, value, etag = False, "", "0"
        stop = ref()
        if stop is not None and google and value in NOTICES[key]:
            stop.notice(f"maintenance notice {key} = {value}")
            return
        del stop
        query = f"?wait_for_change=true&timeout_sec={wait_seconds}&last_etag={etag}" if google else ""
        if time.monotonic() - started < pause_seconds and (not google or value):
            time.sleep(0.2 if google else pause_seconds)
