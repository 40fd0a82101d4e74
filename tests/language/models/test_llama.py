"""Several documents in one row, on plain CPU tensors."""

import dataclasses

import pytest
import torch
from test_gpt_parity import relative_error
from test_llama_parity import STRETCHED

from language.models.gpt import GPT
from language.models.layers import find_documents
from language.models.llama import Llama
from language.options.shapes import START, ModelShape

DOCUMENT_LENGTHS = (5, 1, 9, 2)
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
    documents = [torch.randint(300, (1, n), generator=torch.Generator().manual_seed(n)) for n in DOCUMENT_LENGTHS]
    row = torch.cat(documents, 1)
    row[:, [sum(DOCUMENT_LENGTHS[:i]) for i in range(len(DOCUMENT_LENGTHS))]] += START
    found, expected = model(row).logits, torch.cat([alone(document).logits for document in documents], 1)
    assert relative_error(found, expected) < 1e-5
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    gradients = dict(alone.named_parameters())
    errors = {n: relative_error(p.grad, gradients[n].grad) for n, p in model.named_parameters()}
    assert max(errors.values()) < 1e-4, errors
