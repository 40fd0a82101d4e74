"""llm.c's weight and debug-state files: written, read back bit-identical, and refused when damaged."""

import pytest
import torch

import convert_llmc
from config import ModelShape
from gpt import GPT, split_layers, stack_layers
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.errors import run_script

SHAPE = ModelShape(num_layers=2, num_heads=2, embedding_dim=32, sequence_length=16, vocab_size=200)


@pytest.fixture(scope="module")
def tensors():
    model = GPT(SHAPE)
    model.initialise(3)
    return stack_layers({name: parameter.detach() for name, parameter in model.named_parameters()})


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_bit_identical(tmp_path, tensors, dtype):
    path, again = tmp_path / "model.bin", tmp_path / "again.bin"
    convert_llmc.write_model(path, SHAPE, tensors, dtype)
    shape, found = convert_llmc.read_model(path)
    assert shape == SHAPE and set(found) == set(tensors)
    for name, tensor in found.items():
        assert tensor.dtype == dtype and torch.equal(bits(tensor), bits(tensors[name].to(dtype))), name
    convert_llmc.write_model(again, shape, found, dtype)
    assert path.read_bytes() == again.read_bytes()


def test_layout_is_the_one_llmc_reads(tmp_path, tensors):
    """Header words and the place of single values, by hand from llm.c's layout rather than through our reader."""
    path = tmp_path / "model.bin"
    convert_llmc.write_model(path, SHAPE, tensors)
    words = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int32)
    assert words[:8].tolist() == [20240326, 3, 16, 200, 2, 2, 32, 256]
    values = words[256:].view(torch.float32)
    D, L = 32, 2
    before_qkv = 256 * D + 16 * D + 2 * L * D  # wte (padded), wpe, ln1w, ln1b
    layer, row, column = 1, 70, 5
    assert (
        values[before_qkv + (layer * 3 * D + row) * D + column] == tensors["qkv_weight"].reshape(L, 3 * D, D)[1, 70, 5]
    )
    assert values[-1] == tensors["final_ln_bias"][-1] and values[-D - 1] == tensors["final_ln_weight"][-1]


def test_debug_state_checks_and_a_changed_one_does_not(tmp_path, tensors, capsys):
    model, good, bad = tmp_path / "model.bin", tmp_path / "good.bin", tmp_path / "bad.bin"
    convert_llmc.write_model(model, SHAPE, tensors)
    tokens = torch.randint(SHAPE.vocab_size, (2, 13), dtype=torch.int32)
    state = convert_llmc.compute_debug_state(SHAPE, tensors, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    convert_llmc.write_debug_state(good, SHAPE, state)
    read = convert_llmc.read_debug_state(good, SHAPE)
    assert torch.equal(read.tokens, state.tokens) and torch.equal(read.logits, state.logits)
    assert all(torch.equal(read.gradients[name], gradient) for name, gradient in state.gradients.items())
    assert convert_llmc.main(["check", str(model), str(good)]) == 0
    state.gradients["qkv_weight"].mul_(1.1)
    convert_llmc.write_debug_state(bad, SHAPE, state)
    assert convert_llmc.main(["check", str(model), str(bad)]) == 1
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
    convert_llmc.write_model(path, SHAPE, tensors)
    path.write_bytes(damage(path.read_bytes()))
    assert run_script(lambda: convert_llmc.main(["describe", str(path)])) == 2
    assert message in capsys.readouterr().err


def test_checkpoint_of_a_run_is_exported(tmp_path, tensors):
    options = dict(num_layers=2, num_heads=2, embedding_dim=32, sequence_length=16, vocab_size=200)
    (tmp_path / "run").mkdir()
    Checkpoints(tmp_path / "run" / "checkpoints", 1).save(7, {"model": split_layers(tensors)}, {"config": options})
    assert convert_llmc.main(["export", str(tmp_path / "run"), str(tmp_path / "out.bin"), "bf16"]) == 0
    shape, found = convert_llmc.read_model(tmp_path / "out.bin")
    assert shape == SHAPE
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors.items())
    (tmp_path / "empty").mkdir()
    assert run_script(lambda: convert_llmc.main(["export", str(tmp_path / "empty"), str(tmp_path / "x.bin")])) == 2


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
