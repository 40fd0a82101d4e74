"""Makes this process look like a TPU slice to PyTorch/XLA: it must run before torch_xla does.

Imports no torch, but where prepare_environment() has to tell torch_xla of more devices than there are.
"""

import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import Topology, parse_topology
from tpu_utils.base.versions import SUPPORTED_VERSIONS, TESTED_VERSIONS
from tpu_utils.options.compiler_flags import set_flags, torch_xla_flags

if TYPE_CHECKING:
    import torch

    from tpu_utils.options.train_config import TrainConfig

MOST_VIRTUAL_DEVICES = 64
"""A slice of up to so many devices is traced with as many virtual CPU devices, a larger one with VIRTUAL_DEVICES."""
VIRTUAL_DEVICES = 8
COMPILER_VARIABLE = "AOT_TPU_COMPILER"
"""Variable with the folder of the newest compiler's venv, set for a script that uses it (newest.py)."""


class VersionError(RuntimeError):
    """Other packages are installed than those whose private interfaces we use."""


def become_compiler() -> None:
    """Replace this process, by exec, with `python -m tpu_compiler.of_script SCRIPT ...`: tpu_compiler imports tpu_utils
    and runs scripts, so neither of them imports it."""
    here = str(Path(sys.argv[0]).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(":")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "tpu_compiler.of_script", *sys.argv])


def pretend_slice(config: "TrainConfig") -> None:
    """A step is traced on virtual CPU devices, and compiled for the slice. Raises InputError where it cannot be."""
    if find_spec("tpu_compiler") is None:
        raise InputError(
            "compile_for needs the folder tpu_compiler, which is not beside this script; copy it there from where the "
            "script came from, or leave --compile_for out"
        )
    try:
        check_private_interfaces()
        prepare_environment(config.compile_for, config.tpu_options)
    except (ValueError, VersionError) as error:
        raise InputError(f"compile_for: {error}") from error


def traceable_topology(name: str, newest: bool | None = None) -> Topology:
    """The topology of this name. Raises ValueError if it does not exist, or the compiler that is used does not know it.

    newest: the newest compiler is used; None: as COMPILER_VARIABLE says.
    """
    topology = parse_topology(name)
    newest = bool(os.environ.get(COMPILER_VARIABLE)) if newest is None else newest
    if topology.hardware.newest_only and not newest:
        raise ValueError(
            f"topology {name!r}: libtpu {TESTED_VERSIONS['libtpu']} cannot compile for {topology.generation}; ask a "
            "newer compiler by python aot_tpu.py ... --compiler newest"
        )
    return topology


def prepare_environment(compile_for: str, options: Mapping[str, str] | None = None) -> Topology:
    """Make this process look like the slice to PyTorch/XLA: call it before the first device is touched. Idempotent.

    options: of the compiler, as a run on the slice has them in LIBTPU_INIT_ARGS; torch_xla's own are added.
    Raises ValueError as traceable_topology does, RuntimeError when a device was touched already.
    """
    topology = traceable_topology(compile_for)
    virtual = topology.num_devices if topology.num_devices <= MOST_VIRTUAL_DEVICES else VIRTUAL_DEVICES
    wanted = dict(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(virtual))
    if any(os.environ.get(name) != value for name, value in wanted.items()) and "torch_xla" in sys.modules:
        import torch_xla.runtime as xr

        if xr.is_spmd() or sys.modules["torch_xla"]._XLAC._xla_runtime_is_initialized():
            raise RuntimeError("prepare_environment must be called before the first device is touched")
    os.environ.update(wanted)
    set_flags((options or {}) | torch_xla_flags(topology.generation))
    quiet_libtpu()
    if virtual < topology.num_devices:
        import torch_xla.runtime as xr

        # The runtime cannot have them: autograd keeps a queue for each of its devices, and counts them in 8 bits
        # (c10/core/Device.h, DeviceIndex is int8_t; torch/csrc/autograd/engine.cpp, start_device_threads). A mesh and
        # its shardings need only the number, as on one host of several. Uploads hold the shards of the devices there.
        # Both count the devices of all hosts: SPMD calls the first, world_size() of DDP replicas the second.
        xr.global_runtime_device_count = xr.global_device_count = lambda: topology.num_devices
    return topology


LIBTPU_VARIABLES = {
    "JAX_PLATFORMS": "cpu",  # jax must not look for a TPU; the compile-only client is asked for by name
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second compile at the same time dies on /tmp/libtpu_lockfile
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""What libtpu wants to know before it is loaded on a machine with no TPU."""


def quiet_libtpu() -> None:
    """Set LIBTPU_VARIABLES, but for what the user has set."""
    for name, value in LIBTPU_VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ["JAX_PLATFORMS"] = LIBTPU_VARIABLES["JAX_PLATFORMS"]


def check_private_interfaces() -> dict[str, str]:
    """Versions of torch_xla, jax and libtpu; VersionError unless they are the set whose private interfaces we use."""
    found = {}
    for name in TESTED_VERSIONS:
        try:
            found[name] = version(name).split("+")[0]
        except PackageNotFoundError:
            found[name] = "not installed"
    if found != TESTED_VERSIONS:
        raise VersionError(
            "compiling ahead of time uses private interfaces of "
            + ", ".join(f"{name} {expected} (found {found[name]})" for name, expected in TESTED_VERSIONS.items())
            + f"; install the tested set: pip install {SUPPORTED_VERSIONS[0].requirements}"
        )
    return found


def without_weights(build: Callable[[], "torch.nn.Module"], device) -> "torch.nn.Module":
    """build() with parameters that have shape and dtype but no memory, neither on the host nor on the device.

    They can be marked with a sharding like others (torch_xla's own placeholders cannot), as long as nothing reads them.
    Tie shared weights after this call, as after a move to the device.
    """
    import torch  # only here: the rest of this file comes before it

    with torch.device("meta"):
        model = build()
    model = model.to_empty(device=device)

    def renew(module: torch.nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data = torch.empty_like(tensor)  # nn.Parameter made a view, and a view and its base are two inputs

    # children first, in the order of Module.to: the program lists its outputs in the order they were made
    return model.apply(renew)
