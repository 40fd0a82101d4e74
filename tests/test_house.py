"""The house: which street imports which, how long things are, what a copy takes, one word for one thing."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import ROOT

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
BRANCH = ast.stmt | ast.ExceptHandler | ast.match_case
MOST_LINES = {"simple_mnist_tpu": 140, "distributed_mnist_tpu": 190, "ddp_mnist_tpu": 190, "resnet_cifar_tpu": 190}
MOST_LINES |= {"transformer_tpu": 300}
IMAGE_SCRIPT, TOOLS = {"config", "images", "tpu_utils"}, {"config", "images", "language", "tpu_compiler", "tpu_utils"}
MAY_IMPORT = {
    "tpu_utils": set(),
    "config": {"tpu_utils"},
    "images": {"config", "tpu_utils"},
    "language": {"config", "tpu_utils"},
    "tpu_compiler": {"config", "tpu_utils"},
    "tools": TOOLS,
    "cluster": {"config", "images", "language", "tpu_compiler", "tpu_utils"},
    "browser": {"language", "tpu_utils"},
    "lessons": {"config", "images", "language", "tpu_compiler", "tpu_utils"},  # but for what is told to import nothing
    **{script: IMAGE_SCRIPT for script in MOST_LINES if script != "transformer_tpu"},
    "transformer_tpu": {"language", "tpu_utils"},
    "aot_tpu": {"tpu_compiler", "tpu_utils"},
    "setup_tpu": {"tpu_compiler", "tpu_utils"},
}
"""Every street, and those it may import; a file on the top level is a street of its own."""
NEIGHBOURS = ("browser", "cluster")
SOURCES = sorted(ROOT.glob("*.py"))
SOURCES += [
    path
    for street in MAY_IMPORT
    for path in sorted((ROOT / street).rglob("*.py"))
    if "tests" not in path.relative_to(ROOT).parts
]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


OURS = {name_of(path): path for path in SOURCES}


ROOMS = {f"{path.parent.relative_to(ROOT)}" for path in SOURCES if path.parent.parent != ROOT}
"""Folders in a street, each with at most 12 files."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(path: Path, everywhere: bool = True) -> Iterator[ast.AST]:
    """Of a file, wherever they stand; or those alone that are run when it is imported, but for a type checker's."""
    waiting = list(tree_of(path).body)
    while waiting:
        node = waiting.pop()
        yield node
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if everywhere or not (for_types or isinstance(node, FUNCTION)):
            waiting += [one for one in ast.iter_child_nodes(node) if isinstance(one, BRANCH)]


@cache
def imports_of(path: Path, everywhere: bool = True) -> frozenset[str]:
    """Names that a file imports: anywhere in it, for a type checker too, or as it is imported itself."""
    found = set()
    for node in statements(path, everywhere):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@cache
def ours_of(name: str, everywhere: bool = True) -> set[str]:
    """Our modules that a module imports; of a package and a module in it, the module."""
    found = imports_of(OURS[name], everywhere) & OURS.keys() - {name}
    return {one for one in found if not any(other.startswith(f"{one}.") for other in {*found, name})}


def street_of(name: str) -> str:
    return name.partition(".")[0]


def closure_of(name: str) -> set[str]:
    """Our modules that are imported with this one, it included; with a module its packages."""
    seen, waiting = set(), [name]
    while waiting:
        if (one := waiting.pop()) not in seen:
            seen.add(one)
            waiting += [*ours_of(one, everywhere=False), *({one.rpartition(".")[0]} & OURS.keys())]
    return seen


# -------------------------------------------------------------------------------------------------------------- streets
def test_eight_files_on_the_top_level_and_no_street_that_is_not_named():
    on_top = {path.stem for path in ROOT.glob("*.py")}
    assert on_top == {name for name in MAY_IMPORT if name.endswith("_tpu") or name == "config"} and len(on_top) == 8
    folders = {path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("*/*.py")}
    assert {name for name in folders if not name.startswith(".")} - {"tests", "benchmarks", "runs"} <= MAY_IMPORT.keys()


@pytest.mark.parametrize("street", MAY_IMPORT)
def test_a_street_imports_no_other_than_it_may(street):
    """Wherever in a file the import stands."""
    for name in (name for name in OURS if street_of(name) == street):
        found = {street_of(other) for other in ours_of(name)} - {street}
        assert found <= MAY_IMPORT[street], f"{name} imports {found - MAY_IMPORT[street]}"


def room_of(name: str) -> str:
    """The folder of a file, a file on the top level itself. A file beside a street's rooms is a room of its own."""
    street, _, rest = name.partition(".")
    return name if "." not in rest and f"{street}/{rest}" not in ROOMS else f"{street}.{rest.partition('.')[0]}"


def test_no_circle_of_files_rooms_or_streets():
    """Imports inside functions and for a type checker counted."""
    graphs = [{name: ours_of(name) for name in OURS}]
    for group in (room_of, street_of):
        graphs.append({})
        for name in OURS:
            others = {group(other) for other in ours_of(name)} - {group(name)}
            graphs[-1].setdefault(group(name), set()).update(others)
    for graph in graphs:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"these import each other: {error.args[1]}")


@pytest.mark.parametrize("street", ["images", "language", "tpu_compiler", "tpu_utils"])
def test_a_room_has_few_files(street):
    for folder in (street, *(room for room in ROOMS if room.startswith(f"{street}/"))):
        assert len(list((ROOT / folder).glob("*.py"))) <= 12, folder


def test_a_name_means_one_file():
    names = [path.stem for path in SOURCES if path.stem not in ("__init__", "__main__")]
    assert sorted(names) == sorted(set(names))


def test_what_knows_other_hosts_or_the_compiler_is_imported_where_it_is_needed_alone():
    for script in MOST_LINES:
        found = closure_of(script)
        assert not any(street_of(name) == "tpu_compiler" for name in found), script
        assert not any(name.startswith("tpu_utils.remote") for name in found), script


@pytest.mark.parametrize("script", MOST_LINES)
def test_a_copy_is_two_files_and_two_folders(script):
    """tools.copy_example takes these. Imported at the start of an image script: few modules, and none of the others.
    Both backends are counted, of which a process imports one; dynamo.py, which torch_compile.py imports once there is a
    step, is not, and is shorter than xla.py."""
    found = closure_of(script)
    beside = {street_of(name) for name in found} - {script}
    data = "language" if script == "transformer_tpu" else "images"
    assert beside == {"tpu_utils", data, *(["config"] if data == "images" else [])}
    limits = {"simple_mnist_tpu": (26, 4387), "transformer_tpu": (36, 5894), "resnet_cifar_tpu": (28, 4652)}
    modules, lines = limits.get(script, (27, 4513))
    assert len(found) <= modules
    assert sum(len(OURS[name].read_text().splitlines()) for name in found) <= lines


LEAVES = [f"tpu_utils.base.{name}" for name in ("errors", "hardware", "process", "restarts", "versions", "writing")]
LEAVES += ["tpu_utils.options.compiler_flags", "tpu_utils.options.fields"]
LEAVES += ["lessons.plain_mnist_tpu", "lessons.notebooks"]


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_imports_nothing_of_ours(leaf):
    assert not ours_of(leaf)


ROOM = "tpu_utils.device"
"""The room that knows the backend; all other modules import it from there."""
KERNELS = ["loops", "device_loop", "flash_attention", "expert_kernels"]  # programs of XLA's own, built or lowered there
IMPORT_TORCH_XLA = {f"{ROOM}.xla", "tpu_utils.options.virtual_slice", *(f"language.xla.{name}" for name in KERNELS)}
"""And what is made of torch_xla's own insides; virtual_slice settles them before it is imported."""
ON_BOTH_BACKENDS = ("config", "images", "language", "tpu_utils", *MOST_LINES, "tools.generate", "tools.evaluate")


def test_one_room_knows_the_backend():
    """Wherever in a file the import stands. tpu_compiler/, the doctor and what measures a chip ask torch_xla itself."""
    found = {name for name in OURS if name in ON_BOTH_BACKENDS or street_of(name) in ON_BOTH_BACKENDS}
    roots = {name: {other.split(".")[0] for other in imports_of(OURS[name])} for name in found}
    assert {name for name in found if roots[name] & {"torch_xla", "torch_tpu"}} == IMPORT_TORCH_XLA
    for name in found - IMPORT_TORCH_XLA - {ROOM}:  # a checkpoint's random state has the key xla
        text = ast.unparse(tree_of(OURS[name]))
        assert "_XLAC" not in text and "'xla'" not in text, name


def names_in(path: Path) -> set[str]:
    """Functions, classes and values of a module that have no underscore in front, imported ones too."""
    found = set()
    for node in tree_of(path).body:
        if isinstance(node, FUNCTION | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            targets = [one for target in node.targets for one in getattr(target, "elts", [target])]
            found |= {one.id for one in targets if isinstance(one, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def test_both_backends_have_the_names_that_others_import():
    """xla.py and torch_compile.py; what neither has stands in the room itself."""
    xla, torch_compile = (names_in(OURS[f"{ROOM}.{backend}"]) for backend in ("xla", "torch_compile"))
    imported = set()
    for path in OURS.values():
        imported |= {name.removeprefix(f"{ROOM}.") for name in imports_of(path) if name.startswith(f"{ROOM}.")}
        imported |= set(re.findall(r"\bdevice\.(\w+)", path.read_text()))
    assert len(imported & xla) > 25
    assert imported & xla <= torch_compile, imported & xla - torch_compile
    assert imported & torch_compile <= xla, imported & torch_compile - xla


BEFORE_TORCH = ["config", "setup_tpu", "tpu_utils.options.environment", "tpu_utils.record.run_dir"]
BEFORE_TORCH += ["language.options.transformer_options", "language.tasks.questions", "language.tasks.scores"]
BEFORE_TORCH += [f"images.{name}" for name in "arrays array_files mnist mnist_files cifar cifar_config".split()]
DATA = "tokens text synthetic chat stream llmc_files preparations tokenizer stream_files"
BEFORE_TORCH += [f"language.data.{name}" for name in DATA.split()]


@pytest.mark.parametrize("name", BEFORE_TORCH)
def test_what_comes_before_torch_imports_none_of_it(name):
    """With all that these import in turn, as they are imported."""
    for module in closure_of(name):
        roots = {other.split(".")[0] for other in imports_of(OURS[module], everywhere=False)}
        assert not roots & {"torch", "torch_xla", "jax", "torchvision", "sklearn"}, module


@pytest.mark.parametrize("street", NEIGHBOURS)
def test_a_neighbour_could_move_out(street):
    """It has its own words, requirements and tests, and nobody else imports it."""
    assert all((ROOT / street / name).exists() for name in ("README.md", "requirements.txt", "tests"))
    assert not [name for name in OURS if street_of(name) != street and street in map(street_of, ours_of(name))]


def test_a_training_script_is_imported_by_nobody():
    assert not [name for name in OURS if imports_of(OURS[name]) & MOST_LINES.keys()]


# -------------------------------------------------------------------------------------------------------------- scripts
@pytest.mark.parametrize("script", MOST_LINES)
def test_a_script_shows_no_private_interface(script):
    assert len(OURS[script].read_text().splitlines()) <= MOST_LINES[script]
    for node in ast.walk(tree_of(OURS[script])):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        assert not [name for name in names if re.search(r"(^|\.)_[^_]", name)], f"line {node.lineno}: {names}"


@pytest.mark.parametrize("script", MOST_LINES)
def test_train_is_about_training(script):
    """A statement is for guarantees where it makes the Run, calls a method of `run`, or a check_ or print_ function;
    all others, and the header of the loop over the steps, are training."""
    (train,) = [node for node in tree_of(OURS[script]).body if isinstance(node, FUNCTION) and node.name == "train"]
    assert depth_of(train) <= 4, "the with statement of the run, then at most three levels"
    inside = [node for node in ast.walk(train) if isinstance(node, ast.stmt) and node is not train]
    headers = [ast.unparse(node).splitlines()[0] for node in inside]
    guarantees = [text for text in headers if re.search(r"^(?!for ).*\b(Run|run\.\w+|(check|print)_\w+)\(", text)]
    assert len(guarantees) <= min(11, 0.45 * len(headers)), guarantees


def depth_of(node: ast.AST) -> int:
    kinds = ast.For | ast.While | ast.With | ast.If
    return max((1 + depth_of(child) for child in ast.iter_child_nodes(node) if isinstance(child, kinds)), default=0)


# ------------------------------------------------------------------------------------------------------------ functions
def test_a_function_has_at_most_60_lines():
    for module, path in OURS.items():
        long = [one.name for one in statements(path) if isinstance(one, FUNCTION) and one.end_lineno - one.lineno >= 60]
        assert not long, module


def test_ruff_finds_nothing():
    """By its settings in pyproject.toml a function has at most 8 parameters, and nothing here runs what it reads: no
    pickle in files or messages, in the tests and benchmarks neither."""
    done = subprocess.run([sys.executable, "-m", "ruff", "check", ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_benchmarks_find_what_they_import():
    """Two had been left looking for helpers of tests where these no longer are."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        lines = re.findall(r"sys\.path\.insert\(0, str\((.*)\)\)", path.read_text())
        folders = [path.parent, ROOT, *(ROOT.joinpath(*re.findall(r'"(\w+)"', line)) for line in lines)]
        for name in {name.split(".")[0] for name in imports_of(path)}:
            there = [folder for folder in folders if (folder / name).is_dir() or (folder / f"{name}.py").is_file()]
            assert there or find_spec(name), f"{path.name}: {name}"


# ---------------------------------------------------------------------------------------------------------------- words
PAGES = [ROOT / "README.md", ROOT / "CLAUDE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / street / "README.md" for street in NEIGHBOURS]


def test_one_term_for_one_thing_and_no_path_of_one_machine():
    """A tensor is sharded, sliced along an axis; a file is truncated."""
    for path in [*SOURCES, *PAGES, *sorted((ROOT / "benchmarks").glob("*.py"))]:
        text = re.sub(r"min_cut_\w+|\"cut\"", "", path.read_text())  # PyTorch's name; the marker's of checkpoints
        assert not re.search(r"\bcuts?\b|\bcutting\b", text), f"{path.name}: sharded, sliced or truncated?"
        assert not re.search(r"\bknobs?\b", text), path.name
        assert not re.search(r"(?<![\w.~])/(work|root|home)/", text), path.name
        assert text.isascii() or path.suffix == ".md", path.name
        assert "allow_pickle=True" not in text, path.name
