"""Deciding by the compiler: what is kept on disk, the search, two programs side by side, the picture."""

import contextlib
import csv
import dataclasses
import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import reports
from mutations import at_most, make_irregular, mutated, mutated_json, no_hang
from processes import ROOT, run

import aot_tpu
from language.options.transformer_options import TransformerConfig
from tpu_compiler.answer import RESERVE, read_memory
from tpu_compiler.compile import cache, newest
from tpu_compiler.compile.cache import Cache
from tpu_compiler.compile.compiling import Compiled
from tpu_compiler.compile.planned import PLAN_VARIABLE, has_more_memory
from tpu_compiler.decide import difference, fastest, search, verdict
from tpu_compiler.decide.fastest import Search, ms_per_example, step_ms
from tpu_compiler.decide.roofline import bounds, draw, efficiencies
from tpu_compiler.estimate import schedule
from tpu_compiler.estimate.reading import parse_program, read_collectives, read_cycles
from tpu_compiler.estimate.report import (
    ERROR,
    PLAN_ERROR,
    PLANNED,
    Report,
    format_compilers,
    format_report,
    format_table,
)
from tpu_compiler.estimate.rules import left_out, moved_bytes, ruled_ms
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import GIB, parse_topology
from tpu_utils.options.parsing import as_json, parse_command_line

TINY = ROOT / "tests" / "tiny_training.py"


FACTS = dict(topology="v5litepod-8", devices=8, unit="tokens", limit_bytes=int(15.75 * GIB), peak_bytes=GIB)
FACTS |= dict(memory={"parameters": GIB // 2, "activations": GIB // 2}, settings={"global_batch_size": 64})
FACTS |= dict(estimated_ms=100.0, estimated_per_second=1e4, model_flops=1e12, flops=1e11, asked_seconds=60.0)


def a_report(**changes):
    return reports.a_report(**(FACTS | changes)).with_prediction()


# --------------------------------------------------------------------------------------------------------------- cache
def test_what_is_kept_comes_back_and_what_is_damaged_does_not(tmp_path):
    kept, report = Cache(tmp_path), a_report(costliest_lines=[("a.py:1", 2.5)], reason="a long text\n" * 2000)
    kept.write("answer_1", report)
    assert kept.read("answer_1", Report) == report
    compiled = Compiled("HloModule m\n" * 10**6, 1, 2, 3, 4, 5, 6.0, 7.0)
    kept.write("program_1", compiled)
    assert kept.read("program_1", Compiled) == compiled, "a text larger than the JSON may be"
    assert kept.read("answer_2", Report) is None
    assert kept.read("answer_1", search.Answer) is None  # it is another kind
    path = tmp_path / "answer_1.json.gz"
    shutil.copy(path, tmp_path / "answer_3.json.gz")
    assert kept.read("answer_3", Report) is None  # the name is part of it
    whole = path.read_bytes()
    for content in (whole[:-9], b"", b"\x1f\x8b", b"{}", whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
        path.write_bytes(content)
        assert kept.read("answer_1", Report) is None
    for kind in ("FIFO", "folder"):
        make_irregular(path, kind)
        with no_hang():
            assert kept.read("answer_1", Report) is None
    path.rmdir()
    (tmp_path / "good").write_bytes(whole)
    path.symlink_to("good")
    assert kept.read("answer_1", Report) is None
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".writing")]


def test_whatever_an_entry_holds_it_is_read_or_left(tmp_path):
    kept, path = Cache(tmp_path), tmp_path / "answer_1.json.gz"
    kept.write("answer_1", a_report(costliest_lines=[("a.py:1", 2.5)], settings={"mesh": "8x1x1"}))
    whole = path.read_bytes()
    texts = [*mutated_json(json.loads(gzip.decompress(whole)), 300), b"[" * 10**6, b'{"format": 1, "format": 1}']
    for content in [*mutated(whole, 150), *(gzip.compress(text, 1) for text in (*texts, b"\xff", b"NaN"))]:
        path.write_bytes(content)
        assert isinstance(kept.read("answer_1", Report), Report | None)


def test_the_entries_not_read_for_longest_go_first(tmp_path):
    kept, names = Cache(tmp_path), [f"answer_{letter * 40}" for letter in "abcd"]
    for place, name in enumerate(names[:3]):
        kept.write(name, a_report())
        os.utime(tmp_path / f"{name}.json.gz", (place, place))
    size = (tmp_path / f"{names[0]}.json.gz").stat().st_size
    kept.most_bytes = 3 * size + size // 2
    assert kept.read(names[0], Report)  # which makes it the newest
    kept.write(names[3], a_report())
    assert sorted(path.name[7] for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_no_file_of_anybody_else_is_deleted(tmp_path):
    """--cache DIR once counted and deleted every .json.gz and old .writing of the folder, data sets among them."""
    kept, mine = Cache(tmp_path, most_bytes=100), [f"program_{letter * 40}" for letter in "ab"]
    own = tmp_path / "aot_tpu_k3x9_0aa.writing"  # left by a kill
    others = [tmp_path / name for name in ("shard_0.json.gz", "answer_1.json.gz", "tmpk3x9_0aa.writing", "x.writing")]
    for path in (own, *others):
        path.write_bytes(bytes(10_000))
        os.utime(path, (0, 0))
    for name in mine:
        kept.write(name, a_report())
    assert all(path.exists() for path in others) and not own.exists()
    assert not any((tmp_path / f"{name}.json.gz").exists() for name in mine), "its own are over the limit"


@pytest.mark.parametrize("inner", ["", "mine"])
@pytest.mark.parametrize(
    "how, found", [("mode", r"can be written by other users \(mode 777\)"), ("owner", "belongs to")]
)
def test_nothing_is_believed_or_run_that_others_can_put_there(tmp_path, how, found, inner, capsys):
    """A folder of another user's once ran its bin/python, and its entries were read as the compiler's own answers. One
    of this user's in a folder of another's is renamed by that one, and another put in its place."""
    folder = tmp_path / inner
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("#!/bin/sh\n")
    (folder / newest.VERSIONS).write_text('{"jax": "0.10.2", "libtpu": "0.0.52"}')
    if how == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(tmp_path, 65534, 65534)
    else:
        tmp_path.chmod(0o777)
    for make in (Cache, lambda folder: newest.make_environment(folder, print)):
        with pytest.raises(
            InputError, match=f"{tmp_path} {found}.*; expected a folder that you alone can write.*chmod"
        ):
            make(folder)
    assert aot_tpu.main([str(TINY), "--topology=v5litepod-1", "--cache", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} ")
    if how == "mode":
        tmp_path.chmod(0o1777)  # as /tmp: who can write there cannot rename what is another's
        with pytest.raises(InputError) if not inner else contextlib.nullcontext():
            Cache(folder)


def test_what_came_while_others_could_write_is_not_believed_or_run(tmp_path):
    """As the message says: chmod go-w. What they had put there stays."""
    name, kept = f"answer_{'a' * 40}", Cache(tmp_path)
    kept.write(name, a_report())
    entry = tmp_path / f"{name}.json.gz"
    assert kept.read(name, Report)
    entry.chmod(0o666)
    assert kept.read(name, Report) is None
    if os.geteuid() == 0:
        entry.chmod(0o600)
        os.chown(entry, 65534, 65534)
        assert kept.read(name, Report) is None


@pytest.mark.parametrize("kind", ["json", "text"])
def test_a_small_entry_does_not_take_gigabytes(tmp_path, kind):
    """0.65 MB of gzip once took 3.8 GB."""
    front = b'{"format": 2, "name": "answer_1", "texts": {}, "values": {"a": ['
    start, part = (front, b"[]," * (1 << 22)) if kind == "json" else (front + b"]}}\n", bytes(1 << 26))
    # members of gzip, one after the other, are one file
    (tmp_path / "answer_1.json.gz").write_bytes(gzip.compress(start, 1) + 16 * gzip.compress(part, 1))
    with at_most(700 << 20):
        assert Cache(tmp_path).read("answer_1", Report) is None


def test_no_place_for_the_cache_is_said(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written: .*file: .*; expected a folder with room.*--no_cache"):
        Cache(tmp_path / "file")
    assert aot_tpu.main([str(TINY), "--topology=v5litepod-1", "--cache", str(tmp_path / "file" / "deep")]) == 2
    assert capsys.readouterr().err.startswith("error: the compile cache cannot be written")

    kept = Cache(tmp_path / "full")  # a disk that fills up later costs the entry alone
    monkeypatch.setattr(cache.gzip, "compress", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
    kept.write("a", a_report())
    assert "warning: not kept in the compile cache" in capsys.readouterr().err
    monkeypatch.setenv(cache.VARIABLE, "")
    assert cache.cache_of_environment() is None


def test_the_name_of_an_answer_follows_all_that_decides_it(tmp_path, monkeypatch):
    script, other = tmp_path / "script.py", tmp_path / "inner" / "module.py"
    other.parent.mkdir()
    script.write_text("import inner.module")
    other.write_text("a = 1")

    def key(*options, topology="v5litepod-1"):
        return cache.question_key(str(script), topology, options)

    keys = [key(), key("--a=1"), key("--a", "1"), key(topology="v6e-1")]
    other.write_text("a = 2")
    keys.append(key())
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_something=1")
    keys.append(key())
    assert len(set(keys)) == len(keys) and keys[-1] == key()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "module.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert keys[-1] == key()
    monkeypatch.setattr(cache, "MOST_FILES", 3)
    assert key() is None


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Commands that compile_script ran, each answered with a report; the cache is in tmp_path/cache."""
    commands, settings = [], {"global_batch_size": 8, "data_dir": str(tmp_path / "data")}

    def run_script(command, variables, seconds=None):
        commands.append(command)
        if seconds is not None and seconds < 5:
            raise subprocess.TimeoutExpired(command, seconds)
        folder = Path(variables[search.OUTPUT_VARIABLE])
        report = a_report(topology="v5litepod-8", settings=settings)
        (folder / "report.json").write_text(json.dumps(dataclasses.asdict(report) | {"of_another_commit": 1}))
        (folder / "program.txt").write_text("HloModule m")
        return 0

    monkeypatch.setattr(search, "run_script", run_script)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return commands


def test_the_same_question_runs_the_script_once(asked, tmp_path):
    ask = lambda *options, **more: search.compile_script(str(TINY), "v5litepod-8", options, **more)  # noqa: E731
    first, second = ask("--a=1"), ask("--a=1")
    assert len(asked) == 1 and not first.from_cache and second.from_cache
    assert dataclasses.replace(second, from_cache=False, asked_seconds=0) == dataclasses.replace(first, asked_seconds=0)
    assert "(kept from then)" in format_report(second)
    ask("--a=2")
    ask("--a=1", program_dir=str(tmp_path / "programs"))  # the text is the compiler's
    assert len(asked) == 3
    (tmp_path / "data").mkdir()  # what the settings name has changed
    assert not ask("--a=1").from_cache and ask("--a=1").from_cache
    (entry,) = [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("answer")][:1]
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(entry.read_bytes()[:100])
    assert not ask("--a=1").from_cache


def test_plans_are_held_against_plans(asked, monkeypatch):
    """A search by plan took a kept compile for one of its steps, and chose by it."""
    ask = lambda **more: search.compile_script(str(TINY), "v5litepod-8", ["--a=1"], **more)  # noqa: E731
    ask()
    assert ask(planned=True).from_cache and len(asked) == 1
    monkeypatch.setenv(PLAN_VARIABLE, "1")
    assert not ask().from_cache and len(asked) == 2


@pytest.mark.parametrize("limit, more", [("", False), ("16384", False), ("32768", False), ("65536", True)])
def test_more_on_chip_memory_than_a_kernel_has_by_itself(limit, more):
    assert has_more_memory(f"--xla_b=1 --xla_tpu_scoped_vmem_limit_kib={limit}" if limit else "--xla_b=1") == more


def test_what_was_stopped_is_not_tried_again_in_as_little_time(asked):
    for _ in range(2):
        with pytest.raises(search.OutOfTimeError, match="did not come to an answer"):
            search.compile_script(str(TINY), "v5litepod-8", [], seconds=0.01)
    assert len(asked) == 1
    assert search.compile_script(str(TINY), "v5litepod-8", [], seconds=60).fits


@pytest.mark.slow
def test_a_program_is_compiled_once_by_two_processes(tmp_path):
    """For real: the second process traces the same program and takes what the compiler said from the disk; a damaged
    entry is compiled again."""
    reports = []
    for damage in (False, False, True):
        for path in (tmp_path / "cache").iterdir() if damage else ():
            path.write_bytes(path.read_bytes()[:-20])
        folder = tmp_path / f"run{len(reports)}"
        folder.mkdir()
        done = run(TINY, "--compile_for", "v5litepod-1", AOT_TPU_OUTPUT=folder, AOT_TPU_CACHE=tmp_path / "cache")
        assert done.returncode == 0, done.stderr
        reports.append(Report(**json.loads((folder / "report.json").read_text())))
    assert [r.from_cache for r in reports] == [False, True, False]
    same = dict(from_cache=False, trace_seconds=0, compile_seconds=0, host_peak_gib=0)
    assert len({str(dataclasses.replace(r, **same)) for r in reports}) == 1
    assert (tmp_path / "run0" / "program.txt").read_text() == (tmp_path / "run1" / "program.txt").read_text()


# -------------------------------------------------------------------------------------------------------------- search
SETTINGS = dict(global_batch_size=64, gradient_accumulation_steps=4, mesh="8x1x1", remat=False, scan_layers=False)
SETTINGS |= dict(attention="plain", compiler_options="", windowed_einsum=False, learning_rate=0.1, remat_keep="inputs")
SETTINGS |= dict(offload="nothing")


def parse(options, settings):
    """The settings that options come to, as a script would understand them."""
    now = dict(settings)
    for word in options:
        name, _, value = word.removeprefix("--").partition("=")
        if value:
            now[name] = json.loads(value) if re.fullmatch(r"[\d.]+", value) else value
        else:
            now[name.removeprefix("no_")] = not name.startswith("no_")
    return now


class Compiler:
    """A made-up compiler: milliseconds and GiB by a rule, and each question it was asked."""

    def __init__(self, milliseconds, gib=lambda s: 1.0, settings=SETTINGS, refused=lambda s: False, seconds=60.0):
        self.rules, self.settings, self.asked = (milliseconds, gib, refused), settings, []
        self.seconds = seconds

    def __call__(self, options, seconds):
        assert seconds > 0
        milliseconds, gib, refused = self.rules
        now = parse(options, self.settings)
        if refused(now):
            raise search.ScriptError("the mesh does not divide", 2)
        self.asked.append(str(options))
        size = int(gib(now) * GIB)
        facts = dict(peak_bytes=size, memory={"parameters": 0, "activations": size}, fits=size <= 15.75 * GIB)
        facts |= dict(estimated_ms=milliseconds(now), estimated_per_second=64e3 / milliseconds(now))
        return a_report(settings=now, from_cache=True, asked_seconds=self.seconds, **facts)


def speed(now):
    time = 100.0 if now["attention"] == "plain" else 90.0
    assert now["remat"] or (now["remat_keep"], now["offload"]) == ("inputs", "nothing"), "the script refuses it"
    time *= 1.3 - 0.1 * (now["remat_keep"] == "attention") if now["remat"] else 1.0
    time *= 1.0 if now["offload"] == "nothing" else 1.2
    time *= {4: 1.0, 2: 0.95, 1: 0.93, 8: 1.1}[now["gradient_accumulation_steps"]]
    time *= {"8x1x1": 1.0, "1x8x1": 0.9}.get(now["mesh"], 1.05)
    return time * (0.98 if now["compiler_options"].endswith("32768") else 1.0) * (2.0 if now["scan_layers"] else 1.0)


def test_the_search_finds_the_fastest_that_fits_and_says_how_to_run_it():
    said, compiler = [], Compiler(speed, lambda now: 8 / now["gradient_accumulation_steps"])
    found = Search(compiler, ["--learning_rate=0.1", "--remat"], said.append, 3600)
    compiler.settings = SETTINGS  # --remat is on the command line
    best = found.run()
    changes = dict(attention="flash", remat=False, gradient_accumulation_steps=1, mesh="1x8x1")
    assert best.changes == changes | dict(compiler_options="xla_tpu_scoped_vmem_limit_kib=32768")
    assert parse(best.options, SETTINGS) == SETTINGS | best.changes
    assert "--remat" not in best.options and best.options[0] == "--learning_rate=0.1"
    assert ms_per_example(best.report) <= min(ms_per_example(t.report) for t in found.trials if t.fits) * 1.001
    assert len(said) == len(found.trials) and len(set(compiler.asked)) == len(compiler.asked)  # a line each, once each
    again = Search(Compiler(speed, compiler.rules[1]), ["--learning_rate=0.1", "--remat"], lambda _: None, 3600)
    again.run()
    assert [trial.options for trial in again.trials] == [trial.options for trial in found.trials]
    table = verdict.format_trials(found.trials, best)
    assert "<- best" in table.splitlines()[2]
    for words in ("counted by rule", "the schedule cannot hide", "real time of 28 published steps was"):
        assert words in table
    command = ".venv/bin/python script.py --learning_rate=0.1 --attention=flash"
    assert verdict.command_of("script.py", best).startswith(command)


def a_trial(changes, estimated_ms=100.0, **facts):
    rate = 1e6 / estimated_ms  # 1,000 tokens a step
    return fastest.Trial(changes, [], a_report(estimated_ms=estimated_ms, estimated_per_second=rate, **facts))


FLASH = {"attention": "flash"}
MESH = {"mesh": "1x8x1"}


@pytest.mark.parametrize(
    "trial, is_better",
    [
        (a_trial(FLASH, estimated_ms=85.0, ruled_ms=22.0), False),  # 15 less estimated, 12 more by rule
        (a_trial(FLASH, estimated_ms=84.0, ruled_ms=22.0), True),  # even 0.83 of 16 is more than 1.07 of 12
        (a_trial(MESH, estimated_ms=90.0, ruled_ms=10.0, exposed_ms=8.0), False),
        (a_trial(MESH, estimated_ms=99.0, ruled_ms=10.0), True),  # one option, and nothing became slower by it
        (a_trial(MESH | {"remat": True}, estimated_ms=99.0, ruled_ms=10.0), False),
        (a_trial({"remat": True, "remat_keep": "attention"}, ruled_ms=9.0), True),  # the second goes with the first
        (a_trial(MESH, estimated_ms=99.99, ruled_ms=10.0), False),
        (a_trial(MESH, estimated_ms=1.0, fits=False), False),
    ],
)
def test_what_a_prediction_cannot_tell_apart_is_equal(trial, is_better):
    """Programs of others took 0.83 to 1.07 of what is estimated for them with flash kernels by the rule."""
    base = a_trial({}, ruled_ms=10.0)
    assert fastest.is_better(trial, base) == is_better and fastest.is_better(base, trial) == (not trial.fits)


def test_equal_settings_are_marked():
    base, two = a_trial({}, ruled_ms=10.0), a_trial(MESH | {"remat": True}, estimated_ms=99.0, ruled_ms=10.0)
    best = a_trial(FLASH, estimated_ms=84.0, ruled_ms=22.0)
    table = verdict.format_trials([base, best, two], best).splitlines()
    assert "<- best" in table[2] and ["(equal)" in line for line in table[2:5]] == [False, True, False]
    assert "equal: within 15%" in table[-2]


def test_memory_rules_out_without_a_compile():
    compiler = Compiler(speed, lambda now: 40 / now["gradient_accumulation_steps"] / (4 if now["remat"] else 1))
    found = Search(compiler, [], lambda _: None, 3600)
    best = found.run()
    assert best.fits and best.report.peak_bytes <= best.report.limit_bytes
    skipped = [trial for trial in found.trials if trial.said.startswith("not compiled")]
    assert any(trial.changes.get("gradient_accumulation_steps") == 1 for trial in skipped)
    for trial in skipped:
        assert compiler.rules[1](SETTINGS | trial.changes) > 15.75


def test_the_last_layers_are_whole_as_far_as_memory_goes():
    settings = SETTINGS | dict(remat=True, remat_all_but=0, loss_parts=1)
    compiler = Compiler(
        lambda now: (100 - now["remat_all_but"]) * (1.1 if now["loss_parts"] > 1 else 1.0),
        lambda now: 10 + 0.5 * now["remat_all_but"] - now["loss_parts"] / 8,
        settings,
    )
    found = Search(compiler, ["--remat"], lambda _: None, 7200)
    assert found.run(only=("remat_all_but", "loss_parts")).changes == {"remat_all_but": 8}
    assert not any("remat_all_but=24" in text for text in compiler.asked), "16 did not fit, and it needs no less"


def test_a_search_by_plans_alone_compiles_nothing(monkeypatch, capsys):
    def plan(script, topology, options, seconds, planned):
        assert planned
        ms = 90.0 if "--attention=flash" in options else 100.0
        facts = dict(estimated_ms=ms, estimated_per_second=64e3 / ms, settings=parse(options, {"attention": "plain"}))
        return a_report(reason=PLANNED, compiles=False, **facts), ""

    monkeypatch.setattr(search, "compile_afresh", plan)
    monkeypatch.chdir(ROOT)
    question = ["--search", "--plan", "--price", "v5e=1.20", "--model_config", "a.json"]
    assert aot_tpu.main(["simple_mnist_tpu.py", "--topology", "v5litepod-8", *question]) == 0
    said = capsys.readouterr().out
    assert "cost of 1e+09 tokens" in said and "--initial_weights FOLDER in place of --model_config" in said
    assert "2 settings, 2 planned now" in said and "attention=flash <- best" in said
    assert PLAN_ERROR in said and ERROR not in said and "--attention=flash" in said.splitlines()[-1]


def test_a_plan_comes_before_minutes_of_compiling():
    """What does not fit by its plan, or is far slower by roofline, is not compiled; the answer is the same."""

    def gib(now):
        return 8 / now["gradient_accumulation_steps"] * (9 if now["attention"] == "plain" else 1)

    compiler, plan = Compiler(speed, gib), Compiler(speed, gib)
    best = Search(compiler, ["--attention=flash"], lambda _: None, 7200).run()
    fewer = Compiler(speed, gib)
    found = Search(fewer, ["--attention=flash"], lambda _: None, 7200, plan)
    assert found.run().changes == best.changes
    said = [trial.said for trial in found.trials if trial.said.startswith("not compiled")]
    assert any("its plan has 18.00 of" in text for text in said) and any("by roofline" in text for text in said)
    assert len(fewer.asked) < len(compiler.asked) - 3 and len(set(plan.asked)) == len(plan.asked)
    short = Compiler(speed, gib, seconds=10.0)
    Search(short, ["--attention=flash"], lambda _: None, 7200, Compiler(None)).run()  # a plan would raise
    assert len(short.asked) == len(compiler.asked)


def gib_by_several(now):
    """As a model of 8B: it fits by flash attention, remat and a mesh together, by none of them alone."""
    whole = 40.0 * (1 if now["attention"] == "flash" else 2)
    return whole / (2 if now["remat"] else 1) / (2 if now["mesh"] == "1x8x1" else 1)


@pytest.mark.parametrize(
    "gib, changes",
    [
        (lambda now: 10.0 if now["remat"] else 20.0, {"remat": True, "remat_keep": "attention"}),
        (gib_by_several, {"remat": True, "mesh": "1x8x1", "attention": "flash"}),
        (lambda now: 99.0, None),
    ],
)
def test_where_the_scripts_own_setting_does_not_fit_one_that_does_is_found(gib, changes):
    """Also where no single change makes it fit: the search once ended with nothing."""
    found = Search(Compiler(speed, gib), [], lambda _: None, 36000)
    best = found.run()
    assert not found.trials[0].fits
    assert best is None if changes is None else best.fits and changes.items() <= best.changes.items()


def test_unrolled_layers_are_tried_last_and_only_with_what_is_kept_of_them():
    """36 layers of 8B: 16 s to plan their loop, 5 minutes unrolled."""
    settings = SETTINGS | dict(remat=True, scan_layers=True, attention="flash")
    compiler = Compiler(
        lambda now: speed(now) * (1.0 if now["scan_layers"] else 0.5), lambda now: 14 if now["remat"] else 40, settings
    )
    found = Search(compiler, [], lambda _: None, 36000)
    assert found.run().changes["scan_layers"] is False
    unrolled = ["scan_layers" in trial.changes for trial in found.trials]
    assert unrolled == sorted(unrolled), "first all that a loop can tell"
    last = [trial for trial in found.trials if "scan_layers" in trial.changes]
    assert all(trial.changes["mesh"] == "1x8x1" for trial in last) and len(last) < 8
    (off,) = [trial for trial in last if trial.changes.get("remat") is False]
    assert "remat=False needs 40.0 GiB, and it about as much" in off.said


def test_time_ends_the_search_with_the_best_so_far():
    found = Search(Compiler(speed), [], lambda _: None, 200)
    best = found.run()
    assert len(found.trials) == 3 and best.changes and "minutes are over" in found.ended


def test_what_the_script_refuses_is_a_row_and_its_own_setting_an_error():
    found = Search(Compiler(speed, refused=lambda now: now["mesh"] == "1x8x1"), [], lambda _: None, 3600)
    assert found.run().changes["attention"] == "flash"
    assert "refused: the mesh does not divide" in verdict.format_trials(found.trials, found.best)
    with pytest.raises(search.ScriptError, match="own setting: refused") as caught:
        Search(Compiler(speed, refused=lambda now: True), [], lambda _: None, 3600).run()
    assert caught.value.exit_code == 2


def test_only_one_option_is_changed_when_asked():
    found = Search(Compiler(speed), [], lambda _: None, 3600)
    assert found.run(only=verdict.parse_only("mesh", False)).changes == {"mesh": "1x8x1"}
    assert all(trial.changes.keys() <= {"mesh"} for trial in found.trials) and len(found.trials) == 5
    alone = Search(Compiler(speed), [], lambda _: None, 3600)
    alone.run(only=["shard_parameters"])
    assert len(alone.trials) == 1 and "8 device(s) the script has none of the options to try" in alone.ended


def test_only_options_that_the_script_has():
    assert fastest.candidates({"mesh": 64, "learning_rate": 0.1}, 8, "v5e") == []
    names = [name for name, _ in fastest.candidates(SETTINGS, 1, "v5e")]
    assert "mesh" not in names and "global_batch_size" not in verdict.parse_only(None, False)
    own = SETTINGS | dict(compiler_options="xla_tpu_scoped_vmem_limit_kib=24576")
    assert dict(fastest.candidates(own, 1, "v5e"))["compiler_options"] == [own["compiler_options"]]
    for generation, least in (("v5e", "32768"), ("v6e", "65536")):  # v6e has 32,768 KiB by itself
        tried = dict(fastest.candidates(SETTINGS, 1, generation))["compiler_options"]
        assert tried[:2] == ["", f"xla_tpu_scoped_vmem_limit_kib={least}"]


def test_the_options_of_the_search_are_those_of_the_transformer():
    words = ["--preset=production", "--device=cpu"]
    settings = as_json(parse_command_line(TransformerConfig, "", words)) | {"mesh": "8x1x1"}

    def meshes(**changes):
        return dict(fastest.candidates(settings | changes, 8, "v5e"))["mesh"]

    tried = fastest.candidates(settings, 8, "v5e")
    assert meshes() == meshes(num_experts=0) == ["8x1x1", "1x8x1", "2x4x1", "4x2x1", "4x1x2"]
    assert meshes(mesh="1x2x1x4", sequence_length=32768)[5:] == ["1x4x1x2", "1x2x1x4", "1x1x1x8"]
    assert meshes(num_experts=12)[5:] == ["1x4x1x1x2", "1x2x1x1x4"], "12 experts are not shared by 8 devices"
    assert {name for name, _ in tried} == set(fastest.FIELDS) - {"shard_parameters", "windowed_einsum"}
    words += ["--remat", "--remat_keep=attention", "--offload=attention", "--num_layers=32"]
    for name, values in tried:
        for value in values:
            options = fastest.with_change(words, name, value)
            assert getattr(parse_command_line(TransformerConfig, "", options), name) == value


def test_the_cheapest_slice_comes_first():
    prices = verdict.parse_prices(["v5e=1.20", "v6e=2.70"], ["v5litepod-8", "v6e-8"])
    slow, fast = a_report(), a_report(topology="v6e-8", estimated_ms=50.0, estimated_per_second=2e4)
    best = {"v6e-8": fastest.Trial({}, [], fast), "v5litepod-8": fastest.Trial({}, [], slow), "v6e-4": None}
    table = verdict.format_slices(best, 3.6e8, prices).splitlines()
    assert [line.split()[1] for line in table[2:4]] == ["v5litepod-8", "v6e-8"]
    assert "96.00" in table[2] and "108.00" in table[3]  # 10 hours of 8 chips at 1.20; 5 of 8 at 2.70
    assert "v6e-4: no setting fits" in table
    assert verdict.format_slices(best, None, {}).splitlines()[2].split()[1] == "v6e-8"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--search", "--price", "v9=1"], "--price is 'v9=1'; expected a chip's price for an hour, such as v5e=1.20"),
        (["--search", "--price", "v5e=-1"], "--price is 'v5e=-1'"),
        (["--search", "--price", "v6e=1", "--tokens=1e9"], "--price says nothing of v5e"),
        (["--price", "v6e=1"], "--price says nothing of v5e; expected the price of each kind of chip"),
        (["--search", "--tokens=many"], "--tokens is 'many'; expected how many"),
        (["--search", "--plan", "--only=compiler_options"], "'compiler_options'; expected of attention, gradient"),
        (["--search", "--only=mesh,colour"], "--only says 'colour'; expected of attention, compiler_options, "),
        (["--search", "--only=global_batch_size"], "with --vary_batch also global_batch_size"),
        (["--search", "--minutes=0"], "--minutes is 0.0; expected more than 0"),
        (["--search", "--topology=v5litepod-9"], "nearest is v5litepod-8"),
        (["--search", "--diff", "--a", "--b"], "--search, --diff and --fit are three questions"),
        (["--picture", "a.gif"], "expected the name of a PNG file"),
        (["--picture", "absent/a.png"], "there is no folder"),
        (["--batch_per_device=0"], "--batch_per_device is 0; expected 1 or more"),
        (["--batch_per_device=8", "--fit=num_layers"], "--batch_per_device is for a script at one setting"),
        (["--plan", "--picture=x.png"], "--plan does not compile, and --picture needs a compiled program"),
        (["--plan", "--diff", "--a", "--b"], "--plan does not compile, and --diff needs a compiled program"),
        (["--compiler_dir=x"], "no effect without --compiler newest"),
        (["--dcn_gb_per_s=0"], "dcn_gb_per_s is 0.0; expected a speed above 0"),
        (["--compiler=newest", f"--compiler_dir={ROOT}/tests"], "something else than a newer compiler"),
        (["--compiler=newest", "--compiler_dir=/proc/x/y"], "give a folder that can be written"),
    ],
)
def test_wrong_usage_is_one_message(capsys, options, message):
    assert aot_tpu.main([str(TINY), "--topology=v5litepod-1", *options]) == 2
    said = capsys.readouterr()
    assert message in said.err and len(said.err.splitlines()) == 1 and not said.out


# --------------------------------------------------------------------------------------------------------------- rules
KERNEL = (
    "  %splash_mha_{0}_block_q_512_x.2 = (f32[1], bf16[8,12,1024,64]{{3,2,1,0:S(1)}}) custom-call(%a, %b), "
    'custom_call_target="tpu_custom_call", operand_layout_constraints={{s8[1,2,2]{{2,1,0}}, '
    "bf16[8,12,1024,64]{{3,2,1,0}}, bf16[8,12,1024,64]{{3,2,1,0}}, s32[1024,128]{{1,0}}}}\n"
)


V5E, V6E = parse_topology("v5litepod-1"), parse_topology("v6e-1")
PRODUCT = 0.75 * 2 * 8 * 12 * 1024**2 * 64 / (197e12 * 0.5)
"""Seconds of one product of KERNEL on a v5e: of blocks of 512 in 1,024 tokens three in four; heads of 64 fill half of
the matrix unit."""


def entry(lines: str):
    """The program of these lines."""
    return parse_program("ENTRY %main (a: f32[]) -> f32[] {\n" + lines + "}\n")


def kernels(*names: str, form: str = KERNEL) -> str:
    return "".join(form.format("fwd").replace("splash_mha_fwd_block_q_512_x", name) for name in names)


SPLASH = kernels(*(f"splash_mha_{kind}_block_q_512_x" for kind in ("fwd", "dkv", "dq")))
LAST = "bf16[8,12,1024,64]{3,2,1,0}, s32"  # the keys, of which there may be more than queries
MINOR = KERNEL.replace("1024,64]{{3", "64,1024]{{3")  # positions along the lanes
# jax 0.10 and tokamax have the settings as JSON on lines of their own, and tokamax a list of the blocks to visit
SAID = (
    SPLASH.replace("_block_q_512_x.2", "_no_residuals.1")
    .replace("}}\n", '}}, frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"block_q\\": 512}"\n}}\n')
    .replace("s8[1,2,2]{2,1,0}", "s32[], s8[3]{0}, s8[3]{0}")
)
FUSED = kernels("splash_mha_dkv_x").replace(
    "}}\n", '}}, a={k={\n"xprof_metadata":"{\\"block_q_dkv\\": 512, \\"use_fused_bwd_kernel\\": true}"\n}}\n'
)
NEWER = "bf16[8,2,12,1024,64]{4,3,2,1,0}"  # jax 0.7.1's has a gradient of q for each block of keys; newer ones name it


@pytest.mark.parametrize(
    "text, products",
    [
        (SPLASH, 2 + 4 + 3),
        (SPLASH.replace("bf16[8,12,1024,64]{3,", "bf16[12,1024,64]{"), 9 / 8),  # one row: no axis for it
        (SPLASH.replace("s8[1,2,2]", "s8[1,2,1]"), 9 * 0.5 / 0.75),  # a window: one block of two in each row of blocks
        (SPLASH.replace("_x.2", "_q_layout_2_x.2").replace("1024,64]{3", "64,1024]{3"), 9),
        (kernels("splash_mha_dkv_block_q_2048_block_q_dkv_512_use_fused_bwd_kernel_True"), 5),
        (kernels("vmap_splash_mqa_dkv_block_q_512_block_q_dkv_512_use_fused_bwd_kernel_False"), 4),
        (kernels("splash_mha_dkv_block_q_dkv_512_").replace("bf16[8,12,1024,64]{3,2,1,0:S(1)}", NEWER), 5),
        (SAID, 9),
        (SAID.replace("s8[3]", "s8[2]"), 9 * 0.5 / 0.75),
        (FUSED, 5),
        (SPLASH.replace("_block_q_512_x", ""), 9),  # of how many blocks it is told
        (SPLASH.replace(", s32[1024,128]{1,0}", ""), 9 / 0.75),  # no mask
        (SPLASH.replace(", s32[1024,128]{1,0}", ", s32[1024,128]{1,0}, s32[8,1024]{1,0}"), 9 / 0.75),  # segments alone
        (SAID.replace("s32[1024,128]{1,0}", "s8[1,512,512]{2,1,0}"), 9),  # a mask that tokamax has as blocks
        (SPLASH.replace(LAST, LAST.replace("1024", "4096")).replace("s8[1,2,2]", "s8[1,2,8]"), 9 * 4 / 0.75),
        (SPLASH.replace("_512_x", "_512_block_kv_1024_x").replace("s8[1,2,2]", "s8[1,2,1]"), 9 / 0.75),
        (SPLASH.replace("bf16[8,12,1024,64]{3,", "bf16[8,3,4,1024,64]{4,3,"), 9),  # two batch axes
        (kernels("causal_forward_3_blocks_of_512", "causal_backward_3_blocks_of_512", form=MINOR), 2 + 5),
    ],
)
def test_kernels_of_attention_are_so_many_products(text, products):
    assert ruled_ms(entry(text), V5E) == pytest.approx(products * PRODUCT * 1e3)
    on_v6e = products * PRODUCT * (197e12 * 0.5) / (918e12 * 0.25)  # a larger matrix unit is filled to a quarter
    assert ruled_ms(entry(text), V6E) == pytest.approx(on_v6e * 1e3)


def test_our_kernels_say_how_many_blocks_they_compute():
    from language.xla.flash_kernels import Blocks

    assert Blocks(512, 0, 1024, 1024, 0).name("forward") == "causal_forward_3_blocks_of_512"
    assert Blocks(128, 256, 128, 384, 0).name("backward") == "causal_backward_3_blocks_of_128"
    assert Blocks(128, 0, 1024, 1024, 128).name("forward") == "causal_forward_15_blocks_of_128"
    shared = [Blocks(128, first, 256, 2048, 0, 4).name("backward") for first in (0, 256)]  # each device's early blocks
    assert Blocks(128, 0, 512, 2048, 0, 4).name("backward") == "causal_backward_34_blocks_of_128"
    assert shared == ["causal_backward_9_blocks_of_128", "causal_backward_25_blocks_of_128"]  # the mean of four


# as jax 0.7.1 writes it; the rows in its name are those of an even share of the tokens
GROUPED = (
    "  %p = bf16[1024,4096]{{1,0}} parameter(0)\n  %w = bf16[8,4096,4096]{{2,1,0}} parameter(1)\n"
    '  %gmm.4 = bf16[1024,4096]{{1,0}} custom-call(%p, %w), custom_call_target="tpu_custom_call", '
    'metadata={{op_name="jit(product)/grouped_product_{0}x4096x4096/jit(gmm)/pallas_call"}}\n'
)
# as libtpu 0.0.52 writes it: the scores and V; heads of 64 fill half of the matrix unit
SOFTMAX = (
    "  %scores = bf16[96,1024,1024]{2,1,0} parameter(0)\n  %v = bf16[96,1024,64]{2,1,0} parameter(1)\n"
    '  %online-softmax.3 = bf16[96,1024,64]{2,1,0} custom-call(%scores, %v), custom_call_target="tpu_custom_call"\n'
)


# as libtpu 0.0.40 writes what a kernel says of itself, and as jax, which libtpu 0.0.21 leaves as it is
COUNTED = (
    '  %mine.4 = bf16[4096]{0} custom-call(), custom_call_target="tpu_custom_call", backend_config={'
    '"custom_call_config":{"body":"","cost_estimate":{"flops":"FLOPS","transcendentals":"0","bytes_accessed":"819000000"}}}\n'
)


@pytest.mark.parametrize(
    "text, seconds",
    [
        (COUNTED.replace("FLOPS", "197000000000000"), 1.0),
        (COUNTED.replace("FLOPS", "1"), 1e-3),
        (re.sub(r'"(flops|bytes_accessed)":"(\w+)"', r'"\1": \2', COUNTED).replace("FLOPS", "1"), 1e-3),
        (GROUPED.format(16384), 2 * 16384 * 4096**2 / 197e12),
        (GROUPED.format(256), 2 * (2 * 1024 * 4096 + 8 * 4096**2) / 819e9),
        (SOFTMAX, 2 * (96 * 1024**2 + 2 * 96 * 1024 * 64) / 819e9),
        (SOFTMAX.replace("1,0}", "1,0:S(1)}"), 2 * 96 * 1024**2 * 64 / (197e12 * 0.5)),  # all of it on the chip
    ],
)
def test_other_kernels_are_as_long_as_their_products_or_their_bytes_take(text, seconds):
    assert ruled_ms(entry(text), V5E) == pytest.approx(seconds * 1e3)


def test_kernels_without_a_price_are_named_with_how_often_they_run():
    plain = COUNTED.replace('"cost_estimate"', '"other"')
    text = kernels("causal_forward_3_blocks_of_512", form=MINOR) + plain + plain.replace("mine.4", "mine.4.clone")
    text += plain.replace("mine.4", "other.4") + plain.replace("mine.4 = bf16[4096]", "small.4 = bf16[64]")
    assert left_out(entry(text), V5E) == {"mine": 2, "other": 1}
    said = Report(**FACTS, program="", compiles=True, fits=True, reason="", left_out={"mine": 2}).with_prediction()
    assert "left out           kernels without a price, so the step takes longer" in format_report(said)
    for table in (format_table([said]), format_compilers([said])):
        assert "left out: kernels without a price" in table and "mine 2 times" in table


ON_HOST = """
%body (p: (bf16[64,1024])) -> (bf16[64,1024]) {
  %kept = bf16[64,1024]{1,0:S(5)} parameter(0)
  %row = bf16[1,1024]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %up = ((bf16[64,1024]{1,0:S(5)}, bf16[1,1024]{1,0}, s32[]), bf16[64,1024]{1,0:S(5)}, u32[]{:S(2)}) \
dynamic-update-slice-start(%kept, %row, %i)
  %work = bf16[1,1024]{1,0} fusion(%row), kind=kLoop, calls=%other, backend_config={"estimated_cycles":"CYCLES"}
  %up.done = bf16[64,1024]{1,0:S(5)} dynamic-update-slice-done(%up)
  %down = ((bf16[64,1024]{1,0:S(5)}, s32[]), bf16[1,1024]{1,0}, u32[]{:S(2)}) dynamic-slice-start(%up.done, %i)
  ROOT %down.done = bf16[1,1024]{1,0} dynamic-slice-done(%down)
}

ENTRY %main (a: f32[64,1024]) -> f32[64,1024] {
  %a = f32[64,1024]{1,0} parameter(0)
  %host = bf16[64,1024]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %start = ((f32[64,1024]{1,0}, s32[]), f32[8,1024]{1,0}, u32[]{:S(2)}) dynamic-slice-start(%a, %a)
  %done = f32[8,1024]{1,0} dynamic-slice-done(%start)
  %made = (bf16[64,1024]{1,0:S(5)}, f32[8,1024]{1,0}) concatenate(%host, %done)
  ROOT %w = (bf16[64,1024]{1,0:S(5)}) while(%host), body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""


# the same transfers as libtpu itself writes them: a plan is read from its text
CALLED = """
%put (k: bf16[64,1024], r: bf16[1,1024], i: s32[]) -> bf16[64,1024] {
  %k = bf16[64,1024]{1,0:S(5)} parameter(0)
  %r = bf16[1,1024]{1,0} parameter(1)
  ROOT %u = bf16[64,1024]{1,0:S(5)} dynamic-update-slice(%k, %r, %i)
}

%get (k: bf16[64,1024], i: s32[]) -> bf16[1,1024] {
  %k.1 = bf16[64,1024]{1,0:S(5)} parameter(0)
  ROOT %s = bf16[1,1024]{1,0} dynamic-slice(%k.1, %i)
}
""" + ON_HOST.replace(
    "dynamic-update-slice-start(%kept, %row, %i)", "async-start(%kept, %row, %i), calls=%put"
).replace("dynamic-slice-start(%up.done, %i)", "async-start(%up.done, %i), calls=%get").replace(
    "dynamic-update-slice-done(%up)", "async-done(%up)"
).replace("dynamic-slice-done(%down)", "async-done(%down)")


@pytest.mark.parametrize("text", [ON_HOST, CALLED], ids=["sugar", "called"])
def test_what_lies_on_the_host_costs_no_memory_bandwidth(text):
    """It once counted as if it went through the device's memory: 3.8 s too much for a step with activations there.
    The slice of 8 rows and the concatenation, which makes as much on the device, are all that the rule counts."""
    computations, row = parse_program(text.replace("CYCLES", "0")), 2048
    assert ruled_ms(computations, V5E) == pytest.approx(2 * 2 * 8 * 4096 / 819e9 * 1e3)
    moved = {"count": 5, "bytes": 5 * row}
    assert schedule.read_host_transfers(computations) == {"to host": moved, "from host": moved}
    assert read_cycles(computations)[1]["dynamic-slice-done"] == 0
    for cycles, hidden in ((1, 0.005), (100, 0.488), (10**6, 1.0)):  # beside the row going up; the other has nothing
        computations = parse_program(text.replace("CYCLES", str(cycles)))
        row_ms = row / 15e9 * 1e3
        assert schedule.exposed_ms(computations, V5E, 1) == pytest.approx(5 * (2 - hidden) * row_ms, rel=1e-3)


GATHERS = """
ENTRY %main (a: bf16[100,1000]) -> bf16[400,1000] {
  %a = bf16[100,1000]{1,0} parameter(0)
  %s = (bf16[100,1000]{1,0}, bf16[400,1000]{1,0}) all-gather-start(%a), channel_id=7, replica_groups={{0,1,2,3}}
  %t = (bf16[100,1000]{1,0}, bf16[400,1000]{1,0}) all-gather-start(%a), channel_id=8, replica_groups={{0,1,2,3}}
  %work = bf16[400,1000]{1,0} fusion(%a), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1500"}
  %d = bf16[400,1000]{1,0} all-gather-done(%s)
  %e = bf16[400,1000]{1,0} all-gather-done(%t)
  ROOT %more = bf16[400,1000]{1,0} fusion(%e), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"3000"}
}
"""
WORK = re.search("  %work(.*)", GATHERS)[1]
PIECES = f"""%piece (p: bf16[100,1000]) -> bf16[400,1000] {{
  ROOT %g = bf16[400,1000]{{1,0}} all-gather(%p), channel_id=7, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
}}

%body (a: bf16[100,1000]) -> bf16[400,1000] {{
  ROOT %p{WORK.replace("1500", "375").replace("%f", "%piece")}
}}

ENTRY"""


def test_collectives_over_one_link_run_one_after_the_other():
    """Each takes 3 us, and 1 us is beside the first. Those in fusions are in the budget of tiny_training.py."""
    found = schedule.exposed_ms(parse_program(GATHERS), parse_topology("v5litepod-4"), 4)
    assert found == pytest.approx(2 * 0.003 - 0.001)
    loop = ' = bf16[400,1000]{1,0} while(%a), body=%body, backend_config={"known_trip_count":{"n":"4"}}'
    looped = GATHERS.replace(WORK, loop).replace("ENTRY", PIECES)  # the same 1 us, and no wait in each round
    found = schedule.exposed_ms(parse_program(looped), parse_topology("v5litepod-4"), 4)
    assert found == pytest.approx(2 * 0.003 - 0.001)


LOOP = """
%fused (param_0: f32[64,1024], param_1: s32[]) -> f32[1,1024] {
  %param_0 = f32[64,1024]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  ROOT %dynamic-slice.1 = f32[1,1024]{1,0} dynamic-slice(%param_0, %param_1, %param_1), dynamic_slice_sizes={1,1024}
}

%body (p: (f32[64,1024])) -> (f32[64,1024]) {
  %stack = f32[64,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,1024]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
  %chip = f32[1,1024]{1,0:S(1)} fusion(%row), kind=kLoop, calls=%other, backend_config={"estimated_cycles":"100"}
  %sum = f32[1,1024]{1,0} all-reduce(%row), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %dynamic-update-slice.1 = f32[64,1024]{1,0} dynamic-update-slice(%stack, %row, %i, %i)
}

ENTRY %main (a: f32[64,1024]) -> f32[64,1024] {
  %a = f32[64,1024]{1,0} parameter(0)
  %w = (f32[64,1024]) while(%a), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %sort.1 = f32[64,1024]{1,0} sort(%a), dimensions={0}
}
"""

ROWS_OF_BYTES = """
%lookup (table: s8[4096,1024], which: s32[8]) -> s8[8,1024] {
  %table = s8[4096,1024]{1,0:T(32,128)(4,1)} parameter(0)
  %tiles = s8[4096,1024]{1,0:T(8,128)(4,1)} fusion(%table), kind=kLoop, output_to_operand_aliasing={}, calls=%c
  %which = s32[8]{0} parameter(1)
  ROOT %gather.1 = s8[8,1024]{1,0:T(8,128)(4,1)} gather(%tiles, %which), offset_dims={1}, slice_sizes={1,1024}
}

ENTRY %main (a: s8[4096,1024], b: s32[8]) -> s8[8,1024] {
  %a = s8[4096,1024]{1,0:T(32,128)(4,1)} parameter(0)
  %b = s32[8]{0} parameter(1)
  ROOT %rows = s8[8,1024]{1,0:T(8,128)(4,1)} fusion(%a, %b), kind=kCustom, calls=%lookup
}
"""


def test_loops_and_slices_count_what_they_move():
    computations = parse_program(LOOP)
    row, stack = 4096, 64 * 4096
    # a row is read out of the stack and written, read again into on-chip memory, read and written into the stack
    reduced = {"count": 5, "bytes": 5 * row, "sent_bytes": 5 * row * 2 * 3 / 4}
    assert read_collectives(computations, num_devices=8) == {"all-reduce": reduced}
    assert sum(read_cycles(computations)[0].values()) == 5 * 2 * 100
    assert moved_bytes(computations) == 5 * (2 * row + 4 + row + 2 * row) + 2 * stack
    assert ruled_ms(computations, V5E) == pytest.approx(2 * stack / 819e9 * 1e3)
    assert moved_bytes(parse_program(ROWS_OF_BYTES)) == 8 * 1024 + 8 * 4 + 8 * 1024, "in another tiling: its rows"


# ---------------------------------------------------------------------------------------------------------- prediction
def test_the_predicted_step_is_first_and_has_everything_in_it():
    r = a_report(ruled_ms=25.0, estimated_mfu=0.5, communication_lower_bound_ms=40.0, exposed_ms=10.0)
    assert (r.predicted_ms, r.predicted_mfu, r.predicted_per_second) == (125.0, 0.4, 8000.0)
    assert (r.predicted_ms_all_hidden, r.predicted_ms_nothing_hidden) == (135.0, 165.0)
    text = format_report(r)
    assert "predicted step     125.000 ms, 8,000 tokens/s, MFU 40.0% (not measured: " in text
    whole = "  whole step         135.000 to 165.000 ms, 7,407 to 6,061 tokens/s, MFU 37.0% to 30.3% (communication: "
    assert whole in text and text.index(whole) < text.index("predicted step")
    assert "the compiler's estimate 100.000 ms, by rule 25.000 ms" in text and "MFU 50" not in text
    host = dataclasses.replace(r, host_transfer_ms=100.0, host_transfers={"to host": {"count": 1, "bytes": 5e6}})
    assert host.with_prediction().predicted_ms_nothing_hidden == 265.0
    assert "host memory        5.0 MB to host: at least 100.000 ms over PCIe" in format_report(host)
    between = dataclasses.replace(r, slice_transfers={"all-reduce": {"sent_bytes": 2e9}}, network_gb_per_s=10.0)
    assert between.with_prediction().predicted_ms_all_hidden == 200.0, "a step does not end before its own transfers"
    assert format_table([r]).splitlines()[2].count("125.00") == 1 and "compile s" in format_table([r])
    assert "plan s" in format_table([dataclasses.replace(r, reason=PLANNED, compiles=False)])


def test_a_billion_tokens_are_said_in_chip_hours_and_money():
    """8 chips, 10,000 tokens/s in 100 ms: 222 chip-hours; with communication 110 to 140 ms."""
    r = a_report(communication_lower_bound_ms=40.0, exposed_ms=10.0)
    assert "a billion tokens   244.4 to 311.1 chip-hours\n" in format_report(r)
    priced = dataclasses.replace(r, price=1.2)
    assert "244.4 to 311.1 chip-hours, cost 293.3 to 373.3\n" in format_report(priced)
    assert "v5litepod-8: a billion tokens: 244.4 to 311.1 chip-hours, cost" in format_table([priced, r])
    assert "a billion tokens   222.2 chip-hours\n" in format_report(a_report())
    cores = a_report(topology="v5p-8", devices=4)
    assert "a billion tokens   111.1 chip-hours\n" in format_report(cores), "v5p-8 has four chips"
    assert "billion" not in format_report(a_report(unit="examples"))
    assert "a billion examples 222.2 chip-hours, cost" in format_report(a_report(unit="examples", price=1.2))


def test_a_price_and_tokens_without_a_search_are_in_the_report(monkeypatch, capsys):
    monkeypatch.setattr(aot_tpu, "compile_script", lambda *_: a_report())
    assert aot_tpu.main([str(TINY), "--topology", "v5litepod-8", "--price", "v5e=2", "--tokens", "2e9"]) == 0
    assert "2,000,000,000 tokens 55.56 hours, 444.4 chip-hours, cost 888.9\n" in capsys.readouterr().out


def test_the_error_is_said_until_the_user_has_measured():
    for text in (format_report(a_report()), format_table([a_report(), a_report(topology="v6e-8")])):
        assert text.count("real time of 28 published steps was 21 % below to 34 % above the prediction") == 1
    known = a_report(calibration="measured on v5e: 1.1 x the predicted step")
    for text in (format_report(known), format_table([known])):
        assert "20 published" not in text and "1.1 x the predicted" in text


def test_a_memory_bound_step_says_what_the_cost_model_assumes():
    bound = a_report(topology="v5litepod-1", devices=1, moved_bytes=819e6 * 30, model_flops=197e9 * 20, flops=0.0)
    assert "about half the published bandwidth; the bytes moved need 30.000 ms at it" in format_report(bound)
    assert "memory-bound: v5litepod-1" in format_table([bound])
    for other in (dict(model_flops=197e9 * 40), dict(moved_bytes=819e6 * 24)):  # ms of products; little of 100 ms
        text = format_report(dataclasses.replace(bound, **other))
        assert "half" not in text and "half" not in format_table([dataclasses.replace(bound, **other)])


def test_the_reserve_calls_right_what_hardware_loaded():
    with (ROOT / "docs" / "results" / "loads.csv").open() as file:
        rows = list(csv.DictReader(file))
    kept_apart = [row for row in rows if row["used for the rule"] == "no"]
    assert len(rows) == 8 and len(kept_apart) == 4
    for row in rows:
        needed = float(row["compiled GiB"]) + (1 + RESERVE) * float(row["executable GiB"])
        assert (needed <= parse_topology("v6e-8").hardware.limit_gib) == (row["loaded"] == "yes"), row
        if row["peak GiB when it ran"]:
            assert needed == pytest.approx(float(row["peak GiB when it ran"]), abs=0.25)


@pytest.mark.parametrize("peak, activations", [(15, 11), (0, 14), (3, 14), (99, 14)])
def test_memory_is_the_compilers_own_peak_and_the_program(peak, activations):
    """Its figure of temporaries would make 17 GiB of 15 beside the program. A peak above that is of another memory."""
    sizes = dict(argument_bytes=4 * GIB, output_bytes=GIB, temporary_bytes=13 * GIB, program_bytes=2 * GIB)
    compiled = Compiled(text="", peak_bytes=peak * GIB, flops=0.0, seconds=0.0, **sizes)
    memory = read_memory(compiled, {"ENTRY": []}, ())
    assert memory["activations"] == activations * GIB
    assert sum(memory.values()) == (4 + activations + 2 + 1) * GIB
    r = a_report(peak_bytes=sum(memory.values()), memory=memory)
    assert f"{7 + activations}.00 of 15.75 GiB" in format_report(r) and r.over_bytes == r.peak_bytes - r.limit_bytes


# ---------------------------------------------------------------------------------------------------------- difference
def test_two_sides_may_begin_with_dashes():
    argv = ["script.py", "--diff", "--remat", "--no-remat", "--mesh=1x1x1"]
    assert difference.take_sides(argv) == (["script.py", "--mesh=1x1x1"], ("--remat", "--no-remat"))
    assert difference.take_sides(["script.py"]) == (["script.py"], None)
    with difference.side("script.py", ["--remat", "--seed", "1"], "--no-remat --mesh 1x8x1") as (path, options):
        assert (str(path), options) == ("script.py", ["--seed", "1", "--no-remat", "--mesh", "1x8x1"])


def program(cycles, sent):
    """Two operations with an estimate and a gather, as the compiler writes them."""
    priced = '  %f.{0} = f32[8]{{0}} fusion(%a), calls=%x, metadata={{op_name="m.py_{0}/a"}}, backend_config={1}\n'
    estimate = '{{"estimated_cycles":"{}"}}'
    gather = '  %g = f32[{}]{{0}} all-gather(%a), replica_groups={{{{0,1,2,3}}}}, metadata={{op_name="m.py_9/x"}}\n'
    lines = priced.format(7, estimate.format(cycles)), priced.format(9, estimate.format(1500)), gather.format(sent)
    return "ENTRY %main (a: f32[]) -> f32[] {\n" + "".join(lines) + "}\n"


def test_two_programs_side_by_side():
    a = a_report(memory={"parameters": GIB, "activations": GIB}, peak_bytes=2 * GIB)
    b = a_report(memory={"parameters": GIB, "activations": 3 * GIB}, peak_bytes=4 * GIB)
    text = difference.format_difference(("x", "y"), (a, program(1_500_000, 10**6)), (b, program(3_000_000, 2 * 10**6)))
    lines = [line.split() for line in text.splitlines()]
    assert ["activations", "1.000", "3.000", "+2.000"] in lines
    assert ["m.py:7", "1.000", "2.000", "+1.000"] in lines
    assert not any(line[:1] == ["m.py:9"] for line in lines)  # no difference
    assert ["all-gather,", "m.py:9", "3.0", "6.0", "+3.0"] in lines
    assert "collectives by source line, how many: no difference" in text


def test_commits_are_compiled_in_folders_of_their_own(asked, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(difference, "format_difference", lambda names, a, b: f"{names} {a[0].fits} {b[1]}")
    repository = tmp_path / "repository"
    repository.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e@e"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "none"]):
        subprocess.run([*git, *command], check=True)
    script = repository / "script.py"
    for text in ("1", "2"):
        script.write_text(text)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", text], check=True)
    command = [str(script), "--topology=v5litepod-8", "--seed=1", "--diff"]
    assert aot_tpu.main([*command, "HEAD~1", "HEAD"]) == 0
    assert "('HEAD~1', 'HEAD') True HloModule m" in capsys.readouterr().out
    assert [words[:2] for words in asked] == [["-m", "tpu_compiler.of_script"]] * 2
    scripts = [Path(words[2]) for words in asked]
    assert all(path.name == "script.py" and "--seed=1" in words for path, words in zip(scripts, asked, strict=True))
    assert not any(path == script or path.exists() for path in scripts)
    assert len(subprocess.run([*git, "worktree", "list"], capture_output=True, text=True).stdout.splitlines()) == 1
    for sides, message in (
        (("HEAD~9", "HEAD"), "--diff 'HEAD~9': no such commit"),
        (("HEAD~2", "HEAD"), "--diff 'HEAD~2': there is no script.py in that commit"),
    ):
        assert aot_tpu.main([*command, *sides]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "script.py").write_text("")
    assert aot_tpu.main([str(tmp_path / "script.py"), *command[1:], "HEAD~1", "HEAD"]) == 2
    assert "is in no git repository" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- picture
def test_the_picture_and_what_is_in_it(tmp_path):
    small = a_report(topology="v5litepod-1", devices=1, moved_bytes=819e6, model_flops=197e9, flops=0.0)
    assert bounds(small) == pytest.approx(dict(compute=1.0, memory=1.0, links=0.0, predicted=100.0))
    large = a_report(estimated_per_second=4e4, ruled_ms=50.0, exposed_ms=50.0, moved_bytes=1e9)
    assert step_ms(large) == 200.0
    # 4,000 examples in 200 ms on 8 devices, 1,000 in 100 ms on one
    assert efficiencies([large, small]) == {"v5e": [(1, 1.0), (8, pytest.approx(0.25))]}
    draw([small, large, a_report(topology="v6e-8", moved_bytes=1e9)], tmp_path / "slices.png")
    assert (tmp_path / "slices.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing compiles"):
        draw([a_report(compiles=False)], tmp_path / "none.png")


def test_a_batch_for_each_device():
    assert aot_tpu.with_batch(["--a=1"], "v5litepod-8", 4) == ["--a=1", "--global_batch_size", "32"]
    assert aot_tpu.with_batch(["--a=1"], "v5litepod-8", None) == ["--a=1"]
