"""Notices of the VM's metadata server: maintenance and preemption. Imported where there may be one alone."""

import http.client
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from weakref import WeakMethod

# key of the VM's metadata -> its values that mean that this machine is about to go. A TPU cannot be migrated alive.
# Source: cloud.google.com/compute/docs/metadata/getting-live-migration-notice and .../instances/create-use-spot.
NOTICES = {
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
    "preempted": ("TRUE",),
}


def watch_metadata(notice: Callable[[str], None]) -> None:
    """Call this method of an object at a notice, in the background. A server that is silent or absent has no effect."""
    for key in NOTICES:
        # no reference to the object: the thread ends when nobody can ask it any more
        arguments = (WeakMethod(notice), key)
        threading.Thread(target=_watch, args=arguments, name=f"metadata {key}", daemon=True).start()


def _watch(ref: WeakMethod, key: str, wait_seconds: int = 60, pause_seconds: float = 5) -> None:
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
        notice = ref()
        if notice is not None and google and value in NOTICES[key]:
            notice(f"maintenance notice {key} = {value}")
            return
        del notice
        query = f"?wait_for_change=true&timeout_sec={wait_seconds}&last_etag={etag}" if google else ""
        if time.monotonic() - started < pause_seconds and (not google or value):
            time.sleep(0.2 if google else pause_seconds)
