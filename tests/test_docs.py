"""README and docs: every fenced command is run here, or the page itself says why a reader may not be able to run it."""

import csv
import io
import json
import re
import shlex
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import ROOT, Script, run

import aot_tpu
from tpu_compiler.compile.planned import PLAN_VARIABLE
from tpu_compiler.decide import search

FOLDERS = ("docs", "cluster", "browser")
PAGES = [ROOT / "README.md", *(page for name in FOLDERS for page in sorted((ROOT / name).glob("*.md")))]
SHARED = ROOT.parent / "shared" / "data"
# A comment behind the command, or one on a line of its own for the rest of the block, or a sentence of the page
# for all commands of one program ("Commands of `gcloud` need a Google Cloud account").
REASON = re.compile(r"\b(needs|downloads|takes (\w+ )?(minutes|hours|half an hour)|runs until Ctrl-C)\b")
PROGRAM_NOT_RUN = re.compile(r"[Cc]ommands of `(\w+)` (?:need )?a ")
MADE = ("browser/page/node_modules", "browser/page/models")  # by npm; by the reader
# so that a training takes seconds; what the reader would wait for is measured in docs/results
MNIST = ["--num_epochs=1", "--warmup_steps=2", "--channels=4"]
SHORTER = {
    **dict.fromkeys(("simple_mnist_tpu.py", "distributed_mnist_tpu.py", "ddp_mnist_tpu.py"), MNIST),
    "resnet_cifar_tpu.py": ["--num_epochs=1", "--warmup_steps=2", "--global_batch_size=512", "--width=4"],
    "transformer_tpu.py": ["--num_steps=3", "--warmup_steps=1", "--eval_batches=1", "--global_batch_size=8"],
}


class Command(NamedTuple):
    """A fenced command without comments and line breaks; reason: why it is not run here, in the page's words."""

    text: str
    reason: str


def blocks_of(page: Path) -> list[list[Command]]:
    """The commands of each bash block."""
    text = page.read_text()
    programs = {name: f"commands of {name} need an account or a daemon" for name in PROGRAM_NOT_RUN.findall(text)}
    blocks = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
        commands, for_the_rest = [Command("", "")], ""
        for line in block.replace("\\\n", " ").splitlines():
            if commands[-1].text.count("'") % 2:  # a quoted text goes on as it stands
                commands[-1] = commands[-1]._replace(text=f"{commands[-1].text}\n{line}")
                continue
            words, comment = re.match(r"(.*?)(?:(?:^|\s+)#(.*))?$", line).groups()
            reason = comment.strip() if comment and REASON.search(comment) else ""
            if not words.strip():
                for_the_rest = reason or for_the_rest
            else:
                words = " ".join(words.split())
                commands.append(Command(words, reason or for_the_rest or programs.get(words.split()[0], "")))
        blocks.append([command for command in commands if command.text])
    return blocks


def commands_of(page: Path) -> list[Command]:
    return [command for block in blocks_of(page) for command in block]


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables set before a command, and its words."""
    variables, words = {}, shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words


def is_install_command(command: str) -> bool:
    """.ci/run takes README's two commands that install as they stand."""
    return command.startswith("python3 -m venv .venv && ")


def test_a_command_is_run_unless_its_page_says_what_it_takes():
    commands = [command for page in PAGES for command in commands_of(page)]
    to_run = [text for text, reason in commands if not reason and not is_install_command(text)]
    assert len(commands) >= 225 and len(to_run) >= 85, (len(commands), len(to_run))
    for text in to_run:
        _, words = words_of(text)
        assert words[0] in (".venv/bin/python", ".venv/bin/torchrun"), f"neither run nor excused by its page: {text}"
        name = words[2] if words[1] == "-m" else next(word for word in words if word.endswith(".py"))
        path = ROOT / name if name.endswith(".py") else ROOT / name.replace(".", "/")
        assert any(one.is_file() for one in (path, path.with_suffix(".py"), path / "__main__.py")), f"no script: {text}"


def anchors_of(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_links_anchors_and_paths_in_backticks_lead_somewhere():
    """A path from the top or from the page's own folder; a name `of` a module is defined there."""
    folders = "images|language|tpu_utils|tpu_compiler|tools|cluster|browser|tests|benchmarks|docs"
    path = re.compile(rf"`((?:(?:{folders})/[\w/.-]+)|[a-z_]+_tpu\.py|config\.py)`")
    more = ("CLAUDE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/results/README.md")
    for page in [*PAGES, *(ROOT / name for name in more)]:
        for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", page.read_text()):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors_of(linked), f"{page.name}: {target}#{anchor}"
        for name in path.findall(page.read_text()):
            assert name in MADE or (ROOT / name).exists() or (page.parent / name).exists(), f"{page.name}: {name}"
        for name, module in re.findall(rf"`(\w+)[^`\n]*` of `((?:{folders})[\w./]+)`", page.read_text()):
            text = (ROOT / module.removesuffix(".py").replace(".", "/")).with_suffix(".py").read_text()
            assert re.search(rf"^(def|class) {name}\b", text, re.M), f"{page.name}: {name} is not in {module}"


def test_a_table_of_results_is_whole_and_in_the_index():
    """docs/results/index.csv has a row for each: what it holds, the command that wrote it, and how."""
    folder = ROOT / "docs" / "results"
    rows = list(csv.DictReader((folder / "index.csv").open()))
    assert [row["file"] for row in rows] == sorted(path.name for path in folder.glob("*.csv") if path.stem != "index")
    assert all(all(row.values()) for row in rows), "an empty field"
    for path in folder.glob("*.csv"):
        header, *table = csv.reader(path.open())
        assert table and {len(row) for row in table} == {len(header)}, path.name


def test_pages_are_short():
    """Words of a page, and of all pages together: who adds says what went."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md"), *ROOT.glob("docs/*/*.md")]
    words = {page: len(page.read_text().split()) for page in pages}
    assert words.keys() > set(PAGES)
    assert max(words.values()) <= 1800, max(words, key=words.get)
    assert sum(words.values()) <= 28_000, sum(words.values())


def test_readme_says_of_each_page_what_kind_it_is():
    readme = PAGES[0].read_text()
    assert len(readme.splitlines()) <= 150
    table = readme[readme.index("| I want to | kind | page |") :].split("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) <= 20 and {kind for _, kind, _ in rows} == {"learn", "do", "look up"}
    for page in PAGES[1:]:
        assert sum(f"]({page.relative_to(ROOT)})" in found for *_, found in rows) == 1, f"{page.name}: in one row"


def test_the_lines_that_log_elsewhere_give_each_number_its_name_and_step(monkeypatch, capsys):
    """docs/runs.md, with a wandb that prints what it is given."""
    page = (ROOT / "docs" / "runs.md").read_text()
    (lines,) = re.findall(r"```python\n(import json, sys, wandb\n.*?)```", page, re.S)
    wandb = types.SimpleNamespace(init=lambda **_: None, log=lambda numbers, step: print(step, numbers))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    records = [{"kind": "train", "step": 5, "loss": 1.5, "mfu": None}, {"kind": "sample", "step": 6, "text": "a"}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(record) + "\n" for record in records)))
    exec(lines, {})
    assert capsys.readouterr().out == "5 {'train/step': 5, 'train/loss': 1.5}\n6 {'sample/step': 6}\n"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The project in a folder of its own, which the commands of all pages share, in their order."""
    folder = tmp_path_factory.mktemp("pages") / "checkout"
    folder.mkdir()
    folders = "images language tpu_utils tpu_compiler tools cluster browser benchmarks lessons"
    for path in [*ROOT.glob("*.py"), *(ROOT / name for name in folders.split())]:
        (folder / path.name).symlink_to(path)
    (folder / "input.txt").write_text("To be, or not to be: that is the question.\n" * 400)
    return folder


def data_dir(command: str) -> Path:
    folder = SHARED / ("text" if "transformer_tpu.py" in command else "mnist")
    if not folder.exists():
        pytest.skip("the real data is not beside this checkout (../shared/data)")
    return folder


ASKS_THE_COMPILER = ("any_module.md", "any_slice.md", "search.md", "speedrun.md", "published.md", "calibrate.md")
"""Pages whose commands compile for minutes; what they show has tests of its own. What another page asks is planned, but
for figures that are compared: tests/tpu_compiler has the compiles."""


ASKED = set()
"""Questions to the compiler that a page has asked: another one asks the same."""


def marked(page: Path):
    mark = pytest.mark.exhaustive if page.name in ASKS_THE_COMPILER else pytest.mark.slow
    return pytest.param(page, marks=mark, id=page.name)


@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_commands_run(page, checkout, monkeypatch, capsys):
    def forked(command, variables, seconds=None):
        done = Script(*command, folder=checkout, **variables)
        assert done.wait() in (0, 1, 2), done.text("err")
        return done.returncode

    monkeypatch.setattr(search, "run_script", forked)
    monkeypatch.setenv("AOT_TPU_CACHE", str(checkout.parent / "cache"))  # many pages ask about the same step
    monkeypatch.chdir(checkout)
    for command, reason in commands_of(page):
        if reason or is_install_command(command) or command in ASKED:
            continue
        if "--compile_for" in command or "--topology" in command:
            ASKED.add(command)
        variables, words = words_of(command)
        is_planned = page.name not in ASKS_THE_COMPILER and "benchmarks/budgets.py" not in words
        monkeypatch.setenv(PLAN_VARIABLE, "1" if is_planned else "")
        if words[1] == "setup_tpu.py" and words[2:]:  # its options are run by tests/scripts/test_setup_tpu.py
            continue
        if "runs/mine" in words and not SHARED.exists():
            pytest.skip("runs/mine is trained on real data, which is not beside this checkout (../shared/data)")
        launcher, *words = [str(data_dir(command)) if word == "DIR" else word for word in words]
        if words[0] == "aot_tpu.py":
            assert aot_tpu.main(words[1:]) == 0, f"{command}: {capsys.readouterr().err}"
            continue
        script = next((word for word in words if word in SHORTER), None)
        if script and "-m" not in words and "--compile_for" not in words and "--help" not in words:
            words += SHORTER[script]
            if script == "transformer_tpu.py" and "--initial_weights" not in words:
                words.append("--num_layers=1")
        if launcher.endswith("torchrun"):
            done = run("-m", "torch.distributed.run", *words, PYTHONPATH=checkout)
            code, said = done.returncode, done.stderr
        else:
            process = Script(*words, folder=checkout, **variables)
            code, said = process.wait(), process.text("err")
        # the doctor warns of a machine without a TPU, and fails where this Python is not in order
        assert code == 0, f"{command}: {said}"


def test_what_a_page_names_of_a_module_is_there():
    """One that had moved to another module once was not."""
    found = {}
    for page in PAGES:
        for name, place in re.findall(
            r"`(\w+)(?:\([^`]*\))?` of `((?:tpu_\w+|images|language)[./][\w./]+)`", page.read_text()
        ):
            text = (ROOT / f"{place.removesuffix('.py').replace('.', '/')}.py").read_text()
            found[page.name, name, place] = re.search(rf"^(?:def|class) {name}\b|^{name}\b.* = ", text, re.M)
    assert len(found) >= 4 and all(found.values()), found
