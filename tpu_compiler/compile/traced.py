"""The program of a step, whoever traced it: PyTorch/XLA (tracing), torch alone (through_torch) or a file
(given_program)."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step as PyTorch/XLA would hand it to the compiler. roles, donated, shardings: one entry per program input."""

    hlo: bytes  # serialized HloModuleProto
    roles: tuple[str, ...]  # "parameters", "optimizer_state" or "inputs"
    donated: tuple[bool, ...]  # the inputs whose buffer the step overwrites
    # as marked, "" if unmarked; the traced HLO itself lacks the sharding of a placeholder that is only read
    shardings: tuple[str, ...]
    partitions: int = 1  # SPMD devices
    replicas: int = 1  # DDP replicas
    seconds: float = 0.0
    given: bool = False  # by --hlo: whoever wrote it says which inputs are sharded, and its source lines stay
    shardy: bool = False  # annotated for Shardy instead of GSPMD
    # whether the partitioner may choose the sharding of each output, or, in one entry, of all
    free_outputs: tuple[bool, ...] = (True,)
