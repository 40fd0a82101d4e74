"""A model trained by the Trainer of Hugging Face's transformers, which runs on the CPU or a GPU."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

torch.manual_seed(0)
rows = torch.randn(64, 16)
targets = (rows[:, 0] > 0).long()
examples = [{"rows": row, "labels": target} for row, target in zip(rows, targets, strict=True)]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, rows, labels):
        logits = self.layers(rows)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


model = Classifier()
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=64,
    num_train_epochs=20,
    learning_rate=1e-2,
    lr_scheduler_type="linear",
    max_grad_norm=1.0,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=examples)
trainer.train()
for line in trainer.state.log_history:
    if "loss" in line:
        print(f"loss {line['loss']:.6f}")
