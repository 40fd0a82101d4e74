"""All that follows from a model's depth, by nanochat's rules, and from how much text there is.

Source of the rules: scripts/base_train.py of github.com/karpathy/nanochat (92d63d4, 2026-07-03). Learning rates are
this collection's, because its Muon takes one rate for all parameters.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from language.data.entries import is_hidden
from language.options.hf_config import shape_of

HEAD_WIDTH = 128
WIDTH_PER_LAYER = 64
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022; nanochat: 8 to 12
MOST_EPOCHS = 4  # reading the text again: so many repeats cost little (Muennighoff et al. 2023, arXiv:2305.16264)
REFERENCE_DEPTH, REFERENCE_BATCH = 12, 1 << 19  # nanochat: the best batch at depth 12, in tokens
BATCH_EXPONENT = 0.383  # nanochat: the best batch grows so with the tokens
FEWEST_STEPS = 300  # a smaller batch instead: matters for models that take a minute
CHAT_EPOCHS = 3


@dataclass(frozen=True)
class Plan:
    """Plan of a run. Its tokens of text are estimated, because there is no tokenizer yet."""

    depth: int
    vocab_size: int
    model: dict[str, Any]
    """config.json of Hugging Face."""
    parameters: int
    rows: int
    """Sequences in a batch."""
    steps: int
    chat_steps: int
    learning_rate: float

    @property
    def sequence_length(self) -> int:
        return self.model["max_position_embeddings"]

    @property
    def tokens(self) -> int:
        """Number of tokens in pre-training."""
        return self.steps * self.rows * self.sequence_length

    @property
    def chat_learning_rate(self) -> float:
        return self.learning_rate / 2


def power_of_two(value: float, least: int, most: int) -> int:
    """The largest that is not above value, between two powers of two."""
    return min(most, max(least, 1 << int(math.log2(max(1.0, value)))))


def model_of(depth: int, vocab_size: int) -> dict[str, Any]:
    """Qwen3's: rotary positions, RMSNorm, normed queries and keys as in nanochat, a gated MLP of as many weights."""
    width = -(-depth * WIDTH_PER_LAYER // HEAD_WIDTH) * HEAD_WIDTH
    heads, end = width // HEAD_WIDTH, vocab_size - 3  # the token of tools.train_tokenizer
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": depth,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD_WIDTH,
        "intermediate_size": -(-8 * width // 3 // 128) * 128,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "max_position_embeddings": power_of_two(128 * depth, 256, 2048),
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def multiplied(depth: int, vocab_size: int) -> int:
    """Parameters that tokens are multiplied with: all but the embedding. nanochat's measure of a model."""
    return shape_of(model_of(depth, vocab_size), "the plan").num_multiplied


def make_plan(depth: int, text_bytes: int, chat_bytes: int, most_steps: int = 0, vocab_size: int = 0) -> Plan:
    """most_steps: fewer steps of each training, for a rehearsal. 0: as many as it takes. vocab_size: 0: by the rule."""
    vocab_size = vocab_size or power_of_two(text_bytes / 1024, 512, 1 << 15)
    bytes_per_token = 0.28 * math.log2(vocab_size)  # 2.8 of 1,024 tokens, 4.2 of 32,768
    model, size = model_of(depth, vocab_size), multiplied(depth, vocab_size)
    T = model["max_position_embeddings"]
    tokens = min(TOKENS_PER_PARAMETER * size, MOST_EPOCHS * 0.9 * text_bytes / bytes_per_token)
    reference = TOKENS_PER_PARAMETER * multiplied(REFERENCE_DEPTH, 1 << 15)
    best = REFERENCE_BATCH * (tokens / reference) ** BATCH_EXPONENT
    rows = power_of_two(min(best, tokens / FEWEST_STEPS) / T, 8, 1 << 12)
    steps, chat_steps = int(tokens / (rows * T)), int(CHAT_EPOCHS * chat_bytes / bytes_per_token / (rows * T))
    most = most_steps or max(steps, chat_steps)
    return Plan(
        depth=depth,
        vocab_size=vocab_size,
        model=model,
        parameters=shape_of(model, "the plan").num_parameters,
        rows=rows,
        steps=max(4, min(steps, most)),
        chat_steps=max(4, min(max(chat_steps, 40), most)),
        learning_rate=1e-3 * (model["hidden_size"] / 768) ** -0.5,
    )


def files_of(path: Path) -> list[Path]:
    """The file, or those in a folder, without hidden ones."""
    if not path.is_dir():
        return [path]
    return sorted(f for f in path.rglob("*") if f.is_file() and not is_hidden(str(f.relative_to(path))))


def bytes_of(path: Path) -> int:
    """Total size of the files of a text."""
    return sum(file.stat().st_size for file in files_of(path))
