"""What a layer that runs again computes again: counted in the traced program, which nobody compiles."""

import dataclasses

import pytest
import torch
import torch_xla
from test_llama_parity import QWEN3

from language.models.gpt import GPT
from language.models.llama import Llama
from language.options.shapes import ModelShape
from language.xla.saved_activations import LEVELS, LayerExecution

SHAPES = {"gpt": ModelShape(2, 4, 64, 32, 300), "llama": dataclasses.replace(QWEN3, sequence_length=32)}
AGAIN = {"inputs": 7, "attention": 6, "projections": 3, "residual": 2, "products": 1}
"""Products of a layer that run again; its last one never does. The scores of plain attention are not kept."""


def products(shape, execution=None) -> int:
    """In the program of a forward and a backward pass."""
    model = (GPT if type(shape) is ModelShape else Llama)(shape, execution=execution)
    model.initialise(0)
    model, tokens = model.to(torch_xla.device()), torch.zeros(2, 32, dtype=torch.int32).to(torch_xla.device())
    model(tokens).logits.sum().backward()
    text = torch_xla._XLAC._get_xla_tensors_hlo([parameter.grad for parameter in model.parameters()])
    torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))
    return text.count(" dot(")


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_kept_is_not_computed_again(name):
    shape = SHAPES[name]
    whole = products(shape)
    again = {level: products(shape, LayerExecution(points)) - whole for level, points in LEVELS.items()}
    assert again == {level: count * shape.num_layers for level, count in AGAIN.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_the_last_layers_compute_no_product_again(name):
    shape = SHAPES[name]
    again = products(shape, LayerExecution(LEVELS["inputs"], all_but=1)) - products(shape)
    assert again == AGAIN["inputs"] * (shape.num_layers - 1) + AGAIN["products"]
