"""A run with an average of its weights: in test_optim.py's process, or over virtual devices, sharded.

python tests/averaged.py DEVICES RUN_DIR RESUME
"""

import copy
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=sys.argv[1])

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

from config import MnistConfig
from tpu_utils.device import BatchSharding
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.run import Run
from tpu_utils.step.average import update_average
from tpu_utils.step.graphs import one_graph
from tpu_utils.step.optim import learning_rates, make_optimizer

STEPS, DECAY = 16, 0.6


def build() -> nn.Module:
    """Floating and integer buffers, with dimensions and without, and a scalar parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    return model


class Data:
    num_steps, description = STEPS, "noise"

    def fingerprint(self):
        return 0

    def batch(self, index):
        return np.random.default_rng(index).standard_normal((16, 8)).astype(np.float32)


@one_graph
def train_step(model, average, optimizer, rates, metrics, x):
    loss = (model(x) * model.temperature - 1).square().mean()
    loss.backward()
    optimizer.param_groups[0]["lr"] = rates.index_select(0, metrics.step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    update_average(average, model, DECAY, metrics.step)
    metrics.record(loss)


def train(run_dir, resume: str, seen: list | None = None) -> int:
    """seen: gets the model's state after each step, on the host."""
    options = dict(device="cpu", run_dir=str(run_dir), resume=resume, save_every=8, log_every=4, tensorboard=False)
    config = MnistConfig(**options, learning_rate=0.05, eval_batch_size=16, global_batch_size=16)
    num_devices = int(os.environ.get("CPU_NUM_DEVICES", 1))
    with Run(config, train_step, join=xr.use_spmd if num_devices > 1 else lambda: None) as run:
        device = run.device
        mesh = xs.Mesh(np.arange(num_devices), (num_devices,), ("data",)) if num_devices > 1 else None
        run.open(Data(), Data(), sharding=mesh and BatchSharding(mesh, ("data",)))
        model = build()
        average = copy.deepcopy(model).to(device).eval()
        model.to(device)
        optimizer = make_optimizer(config, model.parameters())
        rates = learning_rates(config, STEPS).to(device)
        metrics = DeviceMetrics(["loss"], config.log_every, device)
        if mesh:  # all that has no sharding track() replicates, the average too
            state = [value for p in model.parameters() for value in optimizer.state[p].values()]
            for tensor in (*model.parameters(), *state):
                if tensor.dim() and len(tensor) % num_devices == 0:
                    xs.mark_sharding(tensor, mesh, ("data",) + (None,) * (tensor.dim() - 1))
        run.track(model=model, average=average, optimizer=optimizer, metrics=metrics)
        for step, (x,) in run.steps(Data()):
            train_step(model, average, optimizer, rates, metrics, x)
            if seen is not None:
                seen.append({name: value.cpu().clone() for name, value in model.state_dict().items()})
            if run.log_due(step):
                run.log(step)
            if run.save_due(step):
                run.save(step)
        return run.finish()


if __name__ == "__main__":
    sys.exit(train(sys.argv[2], sys.argv[3]))
