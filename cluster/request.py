"""What `python -m cluster print` is asked for: the options, checked by themselves and against each other."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

from cluster.slices import Slice, check_image, check_version, check_zone, find_slice
from config import DistributedMnistConfig, MnistConfig
from images.cifar_config import CifarConfig
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError
from tpu_utils.base.restarts import options_in
from tpu_utils.options.fields import hints_of, nearest, plain
from tpu_utils.options.parsing import presets_of

ROOT = Path(__file__).resolve().parent.parent
TRAINING = {
    "simple_mnist_tpu.py": MnistConfig,
    "distributed_mnist_tpu.py": DistributedMnistConfig,
    "resnet_cifar_tpu.py": CifarConfig,
    "transformer_tpu.py": TransformerConfig,
}
KINDS = ("queued-resource", "xpk", "jobset", "kuberay")
ONLY_FOR = {  # option: the kinds that it changes
    "image": KINDS[1:],
    "cluster": KINDS[1:],
    "runtime_version": KINDS[:1],
    "git_url": KINDS[:1],
    "service_account": ("queued-resource", "jobset", "kuberay"),
}
USAGE = "KIND --slice SLICE --zone ZONE [...] -- SCRIPT ..."
DEFAULTS = {"cluster": "tpu-cluster", "git_url": "GIT_URL"}
LONGEST_NAME = 35
"""xpk and GKE take 40 letters, of which node pools need some for the number of their slice."""
NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise InputError(f"{message}; see python -m cluster print --help")


def parser(description: str) -> Parser:
    made = Parser(
        prog="python -m cluster print",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage=f"python -m cluster print {USAGE}",
        argument_default="",
    )
    made.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    made.add_argument("--slice", required=True, metavar="SLICE", help="v5litepod-16, v6e-8, v5p-128, v5e:4x4")
    made.add_argument("--zone", required=True, help="us-west4-a")
    made.add_argument("--any_zone", action="store_true", help="the zone has it, whatever the table here says")
    made.add_argument("--project", help="default: the one gcloud is set to")
    made.add_argument("--name", help="name of the slice and the run; default: after the script")
    made.add_argument("--num_slices", default="1", metavar="N", help="equal slices; each run uses one of them")
    made.add_argument("--spot", action="store_true", help="a lower price; slices may be taken away at any time")
    who = "queued-resource: its e-mail address; jobset and kuberay: the name of a Kubernetes account"
    made.add_argument("--service_account", metavar="WHO", help=who)
    made.add_argument("--image", help="where the container image is pushed to; not of queued-resource")
    made.add_argument("--cluster", metavar="NAME", help="cluster of GKE; default: tpu-cluster")
    version = "version for queued-resource; default: the generation's image"
    made.add_argument("--runtime_version", metavar="VERSION", help=version)
    made.add_argument("--git_url", metavar="URL", help="where the hosts of queued-resource clone this from")
    made.set_defaults(**DEFAULTS)
    return made


class Request(argparse.Namespace):
    """The options, checked: their names as above, and what follows from them."""

    found: Slice
    words: list[str]
    """The script and its arguments."""
    warnings: list[str]

    def value_of(self, option: str) -> str | None:
        """The option's value among the script's arguments; "" if it has none, None if the option is not given."""
        return options_in(self.words).get(option)

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    @property
    def in_project(self) -> list[str]:
        return ["--project", self.project] if self.project else []

    @property
    def in_zone(self) -> list[str]:
        return ["--zone", self.zone, *self.in_project]


def read_request(arguments: list[str], description: str) -> Request:
    """Raises InputError with all that does not fit, a line each."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    if not arguments[place + 1 :] and not {"-h", "--help"} & {*arguments}:
        raise InputError(f"no script to run; expected {USAGE}")
    known, parts = parser(description), [argument.partition("=") for argument in arguments[:place]]  # --num-slices=2
    plain = [("--" + n[2:].replace("-", "_") if n[:2] == "--" else n) + e + v for n, e, v in parts]
    options = [option for action in known._actions for option in action.option_strings]
    for word in plain:
        name = word.partition("=")[0]
        if name.startswith("-") and name not in options:
            raise InputError(f"unknown option {word!r:.80}{nearest(name, options)} (the script's own come after --)")
    request, unknown = known.parse_known_args(plain, Request())
    if unknown:
        raise InputError(f"{unknown[0]!r:.80} is one word too many before --; the script comes after it")
    if request.kind not in KINDS:
        meant = nearest(request.kind.replace("_", "-"), KINDS)
        raise InputError(f"{request.kind!r:.80} cannot be printed; expected one of {', '.join(KINDS)}{meant}")
    request.words, request.warnings = arguments[place + 1 :], []
    problems = [*check_script(request), *check_places(request), *check_names(request), *check_kind(request)]
    if problems:
        raise InputError("\n       ".join(problems))
    warn_of_lost_runs(request)
    return request


def check_script(request: Request) -> list[str]:
    request.words[0] = request.words[0].removeprefix("./")
    script, *words = request.words
    if not re.fullmatch(r"\w[\w-]*(/\w[\w-]*)*\.py", script, re.ASCII) or not (ROOT / script).is_file():
        meant = nearest(script, [path.name for path in sorted(ROOT.glob("*.py"))])
        if "python" in script and words:
            meant = "; leave it out, what runs the script is added"
        return [f"no script {script!r:.80} in this project; expected its path from the project's folder{meant}"]
    if "/" in script and request.kind in ("xpk", "jobset"):
        return [f"{script} is not in the image, which holds the scripts beside the Dockerfile; copy it there"]
    for word in words:
        if any(0xD800 <= ord(letter) <= 0xDFFF for letter in word):
            return [f"an argument of the script is no text in UTF-8: {word!r:.80}; give it in UTF-8"]
    return [*check_training(script, words)] if script in TRAINING else []


def check_training(script: str, words: list[str]) -> Iterator[str]:
    """Misspelt options, and values where there are a few to choose from. The rest the script itself says at its start:
    files that it would check need not be on this machine."""
    fields = hints_of(TRAINING[script])
    few = {name: get_args(plain(kind)) for name, kind in fields.items() if get_origin(plain(kind)) is Literal}
    few["preset"] = tuple(presets_of(TRAINING[script]))
    choices = {name: [str(value) for value in values] for name, values in few.items()}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        if not option.startswith("--"):
            continue
        field, value = option[2:].replace("-", "_"), value if equals else following
        if field.removeprefix("no_") not in [*fields, "help"]:
            yield f"{script} has no option {option!r:.80}{nearest(f'--{field}', [f'--{name}' for name in fields])}"
        elif field in choices and value not in choices[field]:
            expected = f"expected one of {', '.join(choices[field])}"
            yield f"{script} {option} {value!r:.80}; {expected}{nearest(value, choices[field])}"


def check_places(request: Request) -> list[str]:
    """The slice, its zone, the image and the version: each by itself and against the generation."""
    try:
        request.found = find_slice(request.slice, by_xpk=request.kind == "xpk")
    except ValueError as error:
        return [str(error)]
    generation = request.found.topology.generation
    answers = [check_zone(request.zone, generation, request.any_zone)]
    answers += [check_image(request.image)] if request.image else []
    answers += [check_version(request.runtime_version, generation)] if request.runtime_version else []
    request.warnings += [warning for _, warning in answers if warning]
    if request.found.topology.hardware.newest_only:
        request.warnings.append(
            f"the libtpu of requirements.txt does not compile for {generation}; docs/any_slice.md has what does"
        )
    return [problem for problem, _ in answers if problem]


def check_names(request: Request) -> list[str]:
    problems = []
    if not request.name:
        request.name = re.sub(r"[^a-z0-9]+", "-", Path(request.words[0]).stem.lower()).strip("-")[:LONGEST_NAME]
    for option in ("name", "cluster"):
        name = getattr(request, option)
        if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
            better = re.sub(r"[^a-z0-9]+", "-", name.lower())[:LONGEST_NAME].strip("-").lstrip("0123456789-")
            problems.append(
                f"--{option} {name!r:.80} cannot be used; expected at most {LONGEST_NAME} of a-z, 0-9 and -, a letter "
                "first and no - last" + (f"; try {better}" if better else "")
            )
    if request.project and not PROJECT.fullmatch(request.project):
        problems.append(
            f"--project {request.project!r:.80} is no project's ID; expected 6 to 30 of a-z, 0-9 and -, a letter first"
            "; list them: gcloud projects list"
        )
    if not re.fullmatch(r"[1-9]\d?", request.num_slices, re.ASCII):
        problems.append(f"--num_slices {request.num_slices!r:.80}; expected a number from 1 to 99")
    else:
        request.num_slices = int(request.num_slices)
    if re.search(r"\s|^-|^$", request.git_url) or not request.git_url.isprintable():
        problems.append(
            f"--git_url {request.git_url!r:.80} is no address that git can clone; expected https://HOST/PATH.git"
        )
    return problems


def check_kind(request: Request) -> list[str]:
    """What this kind needs, and what has no effect on it."""
    kind, problems = request.kind, []
    for option, kinds in ONLY_FOR.items():
        if getattr(request, option) != DEFAULTS.get(option, "") and kind not in kinds:
            problems.append(f"--{option} has no effect on {kind}; it is for {', '.join(kinds)}; leave it out")
    if kind != "queued-resource" and not request.image:
        problems.append(f"{kind} runs a container image; add --image REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG")
    pattern, expected = NAME.pattern, "a Kubernetes account such as trainer"
    if kind == "queued-resource":
        pattern, expected = r"[\w.+-]+@[\w.-]+", "NAME@PROJECT.iam.gserviceaccount.com"
    if request.service_account and not re.fullmatch(pattern, request.service_account, re.ASCII):
        problems.append(f"--service_account {request.service_account!r:.80}; {kind} expects {expected}")
    if request.service_account and kind != "queued-resource" and not request.project:
        problems.append(
            f"--service_account on {kind} is one of Workload Identity, which is named after the project; add --project"
        )
    if kind == "queued-resource" and "found" in vars(request) and not request.found.rented.version:
        problems.append(
            f"{request.found.topology.generation} is not rented by the Cloud TPU API; print xpk, jobset or kuberay"
        )
    return problems


def warn_of_lost_runs(request: Request) -> None:
    """A run that cannot go on where it stopped, or takes a part of the slice."""
    script = request.words[0]
    if script not in TRAINING:
        return
    run_dir, by_ray = request.value_of("run_dir"), request.kind == "kuberay"  # with --storage for run_dir
    on_hosts = request.kind != "queued-resource" or request.found.hosts > 1 or request.spot
    if on_hosts and not (run_dir or "").startswith("gs://") and not (by_ray and run_dir is None):
        request.warnings.append(
            "no --run_dir gs://BUCKET/FOLDER: the run's files are lost with its hosts, or not shared by them"
        )
    if request.kind in ("xpk", "jobset") and request.value_of("resume") not in ("auto", "must"):
        request.warnings.append("no --resume auto: a restart does not go on with the run")
    if request.value_of("device") == "cpu":
        request.warnings.append("--device cpu leaves the slice's chips unused")
    if script == "simple_mnist_tpu.py" and request.found.chips > 1:
        request.warnings.append(f"{script} uses one chip of one host; distributed_mnist_tpu.py uses all")
