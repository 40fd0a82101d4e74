"""Turn text files into llm.c token shards for transformer_tpu.py.

Run:     python -m tools.prepare_data input.txt --output datasets/shakespeare
             bytes, no download
         python -m tools.prepare_data corpus/ --output data/c --tokenizer gpt2
             GPT-2's vocabulary
         python -m tools.prepare_data corpus/ --output data/c --tokenizer Qwen3/
             the tokenizer.json of a model from Hugging Face
         python -m tools.prepare_data hellaswag_val.jsonl --output datasets/ \\
             --tokenizer gpt2 --hellaswag

Then:    python transformer_tpu.py --dataset tokens --data_dir datasets \\
             --vocab_size 257 --train_data 'shakespeare_train_*.bin' \\
             --validation_data 'shakespeare_val_*.bin'
"""

import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from language.data.llmc_files import (
    MOST_QUESTION_BYTES,
    MOST_QUESTIONS,
    MOST_SHORT_TOKENS,
    MultipleChoice,
    write_hellaswag,
    write_token_shard,
)
from language.data.preparations import abandon_preparation, begin_preparation, end_preparation
from language.data.text import read_documents, split_documents
from language.data.tokenizer import Tokenizer, check_lost, check_texts, load_tokenizer
from language.data.tokenizer_files import keep_with_shards
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.files import lines_of, open_regular, parse_json
from tpu_utils.options.fields import Range
from tpu_utils.options.tool_arguments import parse_options

LONGEST_LINE = 1 << 20  # bytes of a HellaSwag question; they have about a thousand


@dataclass(frozen=True)
class PrepareConfig:
    """What to read and what to write."""

    input: Annotated[Path, tyro.conf.Positional]
    """A UTF-8 text file, or a folder of them; with --hellaswag its JSON lines."""
    output: Path
    """Shards become OUTPUT_train_000000.bin, ... and OUTPUT_val_000000.bin, ... in place of those of an earlier run.
    OUTPUT_shards.json lists them, once all are written."""
    tokenizer: str = "bytes"
    """bytes: vocabulary 257. gpt2: vocabulary 50257. Else a tokenizer.json, or the folder that has it and the files
    which name its end token. They are copied to OUTPUT_tokenizer; the shards record the vocabulary."""
    document_separator: str = ""
    """What divides documents inside a file. Empty: a file is one document."""
    validation_fraction: Annotated[float, Range("[0, 1)")] = 0.1
    """Share of the bytes that is for validation."""
    shard_tokens: Annotated[int, Range("[2, 2147483647]")] = 100_000_000
    """Most tokens in a shard. The last two of several share what is left, so that none is much shorter."""
    hellaswag: bool = False
    """Write OUTPUT/hellaswag_val.bin for transformer_tpu.py --tasks hellaswag=hellaswag_val.bin."""


def write_shards(prefix: str, documents: list[bytes], tokenizer: Tokenizer, shard_tokens: int) -> list[Path]:
    """Before every document stands the end token; around it what the tokenizer puts there, if that is another one. A
    document may begin in one shard and end in the next, as in llm.c. Raises InputError where its text is lost."""
    dtype = np.uint16 if tokenizer.vocab_size <= MOST_SHORT_TOKENS else np.uint32
    first, last = (np.array(tokens, dtype) for tokens in tokenizer.around_document)
    parts = []
    lost = Counter()
    for document in documents:
        parts += [first, tokenizer.encode_document(document), last]
        lost += tokenizer.lost(document.decode(), parts[-2])
    check_lost(lost, sum(len(document.decode()) for document in documents), prefix)
    tokens = np.concatenate(parts, dtype=dtype, casting="unsafe")  # every token is below the vocabulary
    paths = []
    for number, (start, end) in enumerate(pairwise([0, *shard_ends(len(tokens), shard_tokens)])):
        path = Path(f"{prefix}_{number:06d}.bin")
        write_token_shard(path, tokens[start:end], tokenizer.vocab_size)
        print(f"{path}: {end - start:,} tokens of a vocabulary of {tokenizer.vocab_size}")
        paths.append(path)
    return paths


def shard_ends(tokens: int, most: int) -> list[int]:
    """Where each shard ends. Training refuses one that is shorter than a batch: a short last one takes from the one
    before, so that of several none has less than half of the most."""
    ends = [*range(most, tokens, most), tokens]
    if len(ends) > 1 and tokens - ends[-2] < most // 2:
        ends[-2] -= (most - (tokens - ends[-2])) // 2
    return ends


def read_questions(path: Path, tokenizer: Tokenizer) -> list[MultipleChoice]:
    """HellaSwag's JSON lines (ctx, label, endings) as tokens. Raises InputError: which line, and what it lacks."""
    questions = []
    texts = []
    with open_regular(path, "HellaSwag's JSON lines") as file:
        for line in lines_of(file, LONGEST_LINE):
            try:
                label, asked = texts_of(line)
                parts = [tokenizer.encode_document(text.encode()) for text in asked]
                num_bytes = 2 * (5 + sum(1 + len(part) for part in parts))
                if num_bytes > MOST_QUESTION_BYTES:
                    raise ValueError(f"it takes {num_bytes} bytes as tokens, expected at most {MOST_QUESTION_BYTES}")
                questions.append(MultipleChoice(len(questions), label, parts[0], parts[1:]))
                texts += asked
            except ValueError as error:
                raise InputError(f"{path}, line {len(questions) + 1}: not a HellaSwag question: {error}") from error
            if len(questions) > MOST_QUESTIONS:
                break
    if not 1 <= len(questions) <= MOST_QUESTIONS:
        raise InputError(f"{path}: {len(questions)} questions; expected 1 to {MOST_QUESTIONS}, one a line")
    check_texts(tokenizer, texts, str(path))
    return questions


def texts_of(line: bytes) -> tuple[int, list[str]]:
    """The label of a question; its context, and its endings with the space before each. Raises ValueError."""
    record = parse_json(line)
    record = record if isinstance(record, dict) else {}
    context, label, endings = (record.get(name) for name in ("ctx", "label", "endings"))
    if not (isinstance(endings, list) and len(endings) == 4 and all(isinstance(text, str) for text in endings)):
        raise ValueError("expected endings, four texts")
    if not isinstance(context, str) or not context or str(label) not in ("0", "1", "2", "3"):
        raise ValueError("expected ctx, a text, and label, 0 to 3")
    return int(label), [context, *(" " + ending for ending in endings)]


def write_preparation(config: PrepareConfig, documents: list[bytes], tokenizer: Tokenizer, facts: dict) -> None:
    """The shards, their tokenizer, and the list of them; nothing where one of these fails."""
    paths = []
    try:
        for kind, part in zip(("train", "val"), split_documents(documents, config.validation_fraction), strict=True):
            if part:
                paths += write_shards(f"{config.output}_{kind}", part, tokenizer, config.shard_tokens)
        if folder := keep_with_shards(tokenizer, str(config.output)):
            print(f"{folder}: the tokenizer of these shards, for samples and exports of what is trained on them")
        end_preparation(str(config.output), paths, facts)
    except Exception:  # a full disk, a text that the tokenizer loses
        abandon_preparation(str(config.output))
        raise


def main() -> int:
    config = parse_options(PrepareConfig, __doc__)
    tokenizer = load_tokenizer(config.tokenizer)
    if config.hellaswag:
        if tokenizer.vocab_size > MOST_SHORT_TOKENS:
            raise InputError(
                f"tokenizer {config.tokenizer} has a vocabulary of {tokenizer.vocab_size}, but a HellaSwag file of "
                f"llm.c holds tokens of 16 bits; expected at most {MOST_SHORT_TOKENS}; use --tokenizer gpt2"
            )
        questions = read_questions(config.input, tokenizer)
        config.output.mkdir(parents=True, exist_ok=True)
        write_hellaswag(config.output / "hellaswag_val.bin", questions, tokenizer.vocab_size)
        print(f"{config.output / 'hellaswag_val.bin'}: {len(questions):,} questions")
        return 0
    if config.input.is_dir() and config.output.parent.resolve().is_relative_to(config.input.resolve()):
        raise InputError(
            f"output {config.output} lies in {config.input}, where the next preparation would read it as text; "
            "expected another folder"
        )
    documents = read_documents(config.input, config.document_separator)
    facts = {"documents": len(documents), "bytes": sum(map(len, documents)), "tokenizer": config.tokenizer}
    print(f"{config.input}: {facts['documents']:,} document{'s' * (len(documents) > 1)}, {facts['bytes']:,} bytes")
    config.output.parent.mkdir(parents=True, exist_ok=True)
    with begin_preparation(str(config.output)):
        write_preparation(config, documents, tokenizer, facts)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
