"""Programs that are forked end as programs that are started: with their exit code, output and variables."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import drivers
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its socket has no place in a folder")
PROGRAM = """
import os, signal, sys
print(sys.argv[1:], os.environ["OF_MINE"], os.getcwd(), "colorsys" in sys.modules)
if sys.argv[1] == "exit":
    sys.exit(3)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
raise ValueError("of its own")
"""


@pytest.mark.parametrize(("end", "code"), [("exit", 3), ("killed", -signal.SIGKILL), ("raised", 1)])
def test_a_program_ends_as_it_does_by_itself(end: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = drivers.run(tmp_path / "program.py", end, imports=["colorsys", "no_such_module"], OF_MINE="set")
    assert done.returncode == code
    assert ("ValueError: of its own" in done.stderr) is (end == "raised")
    assert end == "killed" or done.stdout == f"{[end]} set {os.getcwd()} True\n"
