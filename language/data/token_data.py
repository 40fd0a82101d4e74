"""Sequences of tokens on the host: llm.c shards, text as bytes, a Markov chain. Nothing here knows about TPUs.

Every source answers batch(step) with int32 (rows, T + 1): inputs [:-1] and targets [1:] of each row. A token that is an
input but no target is stored as ~token, a negative number; padding is ~0. That replaces PyTorch's ignore index, and one
array is uploaded instead of two. Where documents share a row (chat_data.py), the first token of each is ~(START +
token), and padding ~START. A batch is a pure function of the step, so resuming needs no other position.
"""

import codecs
import filecmp
import functools
import io
import re
import resource
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from language.data.llmc_files import check_tokens, open_token_shard
from language.data.preparations import check_preparations
from language.options.shapes import BYTE_VOCAB_SIZE
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import file_size, open_regular

TEXT = "a UTF-8 text file or a folder of them"
END_OF_DOCUMENT_BYTE = BYTE_VOCAB_SIZE - 1  # the token after the 256 bytes; stands before every document
START = 1 << 20  # added to the first token of a document that shares its row with others; no vocabulary is so large


FEWEST_OTHER_FILES, OTHER_FILES = 32, 1024  # that a run has open beside its data
SAMPLES, SAMPLED_TOKENS = 4096, 1 << 13  # 64 MiB of llm.c's GPT-2 tokens, which a cold disk reads in a second or so


class TokenShards:
    """llm.c's order: shards sorted by name, process r reads B*T+1 tokens at r*B*T and strides processes*B*T.

    What is left at the end of a shard after the last whole global batch is skipped, as there; after the last shard
    it starts over. `rows` is the batch of this process.
    """

    def __init__(
        self, pattern: str, vocab_size: int, T: int, rows: int, process_index: int = 0, process_count: int = 1,
        padded: bool = False,
    ):  # fmt: skip
        """padded: a shard shorter than a global batch is one, filled up with ~0; else it is refused."""
        paths = matching(Path(pattern))
        if not paths:
            raise InputError(f"{pattern}: matches no file; expected llm.c token shards; tools.prepare_data writes them")
        check_preparations(Path(pattern), paths)
        self.paths, self.vocab_size, self.T, self.rows = paths, vocab_size, T, rows
        allow_open_files(len(paths), f"the shards that {pattern} matches")
        self.shards = [open_token_shard(path, vocab_size) for path in paths]  # open until the end, as they were
        check_tokens(self.shards[0][: 1 << 26], vocab_size, paths[0])  # further ones as they are read
        self.stride = process_count * rows * T
        self.offset = process_index * rows * T
        steps = [(len(shard) - 1) // self.stride or int(padded and len(shard) > 1) for shard in self.shards]
        if empty := [
            f"{path} ({len(s)} tokens)" for path, s, n in zip(paths, self.shards, steps, strict=True) if n == 0
        ]:
            raise InputError(
                f"shorter than one global batch of {self.stride} + 1 tokens: {', '.join(empty[:3])}; lower "
                "--global_batch_size, or leave these shards out"
            )
        self.ends = np.cumsum(steps)
        self.batches_per_epoch = int(self.ends[-1])

    def fingerprint(self) -> int:
        """The CRC-32 of the shards' names and lengths, and above it that of their tokens: of all of them up to
        SAMPLES * SAMPLED_TOKENS, of more in samples spread evenly over each shard."""
        names = " ".join(f"{path.name} {len(shard)}" for path, shard in zip(self.paths, self.shards, strict=True))
        content, count = 0, max(1, SAMPLES // len(self.shards))
        for shard in self.shards:
            if len(shard) <= count * SAMPLED_TOKENS:
                content = zlib.crc32(shard, content)
                continue
            for start in np.linspace(0, len(shard) - SAMPLED_TOKENS, count).astype(int):
                content = zlib.crc32(shard[start : start + SAMPLED_TOKENS], content)
        return content << 32 | zlib.crc32(names.encode())

    def batch(self, step: int) -> np.ndarray:
        step %= self.batches_per_epoch
        index = int(np.searchsorted(self.ends, step, "right"))
        within = step - (int(self.ends[index - 1]) if index else 0)
        start = within * self.stride + self.offset
        tokens = self.shards[index][start : start + self.rows * self.T + 1].astype(np.int32)
        check_tokens(tokens, self.vocab_size, self.paths[index])
        tokens = np.pad(tokens, (0, self.rows * self.T + 1 - len(tokens)), constant_values=-1)
        return tokens[np.arange(self.rows)[:, None] * self.T + np.arange(self.T + 1)]


def allow_open_files(count: int, what: str) -> None:
    """Raise this process's own limit of open files by so many. Raises InputError where the machine's is lower."""
    needed, unlimited = len(list(Path("/dev/fd").iterdir())) + count, resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != unlimited and hard < needed + FEWEST_OTHER_FILES:
        raise InputError(
            f"{what} are {count:,} files to keep open, but this machine allows a process {hard:,}, others included; "
            "expected fewer and longer ones (tools.prepare_data --shard_tokens), or a higher limit: ulimit -Hn, of "
            "docker --ulimit nofile=NUMBER"
        )
    if soft != unlimited and soft < needed + OTHER_FILES:
        wanted = needed + OTHER_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == unlimited else min(wanted, hard), hard))


def matching(pattern: Path) -> list[Path]:
    """The file of this name; or those that its last part matches as a pattern, sorted."""
    if pattern.exists():
        return [pattern]
    try:
        found = list(pattern.parent.glob(pattern.name))
    except ValueError:  # empty, or with ** inside a name: no pattern to pathlib
        return []
    return entries_of(pattern.parent, found)


def entries_of(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """The paths in a folder, sorted, without hidden ones: what editors, Git and downloads put there is no data.

    Raises InputError for a link out of it: which files a model is trained on is for the user to say, not for whoever
    made the folder. And for the root of all folders, which would take hours to list.
    """
    if folder.resolve() == folder.resolve().parent:
        raise InputError(f"{folder} holds every file of this machine; expected a folder of data")
    every = sorted(paths)
    found = [path for path in every if not is_hidden(str(path.relative_to(folder)))]
    if len(found) < len(every):
        tell_once(f"left out   {len(every) - len(found)} hidden files in {folder}")
    for path in found:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"{path} is a link to {path.resolve()}, expected files within {folder}; copy the folder with "
                "cp --recursive --dereference, or name the folder that it leads to"
            )
    return found


def is_hidden(name: str) -> bool:
    """Whether a path within a folder has a part that begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


@functools.cache  # a run looks at its files when its options are checked, and again when it begins
def tell_once(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def refuse_other_json(file: io.BufferedReader, name: str) -> None:
    """Raises InputError for a file of JSON that is not one object a line. The file is at its beginning, and stays."""
    begins = file.peek(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip()
    found = command = ""
    if begins.startswith(b"["):
        found, command = "is one JSON array", "'.[]'"
    elif re.match(rb"\{[ \t\r]*\n", begins):
        found, command = "has objects of several lines", "."
    if found:
        raise InputError(f"{name} {found}; expected one JSON object a line; jq --compact-output {command} FILE > LINES")


def check_apart(training: Iterable[Path], validation: Iterable[Path]) -> None:
    """Raises InputError for a file that is in both, by a link or as a copy too."""
    by_size: dict[int, list[Path]] = {}
    for path in training:
        by_size.setdefault(size_of(path), []).append(path)
    by_size.pop(0, None)
    for path in validation:
        for other in by_size.get(size_of(path), ()):
            if path.samefile(other) or filecmp.cmp(path, other, shallow=False):
                refuse_overlap(str(other), str(path))


def size_of(path: Path) -> int:
    with open_regular(path, "a file of data") as file:
        return file_size(file)


def refuse_overlap(training: str, validation: str) -> None:
    what = f"{validation} is" if training == validation else f"{training} is the same as {validation},"
    raise InputError(
        f"{what} in train_data and in validation_data; expected text for validation that is not trained on; choose a "
        "--train_data without it"
    )


def text_files(path: Path) -> list[Path]:
    """One UTF-8 file, or all files in a folder, as entries_of() has them."""
    return entries_of(path, (p for p in path.rglob("*") if not p.is_dir())) if path.is_dir() else [path]


def read_documents(path: Path, separator: str = "") -> list[bytes]:
    """Documents of one UTF-8 file, or of all files in a folder. Without a separator a file is one document.

    Raises InputError for a separator that divides nothing.
    """
    try:
        divider = separator.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"document_separator is {separator!r}; expected UTF-8 text") from error
    documents, divided = [], not divider
    for file in text_files(path):
        with open_regular(file, TEXT) as opened:
            content = opened.read()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{file}: not UTF-8 (byte {content[error.start]:#x} at {error.start}); convert it first"
            ) from None
        if divider and divider not in content:
            check_line_ends(file, content, separator)
        divided = divided or divider in content
        documents += content.split(divider) if divider else [content]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise InputError(f"{path}: empty; expected UTF-8 text")
    if not divided:
        raise InputError(
            f"{path}: document_separator {separator!r} stands nowhere in it; expected it between documents; give "
            "what stands there (of bash, a blank line is $'\\n\\n'), or leave it out: a file is one document"
        )
    return documents


def check_line_ends(file: Path, content: bytes, separator: str) -> None:
    """Raises InputError where the separator would stand in the file if its lines ended as elsewhere."""
    other = separator.replace("\n", "\r\n")
    if other != separator and other.encode() in content:
        raise InputError(
            f"{file}: its lines end with \\r\\n, so document_separator stands there as {other!r} alone; expected \\n; "
            "convert it with dos2unix, or give that separator"
        )


def split_documents(documents: list[bytes], validation_fraction: float = 0.1) -> tuple[list[bytes], list[bytes]]:
    """The last part of the bytes is for validation, as in nanoGPT; one document may be split between the two, before a
    character."""
    total = sum(map(len, documents))
    num_training = total - int(total * validation_fraction)
    training, validation, seen = [], [], 0
    for document in documents:
        here = min(max(num_training - seen, 0), len(document))
        while 0 < here < len(document) and document[here] & 0xC0 == 0x80:  # inside a character of UTF-8
            here -= 1
        training += [document[:here]] if here else []
        validation += [document[here:]] if here < len(document) else []
        seen += len(document)
    return training, validation


class TextWindows:
    """Byte-level sequences; no sequence holds parts of two documents.

    Every document starts with the end-of-document token and becomes windows of T + 1 tokens that overlap by one, so
    each byte is a target exactly once an epoch. A short last window is padded with targets that do not count. With
    `bucketed` it is padded only to the next multiple of 128, and each batch comes from one bucket: at most T / 128
    graphs, which `lengths` names beforehand.
    """

    def __init__(
        self, documents: list[bytes], T: int, rows: int, seed: int = 0, shuffle: bool = True, bucketed: bool = False,
        process_index: int = 0, process_count: int = 1,
    ):  # fmt: skip
        self.tokens = np.concatenate([
            np.concatenate([np.array([END_OF_DOCUMENT_BYTE], np.int32), np.frombuffer(document, np.uint8)])
            for document in documents
        ])  # fmt: skip
        if len(self.tokens) < T + 1:
            raise InputError(
                f"{len(self.tokens)} tokens of text, shorter than one sequence of {T} + 1; shorten --sequence_length"
            )
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.process_index, self.process_count = process_index, process_count
        lengths = np.array([1 + len(document) for document in documents])
        ends = np.cumsum(lengths)
        self.starts = np.concatenate([np.arange(e - n, e - 1, T) for e, n in zip(ends, lengths, strict=True)])
        last = np.repeat(ends, -(-(lengths - 1) // T))
        self.counts = np.minimum(self.starts + T, last - 1) - self.starts  # targets in each window
        self.buckets = -(-self.counts // 128) * 128 if bucketed else np.full_like(self.counts, T)
        self.buckets = np.minimum(self.buckets, T)
        self.lengths = sorted(set(self.buckets.tolist()))
        self.batches_per_epoch = sum(-(-int((self.buckets == n).sum()) // self.global_rows) for n in self.lengths)

    @property
    def global_rows(self) -> int:
        return self.rows * self.process_count

    @functools.lru_cache(maxsize=2)  # noqa: B019 - two epochs, and the source lives as long as the run
    def plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(sequence length, indices of windows) of every batch of an epoch; short last batches stay short."""
        random = np.random.default_rng((self.seed, epoch))
        batches = []
        for length in self.lengths:
            members = np.flatnonzero(self.buckets == length)
            if self.shuffle:
                random.shuffle(members)
            batches += [(length, members[i : i + self.global_rows]) for i in range(0, len(members), self.global_rows)]
        if self.shuffle and len(self.lengths) > 1:
            random.shuffle(batches)
        return batches

    def batch(self, step: int) -> np.ndarray:
        epoch, index = divmod(step, self.batches_per_epoch)
        length, members = self.plan(epoch)[index]
        members = members[self.process_index * self.rows : (self.process_index + 1) * self.rows]
        out = np.full((self.rows, length + 1), -1, np.int32)
        reach = self.starts[members, None] + np.arange(length + 1)
        valid = np.arange(length + 1) <= self.counts[members, None]
        out[: len(members)] = np.where(valid, self.tokens[np.minimum(reach, len(self.tokens) - 1)], -1)
        return out


class MarkovChain:
    """Sequences from a Markov chain whose entropy rate is known in closed form.

    Every token has 4 possible successors, its own random ones, with probabilities 1/2, 1/4, 1/8, 1/8. Each row of the
    transition matrix is the same distribution over other tokens, so whatever the stationary distribution is, the
    entropy rate is 1.75 bits = 1.2130 nats, and no model can have a lower expected loss.
    """

    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    entropy = float(-(probabilities * np.log(probabilities)).sum())  # nats per token

    def __init__(
        self,
        vocab_size: int,
        T: int,
        rows: int,
        seed: int = 0,
        stream: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if vocab_size < 4:
            raise InputError(f"vocab_size {vocab_size}: the Markov chain needs at least 4 tokens")
        table = np.random.default_rng((seed, 1))
        self.successors = np.stack([table.choice(vocab_size, 4, replace=False) for _ in range(vocab_size)]).astype(
            np.int32
        )
        self.vocab_size, self.T, self.rows, self.seed, self.stream = vocab_size, T, rows, seed, stream
        self.process_index, self.process_count = process_index, process_count

    def batch(self, step: int) -> np.ndarray:
        random = np.random.default_rng((self.seed, 2 + self.stream, step))
        rows = self.rows * self.process_count  # every process draws the global batch and keeps its part
        choice = np.array([0, 0, 0, 0, 1, 1, 2, 3])[random.integers(0, 8, (self.T, rows), np.uint8)]  # eighths
        out = np.empty((self.T + 1, rows), np.int32)
        out[0] = random.integers(0, self.vocab_size, rows)
        for t in range(self.T):
            out[t + 1] = self.successors[out[t], choice[t]]
        return np.ascontiguousarray(out.T[self.process_index * self.rows : (self.process_index + 1) * self.rows])


@dataclass(frozen=True)
class MicroBatches:
    """Each batch of a source in `parts` batches, one after another."""

    source: Any
    parts: int

    def batch(self, step: int) -> np.ndarray:
        number, part = divmod(step, self.parts)
        return np.split(self.source.batch(number), self.parts)[part]


@dataclass(frozen=True)
class SequenceData:
    """What a language model trains and is validated on. Both sources answer batch(step) for this host."""

    config: TransformerConfig
    train: Any
    validation: Any
    validation_batches: int
    description: str
    crc32: int
    """Identifies the data: a run is resumed on the data it began with. One CRC-32, or the two of TokenShards."""
    loss_floor: float | None = None
    """Lowest possible expected loss in nats, in closed form; None where nobody knows it."""

    unit = "tokens"

    @property
    def num_steps(self) -> int:
        return self.config.num_steps

    def fingerprint(self) -> int:
        return self.crc32

    def batch(self, index: int) -> np.ndarray:
        return self.train.batch(index)

    def count(self, batch: Sequence) -> int:
        """Tokens that a step trains on; its batch: (B, T + 1) on the device."""
        return self.config.global_batch_size * (batch[0].shape[1] - 1)
