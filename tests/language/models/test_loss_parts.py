"""--loss_parts: the losses and gradients of whole logits, which are never in memory."""

import dataclasses
import functools
import json

import pytest
import torch
import torch_xla
from run_files import read_lines, summary_in
from test_llama_parity import QWEN3
from test_transformer_tpu import train_all

import aot_tpu
from language.models.gpt import GPT
from language.models.llama import Llama
from language.models.operations import losses
from language.options.shapes import ModelShape
from language.xla.saved_activations import LayerExecution
from tpu_utils.base.errors import InputError

SHAPES = {"gpt": ModelShape(2, 4, 64, 32, 300), "llama": dataclasses.replace(QWEN3, sequence_length=32)}


@functools.cache
def computed(shape, parts: int, dtype=torch.float32):
    """(losses, gradients by name) of a batch, each target weighted by another number."""
    model = (GPT if type(shape) is ModelShape else Llama)(shape, dtype, execution=LayerExecution(loss_parts=parts))
    model.initialise(0)
    model = model.to(torch_xla.device())
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 250, (3, 33), generator=draw, dtype=torch.int32)
    targets = torch.where(torch.rand(3, 32, generator=draw) < 0.2, -1, tokens[:, 1:])
    tokens, targets, weights = (t.to(torch_xla.device()) for t in (tokens, targets, torch.rand(3, 32, generator=draw)))
    found = losses(model(tokens[:, :-1]).logits, targets, shape.vocab_size)
    (found * weights).sum().backward()
    torch_xla.sync()  # else each gradient is a program of its own
    return found.detach().cpu(), {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name, parts", [("gpt", 8), ("llama", 2)])
def test_losses_and_gradients_are_those_of_whole_logits(name, parts):
    (found, gradients), (expected, whole) = computed(SHAPES[name], parts), computed(SHAPES[name], 1)
    assert torch.equal(found == 0, expected == 0) and (found == 0).any()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == whole.keys()
    for key in whole:
        torch.testing.assert_close(
            gradients[key], whole[key], rtol=1e-4, atol=2e-6, msg=lambda text, key=key: key + text
        )


def test_in_bfloat16_the_parts_add_up_in_float32():
    found, expected = (computed(SHAPES["gpt"], parts, torch.bfloat16)[1]["token_embedding"] for parts in (8, 1))
    exact = computed(SHAPES["gpt"], 1)[1]["token_embedding"]
    assert (found - exact).norm() <= 1.05 * (expected - exact).norm()


def test_an_evaluation_has_whole_logits_and_a_loss_of_ones_own_is_told_that_it_needs_them():
    model, tokens = GPT(SHAPES["gpt"], execution=LayerExecution(loss_parts=4)), torch.zeros(1, 32, dtype=torch.int32)
    with torch.no_grad():
        assert model(tokens).logits.shape == (1, 32, 384)
    with pytest.raises(InputError, match=r"the step takes log_softmax of logits that loss_parts divides; .* 1$"):
        model(tokens).logits.log_softmax(-1)


def test_a_run_has_the_same_losses_in_one_graph(tmp_path):
    options = "--device cpu --num_steps 4 --warmup_steps 1 --log_every 1 --eval_batches 1 --global_batch_size 16"
    options += " --scan_layers --remat --gradient_accumulation_steps=2 --mesh=1x2x2"
    train_all(tmp_path, 4, [[parts, *options.split(), f"--loss_parts={parts}"] for parts in "14"])
    ended = summary_in(tmp_path / "4")
    assert ended["train_graphs"] == 1
    assert ended["validation_loss"] == pytest.approx(summary_in(tmp_path / "1")["validation_loss"], rel=2e-6)
    whole, parts = ([line for line in read_lines(tmp_path / name) if line["kind"] == "train"] for name in ("1", "4"))
    for one, other in zip(parts, whole, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-6)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)


def test_it_takes_less_memory_and_sends_no_more(forked, capsys):
    """64 sequences of 1,024 tokens over 8 devices, two layers of width 64 and GPT-2's 50,304 logits. The head is
    gathered in each pass, not in one; parts of the tokens gathered it for each part."""
    options = "--dataset tokens --precision bfloat16 --model_size 124M --num_layers 2 --embedding_dim 64 --num_heads 1"
    options += " --global_batch_size 64 --mesh 1x8x1 --topology v6e-8 --plan --json --loss_parts"
    reports = {}
    for parts in ("1", "8"):
        assert aot_tpu.main(["transformer_tpu.py", *options.split(), parts]) == 0
        reports[parts] = json.loads(capsys.readouterr().out)[0]
    whole_logits = 8 * 1024 * 50304 * 2
    assert reports["8"]["memory"]["activations"] < whole_logits / 3
    sent = {parts: sum(of["sent_bytes"] for of in r["collectives"].values()) for parts, r in reports.items()}
    assert sent["8"] - sent["1"] == pytest.approx(7 / 8 * 50304 * 64 * 2, rel=0.2)
