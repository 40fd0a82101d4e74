"""Ask the real TPU compiler about a training step, with no TPU attached:
does it compile, does it fit, what will it cost?

Run:     python simple_mnist_tpu.py --compile_for v5litepod-1
             any training script: it reports instead of training
         python aot_tpu.py SCRIPT --topology v5litepod-8,v6e-8 [script options]
             one row for each slice
         python aot_tpu.py SCRIPT --topology v6e-8 --plan
             does it fit, and about how long is a step? In seconds: planned,
             not compiled; with --search too
         python aot_tpu.py SCRIPT --topology v5litepod-1 --fit global_batch_size
             the largest value that fits
         python aot_tpu.py SCRIPT --topology v5litepod-8,v6e-8 --search
             the fastest setting of each slice; with --price the cheapest slice:
             docs/search.md
         python aot_tpu.py SCRIPT --topology v5litepod-1 --diff '--remat' ''
             two sets of options, or two commits, line by line
         python aot_tpu.py SCRIPT --topology v5e-1,v5e-8 --picture FILE.png
             roofline, what a step waits for, efficiency over chips
         python aot_tpu.py SCRIPT --topology tpu7x-8 --compiler newest
             also, or only, by a newer compiler in an environment of its own
         python aot_tpu.py MODULE --inputs 'x=int32[8,1024]' --topology v5e-1
             any torch.nn.Module, no script: docs/any_module.md
         python aot_tpu.py --hlo FILE --topology v6e-8
             a program of jax, or of anything that XLA compiles, as StableHLO or
             HLO: docs/any_module.md
Exit:    0 fits; 1 does not fit or does not compile; 2 wrong usage.

The script runs its normal way on the XLA CPU backend, with as many virtual
devices as the slice has (8 for more than 64), up to its first step, which is
traced and compiled by libtpu for the slice. The report is read from the
compiled program. Milliseconds and MFU are predicted, never measured:
docs/ask_the_compiler.md says what to believe.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tpu_compiler.compile import cache
from tpu_compiler.compile.newest import NewestError, default_folder, make_environment
from tpu_compiler.compile.planned import PLAN_VARIABLE
from tpu_compiler.decide.difference import compare, take_sides
from tpu_compiler.decide.roofline import check_picture, draw
from tpu_compiler.decide.search import ScriptError, compile_script, fit, option_name, with_option
from tpu_compiler.decide.verdict import conclude, parse_only, parse_prices, parse_tokens, search_slices
from tpu_compiler.estimate.calibration import CALIBRATION, Calibration, read_calibration
from tpu_compiler.estimate.report import Report, format_compilers, format_report, format_table
from tpu_compiler.given import check_file, compile_file, take_flags
from tpu_compiler.module.programs import HELP, compile_module, names_a_module, option_parser, parse_question
from tpu_utils.base.errors import run_script
from tpu_utils.base.hardware import parse_topology
from tpu_utils.options.compiler_flags import parse_compiler_options
from tpu_utils.options.fields import nearest
from tpu_utils.options.virtual_slice import COMPILER_VARIABLE, check_private_interfaces, traceable_topology


def main(argv: Sequence[str] | None = None) -> int:
    argv, sides = take_sides(list(sys.argv[1:] if argv is None else argv))
    flags, argv = take_flags(argv)
    arguments, options = make_parser().parse_known_args([word for word in argv if word != "--"])
    arguments.compiler_options = flags
    if arguments.topology is None:
        meant = [f"{word} is no option{near}" for word in options if (near := nearest(word, ["--topology"]))]
        print("error:", *(meant or ["--topology is missing; name a slice, such as v6e-8"])[:1], file=sys.stderr)
        return 2
    arguments.topology = ",".join(dict.fromkeys(name.strip() for name in arguments.topology.split(",")))
    say = partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    reports, found = [], True
    try:
        prices = parse_prices(arguments.price, arguments.topology.split(","))
        tokens = parse_tokens(arguments.tokens) if arguments.tokens else None
        only = parse_only(arguments.only, arguments.vary_batch, arguments.plan)
        names, questions, calibration = check_command(arguments, options, sides, say)
        if sides:
            print(compare(arguments.script, names[0], options, *sides))
            return 0
        if arguments.search:
            minutes = 30.0 if arguments.minutes is None else arguments.minutes
            best = search_slices(arguments.script, names, options, say, only, minutes, arguments.plan)
            reports = conclude(arguments.script, best, say, prices, tokens)
            found = bool(reports)
        else:
            for topology, compiler in questions:
                answers = ask_slice(arguments, options, topology, compiler, say)
                found &= bool(answers)
                reports += answers
    except (ValueError, RuntimeError, OSError) as error:
        code = error.exit_code if isinstance(error, ScriptError) else 1 if isinstance(error, NewestError) else 2
        if not (isinstance(error, ScriptError) and error.is_said):
            print(f"error: {error}", file=sys.stderr)
        return code
    finally:
        os.environ.pop(COMPILER_VARIABLE, None)
        os.environ.pop(PLAN_VARIABLE, None)
    known = dict(calibration=calibration, prices=prices, tokens=tokens, network_gb_per_s=arguments.dcn_gb_per_s)
    reports = [with_what_is_known(report, **known) for report in reports]
    if arguments.picture:
        found &= draw_reports(reports, arguments.picture, say)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(r) for r in reports], indent=2))
    elif len(reports) == 1 and not arguments.search:
        print(format_report(reports[0]))
    elif reports and any(compiler for _, compiler in questions):
        print("\n\n".join(format_compilers([r for r in reports if r.topology == name]) for name in names))
    elif reports and not arguments.search:
        print(format_table(reports))
    return 0 if found and all(r.fits for r in reports) else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog=f"{HELP}\n\n{option_parser().format_help().strip()}",
    )
    parser.add_argument("script", nargs="?", help="a training script that takes --compile_for, or a module")
    help_text = "instead of a script: a program before XLA optimizes it; with --compiler_options, if any"
    parser.add_argument("--hlo", metavar="FILE", help=help_text)
    parser.add_argument("--topology", help="slices, separated by commas")
    parser.add_argument("--fit", metavar="FIELD", help="find the largest value of this integer option that fits")
    parser.add_argument("--plan", action="store_true", help="seconds, not minutes: memory, and the step by roofline")
    parser.add_argument("--json", action="store_true", help="print the reports as a JSON list")
    parser.add_argument(
        "--program",
        metavar="DIR",
        help="write the optimized program text of each slice there, of the newest compiler in DIR/newest",
    )
    parser.add_argument(
        "--compiler",
        choices=("installed", "newest", "newest_alone"),
        default="installed",
        help="newest: that of requirements-newest-compiler.txt too, whose environment is made the first time; "
        "newest_alone: that one only",
    )
    parser.add_argument("--compiler_dir", metavar="DIR", help="environment of the newest compiler; default: a cache")
    parser.add_argument(
        "--dcn_gb_per_s", type=float, metavar="GB/S", help="what a device sends to other slices; default: as published"
    )
    parser.add_argument("--calibration", metavar="FILE", help=f"default: {CALIBRATION}, when there is one")
    parser.add_argument("--search", action="store_true", help="try settings one after the other: the fastest that fits")
    parser.add_argument("--minutes", type=float, help="time for --search, all slices together; default: 30")
    parser.add_argument("--vary_batch", action="store_true", default=None, help="--search may change global_batch_size")
    parser.add_argument("--only", metavar="OPTION,...", help="--search changes nothing else, such as mesh")
    parser.add_argument("--tokens", metavar="N", help="how many tokens or examples the run is to see, such as 10e9")
    parser.add_argument(
        "--price",
        nargs="+",
        action="extend",
        default=[],
        metavar="CHIP=PRICE",
        help="price of a chip for an hour, such as v5e=1.20",
    )
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="two sets of options, or two commits")
    parser.add_argument("--picture", metavar="FILE", help="draw the slices into this PNG file")
    parser.add_argument("--batch_per_device", type=int, metavar="N", help="global_batch_size is N times the devices")
    parser.add_argument("--cache", metavar="DIR", help=f"compiles are kept there; default: {cache.default_folder()}")
    parser.add_argument("--no_cache", action="store_true", help="compile afresh, and keep nothing")
    return parser


def check_command(
    arguments: argparse.Namespace, options: list[str], sides: tuple[str, str] | None, say: Callable[[str], None]
) -> tuple[list[str], list[tuple[str, str]], Calibration | None]:
    """(names of the slices, (slice, folder of the compiler) of each question about one, calibration).

    The folder of the installed compiler is "". Raises ValueError, RuntimeError or OSError for what is wrong already.
    """
    for name in ("only", "vary_batch", "minutes"):
        if getattr(arguments, name) is not None and not arguments.search:
            raise ValueError(f"--{name} has no effect without --search")
    if arguments.picture:
        check_picture(Path(arguments.picture))
    if bool(sides) + arguments.search + bool(arguments.fit) > 1:
        raise ValueError("--search, --diff and --fit are three questions; ask one at a time")
    if sides and "," in arguments.topology:
        raise ValueError(f"--diff is for one slice; found --topology {arguments.topology}")
    if arguments.plan:
        for name, given in dict(diff=sides, picture=arguments.picture, program=arguments.program).items():
            if given:
                raise ValueError(f"--plan does not compile, and --{name} needs a compiled program; leave one out")
        os.environ[PLAN_VARIABLE] = "1"
    check_target(arguments, options, sides)
    choose_cache(arguments.cache, arguments.no_cache)
    is_module = not arguments.hlo and names_a_module(arguments.script)
    # whatever is wrong with a module's options is said before anything is downloaded
    through_torch = is_module and parse_question(arguments.script, options).through == "torch"
    newest = through_torch or arguments.compiler != "installed"
    if newest and (sides or arguments.search):
        raise ValueError("--search and --diff ask the installed compiler; leave --compiler newest out")
    topologies = [traceable_topology(name, newest) for name in arguments.topology.split(",")]
    if not is_module and not arguments.hlo and not Path(arguments.script).is_file():
        raise ValueError(f"no such script: {arguments.script}")
    if not through_torch:
        check_private_interfaces()
    given = arguments.calibration or (CALIBRATION if CALIBRATION.exists() else None)
    calibration = read_calibration(Path(given)) if given else None
    if arguments.dcn_gb_per_s is not None and not 0 < arguments.dcn_gb_per_s < 1e6:
        raise ValueError(f"--dcn_gb_per_s is {arguments.dcn_gb_per_s}; expected a speed above 0")
    if arguments.compiler_dir and not newest:
        raise ValueError("--compiler_dir has no effect without --compiler newest")
    folder = newest and make_environment(Path(arguments.compiler_dir or default_folder()), say)
    # every compiler that knows the chip is asked
    installed = [] if through_torch or arguments.compiler == "newest_alone" else topologies
    questions = [(t.name, "") for t in installed if not t.hardware.newest_only]
    questions += [(t.name, str(folder)) for t in topologies if newest]
    return [t.name for t in topologies], questions, calibration


def check_target(arguments: argparse.Namespace, options: list[str], sides: tuple[str, str] | None) -> None:
    """Raises ValueError unless one thing is asked about, and what is asked of a module or a file can be."""
    if not arguments.script and not arguments.hlo:
        raise ValueError("nothing to ask about; expected a training script, a module, or --hlo FILE")
    if arguments.hlo and (arguments.script or options):
        words = [*options, *filter(None, [arguments.script])]  # argparse takes an unknown option's value for a script
        meant = nearest(words[0].partition("=")[0], [f"--{name}" for name in vars(arguments)])
        found = f"{' '.join(words)} beside it has no effect{meant or '; leave one out'}"
        raise ValueError(f"--hlo {arguments.hlo} is a whole program; {found}")
    if is_no_script(arguments) and (sides or arguments.search or arguments.fit):
        asked = "--fit" if arguments.fit else "--search" if arguments.search else "--diff"
        kind = f"{arguments.hlo} is a program" if arguments.hlo else f"{arguments.script} is a module"
        raise ValueError(f"{asked} is for scripts, and {kind}; change its options")
    several = sides or arguments.search or arguments.fit
    if arguments.batch_per_device is not None and (several or is_no_script(arguments)):
        raise ValueError("--batch_per_device is for a script at one setting; leave it out")
    if arguments.hlo:
        if arguments.tokens or arguments.price:
            named = "--tokens" if arguments.tokens else "--price"
            raise ValueError(f"{named} has no effect with --hlo, which does not say a step's tokens; leave it out")
        parse_compiler_options(arguments.compiler_options)
        check_file(Path(arguments.hlo))


def is_no_script(arguments: argparse.Namespace) -> bool:
    return bool(arguments.hlo or (arguments.script and names_a_module(arguments.script)))


def ask_slice(
    arguments: argparse.Namespace, options: list[str], topology: str, compiler: str, say: Callable[[str], None]
) -> list[Report]:
    """One report of a script, none if no value of --fit fits, and of a module one for each level."""
    os.environ[COMPILER_VARIABLE] = compiler  # where the child process finds the one to use
    place = arguments.program and str(Path(arguments.program, "newest" if compiler else ""))
    if arguments.hlo:
        return [compile_file(arguments.hlo, topology, place, arguments.compiler_options)]
    if names_a_module(arguments.script):
        return compile_module(arguments.script, options, topology, place)
    if arguments.fit:
        value, best = fit(arguments.script, topology, arguments.fit, options, say)
        say(f"{topology}: largest {arguments.fit} that fits is {value}" if best else f"{topology}: none fits")
        return [best] if best else []
    given = with_batch(options, topology, arguments.batch_per_device)
    return [compile_script(arguments.script, topology, given, place)]


def with_what_is_known(
    report: Report,
    calibration: Calibration | None,
    prices: dict[str, float],
    tokens: float | None,
    network_gb_per_s: float | None,
) -> Report:
    """With what the user has measured, and says of the run."""
    chip = parse_topology(report.topology).generation
    report = dataclasses.replace(report, price=prices.get(chip), tokens=tokens)
    if calibration and report.compiles:
        said = calibration.sentence(chip, report.versions.get("libtpu", ""))
        report = dataclasses.replace(report, calibration=said)
    if network_gb_per_s:
        report = dataclasses.replace(report, network_gb_per_s=network_gb_per_s).with_prediction()
    return report


def draw_reports(reports: list[Report], picture: str, say: Callable[[str], None]) -> bool:
    """Whether they could be drawn; why not is printed."""
    try:
        draw(reports, Path(picture))
        say(f"drawn: {picture}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


def choose_cache(folder: str | None, none: bool) -> None:
    """Put the folder of the compile cache into the environment, from which child processes take it. Raises InputError
    if it cannot be written."""
    named = os.environ.get(cache.VARIABLE)
    if none:
        os.environ[cache.VARIABLE] = ""
    elif folder or named != "":
        path = Path(folder or named or cache.default_folder()).resolve()
        os.environ[cache.VARIABLE] = str(cache.Cache(path).folder)


def with_batch(options: Sequence[str], topology: str, per_device: int | None) -> Sequence[str]:
    """options with global_batch_size = per_device x devices; unchanged where per_device is None."""
    if per_device is None:
        return options
    if per_device < 1:
        raise ValueError(f"--batch_per_device is {per_device}; expected 1 or more")
    if "global_batch_size" in map(option_name, options):
        raise ValueError("--batch_per_device and --global_batch_size both say the batch; leave one out")
    return with_option(options, "global_batch_size", str(per_device * parse_topology(topology).num_devices))


if __name__ == "__main__":
    sys.exit(run_script(main, answers=True))
