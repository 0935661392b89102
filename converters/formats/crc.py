"""Cyclic redundancy checks of formats, by the fastest library that is installed."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import google_crc32c
import numpy as np

from statekit.pipeline import passage

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["RunningChecks", "crc32", "crc32c"]  # CRC-32 is that of zip archives and gzip


def crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    """Returns the CRC-32C (Castagnoli) of bytes, as TensorFlow's tables and the shards of zarr carry it.

    Args:
        data: The bytes.
        crc: That of the bytes before them.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    # The library takes what can't change, and an array, without a copy; not a memoryview.
    return int(google_crc32c.extend(crc, np.frombuffer(data, np.uint8) if len(data) else b""))


class RunningChecks:
    """Which checksums of a file were compared; what is read in order in a passage is taken into them on the way.

    Args:
        checksum: Takes bytes and the checksum of those before them.
    """

    def __init__(self, checksum: Callable[[memoryview, int], int]) -> None:
        self._checksum = checksum
        self._compared: set[Hashable] = set()
        self._begun: dict[Hashable, tuple[int, int]] = {}
        """How many bytes were read from the first on, and their checksum."""

    def take(
        self, key: Hashable, start: int, data: memoryview, size: int, compare: Callable[[], None]
    ) -> None:
        """Takes bytes that were read of what has a checksum, and has it compared: now, or at the passage's end.

        Args:
            key: What has the checksum.
            start: The first of these bytes in it.
            data: The bytes.
            size: All its bytes.
            compare: Compares it once, beginning with what `begun` returns, and calls `add`.
        """
        if key in self._compared:
            return
        checks = passage()
        at, checksum = self.begun(key) if start else (0, 0)
        if at == start and (checks is not None or len(data) == size):
            self._begun[key] = at + len(data), self._checksum(data, checksum)
        if checks is None:
            compare()
        else:
            checks[self, key] = compare

    def begun(self, key: Hashable) -> tuple[int, int]:
        """Returns how many bytes were taken of something, and their checksum, and forgets them."""
        return self._begun.pop(key, (0, 0))

    def add(self, key: Hashable) -> None:
        """Notes that a checksum was compared."""
        self._compared.add(key)

    def __contains__(self, key: Hashable) -> bool:
        """Tells whether a checksum was compared."""
        return key in self._compared
