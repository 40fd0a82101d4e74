"""Questions about a module without a script: what is refused is refused in this process, what compiles in its own."""

import dataclasses
import json
import re
import socket
import sys

import pytest
import torch
import torch_xla
import transformers
from mutations import a_full_disk
from processes import ROOT
from reports import a_report
from torch.utils._pytree import tree_map_only

import aot_tpu
from tpu_compiler.decide import search
from tpu_compiler.estimate.report import Report, format_report
from tpu_compiler.estimate.token_bound import with_tokens
from tpu_compiler.module import arguments as module_arguments
from tpu_compiler.module import kv_cache as module_cache
from tpu_compiler.module import model as module_build
from tpu_compiler.module import probing as module_trace
from tpu_compiler.module import programs as modules
from tpu_compiler.module import train_step as module_step
from tpu_utils.base.errors import InputError

NETS = """
import torch
from torch import nn
import config  # the one beside this file


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))  # BLOCK


class Net(nn.Module):
    def __init__(self, width=128, layers=2):
        super().__init__()
        self.embed = nn.Embedding(config.VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, config.VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens):
        which = torch.arange(config.VOCABULARY, device=tokens.device)
        x = (tokens[..., None] == which).float() @ self.embed.weight  # an embedding's gradient compiles for seconds
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


class Normed(nn.Sequential):
    def __init__(self):
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(2)]
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), *blocks, nn.Flatten(), nn.LazyLinear(4))


def reads():
    class Reads(nn.Linear):
        def forward(self, x):
            if x.sum() > 0:  # READS
                x = -x
            return super().forward(x)

    return Reads(4, 4)


def lacks():
    class Lacks(nn.Linear):
        def forward(self, x):
            return super().forward(torch.linalg.eigvals(x).real)

    return Lacks(4, 4)


class Mixed(nn.Linear):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, super().forward(x))  # float32 beside bfloat16


def downloads():
    import urllib.request

    return nn.Linear(int(urllib.request.urlopen("https://example.invalid/weights").read()), 1)


def pretrained():
    import torchvision

    return torchvision.models.resnet18(weights="DEFAULT")


def on_the_host():
    return nn.Linear(*torch.linspace(2, 3, 2).int().tolist())


def broken(size):
    raise KeyError(size)


def a_number():
    return 3
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "nets.py").write_text(NETS)
    (folder / "config.py").write_text("VOCABULARY = 256\n")
    gpt2 = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], n_layer=1, n_embd=128, n_head=2, vocab_size=256)
    (folder / "config.json").write_text(json.dumps(gpt2 | dict(n_positions=128, torch_dtype="bfloat16")))
    return folder


def question(target, *options):
    return modules.parse_question(str(target), [str(option) for option in options])


# --------------------------------------------------------------------------------------------------------- command line
def test_what_a_module_is_asked():
    asked = question(
        *("mine.py:Net", "--inputs", "float32[8,3,224,224]", "labels=int64[8] use_cache=False"),
        *("--mesh", "data=2,fsdp=4", "--shard", "*.out.weight=fsdp@1,*.bias=-", "*=data@0+fsdp@1"),
        *("--level", "conservative,aggressive", "--arguments", "num_classes=10,sizes=[1, 2],name='x'"),
    )
    assert [(i.name, i.dtype, i.shape, i.value) for i in asked.inputs] == [
        ("", "float32", (8, 3, 224, 224), None),
        ("labels", "int64", (8,), None),
        ("use_cache", "", (), False),
    ]
    assert asked.mesh == dict(data=2, fsdp=4) and asked.levels == ("conservative", "aggressive")
    assert [p.axes for p in asked.placements] == [{1: "fsdp"}, {}, {0: "data", 1: "fsdp"}]
    assert asked.arguments == dict(num_classes=10, sizes=[1, 2], name="x")


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "a module needs --inputs"),
        (["--inputs", "x=float32[B,4]"], r"has the size 'B'; expected a number of at least 1, because XLA compiles"),
        (["--inputs", "x=float32[-1,4]"], "has the size '-1'"),
        (["--inputs", "x=float23[4]"], r"the type 'float23'.*did you mean float32\?"),
        (["--inputs", "x=float32[4"], "is not understood"),
        (["--inputs", "x=float32[4]", "float32[4]"], "those by position first"),
        (["--inputs", "x=float32[4]", "x=float32[4]"], "x is given twice"),
        (["--inputs", "x=float32[4]", "--level", "fast"], "level is 'fast'; expected one of conservative"),
        (["--inputs", "x=float32[4]", "--precision", "float32", "--level", "balanced"], "give one of the two"),
        (["--inputs", "x=float32[4]", "--mesh", "data"], "expected NAME=SIZE"),
        (["--inputs", "x=float32[4]", "--mesh", "fsdp=4", "--shard", "*=fdsp"], r"axis 'fdsp'.*did you mean fsdp\?"),
        (["--inputs", "x=float32[4]", "--shard", "weight"], "names the axis|not understood"),
        (["--inputs", "x=float32[4]", "--arguments", "10"], "expected NAME=VALUE"),
        (["--inputs", "x=float32[4]", "--mode", "forwrd"], r"'forwrd'.*did you mean forward\?"),
        (["--inputs", "x=float32[4]", "--mood", "train"], r"--mood is no option of a module.*did you mean --mode\?"),
    ],
)
def test_options_that_cannot_be_meant(options, message):
    with pytest.raises(InputError, match=f"(?s){message}"):
        question("mine.py:Net", *options)


def test_a_script_keeps_its_own_options():
    assert not modules.names_a_module("transformer_tpu.py") and not modules.names_a_module("absent.py")
    assert all(map(modules.names_a_module, ("a.py:Net", "torchvision.models:resnet50", "hf:config.json")))


def test_wrong_usage_is_answered_before_a_child_starts(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(search, "run_script", lambda *_: pytest.fail("a child was started"))
    target, *inputs = "torch.nn:Linear", "--inputs", "float32[4,4]", "--topology", "v5litepod-1"
    (tmp_path / "file").write_text("")
    for options, message in (
        (["--inputs=float32[B,4]", "--topology=v5litepod-1"], "has the size 'B'"),
        ([*inputs, "--mode=decide"], "invalid choice: 'decide'"),
        ([*inputs, "--fit=batch"], "--fit is for scripts"),
        ([*inputs, f"--program={tmp_path}/file/programs"], "Not a directory; expected a folder with room"),
        ([*inputs, "--program=/dev/full/programs"], "cannot be written"),
    ):
        assert aot_tpu.main([target, *options]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("error: ") == 1, said


def test_a_full_disk_is_told_before_anything_is_compiled(tmp_path):
    with (
        a_full_disk(),
        pytest.raises(InputError, match="programs cannot be written: File too large; expected"),
    ):
        modules.make_folder(str(tmp_path / "programs"))


# ---------------------------------------------------------------------------------------------------- building a module
@pytest.fixture
def mine(nets, monkeypatch):
    """As in the child, whose modules give way to the user's of the same name; put back afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept = dict(sys.modules)
    module_build.step_aside()
    yield nets / "nets.py"
    ours = {name for name, module in kept.items() if name not in sys.modules}
    for name in {"nets", *ours}:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


def test_weights_take_no_memory_and_stay_tied(mine):
    notes = []
    model = module_build.build(question(f"{mine}:Net", "--inputs", "int32[8,16]", "--arguments", "width=4"), notes)
    assert {p.device.type for p in model.parameters()} == {"meta"} and model.embed.weight.shape == (256, 4)
    model = module_build.to_device(model, torch_xla.device())
    assert model.head.weight is model.embed.weight and model.count.shape == () and not notes
    assert module_build.build(question(f"{mine}:on_the_host", "--inputs", "float32[1,2]"), notes).weight.is_meta
    assert "built with its weights on the host" in notes[0]


@pytest.mark.parametrize(
    "target, message",
    [
        ("nets.py:Nat", r"nets.py has no 'Nat'; did you mean Net\?"),
        ("nets.py:broken", r"(?s)broken cannot be built: TypeError.*'size'.*--arguments gives it arguments"),
        ("nets.py:a_number", "a_number returned a int; expected a torch.nn.Module"),
        ("nets.py:config", "is a module; expected a class"),
        ("nets.py:downloads", "asked the network for https://example.invalid/weights while it was built"),
        ("nets.py:pretrained", "asked the network for https://download.pytorch.org/models/resnet18"),
        ("no_such_package.models:Net", "no module named 'no_such_package'"),
        ("torchvision.model:resnet50", r"no module named 'torchvision.model'.*did you mean torchvision.models\?"),
        ("torchvision.models:resnet51", r"did you mean resnet50\?|did you mean resnet1"),
        ("absent.py:Net", "no such file: absent.py"),
        ("hf:google/gemma-2-2b", "google/gemma-2-2b: no such file; .* on this machine: nothing is downloaded"),
    ],
)
def test_what_is_no_module_to_ask_about(mine, target, message, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.chdir(mine.parent)
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo
    with pytest.raises(InputError, match=message):
        module_build.build(question(target, "--inputs", "float32[1]"), [])
    assert (socket.socket.connect, socket.getaddrinfo) == (connect, getaddrinfo)


def test_a_configuration_of_hugging_face(mine, nets):
    notes, folder = [], nets
    model = module_build.build(question(f"hf:{folder}", "--inputs", "int32[1,8]", "--arguments", "n_layer=2"), notes)
    assert type(model).__name__ == "GPT2LMHeadModel" and len(model.transformer.h) == 2
    assert model.config._attn_implementation == "eager" and "eager attention" in notes[0]
    assert model.lm_head.weight.dtype == torch.float32
    model = module_build.build(question(f"hf:{folder}:GPT2Model", "--inputs", "int32[1]"), [])
    assert type(model).__name__ == "GPT2Model"
    for target, options, message in (
        (f"hf:{folder}:GPT2", [], "names the class 'GPT2'; expected one of "),
        (f"hf:{folder}", ["--arguments", "n_layers=2"], r"gpt2 has no field 'n_layers'; did you mean n_layer\?"),
    ):
        with pytest.raises(InputError, match=message):
            module_build.build(question(target, "--inputs", "int32[1]", *options), [])
    (folder / "other.json").write_text('{"model_type": "gpt22"}')
    with pytest.raises(InputError, match=r"model_type 'gpt22'.*did you mean gpt2\?"):
        module_build.build(question(f"hf:{folder}/other.json", "--inputs", "int32[1]"), [])


# ------------------------------------------------------------------------------------------------------------- tracing
def probed(target, *options):
    asked = question(target, *options)
    model = module_build.build(asked, [])
    args, kwargs = module_arguments.meta_inputs(asked, model)
    model = module_build.to_device(model, torch_xla.device())
    args, kwargs = tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device=torch_xla.device()), (args, kwargs))
    return module_trace.probe(asked, lambda: model(*args, **kwargs))


def line_of(mark: str) -> int:
    """Where NETS has it."""
    return NETS[: NETS.index(mark)].count("\n") + 1


def test_what_xla_cannot_trace_is_named_with_its_line(mine, capfd):
    reads = rf"it reads the value of a tensor on the host .*nets.py:{line_of('# READS')} \(if x.sum"
    for name, inputs, message in (
        ("reads", "float32[4,4]", reads),
        ("lacks", "float32[4,4]", r"XLA has no operation for aten::linalg_eig, .* at .*nets.py"),
        ("Block", "float32[8,5]", r"fails with these inputs: RuntimeError: .*nets.py"),
        ("Net", "token=int32[8,16]", r"takes no 'token'; expected one of tokens; did you mean tokens\?"),
    ):
        arguments = ["--arguments", "width=4"] if name in ("Block", "Net") else []
        with pytest.raises(InputError, match=message):
            probed(f"{mine}:{name}", "--inputs", inputs, *arguments)
    assert "Unexpected Execution" not in capfd.readouterr().err
    output, flops = probed(f"{mine}:Net", "--inputs", "tokens=int32[8,16]", "--arguments", "width=4")
    assert output["logits"].shape == (8, 16, 256) and flops == 2 * 8 * 16 * (2 * 2 * 4 * 16 + 2 * 4 * 256)


def test_weights_are_cast_where_autocast_mixes_types(mine):
    """And stay float32, with float32 gradients."""
    device, notes = torch_xla.device(), []
    asked = question(f"{mine}:Mixed", "--inputs", "float32[4,4]", "--arguments", "in_features=4,out_features=4")
    model = module_build.to_device(module_build.build(asked, []), device)
    inputs = [torch.empty(1, 4, 4, device=device)]
    forward = module_step.forward_of(asked, "balanced", model, inputs, {}, notes)
    assert re.match("bfloat16: weights cast in each step, because under torch.autocast", notes[0]), notes
    output = forward(model, inputs, {})
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "output, options, targets, said",
    [
        (torch.zeros(8, 10), [], (8,), "loss: cross_entropy of the output [8, 10], dimension 1 the classes"),
        ({"logits": torch.zeros(8, 16, 10)}, [], (8, 16), "cross_entropy of logits"),
        (torch.zeros(8, 21, 4, 5), [], (8, 4, 5), "dimension 1 the classes"),
        ((torch.zeros(8, 16, 10),), [], (8, 16, 10), "loss: mse of the output"),  # no classes are known
        (torch.zeros(8, 10), ["--loss", "mse"], (8, 10), "loss: mse"),
        ({"loss": torch.zeros(()), "logits": torch.zeros(8, 10)}, [], None, "loss: the module's own"),
        (
            {"boxes": torch.zeros(8, 4), "count": torch.ones(8, dtype=torch.int64), "scores": torch.zeros(8, 10)},
            [],
            (8,),
            "output 1 of 3 alone is in the loss: nothing is computed for the others; --loss own, if there is a .loss; "
            "loss: cross_entropy of output 1 of 3 [8, 4], dimension 1 the classes",
        ),
    ],
)
def test_losses_are_made_of_the_outputs_shape(output, options, targets, said):
    notes = []
    asked = question("m:N", "--inputs", "float32[8,4]", *options)
    _, made = module_step.choose_loss(asked, output, {}, torch_xla.device(), notes)
    assert (made if made is None else tuple(made.shape)) == targets and said in "; ".join(notes)


def test_what_has_no_loss_or_no_cache_is_refused():
    asked = question("m:N", "--inputs", "float32[8,4]", "--loss", "own")
    with pytest.raises(InputError, match=r"returns no \.loss"):
        module_step.choose_loss(asked, torch.zeros(8, 10), {}, torch_xla.device(), [])
    with pytest.raises(InputError, match=r"mode is decode.*is a Linear; expected a causal model of transformers"):
        module_cache.decode_inputs(asked, torch.nn.Linear(1, 1), {})


def test_recomputed_blocks_give_the_same_gradients():
    """Arguments and results of any nesting, and gradients to tensors that come by keyword."""

    def block(x, *, pair, flag):
        return {"x": (x * pair[0]).sin(), "flag": flag, "bias": (pair[1] * 2,)}

    device, gradients = torch_xla.device(), []
    for forward in (block, module_step.recomputed(block)):
        leaves = [torch.full((3,), value, device=device, requires_grad=True) for value in (1.0, 2.0, 3.0)]
        out = forward(leaves[0], pair=(leaves[1], leaves[2]), flag="kept")
        assert out["flag"] == "kept"
        (out["x"].sum() + (out["bias"][0] ** 2).sum()).backward()
        gradients.append([leaf.grad.cpu() for leaf in leaves])
    assert all(map(torch.equal, *gradients))
    layer = torch.nn.Linear(3, 3).to(device)  # a first block, whose input has no gradient
    module_step.recomputed(layer)(torch.ones(2, 3, device=device)).sum().backward()
    assert layer.weight.grad.cpu().eq(2).all()


# ---------------------------------------------------------------------------------------------------- the real compiler
def asked(capsys, *arguments, code=0):
    assert aot_tpu.main([*map(str, arguments), "--json"]) == code, capsys.readouterr().err
    return [Report(**report) for report in json.loads(capsys.readouterr().out)]


@pytest.mark.slow
def test_a_training_step_at_two_levels(forked, nets, capsys, tmp_path):
    tokens = 2 * 16
    plain, least = asked(
        *(capsys, f"{nets}/nets.py:Net", "--inputs", "tokens=int32[2,16]", "--topology", "v5litepod-1"),
        *("--level", "conservative,aggressive", "--program", tmp_path, "--optimizer", "sgd"),
    )
    weights = (2 * 8 * 128 * 128 + 256 * 128) * 4
    for r in (plain, least):
        assert r.fits and r.unit == "tokens" and r.model_flops == 6 * tokens * (2 * 8 * 128 * 128 + 2 * 256 * 128)
        assert r.memory["parameters"] == pytest.approx(weights, rel=0.05)
        assert r.memory["optimizer_state"] == pytest.approx(weights, rel=0.05)
        names = dict(r.costliest_modules)
        assert {"layers.0.up", "layers.1.down backward", "head backward"} <= names.keys(), names
        assert f"nets.py:{line_of('# BLOCK')}" in dict(r.costliest_lines)
    assert (plain.level, least.level) == ("conservative", "aggressive")
    assert any("2 blocks (layers.0 to layers.1) are recomputed" in note for note in least.notes)
    assert least.flops > plain.flops
    texts = [(tmp_path / level / "train_step_v5litepod-1.txt").read_text() for level in ("conservative", "aggressive")]
    assert "bf16[" in texts[1] and "HloModule" in texts[0]


def test_a_sharded_step(forked, nets, capsys):
    (r,) = asked(
        *(capsys, f"{nets}/nets.py:Net", "--inputs", "tokens=int32[4,16]", "--topology", "v5litepod-4"),
        *("--mesh", "data=2,fsdp=2", "--shard", "layers.*.weight=fsdp", "--optimizer", "sgd"),
    )
    weights = (2 * 8 * 128 * 128 / 2 + 256 * 128) * 4
    assert r.fits and r.program == "SPMD over 4 devices" and "all-gather" in r.collectives
    assert r.memory["parameters"] == pytest.approx(weights, rel=0.05)
    assert r.memory["optimizer_state"] == pytest.approx(weights, rel=0.05)
    assert any("4 of 9 parameters sharded, the inputs' first dimension over data x fsdp" in note for note in r.notes)
    modules = dict(r.costliest_modules)
    for name, count, ms in r.module_groups:
        alike = [name.replace("*", str(number)) for number in range(count)]
        assert ms == pytest.approx(sum(modules[one] for one in alike)) and count == 1 + ("layers.*" in name), name
    assert {"layers.*.up", "layers.*.down backward"} <= {name for name, *_ in r.module_groups}


@pytest.mark.parametrize(
    "options, message",
    [
        (["--shard", "blocks.*=data"], "'blocks.*' matches no parameter of"),
        (["--shard", "blocks.*=data", "--topology", "v5litepod-1"], "'blocks.*' matches no parameter of"),
        (["--shard", "embed.weight=data@2"], "has the shape [256, 128], and so no dimension 2"),
        (["--shard", "*=data", "--arguments", "width=6"], "cannot be divided by 4 (data); expected a multiple of 4"),
        (["--mesh", "data=8"], "data=8 has 8 devices and v5litepod-4 has 4"),
    ],
)
def test_what_cannot_be_sharded(forked, nets, capfd, options, message):
    target = [f"{nets}/nets.py:Net", "--inputs", "tokens=int32[8,16]", "--topology", "v5litepod-4"]
    assert aot_tpu.main([*target, *options]) == 2
    said = capfd.readouterr().err
    assert message in said and said.count("error: ") == 1, said


def tiny_llama(**more):
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    config = transformers.LlamaConfig(**(sizes | dict(num_key_value_heads=2, head_dim=8) | more))
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()


def test_decoding_does_not_copy_the_cache_for_each_query_head():
    """transformers' eager attention does: of 70B 100 times the milliseconds that servers take. The numbers are its."""
    logits, tokens, notes = [], torch.tensor([[3], [4], [5]]), []
    for change in (lambda model: None, lambda model: module_cache.attend_in_groups(model, notes)):
        model = tiny_llama()
        change(model)
        cache = module_cache.cache_of(model, 16)
        for position in range(3):
            with torch.no_grad():
                step = module_cache.decode_forward(model, cache, tokens + position, torch.tensor([position]))
        logits.append(step)
    assert len(notes) == 1 and model.config._attn_implementation == "grouped"
    torch.testing.assert_close(*logits)
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    before = other.config._attn_implementation
    module_cache.attend_in_groups(other, notes)
    assert len(notes) == 1 and other.config._attn_implementation == before, "its attention is another"


@pytest.mark.parametrize(
    "sharding, heads, expected",
    [
        (["*k_proj.weight=tensor"], 2, {0: ("data",), 1: ("tensor",)}),
        (["*k_proj.weight=tensor"], 3, {0: ("data",)}),  # does not divide
        (["*k_proj.weight=tensor@1"], 2, {0: ("data",)}),
        ([], 2, {0: ("data",)}),
    ],
)
def test_the_cache_is_sharded_as_its_heads_are(sharding, heads, expected):
    """It once lay whole on each device of a tensor axis, and each read all of it."""
    words = ["--inputs", "input_ids=int32[4,16]", "--mesh", "data=2,tensor=2"]
    asked = question("hf:x", *words, *(["--shard", *sharding] if sharding else []))
    assert module_cache.cache_axes(asked, {"data": 2, "tensor": 2}, tiny_llama(), heads) == expected
    assert module_cache.cache_axes(asked, {}, tiny_llama(), heads) == {}


@pytest.mark.parametrize("ms, is_a_speed", [(10.0, True), (400.0, False)])
def test_a_program_far_above_its_bound_is_no_speed(ms, is_a_speed):
    r = a_report(estimated_ms=ms, memory={"parameters": 0}).with_prediction()
    cache = 819 * 10**6 * 5  # 5 ms to read
    assert module_cache.read_per_token(r, tiny_llama(), cache) == cache
    for tokens in (1, 8):
        whole = dataclasses.replace(r, estimated_ms=ms * tokens).with_prediction()
        reads = dict(batch=3, read_bytes=cache, cache_bytes=cache, length=16, tokens=tokens)
        found = with_tokens(whole, **reads)
        assert found.decode["is_a_speed"] == is_a_speed and found.decode["expected_ms"] == ms
        assert found.predicted_per_second == (300 if is_a_speed else None)
        text = format_report(dataclasses.replace(found, memory={"parameters": 0, "optimizer_state": 0, "inputs": 0}))
        assert "weights 0.000, cache and inputs 0.000\n" in text, "decoding has no optimizer"
        assert ("no speed: the predicted step is 80.00 x that bound" in text) != is_a_speed
        expected = "expect 10.000 ms a token of each row, 300 tokens/s: the longest time, 2.00 x that bound"
        assert (expected in text) == is_a_speed and text.count("tokens/s") == is_a_speed, "one rate, beside its time"
        assert (f"a step is 8 tokens of each row: {ms:.3f} ms a token predicted, 0.000" in text) == (tokens == 8)
        fetched = dataclasses.replace(whole, moved_bytes=100 * cache * tokens, exposed_ms=2.0 * tokens)
        moved = with_tokens(fetched, **reads).decode
        assert moved["moved_ms"] == pytest.approx(500), "what is fetched ahead has no price"
        assert moved["expected_ms"] == pytest.approx(502), "and communication comes to it"
    nothing = dataclasses.replace(r, compiles=False)
    assert with_tokens(nothing, **reads) is nothing


@pytest.mark.slow
def test_decoding_shows_its_cache_and_what_binds_it(forked, nets, capsys):
    command = [f"hf:{nets}", "--inputs", "input_ids=int32[4,128]", "--mode", "decode", "--topology", "v5litepod-1"]
    (r,) = asked(capsys, *command)
    assert r.decode["cache_bytes"] == 2 * 4 * 128 * 128 * 2 and r.decode["bound_by"] == "memory"
    assert r.fits and r.decode["expected_ms"] >= r.decode["memory_ms"] > r.decode["matrix_ms"] > 0
    assert r.decode["is_a_speed"] == (r.decode["expected_ms"] <= 4 * r.decode["memory_ms"])
    rate = pytest.approx(4 / r.decode["expected_ms"] * 1e3)
    assert r.predicted_per_second == (rate if r.decode["is_a_speed"] else None)
    assert r.memory["inputs"] >= r.decode["cache_bytes"]
    assert any(line.startswith("modeling_gpt2.py:") for line, _ in r.costliest_lines), r.costliest_lines


def test_state_of_batch_normalisation(forked, capsys, nets):
    """In forward its averages are read, in training they are moved; nothing with BatchNorm is computed twice."""
    target = (f"{nets}/nets.py:Normed", "--inputs", "float32[8,3,10,10]", "--topology", "v5litepod-1")
    (r,) = asked(capsys, *target, "--level", "aggressive", "--optimizer", "sgd")
    assert r.fits and any("has BatchNorm, whose averages would move twice" in note for note in r.notes), r.notes


@pytest.mark.slow
def test_a_model_that_nobody_here_wrote(capsys):
    """docs/any_module.md has a forward pass, benchmarks/budgets.json one of Hugging Face."""
    target = ("torchvision.models:alexnet", "--inputs", "float32[8,3,224,224]", "--mode", "train")
    (r,) = asked(capsys, *target, "--topology", "v5litepod-1", "--plan")
    assert r.fits and any(re.match(r"features\.\*", name) for name, _, _ in r.module_groups)


def test_the_models_of_the_page_and_its_table_are_there():
    texts = [(ROOT / "docs" / name).read_text() for name in ("any_module.md", "results/any_module.csv")]
    names = set(re.findall(r"benchmarks/models/(\w+\.json)", "".join(texts)))
    assert len(names) >= 6
    for name in names:
        assert json.loads((ROOT / "benchmarks" / "models" / name).read_text())["model_type"]
