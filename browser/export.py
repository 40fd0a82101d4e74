"""Export a trained model to ONNX: text in a browser, on a host without PyTorch.

Run:     python -m browser.export RUN_DIR OUT
             the newest checkpoint of a run of transformer_tpu.py, or of
             simple_mnist_tpu.py or distributed_mnist_tpu.py
         python -m browser.export HF_DIR OUT --weights int8
             a folder of Hugging Face
         python -m browser.onnx_generate --onnx OUT --prompt "ROMEO:"
             text of it by onnxruntime; browser/page/ is the page that does so

Expect:  a folder with the graphs, weights.bin, the tokenizer and model.json,
         written after onnxruntime gave PyTorch's logits with it.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import zlib
from importlib import util
from importlib.metadata import version
from pathlib import Path

from browser.onnx_files import FORMAT, MODEL_JSON, OPSET, needed
from language.data.chat import FORMATS, TEMPLATES, choose_format, special_tokens, stop_tokens
from tpu_utils.base.errors import InputError, TrainingError, run_script
from tpu_utils.options.tool_arguments import make_parser, parse_arguments

WEIGHTS = ("float32", "float16", "int8")
LARGEST_ERROR = {"float32": 1e-4, "float16": 2e-2, "int8": 0.5}
"""Largest allowed error of a logit, relative to the largest logit: the export against PyTorch in float32."""
LARGEST_TEMPLATE = 1 << 20  # bytes
EARLIER_TEMPLATES = {
    **{0xC1966534: "chatml", 0x4992B91D: "gemma", 0x4EB24508: "llama3", 0xA47C1BD9: "mistral"},
    **{0xC6F3A29E: "olmo2", 0x8F9499B3: "phi4", 0xF8007751: "plain", 0x05A2436D: "qwen3"},
    **{0xA44D6B3A: "gemma", 0x23F356B4: "mistral"},
}
"""By their CRC-32: those that exports had once."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Raises InputError for what can be known to be wrong before torch is imported."""
    parser = make_parser("browser.export", __doc__)
    parser.add_argument("source", type=Path, metavar="RUN_DIR|HF_DIR")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder, or an earlier export, which is replaced")
    parser.add_argument("--weights", choices=WEIGHTS, default="float32", help="how they are stored; default: float32")
    parser.add_argument("--context", type=int, default=0, metavar="N", help="tokens of the cache; default: the model's")
    parser.add_argument("--chunk", type=int, default=64, metavar="N", help="tokens of a prompt at once; default: 64")
    parser.add_argument("--checkpoint", choices=("newest", "best"), default="newest", help="which one of a run")
    formats = ("auto", *FORMATS)
    which = f"format of conversations: {', '.join(formats)}; auto: that of a run on chats, or of a template that a "
    which += "folder has from one"
    parser.add_argument("--chat_format", choices=formats, default="auto", metavar="NAME", help=which)
    parser.add_argument("--tokenizer", default="", help="bytes, gpt2, numbers, a tokenizer.json or its folder")
    script = Path(__file__).parent.with_name("simple_mnist_tpu.py")
    which = "script of an image classifier: the one with its class ConvNet"
    parser.add_argument("--script", type=Path, default=script, metavar="FILE", help=which)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    given = parse_arguments(parser, arguments)
    try:
        check_arguments(given)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    return given


def check_arguments(given: argparse.Namespace) -> None:
    needed("onnx", "onnxruntime", "onnxscript")
    try:
        os.scandir(given.source).close()  # raises where it is no folder
        if given.out.exists() and (not given.out.is_dir() or (any(given.out.iterdir()) and not is_export(given.out))):
            raise InputError(
                f"{given.out} is there already and is no export, or holds a file of another; expected a new folder; "
                "choose another"
            )
        if given.out.resolve() in (given.source.resolve(), *given.source.resolve().parents):
            raise InputError(f"{given.out} holds {given.source}; expected a folder beside it; choose another")
        for path in (given.out.with_name(name) for name in aside(given.out)):
            if os.path.lexists(path) and not is_export(path):
                raise InputError(f"{path} is there and is no export; the new one needs this name for a while; move it")
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; expected a folder, as --help says") from error
    if given.context < 0:
        raise InputError(f"context is {given.context}; expected 1 or more, or 0 for the model's own")
    if given.chunk < 1:
        raise InputError(f"chunk is {given.chunk}; expected 1 or more")


def aside(out: Path) -> tuple[str, str]:
    """(name of the new export while it is written, name of the old one while it is replaced)."""
    return f"{out.name}.new", f".replaced_{out.name}"


def is_export(folder: Path) -> bool:
    """Whether the folder may be replaced: browser.export wrote it, and it holds no other file."""
    try:
        told = json.loads((folder / MODEL_JSON).read_text())
        return told["format"] == FORMAT and {path.name for path in folder.iterdir()} <= {MODEL_JSON, *told["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False


if __name__ == "__main__":  # a wrong option or file is answered before the seconds that the next imports take
    given = parse(sys.argv[1:])
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # all is computed on the host; left unset, torch_xla warns

import torch

from browser.onnx_cached import CachedModel
from browser.onnx_files import is_count, open_export, open_session
from browser.onnx_graphs import export_graph, quantize, share_weights, store_half
from language.data.tokenizer import Bytes, Numbers, Tokenizer
from language.data.tokenizer_files import (
    GENERATION_CONFIG,
    RUN_TOKENIZER,
    TEMPLATE,
    TOKENIZER_CONFIG,
    one_or_all,
    rewrite,
)
from language.models import gpt, llama
from language.options.llama_shape import LlamaShape
from language.weights.run_weights import read_run
from language.weights.sources import Source, open_source
from language.weights.weight_loading import check_finite
from tpu_utils.base.files import read_json, read_regular
from tpu_utils.base.new_folder import written_aside
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.checkpoint.saved import check_alike
from tpu_utils.checkpoint.state import Kind

INPUTS, OUTPUTS = ("tokens", "position", "length", "keys", "values"), ("logits", "new_keys", "new_values")


def load(source: Source) -> torch.nn.Module:
    """The model on the CPU, computing in float32. What a run or folder has in bfloat16 is widened.

    Raises InputError for a mixture of experts.
    """
    if getattr(source.shape, "num_experts", 0):
        raise InputError(
            f"the model is a mixture of {source.shape.num_experts} experts ({source.shape.family}), which is not "
            "exported to ONNX; expected one MLP in a layer; python -m tools.convert_hf export writes it for others"
        )
    with torch.device("meta"):
        model = (llama.Llama if isinstance(source.shape, LlamaShape) else gpt.GPT)(source.shape)
    if isinstance(model, llama.Llama):
        model.frequencies = llama.frequency_table(source.shape)
    for name, parameter in list(model.named_parameters()):
        value = source.read(name)
        value = value.to(source.dtype).float() if parameter.dim() > 1 else value.float()
        model.load_state_dict({name: torch.nn.Parameter(value)}, strict=False, assign=True)
    return model.requires_grad_(False).eval()


def example(shape, context: int, count: int) -> tuple[torch.Tensor, ...]:
    """Example inputs of a step: count tokens, none of them padding, on an empty cache."""
    rows = torch.zeros(shape.num_layers, 1, context, shape.num_cached_heads, shape.head_dim)
    tokens = torch.arange(count, dtype=torch.int32)[None] % shape.vocab_size
    numbers = (torch.full((1,), n, dtype=torch.int32) for n in (0, count))
    return tokens, *numbers, rows, rows.clone()


def export_language_model(given: argparse.Namespace, folder: Path) -> dict:
    """Write everything but model.json, and return that."""
    is_run = (given.source / "checkpoints").is_dir()
    which = {"run_dir": str(given.source), "checkpoint": given.checkpoint} if is_run else {"hf": str(given.source)}
    source = open_source(**which, tokenizer=given.tokenizer)
    shape = source.shape
    if source.after is not None:
        raise InputError(
            "the tokenizer puts a token behind every text (add_eos_token), which the page does not; "
            "expected false; change its tokenizer_config.json"
        )
    context = given.context or shape.sequence_length
    if context > shape.sequence_length:
        raise InputError(f"context is {context}, but the model reads {shape.sequence_length} tokens; lower --context")
    chunk = min(given.chunk, context)
    tokenizer = write_tokenizer(source, given, folder)
    format = chat_format_of(source, given, is_run)
    model = CachedModel(load(source))
    for name, count in (("prefill", chunk), ("decode", 1)):
        export_graph(model, example(shape, context, count), INPUTS, OUTPUTS, folder / f"{name}.onnx")
        if given.weights == "int8":
            quantize(folder / f"{name}.onnx")
        if given.weights == "float16":
            store_half(folder / f"{name}.onnx")
    share_weights([folder / "prefill.onnx", folder / "decode.onnx"], folder / "weights.bin")
    check_error(largest_difference(model, folder, context, chunk), given.weights)
    return dict(
        kind="language_model",
        family=getattr(shape, "family", "gpt2"),
        weights=given.weights,
        context=context,
        chunk=chunk,
        vocab_size=shape.vocab_size,
        num_layers=shape.num_layers,
        num_cached_heads=shape.num_cached_heads,
        head_dim=shape.head_dim,
        start=source.start,
        stops=sorted(source.tokenizer.stops),
        tokenizer=tokenizer,
        chat=chat_of(format, source.tokenizer) if format else None,
    )


def chat_format_of(source: Source, given: argparse.Namespace, is_run: bool) -> str:
    """The format that the model was trained with, as far as it is known: "" where it is not."""
    if given.chat_format != "auto":
        return given.chat_format
    if is_run and (config := read_run(given.source, given.checkpoint)[0]).dataset == "chat":
        return choose_format(config.chat_format, source.tokenizer)
    folder, template = given.source / RUN_TOKENIZER if is_run else given.source, None
    if (folder / TEMPLATE).exists():
        template = read_regular(folder / TEMPLATE, "a template", LARGEST_TEMPLATE).decode(errors="replace")
    elif (folder / TOKENIZER_CONFIG).exists():
        template = read_json(folder / TOKENIZER_CONFIG, TOKENIZER_CONFIG).get("chat_template")
    ours = EARLIER_TEMPLATES | {zlib.crc32(path.read_bytes()): path.stem for path in TEMPLATES.glob("*.jinja")}
    format = ours.get(zlib.crc32(str(template).encode()), "")
    if template and not format:
        print(f"chat       the template in {folder} is none of ours, and is not run; --chat_format names a format")
    return format


def chat_of(format: str, tokenizer: Tokenizer) -> dict:
    """What model.json says of a chat. The page has the template of the format itself.

    begin: the token in front of a text, or none. stops: tokens that end an answer. words: tokens that no text may hold,
    those of the format and the end of a document; plain has that one alone. Raises InputError.
    """
    return dict(
        format=format,
        begin=[] if tokenizer.begin is None else [tokenizer.begin],
        stops=sorted(tokenizer.stops | stop_tokens(format, tokenizer)),
        words=sorted({*special_tokens(format, tokenizer).values(), tokenizer.end}),
    )


def write_tokenizer(source: Source, given: argparse.Namespace, folder: Path) -> str:
    """ "bytes", "numbers" or "tokenizer.json", which is copied with the files beside it that belong to it; of a model's
    config.json that is its end tokens."""
    if isinstance(source.tokenizer, Bytes):
        return "bytes"
    if isinstance(source.tokenizer, Numbers):
        return "numbers"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (path := source.tokenizer.path.parent / name).is_file():
            shutil.copyfile(path, folder / name)
    ends = {"eos_token_id": one_or_all(source.tokenizer.end, source.tokenizer.stops)}
    rewrite(folder / GENERATION_CONFIG, ends, {}, ())
    return "tokenizer.json"


def check_error(error: float, weights: str) -> None:
    """Prints the largest difference of a logit, relative to the largest. Raises TrainingError where it is too large."""
    print(f"checked    logits within {error:.1e} of PyTorch's in float32, of the largest")
    if not error <= LARGEST_ERROR[weights]:
        raise TrainingError(
            f"onnxruntime's logits are {error:.1e} of the largest away from PyTorch's; expected "
            f"{LARGEST_ERROR[weights]} at most with {weights}; nothing was written"
        )


def largest_difference(model: CachedModel, folder: Path, context: int, chunk: int) -> float:
    """Largest difference of a logit, relative to the largest logit, of a padded prefill and three decoding steps."""
    shape, generator = model.model.shape, torch.Generator().manual_seed(0)
    sessions = {name: open_session(folder / f"{name}.onnx") for name in ("prefill", "decode")}
    _, _, _, keys, values = example(shape, context, 1)
    length = max(1, chunk - 1)
    position = 0
    errors = []
    for name, count in (("prefill", length), ("decode", 1), ("decode", 1), ("decode", 1)):
        if position + count > context:
            break
        tokens = torch.zeros(1, chunk if name == "prefill" else 1, dtype=torch.int32)
        tokens[0, :count] = torch.randint(shape.vocab_size, (count,), generator=generator)
        numbers = (torch.full((1,), n, dtype=torch.int32) for n in (position, count))
        inputs = tokens, *numbers, keys, values
        logits, new_keys, new_values = model(*inputs)
        found = sessions[name].run(list(OUTPUTS), {n: t.numpy() for n, t in zip(INPUTS, inputs, strict=True)})
        errors.append((logits - torch.from_numpy(found[0])).abs().max() / logits.abs().max())
        for rows, new in ((keys, new_keys), (values, new_values)):
            rows[:, :, position : position + count] = new[:, :, :count]
        position += count
    return float(torch.stack(errors).max())  # Python's max() loses what is not a number


class Pixels(torch.nn.Module):
    """Wraps a classifier of images (B, H, W) from 0 to 255, so that it takes (B, 1, H, W) from 0 to 1."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, image):
        return self.model(image[:, 0] * 255)


def export_classifier(given: argparse.Namespace, folder: Path) -> dict:
    """Write everything but model.json, and return that."""
    saved = CheckpointReader(given.source / "checkpoints").load("must")
    model, size = build_classifier(given, saved)
    if given.weights != "float32":
        raise InputError(f"weights is {given.weights}; image classifiers are small, and exported in float32 alone")
    if given.context:
        raise InputError(f"context is {given.context}; an image classifier has none; leave it out")
    model, path = Pixels(model).eval().requires_grad_(False), folder / "classifier.onnx"
    image = torch.rand(1, 1, size, size, generator=torch.Generator().manual_seed(0))
    expected = model(image)
    export_graph(model, (image,), ("image",), ("logits",), path)
    (found,) = open_session(path).run(["logits"], {"image": image.numpy()})
    check_error(float((expected - torch.from_numpy(found)).abs().max() / expected.abs().max()), "float32")
    classes = [str(number) for number in range(expected.shape[1])]
    pixels = dict(image_size=[size, size], channels=1, layout="NCHW", mean=[0.0], std=[1.0])  # the graph normalises
    return dict(kind="image_classifier", classes=classes, **pixels)


def build_classifier(given: argparse.Namespace, saved) -> tuple[torch.nn.Module, int]:
    """The model of a run of the digits scripts with its weights, and the side of its images. Raises InputError."""
    config = saved.value("config", dict)
    kinds = {path.removeprefix("model/"): e.kind for path, e in saved.entries.items() if path.startswith("model/")}
    expected = "a run of simple_mnist_tpu.py or distributed_mnist_tpu.py, or --script with its class ConvNet"
    spec = util.spec_from_file_location("exported_script", given.script)
    if spec is None or not given.script.is_file():
        raise InputError(f"{given.script}: no such script; expected {expected}")
    script = util.module_from_spec(spec)
    spec.loader.exec_module(script)
    channels, hidden = config.get("channels"), config.get("hidden_dim")
    weight = kinds.get("hidden.weight")
    if not (is_count(channels) and is_count(hidden) and weight and hasattr(script, "ConvNet")):
        raise InputError(f"{given.source} is of another model than {given.script}'s ConvNet; expected {expected}")
    size = 4 * round((weight.shape[1] / (2 * channels)) ** 0.5)
    with torch.device("meta"):
        model = script.ConvNet(size, channels, hidden)
    wanted = {name: Kind(tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}
    check_alike(wanted, kinds)
    files = saved.files()
    values = {name: check_finite(files.read(f"model/{name}"), f"{saved.folder}: {name}") for name in wanted}
    model.load_state_dict(values, assign=True)
    return model, size


def main(given: argparse.Namespace) -> int:
    is_run = (given.source / "checkpoints").is_dir()
    if not is_run and not (given.source / "config.json").is_file():
        raise InputError(
            f"{given.source} has neither checkpoints nor a config.json; expected a run or a folder of Hugging Face"
        )
    step = CheckpointReader(given.source / "checkpoints").load("must") if is_run else None
    is_text = step is None or "model/token_embedding" in step.entries
    source = f"run {given.source.resolve().name}" if is_run else f"Hugging Face folder {given.source.resolve().name}"
    new, earlier = (given.out.with_name(name) for name in aside(given.out))
    if is_export(new):  # an earlier export stopped before it renamed this
        shutil.rmtree(new)
    with written_aside(new) as folder:
        facts = (export_language_model if is_text else export_classifier)(given, folder)
        packages = ("torch", "onnx", "onnxscript", "onnxruntime")
        model = dict(format=FORMAT, **facts, opset=OPSET, versions={name: version(name) for name in packages})
        model |= dict(source=source, files=describe(folder))
        (folder / MODEL_JSON).write_text(json.dumps(model, indent=1))
        open_export(folder)  # checks it as every reader does
    if is_export(given.out):
        if is_export(earlier):  # an earlier export stopped before it deleted this
            shutil.rmtree(earlier)
        given.out.rename(earlier)
    new.rename(given.out)
    if is_export(earlier):
        shutil.rmtree(earlier)
    size = sum(entry["bytes"] for entry in model["files"].values())
    print(f"exported   {given.out}: {', '.join(sorted(model['files']))}: {size / 1e6:,.1f} MB, {given.weights} weights")
    return 0


def describe(folder: Path) -> dict[str, dict]:
    """{file: {"bytes", "sha256"}} of all files there."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    return found


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(given)))
