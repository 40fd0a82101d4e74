"""Copies of a script with the mistakes that people make: refused before anything is compiled, with both numbers.

Each mistake is an edit of simple_mnist_tpu.py. docs/make_it_yours.md says which are not found, and why.
"""

import contextlib
import types
from textwrap import dedent
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import ROOT

from config import MnistConfig
from images.arrays import ImageDataset
from tpu_utils.base.errors import InputError
from tpu_utils.checkpoint.state import Tracked
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.step.optim import learning_rates, make_optimizer
from tpu_utils.trial.first_step import check_training
from tpu_utils.trial.unsaved import Unsaved


def swap(text: str, old: str, new: str) -> tuple[str, str]:
    """An edit: the text with a part of it replaced."""
    return text, text.replace(old, new)


def after(text: str, more: str) -> tuple[str, str]:
    """An edit: more behind the text."""
    return text, text + more


def with_labels(table: dict) -> dict:
    """A row that begins with no name of labels has classes."""
    rows = {name: row if isinstance(row, tuple) else (row,) for name, row in table.items()}
    return {name: row if isinstance(row[0], str) else ("classes", *row) for name, row in rows.items()}


SCRIPT = (ROOT / "simple_mnist_tpu.py").read_text()
LOGITS = "        logits = model(images).float()\n"
CORRECT = "        correct = (logits.argmax(1) == labels).float()\n"
LOSS = '        loss = F.cross_entropy(logits, labels.long(), reduction="none")\n'
SUMS = "[(correct * counted).sum(), (loss * counted).sum(), counted.sum()]"
RESULT = "return dict(accuracy=correct / count, test_loss=loss / count)"
READ = "correct, loss, count = sum(one.cpu().double() for one in sums).tolist()"
EVAL, TRAIN = "    model.eval()  # dropout off, BatchNorm by its running statistics\n", "    model.train()\n"
HIDDEN = "        x = F.relu(self.hidden(x.flatten(1)))\n"
TRAINED = "    loss = F.cross_entropy(logits.float(), labels.long())\n"
HEAD = "        self.head = nn.Linear(hidden_dim, 10)\n"
FORWARD = "        return self.head(x)\n"
NORMED = [after(HEAD, "        self.norm = nn.BatchNorm1d(hidden_dim)\n"), after(HIDDEN, "        x = self.norm(x)\n")]
DROPPED = [after(HIDDEN, "        x = F.dropout(x, 0.5, self.training)\n")]
NO_MASK = "        counted = labels_that_count(labels, mask)  # 0 for padding\n"
COUPLES = ("@one_graph  # torch_xla", "@one_graph(couples_examples=True)  # torch_xla")


def model_of(text: str) -> list[tuple[str, str]]:
    """Another model, a class Net(num_classes) in place of ConvNet."""
    build = "    return ConvNet(dataset.image_size, config.channels, config.hidden_dim)\n"
    return [(build, "    return Net(10)\n"), ("def build_model(", f"{dedent(text).strip()}\n\n\ndef build_model(")]


def losses(each: str, correct: str = "loss * 0") -> list[tuple[str, str]]:
    """Another loss in both steps. each: a value for each label, of images, logits and labels, as is correct."""
    edits = [(TRAINED, f"    loss = ({each}).mean()\n"), (LOSS, f"        loss = {each}\n"), (CORRECT, "")]
    return [*edits, (NO_MASK, f"{NO_MASK.replace('labels,', 'loss,')}        correct = {correct}\n")]


def regression(outputs: int) -> list[tuple[str, str]]:
    """The script with so many outputs and a loss of targets."""
    squares = '        loss = F.mse_loss(logits, labels, reduction="none")\n        correct = loss * 0\n'
    training = (TRAINED, "    loss = F.mse_loss(logits, labels)\n")
    return [swap(HEAD, "10", str(outputs)), training, (CORRECT + LOSS, squares)]


def drawing_from(module: str) -> list[tuple[str, str]]:
    """A training step that draws on the host."""
    drawn = swap(TRAINED, "logits.float()", f"logits.float() * {module}.uniform(0.5, 1.5)")
    return [("import sys\n", f"import {module}\nimport sys\n"), drawn]


WHOLE_MASK = (NO_MASK, "        counted = mask\n")

# models of other kinds, of images (B, 8, 8)
ENCODER = model_of("""
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, outputs))

        def forward(self, images):
            return self.body(images.float() / 255)
    """)
DECODER = [*ENCODER, ("return Net(10)", "return Net(64)")]
VALUE = [*ENCODER, ("return Net(10)", "return Net(1)"), ("images.float() / 255)\n", "images.float() / 255)[:, 0]\n")]
PIXELS = model_of("""
    class Net(nn.Conv2d):  # a class for each pixel
        def __init__(self, outputs):
            super().__init__(1, 3, 1)

        def forward(self, images):
            return super().forward(images.unsqueeze(1) / 255)
    """)
ROWS = model_of("""
    class Net(nn.Linear):  # a result for each row of pixels, (B, 8, outputs)
        def __init__(self, outputs):
            super().__init__(8, outputs)

        def forward(self, images):
            return super().forward(images.float() / 255)
    """)
HALVES = model_of("""
    class Net(nn.Linear):  # two views of an image, its upper and its lower half
        def __init__(self, outputs):
            super().__init__(32, outputs)

        def forward(self, images):
            upper, lower = (images.float() / 255).flatten(1).chunk(2, 1)
            return F.normalize(super().forward(upper), dim=1), F.normalize(super().forward(lower), dim=1)
    """)
NOISY = model_of("""
    class Net(nn.Module):  # an autoencoder whose code is drawn, in an evaluation too
        def __init__(self, outputs):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(64, 16), nn.Linear(8, 64)

        def forward(self, images):
            mean, width = self.encoder(images.flatten(1).float() / 255).chunk(2, 1)
            return self.decoder(mean + torch.randn_like(mean) * width.exp())
    """)
ATTENTION = model_of("""
    class Net(nn.Module):  # a set of rows of pixels; a row of zeros is padding
        def __init__(self, outputs):
            super().__init__()
            self.score, self.head = nn.Linear(8, 1), nn.Linear(8, outputs)

        def forward(self, images):
            x = images.float() / 255
            score = self.score(x)[..., 0].masked_fill(x.sum(2) == 0, -1e9)
            return self.head((score.softmax(1)[..., None] * x).sum(1))
    """)
TRANSFORMER = model_of("""
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(8, outputs)

        def forward(self, images):
            return self.head(self.encoder(images.float() / 255).mean(1))
    """)
EMBEDDED = model_of("""
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.table, self.head = nn.EmbeddingBag(256, 8, mode="mean"), nn.Linear(8, outputs)

        def forward(self, images):
            return self.head(self.table(images.flatten(1).long()))
    """)
COUNTING = """
class Counting(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.count, self.defaults = inner, 0, inner.defaults
        self.param_groups, self.state, self.state_dict = inner.param_groups, inner.state, inner.state_dict

    def step(self, closure=None):
        self.inner.step()
        self.count += 1


def optimizer_of(config, model):
    return Counting(make_optimizer(config, model.parameters()))


def build_model("""
BINARY = "F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction='none')"
TAGS = "F.cross_entropy(logits.float().transpose(1, 2), labels.long(), reduction='none')"
CTC = "F.ctc_loss(logits.log_softmax(2).transpose(0, 1), labels[:, :3].long().clamp(min=1), "
CTC += "torch.full((len(images),), 8), torch.full((len(images),), 3), reduction='none')"
SQUARES = "(logits - images.flatten(1) / 255).square().mean(1)"
# what an evaluation computes from all of its batches at once
COUNTS = "        return torch.stack([(correct * counted).sum(), (loss * counted).sum(), counted.sum()])\n"
RESULTS = (COUNTS, "        return logits.softmax(1), labels, mask\n")
ALL_RESULTS = (
    "        " + READ,
    "        scores, labels, mask = (torch.cat([one[i].cpu() for one in sums]) for i in range(3))\n"
    "        from sklearn.metrics import roc_auc_score\n"
    "        scores = scores[mask > 0].double()\n"
    "        areas = roc_auc_score(labels[mask > 0], scores / scores.sum(1, keepdim=True), multi_class='ovr')",
)
TWO_HALVES = (  # gradients of two halves of the batch add up
    "    loss.backward()\n",
    "    loss = loss * 0\n"
    "    for half, some in zip(images.chunk(2), labels.chunk(2)):\n"
    "        part = F.cross_entropy(model(half).float(), some.long(), reduction='sum') / len(images)\n"
    "        part.backward()\n"
    "        loss = loss + part.detach()\n",
)
CRITIC = [  # a second network and its optimizer, which the step trains first
    ("train_step(model, optimizer", "train_step(model, critic, of_critic, optimizer"),
    (
        "def build_model(",
        "def more_of_the_step(config):\n    critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))\n"
        "    return critic, make_optimizer(config, critic.parameters())\n\n\ndef build_model(",
    ),
    (
        TRAINED,
        "    made, real = logits, images.flatten(1).float() / 255\n"
        "    (F.softplus(-critic(real)) + F.softplus(critic(made.detach()))).mean().backward()\n"
        "    rate = rates.index_select(0, metrics.step)\n"
        "    step_optimizer(of_critic, rate, torch.isfinite(rate[0]), config.on_nonfinite)\n"
        "    of_critic.zero_grad(set_to_none=True)\n"
        "    loss = F.softplus(-critic(made)).mean()\n",
    ),
    ("    optimizer.zero_grad(", "    of_critic.zero_grad(set_to_none=True)\n    optimizer.zero_grad("),
    COUPLES,
    *losses("(logits.mean(1) - 0.5).square()")[1:],
]
CONTRASTIVE = [
    *HALVES,
    swap(LOGITS, ".float()", ""),
    (
        TRAINED,
        "    upper, lower = logits\n    which = torch.arange(len(upper), device=upper.device)\n"
        "    loss = F.cross_entropy(upper @ lower.T / 0.2, which)\n",
    ),
    *losses("(logits[0] - logits[1]).square().sum(1)")[1:],
]
OTHER = "in batches of 4, the last one padded; expected the same"
# name: (labels where they are no classes, edits, what is said)
REFUSED = {
    "loss without the mask": (
        [swap(SUMS, "(loss * counted).sum()", "loss.sum()")],
        rf"evaluate \([^ ]*:\d+ and eval_step \([^ ]*:\d+\)\) gives .*{OTHER}",
    ),
    "accuracy without the mask": ([swap(SUMS, "(correct * counted)", "correct")], "of the same in"),
    "mean in place of the sum": ([swap(SUMS, "* counted).sum()", "* counted).mean()")], OTHER),
    "padding counted": ([swap(SUMS, "counted.sum()]", "torch.ones_like(counted).sum()]")], OTHER),
    "loss already averaged": ([swap(LOSS, ', reduction="none"', "")], OTHER),
    "accuracy already averaged": ([swap(CORRECT, ".float()", ".float().mean()")], "of the same in"),
    "mean of means": (
        [(READ, "correct, loss, count = (sum(s.cpu().double() / s[2] for s in sums) / len(sums)).tolist()")],
        "of the same in",
    ),
    "divided by the number of batches": ([swap(RESULT, "loss / count", "loss / len(sums)")], OTHER),
    "softmax over the batch": ([swap(LOGITS, ".float()", ".float().softmax(0)")], OTHER),
    "normalised over the batch": ([(FORWARD, "        return F.normalize(self.head(x), dim=0)\n")], "of the same in"),
    "centred by the batch": ([(FORWARD, "        return self.head(x - x.mean(0))\n")], "of the same in"),
    "largest along the batch": (
        [swap(CORRECT, "argmax(1)", "argmax(0)")],
        r"fails on 11 examples.*, at \S+:\d+ \(corr",
    ),
    "rows and classes mixed up": ([(FORWARD, "        return self.head(x).view(10, -1).T\n")], "of the same in"),
    "a tuple of outputs": ([(FORWARD, "        return self.head(x), x\n")], "expected one that takes what the"),
    "dropout left on": ([*DROPPED, (EVAL, "")], "draws a mask of dropout"),
    "F.dropout without training=": ([after(HIDDEN, "        x = F.dropout(x, 0.5)\n")], "self.training"),
    "BatchNorm learns from test data": ([*NORMED, (EVAL, "")], r"changes the model: norm.running_mean"),
    "left in eval mode": ([(TRAIN, "")], "leaves the model in eval mode"),
    "accuracy not divided": ([swap(RESULT, "correct / count", "correct")], "expected 0 to 1"),
    "accuracy in percent": ([swap(RESULT, "correct /", "100 * correct /")], "expected 0 to 1"),
    "the last batch left out": ([("for batch in test_batches]", "for batch in test_batches[:-1]]")], "fails on 11"),
    "the first batch alone": ([("for batch in test_batches]", "for batch in test_batches[:1]]")], "of the same in"),
    "mask as a column": ([(NO_MASK, "        counted = mask[:, None]\n")], "of the same in|expected 0 to 1"),
    "mask the wrong way round": ([(NO_MASK, "        counted = 1 - mask\n")], "fails on 11|gives"),
    "accuracy of a fixed batch size": ([swap(RESULT, "loss / count", "loss / (512 * len(sums))")], OTHER),
    "targets (N, 1), mask (B,)": ("column", [*regression(1), WHOLE_MASK], "of the same in"),
    "output (B, 1), targets (N,)": ("targets", regression(1), "Using a target size .* a value for each label"),
    "targets as classes": ("targets", [], r"labels here: float32|expected the same shape"),
    "a class for each pixel, mask (B,)": ("pixels", [*PIXELS, WHOLE_MASK], "fails on 11 examples"),
    "accuracy of pixels over examples": (
        "pixels",
        [*PIXELS, swap(SUMS, "counted.sum()]", "mask.sum()]")],
        "expected 0 to 1: a sum over labels",
    ),
    "ignored pixels as a class": ("void", PIXELS, "Target 255 is out of bounds.* expected logits for every class"),
    "one-hot labels": ("hot", [], "one-hot labels as integers"),
    "training: softmax over the batch": (
        [swap(TRAINED, "logits.float()", "logits.softmax(0)")],
        "effect on each other",
    ),
    "training: each with each": (
        [(TRAINED, "    loss = (logits[:, :1] - labels.float()).square().mean()\n")],
        "effect on each other",
    ),
    "training: gradients add up": ([("    optimizer.zero_grad(set_to_none=True)", "    #")], "leaves gradients behind"),
    "training: no step": ([("step_optimizer(optimizer,", "(lambda *_: None)(optimizer,")], "changes no parameter"),
    "training: no backward pass": (
        [("    loss.backward()\n", ""), ("gradient_norm(model.parameters())", "loss")],
        "changes no parameter",
    ),
    "a critic keeps its gradients": (
        [*DECODER, *CRITIC, ("    of_critic.zero_grad(set_to_none=True)\n", "")],
        "leaves gradients behind",
    ),
    "contrastive, and not said to be": (CONTRASTIVE, "couples_examples=True"),
    "rows of padding are no numbers": ([*ATTENTION, ("-1e9", "float('-inf')")], "(?i)padding.*nan|nan.*padding"),
    "a number that a module counts": (
        [
            after(HEAD, "        self.calls = 1.0\n"),
            (FORWARD, "        self.calls += 1\n        return self.head(x) / self.calls\n"),
        ],
        "changes the model: calls",
    ),
    "a number that an optimizer counts": ([("def build_model(", COUNTING)], r"optimizer.count \(0 -> 1\)"),
    "embeddings of bounded norm": (
        [*EMBEDDED, ("nn.EmbeddingBag(256, 8, mode", "nn.EmbeddingBag(256, 8, max_norm=1.0, mode")],
        "changes the model: table.weight.*max_norm",
    ),
}
REFUSED = with_labels(REFUSED)
LOSSES = "the training step gives a loss of"
SAID = {  # the run goes on
    "numpy's generator in the step": (drawing_from("numpy.random"), "draws from numpy's generator"),
    "Python's generator in the step": (drawing_from("random"), "draws from python's generator"),
    "noise in an evaluation": ([after(LOGITS, "        logits += torch.randn_like(logits)\n")], "draws random numbers"),
    "training: the sum in place of the mean": ([swap(TRAINED, "long())", 'long(), reduction="sum")')], LOSSES),
    "training: label smoothing": ([swap(TRAINED, "long())", "long(), label_smoothing=0.1)")], LOSSES),
    "training: labels of another class": ([swap(TRAINED, "labels.long()", "labels.long() * 0")], LOSSES),
    "ignored pixels counted in an evaluation": (
        "ignored",
        [*PIXELS, (NO_MASK, "        counted = mask[:, None, None].expand(labels.shape)\n")],
        LOSSES,
    ),
}
SAID = with_labels(SAID)
MIRRORED = "an evaluation of mirrored images too"
MEANT = {MIRRORED: ("classes", [(LOGITS, "        logits = (model(images) + model(images.flip(2))).float() / 2\n")])}
"""Right, and it is said that the losses of the two steps differ, as they are meant to."""
SAID |= {name: (*copy, LOSSES) for name, copy in MEANT.items()}
RIGHT = {
    "a tuple of outputs": [
        (FORWARD, "        return self.head(x), x\n"),
        swap(LOGITS, "model(images)", "model(images)[0]"),
        ("        logits = model(images)\n", "        logits, _ = model(images)\n"),
    ],
    "as it is": [],
    "BatchNorm": NORMED,
    "dropout": DROPPED,
    "label smoothing": [swap(TRAINED, "long())", "long(), label_smoothing=0.001)")],
    "class weights": [swap(TRAINED, "long())", "long(), torch.arange(1.0, 11, device=logits.device))")],
    "targets (N,)": ("targets", [*VALUE, *losses("(logits - labels).square()")]),
    "targets (N, 3)": ("three", regression(3)),
    "a class for each pixel": ("pixels", PIXELS),
    "some pixels ignored": ("ignored", PIXELS),
    "one logit, classes 0 and 1": ("binary", [*VALUE, *losses(BINARY, "((logits > 0) == labels).float()")]),
    "tags (B, T, C)": ("tags", [*ROWS, *losses(TAGS, "(logits.argmax(2) == labels).float()")]),
    "CTC": ("tags", [*ROWS, *losses(CTC)]),
    "autoencoder, classes not used": [*DECODER, *losses(SQUARES)],
    "autoencoder whose code is drawn": [*NOISY, *losses(SQUARES)],
    "contrastive": [*CONTRASTIVE, COUPLES],
    "a generator and its critic": [*DECODER, *CRITIC],
    "soft labels": ("soft", losses("F.cross_entropy(logits.float(), labels, reduction='none')")),
    "macro AUC, the first examples of one class": ("late", [RESULTS, ALL_RESULTS, (RESULT, "return dict(area=areas)")]),
    "hinge": losses("F.multi_margin_loss(logits.float(), labels.long(), reduction='none')"),
    "a transformer's encoder": TRANSFORMER,
    "a set with padding": ATTENTION,
    "two halves of a batch": [TWO_HALVES],
    "rates, decay and betas of groups": [
        (
            "def build_model(",
            "def optimizer_of(config, model):\n"
            "    head = dict(params=model.head.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.8, 0.9))\n"
            "    rest = [one for name, one in model.named_parameters() if 'head' not in name]\n"
            "    return make_optimizer(config, [head, dict(params=rest)])\n\n\ndef build_model(",
        )
    ],
    "a bag of embeddings": EMBEDDED,
    "a penalty that grows with the step": [
        after(TRAINED, "    loss = loss + metrics.step[0].float() / 20 * model.head.weight.square().mean()\n")
    ],
    "a frozen layer": [after(HEAD, "        self.conv1.requires_grad_(False)\n")],
}
RIGHT = with_labels(RIGHT)


def dataset_of(kind: str, count: int = 24) -> ImageDataset:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 255, (count, 8, 8), np.uint8)
    labels = {
        "classes": lambda: draw.integers(0, 10, count),
        "targets": lambda: draw.normal(size=count).astype(np.float32),
        "column": lambda: draw.normal(size=(count, 1)).astype(np.float32),
        "three": lambda: draw.normal(size=(count, 3)).astype(np.float32),
        "pixels": lambda: draw.integers(0, 3, (count, 8, 8)),
        "ignored": lambda: np.where(draw.random((count, 8, 8)) < 0.3, -100, draw.integers(0, 3, (count, 8, 8))),
        "void": lambda: np.where(draw.random((count, 8, 8)) < 0.3, 255, draw.integers(0, 3, (count, 8, 8))),
        "binary": lambda: draw.integers(0, 2, count),
        "late": lambda: np.concatenate([np.zeros(12, int), np.arange(count - 12) % 10]),
        "tags": lambda: draw.integers(0, 2, (count, 8)),
        "soft": lambda: draw.dirichlet(np.ones(10), count).astype(np.float32),
        "hot": lambda: np.eye(10, dtype=np.int64)[draw.integers(0, 10, count)],
    }[kind]()
    return ImageDataset(kind, images, labels, images, labels)


def tried(kind: str, edits: list[tuple[str, str]]) -> None:
    """What a copy with these edits does before it compiles its first step, on the host alone."""
    text = SCRIPT
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    copied = types.ModuleType("copied")
    copied.__file__ = str(ROOT / "simple_mnist_tpu.py")
    exec(compile(text, copied.__file__, "exec"), vars(copied))
    plain = SimpleNamespace(is_plain=True)
    copied.train_step.watch = copied.eval_step.watch = plain
    config, device, nothing = MnistConfig(), torch.device("cpu"), contextlib.nullcontext
    run = SimpleNamespace(config=config, device=device, phase=lambda _: nothing(), in_plain_pytorch=nothing)
    run.print = print
    dataset = dataset_of(kind)
    torch.manual_seed(0)
    model = copied.build_model(config, dataset)
    more = vars(copied).get("more_of_the_step", lambda config: ())(config)
    state, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    copied.check_model(model, dataset, copied.evaluate, run)
    made = vars(copied).get("optimizer_of", lambda config, model: make_optimizer(config, model.parameters()))
    optimizer, metrics = made(config, model), DeviceMetrics(["loss", "norm"], 4, device)
    rates, batch = learning_rates(config, 40), [torch.from_numpy(array) for array in dataset.first(16)]
    arguments = (model, *more, optimizer, rates, metrics, *batch, config)
    saved = {f"part_{number}": one for number, one in enumerate((model, *more, optimizer, metrics))}
    check_training(run, copied.train_step, arguments, {}, batch, Unsaved(Tracked(saved)))
    assert torch.equal(drawn, torch.get_rng_state()) and int(metrics.step) == 0
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_before_anything_is_compiled(name):
    kind, edits, said = REFUSED[name]
    with pytest.raises(InputError, match=f"(?s){said}"):
        tried(kind, edits)


@pytest.mark.parametrize("name", SAID)
def test_what_may_be_meant_is_said(name, capsys):
    *tried_on, said = SAID[name]
    tried(*tried_on)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_let_through_without_a_word(name, capsys):
    tried(*RIGHT[name])
    assert [line for line in capsys.readouterr().out.splitlines() if "draws random numbers" not in line] == []


def test_the_benchmark_of_copies_has_each_kind():
    """benchmarks/copies.py makes the same edits, of the script as it trains."""
    from benchmarks import copies  # it imports this file

    for kind in copies.KINDS:
        compile(copies.copy_of(kind, ROOT / "simple_mnist_tpu.py", in_a_run=True), kind, "exec")
