"""What a step sends to the device is named by its lines; the losses are those of a run without such a look."""

from run_files import in_process, losses_in, summary_in
from torch import nn

import simple_mnist_tpu

OPTIONS = ["--device=cpu", "--num_epochs=1", "--no_tensorboard", "--warmup_steps=2", "--max_shift=0"]
OPTIONS += ["--log_every=4", "--save_every=99", "--global_batch_size=128"]


class Recurrent(nn.Module):
    """Reads a picture row by row."""

    def __init__(self, image_size: int, channels: int, hidden_dim: int):
        super().__init__()
        self.calls = 0
        self.rnn, self.head = nn.LSTM(image_size, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, images):
        self.calls += self.training
        states, _ = self.rnn(images.float() / 16)
        scaled = states[:, -1] * (2 + self.training / (1 + self.calls))
        return self.head(scaled)


def test_the_lines_that_send_something_are_named_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simple_mnist_tpu, "ConvNet", Recurrent)
    assert in_process("--run_dir", tmp_path / "run", *OPTIONS) == 0
    said = capsys.readouterr().out.splitlines()
    named = [line for line in said if " of this step at " in line]
    assert len(named) == 2, said
    assert named[0].startswith("uploads    24 of this step at ") and "states, _ = self.rnn(images.float()" in named[0]
    assert named[1].startswith("uploads    1 of this step at ") and "scaled = states[:, -1] * (2" in named[1]
    (last,) = [line for line in said if "a step beside the batch" in line]
    assert last.startswith("uploads    25 a step")
    summary = summary_in(tmp_path / "run")
    assert (summary["train_graphs"], summary["host_to_device_uploads_per_step"]) == (1, 25)
    assert len(losses_in(tmp_path / "run")) == 3
