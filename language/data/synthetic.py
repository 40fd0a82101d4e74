"""--dataset synthetic: a Markov chain whose lowest possible loss is known. Imports no torch."""

import numpy as np

from language.data.sequence_data import ALONE, Host, SequenceData
from language.options.transformer_options import TransformerConfig


def check(config: TransformerConfig) -> None:
    """There is no file to check."""


def load(config: TransformerConfig, process_index: int = 0, process_count: int = 1) -> SequenceData:
    """Training and validation draw from one chain, from different streams of random numbers."""
    vocab_size = config.shape.vocab_size
    T = config.shape.sequence_length
    rows = config.global_batch_size // process_count
    host = Host(process_index, process_count)
    train = MarkovChain(vocab_size, T, rows, config.seed, 0, host)
    validation = MarkovChain(vocab_size, T, rows, config.seed, 1, host)
    description = f"Markov chain over {vocab_size} tokens"
    return SequenceData(config, train, validation, config.eval_batches, description, vocab_size, MarkovChain.entropy)


class MarkovChain:
    """Sequences from a Markov chain whose entropy rate is known in closed form.

    Every token has 4 possible successors, its own random ones, with probabilities 1/2, 1/4, 1/8, 1/8. Each row of the
    transition matrix is the same distribution over other tokens, so whatever the stationary distribution is, the
    entropy rate is 1.75 bits = 1.2130 nats, and no model can have a lower expected loss.
    """

    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    entropy = float(-(probabilities * np.log(probabilities)).sum())  # nats per token

    def __init__(self, vocab_size: int, T: int, rows: int, seed: int = 0, stream: int = 0, host: Host = ALONE):
        table = np.random.default_rng((seed, 1))
        successors = [table.choice(vocab_size, 4, replace=False) for _ in range(vocab_size)]
        self.successors = np.array(successors, np.int32)
        self.vocab_size = vocab_size
        self.T = T
        self.rows = rows
        self.seed = seed
        self.stream = stream
        self.host = host

    def batch(self, step: int) -> np.ndarray:
        random = np.random.default_rng((self.seed, 2 + self.stream, step))
        rows = self.rows * self.host.count  # every process draws the global batch and keeps its part
        choice = np.array([0, 0, 0, 0, 1, 1, 2, 3])[random.integers(0, 8, (self.T, rows), np.uint8)]  # eighths
        out = np.empty((self.T + 1, rows), np.int32)
        out[0] = random.integers(0, self.vocab_size, rows)
        for t in range(self.T):
            out[t + 1] = self.successors[out[t], choice[t]]
        return np.ascontiguousarray(out.T[self.host.part(self.rows)])
