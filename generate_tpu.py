"""Sample from a language model, with a key-value cache.

Run:     python generate_tpu.py --run_dir RUN --prompt "ROMEO:" --num_tokens 40
             from the newest checkpoint of a run of transformer_tpu.py,
             or from the best one: --checkpoint best
         python generate_tpu.py --hf Qwen3-0.6B/ --prompt "One" "A second"
             from a folder of Hugging Face (GPT-2, Llama, Qwen3), two at once
         python generate_tpu.py --hf Qwen3-0.6B/ --chat "Who are you?"
             a question to a model that was trained on conversations
         python generate_tpu.py --llmc gpt2_124M.bin --prompt "Hello"
             from llm.c weights; needs tiktoken and its GPT-2 vocabulary
         python generate_tpu.py --onnx OUT --prompt "Hello"
             from a folder of export_onnx.py, by onnxruntime, without torch

Expect:  two graphs, prefill and decode, whatever the length of the prompts.
"""

import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import chat_data
from config import TrainConfig, TransformerConfig
from llmc_files import GPT2_VOCAB_SIZE, read_header
from model_shapes import BYTE_VOCAB_SIZE, LlamaShape, ModelShape, shape_of
from tokenizer import Numbers, Tokenizer, load_tokenizer
from tpu_utils.environment import choose_device, command_line
from tpu_utils.errors import InputError, run_script
from tpu_utils.inputs import open_regular, read_json


@dataclass(frozen=True)
class GenerateConfig:
    """What to sample from, and how."""

    run_dir: str = ""
    """A run of transformer_tpu.py."""
    checkpoint: Literal["newest", "best"] = "newest"
    """Of the run. best: of its best evaluation, which a run with --keep_best keeps."""
    hf: str = ""
    """A folder of Hugging Face instead: config.json, safetensors, tokenizer.json."""
    llmc: str = ""
    """llm.c's weights instead."""
    onnx: str = ""
    """A folder that export_onnx.py wrote instead: by onnxruntime, on the host, sampled as the page in web/ does."""
    tokenizer: str = ""
    """bytes, gpt2, numbers, a tokenizer.json or its folder. Empty: that of the run or folder, else by the size of the
    vocabulary: 257 are bytes, 50257 GPT-2's, others take token numbers such as '3 17 5'."""
    prompt: tuple[str, ...] = ("",)
    """One text or several, which are continued together."""
    chat: tuple[str, ...] = ()
    """Questions instead, each a conversation of its own; the answers are printed."""
    chat_format: Literal["auto", "plain", "chatml", "qwen3", "llama3"] = "auto"
    """How a question becomes text. auto: as the run was trained, else by the special tokens of the tokenizer."""
    num_tokens: int | None = None
    """At most so many tokens follow. None: 100, or as many as the context has room for."""
    context: int = 0
    """Tokens that the cache has room for. 0: as many as this needs, rounded up to 128."""
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int = 0
    """Sample among the k likeliest tokens only. 0: among all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens whose probabilities add up to this. 1: among all."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation, beside the end tokens of the tokenizer or of the chat format."""
    seed: int = 0
    """Seeds the sampling, of each prompt by itself."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and computation. auto: that of the run, or of the files."""
    device: Literal["auto", "tpu", "cpu"] = "auto"
    """auto takes a TPU when one is attached, else the XLA CPU backend."""
    debug: bool = False
    """Show the traceback of an error instead of its message alone."""

    def __post_init__(self):
        if bool(self.run_dir) + bool(self.llmc) + bool(self.hf) + bool(self.onnx) != 1:
            raise InputError("give one of --run_dir, --hf, --llmc and --onnx")
        fixed = dict(tokenizer="", context=0, precision="auto", device="auto")
        if self.onnx and (given := [name for name, value in fixed.items() if getattr(self, name) != value]):
            raise InputError(f"{given[0]} has no effect with --onnx, whose folder says it; leave it out")
        if not self.run_dir and self.checkpoint != "newest":
            raise InputError("checkpoint is best, but only a --run_dir has checkpoints; leave it out")
        if self.chat and self.prompt not in ((), ("",)):
            raise InputError("found both --prompt and --chat; expected one of them")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature is {self.temperature}; expected a finite number, 0 or more")
        if self.num_tokens is not None and self.num_tokens < 1:
            raise InputError(f"num_tokens is {self.num_tokens}; expected 1 or more")
        if self.top_k < 0 or self.context < 0:
            raise InputError(f"top_k is {self.top_k}, context is {self.context}; expected 0 or more of both")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; expected above 0, at most 1")
        if not all(self.stop):
            raise InputError("a text of --stop is empty; expected at least one character")

    @property
    def for_device(self) -> TrainConfig:
        """As start_device wants it."""
        return TrainConfig(device=self.device, seed=self.seed)


def check_source(config: GenerateConfig) -> None:
    """Raises InputError when there is nothing to sample from, DeviceError when there is no such device."""
    if config.onnx:
        return
    choose_device(config.for_device)
    if config.llmc:
        with open_regular(Path(config.llmc), "an llm.c GPT-2 model") as file:
            read_header(file, "an llm.c GPT-2 model")
    elif config.hf:
        path = Path(config.hf) / "config.json"
        shape_of(read_json(path, "the configuration of a Hugging Face model"), str(path))
    elif not list(Path(config.run_dir, "checkpoints").glob("step_*/done")):
        raise InputError(f"{config.run_dir} holds no complete checkpoint to sample from; check --run_dir")


if __name__ == "__main__":  # a wrong option or file is answered before the seconds that the next imports take
    config = command_line(GenerateConfig, __doc__, check_source)
    if config.onnx:
        import onnx_generate

        sys.exit(run_script(lambda: onnx_generate.main(config), answers=True))

import torch
import torch.nn.functional as F
import torch_xla

import gpt
import llama
from convert_llmc import read_model
from hf_files import open_weights
from layers import Decoder, is_matrix, load_weights, split_layers
from operations import causal_attention, layer_norm
from run_weights import read_merged, read_run, tokenizer_folders
from tpu_utils.device import start_device
from tpu_utils.graphs import graphs_compiled


@dataclass(frozen=True)
class Source:
    """A model to sample from, not loaded yet."""

    shape: ModelShape
    dtype: torch.dtype
    """Of weights and computation."""
    read: Callable[[str], torch.Tensor]
    """A parameter by its name in our model, with what adapters add to it."""
    tokenizer: Tokenizer
    start: int | None
    """What stands before a text; None: nothing."""
    chat_format: str


def open_source(config: GenerateConfig) -> Source:
    """Raises InputError for what is damaged or of another kind; the weights are read later."""
    chat_format, trained_here = "auto", not config.hf
    if config.llmc:
        shape, stacked = read_model(Path(config.llmc))
        own, dtype, read = "", torch.float32, split_layers(stacked).__getitem__
    elif config.hf:
        weights = open_weights(Path(config.hf))
        shape, own, read = weights.shape, config.hf if Path(config.hf, "tokenizer.json").exists() else "", weights.read
        dtype = torch.bfloat16 if weights.kind("final_ln_weight").dtype == torch.bfloat16 else torch.float32
    else:
        trained, saved = read_run(Path(config.run_dir), config.checkpoint)
        shape, own = trained.shape, tokenizer_of_run(trained, Path(config.run_dir))
        scale = trained.lora_alpha / trained.lora_rank if trained.lora_rank else 0.0
        read = lambda name: read_merged(saved, name, scale)  # noqa: E731
        dtype, chat_format = getattr(torch, trained.precision), trained.chat_format
        trained_here = saved.step > 0  # at step 0 convert_hf.py has made it
    name = config.tokenizer or own or {BYTE_VOCAB_SIZE: "bytes", GPT2_VOCAB_SIZE: "gpt2"}.get(shape.vocab_size)
    tokenizer = Numbers(shape.vocab_size) if name in (None, "numbers") else load_tokenizer(name)
    # a model from elsewhere reads a text as its tokenizer gives it; where we train, documents stand behind an end token
    start = tokenizer.end if tokenizer.begin is None and trained_here else tokenizer.begin
    dtype = dtype if config.precision == "auto" else getattr(torch, config.precision)
    chat_format = config.chat_format if config.chat_format != "auto" else chat_format
    return Source(shape, dtype, read, tokenizer, start, chat_format)


def tokenizer_of_run(trained: TransformerConfig, run_dir: Path) -> str:
    """What load_tokenizer takes; "" where only the vocabulary can tell."""
    if trained.dataset == "text":
        return "bytes"
    found = [str(folder) for folder in tokenizer_folders(run_dir, trained) if (folder / "tokenizer.json").exists()] + [
        trained.tokenizer
    ]
    return found[0] or ("numbers" if trained.dataset == "synthetic" and not trained.model_config else "")


def load(source: Source, device) -> Decoder:
    """The model on the device, matrices in the compute dtype. The host holds one parameter at a time."""

    def build() -> Decoder:
        model = (llama.Llama if isinstance(source.shape, LlamaShape) else gpt.GPT)(source.shape, source.dtype)
        for name, parameter in model.named_parameters():
            if is_matrix(name) and name != "position_embedding":
                parameter.data = parameter.data.to(source.dtype)
        return model

    return load_weights(build, source.read, device).requires_grad_(False)


class Cache:
    """Keys and values of each layer, (B, T, G, K): of the heads that there are, not of each query's.

    position (B,): the next one to fill, in each row; what lies after it belongs to no token yet.
    """

    def __init__(self, model: Decoder, batch: int, context: int, device):
        shape = model.shape
        zeros = torch.zeros(batch, context, shape.num_cached_heads, shape.head_dim, dtype=model.compute_dtype)
        self.keys, self.values = ([zeros.to(device) for _ in range(shape.num_layers)] for _ in range(2))
        self.position = torch.zeros(batch, dtype=torch.int32).to(device)
        self.everywhere = torch.arange(context, dtype=torch.int32).to(device)


def run_layers(model: Decoder, tokens_BT, positions, attention_of_layer, pick=lambda x_BTD: x_BTD):
    """Logits of what `pick` keeps: the model's forward pass with an attention of its own in each layer.

    positions: (T,) of all rows, or (B, 1).
    """
    weights, layers = model.cast()
    x = F.embedding(tokens_BT, model.token_embedding)
    if isinstance(model, llama.Llama):
        x, place = x.to(model.compute_dtype), llama.angles(positions.float(), model.frequencies)
        for layer, w in enumerate(layers):
            x = llama.block(x, w, model.shape, attention_of_layer(layer), place=place)
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
        # before the head: logits of all tokens would be large. As a sum: products in float32 are rounded on a TPU
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
            # all of it is written: by libtpu's estimate a scatter of the new row takes three times as long
            keys, values = torch.where(is_here, k, cache.keys[layer]), torch.where(is_here, v, cache.values[layer])
            cache.keys[layer].copy_(keys)
            cache.values[layer].copy_(values)
            grouped = q.view(len(q), keys.shape[2], -1, q.shape[3]).float()  # queries by the key that they share
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
        is_out = p.cumsum(-1) - p >= top_p  # those before it are enough; of the first 0 is not
        logits_BV = logits_BV.masked_fill(torch.zeros_like(is_out).scatter(-1, order, is_out), -math.inf)
    return (logits_BV - torch.log(-torch.log(uniform_BV.clamp_min(1e-20)))).argmax(-1)


def check_lengths(shape: ModelShape, prompts: list[list[int]], config: GenerateConfig) -> tuple[int, int]:
    """(tokens that follow, context of the cache). Raises InputError when they do not fit the model."""
    longest = config.context or shape.sequence_length
    if longest > shape.sequence_length:
        raise InputError(f"context is {longest}, but the model reads {shape.sequence_length} tokens; lower --context")
    for number, prompt in enumerate(prompts, 1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if not prompt:
            raise InputError(f"{which} is empty; expected at least one token")
        if wrong := [token for token in prompt if not 0 <= token < shape.vocab_size]:
            raise InputError(f"token {wrong[0]} of {which} is outside the vocabulary of {shape.vocab_size}")
        room = longest + 1 - len(prompt)  # the last token needs no place in the context
        if room < (config.num_tokens or 1):
            raise InputError(
                f"{which} has {len(prompt)} tokens and {config.num_tokens or 1} are to follow, but the context is "
                f"{longest}; shorten the prompt, or ask for at most {max(0, room)} tokens"
            )
    most = max(map(len, prompts))
    num_tokens = config.num_tokens or min(100, longest + 1 - most)
    return num_tokens, config.context or min(longest, -(-(most + num_tokens - 1) // 128) * 128)


def generate(
    model: Decoder, prompts: list[list[int]], config: GenerateConfig, device, ends=lambda tokens: False
) -> list[list[int]]:
    """The tokens that follow each prompt: num_tokens, or up to the first after which ends(tokens) is true.

    What follows a prompt does not depend on the others, but that equal ones differ. Raises InputError when they do not
    fit the context.
    """
    num_tokens, context = check_lengths(model.shape, prompts, config)
    # of the prompt too, or two prompts would draw the same numbers; and equal ones differ
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


def conversations(config: GenerateConfig, source: Source) -> tuple[list[list[int]], set[int]]:
    """(prompts, tokens that end an answer) of the questions."""
    format = chat_data.choose_format(source.chat_format, source.tokenizer)
    asked = [[{"role": "user", "content": question}] for question in config.chat]
    prompts = [chat_data.prompt_of_chat(messages, format, source.tokenizer) for messages in asked]
    return prompts, chat_data.stop_tokens(format, source.tokenizer)


def main(config: GenerateConfig) -> int:
    source = open_source(config)
    tokenizer, stops = source.tokenizer, set(source.tokenizer.stops)
    if config.chat:
        prompts, of_format = conversations(config, source)
        texts, stops = [[] for _ in prompts], stops | of_format  # an answer is printed without its question
    else:
        texts = [tokenizer.encode(prompt) for prompt in config.prompt]
        prompts = [([] if source.start is None else [source.start]) + text for text in texts]
    check_lengths(source.shape, prompts, config)
    device = start_device(config.for_device)
    before = graphs_compiled()
    model = load(source, device)

    def ends(tokens: list[int]) -> bool:
        return tokens[-1] in stops or any(stop in tokenizer.decode(tokens) for stop in config.stop)

    found = generate(model, prompts, config, device, ends)
    for number, (text, tokens) in enumerate(zip(texts, found, strict=True)):
        kept = tokens[:-1] if tokens[-1] in stops else tokens
        whole, begins = tokenizer.decode(text + kept), len(tokenizer.decode(text))
        ended = [at for stop in config.stop if (at := whole.find(stop, begins)) >= 0]
        print("---\n" * (number > 0) + whole[: min(ended, default=None)])
    print(f"{sum(map(len, found))} tokens, {graphs_compiled() - before} graphs", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(config), answers=True))
