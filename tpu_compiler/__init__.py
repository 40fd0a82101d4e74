"""Asks the real TPU compiler about a training step, with no TPU attached. The command line is aot_tpu.py.

of_script  runs a training script up to its first step, and compiles that step instead
tracing    runs a step's Python once and takes the HLO program that it would execute
compiling  hands that program to libtpu's compiler
ask        compile_for(): traces and compiles a step; answer makes the report, and imports no torch
newest     an environment with a newer compiler for a second opinion; newest_child runs there
reading    memory, collectives and cycles, parsed from the text of the compiled program
modules    the options for any torch.nn.Module without a script; module_step compiles it in a child process
           module_through_torch does so without PyTorch/XLA, by ATen operations and torchax
rules      time of operations for which the compiler has no estimate, and bytes moved
report     the compiler's answer: as a record, as text, as a table
cache      compiled programs and reports, kept on disk
search     compiles a script in a process of its own; the largest value that fits
fastest    the fastest setting on a slice; verdict: its tables, the cheapest slice, the command to run
difference two option sets or commits, line by line
roofline   a picture of what bounds a step; calibration: what measurements say of the estimates
"""
