"""Prints Report.traced of a step and compiles nothing: python tests/traced_step.py SCRIPT --compile_for SLICE ...

With AOT_TPU_OUTPUT it leaves the trace there, as a compile does.
"""

import os
import sys

from reports import a_report

from tpu_compiler import answer, ask, of_script


def say(traced, topology, **_):
    if os.environ.get(answer.OUTPUT_VARIABLE):
        answer.hand_over(traced, a_report(), "")
    print("traced", answer.traced_hash(traced, ask.parse_topology(topology)))
    raise SystemExit(0)


ask.ask_compiler = say
sys.exit(of_script.run(sys.argv[1:]))
