"""Time, by rule, of operations without a compiler estimate; and bytes that operations move. Reads HLO text, no torch.

The rule: a flash attention layer is seven matmuls of 2 B H T^2 K FLOPs: two in the forward kernel, five in the one for
all gradients. jax's splash attention has four in its kernel for the gradients of K and V, three in that for Q, or five
in one. Blocks that are skipped do not count. The peak is scaled by how much of the matrix unit a head's width fills. A
kernel of grouped products has as many rows as an even share of the tokens. The newest compiler has a kernel of its own,
online-softmax, of a softmax and the product after it: that product counts, or the bytes of its arrays if they take
longer. So do FLOPs and bytes that another kernel says itself. Copies and slices cost nothing, because they overlap with
arithmetic. Neither do other custom calls; kernels among them are named (left_out). What goes between devices, alone or
inside a fusion, and to the host's memory or from it has bounds of its own: schedule.py. Everything else (sort, scatter)
costs twice the bytes of its result over the memory bandwidth; an update in place costs twice the bytes that it writes.
"""

import math
import re
from collections import Counter

from tpu_compiler.estimate.operation import Operation
from tpu_compiler.estimate.reading import (
    COLLECTIVES,
    HOST,
    WEIGHTY,
    arrays_of,
    collectives_in,
    scheduled,
    shape_bytes,
)
from tpu_utils.base.hardware import Topology

RULE = "flash kernels and other operations without estimate counted by rule"
HIDDEN = {"copy", "slice", "custom-call", *COLLECTIVES}  # copies and slices are started early and awaited late
MOVES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")
FLASH_PRODUCTS = {"forward": 2, "backward": 5, "fwd": 2, "dkv": 4, "dq": 3}
FUSED_PRODUCTS = 5
"""Matrix products in a backward kernel that makes all gradients: Q K^T, dO V^T, and one each for dQ, dK and dV."""


def ruled_ms(computations: dict[str, list[Operation]], topology: Topology) -> float:
    """Milliseconds to add to a step's estimate, by the rule above."""
    seconds = 0.0
    for _, times, operations in scheduled(computations):
        types = {operation.name: operation.type for operation in operations}
        seconds += times * sum(rule_seconds(operation, types, computations, topology) for operation in operations)
    return seconds * 1e3


def left_out(computations: dict[str, list[Operation]], topology: Topology) -> dict[str, int]:
    """{name: times a step} of the kernels that neither the compiler nor the rule has a price for. Those whose results
    have at most 4 KiB do not count: XLA's own, which prepares a grouped product, is one."""
    found: Counter[str] = Counter()
    for _, times, operations in scheduled(computations):
        types = {operation.name: operation.type for operation in operations}
        for operation in operations:
            kernel = (
                'custom_call_target="tpu_custom_call"' in operation.line
                and max(shape_bytes(operation.type, False), default=0) > 4096
            )
            if kernel and operation.cycles is None and not rule_seconds(operation, types, computations, topology):
                found[re.sub(r"(\.\w+)+$", "", operation.name)] += times
    return dict(found.most_common())


def rule_seconds(
    operation: Operation, types: dict[str, str], computations: dict[str, list[Operation]], topology: Topology
) -> float:
    """Seconds of one operation by the rule; 0.0 for one that has an estimate. types: of the operations around it."""
    if operation.cycles is not None or operation.is_free or "ConcatBitcast" in operation.line:
        return 0.0
    if operation.kind == "custom-call":
        return flash_seconds(operation, topology) or product_seconds(operation, types, topology)
    if operation.base in HIDDEN or collectives_in(operation, computations) or host_bytes(operation, types)[1]:
        return 0.0
    size = sum(shape_bytes(array)[0] for array in arrays_of(written(operation, types), on_chip=True))
    if operation.kind not in WEIGHTY and size <= 4096:
        return 0.0
    return 2 * size / topology.hardware.memory_gb_per_s / 1e9


def written(operation: Operation, types: dict[str, str]) -> str:
    """The type of what an operation writes: its result, of an update in place the update."""
    if operation.base == "dynamic-update-slice":
        return types.get(operation.operands[1], operation.result)
    return operation.result


def host_bytes(operation: Operation, types: dict[str, str]) -> tuple[str, int]:
    """("to host" or "from host", bytes) of a copy or a slice between a device's memory and its host's; ("", 0)."""
    if operation.base not in MOVES:
        return "", 0
    source = operation.operands[1 if operation.base == "dynamic-update-slice" else 0]
    into, out = HOST in operation.result, HOST in types.get(source, "")
    if into == out:  # it stays in one of the two memories
        return "", 0
    return "to host" if into else "from host", sum(shape_bytes(written(operation, types)))


def flash_seconds(operation: Operation, topology: Topology) -> float:
    """Seconds of one attention kernel on one device, of language/xla/flash_kernels.py or jax's splash attention; 0.0
    for any other custom call."""
    queries = operation.find(r"operand_layout_constraints=\{.*?(?:bf16|f32)\[(\d+(?:,\d+){2,4})\]")
    own = re.search(r"causal_(forward|backward)_(\d+)_blocks_of_(\d+)", operation.name)
    phase = own or re.search(r"splash_m[hq]a_(fwd|dkv|dq)", operation.name)
    if not phase or not queries:
        return 0.0
    *batch_and_heads, length, width = map(int, queries.split(","))  # no batch axis where a device has one row
    if own or said_by(operation, "q_layout") == "2":  # positions along the lanes; SEQ_MINOR of splash attention
        length, width = width, length
    if own:
        scores = int(own[2]) * int(own[3]) ** 2
    else:
        scores = splash_scores(operation, phase[1], length, width)
    # jax 0.7.1 does not name its fused kernel: it makes one gradient of q for each block of keys, an axis more
    ranks = [array.count(",") + 1 for array in re.findall(r"\[([\d,]+)\]", operation.type)]
    by_name = said_by(operation, "use_fused_bwd_kernel") in ("True", "true")
    fused = phase[1] == "dkv" and (by_name or max(ranks) > len(batch_and_heads) + 2)
    products = FUSED_PRODUCTS if fused else FLASH_PRODUCTS[phase[1]]
    hardware = topology.hardware
    peak = hardware.bf16_tflops / hardware.devices_per_chip * 1e12
    return products * 2 * math.prod(batch_and_heads) * scores * width / (peak * filled(width, topology))


def splash_scores(operation: Operation, phase: str, length: int, width: int) -> int:
    """How many scores of one head a kernel of splash attention computes: all where it is given no mask, else of the
    blocks on or below the diagonal, or of those that it is told to visit, where a window leaves fewer. A kernel for all
    gradients is told of every block (jax 0.7.1 to 0.10): beside a window it counts too many."""
    operands = operation.line.partition("operand_layout_constraints={")[2].partition("}}")[0]
    given = [(dtype, sizes.split(",")) for dtype, sizes in re.findall(r"(\w+)\[([\d,]+)\]", operands)]
    *_, rows, columns = [int(n) for n in [sizes for dtype, sizes in given if dtype in ("bf16", "f32")][1]]
    every = length * (rows if columns == width else columns)  # the keys' positions lie along one or the other
    blocks = [sizes for dtype, sizes in given if dtype == "s8"]
    # positions are one array, s32[8192,128], blocks of a mask too; segments are two, and no mask
    masks = sum(dtype == "s32" and len(sizes) > 1 for dtype, sizes in given)
    if masks % 2 == 0 and all(len(sizes) > 1 for sizes in blocks):
        return every
    # jax's lists are (1, blocks of queries, blocks of keys), tokamax's have those to visit
    visited = blocks[0] if blocks else []
    queries, keys = (
        next((int(size) for end in (f"_{phase}", "") if (size := said_by(operation, f"block_{axis}{end}"))), 0)
        for axis in ("q", "kv")
    )
    block = queries or (length // int(visited[1]) if visited[1:] else 512)
    # the diagonal of a square; queries that begin elsewhere than the keys may see all
    scores = length * (length + max(block, keys)) // 2 if every == length**2 else every
    return min(scores, math.prod(map(int, visited[-2:])) * block * (keys or block)) if visited else scores


def said_by(operation: Operation, setting: str) -> str:
    """What a kernel says of one of its settings, "" if nothing: in its name (_block_q_512) with jax 0.7.1, as JSON that
    stands beside it with jax 0.10."""
    said = operation.name + (operation.find(r'"xprof_metadata":"(\{.*?\})"') or "")
    found = re.search(rf'(?:_|\\"){setting}(?:_|\\": )([Tt]rue|\d+)', said)
    return found[1] if found else ""


def product_seconds(operation: Operation, types: dict[str, str], topology: Topology) -> float:
    """Seconds of one kernel on one device, as long as its products or its bytes take: one of
    language/xla/expert_kernels.py, the newest compiler's own of a softmax and the product after it, or one that says
    its FLOPs and bytes itself (pallas.CostEstimate); 0.0 for any other custom call."""
    sizes = re.search(r"grouped_product_(\d+)x(\d+)x(\d+)/", operation.line)
    said = operation.find(r'"cost_estimate": ?(\{[^}]*\})') or ""
    flops, moved = (re.search(rf'"{key}": ?"?(\d+)', said) for key in ("flops", "bytes_accessed"))
    arrays = (operation.type, *(types.get(operand, "") for operand in operation.operands))
    size = sum(in_memory(array) for array in arrays)
    if operation.name.startswith("online-softmax"):
        products = (
            math.prod(dimensions(arrays[0])) * dimensions(arrays[1])[-1] / filled(dimensions(arrays[0])[-1], topology)
        )
    elif sizes and "tpu_custom_call" in operation.line:
        products = math.prod(map(int, sizes.groups()))
    elif flops and moved:
        products, size = int(flops[1]) / 2, int(moved[1])
    else:
        return 0.0
    hardware = topology.hardware
    peak = hardware.bf16_tflops / hardware.devices_per_chip * 1e12
    return max(2 * products / peak, size / hardware.memory_gb_per_s / 1e9)


def dimensions(array: str) -> list[int]:
    """Sizes of an array of this type; [] of a scalar."""
    found = re.search(r"\[([\d,]+)\]", array)
    return [int(size) for size in found[1].split(",")] if found else []


def filled(width: int, topology: Topology) -> float:
    """The share of the matrix unit that a head of this width fills."""
    return min(1.0, width / (256 if topology.generation in ("v6e", "TPU7x") else 128))


def moved_bytes(computations: dict[str, list[Operation]]) -> float:
    """Bytes that one device's operations read from main memory and write to it in one step.

    Arrays on the chip, S(1) in their layout, and on the host, S(5), do not count. If a fusion only slices an operand,
    only the slice counts; if it updates its result in place, only the bytes that it writes.
    """
    total = 0
    for _, times, operations in scheduled(computations):
        types = {operation.name: operation.type for operation in operations}
        total += times * sum(bytes_moved(operation, types, computations) for operation in operations)
    return float(total)


def bytes_moved(operation: Operation, types: dict[str, str], computations: dict[str, list[Operation]]) -> int:
    """Those of one operation. types: of the operations around it."""
    if operation.is_free or operation.base in COLLECTIVES:
        return 0
    read = [in_memory(types.get(operand, "")) for operand in operation.operands]
    made = in_memory(operation.result)
    if operation.kind == "fusion":
        body = computations.get(operation.find(r"calls=%?([\w.\-]+)") or "", [])
        read, made = sliced(body, read, made, computations)
    elif operation.base in ("dynamic-slice", "slice", "gather"):
        whole = sum(read[:1])  # 0: it does not lie in main memory
        read = [min(whole, sum(shape_bytes(operation.result)))]
    elif operation.base == "dynamic-update-slice":
        read, made = read[1:2], sum(read[1:2]) if HOST not in operation.result else 0
    return sum(read) + made


def in_memory(shape: str) -> int:
    """Bytes of the arrays of a type that lie in main memory."""
    return sum(shape_bytes(array)[0] for array in arrays_of(shape))


def sliced(
    body: list[Operation], read: list[int], made: int, computations: dict[str, list[Operation]]
) -> tuple[list[int], int]:
    """(bytes read of each operand, bytes written) by a fusion. read, made: the whole arrays."""
    types, users = {operation.name: operation.type for operation in body}, {}
    # other tiles of int8 are an inner fusion over the same memory: a gather reads its rows through it, not all of it
    views = {o.name: o.operands[0] for o in body if o.kind == "fusion" and "output_to_operand_aliasing" in o.line}
    for operation in body:
        for place, operand in enumerate(operation.operands if operation.name not in views else ()):
            users.setdefault(views.get(operand, operand), []).append((operation, place))

    def used(user: Operation, place: int, whole: int) -> int:
        if user.kind in ("dynamic-slice", "slice", "gather") and place == 0:
            return sum(shape_bytes(user.type))
        if user.kind == "tuple" or (user.kind == "dynamic-update-slice" and place == 0):  # handed through
            return 0
        if user.kind == "fusion":
            inside = computations.get(user.find(r"calls=%?([\w.\-]+)") or "", [])
            return sliced(inside, [whole if n == place else 0 for n in range(place + 1)], 0, computations)[0][place]
        return whole

    read = list(read)
    for operation in body:
        number = operation.find(r" parameter\((\d+)\)") if operation.kind == "parameter" else None
        using = users.get(operation.name, [])
        if number is not None and int(number) < len(read) and using:
            whole = read[int(number)]
            read[int(number)] = min(whole, sum(used(user, place, whole) for user, place in using))
    named = {operation.name: operation for operation in body}
    roots = [operation for operation in body if operation.line.lstrip().startswith("ROOT")]
    if roots and roots[0].kind == "tuple":
        roots = [named[name] for name in roots[0].operands if name in named]
    for root in roots:
        if root.kind == "parameter":
            made -= in_memory(root.type)
        elif root.kind == "dynamic-update-slice":
            made -= in_memory(root.type) - min(in_memory(root.type), sum(shape_bytes(types.get(root.operands[1], ""))))
    return read, max(0, made)
