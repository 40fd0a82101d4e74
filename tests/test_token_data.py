"""Token shards, text and the Markov chain: what a step gets to see, and every refusal."""

import numpy as np
import pytest

import llmc_files
import token_data
from tpu_utils.errors import InputError


def write_shard(path, tokens, magic=20240520, version=1, count=None, dtype="<u2"):
    """By hand, not through our writer."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def test_shards_are_read_in_llmc_order(tmp_path):
    """Two shards, two processes: process r reads B*T+1 tokens at r*B*T, strides 2*B*T, skips the ragged end."""
    T, rows = 4, 3
    first, second = np.arange(60), 1000 + np.arange(30)  # two global batches (24 tokens each) and one
    write_shard(tmp_path / "b_000.bin", first)
    write_shard(tmp_path / "b_001.bin", second)
    for process in (0, 1):
        source = token_data.TokenShards(str(tmp_path / "b_*.bin"), 2000, T, rows, process, 2)
        assert source.batches_per_epoch == 3
        for step, (tokens, start) in enumerate([(first, 0), (first, 24), (second, 0), (first, 0)]):
            at = start + process * rows * T
            expected = [tokens[at + row * T : at + row * T + T + 1] for row in range(rows)]
            np.testing.assert_array_equal(source.batch(step), expected)


def test_llama_shards_are_read(tmp_path):
    path = write_shard(tmp_path / "l.bin", [70000 + i for i in range(20)], 20240801, 7, dtype="<u4")
    source = token_data.TokenShards(str(path), 128256, 4, 2)
    assert source.batch(0)[0, 0] == 70000 and source.batch(0).dtype == np.int32


def test_our_writer_writes_what_we_read(tmp_path):
    path = tmp_path / "t.bin"
    llmc_files.write_token_shard(path, np.arange(50))
    np.testing.assert_array_equal(llmc_files.open_token_shard(path, 50257), np.arange(50))
    with pytest.raises(InputError, match="65536"):
        llmc_files.write_token_shard(path, np.array([65536]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: write_shard(p, range(40), count=50), "truncated: 1104 bytes, expected 1124"),
        (lambda p: write_shard(p, range(40), count=30), "longer than its header says"),
        (lambda p: write_shard(p, range(40), magic=7), "magic number 7 is not a token shard's"),
        (lambda p: write_shard(p, range(40), version=2), "version 2; expected 1"),
        (
            lambda p: write_shard(p, range(40), 20240801, 7, dtype="<u4"),
            "Llama-3 tokens .vocabulary 128256. for a model",
        ),
        (lambda p: write_shard(p, [*range(40), 999]), "token 999, but vocab_size is 257"),
        (lambda p: write_shard(p, range(8)), "shorter than one global batch of 8"),
        (lambda p: write_shard(p, []), "no tokens"),
        (lambda p: p.write_bytes(b""), "0 bytes; a token shard starts with a header of 1024 bytes"),
        (lambda p: None, "matches no file"),
    ],
)
def test_bad_shards_are_refused(tmp_path, make, message):
    make(tmp_path / "x.bin")
    with pytest.raises(InputError, match=message):
        token_data.TokenShards(str(tmp_path / "x.bin"), 257, 4, 2)


def epoch_of(source, epoch=0):
    n = source.batches_per_epoch
    return [source.batch(epoch * n + i) for i in range(n)]


@pytest.mark.parametrize("bucketed", [False, True])
def test_every_byte_is_a_target_once_and_documents_stay_apart(bucketed):
    random = np.random.default_rng(0)
    documents = [
        bytes(random.integers(0, 64, n).astype(np.uint8) + 64 * (i % 4)) for i, n in enumerate([5, 700, 256, 1, 130])
    ]
    T, rows = 256, 2
    parts = [token_data.TextWindows(documents, T, rows, 1, True, bucketed, process, 2) for process in (0, 1)]
    for epoch in (0, 1):
        windows = [row for part in parts for batch in epoch_of(part, epoch) for row in batch]
        targets = np.concatenate([row[1:][row[1:] >= 0] for row in windows])
        assert sorted(targets) == sorted(b"".join(documents))
        for row in windows:
            inside = row[(row >= 0) & (row != token_data.END_OF_DOCUMENT_BYTE)]
            assert len(set(inside // 64)) <= 1  # each document here has its own quarter of the byte values
    lengths = {batch.shape[1] - 1 for part in parts for batch in epoch_of(part)}
    assert lengths == ({128, 256} if bucketed else {256}) and lengths == set(parts[0].lengths)
    assert [b.tolist() for b in epoch_of(parts[0])] != [b.tolist() for b in epoch_of(parts[0], 1)]  # reshuffled


def test_split_is_nanogpts():
    training, validation = token_data.split_documents([b"a" * 1000])
    assert [len(d) for d in training + validation] == [900, 100]


def test_text_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("three")
    assert token_data.read_documents(tmp_path) == [b"one\n\ntwo", b"three"]
    assert token_data.read_documents(tmp_path, "\n\n") == [b"one", b"two", b"three"]
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9!")
    with pytest.raises(InputError, match=r"not UTF-8 \(byte 0xe9 at 3\)"):
        token_data.read_documents(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(InputError, match="empty"):
        token_data.read_documents(tmp_path / "empty.txt")
    with pytest.raises(InputError, match="shorter than one sequence of 64"):
        token_data.TextWindows([b"short"], 64, 2)


def test_markov_chain_has_the_entropy_it_says():
    """The entropy of the transition matrix as counted from samples, against the closed form."""
    chain = token_data.MarkovChain(16, 256, 64)
    counts = np.zeros((16, 16))
    for step in range(40):
        batch = chain.batch(step)
        np.add.at(counts, (batch[:, :-1].ravel(), batch[:, 1:].ravel()), 1)
    rows = counts / counts.sum(1, keepdims=True)
    per_state = -np.where(rows > 0, rows * np.log(np.maximum(rows, 1e-12)), 0).sum(1)
    assert abs((per_state * counts.sum(1)).sum() / counts.sum() - chain.entropy) < 2e-3
    assert abs(chain.entropy - 1.75 * np.log(2)) < 1e-12
    assert not np.array_equal(chain.batch(0), chain.batch(1)) and np.array_equal(chain.batch(3), chain.batch(3))
    halves = [token_data.MarkovChain(16, 256, 32, process_index=i, process_count=2).batch(5) for i in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(halves), chain.batch(5))


def test_hellaswag_file_round_trip_and_damage(tmp_path):
    questions = [
        llmc_files.MultipleChoice(i, i % 4, np.arange(3 + i), [np.arange(10 * e, 10 * e + 2 + e) for e in range(4)])
        for i in range(5)
    ]
    path = tmp_path / "hellaswag_val.bin"
    llmc_files.write_hellaswag(path, questions)
    words = np.frombuffer(path.read_bytes(), "<u2")[512:]
    assert words[:6].tolist() == [
        65535,
        2 * (6 + 3 + 4 + 2 + 3 + 4 + 5),
        0,
        0,
        4,
        3,
    ]  # llm.c: bytes of the whole example
    found = llmc_files.read_hellaswag(path, 257)
    assert [q.label for q in found] == [0, 1, 2, 3, 0]
    rows = found[1].rows(12)
    assert (
        rows[3, :4].tolist() == [~0, ~1, ~2, ~3] and rows[3, 4:9].tolist() == [30, 31, 32, 33, 34] and rows[3, 9] == -1
    )
    with pytest.raises(InputError, match="longer than 5"):
        found[4].rows(5)
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(InputError, match="example 4 of 5"):
        llmc_files.read_hellaswag(path, 257)
