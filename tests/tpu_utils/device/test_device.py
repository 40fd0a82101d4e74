"""The device of a run: chips on the bus, refusals, exit codes."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_xla
from small_models import Flat, Normed, Vision
from torch import nn

from config import MnistConfig
from tpu_utils import device
from tpu_utils.base.errors import DeviceError, InputError, TrainingError, run_script
from tpu_utils.device import graphs_compiled, seed_host, start_device, transfers_to_device
from tpu_utils.device.as_pytorch import elu_as_pytorch
from tpu_utils.options.environment import attached_chips
from tpu_utils.trial.checks import check_model


def check(build, images, labels, num_classes, **options) -> int:
    """check_model() for a data set that begins with these."""
    data = SimpleNamespace(first=lambda count: (images[:count], labels[:count]), num_classes=num_classes)
    return check_model(build(), data, **options)


def fake_pci(root, *devices):
    for number, (vendor, chip) in enumerate(devices):
        folder = root / f"0000:00:{number:02x}.0"
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(chip + "\n")


def test_chips_are_found_on_the_pci_bus(tmp_path):
    fake_pci(tmp_path, ("0x1ae0", "0x0063"), ("0x8086", "0x0063"), ("0x1ae0", "0x0042"), ("0x1ae0", "0x0063"))
    assert [chip.name for chip in attached_chips(tmp_path)] == ["v5e", "v5e"]  # 0x0042 is Google's network card
    assert attached_chips(tmp_path / "absent") == []


def test_a_runtime_that_started_another_device_is_noticed(monkeypatch):
    monkeypatch.setattr(device, "device_type", lambda: "NEURON")
    with pytest.raises(DeviceError, match="asked for device cpu, the runtime started neuron"):
        start_device(MnistConfig(device="cpu"))


def test_exit_codes_and_messages(capsys, monkeypatch):
    def bad():
        raise InputError("bad value")

    def failed():
        raise TrainingError("went wrong")

    monkeypatch.setattr("sys.argv", ["script"])
    assert [run_script(one) for one in (lambda: 143, bad, failed)] == [143, 2, 1]
    assert capsys.readouterr().err == "error: bad value\nerror: went wrong\n"
    assert [run_script(partial(make, 10**17)) for make in (np.zeros, torch.zeros)] == [1, 1]
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: the host has too little memory: ") for line in lines) and len(lines) == 2
    monkeypatch.setattr("sys.argv", ["script", "--debug"])
    with pytest.raises(InputError):
        run_script(bad)


@pytest.mark.parametrize(
    "function",
    [F.elu, partial(F.elu, alpha=0.5), F.selu, torch.selu, partial(F.celu, alpha=2.0), nn.ELU(1.3, inplace=True)],
)
def test_gradients_of_elu_are_those_of_pytorch(function):
    """torch_xla's were of its input taken for its result, without a word."""
    elu_as_pytorch()
    found = []
    for where in ("cpu", torch_xla.device()):
        x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 3.0]).to(where).requires_grad_()
        value = function(x * 1)
        (first,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        found.append(torch.stack([value, first, second]).detach().cpu())
    torch.testing.assert_close(*found)


def test_hooks_and_attributes_of_a_parameter_move_with_it():
    """Masks of gradients and marks such as _no_weight_decay stayed behind, and all weights were trained alike."""
    model = nn.Linear(2, 1)
    model.tied = nn.Linear(2, 1)
    model.tied.weight = model.weight
    model.weight._no_weight_decay = True
    masked = model.weight.register_hook(lambda gradient: gradient * 0)
    model.bias.register_post_accumulate_grad_hook(lambda bias: setattr(bias, "grad", bias.grad * 3))
    model.to(torch_xla.device())
    assert model.weight._no_weight_decay and model.tied.weight is model.weight
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 2, device=torch_xla.device())).sum().backward()
        gradients.append((model.weight.grad.cpu().tolist(), model.bias.grad.cpu().tolist()))
        masked.remove()
    assert gradients == [([[0, 0]], [3]), ([[1, 1]], [3])]
    old, new = torch.zeros(2), torch.ones(2)
    old.mark, old.inner, new.inner = "kept", "old", "new"  # a subclass keeps what it holds so
    torch.utils.swap_tensors(old, new)
    assert (old.mark, old.inner, old[0]) == ("kept", "new", 1)


# ------------------------------------------------------------------------------- the model, before anything is compiled
COLOUR, CLASSES = np.zeros((2, 3, 8, 8), np.float32), np.zeros(2, np.int32)
FLAT, TARGETS = np.zeros((2, 6), np.float32), np.zeros(2, np.float32)


class Returning(nn.Module):
    """What a function makes of the logits (B, 4) of images."""

    def __init__(self, function):
        super().__init__()
        self.flat, self.function = Flat(6), function

    def forward(self, images):
        return self.function(self.flat(images))


class Asserting(nn.Module):
    def forward(self, images):
        raise AssertionError


class TwoInputs(nn.Module):
    def forward(self, images, positions):
        return images


@pytest.mark.parametrize(
    "build, images, labels, num_classes, said",
    [
        (lambda: Flat(7), FLAT, CLASSES, 4, r"does not take a batch of images float32 \(2, 6\): a and b"),
        (lambda: Normed(8, 0, 0), COLOUR.transpose(0, 2, 3, 1), CLASSES, 5, r"take .* images float32 \(2, 8, 8, 3\)"),
        (lambda: Normed(8, 0, 0), COLOUR[:, 0], CLASSES, 5, r"does not take .* pictures with channels first"),
        (lambda: Vision(16, 0, 0), COLOUR, CLASSES, 5, "Wrong image height! Expected 16 but got 8"),
        (lambda: nn.BatchNorm1d(6), FLAT[:1], CLASSES[:1], 4, "Expected more than 1 value per channel"),
        (lambda: nn.utils.weight_norm(Flat(6).head), FLAT, CLASSES, 4, "^weight was computed from parameters when"),
        (TwoInputs, FLAT, CLASSES, 4, "missing 1 required positional argument: 'positions'"),
        (Asserting, FLAT, CLASSES, 4, r"does not take a batch of images float32 \(2, 6\): AssertionError; expected"),
        (lambda: Returning(lambda logits: None), FLAT, CLASSES, 4, "the model returns NoneType for images"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_before_anything_is_compiled(
    build, images, labels, num_classes, said
):
    before = graphs_compiled(), transfers_to_device()
    with pytest.raises(InputError, match=said) as refused:
        check(build, images, labels, num_classes)
    assert (graphs_compiled(), transfers_to_device()) == before and len(str(refused.value).splitlines()) == 1


def test_a_model_that_fits_is_taken_and_nothing_of_it_is_kept():
    model = Normed(8, 0, 0)
    held, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    before = graphs_compiled(), transfers_to_device()
    check(lambda: model, COLOUR, CLASSES, 3)  # fewer classes than outputs
    assert (torch.get_rng_state() == state).all() and not [p for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())
    assert check(lambda: Flat(6), FLAT, CLASSES, 4) == 2 * (2 * 6 * 4)  # its input needs no gradient
    assert check(lambda: nn.Linear(6, 1), FLAT, TARGETS[:, None], None) == 2 * (2 * 6)
    assert (graphs_compiled(), transfers_to_device()) == before


@pytest.mark.parametrize(
    "outputs, labels, num_classes",
    [
        (lambda logits: logits[:, 0], CLASSES, 2),  # binary, by one logit
        (lambda logits: logits[:, :2], CLASSES, 3),  # ordinal: an output less than classes
        (lambda logits: logits[..., None], CLASSES, 4),
        (lambda logits: logits, CLASSES[:, None], 4),
        (lambda logits: logits.sum(), CLASSES, 4),
        (lambda logits: (logits, {"again": logits}), CLASSES, 4),
        (lambda logits: logits[:, :, None].expand(-1, -1, 9), np.zeros((2, 9), np.int32), 4),  # a label for nine places
    ],
)
def test_shapes_alone_refuse_nothing_that_a_loss_may_accept(outputs, labels, num_classes):
    assert check(lambda: Returning(outputs), FLAT, labels, num_classes) == 2 * (2 * 6 * 4)


def test_memory_is_not_asked_for_under_spmd_where_torch_xla_would_raise(monkeypatch):
    monkeypatch.setattr("tpu_utils.device.xla.device_type", lambda: "TPU")
    monkeypatch.setattr("tpu_utils.device.xla.is_spmd", lambda: True)
    assert device.device_memory(device.current_device()) is None


def test_what_the_host_draws_follows_from_the_seed_and_the_step_alone():
    """So a resumed run draws it too, whatever libraries have drawn from these generators in between."""

    def drawn(*seed):
        seed_host(*seed)
        return np.random.normal(), random.random(), random.gauss(0, 1)

    first = drawn(0, 5)
    assert drawn(0, 5) == first
    assert not set(first) & {*drawn(0, 6), *drawn(1, 5)}
