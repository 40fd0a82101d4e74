"""Tokens a second of sampling on the CPU, ours beside transformers', same weights; and what a token costs the host.

Run:     python benchmarks/decode_speed.py --cores 1

A Llama of random weights is written as Hugging Face does and read by both. Ours and theirs take turns, each continues
1 prompt, then 8, by 128 greedy tokens; the medians of five turns are printed. The host's cost of a token is the
processor time of the thread that dispatches: on a TPU the device computes meanwhile.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = sorted(os.sched_getaffinity(0))
    counts = range(1, len(cores) + 1)
    parser.add_argument("--cores", type=int, default=1, choices=counts, help="cores of this process, so for both")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.sched_setaffinity(0, cores[: arguments.cores])  # before torch counts its threads

import torch
import torch_xla
from transformers import LlamaConfig, LlamaForCausalLM

from language.generation import decoding
from language.generation.sampling import SamplingOptions
from language.weights import sources

PROMPT, TOKENS = 32, 128


def make(folder: str, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def theirs(model: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    given = torch.tensor(prompts)
    made = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made[:, PROMPT:].tolist()


def main() -> None:
    config = SamplingOptions(temperature=0.0, num_tokens=TOKENS)
    for layers in (4, 16):
        with tempfile.TemporaryDirectory() as folder:
            reference = make(folder, layers)
            model = sources.load(sources.open_source(hf=folder, precision="float32"), torch_xla.device())
        for batch in (1, 8):
            prompts = torch.randint(16384, (batch, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
            seconds, host = {"ours": [], "transformers": []}, []
            for turn in range(arguments.turns + 1):  # the first compiles
                for name, run in (
                    ("ours", partial(decoding.generate, model, prompts, config, torch_xla.device())),
                    ("transformers", partial(theirs, reference, prompts)),
                ):
                    begin, thread = time.monotonic(), time.thread_time()
                    run()
                    if turn:
                        seconds[name].append(time.monotonic() - begin)
                        host += [(time.thread_time() - thread) / TOKENS * 1e3] * (name == "ours")
            rates = {name: batch * TOKENS / statistics.median(found) for name, found in seconds.items()}
            print(
                f"{layers} layers, batch {batch}: ours {rates['ours']:.0f} tokens/s, transformers "
                f"{rates['transformers']:.0f}, ratio {rates['ours'] / rates['transformers']:.2f}; "
                f"host {statistics.median(host):.2f} ms a token",
                flush=True,
            )


if __name__ == "__main__":
    main()
