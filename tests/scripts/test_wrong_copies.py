"""Copies of a script with the mistakes that people make: refused before anything is compiled, with both numbers.

Each mistake is an edit of simple_mnist_tpu.py. docs/make_it_yours.md says which are not found, and why.
"""

import contextlib
import types
from textwrap import dedent, indent
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
# another kind of model: one output for each image, or a class for each pixel
ONE = [swap(HEAD, "10", "1")]
PIXELS = [
    ("    return ConvNet(dataset.image_size, config.channels, config.hidden_dim)\n", "    return Pixels()\n"),
    (
        "def build_model(",
        "class Pixels(nn.Conv2d):\n    def __init__(self):\n        super().__init__(1, 3, 1)\n\n"
        "    def forward(self, images):\n        return super().forward(images.unsqueeze(1) / 255)\n\n\n"
        "def build_model(",
    ),
]

MEAN = "loss.mean()"


def model_of(text: str) -> list[tuple[str, str]]:
    """Another model, a class Net(num_classes) in place of ConvNet."""
    build = "    return ConvNet(dataset.image_size, config.channels, config.hidden_dim)\n"
    return [(build, "    return Net(10)\n"), ("def build_model(", f"{dedent(text).strip()}\n\n\ndef build_model(")]


def losses(
    each: str, correct: str = "correct = loss * 0", mean: str = MEAN, couples: bool = False
) -> list[tuple[str, str]]:
    """Another loss in both steps. each: Python code that makes `loss`, a value for each label, of images, logits and
    labels. mean: what the training step makes of it. couples: it is said that examples have an effect on each other.
    """
    training, evaluation = (indent(dedent(each).strip(), " " * width) + "\n" for width in (4, 8))
    edits = [(TRAINED, f"{training}    loss = {mean}\n"), (LOSS, evaluation), (CORRECT, "")]
    edits.append((NO_MASK, f"{NO_MASK.replace('labels,', 'loss,')}        {correct}\n"))
    return [*edits, *[("@one_graph  # torch_xla", "@one_graph(couples_examples=True)  # torch_xla")] * couples]


def regression(*edits):
    """The script with a loss of targets, and these edits."""
    changed = [
        (TRAINED, "    loss = F.mse_loss(logits, labels)\n"),
        (CORRECT + LOSS, '        loss = F.mse_loss(logits, labels, reduction="none")\n        correct = loss * 0\n'),
    ]
    return [*ONE, *changed, *edits]


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
VALUE = [*ENCODER, ("return Net(10)", "return Net(1)"), ("images.float() / 255)\n", "images.float() / 255)[:, 0]\n")]
ROWS = model_of("""
    class Net(nn.Linear):  # a result for each row of pixels, (B, 8, outputs)
        def __init__(self, outputs):
            super().__init__(8, outputs)

        def forward(self, images):
            return super().forward(images.float() / 255)
    """)
SCORES = [*ROWS, ("return Net(10)", "return Net(1)"), ("images.float() / 255)\n", "images.float() / 255)[..., 0]\n")]
HALVES = model_of("""
    class Net(nn.Linear):  # two views of an image, its upper and its lower half
        def __init__(self, outputs):
            super().__init__(32, outputs)

        def forward(self, images):
            upper, lower = (images.float() / 255).flatten(1).chunk(2, 1)
            return F.normalize(super().forward(upper), dim=1), F.normalize(super().forward(lower), dim=1)
    """)
TWO_HEADS = model_of("""
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.classes, self.value, self.scales = nn.Linear(64, 10), nn.Linear(64, 1), nn.Parameter(torch.zeros(2))

        def forward(self, images):
            x = images.flatten(1).float() / 255
            return self.classes(x), self.value(x)[:, 0], self.scales
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
QUEUE = model_of("""
    class Net(nn.Module):  # momentum contrast: negatives are the last batches, in a buffer
        def __init__(self, outputs):
            super().__init__()
            self.body = nn.Linear(32, outputs)
            self.register_buffer("queue", F.normalize(torch.randn(64, outputs), dim=1))

        def forward(self, images):
            upper, lower = (F.normalize(self.body(x), dim=1) for x in (images.float() / 255).flatten(1).chunk(2, 1))
            logits = torch.cat([(upper * lower).sum(1, keepdim=True), upper @ self.queue.clone().T], 1)
            if self.training:
                self.queue.copy_(torch.cat([lower.detach(), self.queue])[: len(self.queue)])
            return logits
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
EXPERTS = model_of("""
    class Net(nn.Module):  # a mixture of experts; the loss that balances them is left in an attribute
        def __init__(self, outputs):
            super().__init__()
            self.gate, self.experts = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, outputs) for _ in range(4))

        def forward(self, images):
            x = images.flatten(1).float() / 255
            shares = self.gate(x).softmax(1)
            self.balance = 4 * (shares.mean(0) * F.one_hot(shares.argmax(1), 4).float().mean(0)).sum()
            return (torch.stack([one(x) for one in self.experts], 1) * shares[..., None]).sum(1)
    """)
CODEBOOK = model_of("""
    class Net(nn.Module):  # a quantised autoencoder; its codebook follows the codes by a moving average
        def __init__(self, outputs):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(8, 64)
            self.register_buffer("codebook", torch.randn(16, 8))
            self.register_buffer("counts", torch.ones(16))
            self.register_buffer("sums", self.codebook.clone())

        def forward(self, images):
            codes = self.encoder(images.flatten(1).float() / 255)
            nearest = F.one_hot(torch.cdist(codes, self.codebook).argmin(1), 16).float()
            if self.training:
                self.counts.mul_(0.9).add_(nearest.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(nearest.T @ codes.detach(), alpha=0.1)
                self.codebook.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])
            quantised = nearest @ self.codebook.clone()
            return self.decoder(codes + (quantised - codes).detach()), codes, quantised
    """)
ANGULAR = model_of("""
    class Net(nn.Module):  # a margin that training alone has: forward takes the labels
        def __init__(self, outputs):
            super().__init__()
            self.body, self.classes = nn.Linear(64, 16), nn.Parameter(torch.randn(outputs, 16))

        def forward(self, images, labels=None):
            x = F.normalize(self.body(images.flatten(1).float() / 255), dim=1)
            cosines = x @ F.normalize(self.classes, dim=1).T
            if labels is not None:
                hot = F.one_hot(labels.long(), cosines.shape[1]) > 0
                cosines = torch.where(hot, torch.cos(torch.acos(cosines.clamp(-0.999, 0.999)) + 0.2), cosines)
            return 8 * cosines
    """)
FOURIER = model_of("""
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.filter, self.head = nn.Parameter(torch.randn(8, 5)), nn.Linear(64, outputs)

        def forward(self, images):
            x = torch.fft.irfft2(torch.fft.rfft2(images.float() / 255) * self.filter, s=(8, 8))
            return self.head(x.flatten(1))
    """)
CHAIN = model_of("""
    class Net(nn.Module):  # tags of a sequence that depend on each other: a conditional random field
        def __init__(self, outputs):
            super().__init__()
            self.body, self.transitions = nn.Linear(8, 2), nn.Parameter(torch.zeros(2, 2))

        def forward(self, images):
            return self.body(images.float() / 255)
    """)
CAPSULES = model_of("""
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.votes = nn.Parameter(0.1 * torch.randn(16, outputs, 4, 4))

        def forward(self, images):
            x = (images.float() / 255).reshape(-1, 16, 4)
            votes = torch.einsum("bif,iofd->biod", x, self.votes)
            routes = torch.zeros_like(votes[..., 0])
            for _ in range(3):
                total = (routes.softmax(2)[..., None] * votes).sum(1)
                size = total.square().sum(2, keepdim=True)
                out = total * size / (1 + size) / (size + 1e-8).sqrt()
                routes = routes + (votes * out[:, None]).sum(3)
            return (out.square().sum(2) + 1e-8).sqrt()
    """)
FLOW = model_of("""
    class Net(nn.Module):  # a normalising flow: a matrix and a coupling layer; returns nats of an image
        def __init__(self, outputs):
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(64) + 0.01 * torch.randn(64, 64))
            self.scale, self.shift = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, images):
            first, second = ((images.float().flatten(1) / 255 - 0.5) @ self.matrix).chunk(2, 1)
            scale = torch.tanh(self.scale(first))
            second = second * scale.exp() + self.shift(first)
            size = torch.cat([first, second], 1).square().sum(1)
            return 0.5 * size - scale.sum(1) - torch.linalg.slogdet(self.matrix)[1]
    """)
EMBEDDED = model_of("""
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.table, self.head = nn.EmbeddingBag(256, 8, mode="mean"), nn.Linear(8, outputs)

        def forward(self, images):
            return self.head(self.table(images.flatten(1).long()))
    """)
BOUNDED = [("nn.EmbeddingBag(256, 8, mode", "nn.EmbeddingBag(256, 8, max_norm=1.0, mode")]
UNET = model_of("""
    class Net(nn.Module):  # a class for each pixel; the way up by a transposed convolution and by interpolation
        def __init__(self, outputs):
            super().__init__()
            self.down, self.inner = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
            self.up, self.head = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(24, outputs, 1)

        def forward(self, images):
            x = F.gelu(self.down(images.unsqueeze(1).float() / 255))
            y = F.gelu(self.inner(x))
            wide = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
            return self.head(torch.cat([x, self.up(y), wide], 1))
    """)
LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):  # slow weights that follow every fifth step
    def __init__(self, inner):
        self.inner, self.count, self.defaults = inner, 0, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = [one.detach().clone() for group in inner.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 5 == 0:
            fast = [one for group in self.param_groups for one in group["params"]]
            for slow, one in zip(self.slow, fast):
                one.copy_(slow.lerp_(one, 0.5))

    def state_dict(self):
        return self.inner.state_dict()


def optimizer_of(config, model):
    return Lookahead(make_optimizer(config, model.parameters()))


def build_model("""
TO_LOGITS = "        logits = model(images)\n    "
"""In the training step alone."""
# what an evaluation computes from all of its batches at once
COUNTS = "        return torch.stack([(correct * counted).sum(), (loss * counted).sum(), counted.sum()])\n"
TABLE = (
    COUNTS,
    "        hot = F.one_hot(labels.long(), 10).float() * mask[:, None]\n"
    "        return hot.T @ F.one_hot(logits.argmax(1), 10).float()\n",
)
RESULTS = (COUNTS, "        return logits.softmax(1), labels, mask\n")
ALL_RESULTS = (
    "        " + READ,
    "        scores, labels, mask = (torch.cat([one[i].cpu() for one in sums]) for i in range(3))\n"
    "        from sklearn.metrics import roc_auc_score\n"
    "        scores = scores[mask > 0].double()\n"
    "        areas = roc_auc_score(labels[mask > 0], scores / scores.sum(1, keepdim=True), multi_class='ovr')",
)
ONE_HALF = (  # gradients of two halves of the batch add up
    "    loss.backward()\n",
    "    loss = loss * 0\n"
    "    for half, some in zip(images.chunk(2), labels.chunk(2)):\n"
    "        part = F.cross_entropy(model(half).float(), some.long(), reduction='sum') / len(images)\n"
    "        part.backward()\n"
    "        loss = loss + part.detach()\n",
)
SHARPNESS = (  # sharpness-aware minimisation: the gradient a little uphill
    TRAINED,
    TRAINED
    + "    parameters = list(model.parameters())\n"
    + "    moves = [0.01 * one for one in torch.autograd.grad(loss, parameters)]\n"
    + "    with torch.no_grad():\n"
    + "        for parameter, move in zip(parameters, moves):\n            parameter.add_(move)\n"
    + "    uphill = F.cross_entropy(model(images), labels.long())\n"
    + "    uphill.backward()\n"
    + "    with torch.no_grad():\n"
    + "        for parameter, move in zip(parameters, moves):\n            parameter.sub_(move)\n",
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
    (LOSS, "        loss = (logits.mean(1) - 0.5).square()\n"),
    (CORRECT, ""),
    after(NO_MASK, "        correct = loss * 0\n"),
    ("@one_graph  # torch_xla", "@one_graph(couples_examples=True)  # torch_xla"),
]
PINBALL = """
    shares = torch.linspace(0.1, 0.9, 10, device=logits.device)
    error = labels[:, None] - logits
    loss = torch.maximum(shares * error, (shares - 1) * error)
"""
MIXTURE = """
    weights, means, scales = logits[:, :9].float().chunk(3, 1)
    each = weights.log_softmax(1) - scales - 0.5 * ((labels[:, None] - means) / scales.exp()).square()
    loss = -torch.logsumexp(each, 1)
"""
DICE = """
    share, there = logits.sigmoid().flatten(1), (labels > 0).float()
    loss = 1 - (2 * (share * there).sum(1) + 1) / (share.sum(1) + there.sum(1) + 1)
"""
COX = """
    at_risk = (labels[:, :1].T >= labels[:, :1]).float()
    loss = torch.log((at_risk * logits.exp()[None]).sum(1)) - logits
"""
RANKING = """
    better = (labels[:, :, None] > labels[:, None]).float()
    loss = (F.softplus(logits[:, None] - logits[:, :, None]) * better).sum((1, 2)) / better.sum((1, 2)).clamp(min=1)
"""
TRIPLETS = """
    distance = (logits[:, None] - logits[None]).square().sum(2).add(1e-6).sqrt()
    same = (labels[:, None] == labels[None]).float()
    loss = F.relu((distance * same).amax(1) - (distance + 100 * same).amin(1) + 0.5)
"""
QUANTISED = """
    made, codes, quantised = logits
    loss = (made - images.flatten(1) / 255).square().mean(1) + 0.25 * (codes - quantised.detach()).square().mean(1)
"""
FORWARD_SUMS = """
    path = F.one_hot(labels.long(), 2).float()
    total = (logits * path).sum((1, 2))
    total = total + torch.einsum("bti,ij,btj->b", path[:, :-1], model.transitions, path[:, 1:])
    sums = logits[:, 0]
    for t in range(1, 8):
        sums = torch.logsumexp(sums[:, :, None] + model.transitions, 1) + logits[:, t]
    loss = torch.logsumexp(sums, 1) - total
"""
MARGINS = """
    hot = F.one_hot(labels.long(), 10).float()
    loss = (hot * F.relu(0.9 - logits).square() + 0.5 * (1 - hot) * F.relu(logits - 0.1).square()).sum(1)
"""
DECORRELATED = """
    upper, lower = ((x - x.mean(0)) / (x.std(0) + 1e-3) for x in logits)
    cross = upper.T @ lower / len(upper)
    loss = (cross - torch.eye(10, device=cross.device)).square().mean()
"""
LANGEVIN = """
    made = torch.rand(images.shape, device=images.device) * 255
    for _ in range(3):
        (slope,) = torch.autograd.grad(model(made.requires_grad_()).sum(), made)
        made = (made - 100 * slope + torch.randn_like(made)).detach()
    energy = model(made)
    loss = (logits - energy).mean() + 0.1 * (logits.square() + energy.square()).mean()
"""
AGAIN = """
    again = model(images).float()
    loss = loss + F.kl_div(again.log_softmax(1), logits.softmax(1), reduction='batchmean')
"""
ALIGNED = (TRAINED, "    upper, lower = logits\n    which = torch.arange(len(upper), device=upper.device)\n")
CONTRASTIVE = [
    *HALVES,
    swap(LOGITS, "logits = model(images).float()", "upper, lower = model(images)"),
    (LOSS, "        loss = (upper - lower).square().sum(1)\n"),
    (CORRECT, ""),
    after(NO_MASK, "        correct = loss * 0\n"),
    (ALIGNED[0], ALIGNED[1] + "    loss = F.cross_entropy(upper @ lower.T / 0.2, which)\n"),
]
COUPLES = ("@one_graph  # torch_xla", "@one_graph(couples_examples=True)  # torch_xla")
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
    "mask on the logits": (
        [after(LOGITS, "        logits *= mask[:, None]\n"), swap(SUMS, "(correct * counted)", "correct")],
        "of the same in",
    ),
    "accuracy of a fixed batch size": ([swap(RESULT, "loss / count", "loss / (512 * len(sums))")], OTHER),
    "targets (N, 1), mask (B,)": ("column", regression(WHOLE_MASK), "of the same in"),
    "targets (N, 3), mask (B,)": (
        "three",
        [*regression(WHOLE_MASK), (HEAD.replace("10", "1"), HEAD.replace("10", "3"))],
        "fails on 11 examples",
    ),
    "output (B, 1), targets (N,)": ("targets", regression(), "Using a target size .* a value for each label"),
    "targets (N, 1), output (B,)": (
        "column",
        regression((FORWARD, "        return self.head(x)[:, 0]\n")),
        "Using a target size .* a value for each label",
    ),
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
    "coupled on purpose: gradients add up": (
        [*CONTRASTIVE, COUPLES, ("    optimizer.zero_grad(set_to_none=True)", "    #")],
        "leaves gradients behind",
    ),
    "coupled on purpose: no step": (
        [*CONTRASTIVE, COUPLES, ("step_optimizer(optimizer,", "(lambda *_: None)(optimizer,")],
        "changes no parameter",
    ),
    "a critic keeps its gradients": (
        [*ENCODER, ("return Net(10)", "return Net(64)"), *CRITIC, ("    of_critic.zero_grad(set_to_none=True)\n", "")],
        "leaves gradients behind",
    ),
    "contrastive, and not said to be": (CONTRASTIVE, "couples_examples=True"),
    "triplets, and not said to be": ([*ENCODER, losses(TRIPLETS)[0]], "couples_examples=True"),
    "soft labels: loss without the mask": (
        "soft",
        [
            *losses("loss = F.cross_entropy(logits.float(), labels, reduction='none')"),
            swap(SUMS, "(loss * counted).sum()", "loss.sum()"),
        ],
        "of the same in",
    ),
    "soft labels: softmax over the batch": (
        "soft",
        [
            *losses("loss = F.cross_entropy(logits.float(), labels, reduction='none')"),
            ("        logits = model(images)\n    ", "        logits = (30 * model(images)).softmax(0)\n    "),
        ],
        "effect on each other",
    ),
    "one logit, each with each": (
        "binary",
        [*ONE, *losses("loss = F.softplus(-logits * (2 * labels.float() - 1))")],
        "of the same in|effect on each other|fails on 11|expected the same shape",
    ),
    "tags: accuracy over examples": (
        "tags",
        [
            *ROWS,
            ("return Net(10)", "return Net(2)"),
            *losses(
                "loss = F.cross_entropy(logits.float().transpose(1, 2), labels.long(), reduction='none')",
                "correct = (logits.argmax(2) == labels).float()",
            ),
            swap(SUMS, "counted.sum()]", "mask.sum()]"),
        ],
        "expected 0 to 1: a sum over labels",
    ),
    "autoencoder without the mask": (
        [
            *ENCODER,
            ("return Net(10)", "return Net(64)"),
            *losses("loss = (logits - images.flatten(1) / 255).square().mean(1)"),
            (SUMS, "[(correct * counted).sum(), loss.sum(), counted.sum()]"),
        ],
        OTHER,
    ),
    "F1 of each batch, averaged": (
        [
            TABLE,
            ("        " + READ, "        tables = [one.cpu().double() for one in sums]"),
            (
                RESULT,
                "return dict(f1=sum((2 * t.diagonal() / (t.sum(0) + t.sum(1) + 1e-9)).mean().item() for t in tables)"
                " / len(tables))",
            ),
        ],
        "of the same in",
    ),
    "rows of padding are no numbers": ([*ATTENTION, ("-1e9", "float('-inf')")], "(?i)padding.*nan|nan.*padding"),
    "an evaluation fills the queue": (
        [*QUEUE, *losses("loss = F.cross_entropy(logits, labels.long() * 0, reduction='none')"), (EVAL, "")],
        "changes the model: queue",
    ),
    "a number that a module counts": (
        [
            after(HEAD, "        self.temperature = 2.0\n"),
            (
                FORWARD,
                "        self.temperature = max(1.0, self.temperature * 0.9)\n"
                "        return self.head(x) / self.temperature\n",
            ),
        ],
        "temperature",
    ),
}
REFUSED = with_labels(REFUSED)
REFUSED |= {
    "look ahead every fifth step": ("classes", [("def build_model(", LOOKAHEAD)], r"optimizer.count \(0 -> 1\)"),
    "embeddings of bounded norm": ("classes", [*EMBEDDED, *BOUNDED], "changes the model: table.weight.*max_norm"),
}
LOSSES = "the training step gives a loss of"
SAID = {  # the run goes on
    "numpy's generator in the step": (
        [
            ("import torch\n", "import numpy as np\nimport torch\n"),
            swap(TRAINED, "logits.float()", "logits.float() * np.random.uniform(0.5, 1.5)"),
        ],
        "draws from numpy's generator",
    ),
    "Python's generator in the step": (
        [
            ("import sys\n", "import random\nimport sys\n"),
            swap(TRAINED, "logits.float()", "logits.float() * random.uniform(0.5, 1.5)"),
        ],
        "draws from python's generator",
    ),
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
    "targets (N, 1)": ("column", regression()),
    "targets (N, 3)": ("three", [*regression(), (HEAD.replace("10", "1"), HEAD.replace("10", "3"))]),
    "a class for each pixel": ("pixels", PIXELS),
    "some pixels ignored": ("ignored", PIXELS),
    "one logit, classes 0 and 1": (
        "binary",
        [
            *VALUE,
            *losses(
                "loss = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction='none')",
                "correct = ((logits > 0) == labels).float()",
            ),
        ],
    ),
    "ordinal classes": [
        swap(HEAD, "10", "9"),
        *losses(
            "above = (labels[:, None] > torch.arange(9, device=labels.device)).float()\n"
            "loss = F.binary_cross_entropy_with_logits(logits.float(), above, reduction='none').sum(1)",
            "correct = ((logits > 0).sum(1) == labels).float()",
        ),
    ],
    "tags (B, T, C)": (
        "tags",
        [
            *ROWS,
            *losses(
                "loss = F.cross_entropy(logits.float().transpose(1, 2), labels.long(), reduction='none')",
                "correct = (logits.argmax(2) == labels).float()",
            ),
        ],
    ),
    "CTC": (
        "tags",
        [
            *ROWS,
            *losses(
                "frames = torch.full((len(images),), 8)\nloss = F.ctc_loss(\n"
                "    logits.log_softmax(2).transpose(0, 1), labels[:, :3].long().clamp(min=1), frames, frames * 0 + 3,"
                " reduction='none',\n)"
            ),
        ],
    ),
    "autoencoder, classes not used": [
        *ENCODER,
        ("return Net(10)", "return Net(64)"),
        *losses("loss = (logits - images.flatten(1) / 255).square().mean(1)"),
    ],
    "autoencoder whose code is drawn": [*NOISY, *losses("loss = (logits - images.flatten(1) / 255).square().mean(1)")],
    "diffusion": [
        *ENCODER,
        ("return Net(10)", "return Net(64)"),
        ("images.float() / 255)\n", "images)\n"),
        (
            LOGITS,
            "        noise = torch.randn(len(images), 64, device=images.device)\n"
            "        logits = model(images.flatten(1) / 255 + noise)\n",
        ),
        (
            "        logits = model(images)\n    ",
            "        noise = torch.randn(len(images), 64, device=images.device)\n"
            "        logits = model(images.flatten(1) / 255 + noise)\n    ",
        ),
        ("nn.Flatten(), ", "nn.Flatten(), nn.Identity(), "),
        *losses("loss = (logits - noise).square().mean(1)"),
    ],
    "contrastive": [*CONTRASTIVE, COUPLES],
    "triplets": [*ENCODER, losses(TRIPLETS)[0], COUPLES],
    "a queue of negatives": [
        *QUEUE,
        *losses("loss = F.cross_entropy(logits, labels.long() * 0, reduction='none')", couples=True),
    ],
    "a generator and its critic": [*ENCODER, ("return Net(10)", "return Net(64)"), *CRITIC],
    "soft labels": ("soft", losses("loss = F.cross_entropy(logits.float(), labels, reduction='none')")),
    "label distributions": (
        "soft",
        losses("loss = F.kl_div(logits.float().log_softmax(1), labels, reduction='none').sum(1)"),
    ),
    "two normalisers": (
        "binary",
        [
            *VALUE,
            *losses(
                "loss = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction='none')",
                mean="loss.mean() + 1e-4 * (loss * labels).sum() / labels.sum().clamp(min=1)",
            ),
        ],
    ),
    "CutMix": [
        (
            TRAINED,
            TRAINED.replace(
                "F.cross", "0.75 * F.cross_entropy(logits.float(), labels.long()) + 0.25 * F.cross"
            ).replace("labels.long())\n", "labels.flip(0).long())\n"),
        ),
        COUPLES,
        (
            "        logits = model(images)\n    ",
            (
                "        half = (torch.arange(8, device=images.device) < 6).to(images.dtype)\n"
                "        logits = model(images * half + images.flip(0) * (1 - half))\n    "
            ),
        ),
    ],
    "macro F1": [
        TABLE,
        ("        " + READ, "        table = sum(one.cpu().double() for one in sums)"),
        (RESULT, "return dict(f1=(2 * table.diagonal() / (table.sum(0) + table.sum(1)).clamp(min=1)).mean().item())"),
    ],
    "macro AUC, the first examples of one class": ("late", [RESULTS, ALL_RESULTS, (RESULT, "return dict(area=areas)")]),
    "hinge": losses("loss = F.multi_margin_loss(logits.float(), labels.long(), reduction='none')"),
    "focal": losses(
        "nats = F.cross_entropy(logits.float(), labels.long(), reduction='none')\n"
        "loss = (1 - (-nats).exp()) ** 2 * nats",
        "correct = (logits.argmax(1) == labels).float()",
    ),
    "counts": ("counts", [*VALUE, *losses("loss = F.poisson_nll_loss(logits, labels.float(), reduction='none')")]),
    "quantiles": (
        "targets",
        [*ENCODER, *losses(PINBALL, "correct, counted = loss * 0, mask[:, None].expand(loss.shape)")],
    ),
    "a mixture of densities": ("targets", [*ENCODER, *losses(MIXTURE)]),
    "two heads": (
        "two",
        [
            *TWO_HEADS,
            swap(LOGITS, ".float()", ""),
            *losses(
                "loss = F.cross_entropy(logits[0], labels[:, 0].long(), reduction='none') * (-logits[2][0]).exp()\n"
                "loss = loss + (logits[1] - labels[:, 1]).square() * (-logits[2][1]).exp() + logits[2].sum()"
            ),
        ],
    ),
    "pairs": (
        "same",
        [
            *HALVES,
            swap(LOGITS, ".float()", ""),
            *losses(
                "distance = (logits[0] - logits[1]).square().sum(1).add(1e-6).sqrt()\n"
                "loss = labels * distance.square() + (1 - labels) * F.relu(1 - distance).square()"
            ),
        ],
    ),
    "dice of each example": ("region", [*ENCODER, ("return Net(10)", "return Net(64)"), *losses(DICE)]),
    "survival": (
        "survival",
        [
            *VALUE,
            *losses("loss = labels[:, 0] * logits.exp() - labels[:, 1] * logits"),
            (
                "    loss = labels[:, 0] * logits.exp() - labels[:, 1] * logits\n    loss",
                indent(dedent(COX).strip(), "    ") + "\n    loss",
            ),
            ("    loss = loss.mean()\n", "    loss = (loss * labels[:, 1]).sum() / labels[:, 1].sum().clamp(min=1)\n"),
            COUPLES,
        ],
    ),
    "ranking within lists": ("relevance", [*SCORES, *losses(RANKING)]),
    "a transformer's encoder": TRANSFORMER,
    "a set with padding": ATTENTION,
    "two halves of a batch": [ONE_HALF],
    "sharpness-aware": [SHARPNESS, ("    loss.backward()\n", "")],
    "gradient penalty": [
        (
            TRAINED,
            TRAINED
            + "    (slopes,) = torch.autograd.grad(logits.logsumexp(1).sum(), pixels, create_graph=True)\n"
            + "    loss = loss + 1e-6 * slopes.flatten(1).square().sum(1).mean()\n",
        ),
        (
            "        logits = model(images)\n    ",
            "        pixels = images.float().requires_grad_()\n        logits = model(pixels)\n    ",
        ),
    ],
    "rates, decay and betas of groups": [
        (
            "def build_model(",
            "def optimizer_of(config, model):\n"
            "    head = dict(params=model.head.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.8, 0.9))\n"
            "    rest = [one for name, one in model.named_parameters() if 'head' not in name]\n"
            "    return make_optimizer(config, [head, dict(params=rest)])\n\n\ndef build_model(",
        )
    ],
    "experts that are balanced": [*EXPERTS, after(TRAINED, "    loss = loss + 0.01 * model.balance\n"), COUPLES],
    "a codebook that follows": [*CODEBOOK, swap(LOGITS, ".float()", ""), *losses(QUANTISED)],
    "a filter in Fourier space": FOURIER,
    "a conditional random field": ("tags", [*CHAIN, *losses(FORWARD_SUMS)]),
    "the hardest examples of a batch": [
        (TRAINED, TRAINED.replace("long())", "long(), reduction='none')") + "    loss = loss.topk(4).values.mean()\n"),
        COUPLES,
    ],
    "stochastic depth": [
        (
            HIDDEN,
            HIDDEN
            + "        if self.training:\n"
            + "            x = x * (torch.rand(len(x), 1, device=x.device) < 0.8) / 0.8\n",
        )
    ],
    "capsules with routing": [*CAPSULES, *losses(MARGINS, "correct = (logits.argmax(1) == labels).float()")],
    "a flow with a determinant": [*FLOW, *losses("loss = logits / 64")],
    "a bag of embeddings": EMBEDDED,
    "a U-net": ("pixels", UNET),
    "a penalty that grows with the step": [
        after(TRAINED, "    loss = loss + metrics.step[0].float() / 20 * model.head.weight.square().mean()\n")
    ],
    "two passes that agree": [*DROPPED, (TRAINED, TRAINED + indent(dedent(AGAIN).strip(), "    ") + "\n")],
    "decorrelated views": [*CONTRASTIVE[:-1], (TRAINED, indent(dedent(DECORRELATED).strip(), "    ") + "\n"), COUPLES],
    "the median of all errors": (
        "targets",
        [
            *VALUE,
            (TRAINED, "    loss = F.l1_loss(logits, labels)\n"),
            (CORRECT + LOSS + NO_MASK + COUNTS, "        return (logits - labels).abs(), mask\n"),
            ("        " + READ, "        errors = torch.cat([one.cpu()[mask.cpu() > 0] for one, mask in sums])"),
            (RESULT, "return dict(test_loss=errors.mean().item(), median=errors.median().item())"),
        ],
    ),
    "mixup by a Beta distribution": [
        (
            TO_LOGITS,
            "        share = torch.distributions.Beta(0.4, 0.4).sample((len(images), 1, 1)).to(images.device)\n"
            "        logits = model(share * images + (1 - share) * images.flip(0))\n    ",
        ),
        COUPLES,
    ],
    "a frozen layer": [after(HEAD, "        self.conv1.requires_grad_(False)\n")],
}
RIGHT = with_labels(RIGHT)

MEANT = {  # right, and it is said that the losses of the two steps differ, as they are meant to
    "an angular margin": [*ANGULAR, swap(TO_LOGITS, "images", "images, labels")],
    "an evaluation of mirrored images too": [
        (LOGITS, "        logits = (model(images) + model(images.flip(2))).float() / 2\n")
    ],
    "an energy sampled by Langevin": [
        *VALUE,
        (TRAINED, indent(dedent(LANGEVIN).strip(), "    ") + "\n"),
        (CORRECT + LOSS, "        loss = logits\n"),
        after(NO_MASK, "        correct = loss * 0\n"),
    ],
    "a penalty on singular values": [
        after(TRAINED, "    loss = loss + 1e-3 * torch.linalg.svdvals(model.head.weight).sum()\n")
    ],
}
MEANT = with_labels(MEANT)
SAID |= {name: (*copy, LOSSES) for name, copy in MEANT.items()}


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
        "counts": lambda: draw.poisson(2, count),
        "late": lambda: np.concatenate([np.zeros(12, int), np.arange(count - 12) % 10]),
        "tags": lambda: draw.integers(0, 2, (count, 8)),
        "soft": lambda: draw.dirichlet(np.ones(10), count).astype(np.float32),
        "two": lambda: np.stack([draw.integers(0, 10, count), draw.normal(size=count)], 1).astype(np.float32),
        "same": lambda: draw.integers(0, 2, count).astype(np.float32),
        "region": lambda: draw.integers(0, 2, (count, 64)).astype(np.float32),
        "survival": lambda: np.stack([draw.exponential(size=count), draw.integers(0, 2, count)], 1).astype(np.float32),
        "relevance": lambda: draw.integers(0, 4, (count, 8)).astype(np.float32),
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
