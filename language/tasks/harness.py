"""Tasks of EleutherAI's lm_eval, by name or by a YAML file, asked of local files alone. Imports no torch.

Python runs from lm_eval's own tasks alone. A YAML file of the user is data: functions in it are refused, and templates
are rendered in a sandbox. Questions come from the path beside the name, whatever data set the task names.
"""

import contextlib
import functools
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")

import datasets
import evaluate
import numpy as np
import yaml
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import evaluator, utils
from lm_eval.api import metrics
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask, TaskConfig
from lm_eval.filters import build_filter_ensemble
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import TaskIndex

from language.data.chat import choose_format, parts_of, stop_tokens
from language.data.tokenizer import Tokenizer, check_texts
from language.tasks.core_tasks import NoAliases
from language.tasks.questions import Row, Task, encode_pair, fit, windows
from language.tasks.task_files import file_of, read_records
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import inside, read_regular
from tpu_utils.options.fields import nearest

SEED = 1234  # lm_eval's --seed for the examples before a question
ALIASES = {"lambada": "lambada_openai"}
COLUMNS = {"cais/mmlu": "subject"}  # data sets whose parts may stand in one file, and the column that tells them apart
NAMES = {"acc": "accuracy", "acc_norm": "accuracy_norm"}
LARGEST_YAML = 1 << 16  # bytes
MOST_BRACKETS = 1000  # in a text: HellaSwag's own code takes time with the square of those that are not closed
REFUSED = ("class", "custom_dataset", "group", "include", "use_prompt")  # keys by which a YAML file names code or files

sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
sandbox.filters |= utils.env.filters
utils.env = sandbox  # lm_eval's own lets a template reach Python's builtins
metrics.bootstrap_stderr = lambda *_, **__: "N/A"  # would fork a process for each core, of one that holds a TPU
logging.getLogger("lm_eval").setLevel(logging.ERROR)
datasets.disable_progress_bars()


def refuse_script(name: str, *_, **__) -> None:
    """In place of evaluate.load(), which would run a script of the current folder or of the hub."""
    raise InputError(f"metric {name!r:.60} is a script, and no script is run; choose another, or another task")


evaluate.load = refuse_script


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """What goes wrong inside becomes one InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever the code and the templates of a task raise for a file that is another's
        said = " ".join(str(error).split())
        raise InputError(
            f"{where}: {type(error).__name__}: {said:.300}; expected the fields that this task of lm_eval reads"
        ) from error


class Conversations:
    """lm_eval's chat template: a question, and examples before it, as the conversation that a model was trained on.
    lm_eval passes texts on; `parts` has the tokens that each stands for."""

    def __init__(self, tokenizer: Tokenizer, format: str):
        self.tokenizer, self.format = tokenizer, choose_format(format, tokenizer)
        self.parts: dict[str, list[int | str]] = {}

    def __call__(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise InputError("its answers begin with a text of the task, which no conversation has; leave out --chat")
        parts = [part for part, _ in parts_of(messages, self.format, self.tokenizer, asks=True)]
        text = "".join(part if isinstance(part, str) else self.tokenizer.decode([part]) for part in parts)
        self.parts[text] = parts
        return text

    def encode(self, context: str, continuation: str = "") -> tuple[list[int], int]:
        """As encode_pair()."""
        parts = self.parts[context]
        last = parts[-1] if isinstance(parts[-1], str) else ""
        front = []
        for part in parts[:-1] if last else parts:
            front += self.tokenizer.encode(part) if isinstance(part, str) else [part]
        whole = front + self.tokenizer.encode(last + continuation)
        start = front + self.tokenizer.encode(last.rstrip())
        return [*start, *whole[len(start) :]], len(whole) - len(start)


class LocalTask(ConfigurableTask):
    """A task whose questions stand in `path`. shots: examples before each of them; None: as many as the task says."""

    path: Path
    shots: int | None
    chat: Conversations | None

    def __init__(self, config: dict):
        config = {key: value for key, value in config.items() if key != "class"}  # this one: lm_eval made it by name
        if self.shots is not None and config.get("num_fewshot") != 0:  # 0: examples make no sense there
            config["num_fewshot"] = self.shots
        if config.get("repeats", 1) != 1:
            raise InputError(f"{config.get('task')} asks each question {config['repeats']} times; expected once")
        for one in config.get("metric_list") or () if config.get("process_results") is None else ():
            if not callable(one["metric"]) and (one.get("hf_evaluate") or one["metric"] not in metric_registry):
                refuse_script(one["metric"])
        self._instances = None
        super().__init__(config=config)
        self.set_fewshot_seed(SEED)

    def download(self, *_) -> None:
        """The splits that are asked for; examples only where there are some."""
        config, examples = self.config, self.fewshot_cfg.split or self.config.training_split
        splits = {config.test_split or config.validation_split}
        if config.num_fewshot and not self.fewshot_cfg.samples:
            splits.add(examples or config.validation_split)
        if None in splits:
            raise InputError(f"num_fewshot is {config.num_fewshot}, but {config.task} has no training set; use 0")
        if self.path.is_file() and len(splits) > 1:
            raise InputError(
                f"{config.task} is one file, {self.path}; num_fewshot {config.num_fewshot} needs a folder with "
                f"{examples}.jsonl too, or .parquet"
            )
        self.dataset = {split: self.read(split) for split in splits}

    def read(self, split: str) -> datasets.Dataset:
        path, part = self.path, self.DATASET_NAME
        if path.is_dir():
            own = inside(path, part) if part else path
            path = file_of(own if own.is_dir() else path, split)
        records = []
        for where, record in read_records(path, f"questions of {self.config.task}"):
            if (count := max((str(value).count("[") for value in record.values()), default=0)) > MOST_BRACKETS:
                raise InputError(f"{where}: a value has {count:,} brackets [; expected at most {MOST_BRACKETS:,}")
            records.append(record)
        if column := COLUMNS.get(self.DATASET_PATH):
            records = [record for record in records if record.get(column) == part]
            if not records:
                raise InputError(f"{path} has no line whose {column} is {part!r}; expected one or more")
        return datasets.Dataset.from_list(records)

    @functools.cached_property
    def eval_docs(self) -> datasets.Dataset:
        return super().eval_docs

    def fewshot_docs(self):
        return super().fewshot_docs() if self.config.num_fewshot else None

    def build_all_requests(self, *, limit: int | None = None, **_) -> None:
        """Once: each evaluation of a run has the same requests, and new answers."""
        if self._instances is None:
            self._instances = []
            for number, doc in self.doc_iterator(limit=limit):
                with naming(f"{self.path}, question {number + 1} of {self.task_name}"):
                    self._instances += self.requests_of(number, doc)
        for instance in self._instances:
            instance.resps, instance.filtered_resps = [], {}

    def requests_of(self, number: int, doc: dict) -> list[Instance]:
        chat = dict(apply_chat_template=True, chat_template=self.chat) if self.chat else {}
        asked = chat | dict(gen_prefix=self.doc_to_prefix(doc), fewshot_as_multiturn=bool(chat))
        context = self.fewshot_context(doc, self.config.num_fewshot or 0, **asked)
        made = self.construct_requests(doc=doc, ctx=context, metadata=(self.task_name, number, 1), **chat)
        if self.OUTPUT_TYPE == "multiple_choice" and self.config.process_results is None:
            choices = self.doc_to_choice(doc)
            answer = self.doc_to_text(doc) if self.multiple_input else self.doc_to_target(doc)
            for one in answer if isinstance(answer, list) else [answer]:  # lm_eval would count it as answered wrong
                if one not in (range(len(choices)) if isinstance(one, int) else choices):
                    raise ValueError(f"its answer is {one!r:.60}, which is none of its {len(choices)} choices")
        return made if isinstance(made, list) else [made]


class TokenTask(ConfigurableTask):
    """A Task of ours, whose questions are tokens, as one of lm_eval's."""

    OUTPUT_TYPE = "loglikelihood"

    def __init__(self, task: Task):
        self._config = TaskConfig(task=task.name, output_type=self.OUTPUT_TYPE, num_fewshot=0)
        self._filters = [build_filter_ensemble("none", [["take_first", None]])]
        self._aggregation_list = dict(acc=metrics.mean)
        if task.name.startswith("core/"):
            guessing = task.guessing
            self._aggregation_list["centered"] = lambda right: (metrics.mean(right) - guessing) / (1 - guessing)
        self._higher_is_better = dict.fromkeys(self._aggregation_list, True)
        self.path, self.how = Path(task.name), task.how
        self.questions = task.questions

    @property
    def eval_docs(self) -> list[dict]:
        return [dict(answer=answer) for _, answer in self.questions]

    def doc_to_target(self, doc: dict) -> int:
        return doc["answer"]

    def build_all_requests(self, **_) -> None:
        self._instances = [
            Instance("loglikelihood", dict(answer=answer), ("", row), idx, (self.task_name, number, 1))
            for number, (rows, answer) in enumerate(self.questions)
            for idx, row in enumerate(rows)
        ]

    def process_results(self, doc: dict, results: list[tuple[float, bool]]) -> dict[str, float]:
        """results: of each row the mean log-likelihood of a target, nan for none, and whether all are likeliest."""
        means = [likelihood for likelihood, _ in results]
        if self.how == "greedy":
            is_right = results[0][1] and not math.isnan(means[0])
        else:  # one that is nan is chosen if it comes first, as nanochat does
            is_right = max(range(len(means)), key=means.__getitem__) == doc["answer"]
        return dict.fromkeys(self._aggregation_list, float(is_right))


# ------------------------------------------------------------------------------------------------------- by their names


class Loader(NoAliases, yaml.SafeLoader):
    """Makes what YAML itself has a form for."""


def read_yaml(path: Path) -> dict:
    """The task that a file describes. Raises InputError for one that names code or other files."""
    content = read_regular(path, "a task of lm_eval in YAML", LARGEST_YAML)
    try:
        found = yaml.load(content.decode(), Loader)
        if not isinstance(found, dict) or not isinstance(found.get("task"), str):
            raise ValueError("it has no text with the name `task`")
        if wrong := [key for key in REFUSED if key in found]:
            raise ValueError(f"it has the key {wrong[0]}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise InputError(
            f"{path}: {said:.200}; expected one task of lm_eval in templates; no code that a YAML file names is run"
        ) from error
    return found


@functools.cache
def shipped() -> dict[str, Path]:
    """{name of a task or a group of lm_eval: its file}. lm_eval's own index parses 14,000 files, in half a minute."""
    named = re.compile(rb"""^"?(?:task|group)"?:\s*["']?([^\s"']+)["']?\s*$""", re.MULTILINE)
    root = Path(utils.__file__).parent / "tasks"
    return {found[1].decode(): path for path in root.rglob("*.yaml") for found in named.finditer(path.read_bytes())}


@functools.cache
def index_of(folder: Path) -> dict:
    """lm_eval's entries of a folder, of which it parses each file: 60 for a subject of MMLU."""
    return TaskIndex.build([folder])


def load(name: str, path: Path, shots: int | None, chat: Conversations | None):
    """A task or a group of lm_eval, by a name that it ships or a YAML file. Raises InputError."""
    local = type("TaskOfPath", (LocalTask,), dict(path=path, shots=shots, chat=chat))
    with naming(f"{name}={path}"):
        if name.endswith(".yaml"):
            return local(config=read_yaml(Path(name)))
        known = ALIASES.get(name, name)
        if known not in shipped():
            raise InputError(f"tasks has {name!r:.60}; expected a task of lm_eval{nearest(name, shipped())}")
        index = index_of(shipped()[known].parent)
        return TaskFactory().build(index[known], overrides={"class": local}, registry=index)


def load_all(named: dict[str, Path], shots: int | None, limit: int, chat: Conversations | None = None) -> dict:
    """{"tasks": {name: task}, "groups": ...}, with their requests. Raises InputError for what cannot be asked."""
    found = TaskManager(include_defaults=False).load([load(name, path, shots, chat) for name, path in named.items()])
    for task in found["tasks"].values():
        task.build_all_requests(limit=limit or None)
    return found


# ----------------------------------------------------------------------------------------------------- asked of a model


class Harness(LM):
    """lm_eval's view of a model: requests become rows of tokens and texts to continue, all at once, and lm_eval reads
    its answers from what the model made of them.

    tasks, chat: as load_all() has them. rows: of all requests for likelihoods. prompts: (tokens, options of
    generation). stops: tokens that end a text beside the tokenizer's. In a run: batches, those of this host, (rows, T +
    1) int32 as in training; and which result of all batches is a row's.
    """

    batches: list[np.ndarray]
    result_of_row: np.ndarray

    def __init__(self, tasks: dict, tokenizer: Tokenizer | None, T: int, limit: int = 0, chat=None):
        super().__init__()
        self.tasks, self.limit = tasks, limit or None
        self.rows: list[Row] = []
        self.prompts: list[tuple[list[int], dict]] = []
        self.stops = stop_tokens(chat.format, tokenizer) if chat else set()
        self.places: dict[tuple, slice] = {}  # of a request: among rows, or among prompts
        for task in tasks["tasks"].values():
            task.build_all_requests(limit=self.limit)
            check_texts(
                tokenizer, [one.args[0] for one in task.instances if one.idx == 0 and one.args[0]], str(task.path)
            )
            for request in task.instances:
                held, spoken = self.rows, chat is not None and request.args[0] in chat.parts
                if request.request_type == "generate_until":
                    held, (text, options) = self.prompts, request.args
                    begin = [] if tokenizer.begin is None else [tokenizer.begin]
                    prompt = chat.encode(text)[0] if spoken else begin + tokenizer.encode(text) or [tokenizer.prefix]
                    added = [(prompt, options)]
                elif request.request_type == "loglikelihood_rolling":
                    added = windows([tokenizer.prefix, *tokenizer.encode(request.args[0])], T)
                elif isinstance(task, TokenTask):
                    added = [request.args[1]]
                else:
                    pair = chat.encode(*request.args) if spoken else encode_pair(tokenizer, *request.args)
                    where = f"{task.path}, question {request.doc_id + 1} of {task.task_name}"
                    added = [fit(*pair, T + 1, where)]
                self.places[place_of(request)] = slice(len(held), len(held) + len(added))
                held += added
        self.results(np.ones((len(self.rows), 3)), [""] * len(self.prompts))  # what lm_eval refuses it refuses now

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        said = []
        for request in requests:
            loss, count, likeliest = self.found[self.places[place_of(request)], :3][0]
            with np.errstate(invalid="ignore"):
                loss = loss / count if isinstance(request.args[1], Row) else loss
            said.append((-float(loss), bool(likeliest == count)))
        return said

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return [-float(self.found[self.places[place_of(request)], 0].sum()) for request in requests]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [self.texts[self.places[place_of(request)]][0] for request in requests]

    def results(self, found: np.ndarray, texts: Sequence[str] = (), with_samples: bool = False) -> dict[str, Any]:
        """What lm_eval's evaluate() gives, and fields_of() it. found: of each of rows the summed loss, the number of
        targets, and how many were likeliest. texts: behind prompts. with_samples: each answer, lm_eval's table."""
        self.found, self.texts = found, texts
        with naming("lm_eval"):
            said = evaluator.evaluate(self, self.tasks, self.limit, log_samples=with_samples)
            return said | dict(fields=fields_of(said)) | (dict(table=utils.make_table(said)) if with_samples else {})

    def fields(self, result: np.ndarray) -> dict[str, Any]:
        """Fields of an eval line of a run. result: what the evaluation step gives for all batches, (rows, 3 or more). A
        model whose losses are no numbers has no answers."""
        found = result[self.result_of_row]
        return self.results(found)["fields"] if np.isfinite(found[:, 0]).all() else {}


def place_of(request: Instance) -> tuple:
    return request.task_name, request.doc_id, request.idx


def fields_of(results: dict[str, Any]) -> dict[str, Any]:
    """{TASK_METRIC: value} of each task and group outside of a group; core, the mean of core_centered of its tasks."""
    members = {name for some in results["group_subtasks"].values() for name in some}
    fields: dict[str, Any] = {}
    for name, result in results["results"].items():
        for key, value in result.items() if name not in members else ():
            metric, is_metric, filter_name = key.partition(",")
            if name.startswith("core/"):
                fields.setdefault("core_centered", []).extend([value] if metric == "centered" else [])
            elif is_metric and not metric.endswith("_stderr") and not isinstance(value, str):
                ending = f"_{filter_name}" * (filter_name != "none")
                fields[f"{name}_{NAMES.get(metric, metric)}{ending}"] = float(value)
    return fields | (dict(core=metrics.mean(fields["core_centered"])) if "core_centered" in fields else {})
