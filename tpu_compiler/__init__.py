"""Asks the real TPU compiler about a training step, with no TPU attached. The command line is aot_tpu.py.

hardware   TPU generations and slices: the one table; no torch, no jax
flags      the compiler's options, and the variable from which libtpu takes them
tracing    runs a step's Python once and takes the program it would execute
compiling  hands that program to libtpu's compiler and makes the report; compile_for() is what a script calls
newest     an environment with a newer compiler, asked as a second opinion; newest_child runs there
reading    memory, collectives and cycles out of a compiled program's text
modules    the options of a question about any module; module_step and what it imports answer it in a child process
rules      what is added for operations without an estimate, and bytes moved
report     what the compiler said: as a record, as text, as a table
cache      compiles and answers kept on disk
search     a script compiled in a process of its own; the largest value that fits
deciding   the fastest setting of a slice
verdict    tables of what was tried, the cheapest slice, the command to run
difference two option sets or commits, line by line
roofline   a picture of what bounds a step
"""
