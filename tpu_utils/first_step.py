"""The training step, tried in plain PyTorch on a few examples before it is compiled: a part of checks.py, imported when
the step is called for the first time."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tpu_utils.checks import ERRORS, is_close, place_of, strict_shapes, with_tensors
from tpu_utils.errors import InputError, first_line, line_of
from tpu_utils.metrics import DeviceMetrics

if TYPE_CHECKING:
    from tpu_utils.graphs import OneGraph


def check_training(
    step: "OneGraph",
    arguments: tuple,
    keywords: dict[str, Any],
    batch: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    evaluated: Callable[[nn.Module], float | None],
) -> None:
    """Raises InputError for a training step whose loss is no mean over examples, leaves gradients behind, or changes
    no parameter.

    arguments, keywords: of the first call, with the tensors of batch among them; copies on the host are tried, with the
    examples of rows in place of the batch, and the model in eval mode. evaluated(model): the loss of these by the
    evaluation of the script.
    A mean may be weighted, by class or by how many labels count: its weights follow from the losses of pairs.
    """
    where = place_of(step.__wrapped__)
    if step.couples_examples or len(batch) != len(rows) or len(rows[0]) < 4:
        return
    given = [position for one in batch for position, other in enumerate(arguments) if other is one]
    if len(given) != len(batch) or not any(isinstance(one, DeviceMetrics) for one in arguments):
        print("check      the loss is not tried in plain PyTorch: the step does not get the batch and DeviceMetrics")
        return
    others = [None if position in given else one for position, one in enumerate(arguments)]
    others = [one.module if isinstance(one, DistributedDataParallel) else one for one in others]
    read = with_tensors([*others, keywords], lambda tensor: tensor.detach().cpu())

    def loss_of(chosen: list[int], learns: bool = False) -> float:
        *inputs, options = with_tensors(read, torch.clone)
        for position, array in zip(given, rows, strict=True):
            inputs[position] = array[chosen]
        (metrics,) = [one for one in inputs if isinstance(one, DeviceMetrics)]
        models = [one for one in inputs if isinstance(one, nn.Module)]
        for model in models:
            model.eval()
        count = int(metrics.step)
        before = [one.detach().clone() for model in models for one in model.parameters()]
        with torch.random.fork_rng([]), strict_shapes():
            step.__wrapped__(*inputs, **options)
        if any(one.grad is not None and one.grad.any() for model in models for one in model.parameters()):
            raise InputError(f"{where} leaves gradients behind; expected optimizer.zero_grad(set_to_none=True) in it")
        values = metrics.read(count, count + 1)
        loss = float(values["loss" if "loss" in values else metrics.names[0]][0])
        after = [one for model in models for one in model.parameters()]
        if learns and count == 0 and math.isfinite(loss) and all(map(torch.equal, before, after)):
            raise InputError(
                f"{where} changes no parameter; expected loss.backward(), and an optimizer of these parameters that "
                "takes a step"
            )
        return loss

    everything, four = list(range(len(rows[0]))), [0, 1, 2, 3]
    try:
        whole, again = loss_of(four, learns=True), loss_of(four)
        single, pairs = [loss_of([one]) for one in four], [loss_of([0, one]) for one in four]
        of_all = loss_of(everything)
    except InputError:
        raise
    except ERRORS as error:
        if "Using a target size" in str(error):
            raise InputError(f"{where}: {first_line(error)} at {line_of(error)}; reshape one of the two") from error
        print(f"check      the loss is not tried in plain PyTorch: {first_line(error)} at {line_of(error)}")
        return
    if not is_close(whole, again) or not all(map(math.isfinite, (whole, *single, *pairs))):
        print("check      the loss is not tried in plain PyTorch: it is random, or not finite for single examples")
        return
    expected = sum(single) if is_close(pairs[1], single[0] + single[1]) else weighted_mean(single, pairs)
    if not is_close(whole, expected):
        raise InputError(
            f"{where} gives a loss of {whole:.4f} for 4 examples, whose own are "
            f"{', '.join(f'{one:.4f}' for one in single)}; expected {expected:.4f}: the examples of a batch have an "
            "effect on each other, as by a softmax over axis 0, or a (B, 1) beside a (B,); where it is meant, as in a "
            "contrastive loss: @one_graph(couples_examples=True)"
        )
    models = [one for one in with_tensors(read, torch.clone) if isinstance(one, nn.Module)]
    by_evaluation = evaluated(models[0]) if models else None
    if by_evaluation is not None and not math.isclose(of_all, by_evaluation, rel_tol=0.01):
        print(
            f"check      of the same {len(everything)} examples, without dropout, the training step gives a loss of "
            f"{of_all:.4f}, evaluate {by_evaluation:.4f}: look why, unless the two are meant to differ"
        )


def weighted_mean(single: list[float], pairs: list[float]) -> float:
    """Of the losses of single examples. pairs[i] is (w[0] single[0] + w[i] single[i]) / (w[0] + w[i]) for weights w."""
    weights = [1.0]
    for one, pair in zip(single[1:], pairs[1:], strict=True):
        alike = is_close(single[0], one) or is_close(pair, one)
        weights.append(1.0 if alike else (single[0] - pair) / (pair - one))
    return sum(w * one for w, one in zip(weights, single, strict=True)) / sum(weights)
