"""A folder that browser.export wrote, checked before a graph of it is loaded. Imports no torch.

Files are data. model.json says what there is; sizes and hashes are those it names; a graph has only operators of the
list below, reads no other file, and has the inputs and outputs that model.json says.
"""

import hashlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from language.data.chat import FORMATS
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import open_regular, read_json, read_regular

FORMAT = "tpu-examples-onnx-1"
MODEL_JSON = "model.json"
OPSET = 20
EXPECTED = "a folder of browser.export"
LARGEST_GRAPH = 1 << 28  # bytes
MOST_NUMBERS = 1 << 31  # in a cache
MOST_STOPS = 1000


def needed(*packages: str) -> None:
    """Raises InputError unless the packages are installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise InputError(f"needs {', '.join(missing)}, not installed; pip install -r browser/requirements.txt")


def is_count(value: Any, least: int = 1, most: int = 1 << 24) -> bool:
    return type(value) is int and least <= value <= most


def check_field(path: Path, name: str, value: Any, is_right: bool, expected: str) -> None:
    """Raises InputError unless is_right."""
    if not is_right:
        raise InputError(f"{path}: {name} is {value!r:.80}; expected {expected}; export it again")


def open_export(folder: Path) -> dict[str, Any]:
    """model.json, after all files of the folder were checked. Raises InputError."""
    path = folder / MODEL_JSON
    model = read_json(path, EXPECTED)
    kind, files = model.get("kind"), model.get("files")

    def check(is_right: bool, name: str, expected: str) -> None:
        check_field(path, name, model.get(name), is_right, expected)

    check(model.get("format") == FORMAT, "format", FORMAT)
    check(kind in ("language_model", "image_classifier"), "kind", "language_model or image_classifier")
    check(model.get("opset") == OPSET, "opset", str(OPSET))
    wanted = {"prefill.onnx", "decode.onnx", "weights.bin"} if kind == "language_model" else {"classifier.onnx"}
    check(isinstance(files, dict) and wanted <= set(files) and len(files) < 10, "files", ", ".join(sorted(wanted)))
    if kind == "language_model":
        for name in ("context", "chunk", "vocab_size", "num_layers", "num_cached_heads", "head_dim"):
            check(is_count(model.get(name)), name, "a number of 1 or more")
        vocabulary = model["vocab_size"]
        rows = model["num_layers"] * model["context"] * model["num_cached_heads"] * model["head_dim"]
        check(rows <= MOST_NUMBERS, "context", f"a cache of {MOST_NUMBERS:,} numbers at most")
        check(model["chunk"] <= model["context"], "chunk", "at most the context")
        start, stops = model.get("start"), model.get("stops")
        check(start is None or is_count(start, 0, vocabulary - 1), "start", "a token of the vocabulary, or null")
        are_tokens = isinstance(stops, list) and all(is_count(token, 0, vocabulary - 1) for token in stops)
        check(are_tokens, "stops", "tokens of the vocabulary")
        check(model.get("tokenizer") in ("bytes", "numbers", "tokenizer.json"), "tokenizer", "bytes, numbers or a file")
        check(model["tokenizer"] != "tokenizer.json" or "tokenizer.json" in files, "files", "a tokenizer.json too")
        check(model["tokenizer"] != "bytes" or vocabulary == 257, "vocab_size", "257 with bytes")
        if model.get("chat") is not None:
            check_chat(path, model["chat"], vocabulary)
    else:
        size = model.get("image_size")
        are_sizes = isinstance(size, list) and len(size) == 2 and all(is_count(n, 1, 4096) for n in size)
        check(are_sizes, "image_size", "two sizes")
        check(isinstance(model.get("classes"), list) and 0 < len(model["classes"]) < 10**5, "classes", "names")
        for name, only in (("channels", 1), ("layout", "NCHW"), ("mean", [0]), ("std", [1])):
            check(model.get(name) == only, name, str(only))
    for name, told in files.items():
        check_file(folder, name, told)
    for name in files:
        if name.endswith(".onnx"):
            check_graph(folder / name, model)
    return model


def check_chat(path: Path, chat: Any, vocab_size: int) -> None:
    """Raises InputError unless it has a format and tokens, as browser.export names them."""
    chat = chat if isinstance(chat, dict) else {}
    format = chat.get("format")
    check_field(path, "chat.format", format, format in list(FORMATS), f"one of {', '.join(FORMATS)}")
    for name, least, most in (("begin", 0, 1), ("stops", 1, MOST_STOPS), ("words", 1, MOST_STOPS)):
        tokens = chat.get(name)
        is_list = isinstance(tokens, list) and least <= len(tokens) <= most
        are_tokens = is_list and all(is_count(token, 0, vocab_size - 1) for token in tokens)
        check_field(path, f"chat.{name}", tokens, are_tokens, f"{least} to {most} tokens of the vocabulary")


def check_file(folder: Path, name: str, told: Any) -> None:
    """Raises InputError unless the file has the size and hash that model.json tells."""
    if not re.fullmatch(r"\w[\w.-]{0,100}", name, re.ASCII) or not isinstance(told, dict):
        raise InputError(f"{folder / MODEL_JSON}: files has {name!r:.80}; expected names of files in the folder")
    path = folder / name
    with open_regular(path, EXPECTED, follow=False) as file:
        size = path.stat().st_size
        if size != told.get("bytes"):
            raise InputError(f"{path} has {size:,} bytes; expected {told.get('bytes')!r:.40}; copy it again")
        if hashlib.file_digest(file, "sha256").hexdigest() != told.get("sha256"):
            raise InputError(
                f"{path} is not the file that {MODEL_JSON} was written with: another SHA-256; copy it again"
            )


def check_graph(path: Path, model: dict[str, Any]) -> None:
    """Raises InputError unless the graph is one that browser.export writes for this model."""
    import onnx

    content = read_regular(path, EXPECTED, LARGEST_GRAPH, follow=False)
    try:
        found = onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf's errors have no common class
        raise InputError(f"{path} is no ONNX graph; expected {EXPECTED}; copy it again") from error
    opsets = {(entry.domain, entry.version) for entry in found.opset_import}
    if not opsets <= {("", OPSET), ("com.microsoft", 1)} or found.functions:
        raise InputError(f"{path} needs {sorted(opsets)!r:.100}; expected opset {OPSET} and no functions of its own")
    strange = sorted({f"{n.domain}:{n.op_type}" for n in found.graph.node if n.domain or n.op_type not in OPERATORS})
    if strange:
        raise InputError(f"{path} has {', '.join(strange)[:100]}; expected operators that browser.export writes")
    if found.graph.sparse_initializer or any(part.type not in PLAIN for n in found.graph.node for part in n.attribute):
        raise InputError(
            f"{path} has sparse weights, or some inside of an operator; expected them as {EXPECTED} has them"
        )
    weights = path.with_name("weights.bin")
    size = weights.stat().st_size if weights.exists() else 0
    for tensor in found.graph.initializer:
        told = {entry.key: entry.value for entry in tensor.external_data}
        if told or tensor.data_location == onnx.TensorProto.EXTERNAL:
            numbers = told.get("offset", ""), told.get("length", "")
            if told.get("location") != "weights.bin" or not all(
                n.isascii() and n.isdigit() and len(n) < 16 for n in numbers
            ):
                raise InputError(f"{path}: {tensor.name:.60} is in {told.get('location')!r:.60}; expected weights.bin")
            if sum(map(int, numbers)) > size:
                raise InputError(f"{path}: {tensor.name:.60} ends behind {weights}; copy both again")
    for values, wanted in zip((found.graph.input, found.graph.output), shapes(path.name, model), strict=True):
        types = {value.name: value.type.tensor_type for value in values}
        told = {name: (kind.elem_type, [axis.dim_value for axis in kind.shape.dim]) for name, kind in types.items()}
        if told != wanted:
            raise InputError(f"{path} has {told!r:.200}; {MODEL_JSON} says {wanted!r:.200}; export it again")


def shapes(name: str, model: dict[str, Any]) -> tuple[dict, dict]:
    """({input: (type, shape)}, {output: (type, shape)}) of a graph; 1 is float32, 6 is int32."""
    if model["kind"] == "image_classifier":
        return {"image": (1, [1, 1, *model["image_size"]])}, {"logits": (1, [1, len(model["classes"])])}
    count = model["chunk"] if name == "prefill.onnx" else 1
    cache = [model["num_layers"], 1, model["context"], model["num_cached_heads"], model["head_dim"]]
    rows = [*cache[:2], count, *cache[3:]]
    numbers = {"tokens": (6, [1, count]), "position": (6, [1]), "length": (6, [1])}
    return numbers | {"keys": (1, cache), "values": (1, cache)}, {
        "logits": (1, [1, model["vocab_size"]]),
        "new_keys": (1, rows),
        "new_values": (1, rows),
    }


def open_session(path: Path):
    """onnxruntime's session of a graph, with a thread for each core."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common class
        raise InputError(f"{path} cannot be loaded: {str(error).splitlines()[0][:200]}; export it again") from error


def run_session(session, outputs: list[str], inputs: dict[str, Any]) -> list:
    """The outputs. Raises InputError where the graph fails, as one that loaded may: shapes can depend on inputs."""
    try:
        return session.run(outputs, inputs)
    except Exception as error:  # onnxruntime's errors have no common class
        raise InputError(f"the graph cannot be run: {str(error).splitlines()[0][:200]}; export it again") from error


PLAIN = frozenset((1, 2, 3, 6, 7, 8))
"""Kinds of attributes: one or several numbers or texts. The others hold tensors and graphs."""
OPERATORS = frozenset(
    "Add Cast Concat Conv Cos DequantizeLinear Div DynamicQuantizeLinear Expand Gather Gelu Gemm Less MatMul "
    "MatMulInteger Min Mul Reciprocal ReduceMean Relu Reshape Sigmoid Sin Slice Softmax Split Sqrt Squeeze Sub "
    "Transpose Unsqueeze Where".split()
)
"""Operators of ONNX's default domain that browser.export writes for language models and ConvNet, in three kinds of
weights."""
