"""Files, read without trust and written without accidents.

In goes a path. Out comes a `Checkpoint`, whose tensors are read only when asked; or, at a target, files that were
written in a folder beside it, synced, read again and compared before they were renamed to it, with a manifest that
has a digest of each.
"""

import sys

from statekit.errors import UnsupportedSystemError

if sys.platform == "win32":
    raise UnsupportedSystemError(
        "statekit doesn't run on Windows, which can't rename a folder safely.",
        expected="Linux or macOS",
        remedy="run it in the Windows Subsystem for Linux (WSL)",
    )
