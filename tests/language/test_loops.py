"""A loop inside the graph: what it gives, and what it refuses."""

import pytest
import torch
import torch_xla

from language.loops import loop_in_graph
from tpu_utils.errors import InputError


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
