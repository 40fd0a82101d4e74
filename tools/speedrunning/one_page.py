"""report.md and report.png of a speedrun, from what its stages left on disk."""

import math
from pathlib import Path

from matplotlib.figure import Figure

from language.data.entries import matching
from language.data.llmc_files import open_token_shard
from language.data.text import read_documents, split_documents
from tools.plot_run import save
from tools.speedrunning.dial import Plan
from tools.speedrunning.price import Price, lines_of_price
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.environment import attached_chips
from tpu_utils.record.records import read_curves, read_records


def tokens_per_byte(folder: Path, text: Path, plan: Plan) -> float:
    """Tokens per byte of the held-out text."""
    _, held_out = split_documents(read_documents(text))
    shards = matching(folder / "shards" / "text_val_*.bin")
    return sum(len(open_token_shard(path, plan.vocab_size)) for path in shards) / sum(map(len, held_out))


def block(title: str, text: str) -> list[str]:
    return [title, "```", text.rstrip(), "```", ""]


def write_report(
    folder: Path, text: Path, plan: Plan, stages: dict[str, dict], questions: list[str], price: Price | None
) -> str:
    """Writes report.png, then report.md, whose text is returned. questions: of the chat."""
    fields = {"loss": 0, "validation_loss": 0}
    runs = {name: read_curves(folder / name / "metrics.jsonl", fields) for name in ("pretrained", "finetuned")}
    losses = {name: curves["eval", "validation_loss"] for name, curves in runs.items()}
    share = tokens_per_byte(folder, text, plan)
    bits = losses["pretrained"][1][-1] * share / math.log(2)
    scored = [name for name in stages if name.startswith("evaluate_")]
    answers = stages["chat"]["printed"].split("\n---\n", len(questions) - 1)  # as tools.generate divides them
    logged = (record for _, _, record in read_records(folder / "pretrained" / "metrics.jsonl"))
    samples = [record for record in logged if record and record["kind"] == "sample"]
    draw(folder, runs, share, {name: stage["seconds"] for name, stage in stages.items()}, price)
    lines = [
        f"# Speedrun, depth {plan.depth}",
        "",
        f"{plan.parameters:,} parameters, {plan.tokens:,} tokens in {plan.steps} steps of {plan.rows} x "
        f"{plan.sequence_length}, vocabulary {plan.vocab_size:,}, learning rate {plan.learning_rate:.2g}; then "
        f"{plan.chat_steps} steps of conversations.",
        "",
        "| | |",
        "|---|---|",
        f"| validation bits per byte | {bits:.4f} |",
        f"| validation loss, nats per token | {losses['pretrained'][1][-1]:.4f}, {1 / share:.3f} bytes per token |",
        f"| loss of held-out answers | {losses['finetuned'][1][0]:.4f} first, {losses['finetuned'][1][-1]:.4f} last |",
        "",
        "![losses, evaluations, time](report.png)",
        "",
        "## Stages",
        "Seconds are those of the last start of a stage; a stage that was killed began earlier. CPU-seconds are those",
        "of all its threads.",
        "",
        *(
            f"- {name}: {stage['seconds']:.1f} s, {stage['cpu_seconds']:.1f} CPU-seconds\n  `{stage['command']}`"
            for name, stage in stages.items()
        ),
        "",
        *(line for name in scored for line in block(f"## {name}", stages[name]["printed"])),
        "## The chat",
        *(line for question, answer in zip(questions, answers, strict=False) for line in block(question, answer)),
        "## While it trained",
        *(f"- step {one['step']}: {one['prompt']!r} goes on {one['text'][:160]!r}" for one in samples[-4:]),
        "",
        *([f"## On {price.topology}", *lines_of_price(price), ""] if price else []),
    ]
    page = "\n".join(lines)
    write_atomically(folder / "report.md", page.encode())
    return page


def draw(folder: Path, runs: dict, share: float, seconds: dict[str, float], price: Price | None) -> None:
    """Panels: pre-training in bits per byte, fine-tuning, seconds of each stage, and where a price is known dollars."""
    money = bool(price and price.dollars)
    figure = Figure(figsize=(16 if money else 12, 3.8), layout="constrained")
    axes = figure.subplots(1, 4 if money else 3)
    for panel, (name, title) in zip(axes, (("pretrained", "pre-training"), ("finetuned", "chats")), strict=False):
        scale = share / math.log(2) if name == "pretrained" else 1.0
        steps, values = runs[name]["train", "loss"]
        panel.plot(steps, values * scale, label="training")
        steps, values = runs[name]["eval", "validation_loss"]
        panel.plot(steps, values * scale, "o-", label="held out")
        panel.set(title=title, xlabel="step", ylabel="bits per byte" if scale != 1.0 else "nats per token of answers")
        panel.legend()
    draw_bars(axes[2], seconds, "{:.0f} s", "where the time went, here", "seconds")
    if money:
        dollars = {f"{name}, predicted": price.dollars_of(value) for name, value in price.seconds.items()}
        title = "what it would cost"
        if attached_chips():  # a CPU is not what is paid for
            dollars |= {name: price.dollars_of(value) for name, value in seconds.items()}
            title = "where the money went"
        title += f"\n{price.chips} chips of {price.topology}, ${price.dollars:g} an hour each"
        draw_bars(axes[3], dollars, "${:.2f}", title, "dollars")
    save(figure, folder / "report.png")


def draw_bars(axes, values: dict[str, float], label: str, title: str, unit: str) -> None:
    """One for each name, the first on top."""
    names = list(values)[::-1]
    bars = axes.barh(names, [values[name] for name in names])
    axes.bar_label(bars, [label.format(values[name]) for name in names], padding=2)
    axes.set(title=title, xlabel=unit)
    axes.margins(x=0.25)
