"""A folder of Hugging Face's: config.json and safetensors, checked from their headers, read and written by tensor.

Files are data: nothing that they say is run. Every name and number is checked before it is used.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from language.data.tokenizer_files import CONFIG, LINKS, write_json
from language.options.hf_config import shape_of
from language.options.llama_shape import LlamaShape
from language.options.shapes import ModelShape
from language.weights.hf_layout import Source, sources
from language.weights.weight_loading import check_finite
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import read_json
from tpu_utils.checkpoint.state import LONGEST_HEADER, Kind
from tpu_utils.checkpoint.streaming import stream_tensors
from tpu_utils.checkpoint.tensor_reading import read_header

ADAPTER_CONFIG = "adapter_config.json"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MOST_BYTES = 5 * 10**9  # largest file of weights that is written, in bytes, as Hugging Face has it
UNUSED_TENSORS = (
    r"(transformer\.h\.\d+\.attn\.(bias|masked_bias)|model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq)"
)
"""Tensors of older files that no model of today reads: masks, and frequencies that follow from the configuration."""
HEAD = "lm_head.weight"


class HuggingFaceWeights:
    """The weights of a folder that open_weights has checked. Each parameter is read when it is asked for."""

    def __init__(self, folder: Path, shape: ModelShape, places: dict[str, tuple[Path, str, Kind]]):
        """places: file, name in it and kind of each of their tensors."""
        self.folder = folder
        self.shape = shape
        self._places = places
        self._sources = sources(shape)

    @property
    def names(self) -> list[str]:
        """Names of our parameters, in their order."""
        return list(self._sources)

    def kind(self, name: str) -> Kind:
        """Shape and type of one of our parameters."""
        source = self._sources[name]
        return Kind(source.size, self._places[source.names[0]][2].dtype)

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One of our parameters by its name, in the type of the file or in dtype, in memory of its own."""
        most = self.shape.sequence_length if name == "position_embedding" else None  # a shorter context
        return self._sources[name].join(lambda hf_name: self.read_hf_tensor(hf_name)[:most], dtype)

    def read_hf_tensor(self, name: str) -> torch.Tensor:
        """One of their tensors; the file is opened for it alone: mapped memory does not add up. Raises InputError."""
        path, inside, _ = self._places[name]
        with safe_open(path, framework="pt") as file:
            return check_finite(file.get_tensor(inside), f"{path}: {name}")


def read_config(folder: Path) -> dict:
    """config.json. Raises InputError, also for a folder that is none."""
    return read_json(folder / CONFIG, "the configuration of a Hugging Face model")


def open_weights(folder: Path, shape: ModelShape | None = None) -> HuggingFaceWeights:
    """Check a folder: configuration, files, names, shapes and types, by their headers alone. shape: the model that the
    weights have to fit, whose context may be shorter than theirs; None: that of config.json. Raises InputError."""
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).exists():  # transformers would apply it, whatever stands beside it
        raise InputError(
            f"{folder} has {ADAPTER_CONFIG}, an adapter of peft's; expected merged weights; merge it with peft's "
            "merge_and_unload(), or copy the folder without it"
        )
    own = shape_of(read_config(folder), str(folder / CONFIG))
    if shape is not None:
        check_shape(folder, own, shape)
    found = find_tensors(folder, own)
    tied = not isinstance(own, LlamaShape) or own.tied_head
    wanted = {name: source.part for source in sources(own).values() for name in source.names}
    if tied and HEAD in found:  # a tied head may be stored as well
        wanted[HEAD] = sources(own)["token_embedding"].part
    problems = [f"{name} is absent" for name in wanted.keys() - found.keys()]
    problems += [f"{name} is there" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        kind = found[name][2]
        if kind.shape != wanted[name] or kind.dtype not in FLOATS:
            problems.append(f"{name} is {kind}, expected float32, bfloat16 or float16 {list(wanted[name])}")
    if problems:
        numbers = [int(number) for name in found for number in re.findall(r"\.experts\.(\d{1,9})\.", name)]
        experts, said = max(numbers, default=-1) + 1, getattr(own, "num_experts", 0)
        wrong = [] if experts == said else [f"{CONFIG} says {said} experts, and the tensors are of {experts}"]
        raise InputError(
            f"{folder}: {'; '.join([*wrong, *sorted(problems)][:3])}{' ...' if problems[3:] else ''}; expected the "
            f"tensors of the model in {CONFIG}; copy the folder again, {CONFIG} too"
        )
    for source in sources(own).values():
        if len({found[name][2].dtype for name in source.names}) > 1:
            raise InputError(f"{folder}: {', '.join(source.names[:3])} ... have several types; expected one of all")
    weights = HuggingFaceWeights(folder, shape or own, found)
    if HEAD in found and tied:
        check_tied(weights, sources(own)["token_embedding"])
    return weights


def check_shape(folder: Path, own: ModelShape, wanted: ModelShape) -> None:
    """Raises InputError unless a model of the one shape can take the weights of the other."""
    theirs, ours = (
        {"kind": type(shape).__name__} | dataclasses.asdict(shape) | {"head_width": shape.head_dim}
        for shape in (own, wanted)
    )
    longest, context = theirs.pop("sequence_length"), ours.pop("sequence_length")
    names = [name for name in ours if ours[name] != theirs.get(name)]
    changed = [f"{name} is {theirs.get(name)}, expected {ours[name]}" for name in names]
    if changed:
        raise InputError(f"{folder}: {'; '.join(changed[:3])}; give the folder of this model, or leave the sizes out")
    if context > longest:
        raise InputError(f"{folder}: reads {longest} tokens, expected {context}; choose a sequence_length that fits")


def find_tensors(folder: Path, shape: ModelShape) -> dict[str, tuple[Path, str, Kind]]:
    """(file, name in it, kind) of all tensors, by the names that a whole model's have. Raises InputError."""
    places: dict[str, tuple[Path, str, Kind]] = {}
    expected = map_of_files(folder)
    for file in sorted(set(expected.values())) if expected else [WHOLE]:
        try:
            header = read_header(folder / file)
        except InputError as error:  # missing, or no file
            raise InputError(f"{error} {LINKS}") from error
        except ValueError as error:
            raise InputError(f"{folder}: {error}; expected a file of safetensors; copy it again") from error
        for name, kind in header.items():
            if expected and expected.get(name) != file:
                said = f"in {expected[name]}" if name in expected else "nowhere"
                raise InputError(f"{folder}: {name[:100]} is in {file}, but {INDEX} has it {said}; copy them again")
            places[name] = folder / file, name, kind
    if absent := sorted(expected.keys() - places.keys()):
        raise InputError(f"{folder}: {absent[0][:100]} is not in {expected[absent[0]]}, where {INDEX} has it")
    base = "model." if isinstance(shape, LlamaShape) else "transformer."
    if not any(name.startswith(base) for name in places):  # saved without the head: names begin below the base
        places = {name if name == HEAD else base + name: place for name, place in places.items()}
    return {name: place for name, place in places.items() if not re.fullmatch(UNUSED_TENSORS, name)}


def map_of_files(folder: Path) -> dict[str, str]:
    """The file of each tensor as the index says; {} where one file holds all. Raises InputError."""
    if os.path.lexists(folder / WHOLE):
        return {}
    if not os.path.lexists(folder / INDEX):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickles:
            raise InputError(
                f"{folder} holds {pickles[0]}, a pickle, which can run code; expected {WHOLE}: only safetensors are "
                "read; a trusted one is converted by transformers: from_pretrained(DIR).save_pretrained(OTHER)"
            )
        raise InputError(f"{folder} holds neither {WHOLE} nor {INDEX}; expected one of them; copy the folder again")
    found = read_json(folder / INDEX, "an index of safetensors", LONGEST_HEADER).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise InputError(f"{folder / INDEX}: weight_map is {found!r:.60}; expected the file of each tensor")
    for file in found.values():
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]{0,200}\.safetensors", file, re.ASCII):
            raise InputError(f"{folder / INDEX} names {file!r:.100}; expected *.safetensors in the same folder")
    return found


def check_tied(weights: HuggingFaceWeights, embedding: Source) -> None:
    """Raises InputError where a head that is the embedding, by the configuration, has other values in the file."""
    for head, tokens in zip(
        weights.read_hf_tensor(HEAD).split(8192), weights.read_hf_tensor(embedding.names[0]).split(8192), strict=True
    ):
        if not torch.equal(head, tokens):
            raise InputError(
                f"{weights.folder}: {HEAD} is not {embedding.names[0]}, but {CONFIG} says that they are one "
                "(tie_word_embeddings); set it to false, or leave the tensor out"
            )


# --------------------------------------------------------------------------------------------------------- writing


def write_weights(
    folder: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    tensors: Iterator[tuple[str, torch.Tensor]],
    most_bytes: int = MOST_BYTES,
) -> None:
    """Their tensors, as their_tensors() gives them, one in memory at a time. most_bytes: of a file, but for one that
    holds a single larger tensor. Raises OSError."""
    files: list[dict[str, Kind]] = [{}]
    size = 0
    for name, part in {name: source.part for source in sources(shape).values() for name in source.names}.items():
        kind = Kind(part, dtype)
        if files[-1] and size + kind.num_bytes > most_bytes:
            files.append({})
            size = 0
        files[-1][name] = kind
        size += kind.num_bytes
    weight_map = {}
    for number, kinds in enumerate(files, 1):
        file = WHOLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        stream_tensors(folder / file, kinds, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(kinds, file)
    if len(files) > 1:
        total = sum(kind.num_bytes for kinds in files for kind in kinds.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
