"""What a script computes, tried in plain PyTorch on a few examples of the data, before anything is compiled.

A mistake in an evaluation costs nothing but the truth: the run ends with 0 and a wrong number. So the script's own
evaluate() and training step are run on the host, on examples in several batches, orders and paddings. A mean over
examples is the same in all of them, whatever the model, the loss and the labels are.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tpu_utils.base.errors import OTHERS, InputError

if TYPE_CHECKING:
    from tpu_utils.trial.trials import TriedRun

EXAMPLES = 11
"""Tried at least: no multiple of the batches of 4 that they come in too."""
CLASSES = 16
"""Most classes of which one example each is tried, if the data begins with that many."""


def check_model(model: nn.Module, dataset, evaluate: Callable | None = None, run: "TriedRun | None" = None) -> int:
    """Raises InputError for a model that does not fit the data, or an evaluation or a training step that computes
    something else on the same examples when they come in other batches, in another order or beside padding.

    Returns the FLOPs of the matrix work in the forward and backward pass of one example.
    model: on the host; it is left as it is. dataset: first(count) gives arrays of the first examples, the labels last,
    of which num_classes says whether they are classes (None: they are not). evaluate(model, batches, run): the
    script's; a batch is those arrays and a mask. The training step is tried when the run calls it for the first time.
    """
    for name, module in model.named_modules():
        computed = [key for key, value in vars(module).items() if isinstance(value, torch.Tensor) and value.grad_fn]
        if computed:
            raise InputError(
                f"{f'{name}.{computed[0]}'.lstrip('.')} was computed from parameters when the model was built, as "
                "torch.nn.utils.weight_norm does, and stays behind when they move; expected it computed in forward"
            )
    rows = examples_of(dataset)
    flops = flops_of(model, [array[:2] for array in rows[:-1] or rows])
    if evaluate and run:
        from tpu_utils.trial.trials import as_tried, check_evaluation  # only here: a model alone needs it not

        copied = with_tensors(model, lambda tensor: tensor.detach().clone())
        with as_tried(flops):
            check_evaluation(evaluate, copied, rows, dataset.num_classes, run)
        run.examples = rows, evaluate, model, flops
    return flops


def examples_of(dataset) -> tuple[torch.Tensor, ...]:
    """EXAMPLES of a data set, and of every class one where the first 16 MiB of it have CLASSES at most."""
    rows = dataset.first(EXAMPLES)
    if dataset.num_classes is not None:
        size = sum(array[:1].nbytes for array in rows)
        more = dataset.first(max(EXAMPLES, min(1024, (1 << 24) // size)))
        labels = more[-1].reshape(len(more[-1]), -1)
        firsts = np.unique(labels, return_index=True)[1] // labels.shape[1]
        chosen = list(dict.fromkeys([*firsts[:CLASSES].tolist(), *range(len(labels))]))
        count = max(EXAMPLES, min(len(firsts), CLASSES))
        chosen = sorted(chosen[: count + (count % 4 == 0)])
        rows = [array[chosen] for array in more]
    return tuple(map(torch.from_numpy, rows))


# ----------------------------------------------------------------------------------------------------------- the model


def flops_of(model: nn.Module, inputs: Sequence[torch.Tensor], where: str = "meta") -> int:
    """Run the model both ways by PyTorch and without memory. Returns the FLOPs of one example."""
    shape = " and ".join(f"{str(array.dtype).removeprefix('torch.')} {tuple(array.shape)}" for array in inputs)
    try:
        shapes = with_tensors(model, lambda tensor: tensor.detach().to(where, copy=True))
        with FlopCounterMode(display=False) as counter:
            outputs = shapes(*(array.to(where) for array in inputs))
            results = [one for one in tensors_in(outputs) if one.requires_grad]
            if results:
                sum(one.float().sum() for one in results).backward()
    except OTHERS as error:
        name = re.match(r"aten::(\w+): attempted", str(error))
        kinds = getattr(torch.ops.aten, name[1]) if name else None
        if kinds and not any(torch.Tag.dynamic_output_shape in getattr(kinds, one).tags for one in kinds.overloads()):
            return flops_of(model, inputs, "cpu")  # PyTorch has no way to run it without values: weight_norm
        from tpu_utils.trial.trials import why_not  # only for an error

        raise InputError(why_not(error, shape)) from error
    if next(tensors_in(outputs), None) is None:
        raise InputError(f"the model returns {type(outputs).__name__} for images {shape}; expected tensors")
    return counter.get_total_flops() // len(inputs[0])


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in tuples, lists, mappings and what has fields, such as a dataclass."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict) or hasattr(value, "__dict__"):
        yield from tensors_in(list((value if isinstance(value, dict) else vars(value)).values()))


# torch_xla replaces nn.GRU by a scan that takes XLA tensors alone: torch_xla/_patched_functions.py
SCANNED_GRU, PLAIN_GRU = nn.GRU, getattr(nn.GRU, "_orig", nn.GRU)


class Copying(TorchFunctionMode):
    """Inside, deep copies have function of each tensor in its place."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def __torch_function__(self, called, types, arguments=(), keywords=None):
        if called in (torch.Tensor.__deepcopy__, torch.Tensor.clone):  # a parameter's copy clones its data
            return self.function(arguments[0])
        return called(*arguments, **(keywords or {}))


def with_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A deep copy, with function of each tensor in its place: of modules, optimizers, metrics, their collections."""
    memo: dict[int, Any] = {}
    with Copying(function):
        copied = copy.deepcopy(value, memo)
        for one in memo.get(id(memo), ()):  # all that was copied, and what the next lines copy
            made = memo.get(id(one))
            if isinstance(one, torch.optim.Optimizer):  # its own copy leaves out what a subclass added
                more = {key: own for key, own in vars(one).items() if key not in vars(made)}
                vars(made).update(copy.deepcopy(more, memo))
            elif type(one) is SCANNED_GRU:
                made.__class__ = PLAIN_GRU
    return copied
