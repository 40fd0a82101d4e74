"""Batches on their way to the device."""

import pytest
import torch
import torch_xla

from tpu_utils.base.errors import InputError
from tpu_utils.base.process import Goodput
from tpu_utils.device import DeviceLoader


def loader_of(count, error=None) -> DeviceLoader:
    """Sends batches 0, 1, 2, ... and then raises the error, if there is one."""

    def batches():
        for number in range(count):
            yield torch.full((3,), float(number)), torch.full((2,), number)
        if error:
            raise error

    return DeviceLoader(batches(), torch_xla.device(), 2, Goodput())


def test_loader_keeps_order_and_counts_other_uploads():
    with loader_of(7) as loader:
        before = loader.uploads_beside_batches()
        assert [int(a[0]) for a, _ in loader] == list(range(7))
        assert loader.uploads_beside_batches() == before
        torch.ones(3).to(torch_xla.device())
        assert loader.uploads_beside_batches() == before + 1


def test_an_error_of_the_reader_reaches_the_loop_after_the_batches_before_it():
    seen = []
    with pytest.raises(InputError, match="shard 3"), loader_of(3, InputError("shard 3")) as loader:
        for a, _ in loader:
            seen.append(int(a[0]))
    assert seen == [0, 1, 2]


def test_leaving_early_ends_the_thread():
    with loader_of(1000) as loader:
        next(loader)
    assert not loader._thread.is_alive()
