"""The processes of one run, as a run knows them. Imports no torch.

Peers is a run of one process. LinkedPeers of remote/meeting.py is a run of several, which must agree on some things.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Peers:
    """The processes of a run, and what they must agree on. In this class there is one process.

    index: of this process. count: of all. All processes make the same calls in the same order.
    """

    index, count = 0, 1

    def with_own_links(self) -> "Peers":
        """The same processes over new connections, for a thread: on shared ones messages of two threads would mix.

        All processes must call it.
        """
        return self

    def patient(self) -> contextlib.AbstractContextManager:
        """Allow more time to the calls inside: another process moves a checkpoint over the network or a slow disk."""
        return contextlib.nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """All-gather on the hosts: the JSON values that the processes gave, in the order of their indices."""
        return [value]

    def largest(self, value: int) -> int:
        """The largest value that any process gave."""
        return value

    def from_first(self, function: Callable[[], Any]) -> Any:
        """Broadcast: only the first process calls function; all return its result, of JSON, or raise its exception."""
        return function()

    def tensor_from_first(self, tensor: "torch.Tensor") -> None:
        """Broadcast the first process's values into this host tensor, contiguous, of one shape and type on all."""
