"""Arrays in files of NumPy. Imports no torch."""

from pathlib import Path

import numpy as np

from images.arrays import ImageDataset
from tpu_utils.base.errors import InputError, first_line
from tpu_utils.base.files import open_regular


def load_arrays(name: str, data_dir: str | Path) -> ImageDataset:
    """train_images.npy, train_labels.npy, test_images.npy and test_labels.npy of a folder, as np.save writes them.

    The files are mapped, not read: they may be larger than memory. Raises InputError for one that is no such file.
    """
    arrays = []
    for field in ("train_images", "train_labels", "test_images", "test_labels"):
        path = Path(data_dir) / f"{field}.npy"
        expected = "an array written by np.save, under --data_dir"
        open_regular(path, expected).close()
        try:
            arrays.append(np.lib.format.open_memmap(path, mode="r"))
            if (more := path.stat().st_size - arrays[-1].offset - arrays[-1].nbytes) > 0:
                raise ValueError(f"{more} bytes stand behind its array")
        except Exception as error:  # whatever numpy's parser of headers raises
            raise InputError(f"{path} cannot be read: {first_line(error)}; expected {expected}") from error
    return ImageDataset(name, *arrays)
