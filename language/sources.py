"""Models to sample from or to export: a run's checkpoint, a folder of Hugging Face, llm.c's weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from language import gpt, llama
from language.hf_files import open_weights
from language.layers import Decoder, is_matrix, load_weights, split_layers
from language.llmc_files import GPT2_VOCAB_SIZE
from language.llmc_weights import read_model
from language.run_weights import longest_context, read_merged, read_run
from language.shapes import BYTE_VOCAB_SIZE, LlamaShape, ModelShape
from language.tokenizer import Numbers, Tokenizer, load_tokenizer
from language.tokenizer_files import tokenizer_of_run


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
    longest: int = 0
    """Tokens that it reads, if these are more than the sequences of its run, which shape has."""


def open_source(
    *, run_dir="", hf="", llmc="", checkpoint="newest", tokenizer="", precision="auto", chat_format="auto"
) -> Source:
    """Give one of run_dir (of transformer_tpu.py, with its checkpoint), hf (a folder of Hugging Face) and llmc (llm.c's
    weights). tokenizer, precision, chat_format replace the source's own.

    Raises InputError for what is damaged or of another kind; the weights are read later.
    """
    of_run, trained_here, longest = "auto", not hf, 0
    if llmc:
        shape, stacked = read_model(Path(llmc))
        own, dtype, read = "", torch.float32, split_layers(stacked).__getitem__
    elif hf:
        weights = open_weights(Path(hf))
        shape, own, read = weights.shape, hf if Path(hf, "tokenizer.json").exists() else "", weights.read
        dtype = torch.bfloat16 if weights.kind("final_ln_weight").dtype == torch.bfloat16 else torch.float32
    else:
        trained, saved = read_run(Path(run_dir), checkpoint)
        shape, own, longest = trained.shape, tokenizer_of_run(Path(run_dir), trained), longest_context(trained)
        scale = trained.lora_alpha / trained.lora_rank if trained.lora_rank else 0.0
        read = lambda name: read_merged(saved, name, scale)  # noqa: E731
        dtype, of_run = getattr(torch, trained.precision), trained.chat_format
        trained_here = saved.step > 0  # at step 0 tools.convert_hf has made it
    name = tokenizer or own or {BYTE_VOCAB_SIZE: "bytes", GPT2_VOCAB_SIZE: "gpt2"}.get(shape.vocab_size)
    tokenizer = Numbers(shape.vocab_size) if name in (None, "numbers") else load_tokenizer(name)
    # our training puts an end token before each document; a model from elsewhere gets what its tokenizer puts there
    start = tokenizer.end if tokenizer.begin is None and trained_here else tokenizer.begin
    dtype = dtype if precision == "auto" else getattr(torch, precision)
    chat_format = of_run if chat_format == "auto" else chat_format
    return Source(shape, dtype, read, tokenizer, start, chat_format, longest)


def load(source: Source, device) -> Decoder:
    """The model on the device, matrices in the compute dtype. The host holds one parameter at a time."""

    def build() -> Decoder:
        model = (llama.Llama if isinstance(source.shape, LlamaShape) else gpt.GPT)(source.shape, source.dtype)
        for name, parameter in model.named_parameters():
            if is_matrix(name) and name != "position_embedding":
                parameter.data = parameter.data.to(source.dtype)
        return model

    return load_weights(build, source.read, device).requires_grad_(False)
