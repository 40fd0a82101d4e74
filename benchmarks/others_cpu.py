"""One training step of this project against what users would pick instead, on this machine's CPU, in one process.

Run:     python benchmarks/others_cpu.py            # MNIST CNN, a small GPT, host tracing at 12 layers
         python benchmarks/others_cpu.py gpt host   # a part of it
Prints:  docs/results/others_cpu.csv and host_tracing.csv: for each peer the first step (tracing and compiling), the
         steps after it (median of rounds taken in turn, and their range), and the graphs that torch_xla compiled.

Every peer gets the same batch from host memory each step, in float32, and is waited for every STEPS steps.
"""

import argparse
import csv
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import other_programs as peers
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

import simple_mnist_tpu
import transformer_tpu
from config import MnistConfig
from language.models.gpt import GPT
from language.options.shapes import ModelShape
from language.options.transformer_options import TransformerConfig
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.step.optim import learning_rates, make_optimizer

ROUNDS, STEPS = 7, 5
MNIST_BATCHES = 128, 256  # batch sizes of the presets development and distributed
SMALL_GPT, GPT_BATCH = ModelShape(4, 4, 256, 128, 512), 8
DEEP_GPT = ModelShape(12, 4, 64, 32, 128)  # small in everything that costs the device, 12 layers for the host


@dataclasses.dataclass
class Peer:
    name: str
    step: Callable[[], object]
    """Starts a step; its result is waited for by `wait`."""
    wait: Callable[[object], None]
    first_seconds: float = 0.0
    graphs: int = 0
    rounds: list[float] = dataclasses.field(default_factory=list)


def xla_wait(_) -> None:
    xm.wait_device_ops()


def compiles() -> int:
    found = met.metric_data("CompileTime")
    return found[0] if found else 0


def measure(all_peers: list[Peer]) -> None:
    """Fills in seconds per step, each round of each peer in turn, so that all meet the same machine."""
    for peer in all_peers:
        before, start = compiles(), time.perf_counter()
        peer.wait(peer.step())
        peer.first_seconds = time.perf_counter() - start
        print(f"{peer.name}: first step after {peer.first_seconds:.1f} s", file=sys.stderr, flush=True)
        for _ in range(3):
            peer.wait(peer.step())
        peer.graphs = compiles() - before
    for _ in range(ROUNDS):
        for peer in all_peers:
            start = time.perf_counter()
            for _ in range(STEPS):
                result = peer.step()
            peer.wait(result)
            peer.rounds.append((time.perf_counter() - start) / STEPS)


def print_table(title: str, all_peers: list[Peer]) -> None:
    ours = statistics.median(all_peers[0].rounds)
    for peer in all_peers:
        ms = sorted(1e3 * seconds for seconds in peer.rounds)
        figures = [f"{value:.1f}" for value in (peer.first_seconds, statistics.median(ms), ms[0], ms[-1])]
        ratio = f"{statistics.median(peer.rounds) / ours:.2f}"
        csv.writer(sys.stdout, lineterminator="\n").writerow([title, peer.name, *figures, ratio, peer.graphs or ""])
    sys.stdout.flush()


def jax_peer(name: str, loss_of, recipe: peers.Recipe, parameters, batch) -> Peer:
    import jax

    update = jax.jit(partial(peers.jax_step, loss_of, recipe), donate_argnums=(0, 1))
    state = [parameters, peers.jax_state(parameters)]

    def step():
        *state[:], _norm, loss = update(*state, *batch)
        return loss

    return Peer(name, step, lambda loss: loss.block_until_ready())


def xla_peer(name: str, model, batch, loss_of, recipe: peers.Recipe = peers.GPT_RECIPE) -> Peer:
    """A loop as pytorch/xla's examples have it: torch_xla.step around the usual lines."""
    device = torch_xla.device()
    model = model.to(device)
    if hasattr(model, "tie"):
        model.tie()
    optimizer = peers.usual_adamw(model, recipe)

    def step():
        on_device = [part.to(device) for part in batch]
        with torch_xla.step():
            return loss_of(model, optimizer, *on_device)

    return Peer(name, step, xla_wait)


def our_gpt(shape: ModelShape, tokens, dtype=torch.float32) -> Peer:
    device, config = torch_xla.device(), TransformerConfig()
    model = GPT(shape, dtype)
    model.initialise(0)
    model = model.to(device)
    optimizer = transformer_tpu.build_optimizer(config, model)
    rates = learning_rates(dataclasses.replace(config, warmup_steps=0), 10_000).to(device)
    metrics = DeviceMetrics(["loss", "gradient_norm"], 50, device)
    xm.wait_device_ops()

    def step():
        return transformer_tpu.train_step.compiled(model, optimizer, rates, metrics, tokens.to(device), config)

    return Peer("transformer_tpu.py", step, xla_wait)


def our_mnist(config: MnistConfig, images, labels) -> Peer:
    device = torch_xla.device()
    model = simple_mnist_tpu.ConvNet(28, config.channels, config.hidden_dim).to(device)
    optimizer = make_optimizer(config, model.parameters())
    rates = learning_rates(config, 10_000).to(device)
    metrics = DeviceMetrics(["loss", "gradient_norm"], 50, device)
    xm.wait_device_ops()

    def step():
        batch = images.to(device), labels.to(device)
        return simple_mnist_tpu.train_step.compiled(model, optimizer, rates, metrics, *batch, config)

    return Peer("simple_mnist_tpu.py", step, xla_wait)


def usual_mnist_step(model, optimizer, images, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels.long())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    return loss.detach(), norm


def mnist(batch: int) -> list[Peer]:
    recipe = peers.MNIST_RECIPE
    config = MnistConfig(optimizer="adamw", learning_rate=recipe.learning_rate, global_batch_size=batch)
    images = torch.randint(256, (batch, 28, 28), dtype=torch.uint8)
    labels = torch.randint(10, (batch,), dtype=torch.int32)
    build = partial(simple_mnist_tpu.ConvNet, 28, config.channels, config.hidden_dim)
    eager, compiled = build(), build()
    eager_step = partial(usual_mnist_step, eager, peers.usual_adamw(eager, recipe), images, labels)
    compiled_step = partial(
        usual_mnist_step, torch.compile(compiled), peers.usual_adamw(compiled, recipe), images, labels
    )
    parameters = peers.jax_cnn_parameters(28, config.channels, config.hidden_dim)
    return [
        our_mnist(config, images, labels),
        jax_peer("plain JAX", peers.jax_cnn_loss, recipe, parameters, (images.numpy(), labels.numpy())),
        xla_peer("the same model in pytorch/xla's example loop", build(), (images, labels), usual_mnist_step, recipe),
        Peer("PyTorch eager", eager_step, lambda _: None),
        Peer("PyTorch, torch.compile of the model", compiled_step, lambda _: None),
    ]


def gpt(shape: ModelShape = SMALL_GPT) -> list[Peer]:
    tokens = torch.randint(shape.vocab_size, (GPT_BATCH, shape.sequence_length + 1), dtype=torch.int32)
    eager, compiled = peers.StraightGPT(shape), peers.StraightGPT(shape)
    eager_step = partial(peers.usual_step, eager, peers.usual_adamw(eager), tokens)
    compiled_step = partial(peers.usual_step, torch.compile(compiled), peers.usual_adamw(compiled), tokens)
    loss_of = partial(peers.jax_gpt_loss, num_heads=shape.num_heads, dtype="float32")
    return [
        our_gpt(shape, tokens),
        jax_peer("plain JAX", loss_of, peers.GPT_RECIPE, peers.jax_gpt_parameters(shape), (tokens.numpy(),)),
        xla_peer("nanoGPT-style in pytorch/xla's example loop", peers.StraightGPT(shape), (tokens,), peers.usual_step),
        xla_peer("Hugging Face GPT-2 in the same loop", peers.HuggingFaceGPT(shape), (tokens,), peers.usual_step),
        Peer("PyTorch eager", eager_step, lambda _: None),
        Peer("PyTorch, torch.compile of the model", compiled_step, lambda _: None),
    ]


def operations_traced() -> int:
    """Calls of torch_xla's operations in this process so far."""
    return sum(met.counter_value(name) for name in met.counter_names() if name.startswith("xla::"))


def host() -> None:
    """Milliseconds from the call of a step to its return: what the host does before the device can begin."""
    tokens = torch.randint(DEEP_GPT.vocab_size, (2, DEEP_GPT.sequence_length + 1), dtype=torch.int32)
    autocast = partial(peers.usual_step, autocast="xla")
    capturable = peers.StraightGPT(DEEP_GPT).to(torch_xla.device())
    capturable.tie()
    optimizer, device = peers.usual_adamw(capturable, capturable=True), torch_xla.device()

    @torch_xla.compile(full_graph=True)
    def straight_step():
        autocast(capturable, optimizer, tokens.to(device))

    all_peers = [
        our_gpt(DEEP_GPT, tokens, torch.bfloat16),
        Peer("nanoGPT-style, autocast, capturable AdamW", straight_step, xla_wait),
    ]
    for _ in range(4):
        for peer in all_peers:
            peer.wait(peer.step())
    traced = []
    for peer in all_peers:
        before = operations_traced()
        peer.wait(peer.step())
        traced.append(operations_traced() - before)
    for _ in range(4 * ROUNDS):
        for peer in all_peers:
            start = time.perf_counter()
            result = peer.step()
            peer.rounds.append(time.perf_counter() - start)
            peer.wait(result)
    ours = statistics.median(all_peers[0].rounds)
    print("\nprogram,operations traced,ms before the device has the step,smallest,largest,of ours")
    for peer, count in zip(all_peers, traced, strict=True):
        ms = sorted(1e3 * seconds for seconds in peer.rounds)
        median, ratio = statistics.median(ms), statistics.median(peer.rounds) / ours
        figures = [f"{median:.0f}", f"{ms[0]:.0f}", f"{ms[-1]:.0f}", f"{ratio:.2f}"]
        csv.writer(sys.stdout, lineterminator="\n").writerow([peer.name, count, *figures])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="mnist, gpt, host; all of them unless named")
    known = ("mnist", "gpt", "host")
    parts = parser.parse_args().parts or known
    if wrong := [part for part in parts if part not in known]:
        parser.error(f"{wrong[0]!r} is no part; expected {', '.join(known)}")
    names = ("torch", "torch_xla", "jax", "transformers")
    print(", ".join(f"{name} {version(name)}" for name in names) + f"; {os.cpu_count()} cores", file=sys.stderr)
    if parts != ["host"]:
        print("model,program,first step s,step ms,smallest,largest,of ours,XLA graphs", flush=True)
    if "mnist" in parts:
        for batch in MNIST_BATCHES:
            measure(found := mnist(batch))
            print_table(f"MNIST CNN, batch {batch} of 28 x 28, AdamW, float32", found)
    if "gpt" in parts:
        measure(found := gpt())
        print_table(f"{SMALL_GPT}, batch {GPT_BATCH}, AdamW, float32", found)
    if "host" in parts:
        host()
    return 0


if __name__ == "__main__":
    sys.exit(main())
