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
from tpu_utils.options.train_config import TrainConfig, parse_profile_steps

IMAGE_KINDS = (MnistConfig, DistributedMnistConfig, DdpMnistConfig, CifarConfig)
KINDS = (*IMAGE_KINDS, TransformerConfig)


def parse(*argv: str) -> MnistConfig:
    return parse_command_line(MnistConfig, "test", list(argv))


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


# what an option needs to have an effect, or to fit the others
COMPANIONS = dict(momentum=["--optimizer=sgd"], decay_every=["--scheduler=step"], decay_factor=["--scheduler=step"])
COMPANIONS |= dict(decay_fraction=["--scheduler=wsd"], download=["--dataset=mnist"], resume=["--run_dir=x"])
CIFAR_COMPANIONS = COMPANIONS | dict(download=["--dataset=cifar10"])
CIFAR_COMPANIONS |= dict(adam_beta1=["--optimizer=adam"], adam_beta2=["--optimizer=adam"])
# for text with a form of its own, and for numbers that are bound to others
VALUES = dict(profile_steps="2:5", compile_for="v5e-8", compiler_options="xla_a=1", depth=14)


def another_value(kind: type, name: str) -> object:
    """Not the default of quick_test, which is what the command line starts from."""
    value, hint = getattr(resolve(kind, "quick_test")[0], name), plain(hints_of(kind)[name])
    if name in VALUES:
        return VALUES[name]
    if name == "preset":
        return "development"
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != value)
    return {bool: lambda: not value, int: lambda: value + 1, float: lambda: value / 2 or 0.5, str: lambda: "x"}[hint]()


def test_classes_of_one_name_in_a_file_have_docstrings_of_their_own():
    def wide():
        @dataclasses.dataclass(frozen=True)
        class Own(MnistConfig):
            width: int = 1
            """Channels."""
            name: str = "no docstring"

        return Own

    def deep():
        @dataclasses.dataclass(frozen=True)
        class Own(MnistConfig):
            depth: int = 1
            """Layers of
            the network."""

        return Own

    assert field_docs(wide()) == {"width": "Channels."}
    assert field_docs(deep()) == {"depth": "Layers of the network."}


@pytest.mark.parametrize("kind", IMAGE_KINDS, ids=lambda kind: kind.__name__)
def test_every_field_can_be_set_in_both_spellings(kind):
    of_the_first = {field.name for field in dataclasses.fields(MnistConfig)} if kind is not MnistConfig else set()
    for name in (field.name for field in dataclasses.fields(kind) if field.name not in of_the_first):
        value = another_value(kind, name)
        assert value != getattr(resolve(kind, "quick_test")[0], name)
        companions = (CIFAR_COMPANIONS if kind is CifarConfig else COMPANIONS).get(name, [])
        for spelled in {name, name.replace("_", "-")}:
            given = [f"--{spelled}", str(value)]
            if isinstance(value, bool):
                given = [f"--{spelled}" if value else f"--no_{spelled}"]
            assert getattr(parse_command_line(kind, "", [*given, *companions]), name) == value, given


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--learnin_rate", "1"], "--learning_rate"),
        (["--learning_rate", "fast"], "could not convert"),
        (["--preset"], "Missing value"),
    ],
)
def test_mistakes_are_answered_with_exit_code_2(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    words = re.sub(r"[\s│|]+", " ", capsys.readouterr().err)
    assert said in words


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--num_epochs", "0"], "num_epochs is 0; expected 1 or more"),
        (["--learning_rate", "nan"], "learning_rate is nan; expected a finite number above 0"),
        (["--momentum", "1"], "momentum is 1.0; expected 0 <= momentum < 1"),
        (["--log_every", "1000001"], "log_every is 1000001; expected 1 <= log_every <= 1000000"),
        (["--profile_steps", "13:10"], "FIRST:LAST"),
        (["--preset", "prodction"], "preset is 'prodction'; expected one of quick_test, .*; did you mean production?"),
        (["--resume", "must"], "name the folder of the run to resume with --run_dir"),
        (["--compile_for", "v5litepod-9"], "compile_for: .* nearest is v5litepod-8"),
    ],
)
def test_values_that_cannot_work_are_refused(argv, said):
    with pytest.raises(InputError, match=said):
        parse(*argv)


@dataclasses.dataclass(frozen=True)
class OwnConfig(MnistConfig):
    dropout: Annotated[float, Range("[0, 1)")] = 0.1
    """Share of the hidden values set to 0."""


def test_a_configuration_of_ones_own_needs_no_registration(capsys):
    config = parse_command_line(OwnConfig, "", ["--preset", "development", "--dropout", "0.5"])
    assert (config.dropout, config.dataset) == (0.5, "mnist")
    with pytest.raises(InputError, match=r"dropout is 1\.0; expected 0 <= dropout < 1"):
        parse_command_line(OwnConfig, "", ["--dropout", "1"])
    with pytest.raises(SystemExit):
        parse_command_line(OwnConfig, "", ["--help"])
    said = capsys.readouterr().out
    assert "own options" in said and "Share of the hidden values set to 0." in said


@dataclasses.dataclass(frozen=True)
class TunedConfig(MnistConfig):
    learning_rate: float = 0.5
    precision: Literal["float32", "bfloat16"] = "bfloat16"


@dataclasses.dataclass(frozen=True)
class SmallConfig(TunedConfig):
    """Options for small runs."""

    presets: ClassVar = {"small": {}, "large": {"learning_rate": 0.25, "num_epochs": 2}}
    presets["production"] = MnistConfig.presets["production"]


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
    with pytest.raises(InputError, match=r"learning_rate is -1\.0; expected a finite number above 0"):
        parse_command_line(TunedConfig, "", ["--learning_rate=-1"])
    with pytest.raises(SystemExit):
        parse_command_line(TunedConfig, "", ["--help"])
    said = capsys.readouterr().out
    assert "TunedConfig(" not in said and "Peak learning rate." in said, "the sentence of the parent's field"


def test_presets_of_ones_own(capsys):
    assert parse_command_line(SmallConfig, "", []).preset == "small"
    assert parse_command_line(SmallConfig, "", ["--preset=large"]).num_epochs == 2
    with pytest.raises(InputError, match="preset is 'larg'; expected one of small, large, production; did you mean la"):
        parse_command_line(SmallConfig, "", ["--preset=larg"])
    with pytest.raises(SystemExit):
        parse_command_line(SmallConfig, "", ["--help"])
    assert "{small,large,production}" in capsys.readouterr().out


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
        (MnistConfig, ["--momentum=0.5"], "--momentum belongs to optimizer sgd, but optimizer is adamw"),
        (MnistConfig, ["--adam-beta1=0.5", "--optimizer=sgd"], "choose --optimizer adam or adamw, or leave"),
        (MnistConfig, ["--decay_every", "5", "--decay_factor=0.1"], "(?s)--decay_every.*--decay_factor"),
        (MnistConfig, ["--decay_fraction=0.2"], "scheduler is cosine; choose --scheduler wsd"),
        (MnistConfig, ["--scheduler=step", "--final_learning_rate_fraction=0"], "choose --scheduler linear or cosine"),
        (MnistConfig, ["--download"], "dataset is digits; choose --dataset mnist, or leave --download out"),
        (CifarConfig, ["--download"], "dataset is stripes; choose --dataset cifar10, or leave --download out"),
        (TransformerConfig, ["--preset=production", "--stream_lanes=4"], "--stream_lanes belongs to dataset stream"),
        (TransformerConfig, ["--dataset=text", "--download"], "--download has no effect: dataset is text; leave"),
        (TransformerConfig, ["--lora_alpha=8"], "lora_rank is 0; leave --lora_alpha out"),
        (TransformerConfig, ["--expert_capacity=2"], "num_experts is 0; leave --expert_capacity out"),
        (TransformerConfig, ["--tokenizer=gpt2"], "choose --dataset tokens or chat or stream, or leave --tokenizer"),
        (TransformerConfig, ["--train_data=x.bin"], "choose --dataset text or tokens or chat or stream, or leave"),
        (TransformerConfig, ["--validation_data=x.bin"], "--validation_data belongs to dataset text or tokens or chat"),
        (TransformerConfig, ["--tasks", "piqa=x", "core=y"], "--tasks belongs to .*, but dataset is synthetic"),
        (TransformerConfig, ["--task_questions=5"], "--task_questions has no effect: tasks is \\(\\); leave"),
        (TransformerConfig, ["--preset=production", "--bucketed"], "dataset is tokens; choose --dataset text"),
        (TransformerConfig, ["--dataset=tokens", "--document_separator=x"], "--document_separator belongs to"),
    ],
)
def test_an_option_without_effect_is_refused(kind, argv, said):
    with pytest.raises(InputError, match=said):
        parse_command_line(kind, "", argv)


def options_in_help(capsys, kind: type, *argv: str) -> tuple[set[str], str]:
    """(the options that --help shows beside these words, its last line)."""
    with pytest.raises(SystemExit) as stop:
        parse_command_line(kind, "", ["--help", "all"] if argv == ("all",) else [*argv, "--help"])
    said = capsys.readouterr().out
    assert not stop.value.code, said
    return set(re.findall(r"^[│ ] +--(\w+)", said, re.M)), said.splitlines()[-1]


def names_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


GPT2 = ("--dataset", "tokens", "--model_size", "124M")


def test_help_shows_what_a_first_run_needs(capsys):
    """nanoGPT's train.py has 33 options; ours has 87, of which its help shows those that are asked for."""
    shown, last = options_in_help(capsys, TransformerConfig, *GPT2)
    assert len(shown) <= 45
    assert {"dataset", "train_data", "model_size", "learning_rate", "adam_beta2", "num_steps", "run_dir"} <= shown
    of_others = {"text_field", "stream_lanes", "chat_format", "document_separator", "bucketed", "download", "momentum"}
    of_others |= {"lora_alpha", "balance_loss", "decay_fraction", "remat_keep", "sample_prompts", "task_questions"}
    assert not shown & (of_others | {"peers_secret", "memory_dir", "profile_steps", "compiler_options", "scan_layers"})
    assert last.startswith(f"{len(names_of(TransformerConfig) - shown)} more options: --help all"), last
    everything, last = options_in_help(capsys, TransformerConfig, "all")
    assert everything == names_of(TransformerConfig) and "more options" not in last


@pytest.mark.parametrize(
    "kind, argv, of_the_choice",
    [
        (TransformerConfig, ["--dataset=stream"], "text_field stream_lanes stream_window stream_damaged"),
        (TransformerConfig, ["--dataset=chat"], "chat_format"),
        (TransformerConfig, ["--dataset=text"], "document_separator bucketed"),
        (TransformerConfig, ["--dataset=text", "--tasks", "piqa=x"], "task_questions"),
        (TransformerConfig, ["--lora_rank=8"], "lora_alpha lora_base"),
        (TransformerConfig, ["--model_size=mixtral_8x7B"], "expert_capacity balance_loss router_z_loss"),
        (TransformerConfig, ["--optimizer=muon"], "muon_momentum"),
        (TransformerConfig, ["--remat"], "remat_keep remat_all_but offload scan_layers"),
        (TransformerConfig, ["--sample_every=10"], "sample_prompts"),
        (TransformerConfig, ["--mesh=2x2x1"], "print_placement context_attention"),
        (TransformerConfig, ["--num_layers=3"], "vocab_size"),
        (TransformerConfig, ["--compile_for=v5e-8"], "compiler_options windowed_einsum"),
        (MnistConfig, ["--optimizer=sgd"], "momentum"),
        (MnistConfig, ["--scheduler=wsd"], "decay_fraction"),
        (MnistConfig, ["--scheduler=step"], "decay_every decay_factor"),
        (MnistConfig, ["--dataset=mnist"], "download"),
        (MnistConfig, ["--preset=development"], "download"),
        (MnistConfig, ["--save_memory_every=10"], "save_memory_every memory_dir"),
        (DistributedMnistConfig, ["--peers_secret=x"], "peers_secret"),
        (CifarConfig, ["--dataset=cifar10"], "download"),
    ],
)
def test_a_choice_brings_its_options_into_the_help(capsys, kind, argv, of_the_choice):
    shown, beside = options_in_help(capsys, kind)[0], options_in_help(capsys, kind, *argv)[0]
    assert not shown & set(of_the_choice.split()) and set(of_the_choice.split()) <= beside


def test_help_of_a_run_has_the_options_of_its_choices(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(MnistConfig(optimizer="sgd", strict=True))))
    shown, _ = options_in_help(capsys, MnistConfig, f"--run_dir={tmp_path}", "--resume=must")
    assert {"momentum", "strict"} <= shown and "adam_beta2" not in shown


def test_help_is_answered_beside_a_mistake(capsys):
    for words in (["--dataset=foo"], ["--learnin_rate=1"], ["--seed=-1"], ["--preset=foo"], ["--model_config=no"]):
        assert "dataset" in options_in_help(capsys, TransformerConfig, *words)[0], words


def test_an_option_that_the_help_leaves_out_is_known_to_the_parser(capsys):
    assert parse("--strict", "--memory_dir=/tmp").strict
    with pytest.raises(SystemExit):
        parse_command_line(TransformerConfig, "", ["--stream_lane=4"])
    assert "--stream_lanes" in capsys.readouterr().err


def test_options_of_an_older_version_are_carried_over(tmp_path):
    """--hellaswag FILE is --tasks hellaswag=FILE now; --sharding had one value that ran."""
    told = dataclasses.asdict(TransformerConfig(dataset="text", train_data="x", tasks=("piqa=p",)))
    argv = ["--run_dir", str(tmp_path), "--resume=must"]
    for former, tasks in (("q.bin", ("piqa=p", "hellaswag=q.bin")), ("", ("piqa=p",))):
        (tmp_path / "config.json").write_text(json.dumps(told | dict(hellaswag=former, sharding="auto")))
        assert parse_command_line(TransformerConfig, "", argv).tasks == tasks
    for damaged in (dict(tasks=3), dict(tasks=None), dict(hellaswag=["\ud800"]), dict(tasks="x")):
        (tmp_path / "config.json").write_text(json.dumps(told | dict(hellaswag="q.bin") | damaged))
        with pytest.raises(InputError, match=r"config.json holds options that cannot work"):
            parse_command_line(TransformerConfig, "", argv)
    assert {"hellaswag", "sharding"} <= free_on_resume(TransformerConfig)
    with pytest.raises(SystemExit):
        parse_command_line(TransformerConfig, "", ["--hellaswag=q.bin"])


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
        (TransformerConfig, ["--dataset=text", "--train_data=x", "--tasks", "hellaswag=x.bin"]),
        (MnistConfig, ["--no_download"]),
        (LionConfig, ["--momentum=0.5", "--download"]),  # what they do there is the script's to say
    ],
)
def test_what_a_preset_sets_is_never_refused(kind, argv):
    assert isinstance(parse_command_line(kind, "", argv), kind)


def test_heads_that_do_not_divide_the_width():
    for heads, width, said in ((3, 128, "2 or 4, or .* 144"), (5, 768, "4 or 6, or .* 800"), (99, 64, "64, or .* 792")):
        with pytest.raises(InputError, match=f"try --num_heads {said}$"):
            TransformerConfig(num_heads=heads, embedding_dim=width)


def test_profile_steps():
    assert parse_profile_steps("10:13") == (10, 13)
    assert parse_profile_steps("") == (-1, -1)
    for wrong in ("10", "10:", "a:b", "5:5", "-1:3"):
        with pytest.raises(InputError):
            parse_profile_steps(wrong)


def test_config_py_prints_every_preset_and_where_each_value_came_from():
    table, as_json = run("config.py"), run("config.py", "--json")
    assert table.returncode == as_json.returncode == 0, table.stderr + as_json.stderr
    assert "MnistConfig --preset production: valid" in table.stdout
    value = json.loads(as_json.stdout)["MnistConfig"]["production"]
    assert value["num_epochs"] == {"value": 10, "source": "preset production"}
    assert value["precision"] == {"value": "float32", "source": "level balanced"}
    assert value["momentum"]["source"] == "default"
    assert run("config.py", "--jsn").returncode == 2


def test_presets_are_read_where_nothing_is_installed_but_python():
    """-S: no installed package is in reach."""
    done = subprocess.run([sys.executable, "-S", "config.py", "--json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() == {kind.__name__ for kind in KINDS}


def test_what_shapes_the_computation_is_not_free_on_resume():
    """The marks stand beside the fields; what a resumption must repeat is held here, by name."""
    shaping = {"seed", "dataset", "global_batch_size", "optimizer", "learning_rate", "momentum", "adam_beta1"}
    shaping |= {"adam_beta2", "weight_decay", "scheduler", "warmup_steps", "decay_every", "decay_factor", "precision"}
    shaping |= {"decay_fraction", "final_learning_rate_fraction", "matmul_precision", "log_every"}
    mnist = shaping | {"num_epochs", "max_shift", "channels", "hidden_dim"}
    text = shaping | {"train_data", "validation_data", "document_separator", "bucketed", "model_size", "num_layers"}
    text |= {"num_heads", "embedding_dim", "sequence_length", "vocab_size", "num_steps", "gradient_accumulation_steps"}
    text |= {"clip_gradient_norm", "eval_every", "eval_batches", "dropout"}
    text |= {"model_config", "lora_rank", "lora_alpha", "chat_format"}
    text |= {"expert_capacity", "balance_loss", "router_z_loss", "muon_momentum"}
    text |= {"text_field", "stream_lanes", "stream_window"}
    cifar = shaping | {"num_epochs", "max_shift", "depth", "width", "flip"}
    mnists = dict.fromkeys((MnistConfig, DistributedMnistConfig, DdpMnistConfig), mnist)
    expected = {**mnists, CifarConfig: cifar, TransformerConfig: text}
    for config_class, names in expected.items():
        assert {field.name for field in dataclasses.fields(config_class)} - free_on_resume(config_class) == names


def test_what_one_image_script_is_free_to_change_another_lets_be_different():
    """A run may be resumed by another image script, which does not have some of its fields."""
    fields_of = {kind: {field.name for field in dataclasses.fields(kind)} for kind in IMAGE_KINDS}
    free = {name for kind in IMAGE_KINDS for name in free_on_resume(kind) & fields_of[kind]}
    of_all = set.intersection(*fields_of.values())
    of_older_versions = {"compile_cache", "strategy"}
    assert TrainConfig.free_elsewhere == free - of_all | of_older_versions


def test_every_number_has_bounds():
    for config_class in KINDS:
        for field in dataclasses.fields(config_class):
            if isinstance(field.default, int | float) and not isinstance(field.default, bool):
                assert any(isinstance(mark, Range) for mark in marks(config_class, field.name)), field.name


def test_requirements_pin_what_must_match():
    lines = (ROOT / "requirements.txt").read_text()
    assert re.search(r"^torch==2\.9\.0$", lines, re.M) and re.search(r"^torch_xla\[tpu,pallas\]==2\.9\.0", lines, re.M)


@pytest.mark.parametrize("name", ["run_dir", "data_dir", "peers_secret", "document_separator"])
def test_options_that_are_no_text_are_refused(name):
    """What a command line hands over for bytes that are no UTF-8; TensorBoard could not write it later."""
    with pytest.raises(InputError, match=rf"{name} is 'a.udcff'; expected UTF-8 text"):
        parse_command_line(TransformerConfig, "", [f"--{name}", "a\udcff"])


@pytest.mark.parametrize(
    "changed, said",
    [
        (dict(seed=-1, log_every=0, weight_decay=np.inf), r"(?s)seed is -1.*weight_decay is inf.*log_every is 0"),
        (dict(num_epochs="3"), "num_epochs is '3'; expected int"),
        (dict(num_epochs=True), "num_epochs is True; expected int"),
        (dict(learning_rate=None), "learning_rate is None; expected float"),
        (dict(tensorboard=1), "tensorboard is 1; expected bool"),
        (dict(run_dir=7), "run_dir is 7; expected str"),
        (dict(dataset="other"), "dataset is 'other'; expected one of digits, mnist, synthetic"),
        (dict(device=[]), "device is .*; expected one of auto, tpu, gpu, cpu"),
    ],
)
def test_values_of_another_type_and_all_that_are_out_of_bounds_are_refused(changed, said):
    with pytest.raises(InputError, match=said):
        MnistConfig(**changed)


def test_numbers_of_numpy_are_numbers():
    assert MnistConfig(num_epochs=np.int64(3), learning_rate=np.float32(0.5), weight_decay=0).num_epochs == 3
