"""What a checkpoint costs: writing, reading, and how long the step loop stands still for it.

Run:     python benchmarks/checkpoint_speed.py                       # 50 and 500 MB, 5 repeats, to the folder runs/
         python benchmarks/checkpoint_speed.py --megabytes 50 --repeats 9 --folder /mnt/disk --devices 8

The state is float32 on the XLA device, in 16 or so many --tensors. With --devices 8 it is sharded over 8 virtual CPU
devices, saved in shards, and restored to them. The disk's own speed is that of the same bytes in one write and fsync.
Ours is all of Checkpoints: the space check, the copy to host memory, safetensors and index, fsync, CRC-32, marker,
removing the oldest; reading is the check of all bytes, and then every tensor on its device again (restore). The bare
library writes and reads one file of safetensors, without fsync or CRC-32. Every figure is a median; the ways take
turns, because a disk is not equally fast all the time. What is read comes from the page cache, for all alike.
"""

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ.setdefault("PJRT_DEVICE", "CPU")

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from safetensors.torch import load_file, save_file

from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.loading import CheckpointReader


def on_device(values: int, tensors: int, devices: int) -> dict[str, torch.Tensor]:
    rows = values // tensors // 512 // devices * devices
    state = {f"tensor_{i}": torch.randn(rows, 512).to(torch_xla.device()) for i in range(tensors)}
    if devices > 1:
        mesh = xs.Mesh(np.arange(devices), (devices,), ("fsdp",))
        for tensor in state.values():
            xs.mark_sharding(tensor, mesh, ("fsdp", None))
    torch_xla.sync()
    return state


def seconds(function, *arguments) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def restore(reader: CheckpointReader, saved, state: dict[str, torch.Tensor]) -> None:
    reader.restore(saved, {"model": state})
    torch_xla.sync(wait=True)


def raw_write(path: Path, content: memoryview) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def measure(megabytes: int, tensors: int, repeats: int, devices: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of every way, one for each repeat."""
    state = on_device(megabytes * 10**6 // 4, tensors, devices)
    content = memoryview(np.random.default_rng(0).bytes(megabytes * 10**6))
    plain = folder / "plain.safetensors"
    ways = "raw write + fsync|bare write|bare read|write|check|restore|blocking, bare|blocking, ours".split("|")
    found = {name: [] for name in ways}
    checkpoints, reader = Checkpoints(folder / "checkpoints", 2), CheckpointReader(folder / "checkpoints")
    for repeat in range(repeats + 1):  # the first one warms up
        row = {"raw write + fsync": seconds(raw_write, folder / "raw", content)}
        started = time.perf_counter()
        host = {name: tensor.cpu() for name, tensor in state.items()}
        row["bare write"] = seconds(save_file, host, plain)
        row["blocking, bare"] = time.perf_counter() - started
        del host
        row["bare read"] = seconds(lambda: [tensor.clone() for tensor in load_file(plain).values()])
        started = time.perf_counter()
        copy = checkpoints.copy(repeat, {"model": state})
        row["blocking, ours"] = time.perf_counter() - started
        started = time.perf_counter()
        checkpoints.write(copy)
        checkpoints.wait()
        row["write"] = time.perf_counter() - started
        started = time.perf_counter()
        saved = reader.load_for_resume("must")
        row["check"] = time.perf_counter() - started
        row["restore"] = seconds(restore, reader, saved, state)
        for name, value in row.items():
            found[name] += [value] if repeat else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    options = parser.parse_args()
    if options.devices > 1:
        os.environ["CPU_NUM_DEVICES"] = str(options.devices)
        xr.use_spmd()
    options.folder.mkdir(parents=True, exist_ok=True)
    versions = f"torch {torch.__version__}, torch_xla {torch_xla.__version__}, Python {platform.python_version()}"
    machine = f"{xr.device_type()}, {options.devices} devices, {os.cpu_count()} cores"
    print(f"{machine}, {versions}; {options.repeats} repeats")
    for megabytes in options.megabytes:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            found = measure(megabytes, options.tensors, options.repeats, options.devices, folder)
        finally:
            shutil.rmtree(folder)
        print(f"{megabytes} MB" + " " * 20 + "MB/s   (slowest, fastest)      seconds")
        for name, values in found.items():
            middle, low, high = (megabytes / s for s in (statistics.median(values), max(values), min(values)))
            print(f"  {name:22} {middle:7.0f}   ({low:.0f}, {high:.0f}){'':12} {statistics.median(values):.3f}")


if __name__ == "__main__":
    main()
