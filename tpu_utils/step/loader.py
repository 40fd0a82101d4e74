"""Batches on their way to the device, ahead of the step."""

import contextlib
import queue
import threading
from collections.abc import Iterable

import torch

from tpu_utils.base.clock import Goodput
from tpu_utils.device import BatchSharding, send, transfers_to_device


class DeviceLoader:
    """Sends batches to the device ahead of the step, in a thread, one transfer a batch, on a mesh one a tensor.

    torch_xla's MpDeviceLoader does the same, but an error of the reader ends its iteration as if the data were over
    (parallel_loader.py, _loader_worker: finally without except), and it holds the first batch back until a whole group
    of prefetched batches is read (_get_batch). Here the error reaches the training loop.

    batches: of host arrays, as send() takes them. goodput: gets the time the loop waits for data.
    """

    def __init__(
        self,
        batches: Iterable,
        device: torch.device,
        prefetch: int,
        goodput: Goodput,
        sharding: BatchSharding | None = None,
    ):
        self._batches, self._device, self._sharding, self._goodput = batches, device, sharding, goodput
        self._queue: queue.Queue = queue.Queue(maxsize=prefetch)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._sent = 0
        self._thread = threading.Thread(target=self._send, name="device loader", daemon=True)

    def _send(self) -> None:
        try:
            for batch in self._batches:
                with self._lock, torch.no_grad():
                    on_device = send(batch, self._device, self._sharding)
                    self._sent += len(on_device) if self._sharding else 1  # sharded tensors are sent one by one
                if not self._put(on_device):
                    return
            self._put(StopIteration())
        except Exception as error:  # whatever it is, __next__ raises it in the training loop
            self._put(error)

    def _put(self, item) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return True
        return False

    def __enter__(self) -> "DeviceLoader":
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._closed.set()  # and wait: a process that ends under a transfer aborts
        self._thread.join()

    def __iter__(self) -> "DeviceLoader":
        return self

    def __next__(self) -> list[torch.Tensor]:
        with self._goodput.phase("data_wait"):
            item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def uploads_beside_batches(self) -> int:
        """Transfers to the device so far that were not of a batch of this loader."""
        with self._lock:
            return transfers_to_device() - self._sent
