"""--sample_every: what a model writes while it trains, on one device and on a mesh; the run does not notice."""

import json
import math

import pytest
import torch_xla
from processes import ROOT, free_port, run, start
from run_files import assert_identical, read_lines, state_in
from test_transformer_tpu import train_all

from language.generation.decoding import generate
from language.generation.sample_prompts import ask_of_run, sampling_options
from language.options.transformer_options import TransformerConfig
from language.weights.run_weights import read_run
from language.weights.sources import load, open_source
from tpu_utils.base.errors import InputError

MODEL = ["--num_layers=1", "--num_heads=2", "--embedding_dim=32", "--sequence_length=128", "--vocab_size=64"]
RUN = ["--num_steps=6", "--global_batch_size=2", "--warmup_steps=1", "--log_every=2", "--eval_batches=1"]
RUN += ["--save_every=3", "--device=cpu"]
SAMPLES = ["--sample_every=2", "--sample_prompts", "1 2 3", "7"]


def samples_in(run_dir) -> list[tuple]:
    return [(s["step"], s["prompt"], s["text"]) for s in read_lines(run_dir) if s["kind"] == "sample"]


LLAMA = [*MODEL, "--model_size=llama_tiny", "--scan_layers", "--remat"]


@pytest.mark.parametrize(
    "mesh, model",
    [
        ("1x1x1", MODEL),
        ("1x2x2", MODEL),
        pytest.param("1x2x2x2", LLAMA, marks=pytest.mark.slow),
        pytest.param("1x1x2x2x2", [*MODEL, "--model_size=mixtral_tiny"], marks=pytest.mark.slow),
        pytest.param("2x1x2x2", [*MODEL, "--dropout=0.2", "--gradient_accumulation_steps=2"], marks=pytest.mark.slow),
    ],
)
def test_a_run_with_samples_ends_with_the_same_bits_and_texts_of_one_device(tmp_path, mesh, model):
    """Resumed, too. On a mesh rows, weights and cache are shared over the devices; the cache by its heads."""
    options = [*model, *RUN, "--global_batch_size=8", "--eval_every=3", f"--mesh={mesh}"]
    sampled = ["sampled", *options, "--tensorboard", "--sample_every=3", *SAMPLES[1:]]
    resumed = ["sampled/resumed", "--resume=must"]  # its options are in config.json
    train_all(tmp_path, math.prod(map(int, mesh.split("x"))), [sampled, ["plain", *options], resumed])
    for name in ("sampled", "resumed"):
        assert_identical(*(state_in(tmp_path / one / "checkpoints/step_00000006") for one in (name, "plain")))
    assert samples_in(tmp_path / "resumed") == samples_in(tmp_path / "sampled")
    lines = [line for line in read_lines(tmp_path / "sampled") if line["kind"] == "sample"]
    assert [(line["step"], line["prompt"]) for line in lines] == [(s, p) for s in (3, 6) for p in ("1 2 3", "7")]
    assert [line["graphs"] for line in lines] == [2, 2, 0, 0] and len({line["text"] for line in lines}) == 4
    assert any(b"sample/1 2 3" in path.read_bytes() for path in (tmp_path / "sampled" / "tensorboard").iterdir())
    summary = json.loads((tmp_path / "sampled" / "summary.json").read_text())
    assert summary["train_graphs"] == summary["eval_graphs"] == 1 and not summary["host_to_device_uploads_per_step"]

    config, _ = read_run(tmp_path / "sampled")
    tokenizer, asked = ask_of_run(config)
    device = torch_xla.device()
    trained = load(open_source(run_dir=tmp_path / "sampled"), device)
    found = generate(trained, asked.prompts, sampling_options(config, 6), device, asked.ends, stops=asked.stops)
    assert [tokenizer.decode(tokens) for tokens in found] == [line["text"] for line in lines[2:]]


@pytest.mark.slow
def test_of_two_hosts_the_first_one_writes(tmp_path):
    """Each of them makes all samples: here on all devices, where a slice has some of each host."""
    options = [*MODEL, *RUN, "--mesh=2x1x1", "--no_tensorboard"]
    done = run("transformer_tpu.py", *options, f"--run_dir={tmp_path / 'plain'}", CPU_NUM_DEVICES=2)
    assert done.returncode == 0, done.stderr
    port, run_dir = free_port(), tmp_path / "sampled"
    given = [port, "--devices_per_host=1", *options, *SAMPLES, f"--run_dir={run_dir}"]
    hosts = [start(ROOT / "tests" / "transformer_hosts.py", index, 2, *given) for index in range(2)]
    for host in hosts:
        assert host.wait() == 0, host.text("err")
    assert_identical(*(state_in(one / "checkpoints/step_00000006") for one in (run_dir, tmp_path / "plain")))
    assert [(step, prompt) for step, prompt, _ in samples_in(run_dir)] == [
        (step, prompt) for step in (2, 4, 6) for prompt in ("1 2 3", "7")
    ]


def test_seeds_come_from_the_step():
    config = TransformerConfig(sample_every=1, sample_prompts=("1",))
    assert sampling_options(config, 1) == sampling_options(config, 1)
    assert sampling_options(config, 1).seed != sampling_options(config, 2).seed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(sample_prompts=("1 " * 100,)), "has 100 tokens; expected 1 to 65: the model reads 128"),
        (dict(sample_prompts=("",)), "'' has 0 tokens"),
        (dict(sample_prompts=()), "sample_prompts is empty"),
        (dict(sample_prompts=("64",)), "token 64 of '64' is outside the vocabulary of 64"),
        (dict(sample_prompts=("words",)), "expected token numbers"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(changes, said):
    config = TransformerConfig(sample_every=1, sequence_length=128, vocab_size=64, **changes)
    with pytest.raises(InputError, match=said):
        ask_of_run(config)
