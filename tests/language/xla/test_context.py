"""Sequences that several devices share: the losses of one device, in both ways, with all that a run may ask for."""

import json

import numpy as np
import pytest
from documents import write_chats
from processes import run
from test_transformer_tpu import OPTIONS, config_of, losses_of, plain_pytorch, train_all

from language.mesh import choose_mesh
from tpu_utils.base.errors import InputError

LLAMA = ["--model_size=llama_tiny"]  # 4 heads, 2 of keys and values
ALL_WAYS = ["--gradient_accumulation_steps=2", "--scan_layers", "--remat"]
CHAT = [*LLAMA, "--dataset=chat", "--train_data=chats.jsonl", "--vocab_size=0", "--sequence_length=128"]
FOUR = {
    "dropped": ["--mesh=1x1x1x4", "--dropout=0.2"],
    "ulysses": [*LLAMA, "--mesh=1x2x1x2", "--context_attention=ulysses", "--remat", "--remat_keep=attention"],
}
FOUR_SLOW = {
    "dropped": ["--mesh=1x1x1x4", "--dropout=0.2"],
    "dropped/moved": ["--mesh=2x2x1", "--dropout=0.2", "--resume=must"],
}
EIGHT_SLOW = {
    "dropped": ["--mesh=1x1x1x8", "--dropout=0.2", "--remat"],
    "dropped_all": ["--mesh=1x2x2x2", "--dropout=0.2", *ALL_WAYS, "--remat_keep=products"],
    "llama": [*LLAMA, "--mesh=1x1x2x4", "--gradient_accumulation_steps=4", "--remat", "--remat_keep=projections"],
}


WIDE = dict(embedding_dim=128, sequence_length=512)


def runs_of(variants: dict[str, list[str]]) -> list[list[str]]:
    return [[name, *OPTIONS, *options] for name, options in variants.items()]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return folder, train_all(folder, 4, [[*run, "--num_layers=1"] for run in runs_of(FOUR)])


KINDS = {"dropped": dict(dropout=0.2), "llama": dict(model_size="llama_tiny")}


@pytest.fixture(scope="module")
def reference() -> dict[str, tuple[np.ndarray, float]]:
    """Losses and the last validation loss of plain PyTorch."""
    return {kind: plain_pytorch(**options) for kind, options in KINDS.items()}


def check(path, expected: tuple[np.ndarray, float], evaluated: bool) -> None:
    np.testing.assert_allclose(losses_of(path), expected[0], rtol=1e-5, err_msg=path.name)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["train_graphs"] == 1, path
    assert summary["host_to_device_uploads_per_step"] == 0, path
    if evaluated:  # with accumulation its batches are smaller
        assert summary["validation_loss"] == pytest.approx(expected[1], rel=1e-5), path


@pytest.mark.parametrize("name, kind", [("dropped", "dropped"), ("ulysses", "llama")])
def test_a_sequence_on_several_devices_has_the_losses_of_plain_pytorch(four, name, kind):
    """One layer: another compiles for as long again."""
    check(four[0] / name, plain_pytorch(**KINDS[kind], num_layers=1), evaluated=True)


@pytest.mark.slow
def test_a_run_moves_to_another_mesh_and_documents_of_a_row_do_not_see_each_other(tmp_path, reference):
    write_chats(tmp_path / "chats.jsonl")
    chat = [f"--data_dir={tmp_path}", *CHAT]
    packed = {"packed": [*chat, "--mesh=1x2x1x2"], "apart": [*chat, "--mesh=4x1x1"]}
    train_all(tmp_path, 4, runs_of(FOUR_SLOW | packed))
    np.testing.assert_allclose(losses_of(tmp_path / "moved"), reference["dropped"][0], rtol=1e-5)
    packed, apart = (losses_of(tmp_path / name) for name in ("packed", "apart"))
    assert packed[-1] < 0.9 * packed[0]
    np.testing.assert_allclose(packed, apart, rtol=1e-5)


def test_the_plan_says_how_sequences_are_shared(four):
    lines = [line for line in four[1].splitlines() if line.startswith("mesh")]
    assert "context 4: as asked; sequences shared by gather: a device has its queries" in lines[0]
    assert "sequences shared by ulysses: a device attends with some heads" in lines[1]


@pytest.mark.slow
def test_on_eight_devices_too(tmp_path, reference):
    train_all(tmp_path, 8, runs_of(EIGHT_SLOW))
    for name, options in EIGHT_SLOW.items():
        evaluated = not any("accumulation" in option for option in options)
        check(tmp_path / name, reference[name.split("_")[0]], evaluated)


@pytest.mark.parametrize(
    "devices, cases",
    [
        pytest.param(1, ("whole", "documents", "window"), marks=pytest.mark.slow),
        pytest.param(4, ("window",), marks=pytest.mark.slow),  # with documents
        pytest.param(4, ("whole", "documents"), marks=pytest.mark.exhaustive),  # the same without a window
    ],
)
def test_each_way_of_attention_is_attention_over_the_whole(devices, cases):
    """Flash, plain and flash gathered and exchanged: outputs and gradients, with grouped heads."""
    place = dict(PYTHONPATH=".", PJRT_DEVICE="CPU", CPU_NUM_DEVICES=devices)
    result = run("tests/attention_in_graph.py", *cases, timeout=1200, **place)
    assert result.returncode == 0, result.stderr
    differences = [float(value) for value in result.stdout.split()]
    assert len(differences) == 4 * (1 if devices == 1 else 5) * len(cases) and max(differences) < 2e-6, differences


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        (dict(mesh="1x1x1x2", scan_layers=True), 2, "the context axis of the mesh is 2, where a loop .* needs --remat"),
        (dict(mesh="1x1x1x3", embedding_dim=96), 3, r"sequence_length \(32\) must be divisible by 6: two pieces"),
        (dict(mesh="1x1x1x2", attention="flash", sequence_length=1152), 2, r"\(1152\) must be divisible by 512"),
        (
            dict(mesh="1x1x1x128", bucketed=True, dataset="text", train_data="x", vocab_size=257, **WIDE),
            128,
            r"\(512\) and the 128 of the shortest bucket must be divisible by 256: .*without --bucketed",
        ),
        (
            dict(mesh="1x1x2x2", model_size="llama_tiny", context_attention="ulysses"),
            4,
            r"context_attention is ulysses, but tensor x context \(2 x 2\) does not divide the 2 heads of keys",
        ),
        (dict(mesh="1x1x1x2", loss_parts=2), 2, "loss_parts is 2, but the mesh's context axis is 2; expected 1"),
        (dict(mesh="1x2x1", context_attention="gather"), 2, "context_attention is gather, but the mesh has no context"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_compiles(changes, devices, message):
    with pytest.raises(InputError, match=message):
        choose_mesh(config_of(**changes), devices, None)
