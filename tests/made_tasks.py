"""Small files of tasks, with what trips readers up: letters of several bytes, spaces at ends, texts that are too long,
choices that are equal or begin alike. And an evaluation bundle of nanochat."""

import json
import random
from pathlib import Path

WORDS = (
    "to be or not to be that is the question whether nobler mind suffer slings arrows Öl 雪 naïve \N{SNOWMAN}".split()
)


def words(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


def hellaswag(draw: random.Random, n: int) -> dict:
    endings = [words(draw, 1, 9) + draw.choice(["", " [step]", "  ", "."]) for _ in range(4)]
    if n % 7 == 0:
        endings[3] = endings[0]
    context = words(draw, 3, 20) if n % 5 else words(draw, 90, 110)
    return dict(
        activity_label=words(draw, 1, 2),
        ctx_a=context + " [title]",
        ctx_b=words(draw, 0, 2).upper(),
        ctx=context,
        endings=endings,
        label=str(draw.randrange(4)),
    )


def arc(draw: random.Random, n: int) -> dict:
    labels = "1234" if n % 3 == 0 else "ABCDE"[: 3 + n % 3]
    choices = dict(text=[words(draw, 1, 4) for _ in labels], label=list(labels))
    return dict(question=words(draw, 4, 15) + "?", choices=choices, answerKey=draw.choice(labels))


def piqa(draw: random.Random, n: int) -> dict:
    solutions = [words(draw, 2, 12) + " " * (n % 2) for _ in range(2)]
    return dict(goal=words(draw, 2, 8), sol1=solutions[0], sol2=solutions[1], label=draw.randrange(2))


def winogrande(draw: random.Random, n: int) -> dict:
    sentence = f"{words(draw, 2, 9)} _ {words(draw, 2, 9)}."
    return dict(sentence=sentence, option1=words(draw, 1, 2), option2=words(draw, 1, 2), answer=draw.choice("12"))


def lambada(draw: random.Random, n: int) -> dict:
    return dict(text=words(draw, 90, 120) if n % 6 == 5 else words(draw, 1, 20) + draw.choice([" be", "", " the"]))


def mmlu(draw: random.Random, n: int) -> dict:
    subject = ("anatomy", "high_school_biology")[n % 2]
    choices = [words(draw, 1, 5) for _ in range(4)]
    return dict(question=f" {words(draw, 3, 12)} ", subject=subject, choices=choices, answer=draw.randrange(4))


MAKERS = dict(hellaswag=hellaswag, arc_easy=arc, piqa=piqa, winogrande=winogrande, lambada=lambada, mmlu=mmlu)
TESTED = dict.fromkeys(("arc_easy", "arc_challenge", "mmlu", "lambada"), "test")


def write_lines(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def write_task(folder: Path, name: str, count: int = 20) -> Path:
    """folder/test.jsonl or validation.jsonl, and train.jsonl or dev.jsonl."""
    draw = random.Random(name)
    records = [MAKERS[name](draw, n) for n in range(2 * count)]
    write_lines(folder / f"{TESTED.get(name, 'validation')}.jsonl", records[:count])
    trained = records[count - 1 :]  # a question among its own examples
    write_lines(folder / ("dev.jsonl" if name == "mmlu" else "train.jsonl"), trained)
    return folder


BUNDLE = [  # label, dataset_uri, icl_task_type, num_fewshot, continuation_delimiter, random baseline in percent
    ("made_choice", "world/made_choice.jsonl", "multiple_choice", 2, "\nAnswer: ", 33.3),
    ("made_schema", "made_schema.jsonl", "schema", 0, " ", 50.0),
    ("made_language", "made_language.jsonl", "language_modeling", 1, " ", 0.0),
]


def write_bundle(folder: Path, count: int = 12) -> Path:
    """A bundle with a task of each kind, two of them with examples before each question."""
    draw = random.Random("core")
    made: dict[str, list[dict]] = {"made_choice": [], "made_schema": [], "made_language": []}
    for n in range(count):
        start = words(draw, 1, 3)
        choices = [start + " " + words(draw, 1, 4), words(draw, 1, 4), start + words(draw, 1, 2)]
        query = words(draw, 3, 12) if n % 4 else words(draw, 80, 100)
        made["made_choice"].append(dict(query=query, choices=choices, gold=draw.randrange(3)))
        options = [words(draw, 1, 8) for _ in range(2)]
        schema = dict(context_options=options, continuation=words(draw, 2, 6), gold=draw.randrange(2))
        made["made_schema"].append(schema)
        context = words(draw, 2, 12) + " " * (n % 3)
        made["made_language"].append(dict(context=context, continuation=draw.choice(["be", "the mind"])))
    listed, guessing = "icl_tasks:\n", "Eval Task,Task Category,Random baseline\n"
    for label, uri, kind, shots, delimiter, percent in BUNDLE:
        listed += f"-\n  label: {label}\n  dataset_uri: {uri}\n  num_fewshot: [{shots}]\n  icl_task_type: {kind}\n"
        listed += f"  continuation_delimiter: {json.dumps(delimiter)}\n" if delimiter != " " else ""
        guessing += f"{label},made,{percent}\n"
        write_lines(folder / "eval_data" / uri, made[label])
    (folder / "core.yaml").write_text(listed)
    (folder / "eval_meta_data.csv").write_text(guessing)
    return folder
