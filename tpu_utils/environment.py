"""What must be settled before torch_xla is imported: the options, the data files, the device. Imports no torch."""

import os
import sys
from collections.abc import Callable
from typing import TypeVar

import tyro

from config import TrainConfig
from tpu_compiler.environment import VersionError, check_private_interfaces, prepare_environment
from tpu_compiler.flags import check_known, set_flags
from tpu_compiler.hardware import GOOGLE_PCI_VENDOR, attached_chips
from tpu_utils.errors import DeviceError, InputError, run_script
from tpu_utils.hosts import settle_hosts
from tpu_utils.options import parse_command_line

Options = TypeVar("Options")


def command_line(config_class: type[Options], description: str, check: Callable[[Options], object]) -> Options:
    """The options of this process; or it ends here, with help or with one message.

    Call it above the imports of torch and torch_xla, which take seconds: a wrong option, a wrong data file or a missing
    TPU is answered at once. check: raises InputError for files that cannot be read.
    """
    found = []

    def read() -> int:
        if issubclass(config_class, TrainConfig):
            found.append(parse_command_line(config_class, description))
            choose_device(found[0])
        else:
            found.append(tyro.cli(config_class, description=description, use_underscores=True))
        check(found[0])
        return 0

    if code := run_script(read):
        sys.exit(code)
    return found[0]


def choose_device(config: TrainConfig) -> str:
    """Settle "tpu" or "cpu", and how many devices, in the environment: it is read once, when a device is first touched.

    Idempotent, and inherited by child processes. Raises DeviceError instead of falling back, InputError where what is
    said of the hosts of this slice contradicts itself.
    """
    if config.compiler_options:
        try:
            check_known(config.tpu_options)
        except ValueError as error:
            raise InputError(str(error)) from error
    if config.compile_for:  # traced on virtual CPU devices, compiled for the slice
        try:
            check_private_interfaces()
            prepare_environment(config.compile_for, config.tpu_options)
        except (ValueError, VersionError) as error:
            raise InputError(f"compile_for: {error}") from error
        return "cpu"
    chosen, chips = config.device, attached_chips()
    if chosen == "auto":
        chosen = (os.environ.get("PJRT_DEVICE") or ("TPU" if chips else "CPU")).lower()
    if chosen == "tpu" and not chips:
        raise DeviceError(
            f"preset {config.preset} runs on tpu, but this machine has no TPU chip (PCI vendor {GOOGLE_PCI_VENDOR}); "
            "run it on a TPU VM, or add --device cpu"
        )
    if chosen == "tpu":
        set_flags(config.tpu_options)
    if chips:  # for the CPU too: where there are chips, torch_xla's import asks for the accelerator type
        settle_hosts(chips)
    os.environ["PJRT_DEVICE"] = chosen.upper()
    if num_virtual_devices := getattr(config, "num_virtual_devices", 0):
        if chosen != "cpu":
            raise InputError(
                f"num_virtual_devices is {num_virtual_devices} but the device is {chosen}; add --device cpu"
            )
        os.environ["CPU_NUM_DEVICES"] = str(num_virtual_devices)
    return chosen
