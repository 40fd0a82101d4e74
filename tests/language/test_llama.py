"""Several documents in one row, and adapters beside frozen weights, on plain CPU tensors."""

import dataclasses

import pytest
import torch
from test_gpt_parity import relative_error
from test_llama_parity import QWEN3, STRETCHED, hugging_face_model, in_our_layout

from language.gpt import GPT
from language.layers import find_documents, load_weights
from language.llama import Llama
from language.shapes import ModelShape
from language.token_data import START

LENGTHS = (5, 1, 9, 2)
SHAPES = {"gpt": ModelShape(2, 4, 64, 32, 300), "llama": dataclasses.replace(STRETCHED, sequence_length=32)}


def random_model(shape, **options):
    model = (GPT if type(shape) is ModelShape else Llama)(shape, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator) + ("ln" in name))
    return model


def test_where_documents_begin():
    marked = torch.tensor([[START + 7, 3, START, START + 2, 1], [START + 1, 1, 1, 1, START + 1]])
    tokens, starts = find_documents(marked)
    assert tokens.tolist() == [[7, 3, 0, 2, 1], [1, 1, 1, 1, 1]]
    assert starts.tolist() == [[0, 0, 2, 3, 3], [0, 0, 0, 0, 4]]


@pytest.mark.parametrize("name", SHAPES)
def test_documents_of_one_row_do_not_see_each_other(name):
    """Each has the logits, and makes the gradients, that it has and makes alone."""
    shape = SHAPES[name]
    model, alone = random_model(shape, packed=True), random_model(shape)
    documents = [torch.randint(300, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    row = torch.cat(documents, 1)
    row[:, [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]] += START
    found, expected = model(row), torch.cat([alone(document) for document in documents], 1)
    assert relative_error(found, expected) < 1e-5
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    gradients = dict(alone.named_parameters())
    errors = {n: relative_error(p.grad, gradients[n].grad) for n, p in model.named_parameters()}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("shape", [STRETCHED, QWEN3], ids=["llama", "qwen3"])
def test_adapters_equal_those_of_peft(shape):
    """Logits, loss and every gradient, with adapters that are no longer at their beginning; the base gets none."""
    peft = pytest.importorskip("peft", reason="pip install -r requirements-dev.txt brings peft")
    shape = dataclasses.replace(shape, sequence_length=64)
    theirs = hugging_face_model(shape)
    for parameter in theirs.parameters():  # the base as a LoRA run has it
        parameter.data = parameter.data.to(torch.bfloat16).float()
    base = in_our_layout(dict(theirs.named_parameters()), shape)
    config = peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(theirs, config)
    ours = load_weights(lambda: Llama(shape, lora_rank=4, lora_alpha=16), base.__getitem__, "cpu", None, seed=0)
    of_theirs = {name: p for name, p in theirs.named_parameters() if "lora_" in name}
    pairs = [(name, ours_of(name, ours)) for name in of_theirs]
    assert sum(part.numel() for _, part in pairs) == sum(p.numel() for p in ours.trained().values())
    with torch.no_grad():
        for seed, (name, part) in enumerate(pairs):
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
            of_theirs[name].copy_(part)
    tokens = torch.randint(shape.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    logits, found = theirs(tokens).logits, ours(tokens)[..., : shape.vocab_size]
    assert relative_error(found, logits) < 1e-4
    for values in (logits, found):
        torch.nn.functional.cross_entropy(values[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    errors = {name: relative_error(ours_of(name, ours, grad=True), p.grad) for name, p in of_theirs.items()}
    assert max(errors.values()) < 1e-4, errors
    assert all(p.grad is None and p.dtype == torch.bfloat16 for p in ours.parameters() if not p.requires_grad)
    assert {p.dtype for p in ours.trained().values()} == {torch.float32}


def ours_of(name: str, model: Llama, grad=False) -> torch.Tensor:
    """base_model.model.model.layers.0.self_attn.k_proj.lora_A.default.weight -> kv_lora_a.0[0], or its gradient."""
    *_, layer, _, module, kind, _, _ = name.split(".")
    stacked = {"k_proj": ("kv", 0), "v_proj": ("kv", 1), "gate_proj": ("gate_up", 0), "up_proj": ("gate_up", 1)}
    single = {"q_proj": "q", "o_proj": "attention_out", "down_proj": "mlp_out"}
    matrix, part = stacked.get(module) or (single[module], ...)
    parameter = model.get_parameter(f"{matrix}_{kind.lower()}.{layer}")
    return (parameter.grad if grad else parameter)[part]
