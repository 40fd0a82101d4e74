"""Notices of the VM's metadata server: maintenance and preemption. Imported where there may be one alone."""

import threading
import time
from collections.abc import Callable
from weakref import WeakMethod

from tpu_utils.remote.hosts import ask_server

# key of the VM's metadata -> its values that mean that this machine is about to go. A TPU cannot be migrated alive.
# Source: cloud.google.com/compute/docs/metadata/getting-live-migration-notice and .../instances/create-use-spot.
NOTICES = {
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
    "preempted": ("TRUE",),
}
WAIT_SECONDS, PAUSE_SECONDS = 60, 5.0
"""How long the server waits for a change; and between two questions where it does not."""


def watch_metadata(notice: Callable[[str], None]) -> None:
    """Call this method of an object at a notice, in the background. A server that is silent or absent has no effect."""
    for key in NOTICES:
        # no reference to the object: the thread ends when nobody can ask it any more
        arguments = (WeakMethod(notice), key)
        threading.Thread(target=_watch, args=arguments, name=f"metadata {key}", daemon=True).start()


def _watch(ref: WeakMethod, key: str) -> None:
    """Ask the metadata server for instance/key again and again, each time waiting there for a change."""
    query = ""
    while ref() is not None:
        started = time.monotonic()
        reply = ask_server(f"{key}{query}", WAIT_SECONDS + 10)
        value = reply.value.decode(errors="replace").strip().upper() if reply.code == 200 else ""
        notice = ref()
        if notice is not None and value in NOTICES[key]:
            notice(f"maintenance notice {key} = {value}")
            return
        del notice
        query = f"?wait_for_change=true&timeout_sec={WAIT_SECONDS}&last_etag={reply.etag}" if reply.code == 200 else ""
        if time.monotonic() - started < PAUSE_SECONDS and (reply.code != 200 or value):
            time.sleep(0.2 if reply.code == 200 else PAUSE_SECONDS)
