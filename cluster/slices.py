"""What Google Cloud rents: machines, zones and images of each generation, and whether a request fits together.

Sizes and shapes of slices are in tpu_utils/base/hardware.py. Imports no torch and nothing that must be installed.
"""

import dataclasses
import math
import re

from tpu_utils.base.hardware import GENERATIONS, SHAPES_2D, SHAPES_3D, Topology, parse_topology
from tpu_utils.options.fields import nearest
from tpu_utils.remote.hosts import family


@dataclasses.dataclass(frozen=True)
class Rented:
    """How one generation is called where it is rented.

    label, machine: of GKE, the machine by its number of chips (docs.cloud.google.com/kubernetes-engine, "Plan TPUs in
    GKE"; xpk 1.16.0, core/system_characteristics.py). version: the image of a TPU VM (docs.cloud.google.com/tpu, "TPU
    VM images"), "" where the Cloud TPU API does not rent it.
    """

    label: str
    machine: str
    version: str


RENTED = {
    "v4": Rented("tpu-v4-podslice", "ct4p-hightpu-{}t", "tpu-ubuntu2204-base"),
    "v5e": Rented("tpu-v5-lite-podslice", "ct5lp-hightpu-{}t", "v2-alpha-tpuv5-lite"),
    "v5p": Rented("tpu-v5p-slice", "ct5p-hightpu-{}t", "v2-alpha-tpuv5"),
    "v6e": Rented("tpu-v6e-slice", "ct6e-standard-{}t", "v2-alpha-tpuv6e"),
    "TPU7x": Rented("tpu7x", "tpu7x-standard-{}t", ""),
}
# docs.cloud.google.com/tpu/docs/regions-zones, its table of North America, in stored copies of 2026, without zones
# that one customer has alone. The other continents were not read whole: a zone there is taken with a warning.
ZONES = {
    "v4": ("us-central2-b",),
    "v5e": ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a"),
    "v5p": ("us-central1-a", "us-east5-a"),
    "v6e": ("us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b", "us-south1-ai1b"),
    "TPU7x": ("us-central1-ai1a", "us-central1-c"),
}
ZONE = r"[a-z]+-[a-z]+\d+-([a-z]|ai\d[a-z])"
COUNTED = dict(map(family, GENERATIONS.values()))
"""What the number in an accelerator type counts of each chip: its two cores in v5p-8."""
XPK_SMALLEST = {"v5e": 8}
"""xpk 1.16.0 knows no smaller slices of it. All its machines have 4 chips, but for slices of one chip."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """One slice as it is rented: chips on each of its hosts."""

    topology: Topology
    chips_per_host: int

    @property
    def chips(self) -> int:
        return math.prod(self.topology.shape)

    @property
    def hosts(self) -> int:
        return self.chips // self.chips_per_host

    @property
    def rented(self) -> Rented:
        return RENTED[self.topology.generation]

    @property
    def machine(self) -> str:
        return self.rented.machine.format(self.chips_per_host)

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.topology.shape))

    @property
    def accelerator_type(self) -> str:
        name, counted = family(self.topology.hardware)
        return f"{name}-{self.chips * counted}"

    @property
    def xpk_type(self) -> str:
        """Named by shape: xpk has several shapes of 4096 v4 chips, and v4-8192 would be another one than ours."""
        return f"{family(self.topology.hardware)[0]}-{self.shape}"

    def __str__(self) -> str:
        kind = f"{self.topology.generation} chip{'s' * (self.chips > 1)}"
        where = "1 host" if self.hosts == 1 else f"{self.hosts} hosts of {self.chips_per_host} chips each"
        return f"{self.accelerator_type}: {self.chips} {kind}, {self.shape}, on {where}"


def slice_names() -> list[str]:
    """All that can be asked for by size."""
    shapes = {1: SHAPES_2D, 2: SHAPES_3D}  # by the number that an accelerator type counts of a chip
    return [f"{name}-{chips * counted}" for name, counted in COUNTED.items() for chips in shapes[counted]]


def find_slice(name: str, by_xpk: bool) -> Slice:
    """Raises ValueError with what was found, what is there, and what is nearest."""
    try:
        topology = parse_topology(name)
    except ValueError as error:
        meant = "" if re.search("nearest|did you mean", str(error)) else nearest(name.lower(), slice_names())
        said = str(error).replace("topology", "--slice", 1).replace(", or 2xv5litepod-16 for two slices", "")
        raise ValueError(said + meant) from error
    if topology.num_slices > 1:
        one = name.strip().lower().partition("x")[2]
        raise ValueError(f"--slice {name!r} names several; expected --slice {one} --num_slices {topology.num_slices}")
    found = Slice(topology, math.prod(topology.chips_per_host))
    if by_xpk:
        smallest = XPK_SMALLEST.get(topology.generation, 1)
        if found.chips < smallest:
            raise ValueError(
                f"--slice {name}: xpk has no {topology.generation} slice of fewer than {smallest} chips; choose "
                f"v5litepod-{smallest}, or print jobset or queued-resource"
            )
        found = Slice(topology, min(4, found.chips))
    return found


def check_zone(zone: str, generation: str, whatever: bool) -> tuple[str, str]:
    """(what is wrong with it, what to warn of); "" for nothing. whatever: accept zones that ZONES lacks."""
    known, everywhere = ZONES[generation], sorted(set().union(*ZONES.values()))
    there = f"zones of the US with {generation}: {', '.join(known)}"
    if not re.fullmatch(ZONE, zone):
        letter = " is a region; a zone ends in a letter" if re.fullmatch(r"[a-z]+-[a-z]+\d+", zone) else " is no zone"
        return f"--zone {zone!r:.80}{letter}; {there}{nearest(zone, everywhere)}", ""
    if zone in known:
        return "", ""
    look = f"ask: gcloud compute tpus accelerator-types list --zone {zone}"
    if (zone in everywhere or zone.startswith("us-")) and not whatever:
        instead = "" if zone in everywhere else nearest(zone, known)
        return f"--zone {zone} is not known to have {generation}; {there}; --any_zone prints it anyway{instead}", ""
    return "", f"the table here does not know whether {zone} has {generation} ({there}); {look}"


def check_version(version: str, generation: str) -> tuple[str, str]:
    """(what is wrong, what to warn of) for the image of a TPU VM."""
    versions = {rented.version: name for name, rented in RENTED.items() if rented.version}
    expected = f"expected {RENTED[generation].version}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", version):
        return f"--runtime_version {version!r:.80} is no name of an image; {expected}", ""
    if versions.get(version, generation) != generation and version != RENTED["v4"].version:  # that one fits several
        return f"--runtime_version {version} is for {versions[version]}, the slice is {generation}; {expected}", ""
    if version not in versions:
        return "", f"runtime version {version} is not known here; {expected}{nearest(version, list(versions))}"
    return "", ""


# distribution/reference, grammar of image names: [HOST[:PORT]/]NAME[/NAME]...[:TAG][@DIGEST]
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?(?::\d+)?"
IMAGE = re.compile(
    rf"(?:(?P<host>{_HOST})/)?(?P<path>{_PART}(?:/{_PART})*)(?P<tag>:\w[\w.-]{{0,127}})?(?P<digest>@sha256:[a-f0-9]{{64}})?",
    re.A,
)


def check_image(image: str) -> tuple[str, str]:
    expected = "expected REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG, in lower case"
    match = IMAGE.fullmatch(image)
    first, _, rest = image.partition("/")
    registry = bool(rest) and ("." in first or ":" in first or first == "localhost")
    if not match or len(image) > 255 or (not registry and first != first.lower()):
        return f"--image {image!r:.80} is no reference to an image; {expected}", ""
    if first.endswith("docker.pkg.dev") and rest.count("/") < 2:
        return f"--image {image} names no image in a repository of Artifact Registry; {expected}", ""
    if not registry:
        return "", f"image {image} has no registry, so nodes look for it on docker.io"
    if not match["tag"] and not match["digest"]:
        return "", f"image {image} has no tag: nodes take what is the latest when they start, each for itself"
    return "", ""
