"""Causal attention as two Pallas kernels for TPU: forward, and one backward pass that makes all three gradients.

jax's own kernels (splash attention, jax 0.7.1) write the row sums 128 times over, and make the gradients of q and of k
and v in two kernels that compute the same scores; its single kernel writes one gradient of q for each block of keys.
Here positions lie along the lanes, in every array: heads of 64 fill them, the row sums are rows, and the scores are
made as (keys, queries), so that no product needs them transposed. Scores stay on the chip. The gradient of q stays
there until its head is done, as a block of keys gives a part of all of it.

Shape suffixes: B batch, H heads of queries, G heads of keys and values, R = H / G, K head_dim, T time.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HIDDEN = -1e30
ON_CHIP = 1 << 19  # values of a gradient of q that stay on the chip, 2 of the 16 MiB; longer rows are taken in parts


def block_size(length: int, head_dim: int) -> int:
    """Queries, and keys, of a block. A larger one has fewer starts; a smaller one spares more above the diagonal."""
    sizes = (1024, 512, 256, 128) if length >= 4096 and head_dim <= 128 else (512, 256, 128)
    return next(size for size in sizes if length % size == 0)


def product(a, b, axis_of_a: int, axis_of_b: int):
    return lax.dot_general(a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=jnp.float32)


class Blocks:
    """Which blocks of keys the blocks of queries see. Queries are those from position `first` on.

    window: how many positions a query sees, itself among them; 0: all before it.
    """

    def __init__(self, size: int, first: int, num_queries: int, num_keys: int, window: int):
        self.size, self.offset, self.window = size, first // size, window
        self.queries, self.keys = num_queries // size, num_keys // size

    def first_key(self, i):
        """The first block of keys that block i of queries sees."""
        if not self.window:
            return 0
        return jnp.maximum(0, lax.div((i + self.offset) * self.size - self.window + 1, self.size))

    def last_key(self, i):
        return i + self.offset

    def first_query(self, j):
        return jnp.maximum(0, j - self.offset)

    def last_query(self, j):
        if not self.window:
            return self.queries - 1
        return jnp.clip(lax.div((j + 1) * self.size + self.window - 2, self.size) - self.offset, 0, self.queries - 1)

    def name(self, phase: str) -> str:
        """What a kernel is called: tpu_compiler/rules.py counts its products by it."""
        reach = self.window - 1 + self.size - 1 if self.window else math.inf
        seen = sum(
            0 <= (i + self.offset - j) * self.size <= reach for i in range(self.queries) for j in range(self.keys)
        )
        return f"causal_{phase}_{seen}_blocks_of_{self.size}"

    def scores(self, q_KT, k_KS, i, j, starts):
        """(keys, queries) float32 of two blocks. starts: where the document of each query begins, (1, queries)."""
        scores = product(k_KS.T, q_KT, 1, 0)
        key = j * self.size + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        query = (i + self.offset) * self.size + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        hidden = key > query
        if self.window:
            hidden |= key + self.window <= query
        for start in starts:
            hidden |= key < start[...]
        return jnp.where(hidden, HIDDEN, scores)


def forward_kernel(q, k, v, *rest, blocks: Blocks):
    *starts, out, logsumexp, largest, sums, weighted = rest
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        largest[...] = jnp.full_like(largest, HIDDEN)
        sums[...] = jnp.zeros_like(sums)
        weighted[...] = jnp.zeros_like(weighted)

    @pl.when((j >= blocks.first_key(i)) & (j <= blocks.last_key(i)))
    def _():
        scores = blocks.scores(q[...], k[...], i, j, starts)
        now = jnp.maximum(largest[...], scores.max(0, keepdims=True))
        p, shrink = jnp.exp(scores - now), jnp.exp(largest[...] - now)
        sums[...] = shrink * sums[...] + p.sum(0, keepdims=True)
        weighted[...] = shrink * weighted[...] + product(v[...], p.astype(v.dtype), 1, 0)
        largest[...] = now

    @pl.when(j == blocks.keys - 1)
    def _():
        out[...] = (weighted[...] / sums[...]).astype(out.dtype)
        logsumexp[...] = largest[...] + jnp.log(sums[...])


def backward_kernel(q, k, v, grad, logsumexp, mean, *rest, blocks: Blocks):
    *starts, dq, dk, dv, dq_sum, dk_sum, dv_sum = rest
    j, i = pl.program_id(2), pl.program_id(3)
    last = i == blocks.queries - 1

    @pl.when((j == 0) & (i == 0))
    def _():
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when(i == 0)
    def _():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when((i >= blocks.first_query(j)) & (i <= blocks.last_query(j)) & (j <= blocks.last_key(i)))
    def _():
        p = jnp.exp(blocks.scores(q[...], k[...], i, j, starts) - logsumexp[...])
        dv_sum[...] += product(grad[...], p.astype(grad.dtype), 1, 1)
        ds = (p * (product(v[...].T, grad[...], 1, 0) - mean[...])).astype(q.dtype)
        dk_sum[...] += product(q[...], ds, 1, 1)
        here = pl.ds(pl.multiple_of(i * blocks.size, blocks.size), blocks.size)
        dq_sum[:, here] += product(k[...], ds, 1, 0)

    @pl.when(last)
    def _():
        dk[...] = dk_sum[...].astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)

    @pl.when(last & (j == blocks.keys - 1))
    def _():
        dq[...] = dq_sum[...].astype(dq.dtype)


def call(kernel, phase: str, blocks: Blocks, grid, parallel: int, in_specs, out_specs, out_shape, scratch, arguments):
    """The kernel's outputs. parallel: how many axes of the grid may run in any order, or on two cores."""
    order = ("parallel",) * parallel + ("arbitrary",) * (4 - parallel)
    with jax.named_scope(blocks.name(phase)):
        return pl.pallas_call(
            functools.partial(kernel, blocks=blocks),
            name=blocks.name(phase),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        )(*arguments)


def forward(window: int, q_BHKT, k_BGKT, v_BGKT, *starts_BT):
    """out (B, H, K, T) and the logarithm of the row sums (B, H, 1, T), float32. Each head of keys and values is read
    for the H / G heads of queries that it serves."""
    (B, H, K, T), R = q_BHKT.shape, q_BHKT.shape[1] // k_BGKT.shape[1]
    size = block_size(T, K)
    blocks = Blocks(size, 0, T, T, window)

    def of_query(b, h, i, j):
        return b, h, 0, i

    def of_key(b, h, i, j):  # blocks that are not seen are not read: the one before stays
        return b, h // R, 0, jnp.clip(j, blocks.first_key(i), blocks.last_key(i))

    rows = [pl.BlockSpec((None, 1, size), lambda b, h, i, j: (b, 0, i)) for _ in starts_BT]
    heads, keys = (pl.BlockSpec((None, None, K, size), index) for index in (of_query, of_key))
    out_shape = [jax.ShapeDtypeStruct(q_BHKT.shape, q_BHKT.dtype), jax.ShapeDtypeStruct((B, H, 1, T), jnp.float32)]
    out_specs = [heads, pl.BlockSpec((None, None, 1, size), of_query)]
    arguments = (q_BHKT, k_BGKT, v_BGKT, *(starts[:, None] for starts in starts_BT))
    grid, scratch = (B, H, blocks.queries, blocks.keys), [(1, size), (1, size), (K, size)]
    specs = [heads, keys, keys, *rows]
    return call(forward_kernel, "forward", blocks, grid, 3, specs, out_specs, out_shape, scratch, arguments)


def backward(window: int, q_BHKT, k_BGKT, v_BGKT, out, logsumexp, grad, *starts_BT):
    """Gradients of q, k and v."""
    (B, H, K, T), G = q_BHKT.shape, k_BGKT.shape[1]
    size = block_size(T, K)
    mean = (out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(2, keepdims=True)  # of dp with weights p
    rows = (q_BHKT, grad, logsumexp, mean, *(starts[:, None] for starts in starts_BT))
    span = max(size, ON_CHIP // K // size * size)
    dq, dk, dv = [], 0, 0
    for first in range(0, T, span):
        end = min(T, first + span)
        blocks = Blocks(size, first, end - first, end, window)
        part = backward_of_rows(blocks, k_BGKT[..., :end], v_BGKT[..., :end], *(row[..., first:end] for row in rows))
        dq.append(part[0])
        # added one by one: XLA's sum over an axis that is not the last takes four times as long
        found = (x.reshape(B, G, H // G, K, end).astype(jnp.float32) for x in part[1:])
        found = (sum(x[:, :, head] for head in range(H // G)) for x in found)
        found = [jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, T - end))) for x in found]
        dk, dv = dk + found[0], dv + found[1]
    return jnp.concatenate(dq, -1), dk.astype(k_BGKT.dtype), dv.astype(v_BGKT.dtype)


def backward_of_rows(blocks: Blocks, k_BGKT, v_BGKT, q_BHKT, grad, logsumexp, mean, *starts_B1T):
    """Gradients of the queries that are given, and of the keys and values, for each head of queries, by these alone."""
    (B, H, K, T), (_, G, _, S), size = q_BHKT.shape, k_BGKT.shape, blocks.size

    def of_query(b, h, j, i):
        return b, h, 0, jnp.clip(i, blocks.first_query(j), blocks.last_query(j))

    def of_key(b, h, j, i):
        return b, h // (H // G), 0, j

    heads, keys = (pl.BlockSpec((None, None, K, size), index) for index in (of_query, of_key))
    row = pl.BlockSpec((None, None, 1, size), of_query)
    starts = [pl.BlockSpec((None, 1, size), lambda b, h, j, i: (b, 0, of_query(b, h, j, i)[3])) for _ in starts_B1T]
    own_keys = pl.BlockSpec((None, None, K, size), lambda b, h, j, i: (b, h, 0, j))
    out_specs = [pl.BlockSpec((None, None, K, T), lambda b, h, j, i: (b, h, 0, 0)), own_keys, own_keys]
    out_shape = [jax.ShapeDtypeStruct((B, H, K, length), q_BHKT.dtype) for length in (T, S, S)]
    arguments = (q_BHKT, k_BGKT, v_BGKT, grad, logsumexp, mean, *starts_B1T)
    grid, scratch = (B, H, blocks.keys, blocks.queries), [(K, T), (K, size), (K, size)]
    specs = [heads, keys, keys, heads, row, row, *starts]
    return call(backward_kernel, "backward", blocks, grid, 2, specs, out_specs, out_shape, scratch, arguments)
