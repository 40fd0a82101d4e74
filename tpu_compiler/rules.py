"""Time, by rule, of operations without a compiler estimate; and bytes that operations move. Reads HLO text, no torch.

The rule: a flash attention layer is nine matmuls of 2 B H T^2 K FLOPs: two in the forward kernel, four in the kernel
for the gradients of K and V, three in that for Q. Blocks above the diagonal are skipped. The peak is scaled by how much
of the matrix unit a head's width fills. Copies and slices cost nothing, because they overlap with arithmetic. Neither
do other custom calls, and collectives have their own bound. Everything else (sort, scatter) costs twice the bytes of
its result over the memory bandwidth; an update in place costs twice the bytes that it writes.
"""

import math
import re

from tpu_compiler.reading import COLLECTIVES, FREE, WEIGHTY, Operation, scheduled, shape_bytes
from tpu_utils.hardware import Topology

RULE = "flash kernels and other operations without estimate counted by rule"
HIDDEN = {"copy", "slice", "custom-call", *COLLECTIVES}  # copies and slices are started early and awaited late
FLASH_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}


def ruled_ms(computations: dict[str, list[Operation]], topology: Topology) -> float:
    """Milliseconds to add to a step's estimate, by the rule above."""
    hardware, seconds = topology.hardware, 0.0
    for _, times, operations in scheduled(computations):
        sizes = {operation.name: operation.type for operation in operations}
        for operation in operations:
            if "estimated_cycles" in operation.line or operation.kind in FREE:
                continue
            if operation.kind == "custom-call":
                seconds += times * flash_seconds(operation, topology)
            elif operation.kind.removesuffix("-start") not in HIDDEN and "ConcatBitcast" not in operation.line:
                shape = operation.type
                if operation.kind == "dynamic-update-slice":
                    shape = sizes.get(operand_names(operation)[1], shape)
                size = sum(shape_bytes(shape))
                if operation.kind in WEIGHTY or size > 4096:
                    seconds += times * 2 * size / hardware.memory_gb_per_s / 1e9
    return seconds * 1e3


def flash_seconds(operation: Operation, topology: Topology) -> float:
    """Seconds of one attention kernel of flash_attention.py on one device; 0.0 for any other custom call."""
    products = next((n for kernel, n in FLASH_PRODUCTS.items() if kernel in operation.name), 0)
    queries = operation.find(r"operand_layout_constraints=\{.*?(?:bf16|f32)\[(\d+(?:,\d+){2,3})\]")
    if not products or not queries:
        return 0.0
    *batch_and_heads, length, width = map(int, queries.split(","))  # no batch axis where a device has one row
    if "q_layout_2" in operation.name:  # SEQ_MINOR of jax's splash attention
        length, width = width, length
    block = int(operation.find(r"_block_q(?:_dkv|_dq)?_(\d+)") or 512)
    computed = (1 + block / length) / 2  # share of the T x T scores: blocks on or below the diagonal
    filled = min(1.0, width / (256 if topology.generation in ("v6e", "TPU7x") else 128))
    hardware = topology.hardware
    peak = hardware.bf16_tflops / hardware.devices_per_chip * 1e12
    return products * computed * 2 * math.prod(batch_and_heads) * length**2 * width / (peak * filled)


def operand_names(operation: Operation) -> list[str]:
    """Names of the operands in optimized HLO text, such as fusion.12."""
    inside = operation.line.partition(f" {operation.kind}(")[2]
    return re.findall(r"%([\w.\-]+)", inside.partition("), ")[0])


def moved_bytes(computations: dict[str, list[Operation]]) -> float:
    """Bytes that one device's operations read from main memory and write to it in one step, copies left out.

    Arrays in on-chip memory, S(1) in their layout, do not count. If a fusion only slices an operand, only the slice
    counts; if it updates its result in place, only the bytes that it writes.
    """
    total = 0
    for _, times, operations in scheduled(computations):
        types = {operation.name: operation.type for operation in operations}
        for operation in operations:
            if operation.kind in FREE or operation.kind.removesuffix("-start") in ("copy", *COLLECTIVES):
                continue
            operands = operand_names(operation)
            read = [in_memory(types.get(operand, "")) for operand in operands]
            written = in_memory(operation.type)
            if operation.kind == "fusion":
                body = computations.get(operation.find(r"calls=%?([\w.\-]+)") or "", [])
                read, written = sliced(body, read, written)
            elif operation.kind in ("dynamic-slice", "slice", "gather"):
                read = [written]
            elif operation.kind == "dynamic-update-slice":
                read, written = read[1:2], sum(read[1:2])
            total += times * (sum(read) + written)
    return float(total)


def in_memory(shape: str) -> int:
    """Bytes of the arrays of a type that lie in main memory."""
    arrays = re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", shape)
    return sum(shape_bytes(array)[0] for array in arrays if "S(1)" not in array)


def sliced(body: list[Operation], read: list[int], written: int) -> tuple[list[int], int]:
    """(bytes read of each operand, bytes written) by a fusion. read, written: the whole arrays."""
    types, users = {operation.name: operation.type for operation in body}, {}
    for operation in body:
        for place, operand in enumerate(operand_names(operation)):
            users.setdefault(operand, []).append((operation, place))
    read = list(read)
    for operation in body:
        number = operation.find(r" parameter\((\d+)\)") if operation.kind == "parameter" else None
        using = users.get(operation.name, [])
        if number is None or int(number) >= len(read) or not using:
            continue
        if all(user.kind in ("dynamic-slice", "slice", "gather") and place == 0 for user, place in using):
            read[int(number)] = min(read[int(number)], sum(sum(shape_bytes(user.type)) for user, _ in using))
        elif all(user.kind == "dynamic-update-slice" and place == 0 for user, place in using):
            read[int(number)] = 0
    root = next((operation for operation in body if operation.line.lstrip().startswith("ROOT")), None)
    if root and root.kind == "dynamic-update-slice":
        written = min(written, sum(shape_bytes(types.get(operand_names(root)[1], root.type))))
    return read, written
