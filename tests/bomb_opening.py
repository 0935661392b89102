"""Opens a file in a process of its own, with nothing of the tests in it, and says what that took, as JSON.

    python tests/bomb_opening.py inspect|stats|seal|convert|imports PATH [TARGET] [--budget SIZE]

The peak is that of this process (VmHWM): its parent's pages don't count. It can write no file, or where it
seals, small ones, and where it converts, as much as it may hold in memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import signal
import sys
import time
from pathlib import Path

MOST_BYTES, MOST_SECONDS = 16 * 2**30, 120
"""What ends the process if nothing else does."""
SEAL_BYTES = 2**20


def peak() -> int:
    """Returns the most that this process had in memory so far, in bytes."""
    match = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def main(verb: str, *arguments: str) -> None:
    """Opens, and prints one line of JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    most = {"seal": SEAL_BYTES, "convert": MOST_BYTES}.get(verb, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    from statekit.cli.main import main as statekit

    if verb == "imports":  # what any format's reader imports
        for module in (
            "h5py",
            "safetensors.numpy",
            "tensorstore",
            "zstandard",
            "statekit.cli.inspect_command",
        ):
            __import__(module)
        print(json.dumps({"peak": peak()}))
        return
    command = ["inspect", "--stats"] if verb == "stats" else [verb]
    said = io.StringIO()
    start, begun = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = statekit([*command, *arguments])
    seconds, busy = time.perf_counter() - start, time.process_time() - begun
    record = {"code": code, "error": said.getvalue()[:2000], "seconds": seconds, "cpu": busy, "peak": peak()}
    print(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
