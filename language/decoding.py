"""Sampling with a key-value cache: two graphs, prefill and decode, whatever the length of the prompts."""

import math
import zlib

import torch
import torch.nn.functional as F
import torch_xla

from language import gpt, llama
from language.layers import Decoder
from language.operations import causal_attention, layer_norm
from language.sampling import SamplingOptions
from language.shapes import ModelShape
from tpu_utils.errors import InputError


class Cache:
    """Keys and values of each layer, (B, T, G, K), of the G heads of keys and values, not of the H heads of queries.

    position (B,): the next one to fill, in each row; what lies after it belongs to no token yet.
    """

    def __init__(self, model: Decoder, batch: int, context: int, device):
        shape = model.shape
        zeros = torch.zeros(batch, context, shape.num_cached_heads, shape.head_dim, dtype=model.compute_dtype)
        self.keys, self.values = ([zeros.to(device) for _ in range(shape.num_layers)] for _ in range(2))
        self.position = torch.zeros(batch, dtype=torch.int32).to(device)
        self.everywhere = torch.arange(context, dtype=torch.int32).to(device)


def run_layers(model: Decoder, tokens_BT, positions, attention_of_layer, pick=lambda x_BTD: x_BTD):
    """The model's forward pass with another attention in each layer. Logits of the positions that `pick` keeps.

    positions: (T,), the same in all rows, or (B, 1).
    """
    weights, layers = model.cast()
    x = F.embedding(tokens_BT, model.token_embedding)
    if isinstance(model, llama.Llama):
        x, rotations = x.to(model.compute_dtype), llama.angles(positions.float(), model.frequencies)
        for layer, w in enumerate(layers):
            x = llama.block(x, w, model.shape, attention_of_layer(layer), shared=rotations)
        return model.head(pick(x), weights)
    x = (x + F.embedding(positions, model.position_embedding)).to(model.compute_dtype)
    for layer, w in enumerate(layers):
        x = gpt.block(x, w, model.shape.num_heads, attention_of_layer(layer))
    x = layer_norm(pick(x), weights["final_ln_weight"], weights["final_ln_bias"])
    return F.linear(x, weights["token_embedding"])


@torch_xla.compile(full_graph=True, name="prefill")
def prefill(model: Decoder, cache: Cache, tokens_BT, length_B):
    """Fill the cache from prompts, each padded to the whole context. Logits (B, V) after the last token of each."""
    is_last = (cache.everywhere == length_B[:, None] - 1)[:, :, None]

    def attention_of_layer(layer):
        def attention(q, k, v, *_):
            cache.keys[layer].copy_(k)
            cache.values[layer].copy_(v)
            return causal_attention(q, k, v)

        return attention

    with torch.no_grad():
        cache.position.copy_(length_B)
        # before the head: logits of all tokens would be large. By a sum: a product with a one-hot mask rounds on a TPU
        last = lambda x_BTD: torch.where(is_last, x_BTD, 0.0).sum(1, keepdim=True)  # noqa: E731
        logits = run_layers(model, tokens_BT, cache.everywhere, attention_of_layer, last)
        return logits[:, 0, : model.shape.vocab_size].float()


@torch_xla.compile(full_graph=True, name="decode")
def decode(model: Decoder, cache: Cache, token_B):
    """Logits (B, V) after one more token of each row; the cache and its positions move on by one."""
    is_here = (cache.everywhere == cache.position[:, None])[:, :, None, None]
    is_seen = (cache.everywhere <= cache.position[:, None])[:, None, None]

    def attention_of_layer(layer):
        def attention(q, k, v, *_):
            # the whole cache is rewritten: by libtpu's estimate a scatter of the new row takes three times as long
            keys, values = torch.where(is_here, k, cache.keys[layer]), torch.where(is_here, v, cache.values[layer])
            cache.keys[layer].copy_(keys)
            cache.values[layer].copy_(values)
            grouped = q.view(len(q), keys.shape[2], -1, q.shape[3]).float()  # (B, G, R, K): R heads share a key
            scores = torch.einsum("bghk,bsgk->bghs", grouped, keys.float()).masked_fill(~is_seen, -1e30)
            return torch.einsum("bghs,bsgk->bghk", scores.softmax(-1).to(v.dtype), values).view(q.shape)

        return attention

    with torch.no_grad():
        logits = run_layers(model, token_B[:, None], cache.position[:, None], attention_of_layer)
        cache.position.add_(1)
        return logits[:, 0, : model.shape.vocab_size].float()


def choose(logits_BV, uniform_BV, temperature: float, top_k: int, top_p: float):
    """The next token of every row, (B,): argmax of logits / temperature + Gumbel noise is a sample of their softmax.

    uniform_BV: random numbers from 0 to 1. top_k is taken before top_p, as in Hugging Face's generate.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV / temperature
    if top_k:
        smallest = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest, -math.inf)
    if top_p < 1:
        likeliest, order = logits_BV.sort(descending=True, stable=True)
        p = likeliest.softmax(-1)
        is_out = p.cumsum(-1) - p >= top_p  # likelier ones reach top_p; the first always stays
        logits_BV = logits_BV.masked_fill(torch.zeros_like(is_out).scatter(-1, order, is_out), -math.inf)
    return (logits_BV - torch.log(-torch.log(uniform_BV.clamp_min(1e-20)))).argmax(-1)


def check_lengths(
    shape: ModelShape, prompts: list[list[int]], num_tokens: int | None = None, context: int = 0
) -> tuple[int, int]:
    """(tokens that follow, context of the cache). Raises InputError when they do not fit the model."""
    longest = context or shape.sequence_length
    if longest > shape.sequence_length:
        raise InputError(f"context is {longest}, but the model reads {shape.sequence_length} tokens; lower --context")
    for number, prompt in enumerate(prompts, 1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if not prompt:
            raise InputError(f"{which} is empty; expected at least one token")
        if wrong := [token for token in prompt if not 0 <= token < shape.vocab_size]:
            raise InputError(f"token {wrong[0]} of {which} is outside the vocabulary of {shape.vocab_size}")
        room = longest + 1 - len(prompt)  # the last token needs no place in the context
        if room < (num_tokens or 1):
            raise InputError(
                f"{which} has {len(prompt)} tokens and {num_tokens or 1} are to follow, but the context is "
                f"{longest}; shorten the prompt, or ask for at most {max(0, room)} tokens"
            )
    most = max(map(len, prompts))
    num_tokens = num_tokens or min(100, longest + 1 - most)
    return num_tokens, context or min(longest, -(-(most + num_tokens - 1) // 128) * 128)


def generate(
    model: Decoder, prompts: list[list[int]], config: SamplingOptions, device, ends=lambda tokens: False, context=0
) -> list[list[int]]:
    """The tokens that follow each prompt: num_tokens, or up to the first after which ends(tokens) is true.

    A continuation does not depend on the other prompts, except that equal prompts draw different numbers. Raises
    InputError when prompts do not fit the context.
    """
    num_tokens, context = check_lengths(model.shape, prompts, config.num_tokens, context)
    # a seed for each prompt: of config.seed, its tokens, and how many equal prompts came before it
    drawn = [repr((config.seed, prompt, prompts[:row].count(prompt))) for row, prompt in enumerate(prompts)]
    seeds = [zlib.crc32(text.encode()) for text in drawn]
    random = [torch.Generator().manual_seed(seed) for seed in seeds]
    # one row alone is slower on a TPU than two: its products become sums in the vector unit
    rows = prompts if len(prompts) > 1 else prompts * 2
    cache = Cache(model, len(rows), context, device)
    padded = torch.zeros(len(rows), context, dtype=torch.int32)
    for row, prompt in zip(padded, rows, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    logits = prefill(model, cache, padded.to(device), lengths.to(device))
    found: list[list[int]] = [[] for _ in prompts]
    is_done = [False] * len(prompts)
    while True:
        uniform = torch.stack([torch.rand(model.shape.vocab_size, generator=generator) for generator in random])
        token_B = choose(logits.cpu()[: len(prompts)], uniform, config.temperature, config.top_k, config.top_p)
        for row, token in enumerate(token_B.tolist()):
            if not is_done[row]:
                found[row].append(token)
                is_done[row] = len(found[row]) == num_tokens or ends(found[row])
        if all(is_done):
            return found
        token_B = token_B.expand(len(rows)) if len(prompts) == 1 else token_B
        logits = decode(model, cache, token_B.to(torch.int32).to(device))
