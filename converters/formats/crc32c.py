"""CRC-32C (Castagnoli), which TensorFlow's tables and the shards of zarr carry."""

from __future__ import annotations

import google_crc32c


def crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    """Returns the CRC-32C of bytes, going on from that of the bytes before them.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    return int(google_crc32c.extend(crc, bytes(data)))
