"""Logits of a model that decodes with its cache and is told the tokens, for tests."""

import torch
import torch_xla

from language.generation import decoding
from language.generation.sampling import SamplingOptions
from language.models.layers import Decoder


@torch_xla.compile(full_graph=True, name="logits")
def logits_after(model: Decoder, cache: decoding.Cache, token_B) -> torch.Tensor:
    keys, values = list(cache.keys), list(cache.values)
    with torch.no_grad():
        logits = decoding.next_logits(model, cache, keys, values, token_B, cache.made)
    for old, new in zip(cache.keys + cache.values, keys + values, strict=True):
        old.copy_(new)
    cache.made.add_(1)
    return logits


def cached_logits(model: Decoder, tokens_BT, lengths: list[int]) -> tuple[list[int], torch.Tensor, decoding.Cache]:
    """(the likeliest token after each prompt, logits (N, B, V) after each token behind the prompts, the cache). Prompts
    are the first of a row's tokens; the rest of their row is padded."""
    device, (batch, context) = torch_xla.device(), tokens_BT.shape
    cache, at = decoding.Cache(model, context, device, [0] * batch), torch.tensor(lengths)
    padded = torch.where(torch.arange(context) < at[:, None], tokens_BT, 7).int().to(device)
    decoding.prefill(model, cache, padded, at.int().to(device), SamplingOptions(temperature=0.0))
    first, found = cache.token_B.tolist(), []
    while at.max() < context:
        found.append(logits_after(model, cache, tokens_BT.gather(1, at[:, None])[:, 0].int().to(device)).cpu())
        at += 1
    return first, torch.stack(found), cache
