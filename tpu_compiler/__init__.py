"""Asks the real TPU compiler about a training step, with no TPU attached. The command line is aot_tpu.py.

of_script  runs a training script up to its first step, and compiles that step instead
ask        compile_for(): traces and compiles a step; answer makes the report, and imports no torch
compile/   tracing (runs a step's Python once and takes its HLO program), compiling (hands that to libtpu's compiler),
           cache (programs and reports on disk), newest and newest_child (a newer compiler for a second opinion)
estimate/  reading (memory, collectives and cycles of a compiled program), rules and schedule (time of what the compiler
           has no estimate for), report (as a record, text, table), token_bound, calibration (what measurements say)
decide/    search (the largest value that fits), fastest (settings on a slice), verdict (its tables), difference (two
           option sets or commits), roofline (a picture of what bounds a step)
module/    any torch.nn.Module without a script: programs (its options), train_step (compiled in a child process),
           through_torch (the same by ATen operations and torchax, without PyTorch/XLA)
"""
