"""Sampling: cached and uncached logits agree, two graphs whatever the prompt, refusals."""

import dataclasses

import numpy as np
import pytest
import torch
import torch_xla
from mutations import make_irregular, no_hang

import convert_llmc
import generate_tpu
from config import TransformerConfig
from generate_tpu import GenerateConfig
from gpt import GPT
from layers import stack_layers
from model_shapes import ModelShape
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.errors import InputError, run_script
from tpu_utils.graphs import graphs_compiled

SHAPE = ModelShape(num_layers=2, num_heads=2, embedding_dim=32, sequence_length=16, vocab_size=50)


@pytest.fixture(scope="module")
def model():
    model = GPT(SHAPE)
    model.initialise(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # far from uniform, so that a wrong key or position shows
    return model


def test_cached_logits_agree_with_uncached_in_two_graphs(model):
    tokens = torch.randint(SHAPE.vocab_size, (1, SHAPE.sequence_length), generator=torch.Generator().manual_seed(0))
    expected = model(tokens)[0, :, : SHAPE.vocab_size].detach().numpy()
    device = torch_xla.device()
    on_device = GPT(SHAPE)
    on_device.load_state_dict(model.state_dict())
    on_device.to(device)
    before = graphs_compiled()
    for prompt in (1, 7):
        cache = generate_tpu.Cache(on_device, 1, device)
        padded = torch.zeros(1, SHAPE.sequence_length, dtype=torch.int32)
        padded[0, :prompt] = tokens[0, :prompt]
        length = torch.tensor([prompt], dtype=torch.int32).to(device)
        found = [generate_tpu.prefill(on_device, cache, padded.to(device), length)]
        for at in range(prompt, SHAPE.sequence_length):
            found.append(generate_tpu.decode(on_device, cache, tokens[:, at].to(torch.int32).to(device)))
        found = torch.cat([logits.cpu() for logits in found]).numpy()
        np.testing.assert_allclose(found, expected[prompt - 1 :], rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert graphs_compiled() - before == 2


def test_same_seed_same_tokens_and_greedy_is_the_argmax(model):
    device = torch_xla.device()
    on_device = GPT(SHAPE)
    on_device.load_state_dict(model.state_dict())
    on_device.to(device)

    def sample(num_tokens=6, **options):
        config = GenerateConfig(run_dir="x", num_tokens=num_tokens, **options)
        return generate_tpu.generate(on_device, [3, 1], config, device)

    assert sample(seed=1) == sample(seed=1) != sample(seed=2)
    assert len(sample(None)) == 15, "as many as a context of 16 has room for"
    greedy, tokens = sample(temperature=0.0), [3, 1]
    for token in greedy:
        assert token == model(torch.tensor([tokens]))[0, -1, : SHAPE.vocab_size].argmax()
        tokens.append(token)
    assert sample(top_k=1) == greedy


def test_top_k_samples_the_softmax_of_the_k_likeliest():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(20000, 4)
    uniform = torch.rand(20000, 4, generator=torch.Generator().manual_seed(0)).clamp_min(1e-20)
    drawn = generate_tpu.choose(logits, -torch.log(-torch.log(uniform)), 0.5, 2)
    share = torch.bincount(drawn, minlength=4) / 20000
    expected = torch.softmax(torch.tensor([4.0, 6.0]), 0)
    np.testing.assert_allclose(share, [0, 0, *expected], atol=0.01)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "message"),
    [
        (range(17), 1, "17 tokens and 1 are to follow, but the context is 16; .* at most 0"),
        (range(10), 8, "at most 7 tokens"),
        ([], 1, "the prompt is empty"),
        ([50], 1, "token 50 of the prompt is outside the vocabulary of 50"),
    ],
)
def test_prompts_that_do_not_fit(model, prompt, num_tokens, message):
    with pytest.raises(InputError, match=message):
        generate_tpu.generate(model, list(prompt), GenerateConfig(run_dir="x", num_tokens=num_tokens), None)


@pytest.mark.parametrize(
    "options",
    [
        *({}, dict(run_dir="a", llmc="b"), dict(run_dir="a", temperature=-1.0), dict(run_dir="a", num_tokens=0)),
        dict(llmc="b", checkpoint="best"),
    ],
)
def test_options_that_cannot_work(options):
    with pytest.raises(InputError):
        GenerateConfig(**options)


@pytest.mark.parametrize(
    "dataset, vocab_size, kind",
    [("tokens", 257, "text"), ("tokens", 50257, "tokens"), ("tokens", 300, "numbers"), ("text", 257, "text")],
)
def test_what_the_tokens_of_a_run_are(tmp_path, dataset, vocab_size, kind):
    config = TransformerConfig(dataset=dataset, vocab_size=vocab_size, num_layers=1, num_heads=1, embedding_dim=64)
    trained = GPT(config.shape)
    trained.initialise(0)
    values = {"config": dataclasses.asdict(config)}
    Checkpoints(tmp_path / "checkpoints", 1).save(1, {"model": trained.state_dict()}, values)
    model, found = generate_tpu.load(GenerateConfig(run_dir=str(tmp_path)))
    assert found == kind
    assert torch.equal(model.token_embedding, trained.token_embedding)
    with pytest.raises(InputError, match="step_00000001 names no best checkpoint"):
        generate_tpu.load(GenerateConfig(run_dir=str(tmp_path), checkpoint="best"))


def test_weights_of_llmc_are_loaded(tmp_path):
    shape = ModelShape(2, 2, 32, 16, 257)
    trained = GPT(shape)
    trained.initialise(0)
    convert_llmc.write_model(tmp_path / "model.bin", shape, stack_layers(dict(trained.named_parameters())))
    model, kind = generate_tpu.load(GenerateConfig(llmc=str(tmp_path / "model.bin")))
    assert kind == "text"
    assert all(torch.equal(model.state_dict()[name], value) for name, value in trained.state_dict().items())


class Words:
    """Stands in for GPT-2's tokenizer, whose vocabulary is a download."""

    eot_token = 0

    def encode_ordinary(self, text):
        return [1 + len(word) for word in text.encode().split()]  # as tiktoken's, of text alone

    def decode(self, tokens):
        return " ".join(map(str, tokens))


@pytest.fixture
def prompted(tmp_path, model, monkeypatch, capsysbinary):
    """call(prompt, kind of tokens): (exit code, standard output, standard error) of generate_tpu.py."""

    def call(prompt, kind):
        shape = dataclasses.replace(SHAPE, vocab_size=257)
        asked = GPT(shape)
        asked.initialise(1)
        monkeypatch.setattr(generate_tpu, "load", lambda config: (asked, kind))
        monkeypatch.setattr(generate_tpu, "gpt2_encoding", Words)
        code = run_script(lambda: generate_tpu.main(GenerateConfig(run_dir="x", prompt=prompt, num_tokens=2)))
        return code, *capsysbinary.readouterr()

    return call


def test_a_prompt_that_is_no_text(prompted):
    """Bytes are what a model of bytes reads; GPT-2's tokenizer takes text, a synthetic run numbers."""
    code, out, err = prompted("a\udcff", "text")
    assert code == 0 and out.startswith("a\ufffd".encode()) and b"Traceback" not in err
    for kind, said in (("tokens", b"expected UTF-8"), ("numbers", b"expected token numbers such")):
        code, out, err = prompted("a\udcff", kind)
        assert code == 2 and not out and said in err and err.count(b"\n") == 1
    for prompt in ("9" * 5000, "-1", "1e3", "\ud800", "5 5000000000000000000000"):
        code, _, err = prompted(prompt, "numbers")
        assert code == 2 and err.count(b"\n") == 1, err
    code, out, _ = prompted("<|endoftext|> word", "tokens")
    assert code == 0 and out.startswith(b"<|endoftext|> word")


@pytest.mark.parametrize("kind", ["FIFO", "folder", "character device", "nothing"])
def test_weights_that_are_no_file_are_refused(tmp_path, kind):
    path = make_irregular(tmp_path / "model.bin", kind)
    said = "no such file" if kind == "nothing" else f"is a {kind}"
    with no_hang(), pytest.raises(InputError, match=f"model.bin:? {said}; expected an llm.c GPT-2 model"):
        generate_tpu.check_source(GenerateConfig(llmc=str(path), device="cpu"))
