"""Ask the real TPU compiler about a training step, with no TPU attached:
does it compile, does it fit, what will it cost?

Run:     python simple_mnist_tpu.py --compile_for v5litepod-1
             any training script: it reports instead of training
         python aot_tpu.py SCRIPT --topology v5litepod-8,v6e-8 [script options]
             one row for each slice
         python aot_tpu.py SCRIPT --topology v5litepod-1 --fit global_batch_size
             the largest value that fits
         python aot_tpu.py SCRIPT --topology tpu7x-8 --compiler newest
             also, or only, by a newer compiler in an environment of its own
Exit:    0 fits; 1 does not fit or does not compile; 2 wrong usage.

How: the script runs its normal way on the XLA CPU backend, with as many
virtual devices as the slice has (8 for more than 64), up to its first step.
That step is traced, not executed. libtpu's compiler compiles the traced
program, with its shardings, for the named slice. Everything in the report is
read from the compiled program.

Trust: compiles or not, memory, FLOPs, kinds, counts and bytes of collectives.
Milliseconds and MFU are sums of the compiler's own cost model over its
schedule: good for comparing two programs, never a measurement. Where
calibrate_tpu.py has measured steps on such a chip, the report says how far they
were from their estimates.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tpu_compiler.calibration import CALIBRATION, read_calibration
from tpu_compiler.environment import COMPILER_VARIABLE, check_private_interfaces, traceable_topology
from tpu_compiler.hardware import parse_topology
from tpu_compiler.newest import NewestError, default_folder, make_environment
from tpu_compiler.report import format_compilers, format_report, format_table
from tpu_compiler.search import ScriptError, compile_script, fit


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("script", help="a training script that takes --compile_for")
    parser.add_argument("--topology", required=True, help="slices, separated by commas")
    parser.add_argument("--fit", metavar="FIELD", help="find the largest value of this integer option that fits")
    parser.add_argument("--json", action="store_true", help="print the reports as a JSON list")
    parser.add_argument(
        "--program",
        metavar="DIR",
        help="write the optimized program text of each slice there, of the newest compiler in DIR/newest",
    )
    parser.add_argument(
        "--compiler", choices=("installed", "newest"), default="installed",
        help="newest: ask libtpu 0.0.42.1 too, and show both answers; makes its environment the first time",
    )  # fmt: skip
    parser.add_argument("--compiler_dir", metavar="DIR", help="of the newest compiler's environment; default: a cache")
    parser.add_argument(
        "--dcn_gb_per_s", type=float, metavar="GB/S", help="what a device sends to other slices; default: as published"
    )
    parser.add_argument("--calibration", metavar="FILE", help=f"default: {CALIBRATION}, when there is one")
    arguments, options = parser.parse_known_args(argv)
    try:
        newest = arguments.compiler == "newest"
        topologies = [traceable_topology(name, newest) for name in arguments.topology.split(",")]
        if not Path(arguments.script).is_file():
            raise ValueError(f"no such script: {arguments.script}")
        libtpu = check_private_interfaces()["libtpu"]
        given = arguments.calibration or (CALIBRATION if CALIBRATION.exists() else None)
        calibration = read_calibration(Path(given)) if given else None
        say = (lambda line: print(line, file=sys.stderr)) if arguments.json else print
        if arguments.dcn_gb_per_s is not None and not 0 < arguments.dcn_gb_per_s < 1e6:
            raise ValueError(f"--dcn_gb_per_s is {arguments.dcn_gb_per_s}; expected a speed above 0")
        if arguments.compiler_dir and not newest:
            raise ValueError("--compiler_dir has no effect without --compiler newest")
        folder = newest and make_environment(Path(arguments.compiler_dir or default_folder()), say)
        # by each compiler that knows the chip; the scripts are told in their environment which one
        asked = [(t.name, "") for t in topologies if not t.hardware.newest_only]
        asked += [(t.name, str(folder)) for t in topologies if newest]
        reports, found = [], True
        for topology, compiler in asked:
            os.environ[COMPILER_VARIABLE] = compiler
            if arguments.fit:
                value, best = fit(arguments.script, topology, arguments.fit, options, say)
                say(f"{topology}: largest {arguments.fit} that fits is {value}" if best else f"{topology}: none fits")
                reports += [best] if best else []
                found &= best is not None
            else:
                place = arguments.program and str(Path(arguments.program, "newest" if compiler else ""))
                reports.append(compile_script(arguments.script, topology, options, place))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, ScriptError) else 1 if isinstance(error, NewestError) else 2
    finally:
        os.environ.pop(COMPILER_VARIABLE, None)
    if calibration:
        chips = [parse_topology(r.topology).generation if r.compiles else "" for r in reports]
        said = [calibration.sentence(chip, libtpu) for chip in chips]
        reports = [dataclasses.replace(r, calibration=text) for r, text in zip(reports, said, strict=True)]
    if arguments.dcn_gb_per_s:
        reports = [dataclasses.replace(r, network_gb_per_s=arguments.dcn_gb_per_s) for r in reports]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(r) for r in reports], indent=2))
    elif newest and reports:
        print("\n\n".join(format_compilers([r for r in reports if r.topology == t.name]) for t in topologies))
    elif reports:
        print(format_report(reports[0]) if len(reports) == 1 else format_table(reports))
    return 0 if found and all(r.fits for r in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
