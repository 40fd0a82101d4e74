"""A question about any module, without a script of its own: its command line, and one compile for each level and slice.

Imports no torch: each compile is a process of its own, in which train_step.py builds and traces the module.
"""

import argparse
import ast
import contextlib
import dataclasses
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from tpu_compiler.decide.search import compile_script
from tpu_compiler.estimate.report import Report
from tpu_utils.base.errors import InputError
from tpu_utils.options.fields import nearest

STEP_SCRIPTS = {
    "torch_xla": Path(__file__).with_name("train_step.py"),
    "torch": Path(__file__).with_name("through_torch.py"),
}
MODES = ("train", "forward", "decode")
LEVELS = ("conservative", "balanced", "aggressive")
PRECISIONS = dict(float32="conservative", bfloat16="balanced")
DTYPES = ("float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
HELP = """A module: FILE.py:NAME or package.module:NAME, a class or a function that
returns a module; or hf:config.json, a configuration of Hugging Face's (or the
folder it is in), with :CLASS for another class of that model.

  python aot_tpu.py torchvision.models:resnet50 --topology v5litepod-1 \\
      --inputs 'float32[64,3,224,224]'
  python aot_tpu.py hf:config.json --topology v5litepod-1 --mode decode \\
      --inputs 'input_ids=int32[8,1024]'"""


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of the module's forward: a tensor (dtype, shape), or a constant (dtype ""). name "": by position."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    value: object = None


@dataclasses.dataclass(frozen=True)
class Placement:
    """What --shard says of the parameters, or the input, whose name matches: {dimension: axis of the mesh}."""

    pattern: str
    axes: dict[int, str]


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked about a module, as the command line says it."""

    target: str
    inputs: tuple[Input, ...]
    mode: str
    optimizer: str
    loss: str
    levels: tuple[str, ...]
    arguments: dict[str, object]
    mesh: dict[str, int]
    placements: tuple[Placement, ...]
    through: str = "torch_xla"
    compile_for: str = ""


def names_a_module(target: str) -> bool:
    """Whether aot_tpu.py was given a module rather than a training script."""
    return ":" in target and not Path(target).is_file()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        raise InputError(message + (nearest(wrong[1], re.findall(r"\w+", wrong[2])) if wrong else ""))


def option_parser() -> argparse.ArgumentParser:
    """The options of a question about a module. Raises InputError instead of ending the process."""
    parser = _Parser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    group = parser.add_argument_group("options of a module")
    group.add_argument(
        "--inputs",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=DTYPE[SHAPE]",
        help="what forward takes, by name or in its order: tokens=int32[8,1024]; or a constant: use_cache=False",
    )
    group.add_argument(
        "--mode", choices=MODES, default="train", help="default: train; decode: one token with its cache"
    )
    group.add_argument("--optimizer", choices=("adamw", "adam", "sgd"), default="adamw", help="one of optim.py")
    group.add_argument(
        "--loss",
        choices=("auto", "cross_entropy", "mse", "own"),
        default="auto",
        help="targets are made of the output's shape; own: what the module returns as .loss",
    )
    group.add_argument(
        "--level",
        default="",
        metavar="LEVEL,...",
        help="conservative (float32), balanced (bfloat16 products, float32 weights; the default), aggressive (also "
        "recomputes the repeated blocks in the backward pass); several are compared in one table",
    )
    group.add_argument("--precision", choices=tuple(PRECISIONS), help="another name for conservative and balanced")
    group.add_argument(
        "--arguments", default="", metavar="NAME=VALUE,...", help="arguments of the class, function or config.json"
    )
    group.add_argument(
        "--through",
        choices=tuple(STEP_SCRIPTS),
        default="torch_xla",
        help="torch: by ATen operations and torchax, without torch_xla; asks the newest compiler alone",
    )
    group.add_argument("--mesh", default="", metavar="NAME=SIZE,...", help="default: data=DEVICES")
    group.add_argument(
        "--shard",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN=AXIS",
        help="parameters (or inputs) by name, the first that matches: '*.weight=fsdp' shards dimension 0, "
        "'*.out.weight=tensor@1' dimension 1, '*=fsdp@0+tensor@1' two, '*bias=-' none; else replicated",
    )
    return parser


def parse_question(target: str, options: Sequence[str], compile_for: str = "") -> Question:
    """Raises InputError with what was found, what is expected, and what to do."""
    given, unknown = option_parser().parse_known_args(options)
    if unknown:
        names = [option for action in option_parser()._actions for option in action.option_strings]
        raise InputError(
            f"{unknown[0]} is no option of a module; expected {', '.join(names)}{nearest(unknown[0], names)}"
        )
    if given.precision and given.level:
        raise InputError(f"precision is {given.precision} and level is {given.level}; give one of the two")
    levels = [PRECISIONS[given.precision]] if given.precision else (given.level or "balanced").split(",")
    for level in levels:
        if level not in LEVELS:
            raise InputError(f"level is {level!r}; expected one of {', '.join(LEVELS)}{nearest(level, LEVELS)}")
    mesh = parse_mesh(given.mesh)
    if given.through == "torch":
        check_through_torch(given, levels)
    return Question(
        target=target,
        inputs=parse_inputs(given.inputs),
        mode=given.mode,
        optimizer=given.optimizer,
        loss=given.loss,
        levels=tuple(dict.fromkeys(levels)),
        arguments=parse_arguments(given.arguments),
        mesh=mesh,
        placements=parse_placements(given.shard, mesh),
        through=given.through,
        compile_for=compile_for,
    )


def check_through_torch(given: argparse.Namespace, levels: Sequence[str]) -> None:
    """Raises InputError for what is only asked through torch_xla, or if torchax is not installed."""
    if "aggressive" in levels:
        raise InputError("through is torch and level is aggressive; expected another level, or leave --through out")
    if lacking := [name for name in ("torch", "jax", "torchax") if find_spec(name) is None]:
        raise InputError(f"through is torch, which needs {', '.join(lacking)}: pip install torch torchax==0.0.13 jax")


def parse_inputs(words: Sequence[str]) -> tuple[Input, ...]:
    """['tokens=int32[8,1024]', 'float32[8,3,224,224] use_cache=False'] -> inputs, in their order."""
    expected = "expected NAME=DTYPE[SIZE,...] such as tokens=int32[8,1024], or NAME=CONSTANT"
    found = []
    for word in re.findall(r"(?:[^\s;,\[]|\[[^\]]*\]?)+", " ".join(words)):
        name, _, rest = word.rpartition("=")
        tensor = re.fullmatch(r"([A-Za-z]\w*)\[([^\]]*)\]", rest)
        if not tensor:
            try:
                constant = ast.literal_eval(rest)
            except (ValueError, SyntaxError):
                constant = None
            if not name.isidentifier() or (constant is None and rest != "None"):
                raise InputError(f"inputs: {word!r} is not understood; {expected}")
            found.append(Input(name, value=constant))
            continue
        if name and not name.isidentifier():
            raise InputError(f"inputs: {name!r} in {word!r} is no name of an argument; {expected}")
        if tensor[1] not in DTYPES:
            raise InputError(
                f"inputs: {word!r} has the type {tensor[1]!r}; expected one of {', '.join(DTYPES)}"
                f"{nearest(tensor[1], DTYPES)}"
            )
        sizes = [size.strip() for size in tensor[2].split(",")] if tensor[2].strip() else []
        for size in sizes:
            if not size.isdigit() or not int(size):
                raise InputError(
                    f"inputs: {word!r} has the size {size!r}; expected a number of at least 1, because XLA compiles a "
                    "program for fixed shapes; ask once for each shape that you will run"
                )
        found.append(Input(name, tensor[1], tuple(map(int, sizes))))
    names = [given.name for given in found if given.name]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"inputs: {twice[0]} is given twice")
    if not any(given.dtype for given in found):
        raise InputError(f"a module needs --inputs; {expected}")
    if any(not later.name for place, given in enumerate(found) if given.name for later in found[place:]):
        raise InputError("inputs: one without a name comes after one with a name; expected those by position first")
    return tuple(found)


def parse_arguments(text: str) -> dict[str, object]:
    """'num_classes=10,name="x"' -> {"num_classes": 10, "name": "x"}."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise InputError(
            f"arguments: {text!r} is not understood; expected NAME=VALUE,... with Python's numbers, lists, True, None "
            "and quoted texts, such as num_classes=10,activation='gelu'"
        ) from error


def parse_mesh(text: str) -> dict[str, int]:
    """'data=2,fsdp=4' -> {"data": 2, "fsdp": 4}."""
    mesh = {}
    for part in text.split(",") if text else []:
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdigit() or not int(size) or name in mesh:
            raise InputError(
                f"mesh: {part!r} in {text!r} is not understood; expected NAME=SIZE,... such as data=2,fsdp=4"
            )
        mesh[name] = int(size)
    return mesh


def parse_placements(words: Sequence[str], mesh: dict[str, int]) -> tuple[Placement, ...]:
    """['*.weight=fsdp,*bias=-'] -> what to shard, the first match first."""
    names = tuple(mesh or {"data": 0})
    found = []
    for word in (part for text in words for part in re.split(r"[,\s]+", text) if part):
        pattern, _, places = word.rpartition("=")
        axes: dict[int, str] = {}
        for place in places.split("+") if places != "-" else []:
            axis, _, dimension = place.partition("@")
            if axis not in names:
                raise InputError(
                    f"shard: {word!r} names the axis {axis!r}; expected one of {', '.join(names)}, the axes of --mesh, "
                    f"or - for none{nearest(axis, names)}"
                )
            if dimension and not dimension.isdigit():
                raise InputError(f"shard: {word!r} has the dimension {dimension!r}; expected AXIS@NUMBER")
            if int(dimension or 0) in axes or axis in axes.values():
                raise InputError(f"shard: {word!r} uses a dimension or an axis twice")
            axes[int(dimension or 0)] = axis
        if not pattern:
            raise InputError(f"shard: {word!r} is not understood; expected PATTERN=AXIS, such as '*.weight=fsdp'")
        found.append(Placement(pattern, axes))
    return tuple(found)


def compile_module(target: str, options: Sequence[str], topology: str, program_dir: str | None) -> list[Report]:
    """One report for each level. Raises InputError, or ScriptError after a child that said why itself."""
    question, reports = parse_question(target, options), []
    if program_dir:
        make_folder(program_dir)
    for level in question.levels:
        place = program_dir and str(Path(program_dir, level) if len(question.levels) > 1 else program_dir)
        command = [f"--target={target}", *options, f"--at={level}"]
        reports.append(compile_script(str(STEP_SCRIPTS[question.through]), topology, command, place))
    return reports


def question_of_child() -> tuple[Question, str, str]:
    """(question, level, slice), in the process that compile_module() has started."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("target", "at", "compile_for"):
        parser.add_argument(f"--{name}", required=True)
    given, options = parser.parse_known_args()
    return parse_question(given.target, options, given.compile_for), given.at, given.compile_for


def make_folder(program_dir: str) -> None:
    """Make the folder of --program. Raises InputError, before anything is compiled, if it has no room for 1 MiB."""
    probe = Path(program_dir, f".room_{os.getpid()}")
    try:
        Path(program_dir).mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b" " * 2**20)
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
        raise InputError(
            f"program: {program_dir} cannot be written: {error.strerror}; expected a folder with room for the text of "
            "the programs; choose another"
        ) from error
