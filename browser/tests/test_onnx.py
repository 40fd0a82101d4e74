"""Exported models: onnxruntime's numbers are PyTorch's, and no damage of a folder is a crash or a hang."""

# ruff: noqa: E402

import dataclasses
import json
import shutil
import zlib

import numpy as np
import pytest
import torch
from mutations import make_irregular, mutated, mutated_json, no_hang
from test_llama_parity import GEMMA3, QWEN3, SHAPES, hugging_face_model
from test_tokenizer import trained

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package, reason="pip install -r requirements-dev.txt brings onnx, onnxruntime and onnxscript")

from onnx_stub import write_model_json

from browser import export as exporting
from browser import onnx_files, onnx_generate
from browser.onnx_files import MODEL_JSON, open_export
from browser.onnx_generate import Mulberry32, OnnxConfig, OnnxModel, choose
from language.data.tokenizer import load_tokenizer
from language.weights.sources import open_source
from tpu_utils.base.errors import InputError, NonFiniteError


def hugging_face_folder(folder, shape, num_layers=2):
    """Random weights, and a tokenizer whose vocabulary is the model's."""
    trained(folder, begins=True)
    hugging_face_model(dataclasses.replace(shape, num_layers=num_layers, sequence_length=256)).save_pretrained(folder)
    return folder


def export(source, out, *options):
    assert exporting.main(exporting.parse([str(source), str(out), *options])) == 0
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return hugging_face_folder(tmp_path_factory.mktemp("source"), QWEN3, num_layers=1)


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory):
    return export(source, tmp_path_factory.mktemp("onnx") / "model", "--context=128", "--chunk=8")


def test_a_mixture_of_experts_is_refused_by_name(tmp_path):
    folder = hugging_face_folder(tmp_path / "theirs", SHAPES["mixtral"], num_layers=1)
    with pytest.raises(InputError, match=r"a mixture of 8 experts \(mixtral\), which is not exported to ONNX"):
        export(folder, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def greedy(model, prompt, count):
    config = OnnxConfig(onnx="x", temperature=0.0, num_tokens=count)
    return onnx_generate.generate(model, prompt, config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_prompt_in_chunks_and_token_by_token_has_pytorchs_logits(source, exported, tmp_path, name):
    """Also where layers have a window, which is shorter than the prompt and no multiple of a chunk."""
    if name == "gemma3":
        source = hugging_face_folder(tmp_path, GEMMA3, num_layers=3)
        exported = export(source, tmp_path / "model", "--context=128", "--chunk=8")
    model = OnnxModel(exported)
    ours = exporting.load(open_source(hf=str(source)))
    tokens = torch.randint(ours.shape.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))
    expected = ours(tokens).logits[0, :, : ours.shape.vocab_size]
    found = model.read(tokens[0, :21].tolist())  # two chunks and a part
    np.testing.assert_allclose(found, expected[20], atol=1e-4 * expected.abs().max().item())
    for at in range(21, 40):
        found = model.read([int(tokens[0, at])])
        np.testing.assert_allclose(found, expected[at], atol=1e-4 * expected.abs().max().item())


def test_an_end_that_only_the_models_configuration_names_goes_out(source, tmp_path):
    theirs = shutil.copytree(source, tmp_path / "theirs")
    (theirs / "tokenizer_config.json").unlink()
    (theirs / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((theirs / "config.json").read_text()) | {"eos_token_id": 2}
    (theirs / "config.json").write_text(json.dumps(config))
    (tmp_path / "out").mkdir()
    exporting.write_tokenizer(open_source(hf=str(theirs)), None, tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out")).stops == {2}


@pytest.mark.slow
def test_what_does_not_fit_is_said(exported):
    model = OnnxModel(exported)
    with pytest.raises(InputError, match="has 120 tokens and 10 are to follow, but the context is 128"):
        greedy(model, [1] * 120, 10)
    assert len(greedy(model, [1] * 120, 9)) == 9  # the last token needs no place
    with pytest.raises(InputError, match="outside the vocabulary"):
        greedy(model, [10**6], 1)


def test_random_numbers_and_choices_are_those_that_the_page_is_held_to():
    """The expected numbers are those of mulberry32's own JavaScript, run by node 20 with seeds 0 and 4294967295."""
    random = Mulberry32(0)
    assert [random.next() for _ in range(3)] == [0.26642920868471265, 0.0003297457005828619, 0.2232720274478197]
    assert Mulberry32(2**32 - 1).next() == Mulberry32(-1).next() == 0.8964226141106337
    logits = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    assert choose(logits, 0.5, 0.0, 0, 1.0) == 1  # the first of the largest
    assert [choose(logits, u, 1.0, 2, 1.0) for u in (0.0, 0.49, 0.51, 0.999)] == [1, 1, 2, 2]
    assert {choose(logits, u, 1.0, 0, 0.39) for u in np.linspace(0, 0.999, 50)} == {1}
    found = np.bincount([choose(logits, u, 1.0, 0, 1.0) for u in (np.arange(4000) + 0.5) / 4000], minlength=4) / 4000
    p = np.exp(logits - 3.0)
    np.testing.assert_allclose(found, p / p.sum(), atol=1e-3)


@pytest.mark.exhaustive
def test_no_damage_of_a_folder_is_a_crash(exported, tmp_path):
    """100 folders: bytes changed with and without a model.json that agrees, fields of it, files of another kind."""
    told = json.loads((exported / MODEL_JSON).read_text())
    contents = {path.name: path.read_bytes() for path in exported.iterdir()}
    folder = tmp_path / "damaged"

    def attempt(name, content, agree):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(exported, folder)
        (folder / name).write_bytes(content)
        if agree:  # whoever made the folder says so
            write_model_json(folder, told)
        try:
            greedy(OnnxModel(folder), [1, 2], 2)
        except (InputError, NonFiniteError) as error:  # the second: a damaged number of a weight
            assert str(folder) in str(error) or isinstance(error, NonFiniteError), error
            return 1
        return 0

    refused = 0
    with no_hang(300):
        for seed, (name, agree) in enumerate((n, a) for n in sorted(contents) if n.endswith(".onnx") for a in (0, 1)):
            refused += sum(attempt(name, damaged, agree) for damaged in mutated(contents[name], 15, seed))
        refused += sum(attempt("weights.bin", d, False) for d in mutated(contents["weights.bin"], 10, 9))
        refused += sum(attempt(MODEL_JSON, damaged, False) for damaged in mutated_json(told, 30, 5))
    assert refused >= 75, refused  # what was left changed a name, or a number of a weight
    for name in ("decode.onnx", "weights.bin", MODEL_JSON):
        shutil.copytree(exported, folder, dirs_exist_ok=True)
        make_irregular(folder / name, "FIFO")
        with no_hang(), pytest.raises(InputError):
            open_export(folder)
        (folder / name).unlink()


@pytest.mark.slow
def test_a_foreign_graph_is_refused(exported, tmp_path):
    import onnx
    from onnx import helper

    def changed(change):
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(exported, folder)
        model = onnx.load(folder / "decode.onnx", load_external_data=False)
        change(model)
        (folder / "decode.onnx").write_bytes(model.SerializeToString())
        write_model_json(folder, json.loads((folder / MODEL_JSON).read_text()))
        return folder

    def weights(key, value):
        def change(model):
            tensor = next(t for t in model.graph.initializer if t.external_data)
            next(e for e in tensor.external_data if e.key == key).value = value

        return change

    for change, said in (
        (weights("location", "../../etc/passwd"), "expected weights.bin"),
        (weights("offset", str(10**12)), "ends behind"),
        (lambda m: m.graph.node.append(helper.make_node("Loop", [], [])), ":Loop; expected operators"),
        (lambda m: setattr(m.graph.node[0], "domain", "evil"), "evil:"),
        (lambda m: setattr(m.opset_import[0], "version", 99), "99"),
        (lambda m: m.graph.sparse_initializer.add(), "sparse weights, or some inside of an operator"),
        (lambda m: m.graph.node[0].attribute.append(helper.make_attribute("t", onnx.TensorProto())), "inside of an op"),
        (lambda m: m.graph.input[0].type.tensor_type.shape.dim.add(dim_value=3), "model.json says"),
    ):
        with pytest.raises(InputError, match=said):
            open_export(changed(change))

    def fails_later(model):
        """Its logits are reshaped to the position of a token, which loading does not know."""
        producer = next(node for node in model.graph.node if "logits" in node.output)
        producer.output[list(producer.output).index("logits")] = "plain"
        model.graph.node.append(helper.make_node("Cast", ["position"], ["rows"], to=onnx.TensorProto.INT64))
        model.graph.node.append(helper.make_node("Concat", ["rows", "rows"], ["both"], axis=0))
        model.graph.node.append(helper.make_node("Reshape", ["plain", "both"], ["logits"]))

    model = onnx_generate.OnnxModel(changed(fails_later))
    with pytest.raises(InputError, match=r"^the graph cannot be run: [^\n]*; export it again$"):
        greedy(model, [5] * 9, 4)


@pytest.mark.parametrize("name", ["model.new", ".replaced_model"])
def test_a_folder_with_a_name_that_an_export_needs_is_left_alone(source, tmp_path, capsys, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        exporting.parse([str(source), str(tmp_path / "model")])
    assert ended.value.code == 2 and f"{name} is there and is no export" in capsys.readouterr().err
    assert (tmp_path / name / "mine.txt").read_text() == "mine"


@pytest.mark.slow
def test_an_export_killed_between_its_two_renamings_is_repeated(source, exported, tmp_path):
    for name in (".replaced_model", "model.new"):
        shutil.copytree(exported, tmp_path / name)
    for _ in range(2):  # the second time it replaces an export that is whole
        export(source, tmp_path / "model", "--context=128", "--chunk=8")
        open_export(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["a\0b", "..", "a/b", "a" * 400, ""])
def test_a_name_of_a_file_is_one_in_the_folder(tmp_path, name):
    with pytest.raises(InputError):
        onnx_files.check_file(tmp_path, name, {"bytes": 1, "sha256": ""})


def test_mistakes_before_anything_is_loaded(source, tmp_path, capsys):
    (tmp_path / "full").mkdir()  # an export, and a file beside it
    told = {"format": onnx_files.FORMAT, "files": {"weights.bin": {}}}
    (tmp_path / "full" / MODEL_JSON).write_text(json.dumps(told))
    for name in ("weights.bin", "mine.txt"):
        (tmp_path / "full" / name).write_bytes(b"mine")
    for arguments, said in (
        (["nowhere", "out"], "nowhere: No such file or directory; expected a folder"),
        ([str(source), str(tmp_path / "full")], "is there already and is no export"),
        ([str(source), str(source)], "is there already and is no export"),
        ([str(source), "out", "--chunk", "0"], "chunk is 0"),
        ([str(source), "out", "--weights", "int4"], "invalid choice"),
    ):
        with pytest.raises(SystemExit) as ended:
            exporting.parse(arguments)
        assert ended.value.code == 2 and said in capsys.readouterr().err
    with pytest.raises(InputError, match="context is 9999, but the model reads 256 tokens"):
        export(source, tmp_path / "new", "--context=9999")
    assert not list(tmp_path.glob("*new*"))  # nothing half-written is left


@pytest.mark.slow
@pytest.mark.parametrize("weights, bound", [("float16", 5e-3), ("int8", 0.1)])
def test_stored_smaller_it_is_smaller_and_near(source, exported, tmp_path, weights, bound):
    folder = export(source, tmp_path / weights, "--context=128", "--chunk=8", f"--weights={weights}")
    size, whole = ((f / "weights.bin").stat().st_size for f in (folder, exported))
    assert size < {"float16": 0.55, "int8": 0.45}[weights] * whole
    found, expected = (OnnxModel(f).read(list(range(20))) for f in (folder, exported))
    assert 0 < np.abs(found - expected).max() < bound * np.abs(expected).max()


def test_the_template_of_an_earlier_export_is_known():
    """As tools.convert_hf wrote it before answers were marked in it."""
    template = (
        "{{- '<|begin_of_text|>' }}\n{%- for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
        "{%- endif %}\n"
    )
    assert exporting.EARLIER_TEMPLATES[zlib.crc32(template.encode())] == "llama3"
