"""What keeps a run from going wrong, and what stops it early on purpose."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from tpu_utils.checkpoint import write_atomically


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The norm over all gradients, () float32, inside the compiled step. Not finite if one of their values is not."""
    return torch.stack([(p.grad.float() * p.grad.float()).sum() for p in parameters]).sum().sqrt()


def step_if(finite: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """optimizer.step(), undone inside the graph unless finite, a () bool tensor on the device.

    Parameters and optimizer state, its step count included, then keep every bit: weight decay and momentum too.
    """
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [value for parameter in tensors for value in optimizer.state[parameter].values()]
    with torch.no_grad():
        before = [tensor.clone() for tensor in tensors]
        optimizer.step()
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(finite, tensor, old))


class StopRequest:
    """The first SIGTERM or SIGINT asks for a checkpoint at the next step boundary; a second one stops at once.

    relay: a file through which a process that only started the replicas passes the signal on to them. It is idempotent
    where forwarding is not: a terminal, or systemd, signals parent and children alike.
    """

    def __init__(self, relay: Path | None = None):
        self._signal: int | None = None
        self._relay = relay
        if threading.current_thread() is threading.main_thread():  # torch_xla.launch runs replicas in other threads
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._request)

    def _request(self, number: int, frame) -> None:
        if self._signal and self._relay:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + number)
        self._signal = number
        if self._relay:
            write_atomically(self._relay, str(number).encode())
        else:
            signal.signal(number, signal.SIG_DFL)

    @property
    def signal(self) -> int | None:
        """Number of the signal that asked to stop, or None."""
        if self._signal is None and self._relay and self._relay.exists():
            self._signal = int(self._relay.read_text())
        return self._signal

    @property
    def exit_code(self) -> int:
        """143 after SIGTERM, 130 after SIGINT, 0 without a signal."""
        return 128 + self.signal if self.signal else 0
