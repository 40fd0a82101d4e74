"""What a process has of a DTensor, for checkpoints."""

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor


class LocalShards:
    """A DTensor in the words of checkpoints: those of torch_xla's XLAShardedTensor."""

    class Shard(NamedTuple):
        data: torch.Tensor
        indices: tuple[slice, ...]
        replica_id: int

    def __init__(self, tensor: DTensor):
        self._local = tensor.detach().to_local()
        place, replica = [slice(0, n) for n in tensor.shape], 0
        grid = tensor.device_mesh
        for axis, placement in enumerate(tensor.placements):
            here, count = grid.get_local_rank(axis), grid.size(axis)
            if placement.is_shard():
                along = tensor.shape[placement.dim]
                each = -(-along // count)
                place[placement.dim] = slice(min(along, here * each), min(along, (here + 1) * each))
            else:
                replica = replica * count + here
        self.local_shards = [LocalShards.Shard(self._local.to("cpu", copy=True), tuple(place), replica)]

    def load_local_shards_(self, shards: list) -> None:
        self._local.copy_(shards[0].data)

    def put(self, value: torch.Tensor) -> None:
        """value: the whole tensor, on the host."""
        self._local.copy_(value[self.local_shards[0].indices])
