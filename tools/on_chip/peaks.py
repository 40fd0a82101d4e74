"""How near the chip comes to its published peaks: what chip_peaks.py measures, over the table of generations."""

from typing import Any

from tools.on_chip.bench import Bench, Cannot, last_object
from tpu_utils.base.hardware import GENERATIONS

PEAKS = {  # {kind of chip_peaks.py: (sizes on a TPU, sizes on a CPU)}
    "product": ("2048,4096,8192", "256"),
    "copy": ("256,1024", "16"),
    "all-reduce": ("1,16,256", "1"),
    "all-gather": ("1,16,256", "1"),
    "reduce-scatter": ("1,16,256", "1"),
    "collective-permute": ("1,16,256", "1"),
}


def peak(bench: Bench, kind: str) -> dict[str, Any]:
    """{size: figures} of chip_peaks.py, with the published peak or the lower bound beside them."""
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
                figures["bound_ms"] += 2 * int(size) * 2**20 / chip.memory_gb_per_s / 1e6
    return found


def least_sent(kind: str, mib: int, devices: int) -> float:
    """Bytes that a device must send, as tpu_compiler.estimate.reading.read_collectives counts them."""
    shares = {"all-reduce": 2 * (devices - 1), "collective-permute": 1}
    return mib * 2**20 * shares.get(kind, devices - 1) / devices
