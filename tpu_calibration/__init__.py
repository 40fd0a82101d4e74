"""What calibrate_tpu.py measures. None of this touches a device but chip_peaks, which runs in a process of its own.

bench         the machine, child processes, and the record of what is done; the others import it
steps         each preset's step: the compiler's estimate, and the clock
peaks         matrix products, memory and collectives, measured by chip_peaks
promises      what README promises, tried on the device itself
report        tables, the picture, and what to attach to a report
"""
