"""Options and presets of resnet_cifar_tpu.py. Imports nothing but config.py and what that imports."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from config import ImageConfig
from tpu_utils.options.fields import Range
from tpu_utils.options.train_config import ON_TPU, DeviceOptions

# what presets have in common
SGD = dict(depth=8, optimizer="sgd", learning_rate=0.1, weight_decay=5e-4, max_shift=4)
CIFAR_LONG = ON_TPU | SGD | dict(optimization_level="aggressive", dataset="cifar10", num_epochs=100)


@dataclass(frozen=True)
class CifarConfig(DeviceOptions, ImageConfig):
    """What resnet_cifar_tpu.py trains."""

    dataset: Literal["stripes", "cifar10"] = "stripes"
    """stripes: made, best accuracy known. cifar10: its binary files in data_dir."""
    depth: Annotated[int, Range("[8, 1202]")] = 20
    """Layers of the ResNet: 6 n + 2."""
    width: Annotated[int, Range("[1, inf)")] = 16
    """Channels of its first third; the next two have twice and four times as many."""
    flip: bool = True
    """Augmentation: half of the pictures are mirrored left to right, on the host."""

    # stochastic gradient descent as He et al. 2015, section 4.2, with a cosine in place of the steps
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "quick_test": SGD | dict(num_epochs=4, warmup_steps=20),
        "development": SGD | dict(dataset="cifar10", width=32, global_batch_size=128, num_epochs=3, warmup_steps=200),
        "production": CIFAR_LONG
        | dict(run_dir="runs/cifar10_width_128", width=128, global_batch_size=128, warmup_steps=400, save_every=1000),
        "distributed": CIFAR_LONG
        | dict(
            run_dir="runs/cifar10_width_256",
            width=256,
            learning_rate=0.4,
            global_batch_size=512,
            warmup_steps=500,
            save_every=500,
        ),
    }

    def problems(self) -> list[str]:
        if self.depth % 6 == 2:
            return super().problems()
        depth = self.depth // 6 * 6 + 2
        return [*super().problems(), f"depth is {self.depth}; expected 6 n + 2; the nearest: {depth} or {depth + 6}"]
