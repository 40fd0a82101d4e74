"""What reading token shards costs the host, as a share of the step, at 10 x the token rate of one v5e chip.

Run:     python benchmarks/token_loader.py        # writes 4 shards of 20 M tokens to a temporary folder, reads them all

The rate of one chip is taken from above: GPT-2 124M at its peak (197 TFLOP/s over 860 MFLOPs a token, MFU 100 %), which
no run reaches. Every batch of 512 sequences of 1,024 tokens is sliced, checked and widened to int32, as in training.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from language.data.llmc_files import write_token_shard
from language.data.tokens import TokenShards
from language.options.llama_shape import MODEL_SIZES

T, ROWS, SHARDS, SHARD_TOKENS = 1024, 512, 4, 20_000_000


def main() -> None:
    rate = 10 * 197e12 / MODEL_SIZES["124M"].flops_per_token
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        for number in range(SHARDS):
            tokens = random.integers(0, 50257, SHARD_TOKENS, np.uint16)
            write_token_shard(Path(folder) / f"bench_{number:06d}.bin", tokens)
        started = time.perf_counter()
        source = TokenShards(f"{folder}/bench_*.bin", 50257, T, ROWS)
        opened = time.perf_counter() - started
        seconds = []
        for step in range(source.batches_per_epoch):
            started = time.perf_counter()
            source.batch(step)
            seconds.append(time.perf_counter() - started)
    tokens, middle = ROWS * T, statistics.median(seconds)
    spread = statistics.quantiles(seconds, n=10)
    print(f"open and check {SHARDS} shards: {opened * 1e3:.0f} ms")
    low, high = spread[0] * 1e3, spread[-1] * 1e3
    print(f"read {tokens:,} tokens: median {middle * 1e3:.2f} ms (10 % to 90 %: {low:.2f} to {high:.2f})")
    print(f"{tokens / middle / 1e6:.0f} M tokens/s; 10 x one v5e at its peak: {rate / 1e6:.2f} M tokens/s")
    print(f"share of the step: {middle / (tokens / rate):.2%}")


if __name__ == "__main__":
    main()
