"""A model with weights from elsewhere: read by name, checked, sent to its shards tensor by tensor."""

import math
from collections.abc import Callable

import torch

from language.models.int8 import quantize, scale_name
from language.models.layers import Decoder, initialise_adapter
from tpu_utils.base.errors import InputError
from tpu_utils.device import mark_sharding, wait_device_ops


def check_finite(value, where: str):
    """value, on the host. Raises InputError where some of it is no number. where: the file, and the tensor in it."""
    if value.is_floating_point() and value.numel() and not all(map(math.isfinite, map(float, value.aminmax()))):
        wrong = sum(int((~torch.isfinite(rows)).sum()) for rows in value.reshape(-1).split(1 << 24))
        raise InputError(
            f"{where}: {wrong:,} of {value.numel():,} values are infinite or not a number; expected numbers; copy the "
            "file again, or take an earlier checkpoint"
        )
    return value


def load_weights(build: Callable, read: Callable, device, partition_spec: Callable | None = None, seed=0) -> Decoder:
    """build() on the device with weights from elsewhere; adapters begin as in a new run. read: by a parameter's name.
    partition_spec: of a name and its parameter, on a mesh. Tensor by tensor, each to its shards at once: the host holds
    one at a time, in its file's dtype and in the model's. A parameter that build() made int8 is quantized, and its
    scales become a buffer."""
    with torch.device("meta"):
        model = build()

    def placed(value, spec: tuple | None):
        if model.mesh is not None:
            mark_sharding(value, model.mesh, spec)
        return value

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        spec = None if model.mesh is None else partition_spec(name, parameter)
        if "_lora_" in name:
            initialise_adapter(name, value := torch.empty(parameter.shape), generator)
        else:
            value = read(name)
        if parameter.dtype == torch.int8:
            value, scale = quantize(value)
            model.register_buffer(scale_name(name), placed(scale.to(device), spec and spec[:-1]), persistent=False)
        value = value.to(parameter.dtype).to(device)
        value = placed(torch.nn.Parameter(value, requires_grad=parameter.requires_grad), spec)
        model.load_state_dict({name: value}, strict=False, assign=True)
        wait_device_ops()  # or the host would hold all that has not been sent yet
    return model.to(device)
