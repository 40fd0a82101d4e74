"""Asks the real TPU compiler about a training step, with no TPU attached. The command line is aot_tpu.py.

hardware   TPU generations and slices: the one table; no torch, no jax
tracing    runs a step's Python once and takes the program it would execute
compiling  hands that program to libtpu's compiler and makes the report; compile_for() is what a script calls
newest     an environment with a newer compiler, asked as a second opinion; newest_child runs there
reading    memory, collectives and cycles out of a compiled program's text
report     what the compiler said: as a record, as text, as a table
"""
