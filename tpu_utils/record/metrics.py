"""Values of each step that stay on the device until a log line."""

import math

import numpy as np
import torch


class DeviceMetrics:
    """A ring on the device: values of the last `capacity` steps, (capacity, len(names) + 1) float32. Beside it the step
    count, and the count of skipped updates, which is also the last column of the ring: exact up to 2 ** 24.

    record() is traced into the compiled step and read() is the only transfer to the host, so logging every n steps
    costs one small read every n steps. Capacity is the number of steps between two reads.
    """

    def __init__(self, names: list[str], capacity: int, device: torch.device):
        self.names, self.capacity = names, capacity
        # made on the host and sent: made on the device, each would be a graph of its own
        self.step = torch.zeros(1, dtype=torch.int32).to(device)  # (1,): a host scalar () would become a constant
        self.skipped = torch.zeros(1, dtype=torch.int32).to(device)
        self.values = torch.zeros(capacity, len(names) + 1).to(device)
        self._slots = torch.arange(capacity, dtype=torch.int32).to(device)
        self.skipped_steps = 0  # updates skipped since the start of the run, as of the last read()

    def record(self, *values: torch.Tensor, skipped: torch.Tensor | None = None) -> None:
        """Write this step's scalars, one per name, and count the step. Inside the compiled step only. skipped: () bool
        on the device, whether this step's update was skipped."""
        if skipped is not None:
            self.skipped.add_(skipped.int())
        row = torch.stack([value.detach().float() for value in (*values, self.skipped[0])])
        here = (self._slots == self.step % self.capacity)[:, None]
        self.values.copy_(torch.where(here, row, self.values))
        self.step.add_(1)

    def read(self, first_step: int, last_step: int) -> dict[str, np.ndarray]:
        """The values of steps first_step to last_step - 1, at most capacity, oldest first; first_step == last_step only
        updates skipped_steps. Waits for the device."""
        values = self.values.cpu().numpy()
        self.skipped_steps = int(values[(last_step - 1) % self.capacity, -1])
        rows = values[np.arange(first_step, last_step) % self.capacity]
        return {name: rows[:, column] for column, name in enumerate(self.names)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"step": self.step, "skipped": self.skipped, "values": self.values}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
        self.skipped_steps = int(state["skipped"])


def labels_that_count(labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """1.0 for each label that counts, in the shape of labels (B, ...); 0.0 for those of padding, and for classes of
    -100, which cross_entropy ignores too. mask: (B,), 0 for the padding of a batch; None: it has none."""
    mask = torch.ones(len(labels), device=labels.device) if mask is None else mask
    counted = mask.view(-1, *[1] * (labels.dim() - 1)).expand(labels.shape)
    if labels.is_floating_point():
        return counted
    # a tensor: compared with a Python number both sides become 64-bit
    return counted * (labels != torch.full((1,), -100, dtype=labels.dtype, device=labels.device))


def first_not_finite(values: dict[str, np.ndarray]) -> int | None:
    """Index of the first step with a value that is not finite. values: {name: (steps,)}."""
    bad = np.flatnonzero(~np.isfinite(np.stack(list(values.values()))).all(0))
    return int(bad[0]) if len(bad) else None


def finite_means(values: dict[str, np.ndarray]) -> dict[str, float]:
    """The mean of each column over the steps whose values are all finite: those that were not skipped. nan for none.
    Of gradient_norm the largest too: one step of 2 million is not seen in a mean."""
    taken = np.isfinite(np.stack(list(values.values()))).all(0)
    found = {name: float(column[taken].mean()) if taken.any() else math.nan for name, column in values.items()}
    if "gradient_norm" in values:
        found["largest_gradient_norm"] = float(values["gradient_norm"][taken].max()) if taken.any() else math.nan
    return found
