"""Answers equal to the last example to those of lm-evaluation-harness and nanochat, in few graphs, on any devices."""

import dataclasses
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_xla
from made_tasks import BUNDLE, MAKERS, WORDS, words, write_bundle, write_lines, write_task
from processes import run
from run_files import assert_identical, read_lines, state_in, summary_in
from test_llama_parity import UNTIED, hugging_face_model
from test_tokenizer import trained

import transformer_tpu
from language.data import chat as chat_data
from language.options.transformer_options import TransformerConfig
from language.tasks.scores import read_tasks
from language.tasks.texts import write_texts
from language.weights.sources import load, open_source
from tools import evaluate
from tools.evaluate import EvaluateConfig
from tpu_utils.base.errors import run_script
from tpu_utils.device import graphs_compiled
from tpu_utils.options.parsing import parse_command_line

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt brings transformers")
LONGEST = 160  # tokens: less than the longest questions


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request, tmp_path_factory) -> Path:
    """A model of Hugging Face with a tokenizer, which puts a token before a text for the Llama alone. The GPT-2
    finds one word likelier than others, so that it completes some texts."""
    begins = request.param == "llama"
    said = dict(eos_token="<|end|>", bos_token="<|begin|>" if begins else None)
    said |= dict(tokenizer_class="PreTrainedTokenizerFast")
    path = trained(tmp_path_factory.mktemp(request.param), begins=begins, tokenizer_config=said)
    be = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]["\u0120be"]
    torch.manual_seed(0)
    if request.param == "gpt2":
        options = dict(vocab_size=300, n_positions=LONGEST, n_embd=32, n_layer=2, n_head=4)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, bos_token_id=0, eos_token_id=0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter) * 0.2
            model.transformer.ln_f.bias += 4.0 * model.transformer.wte.weight[be]
    else:
        shape = dataclasses.replace(UNTIED, num_layers=2, sequence_length=LONGEST, vocab_size=300, num_kv_heads=4)
        model = hugging_face_model(shape)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    """lm-evaluation-harness's own wrapper of a model."""
    models = pytest.importorskip("lm_eval.models.huggingface", reason="requirements-dev.txt brings lm_eval")
    return models.HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(folder).eval(),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        batch_size=8,
        device="cpu",
    )


@pytest.fixture(scope="module")
def ours(folder):
    source = open_source(hf=str(folder))
    return source, load(source, torch_xla.device())


def scored(ours, name: str, path: Path, shots: int | None = None, limit: int = 0, chat: str = "") -> dict:
    """What lm_eval says of our model, asked as the tool asks."""
    source, model = ours
    T, device = source.shape.sequence_length, torch_xla.device()
    harness = read_tasks({name: path}, source.tokenizer, T, shots, limit, chat=chat)
    found = evaluate.score(model, harness.rows, T, 2048, device)
    texts = write_texts(model, source.tokenizer, harness.prompts, T, 640, device, harness.stops)
    return harness.results(found, texts, with_samples=True)


def samples_of_theirs(theirs, config: dict, files: dict[str, Path], shots: int, cache: Path, **chat) -> list[dict]:
    """What lm_eval says of each question with its own model and its own way to data, told where that is."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate

    own = dict(dataset_path="json", dataset_name=None, num_fewshot=shots)
    own["dataset_kwargs"] = dict(data_files={split: str(file) for split, file in files.items()}, cache_dir=str(cache))
    task = ConfigurableTask(config={key: value for key, value in config.items() if key not in ("tag",)} | own)
    task.set_fewshot_seed(1234)  # as simple_evaluate() does
    return evaluate(theirs, {"tasks": {"a": task}}, **chat)["samples"]["a"]


COMMON = dict(test_split="test", doc_to_target="{{text}}")
GENERATES = COMMON | dict(task="gen", output_type="generate_until", doc_to_text="{{text}}")
GENERATES["generation_kwargs"] = dict(until=["or", "\n\n"], max_gen_toks=12, do_sample=False)
GENERATES["metric_list"] = [dict(metric="exact_match", aggregation="mean", higher_is_better=True)]
ROLLS = COMMON | dict(task="roll", output_type="loglikelihood_rolling", doc_to_text="")
ROLLS["metric_list"] = [dict(metric="bits_per_byte", aggregation="bits_per_byte", higher_is_better=False)]
# (task, examples, chat format): each for one model, or for both where a text may be empty, or end in the first token
GPT2 = [("hellaswag", 0, ""), ("piqa", 0, ""), ("mmlu", 2, ""), ("winogrande", 3, ""), ("arc_easy", 0, "chatml")]
GPT2 += [("hellaswag", 1, "plain"), ("generates", 0, "chatml"), ("lambada", 0, ""), ("rolls", 0, "")]
LLAMA = [("arc_easy", 0, ""), ("mmlu", 0, ""), ("winogrande", 0, ""), ("arc_easy", 2, ""), ("hellaswag", 1, "")]
LLAMA += [("winogrande", 1, "chatml"), ("lambada", 0, "plain"), ("generates", 0, "plain"), ("generates", 0, "")]
LLAMA += [("lambada", 0, ""), ("rolls", 0, "")]
COUNTS = dict(mmlu=20, lambada=20)  # questions: of a subject, and until a model completes one


@pytest.mark.parametrize(
    "folder, name, shots, chat",
    [*(("gpt2", *case) for case in GPT2), *(("llama", *case) for case in LLAMA)],
    indirect=["folder"],
)
def test_answers_are_those_of_lm_evaluation_harness(theirs, ours, tmp_path, monkeypatch, name, shots, chat):
    from lm_eval.tasks._yaml_loader import load_yaml

    from language.tasks.harness import ALIASES, shipped

    if name in MAKERS:
        asked = "mmlu_anatomy" if name == "mmlu" else name
        folder = write_task(tmp_path / name, name, COUNTS.get(name, 8))
        config = load_yaml(shipped()[ALIASES.get(asked, asked)])
    else:
        config, folder = (GENERATES if name == "generates" else ROLLS), tmp_path
        asked = str(tmp_path / "mine.yaml")
        Path(asked).write_text(json.dumps(config))
        write_lines(folder / "test.jsonl", [dict(text=words(random.Random(n), 1, 300)) for n in range(6)])
    said = scored(ours, asked, folder, shots, chat=chat)
    (samples,) = said["samples"].values()
    files = {path.stem: path for path in folder.glob("*.jsonl")}
    if name == "mmlu":
        for path in files.values():
            lines = [line for line in path.read_text().splitlines(True) if json.loads(line)["subject"] == "anatomy"]
            path.write_text("".join(lines))
    as_asked = dict(apply_chat_template=True, fewshot_as_multiturn=True) if chat else {}
    template = (chat_data.TEMPLATES / f"{chat}.jinja").read_text() if chat else None
    monkeypatch.setattr(theirs.tokenizer, "chat_template", template)
    if chat == "chatml":  # no begin token in its training; the harness puts the tokenizer's before the template
        monkeypatch.setattr(theirs, "add_bos_token", False)
    expected = samples_of_theirs(theirs, config, files, shots, tmp_path / "cache", **as_asked)
    assert len(samples) == len(expected) >= 6
    if name == "rolls" and ours[0].tokenizer.begin is not None:
        return  # the harness scores a begin token as if it were text
    for one, other in zip(samples, expected, strict=True):
        assert one["arguments"] == other["arguments"]
        if name == "generates":
            assert one["resps"] == other["resps"]
        else:
            logs = [np.ravel([x[0] for x in sample["resps"]])[::2] for sample in (one, other)]
            np.testing.assert_allclose(*logs, rtol=1e-4, atol=1e-4)
        assert [one.get(key) for key in ("acc", "acc_norm")] == [other.get(key) for key in ("acc", "acc_norm")]
    if name == "lambada":
        assert sum(one["acc"] for one in samples) or ours[0].tokenizer.begin is not None, "the GPT-2 completes some"


# ---------------------------------------------------------------------------------------------------- nanochat's CORE


def rendered(item: dict, kind: str, delimiter: str, shots: list[dict]) -> list[str]:
    """The prompts of a question, as render_prompts_mc(), _schema() and _lm() of nanochat/core_eval.py; of
    language_modeling that without and that with the continuation."""

    def texts(one: dict) -> list[str]:
        if kind == "multiple_choice":
            return [one["query"] + delimiter + choice for choice in one["choices"]]
        if kind == "schema":
            return [context + delimiter + one["continuation"] for context in one["context_options"]]
        return [one["context"].strip() + delimiter + one["continuation"]]

    before = "".join(texts(shot)[shot.get("gold", 0)] + "\n\n" for shot in shots)
    prompts = [before + text for text in texts(item)]
    without = [prompts[0].removesuffix(item["continuation"]).strip()] if kind == "language_modeling" else []
    return without + prompts


def common_length(sequences: list[list[int]], from_the_right=False) -> int:
    shortest = min(map(len, sequences))
    for i, index in enumerate(range(-1, -shortest - 1, -1) if from_the_right else range(shortest)):
        if any(sequence[index] != sequences[0][index] for sequence in sequences):
            return i
    return shortest


def is_right(number: int, data: list[dict], task: dict, encode, model, longest: int) -> bool:
    """nanochat's evaluate_example(), with its way of truncation."""
    rng, item, kind = random.Random(1234 + number), data[number], task["kind"]
    shots = rng.sample([i for i in range(len(data)) if i != number], task["shots"]) if task["shots"] else []
    tokens = [encode(prompt) for prompt in rendered(item, kind, task["delimiter"], [data[i] for i in shots])]
    if kind == "multiple_choice":
        starts = [common_length(tokens)] * len(tokens)
    elif kind == "schema":
        starts = [len(sequence) - common_length(tokens, True) for sequence in tokens]
    else:
        assert tokens[0] == tokens[1][: len(tokens[0])]
        starts, tokens = [len(tokens[0])], tokens[1:]
    means = []
    for sequence, start in zip(tokens, starts, strict=True):
        dropped = max(0, len(sequence) - longest)
        ids = torch.tensor([sequence[dropped:]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
        means.append(losses[start - dropped - 1 :].mean().item())
        greedy = torch.equal(logits[start - dropped - 1 : -1].argmax(-1), ids[0, start - dropped :])
    return greedy if kind == "language_modeling" else means.index(min(means)) == item["gold"]


@pytest.mark.parametrize("folder, limit", [("gpt2", 0), ("llama", 5)], indirect=["folder"])
def test_core_is_nanochats(theirs, ours, tmp_path, limit):
    bundle, (source, _) = write_bundle(tmp_path / "bundle"), ours
    said = scored(ours, "core", bundle, limit=limit)
    centered = []
    for label, uri, kind, shots, delimiter, guessing in BUNDLE:
        data = [json.loads(line) for line in (bundle / "eval_data" / uri).read_text().splitlines()]
        random.Random(1337).shuffle(data)
        data = data[:limit] if limit else data
        meta = dict(kind=kind, shots=shots, delimiter=delimiter)
        encode = lambda text: [source.tokenizer.prefix, *source.tokenizer.encode(text)]  # noqa: E731
        right = [is_right(i, data, meta, encode, theirs.model, LONGEST) for i in range(len(data))]
        assert [one["acc"] for one in said["samples"][f"core/{label}"]] == right
        centered.append((np.mean(right) - 0.01 * guessing) / (1.0 - 0.01 * guessing))
    assert said["fields"]["core_centered"] == pytest.approx(centered)
    assert said["fields"]["core"] == pytest.approx(np.mean(centered))
    completed = said["results"]["core/made_language"]["acc,none"]
    assert limit or completed > 0 or source.tokenizer.begin is not None, "the GPT-2 completes some"


# --------------------------------------------------------------------------------------------------- graphs and devices
@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_one_graph_for_each_length_that_occurs(ours, tmp_path):
    source, model = ours
    named = {name: write_task(tmp_path / name, name, 9) for name in ("hellaswag", "arc_easy", "lambada")}
    rows = read_tasks(named, source.tokenizer, LONGEST).rows
    before = graphs_compiled()
    evaluate.score(model, rows, LONGEST, 700, torch_xla.device())  # a shape that no other test has
    assert graphs_compiled() - before == 2, "of 128 and 160 tokens"


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_texts_have_one_graph_to_decode_and_one_for_each_length_of_prompts(ours):
    source, model = ours
    options = dict(until=["question"], max_gen_toks=20)
    prompts = [(source.tokenizer.encode(words(random.Random(n), 1, 8)), options) for n in range(7)]
    before = graphs_compiled()
    texts = write_texts(model, source.tokenizer, prompts, LONGEST, 3 * LONGEST, torch_xla.device())
    assert graphs_compiled() - before == 2 and not any("question" in text for text in texts)
    alone = [write_texts(model, source.tokenizer, [one], LONGEST, LONGEST, torch_xla.device()) for one in prompts[:2]]
    assert [text for (text,) in alone] == texts[:2]


@pytest.mark.slow
def test_four_devices_give_the_same_answers(folder, ours, tmp_path):
    """And the tool as users run it: a table, what it wrote, and graphs. The GPT-2's rows are shared, and the Llama's
    weights."""
    tasks = [f"{name}={write_task(tmp_path / name, name)}" for name in ("hellaswag", "lambada")]
    tasks.append(f"core={write_bundle(tmp_path / 'bundle')}")
    (tmp_path / "text.txt").write_text("to be or not to be " * 90)
    written, shared = [], "rows" if ours[0].tokenizer.begin is None else "weights"
    for count, way in ((1, "one"), (4, shared)):
        options = ["--tokens_per_step=2048", f"--devices={way}", f"--json={tmp_path / way}", "--text"]
        options += [tmp_path / "text.txt", "--tasks", *tasks]
        result = run("tools.evaluate", "--hf", folder, *options, CPU_NUM_DEVICES=count)
        assert result.returncode == 0, result.stderr[-3000:]
        written.append(json.loads((tmp_path / way).read_text()))
        assert written[-1]["graphs"] == 2 and "2 graphs" in result.stderr
        assert "core/made_schema" in result.stdout and "bits per byte of 1,710" in result.stdout, result.stdout
    one, four = written
    for name, samples in one["samples"].items():
        assert [one["acc"] for one in samples] == [one["acc"] for one in four["samples"][name]]
    assert four["fields"]["core"] == one["fields"]["core"] and four["bits_per_byte"] == pytest.approx(
        one["bits_per_byte"], rel=1e-5
    )


# --------------------------------------------------------------------------------------------------------------- a run
@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a run on bytes, and its tasks."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("to be or not to be that is the question " * 200)
    write_task(folder / "arc", "arc_easy")
    write_task(folder / "lambada", "lambada")
    write_bundle(folder / "core")
    train(folder, "scored", "--tasks", *TASKS)
    return folder


def scores_of(run_dir: Path, folder: Path) -> dict:
    """What the tool says of a run of runs(), in the fields of a run."""
    tasks = tuple(f"{name}={run_dir.parent}/{path}" for name, _, path in (task.partition("=") for task in TASKS))
    assert evaluate.main(EvaluateConfig(str(run_dir), tasks=tasks, json=str(folder / "scores.json"))) == 0
    return json.loads((folder / "scores.json").read_text())["fields"]


LAMBADA = "lambada_openai"
TASKS = ("arc_easy=arc", "lambada=lambada/test.jsonl", "core=core")
SIZES = ["--num_layers=1", "--num_heads=2", "--embedding_dim=32", "--sequence_length=256", "--global_batch_size=4"]
STEPS = ["--num_steps=4", "--log_every=2", "--eval_every=2", "--eval_batches=1", "--warmup_steps=1"]


def train(folder: Path, name: str, *own: str, devices=1) -> None:
    options = [f"--data_dir={folder}", "--dataset=text", "--train_data=text.txt", "--learning_rate=0.01"]
    options += [*SIZES, *STEPS, "--no_tensorboard", *own, f"--run_dir={folder / name}"]
    if devices == 1:  # in this process, which has imported lm_eval
        config = parse_command_line(TransformerConfig, "", options)
        assert run_script(lambda: transformer_tpu.train(config)) == 0
        return
    result = run("transformer_tpu.py", *options, CPU_NUM_DEVICES=devices)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
def test_a_run_trains_as_without(runs):
    train(runs, "plain")
    scored, plain = (state_in(runs / name / "checkpoints" / "step_00000004") for name in ("scored", "plain"))
    trained = [name for name in scored if name.startswith(("model/", "optimizer/", "metrics/"))]
    assert len(trained) > 30
    for name in trained:  # torch_xla's running seed moves with every graph; nothing here draws from it
        assert_identical(scored[name], plain[name])
    graphs = [[summary_in(runs / name)[f"{kind}_graphs"] for kind in ("train", "eval")] for name in ("plain", "scored")]
    # rows of 256 tokens have the validation's graph, those of 128 their own; in one process another run compiles none
    assert graphs == [[0, 0], [1, 2]]


@pytest.mark.slow
def test_a_run_on_chats_is_scored_as_its_checkpoint(runs, tmp_path):
    """Its model reads rows of several documents, and finds their first tokens by a mark."""
    chats = [json.dumps(dict(prompt=f"Spell {word}.", completion="-".join(word))) for word in WORDS * 20]
    (runs / "chats.jsonl").write_text("\n".join(chats))
    train(runs, "chats", "--tasks", *TASKS, "--dataset=chat", "--train_data=chats.jsonl", "--model_size=llama_tiny")
    *_, said = [line for line in read_lines(runs / "chats") if line["kind"] == "eval"]
    assert scores_of(runs / "chats", tmp_path)["core"] == said["core"]


@pytest.mark.slow
def test_a_run_on_a_mesh_is_scored_alike(runs, mesh="1x2x2x2"):
    """Rows are sharded, and weights; devices share the positions of a row, and the vocabulary."""
    train(runs, mesh, "--tasks", *TASKS, f"--mesh={mesh}", devices=8)
    one, eight = ([line for line in read_lines(runs / name) if line["kind"] == "eval"] for name in ("scored", mesh))
    for expected, found in zip(one, eight, strict=True):
        values = {name: pytest.approx(value, rel=1e-3) for name, value in expected.items() if name != "kind"}
        assert found == values | {"kind": "eval"}
    assert summary_in(runs / mesh)["eval_graphs"] == 2


def test_a_run_is_scored_and_its_checkpoint_alike(runs, tmp_path, capsys):
    before, said = [line for line in read_lines(runs / "scored") if line["kind"] == "eval"]
    assert before[f"{LAMBADA}_perplexity"] > said[f"{LAMBADA}_perplexity"] and len(said["core_centered"]) == 3
    assert said["core"] == pytest.approx(np.mean(said["core_centered"]))
    assert {"arc_easy_accuracy", "arc_easy_accuracy_norm", f"{LAMBADA}_accuracy"} < said.keys()
    found = scores_of(runs / "scored", tmp_path)
    assert found.pop(f"{LAMBADA}_perplexity") == pytest.approx(said[f"{LAMBADA}_perplexity"], rel=1e-4)
    assert len(found) >= 5 and found == {name: said[name] for name in found}
    assert "arc_easy " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "options, message",
    [
        ([], "give one of RUN, --hf and --llmc"),
        (["--hf=a"], "nothing is asked; give --tasks NAME=PATH or --text FILE"),
        (["--hf=a", "--checkpoint=best", "--text=x"], "only a run has checkpoints"),
        (["--hf=a", "--tasks", "hellswag=x"], "tasks has 'hellswag'; expected a task of lm_eval; did you mean"),
        (["--hf=a", "--tasks", "piqa"], "expected NAME=PATH"),
        (["--hf=a", "--tasks", "piqa=missing.jsonl"], "missing.jsonl: no such file"),
        (["--hf=a", "--tasks", "core=missing"], "core.yaml: no such file"),
        (["--hf=a", "--tasks", "core=missing", "--chat"], "or with core, whose questions are no conversations"),
        (["--hf=a", "--limit=-1", "--text=x"], "limit is -1; expected 0 or more"),
        (["--hf=a", "--text=missing.txt"], "missing.txt: no such file"),
        (["--hf=a", "--text=README.md", "--json=missing/x"], "in a folder that does not exist"),
    ],
)
def test_wrong_options_are_answered_at_once(monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["tools/evaluate.py", *options])
    monkeypatch.setattr(evaluate, "choose_device", lambda _: "cpu")  # this process has one
    with pytest.raises(SystemExit) as stop:  # as its first lines do it, before torch
        evaluate.command_line(EvaluateConfig, "", evaluate.check_files, evaluate.parse_options)
    said = " ".join(re.sub(r"[^\x00-\x7f]", "", capsys.readouterr().err).split())  # without the box around it
    assert stop.value.code == 2 and message in said and "Traceback" not in said, said
