"""A module's step as ATen operations: what is refused, and that the gradients which torchax lacks are torch's."""

import numpy as np
import pytest
import torch

import aot_tpu
from tpu_compiler import module_through_torch, modules
from tpu_utils.errors import InputError

LINEAR = ["torch.nn:Linear", "--arguments", "in_features=4,out_features=4", "--inputs", "float32[8,4]"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--mode", "decode"], r"through is torch and mode is decode; expected another mode"),
        (["--level", "balanced,aggressive"], r"through is torch and level is aggressive; expected another level"),
        (["--shard", "*=data"], r"asks about one device; leave --mesh and --shard out"),
    ],
)
def test_what_is_asked_through_torch_xla_alone(options, message):
    with pytest.raises(InputError, match=message):
        modules.parse_question("m:N", ["--inputs", "int32[8,4]", "--through", "torch", *options])


def test_what_is_not_there_is_said_before_anything_is_downloaded(monkeypatch, capsys):
    monkeypatch.setattr(aot_tpu, "make_environment", lambda *_: pytest.fail("made before the question was read"))
    assert aot_tpu.main([*LINEAR, "--topology", "v5e-8", "--through", "torch"]) == 2
    assert "asks about one device; found --topology v5e-8" in capsys.readouterr().err
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
