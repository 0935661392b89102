"""Files, read without trust and written without accidents.

To read, this room opens a path as a `Checkpoint`, whose tensors are read only on demand. To write, it makes files in a
folder beside the target, syncs them, reads them again, compares them, and renames them to the target. The manifest has
a digest of each file.
"""

import sys

from statekit.errors import UnsupportedSystemError

if sys.platform == "win32":
    raise UnsupportedSystemError(
        "statekit doesn't run on Windows, which can't rename a folder safely.",
        expected="Linux or macOS",
        remedy="run it in the Windows Subsystem for Linux (WSL)",
    )
