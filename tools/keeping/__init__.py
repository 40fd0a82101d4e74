"""What tools.keep_running is made of.

attempt   one start of a script: what it costs when it is lost
team      the hosts of a slice: one of them decides for all when an attempt is over
"""
