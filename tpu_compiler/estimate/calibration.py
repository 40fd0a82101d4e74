"""What measurements say of predicted steps: the part of calibration.json that a report needs. No torch."""

import dataclasses
import statistics
from pathlib import Path

from tpu_utils.base.errors import InputError
from tpu_utils.base.files import read_json

CALIBRATION = Path("calibration/calibration.json")
"""Where tools.calibrate writes it, relative to the folder in which it was started."""
FORMAT = 2
SHORTEST_MS = 1.0
"""Steps predicted to be shorter are not compared: such a step takes as long as the host needs to dispatch it."""

MOST = 1e6
"""A ratio must be below this; a larger one is no sound measurement, and is refused."""


def is_held_up(figures: dict[str, float]) -> bool:
    """Whether host work and waiting for data take over 70 % of a step; then it says nothing of the prediction."""
    return figures["host_ms"] + figures["data_wait_ms"] > 0.7 * figures["ms"]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured over predicted milliseconds of several programs on one kind of chip."""

    chip: str
    libtpu: str
    num_devices: int
    ratios: dict[str, float]

    def sentence(self, chip: str, libtpu: str) -> str:
        """How far predicted steps are from measured ones; "" for another chip than was measured, or without ratios."""
        if chip != self.chip or not self.ratios:
            return ""
        ratios = sorted(self.ratios.values())
        text = f"measured on {chip}: {statistics.median(ratios):.2f} x the predicted step (n = {len(ratios)})"
        text += f", from {ratios[0]:.2f} to {ratios[-1]:.2f}" if len(ratios) > 1 else ""
        # a measured step includes its collectives, a predicted one does not
        text += f", on {self.num_devices} devices, collectives included" if self.num_devices > 1 else ""
        return text + ("" if libtpu == self.libtpu else f", with libtpu {self.libtpu}")


def read_calibration(path: Path) -> Calibration:
    """Raises InputError for anything but what tools.calibrate writes."""
    expected = "a calibration of tools.calibrate"
    found = read_json(path, expected)
    machine, ratios = found.get("machine"), found.get("ratios")
    versions = machine.get("versions") if isinstance(machine, dict) else None
    if found.get("format") == 1 and isinstance(ratios, dict):
        raise InputError(
            f"{path} is a calibration of tools.calibrate against the compiler's estimate alone, which leaves out flash "
            "kernels; expected one against the predicted step; run tools.calibrate again"
        )
    if found.get("format") != FORMAT or not isinstance(versions, dict) or not isinstance(ratios, dict):
        raise InputError(f"{path} is not {expected}: expected format {FORMAT}, machine with versions, and ratios")
    chip = machine.get("chip")
    libtpu = versions.get("libtpu")
    devices = machine.get("num_devices")
    wrong = ""
    if not all(isinstance(text, str) and len(text) <= 40 and text.isprintable() for text in (chip, libtpu)):
        wrong = f"chip is {chip!r:.50} and libtpu {libtpu!r:.50}; expected short names"
    if type(devices) is not int or not 0 < devices < 2**20:
        wrong = f"num_devices is {devices!r:.50}; expected a whole number above 0"
    for name, ratio in ratios.items():
        if type(ratio) not in (int, float) or not 0 < ratio < MOST:
            wrong = f"ratio of {name!r:.50} is {ratio!r:.50}; expected one above 0 and below {MOST:g}"
    if wrong:
        raise InputError(f"{path} is not {expected}: {wrong}")
    return Calibration(chip, libtpu, devices, ratios)
