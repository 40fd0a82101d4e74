"""transformer_tpu.py --dataset stream as users run it: killed, on several hosts, with wrong data."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from documents import write_corpus, write_documents
from processes import ROOT, free_port, run, start, waits
from run_files import assert_identical, read_lines, state_in

OPTIONS = ["--dataset=stream", "--train_data=part_*", "--num_steps=24", "--global_batch_size=8", "--warmup_steps=2"]
OPTIONS += ["--log_every=2", "--save_every=4", "--keep_checkpoints=99", "--stream_window=10", "--eval_every=12"]
OPTIONS += ["--sequence_length=32", "--embedding_dim=32", "--num_layers=1", "--eval_batches=2", "--no_tensorboard"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, 8, 60)
    return folder


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The run directory of a run that was never stopped."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = run("transformer_tpu.py", *OPTIONS, f"--data_dir={corpus}", f"--run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    said = "data       stream of 2 jsonl, 2 jsonl gz, 2 jsonl zst, 2 parquet, "
    assert said in done.stdout and " MB; 8 lanes; " in done.stdout and " tokens/s\n" in done.stdout
    return run_dir


def positions_in(folder: Path) -> list:
    return json.loads((folder / "state.json").read_text())["values"]["position"]


def test_killed_and_resumed_the_weights_and_the_position_are_the_same(corpus, whole, tmp_path):
    run_dir = tmp_path / "killed"
    options = [*OPTIONS, f"--data_dir={corpus}", f"--run_dir={run_dir}"]
    killed = start("transformer_tpu.py", *options)
    waits(lambda: (run_dir / "checkpoints/step_00000008/done").exists(), alive=killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (run_dir / "summary.json").exists()
    resumed = run("transformer_tpu.py", *options, "--resume=must", "--stream_workers=1", "--prefetch_batches=1")
    assert resumed.returncode == 0 and "resumed    after step" in resumed.stdout, resumed.stderr
    last = [place / "checkpoints/step_00000024" for place in (whole, run_dir)]
    assert_identical(*map(state_in, last))
    assert positions_in(last[0]) == positions_in(last[1])
    train, again = (
        [line["loss"] for line in read_lines(place) if line["kind"] == "train"] for place in (whole, run_dir)
    )
    assert train == again


def test_two_hosts_go_on_where_one_stood(corpus, whole, tmp_path):
    """Each host gives its position to the first one, which writes."""
    run_dir = tmp_path / "hosts"
    shutil.copytree(whole / "checkpoints/step_00000012", run_dir / "checkpoints/step_00000012")
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(whole / name, run_dir / name)
    options = [*OPTIONS, f"--data_dir={corpus}", f"--run_dir={run_dir}", "--resume=must"]
    port = free_port()
    hosts = [start(ROOT / "tests" / "transformer_hosts.py", index, 2, port, *options) for index in range(2)]
    for host in hosts:
        assert host.wait() == 0, host.text("err")
    last = [place / "checkpoints/step_00000024" for place in (whole, run_dir)]
    assert_identical(*map(state_in, last))
    assert positions_in(last[1]) == positions_in(last[0]) * 2


def test_processes_that_take_turns_read_each_document_once():
    """The benchmark's small form: 1, 2 and 1 hosts, by positions in files alone."""
    done = run("benchmarks/streams.py", "--documents=12000", "--files=20", "--hosts=1,2,1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 0  12,000 documents, times they came: {1: 12000}" in done.stdout


@pytest.mark.parametrize(
    "options, said",
    [
        (["--dataset=stream"], "train_data is empty; name the documents with --train_data"),
        (["--dataset=stream", "--train_data=nothing/*.parquet"], "matches no file; expected documents: .parquet"),
        (["--stream_lanes=2"], "--stream_lanes belongs to dataset stream, but dataset is synthetic; choose --dataset"),
        (["--dataset=stream", "--train_data=x", "--bucketed"], "--bucketed belongs to dataset text, but dataset"),
    ],
)
def test_wrong_options_are_one_line(options, said):
    done = run("transformer_tpu.py", *options)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_file_that_changed_is_not_resumed_on(corpus, whole, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in corpus.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "part_0001.jsonl").open("a").write('{"text": "one more"}\n')
    done = run("transformer_tpu.py", f"--data_dir={other}", f"--run_dir={whole}", "--resume=must", "--num_steps=30")
    assert done.returncode == 2 and "tested on, data_crc32, is " in done.stderr


@pytest.mark.slow
def test_damage_met_on_the_way_ends_the_run_which_goes_on_without_it(tmp_path):
    """Nothing but the last document of one file is damaged: that is met in the middle of the run."""
    data, run_dir = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    path = write_documents(data / "part_0.jsonl", [f"{number}: {'x' * 50}" for number in range(100)])
    path.write_bytes(path.read_bytes()[:-20])
    write_documents(data / "val.jsonl", ["for validation"])
    options = [*OPTIONS, f"--data_dir={data}", f"--run_dir={run_dir}", "--global_batch_size=4"]
    options += ["--validation_data=val.jsonl"]
    done = run("transformer_tpu.py", *options, "--num_steps=60")
    assert done.returncode == 2, done.stderr
    assert "part_0.jsonl: line 100 is no JSON" in done.stderr and "--stream_damaged skip" in done.stderr
    done = run("transformer_tpu.py", *options, "--num_steps=60", "--resume=must", "--stream_damaged=skip")
    assert done.returncode == 0 and "left out   1 so far in this lane: " in done.stderr, done.stderr
