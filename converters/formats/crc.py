"""Cyclic redundancy checks of formats, by the fastest library that is installed."""

from __future__ import annotations

import google_crc32c
import numpy as np

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32", "crc32c"]  # CRC-32 is that of zip archives and gzip


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
