"""Sampling with a key-value cache: two graphs, prefill and decode, whatever the length of the prompts.

Decode is a loop on the device over TOKENS tokens of each row: the host is asked once in so many. The torch.compile
backend has no such loop: there it is one token.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F

from language.generation.cached_attention import attend, heads_together, own_heads
from language.generation.sampling import SamplingOptions
from language.models.experts import mixture
from language.models.layers import Decoder
from language.models.llama import Llama
from language.models.operations import causal_attention
from language.options.shapes import ModelShape
from language.xla.loops import as_for_one_device
from tpu_utils.base.errors import InputError, NonFiniteError
from tpu_utils.device import IS_XLA, compile_step, device_type, mark_sharding, optimization_barrier_, register
from tpu_utils.device.dropout import GOLDEN, as_int32, mixed

if IS_XLA:
    from language.xla.device_loop import DeviceLoop

TOKENS = 32 if IS_XLA else 1
"""Tokens that one call of decode makes for each row, at most."""
NO_ANSWER = -2
"""In place of a token."""


def update_slot(cache, new, slot):
    return cache.dynamic_update_slice(new, [*[slot.zeros_like()] * 3, slot])


def index_slots(cache, new, slot):
    return cache.index_copy(-1, slot + torch.arange(new.shape[-1], device=new.device), new)


write_slot = register("write_slot", update_slot) if IS_XLA else index_slots
"""(cache, new, slot): the cache with new from one slot, (), of its last axis on; in place, where a loop holds it."""


class Cache:
    """Keys and values (B, G / n, n K, T) of each layer, of the G heads of keys and values, not of the H of queries;
    and where each row stands, as int32. n heads are one product, which reads this order without a copy.

    A prompt lies in the first slots. What follows lies behind the longest prompt, in the same slots in all rows: one
    token of all rows is one slice. A layer with a window has W slots instead: the last W tokens of each prompt, and
    then token after token in turn the one that is the oldest. num_tokens: at most so many follow. stops: tokens that
    end a row.
    """

    def __init__(
        self,
        model: Decoder,
        context: int,
        device,
        seeds: Sequence[int],
        num_tokens=1,
        stops: Sequence[int] = (),
        shapes_only=False,
    ):
        """shapes_only: keys and values are made on the device, where the compiler is asked and nothing runs."""
        shape, batch = model.shape, len(seeds)

        def placed(tensor, *axes) -> torch.Tensor:
            """On a mesh marked even where it is whole: else the program would, and the next one be another graph."""
            if model.mesh is not None:
                mark_sharding(tensor, model.mesh, axes or (None,) * tensor.dim())
            return tensor

        def send(values) -> torch.Tensor:
            return placed(torch.as_tensor(values, dtype=torch.int32).to(device))

        def zeros(*size: int) -> torch.Tensor:
            made = torch.zeros(size, dtype=model.compute_dtype, device=device if shapes_only else "cpu").to(device)
            return placed(made, None, "tensor", None, None)

        self.windows = [window if window < context else 0 for window in shape.windows]
        n = heads_together(shape, model.mesh) if shapes_only or device_type() == "TPU" else 1
        heads = (batch, shape.num_cached_heads // n, n * shape.head_dim)
        self.keys, self.values = ([zeros(*heads, window or context) for window in self.windows] for _ in range(2))
        self.is_own = placed(own_heads(shape, n).to(device)) if n > 1 else None
        self.slots, self.vocabulary = send(range(context)), send(range(shape.vocab_size))
        self.seed_B, self.stops = send([as_int32(seed) for seed in seeds]), send([*stops] or [-1])
        self.num_tokens = send([num_tokens])
        self.made = send([0])
        self.longest = send([0])
        self.length_B, self.token_B, self.is_over_B = (send([0] * batch) for _ in range(3))
        self.rows_B = send(range(batch))
        self.rows_N = send(range(TOKENS))
        self.tokens_NB = send([[0] * batch] * TOKENS)


def run_layers(model: Decoder, tokens_BT, positions, context, attention_of_layer, pick=lambda x_BTD: x_BTD):
    """Logits (B, V) of the position that `pick` keeps: the model's forward pass with another attention in each layer.

    positions: (T,), the same in all rows, or (B, 1). context: of the cache, by which rotations are for long texts.
    """
    # on a mesh of training too every device has all rows, which are few: what is sharded over it are the weights, and
    # the partitioner takes each product apart as they lie. Along "tensor" alone the experts' devices know their own
    mesh = model.mesh
    only_tensor = mesh is not None and mesh.shape()["tensor"] == mesh.size()
    with as_for_one_device(model, mesh if only_tensor else None) if mesh is not None else nullcontext():
        weights, layers = model.cast()
        if isinstance(model, Llama):
            x = model.embed(tokens_BT)
            for layer, (w, own) in enumerate(zip(layers, model.layer_kwargs(positions.float(), context), strict=True)):
                x, _ = model.layer(x, w, attention=attention_of_layer(layer), experts=mixture, **own)
        else:
            x = model.rows_of_tokens(tokens_BT) + F.embedding(positions, model.position_embedding)
            x = x.to(model.compute_dtype)
            for layer, w in enumerate(layers):
                x, _ = model.layer(x, w, attention=attention_of_layer(layer))
        logits = model.head(pick(x), weights)
    logits = logits[:, 0, : model.shape.vocab_size].float()
    # or the choice of a token can take the head's product into its own loop, in the vector unit: 80 ms for 0.3 on a v6e
    optimization_barrier_([logits])
    return logits


def next_tokens(cache: Cache, logits_BV, made, is_over_B, config: SamplingOptions):
    """(the next token of each row, how many that makes, rows that are over) after the `made` ones before it. A token is
    NO_ANSWER where the logits are no numbers."""
    token_B = choose(
        logits_BV,
        uniform(cache.seed_B, made, cache.vocabulary) if config.temperature else None,
        config.temperature,
        config.top_k,
        config.top_p,
    )
    # a sum keeps what is no number
    token_B = torch.where(torch.isfinite(logits_BV.sum(-1)), token_B, torch.full_like(token_B, NO_ANSWER))
    is_stop_B = (token_B[:, None] == cache.stops).int().amax(-1)
    return token_B, made + 1, torch.maximum(is_over_B, is_stop_B)


def is_end(cache: Cache, made, is_over_B):
    """(1,), whether nothing is left to do."""
    return (made >= cache.num_tokens) | (is_over_B.amin(0, keepdim=True) == torch.ones_like(made))


@compile_step
def prefill(model: Decoder, cache: Cache, tokens_BP, length_B, config: SamplingOptions) -> None:
    """Fill the cache from prompts, padded to one length, and choose the first token after each."""
    slots_P = cache.slots[: tokens_BP.shape[1]]
    is_last = (slots_P == length_B[:, None] - 1)[:, :, None]
    first = torch.zeros((), dtype=torch.int32, device=length_B.device)

    def last_of_rows(x_BPGK, window):
        """(B, W, G, K): the last W tokens of each prompt; before its first, that one."""
        at_BW = length_B[:, None] - window + cache.slots[:window]
        at_BW = torch.maximum(at_BW, torch.zeros_like(at_BW)) + (cache.rows_B * len(slots_P))[:, None]
        return x_BPGK.flatten(0, 1).index_select(0, at_BW.flatten()).unflatten(0, (-1, window))

    def attention_of_layer(layer):
        window = cache.windows[layer]

        def attention(q, k, v, *_):
            keys, values = (last_of_rows(x, window) if window else x for x in (k, v))
            for held, new in ((cache.keys[layer], keys), (cache.values[layer], values)):
                held.copy_(write_slot(held, new.permute(0, 2, 3, 1).reshape(*held.shape[:3], -1), first))
            return causal_attention(q, k, v, window=window)

        return attention

    with torch.no_grad():
        # before the head: logits of all tokens would be large. By a sum: a product with a one-hot mask rounds on a TPU
        last = lambda x_BPD: torch.where(is_last, x_BPD, 0.0).sum(1, keepdim=True)  # noqa: E731
        logits_BV = run_layers(model, tokens_BP, slots_P, len(cache.slots), attention_of_layer, last)
        made, is_over_B = torch.zeros_like(cache.made), torch.zeros_like(cache.is_over_B)
        token_B, made, is_over_B = next_tokens(cache, logits_BV, made, is_over_B, config)
        cache.length_B.copy_(length_B), cache.longest.copy_(length_B.amax(0, keepdim=True))
        cache.token_B.copy_(token_B), cache.made.copy_(made), cache.is_over_B.copy_(is_over_B)


def place_of(cache: Cache, window: int, place):
    """(slot, which slots each row sees, (B, T)) of the token that is `place` (1,) behind the prompts, from 0 on."""
    if not window:
        slot = cache.longest + place
        is_behind = (cache.slots >= cache.longest) & (cache.slots <= slot)
        return slot[0], (cache.slots < cache.length_B[:, None]) | is_behind
    slots_W, size = cache.slots[:window], torch.full_like(place, window)
    age_W = place - torch.remainder(place - slots_W, size)  # which token a slot has: below 0 in the prompt
    return torch.remainder(place, size)[0], age_W >= -cache.length_B[:, None]


def next_logits(model: Decoder, cache: Cache, keys: list, values: list, token_B, made):
    """Logits (B, V) after one more token of each row, the last of `made`; keys and values, a tensor for each layer, are
    replaced by those with this token's."""
    places = {window: place_of(cache, window, made - 1) for window in set(cache.windows)}

    def attention_of_layer(layer):
        slot, is_seen = places[cache.windows[layer]]

        def attention(q, k, v, *_):
            for held, new in ((keys, k), (values, v)):
                held[layer] = write_slot(held[layer], new.view(*held[layer].shape[:3], 1), slot)
            return attend(q, keys[layer], values[layer], is_seen, cache.is_own), None

        return attention

    position_B1 = (cache.length_B + made - 1)[:, None]
    token_B = torch.maximum(token_B, torch.zeros_like(token_B))  # a row without an answer
    return run_layers(model, token_B[:, None], position_B1, len(cache.slots), attention_of_layer)


def decode_loop(model: Decoder, cache: Cache, config: SamplingOptions) -> Callable:
    """The loop of decode: TOKENS tokens for each row, or fewer once all rows are over."""
    layers = model.shape.num_layers

    def body(count, made, token_B, is_over_B, tokens_NB, *caches):
        keys, values = list(caches[:layers]), list(caches[layers:])
        logits_BV = next_logits(model, cache, keys, values, token_B, made)
        token_B, made, is_over_B = next_tokens(cache, logits_BV, made, is_over_B, config)
        tokens_NB = torch.where((cache.rows_N == count)[:, None], token_B, tokens_NB)
        return after(count + 1, made, is_over_B), made, token_B, is_over_B, tokens_NB, *keys, *values

    def after(count, made, is_over_B):
        return torch.where(is_end(cache, made, is_over_B)[0], torch.full_like(count, TOKENS), count)

    if not IS_XLA:
        return body
    held = [cache.slots, cache.vocabulary, cache.seed_B, cache.stops]
    held += [] if cache.is_own is None else [cache.is_own]
    held += [cache.num_tokens, cache.longest, cache.length_B, cache.rows_N]
    return DeviceLoop(body, TOKENS, lambda: held, model)


@compile_step
def decode(loop: Callable, cache: Cache) -> None:
    """Up to TOKENS more tokens of each row, into cache.tokens_NB; of rows that are over they mean nothing."""
    first = torch.zeros((), dtype=torch.int32, device=cache.made.device)
    count = torch.where(is_end(cache, cache.made, cache.is_over_B)[0], torch.full_like(first, TOKENS), first)
    state = [cache.made, cache.token_B, cache.is_over_B, cache.tokens_NB, *cache.keys, *cache.values]
    with torch.no_grad():
        for tensor, new in zip(state, loop(count, *state)[1:], strict=True):
            tensor.copy_(new)


def uniform(seed_B, made, vocabulary):
    """Random numbers from 0 to 1, (B, V): a hash of the row's seed, how many tokens it has, and the token."""
    key_B = mixed(seed_B + mixed(made * GOLDEN))
    bits = mixed(key_B[:, None] + vocabulary * GOLDEN) & 0x7FFFFFFF
    return (bits.float() + 0.5) * 2.0**-31


def choose(logits_BV, uniform_BV, temperature: float, top_k: int, top_p: float):
    """The next token of each row, (B,) int32: argmax of logits / temperature + Gumbel noise, drawn from their softmax.

    uniform_BV: random numbers from 0 to 1. top_k is taken before top_p, as in Hugging Face's generate.
    """
    if temperature == 0:
        return logits_BV.argmax(-1).int()
    logits_BV = logits_BV / temperature
    if 0 < top_k < logits_BV.shape[-1]:
        is_in = likeliest(logits_BV, torch.ones_like(logits_BV), top_k)
        logits_BV = logits_BV.masked_fill(~is_in, -torch.inf)
    if top_p < 1:
        p = logits_BV.softmax(-1)
        logits_BV = logits_BV.masked_fill(~likeliest(p, p, top_p), -torch.inf)
    return (logits_BV - torch.log((-torch.log1p(-uniform_BV)).clamp_min(1e-20))).argmax(-1).int()


def likeliest(values_BV, weights_BV, enough: float):
    """Which are the fewest greatest values whose weights add up to `enough`; equal ones stay together.

    The bound is found by halving the range 32 times, to within 2^-32 of it: a sort takes longer on a TPU.
    """
    low, high = values_BV.amin(-1, keepdim=True), values_BV.amax(-1, keepdim=True)
    for _ in range(32):
        middle = (low + high) * 0.5
        is_enough = torch.where(values_BV >= middle, weights_BV, 0.0).sum(-1, keepdim=True) >= enough
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
    return values_BV >= low


def rounded_up(length: int) -> int:
    """To 128, the lanes of a TPU."""
    return -(-length // 128) * 128


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
    return num_tokens, context or min(longest, rounded_up(most + num_tokens - 1))


def rows_of(prompts: int, device_type: str) -> int:
    """One prompt is two equal rows on a TPU: the products of one row would be sums in its vector unit."""
    return 2 if prompts == 1 and device_type == "TPU" else prompts


def generate(
    model: Decoder,
    prompts: list[list[int]],
    config: SamplingOptions,
    device,
    ends: Callable[[list[int]], bool] = lambda tokens: False,
    context=0,
    stops: Sequence[int] = (),
) -> list[list[int]]:
    """The tokens that follow each prompt: num_tokens, or up to the first that is one of stops, or after which
    ends(tokens) is true. The device knows of stops; ends is asked when TOKENS more have come.

    A continuation does not depend on the other prompts, except that equal prompts draw different numbers. Raises
    InputError when prompts do not fit the context, NonFiniteError for logits that are no numbers.
    """
    num_tokens, context = check_lengths(model.shape, prompts, config.num_tokens, context)
    # a seed for each prompt: of config.seed, its tokens, and how many equal prompts came before it
    drawn = [repr((config.seed, prompt, prompts[:row].count(prompt))) for row, prompt in enumerate(prompts)]
    copies = rows_of(len(prompts), device_type()) // len(prompts)
    rows, seeds = prompts * copies, [zlib.crc32(text.encode()) for text in drawn] * copies
    cache = Cache(model, context, device, seeds, num_tokens, sorted(stops))
    padded = torch.zeros(len(rows), min(context, rounded_up(max(map(len, rows)))), dtype=torch.int32)
    for row, prompt in zip(padded, rows, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    prefill(model, cache, padded.to(device), lengths.to(device), config)
    found: list[list[int]] = [[] for _ in prompts]
    is_done = [False] * len(prompts)
    loop = decode_loop(model, cache, config)
    come = cache.token_B.cpu()[None]
    while True:
        for row, tokens in enumerate(found):
            for token in come[:, row].tolist():
                if not is_done[row]:
                    if token == NO_ANSWER:
                        raise NonFiniteError(
                            f"the logits behind {len(prompts[row]) + len(tokens)} tokens are infinite or not a number; "
                            "expected numbers; try --precision float32, or an earlier checkpoint"
                        )
                    tokens.append(token)
                    is_done[row] = len(tokens) == num_tokens or token in stops or ends(tokens)
        if all(is_done):
            return found
        decode(loop, cache)
        come = cache.tokens_NB.cpu()
