"""The training step, tried in plain PyTorch on a few examples before it is compiled: a part of checks.py, imported when
the step is called for the first time."""

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tpu_utils.base.errors import OTHERS, InputError, first_line, line_of
from tpu_utils.device import DEVICE_TYPE, IS_XLA, replica_tried, send, world_size
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.trial.checks import with_tensors
from tpu_utils.trial.trials import RowsAlike, TriedRun, in_batches, is_close, place_of, strict_shapes, values_by
from tpu_utils.trial.unsaved import Unsaved, drawing_from, host_generators

if TYPE_CHECKING:
    from tpu_utils.step.graphs import OneGraph


def check_training(
    run: TriedRun,
    step: "OneGraph",
    arguments: tuple,
    keywords: dict[str, Any],
    batch: Sequence[torch.Tensor],
    unsaved: Unsaved,
) -> None:
    """Raises InputError for a training step whose loss is no mean over examples, or no mean over the batch where DDP
    has parts of it, that leaves gradients behind, changes no parameter, or changes what no checkpoint holds.

    arguments, keywords: of the first call, with the tensors of batch among them; copies on the host are tried, with
    examples of check_model() in place of the batch, and the model in eval mode.
    A mean may be weighted, by class or by how many labels count: its weights follow from the losses of pairs. A sum is
    a mean to this, as there are always four rows.
    """
    where, (rows, evaluate, model) = place_of(step.__wrapped__), run.examples
    if len(batch) != len(rows) or len(rows[0]) < 4:
        return
    given = [position for one in batch for position, other in enumerate(arguments) if other is one]
    if len(given) != len(batch) or not any(isinstance(one, DeviceMetrics) for one in arguments):
        print("check      the loss is not tried in plain PyTorch: the step does not get the batch and DeviceMetrics")
        return
    try:
        with strict_shapes():
            others = [None if i in given else one for i, one in enumerate(arguments)]
            trial = Trial(step, given, rows, others, keywords, model)
            draws_on_host = trial.check_saved(unsaved, arguments, batch)
            four, single = trial.four_rows()
            whole, again = trial.tried(four), trial.tried(four)
            pairs = [trial.tried([four[0], four[0], one, one]).loss for one in four]
    except InputError:
        raise
    except OTHERS as error:
        if "Using a target size" in str(error):
            raise InputError(f"{where}: {first_line(error)} at {line_of(error)}; reshape one of the two") from error
        print(f"check      the loss is not tried in plain PyTorch: {first_line(error)} at {line_of(error)}")
        return
    if whole.left_behind:
        raise InputError(f"{where} leaves gradients behind; expected optimizer.zero_grad(set_to_none=True) in it")
    if trial.is_first and math.isfinite(whole.loss) and not whole.changed:
        raise InputError(
            f"{where} changes no parameter; expected loss.backward(), and an optimizer of these parameters that takes "
            "a step"
        )
    if draws_on_host:
        return
    if not is_close(whole.loss, again.loss) or not all(map(math.isfinite, (whole.loss, *single, *pairs))):
        print("check      the loss is not tried in plain PyTorch: it is random, or not finite for most examples alone")
    elif not step.couples_examples:
        check_coupling(where, whole.loss, single, pairs)
        if any(isinstance(one, DistributedDataParallel) for one in arguments):
            check_replicas(where, trial)
        compare_losses(trial, evaluate, run, dict(zip(four, single, strict=True)))


def check_coupling(where: str, whole: float, single: list[float], pairs: list[float]) -> None:
    """Raises InputError unless the loss of four rows is a mean of what each of them gives alone."""
    expected = weighted_mean(single, pairs)
    if not is_close(whole, expected):
        raise InputError(
            f"{where} gives a loss of {whole:.4f} for 4 examples, and of four times each "
            f"{', '.join(f'{one:.4f}' for one in single)}; expected {expected:.4f}: the examples of a batch have an "
            "effect on each other, as by a softmax over axis 0, or a (B, 1) beside a (B,); where it is meant, as in a "
            "contrastive loss, a mixture of images, or two means over different labels: "
            "@one_graph(couples_examples=True)"
        )


def compare_losses(trial: "Trial", evaluate: Callable, run: TriedRun, single: dict[int, float]) -> None:
    """Says where the script's evaluation gives the same rows another loss. single: of the step, by row."""
    every = range(len(trial.rows[0]))
    for loss, chosen in ((trial.tried(every).loss, every), *((one, [row] * 4) for row, one in single.items())):
        by_evaluation = trial.loss_by(evaluate, run, chosen)
        if by_evaluation is not None and not math.isclose(loss, by_evaluation, rel_tol=0.01):
            print(
                f"check      of the same {len(chosen)} examples, without dropout, the training step gives a loss of "
                f"{loss:.4f}, evaluate {by_evaluation:.4f}: look why, unless the two are meant to differ"
            )
            return


@dataclass
class Tried:
    """What a training step has done on the host."""

    loss: float
    left_behind: bool
    """Whether gradients are still there."""
    changed: bool
    """Whether any parameter is another."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """The last ones of each backward pass, of what DDP has; over the mean of the replicas."""


class Trial:
    """The training step on copies of what it was given, on the host."""

    def __init__(
        self,
        step: "OneGraph",
        given: list[int],
        rows: Sequence[torch.Tensor],
        others: list,
        keywords: dict[str, Any],
        model: nn.Module,
    ):
        """given: positions of the batch among the arguments. others: the arguments without it. model: of check_model(),
        what is evaluated, if it is among them."""
        self._step = step
        self._given = given
        self.rows = rows
        self._ddp = [isinstance(one, DistributedDataParallel) for one in others]
        others = [one.module if is_ddp else one for one, is_ddp in zip(others, self._ddp, strict=True)]
        self._read = with_tensors([*others, keywords], lambda tensor: tensor.detach().cpu())
        (metrics,) = [one for one in others if isinstance(one, DeviceMetrics)]
        self._count = int(metrics.step)
        self.is_first = self._count == 0
        place = next((i for i, one in enumerate(others) if one is model), None)
        self._model = None if place is None else with_tensors(self._read[place], torch.clone)

    def loss_by(self, evaluate: Callable, run: TriedRun, chosen: Sequence[int]) -> float | None:
        """The loss that the script's evaluation gives of these rows, where it gives one."""
        if self._model is None:
            return None
        rows = [array[list(chosen)] for array in self.rows]
        try:
            found = values_by(evaluate, self._model, in_batches(rows, len(chosen)), run)
        except InputError:  # on all of them it does not fail: one class alone may have no AUC
            return None
        return next((value for name, value in found.items() if name.endswith("loss")), None)

    def check_saved(self, unsaved: Unsaved, arguments: tuple, batch: Sequence[torch.Tensor]) -> bool:
        """Whether the step draws on the host. Raises InputError for what one step in training changes and no checkpoint
        holds."""
        *inputs, options = self.copies(range(4))
        named, real = (self._step.signature.bind(*given, **options).arguments for given in (inputs, arguments))
        real = unsaved.given(real, batch)
        named = {name: named[name] for name in real}
        with drawing_from(0), RowsAlike():
            drawn = host_generators()
            unsaved.check_copies(self._step, real, named, lambda: self._step.__wrapped__(*inputs, **options))
            drawn = [name for name, state in host_generators().items() if state != drawn[name]]
        if drawn:
            said = (
                f"{place_of(self._step.__wrapped__)} draws from {drawn[0]}'s generator: on the host, so the number "
                "goes up in each step, or is a constant of the program; torch.rand draws on the device, batch() ahead "
                "of it"
            )
            if not IS_XLA:  # Dynamo makes it a constant
                raise InputError(said)
            print(f"check      {said}")
        return bool(drawn)

    def copies(self, chosen: Sequence[int]) -> list:
        """What the step is given, with the rows chosen in place of the batch; the last one: by keyword."""
        inputs = with_tensors(self._read, torch.clone)
        for position, array in zip(self._given, self.rows, strict=True):
            inputs[position] = array[list(chosen)]
        return inputs

    def four_rows(self) -> tuple[list[int], list[float]]:
        """Four rows whose loss is a number, and it: a row alone may have no label that counts. There are always four
        rows in a trial, as a step may slice its batch."""
        losses = {}
        for row in range(len(self.rows[0])):
            losses[row] = self.tried([row] * 4).loss
            finite = [one for one in losses if math.isfinite(losses[one])]
            if len(finite) == 4:
                return finite, [losses[one] for one in finite]
        return [0, 1, 2, 3], [losses[one] for one in (0, 1, 2, 3)]

    def tried(self, chosen: Sequence[int], replica: "Replica | None" = None) -> Tried:
        """On the rows chosen. replica: as one of several, with the gradients' mean over them, as DDP computes it."""
        *inputs, options = self.copies(chosen)
        (metrics,) = [one for one in inputs if isinstance(one, DeviceMetrics)]
        models = [one for one in inputs if isinstance(one, nn.Module)]
        parameters = [one for model in models for one in model.parameters()]
        before, gradients = [one.detach().clone() for one in parameters], {}
        for is_ddp, model in zip(self._ddp, inputs, strict=False):
            for name, parameter in model.named_parameters() if is_ddp else ():
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: gradients.update({name: average(p, replica)})
                )
        for model in models:
            model.eval()
        with replica or drawing_from(0), RowsAlike():
            self._step.__wrapped__(*inputs, **options)
        values = metrics.read(self._count, self._count + 1)
        return Tried(
            float(values["loss" if "loss" in values else metrics.names[0]][0]),
            any(one.grad is not None and bool(one.grad.any()) for one in parameters),
            not all(map(torch.equal, before, parameters)),
            gradients,
        )


def average(parameter: nn.Parameter, replica: "Replica | None") -> torch.Tensor:
    if replica:
        parameter.grad = replica.sum(parameter.grad) / replica.count
    return parameter.grad.clone()


def check_replicas(where: str, trial: Trial) -> None:
    """Raises InputError unless two replicas, with half of the rows each, do what one does with all of them."""
    rows = range(len(trial.rows[0]) // 2 * 2)
    whole = trial.tried(rows)
    with drawing_from(0), ThreadPoolExecutor(2) as threads:
        parts = [*threads.map(lambda one: trial.tried(rows[one.ordinal :: 2], one), Replica.make(2))]
    size = math.sqrt(sum(float(one.square().sum()) for one in whole.gradients.values()))
    off = math.sqrt(sum(float((one - parts[0].gradients[n]).square().sum()) for n, one in whole.gradients.items()))
    if off > 1e-3 * size or not is_close(whole.loss, parts[0].loss):
        raise InputError(
            f"{where} gives {len(rows)} examples a loss of {whole.loss:.4f} on one replica, {parts[0].loss:.4f} on two "
            f"and gradients that are {off / (size or 1):.2g} of their size apart: a mean over a replica's part is none "
            "over the batch where weights or ignored labels differ; expected the sum of this replica's losses over "
            "mean_over_replicas(the sum of its weights), of tpu_utils/step/replicas.py"
        )


class Replica:
    """One of several replicas that a step is tried as, each in a thread: `with` it, world_size() is their number."""

    def __init__(self, ordinal: int, count: int, barrier: threading.Barrier, given: list):
        self.ordinal = ordinal
        self.count = count
        self._barrier = barrier
        self._given = given

    @staticmethod
    def make(count: int) -> list["Replica"]:
        barrier, given = threading.Barrier(count, timeout=60), [None] * count  # the rest failed: BrokenBarrierError
        return [Replica(ordinal, count, barrier, given) for ordinal in range(count)]

    def __enter__(self) -> None:
        self._token = replica_tried.set(self)

    def __exit__(self, error, *_) -> None:
        replica_tried.reset(self._token)
        if error:
            self._barrier.abort()

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Over the replicas, in one order."""
        self._given[self.ordinal] = value.detach().clone()
        self._barrier.wait()
        total = torch.stack(self._given).sum(0)
        self._barrier.wait()
        return total


class OneBatch(list):
    """Batches of which an evaluation gets one; asking for the next one ends it."""

    class End(Exception):
        pass

    def __iter__(self):
        yield self[0]
        raise OneBatch.End

    def __getitem__(self, index):
        if index:
            raise OneBatch.End
        return super().__getitem__(index)


def trace_evaluation(run: TriedRun) -> None:
    """Raises InputError where evaluate() fails on the device, which need not do what the host does: nn.Transformer has
    another path there. Nothing is compiled: the operations are asked for, and what they would give is dropped."""
    rows, evaluate, model = run.examples
    first = next(model.parameters(), None)
    if world_size() > 1 or first is None or first.device.type != DEVICE_TYPE:
        return  # torch_xla keeps the order of collectives, so one that is dropped would be in the next program
    modes = {module: module.training for module in model.modules()}
    batch = send([one.numpy() for one in in_batches(rows, len(rows[0]))[0]], run.device)
    try:
        with run.in_plain_pytorch(run.device), contextlib.suppress(OneBatch.End):
            evaluate(model, OneBatch([batch, batch]), run)
    except OTHERS as error:
        raise InputError(
            f"{place_of(evaluate)} runs on the host, and fails on the device: {first_line(error)}, at {line_of(error)};"
            " expected operations that the device has too; of nn.TransformerEncoder: enable_nested_tensor=False"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training


def weighted_mean(single: list[float], pairs: list[float]) -> float:
    """Weighted mean of the losses of single examples. pairs[i] is (w[0] single[0] + w[i] single[i]) / (w[0] + w[i]) for
    weights w."""
    weights = [1.0]
    for one, pair in zip(single[1:], pairs[1:], strict=True):
        alike = is_close(single[0], one) or is_close(pair, one)
        weights.append(1.0 if alike else (single[0] - pair) / (pair - one))
    return sum(w * one for w, one in zip(weights, single, strict=True)) / sum(weights)
