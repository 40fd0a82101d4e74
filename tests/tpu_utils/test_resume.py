"""Going on with a run: with the options it has, to another number of steps, when it is finished, and its best one."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Annotated

import pytest
from mutations import DEEP, make_irregular, mutated_json, no_hang
from run_files import assert_identical, files_of, in_process, numbers, read_lines, reader_of, state_in, summary_in

import simple_mnist_tpu
from config import DistributedMnistConfig, MnistConfig
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import CheckpointError, InputError
from tpu_utils.base.process import Peers
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.options.compiler_flags import NO_WINDOWED_EINSUM
from tpu_utils.options.fields import FREE, Range
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.options.stored import resolve_stored
from tpu_utils.record.log import BESIDE
from tpu_utils.run import Run

(THRESHOLD,) = NO_WINDOWED_EINSUM
TINY = ["--warmup_steps=2", "--channels=4", "--hidden_dim=16", "--learning_rate=3e-3", "--max_shift=0", "--log_every=7"]
TINY += ["--device=cpu", "--no_tensorboard", "--save_every=10", "--keep_checkpoints=99"]
LAST = 44  # 2 epochs, 22 steps each


def train(run_dir: Path, *options: object) -> Path:
    assert in_process("--run_dir", run_dir, *options) == 0
    return run_dir


@pytest.fixture(scope="module")
def constant(tmp_path_factory):
    """A finished run of 2 epochs at a constant learning rate."""
    return train(tmp_path_factory.mktemp("constant") / "run", *TINY, "--num_epochs=2", "--scheduler=constant")


def refused(capsys, run_dir: Path, *options: object) -> str:
    """The one line that says why a run does not go on with these options."""
    assert in_process("--run_dir", run_dir, "--resume=must", *options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def copy_until(step: int, run_dir: Path, target: Path) -> Path:
    """As the run was when it was killed after this checkpoint."""
    shutil.copytree(run_dir, target)
    (target / "summary.json").unlink(missing_ok=True)
    for folder in (target / "checkpoints").iterdir():
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)
    return target


def end_state(run_dir: Path) -> dict:
    return state_in(max((run_dir / "checkpoints").glob("step_*")))


# -------------------------------------------------------------------------------------------------- the run's options
def test_a_run_goes_on_with_the_options_it_has(constant, tmp_path, capsys):
    run_dir = copy_until(20, constant, tmp_path / "run")
    train(run_dir, "--resume=must")
    output = capsys.readouterr().out
    assert f"options    from {run_dir}/config.json\n" in output and "resumed    after step 20 of 44" in output
    assert_identical(end_state(run_dir), end_state(constant))
    assert numbers(run_dir) == numbers(constant)
    assert not (run_dir / "tensorboard").exists(), "the options that are free too"


def test_options_given_are_those_of_the_run_or_free(constant, tmp_path, capsys):
    run_dir = copy_until(20, constant, tmp_path / "run")
    said = refused(capsys, run_dir, "--learning_rate=1")
    assert "learning_rate is 1.0, was 0.003; repeat the old values" in said
    assert "precision is 'bfloat16', was 'float32'" in refused(capsys, run_dir, "--optimization_level=aggressive")
    assert "channels is 32, was 4" in refused(capsys, run_dir, "--preset=quick_test")


def stored(folder: Path, content: object) -> list[str]:
    """The command line that resumes a run with this config.json."""
    text = content if isinstance(content, bytes | str) else json.dumps(content)
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return ["--run_dir", str(folder), "--resume", "must"]


@dataclasses.dataclass(frozen=True)
class OwnConfig(MnistConfig):
    dropout: Annotated[float, Range("[0, 1)")] = 0.25
    """Share of the hidden values set to 0."""
    comment: Annotated[str, FREE] = ""
    """Changes nothing."""


KNOWN = {**dataclasses.asdict(MnistConfig(num_epochs=7, channels=5)), "run_id": "ours", "data_crc32": 1}
ONCE = dict(profile_steps="3:5", debug=True, compile_for="v5e-8", run_dir="elsewhere", resume="never")
ONCE |= dict(download=True)  # the folder may come from others
ONCE |= dict(compile_cache="theirs")  # an option of older code
SECRET = dataclasses.asdict(DistributedMnistConfig(peers_secret="theirs"))
WRITES = "xla_jf_dump_to=../elsewhere"
PROGRAM = f"xla_tpu_scoped_vmem_limit_kib=32768 --xla_tpu_enable_async_collective_fusion=true {THRESHOLD}=4"
OTHER = dataclasses.asdict(DistributedMnistConfig(num_epochs=7, num_virtual_devices=4)) | {"run_id": "ours"}
OWN = dataclasses.asdict(OwnConfig(dropout=0, channels=5))


@pytest.mark.parametrize(
    "kind, content, given, expected",
    [
        # what one process was asked for is not of the run
        (MnistConfig, KNOWN | ONCE, {}, dict(num_epochs=7, resume="must", profile_steps="", debug=False)),
        (MnistConfig, KNOWN | ONCE, {}, dict(compile_for="", download=False)),
        # one MNIST script goes on with a run of the other
        (MnistConfig, OTHER, {}, dict(num_epochs=7)),
        (DistributedMnistConfig, KNOWN, {}, dict(num_epochs=7, num_virtual_devices=0)),
        (MnistConfig, SECRET, {}, {}),  # one device has no peers
        # what a folder is not believed, a user may say; and none is no default
        (DistributedMnistConfig, SECRET, dict(peers_secret=""), {}),
        (DistributedMnistConfig, SECRET, dict(peers_secret="ours"), {}),
        (MnistConfig, KNOWN | dict(compiler_options=WRITES), dict(compiler_options=""), {}),
        (MnistConfig, KNOWN | dict(compiler_options=WRITES), dict(compiler_options=WRITES), {}),
        (MnistConfig, KNOWN | dict(compiler_options=PROGRAM), {}, dict(compiler_options=PROGRAM)),
        (OwnConfig, OWN, {}, dict(dropout=0, channels=5)),
        (OwnConfig, OWN, dict(dropout=0.5), {}),
    ],
)
def test_options_come_from_the_run_and_the_command_line(tmp_path, kind, content, given, expected):
    words = [f"--{name}={value}" for name, value in given.items()]
    found = parse_command_line(kind, "", [*stored(tmp_path, content), *words])
    values = {name: getattr(found, name) for name in given | expected}
    assert values == given | expected and found.run_dir == str(tmp_path)
    assert found.options_from == f"{tmp_path}/config.json" and "options_from" not in dataclasses.asdict(found)


def test_options_that_are_not_the_runs(tmp_path):
    argv = stored(tmp_path, KNOWN)
    assert parse_command_line(MnistConfig, "", argv[:2]).options_from == "", "a new run has those of its preset"
    newer = parse_command_line(OwnConfig, "", argv)
    assert newer.dropout == 0.25 and newer.options_from.endswith("config.json (not in it: dropout 0.25)")


@pytest.mark.parametrize(
    "name, value",
    [
        ("peers_secret", "theirs"),  # a folder that says which file is the secret could name one its author knows
        # such a config.json wrote thousands of files elsewhere
        ("compiler_options", WRITES),
        ("compiler_options", "flagfile=/etc/passwd"),
        ("compiler_options", f"xla_tpu_scoped_vmem_limit_kib=32768 --{WRITES}"),
        ("compiler_options", "xla_tpu_scoped_vmem_limit_kib=/etc/passwd"),
        ("compiler_options", "xla_tpu_enable_async_collective_fusion=/etc/passwd"),
        ("compiler_options", "xla_tpu_enable_async_collective_fusion_dump_to=../elsewhere"),
    ],
)
def test_a_folder_does_not_say_where_to_read_and_write(tmp_path, name, value):
    argv = stored(tmp_path, dataclasses.asdict(DistributedMnistConfig()) | {name: value})
    with pytest.raises(InputError, match=rf"config\.json is of a run with (a )?{name}.*; expected --{name} again"):
        parse_command_line(DistributedMnistConfig, "", argv)


def test_help_shows_the_options_of_the_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse_command_line(MnistConfig, "What it does.", [*stored(tmp_path, KNOWN), "--help"])
    said = capsys.readouterr().out.replace("\n", " ")
    assert "Options that are not given are those in" in said and "(default: 7)" in said


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "cannot be read as JSON: "),
        (DEEP, "cannot be read as JSON: it is nested too deep"),
        ("[]", "holds list; expected a JSON object"),
        ("{}", "names no preset; expected the options of this script"),
        (dataclasses.asdict(TransformerConfig()), "has 'attention', 'balance_loss', .*expected the options of this"),
        (OWN, "has 'comment', 'dropout'; expected the options of this script"),
        (KNOWN | {"num_layers\n": 3}, r"has 'num_layers\\n'; expected the options of this script \(MnistConfig\)"),
        (KNOWN | {"channels": "5"}, "holds options that cannot work: channels is '5'; expected int"),
        (KNOWN | {"learning_rate": 10**400}, "learning_rate is 10*; expected float"),
        (KNOWN | {"momentum": 1, "seed": -1}, "cannot work: seed is -1; .*; momentum is 1; .* --preset"),
    ],
)
def test_a_file_that_is_not_this_scripts_is_named(tmp_path, capsys, content, said):
    argv = stored(tmp_path, content)
    with pytest.raises(InputError, match=rf"^{tmp_path}/config.json .*--preset") as error:
        parse_command_line(MnistConfig, "", argv)
    error.match(said)
    assert "\n" not in str(error.value)
    assert parse_command_line(MnistConfig, "", [*argv, "--preset=quick_test"]).num_epochs == 40


def test_damaged_files_are_read_or_refused(tmp_path):
    outcomes = {"read": 0, "refused": 0}
    for content in mutated_json(KNOWN, 300):
        stored(tmp_path, content)
        try:
            resolve_stored(MnistConfig, str(tmp_path), "must")
            outcomes["read"] += 1
        except InputError as error:
            assert str(error).startswith(f"{tmp_path}/config.json"), error
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 40, outcomes
    make_irregular(tmp_path / "config.json", "FIFO")
    with no_hang(), pytest.raises(InputError, match=r"config\.json"):
        resolve_stored(MnistConfig, str(tmp_path), "must")


def test_of_several_hosts_all_or_none_read_their_options_from_the_run(tmp_path):
    """Where they share no folder only the first one has config.json, and the others would train by the preset."""

    class Hosts(Peers):
        count = 2

        def gather(self, value):
            return [value, False]

    config = parse_command_line(MnistConfig, "", stored(tmp_path, KNOWN))
    said = r"process 0 reads its options .* process 1 finds none"
    with Run(config, hosts=Hosts()) as run, pytest.raises(InputError, match=said):
        run.open(Data(10, 0), Data(10, 0))


# --------------------------------------------------------------------------------------------- another number of steps
def test_a_finished_run_is_made_longer_and_ends_as_if_it_had_been_so_from_its_start(constant, tmp_path, capsys):
    from_start = train(tmp_path / "whole", *TINY, "--num_epochs=3", "--scheduler=constant")
    longer = shutil.copytree(constant, tmp_path / "longer")
    train(longer, "--resume=must", "--num_epochs=3")
    assert "resumed    after step 44 of 66" in capsys.readouterr().out
    assert_identical(end_state(longer), end_state(from_start))
    due, expected = (  # a run logs its last step
        [line for line in numbers(run) if line["step"] != LAST or line["kind"] == "eval"]
        for run in (longer, from_start)
    )
    assert due == expected
    assert summary_in(longer)["test_loss"] == summary_in(from_start)["test_loss"]
    assert json.loads((longer / "config.json").read_text())["num_epochs"] == 3
    said = "the run has done 66 steps and is now to have 44; expected 66 or more; choose a larger --num_epochs"
    assert said in refused(capsys, longer, "--num_epochs=2")


def test_a_run_is_made_shorter(constant, tmp_path, capsys):
    """Lines after its new end, of the process that was killed, are no damage."""
    run_dir = copy_until(20, constant, tmp_path / "run")
    train(run_dir, "--resume=must", "--num_epochs=1")
    output, error = capsys.readouterr()
    assert "resumed    after step 20 of 22" in output and "damaged" not in error
    assert (summary_in(run_dir)["steps"], read_lines(run_dir)[-1]["step"]) == (22, 22)


def test_wsd_can_be_made_longer_before_its_decay(tmp_path, capsys):
    wsd = [*TINY, "--scheduler=wsd", "--final_learning_rate_fraction=0.3"]
    short, whole = (train(tmp_path / str(epochs), *wsd, f"--num_epochs={epochs}") for epochs in (1, 2))
    longer = copy_until(10, short, tmp_path / "longer")
    train(longer, "--resume=must", "--num_epochs=2")
    assert_identical(end_state(longer), end_state(whole))
    assert numbers(longer) == numbers(whole)
    capsys.readouterr()
    error = refused(capsys, short, "--num_epochs=2")
    said = "is now to have 44, but it has done 22, and with scheduler wsd the learning rates from step 20 on would"
    assert said in error and "a checkpoint of step 19 or before could go on" in error


def test_a_checkpoint_that_does_not_tell_its_number_of_steps_keeps_it(constant, tmp_path, capsys):
    """An older version wrote it. One with an impossible number is refused."""
    for name, value, said in [
        ("older", None, "num_epochs is 3, was 2; repeat"),
        ("huge", 10**30, "is of step 20 of 10{30}; expected a number of steps"),
        ("text", "44", "is of step 20 of '44'; expected"),
        ("less", 19, "is of step 20 of 19; expected"),
    ]:
        saved = CheckpointReader(constant / "checkpoints").load("must").values
        values = {key: other for key, other in saved.items() if key != "num_steps"}
        values |= {} if value is None else {"num_steps": value}
        run_dir = shutil.copytree(constant, tmp_path / name, ignore=shutil.ignore_patterns("step_*"))
        run_id = json.loads((run_dir / "config.json").read_text())["run_id"]
        Checkpoints(run_dir / "checkpoints", 9, run_id=run_id).save(20, {}, values)
        with pytest.raises(InputError, match=said):
            argv = ["--run_dir", str(run_dir), "--resume=must", "--num_epochs=3"]
            open_run(parse_command_line(MnistConfig, "", argv))


class Data:
    description = ""

    def __init__(self, num_steps, crc32):
        self.num_steps, self.fingerprint = num_steps, lambda: crc32


def open_run(config: MnistConfig, change=lambda crc32: crc32) -> None:
    with Run(config) as run:
        crc32 = json.loads(Path(config.run_dir, "config.json").read_text())["data_crc32"]
        data = Data(22 * config.num_epochs, change(crc32))
        run.open(data, data)


def test_a_run_goes_on_where_its_data_is_known_better_than_before(constant):
    """Above the CRC-32 of older runs stand others: of the tokens of shards, of the data to test on."""
    config = parse_command_line(MnistConfig, "", ["--run_dir", str(constant), "--resume=must"])
    known = json.loads((constant / "config.json").read_text())["data_crc32"]
    assert known >> 32, "of the test set"
    open_run(config, lambda crc32: crc32 | 5 << 64)
    for change in (lambda it: it + 1 | 5 << 64, lambda it: it + 1, lambda it: it ^ 1 << 32, lambda it: it % 2**32, str):
        with pytest.raises(InputError, match=r"checksum of what is trained and tested on, data_crc32, is .*, was "):
            open_run(config, change)


def test_a_fingerprint_of_ones_own_may_be_any_value(constant, tmp_path):
    """hash() is negative half of the time; a string is one, too."""
    saved = CheckpointReader(constant / "checkpoints").load("must").values
    for number, own in enumerate((-5, 2**128 + 3, "a name", 0)):
        run_dir = shutil.copytree(constant, tmp_path / str(number), ignore=shutil.ignore_patterns("step_*"))
        run_id = json.loads((run_dir / "config.json").read_text())["run_id"]
        values = saved | {"config": saved["config"] | {"data_crc32": own}}
        Checkpoints(run_dir / "checkpoints", 9, run_id=run_id).save(20, {}, values)
        config = parse_command_line(MnistConfig, "", ["--run_dir", str(run_dir), "--resume=must"])
        open_run(config, lambda _, own=own: own)
        with pytest.raises(InputError, match="data_crc32, is 7, was"):
            open_run(config, lambda _: 7)


# ------------------------------------------------------------------------------------------------------ a finished run
def test_a_finished_run_that_is_resumed_changes_nothing_and_says_so(constant, capsys):
    before = files_of(constant)
    assert in_process("--run_dir", constant, "--resume=auto", "--tensorboard") == 0
    assert capsys.readouterr().out.endswith("\nfinished   step 44 of 44 was reached before; nothing to do\n")
    assert files_of(constant) == before


@pytest.mark.parametrize("left", [None, b'{"steps": 22}'])
def test_a_summary_that_a_kill_left_out_is_written(constant, tmp_path, capsys, left):
    run_dir = copy_until(LAST, constant, tmp_path / "run")
    if left:
        (run_dir / "summary.json").write_bytes(left)
    train(run_dir, "--resume=must")
    assert "nothing to do" not in capsys.readouterr().out
    found, expected = summary_in(run_dir), summary_in(constant)
    for name in expected.keys() - {"seconds", "goodput", "train_graphs", "eval_graphs", *BESIDE}:
        assert found[name] == expected[name], "but for what differs by process"
    assert numbers(run_dir) == numbers(constant)


# ------------------------------------------------------------------------------------------------------------ the best
ACCURACIES = {22: 0.5, 44: 0.9, 66: 0.9, 88: 0.7}
BEST = [*TINY, "--num_epochs=4", "--keep_best", "--keep_checkpoints=1", "--save_every=20"]


def given_accuracy(model, batches, run) -> dict[str, float]:
    accuracy = ACCURACIES.get(getattr(run, "_step", 0) + 1, 0.5)  # tried before step 1 too
    return dict(accuracy=accuracy, test_loss=1 - accuracy)


@pytest.fixture(scope="module")
def evaluated():
    """Evaluations give these accuracies instead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simple_mnist_tpu, "evaluate", given_accuracy)
        yield


@pytest.fixture(scope="module")
def all_kept(evaluated, tmp_path_factory):
    """A run that keeps its best and every other checkpoint."""
    return train(tmp_path_factory.mktemp("all") / "run", *BEST, "--keep_checkpoints=99")


def checkpoints_of(run_dir: Path) -> list[int]:
    return Checkpoints(run_dir / "checkpoints", 1).steps()


def best_of(run_dir: Path) -> int:
    return CheckpointReader(run_dir / "checkpoints").load_best().step


@pytest.mark.parametrize("killed_after", [40, 60])
def test_the_best_checkpoint_stays_beside_the_newest(all_kept, tmp_path, capsys, killed_after):
    """Resumed before and after the best one."""
    run_dir = copy_until(killed_after, all_kept, tmp_path / "run")
    train(run_dir, "--resume=must", "--keep_checkpoints=1")
    assert checkpoints_of(run_dir) == [44, 88] and best_of(run_dir) == 44, "of two equal ones the first"
    assert summary_in(run_dir)["best_step"] == 44
    assert "best       the evaluation of step 44, whose checkpoint is kept" in capsys.readouterr().out
    saves = [line["step"] for line in read_lines(run_dir) if line["kind"] == "checkpoint"]
    assert saves == [20, 22, 40, 44, 60, 80, 88], "at once where an evaluation is the best so far"
    assert CheckpointReader(run_dir / "checkpoints").load("must").step == 88, "a run goes on from the newest"
    assert_identical(end_state(run_dir), end_state(all_kept))


def test_keeping_the_best_changes_no_number(all_kept, tmp_path):
    whole = train(tmp_path / "whole", *BEST, "--no_keep_best")
    assert "best_step" not in summary_in(whole) and checkpoints_of(whole) == [88]
    assert_identical(end_state(whole), end_state(all_kept))


def test_a_best_checkpoint_that_was_removed_is_forgotten_and_another_one_found(all_kept, tmp_path):
    run_dir = copy_until(60, all_kept, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints" / "step_00000044")
    with pytest.raises(CheckpointError, match=r"step_00000044, the best checkpoint, is not there; use the newest"):
        best_of(run_dir)
    train(run_dir, "--resume=must", "--keep_checkpoints=1")
    assert best_of(run_dir) == 66 and summary_in(run_dir)["best_step"] == 66


def test_without_anything_to_compare_by_it_is_refused(tmp_path, capsys, monkeypatch):
    log_evaluation = Run.log_evaluation
    monkeypatch.setattr(Run, "log_evaluation", lambda run, step, **_: log_evaluation(run, step, score=1.0))
    assert in_process("--run_dir", tmp_path / "run", *TINY, "--num_epochs=1", "--keep_best") == 2
    assert "keep_best needs an evaluation with accuracy or validation_loss; found score" in capsys.readouterr().err


@pytest.mark.parametrize(
    "best", [7, [], {"step": 10}, {"step": -1, "field": "accuracy", "value": 0.5}, {"step": 10**30}]
)
def test_a_checkpoint_that_names_no_evaluation_as_best_is_refused(tmp_path, best):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(10, {}, {"best": best})
    with pytest.raises(CheckpointError, match="as the best evaluation; expected step, field and value of one"):
        reader_of(checkpoints).load_best()


def test_a_run_that_keeps_no_best_has_none(constant):
    with pytest.raises(CheckpointError, match="step_00000044 names no best checkpoint: the run has none, or no"):
        best_of(constant)
