"""`statekit serve` as a process: a sample of what `make test-service` does at length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reliability_table
import service_load


@pytest.fixture(autouse=True)
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keeps the figures of a sample out of the table."""
    kept: list[Any] = []
    monkeypatch.setattr(service_load, "note", lambda suite, row: kept.append(row))
    return kept


def test_every_job_of_several_clients_ends_once_and_kills_lose_none(figures: list[Any]) -> None:
    service_load.load(seconds=1.0, clients=4, jobs=2, workers=2)
    service_load.kills(count=1, waiting=1, workers=2)
    assert all(row.silent == 0 for row in figures) and len(figures) == 2


def test_signals_end_the_server_in_time_and_leave_nothing_behind() -> None:
    service_load.signals(runs=1, jobs=2)


def test_a_service_that_others_could_reach_is_refused_unasked(tmp_path: Path) -> None:
    line = [
        "-m",
        "statekit",
        "serve",
        "--root",
        f"{tmp_path}",
        "--data",
        f"{tmp_path / 'data'}",
        "--host",
        "0.0.0.0",
    ]
    ended = subprocess.run([sys.executable, *line], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--allow-remote" in ended.stderr


def test_the_suite_has_a_section_on_the_page() -> None:
    assert "service" in reliability_table.SUITES
