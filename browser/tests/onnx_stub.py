"""Exported folders of a few nodes, as browser.export lays them out: also such as never end."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="pip install -r requirements-dev.txt brings onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from browser.onnx_files import OPSET  # noqa: E402

SHAPE = dict(num_layers=2, num_cached_heads=2, head_dim=4)


def write_language_model(folder: Path, kind: str = "good", context: int = 256, chunk: int = 8) -> Path:
    """A model of bytes whose logits hang on the last token and its place alone. kind: good; nan; infinite and
    minus_infinite (one of the logits, from the third token on); slow (a tenth of a second a token); endless (a loop
    without end); endless_later (one that the first token does not run)."""
    folder.mkdir()
    table = np.random.default_rng(0).normal(size=(257, 257)).astype(np.float32)
    (folder / "weights.bin").write_bytes(table.tobytes())
    for name, tokens in (("prefill.onnx", chunk), ("decode.onnx", 1)):
        onnx.save(graph(kind, tokens, context, OPSET), folder / name)
    model = dict(format="tpu-examples-onnx-1", kind="language_model", family="gpt2", weights="float32", context=context)
    model |= dict(chunk=chunk, vocab_size=257, **SHAPE, start=256, stops=[256], tokenizer="bytes", opset=OPSET)
    write_model_json(folder, model | dict(versions={}, source="a stub"))
    return folder


def write_model_json(folder: Path, model: dict) -> None:
    """With the sizes and hashes of the files that are there."""
    files = [path for path in sorted(folder.iterdir()) if path.name != "model.json"]
    told = {path.name: (path.read_bytes(),) for path in files}
    told = {name: dict(bytes=len(it), sha256=hashlib.sha256(it).hexdigest()) for name, (it,) in told.items()}
    (folder / "model.json").write_text(json.dumps(model | {"files": told}))


def graph(kind: str, tokens: int, context: int, opset: int) -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    cache = [SHAPE["num_layers"], 1, context, SHAPE["num_cached_heads"], SHAPE["head_dim"]]
    rows = [*cache[:2], tokens, *cache[3:]]
    inputs = [info("tokens", TensorProto.INT32, [1, tokens])]
    inputs += [info(name, TensorProto.INT32, [1]) for name in ("position", "length")]
    inputs += [info(name, TensorProto.FLOAT, cache) for name in ("keys", "values")]
    outputs = [info("logits", TensorProto.FLOAT, [1, 257])]
    outputs += [info(name, TensorProto.FLOAT, rows) for name in ("new_keys", "new_values")]
    weights = numpy_helper.from_array(np.zeros((257, 257), np.float32), "table")
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", str(4 * 257 * 257))):
        weights.external_data.add(key=key, value=value)
    constants = [numpy_helper.from_array(np.array([1], np.int32), "one"), weights]
    constants += [numpy_helper.from_array(np.full(rows, 0.5, np.float32), "rows")]
    constants += [numpy_helper.from_array(np.array([0.0], np.float32), "nothing")]
    make = helper.make_node
    nodes = [
        make("Sub", ["length", "one"], ["last"]),
        make("Gather", ["tokens", "last"], ["token"], axis=1),  # (1, 1)
        make("Reshape", ["token", "shape_1"], ["token_1"]),
        make("Gather", ["table", "token_1"], ["found"], axis=0),  # (1, 257)
        make("Cast", ["position"], ["place"], to=TensorProto.FLOAT),
        make("Mul", ["place", "step"], ["turn"]),
        make("Add", ["found", "turn"], ["moved"]),
        make("Sin", ["moved"], ["bent"]),
        *loop(kind, constants),
        make("Add", ["rows", "nothing"], ["new_keys"]),
        make("Add", ["rows", "nothing"], ["new_values"]),
    ]
    constants += [numpy_helper.from_array(np.array([1], np.int64), "shape_1")]
    constants += [numpy_helper.from_array(np.array([0.1], np.float32), "step")]
    made = helper.make_graph(nodes, "stub", inputs, outputs, constants)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def loop(kind: str, constants: list) -> list:
    """Nodes from bent to logits."""
    make = helper.make_node
    if kind == "nan":
        return [make("Div", ["nothing", "nothing"], ["none"]), make("Add", ["bent", "none"], ["logits"])]
    if kind.endswith("infinite"):
        far = np.eye(1, 257, dtype=np.float32) * (-3e38 if kind.startswith("minus") else 3e38)
        constants.append(numpy_helper.from_array(far.astype(np.float32), "far"))
        return [make("Mul", ["far", "place"], ["farther"]), make("Add", ["bent", "farther"], ["logits"])]
    if kind == "good":
        return [make("Add", ["bent", "nothing"], ["logits"])]
    info = helper.make_tensor_value_info
    times = {"slow": 2**16, "endless": 2**62, "endless_later": 2**50}[kind]
    constants.append(numpy_helper.from_array(np.array([times], np.int64), "most"))
    constants.append(numpy_helper.from_array(np.array(True), "always"))
    state, counter = info("state", TensorProto.FLOAT, [1, 257]), info("i", TensorProto.INT64, [])
    body = helper.make_graph(
        [make("Identity", ["go_on"], ["goes_on"]), make("Sin", ["state"], ["next_state"])],
        "body",
        [counter, info("go_on", TensorProto.BOOL, []), state],
        [info("goes_on", TensorProto.BOOL, []), info("next_state", TensorProto.FLOAT, [1, 257])],
    )
    return [
        make("Cast", ["position"], ["place_64"], to=TensorProto.INT64),
        make("Mul", ["place_64", "most"], ["times"])
        if kind == "endless_later"
        else make("Identity", ["most"], ["times"]),
        make("Loop", ["times", "always", "bent"], ["logits"], body=body),
    ]


def write_classifier(folder: Path, table, offset, side: int, mean: float, std: float, layout: str) -> Path:
    """Logits are the pixels times table (side * side, 10), plus offset."""
    folder.mkdir()
    shape = [1, 1, side, side] if layout == "NCHW" else [1, side, side, 1]
    info, make = helper.make_tensor_value_info, helper.make_node
    nodes = [make("Reshape", ["image", "flat"], ["row"]), make("Gemm", ["row", "table", "offset"], ["logits"])]
    constants = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(offset, "offset")]
    constants += [numpy_helper.from_array(np.array([1, side * side], np.int64), "flat")]
    inputs, outputs = [info("image", TensorProto.FLOAT, shape)], [info("logits", TensorProto.FLOAT, [1, 10])]
    made = helper.make_graph(nodes, "stub", inputs, outputs, constants)
    onnx.save(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "classifier.onnx"
    )
    model = dict(format="tpu-examples-onnx-1", kind="image_classifier", image_size=[side, side], channels=1)
    model |= dict(classes=[str(digit) for digit in range(10)], mean=[mean], std=[std], layout=layout)
    write_model_json(folder, model | dict(opset=18, versions={}, source="a stub"))
    return folder
