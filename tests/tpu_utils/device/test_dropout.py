"""Dropout from a count on the device: how random its masks are, what is replaced, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from tpu_utils.base.errors import InputError, TrainingError
from tpu_utils.device.dropout import dropout, layer_keys, row_keys
from tpu_utils.device.dropout_module import Dropout, replace_dropout


def masks(steps: int, rows: int, places: int, shape: tuple[int, ...], p: float) -> np.ndarray:
    """(steps, places, rows, *shape) bool: what is kept."""
    found = []
    for step in range(steps):
        keys = row_keys(torch.tensor([step], dtype=torch.int32), 0, torch.arange(rows, dtype=torch.int32))
        found.append([dropout(torch.ones(rows, *shape), p, key) > 0 for key in layer_keys(keys, places)])
    return np.array([[mask.numpy() for mask in of_step] for of_step in found])


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_have_their_rate_and_look_independent(p):
    """Over all pairs of steps, places and rows, and along both axes of a row; limits in standard deviations."""
    kept = masks(steps=4, rows=4, places=3, shape=(64, 96), p=p).reshape(48, 64, 96)
    deviation = np.sqrt(p * (1 - p))
    assert abs(kept.mean() - (1 - p)) < 4 * deviation / np.sqrt(kept.size)
    assert np.abs(kept.mean((1, 2)) - (1 - p)).max() < 4.5 * deviation / np.sqrt(kept[0].size)
    normal = (kept - (1 - p)) / deviation
    flat = normal.reshape(48, -1)
    between = (flat @ flat.T / np.sqrt(flat.shape[1]))[np.triu_indices(48, 1)]
    assert np.abs(between).max() < 4.8 and between.std() == pytest.approx(1, abs=0.1)
    spectrum = np.abs(np.fft.rfft2(normal)) ** 2 / flat.shape[1]  # that of white noise is exponential with mean 1
    spectrum = spectrum[:, :, 1:48].ravel()
    assert spectrum.max() < np.log(spectrum.size) + 7 and spectrum.std() == pytest.approx(1, abs=0.05)
    words = np.packbits(kept.reshape(48, -1)[:, :6144], axis=1).ravel()  # eight neighbours
    ones = np.array([bin(i).count("1") for i in range(256)])
    expected = len(words) * (1 - p) ** ones * p ** (8 - ones)
    counts, often = np.bincount(words, minlength=256), expected > 5
    chi2 = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert abs(chi2 - often.sum()) < 5 * np.sqrt(2 * often.sum())


def test_the_values_that_are_kept_are_scaled_in_every_dtype():
    keys = row_keys(torch.zeros(1, dtype=torch.int32), 5, torch.arange(3, dtype=torch.int32))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((3, 50), 3.0, dtype=dtype, requires_grad=True)
        y = dropout(x, 0.25, keys)
        y.sum().backward()
        assert y.dtype == dtype and set(y.tolist()[0]) == {0.0, 4.0}
        assert torch.equal(x.grad > 0, y > 0)


def test_a_module_counts_in_training_only_and_goes_on_where_it_was_saved():
    x, drop, other = torch.ones(4, 6, 8), Dropout(0.5, salt=1), Dropout(0.5, salt=2)
    first, second = drop(x), drop(x)
    assert not torch.equal(first, second) and not torch.equal(first, other(x)) and drop.step.item() == 2
    assert drop.eval()(x) is x and drop.step.item() == 2
    again = Dropout(0.5, salt=1)
    again.load_state_dict(drop.state_dict())
    assert torch.equal(again(x), drop.train()(x))


def test_half_of_the_rows_has_half_of_the_masks():
    """What a replica of DDP computes, which holds every n-th row."""
    x, whole = torch.ones(8, 20), Dropout(0.5, salt=1)(torch.ones(8, 20))
    keys = row_keys(torch.zeros(1, dtype=torch.int32), 1, torch.arange(4, dtype=torch.int32) * 2 + 1)
    assert torch.equal(dropout(x[1::2], 0.5, keys), whole[1::2])


def test_every_dropout_of_a_model_is_replaced():
    shared = nn.Dropout(0.3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.ModuleDict({"a": shared, "b": shared})).eval()
    same = replace_dropout(model, seed=3)
    kinds = [module for module in model.modules() if isinstance(module, nn.Dropout | Dropout)]
    assert same is model and [type(module) for module in kinds] == [Dropout, Dropout]
    assert [module.p for module in kinds] == [0.1, 0.3] and model[2]["a"] is model[2]["b"]
    assert len({module.salt for module in kinds}) == 2 and not any(module.training for module in kinds)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: nn.ModuleDict({"a": nn.MultiheadAttention(4, 2, 0.1)}), "a is a MultiheadAttention with dropout 0.1"),
        (lambda: nn.Sequential(nn.Dropout2d(0.2)), "0 is a Dropout2d with dropout 0.2, which uploads a seed"),
        (lambda: nn.LSTM(4, 4, 2, dropout=0.3), "the model is a LSTM with dropout 0.3"),
    ],
)
def test_other_random_modules_are_refused(build, message):
    with pytest.raises(InputError, match=message):
        replace_dropout(build(), 0)


def test_a_module_inside_a_checkpoint_is_refused():
    from torch.utils.checkpoint import checkpoint

    drop, x = Dropout(0.5, 0), torch.ones(4, 4, requires_grad=True)
    with pytest.raises(TrainingError, match="called once more in the backward pass"):
        checkpoint(lambda x: drop(x) * x, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan")])
def test_probabilities_are_checked(p):
    with pytest.raises(InputError, match="expected 0 <= p < 1"):
        Dropout(p, 0)
