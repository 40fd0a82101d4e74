"""Loops inside a graph: of layers, and of tokens that are made one after the other."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
import torch_xla
from processes import run
from test_llama_parity import QWEN3
from torch import nn

from language.models import layers
from language.models.llama import Llama
from language.xla.device_loop import DeviceLoop
from language.xla.loops import as_for_one_device, loop_in_graph, sums_over_parts
from language.xla.saved_activations import LEVELS, LayerExecution
from tpu_utils.base.errors import InputError
from tpu_utils.device import graphs_compiled, set_global_mesh, transfers_to_device


def test_the_last_carry_and_the_outputs_of_each_turn():
    x = torch.arange(6.0).view(3, 2).to(torch_xla.device())
    for reverse, expected in ((False, [0, 1, 3, 6, 10, 15]), (True, [14, 15, 11, 14, 4, 9])):
        add = lambda carry, row: ([carry[0] + row[0].sum(), carry[1]], [row[0].cumsum(0) + carry[0]])  # noqa: E731
        (total, two), (sums,) = loop_in_graph(add, [x[0, 0], x[1, 0]], [x], reverse)
        assert (total.item(), two.item()) == (15, 2) and sums.flatten().tolist() == expected


@pytest.mark.parametrize("reverse", [False, True])
def test_outputs_take_the_place_of_rows_whose_turn_is_over(reverse):
    x = torch.arange(6.0).view(3, 2).to(torch_xla.device())
    step = lambda carry, rows: ([carry[0] + rows[1].sum()], [rows[0] + carry[0], 2 * rows[1]])  # noqa: E731
    fresh = loop_in_graph(step, [x[0, 0]], [x, x + 1], reverse)
    (total,), found = loop_in_graph(step, [x[0, 0]], [x, x + 1], reverse, over=[0, 1])
    assert total.item() == fresh[0][0].item() == 21 and x.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    for here, there in zip(found, fresh[1], strict=True):
        assert torch.equal(here.cpu(), there.cpu())


@pytest.mark.parametrize("turns, in_backward", [(1, 1), (2, 2)])
def test_the_gradients_of_a_scanned_stack_lie_where_its_weights_lay(turns, in_backward):
    """Else weights and gradients of all layers are in memory at once: 1.6 of 30 GiB of a Llama 3 8B on 8 chips. Where
    gradients accumulate the next turn needs the weights, and a copy of them is no gain."""
    shape = dataclasses.replace(QWEN3, num_layers=5, sequence_length=16)
    model = Llama(shape, execution=LayerExecution(LEVELS["inputs"], scan=True, turns=turns))
    model.initialise(0)
    model, tokens = model.to(torch_xla.device()), torch.zeros(2, 16, dtype=torch.int32).to(torch_xla.device())
    model(tokens).logits.sum().backward()
    text = torch_xla._XLAC._get_xla_tensors_hlo([parameter.grad for parameter in model.parameters()])
    torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))
    loops = [re.match(r".* = \((.*?)\) while\(", line)[1] for line in text.splitlines() if " while(" in line]
    assert [loop.count("f32[5,2,160,64]") for loop in loops] == [1, in_backward]  # gate_up_weight


def test_random_numbers_of_a_loop_are_refused():
    """The same ones in each turn, and others in the backward pass, would be a wrong dropout that nobody sees."""
    x = torch.ones(2, 3).to(torch_xla.device())
    (total,), _ = loop_in_graph(lambda carry, row: ([carry[0] + row[0].sum()], []), [x[0, 0]], [x])
    assert total.item() == 7
    with pytest.raises(InputError, match=r"random numbers inside a loop of the graph .* expected none, or dropout of"):
        loop_in_graph(lambda carry, row: ([carry[0] + torch.rand_like(row[0]).sum()], []), [x[0, 0]], [x])


def test_a_second_model_is_traced_for_one_device_too(monkeypatch):
    """A frozen teacher marked its activations in there, and the process was aborted."""
    marked = []
    monkeypatch.setattr(layers, "mark_sharding_with_gradients", lambda x, mesh, spec: marked.append(spec) or x)
    student, teacher = (SimpleNamespace(mesh=object()) for _ in range(2))
    x = torch.ones(2, 3, 4)
    try:
        set_global_mesh(teacher.mesh)
        with as_for_one_device(student):
            assert layers.Decoder.hold_sharding(teacher, x) is x and not marked
        layers.Decoder.hold_sharding(teacher, x)
        assert len(marked) == 1
    finally:
        set_global_mesh(None)


@pytest.mark.parametrize("replaced", [0, 1, 2])
def test_a_buffer_that_a_turn_changes_is_refused(replaced):
    """It changed once for all turns, or the process ended in a segmentation fault."""
    model = nn.Module()
    model.mesh = None
    model.register_buffer("seen", torch.zeros(()).to(torch_xla.device()))
    x = torch.ones(2, 3).to(torch_xla.device())

    def turn(constants, part):
        for _ in range(replaced):  # the second one may lie where the first one lay
            model.seen = model.seen * 0.9
        if not replaced:
            model.seen.add_(part[0].sum())
        return [part[0].sum()]

    with pytest.raises(InputError, match="buffer seen changes with --gradient_accumulation_steps"):
        sums_over_parts(model, turn, [x[0, 0]], [], [x])
    torch_xla.sync()


AFTER_AN_ERROR = """
import torch, torch_xla
from language.xla.loops import loop_in_graph
x = torch.ones(2, 3).to(torch_xla.device())
kept = []
def body(carry, row):
    kept.append(carry[0] + row[0].sum())
    {error}
    return kept[-1:], []
try:
    loop_in_graph(body, [x[0, 0]], [x])
except Exception as error:
    print(type(error).__name__)
torch_xla.sync()
print(x.sum().item())
"""


@pytest.mark.parametrize(
    "error, name", [("row[0] @ row", "TypeError"), ("kept[0] += torch.rand_like(kept[0])", "InputError")]
)
def test_an_error_inside_a_loop_is_the_message_and_no_crash(tmp_path, error, name):
    (tmp_path / "script.py").write_text(AFTER_AN_ERROR.format(error=error))
    done = run(tmp_path / "script.py", PYTHONPATH=".", PJRT_DEVICE="CPU")
    assert (done.returncode, done.stdout) == (0, f"{name}\n6.0\n"), done.stderr[-500:]


def test_a_loop_on_the_device_computes_what_python_does_and_ends_early():
    """Traced once; the weights' new values are read."""
    device, traces = torch_xla.device(), []
    w, x = (torch.linspace(0.1, 2.0, 9).view(3, 3) / scale for scale in (3.0, 2.0))
    w, x = w.to(device), x.to(device)

    def body(count, x):
        traces.append(1)
        x = torch.tanh(x @ w) * 0.5
        return torch.where(x.amax((0, 1)) < 0.03, torch.full_like(count, 5), count + 1), x

    loop = DeviceLoop(body, 5, lambda: [w])

    @torch_xla.compile(full_graph=True, name="looped")
    def step():
        x.copy_(loop(torch.zeros((), dtype=torch.int32, device=device), x)[1])

    expected, before, turns = x.cpu(), graphs_compiled(), []
    for times in range(3):
        if times == 2:
            w.mul_(0.3)
            torch_xla.sync()
            before += 1
        turns.append(0)
        while turns[-1] < 5 and (not turns[-1] or expected.amax() >= 0.03):
            turns[-1] += 1
            expected = torch.tanh(expected @ w.cpu()) * 0.5
        uploads = transfers_to_device()
        step()
        torch.testing.assert_close(x.cpu(), expected)
        assert not times or transfers_to_device() == uploads
    assert graphs_compiled() - before == 1 and len(traces) == 1 and (min(turns), max(turns)) == (1, 5), turns
