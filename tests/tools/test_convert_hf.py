"""Hugging Face's folders in and out: bit for bit, loaded by its own library, and refused when something is wrong."""

import dataclasses
import functools
import itertools
import json
import logging
import math
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mutations import at_most, make_irregular, mutated, mutated_json, no_hang, refusals
from run_files import assert_identical
from safetensors.torch import load_file, save_file
from test_llama_parity import SHAPES, hugging_face_model

import transformer_tpu
from language.generation.decoding import check_lengths
from language.options.families import FAMILIES
from language.options.hf_config import hugging_face_config, shape_of
from language.options.llama_shape import MODEL_SIZES, LlamaShape
from language.options.shapes import GPT_SIZES, LLAMA_SIZES, ModelShape
from language.options.transformer_options import TransformerConfig
from language.weights.hf_files import HEAD, INDEX, WHOLE, open_weights, read_config, write_weights
from language.weights.hf_layout import sources, their_tensors
from language.weights.run_weights import read_merged, read_run
from tools import convert_hf, convert_llmc
from tools.generate import GenerateConfig, source_of
from tpu_utils.base.errors import InputError, SaveError, run_script
from tpu_utils.options.parsing import parse_command_line

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt brings transformers")

SMALL = dict(num_layers=2, num_heads=4, embedding_dim=32, sequence_length=96, vocab_size=200)
KINDS = {"gpt2": ModelShape(**SMALL)}
KINDS |= {
    name: dataclasses.replace(shape, **(SMALL if name in ("tied", "stretched", "qwen3") else {}), mlp_dim=48)
    for name, shape in SHAPES.items()
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[..., Path]:
    """folders(kind, dtype): a model as transformers saves it, in bfloat16 in several files."""

    @functools.cache
    def saved(kind: str, dtype: str = "float32") -> Path:
        folder, size = tmp_path_factory.mktemp(kind), "20KB" if dtype == "bfloat16" else "1GB"
        hugging_face_model(KINDS[kind]).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=size)
        return folder

    return saved


@pytest.fixture
def folder(folders, tmp_path) -> Path:
    """One of them, to be damaged."""
    return Path(shutil.copytree(folders("tied"), tmp_path / "theirs"))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "name, dtype",
    [("gpt2", "bfloat16"), *zip(KINDS, itertools.cycle(["float32", "bfloat16"]), strict=False)],
)
def test_theirs_come_back_bit_identical_and_their_library_loads_them(folders, tmp_path, name, dtype, caplog, capsys):
    theirs, ours, back = folders(name, dtype), tmp_path / "run", tmp_path / "back"
    convert_hf.import_weights(theirs, ours)
    config, _ = read_run(ours)
    assert config.shape == KINDS[name] and config.precision == dtype
    convert_hf.export(ours, back, getattr(torch, dtype), most_bytes=40_000 if dtype == "bfloat16" else 10**9)
    said, layers = capsys.readouterr().out, KINDS[name].num_layers
    assert said.count(f", {layers} layers of width ") == 2 and f", {dtype}\n" in said and "Shape(" not in said, said
    assert (back / INDEX).exists() == (dtype == "bfloat16") and (theirs / INDEX).exists() == (dtype == "bfloat16")
    assert_identical(tensors_in(back), tensors_in(theirs))
    before, after = (json.loads((place / "config.json").read_text()) for place in (theirs, back))
    assert shape_of(after) == shape_of(before)
    assert all(before[key] == after[key] for key in before.keys() & after.keys() - {"layer_norm_epsilon"}), after
    transformers.utils.logging.enable_propagation()
    with caplog.at_level(logging.INFO):
        load = transformers.AutoModelForCausalLM.from_pretrained
        _, said = load(back, dtype=torch.float32, output_loading_info=True)
    assert not any(said.values()), said
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text


@pytest.mark.parametrize("name", ["mixtral", "phi4"])  # experts; several of ours in one of theirs
def test_the_parameter_before_is_let_go(tmp_path, name):
    shape = dataclasses.replace(KINDS[name], mlp_dim=1024)
    sizes = {ours: source.size for ours, source in sources(shape).items()}

    def ours(name: str) -> torch.Tensor:
        return torch.from_numpy(np.zeros(sizes[name], np.float32))  # in numpy's memory, which is counted

    with at_most(int(1.2 * 4 * max(map(math.prod, sizes.values())))):
        write_weights(tmp_path, shape, torch.float32, their_tensors(shape, ours))


def test_what_a_run_does_not_have_is_not_exported(folder, tmp_path):
    convert_hf.import_weights(folder, tmp_path / "run")
    with pytest.raises(InputError, match="has no adapters; expected a run with --lora_rank"):
        convert_hf.export_adapter(tmp_path / "run", tmp_path / "out", torch.float32)
    with pytest.raises(InputError, match=r"of the Llama family; expected a GPT, which llm.c has"):
        convert_llmc.export(tmp_path / "run", tmp_path / "out", torch.float32)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------- what else is written
def test_files_of_the_tokenizer_go_with_the_weights(folder, tmp_path):
    files = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"a": 1}', "merges.txt": bytes(range(256))}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "modeling_mine.py").write_text("raise SystemExit('run')")
    convert_hf.import_weights(folder, tmp_path / "run")
    shutil.rmtree(folder)  # a run is whole without it
    assert Path(read_run(tmp_path / "run")[0].tokenizer, "tokenizer.json").exists()
    convert_hf.export(tmp_path / "run", tmp_path / "back", torch.float32)
    assert all((tmp_path / "back" / name).read_bytes() == content for name, content in files.items())
    written = {path.name for path in (tmp_path / "back").iterdir()}
    assert written == {*files, WHOLE, "config.json", "generation_config.json"}


def test_a_longer_context_than_that_of_the_run_is_not_forgotten(folder, tmp_path):
    longer = dict(max_position_embeddings=131072, eos_token_id=[3, 4])
    said = json.loads((folder / "config.json").read_text()) | longer
    (folder / "config.json").write_text(json.dumps(said))
    convert_hf.import_weights(folder, tmp_path / "run")
    assert read_run(tmp_path / "run")[0].shape.sequence_length == 4096
    asked = GenerateConfig(run_dir=str(tmp_path / "run"), tokenizer="numbers", context=131072)
    assert check_lengths(source_of(asked).shape, [[1] * 5000], context=asked.context) == (100, 131072)
    convert_hf.export(tmp_path / "run", tmp_path / "back", torch.float32)
    said = json.loads((tmp_path / "back" / "config.json").read_text())
    assert said["max_position_embeddings"] == 131072 and said["eos_token_id"] == [3, 4]


def test_what_fails_on_the_way_leaves_nothing(folder, tmp_path, monkeypatch):
    (tmp_path / ".writing_run_0123456789abcdef" / "checkpoints").mkdir(parents=True)  # left by a kill
    convert_hf.import_weights(folder, tmp_path / "run")

    def no_space(saved, name, config):
        if name == "final_ln_weight":  # the last one
            raise OSError(28, "No space left on device")
        return read_merged(saved, name, config)

    monkeypatch.setattr(convert_hf, "read_merged", no_space)
    with pytest.raises(SaveError, match="No space"):
        convert_hf.export(tmp_path / "run", tmp_path / "back", torch.float32)
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "run"}


def test_a_weight_that_the_written_type_has_no_number_for_is_refused(folder, tmp_path):
    """The largest of float32 are infinite in bfloat16: the folder was written, and refused by whoever read it."""
    rewrite(folder, lambda tensors: tensors[NORM].fill_(3.4e38))
    convert_hf.import_weights(folder, tmp_path / "run")
    with pytest.raises(InputError, match=r"final_ln_weight, as torch.bfloat16: 32 of 32 values are infinite"):
        convert_hf.export(tmp_path / "run", tmp_path / "back", torch.bfloat16)
    assert not (tmp_path / "back").exists()
    convert_hf.export(tmp_path / "run", tmp_path / "back", torch.float32)


def test_an_imported_run_is_not_resumed(folder, tmp_path, capsys):
    convert_hf.import_weights(folder, tmp_path / "run")
    options = ["--run_dir", str(tmp_path / "run"), "--resume=must", "--dataset=synthetic"]
    code = run_script(lambda: transformer_tpu.train(parse_command_line(TransformerConfig, "", options)))
    said = capsys.readouterr().err
    assert code == 2 and "holds weights alone" in said and "--initial_weights" in said, said


# ------------------------------------------------------------------------------------------------------------ bad input
def test_every_published_size_is_a_configuration():
    assert tuple(MODEL_SIZES) == (*GPT_SIZES, *LLAMA_SIZES)
    for name, shape in MODEL_SIZES.items():
        said = hugging_face_config(shape)
        found = shape_of(json.loads(json.dumps(said)))
        head_width = {"head_width": found.head_width} if isinstance(shape, LlamaShape) else {}
        assert found == dataclasses.replace(shape, **head_width), name
        assert (found.head_dim, found.num_parameters) == (shape.head_dim, shape.num_parameters)
    scaled = hugging_face_config(MODEL_SIZES["llama3_8B"])
    newer = {name: value for name, value in scaled.items() if not name.startswith("rope")}
    newer["rope_parameters"] = {"rope_theta": scaled["rope_theta"], **scaled["rope_scaling"]}  # as transformers 5
    assert shape_of(newer) == shape_of(scaled)


OTHER = {  # keys that say what the models here do not do, if their value is another
    "gpt2": "tie_word_embeddings scale_attn_by_inverse_layer_idx activation_function scale_attn_weights",
    "stretched": "attention_dropout partial_rotary_factor attention_bias mlp_bias hidden_act quantization_config",
    "qwen2": "use_sliding_window",
    "gemma3": "final_logit_softcapping attn_logit_softcapping use_bidirectional_attention hidden_activation",
    "olmo2": "attention_bias",
    "phi4": "embd_pdrop resid_pdrop lm_head_bias",
    "mixtral": "sliding_window router_jitter_noise",
    "qwen3_moe": "decoder_sparse_step mlp_only_layers",
    "smollm3": "use_sliding_window mlp_bias",
}


@pytest.mark.parametrize("name, key", [(name, key) for name, keys in OTHER.items() for key in keys.split()])
def test_what_a_model_here_does_not_do_is_refused_by_name(name, key):
    with pytest.raises(InputError, match=f"{key} is 0.125; expected .* has no other"):
        shape_of(hugging_face_config(KINDS[name]) | {key: 0.125})


LONG, LINEAR = {"type": "longrope"}, {"rope_type": "linear", "factor": 2.0}
LARGE = dict(num_hidden_layers=1024, hidden_size=1 << 20, intermediate_size=1 << 20, head_dim=256)
REFUSED = [
    ("stretched", dict(model_type="falcon"), "model_type is 'falcon'; expected gpt2, llama, mistral, qwen2, qwen3"),
    ("stretched", dict(model_type="gemma3"), "of one that reads images"),
    ("stretched", dict(model_type=["llama"]), "model_type is"),
    (
        "stretched",
        dict(num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000; expected an integer from 1 to 1,024",
    ),
    ("stretched", dict(num_hidden_layers=True), "num_hidden_layers is True"),
    ("stretched", dict(vocab_size=1 << 24), "vocab_size is 16777216; expected an integer from 1 to 1,048,576"),
    ("stretched", LARGE, "parameters in 1,024 layers or experts; expected at most 4,398,046,511,104 in 65,536"),
    ("stretched", dict(num_key_value_heads=3), "4 heads of width 8, 3 of keys and values"),
    ("stretched", dict(head_dim=7), "expected an even width"),
    ("stretched", dict(layer_types=["sliding_attention"]), "layer_types is"),
    ("stretched", dict(rope_scaling={"rope_type": "yarn"}), "are 'yarn'; expected default or linear or llama3"),
    ("stretched", dict(rope_scaling=["llama3"]), "the rotary positions are"),
    ("stretched", dict(rope_scaling={"rope_type": "llama3", "factor": float("nan")}), "factor is nan"),
    ("stretched", dict(rope_scaling={"rope_type": "llama3"}), "factor is None"),
    ("stretched", dict(rms_norm_eps=-1.0), "rms_norm_eps is -1.0"),
    ("stretched", dict(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'"),
    ("gpt2", dict(n_inner=77), "n_inner 77"),
    ("gpt2", dict(n_head=5), "n_head 5"),
    ("mistral", dict(sliding_window=0), "sliding_window is 0; expected an integer from 1"),
    ("mistral", dict(layer_types=["full_attention"] * 3), "expected sliding_attention for every layer"),
    ("gemma3", dict(layer_types=["chunked_attention"] * 4), "expected sliding_attention or full_attention"),
    ("gemma3", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar is 0"),
    ("gemma3", dict(rope_scaling={"rope_type": "llama3"}), "are 'llama3'; expected default or linear"),
    ("gemma3", dict(rope_scaling=LINEAR | {"mscale": 1.0}), "rope_scaling has 'mscale'"),
    ("olmo2", dict(rope_scaling=LINEAR), "are 'linear'; expected default"),
    ("phi4", dict(partial_rotary_factor=1.5), "24 of a width rotated"),
    ("phi4", dict(rope_scaling=LONG | dict(short_factor=[1.0], long_factor=[1.0])), "a list of 6 numbers"),
    ("phi4", dict(rope_scaling=LONG | dict(short_factor=["a"] * 6, long_factor=[1.0] * 6)), "longrope is 'a'"),
    ("mixtral", dict(num_experts_per_tok=9), "num_experts_per_tok is 9; expected at most the 8 of num_local_experts"),
    (
        "qwen3_moe",
        dict(num_hidden_layers=1024, num_experts=1024, moe_intermediate_size=1),
        "in 1,048,576 layers or exp",
    ),
    ("qwen3_moe", dict(norm_topk_prob="yes"), "norm_topk_prob is 'yes'; expected true or false"),
    ("smollm3", dict(no_rope_layers=[1, 0]), "no_rope_layers is [1, 0]; expected 0 or 1 for every layer"),
]


@pytest.mark.parametrize("name, changed, message", REFUSED, ids=lambda value: str(value)[:40])
def test_a_configuration_that_cannot_be_is_refused(name, changed, message):
    with pytest.raises(InputError, match=re.escape(message)):
        shape_of(hugging_face_config(KINDS[name]) | changed)


@pytest.mark.parametrize("experts, first", [(6, "experts.6.w1.weight is there"), (10, "block_sparse_moe.experts.8")])
def test_a_folder_with_other_experts_than_its_configuration_says(folders, tmp_path, experts, first):
    folder = Path(shutil.copytree(folders("mixtral"), tmp_path / "theirs"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": experts}))
    with pytest.raises(InputError, match=f"config.json says {experts} experts, and the tensors are of 8; .*{first}"):
        open_weights(folder)


def test_a_key_that_is_absent_means_what_it_means_to_transformers():
    for name, shape in KINDS.items():
        said = hugging_face_config(shape)
        theirs = transformers.AutoConfig.for_model(model_type=said["model_type"])  # all its own defaults
        family = FAMILIES[said["model_type"]]
        for key, value in family.defaults.items():
            if hasattr(theirs, key) and value is not None:
                assert getattr(theirs, key) == value, (name, key)
        for key, values in family.expected.items():
            assert getattr(theirs, key, values[0]) in values or name == "gpt2", (name, key)
    gemma = hugging_face_config(KINDS["gemma3"]) | {"num_hidden_layers": 12}
    older = {key: value for key, value in gemma.items() if key not in ("layer_types", "rope_local_base_freq")}
    assert shape_of(older | {"sliding_window_pattern": 3}) == shape_of(gemma | {"layer_types": GEMMA_TYPES})
    assert shape_of(older).pattern == ("local",) * 5 + ("global",)
    newer = {key: value for key, value in gemma.items() if not key.startswith("rope")} | {"layer_types": GEMMA_TYPES}
    newer["rope_parameters"] = {  # as transformers 5 has it
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    assert shape_of(newer) == shape_of(gemma | {"layer_types": GEMMA_TYPES})
    smollm = {key: value for key, value in hugging_face_config(KINDS["smollm3"]).items() if key != "no_rope_layers"}
    assert shape_of(smollm) == KINDS["smollm3"]


GEMMA_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 4


@pytest.mark.parametrize("name", ["stretched", "gpt2", "qwen3", "gemma3", "phi4", "smollm3"])
def test_no_damage_of_a_configuration_is_a_crash(tmp_path, name):
    contents = mutated_json(hugging_face_config(KINDS[name]), 400, seed=3)
    read = lambda: shape_of(read_config(tmp_path)).num_parameters  # noqa: E731
    assert refusals(tmp_path / "config.json", contents, read) > 100


def rewrite(folder: Path, change, **more) -> None:
    tensors = load_file(folder / WHOLE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WHOLE, {"format": "pt"})


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
KEYS = "model.layers.0.self_attn.k_proj.weight"
CHANGES = {
    "absent": (lambda t: t.pop(NORM), f"{NORM} is absent"),
    "unknown": (lambda t: t.update(score=torch.zeros(2)), "score is there"),
    "shape": (lambda t: t.update({NORM: torch.zeros(33)}), f"{NORM} is float32[33], expected float32, bfloat16"),
    "integers": (lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int32)}), f"{NORM} is int32[32]"),
    "untied": (lambda t: t.update({HEAD: t[EMBEDDING] + 1}), f"{HEAD} is not {EMBEDDING}"),
    "mixed": (lambda t: t.update({KEYS: torch.zeros(16, 32).bfloat16()}), "have several types"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_tensors_are_refused_before_anything_is_written(folder, tmp_path, name):
    change, message = CHANGES[name]
    rewrite(folder, change)
    with pytest.raises(InputError, match=re.escape(message)):
        convert_hf.import_weights(folder, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_head_beside_its_embedding_and_names_without_base_are_read(folders, folder, tmp_path):
    expected = open_weights(folder).read("token_embedding")
    rewrite(folder, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    assert torch.equal(open_weights(folder).read("token_embedding"), expected)
    gpt2 = Path(shutil.copytree(folders("gpt2"), tmp_path / "gpt2"))
    whole = open_weights(gpt2)
    wanted = {name: whole.read(name) for name in whole.names}

    def as_published(tensors):  # OpenAI's own, converted: without the base, with the masks
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)

    rewrite(gpt2, as_published)
    found = open_weights(gpt2)
    assert_identical({name: found.read(name) for name in found.names}, wanted)


def test_float16_comes_in_without_rounding(folder, tmp_path):
    rewrite(folder, lambda tensors: tensors.update({name: tensor.half() for name, tensor in tensors.items()}))
    convert_hf.import_weights(folder, tmp_path / "run")
    convert_hf.export(tmp_path / "run", tmp_path / "back", torch.float32)
    assert_identical(tensors_in(tmp_path / "back"), {n: t.float() for n, t in tensors_in(folder).items()})


def test_an_adapter_beside_the_weights_is_not_left_out_silently(folder, tmp_path):
    both = shutil.copytree(folder, tmp_path / "both")
    (both / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"both has adapter_config.json.*merge_and_unload"):
        open_weights(both)


def test_a_context_may_be_shorter_but_not_longer(folders):
    shape = KINDS["gpt2"]
    shorter = open_weights(folders("gpt2"), dataclasses.replace(shape, sequence_length=10))
    whole = open_weights(folders("gpt2")).read("position_embedding")
    assert torch.equal(shorter.read("position_embedding"), whole[:10])
    assert shorter.kind("position_embedding").shape == (10, 32)
    with pytest.raises(InputError, match="reads 96 tokens, expected 97; choose a sequence_length"):
        open_weights(folders("gpt2"), dataclasses.replace(shape, sequence_length=97))
    with pytest.raises(InputError, match="num_layers is 2, expected 3"):
        open_weights(folders("gpt2"), dataclasses.replace(shape, num_layers=3))
    with pytest.raises(InputError, match="kind is ModelShape, expected LlamaShape"):
        open_weights(folders("gpt2"), KINDS["tied"])


def test_an_index_names_files_of_its_folder_and_these_have_its_tensors(folders, tmp_path):
    folder = Path(shutil.copytree(folders("tied", "bfloat16"), tmp_path / "theirs"))
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(file for file in where.values() if file != where[NORM])
    names = "../out.safetensors", "/etc/passwd", "a/b.safetensors", ".safetensors", 7, "x.bin"
    for changed, message in (
        *((where | {NORM: name}, "; expected *.safetensors in the same folder") for name in names),
        (where | {NORM: other}, f"{NORM} is in {where[NORM]}, but {INDEX} has it in {other}"),
        ({n: f for n, f in where.items() if n != NORM}, f"but {INDEX} has it nowhere"),
        (where | {"more": other}, f"more is not in {other}"),
        (where | {"more": "none.safetensors"}, "none.safetensors: no such file"),
        ([], "weight_map is []"),
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(InputError, match=re.escape(message)):
            open_weights(folder)


@pytest.mark.parametrize("kind", ["FIFO", "folder", "character device", "nothing"])
@pytest.mark.parametrize("file", [WHOLE, "config.json", "tokenizer.json"])
def test_what_is_no_file_is_refused(folder, tmp_path, kind, file):
    make_irregular(folder / file, kind)
    with no_hang(), pytest.raises(InputError, match=f"{file}.*expected"):
        convert_hf.import_weights(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_pickles_are_not_read(folder):
    (folder / WHOLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model.bin, a pickle, .* only safetensors are read"):
        open_weights(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=re.escape(f"neither {WHOLE} nor {INDEX}")):
        open_weights(folder)


def test_no_damage_of_a_header_is_a_crash(folder):
    content = (folder / WHOLE).read_bytes()
    length = 8 + struct.unpack("<Q", content[:8])[0]
    damaged = (front + content[length:] for front in mutated(content[:length], 150, seed=4))
    assert refusals(folder / WHOLE, [content[:-1], *damaged], lambda: open_weights(folder), named=str(folder)) > 100


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        ("--help", 0, "adapter"),
        ("exprot a b", 2, "export RUN_DIR DIR"),
        ("import a", 2, "import DIR RUN_DIR"),
        ("import theirs theirs", 2, "theirs is there already; expected a new or an empty folder"),
        ("import theirs new bf16", 2, "import has no options"),
        ("import empty new", 2, "config.json: no such file"),
        ("export theirs new best best", 2, "each once"),
        ("export gs://bucket/run new", 2, "expected local folders"),
        ("export empty new", 2, "holds no complete checkpoint"),
    ],
)
def test_the_command_line(folder, tmp_path, monkeypatch, capsys, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(run_script(lambda: convert_hf.main(convert_hf.parse(arguments.split()))))
    captured = capsys.readouterr()
    assert stop.value.code == code and said in captured.out + captured.err
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "empty"}
