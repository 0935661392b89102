"""Each checkpoint that a Trainer saves is sealed and examined, and MLflow keeps its digest and the verdict.

python examples/seal_to_mlflow.py [NEW_FOLDER]     # statekit[hf], mlflow-skinny
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import mlflow
import torch
import transformers

import statekit
import statekit.hf
from statekit.attestation.each_save import Save

OUT = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp())


class Net(torch.nn.Module):
    """A layer that gives its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        y = self.layer(x)
        return {"loss": (y - labels).pow(2).mean(), "logits": y}


def log(run: str, save: Save) -> None:
    """Writes what came of a save into a run of MLflow; a thread calls it while the training goes on."""
    tags = {"digest": save.digest or "", "verdict": "passed" if save.passed else str(save)}
    for name, value in tags.items():
        mlflow.MlflowClient().set_tag(run, f"{save.path.name}.{name}", value)


mlflow.set_tracking_uri(f"sqlite:///{OUT}.db")
x = torch.randn(32, 8)
args = transformers.TrainingArguments(
    str(OUT), max_steps=8, save_steps=4, per_device_train_batch_size=8, report_to="none", use_cpu=True
)  # fmt: skip
data = [{"x": row, "labels": row.sum(0, keepdim=True)} for row in x]
with mlflow.start_run() as run:
    seals = statekit.hf.SealCallback(lambda save: log(run.info.run_id, save))
    transformers.Trainer(Net(), args, train_dataset=data, callbacks=[seals]).train()

# What the run says of its checkpoints is what lies on the disk.
tags = mlflow.MlflowClient().get_run(run.info.run_id).data.tags
for step in (4, 8):
    report = statekit.check(OUT / f"checkpoint-{step}")
    print(step, tags[f"checkpoint-{step}.verdict"], tags[f"checkpoint-{step}.digest"])
    assert report.passed and tags[f"checkpoint-{step}.verdict"] == "passed"
    assert tags[f"checkpoint-{step}.digest"] in (OUT / f"checkpoint-{step}" / "statekit.json").read_text()
