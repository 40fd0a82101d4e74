"""transformer_tpu.py's own steps in plain PyTorch: a row counts by its targets alone, whatever it stands beside.

The image scripts try theirs at the start of every run (tpu_utils/trial/checks.py); this asks this script the same.
"""

import numpy as np
import pytest
import torch

import transformer_tpu
from language.models.gpt import GPT
from language.models.llama import Llama
from language.models.operations import is_likeliest
from language.options.transformer_options import TransformerConfig
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.step.optim import learning_rates, make_optimizer

ROWS, T = 11, 12
GIVEN = dict(
    vocab_size=64,
    sequence_length=T,
    num_layers=2,
    num_heads=4,
    embedding_dim=32,
    global_batch_size=4,
    num_steps=4,
    warmup_steps=0,
    precision="float32",
)


def rows_of(padding: int = 0) -> torch.Tensor:
    """(11, T + 1) tokens; some are no targets (~token), at the end, in the middle, or all but one."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 64, (ROWS, T + 1)).astype(np.int32)
    hidden = draw.random((ROWS, T + 1)) < draw.random((ROWS, 1))
    hidden[3, 2:], hidden[4, :] = True, True
    hidden[3, 1] = hidden[4, 5] = False
    hidden[:, 0] = False
    return torch.from_numpy(np.where(hidden, ~tokens, tokens))


@pytest.fixture(params=["tiny", "llama_tiny", "mixtral_tiny"])
def config(request):
    return TransformerConfig(**GIVEN, model_size=request.param)


def model_of(config):
    model = GPT(config.shape) if config.model_size == "tiny" else Llama(config.shape)
    model.initialise(0)
    return model


def evaluated(model, rows: torch.Tensor) -> np.ndarray:
    return transformer_tpu.eval_step.__wrapped__(model, rows).numpy()


def test_an_evaluation_is_of_each_row_alone(config):
    model, rows = model_of(config), rows_of()
    whole = evaluated(model, rows)
    np.testing.assert_array_equal(whole[:, 1], (rows[:, 1:] >= 0).sum(1))
    order = np.random.default_rng(1).permutation(ROWS)
    np.testing.assert_allclose(evaluated(model, rows[order]), whole[order], rtol=1e-5)
    for padding in (0, 7, 63):  # rows without a target, as they fill up the last batch
        padded = torch.cat([rows[8:], torch.full((5, T + 1), ~padding, dtype=torch.int32)])
        found = evaluated(model, padded)
        np.testing.assert_allclose(found[:3], whole[8:], rtol=1e-5)
        assert (found[3:] == 0).all()
    with torch.no_grad():  # and it is PyTorch's own loss
        inputs = torch.where(rows < 0, ~rows, rows)[:, :-1]
        logits = model(inputs).logits[..., :64].transpose(1, 2).float()
        targets = torch.where(rows < 0, -100, rows)[:, 1:].long()
        expected = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none").sum(1)
    np.testing.assert_allclose(whole[:, 0], expected, rtol=1e-5)


def test_what_follows_a_token_has_no_effect_on_it(config):
    model, rows = model_of(config), rows_of().abs() % 64
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
        changed = rows[:, :-1].clone()
        changed[:, 7:] = (changed[:, 7:] + 5) % 64
        np.testing.assert_allclose(model(changed).logits[:, :7], logits[:, :7], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(model(changed).logits[:, 7:], logits[:, 7:])


def test_the_training_loss_is_the_mean_over_targets_and_its_step_moves_the_weights(config):
    rows = rows_of()

    def trained(rows) -> tuple[float, dict[str, torch.Tensor]]:
        model = model_of(config)
        optimizer = make_optimizer(config, model.parameters())
        metrics = DeviceMetrics(["loss", "gradient_norm", *model.reported], 4, torch.device("cpu"))
        transformer_tpu.train_step.__wrapped__(model, optimizer, learning_rates(config, 4), metrics, rows, config)
        assert all(parameter.grad is None for parameter in model.parameters())
        return float(metrics.read(0, 1)["loss"][0]), dict(model.named_parameters())

    loss, weights = trained(rows)
    sums, counts = evaluated(model_of(config), rows).sum(0)[:2]
    assert loss == pytest.approx(sums / counts, rel=1e-5), "a mean over targets, not over rows"
    means = [trained(rows[one : one + 1])[0] for one in range(ROWS)]
    assert abs(np.mean(means) - loss) > 1e-3 * loss, "rows have as many targets, so nothing is told apart"
    order = np.random.default_rng(1).permutation(ROWS)
    padded = torch.cat([rows[order], torch.full((5, T + 1), ~9, dtype=torch.int32)])
    again, same = trained(padded)
    assert again == pytest.approx(loss, rel=1e-5)
    start = dict(model_of(config).named_parameters())
    assert any(not torch.equal(weights[name], start[name]) for name in start)
    for name, weight in weights.items():
        torch.testing.assert_close(same[name], weight, rtol=1e-3, atol=2e-4, msg=name)


def test_the_likeliest_token_is_the_first_of_equal_ones():
    """As argmax says, of logits with many equal values; padded columns and targets below 0 do not count."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 6, (40, 30, 16), generator=random).bfloat16()
    targets = torch.randint(-2, 12, (40, 30), generator=random, dtype=torch.int32)
    expected = (logits[..., :12].float().argmax(-1) == targets).float()
    assert torch.equal(is_likeliest(logits, targets, 12), expected) and 0 < expected.sum() < expected.numel()
