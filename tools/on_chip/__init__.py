"""What tools.calibrate measures. Only chip_peaks touches the device, in a process of its own.

bench                   the machine, child processes, and the record of what is done; the others import it
steps                   each preset's step: predicted by the compiler, and the clock
chip_peaks              matrix products, memory and collectives
promises                what README promises, tried on the device itself
torch_compile_backend   the scripts where torch_xla is not installed
findings                tables, the picture, and what to attach to a report
"""
