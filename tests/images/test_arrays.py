"""Arrays of anybody's: checked once, made batches of, and trained on or refused in one message."""

import numpy as np
import pytest
import torch
import torch_xla
from mutations import at_most, make_irregular, mutated, no_hang, refusals

from config import MnistConfig
from images.array_files import load_arrays
from images.arrays import (
    ExampleRandom,
    ImageDataset,
    TrainBatches,
    eval_batches,
    num_steps_of,
    random_flip,
    random_shift,
)
from images.mnist import load_digits
from tpu_utils.base.errors import InputError
from tpu_utils.device import send


def test_an_epoch_covers_the_training_set_without_repeats_and_the_next_is_shuffled_anew():
    digits = load_digits()
    config = MnistConfig(global_batch_size=100, num_epochs=2)
    source = TrainBatches(digits, config)
    orders = [np.concatenate([source.ids(14 * epoch + step) for step in range(14)]) for epoch in range(2)]
    assert all(len(np.unique(order)) == 1400 for order in orders) and (orders[0] != orders[1]).any()
    assert (source.steps_per_epoch, source.num_steps) == (14, 28)
    batches = [source.batch(step) for step in range(28)]
    assert all(images.shape == (100, 8, 8) and labels.shape == (100,) for images, labels in batches)
    seen = np.concatenate([images for images, _ in batches[:14]])
    np.testing.assert_array_equal(seen, digits.train_images[orders[0]])


def test_batches_depend_on_seed_and_step_alone():
    digits = load_digits()
    config = MnistConfig(global_batch_size=64, max_shift=1, seed=3)
    whole = TrainBatches(digits, config)
    whole = [whole.batch(step) for step in range(30)]
    resumed = TrainBatches(digits, config)
    for step in (25, 26, 29, 3):  # in any order
        assert all(map(np.array_equal, whole[step], resumed.batch(step)))
    other, _ = TrainBatches(digits, MnistConfig(global_batch_size=64, max_shift=1, seed=4)).batch(0)
    assert not np.array_equal(other, whole[0][0])


def test_each_image_is_shifted_by_at_most_that_and_its_channels_together():
    images = np.zeros((500, 3, 9, 9), np.uint8)
    images[:, :, 4, 4] = [1, 2, 3]
    moved = random_shift(images, ExampleRandom([0], len(images)), 2)
    assert moved.dtype == np.uint8
    _, y, x = np.nonzero(moved[:, 0])
    assert set(y) == set(x) == {2, 3, 4, 5, 6} and len(y) == 500
    assert len(set(zip(y, x, strict=True))) == 25, "each by its own y and x"
    assert (moved[:, 1] == 2 * moved[:, 0]).all() and (moved[:, 2] == 3 * moved[:, 0]).all()
    assert (random_shift(images[:, 0], ExampleRandom([0], len(images)), 2) == moved[:, 0]).all(), "grey ones"


def test_what_would_not_move_with_the_images_is_refused():
    """Labels of pixels stayed where they were; channels last were mirrored from red to blue."""
    maps = np.zeros((500, 8, 8), np.int64)
    data = ImageDataset("maps", np.zeros((500, 8, 8), np.uint8), maps, np.zeros((9, 8, 8), np.uint8), maps[:9])
    still = TrainBatches(data, MnistConfig(global_batch_size=64, max_shift=0))
    assert still.batch(0)[1].shape == (64, 8, 8)
    brighter = TrainBatches(data, MnistConfig(global_batch_size=64), augment=lambda images, draw: images[:, ::-1] + 1)
    assert brighter.batch(0)[0].flags.c_contiguous
    for options in (dict(), dict(augment=random_flip)):
        with pytest.raises(InputError, match=r"labels have a value for each pixel.*--max_shift 0, and --no_flip"):
            TrainBatches(data, MnistConfig(global_batch_size=64, max_shift=1), **options)
    with pytest.raises(InputError, match="expected channels first"):
        random_flip(np.zeros((4, 8, 8, 3), np.uint8), ExampleRandom([0], 4))


def test_evaluation_counts_every_example_once():
    images, labels = np.arange(10 * 4).reshape(10, 2, 2).astype(np.uint8), np.arange(10).astype(np.uint8)
    batches = list(eval_batches(ImageDataset("ten", images, labels, images, labels), 4))
    assert all(len(part) == 4 for batch in batches for part in batch)
    masks = np.concatenate([mask for _, _, mask in batches]).astype(bool)
    assert masks.sum() == 10
    assert np.concatenate([target for _, target, _ in batches])[masks].tolist() == list(range(10))


def test_steps_of_a_run():
    assert num_steps_of(MnistConfig(global_batch_size=64, num_epochs=3), 200, "digits") == (3, 9)
    with pytest.raises(InputError, match=r"global_batch_size is 64 .* choose at most 63"):
        num_steps_of(MnistConfig(global_batch_size=64), 63, "digits")
    with pytest.raises(InputError, match="warmup_steps is 9 but the run has 9 steps"):
        num_steps_of(MnistConfig(global_batch_size=64, num_epochs=3, warmup_steps=9), 200, "digits")


# ---------------------------------------------------------------------------------------------------- what is refused
IMAGES, LABELS = np.zeros((6, 3, 8, 8), np.float32), np.arange(6) % 3


def a_set(images=IMAGES, labels=LABELS, test_images=IMAGES, test_labels=LABELS) -> ImageDataset:
    return ImageDataset("mine", images, labels, test_images, test_labels)


def with_value(array, place, value):
    changed = array.copy()
    changed[place] = value
    return changed


@pytest.mark.parametrize(
    "arrays, said",
    [
        (dict(images=IMAGES[:5]), "mine: train_images has 5 examples, its labels are 6; expected as many"),
        (dict(test_labels=LABELS[:2]), "mine: test_images has 6 examples, its labels are 2"),
        (dict(images=with_value(IMAGES, (4, 0, 1, 1), np.nan)), "train_images: example 4 has nan; expected finite"),
        (dict(images=IMAGES.astype(float) + 1e300, test_images=IMAGES.astype(float)), "example 0 has 1e\\+300"),
        (dict(labels=with_value(LABELS, 3, -1)), "train_labels: example 3 has -1; expected 0 to 2147483647: classes"),
        (dict(labels=LABELS + 2**31), "example 0 has 2147483648"),
        (dict(test_labels=LABELS * 0 - 100), "mine: test_labels are all -100, which counts neither in a loss nor"),
        (dict(labels=LABELS.astype(float)), r"labels are float32 \(\) in the training set, int32"),
        (dict(test_images=IMAGES[:, 0]), r"images are float32 \(3, 8, 8\) in the .* float32 \(8, 8\) in the test set"),
        (dict(test_images=IMAGES.astype(np.uint8)), r"images are float32 .* uint8 \(3, 8, 8\) in the test set"),
        (dict(images=np.zeros((6, 2**0), "int64") + 2**40, test_images=np.zeros((6, 1), "int64")), "1099511627776"),
        (dict(images=[[1.0, 2.0], [3.0]]), "mine: train_images is no array: .*; expected numbers"),
        (dict(images=torch.ones(6, 3, 8, 8, requires_grad=True)), "train_images is no array: Can't call numpy"),
        (dict(images=np.ma.masked_array(IMAGES, IMAGES == 1)), "train_images is a masked array; .* or fill them"),
        (dict(images=np.array(["a", "b"])), "train_images is of <U1; expected numbers"),
        (dict(images=np.array([None, {}])), "train_images is of object; expected numbers"),
        (dict(images=IMAGES * 1j), "train_images is of complex64"),
        (dict(images=np.arange(6)), r"train_images is \(6,\); expected the examples along the first axis"),
        (dict(test_images=IMAGES[:0], test_labels=LABELS[:0]), r"test_images is \(0, 3, 8, 8\); .* at least one"),
    ],
)
def test_arrays_that_cannot_be_trained_on_are_named(arrays, said):
    with pytest.raises(InputError, match=said):
        a_set(**arrays)


@pytest.mark.parametrize(
    "labels, expected",
    [
        (LABELS, 3),
        (LABELS.astype(float), 3),  # classes as floats
        (np.eye(3)[LABELS], 3),  # one-hot floats, and other probabilities
        (np.eye(3)[LABELS] * 0.5 + np.eye(3)[LABELS[::-1]] * 0.5, 3),
        (LABELS + 0.5, None),
        (LABELS - 1.0, None),
        (np.eye(3)[LABELS] * 2.0, None),  # several targets
    ],
)
def test_classes_of_labels_in_any_form(labels, expected):
    assert a_set(labels=labels, test_labels=labels).num_classes == expected


def test_anything_that_is_an_array_of_numbers_is_taken(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r", allow_pickle=False)
    for images in (IMAGES.tolist(), torch.from_numpy(IMAGES), IMAGES.astype(">f8"), mapped, IMAGES[:, :, ::-1]):
        data = a_set(images, LABELS.tolist(), images, torch.from_numpy(LABELS))
        batches = TrainBatches(data, MnistConfig(global_batch_size=4))
        batch, labels = batches.batch(0)
        eval_batch, eval_labels, _ = next(eval_batches(data, 8))
        assert batch.dtype == eval_batch.dtype == np.float32 and batch.shape == (4, 3, 8, 8)
        assert labels.dtype == eval_labels.dtype == np.int32 and eval_labels[:6].tolist() == LABELS.tolist()
        assert batch.flags.writeable and data.first(2)[0].flags.writeable and data.num_classes == 3


@pytest.mark.parametrize(
    "kind, as_sent",
    [(np.bool_, np.bool_), (np.uint8, np.uint8), (np.int8, np.int8)]
    + [(kind, np.int32) for kind in (np.uint16, np.int32, np.uint32, np.int64, np.uint64)]
    + [(np.float16, np.float16), (np.float64, np.float32)],
)
def test_every_kind_of_number_reaches_the_device_as_it_is(kind, as_sent):
    images = np.array([[0, 1], [1, 1], [0, 0], [1, 0]]).astype(kind)
    data = a_set(images, LABELS[:4], images, LABELS[:4])
    (batch, _), device = data.first(4), torch_xla.device()
    assert batch.dtype == as_sent
    assert send(batch, device, None)[0].float().cpu().tolist() == images.astype(float).tolist()


def test_targets_of_a_regression_stay_floats():
    data = a_set(labels=LABELS / 2, test_labels=LABELS / 2)
    _, targets = TrainBatches(data, MnistConfig(global_batch_size=6)).batch(0)
    assert data.num_classes is None and targets.dtype == np.float32 and set(targets) == {0.0, 0.5, 1.0}
    _, targets, mask = next(eval_batches(data, 8))
    assert targets.tolist() == [0, 0.5, 1, 0, 0.5, 1, 0, 0] and mask.sum() == 6


def test_a_class_without_an_example_is_said_and_a_large_label_takes_no_memory():
    assert a_set(labels=LABELS * 2).description.endswith("6 train, 6 test; no training example of class 1 and 1 more")
    assert "class 0 and 2147483646 more" in a_set(labels=LABELS * 0 + 2**31 - 1).description
    assert "no training example" not in a_set().description
    assert ImageDataset("images", IMAGES, LABELS, IMAGES, LABELS).num_examples == 6, "a name that arrays have too"


def test_a_fingerprint_is_of_the_training_set_and_above_it_of_the_test_set():
    found = [
        a_set(**{name: with_value(values, 2, 1)}).fingerprint()
        for name, values in dict(images=IMAGES, labels=LABELS, test_images=IMAGES, test_labels=LABELS).items()
    ]
    of_training, of_testing = (a_set().fingerprint() % 2**32, a_set().fingerprint() >> 32)
    assert [each % 2**32 == of_training for each in found] == [False, False, True, True]
    assert [each >> 32 == of_testing for each in found] == [True, True, False, False]


def test_of_an_array_beyond_the_limit_evenly_spaced_examples_are_read(monkeypatch):
    monkeypatch.setattr("images.arrays.LARGEST_READ", IMAGES.nbytes // 2)
    data = a_set(with_value(IMAGES, 3, np.nan))  # between two that are read
    assert data.fingerprint() == a_set(with_value(IMAGES, 5, 1.0)).fingerprint()
    assert data.fingerprint() != a_set(with_value(IMAGES, 4, 1.0)).fingerprint()
    with pytest.raises(InputError, match="example 4 has nan"):
        a_set(with_value(IMAGES, 4, np.nan))


# -------------------------------------------------------------------------------------------------------- augmentation
def test_half_of_the_images_are_mirrored_and_an_example_is_in_whichever_part_it_is():
    images = np.arange(64 * 3 * 2 * 4).reshape(64, 3, 2, 4)
    flipped = random_flip(images, ExampleRandom([5], 64))
    mirrored = (flipped != images).any((1, 2, 3))
    assert 20 < mirrored.sum() < 44 and (flipped[mirrored] == images[mirrored][..., ::-1]).all()
    parts = [random_flip(images[part::4], ExampleRandom([5], 64, part, 4)) for part in range(4)]
    assert (np.stack(parts, 1).reshape(images.shape) == flipped).all()


@pytest.mark.parametrize(
    "shape, max_shift, said",
    [
        ((3, 8, 8), 8, "max_shift is 8 but images are"),
        ((8, 8, 3), 1, "expected channels first; transpose"),
        ((40,), 1, r"expected \(H, W\) or \(C, H, W\)"),
    ],
)
def test_images_that_cannot_be_shifted_are_refused_before_the_first_step(shape, max_shift, said):
    images = np.zeros((6, *shape), np.uint8)
    with pytest.raises(InputError, match=said):
        TrainBatches(a_set(images, LABELS, images, LABELS), MnistConfig(global_batch_size=2, max_shift=max_shift))


def test_an_augmentation_that_changes_the_type_is_refused():
    with pytest.raises(InputError, match=r"augment made float64 \(2, 3, 8, 8\) of float32"):
        TrainBatches(a_set(), MnistConfig(global_batch_size=2), augment=lambda images, draw: images / np.float64(255))


# -------------------------------------------------------------------------------------------------------------- files
@pytest.fixture
def folder(tmp_path):
    for part in ("train", "test"):
        np.save(tmp_path / f"{part}_images.npy", IMAGES)
        np.save(tmp_path / f"{part}_labels.npy", LABELS)
    return tmp_path


def test_files_are_mapped_and_not_read(folder):
    big = np.lib.format.open_memmap(folder / "train_images.npy", "w+", np.uint8, (6, 3, 64, 2048))
    test = np.lib.format.open_memmap(folder / "test_images.npy", "w+", np.uint8, (6, 3, 64, 2048))
    big[5], size = 7, big.nbytes
    del big, test
    with at_most(size):  # two of these; the check of bytes needs a part at a time
        data = load_arrays("mine", folder)
        images, labels = TrainBatches(data, MnistConfig(global_batch_size=1)).batch(0)
    assert images.shape == (1, 3, 64, 2048) and labels.shape == (1,) and data.train_images[5, 2, 0, 0] == 7
    assert data.description == "mine, 3 x 64 x 2048: 6 train, 6 test"


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda path: path.unlink(), "test_labels.npy: no such file; expected an array written by np.save"),
        (lambda path: path.write_bytes(b"PK\3\4"), "test_labels.npy cannot be read"),
        (lambda path: np.save(path, np.array([{}, []], object), allow_pickle=True), "cannot be read: .*objects"),
        (lambda path: make_irregular(path, "FIFO"), "test_labels.npy is a FIFO"),
        (lambda path: path.write_bytes(path.read_bytes() * 2), "cannot be read: 176 bytes stand behind its array"),
    ],
)
def test_files_that_are_no_arrays_are_named(folder, damage, said):
    damage(folder / "test_labels.npy")
    with no_hang(), pytest.raises(InputError, match=said):
        load_arrays("mine", folder)


def test_no_damage_of_an_array_is_a_crash(folder):
    path = folder / "train_labels.npy"
    content = path.read_bytes()

    def read():
        assert load_arrays("mine", folder).train_labels.shape == (6,)

    damaged = [header + content[128:] for header in mutated(content[:128], 300)]
    assert 300 < refusals(path, [*damaged, *mutated(content[:128], 100)], read, "train") <= 400
