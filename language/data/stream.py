"""Documents read as a stream while the run goes, tokenized by threads of the host: --dataset stream. Imports no torch.

The order is that of a number of lanes, the same for every number of hosts:

    files, permuted by (seed, epoch), go one by one to the lane that has the fewest bytes so far
    a lane reads its files one after another, in windows of documents, each shuffled by (seed, epoch, file, window)
    tokens of a lane: a document and what stands around it, again and again; rows of T + 1 of it overlap by one
    a global batch has global_batch_size / lanes rows of each lane, in the order of the lanes

A host reads the lanes of its rows. Where a lane stands is a Position, of numbers that no host shapes: a checkpoint of
any number of hosts is resumed by any other, and a document comes exactly once an epoch.
"""

import contextlib
import heapq
import itertools
import os
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from language.data.entries import allow_open_files
from language.data.sequence_data import Host, SequenceData
from language.data.stream_files import StreamFile, check_no_overlap, fingerprint_of, list_files, read_documents
from language.data.text import EpochRows
from language.data.tokenizer import Tokenizer, check_lost, check_texts, check_tokenizer, tokenizer_of
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import CheckpointError, InputError

MOST_LANES = 64
MOST_WORKERS = 16  # more threads than that wait for each other: docs/streams.md
WINDOW_BYTES = 1 << 25  # a window ends earlier once its text is so long: what bounds memory where documents are long
CHUNK = 64  # documents that a thread tokenizes at a time
CHUNK_CHARACTERS = 1 << 22  # after which a chunk has no more of them: tokens take 30 times the memory of their text
CHUNKS_AHEAD = 2  # chunks that each lane tokenizes ahead
CHECKED_FILES = 8  # at most, and a chunk of each, from which follows whether the tokenizer has their letters
VALIDATION_EVERY = 10  # one document of so many is for validation,
VALIDATION_PREFIX = 1000  # among the first so many of each file


@dataclass(frozen=True)
class Reading:
    """What is read, and how: the same on every host."""

    files: list[StreamFile]
    text_field: str
    tokenizer: Tokenizer
    seed: int
    lanes: int
    window: int  # documents that are shuffled among themselves
    skip_damaged: bool
    hold_out: bool  # leave the documents that are for validation out

    def refused(self, error: InputError, left_out: int) -> None:
        """Raises it, or says now and then that it is the left_out-th thing left out."""
        if not self.skip_damaged:
            raise error
        if left_out & (left_out - 1) == 0:  # 1, 2, 4, 8, ...
            print(f"left out   {left_out} so far in this lane: {error}", file=sys.stderr, flush=True)


class Position(NamedTuple):
    """Where a lane goes on: at the first token of the next row."""

    epoch: int = 0
    turn: int = 0  # which one of the lane's files of this epoch
    first: int = 0  # the document of the file that the window begins with
    index: int = 0  # index of the document in the shuffled window
    offset: int = 0  # index of the token in the document, whose token 0 is the end token in front of it
    left_out: int = 0  # damaged documents and files before the window


class Window(NamedTuple):
    position: Position  # position of its first document
    texts: list[str]


def turns_of(reading: Reading, lane: int) -> Iterator[tuple[int, int, int]]:
    """(epoch, turn, file) of a lane, without end. Plain text counts a third of its bytes, as compressed text would."""
    loads = [(0, number) for number in range(reading.lanes)]  # a heap: the lane with the fewest bytes is first
    for epoch in itertools.count():
        turn = 0
        for file in np.random.default_rng((reading.seed, 2, epoch)).permutation(len(reading.files)).tolist():
            load, taker = loads[0]
            bytes_read = reading.files[file].size // (1 if reading.files[file].kind else 3)
            heapq.heapreplace(loads, (load + bytes_read + 1, taker))
            if taker == lane:
                yield epoch, turn, file
                turn += 1


def windows_of(reading: Reading, lane: int, start: Position) -> Iterator[Window]:
    """The windows of a lane, from the one that start is in, without end."""
    first = start.first
    left_out = start.left_out
    without_text = 0
    for epoch, turn, file in turns_of(reading, lane):
        if (epoch, turn) < (start.epoch, start.turn):
            continue
        without_text += 1
        position = Position(epoch, turn, first, left_out=left_out)
        for window, left_out in windows_of_file(reading, file, position):  # noqa: B007 - of the last window
            without_text = 0 if window.texts else without_text
            yield window
        first = 0
        if without_text > len(reading.files):
            raise InputError(f"{len(reading.files)} files hold no document to train on; expected text to train on")


def windows_of_file(reading: Reading, file: int, position: Position) -> Iterator[tuple[Window, int]]:
    """The windows of a file from position on, and how much was left out until their end."""
    documents = read_documents(reading.files[file], reading.text_field, position.first)
    ended, left_out = False, position.left_out
    while not ended:
        texts = []
        size = 0
        number = position.first
        try:
            for text in documents:
                number += 1
                if isinstance(text, InputError):
                    if not reading.skip_damaged:
                        documents.close()  # raises where the file has changed: that is why
                    left_out += 1
                    reading.refused(text, left_out)
                elif not (reading.hold_out and is_held_out(number - 1)):
                    texts.append(text)
                    size += len(text)
                if number - position.first == reading.window or size > WINDOW_BYTES:
                    break
            else:
                ended = True
        except InputError as error:
            left_out += 1
            reading.refused(error, left_out)
            ended = True
        order = np.random.default_rng((reading.seed, 3, position.epoch, file, position.first)).permutation(len(texts))
        yield Window(position, [texts[i] for i in order]), left_out
        position = position._replace(first=number, left_out=left_out)


def is_held_out(number: int) -> bool:
    return number < VALIDATION_PREFIX and number % VALIDATION_EVERY == VALIDATION_EVERY - 1


class Lane:
    """The tokens of a lane, read and tokenized ahead by the threads of a pool."""

    def __init__(self, reading: Reading, number: int, start: Position, pool: ThreadPoolExecutor):
        self._reading = reading
        self._pool = pool
        self._start = start
        self._windows = windows_of(reading, number, start)
        coming = pool.submit(next, self._windows)  # one at a time: a generator is of one thread
        self._documents = self._tokenized(start, coming)
        self._place = start
        self._tokens = np.empty(0, np.int32)
        self._offset = 0

    def take(self, count: int) -> np.ndarray:
        """The next `count` tokens and the one behind them, which the next call begins with. (count + 1,) int32."""
        out, filled = np.empty(count + 1, np.int32), 0
        while True:
            piece = self._tokens[self._offset : self._offset + count + 1 - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            if filled > count:
                self._offset += len(piece) - 1
                return out
            self._next_document()

    @property
    def position(self) -> Position:
        """Position of the first token that the next call of take() gives."""
        return self._place._replace(offset=self._offset)

    def close(self) -> None:
        """Once the pool is at rest."""
        with contextlib.suppress(InputError):  # the file has changed, which no longer matters
            self._windows.close()

    def _next_document(self) -> None:
        self._place, self._tokens = next(self._documents)
        self._offset = self._start.offset
        start = self._start
        self._start = Position()
        if start != Position() and (self._place[:4] != start[:4] or start.offset >= len(self._tokens)):
            raise CheckpointError(f"the data has no document at {start} of the checkpoint; expected the data it is of")

    def _tokenized(self, start: Position, coming: Future) -> Iterator[tuple[Position, np.ndarray]]:
        """Position and tokens of each document from `start` on, without end. coming: the next window."""
        chunks: deque[tuple[Position, Future]] = deque()  # in a thread
        while True:
            window = coming.result()
            coming = self._pool.submit(next, self._windows)
            first = start.index if window.position[:3] == start[:3] else 0
            for texts in chunks_of(iter(window.texts[first:])):
                place = window.position._replace(index=first)
                chunks.append((place, self._pool.submit(encode, self._reading.tokenizer, texts)))
                first += len(texts)
                if len(chunks) == CHUNKS_AHEAD:
                    place, chunk = chunks.popleft()
                    for index, tokens in enumerate(chunk.result(), place.index):
                        yield place._replace(index=index), tokens


def chunks_of(texts: Iterator[str]) -> Iterator[list[str]]:
    """What is tokenized at a time."""
    chunk, size = [], 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if len(chunk) == CHUNK or size > CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Each text with what stands around a document, int32."""
    first, last = (np.array(tokens, np.int32) for tokens in tokenizer.around_document)
    return [np.concatenate([first, each, last], dtype=np.int32) for each in tokenizer.encode_documents(texts)]


class StreamRows:
    """Rows of T + 1 tokens of this host, batch after batch; where they stand after each."""

    def __init__(self, reading: Reading, T: int, rows: int, kept: int, workers: int, host: Host):
        """rows: of this host in a batch. kept: for how many batches back position() knows; how far it is read ahead."""
        self.reading = reading
        self.T = T
        self.kept = kept
        self.workers = workers
        self.rows_of_lane = rows * host.count // reading.lanes
        first = host.index * rows
        self.numbers = range(first // self.rows_of_lane, (first + rows - 1) // self.rows_of_lane + 1)
        """Numbers of the lanes that have rows of this host. If two hosts share a lane, each reads all of it."""
        self.own = slice(first % self.rows_of_lane, first % self.rows_of_lane + rows)
        self._next, self._positions = 0, {0: dict.fromkeys(self.numbers, Position())}
        self._lanes: list[Lane] = []

    def seek(self, step: int, positions: dict[int, Position]) -> None:
        """Go on behind this many batches."""
        self._next, self._positions = step, {step: {number: positions[number] for number in self.numbers}}

    def position(self, step: int) -> dict[int, Position]:
        """Position of each lane of this host after `step` batches; it may have read further by now."""
        return self._positions[step]

    def batch(self, step: int) -> np.ndarray:
        """(rows, T + 1) int32. Batches come in their order: a stream does not go back."""
        assert step == self._next, f"batch {step} of a stream that is at {self._next}"
        if not self._lanes:
            allow_open_files(len(self.numbers), "the lanes of a stream")
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="stream")
            starts = self._positions[step]
            self._lanes = [Lane(self.reading, number, starts[number], self._pool) for number in self.numbers]
        count, reach = self.rows_of_lane * self.T, np.arange(self.T + 1)
        starts = np.arange(self.rows_of_lane)[:, None] * self.T
        out = np.concatenate([lane.take(count)[starts + reach] for lane in self._lanes])[self.own]
        self._next = step + 1
        self._positions[self._next] = {
            number: lane.position for number, lane in zip(self.numbers, self._lanes, strict=True)
        }
        self._positions.pop(self._next - self.kept, None)
        return np.ascontiguousarray(out)

    def close(self) -> None:
        if self._lanes:
            self._pool.shutdown(cancel_futures=True)
            for lane in self._lanes:
                lane.close()


@dataclass(frozen=True)
class StreamData(SequenceData):
    """As SequenceData; checkpoints of its runs hold where the lanes stand."""

    def position(self, step: int) -> dict[str, list[int]]:
        """Behind `step` batches, of the lanes of this host, as JSON."""
        return {str(number): list(position) for number, position in self.train.position(step).items()}

    def seek(self, step: int, positions: Any) -> None:
        """positions: of all hosts, as position() gave them. Raises CheckpointError for what it never gives."""
        try:
            found = {int(name): Position(*place) for host in positions for name, place in host.items()}
            numbers = [number for place in found.values() for number in place]
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError("it has invalid numbers")
            if found.keys() != set(range(self.train.reading.lanes)):
                raise ValueError(f"it has the lanes {sorted(found)}")
            if max(place.epoch for place in found.values()) > step * self.config.global_batch_size * self.train.T:
                raise ValueError("it has more epochs than the steps had tokens")
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} does not say where the stream stands: {error}; expected a position of "
                f"each of {self.train.reading.lanes} lanes; start anew in another --run_dir"
            ) from error
        self.train.seek(step, found)

    def close(self) -> None:
        self.train.close()


def lanes_of(config: TransformerConfig, files: int) -> int:
    """--stream_lanes; else the largest divisor of the batch that divides the files too, or of which there are four
    files or more each: lanes end an epoch at about the same time then. Raises InputError."""
    if config.stream_lanes > files:
        raise InputError(f"stream_lanes is {config.stream_lanes}, but there are {files} files; choose {files} or less")
    even = [n for n in range(1, MOST_LANES + 1) if files % n == 0 or files >= 4 * n]
    return config.stream_lanes or max(n for n in even if config.global_batch_size % n == 0)


def reading_of(config: TransformerConfig) -> Reading:
    """Raises InputError for files that are not there, and for another tokenizer than the model's."""
    if not config.train_data:
        raise InputError("dataset is stream but train_data is empty; name the documents with --train_data")
    tokenizer = tokenizer_of(config)
    check_tokenizer(tokenizer, config.shape.vocab_size)
    files = list_files(config.train_data, config.data_dir)
    if config.validation_data:
        check_no_overlap(files, list_files(config.validation_data, config.data_dir))
    lanes, skip = lanes_of(config, len(files)), config.stream_damaged == "skip"
    of_order = (config.seed, lanes, config.stream_window)
    return Reading(files, config.text_field, tokenizer, *of_order, skip, not config.validation_data)


def check(config: TransformerConfig) -> None:
    """Raises InputError where the first document of a file on this machine cannot be read, unless damage is skipped."""
    reading = reading_of(config)
    for file in reading.files:
        if not (reading.skip_damaged or file.crc32c):
            for document in itertools.islice(read_documents(file, reading.text_field), 1):
                if isinstance(document, InputError):
                    raise document


def load(config: TransformerConfig, process_index: int = 0, process_count: int = 1) -> StreamData:
    """The stream that config names; of several processes each reads the lanes of its rows. Raises InputError."""
    # our threads are parallel: the library's own below them would take cores from each other
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    reading = reading_of(config)
    T = config.shape.sequence_length
    rows = config.global_batch_size // process_count
    some = reading.files[:: -(-len(reading.files) // CHECKED_FILES)]
    texts = [text for file in some for chunk in first_chunks(file, reading, 1) for text in chunk]
    if texts and not any(map(str.strip, texts)):
        raise InputError(
            f"{reading.files[0].name}: the first {len(texts)} documents are empty; expected text in "
            f"{reading.text_field}; name another --text_field"
        )
    check_texts(reading.tokenizer, texts, "the documents to train on")
    workers = config.stream_workers or min(MOST_WORKERS, os.cpu_count() or 1)
    ahead = config.prefetch_batches + 4  # what is in the loader's queue, on its way there, and made
    host = Host(process_index, process_count)
    train = StreamRows(reading, T, rows, ahead, workers, host)
    validation = validation_rows(reading, config, rows, host)
    evaluated = len(validation.starts)
    kinds = Counter(file.kind if file.kind == "parquet" else f"jsonl {file.kind}".strip() for file in reading.files)
    named = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    shared = f" that {process_count} hosts share" if reading.lanes % process_count else ""  # and each reads in full
    description = (
        f"stream of {named}, {sum(file.size for file in reading.files) / 1e6:,.1f} MB; {reading.lanes} "
        f"lane{'s' * (reading.lanes > 1)}{shared}; {workers} threads; "
        f"{evaluated:,} row{'s' * (evaluated > 1)} for validation"
    )
    if process_index == 0:  # measured: in the description it would make two config.json of two equal runs
        print(f"stream     each thread {speed_of(reading):,.0f} tokens/s", flush=True)
    crc32 = reading.tokenizer.fingerprint ^ fingerprint_of(reading.files)
    crc32 |= zlib.crc32(validation.tokens.tobytes()) << 32
    return StreamData(config, train, validation, validation.batches_per_epoch, description, crc32)


def validation_rows(reading: Reading, config: TransformerConfig, rows: int, host: Host) -> EpochRows:
    """At most eval_batches * global_batch_size of the first documents, each time. Raises InputError for no text."""
    T = config.shape.sequence_length
    found = []
    count = 0
    wanted = config.eval_batches * config.global_batch_size * T + 1
    lost = Counter()
    size = 0
    for chunk in chunks_of(texts_for_validation(reading, config)):
        for text, tokens in zip(chunk, encode(reading.tokenizer, chunk), strict=True):
            lost += reading.tokenizer.lost(text, tokens)
            size += len(text)
            count += len(tokens)
            found.append(tokens)
        if count >= wanted:
            break
    check_lost(lost, size, "the documents for validation")
    if count < 2:
        raise InputError(
            f"no text for validation; expected a file of {VALIDATION_EVERY} documents or more, of which one is "
            "held out; or name others with --validation_data"
        )
    tokens = np.concatenate(found)[:wanted]
    starts = np.arange(0, len(tokens) - 1, T)
    counts = np.minimum(T + 1, len(tokens) - starts)
    return EpochRows(tokens, starts, counts, np.full_like(starts, T), rows, 0, False, host)


def texts_for_validation(reading: Reading, config: TransformerConfig) -> Iterator[str]:
    files = list_files(config.validation_data, config.data_dir) if config.validation_data else reading.files
    for file in files:
        documents = read_documents(file, reading.text_field)
        numbered = enumerate(documents if config.validation_data else itertools.islice(documents, VALIDATION_PREFIX))
        try:
            for number, text in numbered:
                if config.validation_data or is_held_out(number):
                    if isinstance(text, str):
                        yield text
                    elif not reading.skip_damaged:
                        raise text
        except InputError:  # training skips this file too, and counts it
            if not reading.skip_damaged:
                raise


def first_chunks(file: StreamFile, reading: Reading, most: int) -> Iterator[list[str]]:
    """At most so many chunks of the first documents, as far as they can be read."""
    with contextlib.suppress(InputError):  # whoever needs these documents says so
        found = itertools.islice(read_documents(file, reading.text_field), most * CHUNK)
        yield from itertools.islice(chunks_of(text for text in found if isinstance(text, str)), most)


def speed_of(reading: Reading) -> float:
    """Tokens that a thread reads and tokenizes in a second of its own, by the first documents."""
    began, tokens = time.thread_time(), []
    for texts in first_chunks(reading.files[0], reading, 4):
        tokens += encode(reading.tokenizer, texts)
    return sum(map(len, tokens)) / max(time.thread_time() - began, 1e-9)
