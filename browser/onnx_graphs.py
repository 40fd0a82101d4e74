"""ONNX graphs of PyTorch modules: exported, simplified by onnxruntime, their weights shared, halved or quantized."""

import contextlib
import hashlib
import io
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from browser.onnx_files import OPSET

SMALLEST = 1024  # bytes; what is smaller stays in the graph
ALIGNMENT = 4096  # each tensor in weights.bin is aligned, so that a reader can memory-map it


def export_graph(
    model: torch.nn.Module, inputs: tuple, names: Sequence[str], outputs: Sequence[str], path: Path
) -> None:
    """model(*inputs) as an ONNX graph of fixed shapes, weights inside."""
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()), quiet():
        # decomposed: a weight that is an input of an Einsum is neither constant-folded nor quantized
        program = torch.export.export(model, inputs, strict=False).run_decompositions()
        made = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, input_names=names, output_names=outputs, verbose=False
        )
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        raw, folded = Path(folder, "raw.onnx"), Path(folder, "folded.onnx")
        made.save(raw, external_data=True)
        options = onnxruntime.SessionOptions()
        # only what holds on every machine: constants folded, such as the transposition of a weight
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(folded)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "folded.bin")
        onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        found = onnx.load(folded)
    simplify(found)
    onnx.save(found, path)


@contextlib.contextmanager
def quiet():
    """Without the exporter's reports of its progress, and what onnxruntime's quantization tells the root logger."""
    levels = {logger: logger.level for logger in (logging.getLogger("torch.onnx"), logging.getLogger())}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def simplify(model: onnx.ModelProto) -> None:
    """In place. A factor of shape (1, m, n) becomes a matrix. A tied output head, a transposed copy of the embedding,
    reads the embedding itself (Gemm with transB). Unused opsets are removed."""
    graph = model.graph
    values = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, list] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for name, tensor in values.items():
        is_factor = all(node.op_type == "MatMul" and node.input[1] == name for node in readers.get(name, []))
        if len(tensor.dims) == 3 and tensor.dims[0] == 1 and is_factor:
            del tensor.dims[0]
    tables = [values[node.input[0]] for node in graph.node if node.op_type == "Gather" and node.input[0] in values]
    tables = [table for table in tables if table.data_type == TensorProto.FLOAT and len(table.dims) == 2]
    embedding = tables[0] if tables else None  # the first that a language model reads
    if embedding is not None:
        whole = numpy_helper.to_array(embedding)
        for name, tensor in values.items():
            is_alike = list(tensor.dims) == [*embedding.dims][::-1] and tensor.data_type == TensorProto.FLOAT
            if name != embedding.name and is_alike and np.array_equal(numpy_helper.to_array(tensor), whole.T):
                for node in readers[name]:
                    node.op_type = "Gemm"
                    node.input[1] = embedding.name
                    node.attribute.append(helper.make_attribute("transB", 1))
                graph.initializer.remove(tensor)
    del graph.value_info[:]  # outdated shapes
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", OPSET))


def store_half(path: Path) -> None:
    """Weights are stored in half precision and widened when the graph is loaded: computed in float32 as before."""
    model = onnx.load(path)
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and is_large(tensor):
            name, value = tensor.name, numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(value, f"{name}_half"))
            casts.append(helper.make_node("Cast", [f"{name}_half"], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)


def quantize(path: Path) -> None:
    """Matrices to 8-bit integers by dynamic quantization, a scale for each column."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory(dir=path.parent) as folder, quiet():
        made = Path(folder, "int8.onnx")
        # 7 bits: without VNNI a processor's products of 8 bits saturate (onnxruntime's page on quantization)
        settings = dict(per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
        quantize_dynamic(path, made, op_types_to_quantize=["MatMul", "Gather"], **settings)
        model = onnx.load(made)
    onnx.save(model, path)


def is_large(tensor: TensorProto) -> bool:
    return len(tensor.raw_data) >= SMALLEST


def share_weights(paths: Sequence[Path], weights: Path) -> None:
    """Move the large tensors of the graphs to one file, each content once."""
    places: dict[bytes, tuple[int, int]] = {}
    with weights.open("wb") as file:
        for path in paths:
            model = onnx.load(path)
            for tensor in model.graph.initializer:
                if not is_large(tensor):
                    continue
                key = hashlib.sha256(tensor.raw_data).digest()
                if key not in places:
                    file.write(b"\0" * (-file.tell() % ALIGNMENT))
                    places[key] = file.tell(), len(tensor.raw_data)
                    file.write(tensor.raw_data)
                tensor.ClearField("raw_data")
                tensor.data_location = TensorProto.EXTERNAL
                for name, value in zip(("offset", "length"), places[key], strict=True):
                    tensor.external_data.add(key=name, value=str(value))
                tensor.external_data.add(key="location", value=weights.name)
            path.write_bytes(model.SerializeToString())
