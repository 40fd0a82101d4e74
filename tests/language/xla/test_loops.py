"""A loop inside the graph: what it gives, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
import torch_xla
from processes import run

from language.models.gpt import GPT
from language.models.llama import Llama
from language.options.llama_shape import LlamaShape
from language.options.shapes import ModelShape
from language.xla.loops import loop_in_graph
from language.xla.saved_activations import LEVELS, LayerExecution
from tpu_compiler.compile.tracing import _pending_tensors, alias_id
from tpu_utils.base.errors import InputError
from tpu_utils.step.optim import make_optimizer


def test_the_last_carry_and_the_outputs_of_each_turn():
    x = torch.arange(6.0).view(3, 2).to(torch_xla.device())
    for reverse, expected in ((False, [0, 1, 3, 6, 10, 15]), (True, [14, 15, 11, 14, 4, 9])):
        add = lambda carry, row: ([carry[0] + row[0].sum(), carry[1]], [row[0].cumsum(0) + carry[0]])  # noqa: E731
        (total, two), (sums,) = loop_in_graph(add, [x[0, 0], x[1, 0]], [x], reverse)
        assert (total.item(), two.item()) == (15, 2) and sums.flatten().tolist() == expected


def test_random_numbers_of_a_loop_are_refused():
    """The same ones in each turn, and others in the backward pass, would be a wrong dropout that nobody sees."""
    x = torch.ones(2, 3).to(torch_xla.device())
    (total,), _ = loop_in_graph(lambda carry, row: ([carry[0] + row[0].sum()], []), [x[0, 0]], [x])
    assert total.item() == 7
    with pytest.raises(InputError, match=r"random numbers inside a loop of the graph .* expected none, or dropout of"):
        loop_in_graph(lambda carry, row: ([carry[0] + torch.rand_like(row[0]).sum()], []), [x[0, 0]], [x])


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


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("shape", [ModelShape(3, 4, 64, 32, 300), LlamaShape(3, 4, 64, 32, 300, 2, 96)])
def test_a_scanned_step_returns_tensors_of_a_size_in_the_order_in_which_it_takes_them(shape, optimizer):
    """The compiler writes the n-th output of a size over the n-th donated input of that size, and copies an input that
    is read later: in other orders 1.1 GiB of weights of Qwen3 8B on v6e-8, by a plan of libtpu 0.0.21. The moments of
    one weight may change places: one fusion reads and writes both."""
    model = (GPT if type(shape) is ModelShape else Llama)(shape, execution=LayerExecution(LEVELS["inputs"], scan=True))
    model.initialise(0)
    model = model.to(torch_xla.device())
    options = dict(optimizer=optimizer, learning_rate=0.1, weight_decay=0.1, momentum=0.9, compile_for=None)
    updating = make_optimizer(SimpleNamespace(adam_beta1=0.9, adam_beta2=0.9, **options), model.parameters())
    tokens = torch.zeros(2, 32, dtype=torch.int32).to(torch_xla.device())
    torch_xla.sync()
    sizes = {}
    for name, parameter in model.named_parameters():
        sizes[alias_id(parameter)] = (parameter.numel(), name)
        for state in updating.state[parameter].values():
            sizes[alias_id(state)] = (state.numel(), f"state of {name}")
    model(tokens).logits.float().logsumexp(-1).sum().backward()
    updating.step()
    updating.zero_grad(set_to_none=True)
    outputs = _pending_tensors()
    inputs, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
    taken = [sizes[number] for number in inputs if number in sizes]
    returned = [sizes[alias_id(tensor)] for tensor in outputs if alias_id(tensor) in sizes]
    torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))
    assert len(taken) == len(returned) == len(sizes)
    by_size = lambda found: sorted(found, key=lambda one: one[0])  # noqa: E731, stable: keeps the order within a size
    assert by_size(taken) == by_size(returned)
