"""Hugging Face's config.json: what it says of a model, read and written. Imports no torch.

What it says and this project does not compute is refused by name: expected in families.py, and here what depends on it.
"""

from language.options.families import FAMILIES, Experts
from language.options.llama_shape import LlamaShape, RopeScaling
from language.options.shapes import ModelShape
from tpu_utils.base.errors import InputError

MOST = {"layers": 1024, "heads": 4096, "experts": 1024, "width": 1 << 20, "tokens": 1 << 24}
MOST["vocabulary"] = 1 << 20  # below START
"""Bounds of the numbers in a config.json, so that no file can ask for a model that nobody could list."""
MOST_PARAMETERS = 1 << 42
MOST_MATRICES = 1 << 16
"""Bounds of a whole model: published ones have up to 2 trillion parameters, and 61 layers of 384 experts."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
ROTARY = {  # what rope_scaling says, by its kind
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
    "all": ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
}
KINDS = {"sliding_attention": "local", "full_attention": "global"}
INSTEAD = {"gemma3": "; of one that reads images, Gemma3ForCausalLM of transformers saves the text model alone"}


def shape_of(found: dict, name: str = "config.json") -> ModelShape:
    """What a Hugging Face config.json says of a model. sequence_length: the longest that it says it can read. name: of
    the file, for messages. Raises InputError for a model that is not one of ours."""
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        more = INSTEAD.get(kind, "") if isinstance(kind, str) else ""
        raise _wrong(name, "model_type", kind, f"{', '.join(FAMILIES)}; other models are not built here{more}")
    family, rope = FAMILIES[kind], found.get("rope_parameters")
    if isinstance(rope, dict):  # as transformers 5 writes it
        found = found | {key: rope[key] for key in ROTARY["all"][3:] if key in rope}
    usual = {} if "partial_rotary_factor" in family.defaults else {"partial_rotary_factor": (1.0, None)}
    for key, values in (family.expected | usual | {"quantization_config": (None,)}).items():
        if (value := found.get(key, values[0])) not in values:
            raise _wrong(name, key, value, f"{values[0]}: the {kind} of this project has no other")
    # a key that is null has no default: it says that there is none
    shape = _gpt(found, name) if kind == "gpt2" else _llama(family.defaults | found, kind, name)
    matrices = shape.num_layers * max(1, getattr(shape, "num_experts", 0))
    if shape.num_parameters > MOST_PARAMETERS or matrices > MOST_MATRICES:
        raise InputError(
            f"{name}: a model of {shape.num_parameters:,} parameters in {matrices:,} layers or experts; expected at "
            f"most {MOST_PARAMETERS:,} in {MOST_MATRICES:,}; copy the file again"
        )
    return shape


def _wrong(name: str, key: str, value, expected: str) -> InputError:
    return InputError(f"{name}: {key} is {value!r:.60}; expected {expected}")


def _size(found: dict, key: str, bound: str, name: str, default: int | None = None) -> int:
    value = default if found.get(key) is None else found[key]
    if type(value) is not int or not 1 <= value <= MOST[bound]:
        raise _wrong(name, key, value, f"an integer from 1 to {MOST[bound]:,}; copy the file again")
    return value


def _positive(found: dict, key: str, name: str, default: float | None = None) -> float:
    value = default if found.get(key) is None else found[key]
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise _wrong(name, key, value, "a finite number above 0; copy the file again")
    return float(value)


def _gpt(found: dict, name: str) -> ModelShape:
    keys = {"n_layer": "layers", "n_head": "heads", "n_embd": "width", "n_positions": "tokens"}
    keys |= {"vocab_size": "vocabulary"}
    shape = ModelShape(*(_size(found, key, bound, name) for key, bound in keys.items()))
    inner = _size(found, "n_inner", "width", name, 4 * shape.embedding_dim)
    if inner != 4 * shape.embedding_dim or shape.embedding_dim % shape.num_heads:
        raise InputError(
            f"{name}: n_embd {shape.embedding_dim}, n_head {shape.num_heads}, n_inner {inner}; expected a width"
            " that the heads divide, and an n_inner of 4 times that width"
        )
    return shape


def _llama(found: dict, kind: str, name: str) -> LlamaShape:
    layers = _size(found, "num_hidden_layers", "layers", name)
    heads, family = _size(found, "num_attention_heads", "heads", name), FAMILIES[kind]
    width, context = _size(found, "hidden_size", "width", name), _size(found, "max_position_embeddings", "tokens", name)
    kv_heads = _size(found, "num_key_value_heads", "heads", name, heads)
    head_dim = _size(found, "head_dim", "width", name, width // heads if width % heads == 0 else None)
    rotated = int(head_dim * _positive(found, "partial_rotary_factor", name, 1.0))
    if heads % kv_heads or head_dim % 2 or rotated % 2 or not 0 < rotated <= head_dim:
        raise InputError(
            f"{name}: {heads} heads of width {head_dim}, {kv_heads} of keys and values, {rotated} of a width rotated; "
            "expected an even width, and that the one number divides the other"
        )
    mlp = family.experts.width if family.experts else "intermediate_size"
    tied = found.get("tie_word_embeddings", False)
    if type(tied) is not bool:
        raise _wrong(name, "tie_word_embeddings", tied, "true or false; copy the file again")
    pattern = _pattern(found, family.layers, layers, name)
    theta, scaling, local_theta = _rotary(found, kind, rotated // 2, context, name)
    return LlamaShape(
        num_layers=layers,
        num_heads=heads,
        embedding_dim=width,
        sequence_length=context,
        vocab_size=_size(found, "vocab_size", "vocabulary", name),
        num_kv_heads=kv_heads,
        mlp_dim=_size(found, mlp, "width", name),
        head_width=0 if head_dim * heads == width else head_dim,
        tied_head=tied,
        family=kind,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_positive(found, "rms_norm_eps", name, 1e-6),
        window=_size(found, "sliding_window", "tokens", name) if "local" in pattern else 0,
        pattern=pattern,
        local_theta=local_theta,
        rotated_width=0 if rotated == head_dim else rotated,
        query_scalar=_positive(found, "query_pre_attn_scalar", name) if "query_pre_attn_scalar" in found else 0.0,
        **(_experts(found, family.experts, name) if family.experts else {}),
    )


def _experts(found: dict, experts: Experts, name: str) -> dict:
    count, chosen = (_size(found, key, "experts", name) for key in (experts.count, "num_experts_per_tok"))
    if chosen > count:
        raise _wrong(name, "num_experts_per_tok", chosen, f"at most the {count} of {experts.count}")
    normalised = found.get("norm_topk_prob", True)
    if type(normalised) is not bool:
        raise _wrong(name, "norm_topk_prob", normalised, "true or false; copy the file again")
    return dict(num_experts=count, experts_per_token=chosen, normalised_experts=normalised)


def _pattern(found: dict, how: str, layers: int, name: str) -> tuple[str, ...]:
    """The kinds of the layers, as few as repeat."""
    expected, types = ("full_attention",), found.get("layer_types")
    if how == "types":
        expected = tuple(KINDS)
        if types is None:
            period = _size(found, "sliding_window_pattern", "layers", name)
            types = [expected[(layer + 1) % period == 0] for layer in range(layers)]
    elif how == "window" and found.get("sliding_window") is not None:
        expected = ("sliding_attention",)
    types = expected * layers if types is None else types
    if not isinstance(types, list | tuple) or len(types) != layers or any(one not in expected for one in types):
        raise _wrong(name, "layer_types", types, f"{' or '.join(expected)} for every layer")
    kinds = [KINDS[one] for one in types]
    if how == "unrotated":
        interval = _size(found, "no_rope_layer_interval", "layers", name)
        usual = [int((layer + 1) % interval != 0) for layer in range(layers)]
        rotated = usual if found.get("no_rope_layers") is None else found["no_rope_layers"]
        if not isinstance(rotated, list) or len(rotated) != layers or any(one not in (0, 1) for one in rotated):
            raise _wrong(name, "no_rope_layers", rotated, "0 or 1 for every layer")
        kinds = ["global" if one else "unrotated" for one in rotated]
    period = next(n for n in range(1, layers + 1) if all(kinds[i] == kinds[i % n] for i in range(layers)))
    return tuple(kinds[:period])


def _rotary(found: dict, kind: str, pairs: int, context: int, name: str) -> tuple[float, RopeScaling | None, float]:
    """rope_theta, rope_scaling, and the rope_theta of local layers; transformers 5 has all in rope_parameters."""
    said, known = found.get("rope_parameters") or found.get("rope_scaling") or {}, FAMILIES[kind].rotary
    local_theta = 0.0
    if "rope_local_base_freq" in found and isinstance(said, dict):
        local = said.get("sliding_attention", {"rope_theta": found["rope_local_base_freq"]})
        said = said.get("full_attention", said)
        if not isinstance(local, dict) or local.get("rope_type", "default") != "default":
            raise _wrong(name, "the rotary positions of local layers", local, "default")
        local_theta = _positive(local, "rope_theta", name)
    rotary = said.get("rope_type", said.get("type", "default")) if isinstance(said, dict) else said
    if not isinstance(said, dict) or rotary not in known:
        expected = f"{' or '.join(known)}; others are not built here"
        raise InputError(f"{name}: the rotary positions are {rotary!r:.60}; expected {expected}")
    theta = {"rope_theta": 1e4} | {k: v for k, v in found.items() if v is not None} | said
    theta = _positive(theta, "rope_theta", name)
    if rotary == "default":
        return theta, None, local_theta
    unknown = [key for key, value in said.items() if value is not None and key not in ROTARY[rotary] + ROTARY["all"]]
    if unknown:
        raise InputError(f"{name}: rope_scaling has {unknown[0]!r:.60}; expected {', '.join(ROTARY[rotary])} alone")
    if rotary == "longrope":
        original, factors = _size(found, ROTARY["all"][-1], "tokens", name), [said.get(key) for key in ROTARY[rotary]]
        for key, values in zip(ROTARY[rotary], factors, strict=True):
            if not isinstance(values, list) or len(values) != pairs or original < 2:
                raise _wrong(name, key, values, f"a list of {pairs} numbers, and an original context of 2 or more")
        short, long = (tuple(_positive({rotary: x}, rotary, name) for x in values) for values in factors)
        return theta, RopeScaling(context / original, 1.0, 4.0, original, rotary, short, long), local_theta
    factor, *waves = [_positive(said, key, name) for key in ROTARY[rotary]]
    if rotary == "linear":
        return theta, RopeScaling(factor, kind=rotary), local_theta
    low, high, original = waves
    if not (factor >= 1 and low < high and 1 <= original == int(original) <= MOST["tokens"]):
        raise InputError(
            f"{name}: rope_scaling is {said!r:.200}; expected a factor of 1 or more, low_freq_factor below "
            "high_freq_factor, and an original context of whole tokens"
        )
    return theta, RopeScaling(factor, low, high, int(original)), local_theta


# ---------------------------------------------------------------------------------------------------------- writing


def hugging_face_config(shape: ModelShape, dtype: str = "float32", tokens: dict | None = None) -> dict:
    """config.json for AutoModelForCausalLM.from_pretrained. tokens: SPECIAL_TOKENS, as far as they are known."""
    known = {name: (tokens or {}).get(name) for name in SPECIAL_TOKENS}
    kind = getattr(shape, "family", "gpt2")
    family = FAMILIES[kind]
    said = {"architectures": [family.architecture], "model_type": kind, "torch_dtype": dtype}
    said |= {name: values[0] for name, values in family.expected.items()}
    if not isinstance(shape, LlamaShape):
        return {
            **said,
            **{"n_layer": shape.num_layers, "n_head": shape.num_heads, "n_embd": shape.embedding_dim},
            **{"n_positions": shape.sequence_length, "vocab_size": shape.vocab_size},
            **known,
        }
    said |= {
        **{"num_hidden_layers": shape.num_layers, "hidden_size": shape.embedding_dim, "head_dim": shape.head_dim},
        **{"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads},
        **{"intermediate_size": shape.mlp_dim, "vocab_size": shape.vocab_size, "rms_norm_eps": shape.norm_eps},
        **{"max_position_embeddings": shape.sequence_length, "rope_theta": shape.rope_theta},
        **{"tie_word_embeddings": shape.tied_head, "rope_scaling": _said_of(shape.rope_scaling)},
    }
    if family.experts:
        said |= {family.experts.count: shape.num_experts, family.experts.width: shape.mlp_dim}
        said |= {"num_experts_per_tok": shape.experts_per_token}
        said |= {"norm_topk_prob": shape.normalised_experts} if "norm_topk_prob" in family.defaults else {}
    if family.layers in ("window", "types"):
        said["sliding_window"] = shape.window or None
    if family.layers == "types":
        names = {ours: theirs for theirs, ours in KINDS.items()}
        said["layer_types"] = [names[kind] for kind in shape.kinds]
        said |= {"rope_local_base_freq": shape.local_theta, "query_pre_attn_scalar": shape.query_scalar}
    if family.layers == "unrotated":
        said["no_rope_layers"] = [int(kind != "unrotated") for kind in shape.kinds]
    if "partial_rotary_factor" in family.defaults:
        said["partial_rotary_factor"] = (shape.rotated_width or shape.head_dim) / shape.head_dim
    if shape.rope_scaling and shape.rope_scaling.kind == "longrope":  # its factor is that of these two
        original = shape.rope_scaling.original_context
        said["original_max_position_embeddings"] = original
        said["max_position_embeddings"] = round(shape.rope_scaling.factor * original)
    return said | known


def _said_of(scaling: RopeScaling | None) -> dict | None:
    """rope_scaling."""
    if scaling is None:
        return None
    if scaling.kind == "longrope":  # this library's class of Phi-3 takes exactly these three
        values = list(scaling.short_factors), list(scaling.long_factors)
        return {"type": "longrope", **dict(zip(ROTARY["longrope"], values, strict=True))}
    values = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context)
    return {"rope_type": scaling.kind, **dict(zip(ROTARY[scaling.kind], values, strict=False))}
