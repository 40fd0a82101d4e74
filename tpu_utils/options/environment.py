"""What must be settled before torch_xla is imported: the options, the data files, the device. Imports no torch."""

import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tpu_utils.base.errors import DeviceError, InputError, run_script
from tpu_utils.base.process import Peers
from tpu_utils.options.parsing import Options, parse_command_line

if TYPE_CHECKING:
    from tpu_utils.base.hardware import Generation
    from tpu_utils.options.train_config import TrainConfig

Config = TypeVar("Config")
GOOGLE_PCI_VENDOR = "0x1ae0"
UNDER_COMPILER = "AOT_TPU_SCRIPT"
"""Set where tpu_compiler/of_script.py runs the script."""


def command_line(
    config_class: type[Config],
    description: str,
    check: Callable[[Config], object],
    parse: Callable = parse_command_line,
) -> Config:
    """The options of this process; or it ends here, with help or with one message.

    Call it above the imports of torch and torch_xla, which take seconds: a wrong option, a wrong data file or a missing
    TPU is answered at once. check: raises InputError for files that cannot be read. parse: parse_options() for a tool.
    """
    from tpu_utils.base.restarts import end_with_torchrun  # only here, once

    end_with_torchrun()
    if issubclass(config_class, Options) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the run has its own: no traceback of the imports
    found = []

    def read() -> int:
        found.append(parse(config_class, description))
        if issubclass(config_class, Options):
            choose_device(found[0])
        check(found[0])
        if getattr(found[0], "compile_for", "") and UNDER_COMPILER not in os.environ:
            from tpu_utils.options.virtual_slice import become_compiler  # only here: a run on a device needs none of it

            become_compiler()
        return 0

    if code := run_script(read):
        sys.exit(code)
    return found[0]


def attached_chips(pci_root: Path = Path("/sys/bus/pci/devices")) -> "list[Generation]":
    """The TPU chips on this host's PCI bus."""
    googles = (path for path in sorted(pci_root.glob("*/vendor")) if path.read_text().strip() == GOOGLE_PCI_VENDOR)
    ids = [path.with_name("device").read_text().strip() for path in googles]
    if not ids:
        return []
    from tpu_utils.base.hardware import ALL_GENERATIONS  # only for a machine that may have some

    by_id = {generation.pci_id: generation for generation in ALL_GENERATIONS}
    return [by_id[one] for one in ids if one in by_id]


def choose_device(config: "TrainConfig") -> str:
    """Settle "tpu", "gpu" or "cpu", and how many devices, in the environment: it is read when a device is touched.

    Idempotent, and inherited by child processes. Raises DeviceError instead of falling back, InputError if environment
    and metadata contradict each other about the hosts of this slice.
    """
    from tpu_utils.options.variables import check_variables  # only here: once read, it is needed no more

    check_variables(os.environ, config.device, config.tpu_options if config.compiler_options else {})
    if config.compile_for:
        from tpu_utils.options.virtual_slice import pretend_slice

        pretend_slice(config)
        return "cpu"
    chosen, chips = config.device, attached_chips()
    if chosen == "auto":
        chosen = os.environ.get("PJRT_DEVICE", "").lower() or ("tpu" if chips else "auto")
    if chosen in ("auto", "gpu") or config.compile != "auto":
        from tpu_utils.base.gpus import gpu_or_cpu  # only where it is not settled yet

        chosen = gpu_or_cpu(chosen, config.compile, os.environ)
    if chosen == "tpu" and not chips:
        raise DeviceError(
            f"preset {config.preset} runs on tpu, but this machine has no TPU chip (PCI vendor {GOOGLE_PCI_VENDOR}); "
            "run it on a TPU VM, or add --device cpu"
        )
    if chosen == "tpu":
        from tpu_utils.options.compiler_flags import set_flags  # only on a TPU

        set_flags(config.tpu_options)
    if chips:  # for the CPU too: where there are chips, torch_xla's import asks for the accelerator type
        from tpu_utils.remote.hosts import settle_hosts  # only here: a machine without a TPU has no other hosts

        settle_hosts(chips)
    os.environ["PJRT_DEVICE"] = chosen.upper()
    if chosen == "cpu" and find_spec("torch_tpu"):  # which torch loads, and which would start libtpu
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if num_virtual_devices := getattr(config, "num_virtual_devices", 0):
        if chosen != "cpu":
            raise InputError(
                f"num_virtual_devices is {num_virtual_devices} but the device is {chosen}; add --device cpu"
            )
        os.environ["CPU_NUM_DEVICES"] = str(num_virtual_devices)
    return chosen


def meet_hosts(config: "TrainConfig") -> Peers:
    """This process among those of the run, one for each host of the TPU slice; one alone on the CPU. Call it before the
    device is started. Raises DeviceError naming the hosts that are missing."""
    if choose_device(config) != "tpu":
        return Peers()
    from tpu_utils.remote.hosts import read_secret, settle_hosts
    from tpu_utils.remote.meeting import wait_for_peers

    index, addresses = settle_hosts(attached_chips())
    secret = read_secret(config.peers_secret) if len(addresses) > 1 else b""
    return wait_for_peers(index, addresses, config.peers_timeout, secret=secret)
