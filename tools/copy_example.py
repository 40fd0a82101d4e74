"""Copy a training script, with all that it imports, into a folder of your own.

Run:     python -m tools.copy_example simple_mnist_tpu.py mine/
             the script and what it imports: tpu_utils/, and
             images/ with config.py, or language/
         python -m tools.copy_example simple_mnist_tpu.py mine/ --compiler
             tpu_compiler/ too, which --compile_for needs

Expect:  the names of what was copied, and what to edit first. What a script
         needs is read from its imports. Nothing is overwritten.
"""

import ast
import re
import shutil
import sys
from pathlib import Path

from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.new_folder import written_aside
from tpu_utils.options.fields import nearest
from tpu_utils.options.tool_arguments import make_parser, parse_arguments

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "tests")


def imported_by(path: Path) -> set[str]:
    """First words of what a file imports at the left margin: not in functions, not for a type checker."""
    return set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE))


def needed_by(script: Path) -> list[Path]:
    """The files and folders beside a script that it imports, and what these import in turn; the script first."""
    found, waiting = [script], [script]
    while waiting:
        for name in sorted(imported_by(waiting.pop())):
            path = next((p for p in (script.with_name(f"{name}.py"), script.with_name(name)) if p.exists()), None)
            if path is None or path in found:
                continue
            found.append(path)
            waiting += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found


def scripts() -> list[str]:
    """The training scripts: the files *_tpu.py that define train()."""
    return sorted(path.name for path in ROOT.glob("*_tpu.py") if "\ndef train(" in path.read_text())


def places_to_edit(script: Path) -> list[str]:
    """What a reader changes first, each with its line."""
    tree = ast.parse(script.read_text())
    lines = {node.name: node.lineno for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    modules = {
        alias.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    places = ["its first lines, which --help prints: what it trains, and on what"]
    places += [f"the model {name}, line {line}" for name, line in lines.items() if name[0].isupper()]
    if "build_model" in lines:
        places.append(f"how it is made, build_model, line {lines['build_model']}")
    elif "build_model" in modules:
        places.append(f"the model, which {modules['build_model']} makes")
    places += [f"the loss in {name}, line {line}" for name, line in functions_with_a_loss(tree)]
    data = next(name for name in ("load_dataset", "load_sequences") if name in modules)
    return [*places, f"the data, which {data} of {modules[data]} gives"]


def functions_with_a_loss(tree: ast.Module) -> list[tuple[str, int]]:
    """(name, line) of the functions that call a loss which is not the script's own function."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    own = {function.name for function in functions}
    found = []
    for function in functions:
        called = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
        if any(re.search(r"loss|cross_entropy", name) and name not in own for name in called):
            found.append((function.name, function.lineno))
    return found


def copy(script: Path, target: Path, compiler: bool) -> list[Path]:
    """Returns what was copied. Raises InputError where there is no such script, or something is there already."""
    if script.name not in scripts() or script.resolve().parent != ROOT:
        known = ", ".join(scripts())
        raise InputError(f"{script}: no training script; expected {known}{nearest(script.name, scripts())}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} is there already; expected a new folder, or an empty one; choose another")
    if target.resolve().is_relative_to(ROOT) and target.resolve().parent != ROOT:
        raise InputError(f"{target} is inside a folder of this project; expected one beside it, such as ../mine")
    found = [*needed_by(ROOT / script.name), ROOT / "requirements.txt", ROOT / "LICENSE"]
    found += [ROOT / "tpu_compiler"] if compiler else []
    with written_aside(target) as aside:
        for path in found:
            if path.is_dir():
                shutil.copytree(path, aside / path.name, ignore=LEFT_OUT)
            else:
                shutil.copyfile(path, aside / path.name)
    return found


def main() -> int:
    parser = make_parser("tools.copy_example", __doc__)
    parser.add_argument("script", type=Path, help=", ".join(scripts()))
    parser.add_argument("folder", type=Path, help="a new folder, or an empty one")
    parser.add_argument("--compiler", action="store_true", help="what --compile_for needs, too")
    given = parse_arguments(parser, sys.argv[1:])
    copied = copy(given.script, given.folder, given.compiler)
    names = [f"{path.name}/" if path.is_dir() else path.name for path in copied]
    print(f"copied     {', '.join(names)} to {given.folder}")
    for number, place in enumerate(places_to_edit(given.folder / given.script.name)):
        print(f"{'' if number else 'edit first':10} {place}")
    print(f"run it     cd {given.folder} && python {given.script.name} --help")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
