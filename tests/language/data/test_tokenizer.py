"""Tokenizers: what they encode they decode, which tokens they name, and what no damage may do."""

import base64
import hashlib
import json
import zlib

import pytest
import tokenizers
from mutations import mutated, mutated_json, refusals
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from language.data import tokenizer
from language.data.tokenizer import check_texts, growth, load_tokenizer
from tpu_utils.base.errors import InputError

TEXT = "To be, or not to be. \N{SNOWMAN} ünïcode\n\n  spaces  <|end|> <|im_end|>"


def trained(folder, begins=False, **beside):
    """A small byte-level BPE, as those of GPT-2, Llama 3 and Qwen3 are, trained here; its folder."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|begin|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["to be or not to be, that is the question " * 9], trainer)
    if begins:
        made.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    made.enable_truncation(4)
    made.enable_padding(length=32)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    for name, content in (beside or {"tokenizer_config": {"eos_token": "<|end|>"}}).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_tokenizer_of_a_folder(tmp_path):
    found = load_tokenizer(str(trained(tmp_path, begins=True)))
    assert found.decode(found.encode(TEXT)) == TEXT, "nothing is truncated, special tokens in a text are text"
    assert found.encode("the be question") == [*found.encode("the be"), *found.encode(" question")]
    assert not {0, 1, 2, 3} & set(found.encode(TEXT))
    assert (found.end, found.begin, found.stops) == (0, 1, {0})
    assert found.token("<|im_end|>") == 3 and found.token("e") is None and found.token("<|eot_id|>") is None
    assert max(found.encode(TEXT)) < found.vocab_size == max(found.tokenizer.get_vocab().values()) + 1
    assert found.encode_document(TEXT.encode()).tolist() == found.encode(TEXT)
    again = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert again.fingerprint == found.fingerprint and again.encode(TEXT) == found.encode(TEXT)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert load_tokenizer(str(tmp_path)).fingerprint != found.fingerprint
    assert load_tokenizer(str(trained(tmp_path))).begin is None


@pytest.mark.parametrize(
    "beside",
    [
        {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}},
        {"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast", "eos_token": "<|end|>"}},
        {"tokenizer_config": {"eos_token": "<|end|>", "add_prefix_space": True}, "config": {"model_type": "qwen2"}},
        {"tokenizer_config": {"eos_token": "<|end|>"}, "config": {"model_type": "qwen3"}},
        {"tokenizer_config": {"eos_token": "<|end|>"}, "config": {"model_type": "llama"}},
    ],
)
def test_a_space_before_a_text_is_there_where_transformers_puts_one(tmp_path, beside):
    """tokenizer.json asks for one, as the tokenizers library does where nobody says otherwise."""
    transformers = pytest.importorskip("transformers")
    folder = trained(tmp_path, **beside)
    written = json.loads((folder / "tokenizer.json").read_text()) | {"truncation": None, "padding": None}
    written["pre_tokenizer"]["add_prefix_space"] = True
    (folder / "tokenizer.json").write_text(json.dumps(written))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert load_tokenizer(str(folder)).encode("to be") == theirs("to be", add_special_tokens=False).input_ids


def test_dropout_is_off(tmp_path):
    """It made other tokens of one text each time, and so no run could be resumed."""
    trained(tmp_path)
    plain = load_tokenizer(str(tmp_path)).encode(TEXT)
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    written["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    found = load_tokenizer(str(tmp_path))
    assert [found.encode(TEXT) for _ in range(5)] == [plain] * 5


LLAMA, GPT = {"tokenizer_class": "LlamaTokenizerFast"}, {"tokenizer_class": "GPT2TokenizerFast"}
BOTH = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize("begins", [False, True], ids=["no template", "template"])
@pytest.mark.parametrize(
    "config",
    [
        LLAMA | BOTH,
        LLAMA | BOTH | {"add_bos_token": True, "add_eos_token": True},
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": True} | BOTH,
        {"tokenizer_class": "GemmaTokenizer"}
        | BOTH
        | {"bos_token": {"content": "<|im_start|>", "__type": "AddedToken"}},
        {"tokenizer_class": "CohereTokenizerFast", "add_bos_token": False} | BOTH,
        {"tokenizer_class": "GPTNeoXTokenizerFast", "add_bos_token": True} | BOTH,
        GPT | BOTH | {"add_bos_token": True},
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "add_eos_token": True} | BOTH,
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True} | BOTH,
    ],
    ids=lambda config: "-".join(f"{value}" for value in config.values()),
)
def test_what_stands_around_a_text_is_what_transformers_puts_there(tmp_path, config, begins):
    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt brings transformers")
    folder = trained(tmp_path, begins=begins, tokenizer_config=config)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    assert ours.encode_around("to be") == theirs.encode("to be", truncation=False)
    assert ours.encode("to be") == theirs.encode("to be", truncation=False, add_special_tokens=False)
    if theirs.bos_token_id is not None:  # else the harness takes the end token, also where the template has another
        assert ours.prefix == theirs.bos_token_id


@pytest.mark.parametrize("kind, begin", [("Llama", "<s>"), ("Gemma", "<bos>"), ("Cohere", "<BOS_TOKEN>")])
def test_a_class_has_a_begin_token_where_no_file_names_one(tmp_path, kind, begin):
    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt brings transformers")
    folder = trained(tmp_path, tokenizer_config={"tokenizer_class": f"{kind}TokenizerFast", "eos_token": "<|end|>"})
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens([begin])
    made.save(str(folder / "tokenizer.json"))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    assert ours.encode_around("to be") == theirs.encode("to be", truncation=False)
    assert ours.prefix == ours.begin == theirs.bos_token_id == made.token_to_id(begin)


@pytest.mark.parametrize("model, begin", [("llama", 1), ("gemma3_text", 1), ("olmo2", None), ("qwen3", None)])
def test_the_class_of_a_tokenizer_follows_from_the_model(tmp_path, model, begin):
    folder = trained(tmp_path, tokenizer_config=BOTH, config={"model_type": model})
    assert load_tokenizer(str(folder)).begin == begin


@pytest.mark.parametrize(
    "config, message",
    [
        (LLAMA | {"add_bos_token": True, "bos_token": None, "eos_token": "<|end|>"}, "add_bos_token is true and bos_t"),
        (LLAMA | {"add_bos_token": True, "bos_token": "<|no|>", "eos_token": "<|end|>"}, "'<|no|>'; expected a token"),
    ],
)
def test_a_token_to_put_around_a_text_that_nobody_has(tmp_path, config, message):
    with pytest.raises(InputError, match=message.replace("|", r"\|")):
        load_tokenizer(str(trained(tmp_path, tokenizer_config=config)))


def test_two_tokens_in_front_of_a_text_are_refused(tmp_path):
    found = tokenizers.Tokenizer.from_file(str(trained(tmp_path) / "tokenizer.json"))
    special = [("<|begin|>", 1), ("<|im_start|>", 2)]
    found.post_processor = processors.TemplateProcessing("<|begin|> <|im_start|> $A", special_tokens=special)
    found.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="puts 2 tokens in front of a text and 0 behind it; expected at most one each"):
        load_tokenizer(str(tmp_path))


LATIN = "The cat sat on the mat, and the dog sat on the cat. "


def word_tokenizer(model, trainer, pre_tokenizer=None):
    """A tokenizer of words or letters of LATIN alone, as tutorials make them."""
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizer or pre_tokenizers.Whitespace()
    made.train_from_iterator([LATIN], trainer(special_tokens=["<|end|>", "[UNK]"], show_progress=False))
    return made


LOSSY = {
    "BPE without [UNK]": lambda: word_tokenizer(models.BPE(), trainers.BpeTrainer),
    "BPE": lambda: word_tokenizer(models.BPE(unk_token="[UNK]"), trainers.BpeTrainer),
    "words": lambda: word_tokenizer(models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer),
    "WordPiece": lambda: word_tokenizer(models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer),
    "unigram": lambda: word_tokenizer(
        models.Unigram(), lambda **more: trainers.UnigramTrainer(unk_token="[UNK]", **more), pre_tokenizers.Metaspace()
    ),
}


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("text", ["\u65e5\u672c\u8a9e\u306e" * 50, "<> {} ## " * 50])
def test_a_tokenizer_that_loses_a_text_is_refused(tmp_path, capsys, kind, text):
    LOSSY[kind]().save(str(trained(tmp_path) / "tokenizer.json"))
    found = load_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match=r"a text: the tokenizer loses [\d,]+ of [\d,]+ characters, such as '.*10%"):
        check_texts(found, [LATIN, text], "a text")
    check_texts(found, [LATIN], "a text")
    some = LATIN * 9 + text[:5]
    check_texts(found, [some], f"some text of {tmp_path}")
    assert f"some text of {tmp_path}: the tokenizer loses " in capsys.readouterr().err, "counted"


def test_a_tokenizer_that_keeps_a_text_has_lost_nothing(tmp_path):
    """Neither bytes of letters that it has no token for, nor upper case, nor letters that have two forms in Unicode."""
    found = load_tokenizer(str(trained(tmp_path, begins=True)))
    assert not found.lost(TEXT, found.encode(TEXT)) and not load_tokenizer("bytes").lost(TEXT, list(TEXT.encode()))
    changed = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    changed.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    changed.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(str(tmp_path))
    assert found.decode(found.encode("\u00c9T\u00c9")) != "\u00c9T\u00c9"
    assert not found.lost("\u00c9T\u00c9", found.encode("\u00c9T\u00c9"))


def test_bytes_and_gpt2():
    found = load_tokenizer("bytes")
    assert found.encode(TEXT) == list(TEXT.encode()) == found.encode_document(TEXT.encode()).tolist()
    assert found.decode([256, *found.encode(TEXT), 256]) == TEXT
    assert (found.vocab_size, found.end, found.begin) == (257, 256, 256)
    assert found.encode("a\udcff") == [97, 255] and found.decode([97, 255]) == "a\ufffd"
    assert load_tokenizer("").fingerprint == found.fingerprint == zlib.crc32(b"bytes")
    with pytest.raises(InputError, match="expected UTF-8 text"):
        found.encode("\ud800")
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.encode("Hello world") == [15496, 995] and gpt2.decode([15496, 995]) == "Hello world"
    assert gpt2.end == gpt2.token("<|endoftext|>") == 50256 not in gpt2.encode("<|endoftext|>")
    assert (gpt2.vocab_size, gpt2.begin, gpt2.prefix, gpt2.stops) == (50257, 50256, 50256, {50256})
    assert gpt2.fingerprint == zlib.crc32(b"gpt2"), "a stream that was read through tiktoken resumes"


def test_the_vocabulary_of_gpt2_is_openais():
    """The sums that tiktoken has of vocab.bpe and encoder.json, made again from our file."""
    model = json.loads((tokenizer.VOCABULARY_FOLDERS / "gpt2" / "tokenizer.json").read_text())["model"]
    merges = "".join(f"{' '.join(pair)}\n" for pair in model["merges"])
    vocab = json.dumps(dict(sorted(model["vocab"].items(), key=lambda item: item[1])) | {"<|endoftext|>": 50256})
    found = [hashlib.sha256(text.encode()).hexdigest() for text in (f"#version: 0.2\n{merges}", vocab)]
    assert [text[:16] for text in found] == ["1ce1664773c50f3e", "196139668be63f3b"]


@pytest.mark.parametrize(
    ("beside", "end", "stops"),
    [
        (dict(tokenizer_config={"eos_token": {"content": "<|im_end|>", "lstrip": False}}), 3, {3}),
        (dict(config={"eos_token_id": 2}, generation_config={"eos_token_id": [3, 0]}), 3, {0, 2, 3}),
        (dict(tokenizer_config={"eos_token": None}, config={"eos_token_id": [1], "vocab_size": 400}), 1, {1}),
        (dict(tokenizer_config={"eos_token": "<|im_end|>"}, generation_config={"eos_token_id": [3, 0]}), 3, {0, 3}),
    ],
)
def test_the_end_is_what_the_files_beside_it_say(tmp_path, beside, end, stops):
    found = load_tokenizer(str(trained(tmp_path, **beside)))
    assert (found.end, found.stops) == (end, stops)
    assert found.vocab_size == beside.get("config", {}).get("vocab_size", 284), "the model's may be padded"


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (dict(tokenizer_config={}), "name no end token; expected eos_token in tokenizer_config.json"),
        (dict(tokenizer_config={"eos_token": "<|no|>"}), r"tokenizer_config.json: eos_token is '<|no|>', .*same model"),
        (dict(tokenizer_config={"eos_token": 7}), "tokenizer_config.json: eos_token is 7"),
        (dict(tokenizer_config={"eos_token": "\ud800"}), "expected UTF-8 text"),
        (dict(config={"eos_token_id": 10**6}), "config.json: eos_token is None, eos_token_id 1000000"),
        (dict(config={"eos_token_id": [0, "a"]}), "config.json: .*eos_token_id"),
        (dict(config={"vocab_size": 1 << 30}), r"a vocabulary of 1073741824; expected 1 to 1048576"),
        (dict(config=[]), "config.json holds list; expected a JSON object"),
    ],
)
def test_files_beside_it_that_cannot_be(tmp_path, beside, message):
    with pytest.raises(InputError, match=message):
        load_tokenizer(str(trained(tmp_path, **beside)))


def test_a_tokenizer_that_is_too_large_or_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "LARGEST_FILE", 1000)
    with pytest.raises(InputError, match=r"tokenizer.json.* expected 1,000 at most, a tokenizer.json"):
        load_tokenizer(str(trained(tmp_path)))
    with pytest.raises(InputError, match="tokenizer no: no such file or folder; expected bytes, gpt2"):
        load_tokenizer("no")


def replaced(pattern, content, times):
    return normalizers.Sequence([normalizers.Replace(pattern, content) for _ in range(times)])


BY_LENGTH = {
    "letters": ("normalizer", replaced("a", "a" * 8, 12)),
    "regex": ("normalizer", replaced(tokenizers.Regex("x*"), "a" * 8, 12)),
    "bytes": ("normalizer", normalizers.Sequence([normalizers.ByteLevel()] * 30)),
    "front": ("normalizer", normalizers.Prepend("a" * 3000)),
    "words": (
        "pre_tokenizer",
        pre_tokenizers.Sequence(
            [
                step
                for letter in "ab" * 10
                for step in (pre_tokenizers.Split(tokenizers.Regex("."), "isolated"), pre_tokenizers.Metaspace(letter))
            ]
        ),
    ),
    "decoder": ("decoder", decoders.Sequence([decoders.Replace("a", "a" * 8)] * 12)),
    "suffix": ("decoder", decoders.Sequence([decoders.BPEDecoder(suffix="")] * 24)),
    "unknown": ("model", models.WordLevel({"x" * 2000: 0, "<|end|>": 1}, unk_token="x" * 2000)),
    "template": (
        "post_processor",
        processors.TemplateProcessing("<|end|> " * 2000 + "$A", special_tokens=[("<|end|>", 0)]),
    ),
    "long template": (
        "post_processor",
        processors.TemplateProcessing("x" * 2**21 + " $A", special_tokens=[("x" * 2**21, 0)]),
    ),
    "text again": ("post_processor", processors.TemplateProcessing(["$A"] * 2000)),
}


@pytest.mark.parametrize("part", BY_LENGTH)
def test_a_small_file_does_not_take_gigabytes(tmp_path, part):
    """1.5 KB of replacements, each of an a by eight, once took 10.7 GB for one letter."""
    found = tokenizers.Tokenizer.from_file(str(trained(tmp_path) / "tokenizer.json"))
    setattr(found, *BY_LENGTH[part])
    found.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"times as long; expected at most 1024|puts 2,0.. tokens around"):
        load_tokenizer(str(tmp_path))


def test_what_a_usual_tokenizer_does_is_measured():
    table = (4).to_bytes(4, "little") + bytes(4) + b"a" * 999 + b"\0"  # SentencePiece's, of an empty trie and a text
    assert growth({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table)}) == 999
    usual = [normalizers.NFC(), normalizers.BertNormalizer(), normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")]
    assert growth(json.loads(normalizers.Sequence(usual).__getstate__())) == 72
    assert (
        growth(json.loads(normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()]).__getstate__())) == 16.5
    )


def test_no_damage_is_a_crash(tmp_path):
    path = trained(tmp_path, begins=True) / "tokenizer.json"
    content = path.read_bytes()

    def read():
        found = load_tokenizer(str(tmp_path))
        found.decode(found.encode(TEXT))

    assert 100 < refusals(path, [*mutated(content, 150), *mutated_json(json.loads(content), 150)], read) < 300
