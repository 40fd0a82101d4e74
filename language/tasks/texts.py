"""Texts that tasks of lm_eval ask a model to write."""

import json
from collections.abc import Collection, Sequence

from tqdm import tqdm

from language.data.tokenizer import Tokenizer
from language.generation.decoding import generate
from language.generation.sampling import SamplingOptions
from language.models.layers import Decoder
from tpu_utils.base.errors import InputError

KNOWN = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")


def write_texts(
    model: Decoder, tokenizer: Tokenizer, prompts: Sequence[tuple], T: int, tokens: int, device, stops: Collection = ()
) -> list[str]:
    """What follows each (tokens, generation_kwargs of lm_eval), tokens / T of them at a time: one graph of decoding,
    one of prefill for each multiple of 128 tokens. A prompt that is too long loses its beginning. stops: tokens that
    end a text beside the tokenizer's own. Raises InputError."""
    stops = tokenizer.stops.union(stops)
    texts = [""] * len(prompts)
    T = min(T, model.shape.sequence_length)
    size = max(1, tokens // T)
    groups: dict[str, list[int]] = {}
    for number, (_, options) in enumerate(prompts):
        groups.setdefault(json.dumps(options, sort_keys=True), []).append(number)
    for members in groups.values():
        until, sampling = sampling_of(prompts[members[0]][1], T)
        encoded = {number: prompts[number][0][-(T - sampling.num_tokens) :] for number in members}
        members.sort(key=lambda number: len(encoded[number]))

        def ends(written: list[int], until=until) -> bool:
            return any(stop in tokenizer.decode(written) for stop in until)

        for first in tqdm(range(0, len(members), size), "texts", leave=False, disable=None):
            some = members[first : first + size]
            batch = [encoded[number] for number in some] + [encoded[some[0]]] * (size - len(some))
            found = generate(model, batch, sampling, device, ends, T, stops)
            for number, written in zip(some, found, strict=False):
                text = tokenizer.decode([token for token in written if token not in stops])
                texts[number] = text[: min((text.find(stop) for stop in until if stop in text), default=None)]
    return texts


def sampling_of(options: dict, T: int) -> tuple[list[str], SamplingOptions]:
    """(texts that end a continuation, how it is drawn). Raises InputError for what is not known here."""
    if wrong := [name for name in options if name not in KNOWN]:
        raise InputError(f"generation_kwargs has {wrong[0]!r:.60}; expected {', '.join(KNOWN)}")
    until, most = options.get("until") or [], options.get("max_gen_toks", 256)
    if not isinstance(most, int) or not 0 < most < T:
        raise InputError(f"max_gen_toks is {most!r:.60}; expected 1 to {T - 1}, what the model reads")
    drawn = {name: options[name] for name in ("temperature", "top_k", "top_p") if name in options}
    if not options.get("do_sample", drawn.get("temperature", 0.0) > 0):
        drawn = dict(temperature=0.0)
    return [until] if isinstance(until, str) else until, SamplingOptions(num_tokens=most, **drawn)
