"""A module's step as ATen operations: what is refused, and that the gradients which torchax lacks are torch's."""

import jax
import numpy as np
import pytest
import torch

import aot_tpu
from config import TrainConfig
from tpu_compiler import module_through_torch, modules
from tpu_utils.errors import InputError
from tpu_utils.optim import make_optimizer, step_optimizer

LINEAR = ["torch.nn:Linear", "--arguments", "in_features=4,out_features=4", "--inputs", "float32[8,4]"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--mode", "decode"], r"through is torch and mode is decode; expected another mode"),
        (["--level", "balanced,aggressive"], r"through is torch and level is aggressive; expected another level"),
    ],
)
def test_what_is_asked_through_torch_xla_alone(options, message):
    with pytest.raises(InputError, match=message):
        modules.parse_question("m:N", ["--inputs", "int32[8,4]", "--through", "torch", *options])


def test_what_is_not_there_is_said_before_anything_is_downloaded(monkeypatch, capsys):
    monkeypatch.setattr(aot_tpu, "make_environment", lambda *_: pytest.fail("made before the question was read"))
    monkeypatch.setattr(modules, "find_spec", lambda name: None if name == "torchax" else name)
    assert aot_tpu.main([*LINEAR, "--topology", "v5e-1", "--through", "torch"]) == 2
    assert "needs torchax: pip install" in capsys.readouterr().err


def test_gradients_that_torchax_lacks():
    x, weight = torch.randn(2, 3, 9, 9, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    convolved = torch.nn.functional.conv2d(x, weight, stride=2, padding=1)
    gradient = torch.randn_like(convolved)
    expected = torch.autograd.grad(convolved, (x, weight), gradient)
    arrays = [t.detach().numpy() for t in (gradient, x, weight)]
    how = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    *found, bias = module_through_torch.convolution_backward(*arrays, None, *how)
    assert bias is None
    for ours, torchs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, torchs, rtol=1e-4, atol=1e-4)
    pooled, places = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    gradient = torch.randn_like(pooled)
    (expected,) = torch.autograd.grad(pooled, x, gradient)
    arrays = [t.detach().numpy() for t in (gradient, x)]
    found = module_through_torch.max_pool_backward(*arrays, [3, 3], [2, 2], [1, 1], [1, 1], False, places.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


class SmallNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.BatchNorm2d(8)
        self.pool, self.head = (
            torch.nn.MaxPool2d(2),
            torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 5)),
        )

    def forward(self, x):
        x = torch.stack([x, x * torch.tensor([2.0])])[1]  # select, and an array of the graph's own
        return self.head(self.pool(torch.relu(self.norm(self.convolution(x)))).flatten(1))


def test_the_lowered_step_is_torchs():
    """Loss, weights, BatchNorm's averages and momentum after one step, run by jax on the CPU and by eager torch."""
    asked = modules.parse_question("m:SmallNet", ["--inputs", "float32[4,3,8,8]", "--optimizer", "sgd"], "v5e-1")
    with torch.device("meta"):
        without_memory = SmallNet()
    x = torch.empty(4, 3, 8, 8, device="meta")
    graph, inputs, roles, *_ = module_through_torch.record(asked, "conservative", without_memory, [x], {}, {}, [])
    model = SmallNet()
    optimizer = make_optimizer(TrainConfig(optimizer="sgd"), model.parameters())
    state = [*model.parameters(), *model.buffers(), *(v for held in optimizer.state.values() for v in held.values())]
    x, targets, rate = torch.randn(4, 3, 8, 8), torch.arange(4), torch.full((1,), 0.01)
    arrays = [tensor.detach().numpy().copy() for tensor in (*state, x, rate, targets)]
    assert [array.shape for array in arrays] == [tuple(tensor.shape) for tensor in inputs]
    assert roles.count("optimizer_state") == 8 and roles[-3:] == ("inputs",) * 3
    found = jax.jit(lambda *given: list(module_through_torch.Lowering(graph).run(*given)))(*arrays)
    loss = torch.nn.functional.cross_entropy(model(x), targets)
    loss.backward()
    step_optimizer(optimizer, rate, None, "stop")
    for ours, torchs in zip(found, (loss, *state), strict=True):
        np.testing.assert_allclose(ours, torchs.detach(), rtol=1e-4, atol=1e-5)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.inside(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_lowered_attention_is_torchs():
    asked = modules.parse_question("m:Attention", ["--inputs", "float32[2,6,8]", "--mode", "forward"], "v5e-1")
    model, x = Attention(), torch.randn(2, 6, 8)
    graph, *_ = module_through_torch.record(asked, "conservative", model, [x.to("meta")], {}, {}, [])
    arrays = [tensor.detach().numpy() for tensor in (*model.parameters(), x, torch.zeros(1))]
    (found,) = jax.jit(lambda *given: list(module_through_torch.Lowering(graph).run(*given)))(*arrays)
    np.testing.assert_allclose(found, model(x).detach(), rtol=1e-4, atol=1e-5)
