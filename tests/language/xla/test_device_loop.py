"""A loop on the device: what Python computes, traced once, its inputs read anew, and refusals."""

import pytest
import torch
import torch_xla

from language.xla.device_loop import DeviceLoop
from tpu_utils.device import graphs_compiled, transfers_to_device


@pytest.fixture
def looped():
    """(step, carried x, weight, traces): each call of step runs x = tanh(x w) / 2 up to 5 times, until x is small."""
    device, traces = torch_xla.device(), []
    w, x = (torch.linspace(0.1, 2.0, 9).view(3, 3) / scale for scale in (3.0, 2.0))
    w, x = w.to(device), x.to(device)

    def body(count, x):
        traces.append(1)
        x = torch.tanh(x @ w) * 0.5
        return torch.where(x.amax((0, 1)) < 0.2, torch.full_like(count, 5), count + 1), x

    loop = DeviceLoop(body, 5, lambda: [w])

    @torch_xla.compile(full_graph=True, name="looped")
    def step():
        x.copy_(loop(torch.zeros((), dtype=torch.int32, device=device), x)[1])

    return step, x, w, traces


def by_python(x, w):
    for _ in range(5):
        x = torch.tanh(x @ w) * 0.5
        if x.amax() < 0.2:
            break
    return x


def test_it_computes_what_python_does_and_is_traced_once(looped):
    step, x, w, traces = looped
    expected, before = x.cpu(), graphs_compiled()
    for times in range(3):
        if times == 2:
            w.mul_(0.7)  # the weights' new values are read
            torch_xla.sync()
            before += 1
        expected = by_python(expected, w.cpu())
        uploads = transfers_to_device()
        step()
        torch.testing.assert_close(x.cpu(), expected)
        assert not times or transfers_to_device() == uploads
    assert graphs_compiled() - before == 1 and len(traces) == 1


def test_it_ends_early(looped):
    step, x, w, _ = looped
    whole = x.cpu()
    for _ in range(5):
        whole = torch.tanh(whole @ w.cpu() * 0.3) * 0.5
    w.mul_(0.3)
    torch_xla.sync()
    step()
    assert x.cpu().amax() > 10 * whole.amax()


def test_a_carry_of_another_shape_is_refused():
    device = torch_xla.device()
    count, x = torch.zeros((), dtype=torch.int32, device=device), torch.ones(3).to(device)
    for body in (lambda count, x: (count + 1, x[:2]), lambda count, x: (count + 1, x.int())):
        with pytest.raises(ValueError, match=r"tensor 2 of the loop .*\[3\] float32"):
            DeviceLoop(body, 5, list)(count, x)
    with pytest.raises(ValueError, match="gives 1 tensors, expected 2"):
        DeviceLoop(lambda count, x: (count,), 5, list)(count, x)
