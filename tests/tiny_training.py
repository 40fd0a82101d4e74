"""The smallest script with the interface of the training scripts: what test_aot_tpu.py compiles and runs."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from tpu_utils.options.virtual_slice import prepare_environment


class Model(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@torch_xla.compile(full_graph=True, name="train_step")
def train_step(model, optimizer, x):
    loss = (model(x) ** 2).mean()  # FORWARD
    loss.backward()
    if xr.world_size() > 1 and not xr.is_spmd():
        xm.reduce_gradients(optimizer)
    optimizer.step()  # UPDATE
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(config: argparse.Namespace) -> int:
    num_devices = xr.global_runtime_device_count()
    spmd = config.strategy == "spmd" and num_devices > 1
    if spmd:
        xr.use_spmd()
        mesh = xs.Mesh(np.arange(num_devices), (num_devices,), ("fsdp",))
    elif config.strategy == "ddp":  # trace what replica 0 would run
        xm.set_replication(torch_xla.device(), xm.get_xla_supported_devices())
    device = torch_xla.device()

    def shard(tensor, over_devices):
        if spmd and tensor.ndim:
            xs.mark_sharding(tensor, mesh, ("fsdp" if over_devices else None,) + (None,) * (tensor.ndim - 1))

    torch.manual_seed(0)
    if config.placeholders:
        from tpu_utils.options.virtual_slice import without_weights

        model = without_weights(lambda: Model(config.width), device)
    else:
        model = Model(config.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3).to(device), capturable=True)
    for p in model.parameters():
        state = dict(step=torch.zeros(1), exp_avg=torch.zeros(p.shape), exp_avg_sq=torch.zeros(p.shape))
        if config.placeholders:
            state = {name: torch.empty(value.shape, device=device) for name, value in state.items()}
        if not config.without_state:
            optimizer.state[p] = {name: value.to(device) for name, value in state.items()}
        for tensor in (p, *optimizer.state[p].values()):
            shard(tensor, config.shard_parameters and tensor.shape == p.shape)
    replicas = 1 if xr.is_spmd() else xr.world_size()
    shape = (config.global_batch_size // replicas, config.width)
    x = torch.empty(shape, device=device) if config.placeholders else torch.randn(shape).to(device)
    shard(x, True)
    if config.compile_for:
        from tpu_compiler.ask import compile_for

        sizes = dict(examples=config.global_batch_size, model_flops=48 * config.width**2 * config.global_batch_size)
        return compile_for(config.compile_for, train_step, model, optimizer, x, **sizes, settings=vars(config))
    print(train_step(model, optimizer, x).item())
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile_for", default="")
    parser.add_argument("--strategy", choices=["spmd", "ddp"], default="spmd")
    parser.add_argument("--shard_parameters", action="store_true")
    parser.add_argument("--global_batch_size", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--placeholders", action="store_true")
    parser.add_argument("--without_state", action="store_true")
    config = parser.parse_args()
    if config.global_batch_size % 8:
        parser.error(f"global_batch_size ({config.global_batch_size}) must be divisible by 8")
    if config.compile_for:
        prepare_environment(config.compile_for)
    return train(config)


if __name__ == "__main__":
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    sys.exit(main())
