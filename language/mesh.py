"""The mesh of a language model: sizes of its axes, what cannot work on it, what a run says of it."""

import math
from collections.abc import Callable
from importlib.metadata import version

import numpy as np

from language.data.sequence_data import SequenceData
from language.models.layers import Decoder, adapter_sizes
from language.models.routing import slots_of_capacity
from language.options.transformer_options import TransformerConfig
from language.xla.loops import AXES
from language.xla.shards import check_torch_compile, meet, size_of
from tpu_utils.base.errors import InputError
from tpu_utils.base.process import Peers
from tpu_utils.device import IS_XLA, Mesh, device_count, device_type, set_global_mesh, sharding_spec, use_spmd
from tpu_utils.options.environment import attached_chips
from tpu_utils.run import Run


def auto_sizes(config: TransformerConfig, num_devices: int, hbm_bytes: float | None, width: int) -> tuple[tuple, str]:
    """Sizes of AXES and why: data parallelism while weights, gradients and AdamW's moments (16 bytes a parameter) take
    at most a third of a device's memory, else the smallest fsdp axis that gets them there; others when asked for."""
    frozen = 2 if config.base_precision == "bfloat16" else 4  # bytes; adapters are small beside them
    state = (frozen if config.lora_rank else 16) * config.shape.num_parameters
    common = math.gcd(num_devices, config.shape.embedding_dim, width)
    choices = [n for n in range(1, num_devices + 1) if common % n == 0]
    fsdp = next((n for n in choices if hbm_bytes is None or state / n <= hbm_bytes / 3), choices[-1])
    memory = "unknown memory" if hbm_bytes is None else f"{hbm_bytes / 2**30:.0f} GiB"
    why = f"training state {state / fsdp / 2**30:.2f} GiB of {memory} per device; choose with --mesh"
    return (num_devices // fsdp, fsdp, 1, 1, 1), why


def choose_mesh(config: TransformerConfig, num_devices: int, hbm_bytes: float | None) -> tuple[tuple[int, ...], str]:
    """Sizes of AXES and why. Raises InputError for a mesh that cannot work."""
    shape, batch = config.shape, config.global_batch_size
    of_experts = shape.mlp_dim if config.num_experts else 0
    width = 0 if config.num_experts else getattr(shape, "mlp_dim", 0)  # rows of gate and up are sharded over fsdp too
    if config.mesh == "auto":
        sizes, why = auto_sizes(config, num_devices, hbm_bytes, width)
    else:
        sizes, why = tuple(int(size) for size in config.mesh.split("x")), "as asked"
        sizes += (1,) * (len(AXES) - len(sizes))  # the last two may be left out
    data, fsdp, tensor, devices, expert = sizes
    if math.prod(sizes) != num_devices:
        needed = math.prod(sizes)  # hbm_bytes is None where there is neither a TPU nor a slice to ask about
        start = f"CPU_NUM_DEVICES={needed}" if IS_XLA else f"torchrun --nproc_per_node={needed}"
        remedy = f"start it with {start} for as many devices, or" if hbm_bytes is None else "try"
        where = config.compile_for or ("this TPU slice" if hbm_bytes else "this CPU" if IS_XLA else "this run")
        raise InputError(
            f"mesh is {config.mesh}, {needed} devices, but {where} has {num_devices}; {remedy} --mesh {num_devices}x1x1"
        )
    if expert > 1 and not config.num_experts:
        raise InputError(
            f"the expert axis of the mesh is {expert}, but the model has no experts; choose --mesh "
            f"{data * expert}x{fsdp}x{tensor}x{devices}"
        )
    for name, value, axis, size in (
        ("num_heads", shape.num_heads, "tensor", tensor),
        ("number of heads of keys and values", shape.num_cached_heads, "tensor", tensor),
        ("padded vocabulary", shape.padded_vocab_size, "tensor", tensor),
        ("embedding_dim", shape.embedding_dim, "fsdp", fsdp),
        ("embedding_dim", shape.embedding_dim, "fsdp x context", fsdp * devices),
        ("number of experts", config.num_experts, "expert", expert),
        ("width of the MLP", width, "tensor x fsdp x context", tensor * fsdp * devices),
        ("width of an expert", of_experts, "tensor", tensor),
    ):
        if value % size:
            raise InputError(
                f"{name} ({value}) must be divisible by the {axis} axis ({size}) of the mesh; choose another --mesh"
            )
    if devices > 1 and config.loss_parts > 1:
        raise InputError(f"loss_parts is {config.loss_parts}, but the mesh's context axis is {devices}; expected 1")
    if devices > 1 and config.expert_capacity:
        raise InputError(
            f"expert_capacity is {config.expert_capacity}, places in a whole sequence, but the context axis of the "
            f"mesh is {devices}; leave --expert_capacity out, or choose another --mesh"
        )
    if devices > 1 or config.context_attention != "auto":
        from language.xla.context_attention import problem  # only for devices that share sequences

        if said := problem(config, tensor, devices):
            raise InputError(said)
    unit = data * fsdp * expert * config.gradient_accumulation_steps
    if batch % unit:
        raise InputError(
            f"global_batch_size ({batch}) must be divisible by data x fsdp x expert x gradient_accumulation_steps "
            f"({data} x {fsdp} x {expert} x {config.gradient_accumulation_steps}); try {max(1, batch // unit) * unit}"
        )
    return sizes, why


def start_spmd(config: TransformerConfig) -> Peers | None:
    """Switch SPMD on if there are several devices. That must come before the first tensor. The torch.compile
    backend instead joins the processes of the run, and returns them."""
    if not IS_XLA:
        return meet(config)
    if device_count() > 1:
        use_spmd()


def start_mesh(config: TransformerConfig) -> tuple[Mesh | None, str]:
    """The mesh over all devices, None for a single one, and the line that says why it is so."""
    num_devices, on_tpu = device_count(), device_type() == "TPU"
    hbm_bytes = attached_chips()[0].hbm_gib * 2**30 / attached_chips()[0].devices_per_chip if on_tpu else None
    if config.compile_for:
        hbm_bytes = config.topology.hardware.limit_gib * 2**30
    sizes, why = choose_mesh(config, num_devices, hbm_bytes)
    if not IS_XLA:
        check_torch_compile(config, sizes)
    if config.attention == "flash" and not on_tpu and not config.compile_for:
        raise InputError("attention is flash, but its Pallas kernels run on TPU only; use --attention plain")
    if config.attention == "flash" and version("jax") != "0.7.1":
        raise InputError(
            f"attention is flash, whose kernels are jax 0.7.1's; found {version('jax')}; use plain, or torch_xla 2.9.0"
        )
    if num_devices == 1:
        return None, "one device"
    mesh = Mesh(np.arange(num_devices), sizes, AXES)
    set_global_mesh(mesh)
    named = [f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True) if size > 1 or axis in AXES[:3]]
    if size_of(mesh) > 1:
        from language.xla.context_attention import words  # likewise

        why = f"{why}; {words(config.context_attention)}"
    return mesh, f"{' x '.join(named)}: {why}"


def print_plan(run: Run, data: SequenceData, why: str) -> None:
    """What the run trains, in its first lines. why: of start_mesh."""
    config, shape = run.config, run.config.shape
    run.print(f"mesh       {why}")
    run.print(
        f"model      {shape.num_parameters:,} parameters: {shape.num_layers} layers, {shape.num_heads} heads of "
        f"{shape.head_dim}, width {shape.embedding_dim}, context {shape.sequence_length}, vocabulary "
        f"{shape.vocab_size} of {shape.padded_vocab_size}; {config.attention} attention"
    )
    if config.num_experts:
        places = "none is dropped"
        if capacity := config.expert_capacity:
            slots = slots_of_capacity(shape, shape.sequence_length, capacity)
            places = f"{slots} in a sequence, {capacity} even shares"
        run.print(
            f"experts    {config.num_experts} in a layer, {shape.experts_per_token} for a token, which meets "
            f"{shape.num_multiplied:,} of the parameters; places of an expert: {places}"
        )
    if (width := shape.embedding_dim) % 128:
        run.print(f"width      {width} is no multiple of 128: the matrix unit works as for {width + -width % 128}")
    if config.offload != "nothing" and device_type() != "TPU" and not config.compile_for:
        run.print("offload    without effect: this device has no other memory than the host's")
    if config.initial_weights:
        run.print(f"weights    {config.initial_weights}{', as the run has changed them' if run.first_step else ''}")
    if config.lora_rank:
        from language.weights.hf_layout import sizes_of  # only for adapters

        trained = sum(map(math.prod, adapter_sizes(sizes_of(shape), config.lora_rank).values()))
        run.print(
            f"lora       {trained:,} more in adapters of rank {config.lora_rank}, which alone are trained; the weights "
            f"are frozen in {config.base_precision}"
        )
    run.print(
        f"mfu        {config.flops_per_token:,} FLOPs a token ({4 if config.lora_rank else 6} N + 12 L D T, causal "
        "half not taken off) over peak bf16"
    )
    run.print(f"batch      {config.global_batch_size * shape.sequence_length:,} tokens a step, {run.num_steps} steps")
    if data.loss_floor is not None:
        run.print(f"floor      no model can have an expected loss below {data.loss_floor:.4f} nats per token")


def print_placement(run: Run, model: Decoder, partition_spec: Callable) -> None:
    """Says if the model is not the configuration's; with --print_placement what partition_spec(name, parameter) says of
    each parameter, and where it lies."""
    count = sum(parameter.numel() for name, parameter in model.named_parameters() if "_lora_" not in name)
    if count != run.config.shape.num_parameters:  # a copy has another model
        run.print(f"model      this one has {count:,} parameters: mfu is wrong unless run.open() got its FLOPs a token")
    for name, parameter in model.named_parameters() if run.config.print_placement else ():
        spec = sharding_spec(parameter) or "one device"
        table = partition_spec(name, parameter)
        run.print(f"place      {name:22} {tuple(parameter.shape)!s:20} {table!s:38} {spec}")
