"""transformer_tpu.py as users run it: the same losses on every mesh, one graph, resume on another mesh, refusals.

Runs share one process per device count: what costs is the compiler.
"""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import QUICKLY_COMPILED, ROOT, run
from run_files import assert_identical, read_lines, state_in

import transformer_tpu
from language.data import llmc_files
from language.mesh import choose_mesh
from language.models.gpt import GPT
from language.models.layers import is_matrix
from language.models.llama import Llama
from language.options.transformer_options import TransformerConfig
from language.sequences import load_sequences
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.device import graphs_compiled
from tpu_utils.device.dropout import row_keys
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.step.optim import learning_rates

MODEL = dict(num_layers=2, num_heads=4, embedding_dim=64, sequence_length=32, vocab_size=64)
RUN = dict(
    num_steps=20, global_batch_size=16, learning_rate=5e-3, warmup_steps=2, log_every=1, eval_every=10, eval_batches=1
)
OPTIONS = [f"--{name}={value}" for name, value in {**MODEL, **RUN, "save_every": 10, "device": "cpu"}.items()]


def train_all(folder: Path, num_devices: int, runs: list[list[str]]) -> str:
    """Train every [name, options...] into folder/name, in one process. Returns what it printed."""
    # unoptimized machine code takes a third of the time to compile, and the numbers of float32 stay
    flags = dict(XLA_FLAGS=QUICKLY_COMPILED, TF_CPP_MIN_LOG_LEVEL="2")
    environment = dict(CPU_NUM_DEVICES=str(num_devices), PYTHONPATH=str(ROOT), **flags)
    result = run("tests/transformer_worker.py", folder, json.dumps(runs), timeout=1200, **environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def losses_of(run_dir: Path) -> np.ndarray:
    return np.array([line["loss"] for line in read_lines(run_dir) if line["kind"] == "train"])


MUON = ["--model_size=llama_tiny", "--optimizer=muon"]
DROPOUT = ["--dropout=0.2"]
# all ways at once
WAYS = [*DROPOUT, "--gradient_accumulation_steps=2", "--scan_layers", "--remat", "--remat_keep=projections"]
WAYS += ["--offload=attention"]
ONE_DEVICE = {
    "plain": [],
    "llama_muon": MUON,
    "llama_muon/llama_muon_resumed": [*MUON, "--resume=must"],
    "dropped": DROPOUT,
    "dropped/dropped_resumed": [*DROPOUT, "--resume=must"],
    "dropped_8/dropped_1": ["--mesh=1x1x1", *WAYS, "--resume=must"],  # a run of eight devices
}
EIGHT_DEVICES = {
    "accumulated": ["--mesh=8x1x1", "--gradient_accumulation_steps=2"],  # each device by itself: loops.py
    "dropped_8": ["--mesh=2x2x2", *WAYS],
    "llama_muon": [
        *("--mesh=2x2x2", *MUON, "--gradient_accumulation_steps=2"),
        *("--remat", "--remat_keep=residual", "--remat_all_but=1"),
    ],
    "dropped_8/dropped_1x8x1": ["--mesh=1x8x1", *WAYS, "--resume=must"],  # after 10 steps on the first
}


def runs_of(variants: dict[str, list[str]]) -> list[list[str]]:
    return [[name, *OPTIONS, "--print_placement", "--spare", *options] for name, options in variants.items()]


@pytest.fixture(scope="module")
def one_device(eight_devices, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    shutil.copytree(eight_devices[0] / "dropped_8", folder / "dropped_8")
    train_all(folder, 1, runs_of(ONE_DEVICE))
    return folder


@pytest.fixture(scope="module")
def eight_devices(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    return folder, train_all(folder, 8, runs_of(EIGHT_DEVICES))


def reference(name: str) -> np.ndarray:
    """The losses of plain PyTorch for a run of this name."""
    size = "llama_tiny" if "llama" in name else "tiny"
    return plain_pytorch(dropout=0.2 if "dropped" in name else 0.0, model_size=size, muon="muon" in name)[0]


@torch.no_grad()
def plain_muon(parameter, buffer, rate: float) -> None:
    """Jordan's Muon, one matrix after the other, with updates of the size of AdamW's (Liu et al. 2025)."""
    tensors = (x.view(-1, *x.shape[-2:]) for x in (parameter, parameter.grad, buffer))
    for matrix, gradient, momentum in zip(*tensors, strict=True):
        momentum.mul_(0.95).add_(gradient)
        x = gradient + 0.95 * momentum
        x = x.T if len(matrix) > len(matrix.T) else x
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        x = x.T if len(matrix) > len(matrix.T) else x
        matrix.mul_(1 - 0.1 * rate).sub_(0.2 * max(matrix.shape) ** 0.5 * rate * x)


@functools.cache
def plain_pytorch(dropout=0.0, model_size="tiny", muon=False, num_layers=2) -> tuple[np.ndarray, float]:
    """The losses of plain PyTorch on the CPU: the same model and data, its own optimizer, no XLA; and its validation
    loss at the end."""
    config = TransformerConfig(**MODEL | RUN | dict(num_layers=num_layers), model_size=model_size)
    model = GPT(config.shape, dropout=dropout) if model_size == "tiny" else Llama(config.shape)
    model.initialise(config.seed)
    named = dict(model.named_parameters())
    of_muon = [name for name in named if muon and is_matrix(name) and "." in name]
    groups = [[p for n, p in named.items() if n not in of_muon and is_matrix(n) == on] for on in (True, False)]
    groups = [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    buffers = {name: torch.zeros_like(named[name]) for name in of_muon}
    data = load_sequences(config)
    source, losses = data.train, []
    for step, rate in enumerate(learning_rates(config, config.num_steps).tolist()):
        tokens = torch.from_numpy(source.batch(step)).long()
        keys = row_keys(torch.tensor([step], dtype=torch.int32), config.seed, torch.arange(16, dtype=torch.int32))
        logits = model(tokens[:, :-1], keys if model_size == "tiny" else None).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1)[:, :64], tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for name, buffer in buffers.items():
            plain_muon(named[name], buffer, rate)
        losses.append(loss.item())
    tokens = torch.from_numpy(data.validation.batch(0)).long()
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.flatten(0, 1)[:, :64]
    return np.array(losses), torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).item()


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_one_device_equals_plain_pytorch(one_device, name):
    name = name.split("/")[-1]
    np.testing.assert_allclose(losses_of(one_device / name), reference(name), rtol=1e-5)


@pytest.mark.parametrize("name", ["llama_muon", "dropped"])
def test_a_run_resumes_bit_identical(one_device, name):
    states = [state_in(one_device / run / "checkpoints" / "step_00000020") for run in (name, f"{name}_resumed")]
    assert_identical(*states)


@pytest.mark.slow
def test_bfloat16_stays_in_a_band_around_float32(tmp_path):
    """The loss curves of 200 steps, each value the mean of 10 steps: the band that docs/benchmarks.md states."""
    kinds = ("float32", "bfloat16")
    train_all(tmp_path, 1, [[kind, *OPTIONS, f"--precision={kind}", "--num_steps=200"] for kind in kinds])
    float32, bfloat16 = (losses_of(tmp_path / kind).reshape(20, 10).mean(1) for kind in kinds)
    assert float32[-1] < 0.7 * float32[0]  # it learned something
    difference = np.abs(bfloat16 / float32 - 1).max()
    print(f"largest difference {difference:.1e}")  # for docs/benchmarks.md: pytest -m slow -k band -s
    assert 0 < difference < 5e-3, difference


@pytest.mark.parametrize("name", EIGHT_DEVICES)
def test_every_mesh_equals_plain_pytorch(eight_devices, name):
    """Each row of the batch has its mask of dropout, wherever and in whatever order it is computed."""
    name = name.split("/")[-1]
    np.testing.assert_allclose(losses_of(eight_devices[0] / name), reference(name), rtol=1e-5)


def test_what_is_kept_and_accumulated_changes_no_number(one_device, eight_devices):
    for path, name in ((eight_devices[0] / "accumulated", "plain"), (one_device / "dropped_1", "dropped")):
        np.testing.assert_allclose(losses_of(path), losses_of(one_device / name), rtol=1e-6, err_msg=str(path))


@pytest.mark.parametrize("name", ["plain", "accumulated", "llama_muon"])
def test_a_parameter_that_no_output_needs_stays_as_it_is(one_device, eight_devices, name):
    """As under torch's AdamW, which passes over it: no weight decay either."""
    folder = eight_devices[0] if name == "accumulated" else one_device
    state = state_in(folder / name / "checkpoints" / "step_00000020")
    assert state["model/spare_weight"].tolist() == [1.0, 1.0, 1.0]


def test_dropout_changes_a_training_and_no_evaluation(one_device):
    expected, validation_loss = plain_pytorch(dropout=0.2)
    assert (np.abs(expected / reference("plain") - 1)[2:] > 1e-3).all()
    for name in ("dropped", "dropped_1"):
        summary = json.loads((one_device / name / "summary.json").read_text())
        assert summary["validation_loss"] == pytest.approx(validation_loss, rel=1e-5)


def test_a_training_step_without_keys_is_refused_and_an_evaluation_needs_none():
    model = GPT(TransformerConfig(**MODEL).shape, dropout=0.5)
    model.initialise(0)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with pytest.raises(ValueError, match=r"dropout is 0.5 and a training step gave no keys; expected row_keys"):
        model(tokens)
    whole = GPT(model.shape)
    whole.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, whole(tokens).logits)


def test_one_graph_and_no_uploads_beside_the_batch(one_device, eight_devices):
    for folder in (one_device, eight_devices[0]):
        for path in folder.glob("*/summary.json"):
            summary = json.loads(path.read_text())
            assert summary["train_graphs"] == 1 - path.parent.name.endswith("resumed"), path  # the same process has it
            assert summary["eval_graphs"] <= 1, path  # 0: an earlier run of this process compiled the same one
            assert summary["host_to_device_uploads_per_step"] == 0, path
            assert abs(summary["loss_floor"] - 1.75 * np.log(2)) < 1e-9


def test_offload_is_without_effect_on_a_cpu_and_says_so(eight_devices):
    line = "offload    without effect: this device has no other memory than the host's"
    assert eight_devices[1].count(line) == sum("--offload" in " ".join(options) for options in EIGHT_DEVICES.values())


def test_placement_is_the_table(eight_devices):
    """On 2x2x2, a device holds half of the heads, half of the width: what XLA reports, not what we asked for."""

    def shards(name: str) -> list[str]:
        lines = [line for line in eight_devices[1].splitlines() if line.startswith(f"place      {name} ")]
        return [line.split("{devices=[")[1].split("]")[0] if "{devices=[" in line else "replicated" for line in lines]

    assert shards("qkv_weight.0") == ["replicated", "1,2,2,2", "1,1,8"]
    assert shards("q_weight.0") == shards("mlp_out_weight.1")[2:3] == ["2,2,2"]
    assert shards("kv_weight.0") == ["1,2,2,2"]
    assert shards("gate_up_weight.1") == ["1,4,1,2"]  # rows, over both axes


def config_of(**changes) -> TransformerConfig:
    return TransformerConfig(**{**MODEL, "global_batch_size": 16, **changes})


def test_mesh_is_chosen_by_memory():
    big = config_of(model_size="1558M", num_layers=0, num_heads=0, embedding_dim=0, sequence_length=0)
    assert choose_mesh(config_of(), 8, 16 * 2**30)[0] == (8, 1, 1, 1, 1)
    assert choose_mesh(big, 8, 16 * 2**30)[0] == (1, 8, 1, 1, 1)
    assert choose_mesh(big, 8, 95 * 2**30)[0] == (8, 1, 1, 1, 1)
    sizes, why = choose_mesh(config_of(), 4, None)
    assert sizes == (4, 1, 1, 1, 1) and "unknown memory" in why


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        (dict(mesh="2x2x1"), 8, "mesh is 2x2x1, 4 devices, but this CPU has 8; start it with CPU_NUM_DEVICES=4 for"),
        (dict(mesh="1x1x8"), 8, r"num_heads \(4\) must be divisible by the tensor axis \(8\)"),
        (dict(mesh="1x3x1"), 3, r"embedding_dim \(64\) must be divisible by the fsdp axis \(3\)"),
        (dict(model_size="llama_tiny", mesh="1x1x4"), 4, r"heads of keys and values \(2\) must be divisible by"),
        (
            dict(model_size="llama_tiny", mesh="1x256x1", embedding_dim=512, global_batch_size=256),
            256,
            r"width of the MLP \(384\) must be divisible by the tensor x fsdp x context axis \(256\)",
        ),
        (dict(mesh="8x1x1", global_batch_size=20), 8, r"global_batch_size \(20\) must be divisible .* try 16"),
    ],
)
def test_meshes_that_cannot_work(changes, devices, message):
    with pytest.raises(InputError, match=message):
        choose_mesh(config_of(**changes), devices, None)


@pytest.mark.parametrize(("slice", "name"), [("", "this TPU slice"), ("v5litepod-4", "v5litepod-4")])
def test_a_mesh_of_another_size_than_the_slice_is_no_matter_of_the_cpu(slice, name):
    with pytest.raises(InputError, match=f"mesh is 2x2x2, 8 devices, but {name} has 4; try --mesh 4x1x1"):
        choose_mesh(config_of(mesh="2x2x2", compile_for=slice), 4, 16 * 2**30)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mesh="2x2"), "mesh is '2x2'; expected auto, or DATAxFSDPxTENSOR"),
        (dict(num_heads=3), r"embedding_dim \(64\) must be divisible by num_heads \(3\); try --num_heads 2 or 4"),
        (dict(gradient_accumulation_steps=3), r"divisible by gradient_accumulation_steps \(3\)"),
        (dict(dataset="text", vocab_size=64), "vocab_size is 64; text needs 257 or more"),
        (dict(num_steps=5, warmup_steps=5), "warmup_steps is 5 but the run has 5 steps"),
        (dict(num_layers=-1), "num_layers is -1; expected 0 or more"),
        (dict(num_layers=1, remat=True, scan_layers=True, offload="inputs"), "offload is inputs, but a loop over one"),
        (dict(decay_fraction=0.0), "decay_fraction is 0.0"),
        (dict(model_size="llama_tiny", num_heads=3), r"num_heads \(3\) must be divisible by the 2 heads of keys and"),
        (dict(model_size="llama_tiny", dropout=0.1), "dropout is 0.1, but llama_tiny has none"),
        (dict(lora_rank=4, compile_for="v5e-1", optimizer="muon"), "adapters are no matrices of a layer; expected"),
        (dict(model_size="llama_tiny", lora_rank=4), "lora_rank is 4, but there are no weights to adapt"),
    ],
)
def test_configurations_that_cannot_work(changes, message):
    with pytest.raises(InputError, match=message):
        config_of(**changes)


def test_wsd_schedule_is_flat_then_falls():
    rates = learning_rates(config_of(num_steps=100, warmup_steps=10, scheduler="wsd", learning_rate=1.0), 100).numpy()
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert (rates[10:80] == 1).all() and (np.diff(rates[80:]) < 0).all() and 0 < rates[-1] < 0.06
    rates = learning_rates(config_of(num_steps=100, final_learning_rate_fraction=0.1, learning_rate=1.0), 100).numpy()
    assert 0.1 < rates[-1] < 0.101


def test_buckets_and_hellaswag(tmp_path):
    """Two lengths of documents, two graphs known beforehand; HellaSwag is scored by a third of its own."""
    random = np.random.default_rng(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    documents = [" ".join(random.choice(words, size)) for size in (12, 60) * 20]
    (tmp_path / "words.txt").write_text("\n\n".join(documents))
    ending = np.frombuffer(b" not", np.uint8)
    context = np.frombuffer(b"to be or", np.uint8)
    questions = [llmc_files.MultipleChoice(i, i % 4, context, [ending] * 4) for i in range(3)]
    llmc_files.write_hellaswag(tmp_path / "hellaswag_val.bin", questions)
    options = ["--dataset=text", f"--data_dir={tmp_path}", "--train_data=words.txt", "--document_separator=\n\n"]
    options += ["--bucketed", "--sequence_length=256", "--vocab_size=0", "--global_batch_size=4", "--num_steps=6"]
    options += ["--num_layers=1"]
    train_all(tmp_path, 1, [["text", *OPTIONS, *options, "--tasks", "hellaswag=hellaswag_val.bin"]])
    lines = read_lines(tmp_path / "text")
    assert len([line for line in lines if line["kind"] == "train"]) == 6
    (evaluation,) = [line for line in lines if line["kind"] == "eval"]
    assert evaluation["hellaswag_accuracy"] == 1 / 3  # equal endings: the first always wins, and is right once
    assert 0 < evaluation["validation_loss"] < 6


@pytest.mark.slow
def test_quick_test_ends_within_5_percent_of_the_floor(tmp_path):
    """As a user runs it: no options but where to write."""
    result = run("transformer_tpu.py", "--run_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["validation_loss"] < 1.05 * summary["loss_floor"]
    assert summary["train_graphs"] == summary["eval_graphs"] == 1
    assert summary["host_to_device_uploads_per_step"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attention", "flash", "--sequence_length", "128"], "its Pallas kernels run on TPU only"),
        (["--dataset", "text", "--vocab_size", "257"], "train_data is empty"),
        (["--dataset", "tokens", "--vocab_size", "257", "--train_data", "no_*.bin"], "validation_data is empty"),
    ],
)
def test_refused_before_anything_compiles(tmp_path, capsys, options, message):
    before = graphs_compiled()
    arguments = [*OPTIONS, "--run_dir", str(tmp_path / "run"), *options]
    code = run_script(lambda: transformer_tpu.train(parse_command_line(TransformerConfig, "", arguments)))
    assert code == 2 and message in capsys.readouterr().err and graphs_compiled() == before


PACKED = ["--model_size=llama_tiny", "--num_heads=4", "--vocab_size=512", "--dataset=chat"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--remat", "--remat_keep=attention", "--offload=attention"],
        ["--num_layers=2", "--scan_layers", "--remat", "--remat_keep=projections", "--offload=attention"],
        PACKED,
    ],
)
def test_flash_attention_compiles_for_a_tpu(more):
    """Forward and backward kernels of the training step, by the real TPU compiler; no TPU here runs them."""
    options = ["--num_layers=1", "--num_heads=1", "--embedding_dim=128", "--sequence_length=128", "--vocab_size=64"]
    options += ["--attention=flash", "--global_batch_size=1", "--compile_for=v5litepod-1", *more]
    result = run("transformer_tpu.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "v5litepod-1: compiles and fits" in result.stdout
    # forward and backward; the compiler counts them without an estimate
    assert int(result.stdout.split(" custom-call")[0].split()[-1]) >= 2
    assert ("MB to host, " in result.stdout) == ("--offload=attention" in more)
