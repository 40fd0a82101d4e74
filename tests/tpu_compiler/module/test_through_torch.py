"""A module's step as ATen operations: what is refused, and that the gradients which torchax lacks are torch's."""

import re

import jax
import numpy as np
import pytest
import torch
from jaxlib._jax import HloModule
from test_aot_modules import tiny_llama

import aot_tpu
from tpu_compiler.module import kv_cache as module_cache
from tpu_compiler.module import programs as modules
from tpu_compiler.module import through_torch as module_through_torch
from tpu_compiler.module.axes import mesh_sizes
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import parse_topology
from tpu_utils.options.train_config import TrainConfig
from tpu_utils.step.optim import make_optimizer, step_optimizer

LINEAR = ["torch.nn:Linear", "--arguments", "in_features=4,out_features=4", "--inputs", "float32[8,4]"]


def run_lowered(graph, inputs, state) -> list:
    """What the recorded step gives, run by jax on the CPU. state: a tensor for each of its inputs."""
    arrays = [tensor.detach().numpy().copy() for tensor in state]
    assert [array.shape for array in arrays] == [tuple(tensor.shape) for tensor in inputs]
    return jax.jit(lambda *given: list(module_through_torch.Lowering(graph).run(*given)))(*arrays)


def check(found, expected) -> None:
    for ours, torchs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, torchs.detach(), 1e-4, 1e-5)


def recorded(words, model, x):
    """(graph, inputs, FLOPs) of a forward pass."""
    asked = modules.parse_question("m:N", [*words, "--mode", "forward"], "v5e-1")
    graph, inputs, *_, flops = module_through_torch.record(asked, "conservative", model, [x.to("meta")], {}, {}, [])
    return graph, inputs, flops


def test_what_is_asked_through_torch_xla_alone():
    options = ["--inputs", "int32[8,4]", "--through", "torch", "--level", "balanced,aggressive"]
    with pytest.raises(InputError, match=r"through is torch and level is aggressive; expected another level"):
        modules.parse_question("m:N", options)


def test_what_is_not_there_is_said_before_anything_is_downloaded(monkeypatch, capsys):
    monkeypatch.setattr(aot_tpu, "make_environment", lambda *_: pytest.fail("made before the question was read"))
    monkeypatch.setattr(modules, "find_spec", lambda name: None if name == "torchax" else name)
    assert aot_tpu.main([*LINEAR, "--topology", "v5e-1", "--through", "torch"]) == 2
    assert "needs torchax: pip install" in capsys.readouterr().err


class SmallNet(torch.nn.Module):
    """Has each operation that the lowering has a function of its own for, and its gradient."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.BatchNorm2d(8)
        self.pool, self.embedding = torch.nn.MaxPool2d(3, 2, 1), torch.nn.Embedding(7, 32)
        self.middle = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32), torch.nn.GELU())
        self.head = torch.nn.Sequential(torch.nn.GELU(approximate="tanh"), torch.nn.Linear(32, 5))
        for parameter in self.middle[0].parameters():
            torch.nn.init.normal_(parameter)
        self.register_buffer("places", torch.tensor([[0, 3, 3], [2, 0, 1], [1, 1, 1], [4, 0, 2]]))

    def forward(self, x):
        x = torch.stack([x, x * torch.tensor([2.0])])[1]  # select, and an array of the graph's own
        x = self.middle(self.pool(torch.relu(self.norm(self.convolution(x)))).flatten(1) + 3)
        x = x + self.embedding(self.places[:, 0]) + sum(torch.var_mean(x, [0, -1], correction=0, keepdim=True))
        for places in (self.places, self.places[:, :1], self.places[:2, :1]):  # one a row of x, several, of some rows
            x = (x + x.gather(1, places).sum()).scatter(1, places, -1.0)
        return self.head(x)


def test_the_lowered_step_is_torchs():
    """Loss, weights, BatchNorm's averages and momentum after one step, run by jax on the CPU and by eager torch."""
    torch.manual_seed(0)  # BatchNorm's gradients cancel, so by some seeds one is off by 1.6e-5
    asked = modules.parse_question("m:SmallNet", ["--inputs", "float32[4,3,8,8]", "--optimizer", "sgd"], "v5e-1")
    with torch.device("meta"):
        without_memory = SmallNet()
    x = torch.empty(4, 3, 8, 8, device="meta")
    graph, inputs, roles, *_ = module_through_torch.record(asked, "conservative", without_memory, [x], {}, {}, [])
    model = SmallNet()
    optimizer = make_optimizer(TrainConfig(optimizer="sgd"), model.parameters())
    state = [*model.parameters(), *model.buffers(), *(v for held in optimizer.state.values() for v in held.values())]
    x, targets, rate = torch.randn(4, 3, 8, 8), torch.arange(4), torch.full((1,), 0.01)
    assert roles.count("optimizer_state") == 11 and roles[-3:] == ("inputs",) * 3
    found = run_lowered(graph, inputs, (*state, x, rate, targets))
    loss = torch.nn.functional.cross_entropy(model(x), targets)
    loss.backward()
    step_optimizer(optimizer, rate, None, "stop")
    check(found, (loss, *state))
    own = {node.target for node in graph.graph.nodes} & module_through_torch.OURS.keys()
    assert own == module_through_torch.OURS.keys(), "each was tried"


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.torchs = torch.nn.Linear(8, 24), torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.torchs(x, x, x, need_weights=False)[0]
        q, k, v = self.inside(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_lowered_attention_is_torchs():
    model, x = Attention().eval(), torch.randn(2, 6, 8)
    graph, inputs, flops = recorded(["--inputs", "float32[2,6,8]"], model, x)
    assert flops == 2 * 2 * 6 * 8 * (24 + 8 + 24) + 2 * (2 * 2 * 2 * 6 * 6 * (4 + 4))  # layers, and twice attention
    products = [node.target for node in graph.graph.nodes]
    assert products.count(torch.ops.aten.addmm.default) == 1  # torch gives its last layer rows; elsewhere bias is last
    check(run_lowered(graph, inputs, (*model.parameters(), x, torch.zeros(1))), [model(x)])


class Tied(torch.nn.Module):
    """As T5 is: one module under two names, whose weight is a third one's too."""

    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Embedding(16, 8)
        self.inner = torch.nn.Sequential(self.shared, torch.nn.Linear(8, 8))
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, x):
        return self.head(self.inner(x) + self.shared(x))


def test_a_tied_weight_is_one_input():
    model, x = Tied(), torch.randint(16, (2, 6))
    graph, inputs, _ = recorded(["--inputs", "int64[2,6]"], model, x)
    check(run_lowered(graph, inputs, (*model.parameters(), x, torch.zeros(1))), [model(x)])


def test_a_mesh_shards_weights_and_their_moments_before_and_after_the_step():
    words = ["--arguments", "in_features=8,out_features=4", "--inputs", "float32[16,8]", "--mesh", "data=2,fsdp=4"]
    asked = modules.parse_question("torch.nn:Linear", [*words, "--shard", "weight=fsdp"], "v5e-8")
    with torch.device("meta"):
        model, x = torch.nn.Linear(8, 4), torch.empty(16, 8)
    notes = []
    mesh = mesh_sizes(asked, parse_topology("v5e-8"))
    graph, inputs, roles, axes, _ = module_through_torch.record(asked, "conservative", model, [x], {}, mesh, notes)
    hlo, seed = module_through_torch.lower(asked, graph, inputs, mesh, axes)
    text = HloModule.from_serialized_hlo_module_proto(hlo).to_string()
    weight, batch = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}", "{devices=[8,1]<=[8]}"
    given = dict(re.findall(r"parameter\((\d+)\), sharding=(\{.*?\}(?=,|\n|$))", text))
    sharded = [number for number, sharding in given.items() if sharding == weight]
    assert len(given) == len(inputs) and not seed
    assert sorted(map(int, sharded)) == [n for n, t in enumerate(inputs) if t.shape == (4, 8)]  # the moments too
    assert [n for n, sharding in given.items() if sharding == batch] and "1 of 2 parameters sharded" in notes[0]
    constrained = re.findall(r'custom_call_target="Sharding", sharding=(\{.*?\}(?=,|\n|$))', text)
    assert constrained.count(weight) == len(sharded)
    assert len(constrained) == len(roles) - roles.count("inputs")
    with pytest.raises(InputError, match=r"data=2,fsdp=4 has 8 devices and v5e-4 has 4"):
        mesh_sizes(asked, parse_topology("v5e-4"))
    with pytest.raises(InputError, match=r"dimension 0 of the input 0, \[6, 8\], cannot be divided by 8"):
        module_through_torch.record(asked, "conservative", model, [torch.empty(6, 8, device="meta")], {}, mesh, notes)


def test_a_lowered_decoding_step_is_torchs():
    """The token, and the cache with its keys and values, after one token at position 3."""
    asked = modules.parse_question("hf:x", ["--inputs", "input_ids=int32[3,8]", "--mode", "decode"], "v5e-1")
    made = tiny_llama()
    with torch.device("meta"):
        without_memory = tiny_llama()
    tokens = dict(input_ids=torch.empty(3, 8, dtype=torch.int32, device="meta"))
    inputs, length = module_cache.decode_inputs(asked, without_memory, tokens)
    of_cache = module_through_torch.become_decoding(asked, without_memory, inputs, length, {}, [])
    graph, given, *_ = module_through_torch.record(asked, "conservative", without_memory, [], inputs, {}, [], of_cache)
    cache, tokens, position = module_cache.cache_of(made, length), torch.tensor([[3], [4], [5]]), torch.tensor([3])
    with torch.no_grad():
        module_cache.decode_forward(made, cache, tokens, position)  # makes its tensors
        held = module_cache.tensors_of(cache)
        for tensor in held:
            tensor.normal_()
        state = [*made.parameters(), *held, *made.buffers(), tokens.int(), position, torch.zeros(1)]
        token, *kept = run_lowered(graph, given, state)
        expected = module_cache.decode_forward(made, cache, tokens, position)[:, -1].argmax(-1)
    assert token.tolist() == expected.tolist() and len(kept) == len(held) == 4
    check(kept, held)
