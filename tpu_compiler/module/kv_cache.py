"""The key-value cache of --mode decode: its tensors, attention that reads it once, and what a token reads of it."""

import dataclasses
import inspect
import math
import sys
from collections.abc import Mapping

import torch

from tpu_compiler.estimate.report import Report
from tpu_compiler.estimate.token_bound import with_tokens
from tpu_compiler.module.axes import Axes, batch_axes, placement_of
from tpu_compiler.module.programs import Question
from tpu_utils.base.errors import InputError


def decode_inputs(question: Question, model: torch.nn.Module, inputs: dict) -> tuple[dict, int]:
    """(inputs, cache length = input length). A step has one token of each sequence, and its position."""
    tokens = next((a for a in inputs.values() if isinstance(a, torch.Tensor)), None)
    config = getattr(model, "config", None)
    causal = any(word in type(model).__name__ for word in ("CausalLM", "LMHead"))
    known = hasattr(model, "get_output_embeddings") and hasattr(config, "num_hidden_layers")
    if not (causal and known) or getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"mode is decode, and {question.target} is a {type(model).__name__}; expected a causal model of "
            "transformers, whose static cache is known; ask about another by --mode forward, with its cache among "
            "--inputs"
        )
    if len(inputs) != 1 or tokens.dim() != 2 or tokens.is_floating_point():
        raise InputError("mode decode takes one input, such as input_ids=int32[BATCH,LENGTH_OF_THE_CACHE]")
    batch, length = tokens.shape
    position = torch.empty(1, dtype=torch.int64, device="meta")
    return dict(tokens=torch.empty(batch, 1, dtype=tokens.dtype, device="meta"), position=position), length


def cache_of(model: torch.nn.Module, length: int):
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def grouped_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """What transformers' eager attention computes for one token, without its copy of the cache for each query head.

    query (B, H, 1, K), key and value (B, G, T, K), attention_mask (B, 1, 1, T): ((B, 1, H, K), None).
    """
    batch, heads, _, width = query.shape
    query_BGRK = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    # einsum: @ would make one axis of batch and heads, and what is sharded over heads would be gathered for it
    scores = torch.einsum("bgrk,bgtk->bgrt", query_BGRK, key) * scaling
    scores = scores if attention_mask is None else scores + attention_mask[..., : key.shape[2]]
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("bgrt,bgtk->bgrk", weights, value).reshape(batch, 1, heads, width), None


def attend_in_groups(model: torch.nn.Module, notes: list[str]) -> None:
    """Let the model use grouped_attention, if its own eager attention is Llama's, for which it stands."""
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface
    from transformers.models.llama import modeling_llama

    own = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    known = inspect.getsource(modeling_llama.eager_attention_forward)
    if own is None or inspect.getsource(own) != known:
        return
    AttentionInterface.register("grouped", grouped_attention)
    AttentionMaskInterface.register("grouped", eager_mask)
    model.set_attn_implementation("grouped")
    notes.append("attention by groups of query heads: eager attention would copy the cache for each of them")


def cache_axes(question: Question, sizes: Mapping[str, int], model: torch.nn.Module, heads: int) -> Axes:
    """Axes that shard the cache (batch, heads, tokens, width): heads lie where --shard puts k_proj. sizes: of the
    mesh's axes."""
    if not sizes:
        return {}
    names = (name for name, _ in model.named_parameters() if name.endswith("k_proj.weight"))
    placement = placement_of(question, next(names, ""))
    axis = placement.axes.get(0) if placement else None
    batch = batch_axes(sizes)
    over_heads = {1: (axis,)} if axis and heads % sizes[axis] == 0 and axis not in batch.get(0, ()) else {}
    return batch | over_heads


def tensors_of(cache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def decode_forward(forward, cache, tokens, position):
    """Logits. forward: a model, or its own."""
    return forward(
        input_ids=tokens,
        past_key_values=cache,
        cache_position=position,
        position_ids=position.view(1, 1),
        use_cache=True,
    ).logits


def with_cache(
    result: Report, model: torch.nn.Module, held: list, axes: Axes, sizes: Mapping, tokens, length: int, flops
) -> Report:
    """Report of a decoding step, with a note. held: tensors of the cache, sharded along axes. tokens: (B, 1), input."""
    parts = math.prod(sizes[axis] for along in axes.values() for axis in along)
    cache_bytes, batch = sum(tensor.numel() * tensor.element_size() for tensor in held), tokens.shape[0]
    note = f"decode: one token of {batch} sequences, key-value cache for {length} tokens of each"
    result = dataclasses.replace(result, notes=[note])
    if not result.compiles:
        return result
    read = read_per_token(result, model, cache_bytes / parts)
    return with_tokens(result, batch=batch, read_bytes=read, cache_bytes=cache_bytes, length=length, flops=flops)


def read_per_token(result: Report, model: torch.nn.Module, cache_read: float) -> float:
    """Bytes that a device reads at least for one token of each row: parameters, and its part of the cache.

    An embedding that is not tied to the output layer does not count: only one row of it for each sequence is read.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    unread = 0 if tied else embedding.weight.numel() * embedding.weight.element_size()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return result.memory["parameters"] * (1 - unread / whole) + cache_read
