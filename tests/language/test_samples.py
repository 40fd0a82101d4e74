"""--sample_every: what a model writes while it trains, and that the run does not notice."""

import json
import shutil

import pytest
from processes import run
from run_files import assert_identical, read_lines, state_in

from language.run_weights import read_run
from language.sample_prompts import check_samples, sampling_options
from language.transformer_options import TransformerConfig
from tpu_utils.errors import InputError

MODEL = ["--num_layers=1", "--num_heads=2", "--embedding_dim=32", "--sequence_length=128", "--vocab_size=64"]
RUN = ["--num_steps=6", "--global_batch_size=2", "--warmup_steps=1", "--log_every=2", "--eval_batches=1"]
RUN += ["--save_every=3", "--device=cpu"]
SAMPLES = ["--sample_every=2", "--sample_prompts", "1 2 3", "7"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, options in (("plain", []), ("sampled", SAMPLES)):
        done = run("transformer_tpu.py", *MODEL, *RUN, f"--run_dir={folder / name}", *options)
        assert done.returncode == 0, done.stderr
    return folder


def samples_in(run_dir) -> list[tuple]:
    return [(s["step"], s["prompt"], s["text"]) for s in read_lines(run_dir) if s["kind"] == "sample"]


def test_a_run_with_samples_ends_with_the_same_bits(runs):
    last = "checkpoints/step_00000006"
    assert_identical(state_in(runs / "sampled" / last), state_in(runs / "plain" / last))
    summaries = [json.loads((runs / name / "summary.json").read_text()) for name in ("plain", "sampled")]
    for name in ("train_graphs", "eval_graphs", "host_to_device_uploads_per_step"):
        assert summaries[0][name] == summaries[1][name]
    assert summaries[1]["train_graphs"] == 1


def test_samples_are_logged_and_two_graphs_make_them_all(runs):
    lines = [line for line in read_lines(runs / "sampled") if line["kind"] == "sample"]
    assert [(line["step"], line["prompt"]) for line in lines] == [(s, p) for s in (2, 4, 6) for p in ("1 2 3", "7")]
    assert [line["graphs"] for line in lines] == [2, 2, 0, 0, 0, 0]
    assert len({line["text"] for line in lines}) == 6
    assert any(b"sample/1 2 3" in path.read_bytes() for path in (runs / "sampled" / "tensorboard").iterdir())


def test_the_weights_of_a_run_with_samples_are_read(runs):
    """JSON has no tuples: its prompts came back as a list, which no option is."""
    config, _ = read_run(runs / "sampled")
    assert config.sample_prompts == ("1 2 3", "7")


def test_a_resumed_run_writes_the_same_samples(runs):
    """From step 3: with all bits of the run that was not stopped."""
    shutil.copytree(runs / "sampled", runs / "resumed")
    shutil.rmtree(runs / "resumed" / "checkpoints" / "step_00000006")
    (runs / "resumed" / "summary.json").unlink()
    done = run("transformer_tpu.py", f"--run_dir={runs / 'resumed'}", "--resume=must")
    assert done.returncode == 0, done.stderr
    assert samples_in(runs / "resumed") == samples_in(runs / "sampled")
    last = "checkpoints/step_00000006"
    assert_identical(state_in(runs / "resumed" / last), state_in(runs / "plain" / last))


def test_several_devices_are_refused_before_anything_is_compiled():
    done = run("transformer_tpu.py", *MODEL, *RUN, *SAMPLES, CPU_NUM_DEVICES=2)
    assert done.returncode == 2
    assert "sample_every is 2, but found 2 devices" in done.stderr and "tools.generate --run_dir" in done.stderr


def test_seeds_come_from_the_step():
    config = TransformerConfig(sample_every=1, sample_prompts=("1",))
    assert sampling_options(config, 1) == sampling_options(config, 1)
    assert sampling_options(config, 1).seed != sampling_options(config, 2).seed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(sample_prompts=("1 " * 100,)), "has 100 tokens; expected 1 to 65: the model reads 128"),
        (dict(sample_prompts=("",)), "'' has 0 tokens"),
        (dict(sample_prompts=("64",)), "token 64 of '64' is outside the vocabulary of 64"),
        (dict(sample_prompts=("words",)), "expected token numbers"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        check_samples(TransformerConfig(sample_every=1, sequence_length=128, vocab_size=64, **changes))
