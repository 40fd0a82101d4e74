"""The program of a step, whoever traced it: PyTorch/XLA (tracing) or torch alone (through_torch)."""

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
