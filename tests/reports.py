"""What the TPU compiler might say of a step, made up."""

from tpu_compiler.estimate.report import Report


def a_report(**changes) -> Report:
    """One that compiles and fits, on one device, unless the changes say otherwise."""
    facts = dict(topology="v5litepod-1", devices=1, program="one device", compiles=True, fits=True, reason="")
    return Report(**(facts | dict(limit_bytes=100, settings={"global_batch_size": 8}) | changes))
