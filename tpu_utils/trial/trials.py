"""The script's own evaluate(), tried in plain PyTorch on a few examples in other batches, orders and paddings: a part
of checks.py, imported for a script that has one."""

import inspect
import math
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tpu_utils.base.errors import OTHERS, InputError, first_line, line_of
from tpu_utils.step.graphs import OneGraph
from tpu_utils.trial.unsaved import changes, drawing_from, leaves_of

TOLERANCE = 1e-4
"""Relative. Sums in another order differ by 1e-6."""
SMALL = 10**9
"""FLOPs of one example: four times those of a ResNet-20."""
META_READ_ERRORS = ("meta tensors", "Cannot copy out of meta", "can't convert meta", "argument should be a 1D CPU")
"""What an error says of a model that reads a tensor without values; the last: lengths that must lie on the host."""
Batches = list[tuple[torch.Tensor, ...]]


class TriedRun(Protocol):
    """What trying a step or an evaluation needs of the Run, which an evaluation is called with."""

    device: torch.device
    examples: tuple | None

    def in_plain_pytorch(self, where: torch.device | None = None) -> AbstractContextManager[Any]: ...


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
        known = [argument.name for argument in function._schema.arguments]
        given = dict(zip(known, arguments, strict=False)) | (keywords or {})
        if "dropout_p" in known and not given.get("dropout_p"):  # attention without dropout
            return function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        self.drawn.add(name)
        with self.lock:
            torch.manual_seed(zlib.crc32(name.encode()))
            if name == "bernoulli":  # each value has its probability
                return (torch.rand_like(arguments[0][:1]) < arguments[0]).to(arguments[0].dtype)
            result = function(*arguments, **(keywords or {}))
        return result.copy_(result[:1].expand_as(result)) if name in self.DRAWN and result.dim() else result


def place_of(function: Callable) -> str:
    """Where a function stands, and the steps that it calls: the mistake may be theirs."""
    place = f"{inspect.getsourcefile(function)}:{function.__code__.co_firstlineno}"
    called = [function.__globals__.get(name) for name in names_in(function.__code__)]
    steps = [f" and {place_of(one.__wrapped__)}" for one in called if isinstance(one, OneGraph)]
    return f"{function.__name__} ({place}{''.join(steps)})"


def names_in(code: CodeType) -> list[str]:
    """Names that code asks for, in its comprehensions too."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in names_in(one)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def values_by(
    evaluate: Callable, model: nn.Module, batches: Batches, run: TriedRun, noise: RowsAlike | None = None
) -> dict[str, float]:
    """What evaluate gives of these batches in plain PyTorch. Raises InputError where it fails on them."""
    noise = noise or RowsAlike()
    with run.in_plain_pytorch(), drawing_from(0), noise:
        try:
            found = evaluate(model, batches, run)
        except OTHERS as error:
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


def why_not(error: Exception, shape: str) -> str:
    """What a model is told that does not run on tensors without values. shape: of its images, in words."""
    said = str(error)
    if any(words in said for words in META_READ_ERRORS):
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


def check_evaluation(evaluate: Callable, model: nn.Module, rows: tuple, num_classes: int | None, run: TriedRun) -> None:
    """Raises InputError as check_model does."""
    where, noise = place_of(evaluate), RowsAlike()
    values = partial(values_by, evaluate, model, run=run, noise=noise)
    count, labels = len(rows[0]), rows[-1]
    model.train()
    before, attributes = {n: tensor.clone() for n, tensor in model.state_dict().items()}, leaves_of({"": model}, set())
    together = values(in_batches(rows, count))
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    others = changes(attributes, leaves_of({"": model}, set()))
    changed += [path[1:] for path, value, _ in others if isinstance(value, int | float)]
    if changed:
        raise InputError(
            f"{where} changes the model: {', '.join(changed[:3])}; expected model.eval() before its first step, so "
            "that BatchNorm does not learn from test data, no max_norm of an nn.Embedding, and nothing that counts "
            "evaluations"
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
            again = values(in_batches(rows, len(rows[0]))).get(name, math.nan)
            if not is_close(value, again):
                how, other = "once more", again
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


def is_close(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=TOLERANCE, abs_tol=1e-6)


@contextmanager
def as_tried(flops: int) -> Iterator[None]:
    """Around trials: a loss that broadcasts its target is an error, a warning of torch otherwise; and where an example
    costs less than SMALL, one thread does them: a second one waits for work more than it works."""
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")
        torch.set_num_threads(1 if flops < SMALL else threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
