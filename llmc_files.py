"""llm.c's files on the host: headers, token shards, HellaSwag. Source: llm.c, dev/data/data_common.py."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tpu_utils.errors import InputError

HEADER_WORDS = 256  # int32; every llm.c file starts with 1,024 bytes of header
GPT2_TOKENS, LLAMA3_TOKENS = 20240520, 20240801  # magic numbers
# magic number -> version, token type, vocabulary, name
TOKEN_FORMATS = {GPT2_TOKENS: (1, np.uint16, 50257, "GPT-2"), LLAMA3_TOKENS: (7, np.uint32, 128256, "Llama-3")}
HELLASWAG_MAGIC, HELLASWAG_VERSION, START_OF_EXAMPLE = 20240522, 1, 65535


def read_header(path: Path, kind: str) -> np.ndarray:
    """The 256 int32 in front of every llm.c file. Raises InputError when the file is missing or shorter than that."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected {kind}")
    header = np.fromfile(path, "<i4", HEADER_WORDS)
    if len(header) < HEADER_WORDS:
        raise InputError(
            f"{path}: {path.stat().st_size} bytes; {kind} starts with a header of {HEADER_WORDS * 4} bytes; copy or "
            "write it again"
        )
    return header


def write_header(file, *words: int) -> None:
    header = np.zeros(HEADER_WORDS, "<i4")
    header[: len(words)] = words
    file.write(header.tobytes())


def check_size(path: Path, expected: int, what: str) -> None:
    """Raises InputError unless the file is exactly as long as its header says."""
    found = path.stat().st_size
    if found != expected:
        problem = "truncated" if found < expected else "longer than its header says"
        raise InputError(f"{path}: {problem}: {found} bytes, expected {expected} ({what}); copy or write it again")


def open_token_shard(path: Path, vocab_size: int) -> np.ndarray:
    """Memory-mapped tokens of one llm.c shard, uint16 or uint32, checked: magic, version, size, vocabulary."""
    header = read_header(path, "a token shard")
    magic, version, count = (int(word) for word in header[:3])
    if magic not in TOKEN_FORMATS:
        known = ", ".join(f"{m} ({name})" for m, (*_, name) in TOKEN_FORMATS.items())
        raise InputError(f"{path}: magic number {magic} is not a token shard's; expected {known}; see prepare_data.py")
    known_version, dtype, full_vocab, name = TOKEN_FORMATS[magic]
    if version != known_version:
        raise InputError(f"{path}: {name} tokens of version {version}; expected {known_version}; write the shard again")
    check_size(path, HEADER_WORDS * 4 + count * np.dtype(dtype).itemsize, f"{count} {name} tokens")
    if name == "Llama-3" and vocab_size < full_vocab:
        raise InputError(
            f"{path}: {name} tokens (vocabulary {full_vocab}) for a model with vocab_size {vocab_size}; "
            f"use GPT-2 tokens or --vocab_size {full_vocab}"
        )
    if count == 0:
        raise InputError(f"{path}: no tokens; expected at least one sequence")
    return np.memmap(path, dtype, "r", HEADER_WORDS * 4, (count,))


def write_token_shard(path: Path, tokens: np.ndarray) -> None:
    """Write one GPT-2 shard (uint16). Raises InputError for tokens that do not fit."""
    if len(tokens) and (tokens.min() < 0 or tokens.max() > 65535):
        raise InputError(f"token {tokens.max()} does not fit the 16 bits of a GPT-2 shard")
    with path.open("wb") as file:
        write_header(file, GPT2_TOKENS, TOKEN_FORMATS[GPT2_TOKENS][0], len(tokens))
        file.write(np.asarray(tokens, "<u2").tobytes())


def check_tokens(tokens: np.ndarray, vocab_size: int, where: object) -> None:
    if (largest := int(tokens.max())) >= vocab_size:
        raise InputError(
            f"{where}: token {largest}, but vocab_size is {vocab_size}; use the matching tokenizer or vocabulary"
        )


@dataclass(frozen=True)
class MultipleChoice:
    """One HellaSwag question: a context and four endings, as tokens; `label` is the right one."""

    index: int
    label: int
    context: np.ndarray
    endings: list[np.ndarray]

    def rows(self, T: int) -> np.ndarray:
        """int32 (4, T + 1): context (no target) and ending (targets). Raises InputError when that is too long."""
        out = np.full((4, T + 1), -1, np.int32)
        for row, ending in zip(out, self.endings, strict=True):
            if len(self.context) + len(ending) > T + 1:
                raise InputError(
                    f"HellaSwag example {self.index}: {len(self.context) + len(ending)} tokens, longer than {T}"
                )
            row[: len(self.context)] = ~self.context
            row[len(self.context) : len(self.context) + len(ending)] = ending
        return out


def read_hellaswag(path: Path, vocab_size: int) -> list[MultipleChoice]:
    """Questions of an llm.c HellaSwag file. Raises InputError for a foreign, truncated or damaged file."""
    header = read_header(path, "a HellaSwag file")
    if tuple(header[:2]) != (HELLASWAG_MAGIC, HELLASWAG_VERSION):
        raise InputError(
            f"{path}: magic {header[0]}, version {header[1]}; expected {HELLASWAG_MAGIC}, {HELLASWAG_VERSION}"
        )
    stream = np.fromfile(path, "<u2", offset=HEADER_WORDS * 4).astype(np.int64)
    questions, at = [], 0
    for number in range(int(header[2])):
        if at + 6 > len(stream) or stream[at] != START_OF_EXAMPLE or at + stream[at + 1] // 2 > len(stream):
            raise InputError(f"{path}: example {number} of {header[2]} is truncated or damaged; copy the file again")
        end = at + int(stream[at + 1]) // 2
        index, label, endings = (int(x) for x in stream[at + 2 : at + 5])
        parts, at = [], at + 5
        for _ in range(1 + endings):
            parts.append(stream[at + 1 : at + 1 + int(stream[at])].astype(np.int32))
            at += 1 + len(parts[-1])
        if at != end or endings != 4 or label > 3 or not all(map(len, parts)):
            raise InputError(f"{path}: example {number} of {header[2]} is damaged; copy the file again")
        check_tokens(np.concatenate(parts), vocab_size, f"{path}, example {number}")
        questions.append(MultipleChoice(index, label, parts[0], parts[1:]))
    if not questions or at != len(stream):
        raise InputError(
            f"{path}: {len(questions)} examples, then {len(stream) - at} unread words; copy the file again"
        )
    return questions


def write_hellaswag(path: Path, questions: list[MultipleChoice]) -> None:
    streams = []
    for question in questions:
        parts = [np.r_[len(part), part] for part in (question.context, *question.endings)]
        body = np.concatenate([[question.index, question.label, len(question.endings)], *parts])
        streams.append(np.concatenate([[START_OF_EXAMPLE, 2 * (len(body) + 2)], body]).astype("<u2"))
    with path.open("wb") as file:
        write_header(file, HELLASWAG_MAGIC, HELLASWAG_VERSION, len(streams), max(2 * len(s) for s in streams))
        file.write(np.concatenate(streams).tobytes())
