"""Makes this process look like a TPU slice to PyTorch/XLA: it must run before torch_xla does.

Imports no torch, but where prepare_environment() has to tell torch_xla of more devices than there are.
"""

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from tpu_compiler.flags import set_flags, torch_xla_flags
from tpu_compiler.hardware import Topology, parse_topology

TESTED_VERSIONS = {"torch_xla": "2.9.0", "jax": "0.7.1", "libtpu": "0.0.21"}
MOST_DEVICES = 127
"""Of one process: autograd counts its devices in 8 bits."""
MOST_VIRTUAL_DEVICES = 64
"""Of a slice that is traced with as many virtual CPU devices as it has; a larger one is traced with VIRTUAL_DEVICES."""
VIRTUAL_DEVICES = 8
COMPILER_VARIABLE = "AOT_TPU_COMPILER"
"""Holds the folder of the newest compiler's environment, in a script that is to ask that one: see newest.py."""


class VersionError(RuntimeError):
    """Other packages are installed than those whose private interfaces we use."""


def traceable_topology(name: str, newest: bool | None = None) -> Topology:
    """Raises ValueError for a topology that does not exist, or that the compiler does not know which is asked.

    newest: that is the newer one; None: as COMPILER_VARIABLE says.
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
        _claim_devices(topology.num_devices)
    return topology


def _claim_devices(number: int) -> None:
    """PyTorch/XLA says that there are this many devices, while the runtime has fewer: as on one host of many.

    The runtime cannot have them: autograd keeps a queue for each of its devices, and counts them in 8 bits
    (c10/core/Device.h, DeviceIndex is int8_t; torch/csrc/autograd/engine.cpp, start_device_threads). A mesh and its
    shardings need only the number, and nothing runs. Uploads hold the parts of the devices that are there.
    """
    import torch_xla.runtime as xr

    # of all hosts: the first is asked under SPMD, the second by world_size() of replicas
    xr.global_runtime_device_count = xr.global_device_count = lambda: number


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
            + "; install the tested set: pip install torch==2.9.0 'torch_xla[tpu,pallas]==2.9.0'"
        )
    return found
