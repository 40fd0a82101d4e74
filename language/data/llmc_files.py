"""llm.c's files on the host: headers, token shards, HellaSwag. Source: llm.c, dev/data/data_common.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from language.options.shapes import BYTE_VOCAB_SIZE
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import file_size, open_regular
from tpu_utils.base.writing import write_atomically

HEADER_WORDS = 256  # int32; every llm.c file starts with 1,024 bytes of header
GPT2_TOKENS, LLAMA3_TOKENS = 20240520, 20240801  # magic numbers
GPT2_VOCAB_SIZE = 50257
# magic number -> version, token type, vocabulary, name
TOKEN_FORMATS = {
    GPT2_TOKENS: (1, np.uint16, GPT2_VOCAB_SIZE, "GPT-2"),
    LLAMA3_TOKENS: (7, np.uint32, 128256, "Llama-3"),
}
MOST_SHORT_TOKENS = 1 << 16  # the largest vocabulary that words of 16 bits hold
HELLASWAG_MAGIC = 20240522
HELLASWAG_VERSION = 1
START_OF_EXAMPLE = 65535
MOST_QUESTIONS, MOST_QUESTION_BYTES = 65536, 65535  # their number and their sizes are words of 16 bits


def read_header(file: BinaryIO, kind: str) -> np.ndarray:
    """The 256 int32 in front of every llm.c file. Raises InputError when the file is shorter than that."""
    content = file.read(HEADER_WORDS * 4)
    if len(content) < HEADER_WORDS * 4:
        raise InputError(
            f"{file.name}: {len(content)} bytes; {kind} starts with a header of {HEADER_WORDS * 4} bytes; copy it again"
        )
    return np.frombuffer(content, "<i4")


def header_of(*words: int) -> bytes:
    header = np.zeros(HEADER_WORDS, "<i4")
    header[: len(words)] = words
    return header.tobytes()


def check_size(file: BinaryIO, expected: int, what: str) -> None:
    """Raises InputError unless the file is exactly as long as its header says."""
    found = file_size(file)
    if found != expected:
        problem = "truncated" if found < expected else "longer than its header says"
        raise InputError(f"{file.name}: {problem}: {found} bytes, expected {expected} ({what}); copy or write it again")


def check_vocabulary(path: Path, recorded: int, vocab_size: int) -> None:
    """Raises InputError when a file records another vocabulary. 0: it records none, as llm.c's own files."""
    if recorded and recorded != vocab_size:
        known = {BYTE_VOCAB_SIZE: "bytes", GPT2_VOCAB_SIZE: "GPT-2"}.get(recorded, "an unknown tokenizer")
        raise InputError(
            f"{path}: tokens of a vocabulary of {recorded} ({known}), but vocab_size is {vocab_size}; expected them to "
            f"be equal; for a new model use --vocab_size {recorded}; for one of --initial_weights or --model_config "
            f"{other_vocabulary(recorded, vocab_size)}"
        )


def other_vocabulary(tokens: int, vocab_size: int) -> str:
    """What to do where a tokenizer has another number of tokens than a model that is there already."""
    if tokens > vocab_size:
        return (
            f"give it rows for the tokens that were added: transformers' model.resize_token_embeddings({tokens}), then "
            "save_pretrained; or use the tokenizer that the model was published with"
        )
    return "write the file again: tools.prepare_data --tokenizer FOLDER, where its config.json and tokenizer.json are"


def open_token_shard(path: Path, vocab_size: int) -> np.ndarray:
    """Memory-mapped tokens of one llm.c shard, uint16 or uint32, checked: magic, version, size, vocabulary."""
    with open_regular(path, "a token shard") as file:
        magic, version, count, recorded = (int(word) for word in read_header(file, "a token shard")[:4])
        if magic not in TOKEN_FORMATS:
            known = ", ".join(f"{m} ({name})" for m, (*_, name) in TOKEN_FORMATS.items())
            raise InputError(
                f"{path}: magic number {magic} is not a token shard's; expected {known}; see tools.prepare_data"
            )
        expected, dtype, full_vocab, name = TOKEN_FORMATS[magic]
        if version != expected:
            raise InputError(f"{path}: {name} tokens of version {version}; expected {expected}; write the shard again")
        check_size(file, HEADER_WORDS * 4 + count * np.dtype(dtype).itemsize, f"{count} {name} tokens")
        if name == "Llama-3" and not recorded and vocab_size < full_vocab:
            raise InputError(
                f"{path}: {name} tokens (vocabulary {full_vocab}) for a model with vocab_size {vocab_size}; "
                f"use GPT-2 tokens or --vocab_size {full_vocab}"
            )
        check_vocabulary(path, recorded, vocab_size)
        if count == 0:
            raise InputError(f"{path}: no tokens; expected at least one sequence")
        return np.memmap(file, dtype, "r", HEADER_WORDS * 4, (count,))


def write_token_shard(path: Path, tokens: np.ndarray, vocab_size: int = 0) -> None:
    """Write one shard, which llm.c reads too: GPT-2's (uint16), or Llama-3's (uint32) for a vocabulary above 65,536.
    vocab_size: recorded in a word of the header that llm.c does not read. Raises InputError for tokens too large."""
    magic = LLAMA3_TOKENS if vocab_size > MOST_SHORT_TOKENS else GPT2_TOKENS
    version, dtype, _, name = TOKEN_FORMATS[magic]
    if len(tokens) and (tokens.min() < 0 or tokens.max() > np.iinfo(dtype).max):
        raise InputError(f"token {tokens.max()} does not fit the {8 * np.dtype(dtype).itemsize} bits of a {name} shard")
    content = np.asarray(tokens, np.dtype(dtype).newbyteorder("<")).tobytes()
    write_atomically(path, [header_of(magic, version, len(tokens), vocab_size), content])


def check_tokens(tokens: np.ndarray, vocab_size: int, where: object) -> None:
    if (largest := int(tokens.max(initial=0))) >= vocab_size:
        raise InputError(f"{where}: token {largest}, but vocab_size is {vocab_size}; use the matching tokenizer")


@dataclass(frozen=True)
class MultipleChoice:
    """One HellaSwag question: a context and four endings, as tokens; `label` is the right one."""

    index: int
    label: int
    context: np.ndarray
    endings: list[np.ndarray]


def read_hellaswag(path: Path, vocab_size: int) -> list[MultipleChoice]:
    """Questions of an llm.c HellaSwag file. Raises InputError for a foreign, truncated or damaged file."""
    with open_regular(path, "a HellaSwag file") as file:
        magic, version, count, _, recorded = (int(word) for word in read_header(file, "a HellaSwag file")[:5])
        if (magic, version) != (HELLASWAG_MAGIC, HELLASWAG_VERSION):
            raise InputError(
                f"{path}: magic {magic}, version {version}; expected {HELLASWAG_MAGIC}, {HELLASWAG_VERSION}"
            )
        size = file_size(file) - HEADER_WORDS * 4
        if not 1 <= count <= MOST_QUESTIONS or size > count * MOST_QUESTION_BYTES:
            raise InputError(
                f"{path}: {size} bytes of {count} examples, expected 1 to {MOST_QUESTIONS} of at most "
                f"{MOST_QUESTION_BYTES} bytes; copy the file again"
            )
        check_vocabulary(path, recorded, vocab_size)
        words = np.fromfile(file, "<u2")
    questions, at = [], 0
    for number in range(count):
        where = f"{path}: example {number} of {count}"
        question, at = _read_question(words, at, number, where)
        check_tokens(np.concatenate([question.context, *question.endings]), vocab_size, where)
        questions.append(question)
    if behind := size - 2 * at:
        raise InputError(f"{path}: {behind} bytes behind the last example, expected none; copy the file again")
    return questions


def _read_question(words: np.ndarray, at: int, number: int, where: str) -> tuple[MultipleChoice, int]:
    """The question that starts at this word, and the word behind it. Raises InputError: where, found, expected."""

    def expect(fits: bool, at: int, found: str, expected: str) -> None:
        if not fits:
            place = f"byte {HEADER_WORDS * 4 + 2 * at}"
            raise InputError(f"{where}, {place}: found {found}, expected {expected}; copy the file again")

    first = at
    expect(at + 5 < len(words), at, f"{len(words) - at} words", "an example")
    start, num_bytes, index, label, endings = (int(word) for word in words[at : at + 5])
    expect(start == START_OF_EXAMPLE, at, f"{start}", f"{START_OF_EXAMPLE}, which starts an example")
    expect(index == number, at + 2, f"index {index}", f"{number}")
    expect(label < 4, at + 3, f"label {label}", "0 to 3")
    expect(endings == 4, at + 4, f"{endings} endings", "4")
    parts, at = [], at + 5
    for _ in range(5):
        room = len(words) - at - 1
        size = int(words[at]) if room > 0 else 0
        expect(1 <= size <= room, at, f"{size} tokens", f"1 to {room}, what the file has left")
        parts.append(words[at + 1 : at + 1 + size].astype(np.int32))
        at += 1 + size
    expect(num_bytes == 2 * (at - first), first + 1, f"{num_bytes} bytes", f"{2 * (at - first)}, as its tokens need")
    return MultipleChoice(index, label, parts[0], parts[1:]), at


def write_hellaswag(path: Path, questions: list[MultipleChoice], vocab_size: int = 0) -> None:
    """vocab_size: recorded as in a token shard."""
    streams = []
    for question in questions:
        parts = [np.r_[len(part), part.astype(int)] for part in (question.context, *question.endings)]
        body = np.concatenate([[question.index, question.label, len(question.endings)], *parts])
        streams.append(np.concatenate([[START_OF_EXAMPLE, 2 * (len(body) + 2)], body]).astype("<u2"))
    longest = max(2 * len(s) for s in streams)
    header = header_of(HELLASWAG_MAGIC, HELLASWAG_VERSION, len(streams), longest, vocab_size)
    write_atomically(path, [header, np.concatenate(streams).tobytes()])
