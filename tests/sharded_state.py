"""A state sharded over a mesh of virtual devices, saved by one process and loaded by others.

test_checkpoint_sharded.py starts it:

python sharded_state.py ACTION FOLDER DEVICES MESH      # MESH: sizes of the axes (data, fsdp, tensor), 2x2x2

ACTION: save, load, save_a_shard_less, or save_as_I_of_N_at_PORT and load_as_I_of_N_at_PORT: XLA's CPU client knows no
other process, so each of N processes holds the whole state and gives away what the others would have.
"""

import os
import sys
from pathlib import Path

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=sys.argv[3])
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from run_files import reader_of

import tpu_utils.checkpoint.state
from tpu_utils.base.errors import run_script
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.device import graphs_compiled
from tpu_utils.remote.meeting import wait_for_peers

BATCH = ("data", "fsdp")
SPECS = {  # shape, type, sharded over: all axes, some with equal copies on the others, unevenly, nothing
    "all": ((16, 8), torch.float32, (BATCH, "tensor")),
    "some": ((16, 8), torch.bfloat16, ("fsdp", None)),
    "other": ((8, 16), torch.float32, (None, "tensor")),
    "uneven": ((5, 3), torch.float32, (BATCH, None)),
    "copies": ((7,), torch.float32, (None,)),
    "free": ((3,), torch.int32, None),
}


def values() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: (100 * torch.rand(shape, generator=random)).to(dtype) for name, (shape, dtype, _) in SPECS.items()}


def placed(tensors: dict[str, torch.Tensor], sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    device = torch_xla.device()
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    if xr.is_spmd():
        mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), sizes, ("data", "fsdp", "tensor"))
        for name, tensor in tensors.items():
            if SPECS[name][2] is not None:
                xs.mark_sharding(tensor, mesh, SPECS[name][2])
    return tensors


def save(checkpoints: Checkpoints, sizes: tuple[int, ...], index: int = 0, count: int = 1) -> None:
    model, optimizer = placed(values(), sizes), placed(values(), sizes)
    graphs = graphs_compiled()
    copy = checkpoints.copy(7, {"model": model, "optimizer": [optimizer]})
    print(f"graphs {graphs_compiled() - graphs}")
    for tensor in model.values():  # training goes on
        tensor.add_(1)
    torch_xla.sync()
    for number, (path, shards) in enumerate(copy.shards.items()):
        copy.shards[path] = {at: shard for i, (at, shard) in enumerate(shards.items()) if (i + number) % count == index}
    checkpoints.write(copy)
    checkpoints.wait()


def load(checkpoints: Checkpoints, sizes: tuple[int, ...]) -> None:
    saved = reader_of(checkpoints).load_for_resume("must")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in values().items()}
    targets = {"model": placed(zeros, sizes), "optimizer": [placed(zeros, sizes)]}
    before = {name: torch_xla._XLAC._get_xla_sharding_spec(t) for name, t in targets["model"].items()}
    graphs = graphs_compiled()
    reader_of(checkpoints).restore(saved, targets)
    torch_xla.sync()
    print(f"graphs {graphs_compiled() - graphs}")
    for tensors in (targets["model"], targets["optimizer"][0]):
        for name, tensor in tensors.items():
            assert torch_xla._XLAC._get_xla_sharding_spec(tensor) == before[name], f"{name} lost its place"
            found, expected = tensor.cpu(), values()[name]
            assert found.dtype == expected.dtype and torch.equal(found, expected), f"{name}: {found}, {expected}"
    print("identical")


def main() -> int:
    action, folder, num_devices, mesh = sys.argv[1:]
    if int(num_devices) > 1:
        xr.use_spmd()
    sizes = tuple(int(size) for size in mesh.split("x"))
    if action == "load":
        load(Checkpoints(Path(folder), 3), sizes)
    elif "_as_" in action:
        index, count, port = (int(word) for word in action.split("_") if word.isdecimal())
        checkpoints = Checkpoints(Path(folder), 3, wait_for_peers(index, ["localhost"] * count, 600, port))
        save(checkpoints, sizes, index, count) if action.startswith("save") else load(checkpoints, sizes)
    else:
        if action == "save_a_shard_less":
            tpu_utils.checkpoint.sharded_tensors._is_mine = lambda shard: (
                shard.replica_id == 0 and shard.indices[0].start == 0
            )
        save(Checkpoints(Path(folder), 3), sizes)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
