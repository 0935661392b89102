"""docs/decoders.md is run as it stands; with STATEKIT_MAXTEXT, a Python that has MaxText 0.2.5, its losses too."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import load_file, save_file

from statekit.cli.main import main
from statekit.converters.formats.flat_yaml import flat_yaml

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs/decoders.md").read_text(encoding="utf-8")
CASE = HERE / "cases/train/megatron_qwen3/torch_dist"
RECORDED = HERE.parents[1] / "shared/recordings/train/megatron_qwen3_to_maxtext"
TO_MAXTEXT, TO_TORCH, BACK = re.findall(r"```bash\nstatekit (.*)\n```", PAGE)
(CONFIG,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
(LINE,) = re.findall(r"```\n(python3 .*)\n```", PAGE)
LOSSES = {
    int(n): (float(a), float(b)) for n, a, b in re.findall(r"\| (\d) \| \w+ \| ([\d.]+) \| ([\d.]+) \|", PAGE)
}


def begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CASE, folder / "megatron-run")
    (folder / "maxtext-run").mkdir()
    (folder / "maxtext-run/config.yml").write_text(CONFIG)
    monkeypatch.chdir(folder)


def test_the_commands_of_the_page_convert_there_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path, monkeypatch)
    assert main(shlex.split(TO_MAXTEXT)) == 0
    printed = capsys.readouterr().out.replace(
        f"base_output_directory={tmp_path}", "base_output_directory=..."
    )
    assert LINE in printed
    assert main(shlex.split(TO_TORCH)) == 0
    assert "learning rate 0.00868198" in capsys.readouterr().out
    assert main(shlex.split(BACK)) == 0
    assert len(LOSSES) == 4 and all(abs(a - b) <= 2e-6 for a, b in LOSSES.values())


@pytest.mark.slow
@pytest.mark.skipif(
    "STATEKIT_MAXTEXT" not in os.environ, reason="STATEKIT_MAXTEXT names no Python with MaxText"
)
@pytest.mark.skipif(not RECORDED.is_dir(), reason="the whole set of recordings isn't here")
def test_maxtext_and_torch_go_on_with_the_losses_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path, monkeypatch)
    assert main(shlex.split(TO_MAXTEXT)) == 0
    meta = json.loads((RECORDED / "meta.json").read_text(encoding="utf-8"))
    batches = load_file(RECORDED / "batches.safetensors")
    save_file({name: one for name, one in batches.items() if int(name[0]) <= 6}, "batches.safetensors")
    overrides = {**meta["overrides"], **flat_yaml(CONFIG), "adamw_mask": "['scale']", "steps": 6}
    Path("overrides.json").write_text(json.dumps(overrides))
    words = [
        str(HERE / "maxtext_driving.py"),
        str(tmp_path / "maxtext-run"),
        "batches.safetensors",
        "overrides.json",
    ]
    driven = subprocess.run(
        [os.environ["STATEKIT_MAXTEXT"], *words], capture_output=True, text=True, check=True
    )
    losses = {int(n): loss for n, loss in json.loads(driven.stdout.splitlines()[-1]).items()}
    assert main(shlex.split(TO_TORCH)) == 0
    losses |= in_torch(Path("hf-run/checkpoint-6"), batches, [rate[0] for rate in meta["learning_rate"]])
    assert losses.keys() == LOSSES.keys()
    assert max(abs(losses[n] - megatrons) for n, (_, megatrons) in LOSSES.items()) <= 2e-6


def in_torch(folder: Path, batches: dict[str, Any], rates: list[float]) -> dict[int, float]:
    """Returns the losses of updates 7 and 8."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in part["param_names"]]} for part in saved["param_groups"]]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    optimizer.load_state_dict(saved)
    losses = {}
    for step in (7, 8):
        fields = (f"{step}/{name}" for name in ("inputs", "targets", "targets_segmentation"))
        tokens, targets, mask = (torch.from_numpy(batches[name]).long() for name in fields)
        logits = model(tokens).logits.transpose(1, 2)
        each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        loss = (each * (mask != 0)).sum() / (mask != 0).sum()
        losses[step] = float(loss.detach())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rates[step - 1]
        optimizer.step()
    return losses
