"""Documents read as a stream by 1, 2, 4 and 1 hosts, one after another: each once an epoch? Memory, speed.

Run:     python benchmarks/streams.py                              # 2 million documents in 100 files, about 1 GB
         python benchmarks/streams.py --documents 40000 --files 20
         python benchmarks/streams.py --speed TEXT                 # tokens/s by kind of file, of a text file's words
Prints:  for each number of hosts: steps, tokens, memory of a host after its first tenth and at the end; then how often
         the documents came in each whole epoch. Exit code 1 unless it is once.

A host is a process that reads, tokenizes and drops its rows; no model. Each document begins with its number, and what a
lane gives is kept as bytes until it is counted. Where one number of hosts stops, the next one goes on by the position
alone, as JSON, as a checkpoint holds it.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from documents import ENDINGS, write_documents

from benchmarks.children import answer_of, parser_for
from language.data.stream import reading_of, turns_of
from language.options.transformer_options import TransformerConfig
from language.sequences import load_sequences

T, BATCH = 1024, 64


def config_of(folder: Path, **changes) -> TransformerConfig:
    options = dict(train_data="part_*", validation_data="val.jsonl", sequence_length=T, global_batch_size=BATCH)
    return TransformerConfig(dataset="stream", data_dir=str(folder), eval_batches=1, **(options | changes))


def make(folder: Path, documents: int, files: int) -> None:
    random = np.random.default_rng(0)
    words = np.array(["".join(random.choice(list("etaoinshrdlu"), random.integers(2, 9))) for _ in range(5000)])
    filler = " ".join(random.choice(words, 200_000))
    each = documents // files
    for file in range(files):
        starts, lengths = random.integers(0, len(filler) - 400, each), random.integers(20, 380, each)
        numbers = range(file * each, (file + 1) * each)
        texts = [f"{n}:{filler[s : s + k]}" for n, s, k in zip(numbers, starts, lengths, strict=True)]
        write_documents(folder / f"part_{file:04d}.{ENDINGS[file % 4]}", texts, row_group=1000)
    write_documents(folder / "val.jsonl", ["for validation"])


def memory() -> int:
    """Resident MiB of this process."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024


def host(folder: Path, index: int, count: int, begin: int, end: int) -> None:
    """Read steps begin to end from position_BEGIN.json on; append each lane's bytes to its file."""
    data = load_sequences(config_of(folder), index, count)
    if begin:
        data.seek(begin, json.loads((folder / f"position_{begin}.json").read_text()))
    lanes, seen = data.train.numbers, []
    files = [(folder / f"lane_{lane}.bin").open("ab") for lane in lanes]
    for step in range(begin, end):
        rows = data.batch(step)[:, :-1].reshape(len(lanes), -1)  # a row's last token is the next one's first
        for file, tokens in zip(files, rows, strict=True):
            file.write((tokens % 256).astype(np.uint8).tobytes())  # an end token becomes 0
        if (step - begin) % max(1, (end - begin) // 10) == 0:
            seen.append(memory())
    for file in files:
        file.close()
    print(json.dumps({"position": data.position(end), "memory": [*seen, memory()], "cpu": time.process_time()}))
    data.close()


def read(folder: Path, hosts: list[int], steps: int) -> None:
    for left in folder.glob("lane_*.bin"):  # left by an earlier run
        left.unlink()
    begin = 0
    for count in hosts:
        end, started = begin + steps // len(hosts), time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            spans = [
                (__file__, "--folder", folder.resolve(), "--host", index, count, begin, end) for index in range(count)
            ]
            found = list(pool.map(lambda span: answer_of(*span), spans))
        (folder / f"position_{end}.json").write_text(json.dumps([one["position"] for one in found]))
        tokens, seconds = (end - begin) * BATCH * T, time.perf_counter() - started
        early, last = (max(one["memory"][at] for one in found) for at in (1, -1))
        cpu = sum(one["cpu"] for one in found)
        print(
            f"{count} hosts  steps {begin:,} to {end:,}  {tokens / 1e6:,.0f} M tokens in {seconds:.0f} s, CPU "
            f"{cpu:.0f} s  memory of a host {early} MiB after a tenth, {last} MiB at the end",
            flush=True,
        )
        begin = end


def count_documents(folder: Path, documents: int) -> bool:
    """Whether each came once in each epoch that all lanes have finished."""
    reading = reading_of(config_of(folder))
    each, by_epoch, whole = documents // len(reading.files), [], []
    for lane in range(reading.lanes):
        numbers = [int(n) for n in re.findall(rb"\0(\d+):", (folder / f"lane_{lane}.bin").read_bytes())]
        turns = takewhile(lambda turn: turn[0] < 20, turns_of(reading, lane))
        files_of = Counter(epoch for epoch, _, _ in turns)
        epoch = 0
        while len(numbers) > (own := files_of[epoch] * each):  # its last document may be truncated
            by_epoch += [] if len(by_epoch) > epoch else [Counter()]
            by_epoch[epoch].update(numbers[:own])
            numbers, epoch = numbers[own:], epoch + 1
        whole.append(epoch)
    right = min(whole) > 0
    for epoch in range(min(whole)):
        times = Counter(by_epoch[epoch].values())
        print(f"epoch {epoch}  {len(by_epoch[epoch]):,} documents, times they came: {dict(times)}")
        right &= times == {1: documents}
    return right


def speed(text: Path, folder: Path) -> None:
    """Tokens of a CPU second by kind of file and tokenizer, and of a second by threads and processes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    content = text.read_text()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    made.train_from_iterator([content], trainer)
    made.save(str(folder / "tokenizer.json"))
    starts = np.random.default_rng(0).integers(0, len(content) - 3000, 8000)
    texts = [content[start : start + 3000] for start in starts.tolist()]
    for ending in ENDINGS:
        for file in range(4):
            write_documents(folder / f"{ending}_part_{file}.{ending}", texts[file::4], row_group=500)
    write_documents(folder / "val.jsonl", ["for validation"] * 10)
    for name, settings in (("bytes", {}), ("BPE", dict(tokenizer=str(folder), vocab_size=33000))):
        for ending in ENDINGS:
            for workers in (1, 2):
                changes = dict(train_data=f"{ending}_part_*", stream_workers=workers, **settings)
                data = load_sequences(config_of(folder, **changes))
                wall, cpu, steps = time.perf_counter(), time.process_time(), 80 if name == "BPE" else 800
                for step in range(steps):
                    data.batch(step)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                data.close()
                tokens = steps * BATCH * T
                print(
                    f"{name:6} {ending:10} {workers} threads  {tokens / cpu:12,.0f} tokens of a CPU second  "
                    f"{tokens / wall:12,.0f} of a second",
                    flush=True,
                )


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--hosts", default="1,2,4,1")
    parser.add_argument("--epochs", type=float, default=1.3, help="epochs of the mean lane")
    parser.add_argument("--folder", type=Path, help="folder of the files; empty: a new one, removed at the end")
    parser.add_argument("--speed", type=Path, metavar="TEXT")
    parser.add_argument("--host", type=int, nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.host:
        host(given.folder, *given.host)
        return 0
    folder = given.folder or Path(tempfile.mkdtemp(prefix="streams_"))
    folder.mkdir(exist_ok=True)
    try:
        if given.speed:
            speed(given.speed, folder)
            return 0
        make(folder, given.documents, given.files)
        files = list(folder.glob("part_*"))
        print(f"{given.documents:,} documents in {len(files)} files, {sum(map(os.path.getsize, files)) / 1e6:,.0f} MB")
        steps = int(given.epochs * given.documents * 208 / (BATCH * T))  # a document has 208 tokens in the mean
        read(folder, [int(count) for count in given.hosts.split(",")], steps)
        right = count_documents(folder, given.documents)
        print("each document once an epoch" if right else "NOT each document once an epoch")
        return 0 if right else 1
    finally:
        if not given.folder:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
