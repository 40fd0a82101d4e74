"""Prints, as one line of JSON, where other users of a host get at what Ray keeps there: {id of the host: folder or ""}.

The text of this file is the command of a job, `python -c TEXT`, on the head: nothing is unpacked for it into a folder.
"""

import contextlib
import json
import os
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

SECONDS = 60.0


def of_rays_folder() -> str:
    return open_to_others(Path(ray.get_runtime_context().get_temp_dir()))


def open_to_others(place: Path) -> str:
    """The folder, where other users can enter it; "" where it is, or stands in, a folder of this user's alone."""
    place = place.resolve()
    for folder in (place, *place.parents):
        status = folder.stat()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return ""
    return str(place)


if __name__ == "__main__":
    ray.init(log_to_driver=False, logging_level="ERROR")
    question, found = ray.remote(num_cpus=0)(of_rays_folder), {}
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    there = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
    asked = {node: question.options(scheduling_strategy=place, max_retries=0).remote() for node, place in there.items()}
    for node, answer in asked.items():
        with contextlib.suppress(ray.exceptions.RayError):  # it has died, or has no process to spare: it runs nothing
            found[node] = ray.get(answer, timeout=SECONDS)
    print(json.dumps(found))
