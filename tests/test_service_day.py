"""A day in a lab, through the service: a bad step is seen, a good one moved and proven, an old one thinned."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import service_load

import statekit
from goldens import COMPACT
from statekit.client import Client
from statekit.errors import RefusedError
from statekit.service.records import Checkpoint

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

T5 = COMPACT / "t5x_train" / "t5_11_unscanned" / "checkpoint"
BAD, GOOD, OLD = "run/step-10.pt", "run/step-11.pt", "run/step-9.pt"


def train(folder: Path) -> None:
    """Goes on with a run of T5X in PyTorch, and writes three steps, one of them with its moments lost."""
    import statekit.torch as adopted

    model = torch.load(folder / "step-8.pt", weights_only=True)["model"]
    params = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in model.items()}
    optimizer = adopted.load_optimizer(folder / "step-8.pt", params.items(), lr=1e-3)
    chance = torch.Generator().manual_seed(0)
    for step in (9, 10, 11):
        for param in params.values():
            param.grad = 0.01 * torch.randn(param.shape, generator=chance)
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        if step == 10:
            for kept in state["state"].values():
                kept |= {key: torch.zeros_like(one) for key, one in kept.items() if one.ndim}
        saved = {"model": dict(params), "optimizer": state, "step": step}
        torch.save(saved, folder / f"step-{step}.pt")


def test_a_day_in_a_lab(tmp_path: Path) -> None:
    run = tmp_path / "root" / "run"
    run.mkdir(parents=True)
    statekit.convert(T5, run / "step-8.pt", layout="statekit-torch")
    server = service_load.Server(run.parent, tmp_path / "data", workers=1)
    server.start()
    try:
        with Client(f"http://127.0.0.1:{server.port}", server.token) as client:
            _day(client, run)
    finally:
        server.kill()


def _day(client: Client, run: Path) -> None:
    def entry(path: str) -> Checkpoint:
        (one,) = [each for each in client.checkpoints(sort="path") if each.path == path]
        return one

    train(run)
    client.scan()
    (seen,) = client.runs()
    assert (seen.steps, seen.first_step, seen.last_step) == (4, 8, 11)

    steps = list(client.checkpoints(run=seen.id, sort="step"))
    client.wait(client.submit("doctor", *(one.id for one in steps)))
    assert [one.path for one in client.checkpoints(verdict="findings")] == [BAD]

    good = entry(GOOD)
    moved = client.submit(
        "convert",
        good.id,
        target={"root": good.root, "path": "hf.pt"},
        layout="statekit-torch",
        map="t5x-t5:hf-t5",
        config={"num_heads": 4},
    )
    assert client.result(client.wait(moved))["report"]["verified"] == 144
    client.scan()
    made = entry("hf.pt")
    proof = client.result(client.wait(client.submit("verify", good.id, made.id, steps=0)))
    assert proof["passed"], proof["verdict"]
    assert _resumed(run.parent / "hf.pt")

    for path in (OLD, GOOD):
        client.wait(client.submit("seal", entry(path).id))
    client.scan()
    old = entry(OLD)
    promised = client.result(client.wait(client.submit("thin", old.id, dry_run=True)))["freed"]
    assert promised > 0 and (run / "step-9.pt").exists()
    thinned = client.result(client.wait(client.submit("thin", old.id)))
    assert thinned["freed"] == promised
    assert not (run / "step-9.pt").exists()
    assert statekit.inspect(thinned["target"]).totals()["slots"] == 0
    with pytest.raises(RefusedError, match="last step"):
        client.submit("thin", good.id)

    client.scan()
    edges = {(edge.kind, edge.job) for edge in client.lineage(good.id).edges}
    assert ("convert", moved.id) in edges and {kind for kind, _ in edges} == {"convert", "verify"}
    assert [edge.kind for edge in client.lineage(old.id).edges] == ["thin"]


def _resumed(path: Path) -> bool:
    """Goes on from a checkpoint, and tells whether what is live is what it holds."""
    import statekit.torch as adopted

    model = torch.load(path, weights_only=True)["model"]
    untied = {name: one for name, one in model.items() if not name.endswith("embed_tokens.weight")}
    params = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in untied.items()}
    optimizer = adopted.load_optimizer(path, params.items(), lr=1e-3)
    return adopted.attest(optimizer, params.items(), path).passed
