"""Sample from a trained transformer, with a key-value cache.

Run:     python generate_tpu.py --run_dir RUN --prompt "ROMEO:" --num_tokens 40
             from the newest checkpoint of a run of transformer_tpu.py,
             or from the best one: --checkpoint best
         python generate_tpu.py --llmc gpt2_124M.bin --prompt "Hello"
             from llm.c weights; needs tiktoken and its GPT-2 vocabulary

Expect:  two graphs, prefill and decode, whatever the length of the prompt.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config import TrainConfig
from llmc_files import GPT2_VOCAB_SIZE, read_header
from model_shapes import BYTE_VOCAB_SIZE, LlamaShape
from token_data import END_OF_DOCUMENT_BYTE, gpt2_encoding
from tpu_utils.environment import choose_device, command_line
from tpu_utils.errors import InputError, run_script
from tpu_utils.inputs import open_regular


@dataclass(frozen=True)
class GenerateConfig:
    """What to sample from, and how."""

    run_dir: str = ""
    """A run of transformer_tpu.py."""
    checkpoint: Literal["newest", "best"] = "newest"
    """Of the run. best: of its best evaluation, which a run with --keep_best keeps."""
    llmc: str = ""
    """llm.c's weights instead of a run."""
    prompt: str = ""
    """Text; token numbers such as '3 17 5' for synthetic data and a vocabulary of neither bytes nor GPT-2."""
    num_tokens: int | None = None
    """How many tokens follow. None: 100, or as many as the context has room for."""
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int = 0
    """Sample among the k likeliest tokens only. 0: among all."""
    seed: int = 0
    """Seeds the sampling."""
    device: Literal["auto", "tpu", "cpu"] = "auto"
    """auto takes a TPU when one is attached, else the XLA CPU backend."""
    debug: bool = False
    """Show the traceback of an error instead of its message alone."""

    def __post_init__(self):
        if bool(self.run_dir) == bool(self.llmc):
            raise InputError("give either --run_dir or --llmc")
        if self.llmc and self.checkpoint != "newest":
            raise InputError("checkpoint is best, but --llmc has no checkpoints; give --run_dir, or leave it out")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature is {self.temperature}; expected a finite number, 0 or more")
        if self.num_tokens is not None and self.num_tokens < 1:
            raise InputError(f"num_tokens is {self.num_tokens}; expected 1 or more")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; expected 0 or more")

    @property
    def for_device(self) -> TrainConfig:
        """As start_device wants it."""
        return TrainConfig(device=self.device, seed=self.seed)


def check_source(config: GenerateConfig) -> None:
    """Raises InputError when there is nothing to sample from, DeviceError when there is no such device."""
    choose_device(config.for_device)
    if config.llmc:
        with open_regular(Path(config.llmc), "an llm.c GPT-2 model") as file:
            read_header(file, "an llm.c GPT-2 model")
    elif not list(Path(config.run_dir, "checkpoints").glob("step_*/done")):
        raise InputError(f"{config.run_dir} holds no complete checkpoint to sample from; check --run_dir")


if __name__ == "__main__":  # a wrong option or file is answered before the seconds that the next imports take
    config = command_line(GenerateConfig, __doc__, check_source)

import torch
import torch.nn.functional as F
import torch_xla

import llama
from convert_llmc import read_model, read_run
from gpt import GPT, block
from layers import Decoder, split_layers
from llama import Llama, for_each_query
from operations import causal_attention, layer_norm
from tpu_utils.device import start_device
from tpu_utils.graphs import graphs_compiled
from tpu_utils.saved import load_model


def run_layers(model: Decoder, tokens_BT, positions_T, attention_of_layer):
    """Logits (B, T, V): the model's forward pass with an attention of its own in each layer."""
    cast, layers = model.cast()
    if isinstance(model, Llama):
        x = F.embedding(tokens_BT, model.token_embedding).to(model.compute_dtype)
        place = llama.angles(positions_T.float(), model.frequencies)
        for layer, weights in enumerate(layers):
            x = llama.block(x, weights, model.shape, attention_of_layer(layer), place=place)
        return model.head(x, cast)
    x = F.embedding(tokens_BT, model.token_embedding) + model.position_embedding.index_select(0, positions_T)
    x = x.to(model.compute_dtype)
    for layer, weights in enumerate(layers):
        x = block(x, weights, model.shape.num_heads, attention_of_layer(layer))
    return F.linear(layer_norm(x, cast["final_ln_weight"], cast["final_ln_bias"]), cast["token_embedding"])


class Cache:
    """Keys and values of every layer, (L, B, T, G, K), for the whole context; `position` is the next one to fill."""

    def __init__(self, model: Decoder, batch: int, device):
        shape = model.shape
        size = (shape.num_layers, batch, shape.sequence_length, shape.num_cached_heads, shape.head_dim)
        self.keys, self.values = (torch.zeros(size, dtype=model.compute_dtype).to(device) for _ in range(2))
        self.position = torch.zeros(1, dtype=torch.int32).to(device)
        self.everywhere = torch.arange(shape.sequence_length, dtype=torch.int32).to(device)


@torch_xla.compile(full_graph=True, name="prefill")
def prefill(model: Decoder, cache: Cache, tokens_BT, length):
    """Fill the cache from the prompt, padded to the whole context. Logits (B, V) after its last token."""
    kept = []

    def attention_of_layer(_):
        def attention(q, k, v, _):  # a prompt is one document
            kept.append((k, v))
            return causal_attention(q, for_each_query(k, q.shape[2]), for_each_query(v, q.shape[2]))

        return attention

    with torch.no_grad():
        logits = run_layers(model, tokens_BT, cache.everywhere, attention_of_layer)
        cache.keys.copy_(torch.stack([k for k, _ in kept]))
        cache.values.copy_(torch.stack([v for _, v in kept]))
        cache.position.copy_(length)
        last = (cache.everywhere == length - 1).float()
        return torch.einsum("btv,t->bv", logits.float(), last)[:, : model.shape.vocab_size]


@torch_xla.compile(full_graph=True, name="decode")
def decode(model: Decoder, cache: Cache, token_B):
    """Logits (B, V) after one more token; the cache and its position move on by one."""
    here = (cache.everywhere == cache.position)[:, None, None]  # (T, 1, 1); what lies after it is of no request yet
    seen = cache.everywhere <= cache.position
    keys, values = [], []

    def attention_of_layer(layer):
        def attention(q, k, v, _):  # a prompt is one document
            keys.append(torch.where(here, k, cache.keys[layer]))
            values.append(torch.where(here, v, cache.values[layer]))
            k, v = (for_each_query(x[-1], q.shape[2]) for x in (keys, values))
            p = torch.einsum("bthk,bshk->bhts", q.float(), k.float()).masked_fill(~seen, -1e30).softmax(-1)
            return torch.einsum("bhts,bshk->bthk", p.to(v.dtype), v)

        return attention

    with torch.no_grad():
        logits = run_layers(model, token_B[:, None], cache.position, attention_of_layer)
        cache.keys.copy_(torch.stack(keys))
        cache.values.copy_(torch.stack(values))
        cache.position.add_(1)
        return logits[:, 0, : model.shape.vocab_size].float()


def choose(logits_BV, noise_BV, temperature: float, top_k: int):
    """The next token of every row, (B,): argmax of logits / temperature + Gumbel noise is a sample of their softmax."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    if top_k:
        smallest = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest, -1e30)
    return (logits_BV / temperature + noise_BV).argmax(-1)


def generate(model: Decoder, prompt: list[int], config: GenerateConfig, device) -> list[int]:
    """num_tokens token numbers that follow the prompt. Raises InputError when they do not fit the context."""
    T, V = model.shape.sequence_length, model.shape.vocab_size
    if not prompt:
        raise InputError("the prompt is empty; expected at least one token")
    if wrong := [token for token in prompt if not 0 <= token < V]:
        raise InputError(f"token {wrong[0]} of the prompt is outside the vocabulary of {V}")
    room = T + 1 - len(prompt)  # the last token needs no place in the context
    num_tokens = config.num_tokens or max(1, min(100, room))
    if num_tokens > room:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and {num_tokens} are to follow, but the context is {T}; "
            f"shorten the prompt, or ask for at most {max(0, room)} tokens"
        )
    random = torch.Generator().manual_seed(config.seed)
    cache = Cache(model, 1, device)
    padded = torch.zeros(1, T, dtype=torch.int32)
    padded[0, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
    logits = prefill(model, cache, padded.to(device), torch.tensor([len(prompt)], dtype=torch.int32).to(device))
    found = []
    for left in reversed(range(num_tokens)):
        uniform = torch.rand(1, V, generator=random).clamp_min(1e-20)
        found.append(choose(logits.cpu(), -torch.log(-torch.log(uniform)), config.temperature, config.top_k))
        if left:
            logits = decode(model, cache, found[-1].to(torch.int32).to(device))
    return torch.cat(found).tolist()


def load(config: GenerateConfig) -> tuple[Decoder, str]:
    """The model on the host, and what its tokens are: "text" (bytes), "tokens" (GPT-2's) or "numbers" (others)."""
    if config.llmc:
        shape, tensors = read_model(Path(config.llmc))
        model = GPT(shape)
        model.load_state_dict(split_layers({name: tensor.float() for name, tensor in tensors.items()}))
        return model, kind_of_tokens("tokens", shape.vocab_size)
    trained, saved = read_run(Path(config.run_dir), config.checkpoint)
    kind = Llama if isinstance(trained.shape, LlamaShape) else GPT
    model = kind(trained.shape, torch.bfloat16 if trained.precision == "bfloat16" else torch.float32)
    load_model(model, saved.part("model"))
    return model, kind_of_tokens(trained.dataset, trained.shape.vocab_size)


def kind_of_tokens(dataset: str, vocab_size: int) -> str:
    """Shards tell by their vocabulary which tokenizer wrote them: those of prepare_data.py record it."""
    of_shards = {BYTE_VOCAB_SIZE: "text", GPT2_VOCAB_SIZE: "tokens"}.get(vocab_size, "numbers")
    return {"text": "text", "tokens": of_shards}.get(dataset, "numbers")


def prompt_tokens(prompt: str, dataset: str, encoding) -> list[int]:
    """Raises InputError for a prompt that is none for these tokens."""
    try:
        if dataset == "text":  # also bytes that are no text: so they come from the command line
            return [END_OF_DOCUMENT_BYTE, *prompt.encode(errors="surrogateescape")]
        if dataset == "tokens":
            prompt.encode()
            return [encoding.eot_token, *encoding.encode_ordinary(prompt)]
        return [int(number) for number in prompt.split()]
    except UnicodeEncodeError as error:
        raise InputError(f"prompt is {prompt!r:.60}; expected UTF-8 text") from error
    except ValueError as error:
        raise InputError(
            f"prompt is {prompt!r:.60}; expected token numbers such as '3 17 5': the model is of synthetic data or a "
            f"vocabulary of neither bytes ({BYTE_VOCAB_SIZE}) nor GPT-2 ({GPT2_VOCAB_SIZE}), whose tokenizer is unknown"
        ) from error


def main(config: GenerateConfig) -> int:
    model, dataset = load(config)
    encoding = gpt2_encoding() if dataset == "tokens" else None
    prompt = prompt_tokens(config.prompt, dataset, encoding)
    device = start_device(config.for_device)
    before = graphs_compiled()
    tokens = generate(model.to(device), prompt, config, device)
    if dataset == "text":
        print(bytes(token for token in prompt + tokens if token < 256).decode(errors="replace"))
    else:
        print(config.prompt + (encoding.decode(tokens) if encoding else " " + " ".join(map(str, tokens))))
    print(f"{len(tokens)} tokens, {graphs_compiled() - before} graphs", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(config), answers=True))
