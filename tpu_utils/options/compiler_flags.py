"""The TPU compiler's options: which ones, and the variable from which libtpu takes them. Imports no torch.

libtpu reads LIBTPU_INIT_ARGS once, when it is loaded, on a TPU VM and when it is asked ahead of time. So both compile
the same.
"""

import os
import re
from collections.abc import Mapping

VARIABLE = "LIBTPU_INIT_ARGS"
NO_WINDOWED_EINSUM = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
"""All-gather a sharded weight whole, whatever its size, instead of in a chain of small products and sends."""
TORCH_XLA_FLAGS = {
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
"""What torch_xla 2.9.0 adds when it is imported beside a TPU: _setup_libtpu_flags of torch_xla/__init__.py."""
TORCH_XLA_FLAGS_V5 = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}
SAFE_FLAG = (
    r"xla_(tpu_scoped_vmem_limit_kib|jf_spmd_threshold_for_windowed_einsum_mib)=[0-9]{1,9}|xla_(tpu_)?enable_"
    r"(async|data_parallel|sparse_core_collective_offload)_[a-z_]+=(true|false)"
)
"""Options that a run's config.json may set. Others make libtpu read or write files: flagfile, xla_jf_dump_to."""


def parse_compiler_options(text: str) -> dict[str, str]:
    """'NAME=VALUE NAME=VALUE' -> {name: value}. Raises ValueError for anything else."""
    found = {}
    for word in text.split():
        match = re.fullmatch(r"(?:--)?(\w+)=([^\s=]+)", word)
        if not match:
            raise ValueError(
                f"compiler_options has {word!r:.60}; expected NAME=VALUE, several separated by spaces, such as "
                "xla_tpu_scoped_vmem_limit_kib=32768"
            )
        found[match[1]] = match[2]
    return found


def set_flags(options: Mapping[str, str]) -> None:
    """Add options to LIBTPU_INIT_ARGS. What stands there already is the user's, and stays."""
    words = os.environ.get(VARIABLE, "").split()
    names = {word.lstrip("-").partition("=")[0] for word in words}
    os.environ[VARIABLE] = " ".join([*words, *(f"--{name}={v}" for name, v in options.items() if name not in names)])


def torch_xla_flags(generation: str) -> dict[str, str]:
    """What importing torch_xla adds on a TPU VM with such chips. generation: v4, v5e, ..."""
    return TORCH_XLA_FLAGS | (TORCH_XLA_FLAGS_V5 if generation in ("v5e", "v5p") else {})


def flags_in_use(names: Mapping[str, str]) -> dict[str, str]:
    """The values of these options as libtpu gets them."""
    words = (word.lstrip("-").partition("=") for word in os.environ.get(VARIABLE, "").split())
    return {name: value for name, _, value in words if name in names}
