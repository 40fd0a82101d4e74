"""Running averages of BatchNorm and InstanceNorm on the device, beside those of PyTorch on the host."""

import copy

import pytest
import torch
from processes import run
from torch import nn

from tpu_utils.checkpoint.state import Tracked
from tpu_utils.device import compile_step, current_device, graphs_compiled, transfers_to_device

CASES = {
    "(B, C)": (nn.BatchNorm1d(4), (5, 4)),
    "(B, C, T)": (nn.BatchNorm1d(4), (3, 4, 5)),
    "pictures": (nn.BatchNorm2d(4, momentum=0.3), (2, 4, 3, 3)),
    "volumes": (nn.BatchNorm3d(4), (2, 4, 2, 2, 2)),
    "the mean of all batches": (nn.BatchNorm2d(4, momentum=None), (2, 4, 3, 3)),
    "no average": (nn.BatchNorm1d(4, track_running_stats=False), (5, 4)),
    "bfloat16": (nn.BatchNorm2d(4).bfloat16(), (2, 4, 3, 3)),
    "each picture": (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 3, 3)),
    "two examples": (nn.BatchNorm1d(4), (2, 4)),
}

OVER_FOUR_DEVICES = """
import numpy as np, torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from tpu_utils.device import BatchSharding, compile_step, send
xr.use_spmd()
mesh = xs.Mesh(np.arange(4), (4,), ("data",))
norms = nn.BatchNorm1d(4), nn.BatchNorm1d(4).to("xla")
batch = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
step = compile_step(lambda norm, batch: norm(batch))
norms[0](torch.from_numpy(batch)), step(norms[1], *send(batch, "xla", BatchSharding(mesh, ("data",))))
print(torch.stack([norm.running_var.cpu() for norm in norms]).diff(dim=0).abs().max().item())
"""


def train(model, batch):
    (model(batch) * batch).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None


def trained(model, batches, device, step):
    """(outputs in eval mode and state; graphs and uploads of each step) after a step for each batch."""
    model, counts = copy.deepcopy(model).to(device), []
    Tracked({"model": model}).make_inputs()
    for batch in (batch.to(device) for batch in batches):
        before = graphs_compiled(), transfers_to_device()
        step(model, batch)
        counts.append((graphs_compiled() - before[0], transfers_to_device() - before[1]))
    return {"outputs": model.eval()(batches[0].to(device)).detach()} | model.state_dict(), counts


@pytest.mark.parametrize("name", CASES)
def test_an_evaluation_is_that_of_pytorch(name):
    """torch_xla alone averages another variance: of five examples four fifths."""
    model, shape = CASES[name]
    dtype, generator = model.weight.dtype, torch.Generator().manual_seed(0)
    batches = [(torch.randn(shape, generator=generator) * 3 + 1).to(dtype) for _ in range(4)]
    expected, _ = trained(model, batches, "cpu", train)
    found, counts = trained(model, batches, current_device(), compile_step(train))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for key, value in expected.items():
        torch.testing.assert_close(found[key].cpu(), value, rtol=tolerance, atol=tolerance)
    assert counts[0][0] == 1 and counts[1:] == [(0, 0)] * 3


def test_averages_are_of_the_global_batch():
    done = run("-c", OVER_FOUR_DEVICES, PJRT_DEVICE="CPU", CPU_NUM_DEVICES=4)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-6
