"""What several training scripts call. A reader of one script opens run.py and needs no other file of this folder.

run           Run: what every run has and no reader came for; imports most of the others
device        start_device, and what a run says it runs on
hosts         which hosts the slice has, and which this is: by metadata (TPU VM) or environment (GKE, Colab, Kaggle)
peers         the processes of one run: meeting at the start, agreeing later; wire: proved connections between them
metrics       values of each step that stay on the device until a log line
loader        batches on their way to the device, ahead of the step
log           metrics.jsonl, TensorBoard, progress lines, summary
checkpoint    the folder of checkpoints, and the thread that writes them; saved: one of them, checked and read;
              state: tensors to the host and back; tensor_files: safetensors and their index
storage       a run directory in a bucket
graphs        one graph for each kind of step, transfers counted
clock         where the seconds go, and the watchdog
stop          signals and notices of the VM that end a run early
run_dir       the run directory and its lock
profile       traces of some steps
pictures      what a finished MNIST run misread
inputs        files that come from outside: regular ones alone, read in bounds; imports errors, nothing else of ours
options       the command line of a configuration; on a resumption the run's own options
fields        what the fields of a configuration class say of themselves: types, bounds, sentences
files, errors, environment    leaves: no torch, no module of this project
"""
