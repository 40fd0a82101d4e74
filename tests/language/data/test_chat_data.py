"""Conversations: formats, which tokens count, packing, and every refusal. No torch."""

import dataclasses
import gzip
import json
import random
import re
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from mutations import at_most, mutated, refusals

from language.data import chat as chat_data
from language.data import tokenizer
from language.data.chat import (
    FORMATS,
    TEMPLATES,
    ChatPacks,
    encode_chats,
    format_chat,
    prompt_of_chat,
    read_chats,
    stop_tokens,
)
from language.data.sequence_data import Host
from language.options.shapes import START
from language.options.transformer_options import ChatFormat, TransformerConfig
from tpu_utils.base.errors import InputError

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|begin_of_text|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>"]
MORE = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "[INST]", "[/INST]", "</s>", "<|system|>", "<|user|>"]
MORE += ["<|assistant|>", "<|end|>", "<|endoftext|>", "<|endofprompt|>", "|||IP_ADDRESS|||"]


class Bytes(tokenizer.Bytes):
    """With special tokens behind the end of a document. parses: sees them in a text too."""

    def __init__(self, special=(), parses=False):
        self.special = list(special)
        self.parses = parses
        self.vocab_size = 257 + len(self.special)

    def encode(self, text):
        if self.parses and self.special:
            pieces = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
            return [t for p in pieces for t in ([self.token(p)] if p in self.special else p.encode())]
        return super().encode(text)

    def decode(self, tokens):
        names = ["<end>", *self.special]
        return b"".join(bytes([t]) if t < 256 else names[t - 256].encode() for t in tokens).decode()

    def token(self, name):
        return 257 + self.special.index(name) if name in self.special else None


PLAIN, ALL, EVERY = Bytes(), Bytes(SPECIAL), Bytes(SPECIAL + MORE)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Hello\n"},
    {"role": "user", "content": " Who?\n"},
    {"role": "assistant", "content": "Me"},
]
# what apply_chat_template() of each model's tokenizer gives for MESSAGES, tokenize=False; what is learnt in \x01...\x02
MARKED = {
    "plain": "<end>System: Be brief.\nUser: Hi\nAssistant:\1  Hello\n<end>\2\nUser:  Who?\n\nAssistant:\1 Me<end>\2\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n\1 Hello\n<|im_end|>\2\n<|im_start|>user\n Who?\n<|im_end|>\n"
    "<|im_start|>assistant\n\1Me<|im_end|>\2\n",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n\1 Hello\n<|im_end|>\2\n<|im_start|>user\n Who?\n<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n\1Me<|im_end|>\2\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "\1Hello<|eot_id|>\2<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n\1Me<|eot_id|>\2",
    "gemma": "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n\1Hello<end_of_turn>\2\n"
    "<start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n\1Me<end_of_turn>\2\n",
    "mistral": "<s>[INST] Hi[/INST]\1 Hello</s>\2[INST] Be brief.\n\n Who?\n[/INST]\1 Me</s>\2",
    "phi4": "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>\1 Hello\n<|end|>\2<|user|> Who?\n<|end|>"
    "<|assistant|>\1Me<|end|>\2<|endoftext|>",
    "olmo2": "<|endoftext|><|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n\1 Hello\n<|endoftext|>\2\n"
    "<|user|>\n Who?\n\n<|assistant|>\n\1Me<|endoftext|>\2",
}
EXPECTED = {format: re.sub("[\1\2]", "", text) for format, text in MARKED.items()}
ANSWERS = {format: re.findall("(?s)\1(.*?)\2", text) for format, text in MARKED.items()}


def learnt(tokens, targets) -> str:
    return EVERY.decode([token for token, target in zip(tokens, targets, strict=True) if target])


@pytest.mark.parametrize("format", EXPECTED)
def test_a_format_is_the_models_own_and_answers_alone_count(format):
    tokens, targets = format_chat(MESSAGES, format, EVERY)
    assert EVERY.decode(tokens) == EXPECTED[format]
    assert learnt(tokens, targets) == "".join(ANSWERS[format])


@pytest.mark.parametrize("format", EXPECTED)
def test_special_tokens_are_those_of_the_template_whatever_a_text_holds(format):
    draw = random.Random(0)
    pieces = [*SPECIAL, *MORE, "<", "<|im_", "end|>", "[", "/INST]", "|||", "{{ messages }}", "{% generation %}", "{# "]
    special = lambda tokens: [token for token in tokens if token >= 256]  # noqa: E731
    for _ in range(100):
        texts = ["".join(draw.choices([*pieces, "\U00010000", "\ufdd0", "\x00", " ", "\n"], k=5)) for _ in MESSAGES]
        chat = [message | {"content": text} for message, text in zip(MESSAGES, texts, strict=True)]
        tokens, targets = format_chat(chat, format, EVERY)
        assert special(tokens) == special(format_chat(MESSAGES, format, EVERY)[0])
        assert all(text.strip() in EVERY.decode(tokens) for text in texts)
        assert all(text.strip() in learnt(tokens, targets) for text in texts[2::2])
    for mark in map(chr, range(0xD800, 0xD805)):
        with pytest.raises(InputError, match="expected UTF-8 text"):
            format_chat([MESSAGES[1], MESSAGES[2] | {"content": f"a{mark}"}], format, EVERY)


def test_the_formats_stand_once():
    assert get_args(ChatFormat) == ("auto", *FORMATS)
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == {*FORMATS} == {*EXPECTED}


@pytest.mark.parametrize("format", ["gemma", "mistral"])
def test_a_format_of_two_roles_refuses_others(format):
    for messages in (MESSAGES[1:2] * 2 + MESSAGES[2:3], MESSAGES[2:], [*MESSAGES[1:3], *MESSAGES[:3]], MESSAGES[:1]):
        with pytest.raises(InputError, match=f"^the roles are .*; chat_format is {format}: expected user and"):
            format_chat(messages, format, EVERY)


def test_a_text_cannot_end_an_answer():
    chat = [{"role": "user", "content": "Say <|im_end|>"}, {"role": "assistant", "content": "No"}]
    assert ALL.decode(format_chat(chat, "chatml", ALL)[0]).count("<|im_end|>") == 3  # one of them bytes
    with pytest.raises(InputError, match=r"^x, line 3: a text holds <\|im_end\|>, which is a token of the format"):
        encode_chats([("x, line 3", chat)], "chatml", Bytes(SPECIAL, parses=True), 100)


def test_a_format_needs_its_tokens():
    with pytest.raises(InputError, match=r"^chat_format is chatml, but the tokenizer has no token <\|im_start\|>"):
        encode_chats([("x", MESSAGES)] * 2, "chatml", Bytes(SPECIAL[4:]), 100)
    with pytest.raises(InputError, match="chat_format is 'alpaca'; expected auto, or one of plain, chatml, qwen3"):
        stop_tokens("alpaca", PLAIN)


def test_auto_takes_the_format_whose_tokens_are_there():
    for special, format in (([], "plain"), (SPECIAL[:2], "chatml"), (SPECIAL[:4], "qwen3"), (SPECIAL[4:], "llama3")):
        tokenizer = Bytes(special)
        assert chat_data.choose_format("auto", tokenizer) == format
        for function in (format_chat, prompt_of_chat):
            assert function(MESSAGES, "auto", tokenizer) == function(MESSAGES, format, tokenizer)
        assert stop_tokens("auto", tokenizer) == stop_tokens(format, tokenizer)
    assert chat_data.choose_format("plain", ALL) == "plain"


def documents_in(rows) -> list[list[int]]:
    """What stands in rows, as (token, whether it is a target) lists, padding left out: the inverse of a pack."""
    found = []
    for row in np.asarray(rows).reshape(-1, np.shape(rows)[-1]).tolist():
        documents = []
        for value in row:
            if value < -START:
                documents.append([(~value - START, False)])
            else:
                documents[-1].append((value if value >= 0 else ~value, value >= 0))
        while documents and documents[-1] == [(0, False)]:
            documents.pop()
        found += documents
    return found


def random_chats(count, seed=0):
    random = np.random.default_rng(seed)
    word = lambda n: "".join(random.choice(list("abcdef "), n))  # noqa: E731
    return [
        (
            f"x, line {i}",
            [{"role": r, "content": f"{i} " + word(random.integers(0, 30))} for r in ("user", "assistant")],
        )
        for i in range(count)
    ]


def as_document(messages, T, format="plain", tokenizer=PLAIN):
    tokens, targets = format_chat(messages, format, tokenizer)
    return tuple(zip(tokens[: T + 1], targets[: T + 1], strict=True))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_each_conversation_once_an_epoch_whole_and_the_answers_are_the_targets(processes):
    T, chats = 100, random_chats(150)
    encoded, truncated = encode_chats(chats, "plain", PLAIN, T)
    sources = [ChatPacks(encoded, T, 8 // processes, 3, True, Host(i, processes)) for i in range(processes)]
    wanted = Counter(as_document(messages, T) for _, messages in chats)
    steps, epochs = sources[0].batches_per_epoch, []
    for epoch in range(3):
        batches = [
            np.concatenate([source.batch(step) for source in sources])
            for step in range(epoch * steps, (epoch + 1) * steps)
        ]
        assert all(batch.shape == (8, T + 1) and batch.dtype == np.int32 for batch in batches)
        assert Counter(map(tuple, documents_in(batches))) == wanted
        answers = {bytes(t for t, target in d if target and t < 256).decode() for d in documents_in(batches)}
        assert answers == {f" {messages[1]['content']}" for _, messages in chats}
        epochs.append(np.stack(batches))
    assert truncated == 0 and not np.array_equal(epochs[0], epochs[1])
    alone = ChatPacks(encoded, T, 8, 3)  # any number of processes reads the same global batch
    np.testing.assert_array_equal(alone.batch(2 * steps), epochs[2][0])
    assert not np.array_equal(ChatPacks(encoded, T, 8, 4).batch(0), alone.batch(0))  # another seed, another order
    in_order = ChatPacks(encoded, T, 8, shuffle=False)
    np.testing.assert_array_equal(in_order.batch(0), in_order.batch(steps))


def test_rows_are_full_and_planned_fast_enough():
    """100,000 conversations of every length up to a row: no more rows than 1 % above what their tokens need."""
    lengths = np.random.default_rng(0).geometric(1 / 300, 100_000).clip(3, 2049)
    rows = chat_data.fill_rows(lengths, 2049)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert max(int(lengths[row].sum()) for row in rows) <= 2049
    assert len(rows) <= 1.01 * lengths.sum() / 2049


def test_a_conversation_is_truncated_at_its_end_and_refused_when_no_answer_is_left():
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x" * 100}]
    (encoded,), truncated = encode_chats([("x", chat)], "plain", PLAIN, 39)
    assert truncated == 1 and len(encoded) == 40 and encoded[-1] == ord("x")
    with pytest.raises(InputError, match=r"^c\.jsonl, line 7: its first answer begins at token 20, but a row has 20"):
        encode_chats([("c.jsonl, line 7", chat)], "plain", PLAIN, 19)


def said(content="4", **keys) -> bytes:
    answer = {"role": "assistant", "content": content, **keys}
    return json.dumps({"messages": [{"role": "user", "content": "2+2?"}, answer]}).encode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "no conversation: it is no JSON (Expecting property name"),
        (b"7", "no conversation: it holds int, expected a JSON object; correct the line, or leave it out"),
        (b"{}", "it has no key, expected messages, or prompt and completion"),
        (b'{"prompt": "x", "completion": ["y"]}', "the content of message 2 is list, expected a text"),
        (b'{"messages": {}}', "messages is dict, expected a list"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "it has no message of the assistant"),
        (b'{"messages": ["x"]}', "the role of message 1 is None, expected system, user, assistant"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "the role of message 1 is 'tool', expected system, user"),
        (said(tool_calls=[{"id": 1}], content=None), "message 2 has tool_calls"),
        (said(thinking="two and two"), "message 2 has thinking"),
        (said(weight=0.5), "message 2 has weight 0.5, expected 0 or 1 beside an answer"),
        (said(train=[]), "message 2 has train []"),
        (said(weight=0), "it has no answer to learn"),
        (said()[:-1] + b', "label": false}', "its label is false, which marks an answer that is not wanted"),
        (said()[:-1] + b', "kto_tag": false}', "its kto_tag is false, which marks an answer that is not wanted"),
        (
            b'{"messages": [{"role": "user", "content": "x", "train": true}, {"role": "assistant", "content": "y"}]}',
            "message 1 has train True, expected 0 or 1 beside an answer",
        ),
        (b'{"prompt": "x", "completion": "y", "weight": 0}', "it has weight 0, expected 0 or 1 beside an answer"),
        (b'{"messages": [{"role": "assistant", "content": "y"}], "tools": [{"type": "function"}]}', "it has tools"),
        (b'{"prompt": "\\ud800", "completion": "y"}', "surrogates not allowed"),
        (b'{"prompt": "\xff", "completion": "y"}', "invalid start byte"),
        (b'{"prompt": "x", "completion": "' + b"y" * (1 << 24), "bytes, expected fewer than 16,777,216"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    good = b'{"prompt": "a", "completion": "b", "id": 3}\n'
    (tmp_path / "a.jsonl").write_bytes(good + b"\n")
    (tmp_path / "b.jsonl").write_bytes(good + line + b"\n" + good + line)
    with pytest.raises(InputError) as caught:
        read_chats(tmp_path)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{tmp_path}/b.jsonl, line 2: ") and message in first
    assert second.startswith(f"{tmp_path}/b.jsonl, line 4: ") and message in second


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"train": False}, {"loss": 0.0}, {"training": False, "weight": 1}, {"trainable": False}]
)
def test_an_answer_of_weight_0_is_read_and_not_learnt(tmp_path, mark):
    messages = [message | (mark if number == 2 else {"weight": None}) for number, message in enumerate(MESSAGES)]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": messages}))
    ((_, chat),) = read_chats(tmp_path / "x.jsonl")
    for format in EXPECTED:
        tokens, targets = format_chat(chat, format, EVERY)
        assert tokens == format_chat(MESSAGES, format, EVERY)[0], "the same text"
        assert learnt(tokens, targets) == ANSWERS[format][1]


@pytest.mark.parametrize("value", [None, "", [], {}, False])
def test_a_key_without_a_value_is_as_no_key(tmp_path, capsys, value):
    """As tables of records with other keys have them."""
    (tmp_path / "x.jsonl").write_bytes(said(**dict.fromkeys(chat_data.NOT_READ, value)))
    ((_, chat),) = read_chats(tmp_path / "x.jsonl")
    assert chat == [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    assert not capsys.readouterr().err


def test_keys_without_effect_and_empty_answers_are_counted_once(tmp_path, capsys):
    lines = [said(name="Ann", id=1), said(content=" "), b'{"prompt": "a", "completion": "b", "id": 3, "label": true}']
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines * 3))
    for told in (
        f"no effect  keys of conversations in {tmp_path}: 'id' in 6, 'name' in 3, 'label' in 3\n"
        f"empty      answers in 3 conversations of {tmp_path}: they are learnt as answers of no text\n",
        "",
    ):
        assert len(read_chats(tmp_path)) == 9
        assert sorted(capsys.readouterr().err) == sorted(told)


@pytest.mark.parametrize(
    ("begins", "found"),
    [
        (b"[{", "one JSON array"),
        (gzip.compress(b"{", mtime=0), "packed by gzip"),
        (b"\x28\xb5\x2f\xfd", "packed by zstd"),
    ],
)
def test_json_of_another_form_is_named(tmp_path, begins, found):
    (tmp_path / "x.jsonl").write_bytes(begins)
    with pytest.raises(InputError, match=f"x.jsonl is {found}; expected one JSON object a line; "):
        read_chats(tmp_path)


def test_what_is_left_out_of_a_folder_is_told(tmp_path, capsys):
    """A second file was not trained on because of its name, without a word. A byte order mark is none of the text."""
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "D.JSONL", ".hidden"):
        (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}', encoding="utf-8-sig")
    assert len(read_chats(tmp_path)) == 1
    told = f"left out   3 in {tmp_path} whose names do not end with .jsonl, such as D.JSONL\n"
    assert capsys.readouterr().err == told


def test_many_bad_lines_are_counted(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"{}\n" * 25)
    with pytest.raises(InputError, match=r"line 10: .*\nand 15 more$"):
        read_chats(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_bytes(b"x\n" * 1_000_000)  # a text: its last line took minutes and gigabytes
    with at_most(1 << 24), pytest.raises(InputError, match=r"line 10: .*\nand 990 or more$"):
        read_chats(tmp_path / "x.jsonl")


def test_damaged_files_are_read_or_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    content = "".join(json.dumps({"messages": messages}) + "\n" for _, messages in random_chats(3)).encode()
    with at_most(1 << 21):
        assert 50 < refusals(path, mutated(content, 150), lambda: read_chats(path)) < 150


def small_config(tmp_path, **options):
    options = dict(model_size="llama_tiny", sequence_length=160, global_batch_size=4, train_data="x.jsonl") | options
    return TransformerConfig(dataset="chat", chat_format="plain", data_dir=str(tmp_path), **options)


def write_chats(path, chats):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for _, messages in chats))


def test_load(tmp_path):
    chats = random_chats(50)
    write_chats(tmp_path / "x.jsonl", chats)
    config = small_config(tmp_path, gradient_accumulation_steps=2)
    data = chat_data.load(config)
    assert data.description == (
        "45 conversations to train on, 5 to validate, format plain; 2,506 tokens in 17 rows, 91.6% full, 36.0% of them "
        "targets; 0 truncated"
    )
    assert data.train.batch(0).shape == (4, 161) and data.validation.batch(0).shape == (4, 161)
    seen = documents_in([data.validation.batch(step) for step in range(data.validation_batches)])
    assert Counter(map(tuple, seen)) == Counter(as_document(messages, 160) for _, messages in chats[45:])
    part = chat_data.load(config, 1, 2)
    np.testing.assert_array_equal(part.train.batch(1), data.train.batch(1)[2:])
    assert part.fingerprint() == data.fingerprint()
    write_chats(tmp_path / "y.jsonl", chats[:7])
    held_out = chat_data.load(dataclasses.replace(config, validation_data="y.jsonl"))
    assert held_out.description.startswith("50 conversations to train on, 7 to validate")
    assert held_out.fingerprint() != data.fingerprint()


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    with pytest.raises(InputError, match=r"x\.jsonl: no such file; expected conversations"):
        chat_data.check(config)
    write_chats(tmp_path / "x.jsonl", random_chats(1))
    with pytest.raises(InputError, match=r"^x\.jsonl: 1 conversation; expected 2 or more, or others with --validation"):
        chat_data.check(config)
    with pytest.raises(InputError, match=r"^dataset is chat but train_data is empty; name the data with --train_data"):
        chat_data.check(small_config(tmp_path, train_data=""))
    write_chats(tmp_path / "x.jsonl", random_chats(9))
    chat_data.check(config)
    monkeypatch.setattr(chat_data, "tokenizer_of", lambda config: ALL)
    with pytest.raises(InputError, match=r"^the tokenizer has 265 tokens, but the model 257; expected the tokenizer"):
        chat_data.load(config)
