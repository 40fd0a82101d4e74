"""What a model misreads: counted and drawn."""

import numpy as np
import pytest
import torch
from small_models import Flat

from images.arrays import ImageDataset
from images.misread import Misread, as_bytes, find_misread, misread_figure
from tpu_utils.base.errors import InputError


def misread_of(images, labels=None):
    """(what is misread, labels, classes as the model reads them); about three of four labels are not what it reads."""
    torch.manual_seed(0)
    model = Flat(int(np.prod(images.shape[1:])))
    model.eval()
    with torch.no_grad():
        read = model(torch.tensor(images)).argmax(1).numpy()
    labels = np.arange(len(images)) % 4 if labels is None else labels
    return find_misread(model, ImageDataset("mine", images, labels, images, labels), 7), labels, read


@pytest.mark.parametrize(
    "shape, dtype",
    [
        *(((6, 6), dtype) for dtype in (np.uint8, np.int32)),
        *(((3, 4, 6), dtype) for dtype in (np.uint8, np.float16, np.bool_)),
        ((1, 6, 6), np.float32),
    ],
)
def test_grey_and_colour_images_are_drawn_whatever_their_numbers(shape, dtype):
    values = np.random.default_rng(0).integers(0, 2 if dtype == np.bool_ else 200, (8, *shape))
    images = (values / 100 - 1 if np.dtype(dtype).kind == "f" else values).astype(dtype)
    found, labels, read = misread_of(images)
    wrong = np.flatnonzero(read != labels)
    assert (found.predictions == read[wrong]).all() and (found.labels == labels[wrong]).all()
    drawn = found.images.reshape(len(wrong), *shape).astype(float)
    low, high = (0, 255) if dtype == np.uint8 else (images[wrong].min(), images[wrong].max())
    expected = (images[wrong].astype(float) - low) / (float(high) - low) * 255
    np.testing.assert_allclose(drawn, expected, atol=0.6)
    figure = misread_figure(found)
    assert f"{len(wrong)} of 8 test images misread after step 7" in figure.get_suptitle()
    assert len([axes for axes in figure.axes if axes.images]) == len(wrong)


def test_sequences_are_no_pictures():
    sequences = np.random.default_rng(0).normal(size=(40, 7, 4)).astype(np.float32)
    assert as_bytes(sequences) is None and misread_of(sequences)[0].images is None
    assert as_bytes(np.abs(sequences) / np.abs(sequences).max()).shape == sequences.shape, "grey, from 0 to 1"


@pytest.mark.parametrize("shape", [(6,), (2, 6, 6), (6, 6, 3), (2, 3, 4, 4), (3, 2, 513)])
def test_images_of_another_shape_are_counted(shape):
    images = np.random.default_rng(0).integers(0, 200, (40, *shape)).astype(np.uint8)
    found, labels, read = misread_of(images)
    assert found.num_misread == (read != labels).sum() and found.num_tested == 40 and found.images is None


def test_a_model_that_misreads_nothing_draws_nothing_and_equal_pixels_are_drawn():
    images = np.random.default_rng(0).random((20, 3, 6, 6)).astype(np.float32)
    _, _, read = misread_of(images)
    found, _, _ = misread_of(images, read)
    assert found.num_misread == 0 and len(found.images) == 0
    assert not [axes for axes in misread_figure(found).axes if axes.images]
    assert (as_bytes(np.full((2, 6, 6), 0.5)) == 0).all()


@pytest.mark.parametrize("labels", [np.linspace(0, 1, 40), np.zeros((40, 1), int)])
def test_where_labels_are_no_classes_nothing_is_counted(labels):
    images = np.zeros((40, 3, 6, 6), np.float32)
    with pytest.raises(InputError, match="expected a class each"):
        find_misread(Flat(108), ImageDataset("mine", images, labels, images, labels), 7)


def test_misread_digits_carry_label_and_prediction():
    images = np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8)
    figure = misread_figure(Misread(images, np.array([1, 2, 3]), np.array([7, 8, 9]), 5, 360, 40))
    titles = [axes.get_title() for axes in figure.axes if axes.images]
    assert titles == ["1 -> 7", "2 -> 8", "3 -> 9"]
    np.testing.assert_array_equal(figure.axes[1].images[0].get_array(), images[1])
    assert "5 of 360 test images misread after step 40, the first 3 of them" in figure.get_suptitle()
