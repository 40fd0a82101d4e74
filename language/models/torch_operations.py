"""Operations of operations.py by torch's own, for torch's compiler: its graphs can lose the gradient of a Function.

torch 2.11 does, without a word (docs/torchtpu.md). Same names, arguments and results.
"""

import torch
import torch.nn.functional as F


def contract(equation: str, x_BTI, weight):
    """What layers.product() computes, as a product of matrices. An einsum is a batch of one product; cuBLAS has other
    kernels for a batch, which may not divide a sum over all rows, as a weight's gradient is, among multiprocessors."""
    inputs = x_BTI.dim() - 2  # axes that are summed over, the last of both
    y = F.linear(x_BTI.flatten(2), weight.flatten(-inputs).flatten(0, -2))
    return y.view(*x_BTI.shape[:2], *weight.shape[:-inputs])


def layer_norm(x, weight_D, bias_D):
    return F.layer_norm(x.float(), weight_D.shape, weight_D.float(), bias_D.float(), 1e-5).to(x.dtype)


def rms_norm(x, weight_D, eps: float, scale=None):
    """scale: not used; kept between passes under torch_xla alone."""
    return F.rms_norm(x.float(), weight_D.shape, weight_D.float(), eps).to(x.dtype)


def causal_attention(q_BTHK, k_BTGK, v_BTGK, starts_BT=None, saved: None = None, window: int = 0):
    """(output, None). The caller has divided q by sqrt(K). saved: kept between passes under torch_xla alone."""
    visible = None
    if starts_BT is not None or window:
        key = torch.arange(q_BTHK.shape[1], device=q_BTHK.device)
        query = key[:, None]
        visible = key <= query
        if window:
            visible = visible & (query < key + window)
        if starts_BT is not None:
            visible = (visible & (key >= starts_BT[..., None]))[:, None]  # (B, 1, T, T)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=1.0, enable_gqa=True
    )
    return out.transpose(1, 2), None


def losses(logits_BTV, targets_BT, vocab_size: int, mesh=None):
    """Padded columns get no probability; a negative target, of any value, has a loss of 0."""
    logits, targets = logits_BTV[..., :vocab_size].float().flatten(0, -2), targets_BT.flatten().clamp(min=-1).long()
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none").view(targets_BT.shape)
