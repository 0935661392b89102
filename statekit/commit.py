"""Atomic, synced, verified writing: a target is complete and checked, or it isn't there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from statekit.tensor import Tensor


class Stage(Protocol):
    """Where a container writes: a file or folder beside the target that takes its name when all is checked."""

    @property
    def path(self) -> Path:
        """The file (target_kind `file`) or existing empty folder (`folder`) to write."""

    def file(self, relative: str = "") -> AbstractContextManager[BinaryIO]:
        """Opens one new file for writing (seekable, exclusive, below `path`; `path` itself for `""`).

        Leaving the context flushes, syncs and closes it.
        """

    def stream(self, name: str, tensor: Tensor) -> Iterator[bytes]:
        """Yields the bytes of a tensor in C order, little-endian, block by block, and digests them under its name."""

    def manifest(self) -> dict[str, Any]:
        """Returns the manifest of what was streamed so far, for containers that keep it inside their file."""
