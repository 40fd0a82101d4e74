"""Examples that are read one by one, by worker processes, when arrays of all of them would not fit or do not exist.

Of a torch.utils.data.Dataset, of a DataLoader, of Hugging Face's datasets, of anything with len() and [i]:

    dataset = ExampleDataset("flowers", train, test, num_classes=5, read=to_arrays)  # in place of load_dataset(config)
    batches = ExampleBatches(dataset, config)                                        # in place of TrainBatches

read(example) returns (image, label). It runs in processes of their own, so it stands at the top of a module, and what
the data set holds must be able to travel there (no open file, no lambda). The processes talk through local pipes alone.
"""

import multiprocessing
import random
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from config import ImageConfig
from images.arrays import TrainBatches, as_numbers, check_pair, sent
from tpu_utils.base.errors import InputError, TrainingError, first_line

STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
SECONDS_TO_SAVE = 60
SAMPLES = 64  # examples that a fingerprint reads


def as_pair(example: Any) -> tuple[Any, Any]:
    """(image, label) of an example that is such a pair, as torchvision's are. Of a PIL image: channels first."""
    if not isinstance(example, tuple | list) or len(example) != 2:
        found = f"a dict of {sorted(example)}" if isinstance(example, dict) else type(example).__name__
        raise InputError(f"an example is {found}; expected (image, label); give read=, a function that returns them")
    image, label = example
    if hasattr(image, "getbands"):  # a PIL image
        image = np.asarray(image.convert("RGB") if image.mode == "P" else image)  # else numbers of a palette's colours
        image = image if image.ndim == 2 else image.transpose(2, 0, 1)
    return image, label


class ExampleDataset:
    """An ImageDataset to the scripts, but examples are read one by one. The test set is kept in memory, once read.

    train, test: examples, or the DataLoader that has them. Of a DataLoader its data set and its number of workers are
    taken; batches, order and resuming are the run's own, so whatever would change them is refused.
    num_classes: of labels that are classes 0, 1, ...; None for targets of a regression, floats.
    """

    best_accuracy = loss_floor = None

    def __init__(
        self,
        name: str,
        train: Sequence | DataLoader,
        test: Sequence | DataLoader,
        num_classes: int | None,
        read: Callable[[Any], tuple[Any, Any]] = as_pair,
        num_workers: int = 2,
    ):
        """Raises InputError for examples without a length or a place, and for a DataLoader that cannot be resumed."""
        if isinstance(train, DataLoader) and train.num_workers:
            num_workers = train.num_workers
        self.name = name
        self.num_classes = num_classes
        self.num_workers = num_workers
        self.train, self.test = (
            Examples(f"{name}: {part}", examples_of(f"{name}: {part}", examples), read, num_classes)
            for part, examples in (("train", train), ("test", test))
        )
        if num_workers < 1:
            raise InputError(f"num_workers is {num_workers}; expected 1 or more: processes that read ahead of the step")
        self.first(1)

    @property
    def num_examples(self) -> int:
        return len(self.train)

    @property
    def image_size(self) -> int:
        """The last axis of an image."""
        return self.first(1)[0].shape[-1]

    @property
    def description(self) -> str:
        image = self.first(1)[0][0]
        shape = " x ".join(map(str, image.shape))
        return (
            f"{self.name}, {shape}{'' if image.dtype == np.uint8 else f' {image.dtype}'}: {len(self.train)} train, "
            f"{len(self.test)} test; read by {self.num_workers} processes"
        )

    def fingerprint(self) -> int:
        """CRC-32 of the number of training examples and of SAMPLES of them, evenly spaced; above it of the test set."""
        return self.test.fingerprint() << 32 | self.train.fingerprint()

    def first(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The first training examples, as a batch has them."""
        return self.train.alone([(i, i) for i in range(min(count, len(self.train)))])

    @cached_property
    def _test_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        keys = [(i, i) for i in range(len(self.test))]
        keys = [keys[start : start + 64] for start in range(0, len(keys), 64)]
        # copied as they come: each would keep files open, and its share of /dev/shm
        parts = [tuple(map(np.array, part)) for part in read_by_workers(self.test, keys, self.num_workers)]
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    @property
    def test_images(self) -> np.ndarray:
        return self._test_arrays[0]

    @property
    def test_labels(self) -> np.ndarray:
        return self._test_arrays[1]


def examples_of(name: str, examples: Sequence | DataLoader) -> Sequence:
    """The data set behind a DataLoader, or the examples themselves. Raises InputError for what cannot be resumed."""
    if isinstance(examples, DataLoader):
        loader, examples = examples, examples.dataset
        odd = None
        if type(loader.sampler) not in (RandomSampler, SequentialSampler) and not isinstance(examples, IterableDataset):
            odd = f"a sampler of its own, {type(loader.sampler).__name__}"
        elif loader.batch_size is None:
            odd = "batches of its own, batch_size None"
        elif loader.collate_fn is not default_collate:
            odd = "a collate_fn of its own"
        if odd:
            raise InputError(
                f"{name}: the DataLoader has {odd}; expected its data set alone to decide what an example is: order "
                "and batches are pure functions of seed and step here, or a run could not be resumed; put the work on "
                "one example into read="
            )
    if isinstance(examples, IterableDataset) or not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        raise InputError(
            f"{name} is {type(examples).__name__}, which has no length or no [i]; expected both: a stream cannot be "
            "resumed at a step; use the map-style form (of Hugging Face's datasets: streaming=False), or write the "
            "examples to an array that is memory-mapped"
        )
    if len(examples) == 0:
        raise InputError(f"{name} has no example; expected at least one")
    return examples


class Examples(torch.utils.data.Dataset):
    """[(i, seed)]: example i as arrays, read after torch's, NumPy's and Python's generators are seeded with seed."""

    def __init__(self, name: str, examples: Sequence, read: Callable, num_classes: int | None):
        self.name = name
        self._examples = examples
        self._read = read
        self._num_classes = num_classes

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, np.ndarray, np.ndarray]:
        index, seed = int(key[0]), int(key[1])
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        image, label = self._read(self._examples[index])
        return index, np.asarray(image), np.asarray(label)

    def fingerprint(self) -> int:
        places = np.unique(np.linspace(0, len(self) - 1, SAMPLES).astype(int))
        content = [zlib.crc32(np.ascontiguousarray(part)) for i in places for part in self.alone([(i, i)])]
        return zlib.crc32(np.array([len(self), *content], np.uint64))

    def alone(self, keys: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Read in this process, whose generators are restored afterwards."""
        from tpu_utils.trial.unsaved import drawing_from  # not in a worker, which needs no device

        with drawing_from(0):
            return self.together([self[key] for key in keys])

    def together(self, rows: list[tuple[int, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """A batch, checked: InputError names the first example that does not fit."""
        number, first, first_label = rows[0]
        for index, image, label in rows:
            for what, value, like in (("image", image, first), ("label", label, first_label)):
                if (value.shape, value.dtype) != (like.shape, like.dtype):
                    raise InputError(
                        f"{self.name}: the {what} of example {index} is {value.dtype} {value.shape}, that of example "
                        f"{number} {like.dtype} {like.shape}; expected all alike: resize, crop or pad them in read="
                    )
        images = as_numbers(f"{self.name} images", np.stack([image for _, image, _ in rows]))
        labels = as_numbers(f"{self.name} labels", np.stack([label for _, _, label in rows]))
        if self._num_classes is not None and labels.dtype.kind == "f":
            raise InputError(f"{self.name}: labels are {labels.dtype}; expected integers, or num_classes None")
        try:
            check_pair(self.name, images, labels)
        except InputError as error:  # it names the place in the batch: find the example
            if len(rows) == 1:
                raise InputError(str(error).replace("example 0 has", f"example {number} has")) from None
            for row in rows:
                self.together([row])
            raise
        if self._num_classes is not None and labels.max() >= self._num_classes:
            index = rows[int(np.argwhere(labels >= self._num_classes)[0, 0])][0]
            raise InputError(
                f"{self.name}: the label of example {index} is {labels.max()}; expected 0 to {self._num_classes - 1}"
            )
        return sent(images), sent(labels, labels=True)

    def in_worker(self, rows) -> tuple[torch.Tensor, torch.Tensor] | str:
        """A batch in shared memory; or a message: a worker's exception would arrive with a traceback for its text."""
        try:
            return tuple(map(torch.from_numpy, self.together(rows)))
        except InputError as error:
            return str(error)


def outlive_a_stop(_worker: int) -> None:
    """In a worker: stop signals are for the run. SIGTERM, sent to a hung worker too, ends it after SECONDS_TO_SAVE."""
    for number in STOPS - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(SECONDS_TO_SAVE))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def read_by_workers(examples: Examples, keys, num_workers: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches in the order of keys, lists of (index, seed), read ahead by processes that know nothing of the device.

    They are forks of a server process, which has imported the script and this file; a fork of a process with a device
    and its threads may hang. Ctrl-C, and a stop of the whole process group, reach them too: they go on reading until
    the run has saved and ends.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])
    resource_tracker.ensure_running()  # it unblocks signals when it starts (multiprocessing/resource_tracker.py)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # the fork server inherits it: workers end with the server
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    loader = DataLoader(
        examples,
        batch_sampler=keys,
        num_workers=num_workers,
        collate_fn=examples.in_worker,
        worker_init_fn=outlive_a_stop,
        multiprocessing_context=context,
        generator=torch.Generator(),  # else its start draws from the run's generator
    )
    try:
        context.Lock()  # fails as the loader's own would, which leave a traceback of its __del__ behind
        for batch in loader:
            if isinstance(batch, str):
                raise InputError(batch)
            yield tuple(part.numpy() for part in batch)
    except (RuntimeError, OSError) as error:
        if "DataLoader worker" not in str(error) and not getattr(error, "errno", None):  # of read(), in a worker
            raise
        room = "is missing"
        if Path("/dev/shm").is_dir():
            shared = shutil.disk_usage("/dev/shm")
            room = f"has {shared.total >> 20:,} MiB, {shared.free >> 20:,} free"
        raise TrainingError(
            f"a process that reads {examples.name} has died: {first_line(error)}; batches go through /dev/shm, which "
            f"{room}; expected room for {2 * num_workers} or more; enlarge it (docker run --shm-size=16G; mount -o "
            "remount,size=16G /dev/shm), lower num_workers or the batch, or look in dmesg for what ended the process"
        ) from error


class ExampleBatches(TrainBatches):
    """TrainBatches of an ExampleDataset: the same order, read ahead by worker processes.

    A random augmentation inside the data set is drawn from generators seeded by (seed, epoch, example), so a resumed
    run reads the same. One that keeps a generator or a counter of its own cannot be resumed exactly.
    """

    def __init__(self, dataset: ExampleDataset, config: ImageConfig, *arguments, **options):
        super().__init__(dataset, config, *arguments, **options)
        self.close()

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Fast for consecutive indices; any other index starts the workers again."""
        if index != self._next:
            keys = (self.keys(later) for later in range(index, self.num_steps))
            self._batches = read_by_workers(self.dataset.train, keys, self.dataset.num_workers)
        self._next = index + 1
        images, labels = next(self._batches)
        return self.augmented(index, images), labels

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A batch made of its first examples, read here: whether it is the same when read twice."""
        images, labels = self.dataset.train.alone(self.keys(index)[:4])
        return self.augmented(index, np.resize(images, (len(self.ids(index)), *images.shape[1:]))), labels

    def close(self) -> None:
        """The end of the workers: their iterator is dropped."""
        self._next, self._batches = -1, iter(())

    def keys(self, index: int) -> list[tuple[int, int]]:
        """(example, seed of what is drawn for it) for each example of a batch."""
        draw = [self.config.seed, index // self.steps_per_epoch, 2]
        return [(int(i), int(np.random.SeedSequence([*draw, i]).generate_state(1)[0])) for i in self.ids(index)]
