"""One operation of a compiled program's text. Imports nothing of the others here."""

import dataclasses
import re

# operations that take no time of their own, or whose time is that of the computation they call
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast partition-id replica-id after-all iota opt-barrier "
    "add-dependency async-start async-update async-done copy-done slice-done send-done recv-done call while "
    "conditional all-reduce-done all-gather-done collective-permute-done".split()
)
NO_ESTIMATE = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    type: str  # "f32[64,32]{1,0:T(8,128)}" or a tuple of such
    kind: str
    line: str

    def find(self, pattern: str) -> str | None:
        match = re.search(pattern, self.line)
        return match and match[1]

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate. None where it has none; libtpu 0.0.52 then writes the largest number there is."""
        estimate = self.find(r'"estimated_cycles":"(\d+)"')
        return int(estimate) if estimate and int(estimate) < NO_ESTIMATE else None

    @property
    def base(self) -> str:
        """Its kind, of one that is started here and awaited later too: all-gather of all-gather-start."""
        return self.kind.removesuffix("-start")

    @property
    def is_free(self) -> bool:
        """It takes no time of its own: nothing is done, or it awaits what another operation began."""
        return self.kind in FREE or self.kind.endswith(("-done", "-update"))

    @property
    def result(self) -> str:
        """The type of what it makes. Of a -start without the operands and the context that stand beside it."""
        if not self.kind.endswith("-start") or not self.type.startswith("("):
            return self.type
        parts = elements(self.type)
        return parts[0] if self.base == "copy" or len(parts) < 2 else parts[1]

    @property
    def operands(self) -> list[str]:
        """Names of its operands, such as fusion.12."""
        inside = self.line.partition(f" {self.kind}(")[2]
        return re.findall(r"%([\w.\-]+)", inside.partition("), ")[0])


def elements(shape: str) -> list[str]:
    """The types in the type of a tuple, which may be tuples."""
    found = []
    depth = 0
    start = 1
    for place, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            found.append(shape[start:place].strip())
            start = place + 1
    return found
