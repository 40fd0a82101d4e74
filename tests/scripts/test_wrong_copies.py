"""Copies of a script with the mistakes that people make: refused before anything is compiled, with both numbers.

Each mistake is an edit of simple_mnist_tpu.py. docs/make_it_yours.md says which are not found, and why.
"""

import contextlib
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import ROOT

from config import MnistConfig
from images.arrays import ImageDataset
from tpu_utils.checkpoint.state import Tracked
from tpu_utils.errors import InputError
from tpu_utils.first_step import check_training
from tpu_utils.metrics import DeviceMetrics
from tpu_utils.optim import learning_rates, make_optimizer
from tpu_utils.unsaved import Unsaved

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
NORMED = [
    (HEAD, HEAD + "        self.norm = nn.BatchNorm1d(hidden_dim)\n"),
    (HIDDEN, HIDDEN + "        x = self.norm(x)\n"),
]
DROPPED = [(HIDDEN, HIDDEN + "        x = F.dropout(x, 0.5, self.training)\n")]
# another kind of model: one output for each image, or a class for each pixel
ONE = [(HEAD, HEAD.replace("10", "1"))]
PIXELS = [
    ("    return ConvNet(dataset.image_size, config.channels, config.hidden_dim)\n", "    return Pixels()\n"),
    (
        "def build_model(",
        "class Pixels(nn.Conv2d):\n    def __init__(self):\n        super().__init__(1, 3, 1)\n\n"
        "    def forward(self, images):\n        return super().forward(images.unsqueeze(1) / 255)\n\n\n"
        "def build_model(",
    ),
]


def regression(*edits):
    """The script with a loss of targets, and these edits."""
    changed = [
        (TRAINED, "    loss = F.mse_loss(logits, labels)\n"),
        (CORRECT + LOSS, '        loss = F.mse_loss(logits, labels, reduction="none")\n        correct = loss * 0\n'),
    ]
    return [*ONE, *changed, *edits]


NO_MASK = "        counted = labels_that_count(labels, mask)  # 0 for padding\n"
WHOLE_MASK = (NO_MASK, "        counted = mask\n")
OTHER = "in batches of 4, the last one padded; expected the same"
# name: (labels, edits, what is said)
REFUSED = {
    "loss without the mask": ("classes", [(SUMS, SUMS.replace("(loss * counted).sum()", "loss.sum()"))], OTHER),
    "accuracy without the mask": (
        "classes",
        [(SUMS, SUMS.replace("(correct * counted)", "correct"))],
        "of the same in",
    ),
    "mean in place of the sum": ("classes", [(SUMS, SUMS.replace("* counted).sum()", "* counted).mean()"))], OTHER),
    "padding counted": ("classes", [(SUMS, SUMS.replace("counted.sum()]", "torch.ones_like(counted).sum()]"))], OTHER),
    "loss already averaged": ("classes", [(LOSS, LOSS.replace(', reduction="none"', ""))], OTHER),
    "accuracy already averaged": (
        "classes",
        [(CORRECT, CORRECT.replace(".float()", ".float().mean()"))],
        "of the same in",
    ),
    "mean of means": (
        "classes",
        [(READ, "correct, loss, count = (sum(s.cpu().double() / s[2] for s in sums) / len(sums)).tolist()")],
        "of the same in",
    ),
    "divided by the number of batches": (
        "classes",
        [(RESULT, RESULT.replace("loss / count", "loss / len(sums)"))],
        OTHER,
    ),
    "softmax over the batch": ("classes", [(LOGITS, LOGITS.replace(".float()", ".float().softmax(0)"))], OTHER),
    "normalised over the batch": (
        "classes",
        [(FORWARD, "        return F.normalize(self.head(x), dim=0)\n")],
        "of the same in",
    ),
    "centred by the batch": ("classes", [(FORWARD, "        return self.head(x - x.mean(0))\n")], "of the same in"),
    "largest along the batch": (
        "classes",
        [(CORRECT, CORRECT.replace("argmax(1)", "argmax(0)"))],
        "fails on 11 examples",
    ),
    "rows and classes mixed up": (
        "classes",
        [(FORWARD, "        return self.head(x).view(10, -1).T\n")],
        "of the same in",
    ),
    "a tuple of outputs": (
        "classes",
        [(FORWARD, "        return self.head(x), x\n")],
        "expected one that takes what the",
    ),
    "dropout left on": ("classes", [*DROPPED, (EVAL, "")], "draws a mask of dropout"),
    "F.dropout without training=": ("classes", [(HIDDEN, HIDDEN + "        x = F.dropout(x, 0.5)\n")], "self.training"),
    "BatchNorm learns from test data": ("classes", [*NORMED, (EVAL, "")], r"changes the model: norm.running_mean"),
    "left in eval mode": ("classes", [(TRAIN, "")], "leaves the model in eval mode"),
    "accuracy not divided": ("classes", [(RESULT, RESULT.replace("correct / count", "correct"))], "expected 0 to 1"),
    "accuracy in percent": ("classes", [(RESULT, RESULT.replace("correct /", "100 * correct /"))], "expected 0 to 1"),
    "the last batch left out": (
        "classes",
        [("for batch in test_batches]", "for batch in test_batches[:-1]]")],
        "fails on 11",
    ),
    "the first batch alone": (
        "classes",
        [("for batch in test_batches]", "for batch in test_batches[:1]]")],
        "of the same in",
    ),
    "mask as a column": ("classes", [(NO_MASK, "        counted = mask[:, None]\n")], "of the same in|expected 0 to 1"),
    "mask the wrong way round": ("classes", [(NO_MASK, "        counted = 1 - mask\n")], "fails on 11|gives"),
    "mask on the logits": (
        "classes",
        [
            (LOGITS, LOGITS + "        logits *= mask[:, None]\n"),
            (SUMS, SUMS.replace("(correct * counted)", "correct")),
        ],
        "of the same in",
    ),
    "accuracy of a fixed batch size": (
        "classes",
        [(RESULT, RESULT.replace("loss / count", "loss / (512 * len(sums))"))],
        OTHER,
    ),
    "targets (N, 1), mask (B,)": ("column", regression(WHOLE_MASK), "of the same in"),
    "targets (N, 3), mask (B,)": (
        "three",
        [*regression(WHOLE_MASK), (HEAD.replace("10", "1"), HEAD.replace("10", "3"))],
        "fails on 11 examples",
    ),
    "output (B, 1), targets (N,)": (
        "targets",
        regression(),
        "Using a target size .* a value for each label",
    ),
    "targets (N, 1), output (B,)": (
        "column",
        regression((FORWARD, "        return self.head(x)[:, 0]\n")),
        "Using a target size .* a value for each label",
    ),
    "targets as classes": ("targets", [], r"labels here: float32|expected the same shape"),
    "a class for each pixel, mask (B,)": ("pixels", [*PIXELS, WHOLE_MASK], "fails on 11 examples"),
    "accuracy of pixels over examples": (
        "pixels",
        [*PIXELS, (SUMS, SUMS.replace("counted.sum()]", "mask.sum()]"))],
        "expected 0 to 1: a sum over labels",
    ),
    "ignored pixels as a class": ("void", PIXELS, "Target 255 is out of bounds.* expected logits for every class"),
    "one-hot labels": ("hot", [], "one-hot labels as integers"),
    "training: softmax over the batch": (
        "classes",
        [(TRAINED, TRAINED.replace("logits.float()", "logits.softmax(0)"))],
        "effect on each other",
    ),
    "training: each with each": (
        "classes",
        [(TRAINED, "    loss = (logits[:, :1] - labels.float()).square().mean()\n")],
        "effect on each other",
    ),
    "training: gradients add up": (
        "classes",
        [("    optimizer.zero_grad(set_to_none=True)", "    #")],
        "leaves gradients behind",
    ),
    "training: no step": (
        "classes",
        [("step_optimizer(optimizer,", "(lambda *_: None)(optimizer,")],
        "changes no parameter",
    ),
    "training: no backward pass": (
        "classes",
        [("    loss.backward()\n", ""), ("gradient_norm(model.parameters())", "loss")],
        "changes no parameter",
    ),
}
LOSSES = "the training step gives a loss of"
SAID = {  # the run goes on
    "noise in an evaluation": (
        "classes",
        [(LOGITS, LOGITS + "        logits += torch.randn_like(logits)\n")],
        "draws random numbers",
    ),
    "training: the sum in place of the mean": (
        "classes",
        [(TRAINED, TRAINED.replace("long())", 'long(), reduction="sum")'))],
        LOSSES,
    ),
    "training: labels of another class": (
        "classes",
        [(TRAINED, TRAINED.replace("labels.long()", "labels.long() * 0"))],
        LOSSES,
    ),
    "ignored pixels counted in an evaluation": (
        "ignored",
        [*PIXELS, (NO_MASK, "        counted = mask[:, None, None].expand(labels.shape)\n")],
        LOSSES,
    ),
}
RIGHT = {
    "a tuple of outputs": (
        "classes",
        [
            (FORWARD, "        return self.head(x), x\n"),
            (LOGITS, LOGITS.replace("model(images)", "model(images)[0]")),
            ("        logits = model(images)\n", "        logits, _ = model(images)\n"),
        ],
    ),
    "as it is": ("classes", []),
    "BatchNorm": ("classes", NORMED),
    "dropout": ("classes", DROPPED),
    "label smoothing": ("classes", [(TRAINED, TRAINED.replace("long())", "long(), label_smoothing=0.001)"))]),
    "class weights": (
        "classes",
        [
            (TRAINED, TRAINED.replace("long())", "long(), torch.arange(1.0, 11, device=logits.device))")),
        ],
    ),
    "targets (N, 1)": ("column", regression()),
    "targets (N, 3)": ("three", [*regression(), (HEAD.replace("10", "1"), HEAD.replace("10", "3"))]),
    "a class for each pixel": ("pixels", PIXELS),
    "some pixels ignored": ("ignored", PIXELS),
}


def dataset_of(kind: str) -> ImageDataset:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 255, (24, 8, 8), np.uint8)
    labels = {
        "classes": lambda: draw.integers(0, 10, 24),
        "targets": lambda: draw.normal(size=24).astype(np.float32),
        "column": lambda: draw.normal(size=(24, 1)).astype(np.float32),
        "three": lambda: draw.normal(size=(24, 3)).astype(np.float32),
        "pixels": lambda: draw.integers(0, 3, (24, 8, 8)),
        "ignored": lambda: np.where(draw.random((24, 8, 8)) < 0.3, -100, draw.integers(0, 3, (24, 8, 8))),
        "void": lambda: np.where(draw.random((24, 8, 8)) < 0.3, 255, draw.integers(0, 3, (24, 8, 8))),
        "hot": lambda: np.eye(10, dtype=np.int64)[draw.integers(0, 10, 24)],
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
    state, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    copied.check_model(model, dataset, copied.evaluate, run)
    optimizer, metrics = make_optimizer(config, model.parameters()), DeviceMetrics(["loss", "norm"], 4, device)
    rates, batch = learning_rates(config, 40), [torch.from_numpy(array) for array in dataset.first(16)]
    arguments = (model, optimizer, rates, metrics, *batch, config)
    unsaved = Unsaved(Tracked(dict(model=model, optimizer=optimizer, metrics=metrics)))
    check_training(run, copied.train_step, arguments, {}, batch, unsaved)
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
    assert not capsys.readouterr().out
