"""Tokens that a folder's model never trained: found, named before the first step, started elsewhere when asked."""

import json
import re

import pytest
import torch
from test_llama_parity import hugging_face_model
from test_tokenizer_files import ANSWERS, config_of, train_tokenizer
from test_transformer_tpu import train_all

from language.options.hf_config import shape_of
from language.options.transformer_options import TransformerConfig
from language.weights.hf_files import open_weights
from language.weights.new_tokens import untrained_rows, with_new_tokens
from tpu_utils.base.errors import InputError

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt brings transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_nobody_trained_are_told_from_those_that_are(dtype):
    """transformers' resize_token_embeddings() starts new ones at the mean of all."""
    rows = (torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0)) * 0.05 + 0.02).to(dtype)
    assert untrained_rows(rows, list(range(20_000))) == {}
    rows[3], rows[15_000], rows[7] = 0, 1e-23, rows.float().mean(0).to(dtype)
    assert untrained_rows(rows, [1, 3, 7, 15_000]) == {3: "0", 7: "the mean of all rows", 15_000: "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base model with a tokenizer that has tokens of conversations, whose rows are 0, and conversations."""
    place = tmp_path_factory.mktemp("new")
    base = train_tokenizer(place / "base")
    said = json.loads((base / "config.json").read_text())
    model = hugging_face_model(shape_of(said))
    model.model.embed_tokens.weight.data += 0.05
    model.model.embed_tokens.weight.data[1:3] = 0  # <|im_start|>, <|im_end|>
    model.save_pretrained(base)
    said = ({"prompt": asked, "completion": answer} for asked, answer in [*ANSWERS.items()] * 4)
    (place / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in said))
    return place


NEW = r"untrained  <\|im_start\|>, <\|im_end\|>: rows are 0 in token_embedding; "


def read_with(config) -> tuple[list[str], torch.Tensor]:
    """What is printed, and the embedding that training begins with."""
    weights, lines = open_weights(config.initial_weights, config.shape), []
    read = with_new_tokens(config, weights.names, weights.read, lines.append)
    return lines, read("token_embedding")


def test_new_tokens_start_at_the_mean_of_the_trained_rows(folder):
    config = config_of(folder / "base", "chatml", initialise_new_tokens="mean")
    lines, changed = read_with(config)
    assert len(lines) == 1 and re.fullmatch(NEW + "they start at the mean of the trained ones", lines[0])
    rows = open_weights(folder / "base").read("token_embedding")
    trained = [row for row in range(config.shape.vocab_size) if row not in (1, 2)]
    torch.testing.assert_close(changed[1], rows[trained].mean(0), rtol=0, atol=1e-7)
    assert torch.equal(changed[1], changed[2]) and torch.equal(changed[trained], rows[trained])
    assert not changed[config.shape.vocab_size :].any(), "the padding of the vocabulary stays 0"


@pytest.mark.parametrize(
    "format, options, said",
    [
        ("chatml", {}, NEW + "gradients through 0 are so large .*--initialise_new_tokens mean"),
        ("chatml", dict(lora_rank=2), NEW + "adapters leave them so: the model may never end .*--chat_format plain"),
        ("llama3", {}, None),
        ("plain", dict(initialise_new_tokens="mean"), None),
    ],
)
def test_what_is_said_and_left_as_it_is(folder, format, options, said):
    config = config_of(folder / "base", format, **options)
    lines, found = read_with(config)
    assert torch.equal(found, open_weights(folder / "base").read("token_embedding"))
    assert not lines if said is None else re.fullmatch(said, *lines), lines


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(lora_rank=2), "initialise_new_tokens is mean, but adapters leave these rows as they are; expected a run"),
        (dict(initial_weights=""), "initialise_new_tokens is mean, but there are no initial_weights; expected"),
    ],
)
def test_nothing_can_start_where_nothing_trains_it(folder, options, message):
    options = dict(dataset="chat", initial_weights=str(folder / "base"), initialise_new_tokens="mean") | options
    with pytest.raises(InputError, match=message):
        TransformerConfig(**options)


def test_a_run_warns_before_its_first_step_and_shows_the_largest_gradient(folder, tmp_path):
    options = [f"--data_dir={folder}", "--dataset=chat", "--train_data=chats.jsonl", "--chat_format=chatml"]
    options += [f"--initial_weights={folder / 'base'}", "--num_steps=2", "--log_every=2", "--warmup_steps=0"]
    options += ["--global_batch_size=2", "--sequence_length=64", "--device=cpu", "--eval_batches=1"]
    said = train_all(tmp_path, 1, [["zero", *options]])
    assert re.search(NEW + r"gradients.*\n(.*\n)*?step .* norm \S+  largest ", said), said
    lines = map(json.loads, (tmp_path / "zero" / "metrics.jsonl").read_text().splitlines())
    (line,) = [line for line in lines if line["kind"] == "train"]
    assert line["largest_gradient_norm"] > line["gradient_norm"] > 100
