"""Operations for torch's compiler beside those written for the TPU: values and gradients."""

import pytest
import torch

from language.models import layers, operations

T, D, V = 12, 16, 20
CASES = {
    "layer_norm": (lambda own, x, w, b: own.layer_norm(x, w, b), [(2, T, D), (D,), (D,)]),
    "rms_norm": (lambda own, x, w: own.rms_norm(x, w, 1e-5), [(2, T, D), (D,)]),
    "attention": (lambda own, q, k, v: own.causal_attention(q, k, v)[0], [(2, T, 4, 8)] * 3),
    "grouped heads, a window": (
        lambda own, q, k, v: own.causal_attention(q, k, v, window=5)[0],
        [(2, T, 4, 8), (2, T, 2, 8), (2, T, 2, 8)],
    ),
    "documents": (
        lambda own, q, k, v: own.causal_attention(q, k, v, torch.tensor([[0] * 5 + [5] * 7, [0] * T]))[0],
        [(2, T, 4, 8)] * 3,
    ),
    **{
        equation: (lambda own, x, w, equation=equation: own.contract(equation, x, w), shapes)
        for equation, shapes in {
            "btd,ed->bte": [(2, T, D), (24, D)],
            "btd,hkd->bthk": [(2, T, D), (4, 8, D)],
            "btd,cgkd->btcgk": [(2, T, D), (2, 2, 8, D)],
            "bthk,dhk->btd": [(2, T, 4, 8), (D, 4, 8)],
        }.items()
    },
    "losses": (
        lambda own, x: own.losses(
            x, torch.randint(-V, V - 3, (2, T), generator=torch.Generator().manual_seed(1)), V - 3
        ),
        [(2, T, V)],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_equal(name, dtype):
    function, shapes = CASES[name]
    generator, found = torch.Generator().manual_seed(0), []
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    for own in (operations, operations.TorchOperations):
        leaves = [x.to(dtype if x.dim() > 1 else torch.float32).requires_grad_() for x in inputs]
        out = function(own, *leaves)
        (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_are_one_product(dtype, monkeypatch):
    """For torch's compiler, which leaves three products three: forward, and for x and for the weights backward."""
    found, products = [], []
    for is_xla in (True, False):
        monkeypatch.setattr(layers, "IS_XLA", is_xla)
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, T, D), (3, 4, 8, D), (3, 4, 8)]
        x, weight, bias = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
        with torch.profiler.profile() as profile:
            outs = layers.projections(x, list(zip(weight, bias, strict=True)))
            sum((i + 1) * out.float().square().sum() for i, out in enumerate(outs)).backward()
        names = ("aten::mm", "aten::addmm", "aten::bmm")
        products.append(sum(event.count for event in profile.key_averages() if event.key in names))
        found.append([*outs, x.grad, weight.grad, bias.grad])
    assert products == [9, 3]
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    for one, three in zip(found[1], found[0], strict=True):
        assert one.shape == three.shape
        torch.testing.assert_close(one, three, rtol=tolerance, atol=tolerance * three.abs().max().item())
