"""The order of a stream: each document once an epoch whatever the hosts, the same batches, resumed to the bit."""

import json
import re
from itertools import islice

import numpy as np
import pytest
from documents import write_corpus, write_documents
from test_tokenizer import LOSSY, trained

from language.data import stream as streams
from language.data.stream import Position, turns_of
from language.data.text import END_OF_DOCUMENT_BYTE
from language.data.tokenizer import load_tokenizer
from language.options.transformer_options import TransformerConfig
from language.sequences import check_files, load_sequences
from tpu_utils.base.errors import CheckpointError, InputError

T = 16


def config_of(folder, **changes) -> TransformerConfig:
    options = dict(
        train_data="part_*", sequence_length=T, global_batch_size=8, stream_window=10, stream_lanes=8, eval_batches=2
    )
    return TransformerConfig(dataset="stream", data_dir=str(folder), **(options | changes))


def batches_of(config, hosts: int, span: range, positions=None):
    """(global batches of steps, positions of all hosts behind the last). Through JSON, as a checkpoint holds it."""
    data = [load_sequences(config, index, hosts) for index in range(hosts)]
    for one in data:
        if positions:
            one.seek(span.start, json.loads(json.dumps(positions)))
    batches = [np.concatenate([one.batch(step) for one in data]) for step in span]
    positions = [one.position(span.stop) for one in data]
    for one in data:
        one.close()
    return batches, positions


def documents_by_lane(batches, lanes: int) -> list[list[str]]:
    """What each lane has given, document by document; the last one may be truncated."""
    rows = np.stack(batches)[:, :, :-1]  # the last token of a row is the first of the next one
    by_lane = rows.reshape(len(batches), lanes, -1).transpose(1, 0, 2).reshape(lanes, -1)
    texts = []
    for tokens in by_lane:
        assert tokens[0] == END_OF_DOCUMENT_BYTE
        ends = np.flatnonzero(tokens == END_OF_DOCUMENT_BYTE)
        texts.append([bytes(part[1:].astype(np.uint8)).decode() for part in np.split(tokens, ends[1:])])
    return texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Ten files of 40 documents, and their texts; another one for validation."""
    folder = tmp_path_factory.mktemp("corpus")
    write_documents(folder / "val.jsonl", [f"held out {number} {'y' * number}" for number in range(40)])
    return folder, write_corpus(folder, 10, 40)


@pytest.mark.parametrize("hosts", [[1, 2, 4, 1], [4, 1, 2, 8]])
def test_each_document_comes_once_an_epoch_whatever_the_hosts(corpus, hosts):
    """Also across two epochs, in another order; and the global batches are those of one host."""
    folder, texts = corpus
    config = config_of(folder, validation_data="val.jsonl")
    lanes, steps, found, positions = 8, 480 // len(hosts), [], None
    for number, count in enumerate(hosts):
        batches, positions = batches_of(config, count, range(number * steps, (number + 1) * steps), positions)
        found += batches
    alone, _ = batches_of(config, 1, range(480))
    np.testing.assert_array_equal(found, alone)
    reading, by_lane = streams.reading_of(config), documents_by_lane(found, lanes)
    of_epochs = [[], []]
    for lane, given in enumerate(by_lane):
        files_of_epoch = [[], [], []]
        for epoch, _, file in islice(turns_of(reading, lane), 6):
            files_of_epoch[min(epoch, 2)].append(file)
        first, second = 40 * len(files_of_epoch[0]), 40 * len(files_of_epoch[1])
        assert len(given) > first + second, "the test must see two epochs"
        of_epochs[0] += given[:first]
        of_epochs[1] += given[first : first + second]
    assert sorted(of_epochs[0]) == sorted(of_epochs[1]) == sorted(texts)
    assert of_epochs[0] != of_epochs[1]


def test_a_lane_is_shuffled_within_windows_alone(corpus):
    folder, _ = corpus
    reading = streams.reading_of(config_of(folder, validation_data="val.jsonl"))
    windows = list(islice(streams.windows_of(reading, 0, Position()), 4))
    numbers = [[int(text.split(":")[0]) % 40 for text in window.texts] for window in windows]
    for index, window in enumerate(numbers):
        assert sorted(window) == list(range(10 * index, 10 * index + 10)) != window


def test_a_window_of_long_documents_ends_earlier(corpus, monkeypatch):
    """Memory follows text, not documents; what comes once an epoch stays so."""
    folder, texts = corpus
    monkeypatch.setattr(streams, "WINDOW_BYTES", 100)
    config = config_of(folder, validation_data="val.jsonl", stream_lanes=1)
    windows = streams.windows_of(streams.reading_of(config), 0, Position())
    found, longest = [], max(map(len, texts))
    while len(found) < len(texts):
        window = next(windows)
        assert sum(map(len, window.texts)) <= 100 + longest
        found += window.texts
    assert sorted(found) == sorted(texts)
    whole, _ = batches_of(config, 1, range(40))
    resumed, _ = batches_of(config, 1, range(20, 40), batches_of(config, 1, range(20))[1])
    np.testing.assert_array_equal(resumed, whole[20:])


def test_resumed_at_any_step_it_goes_on_as_if_never_stopped(corpus):
    """Though batches are read ahead: the position is the one behind the step asked for."""
    folder, _ = corpus
    config = config_of(folder, stream_workers=5, global_batch_size=4, stream_lanes=2)
    whole, _ = batches_of(config_of(folder, stream_workers=2, global_batch_size=4, stream_lanes=2), 1, range(60))
    ahead = load_sequences(config)
    for step in range(60):
        np.testing.assert_array_equal(ahead.batch(step), whole[step])
        if step % 7 == 6:
            for behind in (0, 2):
                positions = [ahead.position(step + 1 - behind)]
                found, _ = batches_of(config, 1, range(step + 1 - behind, min(60, step + 4)), positions)
                np.testing.assert_array_equal(found, whole[step + 1 - behind : step + 4])
    ahead.close()


def test_one_file_on_more_hosts_than_lanes(tmp_path):
    """Each host reads the lane, and has its rows."""
    write_corpus(tmp_path, 1, 40)
    config = config_of(tmp_path, stream_lanes=0)
    four = load_sequences(config, 3, 4)
    assert "1 lane that 4 hosts share; " in four.description
    np.testing.assert_array_equal(
        batches_of(config, 4, range(20))[0], batches_of(config, 1, range(20))[0], "of one lane"
    )


def test_validation_is_held_out_and_the_same_each_time(corpus):
    folder, texts = corpus
    config = config_of(folder, eval_batches=100)
    data, other = load_sequences(config), load_sequences(config_of(folder, eval_batches=100, seed=1))
    batches = [data.validation.batch(i) for i in range(data.validation_batches)]
    np.testing.assert_array_equal(batches, [other.validation.batch(i) for i in range(other.validation_batches)])
    tokens = np.concatenate(batches)[:, :-1].reshape(-1)
    held_out = bytes((tokens[tokens >= 0] % 256).astype(np.uint8)).decode()  # an end token is 0
    expected = [text for number, text in enumerate(texts) if number % 40 % 10 == 9]
    assert [text for text in held_out.split("\0") if text] == expected
    by_lane = documents_by_lane(batches_of(config, 1, range(300))[0], 8)
    trained = {text for given in by_lane for text in given[:-1]}
    assert len(trained) == 360 and not trained & set(expected)


def test_lanes_stay_even_where_files_are_not(tmp_path):
    """Files of 1 to 64 parts: no lane gets ahead of another by more than the largest file."""
    for number in range(12):
        write_documents(tmp_path / f"part_{number:02d}.jsonl", ["x" * 100] * 2 ** (number % 7))
    reading = streams.reading_of(config_of(tmp_path, stream_lanes=4))
    for epochs in (1, 5):
        loads = []
        for lane in range(4):
            turns = islice(turns_of(reading, lane), 200)
            loads.append(sum(reading.files[file].size for epoch, _, file in turns if epoch < epochs))
        assert max(loads) - min(loads) <= max(file.size for file in reading.files)


def test_what_is_damaged_is_refused_or_left_out_and_counted(tmp_path, capfd):
    texts = write_corpus(tmp_path, 4, 20)
    write_documents(tmp_path / "val.jsonl", ["for validation"])
    path = tmp_path / "part_0001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b'{"text": 7}\n', b"not json\n", *lines[5:]]))
    with (tmp_path / "part_0002.jsonl.gz").open("r+b") as file:
        file.truncate(60)
    config = config_of(tmp_path, validation_data="val.jsonl", stream_lanes=1)
    with pytest.raises(InputError, match=r"line 6 has text: int; expected an object with text: str|damaged behind"):
        batches_of(config, 1, range(40))
    skipping = config_of(tmp_path, validation_data="val.jsonl", stream_lanes=1, stream_damaged="skip")
    batches, (position,) = batches_of(skipping, 1, range(24))
    left_out = position["0"][-1]
    found = set(documents_by_lane(batches, 1)[0])
    assert {*texts[:40], *texts[60:]} <= found, "all but those of the truncated file"
    assert left_out >= 3 and "left out   1 so far in this lane: " in capfd.readouterr().err
    resumed, _ = batches_of(skipping, 1, range(10, 24), batches_of(skipping, 1, range(10))[1])
    np.testing.assert_array_equal(resumed, batches[10:])


def test_files_without_a_document_end_with_a_message(tmp_path):
    for number in range(3):
        (tmp_path / f"part_{number}.jsonl").write_text("\n\n\n")
    write_documents(tmp_path / "val.jsonl", ["for validation"])
    config = config_of(tmp_path, validation_data="val.jsonl", stream_lanes=1)
    with pytest.raises(InputError, match="3 files hold no document to train on"):
        batches_of(config, 1, range(1))
    with pytest.raises(InputError, match="no text for validation; expected a file of 10 documents or more"):
        load_sequences(config_of(tmp_path, stream_lanes=0))


GOOD = {"0": [0, 0, 0, 1, 2, 0], "1": [0, 0, 0, 0, 4, 0]}


NO_PLACES = [[0] * 7, [0, 0, 0, 0, 0.5, 0], [0, 0, -1, 0, 0, 0], "abcdef", None, [10**18, 0, 0, 0, 0, 0]]
NO_POSITIONS = [None, 7, [None], [{"0": [0] * 6}], [GOOD | {"2": [0] * 6}], [GOOD | {"x": [0] * 6}]]


@pytest.mark.parametrize("positions", [*NO_POSITIONS, *([GOOD | {"1": place}] for place in NO_PLACES)])
def test_a_position_that_is_none_is_refused(corpus, positions):
    data = load_sequences(config_of(corpus[0], stream_lanes=2))
    with pytest.raises(CheckpointError, match=r"checkpoint of step 3 does not say where the stream stands: .*2 lanes"):
        data.seek(3, positions)
    data.seek(3, [GOOD])


@pytest.mark.parametrize("place", [[0, 0, 0, 9999, 2, 0], [0, 0, 0, 1, 9999, 0], [0, 0, 9999, 0, 5, 0]])
def test_a_position_outside_of_the_data_is_refused(corpus, place):
    data = load_sequences(config_of(corpus[0], stream_lanes=2))
    data.seek(3, [GOOD | {"1": place}])
    with pytest.raises(CheckpointError, match=r"the data has no document at .* expected the data it is of"):
        data.batch(3)
    data.close()


def test_the_fingerprint_is_of_names_sizes_ends_and_tokenizer(tmp_path):
    write_corpus(tmp_path, 2, 100)
    known = load_sequences(config_of(tmp_path, stream_lanes=0)).fingerprint()
    assert load_sequences(config_of(tmp_path, stream_lanes=0)).fingerprint() == known
    path = tmp_path / "part_0001.jsonl"
    content = path.read_bytes()
    others = [content[:-9] + b"y" + content[-8:], content + b"\n", content.replace(b"x", b"z", 1)]
    for changed in others:
        path.write_bytes(changed)
        assert load_sequences(config_of(tmp_path, stream_lanes=0)).fingerprint() != known
    path.write_bytes(content)
    assert load_sequences(config_of(tmp_path, stream_lanes=0)).fingerprint() == known
    path.rename(tmp_path / "part_0003.jsonl")
    assert load_sequences(config_of(tmp_path, stream_lanes=0)).fingerprint() != known


@pytest.mark.parametrize("source", ["text", "stream"])
def test_the_fingerprint_is_of_what_is_validated_on_too(tmp_path, source):
    write_documents(tmp_path / "part.jsonl", ["a document"] * 9)
    options = dict(dataset=source, data_dir=str(tmp_path), train_data="part.jsonl", validation_data="val.jsonl")
    config = TransformerConfig(**options, sequence_length=T, global_batch_size=1)
    found = []
    for letter in "xy":
        write_documents(tmp_path / "val.jsonl", [letter * 40])
        found.append(load_sequences(config).fingerprint())
    assert found[0] != found[1] and found[0] % 2**32 == found[1] % 2**32


def test_documents_without_a_letter_are_refused(tmp_path):
    write_documents(tmp_path / "part_0.jsonl", ["", " \n"] * 60)
    with pytest.raises(InputError, match=r"part_0.jsonl: the first 64 documents are empty; expected text in"):
        load_sequences(config_of(tmp_path, stream_lanes=1))


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(train_data=""), "train_data is empty; name the documents with --train_data"),
        (dict(train_data="none_*"), "none_.*: matches no file; expected documents: .parquet"),
        (dict(train_data="part_0000.parquet"), "there are 1 files; choose 1"),
        (dict(stream_lanes=3), r"stream_lanes \(3\) must divide global_batch_size \(8\); try 1"),
        (dict(text_field="body"), "has the columns id: int64, text: string; expected body: string"),
        (dict(tokenizer="nowhere", vocab_size=300), "tokenizer nowhere: no such file or folder"),
        (dict(vocab_size=300), "name it with --tokenizer"),
        (dict(validation_data="none"), "none: matches no file"),
    ],
)
def test_what_cannot_work_is_said_before_torch_is_imported(corpus, changes, said):
    with pytest.raises(InputError, match=said):
        config = config_of(corpus[0], **changes)
        check_files(config)
        load_sequences(config)


@pytest.mark.parametrize("begins", [False, True])
def test_tokens_are_those_of_the_tokenizer_document_by_document(tmp_path, corpus, capsys, begins):
    """A begin token too: samples and what others make of an export start with it."""
    folder, _ = corpus
    path = str(trained(tmp_path, begins=begins))
    config = config_of(folder, tokenizer=path, vocab_size=300, stream_lanes=1, validation_data="val.jsonl")
    reading = streams.reading_of(config)
    tokenizer, (window,) = load_tokenizer(path), islice(streams.windows_of(reading, 0, Position()), 1)
    expected = [token for text in window.texts for token in (tokenizer.end, *tokenizer.encode_around(text))]
    assert len(tokenizer.encode_around("")) == begins
    batches, _ = batches_of(config, 1, range(2))
    found = np.concatenate(batches)[:, :-1].reshape(-1)[: len(expected)].tolist()
    assert found == expected[: len(found)] and len(found) > 100
    described = [load_sequences(config).description for _ in range(2)]
    assert described[0] == described[1], "config.json of two equal runs holds it"
    assert re.search(r"stream     each thread [\d,]+ tokens/s", capsys.readouterr().out)


@pytest.mark.parametrize("place", [0, 20])
def test_a_tokenizer_that_loses_what_is_trained_on_is_refused(tmp_path, place):
    """Also in a file that is not the first, and where documents for validation are others, which it has."""
    latin = ["the cat sat on the mat"] * 40
    for number in range(21):
        foreign = abs(number - place) < 5
        write_documents(tmp_path / f"part_{number:02}.jsonl", ["\u65e5\u672c\u8a9e" * 9] * 40 if foreign else latin)
    write_documents(tmp_path / "val.jsonl", latin[1:])
    LOSSY["BPE"]().save(str(trained(tmp_path) / "tokenizer.json"))
    config = config_of(tmp_path, tokenizer=str(tmp_path), vocab_size=300, stream_lanes=1, validation_data="val.jsonl")
    with pytest.raises(InputError, match=r"documents to train on: the tokenizer loses [\d,]+ of [\d,]+ characters"):
        load_sequences(config)


@pytest.mark.parametrize(
    "files, batch, lanes",
    [(1, 8, 1), (8, 8, 8), (10, 8, 2), (100, 64, 16), (100, 100, 50), (1000, 512, 64), (7, 512, 1), (7, 7, 7)],
)
def test_lanes_are_as_many_as_end_an_epoch_together(files, batch, lanes):
    config = TransformerConfig(dataset="stream", train_data="x", global_batch_size=batch)
    assert streams.lanes_of(config, files) == lanes


def test_long_documents_are_tokenized_a_few_at_a_time(monkeypatch):
    """64 of 16 MB took tens of gigabytes."""
    monkeypatch.setattr(streams, "CHUNK_CHARACTERS", 100)
    texts = ["a" * size for size in (10, 80, 20, 300, 1, 1, 101, 5)] + ["b"] * 70
    chunks = list(streams.chunks_of(iter(texts)))
    assert [text for chunk in chunks for text in chunk] == texts
    assert [len(chunk) for chunk in chunks] == [3, 1, 3, 64, 7]
