"""Lowers splash attention and its gradients for one TPU, by whatever jax: python tests/splash_program.py FILE"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

LENGTH, BLOCK = 4096, 1024
KEYS = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute")


def loss(q, k, v):
    sizes = kernels.BlockSizes(
        block_q=BLOCK, block_q_dkv=BLOCK, use_fused_bwd_kernel=True, **dict.fromkeys(KEYS, BLOCK)
    )
    mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * q.shape[1])
    attention = kernels.make_splash_mha_single_device(mask, block_sizes=sizes)
    return jax.vmap(attention)(q, k, v).astype(jnp.float32).sum()


if __name__ == "__main__":
    heads = [jax.ShapeDtypeStruct((2, 8, LENGTH, 128), jnp.bfloat16)] * 3
    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*heads).lower(lowering_platforms=("tpu",))
    Path(sys.argv[1]).write_text(lowered.as_text(debug_info=True))
