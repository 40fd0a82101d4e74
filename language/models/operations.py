"""Operations of a language model, written for the TPU: layer norm, causal attention, cross-entropy.

Each keeps its tensors in memory in the compute dtype, computes in float32 inside one fusion, and has a backward pass
of its own. Shape suffixes: B batch, T time, S keys, D embedding width, H heads of queries, G heads of keys and values,
R = H / G, K head_dim, V padded vocabulary, N = B * T.
"""

import torch
import torch.nn.functional as F

from language.xla.shards import size_of
from tpu_utils.device import IS_XLA


class LayerNorm(torch.autograd.Function):
    """Layer norm of x (B, T, D): float32 inside one fusion, the dtype of x in memory. E[x^2] - E[x]^2 reads x once.
    The backward pass is written down because autograd's takes more operations."""

    @staticmethod
    def forward(ctx, x, weight_D, bias_D):
        z = x.float()
        mean = z.mean(-1, keepdim=True)
        scale = torch.rsqrt((z * z).mean(-1, keepdim=True) - mean * mean + 1e-5)
        ctx.save_for_backward(x, mean, scale, weight_D)
        return ((z - mean) * scale * weight_D + bias_D).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, mean, scale, weight_D = ctx.saved_tensors
        grad, normal = grad.float(), (x - mean) * scale
        dn = grad * weight_D
        dx = (dn - dn.mean(-1, keepdim=True) - normal * (dn * normal).mean(-1, keepdim=True)) * scale
        return dx.to(x.dtype), (grad * normal).sum((0, 1)), grad.sum((0, 1))


layer_norm = LayerNorm.apply


class RMSNorm(torch.autograd.Function):
    """RMS norm of x (..., D): LayerNorm without mean and bias (Zhang and Sennrich 2019). scale: rms_scale(x)."""

    @staticmethod
    def forward(ctx, x, weight_D, scale):
        ctx.save_for_backward(x, scale, weight_D)
        return (x.float() * scale[..., None] * weight_D).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, scale, weight_D = ctx.saved_tensors
        scale = scale[..., None]
        grad, normal = grad.float(), x * scale
        dn = grad * weight_D
        dx = (dn - normal * (dn * normal).mean(-1, keepdim=True)) * scale
        return dx.to(x.dtype), (grad * normal).sum(tuple(range(x.dim() - 1))), None


@torch.no_grad()  # the backward pass of RMSNorm knows that it comes from x
def rms_scale(x, eps: float):
    """One over the root of the mean square of each row, (...) float32."""
    z = x.float()
    return torch.rsqrt((z * z).mean(-1) + eps)


def rms_norm(x, weight_D, eps: float, scale=None):
    """scale: rms_scale(x, eps), where the caller has it."""
    return RMSNorm.apply(x, weight_D, rms_scale(x, eps) if scale is None else scale)


def row_sums(x, rounded: bool):
    """(..., 1) float32, of (..., V). rounded: as a matrix product with ones, which on TPU rounds x to bfloat16 and adds
    in float32; it takes a third of the time, by libtpu 0.0.21's estimate for v5e."""
    if not rounded:
        return x.sum(-1, keepdim=True)
    axes = "abcd"[: x.dim() - 1]  # by einsum: a product of matrices would flatten axes, sharded ones too
    ones = torch.ones(x.shape[-1], 2, device=x.device)  # 2 columns: XLA makes 1 a sum again
    return torch.einsum(f"{axes}v,vn->{axes}n", x, ones)[..., :1]


class AddBias(torch.autograd.Function):
    """x (B, T, ...) + a bias (...). The gradient of the bias is a sum over positions. In bfloat16 it is taken as a
    product with ones (see row_sums): a twentieth of the time where the gradient comes from a kernel and heads are 64
    wide, by libtpu 0.0.21's estimate for v5e. Where a matrix product gives it, XLA fuses a plain sum into that.
    """

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, grad):
        if grad.dtype != torch.bfloat16:
            return grad, grad.sum((0, 1))
        ones = torch.ones(2, *grad.shape[:2], device=grad.device, dtype=grad.dtype)
        return grad, torch.einsum("nbt,bt...->n...", ones, grad)[0]


add_bias = AddBias.apply


def positions(x_BTHK, start: int, end: int):
    """x[:, start:end], or x itself if that is all of it: torch_xla would trace the slice as two operations."""
    return x_BTHK if end - start == x_BTHK.shape[1] else x_BTHK[:, start:end]


class CausalAttention(torch.autograd.Function):
    """(softmax(q k^T) v under the causal mask, its row sums): float32 inside, the dtype of q in memory. Each of the G
    heads of keys and values serves R heads of queries: it is read once for all of them, and their gradients add up
    inside the product.

    Queries are processed in slices, each with the keys up to its end. e = exp(score - maximum) is saved.
    The output is divided by the row sums, and in the backward pass its gradient: K values a row instead of S. The row
    sums of p * dp are equal to those of out * grad, which are used (both: Dao et al. 2022, FlashAttention, section
    3.1), so the gradient of the scores is elementwise, and XLA fuses it into the matrix product before it. einsum keeps
    batch and heads as separate axes, whose layout XLA chooses.
    """

    @staticmethod
    def forward(ctx, q_BTGRK, k_BSGK, v_BSGK, chunks, starts_BT, saved, window, here_T):
        T, S, K, dtype = q_BTGRK.shape[1], k_BSGK.shape[1], q_BTGRK.shape[-1], q_BTGRK.dtype
        position = torch.arange(S, device=q_BTGRK.device)
        of_query = position if here_T is None else here_T
        # as an array: a number would be an input of the program, which no loop can bring into a device's own part of it
        minimum = torch.arange(-1e30, 0.0, 1e30, device=q_BTGRK.device)
        has_window = isinstance(window, torch.Tensor) or window
        until = window_ends(position, window) if has_window else None  # which queries see a key
        v_and_1 = F.pad(v_BSGK, (0, 1), value=1.0).float()
        exps, out, sums = [], [], []
        for first, start, end, last in CausalAttention.slices(T, S, chunks, window):
            q_slice = positions(q_BTGRK, start, end)
            scores = torch.einsum("btgrk,bsgk->bgrts", q_slice, positions(k_BSGK, first, last)).float()
            here, there = of_query[start:end, None], position[None, first:last]
            hidden = here < there
            if has_window:
                hidden = hidden | (until[None, first:last] <= here)
            if starts_BT is not None:
                hidden = (hidden | (there < starts_BT[:, start:end, None]))[:, None, None]  # (B, 1, 1, t, s)
            scores = torch.where(hidden, minimum, scores)
            exps.append((scores - scores.amax(-1, keepdim=True)).exp().to(dtype))
            if saved:
                continue
            weighted = torch.einsum("bgrts,bsgk->btgrk", exps[-1].float(), positions(v_and_1, first, last))
            sums.append(weighted[..., K:])
            out.append((weighted[..., :K] / sums[-1]).to(dtype))
        out, sums = saved or (torch.cat(out, 1), torch.cat(sums, 1))
        ctx.window = window
        ctx.save_for_backward(q_BTGRK, k_BSGK, v_BSGK, out, sums, *exps)
        out, sums = out.detach(), sums.detach()
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)  # else backward() would get zeros for the row sums
        return out, sums

    @staticmethod
    def backward(ctx, grad, _):
        q_BTGRK, k_BSGK, v_BSGK, out, sums, *exps = ctx.saved_tensors
        T, S = q_BTGRK.shape[1], k_BSGK.shape[1]
        grad = (grad / sums).to(q_BTGRK.dtype)  # sums are float32
        mean = (grad * out.float()).sum(-1)  # mean of de, weighted by p: (B, T, G, R)
        dq, dk, dv = [], 0, 0
        for (first, start, end, last), e in zip(CausalAttention.slices(T, S, len(exps), ctx.window), exps, strict=True):
            whole = (0, 0, 0, 0, first, S - last)  # keys before its window and after the slice get nothing from it
            grad_slice, q_slice = positions(grad, start, end), positions(q_BTGRK, start, end)
            dv += F.pad(torch.einsum("bgrts,btgrk->bsgk", e, grad_slice), whole)
            de = torch.einsum("btgrk,bsgk->bgrts", grad_slice, positions(v_BSGK, first, last))
            ds = ((de - positions(mean, start, end).permute(0, 2, 3, 1).unsqueeze(-1)) * e).to(e.dtype)
            dq.append(torch.einsum("bgrts,bsgk->btgrk", ds, positions(k_BSGK, first, last)))
            dk += F.pad(torch.einsum("bgrts,btgrk->bsgk", ds, q_slice), whole)
        return torch.cat(dq, 1), dk, dv, None, None, None, None, None

    @staticmethod
    def slices(T, S, chunks, window):
        """(first key, first query, end of the queries, of the keys) of each; of 6 the last four are half as long. A
        window that is a tensor, of a scanned layer, spares no keys. Fewer queries than keys are those of two pieces, of
        the sequence's first half and of its second one."""
        if T < S:
            return [(0, 0, T // 2, S // 2), (0, T // 2, T, S)]
        ends = [T * end // 8 for end in (2, 4, 5, 6, 7, 8)] if chunks == 6 else range(T // chunks, T + 1, T // chunks)
        spared = window if isinstance(window, int) and window else T
        return [(max(0, start - spared + 1), start, end, end) for start, end in zip((0, *ends), ends, strict=False)]


def window_ends(position_S, window):
    """The first position that does not see each."""
    if isinstance(window, torch.Tensor):
        return position_S + window
    return torch.arange(window, window + len(position_S), device=position_S.device)


def in_order(x_CBTGK):
    """(B, S, G, K) of what devices hold in balanced order, one after the other: context_attention.py."""
    early, late = x_CBTGK.unflatten(2, (2, -1)).unbind(2)
    return torch.cat([early, late.flip(0)]).movedim(0, 1).flatten(1, 2)


def causal_attention(
    q_BTHK, k_BTGK, v_BTGK, starts_BT=None, saved: tuple | None = None, window=0, chunks: int | None = None, here_T=None
):
    """(softmax(q k^T) v under the causal mask; the same and its row sums, as `saved` takes them).

    The caller has divided q by sqrt(K). chunks: slices of queries; None: 4, which compute 5/8 of the square of
    scores; 8 (9/16) from T 2,048 on; 6 for T 1,024 and heads below 128 lanes, which saves 1 to 3 % of a step of GPT-2
    (libtpu 0.0.21's estimates for v5e); 1 unless 512 divides T. starts_BT: where the document of each position begins;
    None: at the row's first token. saved: what a first run of the layer returned, which is then not computed again;
    (): this is the first run; None: there is only one. window: how many positions one sees, itself among them; 0: all
    before it. An int32 scalar in a scanned layer. here_T: positions of the queries of two pieces of a sequence; keys
    and values are (C, B, T, G, K) then: context_attention.py.
    """
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[-2]
    if here_T is not None:
        k_BTGK, v_BTGK, chunks = in_order(k_BTGK), in_order(v_BTGK), 2
    chunks = chunks or (1 if T % 512 else 8 if T >= 2048 else 6 if T == 1024 and K < 128 else 4)
    q_BTGRK = q_BTHK.view(B, T, G, H // G, K)
    saved = CausalAttention.apply(q_BTGRK, k_BTGK, v_BTGK, chunks, starts_BT, saved, window, here_T)
    return saved[0].view(B, T, H, K), saved


class CrossEntropy(torch.autograd.Function):
    """Negative log likelihood of every target, float32; 0 for targets below 0. Padded columns get no probability.

    Logits stay in the compute dtype in memory. The target's logit is picked by comparison: a gather over a sharded
    vocabulary would all-gather the logits. The pick is a maximum, which XLA fuses into the matrix product before it.
    """

    @staticmethod
    def forward(ctx, logits_BTV, target_BT, vocab_size):
        column = torch.arange(logits_BTV.shape[-1], device=logits_BTV.device, dtype=torch.int32)
        z = logits_BTV.float().masked_fill(column >= vocab_size, -1e30)
        largest = z.amax(-1, keepdim=True)
        rounded = logits_BTV.dtype == torch.bfloat16 and ctx.needs_input_grad[0]  # an evaluation is exact
        logsumexp = largest + row_sums((z - largest).exp(), rounded).log()
        picked = z.masked_fill(column != target_BT[..., None], -1e30).amax(-1, keepdim=True)
        ctx.save_for_backward(logits_BTV, target_BT, logsumexp)
        ctx.vocab_size = vocab_size
        return (logsumexp - picked)[..., 0] * (target_BT >= 0).float()

    @staticmethod
    def backward(ctx, grad_BT):
        logits_BTV, target_BT, logsumexp = ctx.saved_tensors
        column = torch.arange(logits_BTV.shape[-1], device=logits_BTV.device, dtype=torch.int32)
        p = (logits_BTV.float() - logsumexp).exp().masked_fill(column >= ctx.vocab_size, 0.0)
        found = (p - (column == target_BT[..., None]).float()) * ((target_BT >= 0).float() * grad_BT)[..., None]
        return found.to(logits_BTV.dtype), None, None


def is_likeliest(logits_BTV, targets_BT, vocab_size: int):
    """1.0 where a target has the largest logit, of equal ones the first; (B, T) float32. 0 for a negative target.

    By maxima and a sum, which XLA computes with those of losses(): an argmax would double the time of head and loss of
    GPT-2 124M, by libtpu 0.0.21's estimate for v5e."""
    column = torch.arange(logits_BTV.shape[-1], device=logits_BTV.device, dtype=torch.int32)
    z = logits_BTV.float().masked_fill(column >= vocab_size, -1e30)
    largest = z.amax(-1, keepdim=True)
    picked = z.masked_fill(column != targets_BT[..., None], -1e30).amax(-1, keepdim=True)
    earlier = ((z == largest) & (column < targets_BT[..., None])).float().sum(-1)
    return ((picked >= largest)[..., 0].float() - earlier).clamp(min=0.0)


def losses(logits_BTV, targets_BT, vocab_size: int, mesh=None):
    """Loss in nats of every target, (B, T) float32; 0 where the target is negative.

    Where devices share sequences batch and time stay two axes: one of both could not be sharded along both, and the
    partitioner would gather it. Elsewhere they are one: with two a step of GPT-2 124M takes 3 % longer, by libtpu
    0.0.21's estimate for v5e.
    """
    if not isinstance(logits_BTV, torch.Tensor):  # LogitsInParts
        return logits_BTV.losses(targets_BT, vocab_size, mesh)
    if size_of(mesh) > 1:
        return CrossEntropy.apply(logits_BTV, targets_BT, vocab_size)
    return CrossEntropy.apply(logits_BTV.flatten(0, -2), targets_BT.flatten(), vocab_size).view(targets_BT.shape)


class TorchOperations:
    """The operations above by torch's own, for torch's compiler, whose graphs can lose the gradient of a Function
    (docs/torchtpu.md). Same names, arguments and results; scale and saved are not used."""

    @staticmethod
    def contract(equation: str, x_BTI, weight):
        """What layers.product() computes, by a product of matrices. For an einsum, a batch of one, cuBLAS has kernels
        that may not divide the sum over all rows in a weight's gradient among multiprocessors."""
        inputs = x_BTI.dim() - 2  # axes that are summed over, the last of both
        y = F.linear(x_BTI.flatten(2), weight.flatten(-inputs).flatten(0, -2))
        return y.view(*x_BTI.shape[:2], *weight.shape[:-inputs])

    @staticmethod
    def layer_norm(x, weight_D, bias_D):
        return F.layer_norm(x.float(), weight_D.shape, weight_D.float(), bias_D.float(), 1e-5).to(x.dtype)

    @staticmethod
    def rms_norm(x, weight_D, eps: float, scale=None):
        return F.rms_norm(x.float(), weight_D.shape, weight_D.float(), eps).to(x.dtype)

    @staticmethod
    def causal_attention(q_BTHK, k_BTGK, v_BTGK, starts_BT=None, saved: None = None, window: int = 0):
        """(output, None). The caller has divided q by sqrt(K)."""
        mask = None
        if starts_BT is not None or window:
            key = torch.arange(q_BTHK.shape[1], device=q_BTHK.device)
            mask = (key <= key[:, None]) & (key[:, None] < key + (window or len(key)))
            if starts_BT is not None:
                mask = (mask & (key >= starts_BT[..., None]))[:, None]  # (B, 1, T, T)
            # with a mask a GPU's fused kernel takes no grouped heads (torch 2.13)
            k_BTGK, v_BTGK = (x.repeat_interleave(q_BTHK.shape[2] // x.shape[2], 2) for x in (k_BTGK, v_BTGK))
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=1.0, enable_gqa=True)
        return out.transpose(1, 2), None

    @staticmethod
    def losses(logits_BTV, targets_BT, vocab_size: int, mesh=None):
        """As whole_row_losses() computes it, which torch_xla does not read."""
        from language.models.whole_row_loss import whole_row_losses

        return whole_row_losses(logits_BTV.flatten(0, -2), targets_BT.flatten(), vocab_size).view(targets_BT.shape)


contract = torch.einsum if IS_XLA else TorchOperations.contract

if not IS_XLA:
    add_bias = torch.add
    causal_attention = TorchOperations.causal_attention
    layer_norm = TorchOperations.layer_norm
    losses = TorchOperations.losses
    rms_norm = TorchOperations.rms_norm
