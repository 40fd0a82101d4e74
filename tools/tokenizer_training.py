"""A tokenizer of one's own: byte-level BPE, trained by the tokenizers library. Imports no torch."""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from language.data.chat import FORMATS
from language.data.tokenizer_files import END, TOKENIZER_CONFIG, TOKENIZER_JSON
from tpu_utils.base.errors import InputError
from tpu_utils.base.new_folder import write_together

SPECIAL = (END, *FORMATS["chatml"])
"""Behind the trained tokens, in this order."""
SMALLEST = 256 + len(SPECIAL)
"""Every byte has a token, so that any text can be encoded."""
WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
"""What no token reaches across: GPT-4's pattern with at most two digits together, as in nanochat: more of them are
worth no token of a small vocabulary. Source: nanochat/tokenizer.py of github.com/karpathy/nanochat."""


PIECES = r"[\s\S]{1,256}"
"""What a longer word is split into in training, whose time grows with the square of a word: a run of one letter."""


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """The same documents give the same tokenizer, byte for byte. Raises InputError for a text that is too short."""
    made = tokenizers.Tokenizer(models.BPE())
    split, pieces = (pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in (WORDS, PIECES))
    to_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pieces, to_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = vocab_size - len(SPECIAL)
    made.train_from_iterator(
        documents, trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=alphabet)
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    if (found := made.get_vocab_size()) < size:
        raise InputError(
            f"the text has pairs for a vocabulary of {found + len(SPECIAL)}, expected {vocab_size}; give more text, or "
            f"--vocab_size {found + len(SPECIAL)} at most"
        )
    made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.post_processor = processors.TemplateProcessing(
        f"{END} $A", f"{END} $A {END} $B", special_tokens=[(END, made.token_to_id(END))]
    )
    return made


def write_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """The files that load_tokenizer and transformers read, in place of earlier ones."""
    named = {"bos_token": END, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    settings = json.dumps(named | {"clean_up_tokenization_spaces": False}, indent=2)
    made = tokenizer.to_str(pretty=True)
    write_together(folder, {TOKENIZER_JSON: made.encode(), TOKENIZER_CONFIG: settings.encode()})
