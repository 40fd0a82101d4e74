from torch import nn


class Net(nn.Sequential):
    """Rows (B, 6) to three values, (B, 3)."""

    def __init__(self, num_classes):
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
