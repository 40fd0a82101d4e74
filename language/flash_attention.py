"""Causal attention by jax's Pallas kernels for TPU (splash attention): the (T, T) scores never reach HBM.

jax lowers the kernels to HLO, which becomes a part of the step's graph. torch_xla 2.9.0's own wrappers are not used:
flash_attention's backward pass expands three row sums to 128 lanes in memory, about a million cycles a layer of GPT-2
124M by libtpu's estimate for v5e; splash_attention needs torchax with flax, and runs the forward kernel twice.
"""

import functools

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla._internal.jax_workarounds import requires_jax
from torch_xla.core import xla_builder

BATCH = ("data", "fsdp")  # batch and heads are sharded over the mesh, where there is one


def splash(num_heads: int, length: int, head_dim: int, **options):
    """jax's kernels for one sequence; blocks that lie wholly above the diagonal are skipped.

    Heads that do not fill 128 lanes are handed over with the positions along the lanes: the products before and after
    then fill the matrix unit, and q, k and v take half the memory.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash

    size = next(size for size in (512, 256, 128) if length % size == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dq", "block_kv_dq")
    names += ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    mask = jax_splash.MultiHeadMask([jax_splash.CausalMask((length, length))] * num_heads)
    minor = jax_splash.QKVLayout.SEQ_MINOR if head_dim % 128 else jax_splash.QKVLayout.HEAD_DIM_MINOR
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), minor)
    blocks = jax_splash.BlockSizes(**dict.fromkeys(names, size), **layouts)
    return jax_splash.make_splash_mha(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, **options)


def documents(starts_T):
    """Segment ids: a position attends to its own document alone. Its id is the position where it begins."""
    from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash

    return jax_splash.SegmentIds(starts_T, starts_T)


def jax_forward(q_BHTK, k_BGTK, v_BGTK, *starts_BT):
    """out (B, H, T, K) and the logarithm of the row sums (B, H, T), float32. The kernels read each head of keys and
    values for the H / G heads of queries that it serves."""
    import jax

    kernel = splash(*q_BHTK.shape[1:], save_residuals=True)
    forward = lambda q, k, v, *starts: kernel(q, k, v, documents(*starts) if starts else None)  # noqa: E731
    out, (logsumexp,) = jax.vmap(forward)(q_BHTK, k_BGTK, v_BGTK, *starts_BT)
    return out, logsumexp


def jax_backward(q_BHTK, k_BGTK, v_BGTK, out, logsumexp, grad, *starts_BT):
    """Gradients of q, k and v."""
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    kernel = splash(*q_BHTK.shape[1:])

    def backward(q, k, v, out, logsumexp, grad, *starts):
        ids = documents(*starts) if starts else None
        saved = (q, k, v, ids, None, out, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info)
        return splash_attention_kernel._splash_attention_bwd(**kernel.kwargs, res=saved, do=grad)[3:6]

    return jax.vmap(backward)(q_BHTK, k_BGTK, v_BGTK, out, logsumexp, grad, *starts_BT)


@functools.cache
@requires_jax
def lower(function, *arguments):
    """XLA computation of a jax function for arguments given as (shape, dtype)."""
    import jax
    from jax._src import tpu_custom_call

    # jax 0.7.1 writes format 8 for every libtpu built from 14 August 2025 on. libtpu 0.0.21 is of the 15th, and reads 7
    # at most: "Unsupported version: expected <= 7 but got 8" (jax/_src/tpu_custom_call.py; pytorch/xla#9614)
    tpu_custom_call.get_ir_version = lambda ctx: 7
    arguments = [jax.ShapeDtypeStruct(shape, str(dtype).removeprefix("torch.")) for shape, dtype in arguments]
    hlo = jax.jit(function, keep_unused=True).lower(*arguments).compiler_ir("hlo")
    return xla_builder.computation_from_module_proto(function.__name__, hlo.as_serialized_hlo_module_proto())


def spec(tensor) -> tuple:
    """The partition spec of a tensor (B, H, T, K), (B, H, T) or (B, T)."""
    return (BATCH, "tensor", None, None)[: tensor.dim()] if tensor.dim() > 2 else (BATCH, None)


def run(function, *tensors):
    """The outputs of a jax function, with axes (B, H, ...) like the first tensor. On the global mesh each device runs
    it on its shard. No mesh: there is one device, or each is traced alone already (loops.py)."""
    mesh, full = xs.get_global_mesh(), tensors[0].shape
    if mesh is not None:
        tensors = [xs.enable_manual_sharding(t, spec(t), mesh=mesh).global_tensor for t in tensors]
    parts = [whole // part for whole, part in zip(full, tensors[0].shape, strict=True)]
    computation = lower(function, *((tuple(t.shape), t.dtype) for t in tensors))
    outputs = torch_xla._XLAC._xla_user_computation(f"xla::{function.__name__}", list(tensors), computation)
    if mesh is not None:
        sizes = [[size * n for size, n in zip(t.shape, parts, strict=False)] for t in outputs]
        outputs = [
            xs.disable_manual_sharding(t, spec(t), torch.Size(size), mesh=mesh).global_tensor
            for t, size in zip(outputs, sizes, strict=True)
        ]
    return tuple(outputs)


# custom_op: torch_xla's scan traces a layer with tensors that have shapes alone
@torch.library.custom_op("tpu_utils::flash_forward", mutates_args=())
def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return run(jax_forward, q, k, v, *starts)


@flash_forward.register_fake
def _(q, k, v, starts):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tpu_utils::flash_backward", mutates_args=())
def flash_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad: torch.Tensor,
    starts: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return run(jax_backward, q, k, v, out, logsumexp, grad, *starts)


@flash_backward.register_fake
def _(q, k, v, out, logsumexp, grad, starts):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, saved, q_BHTK, k_BGTK, v_BGTK, *starts_BT):
        out, logsumexp = saved or flash_forward(q_BHTK, k_BGTK, v_BGTK, list(starts_BT))
        if saved == []:
            saved.extend((out, logsumexp))
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, out, logsumexp, *starts_BT)
        return out.detach()

    @staticmethod
    def backward(ctx, grad):
        *saved, starts = *ctx.saved_tensors[:5], list(ctx.saved_tensors[5:])
        return None, *flash_backward(*saved, grad.contiguous(), starts), *(None for _ in starts)


def flash_attention(q_BTHK, k_BTGK, v_BTGK, starts_BT=None, saved: list | None = None):
    """softmax(q k^T) v under the causal mask; the caller has divided q by sqrt(K). TPU only; 128 divides T. Several
    devices need the global mesh, with axes data, fsdp and tensor. starts_BT: where the document of each position
    begins. saved: an empty list receives the output and the log of the row sums; a filled one gives them."""
    qkv = (x.transpose(1, 2).contiguous() for x in (q_BTHK, k_BTGK, v_BTGK))
    return FlashAttention.apply(saved, *qkv, *(() if starts_BT is None else (starts_BT,))).transpose(1, 2)
