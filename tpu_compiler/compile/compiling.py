"""Hands a traced step to libtpu's compiler. Private interfaces of jax are here and in newest_child.py alone."""

import contextlib
import dataclasses
import io
import itertools
import re
import resource
import struct
import sys
import threading
import time
from collections.abc import Callable

import jax  # after prepare_environment: jax reads its variables when it is imported
from jax import export
from jax._src.interpreters.mlir import make_ir_context
from jax._src.lib import _jax
from jax.extend.mlir import ir

from tpu_compiler.compile import newest_child
from tpu_compiler.compile.newest import request_of, slice_of
from tpu_compiler.compile.traced import Traced
from tpu_compiler.estimate.reading import COLLECTIVES, HOST, with_source_lines
from tpu_utils.base.errors import OTHERS
from tpu_utils.base.hardware import GIB, Topology, parse_topology
from tpu_utils.options.virtual_slice import quiet_libtpu

# removed: PyTorch/XLA records the innermost Python frame, ours while we trace; op_name's scope has the user's line
OUR_FRAME = re.compile(r' source_file="[^"]*" source_line=\d+(?: source_end_line=\d+)?(?: source_column=\d+)?')


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


def compile_only_devices(topology: Topology) -> list:
    """libtpu's devices of a slice, in the order of PyTorch/XLA."""
    quiet_libtpu()
    return newest_child.compile_only_devices(slice_of(topology))


def lower_pallas_for(compile_for: str) -> None:
    """From here on, Pallas kernels of this process are lowered for the slice's chips. Call it before tracing.

    jax asks the device whether it is a TPU, and how old its compiler is; what it writes is the same for all chips, and
    which one it is, the compiler decides. So a chip that the installed libtpu does not know has v6e's kernels.
    """
    topology = parse_topology(compile_for)
    known = parse_topology("v6e-1") if topology.hardware.newest_only else topology
    jax.config.update("jax_default_device", compile_only_devices(known)[0])


def compile_program(traced: Traced, topology: Topology) -> Compiled:
    """Compile for a slice with libtpu. Raises jax.errors.JaxRuntimeError with the compiler's message."""
    quiet_libtpu()
    with progress(f"compiling for {topology.name}"):
        executable, figures = newest_child.compile_program(traced.hlo, request_of(traced, topology), {})
    return compiled_program(traced, executable.hlo_modules()[0].to_string(), figures)


def compile_elsewhere(ask: Callable, traced: Traced, topology: Topology, doing: str = "compiling") -> Compiled:
    """As compile_program, in a process of its own. ask: compile_there() or plan_program(), which know where."""
    with progress(f"{doing} for {topology.name}"):
        answer, text = ask(traced, topology)
    if "error" in answer:
        raise jax.errors.JaxRuntimeError(answer["error"])
    return compiled_program(traced, text, answer)


def compiled_program(traced: Traced, text: str, figures: dict) -> Compiled:
    return Compiled(text=with_source_lines(text) if traced.given else OUR_FRAME.sub("", text), **figures)


OVERWRITTEN = r"(?:buffer_donor|input_output_alias)=\{(.*?)\s\}"
"""In the first line of HLO text: the inputs whose buffers outputs may take."""
ON_HOST = "that does not come through here; lower the program with what goes in and out in the device's memory"
UNREADABLE = (*OTHERS, ir.MLIRError, struct.error)
"""What jax raises for a program that it cannot read."""


def hlo_of_text(text: str) -> bytes:
    """Serialized HloModuleProto of HLO text. Raises UNREADABLE for another text.

    What the program says of outputs that overwrite inputs stays in the text alone: Traced.donated has it, and the
    compiler refuses to be told both ways.
    """
    header = text.partition("\n")[0]
    if HOST in header:
        raise ValueError(f"an argument or a result lies in the host's memory: {ON_HOST}")
    text = text.replace(header, re.sub(rf"{OVERWRITTEN},? ?", "", header), 1)
    numbers = itertools.count(1 + max(map(int, re.findall(r"\bchannel_id=(\d+)", text)), default=0))
    collective = rf"( (?:{'|'.join(COLLECTIVES)})(?:-start)?\(.*\bchannel_id=)\d+"
    text = re.sub(collective, lambda found: f"{found[1]}{next(numbers)}", text)  # as number_collectives()
    module = _jax.hlo_module_from_text(text)
    return module.as_serialized_hlo_module_proto()


def hlo_of_stablehlo(content: bytes) -> tuple[bytes, str]:
    """(as of hlo_of_text, HLO text) of StableHLO: text, bytecode, a portable artifact, or what jax.export wrote."""
    if content.startswith(b"ML\xefR"):
        if b"StableHLO_v" in content[:64]:  # who wrote it; else it is MLIR's own bytecode
            content = _jax.mlir.deserialize_portable_artifact(content)
    elif b"\0" in content[:4096]:
        content = export.deserialize(bytearray(content)).mlir_module()
    with make_ir_context():
        module = ir.Module.parse(content)
        number_collectives(module)
        main = next((o for o in module.body.operations if str(o.attributes["sym_name"]) == '"main"'), None)
        if main is None or not main.regions[0].blocks:
            raise ValueError("it has no function main with a body")
        if re.search(r"\?x|<\?", str(main.type)):
            raise ValueError(f"main has shapes that are not fixed, {main.type!s:.100}")
        arguments = []
        named = main.attributes  # a program may have none of arguments
        for attributes in named["arg_attrs"] if "arg_attrs" in named else ():  # noqa: SIM401, it has no get()
            known = {a.name: a.attr for a in attributes}
            if "host" in str(known.get("mhlo.memory_kind", "")):
                raise ValueError(f"an argument of main lies in {known['mhlo.memory_kind']}: {ON_HOST}")
            if known.pop("tf.aliasing_output", None):
                known["jax.buffer_donor"] = ir.BoolAttr.get(True)
            arguments.append(ir.DictAttr.get(known))
        for attributes in named["res_attrs"] if "res_attrs" in named else ():  # noqa: SIM401
            if any(a.name == "mhlo.memory_kind" and "host" in str(a.attr) for a in attributes):
                raise ValueError(f"a result of main lies in the host's memory: {ON_HOST}")
        if arguments:
            main.arg_attrs = ir.ArrayAttr.get(arguments)
        written = io.BytesIO()
        module.operation.write_bytecode(written)
        computation = _jax.mlir.mlir_module_to_xla_computation(written.getvalue(), False, False)
        counts = {a.name: str(a.attr).partition(" ")[0] for a in module.operation.attributes}
    text = computation.as_hlo_text()
    partitions, replicas = (counts.get(f"mhlo.num_{name}", 1) for name in ("partitions", "replicas"))
    header = f" num_partitions={partitions}, replica_count={replicas},"
    return computation.as_serialized_hlo_module_proto(), text.replace(",", f",{header}", 1)


def number_collectives(module: ir.Module) -> None:
    """Give each collective a channel of its own. jax.shard_map writes all of a program on channel 1, and a channel is
    what tells the pieces of one collective, which the compiler takes apart, from those of another. A function with
    collectives that is called again is a copy from then on: the compiler would put the same channel in each place."""
    functions = {str(o.attributes["sym_name"]).strip('"'): o.operation for o in module.body.operations}
    numbers = itertools.count(1 << 20)  # sends and what receives them keep theirs
    called = set()

    def look(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "func.call":
            name = str(operation.attributes["callee"]).strip('@"')
            if name in called and has_collectives(functions[name], functions):
                copied = functions[name].clone()
                copied.attributes["sym_name"] = ir.StringAttr.get(f"{name}_again_{next(numbers)}")
                module.body.append(copied)
                operation.attributes["callee"] = ir.FlatSymbolRefAttr.get(copied.attributes["sym_name"].value)
                copied.walk(look)
            elif name not in called:
                called.add(name)
                functions[name].walk(look)
        elif is_collective(operation):
            handle = str(operation.attributes["channel_handle"])
            operation.attributes["channel_handle"] = ir.Attribute.parse(
                re.sub(r"handle = \d+", f"handle = {next(numbers)}", handle)
            )
        return ir.WalkResult.ADVANCE

    if "main" in functions:
        functions["main"].walk(look)


def is_collective(operation: ir.Operation) -> bool:
    is_one = operation.name.removeprefix("stablehlo.").replace("_", "-") in COLLECTIVES
    return is_one and "channel_handle" in operation.attributes


def has_collectives(function: ir.Operation, functions: dict[str, ir.Operation]) -> bool:
    """Also in the functions that it calls."""
    found = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "func.call":
            found.append(has_collectives(functions[str(operation.attributes["callee"]).strip('@"')], functions))
        found.append(is_collective(operation))
        return ir.WalkResult.ADVANCE

    function.walk(look)
    return any(found)


@contextlib.contextmanager
def progress(doing: str):
    """Says on stderr what to expect, then that the compiler still works: one moving line on a terminal, else lines,
    each after twice the time of the one before."""
    done = threading.Event()
    start = time.monotonic()
    terminal = sys.stderr.isatty()

    def tell() -> None:
        wait = 1 if terminal else 10
        if not done.wait(wait):
            expected = "Qwen3 8B's 36 unrolled layers took a minute to trace and plan"
            if doing.startswith("compiling"):
                expected = "GPT-2's 12 layers took two minutes on two quiet cores"
            print(f"{doing}: {expected}", file=sys.stderr, flush=True)
        while not done.wait(wait):
            wait *= 1 if terminal else 2
            line = f"{doing}: {time.monotonic() - start:.0f} s"
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


def host_peak_gib() -> float:
    """Peak host memory of this process, or of a child process that has ended, such as the newer compiler."""
    return (
        max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024 / GIB
    )
