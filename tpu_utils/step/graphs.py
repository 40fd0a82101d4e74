"""@one_graph: a function is one compiled graph; a second one is an error that says what changed. Needs no Run."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_utils.base.process import Goodput
from tpu_utils.device import IS_XLA, compile_step, graphs_compiled, operations_on_host, transfers_from_device
from tpu_utils.step.optim import keep_rate_ratios
from tpu_utils.step.seen import Seen, held_by_modules, numbers_in, shape_of, state_sizes


class FirstStep(Exception):
    """Raised in place of the first step of a run with --compile_for; tpu_compiler/of_script.py compiles that step."""

    def __init__(self, step: Callable, arguments: tuple, keywords: dict[str, Any], facts: dict[str, Any]):
        """facts: of the run, as tpu_compiler's compile_for() takes them."""
        super().__init__("the first step, which python -m tpu_compiler.of_script compiles")
        self.step, self.arguments, self.keywords, self.facts = step, arguments, keywords, facts


class OneGraph:
    """A function decorated by one_graph(): a step of the Run that it was given to, or watched by itself."""

    def __init__(self, function: Callable, each_shape: bool = False, couples_examples: bool = False):
        functools.update_wrapper(self, function)
        self.each_shape, self.couples_examples = each_shape, couples_examples
        self.watch, self.signature, self.is_tried = None, inspect.signature(function), False
        self.compiled = compile_step(function, self._begin, keep_rate_ratios)
        """The step without the watch, for a call outside of a run. is_tried: it has run in plain PyTorch."""

    def _begin(self) -> None:
        self.graphs_before, self.on_host = graphs_compiled(), operations_on_host()
        self.reads_before = transfers_from_device()

    def __call__(self, *arguments, **keywords):
        watch = self.watch or StepWatch([self])
        if watch.is_plain:
            return self.__wrapped__(*arguments, **keywords)
        return watch.call(self, arguments, keywords)

    def named(self, arguments: tuple, keywords: dict[str, Any]) -> dict[str, Any]:
        """Arguments by the names of the parameters; beside them globals and variables around that its code names."""
        around = {}
        with contextlib.suppress(ValueError):  # one of them has no value yet
            found = inspect.getclosurevars(inspect.unwrap(self.__wrapped__))
            around = found.globals | found.nonlocals
        bound = self.signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        return around | bound.arguments


def one_graph(function: Callable | None = None, **options: bool) -> OneGraph:
    """Decorator: torch_xla.compile(full_graph=True), and a second graph raises RecompileError, which says what changed.

    each_shape: one graph for each set of shapes that its tensors come in. couples_examples: the loss is no mean over
    examples, as in contrastive learning, so check_model() does not expect it.
    """
    return OneGraph(function) if function else functools.partial(OneGraph, **options)


class StepWatch:
    """Raises RecompileError for a second graph of a step; of a run's steps, for one that none of them made too.

    steps: the first is the training step. goodput: of the run; None: a function by itself.
    on_step(compiled): called after each training step.
    """

    def __init__(self, steps: Sequence[OneGraph], goodput: Goodput | None = None):
        self.steps, self._goodput, self._in_run, self.is_plain = steps, goodput or Goodput(), goodput is not None, False
        """is_plain: steps are called as they are written, by PyTorch alone."""
        for step in steps:
            step.watch = self
        self.begin()

    def begin(
        self,
        first_step: int = 0,
        on_step: Callable[[bool], None] = lambda compiled: None,
        before: Callable[[OneGraph, tuple, dict, dict], None] = lambda *_: None,
        after: Callable[[OneGraph, dict, Any, bool], None] = lambda *_: None,
    ) -> None:
        """Attribute every graph compiled from now on to a step. first_step: training steps done before. before: gets
        the training step, its arguments, and these by name, before each call. after: any step, its arguments by name,
        its result, and whether it is the training step."""
        self._first_step, self._on_step, self.total = first_step, on_step, graphs_compiled()
        self._before, self._after, self._outside = before, after, None
        self._seen: dict[tuple, Seen] = {}
        self._facts: dict[str, Any] | None = None

    def ask(self, **facts: Any) -> None:
        """The next call of a step does not run it: it raises FirstStep, with these facts."""
        self._facts = facts

    def end(self) -> None:
        for step in self.steps:
            step.watch = None

    def graphs(self, training: bool) -> int:
        """Compiled for the training step, or for all others. Raises RecompileError for one that no step made."""
        if self._outside:
            self._outside.check(is_last=True)
        first = self.steps[:1]
        return sum(seen.graphs for seen in self._seen.values() if (seen.step in first) == training)

    def call(self, step: OneGraph, arguments: tuple, keywords: dict[str, Any]) -> Any:
        """step(*arguments, **keywords). Raises RecompileError."""
        if self._facts is not None:
            raise FirstStep(step.compiled, arguments, keywords, self._facts)
        if self._outside:
            self._outside.check()
        named = step.named(arguments, keywords)
        shapes = {name: shape_of(value) for name, value in named.items() if isinstance(value, torch.Tensor)}
        key = (step, *shapes.items()) if step.each_shape else (step,)
        is_first, seen = key not in self._seen, self._seen.setdefault(key, Seen(step))
        seen.calls += 1
        if is_first:
            seen.state = state_sizes(named)
        if seen.calls <= 2:
            seen.held.append(held_by_modules(named))
        if is_first and not self._in_run and not seen.held[0]:
            from tpu_utils.step.second_graph import check_on_device  # only for a function without a model there

            check_on_device(step.__name__, named)
        is_training = self._in_run and step is self.steps[0]
        if is_training:
            before = graphs_compiled()
            self._before(step, arguments, keywords, named)
            self.total += graphs_compiled() - before  # those that a trial compiled
        number = self._first_step + sum(other.calls for other in self._seen.values() if other.step is step)
        call = f"step {number}" if is_training else f"call {number - self._first_step}"
        around = self._outside.left_out() if self._outside else contextlib.nullcontext()
        with self._goodput.phase("compile" if is_first else self._goodput.current), around:
            try:
                result = step.compiled(*arguments, **keywords)
            except RuntimeError as error:
                from tpu_utils.step.second_graph import raise_if_read  # only for an error

                raise_if_read(error, step, call)
                raise
        total, numbers = graphs_compiled(), numbers_in(named)
        new, outside, self.total = total - step.graphs_before, step.graphs_before - self.total, total
        seen.graphs += new
        if seen.graphs > 1:
            from tpu_utils.step.second_graph import raise_why  # only for a step that has one

            raise_why(call, seen, named, shapes, numbers)
        if IS_XLA and not self._in_run and transfers_from_device() > step.reads_before:
            from tpu_utils.step.second_graph import raise_of_read  # only for a function that reads

            raise_of_read(step.__name__, call)
        if outside and self._in_run and IS_XLA and not self._outside:
            from tpu_utils.step.second_graph import GraphsOutside  # only for a run that has one

            self._outside = GraphsOutside(call, step.__name__, seen)
        changed = {name for name, value in numbers.items() if seen.numbers.get(name, value) != value}
        seen.shapes, seen.numbers, seen.changed = shapes, numbers, changed
        if is_training:
            self._on_step(bool(new))
        self._after(step, named, result, is_training)
        return result
