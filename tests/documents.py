"""Files of documents for tests and benchmarks of --dataset stream, written by others than who reads them."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

ENDINGS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst")


def write_documents(path: Path, texts: list[str], row_group: int = 7) -> Path:
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=row_group)
        return path
    content = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, 1, mtime=0)
    if path.suffix == ".zst":
        content = pyarrow.compress(content, codec="zstd", asbytes=True)
    path.write_bytes(content)
    return path


def write_corpus(folder: Path, files: int, documents: int, padding: int = 30) -> list[str]:
    """So many documents in each file, of all kinds; each begins with its number. Returns all texts."""
    folder.mkdir(parents=True, exist_ok=True)
    random, texts = np.random.default_rng(0), []
    for file in range(files):
        lengths = random.integers(1, 2 * padding, documents)
        own = [f"{file * documents + i}:{'x' * int(length)}" for i, length in enumerate(lengths)]
        write_documents(folder / f"part_{file:04d}.{ENDINGS[file % len(ENDINGS)]}", own)
        texts += own
    return texts


def write_chats(path: Path, count: int = 150) -> None:
    """Conversations that a small model learns in a few steps."""
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), random.integers(2, 7))) for _ in range(count)]
    chats = [{"prompt": f"Say {word} twice.", "completion": f"{word} {word}"} for word in words]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
