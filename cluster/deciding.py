"""Who starts next, and on which chips. Plain functions; the queue (turns.py) calls decide() whenever something changed.

The rule: higher priority first, then first come first served. A run that does not fit yet chooses the host, or the
slice, where it will fit soonest, and nobody behind it may start there. So a large run is never starved by small ones,
and small ones pass it only on chips that it does not wait for. A run over its user's quota waits for that user's own
runs, and holds up nobody.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

PARTS = (1, 2, 4, 8)
"""Chips of one host that a run may have: what Ray and libtpu can separate."""


@dataclasses.dataclass(frozen=True)
class Host:
    """One machine. kind: the accelerator type of its slice, as v5litepod-16; empty where there is no TPU."""

    node: str
    chips: int
    kind: str = ""
    slice_name: str = ""
    worker: int = 0
    address: str = ""

    @property
    def family(self) -> str:
        return self.kind.rpartition("-")[0]


@dataclasses.dataclass(frozen=True)
class Request:
    """What a run wants: so many chips on each of so many hosts. since: when it was submitted, in seconds.

    kind: the slice it was given by name; empty: any chips will do. avoid: nodes that it was told to leave.
    """

    name: str
    user: str
    chips: int
    hosts: int = 1
    kind: str = ""
    priority: int = 0
    since: float = 0.0
    avoid: tuple[str, ...] = ()

    @property
    def all_chips(self) -> int:
        return self.chips * self.hosts

    @property
    def order(self) -> tuple:
        return -self.priority, self.since, self.name


class Place(NamedTuple):
    """The chips of one host that a run has."""

    node: str
    chips: tuple[int, ...]


def candidates(request: Request, hosts: Iterable[Host]) -> list[tuple[Host, ...]]:
    """The hosts, or the whole slices, that could hold this run if they were free. Each slice in the order of workers.

    A host without a TPU stands for any kind. Nodes to avoid are left out while there are others.
    """
    hosts, family = sorted(hosts, key=lambda host: host.node), request.kind.rpartition("-")[0]
    if request.hosts == 1:
        found = [(h,) for h in hosts if h.chips >= request.chips and (not family or h.family in ("", family))]
    else:
        slices: dict[str, list[Host]] = {}
        for host in hosts:
            if host.slice_name and host.kind == request.kind:
                slices.setdefault(host.slice_name, []).append(host)
        groups = [tuple(sorted(group, key=lambda host: host.worker)) for _, group in sorted(slices.items())]
        whole = list(range(request.hosts))
        found = [
            group
            for group in groups
            if [h.worker for h in group] == whole and all(h.chips == request.chips for h in group)
        ]
    others = [group for group in found if not any(host.node in request.avoid for host in group)]
    return others or found


def fit(request: Request, group: Sequence[Host], free: Mapping[str, set[int]]) -> list[Place] | None:
    """The request's chips there, or None. They begin at a multiple of their number, so that they are neighbours."""
    places = []
    for host in group:
        starts = range(0, host.chips - request.chips + 1, request.chips)
        blocks = [tuple(range(first, first + request.chips)) for first in starts]
        block = next((block for block in blocks if free[host.node].issuperset(block)), None)
        if block is None:
            return None
        places.append(Place(host.node, block))
    return places


def limit_of(user: str, quota: Mapping[str, int]) -> float:
    """Chips that this user may have at a time."""
    return quota.get(user, quota.get("*", math.inf))


def decide(
    hosts: Sequence[Host],
    running: Mapping[str, tuple[str, Sequence[Place]]],
    waiting: Iterable[Request],
    quota: Mapping[str, int],
) -> dict[str, list[Place]]:
    """The runs that start now, with their places. running: by name the user and the places of each run."""
    free = {host.node: set(range(host.chips)) for host in hosts}
    used: dict[str, int] = {}
    for user, places in running.values():
        for place in places:
            free.get(place.node, set()).difference_update(place.chips)
            used[user] = used.get(user, 0) + len(place.chips)
    held: set[str] = set()  # nodes that somebody further ahead waits for
    started = {}
    for request in sorted(waiting, key=lambda request: request.order):
        if used.get(request.user, 0) + request.all_chips > limit_of(request.user, quota):
            continue
        open_groups = [group for group in candidates(request, hosts) if not any(host.node in held for host in group)]
        # the fullest host that will do, so that empty ones stay whole for who needs a whole one
        open_groups.sort(key=lambda group: sum(len(free[host.node]) for host in group))
        places = next((found for group in open_groups if (found := fit(request, group, free))), None)
        if places:
            for place in places:
                free[place.node].difference_update(place.chips)
            used[request.user] = used.get(request.user, 0) + request.all_chips
            started[request.name] = places
        elif open_groups:  # the emptiest is where it will fit soonest
            held.update(host.node for host in open_groups[-1])
    return started
