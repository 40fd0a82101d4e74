"""A training step of DDP, tried as two replicas in threads: a part of first_step.py, imported where there is DDP."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from tpu_utils.base.errors import InputError
from tpu_utils.trial.trials import is_close
from tpu_utils.trial.tried_step import Replica, Trial, Tried
from tpu_utils.trial.unsaved import drawing_from


def by_two(trial: Trial, **options: bool) -> list[Tried]:
    """The step, tried by two replicas with half of even_rows() each."""
    rows = even_rows(trial)
    with drawing_from(0), ThreadPoolExecutor(2) as threads:
        tried = threads.map(lambda one: trial.tried(rows[one.ordinal :: 2], one, **options), Replica.make(2))
        return [*tried]


def even_rows(trial: Trial) -> range:
    """The rows of a trial, without the last one where their number is odd."""
    return range(len(trial.rows[0]) // 2 * 2)


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
    whole, parts = trial.tried(even_rows(trial)), by_two(trial)
    size = math.sqrt(sum(float(one.square().sum()) for one in whole.gradients.values()))
    off = math.sqrt(sum(float((one - parts[0].gradients[n]).square().sum()) for n, one in whole.gradients.items()))
    if off <= 1e-3 * size and is_close(whole.loss, parts[0].loss):
        return
    found = (
        f"{where} gives {len(even_rows(trial))} examples a loss of {whole.loss:.4f} on one replica, "
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
