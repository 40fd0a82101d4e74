"""Every family against an independent implementation: Hugging Face's, with random weights.

SHAPES is the one table of small models that the tests of imports, fine-tuning, sampling and export take too.
"""

import dataclasses

import pytest
import torch

from language.models.gpt import GPT
from language.models.llama import Llama
from language.models.operations import losses
from language.options.hf_config import hugging_face_config
from language.options.llama_shape import LlamaShape, RopeScaling
from language.options.shapes import ModelShape
from language.weights.hf_layout import sources

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt brings transformers")

GPT2 = ModelShape(num_layers=3, num_heads=4, embedding_dim=64, sequence_length=512, vocab_size=300)
TIED = LlamaShape(3, 4, 64, 128, 300, num_kv_heads=2, mlp_dim=160, tied_head=True, rope_theta=1e4)
STRETCHED = dataclasses.replace(TIED, tied_head=False, rope_scaling=RopeScaling(8.0, original_context=64))
UNTIED = dataclasses.replace(STRETCHED, rope_scaling=None, norm_eps=1e-6)
QWEN3 = dataclasses.replace(UNTIED, family="qwen3", head_width=32)
MISTRAL = dataclasses.replace(UNTIED, family="mistral", window=24, pattern=("local",))
GEMMA3 = dataclasses.replace(
    TIED,
    num_layers=4,
    family="gemma3_text",
    head_width=32,
    norm_eps=1e-6,
    window=20,
    pattern=("local", "local", "global"),
    local_theta=1e4,
    rope_theta=1e6,
    rope_scaling=RopeScaling(8.0, kind="linear"),
    query_scalar=48.0,
)
FACTORS = dict(short_factors=(1.0, 1.0, 1.1, 1.2, 1.3, 1.5), long_factors=(1.0, 1.5, 2.5, 5.0, 9.0, 20.0))
LONGROPE = RopeScaling(2.0, original_context=64, kind="longrope", **FACTORS)
PHI4 = dataclasses.replace(TIED, family="phi3", rotated_width=12, rope_scaling=LONGROPE)
SHAPES = {
    **{"tied": TIED, "stretched": STRETCHED, "qwen2": dataclasses.replace(TIED, family="qwen2", norm_eps=1e-6)},
    **{"mistral": MISTRAL, "gemma3": GEMMA3, "olmo2": dataclasses.replace(UNTIED, family="olmo2"), "phi4": PHI4},
    "phi3": dataclasses.replace(UNTIED, family="phi3", window=24, pattern=("local",)),
    "qwen3": QWEN3,
    "mixtral": dataclasses.replace(UNTIED, family="mixtral", num_experts=8, experts_per_token=2, mlp_dim=48),
    "qwen3_moe": dataclasses.replace(QWEN3, family="qwen3_moe", num_experts=16, experts_per_token=4, mlp_dim=32),
    "smollm3": dataclasses.replace(TIED, num_layers=4, family="smollm3", pattern=(*["global"] * 3, "unrotated")),
}
FAMILIES = {"gpt2": GPT2, **SHAPES}


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest value: a norm-wise measure, so that entries near 0 do not decide."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def hugging_face_model(shape: ModelShape, seed: int = 0):
    """Random weights everywhere, norms and biases too, so that no term of the gradient hides behind a one."""
    config = transformers.AutoConfig.for_model(**hugging_face_config(shape))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    mean = 1.0 - shape.norm_offset  # the weights of norms
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name or ("ln_" in name and name.endswith("weight"))
            parameter.copy_(torch.randn_like(parameter) * 0.08 + (mean if is_scale else 0.0))
    return model


def in_our_layout(tensors: dict[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    return {name: source.join(tensors.__getitem__) for name, source in sources(shape).items()}


def our_model(theirs, shape: ModelShape) -> GPT | Llama:
    model = (Llama if isinstance(shape, LlamaShape) else GPT)(shape)
    model.load_state_dict(in_our_layout(dict(theirs.named_parameters()), shape))
    return model


def batch(shape: ModelShape):
    size = (2, shape.sequence_length + 1)
    tokens = torch.randint(shape.vocab_size, size, generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def our_loss(ours: GPT | Llama, tokens, targets):
    logits = ours(tokens).logits
    return losses(logits, targets, ours.shape.vocab_size).sum() / targets.numel(), logits


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_every_gradient(name):
    shape = FAMILIES[name]
    theirs = hugging_face_model(shape)
    ours = our_model(theirs, shape)
    tokens, targets = batch(shape)
    logits, (found, our_logits) = theirs(tokens).logits, our_loss(ours, tokens, targets)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert relative_error(our_logits[..., : shape.vocab_size], logits) < 1e-4
    assert abs(found.item() - loss.item()) / loss.item() < 1e-4
    loss.backward(), found.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()}
    expected = in_our_layout(gradients, shape)  # theirs of an expert without tokens is None
    errors = {name: relative_error(p.grad, expected[name]) for name, p in ours.named_parameters()}
    assert len(errors) == len(sources(shape)) and max(errors.values()) < 1e-4, errors
    assert ours.token_embedding.grad[shape.vocab_size :].abs().max() == 0  # padding takes no part
    assert sum(p.numel() for p in ours.parameters()) == shape.num_parameters
