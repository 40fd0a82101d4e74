"""Causal attention as two Pallas kernels for TPU: forward, and one backward pass that makes all three gradients.

jax's own kernels (splash attention, jax 0.7.1) write the row sums 128 times over, and make the gradients of q and of k
and v in two kernels that compute the same scores; its single kernel writes one gradient of q for each block of keys.
Here positions lie along the lanes, in every array: heads of 64 fill them, the row sums are rows, and the scores are
made as (keys, queries), so that no product needs them transposed. Scores stay on the chip. The gradient of q stays
there until its head is done, as a block of keys gives a part of all of it.

On a mesh with a context axis (context_attention.py) a device has the queries of two pieces of the sequence, the keys
and values of all devices, and the positions at which its pieces begin, in scalar memory. From them the kernels know
which blocks of keys its queries see, so every device runs the same program.

Shape suffixes: B batch, H heads of queries, G heads of keys and values, R = H / G, K head_dim, T time; C devices along
the context axis.
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


def block_size(length: int, head_dim: int, devices: int) -> int:
    """Queries, and keys, of a block. A larger one has fewer starts; a smaller one spares more above the diagonal. On
    several devices it divides a piece."""
    sizes = (1024, 512, 256, 128) if length >= 4096 and head_dim <= 128 else (512, 256, 128)
    piece = length if devices == 1 else length // (2 * devices)
    return next(size for size in sizes if piece % size == 0)


def product(a, b, axis_of_a: int, axis_of_b: int):
    return lax.dot_general(a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=jnp.float32)


class Blocks:
    """Which blocks of keys the blocks of queries see. Queries are those from number `first` of the device's on.

    window: how many positions a query sees, itself among them; 0: all before it. devices: that share the sequence; of
    several each has two pieces of it, which begin at the positions `begins`, () or a reference to (2,) int32.
    """

    def __init__(self, size: int, first: int, num_queries: int, num_keys: int, window: int, devices: int = 1):
        self.size, self.offset, self.window, self.devices = size, first // size, window, devices
        self.queries, self.keys = num_queries // size, num_keys // size
        self.piece = self.keys // (2 * devices)  # blocks of one

    def place(self, i, begins=()):
        """The number in the sequence of block i of the queries."""
        if self.devices == 1:
            return i + self.offset
        i = i + self.offset
        return lax.div(begins[0][lax.div(i, self.piece)], self.size) + lax.rem(i, self.piece)

    def first_key(self, i, begins=()):
        """The first block of keys that block i of queries sees."""
        if not self.window:
            return 0
        return jnp.maximum(0, lax.div(self.place(i, begins) * self.size - self.window + 1, self.size))

    def last_key(self, i, begins=()):
        return self.place(i, begins)

    def sees(self, i, j, begins=()):
        return (j >= self.first_key(i, begins)) & (j <= self.last_key(i, begins))

    def first_query(self, j, begins=()):
        """The first block of queries that sees block j of keys, where one does."""
        if self.devices == 1:
            return jnp.maximum(0, j - self.offset)
        early, late = (j - lax.div(begins[0][piece], self.size) for piece in range(2))
        first = jnp.where(early < self.piece, jnp.maximum(0, early), self.piece + jnp.maximum(0, late))
        return jnp.maximum(0, first - self.offset)

    def last_query(self, j, begins=()):
        if not self.window:
            return self.queries - 1
        last = lax.div((j + 1) * self.size + self.window - 2, self.size)  # in the sequence
        if self.devices > 1:
            early, late = (last - lax.div(begins[0][piece], self.size) for piece in range(2))
            first_part = jnp.minimum(early, self.piece - 1)
            last = jnp.where(late >= 0, self.piece + jnp.minimum(late, self.piece - 1), first_part)
        return jnp.clip(last - self.offset, 0, self.queries - 1)

    def held(self, j):
        """(device, block) of block j of the keys: devices hold the pieces in balanced order."""
        piece, rest = lax.div(j, self.piece), lax.rem(j, self.piece)
        is_late = piece >= self.devices
        return jnp.where(is_late, 2 * self.devices - 1 - piece, piece), jnp.where(is_late, self.piece, 0) + rest

    def name(self, phase: str) -> str:
        """Name of a kernel, from which tpu_compiler/estimate/rules.py counts its products: the mean over devices."""
        reach = self.window - 1 + self.size - 1 if self.window else math.inf
        pieces = [[0, 0]] if self.devices == 1 else [[d, 2 * self.devices - 1 - d] for d in range(self.devices)]
        piece, here = self.piece if self.devices > 1 else self.keys, range(self.offset, self.offset + self.queries)
        places = [of[i // piece] * piece + i % piece for of in pieces for i in here]
        seen = sum(0 <= (place - j) * self.size <= reach for place in places for j in range(self.keys))
        return f"causal_{phase}_{seen // self.devices}_blocks_of_{self.size}"

    def scores(self, q_KT, k_KS, i, j, starts, begins=()):
        """(keys, queries) float32 of two blocks. starts: where the document of each query begins, (1, queries)."""
        scores = product(k_KS.T, q_KT, 1, 0)
        key = j * self.size + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        query = self.place(i, begins) * self.size + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        hidden = key > query
        if self.window:
            hidden |= key + self.window <= query
        for start in starts:
            hidden |= key < start[...]
        return jnp.where(hidden, HIDDEN, scores)


def forward_kernel(*arguments, blocks: Blocks):
    begins, (q, k, v, *rest) = arguments[: blocks.devices > 1], arguments[blocks.devices > 1 :]
    *starts, out, logsumexp, largest, sums, weighted = rest
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        largest[...] = jnp.full_like(largest, HIDDEN)
        sums[...] = jnp.zeros_like(sums)
        weighted[...] = jnp.zeros_like(weighted)

    @pl.when(blocks.sees(i, j, begins))
    def _():
        scores = blocks.scores(q[...], k[...], i, j, starts, begins)
        now = jnp.maximum(largest[...], scores.max(0, keepdims=True))
        p, shrink = jnp.exp(scores - now), jnp.exp(largest[...] - now)
        sums[...] = shrink * sums[...] + p.sum(0, keepdims=True)
        weighted[...] = shrink * weighted[...] + product(v[...], p.astype(v.dtype), 1, 0)
        largest[...] = now

    @pl.when(j == blocks.keys - 1)
    def _():
        out[...] = (weighted[...] / sums[...]).astype(out.dtype)
        logsumexp[...] = largest[...] + jnp.log(sums[...])


def backward_kernel(*arguments, blocks: Blocks):
    begins, arguments = arguments[: blocks.devices > 1], arguments[blocks.devices > 1 :]
    q, k, v, grad, logsumexp, mean, *rest = arguments
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

    @pl.when(blocks.sees(i, j, begins))
    def _():
        p = jnp.exp(blocks.scores(q[...], k[...], i, j, starts, begins) - logsumexp[...])
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


def call(kernel, phase: str, blocks: Blocks, parallel: int, grid: pltpu.PrefetchScalarGridSpec, out_shape, arguments):
    """The kernel's outputs. parallel: how many axes of the grid may run in any order, or on two cores."""
    order = ("parallel",) * parallel + ("arbitrary",) * (4 - parallel)
    with jax.named_scope(blocks.name(phase)):
        return pl.pallas_call(
            functools.partial(kernel, blocks=blocks),
            name=blocks.name(phase),
            grid_spec=grid,
            out_shape=out_shape,
            compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        )(*arguments)


def make_grid(blocks: Blocks, sizes, in_specs, out_specs, scratch) -> pltpu.PrefetchScalarGridSpec:
    """On several devices the first argument is what lies in scalar memory, and every index map gets it."""
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=int(blocks.devices > 1),
        grid=sizes,
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    )


def forward(window: int, q_BHKT, k_BGKT, v_BGKT, *rest):
    """out (B, H, K, T) and the logarithm of the row sums (B, H, 1, T), float32. Each head of keys and values is read
    for the H / G heads of queries that it serves. rest: where the document of each query begins, (B, T), or nothing. On
    several devices keys and values are (C, B, G, K, T), and before the rest come the two positions of Blocks."""
    (B, H, K, T), devices, R = q_BHKT.shape, devices_of(k_BGKT), q_BHKT.shape[1] // k_BGKT.shape[-3]
    begins, starts_BT = rest[: devices > 1], rest[devices > 1 :]
    size = block_size(T * devices, K, devices)
    blocks = Blocks(size, 0, T, T * devices, window, devices)

    def of_query(b, h, i, j, *begins):
        return b, h, 0, i

    def of_key(b, h, i, j, *begins):  # blocks that are not seen are not read: the one before stays
        j = jnp.clip(j, blocks.first_key(i, begins), blocks.last_key(i, begins))
        return key_block(blocks, b, h // R, j)

    rows = [pl.BlockSpec((None, 1, size), lambda b, h, i, j, *_: (b, 0, i)) for _ in starts_BT]
    heads, keys = pl.BlockSpec((None, None, K, size), of_query), pl.BlockSpec(key_shape(blocks, K), of_key)
    out_shape = [jax.ShapeDtypeStruct(q_BHKT.shape, q_BHKT.dtype), jax.ShapeDtypeStruct((B, H, 1, T), jnp.float32)]
    out_specs = [heads, pl.BlockSpec((None, None, 1, size), of_query)]
    arguments = (*begins, q_BHKT, k_BGKT, v_BGKT, *(starts[:, None] for starts in starts_BT))
    sizes, scratch = (B, H, blocks.queries, blocks.keys), [(1, size), (1, size), (K, size)]
    grid = make_grid(blocks, sizes, [heads, keys, keys, *rows], out_specs, scratch)
    return call(forward_kernel, "forward", blocks, 3, grid, out_shape, arguments)


def devices_of(k_BGKT) -> int:
    """That share a sequence."""
    return len(k_BGKT) if k_BGKT.ndim == 5 else 1


def key_shape(blocks: Blocks, head_dim: int) -> tuple:
    """Shape of a block of keys."""
    return (*(None,) * (3 if blocks.devices > 1 else 2), head_dim, blocks.size)


def key_block(blocks: Blocks, b, g, j) -> tuple:
    """Where block j of the keys lies."""
    if blocks.devices == 1:
        return b, g, 0, j
    device, block = blocks.held(j)
    return device, b, g, 0, block


def backward(window: int, q_BHKT, k_BGKT, v_BGKT, out, logsumexp, grad, *rest):
    """Gradients of q, k and v. rest: as in forward()."""
    (_, H, K, T), devices, G = q_BHKT.shape, devices_of(k_BGKT), k_BGKT.shape[-3]
    begins, starts_BT = rest[: devices > 1], rest[devices > 1 :]
    size = block_size(T * devices, K, devices)
    mean = (out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(2, keepdims=True)  # mean of dp, weighted by p
    rows = (q_BHKT, grad, logsumexp, mean, *(starts[:, None] for starts in starts_BT))
    span = max(size, ON_CHIP // K // size * size)
    dq, dk, dv = [], 0, 0
    for first in range(0, T, span):
        end = min(T, first + span)
        seen = end if devices == 1 else T  # keys of each device
        blocks = Blocks(size, first, end - first, seen * devices, window, devices)
        keys = (k_BGKT[..., :seen], v_BGKT[..., :seen])
        part = backward_of_rows(blocks, begins, *keys, *(row[..., first:end] for row in rows))
        dq.append(part[0])
        # added one by one: XLA's sum over an axis that is not the last takes four times as long
        found = (x.reshape(*x.shape[:-3], G, H // G, K, seen) for x in part[1:])
        found = (sum(x[..., head, :, :].astype(jnp.float32) for head in range(H // G)) for x in found)
        found = [jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, T - seen))) for x in found]
        dk, dv = dk + found[0], dv + found[1]
    return jnp.concatenate(dq, -1), dk.astype(k_BGKT.dtype), dv.astype(v_BGKT.dtype)


def backward_of_rows(blocks: Blocks, begins, k_BGKT, v_BGKT, q_BHKT, grad, logsumexp, mean, *starts_B1T):
    """Gradients of the queries that are given, and of the keys and values, for each head of queries, by these alone."""
    (B, H, K, T), G, size = q_BHKT.shape, k_BGKT.shape[-3], blocks.size

    def of_query(b, h, j, i, *begins):
        return b, h, 0, jnp.clip(i, blocks.first_query(j, begins), blocks.last_query(j, begins))

    def of_key(b, h, j, i, *begins):
        return key_block(blocks, b, h // (H // G), j)

    heads, keys = pl.BlockSpec((None, None, K, size), of_query), pl.BlockSpec(key_shape(blocks, K), of_key)
    row = pl.BlockSpec((None, None, 1, size), of_query)
    starts = [
        pl.BlockSpec((None, 1, size), lambda b, h, j, i, *begins: (b, 0, of_query(b, h, j, i, *begins)[3]))
        for _ in starts_B1T
    ]
    own_keys = pl.BlockSpec(key_shape(blocks, K), lambda b, h, j, i, *_: key_block(blocks, b, h, j))
    out_specs = [pl.BlockSpec((None, None, K, T), lambda b, h, j, i, *_: (b, h, 0, 0)), own_keys, own_keys]
    of_heads = (*k_BGKT.shape[:-3], H, *k_BGKT.shape[-2:])
    out_shape = [jax.ShapeDtypeStruct(shape, q_BHKT.dtype) for shape in ((B, H, K, T), of_heads, of_heads)]
    arguments = (*begins, q_BHKT, k_BGKT, v_BGKT, grad, logsumexp, mean, *starts_B1T)
    sizes, scratch = (B, H, blocks.keys, blocks.queries), [(K, T), (K, size), (K, size)]
    grid = make_grid(blocks, sizes, [heads, keys, keys, heads, row, row, *starts], out_specs, scratch)
    return call(backward_kernel, "backward", blocks, 2, grid, out_shape, arguments)
