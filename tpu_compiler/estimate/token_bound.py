"""What bounds a step that generates tokens: reading weights and cache, or products; and the time to expect."""

import dataclasses

from tpu_compiler.estimate.report import Report
from tpu_utils.base.hardware import parse_topology

MOST = 4.0
"""A predicted token of more times its bound is not called a speed. The compiler's cost model alone can make it two."""


def with_tokens(
    result: Report,
    *,
    batch: int,
    read_bytes: float,
    cache_bytes: int,
    length: int,
    flops: float | None = None,
    tokens: int = 1,
) -> Report:
    """The report with `decode` and the rate that follows from it; unchanged if the step does not compile.

    read_bytes: what a device reads at least for one token of each row. cache_bytes, flops: of all devices; length: of
    the cache. tokens: of each row that one step makes. The time to expect is the longest of the predicted one, both
    bounds, and what moving the program's own bytes takes, with communication that nothing hides: weights that the
    compiler fetches ahead, it has no price for.
    is_a_speed: it is at most MOST times the longer bound. Above that it is the program that is slow, and no server runs
    that program.
    """
    if not result.compiles:
        return result
    hardware = parse_topology(result.topology).hardware
    memory_ms = read_bytes / hardware.memory_gb_per_s / 1e6 * hardware.devices_per_chip
    matrix_ms = (flops or 0) / result.devices / hardware.bf16_tflops / 1e9 * hardware.devices_per_chip
    times = {"memory": memory_ms, "matrix unit": matrix_ms}
    bound = max(times, key=times.get)
    predicted_ms, moved_ms = (result.predicted_ms_all_hidden or 0) / tokens, result.memory_ms / tokens
    expected = max(predicted_ms, moved_ms + result.exposed_ms / tokens, memory_ms, matrix_ms)
    decode = dict(
        cache_bytes=cache_bytes,
        cache_length=length,
        read_bytes=int(read_bytes),
        memory_ms=memory_ms,
        matrix_ms=matrix_ms,
        bound_by=bound,
        predicted_ms=predicted_ms,
        moved_ms=moved_ms,
        expected_ms=expected,
        is_a_speed=expected <= MOST * times[bound],
        tokens=tokens,
        nothing_hidden_ms=(result.predicted_ms_nothing_hidden or 0) / tokens,
    )
    rate = batch / expected * 1e3 if decode["is_a_speed"] else None
    return dataclasses.replace(result, decode=decode, predicted_per_second=rate)
