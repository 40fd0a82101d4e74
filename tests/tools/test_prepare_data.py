"""Text to shards: what was written is what the training script reads."""

import itertools
import json
import shutil
import sys

import numpy as np
import pytest
import tokenizers
from mutations import DEEP, a_full_disk, at_most, make_irregular, mutated_json, no_hang
from test_tokenizer import trained

from language.data import llmc_files, tokenizer
from language.data.text import END_OF_DOCUMENT_BYTE
from language.data.tokens import TokenShards
from tools import prepare_data
from tpu_utils.base.errors import InputError


def prepare(*arguments) -> int:
    sys.argv = ["tools.prepare_data", *map(str, arguments)]
    return prepare_data.run_script(prepare_data.main)


def test_bytes_to_shards_and_back(tmp_path):
    text = "To be, or not to be.\n\n" + "Öther ünicode: \N{SNOWMAN}\n\n" + "third " * 60
    (tmp_path / "in.txt").write_text(text)
    options = ["--output", tmp_path / "out" / "t", "--document_separator", "\n\n", "--shard_tokens", 100]
    assert prepare(tmp_path / "in.txt", *options) == 0
    paths = sorted((tmp_path / "out").glob("t_train_*.bin"))
    assert len(paths) > 1 and (tmp_path / "out" / "t_val_000000.bin").exists()
    tokens = np.concatenate([llmc_files.open_token_shard(path, 257) for path in paths])
    assert (tokens == END_OF_DOCUMENT_BYTE).sum() == 3 and tokens[0] == END_OF_DOCUMENT_BYTE
    validation = llmc_files.open_token_shard(tmp_path / "out" / "t_val_000000.bin", 257)
    both = [bytes(part[part < 256].astype(np.uint8)) for part in (tokens, validation)]
    assert b"".join(both).decode() == text.replace("\n\n", "")
    with pytest.raises(InputError, match=r"vocabulary of 257 .bytes., but vocab_size is 50257; .* use --vocab_size"):
        TokenShards(str(tmp_path / "out" / "t_train_*.bin"), 50257, 16, 2)
    source = TokenShards(str(tmp_path / "out" / "t_train_*.bin"), 257, 16, 2)
    np.testing.assert_array_equal(source.batch(0)[1], tokens[16:33])


def shards_of(folder):
    return TokenShards(str(folder / "t_train_*.bin"), 257, 16, 2)


def test_an_output_belongs_to_one_preparation(tmp_path, capsys):
    """Shards of an earlier, longer text were left behind the new ones, and trained on."""
    (tmp_path / "long.txt").write_text("old " * 500)
    (tmp_path / "short.txt").write_text("NEW " * 120)
    options = ("--output", tmp_path / "t", "--shard_tokens", 200)
    assert prepare(tmp_path / "long.txt", *options) == 0
    (tmp_path / "t_train_x.bin").write_text("of somebody else")
    (tmp_path / "u_train_000000.bin").write_text("of another output")
    assert prepare(tmp_path / "short.txt", *options, "--validation_fraction", 0) == 0
    assert "short.txt: 1 document, 480 bytes" in capsys.readouterr().out
    numbers = sorted(path.name for path in tmp_path.glob("t_*_??????.bin"))
    assert numbers == [f"t_train_00000{number}.bin" for number in range(3)]
    assert len(list(tmp_path.glob("?_train_*.bin"))) == 5
    (tmp_path / "t_train_x.bin").unlink()
    assert sum(map(len, shards_of(tmp_path).shards)) == 481
    facts = json.loads((tmp_path / "t_shards.json").read_text())
    assert facts["documents"] == 1 and facts["tokenizer"] == "bytes" and len(facts["shards"]) == 3


@pytest.mark.parametrize(
    ("killed_at", "said"),
    [(0, "matches no file"), (5, r"t_shards\.json: these shards are still being written, or")],
)
def test_a_preparation_that_was_killed_is_not_trained_on(tmp_path, monkeypatch, killed_at, said):
    (tmp_path / "in.txt").write_text("words " * 500)
    options = (tmp_path / "in.txt", "--output", tmp_path / "t", "--shard_tokens", 200)
    assert prepare(*options) == 0
    number, write = itertools.count(), prepare_data.write_token_shard

    def write_or_die(*shard):
        if next(number) == killed_at:
            raise KeyboardInterrupt
        write(*shard)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_data, "write_token_shard", write_or_die)
        prepare(*options)
    with pytest.raises(InputError, match=said):
        shards_of(tmp_path)
    assert prepare(*options) == 0
    assert sum(map(len, shards_of(tmp_path).shards)) == 2701


def test_of_two_preparations_with_one_output_the_second_is_refused(tmp_path, monkeypatch, capsys):
    """The list of the one that ended last named shards of both."""
    (tmp_path / "in.txt").write_text("words " * 500)
    arguments = (tmp_path / "in.txt", "--output", tmp_path / "t", "--shard_tokens", 200)
    write, codes = prepare_data.write_token_shard, []

    def meets_another(*shard):
        monkeypatch.setattr(prepare_data, "write_token_shard", write)
        codes.append(prepare(*arguments))
        write(*shard)

    monkeypatch.setattr(prepare_data, "write_token_shard", meets_another)
    assert prepare(*arguments) == 0 and codes == [2]
    assert "t_shards.json is being written by another process; wait for it" in capsys.readouterr().err
    assert sum(map(len, shards_of(tmp_path).shards)) == 2701


def test_a_full_disk_leaves_no_shards(tmp_path, capsys):
    """Those of the training part fitted."""
    (tmp_path / "in.txt").write_text("words " * 15_000)
    options = (tmp_path / "in.txt", "--output", tmp_path / "out" / "t", "--validation_fraction", 0.6)
    with a_full_disk():
        assert prepare(*options) == 1
    said = capsys.readouterr()
    assert "t_train_000000.bin: " in said.out and said.err.count("\n") == 1
    assert "File too large" in said.err and "t_val_000000.bin" in said.err
    assert not [*(tmp_path / "out").iterdir()]
    assert prepare(*options) == 0


@pytest.fixture(scope="module")
def two_preparations(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for name in ("t", "o"):
        (folder / f"{name}.txt").write_text(f"{name} words " * 300)
        assert prepare(folder / f"{name}.txt", "--output", folder / name, "--shard_tokens", 200) == 0
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: (t / "t_train_000001.bin").unlink(), r"t_train_000001\.bin is missing \(1 such shards\)"),
        (lambda t: (t / "o_train_000000.bin").replace(t / "t_train_000001.bin"), r"000001\.bin is of another"),
        (lambda t: (t / "o_train_000000.bin").replace(t / "t_train_000099.bin"), r"000099\.bin is of another"),
        (lambda t: (t / "t_shards.json").write_text("{"), r"t_shards\.json cannot be read as JSON"),
        (lambda t: (t / "t_shards.json").write_text('{"complete": true}'), "still being written"),
        (lambda t: (t / "t_shards.json").unlink(), None),
    ],
)
def test_shards_of_two_preparations_are_told_apart(two_preparations, tmp_path, change, said):
    """They have equal sizes, as full shards have: a copy stopped half-way, over an older one."""
    folder = shutil.copytree(two_preparations, tmp_path / "copied")
    change(folder)
    if said is None:  # as those of llm.c
        shards_of(folder)
        return
    with pytest.raises(InputError, match=said):
        shards_of(folder)
    if "missing" in said:  # what is asked for is there
        TokenShards(str(folder / "t_train_000000.bin"), 257, 16, 2)
        TokenShards(str(folder / "t_train_*[23].bin"), 257, 16, 2)


def test_an_output_is_not_the_next_input(tmp_path, capsys):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "in.txt").write_text("words " * 50)
    for output in (folder / "t", folder / "sub" / ".." / "t"):
        assert prepare(folder, "--output", output) == 2
        assert f"output {output} lies in {folder}, where the next" in capsys.readouterr().err
    assert prepare(folder / "in.txt", "--output", folder / "t") == 0
    (folder / "t_train_000000.bin").unlink()
    (folder / "t_val_000000.bin").unlink()
    assert prepare(folder, "--output", folder) == 0, "its files lie beside the folder"


def test_shards_from_elsewhere_are_not_replaced(tmp_path, capsys):
    path = tmp_path / "fineweb_val_000000.bin"
    path.write_text("downloaded")
    (tmp_path / "in.txt").write_text("words " * 50)
    assert prepare(tmp_path / "in.txt", "--output", tmp_path / "fineweb") == 2
    assert "fineweb_val_000000.bin is there without fineweb_shards.json, 1 such shards" in capsys.readouterr().err
    assert path.read_text() == "downloaded" and not list(tmp_path.glob("*.json"))


def test_hellaswag_questions(tmp_path):
    """A line ends at a newline alone: JSON may hold what str.splitlines takes for its end."""
    context = "one\u2028two\x85three"
    (tmp_path / "q.jsonl").write_text(json.dumps(QUESTION | dict(ctx=context), ensure_ascii=False) + "\r\n")
    assert prepare(tmp_path / "q.jsonl", "--output", tmp_path / "out", "--hellaswag") == 0
    (question,) = llmc_files.read_hellaswag(tmp_path / "out" / "hellaswag_val.bin", 257)
    assert question.label == 2 and bytes(question.context.astype(np.uint8)).decode() == context
    assert bytes(question.endings[2].astype(np.uint8)) == b" still"
    with pytest.raises(InputError, match=r"hellaswag_val.bin: tokens of a vocabulary of 257"):
        llmc_files.read_hellaswag(tmp_path / "out" / "hellaswag_val.bin", 50257)


@pytest.mark.parametrize("vocab_size", [65536, 65537])
def test_shards_of_a_tokenizer_json(tmp_path, capsys, vocab_size):
    """16 bits a token as long as they hold the vocabulary, which may be padded by the model beside the tokenizer."""
    folder = trained(tmp_path / "model", tokenizer_config={"eos_token": "<|end|>"}, config={"vocab_size": vocab_size})
    text = "To be ünd not, " * 40 + "\N{SNOWMAN}" * 30  # the division lies inside a character
    (tmp_path / "in.txt").write_text(text)
    options = ("--output", tmp_path / "t", "--tokenizer", folder)
    assert prepare(tmp_path / "in.txt", *options) == 0
    paths = [tmp_path / f"t_{kind}_000000.bin" for kind in ("train", "val")]
    shards = [llmc_files.open_token_shard(path, vocab_size) for path in paths]
    assert all(shard[0] == 0 for shard in shards), "the end token"
    assert all(shard.dtype == (np.uint16 if vocab_size <= 65536 else np.uint32) for shard in shards)
    found = tokenizer.load_tokenizer(str(folder))
    assert "".join(found.decode(shard[1:].tolist()) for shard in shards) == text
    source = TokenShards(str(paths[0]), vocab_size, 16, 2)
    np.testing.assert_array_equal(source.batch(0)[1], shards[0][16:33])
    with pytest.raises(InputError, match=rf"a vocabulary of {vocab_size} .*, but vocab_size is 128256"):
        llmc_files.open_token_shard(paths[0], 128256)
    capsys.readouterr()
    (tmp_path / "in.txt").write_text(json.dumps(QUESTION) + "\n")
    code = prepare(tmp_path / "in.txt", *options, "--hellaswag")
    assert code == (0 if vocab_size <= 65536 else 2)
    assert ("holds tokens of 16 bits; expected at most 65536; use" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda p: None, [], "no such file"),
        (lambda p: p.write_text(""), [], "empty; expected UTF-8 text"),
        (lambda p: p.write_bytes(b"\xff\xfe"), [], "not UTF-8"),
        (lambda p: p.write_text("to be", "utf-16-le"), [], "a byte 0 at 1, as UTF-16 has many; expected UTF-8"),
        (lambda p: p.write_text("x"), ["--validation_fraction", "1.5"], "expected 0 <= validation_fraction < 1"),
        (lambda p: p.write_text(""), ["--hellaswag"], "0 questions; expected 1 to 65536"),
        (lambda p: p.write_text(DEEP + "\n"), ["--hellaswag"], "question: it is nested too deep"),
        (lambda p: p.write_text("x"), ["--shard_tokens", "3000000000"], "shard_tokens <= 2147483647"),
        (lambda p: p.write_text("x"), ["--document_separator", "\udcff"], "expected UTF-8 text"),
        (lambda p: make_irregular(p, "FIFO"), [], "in.txt is a FIFO; expected"),
        (lambda p: make_irregular(p, "FIFO"), ["--hellaswag"], "in.txt is a FIFO; expected"),
        (lambda p: (p.mkdir(), make_irregular(p / "deep", "FIFO")), [], "in.txt/deep is a FIFO; expected"),
    ],
)
def test_bad_input(tmp_path, capsys, make, options, message):
    make(tmp_path / "in.txt")
    with no_hang():
        assert prepare(tmp_path / "in.txt", "--output", tmp_path / "o", *options) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


QUESTION = dict(ctx="A man sits", label=2, endings=["down", "up", "still", "by"])


@pytest.mark.parametrize(
    "change",
    [
        *(dict(label=label) for label in (4, -1, "", "x", None, 1.5, True, [])),
        *(dict(endings=endings) for endings in (["a"] * 3, ["a"] * 5, [], "abcd", None, ["a", "b", "c", 4], {"a": 1})),
        *(dict(ctx=text) for text in ("", None, 7, "\ud800", "x" * 40_000, ["a"])),
        *(dict(endings=["a", "b", "c", text]) for text in ("\ud800", "x" * 40_000)),
    ],
    ids=lambda change: repr(change)[:40],
)
def test_a_question_that_cannot_be_is_refused(tmp_path, capsys, change):
    (tmp_path / "q.jsonl").write_text(f"{json.dumps(QUESTION)}\n{json.dumps(QUESTION | change)}\n")
    assert prepare(tmp_path / "q.jsonl", "--output", tmp_path / "out", "--hellaswag") == 2
    assert "q.jsonl, line 2: not a HellaSwag question" in capsys.readouterr().err
    assert not (tmp_path / "out" / "hellaswag_val.bin").exists()


def test_questions_that_a_tokenizer_loses_are_refused(tmp_path, capsys):
    """They were written, each with the same tokens."""
    trained(tmp_path)
    words = {"<|end|>": 0, "[UNK]": 1, "A": 2, "man": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "q.jsonl").write_text(json.dumps(QUESTION) + "\n")
    options = ["--output", tmp_path / "out", "--tokenizer", tmp_path, "--hellaswag"]
    assert prepare(tmp_path / "q.jsonl", *options) == 2
    assert "q.jsonl: the tokenizer loses " in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_no_damage_of_questions_is_a_crash(tmp_path, capsys):
    refused = 0
    for damaged in mutated_json(QUESTION, 150):
        (tmp_path / "q.jsonl").write_bytes(json.dumps(QUESTION).encode() + b"\n" + damaged)
        code = prepare(tmp_path / "q.jsonl", "--output", tmp_path / "out", "--hellaswag")
        said = capsys.readouterr().err
        assert (code == 0 and not said) or (code == 2 and said.count("\n") == 1 and "q.jsonl, line" in said), said
        refused += code == 2
        if code == 0:
            assert llmc_files.read_hellaswag(tmp_path / "out" / "hellaswag_val.bin", 257)
    assert 50 < refused < 150


def test_shards_take_memory_in_proportion(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"words and words\n" * (1 << 16))
    with at_most(6 << 20):
        assert prepare(tmp_path / "in.txt", "--output", tmp_path / "out") == 0


def test_no_damage_of_a_list_of_shards_is_a_crash(tmp_path):
    (tmp_path / "t.txt").write_text("words " * 100)
    assert prepare(tmp_path / "t.txt", "--output", tmp_path / "t", "--shard_tokens", 200) == 0
    path, refused = tmp_path / "t_shards.json", 0
    for damaged in mutated_json(json.loads(path.read_text()), 150):
        path.write_bytes(damaged)
        try:
            shards_of(tmp_path)
        except InputError as error:
            refused += 1
            assert str(tmp_path / "t_") in str(error)
    assert 50 < refused < 150


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(9, [9]), (10, [10]), (20, [10, 10]), (25, [10, 10, 5]), (21, [10, 6, 5]), (11, [6, 5]), (24, [10, 7, 7])],
)
def test_no_shard_of_several_is_short(tokens, sizes):
    ends = prepare_data.shard_ends(tokens, 10)
    assert [end - start for start, end in itertools.pairwise([0, *ends])] == sizes
