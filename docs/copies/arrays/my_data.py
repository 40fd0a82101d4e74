from dataclasses import dataclass

from config import ImageConfig
from images.array_files import load_arrays


@dataclass(frozen=True)
class MyConfig(ImageConfig):
    """My options: add fields, each with a type, a default and a sentence below it."""


def load_dataset(config: MyConfig):
    """train_images.npy, train_labels.npy, test_images.npy and test_labels.npy in --data_dir."""
    return load_arrays("mine", config.data_dir)
