"""Where Hugging Face keeps our parameters: names, shapes and order in its checkpoints of each family."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from language.models import gpt, llama
from language.models.layers import LAYER_MATRICES
from language.options.llama_shape import LlamaShape
from language.options.shapes import ModelShape

GPT2 = {"ln1": "ln_1", "ln2": "ln_2", "qkv": "attn.c_attn", "attention_out": "attn.c_proj", "mlp_in": "mlp.c_fc"}
GPT2 |= {"mlp_out": "mlp.c_proj"}  # ours: theirs, below transformer.h.N; each has a weight and a bias
LLAMA = {  # below model.layers.N; several: one after another in ours
    **{"ln1_weight": ("input_layernorm.weight",), "ln1_after_weight": ("post_attention_layernorm.weight",)},
    **{"ln2_weight": ("pre_feedforward_layernorm.weight",), "ln2_after_weight": ("post_feedforward_layernorm.weight",)},
    **{"q_bias": ("self_attn.q_proj.bias",), "kv_bias": ("self_attn.k_proj.bias", "self_attn.v_proj.bias")},
    **{"q_weight": ("self_attn.q_proj.weight",), "kv_weight": ("self_attn.k_proj.weight", "self_attn.v_proj.weight")},
    **{"q_ln_weight": ("self_attn.q_norm.weight",), "k_ln_weight": ("self_attn.k_norm.weight",)},
    "attention_out_weight": ("self_attn.o_proj.weight",),
    **{"gate_up_weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp_out_weight": ("mlp.down_proj.weight",)},
}
NORMS_BEFORE = {"ln2_weight": ("post_attention_layernorm.weight",)}  # the name that has another meaning elsewhere
FUSED = dict.fromkeys(("q_weight", "kv_weight"), ("self_attn.qkv_proj.weight",))
FUSED |= {"gate_up_weight": ("mlp.gate_up_proj.weight",)}


@dataclass(frozen=True)
class Source:
    """The tensors of Hugging Face ("theirs") that make up one parameter of our model ("ours"), in this order."""

    size: tuple[int, ...]  # shape of our parameter
    names: tuple[str, ...]
    part: tuple[int, ...]  # shape of each of theirs
    transposed: bool = False  # GPT-2's Conv1D keeps (in, out)
    rows: tuple[int, int] | None = None
    """First and end of the rows that are ours, where they have one matrix for several parameters."""

    def join(self, read: Callable[[str], torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Our parameter, in the type of theirs or in dtype. read: one of theirs by name; one at a time is held beside
        the result. Rows of the padding of a vocabulary are 0."""
        whole = None
        for number, name in enumerate(self.names):
            part = read(name)
            if whole is None:
                whole = torch.zeros(self.size, dtype=dtype or part.dtype, device=part.device)
            part = part.t() if self.transposed else part[slice(*self.rows or (None,))]
            self._place(whole, number, part.shape).copy_(part)
        return whole

    def _place(self, whole: torch.Tensor, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The view of our parameter, of this shape, that holds the number-th of theirs."""
        return whole.view(len(self.names), -1)[number, : math.prod(shape)].view(shape)

    def split(self, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of each of theirs, or of these rows of it."""
        shape = self.part[::-1] if self.transposed else self.part
        shape = (self.rows[1] - self.rows[0], shape[-1]) if self.rows else shape
        for number, name in enumerate(self.names):
            part = self._place(value, number, shape)
            yield name, (part.t() if self.transposed else part).contiguous()


def their_tensors(shape: ModelShape, ours: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """All of theirs, in the order of sources(). ours: one of our parameters by its name; no other one is held, but
    where rows of several make up one of theirs."""
    rows = []
    for name, source in sources(shape).items():
        is_last = source.rows is None or source.rows[1] == source.part[0]
        for theirs, tensor in source.split(ours(name)):
            rows.append(tensor)
            del tensor  # a view: it would hold this parameter while the next one is read
            if is_last:
                yield theirs, torch.cat(rows) if len(rows) > 1 else rows.pop()
                rows.clear()


def sizes_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every parameter of our model, those of the layers stacked."""
    return (llama if isinstance(shape, LlamaShape) else gpt).parameter_shapes(shape)


def expert_names(shape: LlamaShape) -> dict[str, tuple[str, ...]]:
    """Theirs of a layer's experts: a matrix each has a name of its own."""
    said = shape.conventions.experts
    gate, up, out = said.matrices
    experts = [f"{said.below}.experts.{number}" for number in range(shape.num_experts)]
    return {
        "router_weight": (f"{said.below}.gate.weight",),
        "expert_gate_up_weight": tuple(f"{expert}.{part}.weight" for expert in experts for part in (gate, up)),
        "expert_out_weight": tuple(f"{expert}.{out}.weight" for expert in experts),
    }


def sources(shape: ModelShape) -> dict[str, Source]:
    """By the names of our model's parameters; those that are rows of one of theirs follow each other."""
    transposed = not isinstance(shape, LlamaShape)
    if isinstance(shape, LlamaShape):
        table, below = dict(LLAMA), "model.layers"
        table |= NORMS_BEFORE if shape.conventions.norms == "before" else {}
        table |= FUSED if shape.conventions.fused else {}
        table |= expert_names(shape) if shape.num_experts else {}
        top = {"token_embedding": "model.embed_tokens.weight", "final_ln_weight": "model.norm.weight"}
        top["head_weight"] = "lm_head.weight"
    else:
        table = {
            f"{ours}_{kind}": (f"{theirs}.{kind}",) for ours, theirs in GPT2.items() for kind in ("weight", "bias")
        }
        below = "transformer.h"
        top = {"token_embedding": "transformer.wte.weight", "position_embedding": "transformer.wpe.weight"}
        top |= {"final_ln_weight": "transformer.ln_f.weight", "final_ln_bias": "transformer.ln_f.bias"}
    found = {}
    for name, size in sizes_of(shape).items():
        if name in top:
            of_vocabulary = name in ("token_embedding", "head_weight")
            found[name] = Source(size, (top[name],), (shape.vocab_size, size[1]) if of_vocabulary else size)
            continue
        layers = [[f"{below}.{layer}.{part}" for part in table[name]] for layer in range(shape.num_layers)]
        if name not in LAYER_MATRICES:  # stacked over the layers
            names = tuple(part for of_layer in layers for part in of_layer)
            found[name] = Source(size, names, (math.prod(size[1:]) // len(table[name]),))
            continue
        for layer, names in enumerate(layers):
            rows = math.prod(size[1:-1]) // len(names)
            part = (size[-1], rows) if transposed else (rows, size[-1])
            source = Source(size[1:], tuple(names), part, transposed)
            if names[0].endswith("qkv_proj.weight"):
                queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
                where = (0, queries) if name == "q_weight" else (queries, queries + 2 * keys)
                source = dataclasses.replace(source, part=(queries + 2 * keys, size[-1]), rows=where)
            found[f"{name}.{layer}"] = source
    places: dict[tuple[str, ...], int] = {}
    return dict(sorted(found.items(), key=lambda item: places.setdefault(item[1].names, len(places))))
