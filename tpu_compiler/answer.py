"""Compiles a traced step with libtpu, and makes the report of what the compiler said. No torch."""

import dataclasses
import json
import math
import os
import re
import sys
import textwrap
import time
from base64 import b64decode
from functools import partial
from pathlib import Path

from jax.errors import JaxRuntimeError
from jax.extend.mlir import ir

try:
    from jaxlib._jax import HloModule, HloPrintOptions
except ImportError:  # jax 0.10, which --through torch may run under
    from jaxlib._hlo import HloModule, HloPrintOptions

from tpu_compiler.compile import compiling
from tpu_compiler.compile.cache import Cache, digest
from tpu_compiler.compile.compiling import Compiled, compile_elsewhere, compile_program, host_peak_gib
from tpu_compiler.compile.newest import CHILD, compile_there, environment_versions
from tpu_compiler.compile.newest_child import program_inputs
from tpu_compiler.compile.planned import PLAN_VARIABLE, plan_program
from tpu_compiler.compile.traced import Traced
from tpu_compiler.decide.search import OUTPUT_VARIABLE
from tpu_compiler.estimate import reading
from tpu_compiler.estimate.plan_prices import link_share, with_prices
from tpu_compiler.estimate.report import PLANNED, ROOFLINE, Report
from tpu_compiler.estimate.rules import left_out, moved_bytes, ruled_ms
from tpu_compiler.estimate.schedule import LinkShare, all_links, exposed_ms, read_host_transfers, seconds_on_links
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import GIB, Topology, parse_topology
from tpu_utils.options.virtual_slice import COMPILER_VARIABLE, check_private_interfaces


def ask_compiler(
    traced: Traced,
    topology: Topology | str,
    *,
    examples: int | None = None,
    unit: str = "examples",
    model_flops: float | None = None,
    settings: dict | None = None,
    cache: Cache | None = None,
) -> tuple[Report, str]:
    """Compile a traced step for a slice: (Report, optimized program text; empty when it does not compile).

    examples (or tokens, with unit="tokens") and model_flops are those of one step over all devices. cache: where what
    the compiler returned is looked up, and kept. Raises InputError for a program of another number of devices.
    """
    topology, settings = parse_topology(topology) if isinstance(topology, str) else topology, settings or {}
    newest = Path(os.environ[COMPILER_VARIABLE]) if os.environ.get(COMPILER_VARIABLE) else None
    versions = environment_versions(newest) if newest else check_private_interfaces()
    python = newest / "bin" / "python" if newest else Path(sys.executable)
    start = time.monotonic()
    devices = traced.partitions * traced.replicas
    if devices not in (1, topology.num_devices):
        raise InputError(
            f"{settings.get('hlo', 'the step')} is a program for {devices} devices, and {topology.name} has "
            f"{topology.num_devices}; expected a slice of {devices} devices; choose one, or lower the program again "
            f"for a mesh of {topology.num_devices}"
        )
    program = f"SPMD over {devices} devices" if traced.partitions > 1 else f"{devices} replicas"
    if devices == 1:
        idle = topology.num_devices - 1
        program = f"one device, {idle} of the slice idle" if idle else "one device"
    facts = dict(topology=topology.name, devices=devices, program=program, model_flops=model_flops, unit=unit)
    facts |= dict(limit_bytes=int(topology.hardware.limit_gib * GIB), settings=settings, versions=versions)
    facts |= dict(trace_seconds=traced.seconds, traced=traced_hash(traced, topology))
    name = f"program_{program_key(traced, topology, versions)}" if cache else ""
    planned = bool(os.environ.get(PLAN_VARIABLE))  # then a kept compile does not count: plans are held against plans
    compiled = cache.read(name, Compiled) if cache and not planned else None
    facts["from_cache"] = compiled is not None
    if compiled is None and not planned and (expected := expected_time(settings)):
        print(f"{expected} for {topology.name}", file=sys.stderr, flush=True)
    try:
        if planned:
            compiled = compile_elsewhere(partial(plan_program, python), traced, topology, "planning")
        elif compiled is None and newest:
            compiled = compile_elsewhere(partial(compile_there, python), traced, topology)
        compiled = compiled or compile_here(traced, topology)
    except JaxRuntimeError as error:
        return _refused(str(error), traced, facts | {"compile_seconds": time.monotonic() - start}), ""
    if cache and not facts["from_cache"] and not planned:
        cache.write(name, compiled)
    if planned:
        compiled = dataclasses.replace(compiled, text=with_prices(compiled.text, topology))
    result = _accepted(compiled, traced, topology, facts, examples, link_share if planned else all_links)
    if planned:
        said = dict(reason=PLANNED, estimate_label=ROOFLINE, communication_label=ROOFLINE)
        return dataclasses.replace(result, compiles=False, fits=not result.over_bytes, **said), ""
    if result.over_bytes:  # libtpu 0.0.21 leaves the arguments out of its own check
        result = dataclasses.replace(result, fits=False, reason=f"needs {result.memory_text}")
    return result, compiled.text


def expected_time(settings: dict) -> str:
    """How long a language model will compile, from its layers; '' for another program.

    A bound by the seconds that are kept in benchmarks/budgets.json, for a machine with two free cores.
    """
    layers, scanned = settings.get("layers"), settings.get("scan_layers")
    if not layers:
        return ""
    minutes = 7 if scanned else math.ceil((60 + 20 * layers) / 60)
    what = f"one of {layers} layers" if scanned else f"{layers} layers (--scan_layers compiles one of them)"
    return f"compiling {what}, up to {minutes} minutes on two free cores,"


def _accepted(
    compiled: Compiled, traced: Traced, topology: Topology, facts: dict, examples: int | None, share: LinkShare
) -> Report:
    """The report when the compiler accepts, read from the compiled program. share: of the links' bandwidth that a kind
    of collective has."""
    hardware = topology.hardware
    devices = facts["devices"]
    model_flops = facts["model_flops"]
    computations = reading.parse_program(compiled.text)
    memory = read_memory(compiled, computations, traced.roles)
    host = read_host_transfers(computations)
    host_bytes = sum(direction["bytes"] for direction in host.values()) * hardware.devices_per_chip
    collectives = reading.read_collectives(computations, devices)
    (cycles, unpriced), modules = reading.read_cycles(computations), reading.read_modules(computations)
    seconds = sum(cycles.values()) / (hardware.clock_ghz * 1e9)  # 0.0: nothing in it has an estimate
    peak_flops = devices * hardware.bf16_tflops * 1e12 / hardware.devices_per_chip
    to_other_slices = hardware.slice_gb_per_s and hardware.slice_gb_per_s / hardware.devices_per_chip
    on_links = seconds_on_links(computations, topology, devices, share)
    loops = sum(operation.kind == "while" for operations in computations.values() for operation in operations)
    return Report(
        **facts,
        compiles=True,
        fits=True,
        reason="",
        peak_bytes=sum(memory.values()),
        memory=memory,
        compiler_peak_bytes=compiled.peak_bytes,
        flops=compiled.flops,
        loops=loops,
        # the compiler counts the body of a loop once, so there is nothing to compare
        flops_ratio=compiled.flops * devices / model_flops if model_flops and not loops else None,
        collectives=collectives,
        communication_lower_bound_ms=sum(times * each for times, each in on_links.values()) * 1e3,
        slice_transfers=reading.read_slice_transfers(computations, topology.num_slices),
        network_gb_per_s=to_other_slices,
        host_transfers=host,
        host_transfer_ms=host_bytes / hardware.host_gb_per_s / 1e6 if hardware.host_gb_per_s else 0.0,
        exposed_ms=exposed_ms(computations, topology, devices, share),
        estimated_ms=seconds * 1e3,
        estimated_per_second=examples / seconds if examples and seconds else None,
        estimated_mfu=model_flops / (seconds * peak_flops) if model_flops and seconds else None,
        operations_without_estimate=dict(unpriced.most_common()),
        ruled_ms=ruled_ms(computations, topology),
        left_out=left_out(computations, topology),
        assumed=reading.assumed(computations),
        moved_bytes=moved_bytes(computations),
        costliest_operations=reading.read_operations(computations, hardware.clock_ghz * 1e6) if traced.given else [],
        costliest_lines=[(line, c / hardware.clock_ghz / 1e6) for line, c in cycles.most_common(10)],
        costliest_modules=[(module, c / hardware.clock_ghz / 1e6) for module, c in modules.most_common()],
        module_groups=[(name, n, c / hardware.clock_ghz / 1e6) for name, n, c in reading.group_modules(modules)[:10]],
        largest_results=reading.read_largest_results(computations),
        compile_seconds=compiled.seconds,
        host_peak_gib=host_peak_gib(),
    ).with_prediction()


def traced_hash(traced: Traced, topology: Topology) -> str:
    """Hash of a traced program without the names of source lines: for equal hashes a compiler gives equal answers."""
    printed = HloPrintOptions()
    printed.print_metadata, printed.print_large_constants = False, True
    text = HloModule.from_serialized_hlo_module_proto(traced.hlo).to_string(printed)
    chips = [topology.name, topology.hardware.compiler_options]
    return digest(without_lines(text).encode(), facts_of_inputs(traced), chips, {}, read_by_libtpu())


def without_lines(text: str) -> str:
    """HLO whose Pallas kernels are MLIR's text, which does not name the files and lines they were written in."""
    return re.sub(r'(?<="body": ")([^"]+)', lambda body: kernel(body[1]).get_asm(enable_debug_info=False), text)


def kernel(body: str | bytes) -> ir.Operation:
    context = ir.Context()
    context.allow_unregistered_dialects = True
    return ir.Module.parse(b64decode(body), context).operation


KERNELS = 7
"""The version of Pallas kernels that libtpu 0.0.21 reads, at most; it says so when it comes to them, after minutes. jax
writes what an attached TPU reads, and without one its newest: 0.7.1 version 8, 0.10 version 9."""


def compile_here(traced: Traced, topology: Topology) -> Compiled:
    """As compile_program. Raises JaxRuntimeError at once for kernels that libtpu would refuse after minutes."""
    if unread := unread_kernels(traced.hlo):
        raise JaxRuntimeError(unread)
    return compile_program(traced, topology)


def unread_kernels(hlo: bytes) -> str:
    """Why the installed compiler will not take a serialized program; "" if its kernels are no reason."""
    named = "stable_mosaic.version"
    kernels = [kernel(body).attributes for body in set(re.findall(rb'"body": ?"([\w+/=]+)', hlo))]
    newest = max([ir.IntegerAttr(attributes[named]).value for attributes in kernels if named in attributes] + [0])
    if newest <= KERNELS:
        return ""
    return (
        f"it has Pallas kernels of version {newest}, and libtpu 0.0.21 reads {KERNELS} at most: ask --compiler "
        "newest_alone, or --plan, which compiles no kernel"
    )


def facts_of_inputs(traced: Traced) -> list:
    """Every field but hlo and seconds. One with a default counts where it says more: a new field moves no kept hash."""
    counted = ("roles", "donated", "shardings", "partitions", "replicas")
    facts = [getattr(traced, name) for name in counted]
    for field in dataclasses.fields(traced):
        value = getattr(traced, field.name)
        if field.name not in (*counted, "hlo", "seconds") and value != field.default:
            facts.append([field.name, value])
    return facts


def read_by_libtpu() -> list[str]:
    """Options that libtpu has read from the environment."""
    return sorted(os.environ.get("LIBTPU_INIT_ARGS", "").split())


def program_key(traced: Traced, topology: Topology, versions: dict[str, str]) -> str:
    """A hash of all that decides what the compiler returns, the code that asks it included."""
    chips = [topology.compiler_name, topology.num_slices, topology.chips_per_host, topology.hardware.compiler_options]
    code = Path(compiling.__file__).read_bytes() + CHILD.read_bytes()
    return digest(traced.hlo, code, facts_of_inputs(traced), chips, read_by_libtpu(), versions)


RESERVE = 0.5
"""What a loaded program takes beside itself and its data, as a share of the program."""


def read_memory(compiled: Compiled, computations: dict, roles: tuple[str, ...]) -> dict[str, int]:
    """Bytes per device of parameters, optimizer_state, inputs, activations, program, reserve.

    Activations are what the compiler's peak has beside the inputs: its own figure of temporaries counts the gaps
    between them twice, as its message says where it refuses. But a small program's peak is of on-chip memory, and that
    of one with more on the host than on the device is the host's: the smaller counts. The program itself is in no peak,
    and is loaded beside all else: 2 GiB of a large model whose layers are not scanned. On hardware such programs took
    half as much again, for which no reason is published: docs/results/loads.csv.
    """
    memory = dict.fromkeys(("parameters", "optimizer_state", "inputs"), 0)
    for operation in computations["ENTRY"]:
        if operation.kind == "parameter" and reading.HOST not in operation.type:
            memory[roles[int(operation.find(r" parameter\((\d+)\)"))]] += sum(reading.shape_bytes(operation.type))
    memory["inputs"] += compiled.argument_bytes - sum(memory.values())  # rounding of small buffers
    activations = compiled.temporary_bytes + compiled.output_bytes
    if compiled.peak_bytes > compiled.argument_bytes:
        activations = min(activations, compiled.peak_bytes - compiled.argument_bytes)
    program = compiled.program_bytes
    return memory | {"activations": activations, "program": program, "reserve": int(program * RESERVE)}


def _refused(message: str, traced: Traced, facts: dict) -> Report:
    """The report when the compiler refuses. Out of memory comes with figures; its total leaves the arguments out."""
    used = re.search(r"Ran out of memory in memory space hbm\. Used ([\d.]+)([KMGT]) of [^\n]*", message)
    memory = {}
    # libtpu 0.0.52 says it the second way
    if found := used or re.search(r"total memory required for HLO temporaries \(([\d.]+)(G)\) exceeds", message):
        counted = re.search(r"arguments\s+([\d.]+)([BKMGT])", message)
        activations = bytes_of(*found.groups()) - (bytes_of(*counted.groups()) if counted else 0)
        memory = argument_bytes(traced) | {"activations": max(0, activations)}
    reason = used[0] if used else textwrap.shorten(message.strip().splitlines()[0], 300, placeholder=" ...")
    if "xla.sdy" in message:
        reason = "it does not take this program's Shardy annotations; lower it with jax_use_shardy_partitioner=False"
    peak = sum(memory.values())
    facts |= dict(compiles=False, fits=False, reason=reason, peak_bytes=peak, memory=memory)
    return Report(**facts, host_peak_gib=host_peak_gib())


def bytes_of(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** "BKMGT".index(unit))


def argument_bytes(traced: Traced) -> dict[str, int]:
    """Bytes of the program's inputs per device by role, from the traced shapes and shardings, without tile padding."""
    memory = dict.fromkeys(("parameters", "optimizer_state", "inputs"), 0)
    with program_inputs(traced.hlo) as (_, main):
        inputs = zip(traced.roles, main.arguments, main.arg_attrs, traced.shardings, strict=True)
        for role, argument, attributes, marked in inputs:
            kind = ir.RankedTensorType(argument.type)
            element = str(kind.element_type)  # such as bf16, i1, f8E4M3FN or complex<f32>
            size = math.prod(kind.shape) * max(1, int(re.search(r"\d+", element)[0]) // 8)
            size *= 2 if element.startswith("complex") else 1
            sharding = next((str(a.attr) for a in attributes if a.name == "mhlo.sharding"), marked)
            tiles = re.search(r"devices=\[([\d,]+)\]", sharding)
            if tiles:
                counts = [int(t) for t in tiles[1].split(",")][: len(kind.shape)]  # an extra last number: replicas
                size = math.ceil(size / math.prod(counts))
            memory[role] += size
    return memory


def hand_over(traced: Traced, result: Report, text: str) -> int:
    """Write the answer into the folder that compile_script, in the parent process, reads. Returns the exit code."""
    folder = Path(os.environ[OUTPUT_VARIABLE])
    (folder / "program.txt").write_text(text)
    (folder / "traced.hlo.pb").write_bytes(traced.hlo)
    (folder / "inputs.json").write_text(json.dumps({"roles": traced.roles, "donated": traced.donated}))
    (folder / "report.json").write_text(json.dumps(dataclasses.asdict(result), indent=2, default=str))
    return result.exit_code
