"""Files of tasks: what is refused, by file and question; no damage is a crash, no code is run; rows in few shapes."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from made_tasks import BUNDLE, MAKERS, write_bundle, write_lines, write_task
from mutations import at_most, mutated, mutated_json, no_hang, refusals

from language.data.llmc_files import MultipleChoice, write_hellaswag
from language.data.tokenizer import Bytes
from language.options.transformer_options import TransformerConfig
from language.tasks import task_files
from language.tasks.core_tasks import read_bundle
from language.tasks.questions import Row, batched
from language.tasks.scores import check_tasks, check_tasks_of_run, load_tasks, parse_tasks, read_tasks
from tpu_utils.base.errors import InputError

pytest.importorskip("lm_eval", reason="requirements-evaluate.txt brings lm_eval")
BYTES = Bytes()
NAMES = {name: "mmlu_anatomy" if name == "mmlu" else name for name in MAKERS}


@pytest.fixture(scope="module", autouse=True)
def import_harness():
    """Seconds that no test's limit is for."""
    import language.tasks.harness  # noqa: F401


def rows_of(name: str, path: Path, T: int = 999, shots: int | None = None, limit: int = 0) -> list[Row]:
    return read_tasks({name: path}, BYTES, T, shots, limit).rows


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("hellaswag", {"label": "4"}, "question 2 of hellaswag: .* answer is 4, which is none of its 4 choices"),
        ("hellaswag", {"ctx_b": "[" * 1001}, "line 2: a value has 1,001 brackets"),
        ("arc_easy", {"answerKey": "Z"}, "question 2 of arc_easy: ValueError: 'Z' is not in list"),
        ("piqa", {"label": True}, "Expected integer, got bool"),
        ("piqa", {"label": -1}, "question 2 of piqa: .* answer is -1, which is none of its 2 choices"),
        ("piqa", {"sol2": "\ud800"}, "surrogates not allowed"),
        ("winogrande", {"answer": "3"}, "question 2 of winogrande: KeyError: '3'"),
        ("lambada", {"text": ["a"]}, "Could not convert|Expected bytes"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, name, change, message):
    folder = write_task(tmp_path, name, 9)
    path = next(path for path in folder.glob("*.jsonl") if path.stem in ("test", "validation"))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1] |= change
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(InputError, match=rf"(?s){path.parent}.*{message}"):
        rows_of(name, path)


def write_parquet(path: Path, records: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=7)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", MAKERS)
def test_no_damage_of_a_file_is_a_crash(tmp_path, name, kind):
    records = [MAKERS[name](random.Random(n), 2 * n) for n in range(3)]
    path = tmp_path / f"test.{kind}"
    if kind == "jsonl":
        contents = [content + b"\n" + json.dumps(records[0]).encode() for content in mutated_json(records[1], 60)]
    else:
        contents = mutated(write_parquet(path, records).read_bytes(), 60)
    assert refusals(path, contents, lambda: batched(rows_of(NAMES[name], path), 999, 4000, 1)) > 15


@pytest.mark.parametrize("name", MAKERS)
def test_rows_of_parquet_are_the_questions_of_json_lines(tmp_path, name):
    """As the hub has them: choices of ARC are a struct of two lists; with examples, from a folder of such files."""
    lines, rows, shots = write_task(tmp_path / "lines", name), tmp_path / "rows", 0 if name == "lambada" else 2
    rows.mkdir()
    for path in lines.glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        write_parquet(rows / f"{path.stem}-00000-of-00001.parquet", records)
    asked, expected = (rows_of(NAMES[name], folder, 999, shots) for folder in (rows, lines))
    assert [(row.tokens.tolist(), row.num_targets) for row in asked] == [
        (row.tokens.tolist(), row.num_targets) for row in expected
    ]
    for split in ("test", "validation"):
        (rows / f"{split}.parquet").touch(), (rows / f"{split}.jsonl").touch()
    with pytest.raises(InputError, match=r"has (\w*).jsonl and \1.*.parquet; expected one file of \1"):
        rows_of(NAMES[name], rows)


def test_a_wrong_file_is_one_message(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "test.jsonl", [MAKERS["lambada"](random.Random(0), 0)])
    path.write_bytes(path.read_bytes() + b"[]\n")
    with pytest.raises(InputError, match=r"test.jsonl, line 2: .*JSON object a line"):
        rows_of("lambada", path)
    path = write_parquet(tmp_path / "a.parquet", [dict(text="a b")])
    good = path.read_bytes()
    for content, message in ((good[:-9], "ends without the footer"), (b"{" + good, "begins with no parquet")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"a.parquet: .*{message}.*; expected questions of lambada"):
            rows_of("lambada", path)
    monkeypatch.setattr(task_files, "LARGEST_FILE", 1 << 18)
    shared = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 64, pyarrow.int32()), ["a" * (1 << 14)])
    for texts in (["a b " * 2000] * 99, shared):  # a dictionary makes it small
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
        with pytest.raises(InputError, match=r"a.parquet: more than 262,144 bytes or .* questions when it is unpacked"):
            rows_of("lambada", path, 9999)


def test_examples_need_a_file_of_them(tmp_path):
    folder = write_task(tmp_path / "arc", "arc_easy", 5)
    for name, path, shots, message in (
        ("arc_easy", folder / "test.jsonl", 2, "is one file, .*; num_fewshot 2 needs a folder with train.jsonl too"),
        ("arc_easy", folder, 7, "question 1 of arc_easy: ValueError: Sample larger than population"),
        ("lambada", write_task(tmp_path / "lambada", "lambada"), 1, "lambada_openai has no training set"),
        ("piqa", tmp_path, 0, "has no validation.jsonl, nor .parquet; expected one"),
        ("mmlu_virology", write_task(tmp_path / "mmlu", "mmlu"), 0, "no line whose subject is 'virology'"),
        ("hellswag", folder, 0, "expected a task of lm_eval; did you mean hellaswag?"),
    ):
        with pytest.raises(InputError, match=message):
            rows_of(name, path, 9999, shots)
    with pytest.raises(InputError, match="tasks names piqa twice"):
        parse_tasks(["piqa=a", "piqa=b"])
    (folder / "ARC-Easy").mkdir()
    (folder / "test.jsonl").rename(folder / "ARC-Easy" / "test.jsonl")  # as the hub divides a data set
    assert len(read_tasks({"arc_easy": folder}, BYTES, 9999).tasks["tasks"]["arc_easy"].eval_docs) == 5


def test_an_answer_longer_than_the_model_reads_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [dict(goal="g", sol1="short", sol2="l" * 50, label=0)])
    with pytest.raises(InputError, match=r"a.jsonl, question 1 of piqa: an answer of 51 tokens; expected 1 to 50"):
        rows_of("piqa", path, 50)
    assert [(len(row.tokens), row.num_targets) for row in rows_of("piqa", path, 51)] == [(26, 6), (52, 51)]


# ---------------------------------------------------------------------------------------------- a YAML file of the user
TASK = """task: mine
dataset_path: json
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}?"
doc_to_choice: "{{[right, wrong]}}"
doc_to_target: 0
metric_list:
  - metric: acc
"""
QUESTION = dict(question="one", right="a", wrong="b")


def test_a_task_in_yaml_asks_its_templates_and_downloads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", None)
    monkeypatch.setattr("socket.socket.connect", None)
    (tmp_path / "mine.yaml").write_text(TASK)
    path = write_lines(tmp_path / "q.jsonl", [QUESTION, QUESTION | dict(question="two")])
    (name,) = parse_tasks(["mine.yaml=q.jsonl"], tmp_path)
    harness = read_tasks({name: path}, BYTES, 99)
    assert [bytes(row.tokens[1:].tolist()) for row in harness.rows] == [b"one? a", b"one? b", b"two? a", b"two? b"]
    found = np.array([[1.0, 2, 0], [2.0, 2, 0], [2.0, 2, 0], [1.0, 2, 0]])
    assert harness.results(found)["fields"] == {"mine_accuracy": 0.5}


BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text + "process_docs: !function code.run\n", "'!function'.*no code that a YAML file names"),
        (lambda text: text + "include: other.yaml\n", "it has the key include"),
        (lambda text: text + "use_prompt: code:run\n", "it has the key use_prompt"),
        (lambda text: BOMB + text, "it has an alias"),
        (lambda text: "a: " + "[" * 3000, "no code that a YAML file names|recursion"),
        (lambda text: text.replace("metric: acc", "metric: code.py"), "'code.py' is a script, and no script is run"),
        (lambda text: text + "    hf_evaluate: true\n", "'acc' is a script, and no script is run"),
        (lambda text: text + "unsafe_code: true\n", "marked as unsafe"),
        (lambda text: text + "repeats: 4\n", "asks each question 4 times"),
        (lambda text: text.replace("{{question}}", "{{''.__class__.__mro__}}"), "SecurityError: access to attribute"),
        (lambda text: text.replace("{{question}}", "{{missing}}"), "'missing' is undefined"),
        (lambda text: text.replace("task: mine", "task: [a]"), "it has no text with the name `task`"),
        (lambda text: text + "#" * 70000, "expected 65,536 at most"),
    ],
)
def test_no_code_of_a_yaml_file_is_run(tmp_path, monkeypatch, change, message):
    """Nor what lies beside it, where lm_eval, evaluate and datasets would find it."""
    monkeypatch.chdir(tmp_path)
    for name in ("code.py", "json.py", "acc.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "other.yaml").write_text("process_docs: !function code.run\n")
    (tmp_path / "mine.yaml").write_text(change(TASK))
    path = write_lines(tmp_path / "q.jsonl", [QUESTION])
    with no_hang(), pytest.raises(InputError, match=rf"(?s){message}"):
        rows_of(str(tmp_path / "mine.yaml"), path)
    assert not (tmp_path / "ran").exists()


def test_no_script_beside_the_user_is_a_metric(tmp_path, monkeypatch):
    """lm_eval's own humaneval asks Hugging Face's evaluate for code_eval, which looks for it here first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code_eval").mkdir()
    (tmp_path / "code_eval" / "code_eval.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path = write_lines(tmp_path / "q.jsonl", [dict(task_id="a", prompt="", test="", entry_point="f")])
    with pytest.raises(InputError, match="metric 'code_eval' is a script, and no script is run"):
        rows_of("humaneval", path)
    assert not (tmp_path / "ran").exists()


def test_without_lm_eval_it_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval" or name == "language.tasks.harness"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delattr("language.tasks.harness")
    with pytest.raises(InputError, match=r"lm_eval is not installed; run pip install -r requirements-evaluate.txt"):
        check_tasks({"piqa": tmp_path})


# ---------------------------------------------------------------------------------------------------- nanochat's bundle
def test_no_damage_of_a_bundle_is_a_crash(tmp_path):
    bundle, refused = write_bundle(tmp_path / "bundle", 5), 0
    paths = ["core.yaml", "eval_meta_data.csv", *(f"eval_data/{uri}" for _, uri, *_ in BUNDLE)]
    for number, name in enumerate(paths):
        content = (bundle / name).read_bytes()
        with at_most(1 << 24):
            refused += refusals(bundle / name, mutated(content, 20, number), lambda: read_bundle(bundle, BYTES, 500))
        (bundle / name).write_bytes(content)
    assert 25 < refused < 20 * len(paths)
    read_bundle(bundle, BYTES, 500)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text.replace("world/made_choice", "../../made_choice"), "is no name inside a folder"),
        (lambda text: text.replace("multiple_choice", "generation"), "icl_task_type is 'generation'; expected"),
        (lambda text: text.replace("[2]", "[-2]"), "num_fewshot of 'made_choice' is '-2'; expected 0 to 1000"),
        (lambda text: text.replace("[2]", "[50]"), r"12 questions, each after 50 others; expected 51 or more"),
        (lambda text: text.replace("label: made_choice", "label: another"), "'another' has no random baseline"),
        (lambda text: text.replace("icl_tasks", "tasks"), "icl_tasks"),
        (lambda text: "icl_tasks: " + "[" * 3000, "core.yaml: "),
        (lambda text: BOMB + text.replace("schema", "*a39"), r"core.yaml: it has an alias"),
        (lambda text: text.replace("[2]", "!!python/object/apply:os.getcwd []"), "core.yaml: "),
        (lambda text: text + "#" * 70000, "expected 65,536 at most"),
    ],
)
def test_a_wrong_bundle_is_refused(tmp_path, change, message):
    path = write_bundle(tmp_path) / "core.yaml"
    path.write_text(change(path.read_text()))
    with no_hang(), pytest.raises(InputError, match=message):
        read_bundle(tmp_path, BYTES, 4000)


def test_numbers_and_quoted_lines_are_read_as_nanochat_does(tmp_path):
    bundle = write_bundle(tmp_path)
    path = bundle / "eval_data" / "made_schema.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [record | dict(continuation=42, gold=str(record["gold"])) for record in records])
    lines = "".join(f'{label},"of two\nlines",{percent}\n' for label, *_, percent in BUNDLE)
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Description,Random baseline\n" + lines)
    task = read_bundle(bundle, BYTES, 4000)[1]
    assert task.guessing == 0.5
    assert all(bytes(row.tokens[-3:].tolist()) == b" 42" for rows, _ in task.questions for row in rows)


@pytest.mark.parametrize(
    "content, said",
    [
        # 40 million [], a file of 120 MB, were 3 GB; so were 80 million lines that are no question
        (
            b"{}\n" + (b'{"q": [' + b"[]," * 1000 + b"[]]}\n") * 80,
            "more than 1,048,576 bytes or .* when it is unpacked",
        ),
        (b"ab\n" * (1 << 18), "line 1: Expecting value"),
        (b'{"q": "' + b"a" * (1 << 16) + b'"}', "line 1: it is empty, or longer than 65,536 bytes"),
    ],
    ids=range(3),
)
def test_json_lines_that_take_too_much_memory_are_refused(tmp_path, monkeypatch, content, said):
    monkeypatch.setattr(task_files, "LARGEST_FILE", 1 << 20)
    monkeypatch.setattr(task_files, "LONGEST_LINE", 1 << 16)
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with at_most(8 << 20), pytest.raises(InputError, match=rf"a.jsonl(: |, ){said}"):
        task_files.read_records(path, "questions")


# ------------------------------------------------------------------------------------------------------------- in a run


def test_hosts_get_their_rows_of_the_tasks(tmp_path):
    write_task(tmp_path / "piqa", "piqa", 30)
    options = dict(dataset="text", data_dir=str(tmp_path), train_data="x", tasks=("piqa=piqa",), global_batch_size=4)
    config = TransformerConfig(**options, sequence_length=128, task_questions=10)
    whole, halves = load_tasks(config), [load_tasks(config, part, 2) for part in (0, 1)]
    assert len(whole.result_of_row) == 20 and len(whole.batches) == 5
    for batch, *parts in zip(whole.batches, *(half.batches for half in halves), strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), batch)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_model_whose_losses_are_no_numbers_has_no_answers(tmp_path, wrong):
    write_task(tmp_path / "piqa", "piqa")
    options = dict(dataset="text", data_dir=str(tmp_path), train_data="x", tasks=("piqa=piqa",), global_batch_size=4)
    evaluation = load_tasks(TransformerConfig(**options, sequence_length=128))
    result = np.ones((sum(map(len, evaluation.batches)), 3))
    assert set(evaluation.fields(result)) == {"piqa_accuracy", "piqa_accuracy_norm"}
    result[evaluation.result_of_row[3], 0] = wrong
    assert evaluation.fields(result) == {}


def test_llmc_questions_are_known_by_their_first_bytes_and_need_no_tokenizer(tmp_path):
    """Beside JSON lines of another task, or alone, where nobody knows the tokenizer of the tokens."""
    write_task(tmp_path / "piqa", "piqa")
    asked = [MultipleChoice(n, n % 4, np.arange(5), [np.arange(1, 3 + m) for m in range(4)]) for n in range(6)]
    write_hellaswag(tmp_path / "q.bin", asked)
    options = dict(train_data="x", data_dir=str(tmp_path), sequence_length=256, global_batch_size=4)
    alone = TransformerConfig(**options, dataset="tokens", vocab_size=999, tasks=("hellaswag=q.bin",))
    both = TransformerConfig(**options, dataset="text", tasks=("piqa=piqa", "hellaswag=q.bin"), task_questions=4)
    for config, expected in ((alone, {"hellaswag": 6}), (both, {"piqa": 4, "hellaswag": 4})):
        check_tasks_of_run(config)
        harness = load_tasks(config)
        assert {name: task.instances[-1].doc_id + 1 for name, task in harness.tasks["tasks"].items()} == expected
    assert [row.num_targets for row in load_tasks(alone).rows[:4]] == [2, 3, 4, 5]
    (tmp_path / "q.bin").write_bytes((tmp_path / "q.bin").read_bytes()[:-4])
    for read in (check_tasks_of_run, load_tasks):
        with pytest.raises(InputError, match=r"q.bin: example 5 of 6, byte .*copy the file again"):
            read(alone)


def test_what_a_run_cannot_ask_is_refused(tmp_path):
    write_task(tmp_path / "piqa", "piqa")
    options = dict(train_data="x", data_dir=str(tmp_path))
    with pytest.raises(InputError, match="the tokenizer of a vocabulary of 999 is unknown; name it with --tokenizer"):
        load_tasks(TransformerConfig(**options, dataset="tokens", tasks=("piqa=piqa",), vocab_size=999))
    write_lines(tmp_path / "gsm8k.jsonl", [dict(question="1 + 1?", answer="It is #### 2")])
    (tmp_path / "zero.yaml").write_text("task: zero\ntest_split: test\ndoc_to_text: question\ndoc_to_target: answer\n")
    config = TransformerConfig(**options, dataset="text", tasks=("zero.yaml=gsm8k.jsonl",))
    check_tasks_of_run(config)
    with pytest.raises(InputError, match="tasks ask for texts, which no run writes; ask them of a checkpoint"):
        load_tasks(config)
