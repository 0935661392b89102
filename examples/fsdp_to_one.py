"""A run of FSDP2 on two processes goes on in one process, from one file.

python examples/fsdp_to_one.py [NEW_FOLDER]     # statekit[torch]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import statekit


def net() -> torch.nn.Sequential:
    """Returns the model as it begins."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Does four updates; returns the loss before each. Every process has the whole batch."""
    losses = []
    for number in range(first, first + 4):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rank(number: int, out: str) -> None:
    """One of two processes: four updates, a save as torch.distributed.checkpoint has it, four more."""
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=number, world_size=2)
    model = net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=f"{out}/run")
    losses = train(model, optimizer, 4)
    if number == 0:
        torch.save(losses, f"{out}/losses.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    out = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.spawn(rank, (str(out.absolute()),), nprocs=2)
    expected = torch.load(out / "losses.pt")

    report = statekit.convert(out / "run", out / "run.pt", layout="torch-optim")
    print(report.plan.headline)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    saved = torch.load(out / "run.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optim"])
    reached = train(model, optimizer, 4)
    print(f"losses on two processes {expected}, on one {reached}")
    torch.testing.assert_close(torch.tensor(reached), torch.tensor(expected), rtol=1e-5, atol=0)
