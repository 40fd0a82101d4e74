"""Compile seconds and graph size of forward and backward pass against depth, unrolled and scanned, on XLA:CPU.

Run:     python benchmarks/compile_depth.py                  # 12, 24 and 48 layers; each in a process of its own
         python benchmarks/compile_depth.py --depths 12 24   # a part of it
Prints:  docs/results/compile_depth.csv

Width 128, 64 tokens: what XLA compiles depends on the number of operations, hardly on their sizes. The optimizer is
left out: its part of the graph is the same, scanned or not.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def measure(layers: int, scan_layers: bool) -> None:
    sys.path.insert(0, str(ROOT))
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch
    import torch_xla

    from language.models.gpt import GPT
    from language.options.shapes import ModelShape
    from language.options.transformer_options import TransformerConfig
    from language.xla.saved_activations import LayerExecution
    from transformer_tpu import summed_loss

    device = torch_xla.device()
    model = GPT(ModelShape(layers, 2, 128, 64, 256), execution=LayerExecution(scan=scan_layers))
    model.initialise(0)
    model.to(device)
    tokens = torch.zeros(4, 65, dtype=torch.int32).to(device)
    torch_xla.sync()
    config = TransformerConfig()
    summed_loss(model, tokens, None, config)[0].backward()  # the first trace also fills torch's own caches
    model.zero_grad(set_to_none=True)
    started = time.perf_counter()
    loss, _ = summed_loss(model, tokens, None, config)
    loss.backward()
    traced = time.perf_counter() - started
    outputs = [loss, *(parameter.grad for parameter in model.parameters())]
    instructions = torch_xla._XLAC._get_xla_tensors_hlo(outputs).count(" = ")
    wall, cpu = time.perf_counter(), time.process_time()
    torch_xla.sync(wait=True)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    kind = "scanned" if scan_layers else "unrolled"
    print(f"{layers},{kind},{instructions},{traced * 1e3:.0f},{wall:.1f},{cpu:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--one", nargs=2, metavar=("LAYERS", "SCAN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(int(arguments.one[0]), arguments.one[1] == "1")
        return
    print("layers,loop,HLO instructions,trace ms,compile and first run s,of it CPU s", flush=True)
    for layers in arguments.depths:
        for scan_layers in "01":
            subprocess.run(
                [sys.executable, __file__, "--one", str(layers), scan_layers], check=True, stderr=subprocess.DEVNULL
            )


if __name__ == "__main__":
    main()
