"""Makes this process look like a TPU slice to PyTorch/XLA. Imports no torch: it must run before torch_xla does."""

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from tpu_compiler.flags import set_flags, torch_xla_flags
from tpu_compiler.hardware import Topology, parse_topology

TESTED_VERSIONS = {"torch_xla": "2.9.0", "jax": "0.7.1", "libtpu": "0.0.21"}
MOST_DEVICES = 127  # autograd counts the devices of a host in 8 bits: beyond, it has no queue to run on


class VersionError(RuntimeError):
    """Other packages are installed than those whose private interfaces we use."""


def traceable_topology(name: str) -> Topology:
    """Raises ValueError for a topology that does not exist, or has more devices than one process can trace for."""
    topology = parse_topology(name)
    if topology.num_devices > MOST_DEVICES:
        raise ValueError(
            f"topology {name!r} has {topology.num_devices} devices; at most {MOST_DEVICES} can be traced on one "
            "host (autograd counts the devices of a host in 8 bits): ask about a smaller slice"
        )
    return topology


def prepare_environment(compile_for: str, options: Mapping[str, str] | None = None) -> Topology:
    """Make this process look like the slice to PyTorch/XLA: call it before the first device is touched. Idempotent.

    options: of the compiler, as a run on the slice has them in LIBTPU_INIT_ARGS; torch_xla's own are added.
    Raises ValueError as traceable_topology does, RuntimeError when a device was touched already.
    """
    topology = traceable_topology(compile_for)
    wanted = dict(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(topology.num_devices))
    if any(os.environ.get(name) != value for name, value in wanted.items()) and "torch_xla" in sys.modules:
        import torch_xla.runtime as xr

        if xr.is_spmd() or sys.modules["torch_xla"]._XLAC._xla_runtime_is_initialized():
            raise RuntimeError("prepare_environment must be called before the first device is touched")
    os.environ.update(wanted)
    set_flags((options or {}) | torch_xla_flags(topology.generation))
    quiet_libtpu()
    return topology


def quiet_libtpu() -> None:
    """What libtpu wants to know before it is loaded on a machine with no TPU."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # jax must not look for a TPU; the compile-only client is asked for by name
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second compile at the same time dies on /tmp/libtpu_lockfile
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }.items():
        os.environ.setdefault(name, value)


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
