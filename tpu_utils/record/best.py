"""The best evaluation of a run, for --keep_best."""

import math
from typing import Any

from tpu_utils.base.errors import InputError

BEST_IS_LARGEST = {"accuracy": True, "validation_loss": False}
"""Evaluations are compared by the first of these fields that they have; True: the largest value is the best."""


def better(best: dict[str, Any] | None, step: int, fields: dict[str, float]) -> dict[str, Any] | None:
    """The better of the best evaluation so far and this one: its step, the field that was compared, and its value.

    Of equal values the earlier is the best; one that is not finite never is. Raises InputError without such a field.
    """
    name = next((name for name in BEST_IS_LARGEST if name in fields), None)
    if name is None:
        raise InputError(
            f"keep_best needs an evaluation with {' or '.join(BEST_IS_LARGEST)}; found {', '.join(fields)}; log one of "
            "the two, or give --no_keep_best"
        )
    value, sign = float(fields[name]), 1 if BEST_IS_LARGEST[name] else -1
    known = best is not None and best["field"] == name
    if not math.isfinite(value) or (known and sign * value <= sign * best["value"]):
        return best
    return {"step": step, "field": name, "value": value}
