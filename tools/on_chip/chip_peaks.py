"""How fast is this chip at one thing alone: a matrix product, a pass over
memory, a collective between all devices? peak() asks a process of its own.

Run:     python -m tools.on_chip.chip_peaks product --sizes 1024,4096
         python -m tools.on_chip.chip_peaks copy --sizes 256              # MiB
         python -m tools.on_chip.chip_peaks all-reduce --sizes 1,64       # MiB
Prints:  one JSON object {size: figures}; milliseconds of one program are the
         median of 5 rounds, with the lowest and the highest.

product: 8 to 64 bfloat16 products of n x n, one after the other, on one device;
more of smaller ones, so that the host keeps up. copy: one is added to each of
so many MiB of float32, on one device: each is read once and written once.
Collectives: of so many MiB of float32, over all devices; what is gathered,
reduced or exchanged is that large in all.
"""

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from tools.on_chip.bench import Bench, Cannot, last_object
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.hardware import GENERATIONS
from tpu_utils.options.environment import choose_device
from tpu_utils.options.tool_arguments import make_parser
from tpu_utils.options.train_config import TrainConfig

PEAKS = {  # {kind: (sizes on a TPU, sizes on a CPU)}
    "product": ("2048,4096,8192", "256"),
    "copy": ("256,1024", "16"),
    "all-reduce": ("1,16,256", "1"),
    "all-gather": ("1,16,256", "1"),
    "reduce-scatter": ("1,16,256", "1"),
    "collective-permute": ("1,16,256", "1"),
}
ROUNDS, MIB = 5, 2**20


def peak(bench: Bench, kind: str) -> dict[str, Any]:
    """{size: figures}, with the published peak or the lower bound beside them."""
    machine, (on_tpu, on_cpu) = bench.machine, PEAKS[kind]
    if kind not in ("product", "copy") and machine.num_devices == 1:
        raise Cannot("one device: nothing to exchange; on the CPU CPU_NUM_DEVICES=4 makes four")
    sizes = on_tpu if machine.device == "tpu" else on_cpu
    command = ["-m", "tools.on_chip.chip_peaks", kind, f"--sizes={sizes}", f"--device={machine.device}"]
    found, chip = last_object(bench.child(f"peak {kind}", command)), GENERATIONS.get(machine.chip)
    for size, figures in found.items():
        if chip and figures["host_ms"] > 0.7 * figures["ms"]:  # what was measured is the host
            continue
        if chip and kind == "product":
            figures["of_published"] = figures["tflops"] * chip.devices_per_chip / chip.bf16_tflops
        elif chip and kind == "copy":
            figures["of_published"] = figures["gb_per_s"] * chip.devices_per_chip / chip.memory_gb_per_s
        elif chip and chip.link_gb_per_s:
            figures["bound_ms"] = least_sent(kind, int(size), machine.num_devices) / chip.link_gb_per_s / 1e6
            if kind == "all-gather":  # libtpu 0.0.21 copies what was gathered: read and written once more
                figures["bound_ms"] += 2 * int(size) * MIB / chip.memory_gb_per_s / 1e6
    return found


def least_sent(kind: str, mib: int, devices: int) -> float:
    """Bytes that a device must send, as tpu_compiler.estimate.reading.read_collectives counts them."""
    shares = {"all-reduce": 2 * (devices - 1), "collective-permute": 1}
    return mib * MIB * shares.get(kind, devices - 1) / devices


def build(kind: str, size: int):
    """(compiled step, its input on the device, FLOPs of the step, bytes it reads and writes)."""
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    count, device = xr.global_runtime_device_count(), torch_xla.device()
    random = np.random.default_rng(0)
    if kind == "product":
        x = random.standard_normal((size, size), np.float32) / size**0.5  # so that a chain of them stays finite
        products = min(64, 8 * max(1, 4096 // size) ** 2)

        def step(x):
            y = x
            for _ in range(products):
                y = y @ x
            return y

        return torch_xla.compile(step), torch.from_numpy(x).bfloat16().to(device), products * 2 * size**3, None
    rows = size * MIB // 4 // 1024
    if kind == "copy":
        x = torch.from_numpy(random.standard_normal((rows, 1024), np.float32)).to(device)
        return torch_xla.compile(lambda x: x.add_(1)), x, None, 2 * size * MIB
    mesh = xs.Mesh(np.arange(count), (count,), ("all",))

    def step(x):
        if kind in ("all-reduce", "reduce-scatter"):  # each device has a summand of this size
            y, spec = x.sum(0), (None, None) if kind == "all-reduce" else ("all", None)
        elif kind == "all-gather":
            y, spec = x.flatten(0, 1), (None, None)
        else:
            y, spec = x.flip(0), ("all", None, None)  # the first device and the last change places, and so on
        xs.mark_sharding(y, mesh, spec)
        return y

    # all-gather and permutation: each device has a shard; all-reduce and reduce-scatter: each has a whole summand
    shape = (count, rows, 1024) if kind in ("all-reduce", "reduce-scatter") else (count, max(1, rows // count), 1024)
    x = torch.from_numpy(random.standard_normal(shape, np.float32)).to(device)
    xs.mark_sharding(x, mesh, ("all", None, None))
    torch_xla.sync()
    return torch_xla.compile(step), x, None, None


def time_step(step, x) -> dict[str, float]:
    """Milliseconds of one execution: many are dispatched, and waited for once. host_ms: CPU time of this thread for
    each; where it is as long, the host was measured and not the device."""
    import torch_xla.core.xla_model as xm

    def seconds(times: int) -> float:
        xm.wait_device_ops()
        start = time.perf_counter()
        for _ in range(times):
            result = step(x)
        xm.wait_device_ops()
        del result
        return (time.perf_counter() - start) / times

    began = time.perf_counter()
    result = step(x)  # compiles
    xm.wait_device_ops()
    compile_seconds = time.perf_counter() - began
    # all results may be in device memory at once until the host frees them; an update in place allocates none
    room = 200 if result is x else 2**31 // (result.numel() * result.element_size())
    times = max(2, min(200, room, int(0.2 / seconds(2))))
    cpu = time.thread_time()
    rounds = [seconds(times) * 1e3 for _ in range(ROUNDS)]
    host_ms = (time.thread_time() - cpu) / (ROUNDS * times) * 1e3
    figures = dict(ms=statistics.median(rounds), ms_low=min(rounds), ms_high=max(rounds), host_ms=host_ms)
    return figures | {"compile_seconds": compile_seconds}


def main() -> int:
    parser = make_parser("tools.on_chip.chip_peaks", __doc__)
    parser.add_argument("kind", choices=PEAKS)
    parser.add_argument("--sizes", required=True, help="product: n of n x n; others: MiB; separated by commas")
    parser.add_argument("--device", choices=("auto", "tpu", "cpu"), default="auto")
    options = parser.parse_args()
    if not all(size.isdecimal() and int(size) for size in options.sizes.split(",")):
        raise InputError(f"sizes is {options.sizes}; expected whole numbers above 0 such as 1024,4096")
    sizes = [int(size) for size in options.sizes.split(",")]
    choose_device(TrainConfig(device=options.device))
    import torch_xla.runtime as xr

    if options.kind not in ("product", "copy"):
        if xr.global_runtime_device_count() == 1:
            raise InputError(f"{options.kind} needs several devices; found one")
        xr.use_spmd()
    found = {}
    for size in sizes:
        step, x, flops, moved = build(options.kind, size)
        figures = found[str(size)] = time_step(step, x)
        if flops:
            figures["tflops"] = flops / figures["ms"] / 1e9
        if moved:
            figures["gb_per_s"] = moved / figures["ms"] / 1e6
        del step, x
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, answers=True))
