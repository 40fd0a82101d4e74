"""Prints, as one line of JSON, where other users of a host get at what Ray keeps there: {id of the host: folder or ""}.

The text of this file is the command of a job, `python -c TEXT`, on the head: nothing is unpacked for it into a folder.
"""

import contextlib
import json
import os
import stat
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

SECONDS = 60.0


def rays_folder_open_to() -> str:
    return open_to_others(Path(ray.get_runtime_context().get_temp_dir()))


def open_to_others(place: Path) -> str:
    """The folder by which other users get in; "" where it is, or stands in, one of this user's alone, and nobody else
    can put another in the place of that: by renaming it, in a folder above that is theirs or that they can write."""
    for path in (place.absolute(), place.resolve()):
        is_closed = False
        for folder in (path, *path.parents):
            status = folder.stat()
            if is_closed and status.st_uid not in (os.geteuid(), 0):
                return str(folder)
            if is_closed and status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
                return str(folder)
            is_closed |= status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not is_closed:
            return str(path)
    return ""


if __name__ == "__main__":
    ray.init(log_to_driver=False, logging_level="ERROR")
    question, found = ray.remote(num_cpus=0)(rays_folder_open_to), {}
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    there = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
    asked = {node: question.options(scheduling_strategy=place, max_retries=0).remote() for node, place in there.items()}
    for node, answer in asked.items():
        with contextlib.suppress(ray.exceptions.RayError):  # it has died, or has no process to spare: it runs nothing
            found[node] = ray.get(answer, timeout=SECONDS)
    print(json.dumps(found))
