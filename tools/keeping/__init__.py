"""What tools.keep_running is made of.

attempt   one start of a script: what it costs when it is lost
team      the hosts of a slice: one of them decides for all when an attempt is over

torchrun's agents do not replace it: their rendezvous (torch 2.9.0) listens on all addresses and unpickles what anybody
writes there (a stranger's code ran in the agent), and of 8 losses of benchmarks/lost_hosts.py two ended the run, the
first machine and a script frozen by SIGSTOP.
"""
