"""Grouped products by jax's Pallas kernels (megablox, jax 0.7.1): rows in the order of their experts, without padding.

TPU only. An expert's rows need not begin where a tile does, and tiles behind the last row are not computed.
"""

import torch_xla

from language.xla.flash_attention import lower

TILES = (512, 1024, 1024)
"""Rows, inputs and outputs of a tile, at most: they lie in 16 MiB beside the matrix unit."""
TILES_OF_GRADIENT = (512, 1024, 512)
"""What a gradient writes is float32, three times in there."""


def tiling(*sizes: int, most=TILES) -> tuple[int, ...]:
    return tuple(min(tile, size) for tile, size in zip(most, sizes, strict=True))


def name(slots: int, share: tuple[int, int], *sizes: int) -> str:
    """tpu_compiler/estimate/rules.py counts by it. share: of slots, those with rows if experts are chosen alike."""
    return "x".join(["grouped_product_" + str(slots * share[0] // share[1]), *map(str, sizes)])


def product(static: tuple[bool, tuple[int, int]], rows_SI, weights_XOI, counts_X):
    """jax: (S, O), or transposed: of (S, O), (S, I). counts: rows of each expert. static: transposed, and of name()."""
    import jax
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # here, in lower(): torch_xla decides when jax comes

    (S, inputs), (transposed, share) = rows_SI.shape, static
    outputs = weights_XOI.shape[2 if transposed else 1]
    with jax.named_scope(name(S, share, inputs, outputs)):
        return gmm(
            rows_SI, weights_XOI, counts_X, rows_SI.dtype, tiling(S, inputs, outputs), transpose_rhs=not transposed
        )


def gradient(static: tuple[bool, tuple[int, int]], grad_SO, rows_SI, counts_X):
    """jax: (X, O, I), float32: for each expert grad^T rows."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    (S, outputs), inputs = grad_SO.shape, rows_SI.shape[1]
    with jax.named_scope(name(S, static[1], outputs, inputs)):
        return tgmm(grad_SO.T, rows_SI, counts_X, jnp.float32, tiling(S, outputs, inputs, most=TILES_OF_GRADIENT))


def run(function, static: tuple[bool, tuple[int, int]], *tensors):
    """The output of product or gradient, on one device."""
    computation = lower(function, static, *((tuple(t.shape), t.dtype) for t in tensors))
    return torch_xla._XLAC._xla_user_computation(f"xla::{function.__name__}", list(tensors), computation)[0]
