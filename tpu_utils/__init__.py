"""What every training script calls. A reader of one script opens run.py and needs no other file of this folder.

run           Run: run directory, log, checkpoints, stop signals, behind a script's loop. It imports from all rooms.

Rooms, from the ground up; none imports from one further down this list:

base/         errors (what can end a run, and its exit code), files (read with limits), writing (atomically), process
              (clock, watchdog, the other processes), hardware (the one table of TPU generations), gpus, versions (of
              other packages), restarts (for a program that starts a script again), new_folder (whole or not at all)
remote/       pods and gs:// alone: hosts (which the slice has), meeting (how they agree), wire (proved connections),
              secret (what proves them), storage (a run directory in a bucket), notices (of the VM)
options/      parsing (frozen configurations, presets, the command line, config.json), train_config (the options of
              every script), fields (types, bounds, sentences), environment (what is settled before torch_xla is
              imported), variables and compiler_flags (what others may have set), virtual_slice
device/       the one room that knows the backend: the device started and described, batches sent ahead, signals heard;
              xla; torch_compile (the same names without torch_xla) with dynamo, gpu, local_shards, no_graph (why there
              is none), against_eager (what it computes); dropout, batch_norm (as PyTorch's)
record/       metrics (values on the device until a log line), log (metrics.jsonl, progress lines, summary), records,
              best, events (TensorBoard), speed and lines (throughput, reads and uploads by line), profile, run_dir
step/         graphs (@one_graph: a second graph is an error), seen and second_graph (why there is one), optim (learning
              rates, Adam), sgd, replicas (DistributedDataParallel), average (of weights)
checkpoint/   the folder of checkpoints and the thread that writes them; saved, loading, streaming, state,
              sharded_tensors, tensor_reading; memory (in the memory of the hosts); resume (where a run begins)
trial/        in plain PyTorch before anything is compiled: checks (check_model), trials (evaluations), first_step and
              tried_step (training steps); unsaved (what steps change and no checkpoint holds)
"""

import getpass
import os
import time

STARTED = time.perf_counter()
"""When this package was first imported, which scripts do before they import torch. The age of the process would include
what a shell did before it became Python by exec."""

try:
    getpass.getuser()
except (KeyError, OSError):  # an id without a name, as in a container; torch asks when it is imported, and would raise
    os.environ["USER"] = f"uid_{os.getuid()}"
