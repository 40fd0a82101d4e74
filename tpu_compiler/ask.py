"""Traces a step, compiles it with the TPU compiler and reports: compile_for()."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from tpu_compiler.answer import ask_compiler, hand_over
from tpu_compiler.compile.cache import cache_of_environment
from tpu_compiler.compile.compiling import progress
from tpu_compiler.compile.tracing import create_state, trace_step
from tpu_compiler.decide.search import OUTPUT_VARIABLE, suggest
from tpu_compiler.estimate.calibration import CALIBRATION, read_calibration
from tpu_compiler.estimate.report import format_report
from tpu_compiler.estimate.token_bound import with_tokens
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import GIB, parse_topology


def compile_for(
    topology: str,
    step: Callable,
    *args,
    examples: int,
    unit: str = "examples",
    model_flops: float | None = None,
    settings: dict | None = None,
    owners: Sequence = (),
    reads: dict | None = None,
    **kwargs,
) -> int:
    """Compile step(*args, **kwargs) for a slice instead of running it, and print the report.

    The model and the optimizer are recognised among the arguments. examples (tokens, with unit="tokens") and
    model_flops are those of one step over all devices. settings: the resolved configuration, for --fit, and for what
    to try when the step does not fit. owners: as trace_step() takes them, beside those among the arguments. reads: of a
    step that generates tokens, what with_tokens() takes. Returns the exit code: 0 fits, 1 does not.
    """
    if not xr.is_spmd() and xr.global_ordinal() > 0:
        return 0  # all replicas run the same program; the first one compiles it
    alone = not os.environ.get(OUTPUT_VARIABLE)  # nobody else reads the calibration, and prints the report
    calibration = read_calibration(CALIBRATION) if alone and CALIBRATION.exists() else None
    everything = [*args, *kwargs.values()]
    settings = dict(settings or {})
    mesh = xs.get_global_mesh()
    if mesh is not None and "mesh" in settings:
        sizes = list(mesh.mesh_shape)  # the mesh that auto chose
        while len(sizes) > 3 and sizes[-1] == 1:  # axes that --mesh may leave out
            sizes.pop()
        settings["mesh"] = "x".join(map(str, sizes))
        # no option says it: the model has it, and the configuration that the step is given
        settings["num_experts"] = max((getattr(value, "num_experts", 0) for value in everything), default=0)
    # of the configuration that the step is given; a tensor's shape has no such name
    shapes = [v.shape for v in everything if hasattr(getattr(v, "shape", None), "num_layers")]
    settings["layers"] = max((shape.num_layers for shape in shapes), default=0)
    model = torch.nn.ModuleList(a for a in everything if isinstance(a, torch.nn.Module))
    optimizers = [a for a in everything if isinstance(a, torch.optim.Optimizer)]
    for optimizer in optimizers:
        prime(optimizer)
    with progress(f"tracing for {topology}"):
        traced = trace_step(step, *args, owners=(model, *optimizers, *owners), **kwargs)
    sizes = dict(examples=examples, unit=unit, model_flops=model_flops)
    result, text = ask_compiler(traced, topology, **sizes, settings=settings, cache=cache_of_environment())
    result = with_tokens(result, **reads) if reads else result
    if shapes:  # a model's size does not say whether its tokens are those of the data, which may be bytes
        shape = shapes[0]
        said = f"layers {shape.num_layers}, width {shape.embedding_dim}, vocabulary {shape.vocab_size}"
        asked = {"batch": settings.get("global_batch_size"), "mesh": mesh is not None and settings.get("mesh")}
        said += "".join(f", {name} {value}" for name, value in asked.items() if value)
        result = dataclasses.replace(result, notes=[*result.notes, said])
    if not alone:
        return hand_over(traced, result, text)
    if calibration:
        said = calibration.sentence(parse_topology(topology).generation, result.versions["libtpu"])
        result = dataclasses.replace(result, calibration=said)
    print(format_report(result), flush=True)
    if result.over_bytes:
        print(suggest(result, sys.argv[0], sys.argv[1:]), flush=True)
    return result.exit_code


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Create missing optimizer state, so that the report counts it. Warns: a run would stop at step 2 (new graph)."""
    kind = type(optimizer).__name__
    remedy = "create it before the first step, as make_optimizer of optim.py does"
    try:
        created = create_state(optimizer)
    except ValueError as error:
        raise InputError(
            f"{kind} has no state yet, and what its first step creates cannot be worked out ({error}); expected the "
            f"state to be there, or the report would not count it; {remedy}"
        ) from error
    if created:
        size = sum(tensor.numel() * tensor.element_size() for tensor in created) / GIB
        print(
            f"warning: {kind} has no state yet; the report counts the {len(created)} tensors ({size:.3f} GiB) that its "
            f"first step creates, but a run would stop at step 2 with a second graph: {remedy}",
            file=sys.stderr,
        )
