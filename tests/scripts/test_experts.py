"""A mixture of experts in transformer_tpu.py: the losses of plain PyTorch on every mesh, and what a run says of it."""

import functools
import importlib
import json
import math

import numpy as np
import pytest
import torch
from run_files import assert_identical, read_lines, state_in
from test_transformer_tpu import RUN as USUAL
from test_transformer_tpu import losses_of, train_all

from language.mesh import choose_mesh
from language.models.experts import blocks_of_matrix
from language.models.layers import is_matrix
from language.models.llama import Llama
from language.models.routing import slots_of_capacity
from language.options.transformer_options import TransformerConfig
from language.sequences import load_sequences
from language.xla import expert_kernels
from tpu_utils.base.errors import InputError
from tpu_utils.step.optim import learning_rates

MODEL = dict(
    model_size="mixtral_tiny",
    num_heads=4,
    embedding_dim=64,
    sequence_length=32,
    vocab_size=64,
    balance_loss=0.02,
    router_z_loss=0.001,
)
# a small rate: Adam makes a step of rounding errors where a gradient is near 0, and a token whose experts nearly tie
# then chooses another one
RUN = USUAL | dict(learning_rate=1e-3, num_steps=10, eval_every=5)
OPTIONS = [f"--{name}={value}" for name, value in {**MODEL, **RUN, "save_every": 5, "device": "cpu"}.items()]
TIGHT = "--expert_capacity=1.0"
ONE = {"plain": [], "tight": [TIGHT], "tight/tight_resumed": [TIGHT, "--resume=must"]}
EIGHT = {
    "all": ["--mesh=1x2x2x1x2", "--scan_layers", "--gradient_accumulation_steps=2"],
    "tight_8": ["--mesh=1x1x1x1x8", TIGHT],
    "data_accumulated": ["--mesh=8x1x1", TIGHT, "--gradient_accumulation_steps=2"],
    "context": ["--mesh=1x2x1x2x2", "--scan_layers", "--remat"],
    "tight_tensor": ["--mesh=2x1x2x1x2", TIGHT, "--scan_layers", "--remat"],
}


@functools.cache
def reference(capacity: float = 0.0, parts: int = 1) -> dict[str, np.ndarray]:
    """What plain PyTorch on the CPU finds in each step, with losses of routers written down anew. parts: micro-batches,
    since the balance of a part is no sum over its rows."""
    config = TransformerConfig(**MODEL, **RUN)
    shape = config.shape
    model = Llama(shape, expert_capacity=capacity)
    model.initialise(config.seed)
    groups = [{"params": [p for n, p in model.named_parameters() if is_matrix(n) == on]} for on in (True, False)]
    groups[1]["weight_decay"] = 0.0
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    data, found = load_sequences(config), {"loss": [], "dropped_tokens": []}
    for step, rate in enumerate(learning_rates(config, config.num_steps).tolist()):
        rows = torch.from_numpy(data.train.batch(step)).long()
        optimizer.zero_grad()
        losses, dropped = [], 0
        for part in range(parts):  # row i goes to micro-batch i % parts
            tokens = rows[part::parts]
            logits, routing = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1)[:, :64], tokens[:, 1:].flatten())
            more = 0
            for layer in routing:
                probability, z, chose = layer.split([8, 1, 8], -1)
                share = chose.sum(0) / tokens[:, 1:].numel()
                more = more + (8 * (share * probability.mean(0)).sum() * 0.02 + z.mean() * 0.001) / shape.num_layers
                places = slots_of_capacity(shape, 32, capacity) if capacity else 32
                dropped += (chose - places).clamp(min=0).sum().item()
            ((loss + more) / parts).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        found["loss"].append(np.mean(losses)), found["dropped_tokens"].append(dropped)
    return {name: np.array(values) for name, values in found.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    train_all(folder, 1, [[name, *OPTIONS, *options] for name, options in ONE.items()])
    return folder


def check(folder, name: str, options: list[str]) -> None:
    wanted = reference(float(TIGHT in options), 2 if "accumul" in " ".join(options) else 1)
    np.testing.assert_allclose(losses_of(folder / name), wanted["loss"], rtol=1e-5)
    lines = [line for line in read_lines(folder / name) if line["kind"] == "train"]
    assert [line["dropped_tokens"] for line in lines] == wanted["dropped_tokens"].tolist()
    assert wanted["dropped_tokens"].any() == (TIGHT in options)


@pytest.mark.parametrize("name", ONE)
def test_one_device_equals_plain_pytorch(runs, name):
    check(runs, name.split("/")[-1], ONE[name])


@pytest.mark.slow
def test_every_mesh_equals_plain_pytorch(tmp_path):
    train_all(tmp_path, 1, [["tight", *OPTIONS, TIGHT]])
    train_all(tmp_path, 8, [[name, *OPTIONS, *options] for name, options in EIGHT.items()])
    for name, options in EIGHT.items():
        check(tmp_path, name, options)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert (summary["train_graphs"], summary["host_to_device_uploads_per_step"]) == (1, 0), name
    assert tables_of(tmp_path / "tight_8") == tables_of(tmp_path / "tight")


def tables_of(run_dir) -> list:
    return [line["tokens_of_experts"] for line in read_lines(run_dir) if line["kind"] == "eval"]


def test_one_graph_and_no_upload_beside_the_batch(runs):
    for name in ONE:
        summary = json.loads((runs / name.split("/")[-1] / "summary.json").read_text())
        assert summary["train_graphs"] == 1 - name.endswith("resumed"), name
        assert summary["host_to_device_uploads_per_step"] == 0, name


def test_a_mixture_resumes_bit_identical(runs):
    assert_identical(*(state_in(runs / name / "checkpoints" / "step_00000010") for name in ("tight", "tight_resumed")))


def test_an_evaluation_says_which_experts_the_tokens_chose(runs):
    """Each token of the 16 rows chooses 2 experts in each of the 2 layers."""
    tables = tables_of(runs / "plain")
    assert len(tables) == 2 and [sum(layer) for layer in tables[-1]] == [16 * 32 * 2] * 2


def test_flops_are_those_of_the_experts_that_a_token_chooses():
    shape = TransformerConfig(**MODEL).shape
    idle = 2 * 6 * 3 * 64 * shape.mlp_dim  # layers, experts, matrices
    assert shape.num_parameters - shape.num_multiplied == idle  # the head is the embedding
    assert math.isclose(shape.flops_per_token, 6 * (shape.num_parameters - idle) + 12 * 2 * 64 * 32)


@pytest.mark.parametrize(
    "changes, devices, message",
    [
        (dict(mesh="1x1x1x1x3"), 3, r"number of experts \(8\) must be divisible by the expert axis \(3\)"),
        (dict(mesh="1x1x1x2", expert_capacity=1.25), 2, "expert_capacity is 1.25, .* but the context axis"),
        (dict(mesh="1x1x1x1x4", model_size="llama_tiny"), 4, "the expert axis of the mesh is 4, but the model has no"),
    ],
)
def test_meshes_that_cannot_work(changes, devices, message):
    options = {**MODEL, "balance_loss": 0.01, "router_z_loss": 0.0, "global_batch_size": 12, **changes}
    with pytest.raises(InputError, match=message):
        choose_mesh(TransformerConfig(**options), devices, None)


def test_the_kernels_read_one_of_two_matrices_of_each_expert_where_it_lies(monkeypatch):
    megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")  # its package hides it
    monkeypatch.setattr(megablox, "gmm", functools.partial(megablox.gmm, interpret=True))  # on the CPU
    made, counts = np.random.default_rng(0), np.array([10, 0, 33, 9], np.int32)
    rows, weights = made.standard_normal((64, 128), np.float32), made.standard_normal((8, 128, 128), np.float32)
    of_rows = np.repeat(np.arange(4), counts)
    for n in (0, 1):
        here = blocks_of_matrix(torch.from_numpy(counts), n, 2, (1, 1)).numpy()
        found = np.asarray(expert_kernels.product((False, (1, 1)), rows, weights, here))[: len(of_rows)]
        expected = np.einsum("si,soi->so", rows[: len(of_rows)], weights[2 * of_rows + n])
        np.testing.assert_allclose(found, expected, atol=1e-4)
