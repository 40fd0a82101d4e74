"""What a script computes, tried in plain PyTorch on a few examples of the data, before anything is compiled.

A mistake in an evaluation costs nothing but the truth: the run ends with 0 and a wrong number. So the script's own
evaluate() and training step are run on the host, on examples in several batches, orders and paddings. A mean over
examples is the same in all of them, whatever the model, the loss and the labels are.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tpu_utils.errors import InputError, first_line, line_of
from tpu_utils.metrics import DeviceMetrics

if TYPE_CHECKING:
    from tpu_utils.run import Run

EXAMPLES = 11
"""Tried: no multiple of the batches of 4 that they come in too."""
TOLERANCE = 1e-4
"""Relative. Sums in another order differ by 1e-6."""
Batches = list[tuple[torch.Tensor, ...]]
READS = (
    "meta tensors",
    "Cannot copy out of meta",
    "can't convert meta device",
    "'lengths' argument should be a 1D CPU",
)
ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, KeyError, AttributeError, ZeroDivisionError)


def check_model(model: nn.Module, dataset, evaluate: Callable | None = None, run: "Run | None" = None) -> int:
    """Raises InputError for a model that does not fit the data, or an evaluation or a training step that computes
    something else on the same examples when they come in other batches, in another order or beside padding.

    Returns the FLOPs of the matrix work in the forward and backward pass of one example.
    model: on the host; it is left as it is. dataset: first(count) gives arrays of the first examples, the labels last,
    of which num_classes says whether they are classes (None: they are not). evaluate(model, batches, run): the
    script's; a batch is those arrays and a mask. The training step is tried when the run calls it for the first time.
    """
    rows = tuple(torch.from_numpy(array) for array in dataset.first(EXAMPLES))
    flops = check_shapes(model, tuple(array[:2] for array in rows), dataset.num_classes)
    if evaluate and run:
        check_evaluation(evaluate, with_tensors(model, lambda tensor: tensor.detach().clone()), rows, run)
        run.examples = rows, partial(loss_by, evaluate, rows, run)
    return flops


# ----------------------------------------------------------------------------------------------------------- the model


def check_shapes(model: nn.Module, rows: tuple[torch.Tensor, ...], num_classes: int | None) -> int:
    """Run the model both ways by PyTorch and without memory. Returns the FLOPs of one example."""
    *inputs, labels = rows if len(rows) > 1 else (*rows, None)
    shape = " and ".join(f"{str(array.dtype).removeprefix('torch.')} {tuple(array.shape)}" for array in inputs)
    try:
        shapes = with_tensors(model, lambda tensor: tensor.detach().to("meta"))
        with FlopCounterMode(display=False) as counter:
            outputs = shapes(*(array.to("meta") for array in inputs))
            results = [one for one in tensors_in(outputs) if one.requires_grad]
            if results:
                sum(one.float().sum() for one in results).backward()
    except ERRORS as error:
        raise InputError(why_not(error, shape)) from error
    if next(tensors_in(outputs), None) is None:
        raise InputError(f"the model returns {type(outputs).__name__} for images {shape}; expected tensors")
    if isinstance(outputs, torch.Tensor) and labels is not None:
        check_logits(tuple(outputs.shape), tuple(labels.shape), shape, num_classes)
    return counter.get_total_flops() // len(inputs[0])


def why_not(error: Exception, shape: str) -> str:
    """What a model is told that does not run on tensors without values."""
    said = str(error)
    if any(words in said for words in READS):
        return (
            f"the model reads a tensor at {line_of(error)}; expected none of .item(), .tolist(), .cpu(), .numpy(), "
            "print(tensor), if on a tensor, lengths on the host in forward: inside a compiled step nothing is read"
        )
    if isinstance(error, NotImplementedError):
        return (
            f"the shape of a result depends on values at {line_of(error)}; expected shapes that are known before: "
            "torch.where(mask, x, 0) in place of x[mask], nonzero, unique or masked_select"
        )
    if "is not on the expected device meta" in said:
        return (
            f"a tensor is made on the host in forward, at {line_of(error)}; expected device=x.device there, or a "
            "buffer that __init__ registers: it would be sent in every step"
        )
    return (
        f"the model does not take a batch of images {shape}: {first_line(error)}; expected one for "
        "the images of the data set, pictures with channels first; change one of them; --debug shows the line"
    )


def check_logits(outputs: tuple, labels: tuple, shape: str, num_classes: int | None) -> None:
    """Raises InputError for logits and labels that no loss can compare example by example."""
    found, kind = f"the model returns {outputs} for images {shape}", f"labels {labels}"
    if num_classes is not None and (len(outputs) < 2 or outputs[1] < num_classes):
        raise InputError(
            f"{found}, but labels go up to {num_classes - 1}; expected logits for {num_classes} classes along axis 1 "
            "(labels that begin at 1: subtract 1)"
        )
    if num_classes is not None and outputs[:1] + outputs[2:] != labels:
        raise InputError(
            f"{found}, but {kind}; expected a label for each row of logits; reshape the labels (one-hot: argmax(1))"
        )
    if num_classes is None and outputs != labels and [n for n in outputs if n > 1] == [n for n in labels if n > 1]:
        # a loss would compare each with each
        raise InputError(f"{found}, but {kind}; expected the same shape; reshape one of the two")


# ------------------------------------------------------------------------------------------------------ the evaluation


def place_of(function: Callable) -> str:
    return f"{function.__name__} ({inspect.getsourcefile(function)}:{function.__code__.co_firstlineno})"


def values_by(evaluate: Callable, model: nn.Module, batches: Batches, run: "Run", seed: int = 0) -> dict[str, float]:
    """What evaluate gives of these batches in plain PyTorch. Raises InputError where it fails on them."""
    with run.in_plain_pytorch(), torch.random.fork_rng([]), strict_shapes():
        torch.manual_seed(seed)
        try:
            found = evaluate(model, batches, run)
        except ERRORS as error:
            remedy = "a value for each label, times labels_that_count(labels, mask), which has their shape"
            if isinstance(error, AttributeError | TypeError):
                remedy = "one that takes what the model returns; of a Hugging Face model output.logits"
            labels = batches[0][-2]
            raise InputError(
                f"{place_of(evaluate)} fails on {len(labels)} examples in plain PyTorch: {first_line(error)}, at "
                f"{line_of(error)}; expected {remedy} (labels here: {str(labels.dtype).removeprefix('torch.')}, "
                f"{tuple(labels.shape)})"
            ) from error
    return {name: float(value) for name, value in found.items()}


def loss_by(evaluate: Callable, rows: tuple, run: "Run", model: nn.Module) -> float | None:
    """The loss that evaluate gives of these examples, where it gives one."""
    found = values_by(evaluate, model, in_batches(rows, len(rows[0])), run)
    return next((value for name, value in found.items() if name.endswith("loss")), None)


def check_evaluation(evaluate: Callable, model: nn.Module, rows: tuple, run: "Run") -> None:
    """Raises InputError as check_model does."""
    where, values = place_of(evaluate), partial(values_by, evaluate, model, run=run)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    together = values(in_batches(rows, len(rows[0])))
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    if changed:
        raise InputError(
            f"{where} changes the model: {', '.join(changed[:3])}; expected model.eval() before its first step, so "
            "that BatchNorm does not learn from test data"
        )
    if not model.training:
        raise InputError(
            f"{where} leaves the model in eval mode; expected model.train() at its end: the next step would train "
            "without dropout, and BatchNorm would not learn"
        )
    if bad := [name for name, value in together.items() if not math.isfinite(value)]:
        raise InputError(f"{where} gives {bad[0]} {together[bad[0]]} of {len(rows[0])} examples; expected a number")
    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(1))
    others = {
        "once more": (in_batches(rows, len(rows[0])), "model.eval() first, and no noise in an evaluation"),
        "in batches of 4, the last one padded": (in_batches(rows, 4), ""),
        "in another order, beside other padding": (in_batches([array[order] for array in rows], 16, rows), ""),
    }
    for seed, (how, (batches, remedy)) in enumerate(others.items(), 1):
        found = values(batches, seed=seed)
        for name, value in together.items():
            if not is_close(value, found.get(name, math.nan)):
                raise InputError(
                    f"{where} gives {name} {value:.4f} of {len(rows[0])} examples, and {found.get(name):.4f} of the "
                    f"same {how}; expected the same: "
                    + (
                        remedy
                        or "a value for each label, nothing over the batch; times the mask, summed; and one division "
                        "at the end, by how many there were"
                    )
                )
    if bad := [name for name, value in together.items() if "accuracy" in name and not 0 <= value <= 1]:
        raise InputError(
            f"{where} gives {bad[0]} {together[bad[0]]:.4f}; expected 0 to 1: a sum over labels is divided by the "
            "number of labels that count, not of examples"
        )
    if len(rows) > 1 and rows[-1].is_floating_point():
        shifted = values(in_batches([*rows[:-1], rows[-1] + 0.25], len(rows[0])))
        truncated = values(in_batches([*rows[:-1], rows[-1].long().float()], len(rows[0])))
        losses = [name for name in together if name.endswith("loss")] or list(together)
        same = all(shifted[name] == together[name] == truncated[name] for name in losses)
        if same and not torch.equal(rows[-1], rows[-1].long().float()):
            raise InputError(
                f"labels are {str(rows[-1].dtype).removeprefix('torch.')}, targets, but {where} gives the same without "
                "their fractions: its loss is of classes; expected a loss of targets, such as F.mse_loss, or whole "
                "numbers from 0 on as labels"
            )


def in_batches(rows: Sequence[torch.Tensor], size: int, padding: Sequence[torch.Tensor] | None = None) -> Batches:
    """Batches of one size and their masks; the last one is filled up with zeros, or with what padding begins with."""
    batches = []
    for start in range(0, len(rows[0]), size):
        some = [array[start : start + size] for array in rows]
        missing = size - len(some[0])
        fill = [torch.zeros_like(array[:1]).repeat_interleave(missing, 0) for array in rows]
        if padding:
            fill = [array[torch.arange(missing) % len(array)] for array in padding]
        mask = torch.cat([torch.ones(len(some[0])), torch.zeros(missing)])
        batches.append((*(torch.cat(pair) for pair in zip(some, fill, strict=True)), mask))
    return batches


# -------------------------------------------------------------------------------------------------------------- helpers


def is_close(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=TOLERANCE, abs_tol=1e-6)


class strict_shapes(warnings.catch_warnings):
    """A loss that broadcasts its target is an error here, a warning of torch otherwise."""

    def __enter__(self):
        super().__enter__()
        warnings.filterwarnings("error", message="Using a target size")


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


def with_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A deep copy of modules, optimizers, metrics and their collections, with function of each tensor in its place."""
    memo: dict[int, Any] = {}
    waiting, modules = [value], {}
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor) and id(one) not in memo:
            made = function(one)
            memo[id(one)] = nn.Parameter(made, one.requires_grad) if isinstance(one, nn.Parameter) else made
        elif isinstance(one, nn.Module):
            modules |= {id(module): module for module in one.modules()}
            waiting += [*one.parameters(), *one.buffers()]
        elif isinstance(one, torch.optim.Optimizer):
            waiting += [one.param_groups, *one.state.values()]
        elif isinstance(one, DeviceMetrics):
            waiting += vars(one).values()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
    copied = copy.deepcopy(value, memo)
    for number, module in modules.items():
        if type(module) is SCANNED_GRU:
            memo[number].__class__ = PLAIN_GRU
    return copied
