"""The model against an independent implementation: Hugging Face's GPT2LMHeadModel with random weights."""

import pytest
import torch
import torch_xla
from processes import run

from language.models.gpt import GPT, parameter_shapes
from language.models.layers import is_matrix, split_layers
from language.models.operations import add_bias, causal_attention, losses
from language.options.shapes import ModelShape

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt brings transformers")

SHAPE = ModelShape(num_layers=3, num_heads=4, embedding_dim=64, sequence_length=512, vocab_size=300)
HF_LAYER = {
    "ln1": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "ln2": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}


def hugging_face_model(seed: int = 0, shape=SHAPE):
    """Random weights everywhere: biases and layer norms too, so that no term of the gradient hides behind a zero."""
    config = transformers.GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.sequence_length,
        n_embd=shape.embedding_dim,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "ln_" in name and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.08 + (1.0 if is_scale else 0.0))
    return model


def in_our_layout(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors (weights or gradients) by our names: vectors stacked over layers, Linear as (out, in)."""
    padding = SHAPE.padded_vocab_size - SHAPE.vocab_size
    ours = {
        "token_embedding": torch.nn.functional.pad(tensors["transformer.wte.weight"], (0, 0, 0, padding)),
        "position_embedding": tensors["transformer.wpe.weight"],
        "final_ln_weight": tensors["transformer.ln_f.weight"],
        "final_ln_bias": tensors["transformer.ln_f.bias"],
    }
    for name, hf_name in HF_LAYER.items():
        for kind in ("weight", "bias"):
            layers = [tensors[f"transformer.h.{i}.{hf_name}.{kind}"] for i in range(SHAPE.num_layers)]
            if kind == "weight" and "ln" not in name:
                layers = [layer.t() for layer in layers]  # Hugging Face's Conv1D keeps (in, out)
            ours[f"{name}_{kind}"] = torch.stack(layers)
    shapes = parameter_shapes(SHAPE)
    return split_layers({name: ours[name].reshape(shapes[name]).contiguous() for name in shapes})


def our_model(theirs) -> GPT:
    model = GPT(SHAPE)
    model.load_state_dict(in_our_layout(dict(theirs.named_parameters())))
    return model


def batch(seed: int = 1):
    tokens = torch.randint(
        SHAPE.vocab_size, (2, SHAPE.sequence_length + 1), generator=torch.Generator().manual_seed(seed)
    )
    return tokens[:, :-1], tokens[:, 1:]


def their_loss(theirs, tokens, targets):
    logits = theirs(tokens).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest value: a norm-wise measure, so that entries near 0 do not decide."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.fixture(scope="module")
def both():
    theirs = hugging_face_model()
    ours = our_model(theirs)
    tokens, targets = batch()
    loss, logits = their_loss(theirs, tokens, targets)
    loss.backward()
    our_loss = losses(ours(tokens).logits, targets, SHAPE.vocab_size).sum() / targets.numel()
    our_loss.backward()
    return theirs, ours, (loss, logits), (our_loss, ours(tokens).logits)


def test_logits_and_loss(both):
    _, _, (loss, logits), (our_loss, our_logits) = both
    assert relative_error(our_logits[..., : SHAPE.vocab_size], logits) < 1e-4
    assert abs(our_loss.item() - loss.item()) / loss.item() < 1e-4


def test_every_gradient(both):
    theirs, ours, *_ = both
    expected = in_our_layout({name: p.grad for name, p in theirs.named_parameters()})
    errors = {name: relative_error(p.grad, expected[name]) for name, p in ours.named_parameters()}
    assert len(errors) == 12 + 4 * SHAPE.num_layers and max(errors.values()) < 1e-4, errors
    assert ours.token_embedding.grad[SHAPE.vocab_size :].abs().max() == 0  # padding takes no part


def adamw(model, decays):
    groups = [(True, 0.1), (False, 0.0)]
    parameters = list(model.named_parameters())
    return torch.optim.AdamW(
        [{"params": [p for n, p in parameters if decays(n, p) == on], "weight_decay": wd} for on, wd in groups],
        lr=1e-3,
        betas=(0.9, 0.95),
    )


def test_ten_adamw_steps_stay_together():
    theirs = hugging_face_model(seed=2)
    ours = our_model(theirs)

    optimizers = adamw(theirs, lambda n, p: p.dim() >= 2), adamw(ours, lambda n, p: is_matrix(n))
    for step in range(10):
        tokens, targets = batch(seed=10 + step)
        found = []
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            if model is ours:
                loss = losses(model(tokens).logits, targets, SHAPE.vocab_size).sum() / targets.numel()
            else:
                loss, _ = their_loss(model, tokens, targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        assert abs(found[0] - found[1]) / found[0] < 1e-4, (step, found)
    expected = in_our_layout(dict(theirs.named_parameters()))
    errors = {name: relative_error(p, expected[name]) for name, p in ours.named_parameters()}
    assert max(errors.values()) < 1e-3, errors  # Adam's division turns 1e-7 of gradient into more where it is near 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_a_bias_is_the_sum_over_positions(dtype):
    """bfloat16 is summed by a product with ones, which adds up in float32 and rounds once."""
    values = torch.randn(4, 256, 3, 8, generator=torch.Generator().manual_seed(0)) + 1.0  # sums of about 1,024
    x, bias, grad = torch.zeros(4, 256, 3, 8, dtype=dtype), torch.ones(3, 8, dtype=dtype), values.to(dtype)
    expected = grad.double().sum((0, 1))
    x, bias, grad = (t.to(torch_xla.device()) for t in (x, bias, grad))
    out = add_bias(x, bias.requires_grad_())
    out.backward(grad)
    assert out.cpu().eq(1).all() and bias.grad.dtype == dtype
    assert relative_error(bias.grad.cpu().double(), expected) < (2**-8 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 4])
def test_flash_and_plain_attention_agree(num_devices):
    """Outputs and gradients, with grouped heads, packed documents, a window, and rows that are taken in parts, on one
    device and on a mesh of fsdp and tensor axes."""
    result = run("tests/flash_in_graph.py", PYTHONPATH=".", PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(num_devices))
    assert result.returncode == 0, result.stderr
    differences = [float(value) for value in result.stdout.split()]
    assert len(differences) == 24 and max(differences) < 2e-6, differences


@pytest.mark.parametrize("length", [1024, 2048])
def test_many_slices_of_queries_and_grouped_heads_are_the_whole_square(length):
    """Six slices that are not all as long, and eight: against PyTorch's own attention."""
    values = [torch.randn(1, length, heads, 8, generator=torch.Generator().manual_seed(0)) for heads in (4, 2, 2)]
    ours, theirs = ([x.clone().requires_grad_() for x in values] for _ in range(2))
    found, _ = causal_attention(ours[0] * 8**-0.5, *ours[1:])
    q, k, v = (x.transpose(1, 2) for x in theirs)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert relative_error(found, expected.transpose(1, 2)) < 1e-5
    for out in (found, expected.transpose(1, 2)):
        (out * torch.arange(8)).sum().backward()
    assert all(relative_error(a.grad, b.grad) < 1e-5 for a, b in zip(ours, theirs, strict=True))
