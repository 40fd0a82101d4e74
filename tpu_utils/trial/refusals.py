"""What is said of a model that does not run on tensors without values."""

from tpu_utils.base.errors import first_line, line_of

META_READ_ERRORS = (
    "meta tensors",
    "Cannot copy out of meta",
    "can't convert meta device",
    "'lengths' argument should be a 1D CPU",
)


def why_not(error: Exception, shape: str) -> str:
    """What a model is told that does not run on tensors without values."""
    said = str(error)
    if any(words in said for words in META_READ_ERRORS):
        return (
            f"the model reads a tensor at {line_of(error)}; expected none of .item(), .tolist(), .cpu(), .numpy(), "
            "print(tensor), if on a tensor, lengths on the host in forward: inside a compiled step nothing is read"
        )
    if isinstance(error, NotImplementedError):
        return (
            f"the shape of a result depends on values at {line_of(error)}; expected shapes that are known before: "
            "torch.where(mask, x, 0) in place of x[mask], nonzero, unique or masked_select"
        )
    if "is not on the expected device meta" in said:
        return (
            f"a tensor is made on the host in forward, at {line_of(error)}; expected device=x.device there, or a "
            "buffer that __init__ registers: it would be sent in every step"
        )
    return (
        f"the model does not take a batch of images {shape}: {first_line(error)}; expected one for "
        "the images of the data set, pictures with channels first; change one of them; --debug shows the line"
    )
