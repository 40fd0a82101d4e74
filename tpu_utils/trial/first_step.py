"""The training step, tried in plain PyTorch on a few examples before it is compiled: a part of checks.py, imported when
the step is called for the first time."""

import contextlib
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from tpu_utils.base.errors import OTHERS, InputError, first_line, line_of
from tpu_utils.device import DEVICE_TYPE, send, world_size
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.step.graphs import OneGraph
from tpu_utils.trial.trials import TriedRun, as_tried, in_batches, is_close, place_of, values_by
from tpu_utils.trial.tried_step import Trial, Tried, check_alike, check_replicas
from tpu_utils.trial.unsaved import Unsaved


def check_training(
    run: TriedRun, step: OneGraph, arguments: tuple, keywords: dict[str, Any], batch: Sequence, unsaved: Unsaved
) -> None:
    """Raises InputError for a training step whose loss is no mean over examples, or no mean over the batch where DDP
    has parts of it, that leaves gradients behind, changes no parameter, or changes what no checkpoint holds.

    arguments, keywords: of the first call, with the tensors of batch among them; copies on the host are tried, with
    examples of check_model() in place of the batch, and the model in eval mode.
    A mean may be weighted, by class or by how many labels count: its weights follow from the losses of pairs. A sum is
    a mean to this, as there are always four rows.
    """
    where, (rows, evaluate, model, flops) = place_of(step.__wrapped__), run.examples
    if len(batch) != len(rows) or len(rows[0]) < 4:
        return
    given = [position for one in batch for position, other in enumerate(arguments) if other is one]
    if len(given) != len(batch) or not any(isinstance(one, DeviceMetrics) for one in arguments):
        print("check      the loss is not tried in plain PyTorch: the step does not get the batch and DeviceMetrics")
        return
    try:
        with as_tried(flops):
            trial = Trial(step, arguments, keywords, given, rows, model)
            draws_on_host = trial.check_saved(unsaved, arguments, batch)
            single = trial.four_rows()
            whole = trial.tried(single)
            step.is_tried = True
            check_effect(where, trial, whole)
            if trial.is_ddp:
                check_alike(where, trial)
            if draws_on_host or not (step.couples_examples or check_mean(where, trial, whole.loss, single)):
                return
            if trial.is_ddp:
                check_replicas(where, trial, step.couples_examples)
            if not step.couples_examples:
                compare_losses(trial, evaluate, run, single)
    except InputError:
        raise
    except OTHERS as error:
        if "Using a target size" in str(error):
            raise InputError(f"{where}: {first_line(error)} at {line_of(error)}; reshape one of the two") from error
        print(f"check      the loss is not tried in plain PyTorch: {first_line(error)} at {line_of(error)}")


def check_effect(where: str, trial: Trial, whole: Tried) -> None:
    """Raises InputError for a step that leaves gradients behind or trains nothing."""
    if whole.left_behind:
        raise InputError(f"{where} leaves gradients behind; expected optimizer.zero_grad(set_to_none=True) in it")
    if trial.is_first and math.isfinite(whole.loss) and not whole.changed:
        raise InputError(
            f"{where} changes no parameter; expected loss.backward(), and an optimizer of these parameters that takes "
            "a step"
        )


def check_mean(where: str, trial: Trial, whole: float, single: dict[int, float]) -> bool:
    """Raises InputError unless whole, the loss of four rows, is a mean of what each of them gives alone. Returns
    whether this could be tried."""
    if is_close(whole, fmean(single.values())):
        return True
    first, *rest = single
    again = trial.tried(single).loss
    pairs = [trial.tried([first, first, one, one]).loss for one in rest]
    if not is_close(whole, again) or not all(map(math.isfinite, (whole, *single.values(), *pairs))):
        print("check      the loss is not tried in plain PyTorch: it is random, or not finite for most examples alone")
        return False
    expected = weighted_mean([*single.values()], pairs)
    if is_close(whole, expected):
        return True
    raise InputError(
        f"{where} gives a loss of {whole:.4f} for 4 examples, and of four times each "
        f"{', '.join(f'{one:.4f}' for one in single.values())}; expected {expected:.4f}: the examples of a batch have "
        "an effect on each other, as by a softmax over axis 0, or a (B, 1) beside a (B,); where it is meant, as in a "
        "contrastive loss, a mixture of images, or two means over different labels: @one_graph(couples_examples=True)"
    )


def weighted_mean(single: list[float], pairs: list[float]) -> float:
    """Weighted mean of the losses of single examples. pairs[i] is that of the first one and single[i + 1]."""
    weights = [1.0]
    for one, pair in zip(single[1:], pairs, strict=True):
        alike = is_close(single[0], one) or is_close(pair, one)
        weights.append(1.0 if alike else (single[0] - pair) / (pair - one))
    return sum(w * one for w, one in zip(weights, single, strict=True)) / sum(weights)


def compare_losses(trial: Trial, evaluate: Callable, run: TriedRun, single: dict[int, float]) -> None:
    """Says where the script's evaluation gives a row another loss than the step. single: of the step, by row."""
    for row, loss in single.items() if trial.model is not None else ():
        rows = [array[[row] * 4] for array in trial.rows]  # as many as the step gets: else noise is another
        found = {}
        with contextlib.suppress(InputError):  # on all of them it does not fail: one class alone may have no AUC
            found = values_by(evaluate, trial.model, in_batches(rows, 4), run)
        by_evaluation = next((value for name, value in found.items() if name.endswith("loss")), loss)
        if not math.isclose(loss, by_evaluation, rel_tol=1e-3):
            print(
                f"check      of the same example, without dropout, the training step gives a loss of {loss:.4f}, "
                f"evaluate {by_evaluation:.4f}: look why, unless the two are meant to differ, as by label smoothing"
            )
            return


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
    rows, evaluate, model, _ = run.examples
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
