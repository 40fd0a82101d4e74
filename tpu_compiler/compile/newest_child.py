"""Compiles one program with libtpu. compiling.py calls it; newest.py starts python newest_child.py FOLDER.

That runs under another environment's jax and libtpu, without torch and without this project's other modules, so it
stands alone. FOLDER holds program.pb, a serialized HloModuleProto, and request.json; it leaves answer.json, and
program.txt if it compiled. Every private interface of jax that compiling a program needs is in this file.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters.mlir import make_ir_context
from jax._src.lib import _jax
from jax.experimental import topologies
from jax.extend.mlir import hlo_to_stablehlo, ir


def main(folder: Path) -> None:
    """The text is the one that libtpu itself writes. jaxlib would read the program back first (hlo_modules), and a
    libtpu may be newer than any jaxlib: 0.10.2 refuses the collectives that 0.0.51 and 0.0.52 give to TPU7x's
    SparseCores, "async-update instruction should have 1 operands but sees 2". Where it can read, both say the same."""
    request, dump = json.loads((folder / "request.json").read_text()), folder / "dump"
    writing = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": "True"}
    try:
        _, answer = compile_program((folder / "program.pb").read_bytes(), request, writing)
        written = list(dump.glob("*.after_codegen.txt"))
        if len(written) != 1:
            raise RuntimeError(f"libtpu wrote {len(written)} texts of compiled programs into xla_dump_to; expected one")
        written[0].rename(folder / "program.txt")
    except jax.errors.JaxRuntimeError as error:  # the compiler's own words: they are the answer
        answer = {"error": str(error)}
    (folder / "answer.json").write_text(json.dumps(answer))


def compile_only_devices(request: dict[str, Any]) -> list:
    """libtpu's devices of a slice that is not attached: programs can be compiled for them, but not run.

    Sorted by id, as in PyTorch/XLA (pjrt_computation_client.cpp); libtpu lists them host by host. So the first axis of
    a mesh over all devices is the one that spans slices.
    """
    described = topologies.get_topology_desc(
        request["topology"], platform="tpu", chips_per_host_bounds=tuple(request["chips_per_host"]), **request["slice"]
    )
    return sorted(described.devices, key=lambda device: device.id)


def compile_program(hlo: bytes, request: dict[str, Any], options: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    """(executable, the numbers of compiling.Compiled). request: of newest.request_of(). options: of XLA.

    Raises jax.errors.JaxRuntimeError with the compiler's message.
    """
    replicas, partitions = request["replicas"], request["partitions"]
    devices = compile_only_devices(request)[: replicas * partitions]
    compile_options = _jax.CompileOptions()
    compile_options.num_replicas, compile_options.num_partitions = replicas, partitions
    compile_options.env_option_overrides = list(options.items())
    build = compile_options.executable_build_options
    build.num_replicas, build.num_partitions = replicas, partitions
    build.use_spmd_partitioning = partitions > 1
    build.use_shardy_partitioner = request["shardy"]
    build.allow_spmd_sharding_propagation_to_output = list(request["free_outputs"])
    build.device_assignment = _jax.DeviceAssignment.create(np.reshape([d.id for d in devices], (replicas, partitions)))
    start = time.monotonic()
    with program_inputs(hlo) as (module, main):
        # the traced program says nothing of aliasing; PyTorch/XLA adds it when it compiles, and so must we
        donor = {"jax.buffer_donor": ir.BoolAttr.get(True)}
        arguments = []
        free = []  # inputs whose sharding the partitioner may choose
        for attributes, donated, sharding in zip(main.arg_attrs, request["donated"], request["shardings"], strict=True):
            known = {a.name: a.attr for a in attributes} | (donor if donated else {})
            free.append(request["given"] and "mhlo.sharding" not in known)
            if partitions > 1 and not request["given"]:  # what a real run uploads without a sharding is replicated
                known.setdefault("mhlo.sharding", ir.StringAttr.get(sharding or "{replicated}"))
            arguments.append(ir.DictAttr.get(known))
        main.arg_attrs = ir.ArrayAttr.get(arguments)
        if any(free):
            build.allow_spmd_sharding_propagation_to_parameters = free
        if request["shardy"] and "res_attrs" in main.attributes:  # GSPMD's; those of a scalar alone turn Shardy off
            del main.attributes["res_attrs"]
        executable = compiler.backend_compile_and_load(
            devices[0].client, module, _jax.DeviceList(tuple(devices)), compile_options, []
        )
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return executable, {
        "peak_bytes": memory.peak_memory_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "program_bytes": memory.generated_code_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "seconds": time.monotonic() - start,
    }


@contextlib.contextmanager
def program_inputs(hlo: bytes) -> Iterator[tuple]:
    """(module, its entry function) of a serialized program; usable inside the with statement."""
    with make_ir_context():
        module = ir.Module.parse(hlo_to_stablehlo(hlo))
        yield module, next(o for o in module.body.operations if ir.StringAttr(o.attributes["sym_name"]).value == "main")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
