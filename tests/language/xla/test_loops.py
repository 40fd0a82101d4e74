"""A loop inside the graph: what it gives, and what it refuses."""

import pytest
import torch
import torch_xla
from processes import run

from language.xla.loops import loop_in_graph
from tpu_utils.base.errors import InputError


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
