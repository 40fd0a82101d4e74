"""Sampling: greedy as Hugging Face's generate, a batch as each prompt alone, two graphs, refusals."""

import copy
import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch
import torch_xla
from processes import run
from test_llama_parity import QWEN3, STRETCHED, TIED, UNTIED, hugging_face_model
from test_tokenizer import trained

from language.data.tokenizer import Numbers, load_tokenizer
from language.generation import decoding
from language.models.gpt import GPT
from language.models.layers import LoRA, stack_layers
from language.models.llama import Llama
from language.options.llama_shape import LlamaShape
from language.options.shapes import ModelShape
from language.options.transformer_options import TransformerConfig
from language.weights import llmc_weights, sources
from tools import generate as tool
from tools.generate import GenerateConfig
from tpu_compiler.estimate.report import Report
from tpu_utils.base.errors import InputError, NonFiniteError, run_script
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.device import graphs_compiled, transfers_from_device, transfers_to_device

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt brings transformers")

GPT2 = ModelShape(num_layers=2, num_heads=4, embedding_dim=64, sequence_length=256, vocab_size=300)
SHAPES = {
    "gpt2": GPT2,
    "stretched": dataclasses.replace(STRETCHED, num_layers=2, sequence_length=512),
    "qwen3": dataclasses.replace(QWEN3, num_layers=2, sequence_length=512),
}
MIXTURE = dataclasses.replace(UNTIED, num_layers=1, family="mixtral", num_experts=4, experts_per_token=2, mlp_dim=48)
PROMPTS = [[5, 250, 17], list(range(40, 63)), [299]]


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    """A model of Hugging Face with random weights, as they save it, and the model itself."""
    model = hugging_face_model((SHAPES | {"mixture": MIXTURE})[request.param]).eval()
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path, model


@pytest.fixture(scope="module")
def greedy(folder):
    """(model on the device, 200 greedy tokens for each of three prompts in one batch, graphs that this took)."""
    before = graphs_compiled()
    config = GenerateConfig(hf=str(folder[0]), temperature=0.0, num_tokens=200)
    model = sources.load(tool.source_of(config), torch_xla.device())
    found = decoding.generate(model, PROMPTS, config, torch_xla.device())
    return model, found, graphs_compiled() - before


def test_greedy_tokens_are_those_of_hugging_face_in_two_graphs(folder, greedy):
    _, theirs = folder
    model, found, graphs = greedy
    assert isinstance(model, Llama if isinstance(model.shape, LlamaShape) else GPT)
    given = torch.tensor(PROMPTS[:1])
    options = dict(attention_mask=torch.ones_like(given), do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = theirs.generate(given, max_new_tokens=20, **options)
    assert found[0][:20] == expected[0, len(PROMPTS[0]) :].tolist()
    for prompt, tokens in zip(PROMPTS, found, strict=True):  # the same, by one pass over what was found
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert len(tokens) == 200 and tokens == logits.argmax(-1).tolist()
    assert len({token for row in found for token in row}) > 5, "not one cycle of two tokens for all"
    assert graphs == 2


def with_quantized_weights(model):
    """The model in plain PyTorch, each matrix as its int8 values times the scales of its outputs."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "wpe" not in name:
                inputs = 0 if ".h." in name else 1  # GPT-2's layers are (inputs, outputs)
                scale = parameter.abs().amax(inputs, keepdim=True) / 127
                parameter.copy_((parameter / scale).round() * scale)
    return model


def test_int8_tokens_are_those_of_plain_pytorch_with_the_same_weights(folder):
    """And what the logits lose: at most 3 % of their spread, of the root mean square."""
    path, theirs = folder
    config = GenerateConfig(hf=str(path), temperature=0.0, num_tokens=60, int8=True)
    before, device = graphs_compiled(), torch_xla.device()
    model = sources.load(tool.source_of(config), device, config.int8)
    found = decoding.generate(model, PROMPTS, config, device)
    assert graphs_compiled() - before == 2
    quantized = with_quantized_weights(theirs)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            exact, logits = (m(torch.tensor([prompt + tokens])).logits[0] for m in (theirs, quantized))
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert 0 < (logits - exact).square().mean().sqrt() < 0.03 * exact.std()


@pytest.mark.parametrize(
    ("folder", "devices", "int8"),
    [("stretched", 2, "--int8"), ("mixture", 2, "")],
    indirect=["folder"],
)
def test_tokens_of_a_mesh_are_those_of_one_device(folder, devices, int8, capsys):
    asked = dict(hf=str(folder[0]), device="cpu", num_tokens=12, prompt=("5 250 17", "299"), int8=bool(int8))
    assert run_script(lambda: tool.main(GenerateConfig(**asked))) == 0
    expected = capsys.readouterr().out
    command = ["tools.generate", "--hf", folder[0], "--prompt", "5 250 17", "299", "--num_tokens=12", "--device=cpu"]
    result = run(*command, "--devices=all", *int8.split(), CPU_NUM_DEVICES=str(devices))
    assert result.stdout == expected and "24 tokens, 2 graphs" in result.stderr, result.stderr


@pytest.mark.parametrize(
    "folder, options, said",
    [
        ("mixture", dict(int8=True), "int8 is on, but the model is a mixture of experts"),
        (
            "stretched",
            dict(devices="all"),
            "2 heads of keys and values, which 3 devices cannot share; use --dev",
        ),
    ],
    indirect=["folder"],
)
def test_a_model_that_cannot_be_loaded_so_is_refused(folder, options, said, monkeypatch, capsys):
    monkeypatch.setattr(sources, "device_count", lambda: 3)
    config = GenerateConfig(hf=str(folder[0]), prompt=("5",), device="cpu", **options)
    assert run_script(lambda: tool.main(config)) == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_token_costs_on_a_slice(tmp_path):
    """Four devices share the model, and no copy of the weights is made that is wider than int8."""
    values = CONFIG_OF_LLAMA_TINY | dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=8)
    values |= dict(num_key_value_heads=4, head_dim=128, vocab_size=4096, max_position_embeddings=512)
    (tmp_path / "config.json").write_text(json.dumps(values))
    command = ["tools.generate", "--hf", tmp_path, "--compile_for=v6e-4", "--devices=all", "--int8", "--context=256"]
    result = run(*command, "--num_prompts=8", AOT_TPU_OUTPUT=str(tmp_path))
    assert result.returncode == 0, result.stderr
    r = Report(**json.loads((tmp_path / "report.json").read_text()))
    weights = 4096 * 1024 + 2 * (2 * 1024**2 + 2 * 512 * 1024 + 3 * 4096 * 1024)
    assert r.fits and r.devices == 4 and r.unit == "tokens" and "all-reduce" in r.collectives
    assert weights / 4 <= r.memory["parameters"] < 1.1 * weights / 4
    assert r.memory["activations"] < weights / 4
    assert r.decode["tokens"] == decoding.TOKENS and r.decode["cache_bytes"] == 2 * 2 * 8 * 4 * 256 * 128 * 2
    assert r.decode["read_bytes"] == pytest.approx(weights / 4 + r.decode["cache_bytes"] / 4, rel=0.02)
    assert r.decode["is_a_speed"], "the choice of a token has not taken the head's product into its loop"


TINY = LlamaShape(2, 4, 32, 16, 50, num_kv_heads=2, mlp_dim=64, tied_head=True, rope_theta=1e4)


@pytest.fixture(scope="module")
def tiny():
    """A model with weights far from uniform, so that a wrong key or position shows."""
    model = Llama(TINY)
    model.initialise(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model.to(torch_xla.device())


def sample(model, prompts, num_tokens=6, ends=lambda tokens: False, stops=(), **options):
    config = GenerateConfig(run_dir="x", num_tokens=num_tokens, **options)
    return decoding.generate(model, prompts, config, torch_xla.device(), ends, config.context, stops)


def test_the_host_is_asked_once_in_a_loop_which_uploads_nothing_and_the_last_one_is_no_other_graph(tiny, monkeypatch):
    monkeypatch.setattr(decoding, "TOKENS", 4)
    prompts, uploads = [[3, 1], [4], [5, 6, 7]], set()
    whole, graphs = sample(tiny, prompts, num_tokens=9), graphs_compiled()  # the first, and two loops
    for num_tokens in (1, 2, 5, 7, 12):
        begin, up = transfers_from_device(), transfers_to_device()
        found = sample(tiny, prompts, num_tokens=num_tokens)
        assert [row[:9] for row in found] == [row[:num_tokens] for row in whole]
        assert transfers_from_device() - begin == 1 + -(-(num_tokens - 1) // 4)
        uploads.add(transfers_to_device() - up)
    assert graphs_compiled() == graphs and len(uploads) == 1


def test_a_batch_is_each_prompt_alone(tiny):
    prompts = [[3, 1], [4], [5, 6, 7, 8, 9]]
    options = dict(seed=2, temperature=1.5, top_p=0.8, top_k=20)
    together = sample(tiny, prompts, **options)
    assert together == [sample(tiny, [prompt], **options)[0] for prompt in prompts]
    again, other, _ = sample(tiny, [[3, 1], [3, 1], [4]], **options)
    assert again == together[0] != other, "equal prompts differ"


@pytest.mark.parametrize(("device", "expected"), [("TPU", [2, 3]), ("CPU", [1, 3])])
def test_one_prompt_is_computed_as_two_rows_on_a_tpu(tiny, monkeypatch, device, expected):
    """By the TPU compiler's estimate one row takes 2.4 times as long: docs/language_models.md."""
    rows = []
    prefill = decoding.prefill
    monkeypatch.setattr(decoding, "device_type", lambda: device)
    monkeypatch.setattr(decoding, "prefill", lambda *a: rows.append(len(a[2])) or prefill(*a))
    alone, together = sample(tiny, [[3, 1]]), sample(tiny, [[3, 1], [4], [5]])
    assert rows == expected and alone[0] == together[0]


def reference(logits, temperature, top_k, top_p):
    """Probabilities after both, one by one."""
    p = np.exp(np.float64(logits) / temperature)
    order = sorted(range(len(p)), key=lambda token: -p[token])[: top_k or None]
    total, kept = sum(p[token] for token in order), []
    for token in order:
        kept.append(token)
        if sum(p[token] for token in kept) >= top_p * total:
            break
    return [p[token] / sum(p[kept]) if token in kept else 0.0 for token in range(len(p))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.5, 2, 1.0), (1.0, 0, 0.75), (2.0, 4, 0.9), (0.7, 0, 1.0), (1.0, 9, 0.01)]
)
def test_what_is_drawn_has_the_probabilities_of_the_reference(temperature, top_k, top_p):
    row = torch.tensor([0.0, 2.5, 2.0, 3.0, -1.0, 1.5])
    uniform = torch.rand(40000, 6, generator=torch.Generator().manual_seed(0))
    drawn = decoding.choose(row.expand(40000, 6), uniform, temperature, top_k, top_p)
    share = torch.bincount(drawn, minlength=6) / 40000
    expected = reference(row.numpy(), temperature, top_k, top_p)
    np.testing.assert_allclose(share, expected, atol=0.01)
    assert [s > 0 for s in share] == [e > 0 for e in expected]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([range(17)], dict(num_tokens=1), "^the prompt has 17 tokens and 1 are to follow, but the context is 16; .* 0"),
        ([range(3), range(10)], dict(num_tokens=8), "^prompt 2 has 10 tokens and 8 .* at most 7 tokens"),
        ([range(5)], dict(num_tokens=5, context=8), "the context is 8; .*at most 4 tokens"),
        ([range(5)], dict(context=17), "context is 17, but the model reads 16 tokens"),
        ([[]], {}, "the prompt is empty"),
        ([[1], [50]], {}, "token 50 of prompt 2 is outside the vocabulary of 50"),
        ([[-1]], {}, "token -1 of the prompt is outside"),
    ],
)
def test_prompts_that_do_not_fit(prompts, options, message):
    with pytest.raises(InputError, match=message):
        decoding.check_lengths(TINY, [list(p) for p in prompts], **options)


def test_the_cache_is_as_long_as_needed():
    lengths = partial(decoding.check_lengths, dataclasses.replace(TINY, sequence_length=131072))
    assert lengths([[1], [1] * 29]) == (100, 128) and lengths([[1], [1] * 30]) == (100, 256)
    assert lengths([[1]], num_tokens=131072) == (131072, 131072) and lengths([[1]], context=64) == (64, 64)
    assert decoding.check_lengths(TINY, [[1]]) == (16, 16)


@pytest.mark.parametrize(
    "options",
    [
        *({}, dict(run_dir="a", llmc="b"), dict(run_dir="a", temperature=-1.0), dict(run_dir="a", num_tokens=0)),
        *(dict(llmc="b", checkpoint="best"), dict(hf="a", run_dir="b"), dict(hf="a", top_p=0.0), dict(hf="a", top_p=2)),
        *(dict(hf="a", top_k=-1), dict(hf="a", context=-1), dict(hf="a", stop=("",))),
        *(dict(hf="a", prompt=("a",), chat=("b",)), dict(hf="a", num_prompts=2), dict(hf="a", compile_for="v6e-1")),
        dict(hf="a", compile_for="v6e-1", context=9, prompt=("a",)),
        dict(hf="a", compile_for="v6e-1", context=9, num_prompts=0),
        dict(hf="a", compiler_options="xla_tpu_scoped_vmem_limit_kib"),
    ],
)
def test_options_that_cannot_work(options):
    with pytest.raises(InputError):
        GenerateConfig(**options)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (dict(dataset="tokens", vocab_size=257), "Bytes"),
        (dict(dataset="tokens", vocab_size=300), "Numbers"),
        (dict(dataset="synthetic", vocab_size=257), "Numbers"),
        (dict(dataset="text", model_size="llama_tiny"), "Bytes"),
    ],
)
def test_a_run_brings_its_model_and_tokenizer(tmp_path, options, kind):
    sizes = {} if "model_size" in options else dict(num_layers=1, num_heads=1, embedding_dim=64)
    config = TransformerConfig(**options, **sizes)
    saved = (Llama if isinstance(config.shape, LlamaShape) else GPT)(config.shape)
    saved.initialise(0)
    state = {"model": saved.state_dict()}
    Checkpoints(tmp_path / "checkpoints", 1).save(1, state, {"config": dataclasses.asdict(config)})
    source = sources.open_source(run_dir=str(tmp_path))
    assert type(source.tokenizer).__name__ == kind and source.shape == config.shape
    assert source.start == (None if kind == "Numbers" else 256)
    found = sources.load(source, torch_xla.device()).state_dict()
    assert found.keys() == saved.state_dict().keys()
    assert all(torch.equal(found[name].cpu(), value) for name, value in saved.state_dict().items())
    with pytest.raises(InputError, match="step_00000001 names no best checkpoint"):
        sources.open_source(run_dir=str(tmp_path), checkpoint="best")


CONFIG_OF_LLAMA_TINY = dict(model_type="llama", num_hidden_layers=2, num_attention_heads=4, hidden_size=128)
CONFIG_OF_LLAMA_TINY |= dict(max_position_embeddings=64, vocab_size=257, num_key_value_heads=2, intermediate_size=384)
CONFIG_OF_LLAMA_TINY |= dict(tie_word_embeddings=True, rope_theta=1e4, rms_norm_eps=1e-5)
LLMC = ModelShape(2, 2, 32, 16, 257)


def test_weights_of_llmc_are_loaded(tmp_path):
    saved = GPT(LLMC)
    saved.initialise(0)
    llmc_weights.write_model(tmp_path / "model.bin", LLMC, stack_layers(dict(saved.named_parameters())))
    source = sources.open_source(llmc=str(tmp_path / "model.bin"), precision="bfloat16")
    assert type(source.tokenizer).__name__ == "Bytes"
    found = sources.load(source, torch_xla.device()).state_dict()
    for name, value in saved.state_dict().items():
        is_large = ("weight" in name and "ln" not in name) or name == "token_embedding"
        assert torch.equal(found[name].cpu(), value.to(torch.bfloat16) if is_large else value), name


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("kind", ["hf", "llmc", "run", "adapter"])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path, kind, value):
    if kind == "hf":
        model = hugging_face_model(GPT2)
        model.transformer.h[1].mlp.c_fc.weight.data[3, 5] = value
        model.save_pretrained(tmp_path)
        source, named = dict(hf=str(tmp_path)), "transformer.h.1.mlp.c_fc.weight: 1 of 16,384 values"
    elif kind == "llmc":
        model = GPT(LLMC)
        model.initialise(0)
        model.get_parameter("mlp_out_weight.1").data[3, 5] = value
        llmc_weights.write_model(tmp_path / "model.bin", LLMC, stack_layers(dict(model.named_parameters())))
        source, named = dict(llmc=str(tmp_path / "model.bin")), "model.bin: mlp_out_weight: 1 of 8,192"
    else:
        config = TransformerConfig(dataset="text", model_size="llama_tiny")
        values = dataclasses.asdict(config) | dict(lora_rank=2, lora_alpha=8.0, initial_weights=str(tmp_path))
        values["model_config"] = json.dumps(CONFIG_OF_LLAMA_TINY)
        model = Llama(config.shape, lora=LoRA(2, 8.0))
        model.initialise(0)
        name = "q_lora_a.1" if kind == "adapter" else "gate_up_weight.1"
        model.get_parameter(name).data.view(-1)[-1] = value
        Checkpoints(tmp_path / "checkpoints", 1).save(1, {"model": model.state_dict()}, {"config": values})
        source, named = dict(run_dir=str(tmp_path)), f"step_00000001: {name}: 1 of"
    for int8 in (False, True):
        with pytest.raises(InputError, match=f"{named}.* infinite or not a number"):
            sources.load(sources.open_source(**source), torch_xla.device(), int8)


@pytest.mark.parametrize("temperature, top_k", [(0, 0), (1.0, 0), (1.0, 5)])
def test_logits_that_are_no_numbers_are_no_answer(temperature, top_k):
    """Weights that are numbers, each of them, may be too large for their sums."""
    model = Llama(TINY)
    model.initialise(1)
    with torch.no_grad():
        model.token_embedding[9] = 3e38
    with pytest.raises(NonFiniteError, match="the logits behind 3 tokens are infinite or not a number"):
        sample(model.to(torch_xla.device()), [[5, 6, 7]], temperature=temperature, top_k=top_k)


@pytest.fixture
def prompted(monkeypatch, capsysbinary):
    """call(tokenizer, replies, options): (exit code, standard output, standard error) of tools.generate, for a model
    with this tokenizer that replies so, and the prompts that the model got."""

    def call(tokenizer, replies=((65, 66, 67),), **options):
        given = []

        def until_end(reply, ends):
            return next((reply[:count] for count in range(1, len(reply)) if ends(reply[:count])), reply)

        def generate(model, prompts, config, device, ends, context, stops):
            given.extend(prompts)
            return [until_end(list(reply), ends) for reply in replies]

        shape = dataclasses.replace(TINY, vocab_size=tokenizer.vocab_size, sequence_length=64)
        format = options.get("chat_format", "auto")
        source = sources.Source(shape, torch.float32, None, tokenizer, tokenizer.begin, format)
        monkeypatch.setattr(tool, "source_of", lambda config: source)
        monkeypatch.setattr(tool, "load", lambda source, device, int8, mesh: None)
        monkeypatch.setattr(tool, "generate", generate)
        code = run_script(lambda: tool.main(GenerateConfig(run_dir="x", **options)))
        return code, *capsysbinary.readouterr(), given

    return call


def test_a_prompt_that_is_no_text(prompted):
    """Bytes are what a model of bytes reads; other tokenizers take text, a synthetic run numbers."""
    code, out, err, given = prompted(load_tokenizer("bytes"), prompt=("a\udcff",))
    assert code == 0 and out == "a\ufffdABC\n".encode() and given == [[256, 97, 255]]
    for prompt in ("a\udcff", "9" * 5000, "-1", "1e3", "\ud800", "5 5000000000000000000000"):
        code, out, err, _ = prompted(Numbers(300), prompt=(prompt,))
        assert code == 2 and not out and err.count(b"\n") == 1, err
    assert prompted(Numbers(300), prompt=("3 17",))[1] == b"3 17 65 66 67\n"


def test_several_prompts_end_tokens_and_texts(prompted):
    found = load_tokenizer("bytes")
    replies = [[*b"one\nUser: more"], [*b"two", 256, 65]]
    _, out, err, given = prompted(found, replies, prompt=("ab", "User: c "), stop=("\nUser",))
    assert out == b"abone\n---\nUser: c two\n" and given == [[256, *b"ab"], [256, *b"User: c "]]
    assert b"12 tokens" in err, "8 bytes up to the stop; 3 and the end"


def test_a_chat_goes_through_its_format(prompted, tmp_path):
    found = load_tokenizer(str(trained(tmp_path)))
    answer = [*found.encode("to be"), found.token("<|im_end|>"), 9]
    code, out, err, given = prompted(found, [answer], chat=("or not",))
    assert out == b"to be\n" and code == 0, err
    assert found.decode(given[0]) == "<|im_start|>user\nor not<|im_end|>\n<|im_start|>assistant\n"
    code, out, err, given = prompted(load_tokenizer("bytes"), [[*b" yes", 256]], chat=("or not",))
    assert bytes(given[0][1:]) == b"User: or not\nAssistant:"
    assert out == b"yes\n", "the format's space before an answer is none of the answer's"
    code, _, err, _ = prompted(load_tokenizer("bytes"), chat=("or not",), chat_format="chatml")
    assert code == 2 and b"the tokenizer has no token <|im_start|>" in err


def test_what_a_folder_asks_for_that_is_not_done_is_said(tmp_path, capsys):
    said = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 0, "eos_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    tool.tell_not_done(tmp_path)
    assert "repetition_penalty 1.3 makes other tokens" in capsys.readouterr().err
    (tmp_path / "generation_config.json").write_text(json.dumps(said | {"repetition_penalty": 1.0}))
    tool.tell_not_done(tmp_path)
    assert not capsys.readouterr().err


def test_a_folder_of_hugging_face_from_end_to_end(tmp_path, capsys):
    """Its own tokenizer, with what that puts in front of a text; the same tokens as their library's."""
    folder = trained(tmp_path, begins=True)
    theirs = hugging_face_model(dataclasses.replace(TIED, num_layers=1, vocab_size=284, sequence_length=128))
    theirs.save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    fast._tokenizer.no_truncation(), fast._tokenizer.no_padding()
    given = fast("to be or", return_tensors="pt").input_ids
    options = dict(attention_mask=torch.ones_like(given), do_sample=False, eos_token_id=0, pad_token_id=0)
    _, *expected = theirs.generate(given, max_new_tokens=20, **options)[0].tolist()
    config = GenerateConfig(hf=str(folder), prompt=("to be or",), temperature=0.0, num_tokens=20, device="cpu")
    tool.check_source(config)
    assert run_script(lambda: tool.main(config)) == 0
    out, err = capsys.readouterr()
    assert out == fast.decode(expected[:-1] if expected[-1] == 0 else expected) + "\n"
    assert given[0, 0] == 1 and "tokens, 2 graphs" in err
