"""Text to tokens and back: bytes, GPT-2's vocabulary, or a tokenizer.json as Hugging Face's models bring it. No torch.

A tokenizer.json is data: its size is bounded, and what cannot be read is refused. Text is text: a special token that
stands in it is taken apart like any other word, so no document and no question can end a conversation.
"""

import base64
import itertools
import math
import os
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

from language.data.entries import tell_once
from language.data.llmc_files import other_vocabulary
from language.options.shapes import BYTE_VOCAB_SIZE, START
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import parse_json, read_json, read_regular

VOCABULARY_FOLDERS = Path(__file__).with_name("vocabularies")
"""A folder each for bytes and GPT-2: the files that go out with a model. GPT-2's are made of OpenAI's (MIT licence)."""
EXPECTED = "a tokenizer.json of Hugging Face's tokenizers library"
LARGEST_FILE = 1 << 26  # bytes; those of Llama 3 and Qwen3 have 9 to 17 MiB
LARGEST_VOCAB_SIZE = 1 << 20
MOST_GROWTH = 1024
"""By how much a file may lengthen a text. A few replacements one after the other make gigabytes of one letter. The
measure is of the worst text: 528 for T5's, whose table has 33 bytes in a row."""
MOST_LOST = 0.1
"""Share of a text's characters that a tokenizer may lose; one that loses more is made for other languages."""
MOST_SPECIAL = 1000  # special tokens that it may put around a text, and times that it may repeat the text
LENGTHENING = {
    "ByteLevel": 2.0,  # a character for each byte
    # Unicode's own figures for UTF-8 (FAQ, normalization)
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "BertNormalizer": 8.0,  # its decomposition, its lower case, spaces around a character of Chinese
    "WordPiece": 2.0,  # a space before a word
}
"""The most by which a step without settings lengthens a text, in bytes of UTF-8; others do not."""
TOKENIZER_CONFIG = "tokenizer_config.json"
BESIDE = (TOKENIZER_CONFIG, "generation_config.json", "config.json")  # the first that names a token is believed
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # where no file beside the tokenizer names one
ADDS_BEGIN = {"Llama": True, "CodeLlama": True, "Gemma": True, "Cohere": True, "GPTNeoX": False}
"""Tokenizer classes of transformers 4 that put around a text what tokenizer_config.json says, whatever tokenizer.json
does; and whether that is a begin token where it does not say."""
BEGINS = {"Llama": "<s>", "CodeLlama": "<s>", "Gemma": "<bos>", "Cohere": "<BOS_TOKEN>", "GPTNeoX": "<|endoftext|>"}
"""Their begin token, where tokenizer_config.json has no bos_token."""
CLASS_OF_MODEL = dict.fromkeys(("llama", "mistral", "mixtral", "phi3"), "Llama")
CLASS_OF_MODEL |= {"gemma3_text": "Gemma", "olmo2": "GPTNeoX"}
"""By the model_type of config.json, where no file names a class."""


class Tokenizer:
    """What every tokenizer has."""

    vocab_size: int  # vocabulary size of a model for this tokenizer: every token is smaller
    end: int  # stands between documents; sampling stops at it
    stops: frozenset[int]  # all that sampling stops at: the end, and others that the files of a model name
    begin: int | None  # what it puts in front of a text; None: nothing
    after: int | None = None  # what it puts behind a text
    prefix: int
    """Stands before a text whose first token is to be predicted, where it puts nothing in front: begin, else end."""
    fingerprint: int  # CRC-32 of what it is made of

    def encode(self, text: str) -> list[int]:
        """Without special tokens. Raises InputError for what is no text."""
        raise NotImplementedError

    @property
    def around_document(self) -> tuple[list[int], list[int]]:
        """What a document of training has in front of it and behind it: the end token of the one before, and what
        stands around a text, if that is another one."""
        begin, after = ([] if token in (None, self.end) else [token] for token in (self.begin, self.after))
        return [self.end, *begin], after

    def encode_around(self, text: str) -> list[int]:
        """With what it puts around a text."""
        begin, after = ([] if token is None else [token] for token in (self.begin, self.after))
        return [*begin, *self.encode(text), *after]

    def decode(self, tokens: list[int]) -> str:
        raise NotImplementedError

    def lost(self, text: str, tokens: Sequence[int]) -> Counter[str]:
        """The letters of a text that its tokens do not give back, upper and lower case being one."""
        return Counter()

    def token(self, name: str) -> int | None:
        """A special token by its text, such as <|im_end|>."""
        return None

    def encode_document(self, content: bytes) -> np.ndarray:
        """Tokens of a document, which is UTF-8."""
        return np.array(self.encode(content.decode()), np.uint32)

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode_document(text.encode()) for text in texts]


class Bytes(Tokenizer):
    """The 256 bytes, and one token that stands before every document."""

    vocab_size = BYTE_VOCAB_SIZE
    end = begin = prefix = BYTE_VOCAB_SIZE - 1
    stops = frozenset([end])
    fingerprint = zlib.crc32(b"bytes")

    def encode(self, text: str) -> list[int]:
        with text_in(text):
            return list(text.encode(errors="surrogateescape"))  # Python's form of non-UTF-8 arguments

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def encode_document(self, content: bytes) -> np.ndarray:
        return np.frombuffer(content, np.uint8)


class FromFile(Tokenizer):
    """A tokenizer.json. Its end token is named by tokenizer_config.json, generation_config.json or config.json beside
    it. Truncation, padding and dropout that the file asks for are off: they would lose text, or make other tokens each
    time."""

    def __init__(self, path: Path):
        content = read_regular(path, EXPECTED, LARGEST_FILE)
        with panics_told(f"{path} cannot be read"):
            self.tokenizer = tokenizers.Tokenizer.from_buffer(content)
            check_growth(self.tokenizer, path)
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            if isinstance(self.tokenizer.model, tokenizers.models.BPE):
                self.tokenizer.model.dropout = None
            self.tokenizer.encode_special_tokens = True  # special tokens in a text are text
            largest = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
            added = self.tokenizer.get_added_tokens_decoder()
            front, behind = put_around(self.tokenizer)
        self.path, self.special = path, {token.content: number for number, token in added.items()}
        says = {name: read_json(path.parent / name, name) for name in BESIDE if (path.parent / name).exists()}
        self.kind = class_of(says)
        # transformers believes tokenizer_config.json here; where it says nothing, all its classes but one say false
        space = says.get(TOKENIZER_CONFIG, {}).get("add_prefix_space", None if self.kind == "Llama" else False)
        words = self.tokenizer.pre_tokenizer
        if type(space) is bool and isinstance(words, pre_tokenizers.ByteLevel):
            words.add_prefix_space = space
        of_model = says.get("config.json", {}).get("vocab_size")
        self.vocab_size = max(largest + 1, of_model if type(of_model) is int else 0)
        if not 1 <= self.vocab_size <= LARGEST_VOCAB_SIZE:
            raise InputError(f"{path}: a vocabulary of {self.vocab_size}; expected 1 to {LARGEST_VOCAB_SIZE} tokens")
        named = [token for name in BESIDE for token in self.named(says.get(name, {}), path.parent / name)]
        named += [self.special[name] for name in ENDS if name in self.special and not named]
        if not named:
            raise InputError(
                f"{path} and the files beside it name no end token; expected eos_token in tokenizer_config.json, or "
                f"{', '.join(ENDS)} as a special token; copy tokenizer_config.json along"
            )
        self.end, self.stops = named[0], frozenset(named)
        said = (self.vocab_size, self.end, front[0] if front else None)
        self.fingerprint = zlib.crc32(repr(said).encode(), zlib.crc32(content))
        self.begin, self.after, self.prefix = self.around(front, behind, says.get(TOKENIZER_CONFIG, {}))
        self._no_text = {unknown_token(self.tokenizer), *(n for n, token in added.items() if token.special)}

    def around(self, front: list[int], behind: list[int], config: dict) -> tuple[int | None, int | None, int]:
        """begin, after and prefix as transformers has them. front, behind: what tokenizer.json itself puts around.
        config: what tokenizer_config.json says."""
        path = self.path.parent
        adds_begin = ADDS_BEGIN.get(self.kind)
        bos = self.numbers_of(config.get("bos_token", BEGINS.get(self.kind)))
        eos = self.numbers_of(config.get("eos_token"))
        if adds_begin is not None:
            for wanted, token, found in (("add_bos_token", "bos_token", bos), ("add_eos_token", "eos_token", eos)):
                if config.get(wanted) and not found:
                    raise InputError(
                        f"{path / TOKENIZER_CONFIG}: {wanted} is true and {token} {config.get(token)!r:.60}; expected "
                        f"a token that {self.path} has"
                    )
            front = (bos or front) if config.get("add_bos_token", adds_begin) else []
            behind = eos if config.get("add_eos_token") else []
        if len(front) > 1 or len(behind) > 1:
            raise InputError(
                f"{self.path} puts {len(front)} tokens in front of a text and {len(behind)} behind it; expected at "
                "most one each"
            )
        return *(tokens[0] if tokens else None for tokens in (front, behind)), [*front, *bos, self.end][0]

    def named(self, says: dict, path: Path) -> list[int]:
        """The tokens that a file names as its eos: a string, an object with "content", a number, a list of numbers."""
        token, numbers = says.get("eos_token"), says.get("eos_token_id")
        found = [] if token is None else self.numbers_of(token) or [None]
        found += numbers if isinstance(numbers, list) else [] if numbers is None else [numbers]
        for number in found:
            if type(number) is not int or not 0 <= number < self.vocab_size:
                raise InputError(
                    f"{path}: eos_token is {token!r:.60}, eos_token_id {numbers!r:.60}; expected tokens that "
                    f"{self.path} has; copy both from the same model"
                )
        return found

    def numbers_of(self, token) -> list[int]:
        """[the token's number], of a string or an object with "content"; [] for one that tokenizer.json has not."""
        text = token.get("content") if isinstance(token, dict) else token
        with text_in(text):
            number = self.tokenizer.token_to_id(text) if isinstance(text, str) else None
        return [] if number is None else [number]

    def encode(self, text: str) -> list[int]:
        with text_in(text), panics_told(f"{self.path} cannot encode the text"):
            text.encode()
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """Other threads go on meanwhile: of several texts the library releases Python's lock, of one it does not."""
        with panics_told(f"{self.path} cannot encode the text"):
            found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in found]

    def encode_marked(self, text: str) -> list[int]:
        """As others read a text that a template made: special tokens in it are tokens."""
        self.tokenizer.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self.tokenizer.encode_special_tokens = True

    def decode(self, tokens: list[int]) -> str:
        with panics_told(f"{self.path} cannot decode its tokens"):
            return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def lost(self, text: str, tokens: Sequence[int]) -> Counter[str]:
        given_back = self.decode([token for token in np.asarray(tokens).tolist() if token not in self._no_text])
        return Counter() if given_back == text else letters(text) - letters(given_back)

    def token(self, name: str) -> int | None:
        return self.special.get(name)


def class_of(says: dict[str, dict]) -> str:
    """The class that transformers 4 makes of a tokenizer with these files beside it, such as Llama; "" if none says."""
    model = says.get("config.json", {})
    kind = says.get(TOKENIZER_CONFIG, {}).get("tokenizer_class") or model.get("tokenizer_class")
    kind = str(kind or CLASS_OF_MODEL.get(str(model.get("model_type")), ""))
    return kind.removesuffix("Fast").removesuffix("Tokenizer")


def unknown_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """What stands for a letter that the vocabulary has not."""
    if isinstance(tokenizer.model, tokenizers.models.Unigram):
        return parse_json(tokenizer.model.__getstate__()).get("unk_id")
    return tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")


def letters(text: str) -> Counter[str]:
    return Counter(unicodedata.normalize("NFKC", text).casefold())


def check_lost(lost: Counter[str], num_characters: int, what: str) -> None:
    """Says what a tokenizer lost of a text, if anything. Raises InputError for too much of it."""
    if not lost:
        return
    named = ", ".join(repr(letter) for letter, _ in lost.most_common(3))
    found = f"{what}: the tokenizer loses {lost.total():,} of {num_characters:,} characters, such as {named}"
    if lost.total() > max(2, MOST_LOST * num_characters):
        raise InputError(
            f"{found}; expected {MOST_LOST:.0%} at most; choose a tokenizer that has them, such as bytes, or make one "
            "with tools.train_tokenizer"
        )
    tell_once(found)


def check_texts(tokenizer: Tokenizer, texts: Iterable[str], what: str) -> None:
    """Raises InputError for texts of which the tokenizer loses too much."""
    lost, size = Counter(), 0
    for text in texts:
        lost += tokenizer.lost(text, tokenizer.encode(text))
        size += len(text)
    check_lost(lost, size, what)


def put_around(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer.json puts in front of a text, and behind it."""
    for text in ("a", *itertools.islice(tokenizer.get_vocab(), 1000)):  # the first that has a token of its own
        found = tokenizer.encode(text)
        if 0 in (mask := found.special_tokens_mask):
            return found.ids[: mask.index(0)], found.ids[len(mask) - mask[::-1].index(0) :]
    return [], []


def check_growth(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Raises InputError for a tokenizer that would make gigabytes of a short text, before it gets any. A trial in a
    child process proves less: 2 KB that lengthen "zq" alone pass one on every letter of Unicode, then take 4 GiB."""
    parts = [tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder, tokenizer.post_processor]
    text, words, decoded, around = [parse_json(part.__getstate__()) if part else {} for part in parts]
    unknown = getattr(tokenizer.model, "unk_token", None) or ""  # may stand for each letter
    found = max(growth(text) * growth(words), growth(decoded), len(unknown.encode()))
    if found > MOST_GROWTH:
        raise InputError(f"{path} makes a text {found:.3g} times as long; expected at most {MOST_GROWTH}: {EXPECTED}")
    if (count := special_tokens(around)) > MOST_SPECIAL:
        raise InputError(f"{path} puts {count:,} tokens around a text; expected at most {MOST_SPECIAL}: {EXPECTED}")


def growth(part: dict) -> float:
    """The most by which a normalizer, a pre-tokenizer or a decoder lengthens a text, by its own description."""
    kind = part.get("type")
    if kind == "Sequence":
        (inner,) = [value for key, value in part.items() if key != "type"]
        return math.prod(map(growth, inner))
    if kind == "Replace":
        pattern, content = part["pattern"].get("String"), len(part["content"].encode())
        return max(1.0, content / len(pattern.encode())) if pattern else 1.0 + content  # a regex may match nothing
    if kind == "Prepend":
        return 1.0 + len(part["prepend"].encode())
    if kind == "Precompiled":  # 4 bytes, a trie of so many bytes, and texts that end with 0
        table = base64.b64decode(part["precompiled_charsmap"])
        return float(max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0"))))
    if kind == "Metaspace":
        return 1.0 + len(part["replacement"].encode())  # in the place of a space, and before each piece of the text
    if "" in (part.get("suffix"), part.get("word_delimiter_token")):
        return 3.0  # BPEDecoder and CTC: a space in the place of nothing, so around each letter
    return LENGTHENING.get(kind, 1.0)


def special_tokens(part: dict) -> int:
    """How many a post-processor puts around a text, a long one counted as several; and how often it takes the text."""
    if part.get("type") == "Sequence":
        return sum(map(special_tokens, part["processors"]))
    if part.get("type") != "TemplateProcessing":
        return 0
    names = [piece["SpecialToken"]["id"] for piece in part["single"] if "SpecialToken" in piece]
    lengths = {name: [len(text) for text in token["tokens"]] for name, token in part["special_tokens"].items()}
    sizes = {name: sum(1 + length // MOST_GROWTH for length in found) for name, found in lengths.items()}
    return sum(sizes[name] for name in names) + len(part["single"]) - len(names)


class Numbers(Tokenizer):
    """Token numbers as text: for a model whose tokenizer nobody knows, such as one of synthetic data."""

    end = begin = prefix = None
    stops = frozenset()
    fingerprint = zlib.crc32(b"numbers")

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        try:
            return [int(number) for number in text.split()]
        except ValueError as error:
            raise InputError(
                f"found {text!r:.60}; expected token numbers such as '3 17 5': the model is of synthetic data, or its "
                f"vocabulary of {self.vocab_size} is that of an unknown tokenizer; name one with --tokenizer"
            ) from error

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def load_tokenizer(path: str) -> Tokenizer:
    """path: "" or "bytes"; "gpt2"; else a tokenizer.json or the folder that has one. Raises InputError."""
    if path in ("", "bytes"):
        return Bytes()
    if path == "gpt2":
        found = FromFile(VOCABULARY_FOLDERS / "gpt2" / "tokenizer.json")
        found.fingerprint = zlib.crc32(b"gpt2")  # as streams have it that read GPT-2's through tiktoken
        return found
    found = Path(path)
    if not os.path.lexists(found):
        raise InputError(f"tokenizer {path}: no such file or folder; expected bytes, gpt2, or {EXPECTED} or its folder")
    return FromFile(found / "tokenizer.json" if found.is_dir() else found)


@contextmanager
def text_in(text: str) -> Iterator[None]:
    """Raises InputError for text that has no UTF-8."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InputError(f"found {text!r:.60}; expected UTF-8 text") from error


@contextmanager
def panics_told(problem: str) -> Iterator[None]:
    """InputError in place of what the tokenizers library raises: bare Exceptions, and Rust panics (BaseExceptions)."""
    try:
        yield
    except (InputError, UnicodeEncodeError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())
        raise InputError(f"{problem}: {said:.200}; expected {EXPECTED}; copy it again") from error


def tokenizer_of(config: TransformerConfig) -> Tokenizer:
    """That of the options, else that of the initial weights, else bytes. Raises InputError."""
    beside = Path(config.initial_weights, "tokenizer.json")
    if config.tokenizer or (config.initial_weights and beside.exists()):
        return load_tokenizer(config.tokenizer or str(beside))
    if config.shape.vocab_size != BYTE_VOCAB_SIZE:
        raise InputError(
            f"the model has a vocabulary of {config.shape.vocab_size}, and {beside} is missing; expected its tokenizer "
            f"(or a vocabulary of {BYTE_VOCAB_SIZE}, which is bytes); name it with --tokenizer"
        )
    return load_tokenizer("bytes")


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises InputError for one with more tokens than a model has."""
    if tokenizer.vocab_size > min(vocab_size, START):
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model {vocab_size}; expected the tokenizer that "
            f"belongs to the model; {other_vocabulary(tokenizer.vocab_size, vocab_size)}"
        )
