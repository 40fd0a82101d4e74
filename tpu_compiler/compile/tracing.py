"""Runs a training step's Python once, executes nothing, and takes the program it would execute.

Every private interface of torch_xla that this needs is in this file.
"""

import collections
import contextlib
import gc
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch_xla
import torch_xla.runtime as xr
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tpu_compiler.compile.traced import Traced
from tpu_utils.base.errors import first_line


def create_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Give an optimizer that has no state yet the one its first step would create, and return those tensors.

    A copy of the optimizer takes one step on fake tensors, which shows the shapes, dtypes and devices of its state. The
    values are zeros, because nothing runs with them; shardings are those of the parameters. Raises ValueError if the
    step reads a value.
    """
    twin = object.__new__(type(optimizer))
    parameters = {}
    created = []
    if any(optimizer.state.values()):
        return []
    with FakeTensorMode():
        groups = [dict(group, params=[]) for group in optimizer.param_groups]
        for group, real in zip(groups, optimizer.param_groups, strict=True):
            # some optimizers read a learning rate on the device back; the state does not depend on its value
            group.update({name: 0.5 for name, value in group.items() if isinstance(value, torch.Tensor)})
            for parameter in real["params"]:
                fake = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))
                fake.grad = torch.empty_like(fake)
                parameters[fake] = parameter
                group["params"].append(fake)
        vars(twin).update(vars(optimizer), state=collections.defaultdict(dict), param_groups=groups)
        try:
            twin.step()
        except Exception as error:  # whatever it raises for tensors that have no values
            raise ValueError(f"{type(error).__name__}: {first_line(error)}") from error
    for fake, state in twin.state.items():
        parameter = parameters[fake]
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        new = {name: torch.zeros(v.shape, dtype=v.dtype, device=v.device) for name, v in tensors.items()}
        optimizer.state[parameter] = {**state, **new}
        for tensor in new.values():
            sharding = torch_xla._XLAC._get_xla_op_sharding(parameter) if tensor.device.type == "xla" else None
            if sharding is not None and tensor.shape == parameter.shape:
                torch_xla._XLAC._xla_mark_sharding(tensor, sharding)
        created += new.values()
    return created


def settle() -> None:
    """Turn everything not yet computed (initial weights, optimizer state) into placeholders that own no memory.

    So a model from without_weights, sharded and given its optimizer state, never allocates anything: shapes and
    shardings are all the compiler needs.
    """
    torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))
    torch_xla.sync()  # uploads what sits on the host; there is nothing left to execute


def alias_id(tensor) -> int:
    """The number that stays with a tensor through in-place updates, by which the runtime pairs inputs and outputs."""
    return int(re.search(r"AliasID: (\d+)", torch_xla._XLAC._get_xla_tensor_debug_info(tensor))[1])


def _pending_tensors() -> list:
    """The tensors that a sync now would compute, in the order in which it would return them (creation order)."""
    pending, device = {}, torch_xla.device()
    for thing in gc.get_objects():  # PyTorch/XLA keeps this list in C++ only; issubclass does not wake lazy proxies
        if issubclass(type(thing), torch.Tensor) and thing.device == device:
            thing = getattr(thing, "global_tensor", thing)  # XLAShardedTensor wraps the tensor it shards
            if "XLAData: None" in torch_xla._XLAC._get_xla_tensor_debug_info(thing):  # no value yet: computed by a sync
                pending[torch_xla._XLAC._xla_get_tensor_id(thing)] = thing
    return [tensor for _, tensor in sorted(pending.items())]


def _owned_tensors(owners: Sequence) -> dict[int, tuple[str, str]]:
    """{number of a tensor: (role, sharding)} of what modules and optimizers own on the device, and of listed inputs."""
    owned = {}
    for owner in owners:
        if isinstance(owner, torch.nn.Module):
            named = [("parameters", t) for t in (*owner.parameters(), *owner.buffers())]
        elif isinstance(owner, list):
            named = [("inputs", t) for t in owner]
        else:
            named = [("optimizer_state", t) for state in owner.state.values() for t in state.values()]
        for role, tensor in named:
            if isinstance(tensor, torch.Tensor) and tensor.device == torch_xla.device():
                for number in (alias_id(tensor), torch_xla._XLAC._xla_get_tensor_id(tensor)):
                    owned[number] = role, torch_xla._XLAC._get_xla_sharding_spec(tensor)
    return owned


def trace_step(step: Callable, *args, owners: Sequence = (), **kwargs) -> Traced:
    """Run step's Python once, execute nothing, return the program it would execute.

    step may be wrapped by torch_xla.compile: the sync at its end is where the program is taken. All that is alive there
    is an output, as in a real run. owners are modules and optimizers whose tensors the report tells apart, and lists
    of tensors that are marked and neither's. Raises RuntimeError when the step makes no program, or more than one.
    """
    xlac = torch_xla._XLAC
    programs = []
    start = time.monotonic()
    settle()
    owned = _owned_tensors(owners)

    def take_program(wait: bool = False, reset_scope: bool = True) -> None:
        outputs = _pending_tensors()
        if not outputs:
            return
        alias_ids = {alias_id(t) for t in outputs}
        hlo = xlac._get_xla_tensors_hlo_proto(outputs)
        input_ids, _ = xlac._get_tensors_xla_device_data_node(outputs)  # in the order of the program's inputs
        replicas = 1 if xr.is_spmd() else xr.world_size()
        inputs = [owned.get(i, ("inputs", "")) for i in input_ids]
        programs.append(
            Traced(
                hlo=hlo,
                roles=tuple(role for role, _ in inputs),
                donated=tuple(i in alias_ids for i in input_ids),  # the rule of torch_xla's own step marker
                shardings=tuple(sharding for _, sharding in inputs),
                partitions=xr.global_runtime_device_count() if xr.is_spmd() else 1,
                replicas=replicas,
                seconds=time.monotonic() - start,
            )
        )
        xlac._clear_pending_irs(str(torch_xla.device()))

    implementation = sys.modules["torch_xla.torch_xla"]
    real_sync = implementation.sync
    xlac._set_ir_debug(True)  # operations remember the scope they were recorded in
    try:
        implementation.sync = torch_xla.sync = take_program
        with _name_modules(owners) as running, _record_source_lines(running):
            result = step(*args, **kwargs)  # kept alive: what the caller would hold is an output of the program
        take_program()
        del result
    finally:
        implementation.sync = torch_xla.sync = real_sync
        xlac._set_ir_debug(False)
    if len(programs) != 1:
        raise RuntimeError(
            f"the step makes {len(programs)} programs, expected 1: "
            + ("it computes nothing on the device" if not programs else "it calls torch_xla.sync() inside")
        )
    return programs[0]


class _Running(threading.local):
    """Names of the modules whose forward runs on this thread, the innermost last; None for a module without a name."""

    def __init__(self):
        self.names: list[str | None] = []

    def module(self) -> str:
        return next((name for name in reversed(self.names) if name), "")


@contextlib.contextmanager
def _name_modules(owners: Sequence):
    """Yields a _Running that forward hooks keep up to date, with names such as layers.3.mlp."""
    names, running = {}, _Running()
    for owner in owners:
        # compile_for wraps the models of a step in a ModuleList, whose indices the user does not know
        roots = owner if isinstance(owner, torch.nn.ModuleList) else [owner]
        for root in roots:
            if isinstance(root, torch.nn.Module):
                names |= {id(module): name or type(root).__name__ for name, module in root.named_modules()}

    def enter(module, _) -> None:
        running.names.append(names.get(id(module)))

    def leave(*_) -> None:
        if running.names:
            running.names.pop()

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


LIBRARY = sysconfig.get_path("purelib")
TORCHS = tuple(f"{LIBRARY}/{name}/" for name in ("torch", "torch_xla", "functorch"))
NOT_OURS = (sysconfig.get_path("stdlib"), LIBRARY, sysconfig.get_path("platlib"), __file__, "<")
TPU_COMPILER = str(Path(__file__).parent.parent)


def _user_line() -> str:
    """`file.py:line` of the user's code that called the caller of this function."""
    frame, theirs = sys._getframe(2), None
    while frame and (file := frame.f_code.co_filename).startswith(NOT_OURS):
        if not theirs and file.startswith(LIBRARY) and not file.startswith(TORCHS):
            theirs = frame  # the innermost line of a package that is not torch's
        frame = frame.f_back
    if theirs and frame and frame.f_code.co_filename.startswith(TPU_COMPILER):
        frame = theirs  # no user script is on the stack: train_step.py called the module
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "unknown"


@contextlib.contextmanager
def _record_source_lines(running: _Running):
    """Within, every operation is recorded under `file.py:line` of the user's code that caused it.

    What a module's forward caused is recorded under `file.py:line in <layers.3.mlp>`.

    PyTorch/XLA's own metadata names the innermost frame (somewhere in torch) and nothing at all for the backward pass,
    which runs on autograd's thread. So a hook on each autograd node reopens the scope of its forward operation. A
    backward() written in Python is recorded under its own lines, a layer that it recomputes under the layer's lines.
    """
    open_scope = torch_xla._XLAC.profiler.scope_pusher  # closed when the object dies

    class SourceLines(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            line, module = _user_line(), running.module()
            inside = f" in <{module}>" if module else ""
            scope = open_scope(line + inside)
            try:
                result = func(*args, **(kwargs or {}))
            finally:
                del scope
            nodes = [t.grad_fn for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
            while nodes:
                node = nodes.pop()
                if "line" not in node.metadata:  # in metadata: holding the node would keep its saved tensors alive
                    node.metadata["line"] = line
                    nodes += [parent for parent, _ in node.next_functions if parent is not None]
                    node.metadata["module"] = f"{module} backward" if module else None
                    scopes = []
                    node.register_prehook(lambda *_, s=scopes: s.append(open_scope(f"{line} backward{inside}")))
                    node.register_hook(lambda *_, s=scopes: s.clear())
            return result

    python_node = torch.autograd.function.BackwardCFunction
    real_apply = python_node.apply

    def apply(node, *gradients):
        running.names.append(node.metadata.get("module"))
        try:
            with SourceLines():
                return real_apply(node, *gradients)
        finally:
            running.names.pop()

    try:
        python_node.apply = apply
        with SourceLines():
            yield
    finally:
        python_node.apply = real_apply
