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

    position (B,): the next one to fill, in each row; what lies after it belongs to no token yet. A layer with a window
    has a ring of W places. ages (W,): how far behind the end of its row's prompt the token in a place is, below 0
    in the prompt. So all rows fill the same place, which is the one of age n - W.
    """

    def __init__(self, model: Decoder, batch: int, context: int, device):
        shape = model.shape
        self.windows = [window if window < context else 0 for window in shape.windows]
        zeros = [
            torch.zeros(batch, window or context, shape.num_cached_heads, shape.head_dim, dtype=model.compute_dtype)
            for window in self.windows
        ]
        self.keys, self.values = ([layer.to(device) for layer in zeros] for _ in range(2))
        self.window = max(self.windows)
        if self.window:
            ages = torch.arange(-self.window, 0, dtype=torch.int32)
            self.ages, self.oldest = ages.to(device), ages[:1].to(device)
            self.first_row = (torch.arange(batch, dtype=torch.int32)[:, None] * context).to(device)
            self.length = torch.zeros(batch, 1, dtype=torch.int32).to(device)
        self.position = torch.zeros(batch, dtype=torch.int32).to(device)
        self.everywhere = torch.arange(context, dtype=torch.int32).to(device)


def run_layers(model: Decoder, tokens_BT, positions, context, attention_of_layer, pick=lambda x_BTD: x_BTD):
    """The model's forward pass with another attention in each layer. Logits of the positions that `pick` keeps.

    positions: (T,), the same in all rows, or (B, 1). context: of the cache, by which rotations are for long texts.
    """
    weights, layers = model.cast()
    if isinstance(model, llama.Llama):
        x = model.embed(tokens_BT)
        for layer, (w, own) in enumerate(zip(layers, model.of_blocks(positions.float(), context), strict=True)):
            x = llama.block(x, w, model.shape, attention_of_layer(layer), **own)
        return model.head(pick(x), weights)
    x = F.embedding(tokens_BT, model.token_embedding) + F.embedding(positions, model.position_embedding)
    x = x.to(model.compute_dtype)
    for layer, w in enumerate(layers):
        x = gpt.block(x, w, model.shape.num_heads, attention_of_layer(layer))
    x = layer_norm(pick(x), weights["final_ln_weight"], weights["final_ln_bias"])
    return F.linear(x, weights["token_embedding"])


@torch_xla.compile(full_graph=True, name="prefill")
def prefill(model: Decoder, cache: Cache, tokens_BT, length_B):
    """Fill the cache from prompts, each padded to the whole context. Logits (B, V) after the last token of each."""
    is_last = (cache.everywhere == length_B[:, None] - 1)[:, :, None]

    if cache.window:  # the last W tokens of each prompt, in rows of (B T, G, K)
        last_BW = length_B[:, None] + cache.ages
        last_BW = (torch.maximum(last_BW, torch.zeros_like(last_BW)) + cache.first_row).flatten()

    def attention_of_layer(layer):
        def attention(q, k, v, *_):
            for held, new in ((cache.keys[layer], k), (cache.values[layer], v)):
                is_ring = cache.windows[layer]
                held.copy_(new.flatten(0, 1).index_select(0, last_BW).view(held.shape) if is_ring else new)
            return causal_attention(q, k, v, window=cache.windows[layer])

        return attention

    with torch.no_grad():
        cache.position.copy_(length_B)
        if cache.window:
            cache.length.copy_(length_B[:, None])
        # before the head: logits of all tokens would be large. By a sum: a product with a one-hot mask rounds on a TPU
        last = lambda x_BTD: torch.where(is_last, x_BTD, 0.0).sum(1, keepdim=True)  # noqa: E731
        logits = run_layers(model, tokens_BT, cache.everywhere, tokens_BT.shape[1], attention_of_layer, last)
        return logits[:, 0, : model.shape.vocab_size].float()


@torch_xla.compile(full_graph=True, name="decode")
def decode(model: Decoder, cache: Cache, token_B):
    """Logits (B, V) after one more token of each row; the cache and its positions move on by one."""
    here = (cache.everywhere == cache.position[:, None])[:, :, None, None]
    masks = {0: (here, (cache.everywhere <= cache.position[:, None])[:, None, None])}
    if cache.window:
        newest = cache.position[:1] - cache.length[0]
        is_oldest = cache.ages == newest + cache.oldest
        ages = torch.where(is_oldest, newest, cache.ages)
        masks[cache.window] = is_oldest[:, None, None], (ages >= -cache.length)[:, None, None]  # none before a prompt

    def attention_of_layer(layer):
        is_here, is_seen = masks[cache.windows[layer]]

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
        context = len(cache.everywhere)
        logits = run_layers(model, token_B[:, None], cache.position[:, None], context, attention_of_layer)
        cache.position.add_(1)
        if cache.window:
            cache.ages.copy_(ages)
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
