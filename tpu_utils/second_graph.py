"""Why a step has compiled a second graph, in words: imported once one has."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_utils.graphs import Held, Seen


def reasons(
    seen: "Seen",
    is_first: bool,
    held: dict[str, "Held"],
    state: dict[str, int],
    shapes: dict[str, str],
    numbers: dict[tuple, Any],
) -> list[str]:
    """What differs between this call of the step and those before, each with a remedy.

    is_first: of the step, or of this set of shapes. held, state, shapes, numbers: of this call, as seen has them of
    earlier ones.
    """
    reasons = [f"{name} was {seen.shapes[name]}, is {s}" for name, s in shapes.items() if seen.shapes.get(name, s) != s]
    in_modules = _reasons_in_modules(seen.calls, seen.held, held)
    reasons += in_modules
    if is_first:
        return [
            "this is its first call, so operations on device tensors before it became a graph of their own; "
            "do them inside the step, or on the host before the tensor is sent",
            *in_modules,
        ]
    if born := {n: size for n, size in state.items() if size > seen.state.get(n, size)}:
        return [
            f"{name} has {size} tensors of state and had {seen.state[name]} before its first step: state that is "
            "created inside a step makes the next one another program; create it before, as make_optimizer of "
            f"tpu_utils/optim.py does: for each parameter {name}.state[parameter] = {{name: zeros made on the "
            "host, sent to the device}"
            for name, size in born.items()
        ]
    values = [
        f"{name[0]}{''.join(f'[{key!r}]' for key in name[1:])} {seen.numbers[name]!r} -> {value!r}"
        for name, value in numbers.items()
        if seen.numbers.get(name, value) != value and name not in seen.changed
    ]
    return reasons or [
        "no argument changed its shape or dtype, so look for a Python number that is part of the program "
        "(0, 1, sizes, positions and dims are; make it a tensor on the device), for an operation on device "
        "tensors between the steps (move it into the step), or for state that was created inside the step; "
        f"numbers among the arguments that changed now, and not before: {', '.join(values) or 'none'}"
    ]


def _reasons_in_modules(calls: int, before: list[dict[str, "Held"]], now: dict[str, "Held"]) -> list[str]:
    """What modules held that can be the cause of a second graph, each with a remedy.

    calls: of the step so far. before: what was held before each of its first two calls.
    """
    if not before:
        return []
    operations = {path: held.operation for path, held in before[-1].items() if held.operation and calls <= 2}
    found = {
        PENDING: [f"{path} ({name})" for path, name in operations.items() if name != "prim::Constant"],
        CONSTANT: [path for path, name in operations.items() if name == "prim::Constant"],
    }
    if calls > 1:
        old, new = (before[0], before[1]) if calls == 2 else (before[1], now)
        common = [path for path in new if path in old]
        found[CREATED] = [f"{new[p].kind} {p} ({new[p].shape})" for p in new if p not in old]
        found[RESHAPED] = [f"{p} was {old[p].shape}, is {new[p].shape}" for p in common if old[p].shape != new[p].shape]
    texts = {remedy: names[:5] + [f"{len(names) - 5} more"] * (len(names) > 5) for remedy, names in found.items()}
    return [f"{', '.join(names)} {remedy}" for remedy, names in texts.items() if names]


PENDING = (
    "was still to be computed on the device when the step was called; compute it on the host before model.to(device), "
    "or inside the step, or call torch_xla.sync() before the loop"
)
CREATED = "was created in a step, so the next one has an input more: register it in __init__, in its final shape"
RESHAPED = "in the step after: give it its final shape and dtype in __init__, and write into it"
CONSTANT = (
    "is a scalar, and of 0 or 1 torch_xla makes a constant instead of sending it: give its module to run.track(), "
    "which sends it, or give it the shape (1,)"
)
