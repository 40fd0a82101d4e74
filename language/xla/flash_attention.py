"""Causal attention by the Pallas kernels of flash_kernels.py: the (T, T) scores never reach HBM. TPU only.

jax lowers the kernels to HLO, which becomes a part of the step's graph. Positions are the last axis of all that goes
into the kernels: XLA makes the products before and after in that layout.
"""

import functools

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla._internal.jax_workarounds import requires_jax
from torch_xla.core import xla_builder

from language.xla.loops import BATCH


def jax_forward(window: int, *arrays):
    from language.xla.flash_kernels import forward  # here, in lower(): torch_xla decides when jax is imported

    return forward(window, *arrays)


def jax_backward(window: int, *arrays):
    from language.xla.flash_kernels import backward

    return backward(window, *arrays)


@functools.cache
@requires_jax
def lower(function, static, *arguments):
    """XLA computation of a jax function of (static, *arguments), which are given as (shape, dtype)."""
    import jax
    from jax._src import tpu_custom_call

    # jax 0.7.1 writes format 8 for every libtpu built from 14 August 2025 on. libtpu 0.0.21 is of the 15th, and reads 7
    # at most: "Unsupported version: expected <= 7 but got 8" (jax/_src/tpu_custom_call.py; pytorch/xla#9614)
    tpu_custom_call.get_ir_version = lambda ctx: 7
    arguments = [jax.ShapeDtypeStruct(shape, str(dtype).removeprefix("torch.")) for shape, dtype in arguments]
    hlo = jax.jit(functools.partial(function, static), keep_unused=True).lower(*arguments).compiler_ir("hlo")
    return xla_builder.computation_from_module_proto(function.__name__, hlo.as_serialized_hlo_module_proto())


def spec(tensor) -> tuple:
    """The partition spec of a tensor (B, H, ...) of four axes, or (B, T)."""
    return (BATCH, ("tensor", "context"), None, None) if tensor.dim() == 4 else (BATCH, None)


def run(function, window: int, *tensors):
    """The outputs of a jax function, with axes (B, H, ...) like the first tensor. On the global mesh each device runs
    it on its shard. No mesh, or keys of several devices, (C, B, G, K, T): each is traced alone already (loops.py,
    context_attention.py)."""
    mesh, full = None if tensors[1].dim() == 5 else xs.get_global_mesh(), tensors[0].shape
    if mesh is not None:
        tensors = [xs.enable_manual_sharding(t, spec(t), mesh=mesh).global_tensor for t in tensors]
    parts = [whole // part for whole, part in zip(full, tensors[0].shape, strict=True)]
    computation = lower(function, window, *((tuple(t.shape), t.dtype) for t in tensors))
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
    window: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return run(jax_forward, window, q, k, v, *rest)


@flash_forward.register_fake
def _(window, q, k, v, rest):
    return torch.empty_like(q), q.new_empty((*q.shape[:2], 1, q.shape[3]), dtype=torch.float32)


@torch.library.custom_op("tpu_utils::flash_backward", mutates_args=())
def flash_backward(
    window: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad: torch.Tensor,
    rest: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return run(jax_backward, window, q, k, v, out, logsumexp, grad, *rest)


@flash_backward.register_fake
def _(window, q, k, v, out, logsumexp, grad, rest):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FlashAttention(torch.autograd.Function):
    """(output, log of the row sums) of the kernels. saved: both, from a first run of the layer, instead of a second."""

    @staticmethod
    def forward(ctx, saved, window, q_BHKT, k_BGKT, v_BGKT, *rest):
        ctx.window = window
        out, logsumexp = saved or flash_forward(window, q_BHKT, k_BGKT, v_BGKT, list(rest))
        ctx.save_for_backward(q_BHKT, k_BGKT, v_BGKT, out, logsumexp, *rest)
        out, logsumexp = out.detach(), logsumexp.detach()
        ctx.mark_non_differentiable(logsumexp)
        ctx.set_materialize_grads(False)  # else backward() would get zeros for the row sums
        return out, logsumexp

    @staticmethod
    def backward(ctx, grad, _):
        *saved, rest = *ctx.saved_tensors[:5], list(ctx.saved_tensors[5:])
        return None, None, *flash_backward(ctx.window, *saved, grad.contiguous(), rest), *(None for _ in rest)


def flash_attention(q_BTHK, k_BTGK, v_BTGK, starts_BT=None, saved: tuple | None = None, window: int = 0, here_T=None):
    """(softmax(q k^T) v under the causal mask; its output and the log of its row sums, as the kernel makes them).

    The caller has divided q by sqrt(K). TPU only; 128 divides T. Several devices need the global mesh, with axes data,
    fsdp and tensor. Arguments are those of causal_attention().
    """
    qkv = (x.movedim(-3, -1).contiguous() for x in (q_BTHK, k_BTGK, v_BTGK))
    rest = () if here_T is None else (here_T.view(2, -1)[:, 0].contiguous(),)  # where the two pieces begin
    rest += () if starts_BT is None else (starts_BT,)
    saved = FlashAttention.apply(saved, window, *qkv, *rest)
    return saved[0].permute(0, 3, 1, 2), saved
