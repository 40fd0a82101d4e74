"""TPU generations and the slices they are rented in. Nothing here imports torch, jax or a module of this project."""

import dataclasses
import difflib
import math
import re

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation, all figures per chip unless they say per device.

    hbm_gib, bf16_tflops, memory_gb_per_s: docs.cloud.google.com/tpu/docs, one page for each generation, and the table
    on the page of tpu7x; v4: arXiv:2304.01433. pci_id: torch_xla/_internal/tpu.py.
    clock_ghz is implied by the peak over the width of the matrix units (TPU7x: 524,288 FLOPs a cycle and device; the
    compiler's own estimate for a product of 32,768 comes to 88 % of that). limit_gib is the memory per device that
    libtpu 0.0.21 enforces, of TPU7x 0.0.52. link_gb_per_s is all links of a device together, in one direction: half
    of the bidirectional figure on those pages (v5e 400, v5p 1200, v6e 800 GB/s); v4: 6 links of 50 GB/s; TPU7x: half of
    a chip's 1200 for each of its devices, and the link between these two, "six times faster than a 1D ICI link".
    slice_gb_per_s is what a chip can send to other slices: the page of tpu7x has 50 (v5p) and 100 Gb/s (v6e, TPU7x) of
    data center network per chip, the page of v5e 6.4 Tb/s for a pod of 256. host_gb_per_s is PCIe between a chip and
    its host, in one direction: jax-ml.github.io/scaling-book/tpus has 16 for v4, 15 for most and 32 for v6e. None: no
    figure is published.
    """

    name: str
    pci_id: str
    hbm_gib: int
    bf16_tflops: float
    memory_gb_per_s: float
    clock_ghz: float | None = None
    limit_gib: float | None = None
    link_gb_per_s: float | None = None
    slice_gb_per_s: float | None = None
    host_gb_per_s: float | None = None
    devices_per_chip: int = 1
    cores_in_name: int = 1  # v4-8 and v5p-8 count cores: 4 chips
    largest_host: tuple[int, ...] = (2, 2, 1)
    newest_only: bool = False  # libtpu 0.0.21 cannot compile for it, a newer one can: aot_tpu.py --compiler newest
    compiler_options: tuple[tuple[str, str], ...] = ()
    """For jax's get_topology_desc. By default it has two devices in a v4 chip, which is one device (megacore)."""


MEGACORE = (("chip_config_name", "megacore"),)
ALL_GENERATIONS = (
    Generation("v4", "0x005e", 32, 275, 1228, 1.05, 30.75, 300, None, 16, cores_in_name=2, compiler_options=MEGACORE),
    Generation("v5e", "0x0063", 16, 197, 819, 1.5, 15.75, 200, 3.125, 15, largest_host=(2, 4, 1)),
    Generation("v5p", "0x0062", 95, 459, 2765, 1.75, 95.74, 600, 6.25, 15, cores_in_name=2),
    Generation("v6e", "0x006f", 32, 918, 1638, 1.75, 31.25, 400, 12.5, 32, largest_host=(2, 4, 1)),
    Generation("TPU7x", "0x0076", 192, 2307, 7380, 2.2, 94.74, 1500, 12.5, None, 2, cores_in_name=2, newest_only=True),
)
GENERATIONS = {generation.name: generation for generation in ALL_GENERATIONS}
SHAPES_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
SHAPES_3D = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
SHAPES_3D |= {1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice, or several equal ones: its name as asked for, its generation, chips along each axis of one slice."""

    name: str
    generation: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def hardware(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def num_chips(self) -> int:
        return self.num_slices * math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.hardware.devices_per_chip

    @property
    def compiler_name(self) -> str:
        return f"{self.generation.lower()}:{'x'.join(map(str, self.shape))}"

    @property
    def chips_per_host(self) -> tuple[int, ...]:
        """One host holds the whole slice where such a machine exists (1 chip; v5e and v6e up to 8), else 2x2 chips."""
        shape = self.shape + (1,) * (3 - len(self.shape))
        whole = math.prod(shape) == 1 or all(s <= m for s, m in zip(shape, self.hardware.largest_host, strict=True))
        return shape if whole else (2, 2, 1)


def parse_topology(name: str) -> Topology:
    """v5litepod-8, v5e-8, v6e-8, v4-8, v5p-8, tpu7x-8 (these three count cores), v5e:4x4, 2xv5litepod-16 -> Topology.
    Raises ValueError with what was found, what is accepted, and the nearest size that exists."""
    accepted = "v5litepod-8, v6e-8, v4-8, v5p-8, tpu7x-8, v5e:4x4, or 2xv5litepod-16 for two slices"
    kinds = r"(v5litepod|v\d+[ep]?|tpu7x)"
    match = re.fullmatch(rf"(?:(\d+)x)?{kinds}(?:-(\d+)|:(\d+(?:x\d+){{1,2}}))", name.strip().lower())
    generation = match and {"v5litepod": "v5e", "tpu7x": "TPU7x"}.get(match[2], match[2])
    if not match or generation not in GENERATIONS or match[1] in ("0", "00"):
        kind, dash, size = name.strip().lower().partition("-")
        near = difflib.get_close_matches(kind, [*GENERATIONS, "v5litepod", "tpu7x"], 1, 0.75) if dash else []
        hint = f"; did you mean {near[0].lower()}-{size}?" if near and near[0].lower() != kind else ""
        raise ValueError(f"topology {name!r} not understood; expected a TPU slice such as {accepted}{hint}")
    hardware, num_slices = GENERATIONS[generation], int(match[1] or 1)
    shapes = SHAPES_3D if hardware.cores_in_name == 2 else SHAPES_2D
    shapes = {1: "1x1x1"} | shapes if hardware.devices_per_chip == 2 else shapes  # a chip alone is rented too
    asked = "x".join(str(int(number)) for number in (match[4] or match[3]).split("x"))
    each = 1 if match[4] else hardware.cores_in_name
    sizes = {shape if match[4] else str(chips * each): shape for chips, shape in shapes.items()}
    if asked not in sizes:
        number = math.prod(map(int, asked.split("x")))
        nearest = min(shapes, key=lambda chips: abs(chips * each - number))
        unit = "" if match[4] else " cores" if hardware.cores_in_name == 2 else " chips"
        exists = f"{generation}:{shapes[nearest]}" if match[4] else f"{match[2]}-{nearest * each}"
        raise ValueError(
            f"topology {name!r}: no {generation} slice of {asked}{unit}; expected one of {', '.join(sizes)}; "
            f"nearest is {exists}"
        )
    return Topology(name, generation, tuple(map(int, sizes[asked].split("x"))), num_slices)
