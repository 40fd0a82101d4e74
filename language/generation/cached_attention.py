"""Attention of one more token to a key-value cache.

Shape suffixes: B batch, T slots, H heads of queries, G heads of keys and values, R = H / G, K head_dim; n heads of keys
are one product.
"""

import torch

from language.models.operations import row_sums
from language.options.shapes import ModelShape

MATRIX_UNIT = 256
"""Values that a v6e's adds up in one pass."""


def heads_together(shape: ModelShape, mesh=None) -> int:
    """How many heads of keys are one product on a TPU: as many as fill its matrix unit, of those that a device has."""
    heads = shape.num_cached_heads // (mesh.shape()["tensor"] if mesh else 1)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * shape.head_dim <= MATRIX_UNIT))


def own_heads(shape: ModelShape, n: int) -> torch.Tensor:
    """(n R, n K), on the host: which values of n heads of keys each of their queries reads, those of its own head."""
    head = torch.arange(n, device="cpu")
    queries = head.repeat_interleave(shape.num_heads // shape.num_cached_heads)
    return queries[:, None] == head.repeat_interleave(shape.head_dim)


def attend(q_B1HK, keys_BGKT, values_BGKT, is_seen_BT, is_own=None):
    """Attention (B, 1, H, K) of one token to the cache, which holds it already. The caller has divided q by sqrt(K).

    is_own: of own_heads(). A query of few rows fills little of a matrix unit, and of a register. So n heads are one
    product, of n R queries with zeros for the values of other heads; of what the values give, each keeps its own.
    """
    (B, products, width, _), K, dtype = keys_BGKT.shape, q_B1HK.shape[-1], values_BGKT.dtype
    n, q = width // K, q_B1HK.view(B, products, -1, K)
    q = q if n == 1 else torch.where(is_own, torch.cat([q] * n, -1), 0.0)
    scores = torch.einsum("bgrk,bgks->bgrs", q.float(), keys_BGKT.float())
    scores = scores.masked_fill(~is_seen_BT[:, None, None], -1e30)
    p = (scores - scores.amax(-1, keepdim=True)).exp().to(dtype).float()
    y = torch.einsum("bgrs,bgks->bgrk", p, values_BGKT.float())
    y = y if n == 1 else sum(torch.where(is_own, y, 0.0).chunk(n, -1))
    return (y / row_sums(p, rounded=dtype == torch.bfloat16)).to(dtype).view(q_B1HK.shape)
