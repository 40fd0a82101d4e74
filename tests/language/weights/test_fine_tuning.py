"""A fine-tune on conversations, as users run it: the same losses on one device, on a mesh and in plain PyTorch, of all
weights and of adapters; resumed, exported, and read by the libraries of others."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from documents import write_chats
from processes import run
from run_files import assert_identical, state_in
from test_llama_parity import SHAPES, TIED, hugging_face_model
from test_transformer_tpu import losses_of, train_all

from language.build import build_model
from language.models.layers import LoRA, is_matrix
from language.models.llama import Llama
from language.options.shapes import START
from language.options.transformer_options import TransformerConfig
from language.sequences import load_sequences
from language.weights.hf_files import open_weights
from language.weights.weight_loading import load_weights
from tools import convert_hf
from tpu_utils.base.errors import InputError
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.options.parsing import as_json
from tpu_utils.step.optim import learning_rates

RUN = dict(dataset="chat", train_data="chats.jsonl", sequence_length=96, num_steps=10, global_batch_size=8)
RUN |= dict(learning_rate=5e-3, warmup_steps=2, log_every=1, save_every=5, eval_every=5, eval_batches=1)
LORA = dict(lora_rank=4, lora_alpha=8.0)
ALL_WAYS = ["--gradient_accumulation_steps=2", "--remat", "--scan_layers"]
# a rate so small that no weight changes: what goes through the shards comes out as it went in
STILL = ["--num_steps=1", "--warmup_steps=0", "--learning_rate=1e-30", "--save_every=1"]


def options_of(folder: Path, **changes) -> list[str]:
    options = {**RUN, "initial_weights": folder / "base", "data_dir": folder, "device": "cpu", **changes}
    return [f"--{name}={value}" for name, value in options.items()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """On one device all, lora, resumed and mixture; on four mesh, an adapter in all ways at once, and still_mesh."""
    folder = tmp_path_factory.mktemp("tuned")
    write_chats(folder / "chats.jsonl")
    shape = dict(num_layers=2, sequence_length=128, vocab_size=257)
    model = hugging_face_model(TIED.__class__(**{**vars(TIED), **shape}))
    model.save_pretrained(folder / "wide")
    model.to(torch.bfloat16).save_pretrained(folder / "base")
    resumed = ["lora/resumed", *options_of(folder, **LORA), "--resume=must"]
    experts = dict(vars(SHAPES["mixtral"]), **shape | dict(num_experts=4))
    hugging_face_model(TIED.__class__(**experts)).save_pretrained(folder / "experts")
    steps = dict(num_steps=6, save_every=6, eval_every=6, initial_weights=folder / "experts")
    mixture = ["mixture", *options_of(folder, **steps), "--scan_layers"]
    alone = [["all", *options_of(folder)], ["lora", *options_of(folder, **LORA)], resumed, mixture]
    train_all(folder, 1, alone)
    tuned = ["mesh", *options_of(folder, **LORA), *ALL_WAYS, "--mesh=1x2x2"]
    train_all(folder, 4, [tuned, ["still_mesh", *options_of(folder), *STILL, "--mesh=1x2x2"]])
    return folder


def config_of(runs: Path, **changes) -> TransformerConfig:
    return TransformerConfig(**RUN, initial_weights=str(runs / "base"), data_dir=str(runs), **changes)


def plain_pytorch(config: TransformerConfig) -> list[float]:
    """Losses with each conversation in a row of its own, under plain PyTorch on the CPU."""
    weights = open_weights(Path(config.initial_weights), config.shape)
    lora = LoRA(config.lora_rank, config.lora_alpha) if config.lora_rank else None
    model = load_weights(lambda: Llama(config.shape, lora=lora), weights.read, "cpu", None, config.seed)
    trained = model.trained()
    groups = [{"params": [p for n, p in trained.items() if is_matrix(n) == on]} for on in (True, False)]
    groups = [
        group | {"weight_decay": 0.1 * is_on} for group, is_on in zip(groups, (1, 0), strict=True) if group["params"]
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    data, losses = load_sequences(config).train, []
    for step, rate in enumerate(learning_rates(config, config.num_steps).tolist()):
        documents = []
        for row in data.batch(step).astype(np.int64):
            begins = np.flatnonzero((row < 0) & (~row >= START))
            documents += np.split(row, begins[begins > 0])
        alone = np.full((len(documents), max(map(len, documents))), -1)  # each in a row of its own
        for line, document in zip(alone, documents, strict=True):
            line[: len(document)] = np.where((document < 0) & (~document >= START), document + START, document)
        tokens = torch.from_numpy(np.where(alone < 0, ~alone, alone))
        logits = model(tokens[:, :-1]).logits[..., : config.shape.vocab_size]
        targets = torch.from_numpy(np.where(alone < 0, -1, alone))[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("names, options", [(["all"], {}), (["lora", "mesh"], LORA)])
def test_packed_conversations_on_any_devices_equal_plain_pytorch_without_packing(runs, names, options):
    expected = plain_pytorch(config_of(runs, **options))
    assert expected[-1] < 0.9 * expected[0]
    for name in names:
        np.testing.assert_allclose(losses_of(runs / name), expected, rtol=2e-5, err_msg=name)
        summary = json.loads((runs / name / "summary.json").read_text())
        assert summary["train_graphs"] == 1 and summary["host_to_device_uploads_per_step"] == 0, name


def test_a_lora_run_resumes_bit_identical_and_its_checkpoint_has_base_adapters_and_their_moments_alone(runs):
    states = [state_in(runs / name / "checkpoints" / "step_00000010") for name in ("lora", "resumed")]
    assert_identical(*states)
    for name in ("lora", "mesh"):
        state = state_in(runs / name / "checkpoints" / "step_00000010")
        adapters = [path for path in state if path.startswith("model/") and "_lora_" in path]
        moments = [path for path in state if path.endswith("exp_avg_sq")]
        assert len(adapters) == len(moments) == 2 * 5 * 2, name  # a and b of five matrices of two layers
        base = open_weights(runs / "base", config_of(runs).shape)
        assert all(torch.equal(state[f"model/{name}"], base.read(name)) for name in base.names), name


def test_a_mixture_of_experts_learns_chats_and_its_export_is_a_mixture(runs, tmp_path):
    losses, summary = losses_of(runs / "mixture"), json.loads((runs / "mixture" / "summary.json").read_text())
    assert losses[-1] < 0.9 * losses[0] and summary["train_graphs"] == 1
    first, *others = map(sum, summary["tokens_of_experts"])  # one number a layer
    assert others == [first] and first % (2 * RUN["sequence_length"]) == 0, "two experts for each token of whole rows"
    convert_hf.export(runs / "mixture", tmp_path / "out", torch.float32)
    base, found = (json.loads((folder / "config.json").read_text()) for folder in (runs / "experts", tmp_path / "out"))
    names = "model_type", "architectures", "num_local_experts", "num_experts_per_tok"
    assert [found[name] for name in names] == [base[name] for name in names] and found["num_local_experts"] == 4
    assert (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_mesh_exports_what_it_read(runs, tmp_path):
    """Of a run that changed no weight those of its base, to the last bit."""
    convert_hf.export(runs / "still_mesh", tmp_path / "out", torch.bfloat16)
    base, found = open_weights(runs / "base"), open_weights(tmp_path / "out")
    assert [*base.names] == [*found.names] and all(torch.equal(base.read(n), found.read(n)) for n in base.names)
    assert found.read("token_embedding").dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_base_in_float32_is_rounded_if_asked_alone_and_the_export_says_so(runs, tmp_path, capsys, precision):
    """The adapter belongs to the folder that it names, as peft reads it, and brings its template along."""
    own = dict(lora_base="bfloat16") if precision == "bfloat16" else {}
    config = TransformerConfig(**RUN, **LORA, initial_weights=str(runs / "wide"), data_dir=str(runs), **own)
    model = build_model(config, None, "cpu", None, initialised=True)
    state, weights = model.state_dict(), open_weights(runs / "wide")
    assert config.base_precision == precision and not model.token_embedding.requires_grad
    assert all(torch.equal(state[one], weights.read(one).to(getattr(torch, precision))) for one in weights.names)
    Checkpoints(tmp_path / "checkpoints", 1).save(1, {"model": state}, {"config": as_json(config)})
    convert_hf.export_adapter(tmp_path, tmp_path / "adapter", torch.float32)
    said = f"rounded to bfloat16, as the run had them: load {runs}/wide with dtype="
    assert (said in capsys.readouterr().out) == bool(own)
    adapter = tmp_path / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(runs / "wide")
    assert (adapter / "chat_template.jinja").exists() and (adapter / "generation_config.json").exists()


def test_a_folder_whose_tensors_are_not_what_it_says_is_refused(runs, tmp_path):
    """Else LoRA would round them, and nobody would know."""
    shutil.copytree(runs / "wide", tmp_path / "base")
    said = (tmp_path / "base" / "config.json").read_text().replace('"float32"', '"bfloat16"')
    (tmp_path / "base" / "config.json").write_text(said)
    config = TransformerConfig(**RUN, **LORA, initial_weights=str(tmp_path / "base"), data_dir=str(runs))
    with pytest.raises(InputError, match=r"config\.json says bfloat16, but the tensors are float32; expected one type"):
        build_model(config, None, "cpu", None, initialised=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume=must", "--initial_weights={other}"], "its config.json is not that of the run"),
        (["--initial_weights={other}", "--dataset=chat"], "has no model.safetensors and no index"),
        (["--resume=must", "--lora_rank=8"], "lora_rank is 8, was 4"),
        (["--initial_weights={base}", "--dataset=synthetic"], "random tokens; choose --dataset chat or tokens"),
        (["--initial_weights={base}", "--dataset=chat", "--sequence_length=1024"], "reads 128; choose 128 or less"),
        (["--initial_weights={base}", "--dataset=chat", "--model_size=tiny"], "--model_size has no effect"),
        (["--initial_weights={missing}"], "initial_weights: .* no such file; expected a model.s config.json"),
    ],
)
def test_what_does_not_belong_together_is_refused_before_torch_is_imported(runs, tmp_path, options, message):
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((runs / "base" / "config.json").read_text()) | {"rope_theta": 5e5}
    (other / "config.json").write_text(json.dumps(config))
    places = dict(other=other, base=runs / "base", missing=tmp_path / "missing")
    folder = runs / "lora" if "--resume=must" in options else tmp_path / "run"
    done = run("transformer_tpu.py", "--run_dir", folder, *(option.format(**places) for option in options))
    assert done.returncode == 2 and re.search(message, done.stderr), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "run").exists()
