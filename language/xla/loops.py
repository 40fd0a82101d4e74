"""A loop inside the graph, and sums over its turns that the devices of a mesh keep apart until it has ended.

The pieces are those of torch_xla.experimental.scan, whose own loop gives no way to say how the constants of its body
are sharded. Private interfaces of torch_xla 2.9.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from tpu_utils.base.errors import InputError
from tpu_utils.device import IS_XLA, Mesh, set_global_mesh

if IS_XLA:
    import torch_xla
    import torch_xla.core.xla_builder as xb
    import torch_xla.distributed.spmd as xs
    from torch_xla.experimental.scan import dynamic_slice, dynamic_update_slice

AXES = ("data", "fsdp", "tensor", "context", "expert")  # axes of a language model's mesh
BATCH = ("data", "fsdp", "expert")  # those that the batch axis is sharded over


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Around what runs on placeholders. After an error torch_xla would compute what was traced so far, of placeholders
    that own no memory: a segmentation fault instead of the message."""
    try:
        yield
    except BaseException:
        torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))
        raise


def lower(outputs: list[torch.Tensor], inputs: list[torch.Tensor]):
    """What was traced from inputs to outputs, as the body of a loop: (its computation, the number that each input has
    among its parameters, {number: a tensor on the device} of all else that it reads). -1: an input that is not read."""
    context = torch_xla._XLAC.lowering.LoweringContext("body")
    context.build(outputs)
    numbers, read = [context.tensor_parameter_id(t) for t in inputs], context.device_parameter_id_tensor_mapping()
    constants = {number: t.to(torch_xla.device()) for number, t in read.items() if number not in numbers}
    return xb.computation_from_module_proto("body", context.hlo()), numbers, constants


def loop_in_graph(
    function: Callable,
    carry: list[torch.Tensor],
    rows: list[torch.Tensor],
    reverse: bool = False,
    to_local: Callable = lambda constant: constant,
    over: Sequence[int] = (),
):
    """(last carry, stacked outputs) of function(carry, row) -> (carry, outputs), called for each row of `rows`: one
    loop in the HLO, however many. over: for each output the number of the rows that it is written over; (): for none.

    function is traced once, with a backward pass inside. What it takes from elsewhere is a constant of the loop, which
    to_local() gets first. Raises InputError where it draws random numbers. The torch.compile backend unrolls the loop.
    """
    if not IS_XLA:
        return turn_by_turn(function, carry, rows, reverse)
    device, count = torch_xla.device(), len(rows[0])
    inputs = [[xb.create_placeholder_tensor(t.shape, t.dtype) for t in of] for of in (carry, [row[0] for row in rows])]
    with tracing():
        # times 1: a mark_sharding inside would put other data in the place of a placeholder (pytorch/xla#8742)
        new_carry, outputs = function(*([t * 1 for t in of] for of in inputs))
        leaves, _ = torch_xla._XLAC._get_tensors_xla_device_data_node([*new_carry, *outputs])
        if torch_xla._XLAC._get_seed_info_id() in leaves:
            raise InputError(
                "random numbers inside a loop of the graph (--scan_layers, --gradient_accumulation_steps): they would "
                "be the same in each turn; expected none, or dropout of tpu_utils/device/dropout.py, which counts "
                "steps and layers"
            )
    body, numbers, constants = lower([*new_carry, *outputs], [t for of in inputs for t in of])
    new = [] if over else [torch.zeros((count, *t.shape), dtype=t.dtype, device=device) for t in outputs]
    state = [*carry, *rows, *new, *map(to_local, [torch.tensor(0, device=device), *constants.values()])]
    c, turns = len(carry), len(state) - len(constants) - 1  # places of the first row and of the number of turns
    written = [c + i for i in over] or range(turns - len(new), turns)
    place = {number: i for i, number in enumerate(numbers) if number >= 0}
    place |= {number: turns + 1 + i for i, number in enumerate(constants)}

    def turns_left(*state: xb.Op) -> xb.Op:
        return state[turns] < xb.Op.scalar(state[0].builder(), count, dtype=xb.Type.S64)

    def turn(*state: xb.Op) -> tuple[xb.Op, ...]:
        number = lambda n: xb.Op.scalar(state[0].builder(), n, dtype=xb.Type.S64)  # noqa: E731
        here = number(count - 1) - state[turns] if reverse else state[turns]
        values = [*state[:c], *(dynamic_slice(row, here) for row in state[c:turns]), *state[turns:]]
        result = xb.Op.call(body, [values[place[i]] for i in range(len(place))])
        after = [*(result.get_tuple_element(i) for i in range(c)), *state[c:]]
        after[turns] += number(1)
        for i, at in enumerate(written, start=c):
            after[at] = dynamic_update_slice(state[at], result.get_tuple_element(i), here)
        return tuple(after)

    builder = xb.create_builder("loop")
    parameters = tuple(xb.mkparam(builder, i, xb.tensor_shape(t)) for i, t in enumerate(state))
    loop = xb.Op.mkwhile(parameters, turns_left, turn).build("loop")
    last = torch_xla._XLAC._xla_user_computation("xla::loop", state, loop)
    return last[:c], [last[at] for at in written]


def turn_by_turn(function: Callable, carry: list, rows: list, reverse: bool):
    """loop_in_graph(), without a loop in the graph."""
    found = []
    for turn in reversed(range(len(rows[0]))) if reverse else range(len(rows[0])):
        carry, outputs = function(carry, [row[turn] for row in rows])
        found.append(outputs)
    return carry, [torch.stack(of_turns) for of_turns in zip(*(found[::-1] if reverse else found), strict=True)]


def sums_over_parts(model, function: Callable, sums: list, constants: list, parts: list) -> list[torch.Tensor]:
    """sums, and added to them what function(constants, part) gives for each of the parts (N, B, ...).

    On a mesh of the data axis alone each device has whole weights: it goes through its shares of the parts alone, with
    sums of its own, and these are added up once, after the loop. The partitioner would do it in each turn.
    """
    mesh = model.mesh
    before = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}

    def add(carry, part):
        constants = carry[len(sums) :]
        found = function(constants, part)
        for name, buffer in model.named_buffers() if IS_XLA else ():
            was, version = before.get(name, (None, 0))
            if was is not buffer or version != buffer._version:  # written on placeholders, once for all turns
                raise InputError(
                    f"buffer {name} changes with --gradient_accumulation_steps, in a loop of the graph; expected one "
                    "that stays; leave accumulation out, or change it after the sums"
                )
        return [a + b for a, b in zip(carry, found, strict=False)] + constants, []

    carry = [*sums, *(constant.detach() for constant in constants)]
    if mesh is None or not IS_XLA:
        return loop_in_graph(add, carry, parts)[0][: len(sums)]
    whole_batch = mesh.mesh_shape[0] != mesh.size() or model.reported  # routers look at all of a part
    if whole_batch or torch_xla._XLAC._xla_get_auto_sharding():
        return loop_in_graph(add, carry, parts)[0][: len(sums)]
    copied = lambda t: to_local(t, mesh, (None,) * t.dim())  # noqa: E731
    parts = [to_local(t, mesh, (None, BATCH, *(None,) * (t.dim() - 2))) for t in parts]
    with as_for_one_device(model):
        sums = loop_in_graph(add, [copied(t) for t in carry], parts, to_local=copied)[0][: len(sums)]
    return [sum_over(mesh.axis_names, t, mesh, (None,) * t.dim()) for t in sums]


@contextlib.contextmanager
def as_for_one_device(model, global_mesh: Mesh | None = None) -> Iterator[None]:
    """Within, the model is traced as for one device. global_mesh: what experts and flash attention see meanwhile."""
    mesh = model.mesh
    try:
        model.mesh = None
        set_global_mesh(global_mesh)
        yield
    finally:
        model.mesh = mesh
        set_global_mesh(mesh)


def to_local(tensor, mesh: Mesh, spec: tuple):
    """A device's shard of a tensor, which the partitioner then leaves alone, with all that is computed of it."""
    # times 1: marking what lies on the device already would upload it again
    return xs.enable_manual_sharding(tensor * 1, spec, mesh=mesh).global_tensor


def from_local(shard, mesh: Mesh, spec: tuple):
    """The tensor whose shards the devices hold."""
    sizes = mesh.shape()
    axes = [(axis,) if isinstance(axis, str) else axis or () for axis in spec]
    shape = [n * math.prod(sizes[axis] for axis in over) for n, over in zip(shard.shape, axes, strict=True)]
    return xs.disable_manual_sharding(shard, spec, torch.Size(shape), mesh=mesh).global_tensor


def sum_over(axes, value, mesh: Mesh, spec: tuple):
    """The tensor whose shards are sums of what the devices along these mesh axes hold."""
    return from_local(value[None], mesh, (axes, *spec)).sum(0)
