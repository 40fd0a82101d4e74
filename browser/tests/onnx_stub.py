"""Exported folders of a few nodes, as browser.export lays them out: also such as never end."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="pip install -r requirements-dev.txt brings onnx")
from onnx import numpy_helper, parser  # noqa: E402

from browser.onnx_files import OPSET  # noqa: E402

SHAPE = dict(num_layers=2, num_cached_heads=2, head_dim=4)
CONTEXT, CHUNK = 256, 8
LOOP = """
  always = Constant <value = bool {1}> ()
  logits = Loop (times, always, moved) <body = body (int64 i, bool go_on, float[1, 257] state)
    => (bool goes_on, float[1, 257] next_state) { goes_on = Identity (go_on) next_state = Sin (state) }>"""
FAR = f"{{3e38{', 0' * 256}}}"
KINDS = {  # nodes from moved to logits
    "good": "logits = Sin (moved)",
    "nan": "none = Sub (place, place) nan = Div (none, none) logits = Add (moved, nan)",
    # one of the logits, from the third token on
    "infinite": "it = Mul (far, place) logits = Add (moved, it)",
    "minus_infinite": "it = Mul (far, place) logits = Sub (moved, it)",
    # a tenth of a second a token; a loop without end; one that the first token does not run
    "slow": f"times = Constant <value_int = {2**16}> () {LOOP}",
    "endless": f"times = Constant <value_int = {2**62}> () {LOOP}",
    "endless_later": f"n = Constant <value_int = {2**50}> () at = Cast <to = 7> (place) times = Mul (at, n) {LOOP}",
}


def write_language_model(folder: Path, kind: str = "good") -> Path:
    """A model of bytes whose logits hang on the last token and its place alone. kind: of KINDS."""
    folder.mkdir()
    table = np.random.default_rng(0).normal(size=(257, 257)).astype(np.float32)
    (folder / "weights.bin").write_bytes(table.tobytes())
    for name, tokens in (("prefill.onnx", CHUNK), ("decode.onnx", 1)):
        onnx.save(graph(kind, tokens), folder / name)
    model = dict(format="tpu-examples-onnx-1", kind="language_model", family="gpt2", weights="float32", context=CONTEXT)
    model |= dict(chunk=CHUNK, vocab_size=257, **SHAPE, start=256, stops=[256], tokenizer="bytes", opset=OPSET)
    write_model_json(folder, model | dict(versions={}, source="a stub"))
    return folder


def write_model_json(folder: Path, model: dict) -> None:
    """With the sizes and hashes of the files that are there."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "model.json":
            content = path.read_bytes()
            files[path.name] = dict(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (folder / "model.json").write_text(json.dumps(model | {"files": files}))


def graph(kind: str, tokens: int, opset: int = OPSET) -> onnx.ModelProto:
    """ONNX's own text of it."""
    cache, rows = (f"float[2, 1, {length}, 2, 4]" for length in (CONTEXT, tokens))
    return parser.parse_model(f"""<ir_version: 9, opset_import: ["": {opset}]>
      stub (int32[1, {tokens}] tokens, int32[1] position, int32[1] length, {cache} keys, {cache} values)
        => (float[1, 257] logits, {rows} new_keys, {rows} new_values)
      <float[257, 257] table = ["location": "weights.bin", "offset": "0", "length": "{4 * 257 * 257}"],
       int32[1] one = {{1}}, int64[1] flat = {{1}}, int64[5] rows = {{2, 1, {tokens}, 2, 4}},
       float[257] far = {FAR}, float[1] step = {{0.1}}, float[1] half = {{0.5}}>
      {{
        last = Sub (length, one)
        token = Gather <axis = 1> (tokens, last)
        token_1 = Reshape (token, flat)
        found = Gather <axis = 0> (table, token_1)
        place = Cast <to = 1> (position)
        turn = Mul (place, step)
        moved = Add (found, turn)
        {KINDS[kind]}
        new_keys = Expand (half, rows)
        new_values = Expand (half, rows)
      }}""")


def write_classifier(folder: Path, table, offset, side: int) -> Path:
    """Logits are the pixels times table (side * side, 10), plus offset."""
    folder.mkdir()
    made = parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]>
      stub (float[1, 1, {side}, {side}] image) => (float[1, 10] logits) <int64[2] flat = {{1, {side * side}}}>
      {{
        row = Reshape (image, flat)
        logits = Gemm (row, table, offset)
      }}""")
    for name, value in (("table", table), ("offset", offset)):
        made.graph.initializer.append(numpy_helper.from_array(value, name))
    onnx.save(made, folder / "classifier.onnx")
    model = dict(format="tpu-examples-onnx-1", kind="image_classifier", image_size=[side, side], channels=1)
    model |= dict(classes=[str(digit) for digit in range(10)], mean=[0.0], std=[1.0], layout="NCHW")
    write_model_json(folder, model | dict(opset=18, versions={}, source="a stub"))
    return folder
