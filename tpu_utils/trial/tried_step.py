"""The training step on copies of what it was given, on the host: alone, or as one of several replicas of DDP."""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tpu_utils.base.errors import InputError
from tpu_utils.device import IS_XLA, replica_tried
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.step.graphs import OneGraph
from tpu_utils.trial.checks import with_tensors
from tpu_utils.trial.trials import RowsAlike, is_close, place_of
from tpu_utils.trial.unsaved import Unsaved, drawing_from, host_generators


@dataclass
class Replica:
    """One of several replicas that a step is tried as, each in a thread: `with` it, world_size() is their number."""

    ordinal: int
    count: int
    _barrier: threading.Barrier
    _given: list

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
    models: dict[str, nn.Module] = field(default_factory=dict)
    """After the step, by the names of the step's parameters."""


class Trial:
    """The training step on copies of what it was given, on the host."""

    def __init__(self, step: OneGraph, arguments: tuple, keywords: dict, given: list[int], rows: tuple, model: Any):
        """given: positions of the batch among the arguments. rows: in its place. model: of check_model(), what is
        evaluated, if it is among them."""
        self._step = step
        self._given = given
        self.rows = rows
        self.even = range(len(rows[0]) // 2 * 2)  # without the last one where their number is odd
        self._ddp = [isinstance(one, DistributedDataParallel) for one in arguments]
        others = [one.module if is_ddp else one for one, is_ddp in zip(arguments, self._ddp, strict=True)]
        others = [None if i in given else one for i, one in enumerate(others)]
        self._read = with_tensors([*others, keywords], lambda tensor: tensor.detach().cpu())
        (metrics,) = [one for one in others if isinstance(one, DeviceMetrics)]
        self._count = int(metrics.step)
        self.is_first, self.is_ddp = self._count == 0, any(self._ddp)
        self.model = next((copied for copied, one in zip(self._read, others, strict=False) if one is model), None)

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

    def copies(self, chosen: Iterable[int]) -> list:
        """What the step is given, with the rows chosen in place of the batch; the last one: by keyword."""
        inputs = with_tensors(self._read, torch.clone)
        for position, array in zip(self._given, self.rows, strict=True):
            inputs[position] = array[list(chosen)]
        return inputs

    def four_rows(self) -> dict[int, float]:
        """The loss of four rows for which it is a number: a row alone may have no label that counts. There are always
        four rows in a trial, as a step may slice its batch."""
        losses = {}
        for row in range(len(self.rows[0])):
            losses[row] = self.tried([row] * 4).loss
            finite = {one: loss for one, loss in losses.items() if math.isfinite(loss)}
            if len(finite) == 4:
                return finite
        return {row: losses[row] for row in range(4)}

    def tried(self, chosen: Iterable[int], replica: Replica | None = None, training: bool = False) -> Tried:
        """On the rows chosen. replica: as one of several, with the gradients' mean over them, as DDP computes it.
        training: modules stay in their own modes."""
        *inputs, options = self.copies(chosen)
        (metrics,) = [one for one in inputs if isinstance(one, DeviceMetrics)]
        named = zip(self._step.signature.parameters, inputs, strict=False)
        models = {name: one for name, one in named if isinstance(one, nn.Module)}
        parameters = [one for model in models.values() for one in model.parameters()]
        before, gradients = [one.detach().clone() for one in parameters], {}
        for is_ddp, model in zip(self._ddp, inputs, strict=False):
            for name, parameter in model.named_parameters() if is_ddp else ():
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: gradients.update({name: average(p, replica)})
                )
        for model in models.values():
            if not training:
                model.eval()
        with replica or drawing_from(0), RowsAlike():
            self._step.__wrapped__(*inputs, **options)
        values = metrics.read(self._count, self._count + 1)
        return Tried(
            float(values["loss" if "loss" in values else metrics.names[0]][0]),
            any(one.grad is not None and bool(one.grad.any()) for one in parameters),
            not all(map(torch.equal, before, parameters)),
            gradients,
            models,
        )


def average(parameter: nn.Parameter, replica: Replica | None) -> torch.Tensor:
    if replica:
        parameter.grad = replica.sum(parameter.grad) / replica.count
    return parameter.grad.clone()


def by_two(trial: Trial, **options: bool) -> list[Tried]:
    """The step, tried by two replicas in threads, with half of the even rows each."""
    barrier, given = threading.Barrier(2, timeout=60), [None, None]  # where one fails: BrokenBarrierError in the other
    with drawing_from(0), ThreadPoolExecutor(2) as threads:
        replicas = (Replica(ordinal, 2, barrier, given) for ordinal in range(2))
        return [*threads.map(lambda one: trial.tried(trial.even[one.ordinal :: 2], one, **options), replicas)]


def held_alike(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of parameters and buffers, but for statistics of BatchNorm, which replicate() refuses."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.named_buffers(path, recurse=False)


def check_alike(where: str, trial: Trial) -> None:
    """Raises InputError unless two replicas end a step with the same weights and buffers."""
    one, other = (
        {f"{name}.{path}": value for name, model in part.models.items() for path, value in held_alike(model)}
        for part in by_two(trial, training=True)
    )
    if unlike := [name for name in one if not torch.equal(one[name], other[name])]:
        raise InputError(
            f"{where} leaves {', '.join(unlike[:3])} unlike on two replicas, and a checkpoint holds those of one: DDP "
            "averages the gradients of the module that replicate() was given, and nothing else; expected "
            "distributed_mnist_tpu.py, one program over all devices"
        )


def check_replicas(where: str, trial: Trial, couples_examples: bool) -> None:
    """Raises InputError unless two replicas, with half of the rows each, do what one does with all of them.
    couples_examples: it is said, as each replica has the examples of its part alone."""
    whole, parts = trial.tried(trial.even), by_two(trial)
    size = math.sqrt(sum(float(one.square().sum()) for one in whole.gradients.values()))
    off = math.sqrt(sum(float((one - parts[0].gradients[n]).square().sum()) for n, one in whole.gradients.items()))
    if off <= 1e-3 * size and is_close(whole.loss, parts[0].loss):
        return
    found = (
        f"{where} gives {len(trial.even)} examples a loss of {whole.loss:.4f} on one replica, "
        f"{parts[0].loss:.4f} on two and gradients that are {off / (size or 1):.2g} of their size apart: "
    )
    if not couples_examples:
        raise InputError(
            f"{found}a mean over a replica's part is none over the batch where weights or ignored labels differ; "
            "expected the sum of this replica's losses over mean_over_replicas(the sum of its weights), of "
            "tpu_utils/step/replicas.py"
        )
    print(
        f"check      {found}an example has an effect on those of its replica alone, so the run depends on how many "
        "there are; distributed_mnist_tpu.py couples the whole batch"
    )
