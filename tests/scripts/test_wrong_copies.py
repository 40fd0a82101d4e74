"""Copies of a script with the mistakes that people make: refused before anything is compiled, with both numbers.

Each mistake is an edit of simple_mnist_tpu.py. docs/make_it_yours.md says which are not found, and why.
"""

import ast
import contextlib
import types
from collections.abc import Callable
from dataclasses import dataclass
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

SCRIPT = (ROOT / "simple_mnist_tpu.py").read_text()


@dataclass(frozen=True)
class Place:
    """The first statement of a function that begins so; "def" is its first line, "@" its decorator."""

    function: str
    start: str

    def to(self, code: str):
        """An edit: this code instead."""
        return self, lambda found: dedent(code)

    def then(self, code: str):
        """An edit: this code behind it."""
        return self, lambda found: found + dedent(code)

    def swap(self, old: str, new: str):
        """An edit of a part of it."""

        def swapped(found: str) -> str:
            assert old in found, f"{old!r} is not in {found!r}"
            return found.replace(old, new)

        return self, swapped

    def lines(self, script: str) -> tuple[int, int]:
        """First and last, counted from 1."""
        nodes = ast.walk(ast.parse(script))
        function = next(node for node in nodes if getattr(node, "name", "") == self.function)
        if self.start == "def":
            return function.lineno, function.lineno
        statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
        found = [node for node in statements[1:] if ast.unparse(node).startswith(self.start)]
        statement = function.decorator_list[0] if self.start == "@" else found[0]
        return statement.lineno, statement.end_lineno

    def edited(self, script: str, change: Callable[[str], str]) -> str:
        lines = script.splitlines(keepends=True)
        first, last = self.lines(script)
        found = "".join(lines[first - 1 : last])
        margin = found[: len(found) - len(found.lstrip())]
        lines[first - 1 : last] = indent(change(dedent(found)).strip(), margin) + "\n"
        return "".join(lines)


HEAD = Place("__init__", "self.head")
HIDDEN = Place("forward", "x = F.relu(self.hidden")
FORWARD = Place("forward", "return")
BUILD = Place("build_model", "return")
TRAIN_LOGITS = Place("train_step", "logits")
TRAIN_LOSS = Place("train_step", "loss =")
BACKWARD = Place("train_step", "loss.backward")
NORM = Place("train_step", "norm = gradient_norm")
STEP = Place("train_step", "skipped")
ZERO_GRAD = Place("train_step", "optimizer.zero_grad")
LOGITS = Place("eval_step", "logits")
CORRECT = Place("eval_step", "correct")
LOSS = Place("eval_step", "loss")
COUNTED = Place("eval_step", "counted")
SUMS = Place("eval_step", "return")
EVAL = Place("evaluate", "model.eval")
BATCHES = Place("evaluate", "sums")
READ = Place("evaluate", "correct")
RESULT = Place("evaluate", "return")

NORMED = [HEAD.then("self.norm = nn.BatchNorm1d(hidden_dim)"), HIDDEN.then("x = self.norm(x)")]
DROPPED = HIDDEN.then("x = F.dropout(x, 0.5, self.training)")
COUPLES = Place("train_step", "@").to("@one_graph(couples_examples=True)")
WHOLE_MASK = COUNTED.to("counted = mask")
ONE = HEAD.swap("10", "1")  # one output for each image
THREE = HEAD.swap("10", "3")
NO_CORRECT = [CORRECT.to("pass"), COUNTED.then("correct = loss * 0")]
REGRESSION = [TRAIN_LOSS.to("loss = F.mse_loss(logits, labels)")]
REGRESSION += [LOSS.to('loss = F.mse_loss(logits, labels, reduction="none")'), *NO_CORRECT]


def losses(each: str, correct: str = "correct = loss * 0", mean: str = "loss.mean()") -> list:
    """Another loss in both steps. each: Python code that makes `loss`, a value for each label, of images, logits and
    labels. mean: what the training step makes of it.
    """
    training = TRAIN_LOSS.to(f"{dedent(each)}\nloss = {mean}")
    return [training, LOSS.to(each), CORRECT.to("pass"), COUNTED.swap("labels,", "loss,"), COUNTED.then(correct)]


def net(text: str, outputs: int = 10) -> list:
    """Another model, a class Net(outputs) in place of ConvNet."""
    return [text, BUILD.to(f"return Net({outputs})")]


# models of other kinds, of images (B, 8, 8)
PIXELS = """
    class Net(nn.Conv2d):  # a class for each pixel
        def __init__(self, outputs):
            super().__init__(1, outputs, 1)

        def forward(self, images):
            return super().forward(images.unsqueeze(1) / 255)
    """
ENCODER = """
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, outputs))

        def forward(self, images):
            return self.body(images.float() / 255)
    """
ROWS = """
    class Net(nn.Linear):  # a result for each row of pixels, (B, 8, outputs)
        def __init__(self, outputs):
            super().__init__(8, outputs)

        def forward(self, images):
            return super().forward(images.float() / 255)
    """
HALVES = """
    class Net(nn.Linear):  # two views of an image, its upper and its lower half
        def __init__(self, outputs):
            super().__init__(32, outputs)

        def forward(self, images):
            upper, lower = (images.float() / 255).flatten(1).chunk(2, 1)
            return F.normalize(super().forward(upper), dim=1), F.normalize(super().forward(lower), dim=1)
    """
TWO_HEADS = """
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.classes, self.value, self.scales = nn.Linear(64, 10), nn.Linear(64, 1), nn.Parameter(torch.zeros(2))

        def forward(self, images):
            x = images.flatten(1).float() / 255
            return self.classes(x), self.value(x)[:, 0], self.scales
    """
NOISY = """
    class Net(nn.Module):  # an autoencoder whose code is drawn, in an evaluation too
        def __init__(self, outputs):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(64, 16), nn.Linear(8, 64)

        def forward(self, images):
            mean, width = self.encoder(images.flatten(1).float() / 255).chunk(2, 1)
            return self.decoder(mean + torch.randn_like(mean) * width.exp())
    """
QUEUE = """
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
    """
ATTENTION = """
    class Net(nn.Module):  # a set of rows of pixels; a row of zeros is padding
        def __init__(self, outputs):
            super().__init__()
            self.score, self.head = nn.Linear(8, 1), nn.Linear(8, outputs)

        def forward(self, images):
            x = images.float() / 255
            score = self.score(x)[..., 0].masked_fill(x.sum(2) == 0, -1e9)
            return self.head((score.softmax(1)[..., None] * x).sum(1))
    """
TRANSFORMER = """
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(8, outputs)

        def forward(self, images):
            return self.head(self.encoder(images.float() / 255).mean(1))
    """
EXPERTS = """
    class Net(nn.Module):  # a mixture of experts; the loss that balances them is left in an attribute
        def __init__(self, outputs):
            super().__init__()
            self.gate, self.experts = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, outputs) for _ in range(4))

        def forward(self, images):
            x = images.flatten(1).float() / 255
            shares = self.gate(x).softmax(1)
            self.balance = 4 * (shares.mean(0) * F.one_hot(shares.argmax(1), 4).float().mean(0)).sum()
            return (torch.stack([one(x) for one in self.experts], 1) * shares[..., None]).sum(1)
    """
CODEBOOK = """
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
    """
ANGULAR = """
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
    """
FOURIER = """
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.filter, self.head = nn.Parameter(torch.randn(8, 5)), nn.Linear(64, outputs)

        def forward(self, images):
            x = torch.fft.irfft2(torch.fft.rfft2(images.float() / 255) * self.filter, s=(8, 8))
            return self.head(x.flatten(1))
    """
CHAIN = """
    class Net(nn.Module):  # tags of a sequence that depend on each other: a conditional random field
        def __init__(self, outputs):
            super().__init__()
            self.body, self.transitions = nn.Linear(8, 2), nn.Parameter(torch.zeros(2, 2))

        def forward(self, images):
            return self.body(images.float() / 255)
    """
CAPSULES = """
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
    """
FLOW = """
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
    """
EMBEDDED = """
    class Net(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.table, self.head = nn.EmbeddingBag(256, 8, mode="mean"), nn.Linear(8, outputs)

        def forward(self, images):
            return self.head(self.table(images.flatten(1).long()))
    """
UNET = """
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
    """
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
    """
GROUPS = """
    def optimizer_of(config, model):
        head = dict(params=model.head.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.8, 0.9))
        rest = [one for name, one in model.named_parameters() if 'head' not in name]
        return make_optimizer(config, [head, dict(params=rest)])
    """
# what an evaluation computes from all of its batches at once
TABLE = """
    hot = F.one_hot(labels.long(), 10).float() * mask[:, None]
    return hot.T @ F.one_hot(logits.argmax(1), 10).float()
"""
F1 = "(2 * table.diagonal() / (table.sum(0) + table.sum(1)).clamp(min=1e-9)).mean().item()"
AREAS = """
    scores, labels, mask = (torch.cat([one[i].cpu() for one in sums]) for i in range(3))
    from sklearn.metrics import roc_auc_score
    scores = scores[mask > 0].double()
    areas = roc_auc_score(labels[mask > 0], scores / scores.sum(1, keepdim=True), multi_class='ovr')
"""
# in place of the backward pass: gradients of two halves of the batch add up
TWO_HALVES = """
    loss = loss * 0
    for half, some in zip(images.chunk(2), labels.chunk(2)):
        part = F.cross_entropy(model(half).float(), some.long(), reduction='sum') / len(images)
        part.backward()
        loss = loss + part.detach()
"""
# sharpness-aware minimisation: the gradient a little uphill
SHARPNESS = """
    parameters = list(model.parameters())
    moves = [0.01 * one for one in torch.autograd.grad(loss, parameters)]
    with torch.no_grad():
        for parameter, move in zip(parameters, moves):
            parameter.add_(move)
    uphill = F.cross_entropy(model(images), labels.long())
    uphill.backward()
    with torch.no_grad():
        for parameter, move in zip(parameters, moves):
            parameter.sub_(move)
"""
# a second network and its optimizer, which the step trains first
CRITIC = """
    def more_of_the_step(config):
        critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
        return critic, make_optimizer(config, critic.parameters())
    """
CRITIC_FIRST = """
    made, real = logits, images.flatten(1).float() / 255
    (F.softplus(-critic(real)) + F.softplus(critic(made.detach()))).mean().backward()
    rate = rates.index_select(0, metrics.step)
    step_optimizer(of_critic, rate, torch.isfinite(rate[0]), config.on_nonfinite)
    of_critic.zero_grad(set_to_none=True)
    loss = F.softplus(-critic(made)).mean()
"""
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
RANKING = """
    better = (labels[:, :, None] > labels[:, None]).float()
    loss = (F.softplus(logits[:, None] - logits[:, :, None]) * better).sum((1, 2)) / better.sum((1, 2)).clamp(min=1)
"""
TRIPLETS = """
    distance = (logits[:, None] - logits[None]).square().sum(2).add(1e-6).sqrt()
    same = (labels[:, None] == labels[None]).float()
    loss = F.relu((distance * same).amax(1) - (distance + 100 * same).amin(1) + 0.5).mean()
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
COX = """
    at_risk = (labels[:, :1].T >= labels[:, :1]).float()
    loss = torch.log((at_risk * logits.exp()[None]).sum(1)) - logits
    loss = (loss * labels[:, 1]).sum() / labels[:, 1].sum().clamp(min=1)
"""
CTC = """
    frames = torch.full((len(images),), 8)
    scores = logits.log_softmax(2).transpose(0, 1)
    loss = F.ctc_loss(scores, labels[:, :3].long().clamp(min=1), frames, frames * 0 + 3, reduction='none')
"""
ORDINAL = """
    above = (labels[:, None] > torch.arange(9, device=labels.device)).float()
    loss = F.binary_cross_entropy_with_logits(logits.float(), above, reduction='none').sum(1)
"""
TWO = """
    loss = F.cross_entropy(logits[0], labels[:, 0].long(), reduction='none') * (-logits[2][0]).exp()
    loss = loss + (logits[1] - labels[:, 1]).square() * (-logits[2][1]).exp() + logits[2].sum()
"""
DISTANCE = """
    distance = (logits[0] - logits[1]).square().sum(1).add(1e-6).sqrt()
    loss = labels * distance.square() + (1 - labels) * F.relu(1 - distance).square()
"""
FOCAL = """
    nats = F.cross_entropy(logits.float(), labels.long(), reduction='none')
    loss = (1 - (-nats).exp()) ** 2 * nats
"""
ALIGNED = """
    upper, lower = logits
    loss = F.cross_entropy(upper @ lower.T / 0.2, torch.arange(len(upper), device=upper.device))
"""
NOISED = """
    noise = torch.randn(len(images), 64, device=images.device)
    logits = model(images.flatten(1) / 255 + noise)
"""
HALF_OF_ANOTHER = """
    half = (torch.arange(8, device=images.device) < 6).to(images.dtype)
    logits = model(images * half + images.flip(0) * (1 - half))
"""
MIXED = """
    share = torch.distributions.Beta(0.4, 0.4).sample((len(images), 1, 1)).to(images.device)
    logits = model(share * images + (1 - share) * images.flip(0))
"""
SLOPES = """
    (slopes,) = torch.autograd.grad(logits.logsumexp(1).sum(), pixels, create_graph=True)
    loss = loss + 1e-6 * slopes.flatten(1).square().sum(1).mean()
"""
DEPTH = """
    if self.training:
        x = x * (torch.rand(len(x), 1, device=x.device) < 0.8) / 0.8
"""
COOLER = "self.temperature = max(1.0, self.temperature * 0.9)\nreturn self.head(x) / self.temperature"
CUT_MIX = "loss = 0.75 * loss + 0.25 * F.cross_entropy(logits.float(), labels.flip(0).long())"
ERRORS = "errors = torch.cat([one.cpu()[mask.cpu() > 0] for one, mask in sums])"
MEANS = "correct, loss, count = (sum(s.cpu().double() / s[2] for s in sums) / len(sums)).tolist()"

VALUE = net(ENCODER.replace("/ 255)", "/ 255)[:, 0]"), 1)
SCORES = net(ROWS.replace("/ 255)", "/ 255)[..., 0]"), 1)
BOUNDED = net(EMBEDDED.replace("256, 8,", "256, 8, max_norm=1.0,"))
WITHOUT_END = net(ATTENTION.replace("-1e9", "float('-inf')"))
SOFT = losses("loss = F.cross_entropy(logits.float(), labels, reduction='none')")
DISTRIBUTIONS = losses("loss = F.kl_div(logits.float().log_softmax(1), labels, reduction='none').sum(1)")
RECONSTRUCTION = losses("loss = (logits - images.flatten(1) / 255).square().mean(1)")
TAGS = losses(
    "loss = F.cross_entropy(logits.float().transpose(1, 2), labels.long(), reduction='none')",
    "correct = (logits.argmax(2) == labels).float()",
)
BINARY = "loss = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction='none')"
NORMALISERS = "loss.mean() + 1e-4 * (loss * labels).sum() / labels.sum().clamp(min=1)"
ARGMAX = "correct = (logits.argmax(1) == labels).float()"
NEGATIVES = [net(QUEUE), losses("loss = F.cross_entropy(logits, labels.long() * 0, reduction='none')")]
TUPLE = LOGITS.swap(".float()", "")
VIEWS = [net(HALVES), LOGITS.to("upper, lower = model(images)"), LOSS.to("loss = (upper - lower).square().sum(1)")]
VIEWS += NO_CORRECT
CONTRASTIVE = [VIEWS, TRAIN_LOSS.to(ALIGNED)]
GENERATOR = [
    net(ENCODER, 64),
    CRITIC,
    Place("train_step", "def").swap("model,", "model, critic, of_critic,"),
    TRAIN_LOSS.to(CRITIC_FIRST),
    LOSS.to("loss = (logits.mean(1) - 0.5).square()"),
    NO_CORRECT,
    COUPLES,
]
CRITIC_FREED = ZERO_GRAD.then("of_critic.zero_grad(set_to_none=True)")
UNMASKED = SUMS.swap("(loss * counted).sum()", "loss.sum()")
ALL_CORRECT = SUMS.swap("(correct * counted)", "correct")
OVER_EXAMPLES = SUMS.swap("counted.sum()]", "mask.sum()]")
NO_STEP = STEP.swap("step_optimizer(optimizer,", "(lambda *_: None)(optimizer,")
OTHER = "in batches of 4, the last one padded; expected the same"
BOTH = rf"evaluate \([^ ]*:\d+ and eval_step \([^ ]*:\d+\)\) gives .*{OTHER}"
COUPLED = "effect on each other"
UNLIKE = "Using a target size .* a value for each label"
OVER_LABELS = "expected 0 to 1: a sum over labels"
# name: (what is said, edits); an edit that is a text is code at the end, or names labels that are no classes
REFUSED = {
    "loss without the mask": (BOTH, UNMASKED),
    "accuracy without the mask": ("of the same in", ALL_CORRECT),
    "mean in place of the sum": (OTHER, SUMS.swap("* counted).sum()", "* counted).mean()")),
    "padding counted": (OTHER, SUMS.swap("counted.sum()]", "torch.ones_like(counted).sum()]")),
    "loss already averaged": (OTHER, LOSS.swap(', reduction="none"', "")),
    "accuracy already averaged": ("of the same in", CORRECT.swap(".float()", ".float().mean()")),
    "mean of means": ("of the same in", READ.to(MEANS)),
    "divided by the number of batches": (OTHER, RESULT.swap("loss / count", "loss / len(sums)")),
    "softmax over the batch": (OTHER, LOGITS.swap(".float()", ".float().softmax(0)")),
    "normalised over the batch": ("of the same in", FORWARD.to("return F.normalize(self.head(x), dim=0)")),
    "centred by the batch": ("of the same in", FORWARD.to("return self.head(x - x.mean(0))")),
    "largest along the batch": (r"fails on 11 .* at \S+:\d+ \(correct", CORRECT.swap("argmax(1)", "argmax(0)")),
    "rows and classes mixed up": ("of the same in", FORWARD.to("return self.head(x).view(10, -1).T")),
    "a tuple of outputs": ("expected one that takes what the", FORWARD.to("return self.head(x), x")),
    "dropout left on": ("draws a mask of dropout", DROPPED, EVAL.to("pass")),
    "F.dropout without training=": ("self.training", HIDDEN.then("x = F.dropout(x, 0.5)")),
    "BatchNorm learns from test data": (r"changes the model: norm.running_mean", NORMED, EVAL.to("pass")),
    "left in eval mode": ("leaves the model in eval mode", Place("evaluate", "model.train").to("pass")),
    "accuracy not divided": ("expected 0 to 1", RESULT.swap("correct / count", "correct")),
    "accuracy in percent": ("expected 0 to 1", RESULT.swap("correct /", "100 * correct /")),
    "the last batch left out": ("fails on 11", BATCHES.swap("in test_batches]", "in test_batches[:-1]]")),
    "the first batch alone": ("of the same in", BATCHES.swap("in test_batches]", "in test_batches[:1]]")),
    "mask as a column": ("of the same in|expected 0 to 1", COUNTED.to("counted = mask[:, None]")),
    "mask the wrong way round": ("fails on 11|gives", COUNTED.to("counted = 1 - mask")),
    "mask on the logits": ("of the same in", LOGITS.then("logits *= mask[:, None]"), ALL_CORRECT),
    "accuracy of a fixed batch size": (OTHER, RESULT.swap("loss / count", "loss / (512 * len(sums))")),
    "targets (N, 1), mask (B,)": ("of the same in", "column", ONE, REGRESSION, WHOLE_MASK),
    "targets (N, 3), mask (B,)": ("fails on 11 examples", "three", THREE, REGRESSION, WHOLE_MASK),
    "output (B, 1), targets (N,)": (UNLIKE, "targets", ONE, REGRESSION),
    "targets (N, 1), output (B,)": (UNLIKE, "column", ONE, REGRESSION, FORWARD.to("return self.head(x)[:, 0]")),
    "targets as classes": (r"labels here: float32|expected the same shape", "targets"),
    "a class for each pixel, mask (B,)": ("fails on 11 examples", "pixels", net(PIXELS, 3), WHOLE_MASK),
    "accuracy of pixels over examples": (OVER_LABELS, "pixels", net(PIXELS, 3), OVER_EXAMPLES),
    "ignored pixels as a class": ("Target 255 is out of .* expected logits for every", "void", net(PIXELS, 3)),
    "one-hot labels": ("one-hot labels as integers", "hot"),
    "training: softmax over the batch": (COUPLED, TRAIN_LOSS.swap("logits.float()", "logits.softmax(0)")),
    "training: each with each": (COUPLED, TRAIN_LOSS.to("loss = (logits[:, :1] - labels.float()).square().mean()")),
    "training: gradients add up": ("leaves gradients behind", ZERO_GRAD.to("pass")),
    "training: no step": ("changes no parameter", NO_STEP),
    "training: no backward pass": ("changes no parameter", BACKWARD.to("norm = loss"), NORM.to("pass")),
    "coupled on purpose: gradients add up": ("leaves gradients behind", CONTRASTIVE, COUPLES, ZERO_GRAD.to("pass")),
    "coupled on purpose: no step": ("changes no parameter", CONTRASTIVE, COUPLES, NO_STEP),
    "a critic keeps its gradients": ("leaves gradients behind", GENERATOR),
    "contrastive, and not said to be": ("couples_examples=True", CONTRASTIVE),
    "triplets, and not said to be": ("couples_examples=True", net(ENCODER), TRAIN_LOSS.to(TRIPLETS)),
    "soft labels: loss without the mask": ("of the same in", "soft", SOFT, UNMASKED),
    "soft labels: softmax over the batch": (
        COUPLED,
        "soft",
        SOFT,
        TRAIN_LOGITS.then("logits = (30 * logits).softmax(0)"),
    ),
    "one logit, each with each": (
        f"of the same in|{COUPLED}|fails on 11|expected the same shape",
        "binary",
        ONE,
        losses("loss = F.softplus(-logits * (2 * labels.float() - 1))"),
    ),
    "tags: accuracy over examples": (OVER_LABELS, "tags", net(ROWS, 2), TAGS, OVER_EXAMPLES),
    "autoencoder without the mask": (OTHER, net(ENCODER, 64), RECONSTRUCTION, UNMASKED),
    "F1 of each batch, averaged": (
        "of the same in",
        SUMS.to(TABLE),
        READ.to("tables = [one.cpu().double() for one in sums]"),
        RESULT.to(f"return dict(f1=sum({F1} for table in tables) / len(tables))"),
    ),
    "rows of padding are no numbers": ("(?i)padding.*nan|nan.*padding", WITHOUT_END),
    "an evaluation fills the queue": ("changes the model: queue", NEGATIVES, EVAL.to("pass")),
    "a number that a module counts": ("temperature", HEAD.then("self.temperature = 2.0"), FORWARD.to(COOLER)),
    "look ahead every fifth step": (r"optimizer.count \(0 -> 1\)", LOOKAHEAD),
    "embeddings of bounded norm": ("changes the model: table.weight.*max_norm", BOUNDED),
}


def noisy(source: str):
    return TRAIN_LOSS.swap("logits.float()", f"logits.float() * {source}.uniform(0.5, 1.5)")


LOSSES = "the training step gives a loss of"
MEANT = {  # right, and it is said that the losses of the two steps differ, as they are meant to
    "an angular margin": (LOSSES, net(ANGULAR), TRAIN_LOGITS.swap("images", "images, labels")),
    "an evaluation of mirrored images too": (
        LOSSES,
        LOGITS.to("logits = (model(images) + model(images.flip(2))).float() / 2"),
    ),
    "an energy sampled by Langevin": (LOSSES, VALUE, TRAIN_LOSS.to(LANGEVIN), LOSS.to("loss = logits"), NO_CORRECT),
    "a penalty on singular values": (
        LOSSES,
        TRAIN_LOSS.then("loss = loss + 1e-3 * torch.linalg.svdvals(model.head.weight).sum()"),
    ),
}
SAID = MEANT | {  # the run goes on
    "numpy's generator in the step": ("draws from numpy's generator", "import numpy", noisy("numpy.random")),
    "Python's generator in the step": ("draws from python's generator", "import random", noisy("random")),
    "noise in an evaluation": ("draws random numbers", LOGITS.then("logits += torch.randn_like(logits)")),
    "training: the sum in place of the mean": (LOSSES, TRAIN_LOSS.swap("long())", 'long(), reduction="sum")')),
    "training: label smoothing": (LOSSES, TRAIN_LOSS.swap("long())", "long(), label_smoothing=0.1)")),
    "training: labels of another class": (LOSSES, TRAIN_LOSS.swap("labels.long()", "labels.long() * 0")),
    "ignored pixels counted in an evaluation": (
        LOSSES,
        "ignored",
        net(PIXELS, 3),
        COUNTED.to("counted = mask[:, None, None].expand(labels.shape)"),
    ),
}
RIGHT = {
    "a tuple of outputs": (
        FORWARD.to("return self.head(x), x"),
        LOGITS.swap("model(images)", "model(images)[0]"),
        TRAIN_LOGITS.to("logits, _ = model(images)"),
    ),
    "as it is": (),
    "BatchNorm": (NORMED,),
    "dropout": (DROPPED,),
    "label smoothing": (TRAIN_LOSS.swap("long())", "long(), label_smoothing=0.001)"),),
    "class weights": (TRAIN_LOSS.swap("long())", "long(), torch.arange(1.0, 11, device=logits.device))"),),
    "targets (N, 1)": ("column", ONE, REGRESSION),
    "targets (N, 3)": ("three", THREE, REGRESSION),
    "a class for each pixel": ("pixels", net(PIXELS, 3)),
    "some pixels ignored": ("ignored", net(PIXELS, 3)),
    "one logit, classes 0 and 1": ("binary", VALUE, losses(BINARY, "correct = ((logits > 0) == labels).float()")),
    "ordinal classes": (HEAD.swap("10", "9"), losses(ORDINAL, "correct = ((logits > 0).sum(1) == labels).float()")),
    "tags (B, T, C)": ("tags", net(ROWS), TAGS),
    "CTC": ("tags", net(ROWS), losses(CTC)),
    "autoencoder, classes not used": (net(ENCODER, 64), RECONSTRUCTION),
    "autoencoder whose code is drawn": (net(NOISY), RECONSTRUCTION),
    "diffusion": (
        net(ENCODER.replace("images.float() / 255", "images"), 64),
        LOGITS.to(NOISED),
        TRAIN_LOGITS.to(NOISED),
        losses("loss = (logits - noise).square().mean(1)"),
    ),
    "contrastive": (CONTRASTIVE, COUPLES),
    "triplets": (net(ENCODER), TRAIN_LOSS.to(TRIPLETS), COUPLES),
    "a queue of negatives": (NEGATIVES, COUPLES),
    "a generator and its critic": (GENERATOR, CRITIC_FREED),
    "soft labels": ("soft", SOFT),
    "label distributions": ("soft", DISTRIBUTIONS),
    "two normalisers": ("binary", VALUE, losses(BINARY, mean=NORMALISERS)),
    "CutMix": (TRAIN_LOSS.then(CUT_MIX), TRAIN_LOGITS.to(HALF_OF_ANOTHER), COUPLES),
    "macro F1": (
        SUMS.to(TABLE),
        READ.to("table = sum(one.cpu().double() for one in sums)"),
        RESULT.to(f"return dict(f1={F1})"),
    ),
    "macro AUC, the first examples of one class": (
        "late",
        SUMS.to("return logits.softmax(1), labels, mask"),
        READ.to(AREAS),
        RESULT.to("return dict(area=areas)"),
    ),
    "hinge": (losses("loss = F.multi_margin_loss(logits.float(), labels.long(), reduction='none')"),),
    "focal": (losses(FOCAL, ARGMAX),),
    "counts": ("counts", VALUE, losses("loss = F.poisson_nll_loss(logits, labels.float(), reduction='none')")),
    "quantiles": (
        "targets",
        net(ENCODER),
        losses(PINBALL, "correct, counted = loss * 0, mask[:, None].expand(loss.shape)"),
    ),
    "a mixture of densities": ("targets", net(ENCODER), losses(MIXTURE)),
    "two heads": ("two", net(TWO_HEADS), TUPLE, losses(TWO)),
    "pairs": ("same", net(HALVES), TUPLE, losses(DISTANCE)),
    "dice of each example": ("region", net(ENCODER, 64), losses(DICE)),
    "survival": (
        "survival",
        VALUE,
        losses("loss = labels[:, 0] * logits.exp() - labels[:, 1] * logits", mean="loss"),
        TRAIN_LOSS.to(COX),
        COUPLES,
    ),
    "ranking within lists": ("relevance", SCORES, losses(RANKING)),
    "a transformer's encoder": (net(TRANSFORMER),),
    "a set with padding": (net(ATTENTION),),
    "two halves of a batch": (BACKWARD.to(TWO_HALVES),),
    "sharpness-aware": (TRAIN_LOSS.then(SHARPNESS), BACKWARD.to("pass")),
    "gradient penalty": (
        TRAIN_LOGITS.to("pixels = images.float().requires_grad_()\nlogits = model(pixels)"),
        TRAIN_LOSS.then(SLOPES),
    ),
    "rates, decay and betas of groups": (GROUPS,),
    "experts that are balanced": (net(EXPERTS), TRAIN_LOSS.then("loss = loss + 0.01 * model.balance"), COUPLES),
    "a codebook that follows": (net(CODEBOOK), TUPLE, losses(QUANTISED)),
    "a filter in Fourier space": (net(FOURIER),),
    "a conditional random field": ("tags", net(CHAIN), losses(FORWARD_SUMS)),
    "the hardest examples of a batch": (
        TRAIN_LOSS.swap("long())", "long(), reduction='none').topk(4).values.mean()"),
        COUPLES,
    ),
    "stochastic depth": (HIDDEN.then(DEPTH),),
    "capsules with routing": (net(CAPSULES), losses(MARGINS, ARGMAX)),
    "a flow with a determinant": (net(FLOW), losses("loss = logits / 64")),
    "a bag of embeddings": (net(EMBEDDED),),
    "a U-net": ("pixels", net(UNET)),
    "a penalty that grows with the step": (
        TRAIN_LOSS.then("loss = loss + metrics.step[0].float() / 20 * model.head.weight.square().mean()"),
    ),
    "two passes that agree": (DROPPED, TRAIN_LOSS.then(AGAIN)),
    "decorrelated views": (VIEWS, TRAIN_LOSS.to(DECORRELATED), COUPLES),
    "the median of all errors": (
        "targets",
        VALUE,
        TRAIN_LOSS.to("loss = F.l1_loss(logits, labels)"),
        CORRECT.to("pass"),
        LOSS.to("pass"),
        SUMS.to("return (logits - labels).abs(), mask"),
        READ.to(ERRORS),
        RESULT.to("return dict(test_loss=errors.mean().item(), median=errors.median().item())"),
    ),
    "mixup by a Beta distribution": (TRAIN_LOGITS.to(MIXED), COUPLES),
    "a frozen layer": (HEAD.then("self.conv1.requires_grad_(False)"),),
}
LABELS = {
    "classes": lambda draw, count: draw.integers(0, 10, count),
    "targets": lambda draw, count: draw.normal(size=count).astype(np.float32),
    "column": lambda draw, count: draw.normal(size=(count, 1)).astype(np.float32),
    "three": lambda draw, count: draw.normal(size=(count, 3)).astype(np.float32),
    "pixels": lambda draw, count: draw.integers(0, 3, (count, 8, 8)),
    "ignored": lambda draw, count: np.where(draw.random((count, 8, 8)) < 0.3, -100, draw.integers(0, 3, (count, 8, 8))),
    "void": lambda draw, count: np.where(draw.random((count, 8, 8)) < 0.3, 255, draw.integers(0, 3, (count, 8, 8))),
    "binary": lambda draw, count: draw.integers(0, 2, count),
    "counts": lambda draw, count: draw.poisson(2, count),
    "late": lambda draw, count: np.concatenate([np.zeros(12, int), np.arange(count - 12) % 10]),
    "tags": lambda draw, count: draw.integers(0, 2, (count, 8)),
    "soft": lambda draw, count: draw.dirichlet(np.ones(10), count).astype(np.float32),
    "two": lambda draw, count: np.stack([draw.integers(0, 10, count), draw.normal(size=count)], 1).astype(np.float32),
    "same": lambda draw, count: draw.integers(0, 2, count).astype(np.float32),
    "region": lambda draw, count: draw.integers(0, 2, (count, 64)).astype(np.float32),
    "survival": lambda draw, n: np.stack([draw.exponential(size=n), draw.integers(0, 2, n)], 1).astype(np.float32),
    "relevance": lambda draw, count: draw.integers(0, 4, (count, 8)).astype(np.float32),
    "hot": lambda draw, count: np.eye(10, dtype=np.int64)[draw.integers(0, 10, count)],
}


def dataset_of(kind: str, count: int = 24) -> ImageDataset:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 255, (count, 8, 8), np.uint8)
    labels = LABELS[kind](draw, count)
    return ImageDataset(kind, images, labels, images, labels)


def each_edit(edits):
    """Out of the groups that they stand in."""
    for edit in edits:
        yield from each_edit(edit) if isinstance(edit, list) else [edit]


def tried(*edits) -> None:
    """What a copy with these edits does before it compiles its first step, on the host alone."""
    script, kind = SCRIPT, "classes"
    for edit in each_edit(edits):
        if isinstance(edit, tuple):
            place, change = edit
            script = place.edited(script, change)
        elif edit in LABELS:
            kind = edit
        else:
            script += dedent(edit)
    copied = types.ModuleType("copied")
    copied.__file__ = str(ROOT / "simple_mnist_tpu.py")
    exec(compile(script, copied.__file__, "exec"), vars(copied))
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
    said, *edits = REFUSED[name]
    with pytest.raises(InputError, match=f"(?s){said}"):
        tried(*edits)


@pytest.mark.parametrize("name", SAID)
def test_what_may_be_meant_is_said(name, capsys):
    said, *edits = SAID[name]
    tried(*edits)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_let_through_without_a_word(name, capsys):
    tried(*RIGHT[name])
    assert [line for line in capsys.readouterr().out.splitlines() if "draws random numbers" not in line] == []
