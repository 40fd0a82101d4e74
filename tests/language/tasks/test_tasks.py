"""Files of tasks: what is refused, by file and line; no damage is a crash; rows in batches of few shapes."""

import json
import random
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from made_tasks import BUNDLE, MAKERS, write_bundle, write_lines, write_task
from mutations import NO_OBJECT, NOT_JSON, at_most, make_irregular, mutated, mutated_json, no_hang

from language.data.llmc_files import MultipleChoice, write_hellaswag
from language.data.tokenizer import Bytes
from language.options.shapes import START
from language.options.transformer_options import TransformerConfig
from language.tasks import task_files
from language.tasks.core_tasks import read_bundle
from language.tasks.questions import Question, Row, Task, answers, batched
from language.tasks.scores import (
    CORE,
    READERS,
    check_tasks,
    encode_pair,
    load_tasks,
    parse_tasks,
    read_task,
    read_tasks,
)
from tpu_utils.base.errors import InputError

BYTES = Bytes()


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("hellaswag", {"label": "4"}, "label is '4'; expected 0 or 1 or 2 or 3"),
        ("hellaswag", {"label": ""}, "label is ''"),
        ("hellaswag", {"endings": []}, "expected endings, a list of 1 to 64 texts"),
        ("hellaswag", {"endings": "abcd"}, "expected endings, a list"),
        ("hellaswag", {"ctx_b": None}, "expected ctx_b, a text"),
        ("arc_easy", {"answerKey": "Z"}, "answerKey is 'Z'; expected A or B"),
        ("arc_easy", {"choices": ["a", "b"]}, "expected text, a list"),
        ("piqa", {"label": True}, "label is True; expected 0 or 1"),
        ("piqa", {"label": -1}, "label is -1"),
        ("piqa", {"sol2": "\ud800"}, "surrogates not allowed"),
        ("winogrande", {"sentence": "no gap"}, "sentence has no _"),
        ("winogrande", {"answer": "3"}, "answer is '3'; expected 1 or 2"),
        ("mmlu", {"choices": ["a", "b", "c"]}, "3 choices; expected 4"),
        ("mmlu", {"subject": 7}, "expected subject, a text"),
        ("lambada", {"text": ["a"]}, "expected text, a text"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, name, change, message):
    path = next(write_task(tmp_path, name, 9).glob("[tv]e*.jsonl" if name in ("mmlu", "lambada") else "[tv]*.jsonl"))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1] |= change
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(InputError, match=rf"{path.name}, line 2: no question of {name}: .*{message}"):
        read_task(name, path, BYTES, 999)


@pytest.mark.parametrize("line", [*NOT_JSON, *NO_OBJECT])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    if b"\n" in line:
        return
    path = write_lines(tmp_path / "test.jsonl", [MAKERS["lambada"](random.Random(0), 0)])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(InputError, match=r"test.jsonl, line 2: .*JSON object a line"):
        read_task("lambada", path, BYTES, 999)


@pytest.mark.parametrize("name", MAKERS)
def test_no_damage_of_a_file_is_a_crash(tmp_path, name):
    record = MAKERS[name](random.Random(5), 1)
    path, refused = tmp_path / "test.jsonl", 0
    for content in mutated_json(record, 150):
        path.write_bytes(content + b"\n" + json.dumps(record).encode())
        with no_hang(), at_most(1 << 24):
            try:
                (task,) = read_tasks(name, path, BYTES, 500)
                batched(task.rows, 500, 4000, 1)
            except InputError as error:
                assert "test.jsonl, line " in str(error)
                refused += 1
    assert 50 < refused < 150


def write_parquet(path, records: list[dict], **schema):
    columns = {name: pyarrow.array([record[name] for record in records], schema.get(name)) for name in records[0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return path


@pytest.mark.parametrize("name", MAKERS)
def test_rows_of_parquet_are_the_questions_of_json_lines(tmp_path, name):
    """As the hub has them: choices of ARC are a struct of two lists; with examples, from a folder of such files."""
    lines, rows, shots = write_task(tmp_path / "lines", name), tmp_path / "rows", 0 if name == "lambada" else 2
    rows.mkdir()
    for path in lines.glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        write_parquet(rows / f"{path.stem}-00000-of-00001.parquet", records)
    asked, expected = (read_task(name, folder, BYTES, 999, shots) for folder in (rows, lines))
    assert len(asked.questions) == 20 and asked.guessing == expected.guessing
    for one, other in zip(asked.questions, expected.questions, strict=True):
        assert (one.answer, one.lengths) == (other.answer, other.lengths)
        for row, same in zip(one.rows, other.rows, strict=True):
            np.testing.assert_array_equal(row.tokens, same.tokens)
            assert row.num_targets == same.num_targets
    (rows / "test.parquet").touch(), (rows / "test.jsonl").touch()
    with pytest.raises(InputError, match=r"has test.jsonl and test.*.parquet; expected one file of test"):
        read_task(name, rows, BYTES, 999)


@pytest.mark.parametrize("name", MAKERS)
def test_no_damage_of_parquet_is_a_crash(tmp_path, name):
    records = [MAKERS[name](random.Random(n), n) for n in range(3)]
    path, refused = write_parquet(tmp_path / "test.parquet", records), 0
    for content in mutated(path.read_bytes(), 60):
        path.write_bytes(content)
        with no_hang():
            try:
                read_task(name, path, BYTES, 999)
            except InputError as error:
                assert "test.parquet" in str(error)
                refused += 1
    assert refused > 30


def test_a_wrong_parquet_file_is_one_message(tmp_path, monkeypatch):
    good = [MAKERS["arc_easy"](random.Random(n), n) for n in range(9)]
    path = write_parquet(tmp_path / "a.parquet", [*good, good[0] | {"answerKey": "Z"}])
    with pytest.raises(InputError, match=r"a.parquet, row 10: no question of arc_easy: answerKey is 'Z'; expected"):
        read_task("arc_easy", path, BYTES, 999)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"a.parquet: ends without the footer of parquet; expected arc_easy's"):
        read_task("arc_easy", path, BYTES, 999)
    write_lines(path, good)
    with pytest.raises(InputError, match=r"a.parquet: .* begins with no parquet; expected arc_easy's questions"):
        read_task("arc_easy", path, BYTES, 999)
    write_parquet(path, good, choices=pyarrow.map_(pyarrow.string(), pyarrow.list_(pyarrow.string())))
    with pytest.raises(InputError, match=r"a.parquet, row 1: no question of arc_easy: expected text, a list"):
        read_task("arc_easy", path, BYTES, 999)
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(InputError, match=r"a.parquet: no question; expected lambada's questions"):
        read_task("lambada", path, BYTES, 999)
    write_parquet(path, [dict(text="a b " * 2000)] * 99)  # a dictionary makes it small
    monkeypatch.setattr(task_files, "LARGEST_FILE", 1 << 18)
    with pytest.raises(InputError, match=r"a.parquet: more than 262,144 bytes or .* questions when it is unpacked"):
        read_task("lambada", path, BYTES, 9999)


def test_no_damage_of_a_bundle_is_a_crash(tmp_path):
    bundle, refused = write_bundle(tmp_path / "bundle", 5), 0
    paths = ["core.yaml", "eval_meta_data.csv", *(f"eval_data/{uri}" for _, uri, *_ in BUNDLE)]
    for number, name in enumerate(paths):
        content = (bundle / name).read_bytes()
        for damaged in mutated(content, 40, number):
            (bundle / name).write_bytes(damaged)
            with no_hang(), at_most(1 << 24):
                try:
                    read_bundle(bundle, BYTES, 500)
                except InputError:
                    refused += 1
        (bundle / name).write_bytes(content)
    assert 50 < refused < 40 * len(paths)
    read_bundle(bundle, BYTES, 500)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text.replace("world/made_choice", "../../made_choice"), "is no name inside a folder"),
        (
            lambda text: text.replace("multiple_choice", "generation"),
            "icl_task_type is 'generation'; expected multiple",
        ),
        (lambda text: text.replace("[2]", "[-2]"), "num_fewshot of 'made_choice' is '-2'; expected 0 to 1000"),
        (lambda text: text.replace("[2]", "[50]"), r"12 questions, each after 50 others; expected 51 or more"),
        (lambda text: text.replace("label: made_choice", "label: another"), "'another' has no line in eval_meta_data"),
        (lambda text: text.replace("icl_tasks", "tasks"), "icl_tasks"),
        (lambda text: "icl_tasks: " + "[" * 30000, "core.yaml: "),
        (lambda text: "a: &a [1,1]\n" + text.replace("[2]", "!!python/object/apply:os.getcwd []"), "core.yaml: "),
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
    lines = write_lines(path, [record | dict(continuation=42, gold=str(record["gold"])) for record in records])
    (bundle / "eval_meta_data.csv").write_text(
        "Eval Task,Description,Random baseline\n"
        + "".join(f'{label},"of two\nlines",{percent}\n' for label, *_, percent in BUNDLE)
    )
    task = read_bundle(bundle, BYTES, 4000)[1]
    assert lines.exists() and task.guessing == 0.5
    assert all(bytes(row.tokens[-3:].astype(np.uint8)) == b" 42" for row in task.rows)


@pytest.mark.parametrize("level", ["\n  <<: [*a{0}, *a{0}]", " [*a{0}, *a{0}]"])
def test_aliases_of_yaml_do_not_multiply(tmp_path, level):
    """A safe loader of PyYAML would make 2 ** 40 of these, and so would a message that shows a list of lists."""
    path, levels = write_bundle(tmp_path) / "core.yaml", "a0: &a0 {x: 1}\n"
    levels += "".join(f"a{n}: &a{n}{level.format(n - 1)}\n" for n in range(1, 40))
    path.write_text(levels + path.read_text().replace("schema", "*a39"))
    with no_hang(), at_most(1 << 24), pytest.raises(InputError, match=r"core.yaml: it has an alias"):
        read_bundle(tmp_path, BYTES, 4000)


@pytest.mark.parametrize("kind", ["FIFO", "folder", "character device", "nothing"])
def test_what_is_no_file_is_refused(tmp_path, kind):
    path = make_irregular(tmp_path / "x.jsonl", kind)
    with no_hang(), pytest.raises(InputError, match=r"x.jsonl"):
        read_task("piqa", path, BYTES, 99)


def test_examples_need_a_file_of_them(tmp_path):
    folder = write_task(tmp_path / "arc", "arc_easy", 5)
    with pytest.raises(InputError, match=r"is one file, .*; num_fewshot 2 needs a folder with train.jsonl too"):
        read_task("arc_easy", folder / "test.jsonl", BYTES, 9999, 2)
    with pytest.raises(InputError, match=r"test.jsonl, line 1: 6 examples to draw 7 from; choose a smaller"):
        read_task("arc_easy", folder, BYTES, 9999, 7)
    with pytest.raises(InputError, match="lambada has no training set"):
        read_task("lambada", write_task(tmp_path / "lambada", "lambada"), BYTES, 9999, 1)
    with pytest.raises(InputError, match=r"has no test.jsonl and no validation.jsonl"):
        read_task("piqa", tmp_path, BYTES, 99)
    with pytest.raises(InputError, match="tasks names piqa twice"):
        parse_tasks(["piqa=a", "piqa=b"])


def test_an_answer_longer_than_the_model_reads_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [dict(goal="g", sol1="short", sol2="l" * 50, label=0)])
    with pytest.raises(InputError, match=r"a.jsonl, line 1: an answer of 51 tokens; expected 1 to 50, what"):
        read_task("piqa", path, BYTES, 50)
    (question,) = read_task("piqa", path, BYTES, 51).questions
    assert [(len(row.tokens), row.num_targets) for row in question.rows] == [(26, 6), (52, 51)]


def test_pairs_are_encoded_as_the_harness_does():
    assert encode_pair(BYTES, "a  ", " b") == ([256, *b"a   b"], 4), "spaces go to what follows"
    assert encode_pair(BYTES, "", " b") == ([256, *b" b"], 2)


def test_batches_have_few_shapes_and_results_find_their_rows():
    draw = np.random.default_rng(0)
    rows = [Row(draw.integers(1, 200, size).astype(np.int32), int(size // 2)) for size in draw.integers(2, 601, 70)]
    for packed in (False, True):
        batches, places = batched(rows, 600, 2400, 2, packed=packed)
        assert {batch.shape for batch in batches} == {(18, 129), (8, 257), (4, 513), (4, 601)}
        found = np.concatenate([np.pad(b, ((0, 0), (0, 601 - b.shape[1])), constant_values=-1) for b in batches])
        start = START if packed else 0
        for row, place in zip(rows, places, strict=True):
            stored, size = found[place], len(row.tokens)
            assert (stored[: size - row.num_targets] < 0).all() and (stored[size:] < 0).all()
            assert stored[0] == ~(start + row.tokens[0])
            read = np.where(stored < 0, ~stored, stored)
            assert (read[1:size] == row.tokens[1:]).all()
        others = np.delete(found, places, 0)
        assert (others < 0).all() and len(found) == len(places) + len(others)


def test_how_answers_are_chosen():
    row = Row(np.arange(3, dtype=np.int32), 2)
    two = [Question([row] * 2, 1, (10, 2)), Question([row] * 2, 0, (4, 4))]
    found = np.array([[4.0, 2, 0], [3.0, 1, 0], [5.0, 5, 0], [5.0, 2, 0]])
    said = answers(Task("a", "likelihood", two, 0.5), found)
    assert said.chosen == [1, 0] and said.chosen_norm == [0, 0], "of equal ones the first"
    assert said.accuracy == 1 and said.accuracy_norm == 0.5 and said.stderr == 0 and said.centered == 1
    assert answers(Task("a", "per_token", two, 0.5), found).chosen == [0, 0]
    found[0] = 0.0, 0, 0  # no target: nan in nanochat, which is chosen if it comes first
    assert answers(Task("a", "per_token", two, 0.5), found).chosen == [0, 0]
    one = [Question([row], 0)] * 3
    said = answers(Task("a", "greedy", one, 0.0), np.array([[1.0, 2, 2], [1.0, 2, 1], [0.0, 0, 0]]))
    assert said.chosen == [0, -1, -1] and said.accuracy == 1 / 3 and said.perplexity == pytest.approx(np.exp(2 / 3))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("how", ["likelihood", "per_token", "greedy"])
def test_a_loss_that_is_no_number_is_no_answer(how, wrong):
    row = Row(np.arange(3, dtype=np.int32), 2)
    questions = [Question([row] * (1 if how == "greedy" else 2), 0, (4, 4))] * 2
    found = np.array([[wrong, 2.0, 2.0]] * 2 * len(questions[0].rows))
    said = answers(Task("a", how, questions, 0.25), found)
    assert said.chosen == [-1, -1] and said.accuracy == 0 and (how == "greedy" or said.accuracy_norm == 0)


def test_hosts_get_their_rows_of_the_tasks(tmp_path):
    write_task(tmp_path / "piqa", "piqa", 30)
    options = dict(dataset="text", data_dir=str(tmp_path), train_data="x", tasks=("piqa=piqa",), global_batch_size=4)
    config = TransformerConfig(**options, sequence_length=128, task_questions=10)
    whole, halves = load_tasks(config), [load_tasks(config, part, 2) for part in (0, 1)]
    assert len(whole.places) == 20 and len(whole.batches) == 5
    for batch, *parts in zip(whole.batches, *(half.batches for half in halves), strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), batch)
    assert load_tasks(TransformerConfig(**options | dict(tasks=()))).batches == []


def test_llmc_questions_are_known_by_their_first_bytes_and_need_no_tokenizer(tmp_path):
    """Beside JSON lines of another task, or alone, where nobody knows the tokenizer of the tokens."""
    write_task(tmp_path / "piqa", "piqa")
    asked = [MultipleChoice(n, n % 4, np.arange(5), [np.arange(1, 3 + m) for m in range(4)]) for n in range(6)]
    write_hellaswag(tmp_path / "q.bin", asked)
    options = dict(train_data="x", data_dir=str(tmp_path), sequence_length=256, global_batch_size=4)
    alone = TransformerConfig(**options, dataset="tokens", vocab_size=999, tasks=("hellaswag=q.bin",))
    both = TransformerConfig(**options, dataset="text", tasks=("piqa=piqa", "hellaswag=q.bin"), task_questions=4)
    for config, expected in ((alone, {"hellaswag": 6}), (both, {"piqa": 4, "hellaswag": 4})):
        check_tasks(config)
        assert {task.name: len(task.questions) for task in load_tasks(config).tasks} == expected
    (task,) = load_tasks(alone).tasks
    assert task.how == "per_token" and [question.answer for question in task.questions] == [n % 4 for n in range(6)]
    assert [row.num_targets for row in task.questions[0].rows] == [2, 3, 4, 5]
    (tmp_path / "q.bin").write_bytes((tmp_path / "q.bin").read_bytes()[:-4])
    for read in (check_tasks, load_tasks):
        with pytest.raises(InputError, match=r"q.bin: example 5 of 6, byte .*copy the file again"):
            read(alone)


def test_a_vocabulary_of_an_unknown_tokenizer_is_refused(tmp_path):
    write_task(tmp_path / "piqa", "piqa")
    options = dict(dataset="tokens", train_data="x", tasks=("piqa=piqa",), data_dir=str(tmp_path), vocab_size=999)
    with pytest.raises(InputError, match="the tokenizer of a vocabulary of 999 is unknown; name it with --tokenizer"):
        load_tasks(TransformerConfig(**options))
    assert set(MAKERS) == READERS.keys() - {"arc_challenge"} and CORE not in READERS


def test_brackets_that_nobody_closes_take_no_square_of_their_number():
    """100 kB of [ took half a minute. What is taken out is what the harness's expression takes out."""
    with no_hang():
        assert task_files.tidied("[" * 200_000) == "[" * 200_000
        assert task_files.tidied("[a]" + "[" * 100_000 + "\n]b[c]d[") == "[" * 100_000 + "\n]bd["
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choice("[] a\n") for _ in range(draw.randrange(20)))
        assert task_files.tidied(text) == re.sub(r"\[.*?\]", "", text.strip()).replace("  ", " ")


def test_a_value_that_many_rows_share_counts_as_often(tmp_path, monkeypatch):
    monkeypatch.setattr(task_files, "LARGEST_FILE", 1 << 20)
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 64, pyarrow.int32()), ["a" * (1 << 17)])
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"more than 1,048,576 bytes or .* questions when it is unpacked"):
        task_files.read_records(tmp_path / "a.parquet", "questions")


def test_lists_take_more_memory_than_their_letters(tmp_path, monkeypatch):
    """40 million [], a file of 120 MB, were 3 GB; so were 80 million lines that are no question."""
    monkeypatch.setattr(task_files, "LARGEST_FILE", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n" + ('{"choices": [' + "[]," * 1000 + "[]]}\n") * 80)
    with pytest.raises(InputError, match=r"a.jsonl: more than 1,048,576 bytes or .* questions when it is unpacked"):
        task_files.read_records(path, "questions")
    path.write_bytes(b"ab\n" * (1 << 18))
    with at_most(1 << 20), pytest.raises(InputError, match=r"a.jsonl, line 1: Expecting value"):
        task_files.read_records(path, "questions")
    monkeypatch.setattr(task_files, "LONGEST_LINE", 1 << 16)
    path.write_bytes(b'{"q": "' + b"a" * (1 << 16) + b'"}')
    with pytest.raises(InputError, match=r"a.jsonl, line 1: it is empty, or longer than 65,536 bytes"):
        task_files.read_records(path, "questions")
