"""A loop that the device runs: one call of it is one operation of the graph, whatever its body holds.

torch_xla's own while_loop traces its body in every call, and makes, for the trace, a tensor in the device's memory for
each of the carry's. Here the body is traced in the first call, on placeholders that own no memory; what is kept is the
program of the loop, and where its inputs come from. This is private to torch_xla 2.9, as its scan() is built.
"""

from collections.abc import Callable, Sequence

import torch
import torch_xla
import torch_xla.core.xla_builder as xb

from language.xla.loops import lower, tracing


class Body(torch.nn.Module):
    """A function of tensors that also reads those of a model, as a module that has them."""

    def __init__(self, function: Callable, model: torch.nn.Module | None):
        super().__init__()
        self.function, self.model = function, model

    def forward(self, *carry: torch.Tensor):
        return self.function(*carry)


class DeviceLoop:
    """Calls body(*carry) on the device until the carry's first tensor, an int32 (), has reached `most`.

    The first tensor counts: the body adds 1, or sets it to `most` to end early. body takes tensors and returns as many
    of the same shapes and dtypes. Other tensors that it reads are those of model and of held(): they are inputs of the
    loop, read anew in each call, so their values may change, and not their shapes. A constant is what it was in the
    first call.
    """

    def __init__(
        self,
        body: Callable,
        most: int,
        held: Callable[[], Sequence[torch.Tensor]],
        model: torch.nn.Module | None = None,
    ):
        self.body, self.most, self.held = Body(body, model), most, held
        self.program = None

    def __call__(self, *carry: torch.Tensor) -> list[torch.Tensor]:
        held = [*self.body.parameters(), *self.body.buffers(), *self.held()]
        if self.program is None:
            with tracing():
                self.trace(carry, held)
        inputs = [*self.constants, *(held[place] for place in reversed(self.places)), *reversed(carry)]
        return torch_xla._XLAC._xla_user_computation("xla::loop", inputs, self.program)[: len(carry)]

    def trace(self, carry: Sequence[torch.Tensor], held: list[torch.Tensor]) -> None:
        """Sets program; places: of the held tensors that the body reads; constants: what else it reads.

        Weights are placeholders too. On a mesh torch_xla no longer counts what lower() has read as its tensor's own: a
        training step could not overwrite it, and would be another program.
        """
        begins = [xb.create_placeholder_tensor(tensor.shape, tensor.dtype) for tensor in carry]
        named = dict(self.body.named_parameters()) | dict(self.body.named_buffers())
        weights = {name: xb.create_placeholder_tensor(tensor.shape, tensor.dtype) for name, tensor in named.items()}
        with torch.no_grad():
            ends = torch.func.functional_call(self.body, weights, tuple(begins))
        held = [*weights.values(), *held[len(weights) :]]
        assert [(t.shape, t.dtype) for t in ends] == [(t.shape, t.dtype) for t in begins], "what the body takes"
        body, numbers, constants = lower(list(ends), [*begins, *held])
        carried, of_held = numbers[: len(carry)], numbers[len(carry) :]
        self.places = [place for place, number in enumerate(of_held) if number != -1]
        self.constants = list(constants.values())
        order = [*carried, *(of_held[place] for place in self.places), *reversed(constants)]
        place_of = {number: place for place, number in enumerate(order) if number != -1}

        builder = xb.create_builder("loop")
        # Backwards: a program's inputs are numbered from an operation's last operand to its first. Then inputs that the
        # caller overwrites with what the loop gives stand in the order of the outputs, and XLA, which pairs donated
        # inputs with outputs of their size one after the other, pairs each with itself: nothing is copied.
        inputs = [*carry, *(held[place] for place in self.places), *reversed(self.constants)]
        shapes = [xb.tensor_shape(tensor) for tensor in inputs]
        parameters = tuple(xb.mkparam(builder, len(shapes) - 1 - place, shape) for place, shape in enumerate(shapes))

        def go_on(count, *_):
            return count < xb.Op.scalar(count.builder(), self.most, dtype=xb.Type.S32)

        def once(*values):
            made = xb.Op.call(body, [values[place_of[number]] for number in range(len(place_of))])
            return (*(made.get_tuple_element(i) for i in range(len(carry))), *values[len(carry) :])

        self.program = xb.Op.mkwhile(parameters, go_on, once).build("loop")
