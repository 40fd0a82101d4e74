"""Prices of a program that is planned and not compiled: an operation takes as long as its products or its bytes.

Reads HLO text, no torch. The rates are shares of a v6e's peaks that steps and kernels reached there by the clock
(vlasenkoalexey's tpu_performance_autoresearch_wiki, 2026); other chips are taken to reach the same shares.
"""

import re
from functools import cache

from tpu_compiler.estimate.operation import Operation
from tpu_compiler.estimate.reading import (
    COLLECTIVES,
    called_by,
    collectives_in,
    lines_of,
    parse_program,
    scheduled,
)
from tpu_compiler.estimate.rules import bytes_moved, dimensions, flash_seconds, host_bytes
from tpu_utils.base.hardware import Topology

MATRIX_SHARE = 0.80
"""Matrix products in steps of Qwen3 8B: 0.79 and 0.82, Llama 3 8B 0.77; one product of XLA's alone 0.81."""
MEMORY_SHARE = 0.65
"""Elementwise operations, sums and copies in the same steps: 0.71, 0.64 and 0.56; RMSNorm alone 0.85."""
SPARSE_CORE_SHARE = 0.5
"""A collective of v6e's SparseCore, beside one of the TensorCore. With reduce-scatters and all-reduces there, a step of
Qwen3 8B of 4 x 8,192 tokens was 1.9 % faster by the clock (D243 and D258 of benchmarks/published/decisions.csv), and is
1.6 % faster by this. All-gathers that flags send there libtpu 0.0.21 leaves on the TensorCore, awaited one by one."""
KERNEL_SHARES = {"forward": 0.70, "fwd": 0.70, "backward": 0.82, "dkv": 0.82, "dq": 0.82}
"""Splash attention, heads of 128, 8,192 tokens: the share of what its products take where nothing else is done."""


def corner_share(topology: Topology) -> float:
    """The share of its links that a chip in a corner of the slice has: all collectives wait for it.

    An axis of v4 and v5p is closed to a ring from 4 chips on, of v5e and v6e with 16; TPU7x is taken to be as v5p.
    Collectives that steps of Qwen3 8B waited for on v6e-8, half by this, took 0.53 of the bandwidth of all links.
    """
    ring, axes = (16, 2) if topology.generation in ("v5e", "v6e") else (4, 3)
    links = sum(2 if size >= ring else 1 for size in topology.shape if size > 1)
    return links / (2 * axes) or 1.0


def link_share(kind: str, topology: Topology, on_sparse_core: bool) -> float:
    """The share of its links that a collective has. A reduce-scatter of libtpu is an all-reduce and a slice: in eight
    steps of Qwen3 8B on v6e-8 it took 142 to 198 ms, half by 149; all-reduces at a corner's share need 122."""
    share = corner_share(topology) / (2 if kind == "reduce-scatter" else 1)
    return share * SPARSE_CORE_SHARE if on_sparse_core and topology.generation == "v6e" else share


def with_prices(text: str, topology: Topology) -> str:
    """A planned program with an estimate in every operation that a compiled one has an estimate in."""
    computations = parse_program(text)
    bandwidth = MEMORY_SHARE * topology.hardware.memory_gb_per_s * 1e9
    starts = [o for operations in computations.values() for o in operations if o.kind == "async-start"]
    ahead = {called for start in starts for called, _ in called_by(start, computations)}  # runs beside the rest
    prices = {True: {}, False: {}}  # of what is read ahead, slices brought on the chip mostly, and of the rest
    step = {True: 0.0, False: 0.0}
    needed = 0.0
    for name, times, operations in scheduled(computations):
        types = {operation.name: operation.type for operation in operations}
        for operation in operations:
            if seconds := seconds_of(operation, types, computations, topology):
                prices[name in ahead][operation.line] = seconds
                step[name in ahead] += times * seconds
                needed += times * bytes_moved(operation, types, computations) / bandwidth
    waited = max(0.0, needed - step[False])  # what is read ahead is free as long as memory is not busy all the step
    prices = prices[False] | {line: each * waited / step[True] for line, each in prices[True].items()}
    prices = {line: round(each * topology.hardware.clock_ghz * 1e9) for line, each in prices.items() if each}
    return "\n".join(
        f'{line}, backend_config={{"estimated_cycles":"{prices[line]}"}}' if line in prices else line
        for line in lines_of(text)
    )


def seconds_of(
    operation: Operation, types: dict[str, str], computations: dict[str, list[Operation]], topology: Topology
) -> float:
    """Seconds of one operation; 0.0 for what is free, awaited later, or priced by rules.py or schedule.py."""
    hardware = topology.hardware
    if kernel := re.search(r"causal_(forward|backward)_|splash_m[hq]a_(fwd|dkv|dq)", operation.name):
        return flash_seconds(operation, topology) / KERNEL_SHARES[kernel[1] or kernel[2]]
    started = operation.is_free or operation.kind.endswith("-start") or operation.kind == "custom-call"
    if started or operation.base in COLLECTIVES or host_bytes(operation, types)[1]:
        return 0.0
    peak = hardware.bf16_tflops / hardware.devices_per_chip * 1e12
    products = product_flops(operation, types, computations) / (MATRIX_SHARE * peak)
    if collectives_in(operation, computations):  # its bytes are on the way while the products run
        return products
    moved = bytes_moved(operation, types, computations)
    return max(products, moved / (MEMORY_SHARE * hardware.memory_gb_per_s * 1e9))


def product_flops(operation: Operation, types: dict[str, str], computations: dict[str, list[Operation]]) -> float:
    """FLOPs of an operation's products. XLA writes each as a convolution for a TPU, mostly inside a fusion."""
    if operation.kind == "convolution":
        return convolution_flops(operation, types)
    flops = 0.0
    for called, _ in called_by(operation, computations) if operation.kind == "fusion" else ():
        inside = computations.get(called, [])
        inner = {one.name: one.type for one in inside}
        flops += sum(product_flops(one, inner, computations) for one in inside)
    return flops


def convolution_flops(operation: Operation, types: dict[str, str]) -> float:
    """Two for each multiplication. Padding and the holes of a dilation are none: a batched product is a window over
    the batch in which one place holds a number."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.line)
    shapes = [dimensions(types.get(name, "")) for name in operation.operands[:2]] + [dimensions(operation.type)]
    if not labels or not all(shapes):
        return 0.0
    pairs = zip(labels.groups(), shapes, strict=True)
    left, right, out = (dict(zip(names, sizes, strict=True)) for names, sizes in pairs)
    window = dict(re.findall(r"(\w+)=(\S+)", operation.find(r"window=\{([^}]*)\}") or ""))
    flops = 2.0 * out["b"] * out["f"] * right["i"] * passes(operation, types)
    for place, letter in enumerate(sorted(letter for letter in out if letter.isdigit())):
        stride, base, step = (
            int(window[name].split("x")[place]) if name in window else 1
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        padding = int(window["pad"].split("x")[place].split("_")[0]) if "pad" in window else 0
        flops *= met(left[letter], out[letter], right[letter], stride, base, step, padding)
    return flops / int(operation.find(r"batch_group_count=(\d+)") or 1)


def passes(operation: Operation, types: dict[str, str]) -> int:
    """How often a product of float32 goes through the matrix unit, which multiplies bfloat16: jax's precision
    highest is six times, high three (jax.lax.Precision)."""
    asked = operation.find(r"operand_precision=\{(\w+)")
    whole = all(types.get(name, "").startswith("f32") for name in operation.operands[:2])
    return {"highest": 6, "high": 3}.get(asked, 1) if whole else 1


@cache
def met(inputs: int, outputs: int, kernel: int, stride: int, base: int, step: int, padding: int) -> int:
    """Pairs of a place of the output and one of the kernel that meet a number, along one axis."""
    places = (out * stride - padding + one * step for out in range(outputs) for one in range(kernel))
    return sum(place % base == 0 and 0 <= place // base < inputs for place in places)
