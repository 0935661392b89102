"""CRC-32C (Castagnoli), which zarr's shards carry.

Source: RFC 3720, appendix B.4: polynomial 0x1EDC6F41, reflected, with all bits inverted before and after.
"""

from __future__ import annotations

_POLYNOMIAL = 0x82F63B78


def _row(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = tuple(_row(value) for value in range(256))


def crc32c(data: bytes) -> int:
    """Returns the checksum of a few bytes; a MiB takes a tenth of a second.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[crc & 0xFF ^ byte]
    return crc ^ 0xFFFFFFFF
