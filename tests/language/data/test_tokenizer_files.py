"""The files that go out with a model: the same tokens for a chat, and the same end, in the libraries of others."""

import dataclasses
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import torch_xla
from test_chat_data import MESSAGES
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from language.data.chat import FORMATS, TEMPLATES, format_chat, prompt_of_chat, stop_tokens
from language.data.llmc_files import write_token_shard
from language.data.tokenizer import Bytes, load_tokenizer
from language.data.tokenizer_files import (
    export_tokenizer,
    keep_with_shards,
    reads_as_trained,
    tokenizer_by_size,
    tokenizer_of_run,
)
from language.data.tokens import check as check_shards
from language.generation.decoding import generate
from language.generation.sampling import SamplingOptions, ask
from language.models.llama import Llama
from language.options.hf_config import hugging_face_config
from language.options.llama_shape import LlamaShape
from language.options.transformer_options import TransformerConfig
from language.sequences import check_files
from language.weights import sources
from tools import convert_hf, prepare_data
from tools import train_tokenizer as own_tokenizer
from tpu_utils.base.errors import InputError
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.options.parsing import as_json

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt brings transformers")

SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # as Llama 3's
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>"]
OTHERS = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "[INST]", "[/INST]", "</s>"]
OTHERS += ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TOGETHER = [format for format in FORMATS if format != "olmo2"]  # whose roles are text that another has as tokens
ENDING = ["plain", "qwen3", "gemma", "mistral"]  # one of each kind of end
TEXT = "User: Say be. Assistant: to be or not to be, that is the question\nSystem: Be brief.\n" * 9
SHAPE = LlamaShape(2, 4, 64, 128, 0, num_kv_heads=2, mlp_dim=128, tied_head=True, rope_theta=1e4)
ANSWERS = {"Say be.": "to be or not", "Say not.": "that is\nit", "Who?": "Me, a question."}


def train_tokenizer(folder: Path, begins: bool = False, special: list[str] = SPECIAL) -> Path:
    """A tokenizer like those of Llama 3 and Qwen3, with the tokens of some formats."""
    made = tokenizers.Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=313 + len(special), special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([TEXT], trainer)
    made.add_tokens(["<think>", "</think>"])  # as Qwen3 has them: no special tokens
    if begins:
        made.post_processor = processors.TemplateProcessing(f"{SPECIAL[3]} $A", special_tokens=[(SPECIAL[3], 3)])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    # a base model's: another end, another template, in both places where one may stand
    said = {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>", "chat_template": "base", "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    (folder / "chat_template.jinja").write_text("base")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "top_k": 7}))
    shape = LlamaShape(**vars(SHAPE) | dict(vocab_size=made.get_vocab_size()))
    (folder / "config.json").write_text(json.dumps(hugging_face_config(shape, tokens={"eos_token_id": 0})))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("base") / "it", special=[*SPECIAL, *OTHERS])


@pytest.fixture(scope="module")
def olmo2(tmp_path_factory) -> Path:
    special = [*SPECIAL, *FORMATS["olmo2"][1:]]
    return train_tokenizer(tmp_path_factory.mktemp("olmo2") / "it", special=special)


def config_of(folder: Path, format: str, **options) -> TransformerConfig:
    return TransformerConfig(
        **dict(dataset="chat", initial_weights=str(folder), chat_format=format, sequence_length=128) | options
    )


def conversations(count: int) -> list[list[dict[str, str]]]:
    """With and without a system message, of several turns, of words, spaces, lines, letters of all kinds."""
    draw, found = random.Random(0), [MESSAGES]
    pieces = ["be", "not", " ", "  ", "!", "\n", "\n\n", "?\n", "\u00fc\u2603", "3.14", "<|x|>", "User:", "'s", "\t"]
    for _ in range(count):
        text = lambda: "".join(draw.choice(pieces) for _ in range(draw.randrange(9)))  # noqa: E731
        turns = [("system", text())] * draw.randrange(2)
        for _ in range(draw.randrange(1, 4)):
            turns += [("user", text()), ("assistant", draw.choice(["", " ", "a"]) + text().lstrip())]
        found.append([{"role": role, "content": content} for role, content in turns])
    return found


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("format", [*FORMATS, "bytes"])
def test_a_templated_conversation_has_the_tokens_of_training(base, olmo2, tmp_path, format, begins):
    base = olmo2 if format == "olmo2" else base
    if begins:
        special = list(load_tokenizer(str(base)).special)
        base = train_tokenizer(tmp_path / "begins", True, [name for name in special if "think" not in name])
    if format == "bytes":
        config = TransformerConfig(dataset="chat", model_size="llama_tiny", chat_format="plain")
    else:
        config = config_of(base, format)
    ours = load_tokenizer("bytes" if format == "bytes" else str(base))
    (tmp_path / "out").mkdir()
    written, ends = export_tokenizer(tmp_path / "run", config, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(written) >= {"chat_template.jinja"}
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.get_chat_template() == (TEMPLATES / f"{config.chat_format}.jinja").read_text()
    for messages in conversations(60 if begins else 500):
        expected, targets = format_chat(messages, config.chat_format, ours)
        said = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert said["input_ids"] == expected and said["assistant_masks"] == [int(one) for one in targets], messages
        prompt = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)
        assert prompt == prompt_of_chat(messages[:-1], config.chat_format, ours), messages
    stops = stop_tokens(config.chat_format, ours) | ours.stops
    assert theirs.eos_token_id == expected[len(targets) - 1 - targets[::-1].index(True)], "what ended an answer"
    said = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    named = said.eos_token_id if isinstance(said.eos_token_id, list) else [said.eos_token_id]
    assert set(named) == stops and named[0] == theirs.eos_token_id and ends["eos_token_id"] == said.eos_token_id
    assert format == "bytes" or said.top_k == 7
    assert load_tokenizer(str(tmp_path / "out")).stops == stops, "and ours ends there too"


def test_what_a_run_of_other_data_copies_stays_as_it_is(base, tmp_path):
    tmp_path = tmp_path / "out"
    tmp_path.mkdir()
    written, known = export_tokenizer(tmp_path / "run", config_of(base, "auto", dataset="tokens"), tmp_path)
    assert known == {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None} and written
    assert all((tmp_path / name).read_bytes() == (base / name).read_bytes() for name in written)


@pytest.mark.parametrize("vocab_size", [0, 324])
def test_a_tokenizer_of_ones_own_names_its_end_and_is_no_llamas(base, tmp_path, vocab_size):
    """A run of a stream named the end of GPT-2, or none; a bare tokenizer.json got a token outside of the model."""
    (tmp_path / "own").mkdir()
    shutil.copy(base / "tokenizer.json", tmp_path / "own")
    named = dict(dataset="stream", model_size="llama_tiny", train_data="a.jsonl", vocab_size=vocab_size)
    config = TransformerConfig(tokenizer=str(tmp_path / "own"), **named)
    (tmp_path / "out").mkdir()
    _, known = export_tokenizer(tmp_path / "run", config, tmp_path / "out")
    assert known == {"bos_token_id": 0, "eos_token_id": [0, 13], "pad_token_id": None}, "</s> too"
    shape = LlamaShape(**vars(SHAPE) | dict(vocab_size=324))
    (tmp_path / "out" / "config.json").write_text(json.dumps(hugging_face_config(shape, tokens=known)))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(config.tokenizer)
    assert theirs("to be").input_ids == ours.encode("to be") and theirs.eos_token_id == ours.end == 0
    assert load_tokenizer(str(tmp_path / "out")).encode_around("to be") == ours.encode("to be")


def test_another_vocabulary_of_gpt2s_size_is_not_gpt2s(tmp_path):
    gpt2 = load_tokenizer("gpt2").tokenizer.get_vocab()
    for name, vocabulary in (("theirs", gpt2), ("other", {f"{number:x}": number for number in range(50257)})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "sentencepiece").mkdir()
    (tmp_path / "sentencepiece" / "tokenizer.model").write_bytes(b"x")
    found = [tokenizer_by_size(50257, [tmp_path / name]) for name in ("theirs", "other", "sentencepiece", "none")]
    assert found == ["gpt2", "", "", "gpt2"] and tokenizer_by_size(257, []) == "bytes"


@pytest.mark.parametrize("name, kind", [("other", "Numbers"), ("theirs", "FromFile")])
def test_nobody_guesses_against_what_a_run_says(tmp_path, monkeypatch, name, kind):
    config = TransformerConfig(dataset="tokens", train_data="a", vocab_size=50257)
    monkeypatch.setattr(sources, "read_run", lambda run_dir, checkpoint: (config, SimpleNamespace(step=1)))
    monkeypatch.setattr(sources, "tokenizer_of_run", lambda run_dir, config: {"other": "", "theirs": "gpt2"}[name])
    assert type(sources.open_source(run_dir=str(tmp_path)).tokenizer).__name__ == kind


def test_a_tokenizer_that_puts_a_space_before_each_text_is_named(base, tmp_path):
    """Llama 2's does: a template's text has one such space, a conversation in parts several."""
    spaced = Path(shutil.copytree(base, tmp_path / "spaced"))
    said = json.loads((base / "tokenizer_config.json").read_text()) | {"add_prefix_space": True}
    (spaced / "tokenizer_config.json").write_text(json.dumps(said))
    changed = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    changed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    changed.save(str(spaced / "tokenizer.json"))
    assert all(reads_as_trained(base, format) for format in TOGETHER)
    named = [format for format in TOGETHER if not reads_as_trained(spaced, format)]
    assert named == ["chatml", "qwen3", "llama3", "gemma"], "answers of plain and mistral begin with a space already"
    assert load_tokenizer(str(base)).encode("<|im_end|>") != [2], "special tokens in a text are text as before"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_refused(base, tmp_path, name):
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    for number, content in enumerate(("[]", "{", '{"eos_token": 1, "eos_token": 2}')):
        (folder / name).write_text(content)
        (tmp_path / f"{number}").mkdir()
        with pytest.raises(InputError, match=f"{name}.*expected"):
            export_tokenizer(tmp_path / "run", config_of(folder, "chatml"), tmp_path / f"{number}")


# ---------------------------------------------------------------------------------------------------------------- bytes
def test_bytes_as_others_read_them(tmp_path):
    (tmp_path / "out").mkdir()
    config = TransformerConfig(dataset="text", model_size="llama_tiny")
    written, _ = export_tokenizer(tmp_path / "run", config, tmp_path / "out")
    assert written == ["tokenizer.json", "tokenizer_config.json"]
    theirs, again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(str(tmp_path / "out"))
    ours = Bytes()
    everything = "".join(map(chr, range(0x250))) + "\u2603\U0001f600 \n\n <|endoftext|>x"
    assert theirs(everything[:-14]).input_ids == [256, *ours.encode(everything[:-14])], "256 stands before every text"
    assert again.encode(everything) == ours.encode(everything) and again.decode(again.encode(everything)) == everything
    assert theirs.decode(ours.encode(everything), skip_special_tokens=True) == everything
    assert (again.vocab_size, again.end, again.begin, again.stops) == (257, 256, 256, {256})


def test_shards_keep_their_tokenizer(base, tmp_path):
    prefix, kept = str(tmp_path / "c"), tmp_path / "c_tokenizer"
    for _ in range(2):  # again, from itself
        assert keep_with_shards(load_tokenizer(str(kept if kept.exists() else base)), prefix) == kept
        assert load_tokenizer(str(kept)).fingerprint == load_tokenizer(str(base)).fingerprint
    assert keep_with_shards(Bytes(), prefix) is None and not any(kept.iterdir())


def test_a_run_on_shards_exports_and_samples_with_their_tokenizer(base, tmp_path, monkeypatch, capsys):
    (tmp_path / "in.txt").write_text(TEXT * 20)
    prefix = tmp_path / "datasets" / "c"
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path / "in.txt"), "--output", str(prefix), "--tokenizer", str(base)])
    assert prepare_data.main() == 0 and f"{prefix}_tokenizer: the tokenizer of" in capsys.readouterr().out
    kept = load_tokenizer(f"{prefix}_tokenizer")
    data = dict(dataset="tokens", data_dir=str(prefix.parent), train_data="c_train_*", validation_data="c_val_*")
    config = TransformerConfig(**data, model_size="llama_tiny", vocab_size=kept.vocab_size, global_batch_size=2)
    check_files(config)
    model = Llama(config.shape)
    model.initialise(0)
    save_run(tmp_path / "run", config, model.state_dict())
    source = sources.open_source(run_dir=str(tmp_path / "run"))
    assert source.tokenizer.fingerprint == kept.fingerprint
    assert source.start == kept.begin == 1, "as of a Llama, whose class no file names"
    convert_hf.export(tmp_path / "run", tmp_path / "out", torch.float32)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT, add_special_tokens=False).input_ids == kept.encode(TEXT)
    named = dataclasses.replace(config, tokenizer="bytes", data_dir=str(tmp_path))
    assert tokenizer_of_run(tmp_path / "run", named) == "bytes", "the one that is named is believed"


# ------------------------------------------------------------------------------------------------ models that end
def chats() -> list[list[dict[str, str]]]:
    user, assistant = (lambda text, role=role: dict(role=role, content=text) for role in ("user", "assistant"))
    turns = [[user(asked), assistant(said)] for asked, said in ANSWERS.items()]
    return [*turns, [dict(role="system", content="Be brief."), *turns[0], *turns[2]]]


@pytest.fixture(scope="module")
def trained(base) -> tuple[Llama, Path]:
    return by_heart(base), base


def by_heart(base: Path) -> Llama:
    """A model that knows a few conversations by heart in every format of ENDING. base: the folder of its tokenizer."""
    tokenizer = load_tokenizer(str(base))
    rows = [format_chat(messages, format, tokenizer) for format in ENDING for messages in chats()]
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows])
    counts = torch.tensor([targets + [False] * (longest - len(targets)) for _, targets in rows])[:, 1:]
    model = Llama(LlamaShape(**vars(SHAPE) | dict(vocab_size=tokenizer.vocab_size)))
    model.initialise(0)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    wanted = tokens[:, 1:][counts]
    for _ in range(150):
        logits = model(tokens[:, :-1]).logits[counts]
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        if loss < 0.05 and torch.equal(logits.argmax(-1), wanted):
            return model
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the loss is {loss} after 150 steps")


def save_run(run_dir: Path, config: TransformerConfig, model: dict[str, torch.Tensor]) -> None:
    values = {"config": as_json(config)}
    run_dir.mkdir()
    Checkpoints(run_dir / "checkpoints", 1).save(7, {"model": model, "metrics": {"loss": torch.zeros(1)}}, values)


def our_answers(run_dir: Path) -> list[list[int]]:
    """The answers to the questions, each with the token that ended it."""
    source = sources.open_source(run_dir=str(run_dir))
    options = SamplingOptions(prompt=(), chat=tuple(ANSWERS), temperature=0, num_tokens=40)
    asked = ask(options, source.tokenizer, source.start, source.chat_format, set(source.tokenizer.stops))
    device = torch_xla.device()
    return generate(sources.load(source, device), asked.prompts, options, device, asked.ends)


def their_answers(model, tokenizer) -> list[tuple[str, list[int]]]:
    """(text, tokens) as the pipeline for chats gives them, with no option but those that make it repeatable."""
    chat = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    asked = [[dict(role="user", content=question)] for question in ANSWERS]
    options = dict(max_new_tokens=40, do_sample=False)
    texts = [chat(messages, **options)[0]["generated_text"][-1]["content"] for messages in asked]
    tokens = [chat(messages, return_tensors=True, **options)[0]["generated_token_ids"] for messages in asked]
    prompts = [tokenizer.apply_chat_template(messages, add_generation_prompt=True) for messages in asked]
    return [(text, ids[len(prompt) :]) for text, ids, prompt in zip(texts, tokens, prompts, strict=True)]


@pytest.mark.parametrize("format", ENDING)
def test_a_chat_ends_elsewhere_where_it_ends_here(trained, tmp_path, format, capsys):
    model, base = trained
    save_run(tmp_path / "run", config_of(base, format), model.state_dict())
    convert_hf.export(tmp_path / "run", tmp_path / "out", torch.float32)
    assert "chat_template.jinja" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    found, expected = their_answers(theirs, tokenizer), our_answers(tmp_path / "run")
    assert [tokens for _, tokens in found] == expected
    for (text, _), tokens, answer in zip(found, expected, ANSWERS.values(), strict=True):
        assert text.removeprefix(" ") == answer and len(tokens) < 40, "it has ended by itself"


def test_shards_of_another_tokenizer_than_the_models_are_refused(tmp_path):
    """Both have one size, so every token passed: a model was trained on other texts than its own, without a word."""
    words = {"own": [f"{number:x}" for number in range(4000)], "other": Path(__file__).read_text().split()}
    for name in words:
        made = own_tokenizer.train_tokenizer([" ".join(words[name])], 400)
        for folder in (name, f"{name}_tokenizer"):
            own_tokenizer.write_tokenizer(made, tmp_path / folder)
        for part, order in (("train", 1), ("val", -1)):
            write_token_shard(tmp_path / f"{name}_{part}_000000.bin", np.arange(256)[::order], 400)

    def check(train, validation, tokenizer):
        named = dict(train_data=f"{train}_train_*.bin", validation_data=f"{validation}_val_*.bin")
        named |= dict(data_dir=str(tmp_path), vocab_size=400, tokenizer=tokenizer and str(tmp_path / tokenizer))
        check_shards(TransformerConfig(dataset="tokens", global_batch_size=2, sequence_length=16, **named))

    check("own", "own", "own")
    check("own", "own", "")
    for train, validation, tokenizer, odd in (
        ("other", "other", "own", "own/tokenizer.json has other tokens than .*/other_tokenizer/"),
        ("own", "other", "own", "other_tokenizer/tokenizer.json has other tokens than .*/own_tokenizer/"),
    ):
        with pytest.raises(InputError, match=odd):
            check(train, validation, tokenizer)
