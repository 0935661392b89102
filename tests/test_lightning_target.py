"""A `.ckpt` from another trainer's run is one that Lightning itself goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import drivers
import pytest
import torch

from statekit.cli.main import main

pytestmark = pytest.mark.torch
FIT = """
import sys, warnings, torch, lightning
warnings.simplefilter("ignore")
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
    def training_step(self, batch, index):
        return (self.layer(batch) ** 2).mean()
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
data = torch.utils.data.DataLoader(torch.ones(80, 3), batch_size=2)
off = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
def fitted(path, steps):
    model, trainer = Net(), lightning.Trainer(max_steps=steps, accelerator="cpu", **off)
    globals().update(model=model)
    trainer.fit(model, data, ckpt_path=path)
    return model, trainer
model, trainer = fitted(sys.argv[1], 10)
trainer.save_checkpoint(sys.argv[2])
model, trainer = fitted(sys.argv[2], 12)
torch.save([trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"], model.state_dict()], sys.argv[3])
"""


def test_lightning_goes_on_saves_and_goes_on_from_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = torch.nn.ModuleDict({"layer": torch.nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)

    def step() -> None:
        optimizer.zero_grad()
        (layer["layer"](torch.ones(2, 3)) ** 2).mean().backward()
        optimizer.step()
        schedule.step()

    for _ in range(7):
        step()
    parts = {
        "model": layer.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": schedule.state_dict(),
    }
    torch.save(parts, tmp_path / "run.pt")
    assert main(["convert", str(tmp_path / "run.pt"), str(tmp_path / "there.ckpt"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["resume"] == [f'trainer.fit(model, ckpt_path="{tmp_path / "there.ckpt"}")']
    assert any("Lightning" in said for said in document["plan"]["assumptions"])
    files = [str(tmp_path / name) for name in ("there.ckpt", "again.ckpt", "found.pt")]
    (tmp_path / "fit.py").write_text(FIT)
    done = drivers.run(tmp_path / "fit.py", *files, imports=["lightning"])
    assert done.returncode == 0, done.stderr[-3000:]
    for _ in range(5):
        step()
    updates, rate, weights = torch.load(tmp_path / "found.pt", weights_only=True)
    assert updates == 12 and rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7)
    assert main(["convert", str(tmp_path / "there.ckpt"), str(tmp_path / "back.ckpt")]) == 0


def test_a_torch_file_of_another_name_stays_as_it_was(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    assert main(["convert", str(tmp_path / "run.pt"), str(tmp_path / "there.pt")]) == 0
    assert {"model", "optimizer"} <= torch.load(tmp_path / "there.pt", weights_only=True).keys()
