"""plot_run.py: what stands in the figure is what stands in the files; broken and unfinished runs; refusals."""

import io
import json
import os
import sys
import warnings

import numpy as np
import pytest
from mutations import at_most, mutated_json, no_hang
from processes import ROOT
from run_files import in_process, summary_in

from tools import plot_run
from tpu_utils.base.errors import InputError, run_script


def make_run(folder, steps=40, unit="examples", floor=None, finished=True, accuracy=True, experts=None):
    """A run directory as the scripts write it. Loss of step s: 10 / s. experts: of a mixture, tokens of each expert of
    each layer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"seed": 0}))
    lines = []
    for step in range(10, steps + 1, 10):
        train = dict(loss=10 / step, learning_rate=1e-3 * step, mfu=None, data_wait_seconds=0.0)
        lines.append(dict(kind="train", step=step, **train, **{f"{unit}_per_second": 100.0 + step}))
        evaluated = ({"accuracy": 0.9} if accuracy else {}) | ({"tokens_of_experts": experts} if experts else {})
        lines.append(dict(kind="eval", step=step, test_loss=12 / step, **evaluated))
        lines.append(dict(kind="checkpoint", step=step, wait_seconds=0.1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        goodput = {"start_up": 1.0, "step": 3.0, "other": 0.0}
        summary = dict(steps=steps, loss_floor=floor, seconds=4.0, goodput=goodput)
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def panel(figure, title):
    return next(axes for axes in figure.axes if axes.get_title(loc="left").startswith(title))


def curves(axes, label):
    return [line.get_xydata() for line in axes.lines if line.get_label() == label]


def texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def call(*arguments) -> int:
    sys.argv = ["tools.plot_run", *map(str, arguments)]
    return run_script(plot_run.main)


def test_every_value_of_the_files_is_in_the_figure(tmp_path):
    figure = plot_run.plot([plot_run.read_run(make_run(tmp_path / "a", floor=0.2))])
    steps = np.arange(10, 41, 10)
    loss = panel(figure, "loss")
    np.testing.assert_allclose(curves(loss, "loss"), [np.c_[steps, 10 / steps]])
    np.testing.assert_allclose(curves(loss, "test_loss"), [np.c_[steps, 12 / steps]])
    assert set(curves(loss, "floor 0.2000: no model can do better")[0][:, 1]) == {0.2}
    np.testing.assert_allclose(curves(panel(figure, "accuracy (%)"), "accuracy"), [np.c_[steps, [90] * 4]])
    np.testing.assert_allclose(curves(panel(figure, "learning"), "learning_rate"), [np.c_[steps, 1e-3 * steps]])
    speed = panel(figure, "throughput (examples per second)")
    np.testing.assert_allclose(curves(speed, "examples_per_second"), [np.c_[steps, 100 + steps]])
    bars = {bars.get_label(): bars.patches[0] for bars in panel(figure, "where the time").containers}
    assert {name: bar.get_width() for name, bar in bars.items()} == {"start_up": 25, "step": 75, "other": 0}
    assert bars["step"].get_x() == 25, "stacked"
    assert "4 s" in [text.get_text() for text in panel(figure, "where the time").texts]


def test_the_load_of_each_expert_is_a_row_and_each_evaluation_a_column(tmp_path):
    even, uneven = [[30, 30, 30], [30, 30, 30]], [[90, 0, 0], [15, 30, 45]]
    folder = make_run(tmp_path / "a", experts=even, finished=False)
    add_line(folder, kind="eval", step=50, test_loss=0.2, tokens_of_experts=uneven)
    found = plot_run.read_run(folder)
    axes = panel(plot_run.plot([found]), "tokens of experts (1: even share), a")
    (drawn,) = axes.collections
    np.testing.assert_allclose(drawn.get_array(), np.c_[np.ones((6, 4)), [3, 0, 0, 0.5, 1, 1.5]])
    np.testing.assert_allclose(drawn.get_coordinates()[0, :, 0], [0, 10, 20, 30, 40, 50])
    assert axes.get_ylim() == (2, 0) and axes.get_ylabel() == "layer, 3 experts each"
    runs = [found, *(plot_run.read_run(make_run(tmp_path / n, experts=e)) for n, e in (("b", uneven), ("dense", None)))]
    titles = {axes.get_title(loc="left") for axes in plot_run.plot(runs).axes if axes.collections}
    assert titles - {""} == {f"tokens of experts (1: even share), {name}" for name in ("a", "b")}


def kept_running(folder):
    summary = json.loads((folder / "summary.json").read_text())
    lost = dict(restart=2.0, recompile=1.0, lost_steps=3.0, silence=0.0, waiting=2.0)
    again = dict(attempts=3, seconds=20.0, ended_by=["killed by SIGKILL", "silent for 9 s"], lost_seconds=lost)
    (folder / "summary.json").write_text(json.dumps(summary | dict(keep_running=again)))
    return folder


def test_what_was_lost_to_restarts_is_a_bar_of_its_own(tmp_path):
    figure = plot_run.plot([plot_run.read_run(kept_running(make_run(tmp_path / "a")))])
    axes = panel(figure, "where the time")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "all 3 attempts"]
    widths = {bars.get_label(): bars.patches[0].get_width() for bars in axes.containers}
    parts = dict(kept_work=60, restart=10, recompile=5, lost_steps=15, silence=0, waiting=10)
    assert widths == dict(start_up=25, step=75, other=0) | parts
    assert {"4 s", "20 s"} <= {text.get_text() for text in axes.texts}


def test_several_runs_of_different_kinds_share_a_figure(tmp_path):
    folders = [
        make_run(tmp_path / "a" / "run", floor=0.2),
        make_run(tmp_path / "b" / "run", unit="tokens", floor=1.2, accuracy=False),
        make_run(tmp_path / "c" / "third", finished=False),
    ]
    figure = plot_run.plot([plot_run.read_run(folder) for folder in folders])
    named = texts(figure)
    assert {"a/run", "b/run", "c/third (unfinished, step 40)"} <= set(named)
    loss = panel(figure, "loss")
    assert len(curves(loss, "loss")) == 3
    floors = [text.get_text() for text in loss.get_legend().texts if text.get_text().startswith("floor")]
    assert floors == ["floor 0.2000: no model can do better", "floor 1.2000: no model can do better"]
    assert len(curves(panel(figure, "throughput (tokens"), "tokens_per_second")) == 1
    assert len(curves(panel(figure, "throughput (examples"), "examples_per_second")) == 2
    goodput = panel(figure, "where the time")
    assert [label.get_text() for label in goodput.get_yticklabels()] == ["a/run", "b/run", "c/third"]
    assert "goes on" in [text.get_text() for text in goodput.texts]
    assert len({line.get_color() for line in loss.lines if line.get_label() == "loss"}) == 3


@pytest.mark.parametrize("count", [1, 12])
def test_no_text_lies_on_another(tmp_path, count):
    runs = [plot_run.read_run(make_run(tmp_path / f"a_rather_long_name_of_a_run_{i}", steps=400)) for i in range(count)]
    runs.append(plot_run.read_run(kept_running(make_run(tmp_path / "again", experts=[[1, 2]] * 12))))
    figure = plot_run.plot(runs)
    figure.draw_without_rendering()
    boxes = []
    for axes in figure.axes:
        boxes += [axes._left_title, axes.xaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            boxes += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes += [text for legend in figure.legends for text in legend.get_texts()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in boxes if text.get_text() and text.get_visible()]
    for i, (name, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, name
        for other_name, other in boxes[i + 1 :]:
            # corners of two axes' tick labels may touch; nothing may cover
            shared = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
            assert min(shared) <= 1, (name, other_name)


def test_a_repeated_line_a_gap_and_a_loss_over_many_decades(tmp_path):
    """A line that a resumed run wrote again counts once; panels have the same steps, and a scale has labels."""
    folder = make_run(tmp_path / "a", finished=False)
    add_line(folder, kind="train", step=20, loss=7.0, learning_rate=0.1)
    add_line(folder, kind="eval", step=40, test_loss=7e30, accuracy=1.0)
    add_line(folder, kind="train", step=50, loss=None, learning_rate=0.1, examples_per_second=None)
    figure = plot_run.plot([plot_run.read_run(folder)])
    figure.draw_without_rendering()
    loss, accuracy = panel(figure, "loss"), panel(figure, "accuracy")
    np.testing.assert_allclose(curves(loss, "loss")[0], np.c_[[10, 20, 30, 40, 50], [1, 7, 10 / 30, 0.25, np.nan]])
    assert loss.get_xlim() == accuracy.get_xlim()
    low, high = loss.get_ylim()
    labels = [t for t, y in zip(loss.get_yticklabels(), loss.get_yticks(), strict=True) if low <= y <= high]
    assert len([label for label in labels if label.get_text()]) >= 3


def test_a_single_evaluation_is_told_from_the_training(tmp_path):
    loss = panel(plot_run.plot([plot_run.read_run(make_run(tmp_path / "one", steps=10))]), "loss")
    (single,) = [line for line in loss.lines if line.get_label() == "test_loss"]
    legend = loss.get_legend()
    markers = dict(zip([text.get_text() for text in legend.texts], legend.legend_handles, strict=True))
    assert single.get_marker() == markers["evaluation"].get_marker() != markers["training"].get_marker()


def test_a_truncated_a_missing_and_an_empty_file_are_named(tmp_path, capsys):
    cut, missing, empty = (make_run(tmp_path / name, finished=False) for name in ("cut", "missing", "empty"))
    content = (cut / "metrics.jsonl").read_bytes()
    (cut / "metrics.jsonl").write_bytes(content[:-20])
    (missing / "metrics.jsonl").unlink()
    (empty / "metrics.jsonl").write_bytes(b"")
    assert call(cut, missing, empty, "--output", tmp_path / "x.png") == 0
    said = capsys.readouterr()
    assert f"{cut}/metrics.jsonl: damaged lines are left out: 1, the first 12;" in said.err
    for folder in (missing, empty):
        assert f"{folder}/metrics.jsonl is missing or holds no lines to draw" in said.err
    assert said.out == f"{tmp_path}/x.png\n" and (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_a_summary_older_than_the_run_is_left_out(tmp_path, capsys):
    folder = make_run(tmp_path / "a")
    (folder / "summary.json").write_text(json.dumps({"steps": 20, "goodput": {"step": 1.0}}))
    assert plot_run.read_run(folder).bars == {"": {}}
    assert "is of step 20, but the run is at 40" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent"], "absent is no folder with a config.json; expected a run directory; there are empty, good"),
        (["."], "is no folder with a config.json; expected a run directory; there are empty, good"),
        (["gs://bucket/run"], "is in a bucket; fetch it first: gcloud storage cp"),
        (["empty"], "there is nothing to draw"),
        (["good", "--output", "x.gif"], "expected a name that ends with one of .png, .pdf, .svg"),
        (["good", "--output", "no/x.png"], "the folder of output no/x.png is not there; make it first: mkdir -p no"),
        (["n" * 300], "File name too long"),
        ([], "0 runs were named; expected 1 to 100 in one picture"),
        ([*map(str, range(101))], "101 runs were named; expected 1 to 100 in one picture"),
        (["good", "empty", "--script", "x.py"], "2 runs were named; expected 1 to 1"),
    ],
)
def test_bad_input_gives_one_message_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "good")
    (make_run(tmp_path / "empty", finished=False) / "metrics.jsonl").write_text("")
    assert call(*arguments) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_with_its_script_what_a_run_misreads_is_drawn_too(tmp_path, capsys):
    options = ["--device=cpu", "--num_epochs=1", "--warmup_steps=2", "--channels=4", "--hidden_dim=8"]
    assert in_process(*options, "--run_dir", tmp_path / "run") == 0
    capsys.readouterr()
    script = ROOT / "simple_mnist_tpu.py"
    assert call(tmp_path / "run", "--script", script) == 0
    said = capsys.readouterr().out
    wrong = round((1 - summary_in(tmp_path / "run")["test_accuracy"]) * 360)
    assert f"{tmp_path}/run: {wrong} of 360 test images misread after step 22\n" in said
    assert (tmp_path / "run" / "plot_misread.png").read_bytes()[:4] == b"\x89PNG"
    for wrong, expected in ((tmp_path / "no.py", "no such script"), (ROOT / "aot_tpu.py", "has no train")):
        assert call(tmp_path / "run", "--script", wrong) == 2 and expected in capsys.readouterr().err


def test_no_damage_of_a_run_is_a_crash(tmp_path, capsys):
    """Each damaged run is read or refused; every tenth that was read is drawn, all in one picture."""
    good = make_run(tmp_path / "good", floor=0.2, experts=[[3, 4], [7, 0]])
    lines = (good / "metrics.jsonl").read_bytes().splitlines()
    damaged = [mutated_json(json.loads(line), 90, place) for place, line in enumerate(lines)]
    summaries = mutated_json(json.loads((good / "summary.json").read_text()), 90, 50)
    configs = mutated_json({"a": 0}, 90)
    random, runs, refused = np.random.default_rng(0), [], 0
    for number in range(90):
        (folder := tmp_path / str(number)).mkdir()
        chosen = [next(damaged[i]) if random.integers(5) == 0 else line for i, line in enumerate(lines)]
        (folder / "metrics.jsonl").write_bytes(b"\n".join(chosen))
        (folder / "summary.json").write_bytes(next(summaries) if number % 2 else (good / "summary.json").read_bytes())
        (folder / "config.json").write_bytes(next(configs) if number % 9 == 0 else b"{}")
        try:
            runs.append(plot_run.read_run(folder))
        except InputError as error:
            refused += 1
            assert str(folder) in str(error) and "expected" in str(error)
    assert 10 < refused < 80 and len(capsys.readouterr().err.splitlines()) < 180
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a layout too high for its figure
        plot_run.plot(runs[::10]).savefig(io.BytesIO(), dpi=20)


def add_line(folder, **fields):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("config.json", b"[]", "holds list; expected a JSON object"),
        ("summary.json", b'{"steps": "forty"}', "'forty' is no number"),
        ("summary.json", b'{"steps": 40, "goodput": [1]}', "goodput is [1], not the seconds of each phase"),
        ("summary.json", b'{"steps": 40, "goodput": {"step": -1}}', "goodput is {'step': -1}, not the seconds"),
        ("summary.json", b'{"steps": 40, "goodput": {"step": 1e999}}', "[inf] is no number, or too large"),
        ("summary.json", b'{"steps": 40, "keep_running": [1]}', "lost_seconds is [1], not the seconds of each phase"),
        ("summary.json", b'{"steps": 40, "keep_running": {"lost_seconds": 7}}', "lost_seconds is 7, not the seconds"),
        *((name, None, "is a FIFO") for name in ("config.json", "metrics.jsonl", "summary.json")),
    ],
)
def test_files_that_no_run_writes_are_refused(tmp_path, capsys, name, content, said):
    folder = make_run(tmp_path / "a")
    (folder / name).unlink()
    (folder / name).write_bytes(content) if content else os.mkfifo(folder / name)
    with no_hang():
        assert call(folder) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {folder}/{name}") and said in message and "expected" in message
    assert message.count("\n") == 1


def test_lines_that_no_run_writes_are_left_out_and_named(tmp_path, capsys):
    folder = make_run(tmp_path / "a", experts=[[30, 30, 30], [30, 30, 30]], finished=False)
    bad = [dict(loss=value) for value in ("high", 10**400, [], {}, -1e308)] + [dict(test_loss=1.0, loss_floor="low")]
    tables = ([[1, 2], [3]], [[90, {}, 1], [1, 1, 1]], [[30, 30], [30, 30]], [[None]], "none", [])
    for fields in [*bad, *(dict(tokens_of_experts=table) for table in tables)]:
        add_line(folder, kind="eval", step=60, **fields)
    found = plot_run.read_run(folder)
    said = "damaged lines are left out: 12, the first 13, 14, 15, 16, 17, 18, 19, 20;"
    assert said in capsys.readouterr().err and found.last_step == 40


def test_a_line_without_end_and_a_long_log_take_little_memory(tmp_path):
    folder = make_run(tmp_path / "a", finished=False)
    path = folder / "metrics.jsonl"
    with path.open("r+b") as file:
        file.seek(32 << 20, os.SEEK_END)
        file.write(b"\n")
    with at_most(8 << 20):
        assert plot_run.read_run(folder).last_step == 40
    line = '{"kind":"train","step":%d,"loss":1.5,"learning_rate":0.001,"examples_per_second":100.5}\n'
    path.write_text("".join(line % step for step in range(10_000)))
    with at_most(2 * path.stat().st_size):
        assert len(plot_run.read_run(folder).curves["train", "loss"][0]) == 10_000


def test_names_that_are_no_text_are_drawn(tmp_path):
    folders = [make_run(tmp_path / os.fsdecode(name)) for name in (b"\xff$x_{$", b"a (1)", b"a (2)", b"new\nline")]
    assert call(*folders, "--output", tmp_path / "x.png") == 0
    assert {"?$x_{$", "a (1)", "a (2)", "new?line"} <= set(texts(plot_run.plot([*map(plot_run.read_run, folders)])))
