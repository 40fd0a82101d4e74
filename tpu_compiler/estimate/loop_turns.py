"""How often the loops of a compiled program run, by their counters."""

import itertools
import operator

from tpu_compiler.estimate.operation import Operation

COMPARED = dict(LT=operator.lt, LE=operator.le, GT=operator.gt, GE=operator.ge, NE=operator.ne)
MIRRORED = dict(LT="GT", GT="LT", LE="GE", GE="LE")


def turns_of(loop: Operation, computations: dict[str, list[Operation]]) -> tuple[int, bool]:
    """(how often a loop runs, whether that is known): as the compiler says, else as its condition says of a counter. Of
    a loop whose end depends on values too, the most; of one without a counter, the largest whole number of its
    condition, or 1."""
    if known := loop.find(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known), True
    condition, body = (
        {o.name: o for o in computations.get(loop.find(rf"{role}=%?([\w.\-]+)") or "", ())}
        for role in ("condition", "body")
    )
    caller = next((found for found in computations.values() if any(one is loop for one in found)), [])
    around = {o.name: o for o in caller}
    begun = around.get(loop.operands[0])
    begun = begun.operands if begun and begun.kind == "tuple" else []
    carried = next((o.operands for o in body.values() if o.line.lstrip().startswith("ROOT")), [])
    found, guessed = [], []  # of counters whose step is known, and of others, which grow by 1
    for compare in (o for o in condition.values() if o.kind == "compare"):
        sides = [condition.get(name) for name in compare.operands]
        numbers = [side and whole_number(side.name, condition) for side in sides]
        if None not in numbers or numbers == [None, None]:
            continue
        left = numbers[0] is None
        counter = sides[0 if left else 1]
        place = counter and counter.find(r"get-tuple-element\(.*, index=(\d+)")
        if place is None:
            continue
        place, bound = int(place), numbers[1 if left else 0]
        start = whole_number(begun[place], around) if place < len(begun) else None
        change = change_of(carried[place] if place < len(carried) else "", body)
        direction = compare.find(r"direction=(\w+)")
        direction = direction if left else MIRRORED.get(direction, direction)
        if start is not None or direction in ("LT", "LE", "NE"):  # else it goes down, nobody knows from where
            count = turns(start or 0, *(change or ("add", 1)), direction, bound)
            (found if change else guessed).append(count)
    known = [count for count in found or guessed if count is not None]
    if known:
        return (max if any(o.kind == "or" for o in condition.values()) else min)(known), True
    return max([1, *(whole_number(name, condition) or 1 for name in condition)]), False


def original(name: str, named: dict[str, Operation]) -> Operation | None:
    """The operation of that name, or what it is a copy of."""
    while name in named and named[name].base in ("copy", "copy-done", "bitcast") and named[name].operands:
        name = named[name].operands[0]
    return named.get(name)


def whole_number(name: str, named: dict[str, Operation]) -> int | None:
    """The whole number of a constant or of a copy of one."""
    operation = original(name, named)
    found = operation and operation.find(r" [su]\d+\[\]\S* constant\((-?\d+)\)")
    return None if found is None else int(found)


def change_of(name: str, body: dict[str, Operation]) -> tuple[str, int] | None:
    """How the body of a loop changes its counter, such as ("add", 1); None: by what is computed."""
    operation = original(name, body)
    if operation is None or operation.kind not in ("add", "subtract", "multiply"):
        return None
    numbers = [number for part in operation.operands if (number := whole_number(part, body)) is not None]
    return (operation.kind, numbers[0]) if numbers else None


def turns(start: int, kind: str, by: int, direction: str, bound: int) -> int | None:
    """How often a counter changes until it is not in that direction of the bound; None: never, or nobody can say."""
    if direction not in COMPARED:
        return None
    if kind == "multiply":
        values = itertools.takewhile(lambda value: abs(value) < 2**63, (start * by**n for n in range(64)))
        return next((n for n, value in enumerate(values) if not COMPARED[direction](value, bound)), None)
    by = -by if kind == "subtract" else by
    if not COMPARED[direction](start, bound):
        return 0
    beyond = {"LE": 1, "GE": -1}.get(direction, 0)
    left = bound + beyond - start
    if by == 0 or left * by < 0 or (direction == "NE" and left % by):
        return None
    return -(-abs(left) // abs(by))
