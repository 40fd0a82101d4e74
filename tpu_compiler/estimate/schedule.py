"""What a step waits for: transfers between devices and with the host's memory, as the compiler has scheduled them.

A transfer that is started and awaited later runs beside the operations between. The schedule says which these are, the
compiler's estimate and the rule how long they take, and published bandwidths how long the transfer takes at least. So
this is the least that a step waits: all is hidden that the schedule lets hide. Transfers over one link run one after
the other. What goes to other slices is not looked at: nothing but its bound is known.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

from tpu_compiler.estimate.operation import Operation
from tpu_compiler.estimate.reading import called_by, channel_of, collectives_in, list_collectives, scheduled
from tpu_compiler.estimate.rules import host_bytes, rule_seconds
from tpu_utils.base.hardware import Topology

LINKS = "links"
"""All links of a device to its neighbours, together. The others are "to host" and "from host"."""
LinkShare = Callable[[str, Topology, bool], float]
"""The share of the links' bandwidth that a kind of collective has on a slice; whether the SparseCore runs it."""


def all_links(kind: str, topology: Topology, on_sparse_core: bool) -> float:
    return 1.0


def read_host_transfers(computations: dict[str, list[Operation]]) -> dict[str, dict[str, float]]:
    """{"to host" or "from host": {"count", "bytes"}} of one step and one device."""
    totals: dict[str, dict[str, float]] = {}
    for _, times, operations in scheduled(computations):
        types = {operation.name: operation.type for operation in operations}
        for operation in operations:
            direction, size = host_bytes(operation, types)
            if size:
                total = totals.setdefault(direction, {"count": 0, "bytes": 0})
                total["count"] += times
                total["bytes"] += times * size
    return totals


def host_moves(
    operation: Operation, types: dict[str, str], computations: dict[str, list[Operation]]
) -> list[tuple[str, int]]:
    """(direction, bytes) of what an operation moves between the host and a device, or has a computation move."""
    moves = [host_bytes(operation, types)]
    for called, _ in called_by(operation, computations) if operation.kind == "async-start" else ():
        inside = computations.get(called, [])
        moves += [host_bytes(one, {other.name: other.type for other in inside}) for one in inside]
    return [(direction, size) for direction, size in moves if size]


def seconds_on_links(
    computations: dict[str, list[Operation]], topology: Topology, num_devices: int, link_share: LinkShare
) -> dict[str, tuple[int, float]]:
    """{channel of a collective: (times it runs in a step, seconds that one takes at least)}."""
    found = {}
    for operation, kind, times, _, size in list_collectives(computations, num_devices):
        share = link_share(kind, topology, "DEVICE_TYPE_SPARSECORE" in operation.line)
        found[channel_of(operation)] = times, size / (share * topology.hardware.link_gb_per_s) / 1e9
    return found


def exposed_ms(
    computations: dict[str, list[Operation]],
    topology: Topology,
    num_devices: int,
    link_share: LinkShare = all_links,
) -> float:
    """Milliseconds of a step, at least, that no operation runs in and a transfer does."""
    waiting = _step_seconds(computations, topology, num_devices, link_share)
    return (waiting - _step_seconds(computations, topology, 0)) * 1e3


def _step_seconds(
    computations: dict[str, list[Operation]],
    topology: Topology,
    num_devices: int,
    link_share: LinkShare = all_links,
) -> float:
    """Seconds of a step, waiting included; without any transfer where num_devices is 0."""
    hardware = topology.hardware
    on_links = seconds_on_links(computations, topology, num_devices, link_share) if num_devices else {}
    sent = {channel: seconds for channel, (_, seconds) in on_links.items()}
    bodies = {}
    owner = {}  # of a collective: callers stand last, and what starts there may have pieces in the loops it runs beside
    for name, _, operations in scheduled(computations):
        bodies[name] = {o.name: collectives_in(o, computations) & sent.keys() for o in operations}
        owner |= {channel: name for channels in bodies[name].values() for channel in channels}

    def transfers(name: str, operation: Operation, types: dict[str, str]) -> Iterator[tuple[str, str, float]]:
        """(name, link, seconds) of those that an operation is a piece of."""
        for channel in bodies[name][operation.name]:
            if owner[channel] == name:
                yield channel, LINKS, sent[channel]
        known = num_devices and hardware.host_gb_per_s
        for direction, size in host_moves(operation, types, computations) if known else ():
            yield operation.name, direction, size / hardware.host_gb_per_s / 1e9 * hardware.devices_per_chip

    @cache
    def seconds(name: str) -> float:
        """Seconds of one pass through a computation."""
        operations = computations[name]
        types = {operation.name: operation.type for operation in operations}
        found = {operation.name: list(transfers(name, operation, types)) for operation in operations}
        for operation in operations:
            if operation.kind.endswith(("-done", "-update")) and operation.operands:
                found[operation.name] = found.get(operation.operands[0], [])
        last = {transfer: o.name for o in operations for transfer, *_ in found[o.name]}  # after it, it has ended
        now = 0.0
        ends = {}
        free = Counter()
        busy = Counter()
        for operation in operations:
            # TPU7x's compiler starts a collective on the SparseCore with nothing, and hands it the data in an update
            waits_for_data = operation.kind == "async-start" and not operation.operands
            for transfer, link, lasting in found[operation.name] if not waits_for_data else ():
                if transfer not in ends:
                    free[link] = ends[transfer] = max(now, free[link]) + lasting
                    busy[link] += lasting
            now += (operation.cycles or 0) / (hardware.clock_ghz * 1e9)
            now += rule_seconds(operation, types, computations, topology)
            moves = collectives_in(operation, computations) or host_moves(operation, types, computations)
            beside = operation.kind == "async-start" and moves
            inner = [] if beside else [call for call in called_by(operation, computations) if call[0] in bodies]
            now += sum(trips * seconds(called) for called, trips in inner)
            for transfer, *_ in found[operation.name]:
                if last[transfer] == operation.name and not operation.kind.endswith("-start"):
                    now = max(now, ends[transfer])
        return max([now, *busy.values()])  # what is not awaited here may end later, but its link is taken

    return seconds("ENTRY")
