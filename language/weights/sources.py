"""Models to sample from or to export: a run's checkpoint, a folder of Hugging Face, llm.c's weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from language.data.tokenizer import Numbers, Tokenizer, load_tokenizer
from language.data.tokenizer_files import tokenizer_by_size, tokenizer_of_run
from language.models import gpt, llama
from language.models.int8 import scale_name
from language.models.layers import Decoder, is_matrix, split_layers
from language.options.llama_shape import LlamaShape
from language.options.shapes import ModelShape
from language.weights.hf_files import open_weights
from language.weights.llmc_weights import read_model
from language.weights.run_weights import longest_context, read_merged, read_run
from language.weights.weight_loading import load_weights
from language.xla.loops import AXES
from tpu_utils.base.errors import InputError
from tpu_utils.device import Mesh, device_count, mark_sharding, set_global_mesh, use_spmd
from tpu_utils.options.virtual_slice import without_weights


@dataclass(frozen=True)
class Source:
    """A model to sample from, not loaded yet."""

    shape: ModelShape
    dtype: torch.dtype  # type of weights and computation
    read: Callable[[str], torch.Tensor]  # a parameter by its name in our model, with what adapters add to it
    tokenizer: Tokenizer
    start: int | None  # what stands before a text; None: nothing
    chat_format: str
    after: int | None = None  # what stands behind a text that is to be continued
    longest: int = 0  # tokens that it reads, if these are more than the sequences of its run, which shape has


def open_source(
    *, run_dir="", hf="", llmc="", checkpoint="newest", tokenizer="", precision="auto", chat_format="auto"
) -> Source:
    """Give one of run_dir (of transformer_tpu.py, with its checkpoint), hf (a folder of Hugging Face) and llmc (llm.c's
    weights). tokenizer, precision, chat_format replace its own. The weights are read later. Raises InputError."""
    of_run = "auto"
    trained_here = not hf
    longest = 0
    if llmc:
        shape, stacked = read_model(Path(llmc))
        own = tokenizer_by_size(shape.vocab_size, [])
        dtype = torch.float32
        read = split_layers(stacked).__getitem__
    elif hf:
        weights = open_weights(Path(hf))
        shape = weights.shape
        own = hf if Path(hf, "tokenizer.json").exists() else tokenizer_by_size(shape.vocab_size, [Path(hf)])
        read = weights.read
        dtype = torch.bfloat16 if weights.kind("final_ln_weight").dtype == torch.bfloat16 else torch.float32
    else:
        trained, saved = read_run(Path(run_dir), checkpoint)
        shape = trained.shape
        own = tokenizer_of_run(Path(run_dir), trained)
        longest = longest_context(trained)
        read = lambda name: read_merged(saved, name, trained)  # noqa: E731
        dtype, of_run = getattr(torch, trained.precision), trained.chat_format
        trained_here = saved.step > 0  # at step 0 tools.convert_hf has made it
    name = tokenizer or own
    tokenizer = Numbers(shape.vocab_size) if name in ("", "numbers") else load_tokenizer(name)
    # our training puts an end token before each document; a model from elsewhere gets what its tokenizer puts around
    start = tokenizer.end if tokenizer.begin is None and trained_here else tokenizer.begin
    after = None if trained_here else tokenizer.after
    dtype = dtype if precision == "auto" else getattr(torch, precision)
    chat_format = of_run if chat_format == "auto" else chat_format
    return Source(shape, dtype, read, tokenizer, start, chat_format, after, longest)


def build(source: Source, int8=False, mesh: Mesh | None = None) -> Decoder:
    """The model, its matrices in the compute dtype or in int8. Raises InputError for experts in int8."""
    if int8 and getattr(source.shape, "num_experts", 0):
        raise InputError("int8 is on, but the model is a mixture of experts, which stay as they are; leave it out")
    model = (llama.Llama if isinstance(source.shape, LlamaShape) else gpt.GPT)(source.shape, source.dtype, mesh=mesh)
    for name, parameter in model.requires_grad_(False).named_parameters():
        if is_matrix(name) and name != "position_embedding":
            parameter.data = parameter.data.to(torch.int8 if int8 else source.dtype)
    return model


def load(source: Source, device, int8=False, mesh: Mesh | None = None) -> Decoder:
    """The model on the device, or on a mesh as sampling_spec() says. The host holds one parameter at a time."""
    return load_weights(partial(build, source, int8, mesh), source.read, device, sampling_spec)


def without_values(source: Source, device, int8=False, mesh: Mesh | None = None) -> Decoder:
    """As load(), of shapes without memory, which the compiler is asked about."""

    def with_scales() -> Decoder:
        model = build(source, int8, mesh)
        for name, parameter in model.named_parameters() if int8 else ():
            if parameter.dtype == torch.int8:
                model.register_buffer(scale_name(name), torch.empty(parameter.shape[:-1]))
        return model

    model = without_weights(with_scales, device)
    for name, parameter in model.named_parameters() if mesh else ():
        spec = sampling_spec(name, parameter)
        mark_sharding(parameter, mesh, spec)
        if parameter.dtype == torch.int8:
            mark_sharding(model.get_buffer(scale_name(name)), mesh, spec[:-1])
    return model


# The axis of a parameter that the devices of a mesh share: heads, columns of the MLP, tokens of the vocabulary. What
# attention and the MLP give is added up over the devices, twice in a layer; all else lies whole on each of them.
SHARED_AXIS = {"token_embedding": 0, "head_weight": 0, "q_weight": 0, "mlp_in_weight": 0, "qkv_weight": 1}
SHARED_AXIS |= {"kv_weight": 1, "gate_up_weight": 1, "attention_out_weight": 1, "mlp_out_weight": 1}
SHARED_AXIS |= {"expert_gate_up_weight": 2, "expert_out_weight": 2}
SHARED_AXIS |= {"q_bias": 1, "mlp_in_bias": 1, "qkv_bias": 2, "kv_bias": 2}


def sampling_spec(name: str, parameter: torch.Tensor) -> tuple[str | None, ...]:
    """The axis of the mesh that each axis of a parameter is sharded over."""
    shared = SHARED_AXIS.get(name.split(".")[0])
    return tuple("tensor" if axis == shared else None for axis in range(parameter.dim()))


def sampling_mesh(shape: ModelShape, axis: str = "tensor") -> Mesh | None:
    """All devices of this host along an axis; None for one device. Call it before the first tensor. Raises InputError
    where "tensor" cannot divide heads, MLP or vocabulary."""
    devices = device_count()
    if devices == 1:
        return None
    for name, count in (
        ("heads of keys and values", shape.num_cached_heads),
        ("columns of the MLP", getattr(shape, "mlp_dim", 4 * shape.embedding_dim)),
        ("tokens of the padded vocabulary", shape.padded_vocab_size),
    ):
        if axis == "tensor" and count % devices:
            raise InputError(f"the model has {count} {name}, which {devices} devices cannot share; use --devices one")
    use_spmd()
    mesh = Mesh(np.arange(devices), tuple(devices if one == axis else 1 for one in AXES), AXES)
    set_global_mesh(mesh)
    return mesh
