"""What the TPU compiler says of one step: this project's, and what users would write or pick instead.

Run:     python benchmarks/others_tpu.py                                  # all of them for one v5e: about 15 minutes
         python benchmarks/others_tpu.py --peers ours jax --topology v5p-8 v6e-1   # one chip of each
         python benchmarks/others_tpu.py --peers llama llama_flash llama_jax llama_hugging_face --topology v6e-1
Prints:  docs/results/others_tpu.csv, a row for each program: megacycles and milliseconds by the compiler's own
         estimate, peak memory, seconds to compile. Nothing runs on a TPU. libtpu, torch_xla and jax are the same for
         every row.

AdamW, bfloat16 products, float32 master weights. GPT-2 124M, true shape: 8 x 1,024 tokens. llama: Llama 3.2 1B with 4
layers, 4 x 2,048 tokens. Operations that the compiler gives no estimate for are added by the
rule of tpu_compiler/estimate/rules.py.
"""

import argparse
import csv
import dataclasses
import json
import math
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from language.options.llama_shape import MODEL_SIZES, LlamaShape
from language.options.shapes import ModelShape
from language.options.transformer_options import TransformerConfig
from tpu_compiler.estimate.reading import parse_program, read_cycles
from tpu_compiler.estimate.rules import ruled_ms
from tpu_utils.base.hardware import GIB, parse_topology
from tpu_utils.options.virtual_slice import check_private_interfaces, prepare_environment

SHAPE, BATCH = ModelShape(12, 12, 768, 1024, 50257), 8
LLAMA, LLAMA_BATCH = dataclasses.replace(MODEL_SIZES["llama3_1B"], num_layers=4, sequence_length=2048), 4
PEERS = {
    "ours": "transformer_tpu.py",
    "ours_flash": "transformer_tpu.py --attention flash",
    "ours_6x128": "transformer_tpu.py --num_heads 6",
    "jax": "plain JAX",
    "nanogpt": "nanoGPT-style through torch_xla, autocast",
    "hugging_face": "Hugging Face GPT2LMHeadModel through torch_xla, autocast",
    "llama": "transformer_tpu.py",
    "llama_flash": "transformer_tpu.py --attention flash",
    "llama_jax": "plain JAX",
    "llama_hugging_face": "Hugging Face LlamaForCausalLM, eager attention, through torch_xla, autocast",
}
OURS = ("ours", "ours_flash", "ours_6x128", "llama", "llama_flash")


def problem(name: str) -> tuple[ModelShape, int]:
    """Model and batch of a program."""
    if name.startswith("llama"):
        return LLAMA, LLAMA_BATCH
    return dataclasses.replace(SHAPE, num_heads=6) if name == "ours_6x128" else SHAPE, BATCH


def compile_torch(name: str, topology, options: dict[str, str]) -> tuple[str, int]:
    """Optimized program text and the compiler's peak memory of a step through torch_xla."""
    import other_programs as peers
    import torch
    import torch_xla

    import transformer_tpu
    from language.models.gpt import GPT
    from language.models.llama import Llama
    from language.models.operations import causal_attention
    from language.xla.flash_attention import flash_attention
    from tpu_compiler.compile.compiling import compile_program, lower_pallas_for
    from tpu_compiler.compile.tracing import trace_step
    from tpu_utils.options.virtual_slice import without_weights
    from tpu_utils.record.metrics import DeviceMetrics
    from tpu_utils.step.optim import learning_rates

    (shape, batch), device = problem(name), torch_xla.device()
    tokens = torch.zeros(batch, shape.sequence_length + 1, dtype=torch.int32).to(device)
    if name in OURS:
        if name.endswith("flash"):
            lower_pallas_for(topology.name)
        config = TransformerConfig(compile_for=topology.name)
        attention = flash_attention if name.endswith("flash") else causal_attention
        kind = Llama if isinstance(shape, LlamaShape) else GPT
        build = partial(kind, shape, torch.bfloat16, attention=attention)
        model = without_weights(build, device)
        optimizer = transformer_tpu.build_optimizer(config, model)
        rates = learning_rates(config, config.num_steps).to(device)
        metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, device)
        step = transformer_tpu.train_step.compiled
        arguments = (model, optimizer, rates, metrics, tokens, config)
    else:
        kinds = dict(nanogpt=peers.StraightGPT, hugging_face=peers.HuggingFaceGPT)
        kind = (kinds | dict(llama_hugging_face=peers.HuggingFaceLlama))[name]
        model = without_weights(partial(kind, shape), device)
        model.tie()
        optimizer = peers.usual_adamw(model, capturable=True)
        for parameter in model.parameters():
            zeros = {key: torch.empty_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(1).to(device), **zeros}
        step = torch_xla.compile(partial(peers.usual_step, autocast="xla"), full_graph=True)
        arguments = (model, optimizer, tokens)
    compiled = compile_program(trace_step(step, *arguments, owners=(model, optimizer)), topology, options)
    return compiled.text, compiled.peak_bytes


def compile_jax(name: str, topology, options: dict[str, str]) -> tuple[str, int]:
    import jax
    import jax.numpy as jnp
    import other_programs as peers
    from jax.sharding import SingleDeviceSharding

    from tpu_compiler.compile.compiling import compile_only_devices

    (shape, batch), sharding = problem(name), SingleDeviceSharding(compile_only_devices(topology)[0])
    if isinstance(shape, LlamaShape):
        build, loss_of = peers.jax_llama_parameters, partial(peers.jax_llama_loss, shape=shape, dtype="bfloat16")
    else:
        build = peers.jax_gpt_parameters
        loss_of = partial(peers.jax_gpt_loss, num_heads=shape.num_heads, dtype="bfloat16")
    parameters = jax.eval_shape(partial(build, shape))
    arguments = parameters, jax.eval_shape(peers.jax_state, parameters)
    arguments += (jax.ShapeDtypeStruct((batch, shape.sequence_length + 1), jnp.int32),)
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    compiled = (
        jax.jit(partial(peers.jax_step, loss_of, peers.GPT_RECIPE), donate_argnums=(0, 1))
        .lower(*arguments)
        .compile(options)
    )
    return compiled.as_text(), compiled.memory_analysis().peak_memory_in_bytes


def one(name: str, topology_name: str, *options: str) -> None:
    """Compile in this process and print the row as JSON. options: of the compiler, NAME=VALUE."""
    topology = prepare_environment(topology_name)
    (shape, batch), start = problem(name), time.monotonic()
    compile_it = compile_jax if name.endswith("jax") else compile_torch
    text, peak = compile_it(name, topology, dict(option.split("=", 1) for option in options))
    computations = parse_program(text)
    priced, _ = read_cycles(computations)
    cycles = sum(priced.values())
    added = ruled_ms(computations, topology) * topology.hardware.clock_ghz * 1e6
    milliseconds = (cycles + added) / topology.hardware.clock_ghz / 1e6
    flops = shape.flops_per_token * batch * shape.sequence_length
    mfu = flops / (milliseconds / 1e3) / (topology.hardware.bf16_tflops * 1e12)
    print(json.dumps([cycles / 1e6, added / 1e6, milliseconds, mfu, peak / GIB, time.monotonic() - start]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[p for p in PEERS if "llama" not in p])
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
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["program", "slice", "M cycles", "of it added", "ms", "MFU", "peak GiB", "s to trace and compile"])
    failed = False
    for topology in arguments.topology:
        for name in arguments.peers:
            command = [sys.executable, __file__, "--one", name, topology, *arguments.options]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                failed = True
                reason = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
                table.writerow([PEERS[name], topology, f"failed: {reason[:120]}"])
                continue
            cycles, added, ms, mfu, peak, seconds = json.loads(done.stdout.strip().splitlines()[-1])
            figures = [f"{cycles + added:.1f}", f"{added:.1f}", f"{ms:.1f}", f"{mfu:.1%}", f"{peak:.2f}"]
            table.writerow([PEERS[name], topology, *figures, math.ceil(seconds)])
            sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
