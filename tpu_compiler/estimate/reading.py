"""What a compiled program says of itself: memory, collectives, cycles.

Everything is read from the text that the compiler returns; nothing here needs torch, jax or a TPU. The cycles are the
compiler's own cost model: good for comparing two programs, not a measurement.
"""

import math
import re
from collections import Counter

from tpu_compiler.estimate.loop_turns import turns_of
from tpu_compiler.estimate.operation import Operation

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COLLECTIVES += ("ragged-all-to-all", "collective-broadcast")
# operations whose result can be small although they are costly: counted whatever its size
WEIGHTY = frozenset((*COLLECTIVES, "custom-call", "sort", "reduce", "reduce-window", "convolution", "dot", "fusion"))

# the compiler's names for transfers between slices: (our name, the share of the bytes that has to leave the device)
MEGASCALE = {
    "ALL_REDUCE": ("all-reduce", lambda slices: 2 * (slices - 1) / slices),
    "REDUCE_SCATTER": ("reduce-scatter", lambda slices: (slices - 1) / slices),
    "ALL_TO_ALL": ("all-to-all", lambda slices: (slices - 1) / slices),
    "ALL_GATHER": ("all-gather", lambda slices: slices - 1),
}

HOST = "S(5)"
"""In the layout of an array that lies in the host's memory."""


def lines_of(text: str) -> list[str]:
    """Lines of HLO text, an operation on one: what a kernel says of itself, jax 0.10 has on lines of their own."""
    return re.sub(r'(?<=\{)\n((?:"[^\n]*\n)+)(?=\})', lambda said: said[1].replace("\n", " "), text).splitlines()


def with_source_lines(text: str) -> str:
    """HLO text of a newer compiler, which has tables of frames, with the line of its source in each operation."""

    def rows(table: str, row: str) -> list[tuple[str, ...]]:
        found = re.search(rf"^{table}\n((?:\d+ .*\n)+)", text, re.M)
        return re.findall(rf"^(\d+) {row}", found[1], re.M) if found else []

    files = dict(rows("FileNames", "(.*)"))
    locations = {
        number: f"source_file={files.get(file)} source_line={line}"
        for number, file, line in rows("FileLocations", r"\{file_name_id=(\d+) .*?line=(\d+)")
    }
    frames = dict(rows("StackFrames", r"\{file_location_id=(\d+)"))
    return re.sub(r"stack_frame_id=(\d+)", lambda frame: locations.get(frames.get(frame[1]), frame[0]), text)


def parse_program(text: str) -> dict[str, list[Operation]]:
    """Optimized HLO text -> {computation name: operations in schedule order}; the entry is called ENTRY."""
    computations: dict[str, list[Operation]] = {}
    operations: list[Operation] = []
    for line in lines_of(text):
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
            waiting += [(called, count * trips) for called, trips in called_by(operation, computations)]
    return times


def called_by(operation: Operation, computations: dict[str, list[Operation]]) -> list[tuple[str, int]]:
    """(computation, how often it runs) of what an operation calls: a loop's body with its turns, and of a conditional
    the longest branch, or all of them before they have prices."""
    times = turns_of(operation, computations)[0] if operation.kind == "while" else 1
    found = [(called, times) for called in re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", operation.line)]
    # called_computations: of a custom call, which is how a collective is handed to the SparseCore of TPU7x
    for several in re.findall(r"called_computations=\{([^}]*)\}", operation.line):
        found += [(called.strip().lstrip("%"), 1) for called in several.split(",")]
    branches = branches_of(operation)
    if any(one.cycles is not None for name in branches for one in computations.get(name, ())):
        branches = [max(branches, key=lambda name: cycles_of(name, computations))]
    return found + [(name, 1) for name in branches]


def branches_of(operation: Operation) -> list[str]:
    """The computations of a conditional, of which one runs."""
    several = operation.find(r"branch_computations=\{([^}]*)\}") or ""
    either = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", operation.line)
    return [name.strip().lstrip("%") for name in several.split(",") if name] + either


def cycles_of(name: str, computations: dict[str, list[Operation]]) -> int:
    """The compiler's estimate of a computation, with what it calls; of a collective, about a cycle for 100 bytes."""
    total = 0
    for operation in computations.get(name, ()):
        total += sum(shape_bytes(operation.result)) // 100 if operation.base in COLLECTIVES else 0
        inner = called_by(operation, computations) if operation.kind in ("while", "conditional", "call") else ()
        total += (operation.cycles or 0) + sum(times * cycles_of(called, computations) for called, times in inner)
    return total


def assumed(computations: dict[str, list[Operation]]) -> list[str]:
    """What is taken to be so of loops and conditionals, because the program does not say it."""
    operations = [operation for _, _, found in scheduled(computations) for operation in found]
    loops = [operation for operation in operations if operation.kind == "while"]
    endless = sum(not turns_of(loop, computations)[1] for loop in loops)
    either = sum(bool(branches_of(operation)) for operation in operations)
    said = [f"loops that end by values: {endless} of {len(loops)}, counted by a number in their condition, or once"]
    return said * bool(endless) + [f"conditionals: {either}, of each its longest branch"] * bool(either)


def shape_bytes(shape: str, padded: bool = True) -> list[int]:
    """Bytes of each array in an HLO type, which may be a tuple: padded to the tiles of its layout, or not."""
    sizes = []
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape):
        dims = [int(d) for d in dims.split(",") if d]
        tile = re.search(r":T\(([\d,]+)\)", layout) if padded and dims else None
        if tile:
            tile = [int(t) for t in tile[1].split(",")]
            minor_to_major = [int(d) for d in re.match(r"\{([\d,]*)", layout)[1].split(",") if d]
            for size, dim in zip(reversed(tile), minor_to_major, strict=False):
                dims[dim] = -(-dims[dim] // size) * size
        sizes.append(-(-math.prod(dims) * item_bits(dtype, layout) // 8))
    return sizes


def item_bits(dtype: str, layout: str = "") -> int:
    """Bits of a number of a type such as bf16, f8e4m3fn, c64; s4 has a byte unless its layout says E(4)."""
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["32"])[0])
    return bits if "E(" in layout else max(8, bits)


def arrays_of(shape: str, on_chip: bool = False) -> list[str]:
    """The types of the arrays of a type that lie in a device's memory: not on the host, S(5), nor, without on_chip, on
    the chip, S(1)."""
    arrays = re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", shape)
    return [array for array in arrays if HOST not in array and (on_chip or "S(1)" not in array)]


def list_collectives(
    computations: dict[str, list[Operation]], num_devices: int
) -> list[tuple[Operation, str, int, int, float]]:
    """(operation, kind, times it runs, bytes, sent bytes of one) of one step and one device.

    bytes is the full tensor: gathered, reduced or exchanged. sent_bytes is the least a device must send for it in a
    group of n: (n - 1) / n of the tensor, twice that for an all-reduce. A reduce-scatter appears as an all-reduce
    inside a computation named %all-reduce-scatter; copies of one collective share a channel and are counted once.
    """
    times, seen = _times_run(computations), {}
    for computation, operations in computations.items():
        for operation in operations:
            kind = operation.base
            if kind not in COLLECTIVES or not times[computation]:
                continue
            sizes = [size for size in shape_bytes(operation.type, padded=False) if size]
            if operation.kind in ("all-gather-start", "collective-permute-start"):  # (inputs, outputs, flags)
                sizes = [s for s in sizes if s > 4] or sizes
                sizes = sizes[len(sizes) // 2 :]
            size = sum(sizes)
            group = group_size(operation, num_devices)
            if "all-reduce-scatter" in computation:
                kind = "reduce-scatter"
            elif kind == "reduce-scatter":
                size *= group
            share = 1.0 if kind == "collective-permute" else (group - 1) / group * (2 if kind == "all-reduce" else 1)
            if group > 1:
                seen[channel_of(operation)] = (operation, kind, times[computation], size, share * size)
    return list(seen.values())


def group_size(operation: Operation, num_devices: int) -> int:
    """How many devices take part together: {{0,1},{2,3}}, [2,2]<=[4], or axes of a mesh, mesh['a'=2,'b'=4] {'a'}; of
    an axis perhaps a part, 'b':(2)2, which has the size that stands last. All of them where nothing is said."""
    if listed := operation.find(r"replica_groups=\{\{([\d,]+)\}"):
        return len(listed.split(","))
    if iota := operation.find(r"replica_groups=\[\d+,(\d+)\]"):
        return int(iota)
    mesh = re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\][^{]*\{([^}]*)\}", operation.line)
    if not mesh:
        return num_devices
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]))


def channel_of(operation: Operation) -> str:
    """What names a collective: the same in every piece of one that the compiler has taken apart."""
    return operation.find(r"channel_id=(\d+)") or operation.name


def read_collectives(computations: dict[str, list[Operation]], num_devices: int) -> dict[str, dict[str, float]]:
    """{kind: {"count", "bytes", "sent_bytes"}} of one step and one device, as list_collectives finds them."""
    totals: dict[str, dict[str, float]] = {}
    for _, kind, count, size, sent in list_collectives(computations, num_devices):
        add_up(totals, kind, count, size, sent)
    return totals


def add_up(totals: dict[str, dict[str, float]], kind: str, count: int, size: float, sent: float) -> None:
    total = totals.setdefault(kind, {"count": 0, "bytes": 0, "sent_bytes": 0})
    total["count"] += count
    total["bytes"] += count * size
    total["sent_bytes"] += count * sent


def read_slice_transfers(computations: dict[str, list[Operation]], num_slices: int) -> dict[str, dict[str, float]]:
    """{kind: {"count", "bytes", "sent_bytes"}} of what leaves the slice in one step, for one device.

    Between slices the compiler sends through the host, over the data center network: an operation `send` that names the
    collective it is a part of and the devices it goes to, one in each slice. What read_collectives finds stays inside
    a slice. bytes is what is handed to the network; sent_bytes is the least that has to leave the device for it.
    """
    totals: dict[str, dict[str, float]] = {}
    for _, times, operations in scheduled(computations):
        for operation in operations:
            kind = operation.kind == "send" and operation.find(r'_xla_megascale_transfer_type="(\w+)"')
            if not kind:
                continue
            size = shape_bytes(operation.type, padded=False)[0]
            # {{100000,200000},...}: numbers of devices, one group after the other; "{1,2}x{0:3}": slices x devices
            target = operation.find(r'_xla_megascale_target="?\{\{?([\d,:]+)\}') or ""
            bounds = [[int(n) for n in part.split(":")] for part in target.split(",") if part]
            slices = sum(part[-1] - part[0] + 1 for part in bounds) or num_slices
            name, share = MEGASCALE.get(kind, (kind.lower().replace("_", "-"), lambda slices: 1.0))
            add_up(totals, name, times, size, size * share(slices))
    return totals


def _nested(computations: dict[str, list[Operation]]) -> set[str]:
    """Computations that are part of an operation: what a fusion does inside, what a reduction applies."""
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
            return nested
        nested |= called


def collectives_in(
    operation: Operation, computations: dict[str, list[Operation]], seen: frozenset[str] = frozenset()
) -> set[str]:
    """Channels of the collectives that an operation is a piece of: itself, or inside what it calls."""
    found = {channel_of(operation)} if operation.base in COLLECTIVES else set()
    # async-start: a computation that another core runs meanwhile, such as the SparseCore
    inside = operation.kind in ("fusion", "async-start", "custom-call", "call") and called_by(operation, computations)
    for called, _ in inside or ():
        for inner in computations.get(called, ()) if called not in seen else ():
            found |= collectives_in(inner, computations, seen | {called})
    return found


def scheduled(computations: dict[str, list[Operation]]) -> list[tuple[str, int, list[Operation]]]:
    """(name, times it runs in a step, operations) of the computations that are not inside a fusion or a reduction."""
    times, nested = _times_run(computations), _nested(computations)
    return [(name, times[name], found) for name, found in computations.items() if name not in nested and times[name]]


def _scope(operation: Operation) -> tuple[str, str, str, str]:
    """(file, line, " backward", module) of the innermost scope in its op_name; "" for what is missing."""
    path = operation.find(r'op_name=("[^"]*)') or ""
    scopes = re.findall(r'["/]([\w\-.]+\.py)_(\d+)( backward)?(?: in <([^<>"]*)>)?', path)
    return scopes[-1] if scopes else ("",) * 4


def source_of(operation: Operation) -> str:
    """file.py:12, or file.py:12 backward."""
    file, line, backward, _ = _scope(operation)
    if not file and (frame := re.search(r'source_file="[^"]*?([^/"]+)" source_line=(\d+)', operation.line)):  # jax's
        file, line = frame.groups()
        backward = " backward" if "transpose(" in operation.line else ""
    return f"{file}:{line}{backward}" if file else "added by the compiler"


def module_of(operation: Operation) -> str:
    """layers.3.mlp, or layers.3.mlp backward; "" for what no module's forward caused."""
    *_, backward, module = _scope(operation)  # autograd.Function.backward has named the module so already
    return module.removesuffix(" backward") + backward if module and backward else module


def read_modules(computations: dict[str, list[Operation]]) -> Counter:
    """{module: estimated cycles} of one step on one device, added up as read_cycles does.

    An operation counts for the innermost module that was running. What none caused (the loss, the optimizer, what the
    compiler adds) is left out.
    """
    cycles = Counter()
    for _, times, operations in scheduled(computations):
        for operation in operations:
            if operation.cycles and (module := module_of(operation)):
                cycles[module] += operation.cycles * times
    return cycles


def group_modules(cycles: Counter) -> list[tuple[str, int, int]]:
    """(name with * for numbers, how many modules, their cycles together), the costliest first."""
    groups: dict[str, list[int]] = {}
    for module, count in cycles.items():
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^. ])", "*", module), []).append(count)
    return sorted(((name, len(c), sum(c)) for name, c in groups.items()), key=lambda row: -row[2])


def read_largest_results(computations: dict[str, list[Operation]], count: int = 10) -> list[tuple[int, str, str, str]]:
    """(bytes with the padding of tiles, kind, source line, module) of the largest results in a device's main memory.

    Not the largest live buffers: which results share memory, and when, is not in the program's text. Inputs are not
    temporaries and are left out, as is what overwrites its operand or is part of another operation.
    """
    found = []
    for _, _, operations in scheduled(computations):
        for operation in operations:
            sizes = [shape_bytes(array)[0] for array in arrays_of(operation.type)]
            if sizes and not operation.is_free and operation.kind not in ("dynamic-update-slice", "copy-start"):
                found.append((max(sizes), operation.kind, source_of(operation), module_of(operation)))
    return sorted(found, key=lambda row: -row[0])[:count]


def read_operations(computations: dict[str, list[Operation]], cycles_per_ms: float) -> list[tuple[str, float]]:
    """The ten costliest kinds of operation by the compiler's estimate: (what it does, its result and where it comes
    from, milliseconds a step). Operations that differ in their number alone are one kind."""
    cycles = Counter()
    for _, times, operations in scheduled(computations):
        for operation in operations:
            if operation.cycles:
                inside = computations.get(operation.find(r"calls=%?([\w.\-]+)") or "", [])
                product = any(o.kind in ("convolution", "dot") for o in (operation, *inside))
                what = "product" if product else operation.base
                result = re.match(r"\(?(\w+\[[\d,]*\])?", operation.result)[1]
                path = re.sub(r"\d+", "*", operation.find(r'op_name="([^"]*)') or "added by the compiler")
                path = path if len(path) <= 80 else path[-80:].partition("/")[2] or path[-80:]
                cycles[f"{what} {result}, {path}"] += operation.cycles * times
    return [(name, count / cycles_per_ms) for name, count in cycles.most_common(10)]


def read_cycles(computations: dict[str, list[Operation]]) -> tuple[Counter, Counter]:
    """({source line: estimated cycles}, {kind: operations without estimate}) of one step on one device.

    Sums estimated_cycles over the schedule: entry, loop bodies times their trips, branches, asynchronous calls. What is
    inside a fusion belongs to the fusion. A fusion counts for the source line of its last operation. Results of at most
    4 KiB (one register) without estimate are left out.
    """
    cycles = Counter()
    unpriced = Counter()

    def small(operation: Operation) -> bool:  # scalars of the optimizer: nothing beside a priced operation
        return operation.kind not in WEIGHTY and max(shape_bytes(operation.type, padded=False), default=0) <= 4096

    for _, times, operations in scheduled(computations):
        for operation in operations:
            if operation.cycles is not None:
                cycles[source_of(operation)] += operation.cycles * times
            elif not operation.is_free and "ConcatBitcast" not in operation.line and not small(operation):
                unpriced[operation.base] += times
    return cycles, unpriced
