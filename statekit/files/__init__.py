"""Files: opened without trust, written without accidents, described by a manifest."""

import sys

from statekit.errors import UnsupportedSystemError

if sys.platform == "win32":
    raise UnsupportedSystemError(
        "statekit doesn't run on Windows, which can't rename a folder safely.",
        expected="Linux or macOS",
        remedy="run it in the Windows Subsystem for Linux (WSL)",
    )
