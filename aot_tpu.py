"""Ask the real TPU compiler about a training step, with no TPU attached:
does it compile, does it fit, what will it cost?

Run:     python simple_mnist_tpu.py --compile_for v5litepod-1
             any training script: it reports instead of training
         python aot_tpu.py SCRIPT --topology v5litepod-8,v6e-8 [script options]
             one row for each slice
         python aot_tpu.py SCRIPT --topology v5litepod-1 --fit global_batch_size
             the largest value that fits
         python aot_tpu.py MODULE --inputs 'x=int32[8,1024]' --topology v5e-1
             any torch.nn.Module, no script: docs/any_module.md
Exit:    0 fits; 1 does not fit or does not compile; 2 wrong usage.

How: the script runs its normal way on the XLA CPU backend, with as many
virtual devices as the slice has, up to its first step. That step is traced, not
executed. libtpu's compiler compiles the traced program, with its shardings, for
the named slice. Everything in the report is read from the compiled program.

Trust: compiles or not, memory, FLOPs, kinds, counts and bytes of collectives.
Milliseconds and MFU are sums of the compiler's own cost model over its
schedule: good for comparing two programs, never a measurement. Where
calibrate_tpu.py has measured steps on such a chip, the report says how far they
were from their estimates.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tpu_compiler.calibration import CALIBRATION, read_calibration
from tpu_compiler.environment import check_private_interfaces, traceable_topology
from tpu_compiler.hardware import parse_topology
from tpu_compiler.modules import HELP, compile_module, names_a_module, option_parser
from tpu_compiler.report import format_report, format_table
from tpu_compiler.search import ScriptError, compile_script, fit


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog=f"{HELP}\n\n{option_parser().format_help().strip()}",
    )
    parser.add_argument("script", help="a training script that takes --compile_for, or a module")
    parser.add_argument("--topology", required=True, help="slices, separated by commas")
    parser.add_argument("--fit", metavar="FIELD", help="find the largest value of this integer option that fits")
    parser.add_argument("--json", action="store_true", help="print the reports as a JSON list")
    parser.add_argument("--program", metavar="DIR", help="write the optimized program text of each slice there")
    parser.add_argument("--calibration", metavar="FILE", help=f"default: {CALIBRATION}, when there is one")
    arguments, options = parser.parse_known_args(argv)
    try:
        topologies = [traceable_topology(name).name for name in arguments.topology.split(",")]
        is_module = names_a_module(arguments.script)
        if not is_module and not Path(arguments.script).is_file():
            raise ValueError(f"no such script: {arguments.script}")
        libtpu = check_private_interfaces()["libtpu"]
        given = arguments.calibration or (CALIBRATION if CALIBRATION.exists() else None)
        calibration = read_calibration(Path(given)) if given else None
        say = (lambda line: print(line, file=sys.stderr)) if arguments.json else print
        reports, found = [], True
        if is_module:
            if arguments.fit:
                raise ValueError(f"--fit is for scripts, and {arguments.script} is a module; change its --inputs")
            reports = compile_module(arguments.script, options, topologies, arguments.program)
        for topology in topologies if not is_module else ():
            if arguments.fit:
                value, best = fit(arguments.script, topology, arguments.fit, options, say)
                say(f"{topology}: largest {arguments.fit} that fits is {value}" if best else f"{topology}: none fits")
                reports += [best] if best else []
                found &= best is not None
            else:
                reports.append(compile_script(arguments.script, topology, options, arguments.program))
    except (ValueError, RuntimeError, OSError) as error:
        code = error.exit_code if isinstance(error, ScriptError) else 2
        if not (isinstance(error, ScriptError) and is_module and code == 2):  # there the child has said all
            print(f"error: {error}", file=sys.stderr)
        return code
    if calibration:
        chips = [parse_topology(r.topology).generation if r.compiles else "" for r in reports]
        said = [calibration.sentence(chip, libtpu) for chip in chips]
        reports = [dataclasses.replace(r, calibration=text) for r, text in zip(reports, said, strict=True)]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(r) for r in reports], indent=2))
    elif reports:
        print(format_report(reports[0]) if len(reports) == 1 else format_table(reports))
    return 0 if found and all(r.fits for r in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
