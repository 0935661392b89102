"""A day in a lab, through the service: a bad step is seen, a good one moved and proven, an old one thinned."""

from __future__ import annotations

from pathlib import Path

import pytest
import service_load

import statekit
from statekit.client import Client
from statekit.errors import RefusedError
from statekit.service.records import Checkpoint

pytest.importorskip("torch")
import lab_day

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_a_day_in_a_lab(tmp_path: Path) -> None:
    run = tmp_path / "root" / "run"
    lab_day.begin(run)
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

    old, bad, good = (f"{run.name}/{name}" for name in (lab_day.OLD, lab_day.BAD, lab_day.GOOD))
    lab_day.train(run)
    client.scan()
    (seen,) = client.runs()
    assert (seen.steps, seen.first_step, seen.last_step) == (4, 8, 11)

    steps = list(client.checkpoints(run=seen.id, sort="step"))
    client.wait(client.submit("doctor", *(one.id for one in steps)))
    assert [one.path for one in client.checkpoints(verdict="findings")] == [bad]

    last = entry(good)
    moved = client.submit(
        "convert",
        last.id,
        target={"root": last.root, "path": "hf.pt"},
        layout="statekit-torch",
        map="t5x-t5:hf-t5",
        config=lab_day.CONFIG,
    )
    assert client.result(client.wait(moved))["report"]["verified"] == 144
    client.scan()
    made = entry("hf.pt")
    proof = client.result(client.wait(client.submit("verify", last.id, made.id, steps=0)))
    assert proof["passed"], proof["verdict"]
    assert lab_day.resumed(run.parent / "hf.pt")

    for path in (old, good):
        client.wait(client.submit("seal", entry(path).id))
    client.scan()
    older = entry(old)
    promised = client.result(client.wait(client.submit("thin", older.id, dry_run=True)))["freed"]
    assert promised > 0 and (run / lab_day.OLD).exists()
    thinned = client.result(client.wait(client.submit("thin", older.id)))
    assert thinned["freed"] == promised
    assert not (run / lab_day.OLD).exists()
    assert statekit.inspect(thinned["target"]).totals()["slots"] == 0
    with pytest.raises(RefusedError, match="last step"):
        client.submit("thin", last.id)

    client.scan()
    edges = {(edge.kind, edge.job) for edge in client.lineage(last.id).edges}
    assert ("convert", moved.id) in edges and {kind for kind, _ in edges} == {"convert", "verify"}
    assert [edge.kind for edge in client.lineage(older.id).edges] == ["thin"]
