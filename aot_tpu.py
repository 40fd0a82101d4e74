"""Compile a training step with the real TPU compiler, with no TPU attached: does it compile, fit, what will it cost?

Run:     python simple_mnist_tpu.py --compile_for v5litepod-1    # any training script: reports instead
         python aot_tpu.py SCRIPT --topology v5litepod-8,v6e-8 [script options]   # one row per slice
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
from collections.abc import Callable, Sequence
from pathlib import Path

from tpu_program import (
    GIB,
    Report,
    Topology,
    format_report,
    format_table,
    parse_program,
    parse_topology,
    read_collectives,
    read_cycles,
    shape_bytes,
)

# torch, torch_xla and jax are imported where they are used: they read the variables that prepare_environment sets,
# and the command line below should answer a wrong topology at once.

OUTPUT_VARIABLE = "AOT_TPU_OUTPUT"  # a folder: compile_for writes its files there and prints nothing
TESTED_VERSIONS = {"torch_xla": "2.9.0", "jax": "0.7.1", "libtpu": "0.0.21"}
MOST_DEVICES = 127  # torch counts the devices of a host in 8 bits: beyond, autograd has no queue to run on


# PyTorch/XLA notes the innermost Python frame, which while we trace is ours; the scope in op_name tells the user's
OUR_FRAME = re.compile(r' source_file="[^"]*" source_line=\d+(?: source_end_line=\d+)?(?: source_column=\d+)?')


def traceable_topology(name: str) -> Topology:
    """Raises ValueError for a topology that does not exist, or has more devices than one process can trace for."""
    topology = parse_topology(name)
    if topology.num_devices > MOST_DEVICES:
        raise ValueError(
            f"topology {name!r} has {topology.num_devices} devices; at most {MOST_DEVICES} can be traced on one "
            f"host (autograd counts the devices of a host in 8 bits): ask about a smaller slice"
        )
    return topology


def prepare_environment(compile_for: str) -> Topology:
    """Make this process look like the slice to PyTorch/XLA: call before the first device is touched.

    Raises ValueError as traceable_topology does, RuntimeError when a device was touched already.
    """
    topology = traceable_topology(compile_for)
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
    """A step as PyTorch/XLA would hand it to the compiler. roles, donated, shardings: one entry per program input."""

    hlo: bytes  # serialized HloModuleProto
    roles: tuple[str, ...]  # "parameters", "optimizer_state" or "inputs"
    donated: tuple[bool, ...]  # the inputs whose buffer the step overwrites
    # as marked, "" where nothing is: the program itself forgets that of a placeholder which is only read
    shardings: tuple[str, ...]
    partitions: int = 1  # SPMD devices
    replicas: int = 1  # DDP replicas
    seconds: float = 0.0


def without_weights(build: Callable, device):
    """build() with parameters that have shape and dtype but no memory, neither on the host nor on the device.

    They can be marked with a sharding like others (torch_xla's own placeholders cannot), as long as nothing reads them.
    Tie shared weights after this call, as after a move to the device.
    """
    import torch

    with torch.device("meta"):
        model = build()
    model = model.to_empty(device=device)

    def renew(module: torch.nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data = torch.empty_like(tensor)  # nn.Parameter made a view, and a view and its base are two inputs

    # children first, in the order of Module.to: the program lists its outputs in the order they were made
    return model.apply(renew)


def settle() -> None:
    """Turn everything not yet computed (initial weights, optimizer state) into placeholders that own no memory.

    So a model from without_weights, sharded and given its optimizer state, never allocates anything: shapes and
    shardings are all the compiler needs.
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


def trace_step(step: Callable, *args, owners: Sequence = (), **kwargs) -> Traced:
    """Run step's Python once, execute nothing, return the program it would execute.

    step may be wrapped by torch_xla.compile: the sync at its end is where the program is taken. All that is alive there
    is an output, as in a real run. owners are the modules and optimizers whose tensors the report tells apart. Raises
    RuntimeError when the step makes no program, or more than one.
    """
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    xlac, programs, start = torch_xla._XLAC, [], time.monotonic()
    settle()
    owned = {}  # number of a tensor: (role, sharding)
    for owner in owners:
        if isinstance(owner, torch.nn.Module):
            named = [("parameters", t) for t in (*owner.parameters(), *owner.buffers())]
        else:
            named = [("optimizer_state", t) for state in owner.state.values() for t in state.values()]
        for role, tensor in named:
            if isinstance(tensor, torch.Tensor) and tensor.device == torch_xla.device():
                for number in (_alias_id(tensor), xlac._xla_get_tensor_id(tensor)):
                    owned[number] = role, xlac._get_xla_sharding_spec(tensor)

    def take_program(wait: bool = False, reset_scope: bool = True) -> None:
        outputs = _pending_tensors()
        if not outputs:
            return
        alias_ids = {_alias_id(t) for t in outputs}
        hlo = xlac._get_xla_tensors_hlo_proto(outputs)
        input_ids, _ = xlac._get_tensors_xla_device_data_node(outputs)  # in the order of the program's inputs
        replicas = 1 if xr.is_spmd() else xr.world_size()
        inputs = [owned.get(i, ("inputs", "")) for i in input_ids]
        programs.append(
            Traced(
                hlo=hlo,
                roles=tuple(role for role, _ in inputs),
                donated=tuple(i in alias_ids for i in input_ids),  # the rule of torch_xla's own step marker
                shardings=tuple(sharding for _, sharding in inputs),
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
                if "line" not in node.metadata:  # noted there: to hold the node would keep what it saved alive
                    node.metadata["line"] = line
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


def _compile_only_devices(topology: Topology) -> list:
    """libtpu's description of the slice: devices that programs can be compiled for, and nothing else."""
    from jax.experimental import topologies

    slices = {"num_slices": topology.num_slices} if topology.num_slices > 1 else {}
    return topologies.get_topology_desc(
        topology.compiler_name, platform="tpu", chips_per_host_bounds=topology.chips_per_host, **slices
    ).devices


def lower_pallas_for(compile_for: str) -> None:
    """From here on, Pallas kernels of this process are lowered for the slice's chips. Call it before tracing."""
    import jax
    from jax._src import tpu_custom_call

    check_private_interfaces()
    _quiet_libtpu()
    jax.config.update("jax_default_device", _compile_only_devices(parse_topology(compile_for))[0])
    # jax writes the newest kernel format unless the TPU it runs on is older; here it has none to ask, and libtpu 0.0.21
    # reads format 7 at most (jax/_src/tpu_custom_call.py, get_ir_version)
    tpu_custom_call.get_ir_version = lambda ctx: 7


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
    from jax.extend.mlir import hlo_to_stablehlo, ir
    from jaxlib._jax import CompileOptions, DeviceAssignment, DeviceList

    devices = _compile_only_devices(topology)[:needed]
    start = time.monotonic()
    with make_ir_context(), _progress(f"compiling for {topology.name}"):
        module = ir.Module.parse(hlo_to_stablehlo(traced.hlo))
        main = next(o for o in module.body.operations if ir.StringAttr(o.attributes["sym_name"]).value == "main")
        # the traced program says nothing of aliasing; PyTorch/XLA adds it when it compiles, and so must we
        donor = {"jax.buffer_donor": ir.BoolAttr.get(True)}
        arguments = []
        for attributes, donated, sharding in zip(main.arg_attrs, traced.donated, traced.shardings, strict=True):
            known = {a.name: a.attr for a in attributes} | (donor if donated else {})
            if traced.partitions > 1:  # what a real run uploads without a sharding is replicated
                known.setdefault("mhlo.sharding", ir.StringAttr.get(sharding or "{replicated}"))
            arguments.append(ir.DictAttr.get(known))
        main.arg_attrs = ir.ArrayAttr.get(arguments)
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
        text=OUR_FRAME.sub("", executable.hlo_modules()[0].to_string()),
        peak_bytes=memory.peak_memory_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        program_bytes=memory.generated_code_size_in_bytes,
        flops=cost.get("flops", 0.0),
        seconds=time.monotonic() - start,
    )


@contextlib.contextmanager
def _progress(doing: str):
    """Says on stderr that the compiler still works: one moving line on a terminal, else a line every 10 seconds."""
    done, start, terminal = threading.Event(), time.monotonic(), sys.stderr.isatty()

    def tell() -> None:
        while not done.wait(1 if terminal else 10):
            line = f"{doing}: {time.monotonic() - start:.0f} s, {_host_peak_gib():.1f} GiB of host memory"
            print(f"\r{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
        if terminal:
            print("\r" + " " * 79 + "\r", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _host_peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


# ---------------------------------------------------------------------------------------------------------------------
# The report


def report(
    traced: Traced,
    topology: Topology | str,
    *,
    examples: int | None = None,
    unit: str = "examples",
    model_flops: float | None = None,
    settings: dict | None = None,
    options: dict[str, str] | None = None,
) -> tuple[Report, str]:
    """Compile a traced step for a slice: (Report, optimized program text; empty when it does not compile).

    examples (or tokens, with unit="tokens") and model_flops are those of one step over all devices.
    """
    topology = parse_topology(topology) if isinstance(topology, str) else topology
    hardware, devices = topology.hardware, traced.partitions * traced.replicas
    shape = f"SPMD over {devices} devices" if traced.partitions > 1 else f"{devices} replicas"
    if devices == 1:
        idle = topology.num_devices - 1
        shape = f"one device, {idle} of the slice idle" if idle else "one device"
    facts = dict(
        topology=topology.name,
        devices=devices,
        program=shape,
        limit_bytes=int(hardware.limit_gib * GIB),
        model_flops=model_flops,
        unit=unit,
        trace_seconds=traced.seconds,
        versions=check_private_interfaces(),
        settings=settings or {},
    )
    from jax.errors import JaxRuntimeError

    start = time.monotonic()
    try:
        compiled = compile_program(traced, topology, options)
    except JaxRuntimeError as error:
        return _refused(str(error), traced, facts | {"compile_seconds": time.monotonic() - start}), ""
    computations = parse_program(compiled.text)
    memory = dict.fromkeys(("parameters", "optimizer_state", "inputs"), 0)
    for operation in computations["ENTRY"]:
        if operation.kind == "parameter":
            memory[traced.roles[int(operation.find(r" parameter\((\d+)\)"))]] += sum(shape_bytes(operation.type))
    memory["inputs"] += compiled.argument_bytes - sum(memory.values())  # rounding of small buffers
    memory |= {"activations": compiled.temporary_bytes + compiled.output_bytes, "program": compiled.program_bytes}
    peak = sum(memory.values())
    fits = peak <= facts["limit_bytes"]  # libtpu 0.0.21 leaves the arguments out of its own check
    collectives = read_collectives(computations, devices)
    cycles, unpriced = read_cycles(computations)
    seconds = sum(cycles.values()) / (hardware.clock_ghz * 1e9)
    sent = sum(kind["sent_bytes"] for kind in collectives.values())
    loops = sum(operation.kind == "while" for operations in computations.values() for operation in operations)
    limit = facts["limit_bytes"]
    too_much = f"needs {peak / GIB:.2f} of {limit / GIB:.2f} GiB, over by {(peak - limit) / GIB:.2f} GiB"
    return (
        Report(
            **facts,
            compiles=True,
            fits=fits,
            reason="" if fits else too_much,
            peak_bytes=peak,
            memory=memory,
            compiler_peak_bytes=compiled.peak_bytes,
            flops=compiled.flops,
            loops=loops,
            # the compiler counts the body of a loop once, so there is nothing to compare
            flops_ratio=compiled.flops * devices / model_flops if model_flops and not loops else None,
            collectives=collectives,
            communication_lower_bound_ms=sent / hardware.link_gb_per_s / 1e6,
            estimated_ms=seconds * 1e3,
            estimated_per_second=examples / seconds if examples else None,
            estimated_mfu=model_flops / (devices * seconds * hardware.bf16_tflops * 1e12) if model_flops else None,
            operations_without_estimate=dict(unpriced.most_common()),
            costliest_lines=[(line, c / hardware.clock_ghz / 1e6) for line, c in cycles.most_common(10)],
            compile_seconds=compiled.seconds,
            host_peak_gib=_host_peak_gib(),
        ),
        compiled.text,
    )


def _refused(message: str, traced: Traced, facts: dict) -> Report:
    """The report when the compiler refuses. Out of memory comes with figures; its total leaves the arguments out."""
    found = re.search(r"Ran out of memory in memory space hbm\. Used ([\d.]+)([KMGT]) of [^\n]*", message)
    memory, peak = {}, 0
    if found:
        memory = _argument_bytes(traced)
        temporary = int(float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[found[2]])
        counted = re.search(r"arguments\s+([\d.]+)([BKMGT])", message)
        if counted and float(counted[1]):
            temporary -= int(float(counted[1]) * 2 ** {"B": 0, "K": 10, "M": 20, "G": 30, "T": 40}[counted[2]])
        memory["activations"] = max(0, temporary)
        peak = sum(memory.values())
    reason = found[0] if found else message.strip().splitlines()[0][:300]
    return Report(
        **facts, compiles=False, fits=False, reason=reason, peak_bytes=peak, memory=memory,
        host_peak_gib=_host_peak_gib(),
    )  # fmt: skip


def _argument_bytes(traced: Traced) -> dict[str, int]:
    """Bytes of the program's inputs per device by role, from the traced shapes and shardings, without tile padding."""
    from jax._src.interpreters.mlir import make_ir_context
    from jax.extend.mlir import hlo_to_stablehlo, ir

    memory = dict.fromkeys(("parameters", "optimizer_state", "inputs"), 0)
    with make_ir_context():
        module = ir.Module.parse(hlo_to_stablehlo(traced.hlo))
        main = next(o for o in module.body.operations if ir.StringAttr(o.attributes["sym_name"]).value == "main")
        inputs = zip(traced.roles, main.arguments, main.arg_attrs, traced.shardings, strict=True)
        for role, argument, attributes, marked in inputs:
            kind = ir.RankedTensorType(argument.type)
            bits = re.search(r"(\d+)$", str(kind.element_type))
            size = math.prod(kind.shape) * max(1, int(bits[1]) // 8 if bits else 4)
            sharding = next((str(a.attr) for a in attributes if a.name == "mhlo.sharding"), marked)
            tiles = re.search(r"devices=\[([\d,]+)\]", sharding)
            if tiles:
                counts = [int(t) for t in tiles[1].split(",")][: len(kind.shape)]  # a last extra one is replication
                size = math.ceil(size / math.prod(counts))
            memory[role] += size
    return memory


# ---------------------------------------------------------------------------------------------------------------------
# For the training scripts


def compile_for(
    topology: str,
    step: Callable,
    *args,
    examples: int,
    unit: str = "examples",
    model_flops: float | None = None,
    settings: dict | None = None,
    knobs: Sequence[tuple[str, Sequence[str]]] = (),
    **kwargs,
) -> int:
    """What a training script calls in place of its loop: step(*args, **kwargs) is compiled, the report printed.

    The model and the optimizer are recognised among the arguments. examples (tokens, with unit="tokens") and
    model_flops are those of one step over all devices; settings is the resolved configuration, for --fit.
    knobs: (what it is, options to add, such as ["--remat", "--mesh=1x8x1"]) to try when the step does not fit.
    Returns the exit code: 0 fits, 1 does not.
    """
    import torch
    import torch_xla.runtime as xr

    if not xr.is_spmd() and xr.global_ordinal() > 0:
        return 0  # all replicas run the same program; the first one compiles it
    everything = [*args, *kwargs.values()]
    model = torch.nn.ModuleList(a for a in everything if isinstance(a, torch.nn.Module))
    optimizers = [a for a in everything if isinstance(a, torch.optim.Optimizer)]
    traced = trace_step(step, *args, owners=(model, *optimizers), **kwargs)
    result, text = report(
        traced, topology, examples=examples, unit=unit, model_flops=model_flops, settings=settings
    )  # fmt: skip
    if os.environ.get(OUTPUT_VARIABLE):
        folder = Path(os.environ[OUTPUT_VARIABLE])
        (folder / "program.txt").write_text(text)
        (folder / "traced.hlo.pb").write_bytes(traced.hlo)
        (folder / "inputs.json").write_text(json.dumps({"roles": traced.roles, "donated": traced.donated}))
        (folder / "report.json").write_text(json.dumps(dataclasses.asdict(result), indent=2, default=str))
        return result.exit_code
    print(format_report(result), flush=True)
    if result.over_bytes:
        print(suggest(result, sys.argv[0], sys.argv[1:], knobs), flush=True)
    return result.exit_code


# ---------------------------------------------------------------------------------------------------------------------
# Several compiles: each in a process of its own, because a process can only look like one slice


class ScriptError(RuntimeError):
    """The script did not come as far as its first step. exit_code is 2 when it refused its options."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def option_name(option: str) -> str:
    """The field that --a-field, --a_field or --a_field=value sets."""
    return option.removeprefix("--").split("=")[0].replace("-", "_")


def with_option(options: Sequence[str], name: str, value: str | None) -> list[str]:
    """options with --name (or --na-me) set to value, or taken out when value is None."""
    kept, dropping = [], False
    for option in options:
        if option.startswith("--"):
            dropping = option_name(option) == name  # and the value after it, if it has one
        if not dropping:
            kept.append(option)
    return kept if value is None else [*kept, f"--{name}", value]


def compile_script(script: str, topology: str, options: Sequence[str], program_dir: str | None = None) -> Report:
    """Run a training script up to its first step for one slice. Raises ScriptError when it does not get there."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, *with_option(options, "compile_for", topology)]
        environment = os.environ | {OUTPUT_VARIABLE: folder}
        environment.pop("XLA_USE_SPMD", None)  # xr.use_spmd() of this process leaves it there
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
        written = Path(folder, "report.json")
        if not written.exists():
            if done.returncode < 0:
                cause = f"was killed by signal {-done.returncode} (9 is out of host memory, 6 an abort in the compiler)"
            elif done.returncode == 0:
                raise ScriptError(f"{script} ended without asking to compile a step: is it a training script?", 2)
            else:
                cause = f"ended with code {done.returncode} before its first step; its own message is above"
            raise ScriptError(f"{script} for {topology} {cause}", 2 if done.returncode == 2 else 1)
        report = Report(**json.loads(written.read_text()))
        if report.topology != topology:
            raise ScriptError(
                f"{script} was asked for {topology} and compiled for {report.topology}: expected a script that takes "
                "its slice from --compile_for",
                2,
            )
        text = Path(folder, "program.txt").read_text()
        if program_dir and text:
            Path(program_dir).mkdir(parents=True, exist_ok=True)
            Path(program_dir, f"{Path(script).stem}_{topology.replace(':', '_')}.txt").write_text(text)
        return report


def batch_unit(r: Report) -> int:
    """The greatest step between batches that every device and every part of an accumulation can share as they share
    the report's own."""
    return math.gcd(r.settings["global_batch_size"], r.devices * r.settings.get("gradient_accumulation_steps", 1))


def fit(
    script: str, topology: str, field: str, options: Sequence[str], say: Callable[[str], None] = print
) -> tuple[int, Report | None]:
    """The largest value of an integer option that fits, and its report; (0, None) when no value does.

    Doubles or halves from the script's own value, then bisects, a batch in steps that can be divided as that value is.
    Each compile is said. A value that the script refuses, such as a batch larger than the data set, does not fit.
    """
    first = compile_script(script, topology, options)
    value = first.settings.get(field)
    if not isinstance(value, int) or value < 1:
        numbers = [name for name, v in first.settings.items() if isinstance(v, int) and not isinstance(v, bool)]
        raise ScriptError(f"--fit {field}: not a number of {script}; expected one of {', '.join(numbers)}", 2)
    tried = {value: first}

    def fits(value: int) -> bool:
        try:
            if value not in tried:
                tried[value] = compile_script(script, topology, with_option(options, field, str(value)))
        except ScriptError as error:
            if error.exit_code != 2:
                raise
            say(f"{field} {value:>7}: refused by {script}, see above")
            return False
        r = tried[value]
        say(f"{field} {value:>7}: {'fits' if r.fits else 'does not fit'}, {r.peak_bytes / GIB:.2f} of "
            f"{r.limit_bytes / GIB:.2f} GiB, {r.compile_seconds:.0f} s to compile")  # fmt: skip
        return r.fits

    unit = batch_unit(first) if field == "global_batch_size" else 1
    low, high = (value, 0) if fits(value) else (0, value)
    while not high:
        low, high = (value := value * 2, 0) if fits(value * 2) else (low, value * 2)
    while not low and high > unit:
        value = max(unit, high // 2 // unit * unit)
        low, high = (value, high) if fits(value) else (0, value)
    while low and high - low > unit:
        middle = (low + high) // 2 // unit * unit
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low and high not in tried:
        say(f"{field} {high} is refused by {script}, not for its memory")
    return low, tried.get(low)


def suggest(r: Report, script: str, options: Sequence[str], knobs: Sequence[tuple[str, Sequence[str]]]) -> str:
    """What would make a step fit that does not: every line compiled, none guessed."""
    lines = [f"over the limit by {r.over_bytes / GIB:.2f} GiB; compiling what could help:"]

    def attempt(name: str, changed: Sequence[str]) -> bool:
        try:
            other = compile_script(script, r.topology, changed)
        except ScriptError as error:
            lines.append(f"  {name:<34} not possible: {error}")
            return False
        verdict = "fits" if other.fits else "does not fit"
        lines.append(f"  {name:<34} {verdict}, {other.peak_bytes / GIB:.2f} of {other.limit_bytes / GIB:.2f} GiB")
        return other.fits

    batch, scale = r.settings.get("global_batch_size"), r.memory.get("activations", 0)
    if batch and scale:
        room = 0.95 * r.limit_bytes - (sum(r.memory.values()) - scale)
        unit = batch_unit(r)
        guess = int(batch * room / scale) // unit * unit  # activations grow with the batch
        while unit <= guess < batch:
            if attempt(f"--global_batch_size {guess}", with_option(options, "global_batch_size", str(guess))):
                break
            guess = guess // 2 // unit * unit
    for name, changes in knobs:
        changed = list(options)
        for change in changes:
            changed = [*with_option(changed, option_name(change), None), change]
        attempt(f"{name} ({' '.join(changes)})", changed)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("script", help="a training script that takes --compile_for")
    parser.add_argument("--topology", required=True, help="slices, separated by commas")
    parser.add_argument("--fit", metavar="FIELD", help="find the largest value of this integer option that fits")
    parser.add_argument("--json", action="store_true", help="print the reports as a JSON list")
    parser.add_argument("--program", metavar="DIR", help="write the optimized program text of each slice there")
    arguments, options = parser.parse_known_args(argv)
    try:
        topologies = [traceable_topology(name).name for name in arguments.topology.split(",")]
        if not Path(arguments.script).is_file():
            raise ValueError(f"no such script: {arguments.script}")
        check_private_interfaces()
        say = (lambda line: print(line, file=sys.stderr)) if arguments.json else print
        reports, found = [], True
        for topology in topologies:
            if arguments.fit:
                value, best = fit(arguments.script, topology, arguments.fit, options, say)
                say(f"{topology}: largest {arguments.fit} that fits is {value}" if best else f"{topology}: none fits")
                reports += [best] if best else []
                found &= best is not None
            else:
                reports.append(compile_script(arguments.script, topology, options, arguments.program))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, ScriptError) else 2
    if arguments.json:
        print(json.dumps([dataclasses.asdict(r) for r in reports], indent=2))
    elif reports:
        print(format_report(reports[0]) if len(reports) == 1 else format_table(reports))
    return 0 if found and all(r.fits for r in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
