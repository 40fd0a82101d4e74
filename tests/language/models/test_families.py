"""What each family has to do beside its forward pass: decoding, a loop over its layers, packed rows, adapters."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_xla
from cached_logits import cached_logits
from documents import write_chats
from processes import run
from run_files import assert_identical, state_in
from safetensors.torch import load_file
from test_llama_parity import (
    FACTORS,
    FAMILIES,
    GEMMA3,
    SHAPES,
    hugging_face_model,
    in_our_layout,
    our_loss,
    relative_error,
)
from test_transformer_tpu import losses_of, train_all

from language.generation import decoding
from language.mesh import print_placement
from language.models.gpt import GPT
from language.models.layers import LoRA
from language.models.llama import Llama
from language.options.hf_config import hugging_face_config
from language.options.llama_shape import LlamaShape
from language.options.shapes import START, ModelShape
from language.options.transformer_options import TransformerConfig
from language.weights.run_weights import adapter_names
from language.weights.weight_loading import load_weights
from language.xla.saved_activations import LEVELS, LayerExecution
from tools import convert_hf
from tpu_utils.base.errors import InputError
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.options.parsing import as_json


def random_model(shape: ModelShape, **options):
    model = (Llama if isinstance(shape, LlamaShape) else GPT)(shape, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 - shape.norm_offset if "ln" in name and name.endswith("weight") else 0.0
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator) + mean)
    return model


def tokens_of(shape: ModelShape, rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(shape.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size, lora", [("tiny", None), ("mixtral_tiny", None), ("llama_tiny", LoRA(4, 8.0))])
def test_a_model_with_more_than_its_shape_is_said_to_have_no_mfu_of_it(size, lora):
    """A copy may change the model; FLOPs are counted of the configuration's. Adapters are not in its shape."""
    lines, config = [], TransformerConfig(model_size=size)
    model, run = random_model(config.shape, lora=lora), SimpleNamespace(config=config, print=lines.append)
    print_placement(run, model, lambda name, parameter: ())
    assert not lines
    model.another_layer = torch.nn.Linear(2, 3)
    print_placement(run, model, lambda name, parameter: ())
    (said,) = lines
    assert f"{config.shape.num_parameters + 9:,} parameters: mfu is wrong unless" in said


QUICK = ("gemma3", "phi4", "mixtral")
OTHERS = [pytest.param(name, "CPU", marks=pytest.mark.slow) for name in SHAPES if name not in QUICK]


@pytest.mark.parametrize("name, device", [*((name, "CPU") for name in QUICK), ("stretched", "TPU"), *OTHERS])
def test_decoding_with_the_cache_is_the_forward_pass(name, device, monkeypatch):
    """Rows whose prompts are shorter and longer than the window; a local layer keeps no more than its window. On a TPU
    several heads of keys are one product."""
    monkeypatch.setattr(decoding, "device_type", lambda: device)
    shape, T = dataclasses.replace(SHAPES[name], sequence_length=128), 72
    model = random_model(shape)
    tokens, lengths = tokens_of(shape, 2, T), torch.tensor([3, 41])
    expected = model(tokens).logits[..., : shape.vocab_size].detach()
    model.to(torch_xla.device())
    first, found, cache = cached_logits(model, tokens, lengths.tolist())
    heads = (1, 2 * shape.head_dim) if device == "TPU" else (shape.num_cached_heads, shape.head_dim)
    assert [values.shape[1:] for values in cache.values] == [(*heads, window or T) for window in shape.windows]
    assert first == expected[range(2), lengths - 1].argmax(-1).tolist()
    for row, length in enumerate(lengths.tolist()):
        assert relative_error(found[:, row], expected[row, length : length + len(found)]) < 1e-4, name


@pytest.mark.parametrize(
    "name, execution",
    [
        ("gemma3", LayerExecution(LEVELS["attention"])),
        ("gemma3", LayerExecution(LEVELS["inputs"], scan=True, all_but=2)),
        pytest.param("smollm3", LayerExecution(scan=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_of_several_kinds_in_one_loop_and_run_again(name, execution):
    """Loss and gradients of one layer after the other, in plain PyTorch."""
    shape = SHAPES[name]
    alone, model = random_model(shape), random_model(shape, execution=execution).to(torch_xla.device())
    tokens = tokens_of(shape, 2, 97)
    expected, _ = our_loss(alone, tokens[:, :-1], tokens[:, 1:])
    expected.backward()
    tokens = tokens.to(torch_xla.device())
    found, _ = our_loss(model, tokens[:, :-1], tokens[:, 1:])
    found.backward()
    torch_xla.sync()
    assert abs(found.item() - expected.item()) < 1e-4 * expected.item()
    gradients = dict(alone.named_parameters())
    errors = {n: relative_error(p.grad.cpu(), gradients[n].grad) for n, p in model.named_parameters()}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("name", ["gpt2", "stretched", "mistral", "gemma3"])
def test_documents_of_one_row_do_not_see_each_other(name):
    """Each has the logits, and makes the gradients, that it has and makes alone; with a window, too."""
    shape = FAMILIES[name]
    model, alone = random_model(shape, packed=True), random_model(shape)
    documents = [tokens_of(shape, 1, length, length) for length in (50, 1, 3, 43)]
    documents[1][:] = 0
    marked = [torch.cat((document[:, :1] + START, document[:, 1:]), 1) for document in documents]
    logits = [alone(document).logits for document in documents]
    expected = torch.cat([torch.cat(parts, 1) for parts in (logits, logits[::-1])])
    found = model(torch.cat([torch.cat(parts, 1) for parts in (marked, marked[::-1])])).logits
    assert relative_error(found, expected) < 1e-4
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    gradients = dict(alone.named_parameters())
    errors = {n: relative_error(p.grad, gradients[n].grad) for n, p in model.named_parameters()}
    assert max(errors.values()) < 1e-4, errors


def test_a_layer_with_a_window_counts_its_window_in_the_flops():
    whole = dataclasses.replace(GEMMA3, pattern=("global",))
    T, heads = GEMMA3.sequence_length, GEMMA3.num_heads * GEMMA3.head_dim
    assert whole.flops_per_token - GEMMA3.flops_per_token == 12 * heads * 3 * (T - GEMMA3.window)


# ------------------------------------------------------------------------------------------------------------- adapters
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "tied"])
def test_adapters_equal_those_of_peft(name, tmp_path):
    """As a run exports them, and merged: logits, every gradient and the sums; the base gets no gradient."""
    peft = pytest.importorskip("peft", reason="pip install -r requirements-dev.txt brings peft")
    shape = FAMILIES[name]
    theirs = hugging_face_model(shape)
    for parameter in theirs.parameters():  # the base as a LoRA run has it
        parameter.data = parameter.data.to(torch.bfloat16).float()
    base = in_our_layout(dict(theirs.named_parameters()), shape)
    build = GPT if name == "gpt2" else Llama
    ours = load_weights(lambda: build(shape, lora=LoRA(3, 12)), base.__getitem__, "cpu", None, seed=0)
    trained, compared = ours.trained(), 0
    with torch.no_grad():
        for seed, parameter in enumerate(trained.values()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
    config = TransformerConfig(model_config=json.dumps(hugging_face_config(shape)), dataset="tokens")
    values = as_json(config) | dict(lora_rank=3, lora_alpha=12.0, initial_weights="base")
    Checkpoints(tmp_path / "checkpoints", 1).save(7, {"model": ours.state_dict()}, {"config": values})
    convert_hf.export(tmp_path, tmp_path / "merged", torch.float32)
    convert_hf.export_adapter(tmp_path, tmp_path / "adapter", torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True)
    tokens = tokens_of(shape, 2, 64)
    logits, here = theirs(tokens).logits, ours(tokens).logits[..., : shape.vocab_size]
    assert relative_error(here, logits) < 1e-4
    for values in (logits, here):
        torch.nn.functional.cross_entropy(values[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    parameters, gradients = dict(theirs.named_parameters()), {n: p.grad for n, p in trained.items()}
    for module, parts in convert_hf.adapters(shape).items():
        of_a, of_b = (parameters[f"{module}.lora_{letter}.default.weight"].grad for letter in "AB")
        row = 0
        for number, (part, matrix, _) in enumerate(parts):
            a, b = (gradients[n].reshape(-1, *gradients[n].shape[-2:])[matrix] for n in adapter_names(part))
            assert relative_error(a, of_a[3 * number :][:3]) < 1e-4, (module, number)
            assert relative_error(b, of_b[row:, 3 * number :][: len(b), :3]) < 1e-4, (module, number)
            row, compared = row + len(b), compared + a.numel() + b.numel()
    assert compared == sum(parameter.numel() for parameter in trained.values())
    assert all(p.grad is None and p.dtype == torch.bfloat16 for p in ours.parameters() if not p.requires_grad)
    merged = theirs.merge_and_unload().state_dict()
    for one, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, merged[one], rtol=0, atol=1e-6, msg=one)


# ----------------------------------------------------------------------------------------------------------------- runs
RUN = dict(
    dataset="chat", train_data="chats.jsonl", sequence_length=64, num_steps=10, global_batch_size=8, device="cpu"
)
RUN |= dict(learning_rate=5e-3, warmup_steps=2, log_every=1, save_every=5, eval_every=10, eval_batches=1)
LORA, ALL_WAYS = dict(lora_rank=4, lora_alpha=8.0), ["--gradient_accumulation_steps=2", "--remat", "--scan_layers"]
TUNED = {"gpt2": LORA, "gemma3": {}}


@pytest.mark.slow
def test_runs_of_two_families_are_the_same_on_a_mesh_and_resume_bit_identical(tmp_path):
    """All weights or adapters (a Llama's: tests/language/weights/test_fine_tuning.py); on the mesh accumulated,
    recomputed and scanned, with a tensor axis. Its configuration is what the run has kept."""
    write_chats(tmp_path / "chats.jsonl", 80)
    runs: dict[int, list[list[str]]] = {1: [], 4: []}
    for name, more in TUNED.items():
        base = tmp_path / f"base_{name}"
        shape = FAMILIES[name]
        sizes = dict(vocab_size=257, num_layers=2 if name == "gpt2" else shape.num_layers)
        hugging_face_model(dataclasses.replace(shape, **sizes)).save_pretrained(base)
        options = {**RUN, **more, "initial_weights": base, "data_dir": tmp_path}
        options = [f"--{option}={value}" for option, value in options.items()]
        runs[1] += [[name, *options], [f"{name}/{name}_resumed", *options, "--resume=must"]]
        runs[4].append([f"{name}_mesh", *options, *ALL_WAYS, "--mesh=1x2x2"])
    for devices, of_these in runs.items():
        train_all(tmp_path, devices, of_these)
    for name in TUNED:
        losses = losses_of(tmp_path / name)
        np.testing.assert_allclose(losses_of(tmp_path / f"{name}_mesh"), losses, rtol=1e-4, err_msg=name)
        assert losses[-1] < 0.9 * losses[0], name
        states = [state_in(tmp_path / one / "checkpoints" / "step_00000010") for one in (name, f"{name}_resumed")]
        assert_identical(*states)
        for one in (name, f"{name}_mesh"):
            summary = json.loads((tmp_path / one / "summary.json").read_text())
            assert summary["train_graphs"] == 1 and summary["host_to_device_uploads_per_step"] == 0, one


# --------------------------------------------------------------------------------------------------------- for a slice
FOR_A_TPU = dict(sequence_length=256, head_width=64, embedding_dim=128, mlp_dim=256, vocab_size=512)
PATTERNS = {"gemma3": ("local", "global"), "smollm3": ("global", "unrotated")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "phi4", "mixtral", "smollm3"])
def test_a_step_compiles_for_a_tpu(tmp_path, name):
    """With the kernels of flash attention; of a local layer they know the window. No TPU here runs them."""
    shape = SHAPES[name]
    scaling = shape.rope_scaling
    if scaling and scaling.kind == "longrope":
        scaling = dataclasses.replace(scaling, factor=1.0, original_context=256, **dict.fromkeys(FACTORS, (1.0,) * 24))
    more = dict(rotated_width=shape.rotated_width and 48, window=shape.window and 100, rope_scaling=scaling)
    pattern = PATTERNS.get(name, shape.pattern)
    shape = dataclasses.replace(shape, **FOR_A_TPU, **more, num_layers=len(pattern), pattern=pattern)
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(shape)))
    options = [
        f"--model_config={tmp_path / 'config.json'}",
        "--dataset=chat",
        "--attention=flash",
        "--precision=bfloat16",
    ]
    result = run("transformer_tpu.py", *options, "--global_batch_size=2", "--compile_for=v5litepod-1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "v5litepod-1: compiles and fits" in result.stdout
    assert int(result.stdout.split(" custom-call")[0].split()[-1]) >= 3 * len(pattern)  # kernels of each layer


def test_a_loop_over_layers_has_one_kernel(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(GEMMA3)))
    options = dict(model_config=str(tmp_path / "config.json"), dataset="tokens", attention="flash", scan_layers=True)
    with pytest.raises(InputError, match="layers of gemma3_text have different windows, and a loop has one kernel"):
        TransformerConfig(**options)
    assert TransformerConfig(**options | dict(attention="plain")).shape == GEMMA3


def test_rows_of_conversations_are_no_longer_than_the_context_of_longrope(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(SHAPES["phi4"])))
    options = dict(model_config=str(tmp_path / "config.json"), dataset="chat")
    with pytest.raises(InputError, match=r"^sequence_length is 128, but a row holds .*; choose 64 or less"):
        TransformerConfig(**options)
    assert TransformerConfig(**options, sequence_length=64).shape.rope_scaling.factor == 2
