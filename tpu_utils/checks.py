"""What a script computes, tried in plain PyTorch on a few examples of the data, before anything is compiled.

A mistake in an evaluation costs nothing but the truth: the run ends with 0 and a wrong number. So the script's own
evaluate() and training step are run on the host, on examples in several batches, orders and paddings. A mean over
examples is the same in all of them, whatever the model, the loss and the labels are.
"""

import copy
import inspect
import math
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tpu_utils.device import drawing_from
from tpu_utils.errors import InputError, first_line, line_of
from tpu_utils.metrics import DeviceMetrics

if TYPE_CHECKING:
    from tpu_utils.run import Run

EXAMPLES = 11
"""Tried at least: no multiple of the batches of 4 that they come in too."""
CLASSES = 16
"""Of so many classes an example each is tried, where the data begins with as many."""
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
ERRORS += (UserWarning,)  # of strict_shapes


def check_model(model: nn.Module, dataset, evaluate: Callable | None = None, run: "Run | None" = None) -> int:
    """Raises InputError for a model that does not fit the data, or an evaluation or a training step that computes
    something else on the same examples when they come in other batches, in another order or beside padding.

    Returns the FLOPs of the matrix work in the forward and backward pass of one example.
    model: on the host; it is left as it is. dataset: first(count) gives arrays of the first examples, the labels last,
    of which num_classes says whether they are classes (None: they are not). evaluate(model, batches, run): the
    script's; a batch is those arrays and a mask. The training step is tried when the run calls it for the first time.
    """
    rows = examples_of(dataset)
    flops = flops_of(model, [array[:2] for array in rows[:-1] or rows])
    if evaluate and run:
        model = with_tensors(model, lambda tensor: tensor.detach().clone())
        check_evaluation(evaluate, model, rows, dataset.num_classes, run)
        run.examples = rows, evaluate
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


def flops_of(model: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """Run the model both ways by PyTorch and without memory. Returns the FLOPs of one example."""
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


# ------------------------------------------------------------------------------------------------------ the evaluation


class RowsAlike(TorchDispatchMode):
    """Random numbers inside are the same for each row of a batch, and in each try: what then differs between two tries
    depends on the rows, their batches or their order, and not on the noise of a VAE or a diffusion model."""

    DRAWN = ("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal_", "uniform_", "random_")
    DRAWN += ("bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_")
    lock = threading.Lock()  # the generator is one for all threads

    def __init__(self):
        super().__init__()
        self.drawn: set[str] = set()
        """Names of the operations that drew."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        self.drawn.add(name)
        with self.lock:
            torch.manual_seed(zlib.crc32(name.encode()))
            if name == "bernoulli":  # of a probability for each value
                return (torch.rand_like(arguments[0][:1]) < arguments[0]).to(arguments[0].dtype)
            result = function(*arguments, **(keywords or {}))
        return result.copy_(result[:1].expand_as(result)) if name in self.DRAWN and result.dim() else result


def place_of(function: Callable) -> str:
    return f"{function.__name__} ({inspect.getsourcefile(function)}:{function.__code__.co_firstlineno})"


def values_by(
    evaluate: Callable, model: nn.Module, batches: Batches, run: "Run", noise: RowsAlike | None = None
) -> dict[str, float]:
    """What evaluate gives of these batches in plain PyTorch. Raises InputError where it fails on them."""
    noise = noise or RowsAlike()
    with run.in_plain_pytorch(), drawing_from(0), strict_shapes(), noise:
        try:
            found = evaluate(model, batches, run)
        except ERRORS as error:
            labels = batches[0][-2]
            raise InputError(
                f"{place_of(evaluate)} fails on {int(sum(batch[-1].sum() for batch in batches))} examples in plain "
                f"PyTorch: {first_line(error)}, at {line_of(error)}; expected {remedy_of(error)} (labels here: "
                f"{str(labels.dtype).removeprefix('torch.')}, {tuple(labels.shape)})"
            ) from error
    if masks := noise.drawn & {"bernoulli_", "native_dropout"}:
        raise InputError(
            f"{place_of(evaluate)} draws a mask of dropout ({masks.pop()}); expected model.eval() first, and "
            "F.dropout(x, p, self.training); for a mask that is meant torch.rand_like(x) < p"
        )
    return {name: float(value) for name, value in found.items()}


def remedy_of(error: Exception) -> str:
    """What an evaluation is told that fails."""
    if isinstance(error, IndexError) and "out of bounds" in str(error):
        return "logits for every class along axis 1, classes from 0 on (labels that begin at 1: subtract 1; none: -100)"
    if isinstance(error, AttributeError | TypeError):
        return "one that takes what the model returns; of a Hugging Face model output.logits"
    if isinstance(error, ZeroDivisionError):
        return "at least one label that counts"
    return (
        "a value for each label, times labels_that_count(labels, mask), which has their shape (one-hot labels as "
        "integers: argmax(1))"
    )


def check_evaluation(evaluate: Callable, model: nn.Module, rows: tuple, num_classes: int | None, run: "Run") -> None:
    """Raises InputError as check_model does."""
    where, noise = place_of(evaluate), RowsAlike()
    values = partial(values_by, evaluate, model, run=run, noise=noise)
    count, labels = len(rows[0]), rows[-1]
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    together = values(in_batches(rows, count))
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
    for name in [name for name, value in together.items() if not math.isfinite(value)]:
        if "loss" in name:
            raise InputError(f"{where} gives {name} {together[name]} of {count} examples; expected a number")
        print(f"check      {name} is not tried: of {count} examples it is {together.pop(name)}")
    if num_classes and len(rows) > 1 and labels.max() < num_classes - 1:  # the largest is rare
        values(in_batches([*rows[:-1], torch.where(labels == labels.max(), num_classes - 1, labels)], count))
    compare(where, values, together, rows)
    if noise.drawn:
        print(
            f"check      {where} draws random numbers ({', '.join(sorted(noise.drawn))}): no two evaluations are equal"
        )
    if bad := [name for name, value in together.items() if "accuracy" in name and not 0 <= value <= 1]:
        raise InputError(
            f"{where} gives {bad[0]} {together[bad[0]]:.4f}; expected 0 to 1: a sum over labels is divided by the "
            "number of labels that count, not of examples"
        )
    if len(rows) > 1 and labels.is_floating_point() and labels.dim() == 1 and not torch.equal(labels, labels.trunc()):
        others = [labels + 0.25, labels.trunc()]
        found = [values(in_batches([*rows[:-1], other], count)) for other in others]
        losses = [name for name in together if name.endswith("loss")] or list(together)
        if all(together[name] == other[name] for name in losses for other in found):
            raise InputError(
                f"labels are {str(labels.dtype).removeprefix('torch.')}, targets, but {where} gives the same without "
                "their fractions: its loss is of classes; expected a loss of targets, such as F.mse_loss, or whole "
                "numbers from 0 on as labels"
            )


def compare(where: str, values: Callable[[Batches], dict[str, float]], together: dict[str, float], rows) -> None:
    """Raises InputError unless the same rows give the same values in other batches, another order, other padding."""
    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(1))
    others = {
        "once more": in_batches(rows, len(rows[0])),
        "in batches of 4, the last one padded": in_batches(rows, 4),
        "in another order, beside other padding": in_batches([array[order] for array in rows], 16, rows),
    }
    for how, batches in others.items():
        found = values(batches)
        for name, value in together.items():
            other = found.get(name, math.nan)
            if is_close(value, other):
                continue
            remedy = (
                "a value for each label, nothing over the batch; times the mask, summed; and one division at the end, "
                "by how many there were"
            )
            if how == "once more":
                remedy = "a function of the model and the batches, without a generator or a count of its own"
            elif math.isnan(other):
                remedy = (
                    "torch.where(counted > 0, loss, 0) in place of loss * counted: rows of padding give nan, and nan "
                    "times 0 is nan"
                )
            raise InputError(
                f"{where} gives {name} {value:.4f} of {len(rows[0])} examples, and {other:.4f} of the same {how}; "
                f"expected the same: {remedy}"
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
            waiting += [
                own for module in one.modules() for own in vars(module).values() if isinstance(own, torch.Tensor)
            ]
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
