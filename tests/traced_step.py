"""Prints Report.traced of a step and compiles nothing: python tests/traced_step.py SCRIPT --compile_for SLICE ..."""

import sys

from tpu_compiler import answer, ask, of_script


def say(traced, topology, **_):
    print("traced", answer.traced_hash(traced, ask.parse_topology(topology)))
    raise SystemExit(0)


ask.ask_compiler = say
sys.exit(of_script.run(sys.argv[1:]))
