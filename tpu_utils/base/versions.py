"""Releases of other packages that work together. Imports nothing of this project; any Python from 3.8 on reads it."""

from typing import NamedTuple


class Versions(NamedTuple):
    """A pattern of fnmatch for each package; python: the first and the last release that has all of them."""

    torch: str
    torch_xla: str
    torchvision: str
    libtpu: str
    jax: str
    python: tuple

    @property
    def requirements(self) -> str:
        """What `pip install` is given: torch_xla's extras choose libtpu and jax."""
        return f"torch=={self.torch} 'torch_xla[tpu,pallas]=={self.torch_xla}' 'torchvision=={self.torchvision}'"


SUPPORTED_VERSIONS = (  # newest first
    Versions("2.9.0", "2.9.0", "0.24.*", "0.0.21*", "0.7.1", ((3, 11), (3, 12))),
    Versions("2.8.0", "2.8.*", "0.23.*", "0.0.17", "0.6.2", ((3, 11), (3, 13))),
)
"""requirements.txt pins the first set; the tests hold it to that."""
TESTED_VERSIONS = {name: getattr(SUPPORTED_VERSIONS[0], name).rstrip("*") for name in ("torch_xla", "jax", "libtpu")}
"""Those whose private interfaces are used to compile ahead of time."""
