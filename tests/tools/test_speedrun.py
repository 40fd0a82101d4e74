"""tools.speedrun: what follows from the depth, a kill in the middle, and what is refused."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from made_tasks import write_lines
from matplotlib.image import imread
from processes import QUICKLY_COMPILED, ROOT, Script, waits

from benchmarks import speedrun_kills
from language.data.llmc_files import write_token_shard
from language.data.tokenizer import load_tokenizer
from language.options.hf_config import shape_of
from tools import speedrun
from tools.make_chats import chats_of
from tools.speedrun import check_text
from tools.speedrunning import price, stages
from tools.speedrunning.dial import make_plan
from tools.speedrunning.one_page import write_report
from tools.speedrunning.price import TRAININGS, ask_compiler, lines_of_price, options_of_slice, with_changes
from tools.speedrunning.stages import Stage, marker_of, run_stages, stages_of
from tpu_utils.base.errors import InputError, TrainingError, run_script

DRAW = random.Random(0)
WORDS = ["".join(DRAW.choices("aeioubcdfglmnrstw", k=DRAW.randrange(3, 8))) for _ in range(800)]
TEXT = "".join(f"The {' '.join(DRAW.choices(WORDS, k=8))}.\n" for _ in range(3000))


def test_a_deeper_model_is_wider_and_reads_more():
    plans = [make_plan(depth, 4 * 10**10, 10**6) for depth in (4, 12, 24)]
    shapes = [shape_of(plan.model, "plan") for plan in plans]
    assert [(s.num_layers, s.embedding_dim, s.num_heads) for s in shapes] == [(4, 256, 2), (12, 768, 6), (24, 1536, 12)]
    for plan, shape in zip(plans, shapes, strict=True):
        assert 0.9 < plan.tokens / (20 * shape.num_multiplied) <= 1.0
    assert plans[1].rows * plans[1].sequence_length == 1 << 19  # nanochat's batch at depth 12
    assert plans[0].learning_rate > plans[1].learning_rate > plans[2].learning_rate


def test_a_short_text_is_read_four_times_and_a_vocabulary_can_be_given():
    """A text with few different pairs has none for that of the rule."""
    plan = make_plan(4, 10**6, 10**5)
    assert plan.tokens < 4 * 10**6 / 2.5 and plan.steps >= 300
    assert make_plan(4, 10**6, 10**5, most_steps=7).steps == 7
    plan = make_plan(2, 10**6, 10**5, vocab_size=300)
    assert plan.vocab_size == plan.model["vocab_size"] == 300 and plan.model["eos_token_id"] == 297


def test_a_stage_on_a_cpu_has_variables_that_its_command_says(monkeypatch):
    stage = Stage("it", ["tools.generate", "--help"])
    for name in stages.ON_A_CPU:
        monkeypatch.delenv(name, raising=False)
    assert stage.shown.startswith("XLA_FLAGS=--xla_backend_optimization_level=1 MALLOC_ARENA_MAX=1 ")
    assert stage.shown.endswith(" MALLOC_TRIM_THRESHOLD_=1099511627776 python -m tools.generate --help")
    monkeypatch.setenv("XLA_FLAGS", "")  # what is there stays
    assert stage.shown.startswith("MALLOC_ARENA_MAX=1 ")
    monkeypatch.setattr(stages, "attached_chips", lambda: ["a chip"])
    assert stage.shown == "python -m tools.generate --help"


def test_chats_are_lines_that_follow_each_other():
    chats = chats_of([b"One line of it.\nAnother line.\n\nSPEAKER NAME:\nThe third one.\n"], 10, 0)
    (found,) = [[message["content"] for message in chat["messages"]] for chat in chats]
    assert found == ["What comes after: One line of it.", "Another line."]


def stage_of(folder: Path, name: str, script: str, **more) -> Stage:
    (folder / f"{name}.py").write_text(script)
    return Stage(name, [str(folder / f"{name}.py")], **more)


def test_stages_go_on_where_they_were(tmp_path, capfd):
    good, bad = stage_of(tmp_path, "good", "print('it runs')", kept=True), stage_of(tmp_path, "bad", "exit(3)")
    with pytest.raises(TrainingError, match="stage 2 of 2, bad ended with exit code 3"):
        run_stages([good, bad], tmp_path)
    with pytest.raises(InputError, match="stage 2 of 2, refusing ended with exit code 2"):
        run_stages([good, Stage("refusing", [str(tmp_path / "missing.py")])], tmp_path)
    assert json.loads(marker_of(tmp_path, "good").read_text())["printed"] == "it runs\n"
    assert capfd.readouterr().out.count("it runs") == 1
    assert run_stages([good], tmp_path) == 0
    assert "good: done before" in capfd.readouterr().out
    made = Stage("made", [str(tmp_path / "missing.py")], made=tmp_path)  # killed between the rename and the marker
    assert run_stages([made], tmp_path) == 0


def changed(path):
    """As many bytes, of the same time."""
    status = path.stat()
    path.write_bytes(path.read_bytes().swapcase())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        (lambda folder: changed(folder / "one.txt"), True),
        (lambda folder: (folder / "one.txt").write_text("Some text. More."), True),
        (lambda folder: (folder / "two.txt").write_text("new"), True),
        (lambda folder: (folder / "one.txt").rename(folder / "another.txt"), True),
        (lambda folder: (folder / ".hidden").write_text("no part of the text"), False),
        (lambda folder: (folder / "one.txt~").write_text("as an editor keeps it"), False),
        (lambda folder: (folder / "one.txt").touch(), False),
    ],
)
def test_another_text_than_a_stage_has_read_is_refused(tmp_path, change, is_refused):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text("Some text.")
    stage = stage_of(tmp_path, "good", "", reads=(tmp_path / "text",))
    assert run_stages([stage], tmp_path) == 0
    change(tmp_path / "text")
    if not is_refused:
        assert run_stages([stage], tmp_path) == 0
        return
    with pytest.raises(InputError, match=r"text is not what stage 1 of 1, good has read or made: it was .*'bytes': 10"):
        run_stages([stage], tmp_path)
    record = json.loads(marker_of(tmp_path, "good").read_text())
    del record["read"]  # as an older version wrote it
    marker_of(tmp_path, "good").write_text(json.dumps(record))
    assert run_stages([stage], tmp_path) == 0


def test_what_a_stage_has_made_is_what_later_ones_read(tmp_path):
    """Another tokenizer in its place, conversations or weights edited by hand, were taken for those of the run."""
    made = tmp_path / "made"
    makes = stage_of(tmp_path, "makes", f"open({str(made)!r}, 'w').write('Weights.')", leaves=(made,))
    both = [makes, stage_of(tmp_path, "next", "exit(3)")]
    for change, said in ((made.touch, "stage 2 of 2, next ended"), (lambda: changed(made), "made is not what stage 1")):
        with pytest.raises(TrainingError, match="stage 2 of 2, next ended with exit code 3"):
            run_stages(both, tmp_path)
        change()
        with pytest.raises((TrainingError, InputError), match=said):
            run_stages(both, tmp_path)
    made.unlink()  # for room: whoever needs it says so
    with pytest.raises(TrainingError, match="stage 2 of 2, next ended with exit code 3"):
        run_stages(both, tmp_path)


def test_each_file_that_decides_a_stage_stands_in_its_record(tmp_path):
    """A YAML file names its questions and how they are asked, beside the file that has them."""
    plan, tasks = make_plan(1, 10**6, 10**5), [f"{tmp_path}/mine.yaml={tmp_path}/mine.jsonl", f"core={tmp_path}/core"]
    found = {s.name: s for s in stages_of(plan, tmp_path / "text", None, tmp_path, "muon", 0, tasks, [])}
    asked = {tmp_path / "mine.yaml", tmp_path / "mine.jsonl", tmp_path / "core"}
    assert {*found["evaluate_pretrained"].reads} == {*found["evaluate_finetuned"].reads} == asked
    left = [path.relative_to(tmp_path) for stage in found.values() for path in stage.leaves]
    runs = [Path(name, "checkpoints") for name in ("pretrained", "finetuned")]
    assert left == [Path("tokenizer"), Path("shards"), Path("chats"), runs[0], Path("base"), runs[1], Path("model")]


def test_a_text_that_changes_while_a_stage_reads_it_is_refused(tmp_path):
    (tmp_path / "in.txt").write_text("Some text.")
    writes = f"open({str(tmp_path / 'in.txt')!r}, 'a').write('more')"
    with pytest.raises(InputError, match=r"in.txt is not what stage 1 of 1, it has read"):
        run_stages([stage_of(tmp_path, "it", writes, reads=(tmp_path / "in.txt",))], tmp_path)
    assert not marker_of(tmp_path, "it").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT[:300], "the text has pairs for a vocabulary of"),
        (TEXT[:3000], "its training part has 1,280 tokens, expected 2,049 or more, one batch of 8 x 256"),
        (TEXT[:25000], r"its held-out part has 1,[0-9]{3} tokens, expected 2,049 or more"),
        (TEXT.replace("\n", " ")[:60000], "no two lines of 8 to 80 characters that follow each other"),
    ],
)
def test_a_text_that_is_too_short_is_refused_before_the_first_stage(tmp_path, text, said):
    (tmp_path / "in.txt").write_text(text)
    with pytest.raises(InputError, match=said):
        check_text(tmp_path / "in.txt", make_plan(1, len(text), 0), None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--depth", "0"], "error: depth is 0; expected 1 <= depth <= 64"),
        (["--depth", "2", "--price", "1"], "price and cost_only have no effect without --slice"),
        (["--depth", "2", "--slice", "v6e-7"], "slice: "),
        (["--depth", "2", "--search_minutes", "-1"], "search_minutes is -1.0; expected 0 or more"),
        (["--depth", "2", "--vocab_size", "10"], "vocab_size is 10; expected 259 to"),
        (["--depth", "2", "--chats", "missing.jsonl"], "missing.jsonl: no such file"),
        (["--depth", "2", "--tasks", "piqa=missing.jsonl"], "missing.jsonl"),
        (["--depth", "2", "--text", "/dev/null"], "text is /dev/null: found nothing in it; expected UTF-8 text"),
        (["--depth", "2", "--run_dir", "/dev/null"], "run_dir is /dev/null, a file; expected a folder, or a new name"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, monkeypatch, capsys, arguments, said):
    (tmp_path / "in.txt").write_text(TEXT)
    given = ["--text", str(tmp_path / "in.txt"), "--run_dir", str(tmp_path / "run"), *arguments]
    monkeypatch.setattr(sys, "argv", ["tools.speedrun", *given])
    with pytest.raises(SystemExit, match="2"):  # a wrong option ends the process, wrong values are a return
        sys.exit(run_script(speedrun.main))
    assert said in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "run").exists()


def test_a_slice_with_more_devices_than_sequences_is_refused():
    with pytest.raises(InputError, match="256 devices, but the batch of depth 2 has 16 sequences"):
        options_of_slice(make_plan(2, 10**6, 10**5), "v6e-256")


@pytest.fixture
def compiler(monkeypatch):
    """In place of aot_tpu.py: has what it was asked, and answers with the setting that a search found."""
    settings = dict(mesh="2x4x1", gradient_accumulation_steps=2, attention="flash", remat=False, remat_keep="inputs")
    settings |= dict(offload="nothing", compiler_options="", scan_layers=False, global_batch_size=256)
    report = dict(fits=True, reason="", predicted_ms=90.0, predicted_ms_all_hidden=100.0, settings=settings)
    report |= dict(limit_bytes=32 << 30, peak_bytes=4 << 30, compiler_peak_bytes=3 << 30, other=1)
    made = SimpleNamespace(asked=[], report=report, code=0)

    def answer(command, **_):
        made.asked.append(command[1:])
        return SimpleNamespace(returncode=made.code, stdout=json.dumps([report] if made.code == 0 else []))

    monkeypatch.setattr(price.subprocess, "run", answer)
    return made


def ask(folder, dollars=2.0, minutes=5.0):
    """(the answer, the options that a slice takes then)."""
    plan = make_plan(12, 4 * 10**10, 10**6)
    of_slice = options_of_slice(plan, "v6e-8")
    made = stages_of(plan, folder / "text", None, folder, "muon", 0, [], of_slice)
    trainings = {stage.name: stage for stage in made if stage.name in TRAININGS}
    found = ask_compiler(trainings, plan, "v6e-8", dollars, minutes, folder)
    return found, with_changes(of_slice, found.changes)


def test_what_the_search_found_is_asked_once_kept_and_used(tmp_path, compiler):
    found, options = ask(tmp_path)
    searched, tuned = compiler.asked
    assert searched[-3:] == ["--search", "--minutes", "5"] and "--search" not in tuned
    pretrain = stages_of(make_plan(12, 4 * 10**10, 10**6), tmp_path, None, tmp_path, "muon", 0, [], options)[3].command
    assert "--sample_prompts" in pretrain and "--mesh=2x4x1" in pretrain  # samples are made on the slice,
    assert not any("sample" in word for word in searched)  # and are no part of the step
    assert "--dataset=tokens" in searched and "--dataset=chat" in tuned  # documents in a row: another program
    assert f"--model_config={tmp_path / 'config.json'}" in tuned and "--mesh=2x4x1" in tuned
    assert found.changes == {"mesh": "2x4x1", "gradient_accumulation_steps": 2, "attention": "flash"}
    expected = ["--attention=flash", "--gradient_accumulation_steps=2", "--mesh=2x4x1", "--precision=bfloat16"]
    assert sorted(options) == expected
    assert found.chips == 8 and found.dollars_of(3600) == 16.0
    assert found.seconds["pretrain"] == pytest.approx(make_plan(12, 4 * 10**10, 10**6).steps * 0.1)
    assert found.steps["finetune"] == "predicted, 100 ms a step, 4.00 of 32.00 GiB"
    said = "found by a search for v6e-8: attention flash, gradient_accumulation_steps 2, mesh 2x4x1"
    assert said in "\n".join(lines_of_price(found))
    again = ask(tmp_path)
    assert len(compiler.asked) == 2 and again == (found, options)  # as after a kill: from price.json
    (tmp_path / "price.json").write_text('{"pretrain": {"question": []}}')
    assert ask(tmp_path) == again and len(compiler.asked) == 4


def test_without_a_search_the_setting_is_that_of_the_dial(tmp_path, compiler):
    found, options = ask(tmp_path, minutes=0.0)
    assert "--search" not in compiler.asked[0] and found.changes == {}
    assert options == options_of_slice(make_plan(12, 4 * 10**10, 10**6), "v6e-8")


def test_what_does_not_fit_is_refused(tmp_path, compiler):
    compiler.report |= dict(fits=False, reason="too much", predicted_ms=None)
    with pytest.raises(InputError, match="pretrain of depth 12 does not fit v6e-8: too much; choose a larger slice"):
        ask(tmp_path)
    compiler.code = 1
    with pytest.raises(InputError, match="no setting of pretrain fits that --search tried"):
        ask(tmp_path / "none")


def test_the_report_has_what_the_stages_left(tmp_path, compiler):
    """A few lines stand for the runs. With a price the picture is wider: dollars beside the seconds."""
    text, plan = tmp_path / "text", make_plan(12, 4 * 10**10, 10**6)
    text.write_text("ab" * 5000)
    (tmp_path / "shards").mkdir()
    for name, tokens in (("train", [1] * 4500), ("val", [1] * 500)):
        write_token_shard(tmp_path / "shards" / f"text_{name}_000000.bin", np.asarray(tokens))
    for run_dir in ("pretrained", "finetuned"):
        lines = [dict(kind="train", step=1, loss=3.0), dict(kind="eval", step=1, validation_loss=2 * math.log(2))]
        lines += [dict(kind="sample", step=1, prompt="The ", text="the answer of it")]
        write_lines(tmp_path / run_dir / "metrics.jsonl", lines)
    stage = dict(seconds=7.0, cpu_seconds=3.0, command="python a", printed="piqa 20 0.5\n")
    left = dict.fromkeys(("pretrain", "evaluate_pretrained"), stage)
    left["chat"] = stage | {"printed": "piqa 20 0.5\n---\nno answer\n---\n of its last line\n"}
    for found, width in ((None, 1320), (ask(tmp_path)[0], 1760)):
        page = write_report(tmp_path, text, plan, left, ["What is it?", "And now?"], found)
        assert "| validation bits per byte | 1.0" in page and "## evaluate_pretrained\n```\npiqa 20 0.5" in page
        assert "What is it?\n```\npiqa 20 0.5\n```" in page and "And now?\n```\nno answer" in page
        assert "- chat: 7.0 s, 3.0 CPU-seconds\n  `python a`" in page and "goes on 'the answer of it'" in page
        assert ("pretrain on v6e-8" in page) == bool(found) and page == (tmp_path / "report.md").read_text()
        assert imread(tmp_path / "report.png").shape[1] == width


def test_kills_are_spread_over_all_stages():
    """Each once, in the order in which they come; what is left goes to the trainings."""
    plan = speedrun_kills.plan_of(20)
    assert list(dict.fromkeys(plan)) == list(speedrun_kills.AIMS) and len(plan) == 20
    assert plan.count("pretrain") == 5 and plan.count("finetune") == 4
    with pytest.raises(SystemExit, match="kills is 3; expected 13 or more"):
        speedrun_kills.plan_of(3)


def test_a_kill_knows_which_stage_it_meets(tmp_path):
    killed = object.__new__(speedrun_kills.Speedrun)  # without a process
    killed.folder, killed.log, killed.began_at = tmp_path, tmp_path / "log", 6
    killed.log.write_text("stage of an earlier start\n")
    assert killed.stage() == "start"
    with killed.log.open("a") as log:
        log.write("stage 1 of 8, tokenizer: done before\n\nstage 4 of 8, pretrain\n$ python it\n")
    assert killed.stage() == "pretrain"
    evaluated = [dict(kind="eval", step=2), dict(kind="sample", step=2), dict(kind="eval", step=4)]
    write_lines(tmp_path / "pretrained" / "metrics.jsonl", evaluated)
    assert killed.stage() == "samples"
    write_lines(tmp_path / "stages" / "model.json", [{}])
    assert killed.stage() == "report"


@pytest.mark.slow
def test_a_speedrun_that_was_killed(tmp_path, monkeypatch, capfd):
    """With all that it started, in the middle of pre-training: it goes on, and the model answers. What goes on is
    forked."""
    text, folder = tmp_path / "in.txt", tmp_path / "run"
    text.write_text(TEXT)
    command = [sys.executable, "-m", "tools.speedrun", "--depth", "1", "--text", text, "--run_dir", folder]
    command += ["--most_steps", "4"]
    own = os.environ | {"XLA_FLAGS": QUICKLY_COMPILED}
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(command, cwd=ROOT, env=own, stdout=log, stderr=log, start_new_session=True)
    waits(lambda: list(folder.glob("pretrained/checkpoints/step_*/done")) or child.poll() is not None)
    assert child.poll() is None, (tmp_path / "log").read_text()
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert not marker_of(folder, "pretrain").exists()

    def forked(words, cwd, env, **_):
        return Script(*words[1:], folder=cwd, **{name: env[name] for name in env.keys() - os.environ.keys()})

    monkeypatch.setattr(stages, "subprocess", SimpleNamespace(Popen=forked, PIPE=None))
    monkeypatch.setattr(sys, "argv", [str(word) for word in command[2:]])
    assert speedrun.main() == 0
    said = capfd.readouterr().out
    assert "shards: done before" in said and "resumed    after step" in said
    report = (folder / "report.md").read_text()
    assert "validation bits per byte" in report and "tools.convert_hf export" in report
    assert (folder / "report.png").stat().st_size > 10_000 and (folder / "model" / "model.safetensors").exists()
    assert load_tokenizer(str(folder / "model")).token("<|im_end|>") is not None
    sys.argv += ["--seed", "1"]
    with pytest.raises(InputError, match="was begun with seed 0, now 1"):
        speedrun.main()
