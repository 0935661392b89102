"""What deploy/ holds works: the proxy's configuration, the action's script, the hooks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from goldens import COMPACT
from statekit.cli.main import main

ROOT = Path(__file__).parents[1]
ACTION = ROOT / "deploy" / "action"
GOOD = COMPACT / "torch_formats" / "adamw_legacy" / "checkpoint" / "checkpoint.pt"


def examined(
    folder: Path, verb: str, checkpoints: str, options: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs the action's script as a workflow does, with this Python's statekit."""
    command = folder / "statekit"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m statekit "$@"\n')
    command.chmod(0o755)
    said = {"VERB": verb, "CHECKPOINTS": checkpoints, "OPTIONS": options}
    return subprocess.run(
        ["bash", ACTION / "examine.sh"],
        env={**os.environ, **said, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_action_fails_where_one_of_its_checkpoints_does(tmp_path: Path) -> None:
    shutil.copy(GOOD, tmp_path / "a run.pt")
    (tmp_path / "--help").write_bytes(GOOD.read_bytes()[:1000])
    assert examined(tmp_path, "check", "\n  \na run.pt\n").returncode == 0
    failed = examined(tmp_path, "check", "a run.pt\n--help\n", "--json")
    assert failed.returncode != 0 and "Usage" not in failed.stdout
    assert examined(tmp_path, "check; touch made", "a run.pt").returncode == 2
    assert not (tmp_path / "made").exists()


def test_the_action_asks_for_what_its_script_reads() -> None:
    steps = yaml.safe_load((ACTION / "action.yml").read_text())["runs"]["steps"]
    assert set(re.findall(r"\$\{?([A-Z]+)", (ACTION / "examine.sh").read_text())) == set(steps[-1]["env"])


def test_each_hook_is_a_verb_that_takes_files() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert [hook["entry"] for hook in hooks] == ["statekit check", "statekit doctor"]
    assert all(re.search(hook["files"], GOOD.name) for hook in hooks)


@pytest.mark.parametrize("name", ["--report=m.pt", "--layout=m.pt", "-m.pt"])
def test_a_hook_examines_a_file_that_is_called_like_an_option(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: the damaged file wasn't examined, and was written over with a report."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(GOOD, "good.pt")
    damaged = GOOD.read_bytes()[:1000]
    Path(name).write_bytes(damaged)
    for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text()):
        _, *line = hook["entry"].split()
        assert main([*line, *hook["args"], name, "good.pt"]) not in (0, 2)
        assert Path(name).read_bytes() == damaged


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx: apt-get install nginx")
def test_nginx_takes_the_location(tmp_path: Path) -> None:
    location = (ROOT / "deploy" / "nginx.conf").read_text()
    file = tmp_path / "nginx.conf"
    file.write_text(
        f"pid {tmp_path}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; server {{ listen 127.0.0.1:1; {location} }} }}\n"
    )
    tried = subprocess.run(["nginx", "-t", "-c", file], capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stderr
