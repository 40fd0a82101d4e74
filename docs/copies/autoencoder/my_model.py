from torch import nn

from tpu_utils.device.dropout_module import Dropout


class Net(nn.Sequential):
    """Rows (B, 6) of floats, a quarter of them masked in training, to rows (B, 6)."""

    def __init__(self, num_classes):
        super().__init__(Dropout(0.25, salt=0), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))
