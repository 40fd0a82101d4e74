"""llm.c's weight and debug-state files: written, read back bit-identical, and refused when damaged."""

import dataclasses

import numpy as np
import pytest
import torch
from mutations import a_full_disk, at_most, mutated, refusals
from run_files import assert_identical

from language.models.gpt import GPT, parameter_shapes
from language.models.layers import split_layers, stack_layers
from language.options.shapes import ModelShape
from language.weights import llmc_weights
from tools import convert_llmc
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.checkpoint import Checkpoints

OPTIONS = dict(num_layers=2, num_heads=2, embedding_dim=32, sequence_length=16, vocab_size=200)
SHAPE = ModelShape(**OPTIONS)


def write_debug_state(path, shape, state):
    """As llm.c's train_gpt2.py writes it: header, inputs, targets, logits, loss, gradients in model order."""
    header = np.zeros(256, "<i4")
    header[:4] = 20240327, 2, *state.tokens.shape
    parts = [header, state.tokens.numpy().astype("<i4"), state.targets.numpy().astype("<i4")]
    parts += [state.logits.contiguous().numpy().astype("<f4"), np.array(state.loss, "<f4")]
    parts += [state.gradients[name].numpy().astype("<f4") for name in parameter_shapes(shape)]
    path.write_bytes(b"".join(part.tobytes() for part in parts))


@pytest.fixture(scope="module")
def tensors():
    model = GPT(SHAPE)
    model.initialise(3)
    return stack_layers({name: parameter.detach() for name, parameter in model.named_parameters()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_bit_identical(tmp_path, tensors, dtype):
    path, again = tmp_path / "model.bin", tmp_path / "again.bin"
    llmc_weights.write_model(path, SHAPE, tensors, dtype)
    shape, found = llmc_weights.read_model(path)
    assert shape == SHAPE
    assert_identical(found, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    llmc_weights.write_model(again, shape, found, dtype)
    assert path.read_bytes() == again.read_bytes()


def test_layout_is_the_one_llmc_reads(tmp_path, tensors):
    """Header words and the place of single values, by hand from llm.c's layout rather than through our reader."""
    path = tmp_path / "model.bin"
    llmc_weights.write_model(path, SHAPE, tensors)
    words = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int32)
    assert words[:8].tolist() == [20240326, 3, 16, 200, 2, 2, 32, 256]
    values = words[256:].view(torch.float32)
    D, L = 32, 2
    before_qkv = 256 * D + 16 * D + 2 * L * D  # wte (padded), wpe, ln1w, ln1b
    layer, row, column = 1, 70, 5
    found = values[before_qkv + (layer * 3 * D + row) * D + column]
    assert found == tensors["qkv_weight"].reshape(L, 3 * D, D)[layer, row, column]
    assert values[-1] == tensors["final_ln_bias"][-1] and values[-D - 1] == tensors["final_ln_weight"][-1]


@pytest.fixture
def files(tmp_path, tensors):
    """(weights, their debug state, both as files; the state)."""
    model, state = tmp_path / "model.bin", tmp_path / "state.bin"
    llmc_weights.write_model(model, SHAPE, tensors)
    tokens = torch.randint(SHAPE.vocab_size, (2, 9), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    found = llmc_weights.compute_debug_state(SHAPE, tensors, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    write_debug_state(state, SHAPE, found)
    return model, state, found


def test_debug_state_checks_and_a_changed_one_does_not(files, capsys):
    """Nor one that is no number."""
    model, path, state = files
    read = llmc_weights.read_debug_state(path, SHAPE)
    assert torch.equal(read.tokens, state.tokens) and torch.equal(read.logits, state.logits)
    assert all(torch.equal(read.gradients[name], gradient) for name, gradient in state.gradients.items())
    assert convert_llmc.main(["check", str(model), str(path)]) == 0
    gradients = state.gradients | {"qkv_weight": state.gradients["qkv_weight"] * 1.1}
    nowhere = torch.full_like(state.logits, torch.nan)
    for change in (dict(gradients=gradients), dict(loss=float("nan")), dict(logits=nowhere)):
        write_debug_state(path, SHAPE, dataclasses.replace(state, **change))
        assert convert_llmc.main(["check", str(model), str(path)]) == 1
        assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-2], "truncated"),
        (lambda b: b + b"\0\0", "longer than its header says"),
        (lambda b: b"\1\2\3\4" + b[4:], "magic"),
        (lambda b: b[:500], "header of 1024 bytes"),
        (lambda b: b[:20] + (3).to_bytes(4, "little") + b[24:], "damaged header"),  # 3 heads for width 32
        (lambda b: b[:28] + (200).to_bytes(4, "little") + b[32:], "padded to 200"),
    ],
)
def test_damaged_weights_are_refused(tmp_path, tensors, damage, message, capsys):
    path = tmp_path / "model.bin"
    llmc_weights.write_model(path, SHAPE, tensors)
    path.write_bytes(damage(path.read_bytes()))
    assert run_script(lambda: convert_llmc.main(["describe", str(path)])) == 2
    assert message in capsys.readouterr().err


def save(run_dir, step, model, **more):
    """What transformer_tpu.py leaves of a run."""
    values = {"config": OPTIONS, **more}
    Checkpoints(run_dir / "checkpoints", 2).save(step, {"model": split_layers(model)}, values)


def test_checkpoint_of_a_run_is_exported(tmp_path, tensors):
    run_dir, out = tmp_path / "run", tmp_path / "out.bin"
    run_dir.mkdir()
    save(run_dir, 7, tensors)
    best = {"step": 7, "field": "validation_loss", "value": 3.5}
    save(run_dir, 9, {name: tensor + 1 for name, tensor in tensors.items()}, best=best)
    for options, added, dtype in ((["bf16", "best"], 0, torch.bfloat16), ([], 1, torch.float32)):
        assert convert_llmc.main(convert_llmc.parse(["export", str(run_dir), str(out), *options])) == 0
        shape, found = llmc_weights.read_model(out)
        assert shape == SHAPE
        assert_identical(found, {name: (tensor + added).to(dtype) for name, tensor in tensors.items()})
    whole = out.read_bytes()
    with a_full_disk(), pytest.raises(OSError, match=r"File too large: '.*/out\.bin'"):
        convert_llmc.main(["export", str(run_dir), str(out)])
    assert out.read_bytes() == whole and len([*tmp_path.iterdir()]) == 2
    (tmp_path / "empty").mkdir()
    assert run_script(lambda: convert_llmc.main(["export", str(tmp_path / "empty"), str(tmp_path / "x.bin")])) == 2


def test_a_weight_that_bfloat16_has_no_number_for_is_refused(tmp_path, tensors):
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 7, {name: torch.full_like(tensor, 3.4e38) for name, tensor in tensors.items()})
    with pytest.raises(InputError, match=r"step_00000007: [\w.]*, as torch.bfloat16: .* values are infinite"):
        convert_llmc.main(["export", str(tmp_path / "run"), str(tmp_path / "out.bin"), "bf16"])
    assert convert_llmc.main(["export", str(tmp_path / "run"), str(tmp_path / "out.bin")]) == 0


def test_help_is_no_mistake(tmp_path, capsys):
    for arguments, code, said in (
        (["--help"], 0, "export"),
        (["exprot", "a", "b"], 2, "export"),
        (["describe", str(tmp_path / "none.bin")], 2, "none.bin: no such file or folder"),
        (["export", str(tmp_path / "none"), str(tmp_path / "x.bin")], 2, "none: no such file or folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            convert_llmc.parse(arguments)
        captured = capsys.readouterr()
        assert stop.value.code == code and said in captured.out + captured.err


def test_no_damage_of_weights_or_states_is_a_crash(files):
    model, state, _ = files
    for path, words, read in (
        (model, 8, llmc_weights.read_model),
        (state, 4, lambda path: llmc_weights.read_debug_state(path, SHAPE)),
    ):
        content = path.read_bytes()
        damaged = [front + content[4 * words :] for front in mutated(content[: 4 * words], 200)]
        damaged += [front + content[1200:] for front in mutated(content[:1200], 100)]
        assert 150 < refusals(path, damaged, lambda read=read, path=path: read(path)) < 300
        path.write_bytes(content)


def test_a_header_whose_sizes_wrap_around_is_refused(tmp_path):
    """2 ** 30 layers of width 2 ** 30 and so on: in 64 bits the sizes add up to nothing behind the header."""
    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        words = 2**31 - 2, 2**30, 2**30, 1, 2**30, 2**30  # context, vocabulary, layers, heads, width, padded
        file.write(llmc_weights.header_of(llmc_weights.MODEL_MAGIC, 3, *words))
    with at_most(1 << 20), pytest.raises(InputError, match="truncated: 1024 bytes, expected"):
        llmc_weights.read_model(path)


@pytest.mark.parametrize("word, value", [(0, 200), (0, -1), (0, 2**31 - 1), (20, 200), (20, -5)])
def test_a_state_with_tokens_outside_the_vocabulary_is_refused(files, word, value):
    content = bytearray(files[1].read_bytes())
    content[1024 + 4 * word : 1028 + 4 * word] = value.to_bytes(4, "little", signed=True)
    files[1].write_bytes(content)
    with pytest.raises(InputError, match=rf"state.bin: token {value}, expected 0 to 199"):
        llmc_weights.read_debug_state(files[1], SHAPE)


CHANGED = [*(dict(num_layers=v) for v in ("2", 2.5, None, -1, 10**9, [])), dict(embedding_dim=2**40)]
CHANGED += [dict(num_heads=3), dict(vocab_size=10**12), dict(dataset=[]), dict(precision=7), dict(model_size={})]


@pytest.mark.parametrize("changed", CHANGED, ids=str)
def test_a_run_whose_options_cannot_be_is_refused(tmp_path, tensors, changed):
    values = {"config": OPTIONS | changed}
    Checkpoints(tmp_path / "checkpoints", 1).save(7, {"model": split_layers(tensors)}, values)
    with at_most(8 << 20), pytest.raises(InputError, match=f"{tmp_path}.*expected"):
        convert_llmc.read_run(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [{"token_embedding": torch.zeros(3)}, {"qkv_weight.1": None}, {"extra": torch.zeros(2)}, {3: torch.zeros(2)}],
    ids=lambda changed: str(list(changed)),
)
def test_a_run_with_other_weights_is_refused(tmp_path, tensors, changed):
    model = {**split_layers(tensors), **changed}
    Checkpoints(tmp_path / "checkpoints", 1).save(7, {"model": model}, {"config": OPTIONS})
    with pytest.raises(InputError, match="the checkpoint is of another model"):
        convert_llmc.read_run(tmp_path)
