"""Batches on their way to the device."""

import pytest
import torch
import torch_xla

from tpu_utils.base.errors import InputError
from tpu_utils.base.process import Goodput
from tpu_utils.device import DeviceLoader


@pytest.fixture(scope="module")
def device():
    return torch_xla.device()


class Reader:
    """Batches 0, 1, 2, ... and an error at the end, if there is one."""

    def __init__(self, count, error=None):
        self.count, self.error = count, error

    def __iter__(self):
        for number in range(self.count):
            yield torch.full((3,), float(number)), torch.full((2,), number)
        if self.error:
            raise self.error


def test_loader_keeps_order_and_counts_other_uploads(device):
    with DeviceLoader(Reader(7), device, 2, Goodput()) as loader:
        before = loader.uploads_beside_batches()
        assert [int(a[0]) for a, _ in loader] == list(range(7))
        assert loader.uploads_beside_batches() == before
        torch.ones(3).to(device)
        assert loader.uploads_beside_batches() == before + 1


def test_an_error_of_the_reader_reaches_the_loop_after_the_batches_before_it(device):
    seen = []
    with (
        pytest.raises(InputError, match="shard 3"),
        DeviceLoader(Reader(3, InputError("shard 3")), device, 2, Goodput()) as loader,
    ):
        for a, _ in loader:
            seen.append(int(a[0]))
    assert seen == [0, 1, 2]


def test_leaving_early_ends_the_thread(device):
    with DeviceLoader(Reader(1000), device, 2, Goodput()) as loader:
        next(loader)
    assert not loader._thread.is_alive()
