"""Conversations to fine-tune on: JSON lines, formatted, packed into rows of one length. Nothing here knows about TPUs.

A line is {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, or
{"prompt": "Hi", "completion": "Hello"}. The loss counts answers alone: what the assistant says and the token that ends
it, where no "weight": 0 stands beside it. A key that means something elsewhere and nothing here is refused, others are
counted. A template is a program: only those of chat_templates/ are rendered, none that comes with a tokenizer.
"""

import bisect
import functools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from language.data.entries import check_apart, entries_of, is_hidden, tell_once
from language.data.sequence_data import ALONE, Host, SequenceData
from language.data.stream_files import refuse_other_json
from language.data.text import EpochRows
from language.data.tokenizer import check_texts, check_tokenizer, text_in, tokenizer_of
from language.options.shapes import START
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import lines_of, open_regular, parse_json

CHATS = "conversations, one JSON object a line"
LONGEST_LINE = 1 << 24  # bytes
SAMPLED_CHATS = 1000  # from which follows whether the tokenizer has their letters
MOST_PROBLEMS = 10  # that one message lists
MOST_COUNTED = 1000  # behind which nothing is read: of a text in place of conversations each line is one
ROLES = ("system", "user", "assistant")
WHETHER_LEARNT = ("weight", "train", "training", "loss", "loss_scale", "trainable")
"""Beside an answer: 1 or true, 0 or false. Names of OpenAI, mistral-finetune, axolotl, ms-swift and Tinker."""
NOT_READ = ("tool_calls", "function_call", "tool_call_id", "tools", "functions", "documents", "system", "history")
NOT_READ += ("thinking", "thought", "thoughts", "reasoning", "reasoning_content", "refusal", "prefix", "audio")
NOT_READ += ("image", "images", "video", "videos", "audios", "mask", "masked", "loss_mask", "train_detail")
NOT_READ += ("chat_template", "chat_template_kwargs", "channel", "recipient")
"""Elsewhere they change what the model reads or learns. A value of none of it, such as null or [], is as no key."""

FORMATS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "mistral": ("<s>", "[INST]", "[/INST]", "</s>"),
    "phi4": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    "olmo2": ("<|endoftext|>", "<|endofprompt|>", "|||IP_ADDRESS|||"),  # the others tell its tokenizer from ChatML's
}
"""Special tokens of each format; all else of it is in its template, chat_templates/NAME.jinja. Source: chat_template of
HuggingFaceTB/SmolLM2-135M-Instruct, Qwen/Qwen3-0.6B, meta-llama/Meta-Llama-3-8B-Instruct, google/gemma-3-1b-it,
mistralai/Mistral-7B-Instruct-v0.3, microsoft/Phi-4-mini-instruct and allenai/OLMo-2-1124-7B-Instruct."""
TEMPLATES = Path(__file__).with_name("chat_templates")
TYPED, BEGIN, END, ANSWER, ANSWERED = map(chr, range(0xD800, 0xD805))
"""Marks in a rendered conversation: halves of surrogate pairs, which no text holds. TYPED follows each letter of a
message that could begin a special token, so only the template's own text has special tokens. BEGIN and END are the
tokenizer's own tokens, which may have no text; ANSWER and ANSWERED are both ends of an answer."""


class Answers(Extension):
    """{% generation %}, which transformers and TRL know too: an answer, with a mark at both ends."""

    tags = frozenset(["generation"])

    def parse(self, parser):
        next(parser.stream)
        answer = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (ANSWER, ANSWERED))
        return [begin, *answer, end]


@functools.cache
def template_of(format: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Answers])
    return environment.from_string((TEMPLATES / f"{format}.jinja").read_text())


def choose_format(format: str, tokenizer) -> str:
    """auto: of the formats whose special tokens the tokenizer has, the one with the most of them."""
    return max(fitting(tokenizer), key=lambda name: len(FORMATS[name])) if format == "auto" else format


def fitting(tokenizer) -> list[str]:
    return [name for name, special in FORMATS.items() if None not in map(tokenizer.token, special)]


def special_tokens(format: str, tokenizer) -> dict[str, int]:
    """Numbers of the tokens in FORMATS by their names. Raises InputError for a tokenizer that has not all of them."""
    if format not in FORMATS:
        raise InputError(f"chat_format is {format!r}; expected auto, or one of {', '.join(FORMATS)}")
    if tokenizer.end is None:
        raise InputError("the tokenizer of the model is unknown, so no token ends an answer; name it with --tokenizer")
    found = {name: tokenizer.token(name) for name in FORMATS[format]}
    missing = [name for name, token in found.items() if token is None]
    if missing:
        raise InputError(
            f"chat_format is {format}, but the tokenizer has no token {missing[0]}; choose "
            f"{' or '.join(fitting(tokenizer))}, or the tokenizer of the model that the format belongs to"
        )
    return found


def parts_of(messages: list[dict], format: str, tokenizer, asks: bool = False) -> Iterator[tuple[int | str, bool]]:
    """A conversation in order: a special token, or text to encode, and whether it is a target. asks: with the header of
    an answer that is to come. That an answer is a text of its own is on purpose: a prompt ends before it."""
    tokens = special_tokens(format, tokenizer)

    def refuse(expected: str) -> None:
        roles = ", ".join(message["role"] for message in messages)
        raise InputError(f"the roles are {roles[:200]}; chat_format is {format}: {expected}")

    rendered = template_of(format).render(
        messages=[{"role": one["role"], "content": typed(one["content"], tokens)} for one in messages],
        add_generation_prompt=asks,
        bos_token="" if tokenizer.begin is None else BEGIN,
        eos_token=END,
        raise_exception=refuse,
    )
    tokens |= {BEGIN: tokenizer.begin, END: tokenizer.end}
    learnt = (one.get("learnt", True) for one in messages if one["role"] == "assistant")
    is_target = False
    for part in re.split(f"({'|'.join(map(re.escape, [*tokens, ANSWER, ANSWERED]))})", rendered):
        if part in (ANSWER, ANSWERED):
            is_target = part == ANSWER and next(learnt)
        elif part:
            yield tokens[part] if part in tokens else part.replace(TYPED, ""), is_target


def typed(text: str, names: Iterable[str]) -> str:
    """A text of a message that cannot begin one of these special tokens. Raises InputError for what is no text."""
    with text_in(text):
        text.encode(errors="surrogateescape")  # Python's form of non-UTF-8 arguments
    for letter in {name[0] for name in names}:
        text = text.replace(letter, letter + TYPED)
    return text


def end_of_answer(format: str, tokenizer) -> int:
    """The token behind each answer in training."""
    messages = [{"role": role, "content": ""} for role in ("user", "assistant")]
    return [part for part, is_target in parts_of(messages, format, tokenizer) if is_target][-1]


def encode(parts: Iterator[tuple[int | str, bool]], format: str, tokenizer) -> tuple[list[int], list[bool]]:
    """Raises InputError for text in which the tokenizer sees a special token of the format: it could end an answer."""
    special = {*special_tokens(format, tokenizer).values(), tokenizer.end}
    tokens, targets = [], []
    for part, is_target in parts:
        found = [part] if isinstance(part, int) else tokenizer.encode(part)
        if isinstance(part, str) and not special.isdisjoint(found):
            name = tokenizer.decode([next(token for token in found if token in special)])
            raise InputError(f"a text holds {name}, which is a token of the format; take it out of the text")
        tokens += found
        targets += [is_target] * len(found)
    return tokens, targets


def format_chat(messages: list[dict], format: str, tokenizer) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and which are targets: those of answers and the token that ends each. tokenizer: has
    encode(text), decode(tokens), token(name) -> int | None, end, begin (int | None). Raises InputError."""
    format = choose_format(format, tokenizer)
    return encode(parts_of(messages, format, tokenizer), format, tokenizer)


def prompt_of_chat(messages: list[dict], format: str, tokenizer) -> list[int]:
    """The tokens that an answer follows: the conversation and the header of the answer. Raises InputError."""
    format = choose_format(format, tokenizer)
    return encode(parts_of(messages, format, tokenizer, asks=True), format, tokenizer)[0]


def stop_tokens(format: str, tokenizer) -> set[int]:
    """Any of these ends an answer."""
    return {tokenizer.end, end_of_answer(choose_format(format, tokenizer), tokenizer)}


def record_of(line: bytes) -> dict[str, Any]:
    """The JSON object in a line. Raises ValueError: what is wrong."""
    try:
        record = parse_json(line)
    except json.JSONDecodeError as error:  # its text would count lines from this one
        raise ValueError(f"it is no JSON ({error.msg}, character {error.pos + 1})") from error
    if not isinstance(record, dict):
        raise ValueError(f"it holds {type(record).__name__}, expected a JSON object")
    return record


def messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a line. An answer that is not to be learnt has "learnt": False. Raises ValueError."""
    messages: Any = record.get("messages")
    if "messages" not in record:
        if not {"prompt", "completion"} <= record.keys():
            keys = ", ".join(repr(key)[:40] for key in [*record][:5])
            raise ValueError(f"it has {keys or 'no key'}, expected messages, or prompt and completion")
        said = ("user", record["prompt"]), ("assistant", record["completion"])
        messages = [{"role": role, "content": content} for role, content in said]
    if not isinstance(messages, list):
        raise ValueError(f"messages is {type(messages).__name__}, expected a list")
    check_keys(record, "it", (None, 1))
    if marks := [key for key in ("label", "kto_tag") if record.get(key) is False]:  # of data for KTO
        raise ValueError(f"its {marks[0]} is false, which marks an answer that is not wanted, expected one to learn")
    found = []
    for number, message in enumerate(messages, 1):
        message = message if isinstance(message, dict) else {}
        role, content = message.get("role"), message.get("content")
        check_keys(message, f"message {number}", (None, 0, 1) if role == "assistant" else (None, 0))
        if role not in ROLES:
            raise ValueError(f"the role of message {number} is {role!r:.40}, expected {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"the content of message {number} is {type(content).__name__}, expected a text")
        content.encode()  # half of a surrogate pair is no text: UnicodeEncodeError is a ValueError
        is_learnt = all(message.get(key) in (None, 1) for key in WHETHER_LEARNT)
        found.append({"role": role, "content": content} | ({} if is_learnt else {"learnt": False}))
    if not any(message["role"] == "assistant" for message in found):
        raise ValueError("it has no message of the assistant, so there is nothing to learn")
    if not any(is_answer(message) for message in found):
        raise ValueError("it has no answer to learn: each is marked as not learnt")
    return found


def is_answer(message: dict[str, Any]) -> bool:
    """Whether it is learnt."""
    return message["role"] == "assistant" and message.get("learnt", True)


def check_keys(place: dict[str, Any], name: str, marks: tuple) -> None:
    """Raises ValueError for a key of a message or of a line that has another meaning elsewhere than here. marks: the
    values that those of WHETHER_LEARNT may have."""
    for key in NOT_READ:
        if place.get(key):
            raise ValueError(f"{name} has {key}, which is not read here, expected text alone, in role and content")
    for key in WHETHER_LEARNT:
        if place.get(key) not in marks:
            expected = "0 or 1 beside an answer; no other text is learnt, and each line counts alike"
            raise ValueError(f"{name} has {key} {place[key]!r:.40}, expected {expected}")


def keys_without_effect(record: dict[str, Any]) -> set[str]:
    """Those of a line and of its messages that nobody reads."""
    read = {"messages"} if "messages" in record else {"prompt", "completion"}
    inside = [message.keys() - {"role", "content", *WHETHER_LEARNT} for message in record.get("messages", ())]
    return set().union(record.keys() - read, *inside) - {*NOT_READ}


def refuse(problems: list[str]) -> None:
    if problems:
        number = f"{len(problems) - MOST_PROBLEMS}{' or' * (len(problems) == MOST_COUNTED)} more"
        more = [f"and {number}"] if len(problems) > MOST_PROBLEMS else []
        raise InputError("\n".join([*problems[:MOST_PROBLEMS], *more]))


def chat_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = entries_of(path, path.glob("*.jsonl"))
    others = sorted(other.name for other in {*path.iterdir()}.difference(found) if not is_hidden(other.name))
    if others:
        tell_once(f"left out   {len(others)} in {path} whose names do not end with .jsonl, such as {others[0]}")
    return found


def read_chats(path: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """(file and line, messages) of every conversation in a file, or in all .jsonl of a folder, sorted by name. Raises
    InputError that names every line that is none. Empty lines are skipped."""
    files = chat_files(path)
    chats = []
    problems = []
    without_effect, empty = Counter(), 0
    for file in files:
        with open_regular(file, CHATS) as opened:
            refuse_other_json(opened, str(file))
            end = 0
            for number, line in enumerate(lines_of(opened, LONGEST_LINE), 1):
                where = f"{file}, line {number}"
                start, end = end, opened.tell()
                try:
                    if end - start >= LONGEST_LINE:
                        raise ValueError(f"it has {end - start:,} bytes, expected fewer than {LONGEST_LINE:,}")
                    if line.strip():
                        record = record_of(line)
                        messages = messages_of(record)
                        chats.append((where, messages))
                        without_effect.update(keys_without_effect(record))
                        empty += any(is_answer(message) and not message["content"].strip() for message in messages)
                except ValueError as error:
                    problems.append(f"{where}: no conversation: {error}; correct the line, or leave it out")
                    if len(problems) == MOST_COUNTED:
                        refuse(problems)
    refuse(problems)
    if not chats:
        raise InputError(f"{path}: {'no conversation' if files else 'no .jsonl file'}; expected {CHATS}")
    if without_effect:
        named = ", ".join(f"{key!r:.40} in {count:,}" for key, count in without_effect.most_common(8))
        tell_once(f"no effect  keys of conversations in {path}: {named}")
    if empty:
        tell_once(f"empty      answers in {empty:,} conversations of {path}: they are learnt as answers of no text")
    return chats


def encode_chats(chats: list[tuple[str, list[dict]]], format: str, tokenizer, T: int) -> tuple[list[np.ndarray], int]:
    """Each conversation as int32, at most T + 1 long, as a row holds it; and how many were truncated to that. A target
    is stored as token, a token that is no target as ~token, the first as ~(START + token): sequence_data.py. Raises
    InputError for a conversation whose targets are all truncated."""
    format = choose_format(format, tokenizer)
    special_tokens(format, tokenizer)  # refused once, not for every line
    some = chats[:: len(chats) // SAMPLED_CHATS + 1]
    check_texts(tokenizer, (message["content"] for _, messages in some for message in messages), "the conversations")
    encoded = []
    problems = []
    truncated = 0
    for where, messages in chats:
        try:
            tokens, targets = format_chat(messages, format, tokenizer)
        except InputError as error:
            problems.append(f"{where}: {error}")
            continue
        tokens = np.array(tokens, np.int32)
        signed = np.where(targets, tokens, ~tokens)
        signed[0] = ~(START + tokens[0])  # a header, never a target
        truncated += len(tokens) > T + 1
        if not (signed[: T + 1] >= 0).any():
            problems.append(
                f"{where}: its first answer begins at token {targets.index(True)}, but a row has {T + 1}; leave it "
                "out, or raise --sequence_length"
            )
        encoded.append(signed[: T + 1])
    refuse(problems)
    return encoded, truncated


def fill_rows(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bin packing: rows of indices, at most `capacity` in sum; the longest first, each into the fullest row it fits.
    Best-fit decreasing: at most 11/9 of the fewest rows possible, and 1 more."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by the room that is left in them
    rooms: list[int] = []  # where with_room has rows, sorted: the fullest one that fits is found by bisection
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        left = room - length
        if not with_room[left]:
            bisect.insort(rooms, left)
        with_room[left].append(row)
    return rows


class ChatPacks(EpochRows):
    """Packs whole conversations into rows of T + 1 tokens; none attends to another.

    Conversations are put into rows once, by the seed; every epoch has the same rows in an order of its own. So each
    conversation comes once an epoch, and an epoch has the same number of batches. The last batch is padded.
    """

    padding = ~START  # documents of one token 0, no targets

    def __init__(
        self, conversations: list[np.ndarray], T: int, rows: int, seed: int = 0, shuffle=True, host: Host = ALONE
    ):
        """conversations: as encode_chats() gives them."""
        self.rows, self.seed, self.shuffle, self.host = rows, seed, shuffle, host
        lengths = np.array([len(conversation) for conversation in conversations])
        order = np.random.default_rng(seed).permutation(len(lengths)) if shuffle else np.arange(len(lengths))
        packs = [order[members] for members in fill_rows(lengths[order], T + 1)]
        self.tokens = np.concatenate([conversations[index] for members in packs for index in members])
        self.counts = np.array([lengths[members].sum() for members in packs])
        self.starts = np.cumsum(self.counts) - self.counts
        self.buckets = np.full_like(self.counts, T)

    @property
    def fill(self) -> float:
        """Share of the places in an epoch's rows that hold a token, without the rows that pad the last batch."""
        return len(self.tokens) / (self.buckets + 1).sum()


def read_parts(config: TransformerConfig) -> tuple[list, list]:
    """Conversations to train on and to validate on: of two files, or the last tenth of one. Raises InputError."""
    path, validation_path = config.data_paths
    chats = read_chats(path)
    if validation_path:
        check_apart(chat_files(path), chat_files(validation_path))
        return chats, read_chats(validation_path)
    if len(chats) < 2:
        raise InputError(f"{config.train_data}: 1 conversation; expected 2 or more, or others with --validation_data")
    held_out = max(1, len(chats) // 10)
    return chats[:-held_out], chats[-held_out:]


def check(config: TransformerConfig) -> None:
    """Raises InputError for files that are missing, lines that are no conversation, a wrong tokenizer."""
    tokenizer = tokenizer_of(config)
    special_tokens(choose_format(config.chat_format, tokenizer), tokenizer)
    read_parts(config)


def load(config: TransformerConfig, process_index: int = 0, process_count: int = 1) -> SequenceData:
    """The conversations that config names, packed; of several processes each gets its rows. Raises InputError."""
    T = config.shape.sequence_length
    tokenizer = tokenizer_of(config)
    check_tokenizer(tokenizer, config.shape.vocab_size)
    training, validating = read_parts(config)
    rows = config.global_batch_size // process_count
    host = Host(process_index, process_count)
    encoded, truncated = encode_chats(training, config.chat_format, tokenizer, T)
    encoded_validation, truncated_validation = encode_chats(validating, config.chat_format, tokenizer, T)
    train = ChatPacks(encoded, T, rows, config.seed, True, host)
    validation = ChatPacks(encoded_validation, T, rows, shuffle=False, host=host)
    description = (
        f"{len(training):,} conversations to train on, {len(validating):,} to validate, format "
        f"{choose_format(config.chat_format, tokenizer)}; "
        f"{len(train.tokens):,} tokens in {len(train.counts):,} rows, {train.fill:.1%} full, "
        f"{(train.tokens >= 0).mean():.1%} of them targets; {truncated + truncated_validation} truncated"
    )
    batches = min(config.eval_batches, validation.batches_per_epoch)
    crc32 = zlib.crc32(validation.tokens.tobytes()) << 32 | zlib.crc32(train.tokens.tobytes())
    return SequenceData(config, train, validation, batches, description, crc32)
