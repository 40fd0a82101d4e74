"""What every training script calls. A reader of one script opens run.py and needs no other file of this folder.

run           Run: run directory, log, checkpoints, stop signals, behind a script's loop; imports most of the others
device        the one room that knows the backend: started, described, a step compiled and counted; tensors sent, placed
              on a mesh, read back in shards; random numbers, memory; batch_norm: running averages as PyTorch's
checks        check_model: model, evaluation (trials) and training step (first_step), tried in plain PyTorch before
              anything is compiled; unsaved: what steps change and no checkpoint holds
torch_compile the same names where torch_xla is not installed: docs/torchtpu.md; against_eager: what it computes
graphs        @one_graph: a second graph of a step is an error, in a run and without; second_graph: why there is one
metrics       values of each step that stay on the device until a log line
speed         throughput between two log lines, transfers beside the batch; lines: at which lines these are
loader        batches sent to the device in a thread, ahead of the step
optim         learning rates, optimizers whose state is there before step 1, the average of the weights
dropout       masks hashed on the device
replicas      a process for each device, with DistributedDataParallel
log           metrics.jsonl, progress lines, summary; records: read back; events: the same for TensorBoard
checkpoint/   the folder of checkpoints, and the thread that writes them; saved: one of them, checked and read;
              state: tensors to the host and back; tensor_files: safetensors and their index; memory: checkpoints in
              the memory of the hosts
resume        where a run begins: at step 0, or after a checkpoint
run_dir       the run directory and its lock; restarts: what a program that starts a script again has to know
peers         the processes of a run; here: a run of one process
remote/       for pods and gs:// alone. hosts: which hosts the slice has; meeting: how they meet and what they agree on;
              wire: proved connections between them; secret: what proves them; storage: a run directory in a bucket
clock         where the seconds go, and the watchdog
stop          signals and notices of the VM that end a run early
profile       traces of some steps
options       frozen configurations, presets, the command line; on a resumption the run's own options
fields        what the fields of a configuration class say of themselves: types, bounds, marks, sentences
environment   what must be settled before torch_xla is imported: options, files, device, hosts
virtual_slice this process as a TPU slice, for the compiler
hardware      TPU generations and slices: the one table
compiler_flags  options of the TPU compiler, and the variable that libtpu reads
known_flags     which of them libtpu and XLA have; variables: those of the environment, checked as options are
files         opened only if regular, read up to a size limit, written atomically; new_folder: whole or not at all
errors        what can end a run, and its exit code
"""

import getpass
import os
import time

STARTED = time.perf_counter()
"""When this package was first imported. Scripts do that before they import torch, which takes seconds. The age of the
process is not used: it includes what a shell did before it became Python by exec."""

try:
    getpass.getuser()
except (KeyError, OSError):  # an id without a name, as in a container; torch asks when it is imported, and would raise
    os.environ["USER"] = f"uid_{os.getuid()}"
