"""Operations of the models: values and gradients beside PyTorch's, and those for torch's compiler beside them."""

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from test_llama_parity import relative_error
from torch.utils._python_dispatch import TorchDispatchMode

from language.models import layers, operations

T, D, V = 12, 16, 20
HEADS, FEWER = (2, T, 4, 8), (2, T, 2, 8)
DOCUMENTS = torch.tensor([[0] * 5 + [5] * 7, [0] * T])
TARGETS = torch.randint(-V, V - 3, (2, T), generator=torch.Generator().manual_seed(1))
CASES = {  # what is computed by both, and the shapes of its inputs
    "layer_norm": (lambda own, x, w, b: own.layer_norm(x, w, b), [(2, T, D), (D,), (D,)]),
    "rms_norm": (lambda own, x, w: own.rms_norm(x, w, 1e-5), [(2, T, D), (D,)]),
    "attention": (lambda own, q, k, v: own.causal_attention(q, k, v)[0], [HEADS] * 3),
    "a window": (lambda own, q, k, v: own.causal_attention(q, k, v, window=5)[0], [HEADS, FEWER, FEWER]),
    "documents": (lambda own, q, k, v: own.causal_attention(q, k, v, DOCUMENTS)[0], [HEADS] * 3),
    "btd,ed->bte": (lambda own, x, w: own.contract("btd,ed->bte", x, w), [(2, T, D), (24, D)]),
    "btd,hkd->bthk": (lambda own, x, w: own.contract("btd,hkd->bthk", x, w), [(2, T, D), (4, 8, D)]),
    "btd,cgkd->btcgk": (lambda own, x, w: own.contract("btd,cgkd->btcgk", x, w), [(2, T, D), (2, 2, 8, D)]),
    "bthk,dhk->btd": (lambda own, x, w: own.contract("bthk,dhk->btd", x, w), [HEADS, (D, 4, 8)]),
    "losses": (lambda own, x: own.losses(x, TARGETS, V - 3), [(2, T, V)]),
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


class Operations(TorchDispatchMode):
    """Names of the operations inside, and the last axis of what they give."""

    def __init__(self):
        super().__init__()
        self.names, self.widths = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names.add(function.overloadpacket.__name__)
        self.widths |= {out.shape[-1]} if isinstance(out, torch.Tensor) and out.dim() > 1 else set()
        return out


def test_the_loss_for_inductor_reads_and_writes_whole_rows_of_padded_logits():
    """Else it is not one kernel, and a GPU reads rows of 50,257 columns one by one: four kernels of 128 instructions
    a logit, not one of 73, by the machine code for an H200 (torch 2.13)."""
    logits = torch.randn(2, T, V, dtype=torch.bfloat16, requires_grad=True)
    with Operations() as seen:
        operations.TorchOperations.losses(logits, TARGETS.int(), V - 3).sum().backward()
    assert V in seen.widths and not seen.widths & {V - 3, V - 1}
    assert not seen.names & {"gather", "index", "select", "slice", "nll_loss_forward"}
    assert not logits.grad[..., V - 3 :].any() and not logits.grad[TARGETS < 0].any()


@pytest.mark.parametrize("masked", [{}, dict(window=5), dict(starts_BT=torch.zeros(2, T, dtype=torch.long))])
def test_a_mask_comes_with_a_head_of_keys_for_each_of_queries(masked, monkeypatch):
    """Else no fused kernel of torch 2.13 on a GPU takes it (can_use_mem_efficient_attention of sdp_utils.cpp; cuDNN's
    is not deterministic), and torch keeps scores (B, H, T, T). Without a mask flash attention reads grouped heads."""
    heads, attention = [], F.scaled_dot_product_attention

    def look(q, k, v, *mask, **options):
        heads.extend(x.shape[1] for x in (q, k, v))
        return attention(q, k, v, *mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    operations.TorchOperations.causal_attention(*(torch.randn(2, T, heads, 8) for heads in (4, 2, 2)), **masked)
    assert heads == ([4, 4, 4] if masked else [4, 2, 2])


@pytest.mark.parametrize("length, window", [*((1024, w) for w in (0, 1, 100, 512, 700, 1023)), (2048, 0)])
def test_slices_of_queries_and_a_window_are_the_whole_square(length, window):
    """Six slices that are not all as long, and eight; keys before the window of a slice take no part, in both passes; a
    window that is a tensor, as in a loop, too. Heads are grouped; against PyTorch's own attention."""
    values = [torch.randn(1, length, heads, 8, generator=torch.Generator().manual_seed(0)) for heads in (4, 2, 2)]
    here = torch.arange(length)
    is_seen = (here[None] <= here[:, None]) & (here[None] > here[:, None] - (window or length))
    q, k, v = (x.clone().transpose(1, 2).requires_grad_() for x in values)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_seen, enable_gqa=True).transpose(1, 2)
    (expected * torch.arange(8)).sum().backward()
    for how in (window, window and torch.tensor(window, dtype=torch.int32)):
        inputs = [x.clone().requires_grad_() for x in values]
        found, _ = operations.causal_attention(inputs[0] * 8**-0.5, *inputs[1:], window=how)
        (found * torch.arange(8)).sum().backward()
        gradients = [x.grad.transpose(1, 2) for x in (q, k, v)]
        for a, b in zip([found, *(x.grad for x in inputs)], [expected, *gradients], strict=True):
            assert (a - b).abs().max() < 1e-5 * b.abs().max().clamp(min=1.0)  # a window of 1: gradients of q, k are 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_a_bias_is_the_sum_over_positions(dtype):
    """bfloat16 is summed by a product with ones, which adds up in float32 and rounds once."""
    values = torch.randn(4, 256, 3, 8, generator=torch.Generator().manual_seed(0)) + 1.0  # sums of about 1,024
    x, bias, grad = torch.zeros(4, 256, 3, 8, dtype=dtype), torch.ones(3, 8, dtype=dtype), values.to(dtype)
    expected = grad.double().sum((0, 1))
    x, bias, grad = (t.to(torch_xla.device()) for t in (x, bias, grad))
    out = operations.add_bias(x, bias.requires_grad_())
    out.backward(grad)
    assert out.cpu().eq(1).all() and bias.grad.dtype == dtype
    assert relative_error(bias.grad.cpu().double(), expected) < (2**-8 if dtype == torch.bfloat16 else 1e-5)


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
