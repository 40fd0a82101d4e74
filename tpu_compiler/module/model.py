"""The module that a question names, built without weights, without memory and without a network."""

import contextlib
import importlib
import importlib.util
import pkgutil
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tpu_compiler.module.programs import Question
from tpu_utils.base.errors import InputError, first_line
from tpu_utils.base.files import read_json
from tpu_utils.options.fields import nearest
from tpu_utils.options.virtual_slice import without_weights

ROOT = Path(__file__).resolve().parents[2]
NON_SHAPE_FIELDS = ("torch_dtype", "dtype", "transformers_version", "_name_or_path")
"""Fields of a config.json that say nothing of the model's shape."""


class NetworkAsked(BaseException):
    """A BaseException, because libraries catch an Exception and retry for minutes."""


def build(question: Question, notes: list[str]) -> torch.nn.Module:
    """The module, its parameters without memory (device meta). Raises InputError."""
    make = hugging_face_module(question, notes) if question.target.startswith("hf:") else python_module(question)
    with no_network(question.target):
        try:
            with torch.device("meta"):
                model = make()
        except InputError:
            raise
        except Exception as on_meta:
            try:  # a constructor that reads values, such as linspace(...).tolist()
                model = make()
            except Exception as error:
                raise InputError(
                    f"{question.target} cannot be built: {type(error).__name__}: {first_line(error)} "
                    f"{place_of(error)}; expected a class or a function that returns a torch.nn.Module; --arguments "
                    "gives it arguments"
                ) from error
            notes.append(f"built with its weights on the host: without memory it says {first_line(on_meta):.80}")
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{question.target} returned a {type(model).__name__}; expected a torch.nn.Module")
    model = model.to("meta")
    if hasattr(model, "set_attn_implementation") and getattr(model.config, "_attn_implementation", "eager") != "eager":
        model.set_attn_implementation("eager")
        notes.append("attention: eager, because the fused one mixes float32 and bfloat16 under autocast")
    return model


def step_aside() -> None:
    """Let the user's modules win over our top-level ones of the same name, such as config.

    This process has imported ours already. They leave sys.modules, and sys.path begins with the user's folder.
    """
    for name, module in list(sys.modules.items()):
        if "." not in name and Path(getattr(module, "__file__", None) or "/").parent == ROOT:
            del sys.modules[name]
    sys.path[0] = str(Path.cwd())


def python_module(question: Question) -> Callable[[], torch.nn.Module]:
    """What FILE.py:NAME or package.module:NAME names, with --arguments."""
    place, _, name = question.target.rpartition(":")
    with no_network(question.target):
        try:
            if place.endswith(".py"):
                sys.path.insert(0, str(Path(place).resolve().parent))
                if not Path(place).is_file():
                    raise InputError(f"no such file: {place}; expected FILE.py:NAME")
                specification = importlib.util.spec_from_file_location(Path(place).stem, place)
                module = importlib.util.module_from_spec(specification)
                sys.modules[Path(place).stem] = module
                specification.loader.exec_module(module)
            else:
                module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise InputError(
                f"no module named {error.name!r}, wanted by {question.target}; expected an installed package, or a "
                f"module in this folder{nearest(place, sorted(known_modules(place)))}"
            ) from error
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{place} cannot be imported: {type(error).__name__}: {first_line(error)} {place_of(error)}"
            ) from error
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in dir(found) if not n.startswith("_")]
            raise InputError(f"{place} has no {part!r}{nearest(part, names)}; expected a class or a function in it")
        found = getattr(found, part)
    if isinstance(found, torch.nn.Module):
        return lambda: found
    if not callable(found):
        raise InputError(f"{question.target} is a {type(found).__name__}; expected a class, a function or a module")
    return lambda: found(**question.arguments)


def known_modules(place: str) -> set[str]:
    package, _, _ = place.rpartition(".")
    try:
        path = list(importlib.import_module(package).__path__) if package else None
    except (ImportError, AttributeError):
        path = None
    names = {m.name for m in pkgutil.iter_modules(path)}
    return {f"{package}.{name}" for name in names} if path else names


def hugging_face_module(question: Question, notes: list[str]) -> Callable[[], torch.nn.Module]:
    """hf:PLACE or hf:PLACE:CLASS, of a config.json; --arguments replace its fields. No code of the folder is run."""
    place, _, class_name = question.target.removeprefix("hf:").partition(":")
    path = Path(place) / "config.json" if Path(place).is_dir() else Path(place)
    if not path.exists():
        raise InputError(
            f"{path}: no such file; expected a config.json of Hugging Face's, or its folder, on this machine: "
            "nothing is downloaded"
        )
    fields = read_json(path, "a config.json of Hugging Face's")
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ModuleNotFoundError as error:
        raise InputError("hf: needs the package transformers: pip install 'transformers>=4.50,<5'") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if kind not in CONFIG_MAPPING:
        raise InputError(
            f"{path} has the model_type {kind!r}; expected one that transformers {transformers.__version__} knows"
            f"{nearest(str(kind), CONFIG_MAPPING)}"
        )
    fields = {name: value for name, value in fields.items() if name not in NON_SHAPE_FIELDS}
    architectures = fields.get("architectures")
    class_name = class_name or (architectures[0] if isinstance(architectures, list) and architectures else "")
    if unknown := [name for name in question.arguments if not hasattr(CONFIG_MAPPING[kind](), name)]:
        names = list(CONFIG_MAPPING[kind]().to_dict())
        raise InputError(f"arguments: {kind} has no field {unknown[0]!r}{nearest(unknown[0], names)}")
    module = importlib.import_module(CONFIG_MAPPING[kind].__module__.replace(".configuration_", ".modeling_"))
    names = [name for name, value in vars(module).items() if isinstance(value, type) and hasattr(value, "_from_config")]
    model_class = getattr(module, class_name, None)
    if class_name not in names:
        raise InputError(
            f"{path} names the class {class_name!r}; expected one of {', '.join(names)}{nearest(class_name, names)}; "
            f"write hf:{place}:CLASS"
        )
    notes.append(f"transformers {transformers.__version__}, {class_name}, eager attention")

    def make() -> torch.nn.Module:
        config = CONFIG_MAPPING[kind].from_dict(fields | question.arguments)
        return model_class._from_config(config, attn_implementation="eager")

    return make


@contextlib.contextmanager
def no_network(target: str) -> Iterator[None]:
    """Inside this context a network connection raises InputError, which names the URL or address."""

    def refuse(*arguments, **_) -> None:
        frame, wanted = sys._getframe(1), ""
        while frame and not wanted:
            texts = [value for value in list(frame.f_locals.values()) if isinstance(value, str)]
            wanted = next((text for text in texts if re.match(r"https?://", text)), "")
            frame = frame.f_back
        raise NetworkAsked(wanted or str(arguments[0] if isinstance(arguments[0], str) else arguments[1:]))

    def connect(self, address, *rest):
        if self.family == getattr(socket, "AF_UNIX", None):
            return real["connect"](self, address, *rest)
        return refuse(self, address)

    real = dict(connect=socket.socket.connect, getaddrinfo=socket.getaddrinfo)
    socket.socket.connect, socket.getaddrinfo = connect, refuse
    try:
        yield
    except NetworkAsked as asked:
        raise InputError(
            f"{target} asked the network for {asked} while it was built; expected a module that needs no weights and "
            "no network: ask about its shape, with weights=None, or by hf:config.json"
        ) from asked
    finally:
        socket.socket.connect, socket.getaddrinfo = real["connect"], real["getaddrinfo"]


def place_of(error: BaseException) -> str:
    """The innermost frame outside torch and this package, as `at FILE:LINE (text)`; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [f for f in frames if not re.search(r"/(torch|torch_xla|tpu_compiler)/|^<", f.filename)]
    return f"at {others[-1].filename}:{others[-1].lineno} ({others[-1].line})" if others else ""


def to_device(model: torch.nn.Module, device) -> torch.nn.Module:
    """The module on the device, still without memory. Tied parameters and buffers are tied again."""
    holders: dict[int, list] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    holders.setdefault(id(tensor), []).append((tensors, name))
    model = without_weights(lambda: model, device)
    for (tensors, name), *others in holders.values():
        for others_tensors, other_name in others:
            others_tensors[other_name] = tensors[name]
    for module in model.modules():  # tensors that are neither parameter nor buffer, which Module.to does not move
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                setattr(module, name, torch.empty_like(value, device=device))
    return model
