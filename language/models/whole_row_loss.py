"""Cross-entropy for torch's compiler: one kernel computes it and its gradient, in the place of the logits."""

import torch


def whole_row_losses(logits_NV, targets_N, vocab_size: int):
    """Loss in nats of every target, (N,) float32. Padded columns, from vocab_size on, get no probability; a negative
    target, of any value, has a loss of 0.

    inductor fuses what goes over the same rows, and a step's graph holds both passes. So padding is masked, not left
    out: 50,257 columns are another loop than the 50,304 of the gradient, and no whole vectors, so that a GPU reads
    them one by one. The target's logit is a masked sum: a gather would read the logits after their gradient could
    have taken their place. By the clamp, which changes no value, the gradient needs that sum, which so comes first.
    """
    column = torch.arange(logits_NV.shape[-1], device=logits_NV.device, dtype=targets_N.dtype)
    if len(column) > vocab_size:
        logits_NV = logits_NV.masked_fill(column >= vocab_size, -1e30)
    z, target = logits_NV.float(), targets_N[:, None]
    largest = z.detach().amax(-1, keepdim=True)
    logsumexp = largest + (z - largest).exp().sum(-1, keepdim=True).log()
    picked = torch.where(column == target, z, 0.0).sum(-1, keepdim=True)
    return torch.where(target < 0, 0.0, (logsumexp - picked).clamp(min=0.0)).flatten()
