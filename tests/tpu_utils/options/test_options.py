"""Presets, bounds, the command line."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args, get_origin

import numpy as np
import pytest
from processes import ROOT, run

from config import DdpMnistConfig, DistributedMnistConfig, MnistConfig
from images.cifar_config import CifarConfig
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError
from tpu_utils.options.fields import FREE, Range, field_docs, hints_of, marks, plain  # noqa: F401 - FREE in an annotation as text
from tpu_utils.options.parsing import parse_command_line, presets_of, resolve
from tpu_utils.options.stored import free_on_resume
from tpu_utils.options.train_config import TrainConfig

IMAGE_KINDS = (MnistConfig, DistributedMnistConfig, DdpMnistConfig, CifarConfig)
KINDS = (*IMAGE_KINDS, TransformerConfig)


def parse(*argv: str) -> MnistConfig:
    return parse_command_line(MnistConfig, "test", list(argv))


def names_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_every_preset_is_valid_and_no_preset_sets_a_field_of_a_level():
    owned = {field for fields in TrainConfig.levels.values() for field in fields}
    for config_class in KINDS:
        presets = presets_of(config_class)
        assert set(presets) >= {"quick_test", "development", "production", "distributed"}
        for name, values in presets.items():
            config, sources = resolve(config_class, name)
            assert not owned & set(values)
            assert all(getattr(config, field) == value for field, value in values.items())
            assert all(sources[field] == f"preset {name}" for field in values)


def test_later_sources_win():
    assert parse().learning_rate == MnistConfig.presets["quick_test"]["learning_rate"]
    assert parse("--preset", "production").num_epochs == 10
    assert parse("--preset=production", "--num-epochs", "3").num_epochs == 3
    assert parse("--optimization-level", "aggressive").precision == "bfloat16"
    assert parse("--optimization_level", "aggressive", "--precision", "float32").precision == "float32"
    assert parse("--no_tensorboard").tensorboard is False
    assert parse("--strict").strict, "an option that the help leaves out"


# text with a form of its own, numbers that are bound to others, and choices beside which all but OTHERS have an effect
VALUES = dict(preset="development", profile_steps="2:5", compile_for="v5e-8", compiler_options="xla_a=1", depth=14)
VALUES |= dict(optimizer="sgd", scheduler="step")
OTHERS = dict(optimizer="adam", adam_beta1=0.5, adam_beta2=0.5)
OTHERS |= dict(scheduler="wsd", decay_fraction=0.5, final_learning_rate_fraction=0.5)


def another_value(kind: type, name: str) -> object:
    """Not the default of quick_test, which is what the command line starts from."""
    value, hint = getattr(resolve(kind, "quick_test")[0], name), plain(hints_of(kind)[name])
    if name in VALUES:
        return VALUES[name]
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != value)
    return {bool: lambda: not value, int: lambda: value + 1, float: lambda: value / 2 or 0.5, str: lambda: "x"}[hint]()


def test_classes_of_one_name_in_a_file_have_docstrings_of_their_own():
    def wide():
        class Own:
            width: int
            """Channels."""
            name: str

        return Own

    def deep():
        class Own:
            depth: int
            """Layers of
            the network."""

        return Own

    assert field_docs(wide()) == {"width": "Channels."}
    assert field_docs(deep()) == {"depth": "Layers of the network."}


@pytest.mark.parametrize("kind", IMAGE_KINDS, ids=lambda kind: kind.__name__)
def test_every_field_can_be_set_in_both_spellings(kind):
    first = {name: another_value(kind, name) for name in names_of(kind) - OTHERS.keys() | {"optimizer", "scheduler"}}
    for values in (first, OTHERS):
        for spelled in (str, lambda name: name.replace("_", "-")):
            words = []
            for name, value in values.items():
                yes_or_no = [f"--{spelled(name)}" if value else f"--no_{spelled(name)}"]
                words += yes_or_no if isinstance(value, bool) else [f"--{spelled(name)}", str(value)]
            config = parse_command_line(kind, "", words)
            assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    "kind, argv, said",
    [
        (MnistConfig, ["--learning_rate", "fast"], "could not convert"),
        (MnistConfig, ["--preset"], "Missing value"),
        (TransformerConfig, ["--stream_lane=4"], "--stream_lanes"),  # which the help leaves out
    ],
)
def test_mistakes_are_answered_with_exit_code_2(kind, argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_command_line(kind, "", argv)
    assert stop.value.code == 2
    assert said in re.sub(r"[\s│|]+", " ", capsys.readouterr().err)


@dataclasses.dataclass(frozen=True)
class TunedConfig(MnistConfig):
    learning_rate: float = 0.5
    precision: Literal["float32", "bfloat16"] = "bfloat16"


@dataclasses.dataclass(frozen=True)
class SmallConfig(TunedConfig):
    """Options for small runs."""

    presets: ClassVar = {"small": {}, "large": {"learning_rate": 0.25, "num_epochs": 2}}
    presets["production"] = MnistConfig.presets["production"]
    dropout: Annotated[float, Range("[0, 1)")] = 0.1
    """Share of the hidden values set to 0."""


@dataclasses.dataclass(frozen=True)
class AloneConfig(TrainConfig):
    layers: Annotated[tuple[int, ...], Range("[1, inf)")] = (3, 4)
    limit: Annotated[int | None, Range("[1, inf)")] = None
    verbose: bool = False


def test_a_default_of_a_subclass_stands_against_its_parents_presets_and_level(capsys):
    for preset in MnistConfig.presets:
        config, sources = resolve(TunedConfig, preset)
        assert (config.learning_rate, config.precision, sources["learning_rate"]) == (0.5, "bfloat16", "default")
        assert config.num_epochs == resolve(MnistConfig, preset)[0].num_epochs
    assert resolve(SmallConfig, "production")[0].learning_rate == 0.5, "a preset taken over is still the parent's"
    assert resolve(SmallConfig, "large")[0].learning_rate == 0.25, "one that the class states itself counts"
    options = ["--optimization_level=conservative", "--learning_rate=2"]
    config = parse_command_line(TunedConfig, "", options)
    assert (config.learning_rate, config.precision) == (2, "float32")
    with pytest.raises(InputError, match=r"learning_rate is -1\.0; expected 0 < learning_rate <= 3e38"):
        parse_command_line(TunedConfig, "", ["--learning_rate=-1"])
    with pytest.raises(SystemExit):
        parse_command_line(TunedConfig, "", ["--help"])
    said = capsys.readouterr().out
    assert "TunedConfig(" not in said and "Peak learning rate." in said, "the sentence of the parent's field"


def test_options_and_presets_of_ones_own_need_no_registration(capsys):
    assert parse_command_line(SmallConfig, "", []).preset == "small"
    config = parse_command_line(SmallConfig, "", ["--preset=large", "--dropout=0.5"])
    assert (config.num_epochs, config.dropout) == (2, 0.5)
    with pytest.raises(InputError, match=r"dropout is 1\.0; expected 0 <= dropout < 1"):
        parse_command_line(SmallConfig, "", ["--dropout=1"])
    with pytest.raises(InputError, match="preset is 'larg'; expected one of small, large, production; did you mean la"):
        parse_command_line(SmallConfig, "", ["--preset=larg"])
    with pytest.raises(SystemExit):
        parse_command_line(SmallConfig, "", ["--help"])
    said = capsys.readouterr().out
    assert all(text in said for text in ("{small,large,production}", "small options", "Share of the hidden values"))


def test_a_class_of_ones_own_below_the_root():
    assert presets_of(AloneConfig) == {"quick_test": {}}
    assert parse_command_line(AloneConfig, "", []) == AloneConfig()
    config = parse_command_line(AloneConfig, "", ["--layers", "1", "2", "3", "--limit=5", "--verbose"])
    assert (config.layers, config.limit, config.verbose) == ((1, 2, 3), 5, True)
    assert "keep_checkpoints" in free_on_resume(AloneConfig) and "limit" not in free_on_resume(AloneConfig)
    for options in (["--limit=0"], ["--layers", "1", "0"]):
        with pytest.raises(InputError, match="expected 1 or more"):
            parse_command_line(AloneConfig, "", options)
    with pytest.raises(InputError, match=r"layers is \[3\]; expected tuple\[int, \.\.\.\]"):
        AloneConfig(layers=[3])
    with pytest.raises(InputError, match="preset is 'production'; expected one of quick_test"):
        parse_command_line(AloneConfig, "", ["--preset=production"])


def own(parent, decorated=True, **body):
    annotations = {name: kind for name, (kind, _) in body.items() if kind}
    values = {name: value for name, (_, value) in body.items()}
    kind = type("Own", (parent,), {**values, "__annotations__": annotations, "__module__": __name__})
    return dataclasses.dataclass(frozen=True)(kind) if decorated else kind


@pytest.mark.parametrize(
    "kind, said",
    [
        (own(MnistConfig, where=(Path, Path("x"))), "Own: where is of type Path; expected bool, int, float, str"),
        (own(MnistConfig, sizes=(list[int], dataclasses.field(default_factory=list))), r"sizes is of type list\[int\]"),
        (own(MnistConfig, learning_rate=(None, 0.1)), "Own sets learning_rate without a type.* learning_rate: float"),
        (own(MnistConfig, decorated=False, dropout=(float, 0.1)), "Own declares dropout but is no dataclass"),
        (own(MnistConfig, presets=(None, {"a": {"num_epoch": 3}})), "preset a: num_epoch is no field.*mean num_epochs"),
        (own(MnistConfig, presets=(None, {"a": {"precision": "x"}})), "preset a sets precision, .* optimization_level"),
        (own(MnistConfig, presets=(None, {"a": {"num_epochs": 0}})), "num_epochs is 0; expected 1 or more"),
        (own(MnistConfig, presets=(None, {})), r"Own.presets is \{\}; expected"),
    ],
)
def test_a_class_that_would_not_do_what_it_says_is_refused(kind, said):
    with pytest.raises(InputError, match=said):
        parse_command_line(kind, "", [])


def test_annotations_as_text_are_understood():
    kind = own(TrainConfig, steps=("Annotated[int, Range('[1, inf)'), FREE]", 3))
    assert parse_command_line(kind, "", ["--steps=4"]).steps == 4 and "steps" in free_on_resume(kind)
    with pytest.raises(InputError, match="steps is 0; expected 1 or more"):
        parse_command_line(kind, "", ["--steps=0"])


@pytest.mark.parametrize(
    "kind, argv, said",
    [
        # a value that cannot work
        (MnistConfig, ["--num_epochs", "0"], "num_epochs is 0; expected 1 or more"),
        (MnistConfig, ["--learning_rate", "nan"], "learning_rate is nan; expected 0 < learning_rate <= 3e38"),
        (MnistConfig, ["--momentum", "1"], "momentum is 1.0; expected 0 <= momentum < 1"),
        (MnistConfig, ["--log_every", "1000001"], "log_every is 1000001; expected 1 <= log_every <= 1000000"),
        (MnistConfig, ["--profile_steps", "5:5"], "FIRST:LAST"),
        (MnistConfig, ["--profile_steps", "10:"], "FIRST:LAST"),
        (MnistConfig, ["--profile_steps", "-1:3"], "FIRST:LAST"),
        (MnistConfig, ["--preset", "prodction"], "preset is 'prodction'; expected one of .*; did you mean production?"),
        (MnistConfig, ["--resume", "must"], "name the folder of the run to resume with --run_dir"),
        (MnistConfig, ["--compile_for", "v5litepod-9"], "compile_for: .* nearest is v5litepod-8"),
        (TransformerConfig, ["--num_heads=3", "--embedding_dim=128"], "try --num_heads 2 or 4, or .* 144$"),
        (TransformerConfig, ["--num_heads=99", "--embedding_dim=64"], "try --num_heads 64, or .* 792$"),
        # bytes that are no UTF-8, as a command line hands them over: TensorBoard could not write them later
        (TransformerConfig, ["--run_dir", "a\udcff"], r"run_dir is 'a.udcff'; expected UTF-8 text"),
        (TransformerConfig, ["--document_separator", "a\udcff"], r"document_separator is 'a.udcff'; expected UTF-8"),
        # an option without effect
        (MnistConfig, ["--momentum=0.5"], "--momentum belongs to optimizer sgd, but optimizer is adamw"),
        (MnistConfig, ["--adam-beta1=0.5", "--optimizer=sgd"], "choose --optimizer adam or adamw, or leave"),
        (MnistConfig, ["--decay_every", "5", "--decay_factor=0.1"], "(?s)--decay_every.*--decay_factor"),
        (MnistConfig, ["--scheduler=step", "--final_learning_rate_fraction=0"], "choose --scheduler linear or cosine"),
        (MnistConfig, ["--download"], "dataset is digits; choose --dataset mnist, or leave --download out"),
        (CifarConfig, ["--download"], "dataset is stripes; choose --dataset cifar10, or leave --download out"),
        (TransformerConfig, ["--preset=production", "--stream_lanes=4"], "--stream_lanes belongs to dataset stream"),
        (TransformerConfig, ["--dataset=text", "--download"], "--download has no effect: dataset is text; leave"),
        (TransformerConfig, ["--tasks", "piqa=x", "core=y"], "--tasks belongs to .*, but dataset is synthetic"),
        (TransformerConfig, ["--task_questions=5"], "--task_questions has no effect: tasks is \\(\\); leave"),
        (TransformerConfig, ["--dataset=tokens", "--document_separator=x"], "--document_separator belongs to"),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused(kind, argv, said):
    with pytest.raises(InputError, match=said):
        parse_command_line(kind, "", argv)


def options_in_help(capsys, kind: type, *argv: str) -> tuple[set[str], str]:
    """(the options that --help shows beside these words, its last line)."""
    with pytest.raises(SystemExit) as stop:
        parse_command_line(kind, "", ["--help", "all"] if argv == ("all",) else [*argv, "--help"])
    said = capsys.readouterr().out
    assert not stop.value.code, said
    return set(re.findall(r"^[│ ] +--(\w+)", said, re.M)), said.splitlines()[-1]


def test_help_shows_what_a_first_run_needs(capsys):
    """nanoGPT's train.py has 33 options; ours has 87, of which its help shows those that are asked for."""
    shown, last = options_in_help(capsys, TransformerConfig, "--dataset=tokens", "--model_size=124M")
    assert len(shown) <= 45
    assert {"dataset", "train_data", "model_size", "learning_rate", "adam_beta2", "num_steps", "run_dir"} <= shown
    of_others = {"text_field", "stream_lanes", "chat_format", "document_separator", "bucketed", "download", "momentum"}
    of_others |= {"lora_alpha", "balance_loss", "decay_fraction", "remat_keep", "sample_prompts", "task_questions"}
    assert not shown & (of_others | {"peers_secret", "memory_dir", "profile_steps", "compiler_options", "scan_layers"})
    assert last.startswith(f"{len(names_of(TransformerConfig) - shown)} more options: --help all"), last
    everything, last = options_in_help(capsys, TransformerConfig, "all")
    assert everything == names_of(TransformerConfig) and "more options" not in last


STREAM = "stream_lanes stream_window stream_workers stream_damaged"
DATA = "tasks train_data validation_data "
MUCH = ["--lora_rank=8", "--model_size=mixtral_8x7B", "--optimizer=muon", "--remat", "--sample_every=10"]
MUCH += ["--mesh=2x2x1", "--compile_for=v5e-8"]
OF_MUCH = "lora_alpha lora_base expert_capacity balance_loss router_z_loss muon_momentum loss_parts remat_keep "
OF_MUCH += "remat_all_but offload scan_layers sample_prompts print_placement context_attention compiler_options "


@pytest.mark.parametrize(
    "kind, argv, of_the_choice",
    [
        (TransformerConfig, ["--dataset=stream"], DATA + "tokenizer text_field " + STREAM),
        (TransformerConfig, ["--dataset=chat"], DATA + "tokenizer chat_format initialise_new_tokens"),
        (TransformerConfig, ["--dataset=text", "--tasks", "a=x"], DATA + "bucketed document_separator task_questions"),
        (TransformerConfig, MUCH, OF_MUCH + "windowed_einsum"),
        (TransformerConfig, ["--num_layers=3"], "vocab_size"),
        (MnistConfig, ["--optimizer=sgd", "--scheduler=step"], "momentum decay_every decay_factor"),
        (MnistConfig, ["--scheduler=wsd", "--preset=development"], "decay_fraction download"),
        (MnistConfig, ["--save_memory_every=10"], "save_memory_every memory_dir"),
        (DistributedMnistConfig, ["--peers_secret=x"], "peers_secret"),
        (CifarConfig, ["--dataset=cifar10"], "download"),
    ],
)
def test_a_choice_brings_its_options_into_the_help(capsys, kind, argv, of_the_choice):
    usual = options_in_help(capsys, kind)[0]
    assert options_in_help(capsys, kind, *argv)[0] - usual == set(of_the_choice.split())


def test_help_of_a_run_has_the_options_of_its_choices(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(MnistConfig(optimizer="sgd", strict=True))))
    shown, _ = options_in_help(capsys, MnistConfig, f"--run_dir={tmp_path}", "--resume=must")
    assert {"momentum", "strict"} <= shown and "adam_beta2" not in shown


def test_help_is_answered_beside_a_mistake(capsys):
    for words in (["--dataset=foo"], ["--learnin_rate=1"], ["--seed=-1"], ["--preset=foo"], ["--model_config=no"]):
        assert "dataset" in options_in_help(capsys, TransformerConfig, *words)[0], words


def test_options_of_an_older_version_are_carried_over(tmp_path):
    """--hellaswag FILE is --tasks hellaswag=FILE now; --sharding had one value that ran."""
    told = dataclasses.asdict(TransformerConfig(dataset="text", train_data="x", tasks=("piqa=p",)))
    argv = ["--run_dir", str(tmp_path), "--resume=must"]
    for former, tasks in (("q.bin", ("piqa=p", "hellaswag=q.bin")), ("", ("piqa=p",))):
        (tmp_path / "config.json").write_text(json.dumps(told | dict(hellaswag=former, sharding="auto")))
        assert parse_command_line(TransformerConfig, "", argv).tasks == tasks
    for damaged in (dict(tasks=3), dict(tasks=None), dict(hellaswag=["\ud800"])):
        (tmp_path / "config.json").write_text(json.dumps(told | dict(hellaswag="q.bin") | damaged))
        with pytest.raises(InputError, match=r"config.json holds options that cannot work"):
            parse_command_line(TransformerConfig, "", argv)


@dataclasses.dataclass(frozen=True)
class LionConfig(MnistConfig):
    optimizer: Literal["lion"] = "lion"
    dataset: Literal["mine"] = "mine"


@pytest.mark.parametrize(
    "kind, argv",
    [
        (TransformerConfig, ["--preset=development", "--scheduler=constant"]),  # its final_learning_rate_fraction
        (TransformerConfig, ["--preset=development", "--optimizer=sgd"]),  # its adam_beta2
        (TransformerConfig, ["--preset=production", "--dataset=synthetic"]),  # its train_data
        (MnistConfig, ["--no_download"]),
        (LionConfig, ["--momentum=0.5", "--download"]),  # what they do there is the script's to say
    ],
)
def test_what_a_preset_sets_is_never_refused(kind, argv):
    assert isinstance(parse_command_line(kind, "", argv), kind)


def test_config_py_prints_every_preset_and_where_each_value_came_from():
    """-S: no installed package is in reach, only Python."""
    command = [sys.executable, "-S", "config.py", "--json"]
    as_json = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert as_json.returncode == 0, as_json.stderr
    found = json.loads(as_json.stdout)
    assert found.keys() == {kind.__name__ for kind in KINDS}
    value = found["MnistConfig"]["production"]
    assert value["num_epochs"] == {"value": 10, "source": "preset production"}
    assert value["precision"] == {"value": "float32", "source": "level balanced"}
    assert value["momentum"]["source"] == "default"
    assert "MnistConfig --preset production: valid" in run("config.py").stdout
    assert run("config.py", "--jsn").returncode == 2


def test_what_shapes_the_computation_is_not_free_on_resume():
    """The marks stand beside the fields; what a resumption must repeat is held here, by name."""
    shaping = "seed dataset global_batch_size optimizer learning_rate momentum adam_beta1 adam_beta2 weight_decay "
    shaping += "scheduler warmup_steps decay_every decay_factor decay_fraction final_learning_rate_fraction precision "
    shaping += "matmul_precision log_every "
    images = shaping + "num_epochs max_shift "
    text = shaping + "train_data validation_data document_separator bucketed model_size model_config num_layers "
    text += "num_heads embedding_dim sequence_length vocab_size num_steps gradient_accumulation_steps dropout "
    text += "clip_gradient_norm eval_every eval_batches lora_rank lora_alpha chat_format expert_capacity balance_loss "
    text += "router_z_loss muon_momentum text_field stream_lanes stream_window"
    expected = dict.fromkeys(IMAGE_KINDS, images + "channels hidden_dim")
    expected |= {CifarConfig: images + "depth width flip", TransformerConfig: text}
    for config_class, names in expected.items():
        assert names_of(config_class) - free_on_resume(config_class) == set(names.split())


def test_what_one_image_script_is_free_to_change_another_lets_be_different():
    """A run may be resumed by another image script, which does not have some of its fields."""
    free = {name for kind in IMAGE_KINDS for name in free_on_resume(kind) & names_of(kind)}
    of_all = set.intersection(*map(names_of, IMAGE_KINDS))
    of_older_versions = {"compile_cache", "strategy"}
    assert TrainConfig.free_elsewhere == free - of_all | of_older_versions


def test_every_number_has_bounds():
    for config_class in KINDS:
        for field in dataclasses.fields(config_class):
            if isinstance(field.default, int | float) and not isinstance(field.default, bool):
                assert any(isinstance(mark, Range) for mark in marks(config_class, field.name)), field.name


def test_values_of_another_type_and_out_of_bounds_are_named_all_at_once():
    wrong = dict(num_epochs="3", channels=True, learning_rate=None, tensorboard=1, run_dir=7, dataset="other")
    with pytest.raises(InputError) as refused:
        MnistConfig(**wrong, device=[], seed=-1, log_every=0, weight_decay=np.inf)
    said = "num_epochs is '3'; expected int/channels is True; expected int/learning_rate is None; expected float/"
    said += "tensorboard is 1; expected bool/run_dir is 7; expected str/dataset is 'other'; expected one of digits/"
    said += "device is []; expected one of auto, tpu, gpu, cpu/seed is -1/log_every is 0/weight_decay is inf"
    assert not [sentence for sentence in said.split("/") if sentence not in str(refused.value)]
    numbers = MnistConfig(num_epochs=np.int64(3), learning_rate=np.float32(0.5), weight_decay=0)
    assert numbers.num_epochs == 3, "NumPy's numbers are numbers"
