"""The house: who imports whom, how long things are, one word for one thing."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from processes import ROOT

SCRIPTS = {"simple_mnist_tpu.py": (210, 60), "resnet_cifar_tpu.py": (210, 65), "distributed_mnist_tpu.py": (310, 85)}
SCRIPTS |= {"transformer_tpu.py": (430, 85)}
FOLDERS = (".", "tpu_utils", "tpu_compiler", "tpu_calibration", "tpu_cluster")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
OURS = {str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__") for path in SOURCES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")


def imports_of(path: Path, everywhere: bool = True) -> set[str]:
    """Modules that a file imports: anywhere in it, or as it is imported itself, without what is for a type checker."""
    nodes = list(ast.walk(tree_of(path))) if everywhere else list(tree_of(path).body)
    if not everywhere:
        nodes += [inner for node in nodes if isinstance(node, ast.If | ast.Try) for inner in ast.walk(node)]
        checked = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
        left_out = {inner for node in checked for inner in ast.walk(node)}
        nodes = [node for node in nodes if node not in left_out]
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_import_circle():
    graph = {name_of(path): (imports_of(path, everywhere=False) & OURS) - {name_of(path)} for path in SOURCES}
    left = dict(graph)
    while free := [name for name, wanted in left.items() if not wanted & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {left}"


RUN_WHAT_THEY_READ = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "torch.distributed.checkpoint"}
RUN_WHAT_THEY_READ |= {"torch_xla.experimental.distributed_checkpoint", "torch.load", "torch.save", "torch.package"}
RUN_WHAT_THEY_READ |= {f"dist.{name}" for name in ("broadcast_object_list", "all_gather_object", "gather_object")}
RUN_WHAT_THEY_READ |= {f"dist.{name}" for name in ("scatter_object_list", "send_object_list", "recv_object_list")}


@pytest.mark.parametrize("folder", [*FOLDERS, "tests", "benchmarks"])
def test_nothing_here_runs_what_it_reads(folder):
    """Files and messages are data: no pickle, in the tests and benchmarks neither."""
    for path in sorted((ROOT / folder).glob("*.py")):
        nodes = list(ast.walk(tree_of(path)))
        used = imports_of(path) | {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        assert not used & RUN_WHAT_THEY_READ, path.name
        for call in (ast.unparse(node) for node in nodes if isinstance(node, ast.Call)):
            assert not call.startswith("np.load(") or "allow_pickle=False" in call, (path.name, call)


@pytest.mark.parametrize(
    "leaf",
    [
        "tpu_utils/files.py",
        "tpu_utils/clock.py",
        "tpu_utils/errors.py",
        "tpu_utils/fields.py",
        "tpu_compiler/hardware.py",
    ],
)
def test_a_leaf_imports_nothing_of_ours(leaf):
    assert not imports_of(ROOT / leaf) & OURS


@pytest.mark.parametrize(
    "name",
    [
        *("config.py", "image_data.py", "mnist_data.py", "cifar_data.py", "token_data.py", "llmc_files.py"),
        *("chat_data.py", "tokenizer.py", "model_shapes.py"),
        *("tpu_utils/environment.py", "tpu_utils/run_dir.py"),  # a command line reads the run that it resumes
    ],
)
def test_what_comes_before_torch_imports_none_of_it(name):
    """With all that these import in turn, as they are imported."""
    seen, waiting = set(), [ROOT / name]
    while waiting:
        path = waiting.pop()
        for module in imports_of(path, everywhere=False):
            assert module.split(".")[0] not in ("torch", "torch_xla", "jax", "torchvision", "sklearn"), (path, module)
            if module in OURS and module not in seen:
                seen.add(module)
                file = ROOT / (module.replace(".", "/") + ".py")
                waiting.append(file if file.exists() else ROOT / module / "__init__.py")


def test_a_training_script_is_imported_by_nobody_and_mnist_meets_no_language_model():
    scripts = {name.removesuffix(".py") for name in SCRIPTS}
    for path in SOURCES:
        assert not imports_of(path) & scripts, path
    language = {"token_data", "chat_data", "llmc_files", "gpt", "operations", "transformer_tpu"}
    for path in [
        ROOT / "image_data.py",
        ROOT / "mnist_data.py",
        ROOT / "simple_mnist_tpu.py",
        *(ROOT / "tpu_utils").glob("*.py"),
    ]:
        assert not imports_of(path) & language, path


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_reads_like_an_example(name):
    most_lines, train_lines = SCRIPTS[name]
    assert len((ROOT / name).read_text().splitlines()) <= most_lines
    from_utils = [
        alias.name
        for node in ast.walk(tree_of(ROOT / name))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tpu_utils")
        for alias in node.names
    ]
    assert len(from_utils) <= 16, from_utils
    for node in ast.walk(tree_of(ROOT / name)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= (train_lines if node.name == "train" else 60), f"{node.name} has {length} lines"
            if node.name == "train":
                assert depth_of(node) <= 4, "the with statement of the run, then at most three levels"


def depth_of(node: ast.AST) -> int:
    blocks = [
        child for child in ast.iter_child_nodes(node) if isinstance(child, ast.For | ast.While | ast.With | ast.If)
    ]
    return max((1 + depth_of(block) for block in blocks), default=0)


def test_one_term_for_one_thing():
    """A tensor is sharded, sliced along an axis; a file is truncated."""
    pages = [*SOURCES, ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.py")]
    for path in pages:
        text = re.sub(r"min_cut_\w+|\"cut\"", "", path.read_text())  # PyTorch's name; the marker's of checkpoints
        assert not re.search(r"\bcuts?\b|\bcutting\b", text), f"{path.name}: sharded, sliced or truncated?"
        assert not re.search(r"\bknobs?\b", text), path.name
        assert text.isascii() or path.suffix == ".md", path.name


def test_no_path_of_one_machine():
    for path in [*SOURCES, ROOT / "README.md", ROOT / "CLAUDE.md", *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"(?<![\w.~])/(work|root|home)/", path.read_text()), path.name
