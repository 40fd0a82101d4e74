"""A step as one graph of torch.compile: what makes it, and which compiler it is given to. Not imported by torch_xla."""

import functools
import inspect
import logging
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._dynamo import config, lookup_backend

from tpu_utils.base.errors import RecompileError
from tpu_utils.device.against_eager import first_call
from tpu_utils.device.as_pytorch import average_as_pytorch

compiler = "auto"
"""inductor, eager or auto: as choose_compiler() of torch_compile.py was told before the steps are compiled."""


def _prepare() -> None:
    config.trace_autograd_ops = True  # loss.backward() becomes a part of the graph
    # torch keeps Dynamo out of it; its body, which sets gradients to None, is traced
    torch.optim.Optimizer.zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    # step() of any optimizer records its name for a profiler
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    # a sum over two axes of a mesh is one after the other, and a rate (1,) beside a DTensor is the same everywhere
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1", UserWarning)


def settle(optimizer: torch.optim.Optimizer, keep_rates: Callable[[torch.optim.Optimizer], None]) -> None:
    """Make its groups what step 1 makes of them, which calls keep_rates: else step 2 would be another graph."""
    keep_rates(optimizer)
    on_device: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        group.setdefault("capturable", True)  # Dynamo sets it
        if isinstance(rate := group["lr"], torch.Tensor):  # the step puts its own there, one for all groups
            group["lr"] = on_device.setdefault(id(rate), rate.to(group["params"][0].device))


def compile_step(
    function: Callable, begin: Callable, keep_rates: Callable[[torch.optim.Optimizer], None], device_type: str
) -> Callable:
    """The function as one graph of Dynamo's. Raises RecompileError where it would be several, or reads a tensor.

    begin: called before each call. keep_rates: as settle() takes it, for each optimizer among the arguments.
    """
    _prepare()
    average_as_pytorch()  # momentum=None without a read
    compiled = torch.compile(
        function, fullgraph=True, dynamic=False, backend=functools.partial(_compile_graph, device_type)
    )
    is_first = True

    def in_one_graph(*arguments, **keywords):
        begin()
        try:
            return compiled(*arguments, **keywords)
        except (RuntimeError, AssertionError) as error:
            from tpu_utils.device.no_graph import raise_explained  # only for an error

            raise_explained(error, function.__name__)

    @functools.wraps(function)
    def call(*arguments, **keywords):
        nonlocal is_first
        for optimizer in (one for one in arguments if isinstance(one, torch.optim.Optimizer)):
            settle(optimizer, keep_rates)
        if not is_first:
            return in_one_graph(*arguments, **keywords)
        is_first = False
        return first_call(function, in_one_graph, arguments, keywords)

    return call


def _compile_graph(device_type: str, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """By torch_tpu, inductor, or torch's own that runs it. Raises RecompileError for .item(), which Dynamo takes in."""
    for node in graph.graph.nodes:
        if node.target == "item":
            raise RecompileError(f"it reads a tensor\n{node.stack_trace}")
    if device_type == "tpu":
        return lookup_backend("tpu")(graph, inputs)
    if compiler == "eager" or (compiler == "auto" and device_type != "cuda"):
        return lookup_backend("eager")(graph, inputs)
    from torch._inductor import config as inductor

    from tpu_utils.device.gpu import INDUCTOR, Replayed  # its settings serve the CPU too

    # it would time products with padding and without: another process may choose otherwise, and sum otherwise
    padded = not torch.are_deterministic_algorithms_enabled()
    settings = {name: value for name, value in INDUCTOR.items() if hasattr(inductor, name)} | {"shape_padding": padded}
    compiled = lookup_backend("inductor")(graph, inputs, config_patches=settings)
    on_gpu = all(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
    return Replayed(compiled) if on_gpu and not dist.is_initialized() else compiled
