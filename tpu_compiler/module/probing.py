"""For a module without a script: traces its forward pass without running it, or says why it cannot be traced."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

import torch
import torch_xla
import torch_xla.debug.metrics as met
from torch.utils.flop_counter import FlopCounterMode

from tpu_compiler.module.model import place_of
from tpu_compiler.module.programs import Question
from tpu_utils.base.errors import InputError, first_line


def probe(question: Question, run: Callable) -> tuple[object, int]:
    """(what run() returns, with shapes and no values; FLOPs of its products and convolutions, of all devices).

    Raises InputError for what XLA cannot trace.
    """

    def counted() -> tuple[object, int]:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            result = run()
        return result, counter.get_total_flops()

    return in_words(question, counted)


def in_words(question: Question, run: Callable):
    """Return run(), with execution on the device forbidden. An error becomes an InputError about the module."""
    met.clear_counters()
    allowed = torch_xla._XLAC._get_allow_execution()
    torch_xla._XLAC._set_allow_execution(False)
    try:
        with quiet_errors():
            result = run()
    except InputError:
        raise
    except Exception as error:
        if fallen := fallen_back():
            raise InputError(f"{question.target} cannot run as one XLA program: {fallen} {place_of(error)}") from error
        raise InputError(
            f"{question.target} fails with these inputs: {type(error).__name__}: {first_line(error)} {place_of(error)}"
        ) from error
    finally:
        torch_xla._XLAC._set_allow_execution(allowed)
    if (fallen := fallen_back()) and "reads" not in fallen:
        raise InputError(f"{question.target} cannot run as one XLA program: {fallen}")
    return result


def fallen_back() -> str:
    """The operations that torch_xla ran on the host since its counters were cleared, in words; "" for none."""
    names = [name.removeprefix("aten::") for name in met.counter_names() if name.startswith("aten::")]
    lacking = [name for name in names if name not in ("_local_scalar_dense", "item", "is_nonzero")]
    if lacking:
        return f"XLA has no operation for {', '.join(f'aten::{name}' for name in lacking)}, which runs on the host"
    return "it reads the value of a tensor on the host (an if, .item(), .tolist() or print)" if names else ""


@contextlib.contextmanager
def quiet_errors() -> Iterator[None]:
    """Hold back stderr, where PyTorch/XLA writes pages about a refused execution. Shown only if nothing was raised."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
            sys.stderr.flush()
            os.dup2(kept, 2)
            file.seek(0)
            sys.stderr.write(file.read().decode(errors="replace"))
        finally:
            os.dup2(kept, 2)
            os.close(kept)
