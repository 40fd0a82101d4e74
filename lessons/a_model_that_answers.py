# %% [markdown]
# # A model that answers
# From a text to a model that answers questions, in one sitting: a tokenizer, training on text, training on
# conversations, questions, a file for others. These are the stages of `tools.speedrun`, by hand, for a world so small
# that a minute of a CPU is enough to learn it. Each stage is one command of this project.

# %%
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path.cwd() if Path("tpu_utils").is_dir() else Path.cwd().parent
WORK = Path(tempfile.mkdtemp())
FASTER = {"XLA_FLAGS": "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"}  # it compiles sooner


def run(*words, show=".*"):
    """Runs `python WORDS` in the folder of the lesson; prints the command and the lines that match."""
    print("$ python", *words)
    command = [sys.executable, *(str(ROOT / word) if word.endswith("_tpu.py") else word for word in words)]
    environment = os.environ | FASTER | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=WORK, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    lines = [line for line in done.stdout.splitlines() if re.match(show, line)]
    print("\n".join(lines))
    return lines


# %% [markdown]
# ## The world
# 30 animals; each lives somewhere and eats something. The text says so, in random order, again and again:

# %%
ANIMALS = "cat dog cow horse fox wolf bear owl duck frog goat sheep mouse snake eagle seal bat ant bee crab"
ANIMALS = f"{ANIMALS} lion tiger hen goose pig deer hare crow moth carp".split()
PLACES = "house yard barn field wood hill cave tree pond lake".split()
FOODS = "fish meat grass hay eggs mice honey seeds bread leaves".split()
draw = random.Random(0)
lives = {animal: draw.choice(PLACES) for animal in ANIMALS}
eats = {animal: draw.choice(FOODS) for animal in ANIMALS}


def facts():
    """A paragraph for each animal, in random order."""
    pairs = [[f"The {one} lives in the {lives[one]}.", f"The {one} eats {eats[one]}."] for one in ANIMALS]
    return [" ".join(draw.sample(pair, 2)) for pair in draw.sample(pairs, len(pairs))]


text = "\n".join(line for _ in range(150) for line in facts()) + "\n"
(WORK / "world.txt").write_text(text)
print(f"{len(text):,} characters, {2 * len(ANIMALS)} facts; it begins:", *text.splitlines()[:4], sep="\n  ")

# %% [markdown]
# ## 1. A tokenizer, and tokens
# A model reads numbers. Byte pair encoding makes a number of what stands together often:

# %%
run("-m", "tools.train_tokenizer", "world.txt", "--vocab_size", "384", "--output", "tokenizer", show="$^")
run("-m", "tools.prepare_data", "world.txt", "--output", "shards/world", "--tokenizer", "tokenizer", show="$^")
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(str(WORK / "tokenizer" / "tokenizer.json"))
sentence = text.splitlines()[0]
encoded = tokenizer.encode(sentence)
print(sentence, "->", encoded.ids, [token.replace("\u0120", "_") for token in encoded.tokens])

# %% [markdown]
# ## 2. Training on text
# The model learns to say the next token. Two layers of Llama's kind, of random weights:

# %%
SIZES = ["--model_size", "llama_tiny", "--sequence_length", "64", "--global_batch_size", "16", "--device", "cpu"]
SIZES += ["--no_tensorboard", "--warmup_steps", "10", "--log_every", "10"]
SHOWN = r"model|data |step +\d*00 |result|graphs"
PRETRAIN = ["--dataset", "tokens", "--data_dir", "shards", "--train_data", "world_train_*.bin", "--vocab_size", "384"]
PRETRAIN += ["--validation_data", "world_val_*.bin", "--tokenizer", "tokenizer"]
PRETRAIN += ["--num_steps", "250", "--learning_rate", "4e-3"]
run("transformer_tpu.py", *PRETRAIN, *SIZES, "--run_dir", "runs/base", show=SHOWN)


def ask(run_dir, *words):
    """What a run says, each time the likeliest token."""
    return run("-m", "tools.generate", "--run_dir", run_dir, *words, "--num_tokens", "12", "--temperature", "0")


ask("runs/base", "--prompt", "The owl eats", "What does the owl eat?")
print("the text says: the owl eats", eats["owl"])

# %% [markdown]
# It continues a text. A question it cannot answer, for it has never seen one.
#
# ## 3. Conversations
# Now questions and answers, one conversation a line. We keep ten animals back: what those eat is asked here of none of
# them. The model has read it in stage 2 only.

# %%
kept_back = ANIMALS[::3]
chats = [(f"Where does the {animal} live?", f"The {animal} lives in the {lives[animal]}.") for animal in ANIMALS]
chats += [(f"What does the {animal} eat?", f"The {animal} eats {eats[animal]}.") for animal in ANIMALS]
questions = [(question, answer) for question, answer in chats if "eat" in question and question.split()[3] in kept_back]
learnt = [chat for chat in chats if chat not in questions]
(WORK / "chats").mkdir(exist_ok=True)
for name, found in (("train", learnt * 20), ("held_out", questions)):
    lines = [json.dumps({"prompt": question, "completion": answer}) + "\n" for question, answer in found]
    (WORK / "chats" / f"{name}.jsonl").write_text("".join(lines))
print((WORK / "chats" / "train.jsonl").read_text().splitlines()[0])
print(len(learnt), "questions to learn from,", len(questions), "kept back")

# %% [markdown]
# The trained weights go on from a folder of Hugging Face's form, as any model from there would:

# %%
run("-m", "tools.convert_hf", "export", "runs/base", "base", show="$^")
TUNE = ["--initial_weights", "base", "--dataset", "chat", "--data_dir", "chats", "--train_data", "train.jsonl"]
TUNE += ["--validation_data", "held_out.jsonl", "--num_steps", "100", "--learning_rate", "1e-3"]
run("transformer_tpu.py", *TUNE, *SIZES[2:], "--run_dir", "runs/chat", show=SHOWN)

# %% [markdown]
# ## 4. Ask
# The ten questions that were kept back:

# %%
asked = [question for question, _ in questions]
answers = "\n".join(ask("runs/chat", "--chat", *asked))
right = sum(answer in answers for _, answer in questions)
print(f"{right} of {len(questions)} answers are what the text of stage 2 says; by chance it would be one")

# %% [markdown]
# ## 5. What happened, and a file for others
# Every run writes `metrics.jsonl`, one JSON object a line. Follow that file to log anywhere:

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 2.6))
for axes, name in zip(panels, ("base", "chat"), strict=True):
    records = [json.loads(line) for line in (WORK / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    losses = [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]
    axes.plot(*zip(*losses, strict=True), label="training")
    points = [(record["step"], record["validation_loss"]) for record in records if record["kind"] == "eval"]
    axes.plot(*zip(*points, strict=True), "o", label="kept back")
    axes.set(xlabel="step", title={"base": "text", "chat": "conversations"}[name] + ", nats per token")
    axes.legend()

run("-m", "tools.convert_hf", "export", "runs/chat", "model", show="$^")
print(*sorted(path.name for path in (WORK / "model").iterdir()), sep="\n")

# %% [markdown]
# The folder loads in `transformers`, vLLM and llama.cpp; [fine-tuning](../docs/fine_tuning.md) says how, and does stage
# 3 and 4 with a real model. `python -m tools.speedrun --depth 2 --text FILE` does all of this with one command, with a
# schedule that grows with the depth. What it costs on a TPU is the subject of *What it will cost*.
