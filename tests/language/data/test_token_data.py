"""Token shards, text and the Markov chain: what a step gets to see, and every refusal."""

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from mutations import at_most, make_irregular, mutated, no_hang, refusals
from processes import ROOT

from language import sequences
from language.data import llmc_files
from language.data.chat import read_chats
from language.data.entries import entries_of
from language.data.sequence_data import Host
from language.data.stream_files import list_files
from language.data.synthetic import MarkovChain
from language.data.text import END_OF_DOCUMENT_BYTE, TextWindows, read_documents, split_documents
from language.data.tokenizer import load_tokenizer
from language.data.tokens import TokenShards
from language.options.transformer_options import TransformerConfig
from language.tasks.task_files import read_records
from language.weights.llmc_weights import read_debug_state, read_model
from tpu_utils.base.errors import InputError


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
        source = TokenShards(str(tmp_path / "b_*.bin"), 2000, T, rows, Host(process, 2))
        assert source.batches_per_epoch == 3
        for step, (tokens, start) in enumerate([(first, 0), (first, 24), (second, 0), (first, 0)]):
            at = start + process * rows * T
            expected = [tokens[at + row * T : at + row * T + T + 1] for row in range(rows)]
            np.testing.assert_array_equal(source.batch(step), expected)


def test_more_shards_than_open_files(tmp_path):
    """The soft limit is this process's own to raise; the hard one is not."""
    write_shard(tmp_path / "s_000.bin", np.arange(20))
    for number in range(1, 300):
        os.link(tmp_path / "s_000.bin", tmp_path / f"s_{number:03d}.bin")
    program = (
        "import resource, sys; from language.data.tokens import TokenShards\n"
        "from tpu_utils.base.errors import InputError\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[2])))\n"
        "try: print(len(TokenShards(sys.argv[1], 257, 4, 2).shards))\n"
        "except InputError as error: print(error)"
    )
    for hard, said in (
        (1000, "300\n"),
        (320, "are 300 files to keep open, but this machine allows a process 320, others"),
    ):
        command = [sys.executable, "-c", program, str(tmp_path / "s_*.bin"), str(hard)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert said in done.stdout


def test_llama_shards_are_read(tmp_path):
    path = write_shard(tmp_path / "l.bin", [70000 + i for i in range(20)], 20240801, 7, dtype="<u4")
    source = TokenShards(str(path), 128256, 4, 2)
    assert source.batch(0)[0, 0] == 70000 and source.batch(0).dtype == np.int32


def test_our_writer_writes_what_we_read(tmp_path):
    path = tmp_path / "t.bin"
    llmc_files.write_token_shard(path, np.arange(50))
    np.testing.assert_array_equal(llmc_files.open_token_shard(path, 50257), np.arange(50))
    with pytest.raises(InputError, match="65536"):
        llmc_files.write_token_shard(path, np.array([65536]))


@pytest.mark.parametrize(
    "recorded, of_model, expected",
    [
        (257, 50257, r"a vocabulary of 257 \(bytes\), .*--vocab_size 257; .*tools.prepare_data --tokenizer FOLDER"),
        (
            316,
            300,
            r"for a new model use --vocab_size 316; for one of --init.*resize_token_embeddings\(316\), then save",
        ),
    ],
)
def test_a_shard_of_another_vocabulary_leads_somewhere(tmp_path, recorded, of_model, expected):
    """A model that has its weights takes no other --vocab_size, and its own tokenizer may have got more tokens."""
    path = tmp_path / "a.bin"
    llmc_files.write_token_shard(path, np.arange(50), recorded)
    assert np.frombuffer(path.read_bytes(), "<i4", 256).tolist() == [20240520, 1, 50, recorded] + 252 * [0]
    np.testing.assert_array_equal(llmc_files.open_token_shard(path, recorded), np.arange(50))
    with pytest.raises(InputError, match=expected):
        llmc_files.open_token_shard(path, of_model)


def test_the_page_makes_a_shard_of_an_array_of_tokens(tmp_path, monkeypatch):
    """docs/another_model.md, "Tokens of your own"."""
    section = (ROOT / "docs" / "another_model.md").read_text().partition("\n## Tokens of your own")[2]
    monkeypatch.chdir(tmp_path)
    np.save("tokens.npy", np.arange(50) * 1000)
    exec(re.search(r"```python\n(.*?)```", section, re.S)[1], {})
    source = TokenShards("mine_train_*.bin", 65536, 4, 2)
    np.testing.assert_array_equal(source.batch(0), np.array([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]) * 1000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: write_shard(p, range(40), count=50), "truncated: 1104 bytes, expected 1124"),
        (lambda p: write_shard(p, range(40), count=30), "longer than its header says"),
        (lambda p: write_shard(p, range(40), magic=7), "magic number 7 is not a token shard's"),
        (lambda p: write_shard(p, range(40), version=2), "version 2; expected 1"),
        (lambda p: write_shard(p, range(40), 20240801, 7, dtype="<u4"), "Llama-3 tokens .vocabulary 128256"),
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
        TokenShards(str(tmp_path / "x.bin"), 257, 4, 2)


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
    parts = [TextWindows(documents, T, rows, 1, True, bucketed, Host(process, 2)) for process in (0, 1)]
    for epoch in (0, 1):
        windows = [row for part in parts for batch in epoch_of(part, epoch) for row in batch]
        targets = np.concatenate([row[1:][row[1:] >= 0] for row in windows])
        assert sorted(targets) == sorted(b"".join(documents))
        for row in windows:
            inside = row[(row >= 0) & (row != END_OF_DOCUMENT_BYTE)]
            assert len(set(inside // 64)) <= 1  # each document here has its own quarter of the byte values
    lengths = {batch.shape[1] - 1 for part in parts for batch in epoch_of(part)}
    assert lengths == ({128, 256} if bucketed else {256}) and lengths == set(parts[0].lengths)
    assert [b.tolist() for b in epoch_of(parts[0])] != [b.tolist() for b in epoch_of(parts[0], 1)]  # reshuffled


def test_split_is_nanogpts():
    training, validation = split_documents([b"a" * 1000])
    assert [len(d) for d in training + validation] == [900, 100]


def test_text_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("three", encoding="utf-8-sig")
    assert read_documents(tmp_path) == [b"one\n\ntwo", b"three"]
    assert read_documents(tmp_path, "\n\n") == [b"one", b"two", b"three"]
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9!")
    with pytest.raises(InputError, match=r"not UTF-8 \(byte 0xe9 at 3\)"):
        read_documents(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(InputError, match="empty"):
        read_documents(tmp_path / "empty.txt")
    with pytest.raises(InputError, match="shorter than one sequence of 64"):
        TextWindows([b"short"], 64, 2)


def test_markov_chain_has_the_entropy_it_says():
    """The entropy of the transition matrix as counted from samples, against the closed form."""
    chain = MarkovChain(16, 256, 64)
    counts = np.zeros((16, 16))
    for step in range(40):
        batch = chain.batch(step)
        np.add.at(counts, (batch[:, :-1].ravel(), batch[:, 1:].ravel()), 1)
    rows = counts / counts.sum(1, keepdims=True)
    per_state = -np.where(rows > 0, rows * np.log(np.maximum(rows, 1e-12)), 0).sum(1)
    assert abs((per_state * counts.sum(1)).sum() / counts.sum() - chain.entropy) < 2e-3
    assert abs(chain.entropy - 1.75 * np.log(2)) < 1e-12
    assert not np.array_equal(chain.batch(0), chain.batch(1)) and np.array_equal(chain.batch(3), chain.batch(3))
    halves = [MarkovChain(16, 256, 32, host=Host(i, 2)).batch(5) for i in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(halves), chain.batch(5))


def hellaswag(path, count=5):
    """A file of questions and its bytes."""
    questions = [
        llmc_files.MultipleChoice(i, i % 4, np.arange(3 + i % 7), [np.arange(10 * e, 10 * e + 2 + e) for e in range(4)])
        for i in range(count)
    ]
    llmc_files.write_hellaswag(path, questions)
    return path.read_bytes()


def test_questions_are_written_as_llmc_reads_them(tmp_path):
    path = tmp_path / "hellaswag_val.bin"
    words = np.frombuffer(hellaswag(path), "<u2")[512:]
    size = 2 * (6 + 3 + 4 + 2 + 3 + 4 + 5)  # bytes of the whole example
    assert words[:6].tolist() == [65535, size, 0, 0, 4, 3]
    found = llmc_files.read_hellaswag(path, 257)
    assert [q.label for q in found] == [0, 1, 2, 3, 0]
    assert found[1].context.tolist() == [0, 1, 2, 3] and found[1].endings[3].tolist() == [30, 31, 32, 33, 34]


def test_no_damage_of_a_hellaswag_file_is_a_crash(tmp_path):
    path = tmp_path / "hellaswag_val.bin"
    content = hellaswag(path)

    def read():
        for question in llmc_files.read_hellaswag(path, 257):
            assert question.label < 4 and len(question.endings) == 4
            assert all(0 <= part.min() <= part.max() < 257 for part in (question.context, *question.endings))

    damaged = [content[:1024] + body for body in mutated(content[1024:], 525)]
    assert 300 < refusals(path, [*damaged, *mutated(content, 75)], read) < 600


def with_word(content: bytes, word: int, value: int) -> bytes:
    return content[: 1024 + 2 * word] + value.to_bytes(2, "little") + content[1026 + 2 * word :]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda c: with_word(c, 0, 0), "example 0 of 5, byte 1024: found 0, expected 65535, which starts an example"),
        (lambda c: with_word(c, 1, 8), "example 0 of 5, byte 1026: found 8 bytes, expected 54"),
        (lambda c: with_word(c, 2, 1), "example 0 of 5, byte 1028: found index 1, expected 0"),
        (lambda c: with_word(c, 3, 4), "example 0 of 5, byte 1030: found label 4, expected 0 to 3"),
        (lambda c: with_word(c, 4, 3), "example 0 of 5, byte 1032: found 3 endings, expected 4"),
        (lambda c: with_word(c, 5, 0), "example 0 of 5, byte 1034: found 0 tokens, expected 1 to 139"),
        (lambda c: with_word(c, 9, 60000), "example 0 of 5, byte 1042: found 60000 tokens, expected 1 to"),
        (lambda c: with_word(c, 7, 257), "example 0 of 5: token 257, but vocab_size is 257"),
        (lambda c: c + b"\0", "1 bytes behind the last example, expected none"),
        (lambda c: c[:8] + (0).to_bytes(4, "little") + c[12:], "of 0 examples, expected 1 to 65536"),
        (lambda c: c[:8] + (65537).to_bytes(4, "little") + c[12:], "65537 examples, expected 1 to 65536"),
        (lambda c: c[:1035], "example 0 of 5, byte 1024: found 5 words, expected an example"),
        (lambda c: c[:-6], "example 4 of 5"),
    ],
)
def test_a_damaged_hellaswag_file_is_refused_by_place(tmp_path, change, said):
    path = tmp_path / "hellaswag_val.bin"
    path.write_bytes(change(hellaswag(path)))
    with pytest.raises(InputError, match=rf"{path}: .*{said}"):
        llmc_files.read_hellaswag(path, 257)


def test_no_damage_of_a_token_shard_is_a_crash(tmp_path):
    path = write_shard(tmp_path / "x.bin", range(60))
    content = path.read_bytes()

    def read():
        source = TokenShards(str(path), 257, 4, 2)
        assert source.batch(0).shape == (2, 5) and source.batch(source.batches_per_epoch).max() < 257

    damaged = [header + content[12:] for header in mutated(content[:12], 400)]
    assert 300 < refusals(path, [*damaged, *mutated(content, 200)], read) < 600


def load(tmp_path, **options):
    return sequences.load_sequences(TransformerConfig(data_dir=str(tmp_path), num_steps=1, warmup_steps=0, **options))


READERS = {
    "shards": lambda path: TokenShards(str(path), 257, 4, 2),
    "shards by pattern": lambda path: TokenShards(str(path.with_name("x*")), 257, 4, 2),
    "text": read_documents,
    "hellaswag": lambda path: llmc_files.read_hellaswag(path, 257),
    "chats": read_chats,
    "stream": lambda path: list_files(path.name, str(path.parent)),
    "tokenizer": lambda path: load_tokenizer(str(path)),
    "tasks": lambda path: read_records(path, "questions"),
    "weights of llm.c": read_model,
    "state of llm.c": lambda path: read_debug_state(path, None),
}


@pytest.mark.parametrize("kind", ["FIFO", "character device", "nothing", "folder"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_by_name(tmp_path, reader, kind):
    path = make_irregular(tmp_path / "x.jsonl", kind)
    with no_hang(), pytest.raises(InputError, match=r"(?s)x(\.jsonl|\*).*(expected|no such file|no \.jsonl file)"):
        READERS[reader](path)


@pytest.mark.parametrize("name", [".", "..", "/", "x**", "**", "[", "[!", "x" * 300, "\udcff", "a/b/*"])
def test_a_pattern_that_matches_no_shard_is_refused(tmp_path, name):
    (tmp_path / "other.txt").write_text("x")
    with pytest.raises((InputError, OSError), match=r"matches no file|token shard|too long|expected UTF-8"):
        load(tmp_path, dataset="tokens", train_data=name, validation_data=name)


SEPARATED = b"A story.\n\nAnother.\n\n"


@pytest.mark.parametrize(
    ("files", "separator", "expected"),
    [
        ([SEPARATED], "\n\n", 2),
        ([b"first\n\nhas \r\n\r\n in it"], "\n\n", 2),
        ([b"a\r\nb\r\n"], "\n", 2),
        ([SEPARATED.replace(b"\n", b"\r\n")], "\r\n\r\n", 2),
        ([SEPARATED.replace(b"\n", b"\r\n")], "\n\n", r"0.txt: its lines end with \\r\\n, .*'\\r\\n\\r\\n'"),
        ([SEPARATED], r"\n\n", r"'\\\\n\\\\n' stands nowhere in it; .*of bash, a blank line is \$'\\n\\n'"),
        ([b"one document", b"and another"], "\n\n", "stands nowhere in it"),
        ([b"a\n\nb" + b"c\r\n\r\nd" * 9], "\n\n", r"0.txt: its lines end with \\r\\n"),
        ([b"words"], "a\udcff", r"document_separator is 'a\\udcff'; expected UTF-8"),
        ([b"one document"], "x" * 1000, "document_separator 'x{59} stands nowhere in it"),
    ],
)
def test_a_separator_divides_or_is_refused(tmp_path, files, separator, expected):
    """One that never occurred once made one document of a file, without a word."""
    for number, content in enumerate(files):
        (tmp_path / f"{number}.txt").write_bytes(content)
    if isinstance(expected, int):
        assert len(read_documents(tmp_path, separator)) == expected
        return
    with pytest.raises(InputError, match=expected):
        read_documents(tmp_path, separator)


HIDDEN = ".ipynb_checkpoints/a-checkpoint.txt .cache/huggingface/.gitignore .gitattributes sub/.a.swp a.txt~ #a.txt# "
HIDDEN += "~$a.txt a.txt.bak a.txt.crdownload desktop.ini Thumbs.db __MACOSX/a.txt _SUCCESS"


def test_hidden_files_are_no_text(tmp_path, capsys):
    folder = tmp_path / ".data"
    for hidden in HIDDEN.split():
        path = folder / hidden
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not a text")
    with pytest.raises(InputError, match="empty; expected UTF-8 text"):
        read_documents(folder)
    (folder / "a.txt").write_text("a text")
    assert read_documents(folder) == [b"a text"]
    assert capsys.readouterr().err == f"left out   13 hidden files in {folder}\n"


def test_a_copy_beside_its_file_is_told(tmp_path, capsys):
    """By a browser or a file manager. Of shards such a name is in no list: it was trained on twice without a word."""
    for name in ("a_train_000000.bin", "a_train_000000 (1).bin", "a_train_000001.bin"):
        write_shard(tmp_path / name, np.arange(50) + name.count("1."))
    told = f"twice      1 files in {tmp_path} are copies of others there, such as a_train_000000.bin\n"
    TokenShards(str(tmp_path / "a_train_*.bin"), 300, 4, 2)
    assert capsys.readouterr().err == told
    for folder, texts in (("same", ["x", "x", ""]), ("others", ["x", "y", "", ""])):
        (tmp_path / folder).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / folder / f"{number}.txt").write_text(text)
        read_documents(tmp_path / folder)
        assert ("1 files" in capsys.readouterr().err) == (folder == "same")


def test_json_that_is_read_as_text_is_told(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    assert read_documents(tmp_path / "a.jsonl") == [b'{"text": "a"}']
    assert "a.jsonl: JSON with its quotes and brackets; --dataset stream reads the texts" in capsys.readouterr().err


def test_a_large_hellaswag_file_takes_memory_in_proportion(tmp_path):
    path = tmp_path / "hellaswag_val.bin"
    part = [np.arange(150)] * 4
    llmc_files.write_hellaswag(path, [llmc_files.MultipleChoice(i, 0, np.arange(300), part) for i in range(2000)])
    with at_most(4 * path.stat().st_size):
        assert len(llmc_files.read_hellaswag(path, 300)) == 2000


def test_the_root_of_all_folders_is_no_folder_of_data():
    """It would be listed for hours."""
    with pytest.raises(InputError, match="holds every file of this machine; expected a folder of data"):
        entries_of(Path("/"), Path("/").rglob("*"))


def test_a_link_in_the_data_leads_nowhere_else(tmp_path):
    """In a folder that came from elsewhere; its files were trained on."""
    folder, secret = tmp_path / "data", tmp_path / "secret.jsonl"
    folder.mkdir()
    secret.write_text('{"messages": []}')
    (folder / "a.jsonl").symlink_to(secret)
    for read in (read_documents, read_chats, lambda path: TokenShards(str(path / "*.jsonl"), 300, 4, 2)):
        with pytest.raises(
            InputError, match=rf"{folder}/a.jsonl is a link to {secret}, expected files within {folder}"
        ):
            read(folder)
    write_shard(folder / "b_0.bin", np.arange(50))
    (folder / "b_1.bin").symlink_to("b_0.bin")
    (tmp_path / "alias").symlink_to(folder)
    assert TokenShards(str(tmp_path / "alias" / "b_*.bin"), 300, 4, 2).batches_per_epoch == 12


def test_shards_whose_tokens_changed_are_another_data_set(tmp_path, monkeypatch):
    """Names and lengths alone once told: shards of another tokenizer went unnoticed on resume."""
    tokens = np.arange(5000) % 250
    (tmp_path / "b").mkdir()

    def fingerprint(changed=None, name="b") -> int:
        part = tokens.copy()
        part[[] if changed is None else changed] = 255
        paths = [write_shard(tmp_path / "b" / f"{name}_{i}.bin", t) for i, t in enumerate((tokens[:1000], part))]
        return TokenShards(str(paths[0]).replace("_0", "_*"), 257, 4, 2).fingerprint()

    plain = fingerprint()
    assert plain % 2**32 == zlib.crc32(b"b_0.bin 1000 b_1.bin 5000"), "what older runs have in config.json"
    assert plain == fingerprint() != fingerprint([4321]) and plain % 2**32 == fingerprint([4321]) % 2**32
    assert plain >> 32 == fingerprint(name="c") >> 32 and plain != fingerprint(name="c")
    monkeypatch.setattr("language.data.tokens.SAMPLES", 8)
    monkeypatch.setattr("language.data.tokens.SAMPLED_TOKENS", 100)
    sampled = fingerprint()
    assert sampled == fingerprint([150]) and sampled != fingerprint([0]) and sampled != fingerprint([4999])
