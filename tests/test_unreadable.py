"""What may not be read is said to be forbidden, by a process that really may not; never that no format fits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from samples import ROWS

from statekit.cli.main import FAILED

NOBODY = 65534
OPENING = f"""
import contextlib, io, json, os, sys
from statekit.cli.main import main

def said(path):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["inspect", path])
    return code, err.getvalue()

readable, shut = json.loads(sys.stdin.read())
for path in readable:  # imports what reading takes, which may lie where nobody may look
    assert said(path)[0] == 0, said(path)
os.setgroups([])
os.setegid({NOBODY})
os.seteuid({NOBODY})
print(json.dumps([said(path) for path in shut]))
"""


def _copied(whole: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    copy = folder / whole.name
    return Path(shutil.copytree(whole, copy) if whole.is_dir() else shutil.copy(whole, copy))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_what_may_not_be_read_is_said_to_be_forbidden() -> None:
    firsts = {row.sample.container: row for row in reversed(ROWS)}
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders let nobody in
        os.chmod(made, 0o755)
        readable, shut = [], []
        for number, row in enumerate(firsts.values()):
            (place := Path(made) / f"{number}").mkdir()
            whole = row.sample_in(place).path
            if not whole.exists():  # the prefix of several files
                continue
            readable.append(str(whole))
            copy = _copied(whole, place / "shut")
            shut.append(str(copy))
            os.chmod(copy, 0)
            if whole.is_dir():
                inside = _copied(whole, place / "inside")
                for file in (path for path in inside.rglob("*") if path.is_file()):
                    file.chmod(0)
                shut.append(str(inside))
        command = [sys.executable, "-c", OPENING]
        done = subprocess.run(
            command, input=json.dumps([readable, shut]), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout)
    assert len(answers) > 15
    wrong = [
        (path, error)
        for path, (code, error) in zip(shut, answers, strict=True)
        if code != FAILED or "ermission denied" not in error or path not in error
    ]
    assert not wrong, "\n".join(f"{path}: {error}" for path, error in wrong)
