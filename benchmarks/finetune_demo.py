"""A fine-tune that works: a small Llama learns a text, then made chats, then answers about words it has not seen.

Run:     python benchmarks/finetune_demo.py TEXT --work runs/finetune
             TEXT: a text in English, such as tinyshakespeare.txt
         python benchmarks/finetune_demo.py TEXT --work runs/finetune --lora_rank 8
             adapters instead of all weights, beside it
Prints:  every command it runs, then a table: of the answers about held-out words, how many have the trained format,
         how many are right; before fine-tuning and after. Exit code 1 unless all have the format after it.

The chats are made of the text's own words: four tasks for each, such as "Reverse crown." and "nworc". Words of the
validation set stand in no training question. Each stage is one command of the scripts, with --resume auto, so a demo
that was stopped goes on where it was.
"""

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name, question, right answer, what any answer of the trained format looks like
TASKS = [
    ("spell", "Spell {word}.", lambda word: "-".join(word), r"[a-z](-[a-z])+"),
    ("twice", "Say {word} twice.", lambda word: f"{word} {word}", r"[a-z]+ [a-z]+"),
    ("count", "How long is {word}?", lambda word: f"{word} has {len(word)} letters.", r"[a-z]+ has \d letters\."),
    ("reverse", "Reverse {word}.", lambda word: word[::-1], r"[a-z]+"),
]
TRAINING_WORDS, VALIDATION_WORDS, ASKED_WORDS = 4000, 200, 25
PRETRAINING = ["--model_size=llama_tiny", "--num_layers=4", "--sequence_length=128", "--num_steps=600"]
PRETRAINING += ["--learning_rate=3e-3"]
FINE_TUNING = ["--sequence_length=128", "--num_steps=900", "--learning_rate=2e-3"]
BOTH = ["--global_batch_size=16", "--warmup_steps=50", "--log_every=50", "--eval_every=150", "--eval_batches=20"]
BOTH += ["--save_every=300", "--resume=auto"]


def words_of(text: str, seed: int) -> tuple[list[str], list[str]]:
    """(words to train on, held-out words) of 3 to 7 small letters, each once."""
    words = sorted(set(re.findall(r"(?<![\w'])[a-z]{3,7}(?![\w'])", text)))
    random.Random(seed).shuffle(words)
    if len(words) < 2 * VALIDATION_WORDS:
        sys.exit(f"{len(words)} words of 3 to 7 letters in the text; expected {2 * VALIDATION_WORDS} or more")
    held_out = words[:VALIDATION_WORDS]
    return words[VALIDATION_WORDS : VALIDATION_WORDS + TRAINING_WORDS], held_out


def write_chats(path: Path, words: list[str], seed: int) -> None:
    """Every task for every word, shuffled, as JSON lines."""
    source = random.Random(seed)
    lines = []
    for word in words:
        for _, question, answer, _ in TASKS:
            asked = {"role": "user", "content": question.format(word=word)}
            lines.append({"messages": [asked, {"role": "assistant", "content": answer(word)}]})
    source.shuffle(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(*options: str | Path) -> str:
    """What a script prints. Ends this process when it fails."""
    command = [sys.executable, *map(str, options)]
    shown = " ".join(shlex.quote(word) for word in ["python", *command[1:]])
    print(f"$ {shown[:500]}{' ...' if len(shown) > 500 else ''}", flush=True)
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    if done.returncode:
        sys.exit(f"exit code {done.returncode}\n{done.stdout[-3000:]}")
    print(
        "\n".join(line for line in done.stdout.splitlines() if re.match("model|data|result|seconds", line)), flush=True
    )
    return done.stdout


def ask(run_dir: Path, words: list[str]) -> list[tuple[str, str, str, bool, bool]]:
    """(task, question, answer, whether it has the format, whether it is right), at temperature 0."""
    asked = [(task, task[1].format(word=word), word) for task in TASKS for word in words]
    greedy = ["--chat_format", "plain", "--temperature", "0", "--num_tokens", "40"]
    questions = [question for _, question, _ in asked]
    printed = run("tools.generate", "--run_dir", run_dir, *greedy, "--chat", *questions)
    answers = printed.removesuffix("\n").split("\n---\n")
    if len(answers) != len(asked):  # an untrained model can say the line that divides answers
        answers = (answers + [""] * len(asked))[: len(asked)]
    return [
        (
            name,
            question,
            answer.removeprefix(" "),
            re.fullmatch(f" {form}", answer) is not None,
            answer == " " + right(word),
        )
        for ((name, _, right, form), question, word), answer in zip(asked, answers, strict=True)
    ]


def table(found: dict[str, list[tuple]]) -> None:
    print(f"\n{'task':10}" + "".join(f"{stage + ': format':>24}{'right':>8}" for stage in found))
    for name in [task[0] for task in TASKS]:
        rows = {stage: [row for row in rows if row[0] == name] for stage, rows in found.items()}
        counts = [(sum(row[3] for row in of), sum(row[4] for row in of), len(of)) for of in rows.values()]
        print(f"{name:10}" + "".join(f"{f'{form} of {n}':>24}{right:>8}" for form, right, n in counts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for runs, weights and chats")
    parser.add_argument("--lora_rank", type=int, default=0, help="0: all weights are trained")
    parser.add_argument("--until", choices=("pretrained", "end"), default="end")
    options = parser.parse_args()
    text, work = options.text.resolve(), options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    words, held_out = words_of(text.read_text(), seed=0)
    write_chats(work / "chats.jsonl", words, seed=1)
    write_chats(work / "held_out.jsonl", held_out, seed=2)
    pretrained, weights = work / "pretrained", work / "weights"
    of_text = ["--dataset=text", f"--data_dir={text.parent}", f"--train_data={text.name}"]
    run("transformer_tpu.py", *of_text, *PRETRAINING, *BOTH, "--run_dir", pretrained)
    if options.until == "pretrained":
        return 0
    if not weights.exists():
        run("tools.convert_hf", "export", pretrained, weights)
    of_chats = ["--dataset=chat", f"--data_dir={work}", "--train_data=chats.jsonl", "--validation_data=held_out.jsonl"]
    lora = [f"--lora_rank={options.lora_rank}"] if options.lora_rank else []
    tuned = work / (f"lora_{options.lora_rank}" if lora else "finetuned")
    start = ["--initial_weights", weights]
    run("transformer_tpu.py", *start, *of_chats, *FINE_TUNING, *BOTH, *lora, "--run_dir", tuned)
    run("tools.plot_run", pretrained, tuned, "--output", work / f"{tuned.name}.png")
    asked = held_out[:ASKED_WORDS]
    found = {"before": ask(pretrained, asked), tuned.name: ask(tuned, asked)}
    table(found)
    for name, question, answer, _, right in found[tuned.name][::ASKED_WORDS]:
        print(f"{name:10}{question!r} -> {answer!r}{'' if right else ', which is wrong'}")
    (work / f"{tuned.name}.json").write_text(json.dumps(found, indent=1))
    return 0 if all(row[3] for row in found[tuned.name]) else 1


if __name__ == "__main__":
    sys.exit(main())
