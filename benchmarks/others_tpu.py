"""What the TPU compiler says of one step: this project's, and what users would write or pick instead.

Run:     python benchmarks/others_tpu.py                                  # all of them for one v5e: about 15 minutes
         python benchmarks/others_tpu.py --peers ours jax --topology v5p-8 v6e-1   # one chip of each
Prints:  docs/results/others_tpu.csv, a row for each program: megacycles and milliseconds by the compiler's own
         estimate, peak memory, seconds to compile. Nothing runs on a TPU. libtpu, torch_xla and jax are the same for
         every row.

GPT-2 124M, true shape: 8 x 1,024 tokens; AdamW, bfloat16 products, float32 master weights. Operations that the compiler
gives no estimate for are added by the rule of tpu_compiler/estimate/rules.py.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import answer_of, as_csv, parser_for
from language.options.shapes import ModelShape
from language.options.transformer_options import TransformerConfig
from tpu_compiler.estimate.reading import parse_program, read_cycles
from tpu_compiler.estimate.rules import ruled_ms
from tpu_utils.base.hardware import GIB, parse_topology
from tpu_utils.options.virtual_slice import check_private_interfaces, prepare_environment

SHAPE, BATCH = ModelShape(12, 12, 768, 1024, 50257), 8
PEERS = {
    "ours": "transformer_tpu.py",
    "ours_flash": "transformer_tpu.py --attention flash",
    "ours_6x128": "transformer_tpu.py --num_heads 6",
    "jax": "plain JAX",
    "nanogpt": "nanoGPT-style through torch_xla, autocast",
    "hugging_face": "Hugging Face GPT2LMHeadModel through torch_xla, autocast",
}


def compile_torch(name: str, topology) -> tuple[str, int]:
    """Optimized program text and the compiler's peak memory of a step through torch_xla."""
    import torch
    import torch_xla

    import transformer_tpu
    from benchmarks import other_programs as peers
    from language.models.gpt import GPT
    from language.models.operations import causal_attention
    from language.xla.flash_attention import flash_attention
    from tpu_compiler.compile.compiling import compile_program, lower_pallas_for
    from tpu_compiler.compile.tracing import trace_step
    from tpu_utils.options.virtual_slice import without_weights
    from tpu_utils.record.metrics import DeviceMetrics
    from tpu_utils.step.optim import learning_rates

    device = torch_xla.device()
    tokens = torch.zeros(BATCH, SHAPE.sequence_length + 1, dtype=torch.int32).to(device)
    if name.startswith("ours"):
        if name == "ours_flash":
            lower_pallas_for(topology.name)
        config = TransformerConfig(compile_for=topology.name)
        attention = flash_attention if name == "ours_flash" else causal_attention
        shape = dataclasses.replace(SHAPE, num_heads=6) if name == "ours_6x128" else SHAPE
        model = without_weights(partial(GPT, shape, torch.bfloat16, attention=attention), device)
        optimizer = transformer_tpu.build_optimizer(config, model)
        rates = learning_rates(config, config.num_steps).to(device)
        metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, device)
        step = transformer_tpu.train_step.compiled
        arguments = (model, optimizer, rates, metrics, tokens, config)
    else:
        model = without_weights(
            partial(peers.HuggingFaceGPT if name == "hugging_face" else peers.StraightGPT, SHAPE), device
        )
        model.tie()
        optimizer = peers.usual_adamw(model, capturable=True)
        for parameter in model.parameters():
            zeros = {key: torch.empty_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(1).to(device), **zeros}
        step = torch_xla.compile(peers.usual_step, full_graph=True)
        arguments = (model, optimizer, tokens)
    compiled = compile_program(trace_step(step, *arguments, owners=(model, optimizer)), topology)
    return compiled.text, compiled.peak_bytes


def compile_jax(topology) -> tuple[str, int]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from benchmarks import other_programs as peers
    from tpu_compiler.compile.compiling import compile_only_devices

    sharding = SingleDeviceSharding(compile_only_devices(topology)[0])
    parameters = jax.eval_shape(partial(peers.jax_gpt_parameters, SHAPE))
    arguments = parameters, jax.eval_shape(peers.jax_state, parameters)
    arguments += (jax.ShapeDtypeStruct((BATCH, SHAPE.sequence_length + 1), jnp.int32),)
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    step = partial(peers.jax_step, partial(peers.jax_gpt_loss, num_heads=SHAPE.num_heads, dtype="bfloat16"))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    return compiled.as_text(), compiled.memory_analysis().peak_memory_in_bytes


def one(name: str, topology_name: str, *words: str) -> None:
    """Compile in this process and print the row as JSON. words: options of the compiler, NAME=VALUE."""
    options, start = dict(word.split("=", 1) for word in words), time.monotonic()
    topology = prepare_environment(topology_name, options)
    text, peak = compile_jax(topology) if name == "jax" else compile_torch(name, topology)
    computations = parse_program(text)
    priced, _ = read_cycles(computations)
    cycles = sum(priced.values())
    added = ruled_ms(computations, topology) * topology.hardware.clock_ghz * 1e6
    milliseconds = (cycles + added) / topology.hardware.clock_ghz / 1e6
    flops = SHAPE.flops_per_token * BATCH * SHAPE.sequence_length
    mfu = flops / (milliseconds / 1e3) / (topology.hardware.bf16_tflops * 1e12)
    figures = [f"{(cycles + added) / 1e6:.1f}", f"{added / 1e6:.1f}", f"{milliseconds:.1f}", f"{mfu:.1%}"]
    print(json.dumps([*figures, f"{peak / GIB:.2f}", math.ceil(time.monotonic() - start)]))


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--topology", nargs="+", default=["v5litepod-1"])
    parser.add_argument("--options", nargs="+", default=[], metavar="NAME=VALUE", help="compiler options")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(*arguments.one)
        return 0
    for name in arguments.topology:
        try:
            parse_topology(name)
        except ValueError as error:
            parser.error(str(error))
    versions = check_private_interfaces()
    print(", ".join(f"{name} {version}" for name, version in versions.items()), file=sys.stderr, flush=True)
    print("program,slice,M cycles,of it added,ms,MFU,peak GiB,s to trace and compile", flush=True)
    failed = False
    for topology in arguments.topology:
        for name in arguments.peers:
            try:
                cells = answer_of(__file__, "--one", name, topology, *arguments.options)
            except RuntimeError as error:
                failed, cells = True, [f"failed: {error!s:.120}"]
            print(as_csv([[PEERS[name], topology, *cells]]), end="", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
