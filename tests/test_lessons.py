"""lessons/plain_mnist_tpu.py: nothing of ours, and the losses of simple_mnist_tpu.py."""

import json
import subprocess
import sys

from processes import ROOT, environment_with, run

PLAIN = ROOT / "lessons" / "plain_mnist_tpu.py"
AS_PLAIN = ["--optimizer=sgd", "--max_shift=0", "--num_epochs=10", "--learning_rate=0.05", "--scheduler=constant"]
AS_PLAIN += ["--warmup_steps=0", "--weight_decay=0", "--log_every=1", "--no_tensorboard", "--device=cpu"]


def test_the_plain_loop_has_the_losses_of_the_simple_script(tmp_path):
    """Bit for bit, in training and evaluation, though it is killed after an epoch and started again."""
    environment = environment_with({"PJRT_DEVICE": "CPU"})
    environment.pop("PYTHONPATH", None)
    options = dict(cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen([sys.executable, PLAIN], **options) as killed:
        lines = []
        for line in killed.stdout:
            lines.append(line)
            if line.startswith("epoch 4"):  # its checkpoint may be there or not
                killed.kill()
                break
    again = subprocess.run([sys.executable, PLAIN], **options)
    assert again.returncode == 0, again.stdout
    assert "graphs 2 on CPU" in again.stdout  # one for training, one for evaluation
    losses, evaluations = {}, {}
    for line in [*lines, *again.stdout.splitlines()]:
        words = line.split()
        if words[:1] == ["step"]:
            losses[int(words[1])] = [float(word) for word in words[2:]]
        elif words[:1] == ["epoch"]:
            evaluations[22 * int(words[1])] = float(words[-1])
    ours = run("simple_mnist_tpu.py", *AS_PLAIN, f"--run_dir={tmp_path / 'run'}")
    assert ours.returncode == 0, ours.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    assert len(losses) == 11 and len(expected) == 220
    for last, found in losses.items():  # after a restart the first line has zeros for steps before it
        steps = range(last - len(found) + 1, last + 1)
        assert all(loss == expected[step] or loss == 0.0 for step, loss in zip(steps, found, strict=True))
    assert evaluations == {r["step"]: r["test_loss"] for r in records if r["kind"] == "eval"}
