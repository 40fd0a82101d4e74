"""Compile a training step with the real TPU compiler, with no TPU attached: does it compile, fit, and what will it cost?

Run:     python simple_mnist_tpu.py --compile_for v5litepod-1              # any training script: report instead of training
         python aot_tpu.py SCRIPT --topology v5litepod-8,v6e-8 [options]   # one row per slice
         python aot_tpu.py SCRIPT --topology v5litepod-1 --fit global_batch_size
Exit:    0 fits; 1 does not fit or does not compile; 2 wrong usage.

How: the script runs its normal way on PJRT_DEVICE=CPU with as many virtual devices as the slice has, up to its first
step. That step is traced, not executed; the traced program, with its shardings, goes to libtpu's compiler for the named
slice, and everything in the report is read from the compiled program.

Trust: compiles or not, memory, FLOPs, kinds, counts and bytes of collectives. Milliseconds and MFU are sums of the
compiler's own cost model over its schedule: good for comparing two programs, never a measurement.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import os
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

# torch, torch_xla and jax are imported where they are used: they read the variables that prepare_environment sets,
# and the command line below should answer a wrong topology at once.

LABEL = "compiler estimate, not measured; excludes collectives"
COMMUNICATION_LABEL = "lower bound: bytes over link bandwidth, not measured"
OUTPUT_VARIABLE = "AOT_TPU_OUTPUT"  # a folder: compile_for writes report.json and program.txt there and prints no report
TESTED_VERSIONS = {"torch_xla": "2.9.0", "jax": "0.7.1", "libtpu": "0.0.21"}
GIB = 2**30
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}


# ---------------------------------------------------------------------------------------------------------------------
# Slices


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation, per device as the compiler sees it (a v4 chip is two devices, every other chip is one).

    clock_ghz is implied by peak FLOP/s over the width of the matrix units. limit_gib is what libtpu 0.0.21 enforces.
    link_gb_per_s is all links of one device together, in one direction: half of the bidirectional figure per chip in
    docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e} (400, 1200, 800 GB/s); v4: 6 links of 50 GB/s (arXiv:2304.01433).
    """

    clock_ghz: float
    bf16_tflops: float
    limit_gib: float
    link_gb_per_s: float
    devices_per_chip: int = 1
    cores_in_name: int = 1  # v4-8 and v5p-8 count cores: 4 chips
    largest_host: tuple[int, ...] = (2, 2, 1)


GENERATIONS = {
    "v4": Generation(1.05, 137.5, 15.25, 150, devices_per_chip=2, cores_in_name=2),
    "v5e": Generation(1.5, 197, 15.75, 200, largest_host=(2, 4, 1)),
    "v5p": Generation(1.75, 459, 95.74, 600, cores_in_name=2),
    "v6e": Generation(1.75, 918, 31.25, 400, largest_host=(2, 4, 1)),
}
SHAPES_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
SHAPES_3D = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice, or several equal ones: name as asked, the generation, chips along each axis of one slice."""

    name: str
    generation: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def hardware(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def num_devices(self) -> int:
        return self.num_slices * math.prod(self.shape) * self.hardware.devices_per_chip

    @property
    def compiler_name(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def chips_per_host(self) -> tuple[int, ...]:
        """One host holds the whole slice where such a machine exists (1 chip; v5e and v6e up to 8), else 2x2 chips."""
        shape = self.shape + (1,) * (3 - len(self.shape))
        whole = math.prod(shape) == 1 or all(s <= m for s, m in zip(shape, self.hardware.largest_host, strict=True))
        return shape if whole else (2, 2, 1)


def parse_topology(name: str) -> Topology:
    """v5litepod-8, v5e-8, v6e-8, v4-8, v5p-8 (the last two count cores), v5e:4x4, 2xv5litepod-16 -> Topology.

    Raises ValueError with what was found, what is accepted, and the nearest size that exists.
    """
    accepted = "v5litepod-8, v6e-8, v4-8, v5p-8, v5e:4x4, or 2xv5litepod-16 for two slices"
    match = re.fullmatch(r"(?:(\d+)x)?(v5litepod|v\d+[ep]?)(?:-(\d+)|:(\d+(?:x\d+){1,2}))", name.strip().lower())
    generation = match and {"v5litepod": "v5e"}.get(match[2], match[2])
    if not match or generation not in GENERATIONS or match[1] in ("0", "00"):
        raise ValueError(f"topology {name!r} not understood; expected a TPU slice such as {accepted}")
    hardware, num_slices = GENERATIONS[generation], int(match[1] or 1)
    shapes = SHAPES_3D if hardware.cores_in_name == 2 else SHAPES_2D
    if match[4]:
        shape = tuple(map(int, match[4].split("x")))
        known = [s for s in shapes.values()]
        if "x".join(map(str, shape)) not in known:
            chips = math.prod(shape)
            nearest = min(shapes, key=lambda n: abs(n - chips))
            raise ValueError(
                f"topology {name!r}: no {match[4]} slice of {generation}; expected one of {', '.join(known)}; "
                f"nearest is {generation}:{shapes[nearest]}"
            )
        return Topology(name, generation, shape, num_slices)
    chips, cores = divmod(int(match[3]), hardware.cores_in_name)
    if cores or chips not in shapes:
        sizes = [n * hardware.cores_in_name for n in shapes]
        nearest = min(sizes, key=lambda n: abs(n - int(match[3])))
        unit = "cores" if hardware.cores_in_name == 2 else "chips"
        raise ValueError(
            f"topology {name!r}: no {generation} slice of {match[3]} {unit}; expected one of "
            f"{', '.join(map(str, sizes))}; nearest is {match[2]}-{nearest}"
        )
    return Topology(name, generation, tuple(map(int, shapes[chips].split("x"))), num_slices)


def prepare_environment(compile_for: str) -> Topology:
    """Make this process look like the slice to PyTorch/XLA: call before the first device is touched.

    Raises ValueError for a topology that does not exist, RuntimeError when a device was touched already.
    """
    topology = parse_topology(compile_for)
    if "torch_xla" in sys.modules:
        import torch_xla.runtime as xr

        if xr.is_spmd() or sys.modules["torch_xla"]._XLAC._xla_runtime_is_initialized():
            raise RuntimeError("prepare_environment must be called before the first device is touched")
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(topology.num_devices))
    _quiet_libtpu()
    return topology


def _quiet_libtpu() -> None:
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


# ---------------------------------------------------------------------------------------------------------------------
# Private interfaces of torch_xla and jax: all of them are in this section


def check_private_interfaces() -> dict[str, str]:
    """Versions of torch_xla, jax and libtpu; RuntimeError unless they are the set whose private interfaces we use."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in TESTED_VERSIONS:
        try:
            found[name] = version(name).split("+")[0]
        except PackageNotFoundError:
            found[name] = "not installed"
    if found != TESTED_VERSIONS:
        raise RuntimeError(
            "compiling ahead of time uses private interfaces of "
            + ", ".join(f"{name} {expected} (found {found[name]})" for name, expected in TESTED_VERSIONS.items())
            + "; install the tested set: pip install torch==2.9.0 'torch_xla[tpu,pallas]==2.9.0'"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step as PyTorch/XLA would hand it to the compiler. roles and donated have one entry per program input."""

    hlo: bytes  # serialized HloModuleProto
    roles: tuple[str, ...]  # "parameters", "optimizer_state" or "inputs"
    donated: tuple[bool, ...]  # the inputs whose buffer the step overwrites
    partitions: int = 1  # SPMD devices
    replicas: int = 1  # DDP replicas
    seconds: float = 0.0


def settle() -> None:
    """Turn everything not yet computed (initial weights, optimizer state) into placeholders that own no memory.

    A model built as `with torch.device("meta"): model = GPT(config)` then `.to_empty(device=device)`, sharded and given
    its optimizer state, never allocates anything: shapes and shardings are all the compiler needs.
    """
    import torch_xla

    torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))
    torch_xla.sync()  # uploads what sits on the host; there is nothing left to execute


def _alias_id(tensor) -> int:
    """The number that stays with a tensor through in-place updates, by which the runtime pairs inputs and outputs."""
    import torch_xla

    return int(re.search(r"AliasID: (\d+)", torch_xla._XLAC._get_xla_tensor_debug_info(tensor))[1])


def _pending_tensors() -> list:
    """The tensors that a sync now would compute, in the order in which it would return them (creation order)."""
    import torch
    import torch_xla

    pending, device = {}, torch_xla.device()
    for thing in gc.get_objects():  # PyTorch/XLA keeps this list in C++ only; issubclass does not wake lazy proxies
        if issubclass(type(thing), torch.Tensor) and thing.device == device:
            thing = getattr(thing, "global_tensor", thing)  # XLAShardedTensor wraps the tensor it shards
            if "XLAData: None" in torch_xla._XLAC._get_xla_tensor_debug_info(thing):  # no value yet: computed by a sync
                pending[torch_xla._XLAC._xla_get_tensor_id(thing)] = thing
    return [tensor for _, tensor in sorted(pending.items())]


def trace_step(step: Callable, *args, model=None, optimizer=None, **kwargs) -> Traced:
    """Run step's Python once, execute nothing, return the program it would execute.

    step may be wrapped by torch_xla.compile: the sync at its end is where the program is taken. All that is alive there
    is an output, as in a real run. Raises RuntimeError when the step makes no program, or more than one.
    """
    import torch_xla
    import torch_xla.runtime as xr

    xlac, programs, start = torch_xla._XLAC, [], time.monotonic()
    settle()
    roles = {}
    for p in [*model.parameters(), *model.buffers()] if model is not None else []:
        roles[_alias_id(p)] = "parameters"
    for state in optimizer.state.values() if optimizer is not None else []:
        for value in state.values():
            if getattr(value, "device", None) == torch_xla.device():
                roles[_alias_id(value)] = "optimizer_state"

    def take_program(wait: bool = False, reset_scope: bool = True) -> None:
        outputs = _pending_tensors()
        if not outputs:
            return
        alias_ids = {_alias_id(t) for t in outputs}
        hlo = xlac._get_xla_tensors_hlo_proto(outputs)
        input_ids, _ = xlac._get_tensors_xla_device_data_node(outputs)  # in the order of the program's inputs
        replicas = 1 if xr.is_spmd() else xr.world_size()
        programs.append(
            Traced(
                hlo=hlo,
                roles=tuple(roles.get(i, "inputs") for i in input_ids),
                donated=tuple(i in alias_ids for i in input_ids),  # the rule of torch_xla's own step marker
                partitions=xr.global_runtime_device_count() if xr.is_spmd() else 1,
                replicas=replicas,
                seconds=time.monotonic() - start,
            )
        )
        xlac._clear_pending_irs(str(torch_xla.device()))

    implementation = sys.modules["torch_xla.torch_xla"]
    real_sync = implementation.sync
    xlac._set_ir_debug(True)  # operations remember the scope they were recorded in
    try:
        implementation.sync = torch_xla.sync = take_program
        with _record_source_lines():
            result = step(*args, **kwargs)  # kept alive: what the caller would hold is an output of the program
        take_program()
        del result
    finally:
        implementation.sync = torch_xla.sync = real_sync
        xlac._set_ir_debug(False)
    if len(programs) != 1:
        raise RuntimeError(
            f"the step makes {len(programs)} programs, expected 1: "
            + ("it computes nothing on the device" if not programs else "it calls torch_xla.sync() inside")
        )
    return programs[0]


def _record_source_lines():
    """A mode in which every operation is recorded under `file.py:line` of the user's code that caused it.

    PyTorch/XLA's own metadata names the innermost frame (somewhere in torch) and nothing at all for the backward pass,
    which runs on autograd's thread: there, each node reopens the line of its forward operation.
    """
    import torch
    import torch_xla
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_leaves

    not_ours = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), __file__)
    open_scope = torch_xla._XLAC.profiler.scope_pusher  # closed when the object dies

    def user_line() -> str:
        frame = sys._getframe(2)
        while frame and frame.f_code.co_filename.startswith((*not_ours, "<")):
            frame = frame.f_back
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "unknown"

    class SourceLines(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            line = user_line()
            scope = open_scope(line)
            try:
                result = func(*args, **(kwargs or {}))
            finally:
                del scope
            nodes = [t.grad_fn for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
            while nodes:
                node = nodes.pop()
                if node not in self.seen:
                    self.seen.add(node)
                    nodes += [parent for parent, _ in node.next_functions if parent is not None]
                    scopes = []
                    node.register_prehook(lambda *_, s=scopes: s.append(open_scope(f"{line} backward")))
                    node.register_hook(lambda *_, s=scopes: s.clear())
            return result

    return SourceLines()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler returned: the optimized, scheduled program of one device, its memory and its FLOPs."""

    text: str
    peak_bytes: int
    argument_bytes: int
    output_bytes: int  # outputs that do not overwrite an input
    temporary_bytes: int
    program_bytes: int
    flops: float
    seconds: float


def compile_program(traced: Traced, topology: Topology, options: dict[str, str] | None = None) -> Compiled:
    """Compile for a slice with libtpu. options are compiler options such as {"xla_tpu_...": "true"}.

    Raises jax.errors.JaxRuntimeError with the compiler's message, ValueError when the step was traced for another
    number of devices than the slice has.
    """
    check_private_interfaces()
    _quiet_libtpu()
    needed = traced.partitions * traced.replicas
    if needed not in (1, topology.num_devices):
        raise ValueError(f"the step was traced for {needed} devices, {topology.name} has {topology.num_devices}")
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters.mlir import make_ir_context
    from jax.experimental import topologies
    from jax.extend.mlir import hlo_to_stablehlo, ir
    from jaxlib._jax import CompileOptions, DeviceAssignment, DeviceList

    slices = {"num_slices": topology.num_slices} if topology.num_slices > 1 else {}
    devices = topologies.get_topology_desc(
        topology.compiler_name, platform="tpu", chips_per_host_bounds=topology.chips_per_host, **slices
    ).devices[:needed]
    start = time.monotonic()
    with make_ir_context(), _progress(f"compiling for {topology.name}"):
        module = ir.Module.parse(hlo_to_stablehlo(traced.hlo))
        main = next(o for o in module.body.operations if ir.StringAttr(o.attributes["sym_name"]).value == "main")
        # the traced program says nothing of aliasing; PyTorch/XLA adds it when it compiles, and so must we
        donor = {"jax.buffer_donor": ir.BoolAttr.get(True)}
        main.arg_attrs = ir.ArrayAttr.get(
            [
                ir.DictAttr.get({a.name: a.attr for a in attributes} | (donor if donated else {}))
                for attributes, donated in zip(main.arg_attrs, traced.donated, strict=True)
            ]
        )
        compile_options = CompileOptions()
        compile_options.num_replicas, compile_options.num_partitions = traced.replicas, traced.partitions
        compile_options.env_option_overrides = list((options or {}).items())
        build = compile_options.executable_build_options
        build.num_replicas, build.num_partitions = traced.replicas, traced.partitions
        build.use_spmd_partitioning = traced.partitions > 1
        build.use_shardy_partitioner = False  # PyTorch/XLA writes GSPMD annotations
        build.allow_spmd_sharding_propagation_to_output = [True]  # else new weights come back replicated
        ids = np.array([d.id for d in devices]).reshape(traced.replicas, traced.partitions)
        build.device_assignment = DeviceAssignment.create(ids)
        executable = compiler.backend_compile_and_load(
            devices[0].client, module, DeviceList(tuple(devices)), compile_options, []
        )
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return Compiled(
        text=executable.hlo_modules()[0].to_string(),
        peak_bytes=memory.peak_memory_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        program_bytes=memory.generated_code_size_in_bytes,
        flops=cost.get("flops", 0.0),
        seconds=time.monotonic() - start,
    )
