"""Frozen configurations and presets of the MNIST scripts, and what every image script takes. Imports no torch.

Run:     python config.py            # every preset, resolved and checked:
                                     # each value, and where it came from
         python config.py --json     # the same for machines

A value is looked up in this order, the last one wins: the field's default, the
preset, the optimization level, the command line. Presets never set a field that
a level owns, so no value is overridden behind the reader's back. A resumed run
has its own config.json in place of the preset, unless --preset is given.

A configuration of your own is a subclass; command_line() of a script takes it
as it is. Its presets, if it has some, replace its parents'; its docstring is the
heading in --help.

A default that a class states anew stands against the presets of its parents; a
preset that the class states itself sets it. What redeclares a field without
Annotated keeps the bounds and the sentence of its parent's.
"""

import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from tpu_utils.base.errors import run_script
from tpu_utils.options.fields import FREE, Range, Seldom
from tpu_utils.options.train_config import ON_TPU, DeviceOptions, TrainConfig

# what two presets have in common
MNIST_98_9 = ON_TPU | dict(dataset="mnist", num_epochs=10, learning_rate=3e-3, weight_decay=0.05, max_shift=2)


@dataclass(frozen=True)
class ImageConfig(TrainConfig):
    """Passes over labelled images."""

    num_epochs: Annotated[int, Range("[1, inf)")] = 10
    """Passes over the training set. The last, short batch of a pass is left out; each pass is shuffled anew."""
    max_shift: Annotated[int, Range("[0, inf)")] = 0
    """Augmentation: each image moves by up to this many pixels in x and in y, on the host."""
    eval_batch_size: Annotated[int, Range("[1, inf)"), FREE] = 512
    """Examples per evaluation step. The last batch is padded and masked, so each example counts once."""


@dataclass(frozen=True)
class MnistConfig(ImageConfig):
    """What the MNIST scripts train."""

    dataset: Literal["digits", "mnist", "synthetic"] = "digits"
    """digits: 1,797 real digits, no download. mnist: IDX files in data_dir. synthetic: best accuracy known."""
    channels: Annotated[int, Range("[1, inf)")] = 32
    """Channels of the first convolution; the later ones have twice as many."""
    hidden_dim: Annotated[int, Range("[1, inf)")] = 128
    """Width of the hidden linear layer."""

    # those of many devices have them too: equal global batch, epochs and seed give equal numbers in all
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "quick_test": dict(num_epochs=40, learning_rate=4e-3, weight_decay=0.05, max_shift=1, warmup_steps=20),
        "development": dict(dataset="mnist", num_epochs=3, global_batch_size=128, warmup_steps=50, log_every=10),
        "production": MNIST_98_9 | dict(run_dir="runs/mnist_production", global_batch_size=64, warmup_steps=100),
        "distributed": MNIST_98_9 | dict(run_dir="runs/mnist_distributed", global_batch_size=256, warmup_steps=50),
    }


@dataclass(frozen=True)
class DistributedMnistConfig(DeviceOptions, MnistConfig):
    """What distributed_mnist_tpu.py trains."""

    shard_parameters: Annotated[bool, FREE] = False
    """Shard parameters and optimizer state over the devices too (FSDP) instead of one copy each."""


@dataclass(frozen=True)
class DdpMnistConfig(MnistConfig):
    """What ddp_mnist_tpu.py trains."""

    peers_timeout: Annotated[int, Range("[1, 1000000]"), FREE, Seldom()] = 300
    """Seconds to wait at the start for the other replicas."""


CONFIGURATIONS = ("config:MnistConfig", "config:DistributedMnistConfig", "config:DdpMnistConfig")
CONFIGURATIONS += ("images.cifar_config:CifarConfig", "language.options.transformer_options:TransformerConfig")


def main() -> int:
    from tpu_utils.options.presets import print_presets  # only here: a script that is run needs none of it

    return print_presets(CONFIGURATIONS)


if __name__ == "__main__":
    sys.exit(run_script(main, answers=True))
