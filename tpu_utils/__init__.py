"""What several training scripts call, in the order they call it: device, metrics, checkpoint.

    device = start_device(config)                     # one XLA device, or DeviceError; print_banner says what it is
    loader = DeviceLoader(batches, device, ...)       # uploads ahead of the step
    metrics = DeviceMetrics(["loss"], ...)            # values of each step stay on the device until a log line
    checkpoints = Checkpoints(run_dir / ...)          # atomic, checked, never executed

One module for each: device, loader, guards (what stops a run early), metrics, checkpoint, state (to files and
back), storage (a run directory in a bucket), pictures (what a finished run shows of itself), flash_attention, errors.
Exceptions: InputError (config.py) is the user's to mend and exits with 2; every TrainingError exits with 1.
"""

from tpu_utils.checkpoint import (
    Checkpoints,
    DamagedCheckpoint,
    check_like,
    check_same_run,
    load_model,
    load_part,
    open_run_dir,
    random_state,
    read_checkpoint,
    set_random_state,
    sync_folder,
    write_atomically,
)
from tpu_utils.device import (
    GENERATIONS,
    GOOGLE_PCI_VENDOR,
    Generation,
    Peers,
    attached_chips,
    choose_device,
    compile_cache_dir,
    device_memory,
    peak_flops,
    print_banner,
    start_device,
    tpu_hosts,
    wait_for_peers,
)
from tpu_utils.errors import (
    CheckpointError,
    DeviceError,
    NonFiniteError,
    RecompileError,
    SaveError,
    TrainingError,
    run_script,
)
from tpu_utils.flash_attention import flash_attention
from tpu_utils.guards import (
    RunLock,
    StopRequest,
    end_with_parent,
    gradient_norm,
    step_if,
    watch_for_stalls,
)
from tpu_utils.loader import BatchSharding, DeviceLoader
from tpu_utils.metrics import (
    CompileWatch,
    DeviceMetrics,
    Goodput,
    Profile,
    RunLog,
    Speed,
    check_finite,
    finite_means,
    graphs_compiled,
    process_age,
    transfers_from_device,
    transfers_to_device,
)
from tpu_utils.pictures import log_misread, log_sample, log_summary, print_summary
from tpu_utils.state import HostCopy, crc32_of, to_host
from tpu_utils.storage import Mirror

__all__ = [
    "GENERATIONS",
    "GOOGLE_PCI_VENDOR",
    "BatchSharding",
    "CheckpointError",
    "Checkpoints",
    "CompileWatch",
    "DamagedCheckpoint",
    "DeviceError",
    "DeviceLoader",
    "DeviceMetrics",
    "Generation",
    "Goodput",
    "HostCopy",
    "Mirror",
    "NonFiniteError",
    "Peers",
    "Profile",
    "RecompileError",
    "RunLock",
    "RunLog",
    "SaveError",
    "Speed",
    "StopRequest",
    "TrainingError",
    "attached_chips",
    "check_finite",
    "check_like",
    "check_same_run",
    "choose_device",
    "compile_cache_dir",
    "crc32_of",
    "device_memory",
    "end_with_parent",
    "finite_means",
    "flash_attention",
    "gradient_norm",
    "graphs_compiled",
    "load_model",
    "load_part",
    "log_misread",
    "log_sample",
    "log_summary",
    "open_run_dir",
    "peak_flops",
    "print_banner",
    "print_summary",
    "process_age",
    "random_state",
    "read_checkpoint",
    "run_script",
    "set_random_state",
    "start_device",
    "step_if",
    "sync_folder",
    "to_host",
    "tpu_hosts",
    "transfers_from_device",
    "transfers_to_device",
    "wait_for_peers",
    "watch_for_stalls",
    "write_atomically",
]
