"""Compiles one program with the libtpu of another environment: python newest_child.py FOLDER. Started by newest.py.

It runs under a newer jax and libtpu, without torch and without this project's other modules, so it stands alone. FOLDER
holds program.pb, a serialized HloModuleProto, and request.json; it leaves answer.json, and program.txt if it compiled.
Every private interface of the newer jax is in this file.
"""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters.mlir import make_ir_context
from jax._src.lib import _jax
from jax.experimental import topologies
from jax.extend.mlir import hlo_to_stablehlo, ir


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    try:
        answer = compile_program((folder / "program.pb").read_bytes(), request, folder)
    except jax.errors.JaxRuntimeError as error:  # the compiler's own words: they are the answer
        answer = {"error": str(error)}
    (folder / "answer.json").write_text(json.dumps(answer))


def compile_program(hlo: bytes, request: dict, folder: Path) -> dict:
    """What compiling.py does with the libtpu that belongs to PyTorch/XLA, call by call, but for the program's text.

    The text is the one that libtpu itself writes. jaxlib would read the program back first (hlo_modules), and a libtpu
    may be newer than any jaxlib: 0.10.2 refuses the collectives that 0.0.51 and 0.0.52 give to TPU7x's SparseCores,
    "async-update instruction should have 1 operands but sees 2". Where it can read, both texts say the same.
    """
    replicas, partitions = request["replicas"], request["partitions"]
    described = topologies.get_topology_desc(
        request["topology"], platform="tpu", chips_per_host_bounds=tuple(request["chips_per_host"]), **request["slice"]
    )
    devices = sorted(described.devices, key=lambda device: device.id)[: replicas * partitions]
    options = _jax.CompileOptions()
    options.num_replicas, options.num_partitions = replicas, partitions
    dump = folder / "dump"
    own = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": "True"}
    options.env_option_overrides = list((request["options"] | own).items())
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = replicas, partitions
    build.use_spmd_partitioning = partitions > 1
    build.use_shardy_partitioner = request["shardy"]
    build.allow_spmd_sharding_propagation_to_output = request["free_outputs"]
    build.device_assignment = _jax.DeviceAssignment.create(np.reshape([d.id for d in devices], (replicas, partitions)))
    start = time.monotonic()
    with make_ir_context():
        module = ir.Module.parse(hlo_to_stablehlo(hlo))
        main = next(o for o in module.body.operations if ir.StringAttr(o.attributes["sym_name"]).value == "main")
        arguments = []
        free = []  # inputs whose sharding the partitioner may choose
        for attributes, donated, sharding in zip(main.arg_attrs, request["donated"], request["shardings"], strict=True):
            known = {a.name: a.attr for a in attributes}
            if donated:
                known["jax.buffer_donor"] = ir.BoolAttr.get(True)
            free.append(request["given"] and "mhlo.sharding" not in known)
            if partitions > 1 and not request["given"]:
                known.setdefault("mhlo.sharding", ir.StringAttr.get(sharding or "{replicated}"))
            arguments.append(ir.DictAttr.get(known))
        main.arg_attrs = ir.ArrayAttr.get(arguments)
        if any(free):
            build.allow_spmd_sharding_propagation_to_parameters = free
        if request["shardy"] and "res_attrs" in main.attributes:  # GSPMD's; those of a scalar alone turn Shardy off
            del main.attributes["res_attrs"]
        executable = compiler.backend_compile_and_load(
            devices[0].client, module, _jax.DeviceList(tuple(devices)), options, []
        )
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    written = list(dump.glob("*.after_codegen.txt"))
    if len(written) != 1:
        raise RuntimeError(f"libtpu wrote {len(written)} texts of compiled programs into xla_dump_to; expected one")
    written[0].rename(folder / "program.txt")
    return {
        "peak_bytes": memory.peak_memory_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "program_bytes": memory.generated_code_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "seconds": time.monotonic() - start,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
