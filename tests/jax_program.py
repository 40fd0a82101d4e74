"""Lowers one layer of a transformer, sharded over 8 devices, for TPU: python tests/jax_program.py FOLDER v6e-8

Writes the program in each form that `aot_tpu.py --hlo` reads, and what jax itself says of its memory into memory.json.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_compiler.compile.compiling import compile_only_devices
from tpu_utils.base.hardware import parse_topology
from tpu_utils.options.virtual_slice import quiet_libtpu

WIDTH, HEADS, LENGTH, BATCH = 128, 2, 128, 8
SHAPES = dict(qkv=(WIDTH, 3 * WIDTH), out=(WIDTH, WIDTH), up=(WIDTH, 4 * WIDTH), down=(4 * WIDTH, WIDTH))


def loss(weights, tokens):
    q, k, v = jnp.split((tokens @ weights["qkv"]).reshape(BATCH, LENGTH, HEADS, -1), 3, axis=-1)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    hidden = tokens + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(BATCH, LENGTH, WIDTH) @ weights["out"]
    return jnp.mean((hidden + jax.nn.gelu(hidden @ weights["up"]) @ weights["down"]) ** 2)


def step(weights, tokens):
    mean, gradients = jax.value_and_grad(loss)(weights, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), mean


def calls_the_host(weights, tokens):
    jax.debug.print("loss {}", loss(weights, tokens))
    return step(weights, tokens)


def main(folder: Path, slice_name: str) -> None:
    quiet_libtpu()
    mesh = Mesh(np.array(compile_only_devices(parse_topology(slice_name))), ("fsdp",))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows) for name, shape in SHAPES.items()}
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32, sharding=rows)
    sharded = dict(donate_argnums=0, out_shardings=(rows, NamedSharding(mesh, PartitionSpec())))
    jitted = jax.jit(step, **sharded)
    lowered = jitted.trace(weights, tokens).lower(lowering_platforms=("tpu",))
    (folder / "shardy.mlir").write_text(lowered.as_text(debug_info=True))
    (folder / "shardy.txt").write_text(lowered.as_text("hlo"))
    exported = export.export(jitted, platforms=["tpu"])(weights, tokens)
    (folder / "exported.bin").write_bytes(exported.serialize())
    (folder / "portable.bytecode").write_bytes(exported.mlir_module_serialized)
    compiled = lowered.compile()
    (folder / "optimized.txt").write_text(compiled.as_text())
    stats = compiled.memory_analysis()
    names = ("argument_size_in_bytes", "temp_size_in_bytes", "generated_code_size_in_bytes", "alias_size_in_bytes")
    (folder / "memory.json").write_text(json.dumps({name: getattr(stats, name) for name in names}))
    (folder / "callback.mlir").write_text(jax.jit(calls_the_host).trace(weights, tokens).lower().as_text())
    alone = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), each) for each in (weights, tokens)]
    alone_jitted = jax.jit(step, donate_argnums=0)  # says which output takes which input's buffer
    lowered = alone_jitted.trace(*alone).lower(lowering_platforms=("tpu",))
    (folder / "alone.mlir").write_text(lowered.as_text())
    (folder / "alone.txt").write_text(lowered.as_text("hlo"))
    jax.config.update("jax_use_shardy_partitioner", False)
    lowered = jax.jit(step, **sharded).trace(weights, tokens).lower(lowering_platforms=("tpu",))
    (folder / "gspmd.mlir").write_text(lowered.as_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
