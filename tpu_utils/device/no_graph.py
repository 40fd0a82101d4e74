"""Why torch.compile made no graph of a step. Imported only for an error."""

import re
from typing import NoReturn

import torch
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, Unsupported

from tpu_utils.base.errors import InputError, RecompileError, first_line, is_own


def raise_if_not_deterministic(error: Exception) -> None:
    """Raises InputError for an operation that has no deterministic kernel."""
    if "does not have a deterministic implementation" in str(error):
        raise InputError(
            f"{first_line(error)} With --no_deterministic it runs, and a resumed run may end with other bits"
        ) from error


def raise_explained(error: Exception, name: str) -> NoReturn:
    """Raises InputError or RecompileError for what is known of an error of the compiled function of this name, else the
    error itself."""
    raise_if_not_deterministic(error)
    if isinstance(error, InternalTorchDynamoError | AssertionError):  # 2.11 asserts that no DTensor has a gradient
        said = str(error).partition("from user code")[0].strip() or type(error).__name__
        raise InputError(
            f"torch.compile of torch {torch.__version__} fails at {_last_line(error)}, which PyTorch alone runs: "
            f"{said}; expected the torch of requirements-compile.txt"
        ) from error
    cause = getattr(error, "inner_exception", error)
    if not (isinstance(error, Unsupported | BackendCompilerFailed) and isinstance(cause, Unsupported | RecompileError)):
        raise error
    lines = re.findall(r'File "(.+)", line (\d+)', str(cause))
    expected = "tensors alone there: no .item(), print(tensor), if on a tensor"
    if lines and "torch/optim/" in lines[-1][0]:  # it breaks a graph on purpose
        expected = "an optimizer of make_optimizer, of tpu_utils/step/optim.py: torch.optim's step() is in no graph"
    raise RecompileError(
        f"torch.compile makes no one graph of {name}, at {_last_line(cause)}: {first_line(cause)}; expected {expected}"
    ) from error


def _last_line(error: Exception) -> str:
    """FILE:LINE of the step, as Dynamo tells it at the end of its message."""
    lines = re.findall(r'File "(.+)", line (\d+)', str(error))
    own = [line for line in lines if is_own(line[0])] or lines
    return ":".join(own[-1]) if own else "?"
