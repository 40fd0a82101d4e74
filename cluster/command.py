"""Run any training script on a cluster that people share, or alone.

Run:     python -m cluster run transformer_tpu.py --chips 4 -- --seed 1
             alone: Ray starts by itself on this machine and ends with the run
         python -m cluster run transformer_tpu.py --slice v5litepod-16 \\
                 --address http://HEAD:8265 --storage gs://BUCKET/runs \\
                 -- --preset production
             on a shared cluster, whose address and storage RAY_ADDRESS and
             TPU_CLUSTER_STORAGE can say too
         python -m cluster list | logs [-f] NAME | stop NAME | top [--json]
         python -m cluster print ...
             the commands and files that create a slice: print --help
Exit:    the script's own code; 2 for bad input; 1 where the run was lost.

What stands before -- is for this command, what stands after it for the script.
A run waits for its turn, gets exactly its chips, and starts again from its
newest checkpoint when its worker, host or slice dies: cluster/README.md.
"""

import argparse
import getpass
import importlib.util
import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster import view
from cluster.deciding import PARTS, Request
from cluster.slices import COUNTED
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import parse_topology
from tpu_utils.base.restarts import options_in
from tpu_utils.options.environment import attached_chips
from tpu_utils.options.tool_arguments import make_parser, parse_arguments
from tpu_utils.remote.hosts import family


def parse(argv: Sequence[str]) -> argparse.Namespace:
    variable = os.environ.get
    parser = make_parser("cluster", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--address", default=variable("RAY_ADDRESS"), help="http://HEAD:8265; default: RAY_ADDRESS")
    shared.add_argument("--debug", action="store_true", help="a traceback with an error")
    run = commands.add_parser("run", parents=[shared], allow_abbrev=False, help="a script, now or when its turn comes")
    run.add_argument("script")
    size = run.add_mutually_exclusive_group()
    size.add_argument("--chips", type=int, choices=PARTS, help="chips of one host; default: 1")
    size.add_argument("--slice", dest="kind", default="", help="a whole slice, as v5litepod-16: a process on each host")
    run.add_argument("--name", help="name of the run and its run directory; default: script, date and time")
    run.add_argument("--user", help="whom it is counted to; default: the login name")
    run.add_argument("--priority", type=int, default=0, help="higher comes first; default: 0")
    where = "for run directories: gs://... or a shared folder; default: TPU_CLUSTER_STORAGE"
    run.add_argument("--storage", default=variable("TPU_CLUSTER_STORAGE"), help=where)
    run.add_argument("--plain", action="store_true", help="the script takes no --run_dir, --resume and --compile_for")
    run.add_argument("--env", action="append", default=[], metavar="NAME", help="a variable to take along, not shown")
    run.add_argument("--retries", type=int, default=3, help="starts after a fault; default: 3")
    run.add_argument("--working_dir", default=".", help="the code to upload; default: this folder")
    run.add_argument("--most_mib", type=float, default=64, help="largest upload of code, in MiB; default: 64")
    run.add_argument("--no_check", action="store_true", help="do not ask the TPU compiler whether it fits")
    run.add_argument("--detach", action="store_true", help="return once it is queued")
    listing = commands.add_parser("list", parents=[shared], help="the runs of the cluster")
    listing.add_argument("--json", action="store_true")
    logs = commands.add_parser("logs", parents=[shared], help="what a run printed")
    logs.add_argument("name")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until it ends; returns its exit code")
    stop = commands.add_parser("stop", parents=[shared], help="the run saves and ends")
    stop.add_argument("name")
    top = commands.add_parser("top", parents=[shared], help="who has which chips, who waits")
    top.add_argument("--json", action="store_true")
    commands.add_parser("print", help="the commands and files that create a slice", add_help=False)
    return parse_arguments(parser, argv, " (the script's own options come after --)")


def check_ray() -> None:
    """Raises InputError where Ray is not installed."""
    # not imported: Ray reads the variables of its security once, at its import, and alone.py sets them
    missing = [name for name in ("ray", "aiohttp") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"python -m cluster needs Ray, and {missing[0]} is not installed here; "
            "install it: pip install -r cluster/requirements.txt"
        )


def request_of(arguments: argparse.Namespace) -> Request:
    """What the command line asks for. Raises InputError."""
    user = arguments.user or getpass.getuser()
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    name = arguments.name or f"{Path(arguments.script).stem}-{stamp}"
    for what, text in (("--name", name), ("--user", user)):
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", text, re.ASCII):
            raise InputError(f"{what} is {text!r}; expected letters, digits, and . _ - within")
    chips, hosts = arguments.chips or 1, 1
    if arguments.kind:
        try:
            topology = parse_topology(arguments.kind)
        except ValueError as error:
            raise InputError(f"--slice: {error}") from error
        if topology.num_slices > 1 or ":" in arguments.kind:
            raise InputError(
                f"--slice is {arguments.kind}; expected one slice by its accelerator type, as v5litepod-16"
            )
        chips = math.prod(topology.chips_per_host)
        hosts = topology.num_chips // chips
    kind = arguments.kind and re.sub("^v5e-", "v5litepod-", arguments.kind.lower())
    return Request(name, user, chips, hosts, kind, arguments.priority, time.time())


def check_run(arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The variables of --env. Raises InputError for what is wrong before anything is asked of anybody."""
    script = folder / arguments.script
    if not script.is_file():
        raise InputError(f"no such script: {script}; expected a path in --working_dir ({folder})")
    if not script.resolve().is_relative_to(folder):
        raise InputError(f"{script.resolve()} is outside --working_dir {folder}, which is all that is uploaded")
    text = script.read_text(errors="replace")
    several = re.search(r"spmd|mesh|join=|xmp|launch", text)
    if not arguments.plain and not re.search(r"run_dir|command_line", text):
        print(
            f"note: {arguments.script} gets --run_dir and --resume, and names neither; one without them wants --plain"
        )
    if (arguments.chips or 1) > 1 and not several:
        print(
            f"note: --chips {arguments.chips}, but {arguments.script} has no SPMD, mesh or replicas: it would use "
            "one chip, and leave the others idle"
        )
    if arguments.retries < 0:
        raise InputError(f"--retries is {arguments.retries}; expected 0 or more")
    missing = [name for name in arguments.env if name not in os.environ]
    if missing:
        raise InputError(f"--env {', '.join(missing)}: not set here; export it first, or leave it out")
    return {name: os.environ[name] for name in arguments.env}


def check_alone(arguments: argparse.Namespace, request: Request, chips_here: int) -> None:
    """Raises InputError for what this machine without a cluster cannot do. chips_here: its TPU chips."""
    if arguments.detach:
        raise InputError("--detach needs a shared cluster: name it by --address http://HEAD:8265 or RAY_ADDRESS")
    if request.hosts > 1:
        raise InputError(
            f"--slice {request.kind} has {request.hosts} hosts, and this machine is one; name a cluster by --address"
        )
    if chips_here and chips_here < request.chips:
        raise InputError(f"this machine has {chips_here} TPU chips, and {request.chips} were asked for")


def run(arguments: argparse.Namespace, options: list[str]) -> int:
    folder = Path(arguments.working_dir).resolve()
    variables = check_run(arguments, folder)
    check_ray()
    from cluster.admission import admit
    from cluster.alone import run_alone
    from cluster.client import Cluster
    from cluster.driver import Spec, say
    from cluster.host import versions

    alone = not arguments.address
    request = request_of(arguments)
    if alone:
        chips_here = attached_chips()
        check_alone(arguments, request, len(chips_here))
        families = {family(chip)[0] for chip in chips_here}
    else:
        cluster = Cluster(arguments.address)
        families = {host.family for host in cluster.check_chips_wanted(request)}
    storage = arguments.storage or ("runs" if alone else "")
    if not arguments.plain and not storage and "run_dir" not in options_in(options):
        raise InputError(
            "no --storage, TPU_CLUSTER_STORAGE or --run_dir: expected a place for run directories that every host "
            "reaches, gs://BUCKET/runs or a shared folder; a script that takes no --run_dir wants --plain"
        )
    (only,) = families if len(families) == 1 else [""]
    asked = request.kind or (f"{only}-{request.chips * COUNTED.get(only, 1)}" if only else "")
    if not arguments.no_check and not arguments.plain:
        if asked:
            say("admission", admit(folder / arguments.script, options, asked))
        else:
            say("admission", "not asked: the hosts have no TPU, and no --slice names one to ask about")
    kept = "" if arguments.plain else storage or "given"
    packages = {name: found for name, found in versions().items() if name != "python"}  # a laptop may have another
    place = str(folder) if alone else ""
    spec = Spec(vars(request), arguments.script, options, kept, place, arguments.retries, packages)
    if alone:
        return run_alone(spec, variables, len(chips_here))
    cluster.submit(spec, folder, arguments.most_mib, variables)
    say("run", f"{request.name} of {request.user}, submitted to {cluster.address}")
    if arguments.detach:
        say("follow", f"python -m cluster logs -f {request.name} --address {cluster.address}")
        return 0
    return follow(cluster, request.name, stops=True)


def follow(cluster, name: str, stops: bool) -> int:
    """Passes the log on; the run's exit code. stops: the first Ctrl-C stops the run, the second only this command."""
    while True:
        try:
            return cluster.follow(name, partial(print, end="", flush=True))
        except KeyboardInterrupt:
            if not stops:
                return 130
            stops = False
            print(f"\nstop       {name} saves and ends; Ctrl-C again leaves it to that", flush=True)
            cluster.stop(name)


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["print"]:
        from cluster.manifests import main as print_manifests

        return print_manifests(list(argv[1:]))
    own, options = (list(argv[: argv.index("--")]), list(argv[argv.index("--") + 1 :])) if "--" in argv else (argv, [])
    arguments = parse(own)
    if arguments.command == "run":
        return run(arguments, options)
    if not arguments.address:
        raise InputError(
            f"{arguments.command} asks a shared cluster: name it by --address http://HEAD:8265 or RAY_ADDRESS"
        )
    check_ray()
    from cluster.client import Cluster

    cluster = Cluster(arguments.address)
    if arguments.command == "list":
        found = view.runs(cluster.jobs.list_jobs(), cluster.state())
        print(json.dumps(found, indent=1) if arguments.json else view.show_list(found))
    elif arguments.command == "top":
        found = view.top(cluster.state(), cluster.hosts(), cluster.address, time.time())
        print(json.dumps(found, indent=1) if arguments.json else view.show_top(found, time.time()))
    elif arguments.command == "stop":
        cluster.stop(arguments.name)
        print(f"stop       {arguments.name} was asked to save and end; follow it by logs -f {arguments.name}")
    elif arguments.follow:
        return follow(cluster, arguments.name, stops=False)
    else:
        sys.stdout.write(cluster.log(arguments.name))
    return 0
