"""The TPU slices there are, and what a program compiled for one says of itself: memory, collectives, cycles.

Everything is read from the text and the statistics that the compiler returns (aot_tpu.py asks it); nothing here needs
torch, jax or a TPU. The cycles are the compiler's own cost model: good for comparing two programs, not a measurement.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence

LABEL = "compiler estimate, not measured; excludes collectives"
COMMUNICATION_LABEL = "lower bound: bytes over link bandwidth, not measured"
GIB = 2**30
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}


# ---------------------------------------------------------------------------------------------------------------------
# Slices


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation, per device as the compiler sees it (a v4 chip is two devices, every other chip is one).

    clock_ghz is implied by peak FLOP/s over the width of the matrix units. limit_gib is what libtpu 0.0.21 enforces.
    link_gb_per_s is all links of one device together, in one direction: half of the bidirectional figure per chip in
    docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e} (400, 1200, 800 GB/s); v4: 6 links of 50 GB/s (arXiv:2304.01433).
    Between slices the network is slower, so a bound from it stays a lower bound.
    """

    clock_ghz: float
    bf16_tflops: float
    limit_gib: float
    link_gb_per_s: float
    devices_per_chip: int = 1
    cores_in_name: int = 1  # v4-8 and v5p-8 count cores: 4 chips
    largest_host: tuple[int, ...] = (2, 2, 1)


GENERATIONS = {
    "v4": Generation(1.05, 137.5, 15.25, 150, devices_per_chip=2, cores_in_name=2),
    "v5e": Generation(1.5, 197, 15.75, 200, largest_host=(2, 4, 1)),
    "v5p": Generation(1.75, 459, 95.74, 600, cores_in_name=2),
    "v6e": Generation(1.75, 918, 31.25, 400, largest_host=(2, 4, 1)),
}
SHAPES_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
SHAPES_3D = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice, or several equal ones: name as asked, the generation, chips along each axis of one slice."""

    name: str
    generation: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def hardware(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def num_devices(self) -> int:
        return self.num_slices * math.prod(self.shape) * self.hardware.devices_per_chip

    @property
    def compiler_name(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def chips_per_host(self) -> tuple[int, ...]:
        """One host holds the whole slice where such a machine exists (1 chip; v5e and v6e up to 8), else 2x2 chips."""
        shape = self.shape + (1,) * (3 - len(self.shape))
        whole = math.prod(shape) == 1 or all(s <= m for s, m in zip(shape, self.hardware.largest_host, strict=True))
        return shape if whole else (2, 2, 1)


def parse_topology(name: str) -> Topology:
    """v5litepod-8, v5e-8, v6e-8, v4-8, v5p-8 (the last two count cores), v5e:4x4, 2xv5litepod-16 -> Topology.

    Raises ValueError with what was found, what is accepted, and the nearest size that exists.
    """
    accepted = "v5litepod-8, v6e-8, v4-8, v5p-8, v5e:4x4, or 2xv5litepod-16 for two slices"
    match = re.fullmatch(r"(?:(\d+)x)?(v5litepod|v\d+[ep]?)(?:-(\d+)|:(\d+(?:x\d+){1,2}))", name.strip().lower())
    generation = match and {"v5litepod": "v5e"}.get(match[2], match[2])
    if not match or generation not in GENERATIONS or match[1] in ("0", "00"):
        raise ValueError(f"topology {name!r} not understood; expected a TPU slice such as {accepted}")
    hardware, num_slices = GENERATIONS[generation], int(match[1] or 1)
    shapes = SHAPES_3D if hardware.cores_in_name == 2 else SHAPES_2D
    if match[4]:
        shape = tuple(map(int, match[4].split("x")))
        known = list(shapes.values())
        if "x".join(map(str, shape)) not in known:
            chips = math.prod(shape)
            nearest = min(shapes, key=lambda n: abs(n - chips))
            raise ValueError(
                f"topology {name!r}: no {match[4]} slice of {generation}; expected one of {', '.join(known)}; "
                f"nearest is {generation}:{shapes[nearest]}"
            )
        return Topology(name, generation, shape, num_slices)
    chips, cores = divmod(int(match[3]), hardware.cores_in_name)
    if cores or chips not in shapes:
        sizes = [n * hardware.cores_in_name for n in shapes]
        nearest = min(sizes, key=lambda n: abs(n - int(match[3])))
        unit = "cores" if hardware.cores_in_name == 2 else "chips"
        raise ValueError(
            f"topology {name!r}: no {generation} slice of {match[3]} {unit}; expected one of "
            f"{', '.join(map(str, sizes))}; nearest is {match[2]}-{nearest}"
        )
    return Topology(name, generation, tuple(map(int, shapes[chips].split("x"))), num_slices)


# ---------------------------------------------------------------------------------------------------------------------
# Reading a compiled program

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# operations that take no time of their own, or whose time is that of the computation they call
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast partition-id replica-id after-all iota opt-barrier "
    "add-dependency async-start async-update async-done copy-done slice-done send-done recv-done call while "
    "conditional all-reduce-done all-gather-done collective-permute-done".split()
)


# their result says nothing about their cost: counted however small it is
WEIGHTY = frozenset((*COLLECTIVES, "custom-call", "sort", "reduce", "reduce-window", "convolution", "dot", "fusion"))


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    type: str  # "f32[64,32]{1,0:T(8,128)}" or a tuple of such
    kind: str
    line: str

    def find(self, pattern: str) -> str | None:
        match = re.search(pattern, self.line)
        return match and match[1]


def parse_program(text: str) -> dict[str, list[Operation]]:
    """Optimized HLO text -> {computation name: operations in schedule order}; the entry is called ENTRY."""
    computations: dict[str, list[Operation]] = {}
    operations: list[Operation] = []
    for line in text.splitlines():
        if line.endswith("{") and (match := re.match(r"(ENTRY )?%?([\w.\-]+) \(", line)):
            operations = computations.setdefault("ENTRY" if match[1] else match[2], [])
        elif match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", line):
            operations.append(Operation(*match.groups(), line))
    return computations


def _times_run(computations: dict[str, list[Operation]]) -> dict[str, int]:
    """How often each computation runs in one step: loop bodies count their trips."""
    times: Counter[str] = Counter()
    waiting = [("ENTRY", 1)]
    while waiting:
        name, count = waiting.pop()
        times[name] += count
        for operation in computations.get(name, ()):
            trips = 1
            if operation.kind == "while":
                trips = int(operation.find(r'"known_trip_count":\{"n":"(\d+)"') or 0)
                if not trips:  # the bound is the largest constant the condition compares with
                    condition = computations.get(operation.find(r"condition=%?([\w.\-]+)") or "", ())
                    trips = max([int(o.find(r"constant\((\d+)\)") or 0) for o in condition] + [1])
            for called in re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", operation.line):
                waiting.append((called, count * trips))
            for branches in re.findall(r"branch_computations=\{([^}]*)\}", operation.line):
                waiting += [(branch.strip().lstrip("%"), count) for branch in branches.split(",")]
    return times


def shape_bytes(shape: str, padded: bool = True) -> list[int]:
    """Bytes of each array in an HLO type, one or a tuple: in the hardware's tiles, or as counted by hand."""
    sizes = []
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape):
        dims = [int(d) for d in dims.split(",") if d]
        tile = re.search(r":T\(([\d,]+)\)", layout) if padded and dims else None
        if tile:
            tile = [int(t) for t in tile[1].split(",")]
            minor_to_major = [int(d) for d in re.match(r"\{([\d,]*)", layout)[1].split(",") if d]
            for size, dim in zip(reversed(tile), minor_to_major, strict=False):
                dims[dim] = -(-dims[dim] // size) * size
        sizes.append(math.prod(dims) * ITEM_BYTES.get(dtype, 4))
    return sizes


def read_collectives(computations: dict[str, list[Operation]], num_devices: int) -> dict[str, dict[str, float]]:
    """{kind: {"count", "bytes", "sent_bytes"}} of one step and one device.

    bytes is the full tensor: gathered, reduced or exchanged. sent_bytes is the least a device must send for it in a
    group of n: (n - 1) / n of the tensor, twice that for an all-reduce. A reduce-scatter appears as an all-reduce
    inside a computation named %all-reduce-scatter; copies of one collective share a channel and are counted once.
    """
    times, seen = _times_run(computations), {}
    for computation, operations in computations.items():
        for operation in operations:
            kind = operation.kind.removesuffix("-start")
            if kind not in COLLECTIVES or not times[computation]:
                continue
            sizes = [size for size in shape_bytes(operation.type, padded=False) if size]
            if operation.kind in ("all-gather-start", "collective-permute-start"):  # (inputs, outputs, flags)
                sizes = [s for s in sizes if s > 4] or sizes
                sizes = sizes[len(sizes) // 2 :]
            size = sum(sizes)
            listed, iota = (
                operation.find(r"replica_groups=\{\{([\d,]+)\}"),
                operation.find(r"replica_groups=\[\d+,(\d+)\]"),
            )
            group = len(listed.split(",")) if listed else int(iota or num_devices)
            if "all-reduce-scatter" in computation:
                kind = "reduce-scatter"
            elif kind == "reduce-scatter":
                size *= group
            share = 1.0 if kind == "collective-permute" else (group - 1) / group * (2 if kind == "all-reduce" else 1)
            if group > 1:
                channel = operation.find(r"channel_id=(\d+)") or operation.name
                seen[channel] = (kind, times[computation], size, share * size)
    totals: dict[str, dict[str, float]] = {}
    for kind, count, size, sent in seen.values():
        total = totals.setdefault(kind, {"count": 0, "bytes": 0, "sent_bytes": 0})
        total["count"] += count
        total["bytes"] += count * size
        total["sent_bytes"] += count * sent
    return totals


def read_cycles(computations: dict[str, list[Operation]]) -> tuple[Counter, Counter]:
    """({source line: estimated cycles}, {kind: operations without estimate}) of one step on one device.

    Sums estimated_cycles over the schedule: entry, loop bodies times their trips, branches, asynchronous calls. What is
    inside a fusion belongs to the fusion. A fusion counts for the source line of its last operation. Results of at most
    4 KiB (one register) without estimate are left out.
    """
    times, cycles, unpriced = _times_run(computations), Counter(), Counter()
    fused = {o.find(r"calls=%?([\w.\-]+)") for ops in computations.values() for o in ops if o.kind == "fusion"}
    applied = {o.find(r"to_apply=%?([\w.\-]+)") for ops in computations.values() for o in ops if o.kind != "call"}
    nested = {name for name in fused | applied if name}
    while True:  # whatever a fused computation calls is fused too
        called = {
            inner
            for name in nested
            for o in computations.get(name, ())
            for inner in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", o.line)
        }
        if called <= nested:
            break
        nested |= called

    def small(operation: Operation) -> bool:  # scalars of the optimizer: nothing beside a priced operation
        return operation.kind not in WEIGHTY and max(shape_bytes(operation.type, padded=False), default=0) <= 4096

    for computation, operations in computations.items():
        if computation in nested or not times[computation]:
            continue
        for operation in operations:
            estimate = operation.find(r'"estimated_cycles":"(\d+)"')
            if estimate:
                scope = re.search(r'op_name="([\w\-.]+\.py)_(\d+)( backward)?', operation.line)
                source = f"{scope[1]}:{scope[2]}{scope[3] or ''}" if scope else "added by the compiler"
                cycles[source] += int(estimate) * times[computation]
            elif operation.kind not in FREE and "ConcatBitcast" not in operation.line and not small(operation):
                unpriced[operation.kind.removesuffix("-start")] += times[computation]
    return cycles, unpriced


# ---------------------------------------------------------------------------------------------------------------------
# The report


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler says about one step on one slice. Bytes and FLOPs are per device unless they say otherwise."""

    topology: str
    devices: int
    program: str  # "one device", "one device, 3 of the slice idle", "SPMD over 8 devices", "8 replicas"
    compiles: bool
    fits: bool
    reason: str  # the compiler's own words when it does not compile or fit
    limit_bytes: int
    peak_bytes: int = 0  # the sum of memory below
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    compiler_peak_bytes: int = 0  # the compiler's own figure; for small programs it includes on-chip memory
    flops: float = 0.0
    loops: int = 0  # in the program; flops counts the body of each once
    model_flops: float | None = None  # of a step, all devices
    flops_ratio: float | None = None  # compiled over model: above 1 is recomputation and padding; None with loops
    collectives: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    communication_lower_bound_ms: float = 0.0
    communication_label: str = COMMUNICATION_LABEL
    estimated_ms: float | None = None
    estimated_per_second: float | None = None  # examples or tokens, all devices
    estimated_mfu: float | None = None
    estimate_label: str = LABEL
    unit: str = "examples"
    operations_without_estimate: dict[str, int] = dataclasses.field(default_factory=dict)
    costliest_lines: list[tuple[str, float]] = dataclasses.field(default_factory=list)  # source line, milliseconds
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    host_peak_gib: float = 0.0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    settings: dict = dataclasses.field(default_factory=dict)

    @property
    def over_bytes(self) -> int:
        return max(0, self.peak_bytes - self.limit_bytes)

    @property
    def exit_code(self) -> int:
        return 0 if self.fits else 1


def format_report(r: Report) -> str:
    """The report as text, a fact a line."""
    verdict = "compiles and fits" if r.fits else "does not fit" if r.peak_bytes > r.limit_bytes else "does not compile"
    lines = [f"{r.topology}: {verdict} ({r.program})"]

    def row(name: str, text: str) -> None:
        lines.append(f"  {name:<18} {text}")

    if r.reason:
        row("compiler", r.reason)
    if r.memory:
        row("memory per device", f"{r.peak_bytes / GIB:.2f} of {r.limit_bytes / GIB:.2f} GiB" + (
            f", over by {r.over_bytes / GIB:.2f} GiB" if r.over_bytes else ""))  # fmt: skip
        row("", ", ".join(f"{name.replace('_', ' ')} {size / GIB:.3f}" for name, size in r.memory.items()))
    if r.compiles:
        model = f", {r.flops_ratio:.2f} x the model's {r.model_flops:.3g}" if r.flops_ratio else ""
        model += f", the bodies of {r.loops} loops counted once" if r.loops else ""
        row("FLOPs per step", f"{r.flops * r.devices:.3g} over all devices{model}")
        kinds = [f"{int(v['count'])} {kind} ({v['bytes'] / 1e6:.1f} MB)" for kind, v in r.collectives.items()]
        row("collectives", ", ".join(kinds) or "none")
        if kinds:
            row("communication", f"at least {r.communication_lower_bound_ms:.3f} ms ({r.communication_label})")
        rate = f", {r.estimated_per_second:,.0f} {r.unit}/s" if r.estimated_per_second else ""
        mfu = f", MFU {r.estimated_mfu:.1%}" if r.estimated_mfu else ""
        row("time per step", f"{r.estimated_ms:.3f} ms{rate}{mfu} ({r.estimate_label})")
        kinds = ", ".join(f"{count} {kind}" for kind, count in r.operations_without_estimate.items())
        row(
            "without estimate",
            f"{sum(r.operations_without_estimate.values())} operations{': ' + kinds if kinds else ''}",
        )
        for i, (line, ms) in enumerate(r.costliest_lines):
            row("" if i else "costliest lines", f"{ms:9.3f} ms  {ms / r.estimated_ms:5.1%}  {line}")
    row("took", f"{r.trace_seconds:.1f} s to trace, {r.compile_seconds:.1f} s to compile, "
        f"{r.host_peak_gib:.1f} GiB of host memory")  # fmt: skip
    row("versions", ", ".join(f"{name} {version}" for name, version in r.versions.items()))
    return "\n".join(lines)


def format_table(reports: Sequence[Report]) -> str:
    """Several slices side by side, as a Markdown table."""
    unit = reports[0].unit
    header = ["slice", "devices", "fits", "GiB of limit", "FLOPs / model", "collectives MB", "comm. ms >=", "est. ms",
              f"est. {unit}/s", "est. MFU", "no estimate", "compile s"]  # fmt: skip
    rows = [header, ["---"] * len(header)]
    for r in reports:
        row = [r.topology, str(r.devices), "yes" if r.fits else "no"]
        row.append(f"{r.peak_bytes / GIB:.2f} of {r.limit_bytes / GIB:.2f}" if r.peak_bytes else "-")
        if r.compiles:
            row += [f"{r.flops_ratio:.2f}" if r.flops_ratio else "-"]
            row += [f"{sum(v['bytes'] for v in r.collectives.values()) / 1e6:.1f}"]
            row += [f"{r.communication_lower_bound_ms:.2f}", f"{r.estimated_ms:.2f}"]
            row += [f"{r.estimated_per_second:,.0f}" if r.estimated_per_second else "-"]
            row += [f"{r.estimated_mfu:.1%}" if r.estimated_mfu else "-"]
            row += [str(sum(r.operations_without_estimate.values()))]
        else:
            row += ["-"] * 7
        rows.append([*row, f"{r.compile_seconds:.0f}"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines += [f"{r.topology}: {r.reason}" for r in reports if r.reason]
    return "\n".join([*lines, f"est.: {LABEL}. comm.: {COMMUNICATION_LABEL}."])
