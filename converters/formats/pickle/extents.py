"""Reads pickles of large arrays without their bytes: where each byte string lies in the file takes its place.

The opcodes of a pickle are passed over one by one, and each long byte string among them becomes a persistent id (its
number), which `reader` then meets as a `Part` of the file. So a file of gigabytes opens by its small part.
"""

from __future__ import annotations

import pickletools
import re
from dataclasses import replace

from statekit.converters.formats.pickle.reader import TruncatedPickle, Unpickled, Vocabulary, read_pickle
from statekit.errors import FormatError
from statekit.files.source import Part, Source, byte_of, bytes_at, hold, record

KEPT_BYTES = 256
"""Byte strings up to this stay where they are."""
MAX_LINE = 2**16
"""Bytes of a number or name of protocol 0 at most, far beyond any that the reader takes."""
_WINDOW = 2**16
_ASKED, _AT_ONCE = 1024, 2**20
"""Opcodes, and bytes, between two questions to the budget."""
_WHAT = "A pickle without its arrays"
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}  # fmt: skip
_ARGUMENTS = {ord(op.code): op.arg.n if op.arg else 0 for op in pickletools.opcodes}
_BYTES = frozenset(b"BC\x8e\x96")
_OUTSIDE = frozenset(b"PQ")
_TWO_LINES = frozenset(b"ci")
_STOP = ord(".")


def _fixed() -> re.Pattern[bytes]:
    """Returns what matches a run of opcodes whose sizes are fixed, up to one that ends or leads outside."""
    kinds = []
    for size in sorted({size for size in _ARGUMENTS.values() if size >= 0}):
        codes = {code for code, n in _ARGUMENTS.items() if n == size} - _OUTSIDE - {_STOP}
        kinds.append(b"[" + re.escape(bytes(sorted(codes))) + b"]" + b".{%d}" % size)
    return re.compile(b"(?:" + b"|".join(kinds) + b")++", re.DOTALL)


_FIXED = _fixed()


def read_thin_pickle(source: Source, calls: Vocabulary) -> Unpickled:
    """Reads the pickle at the start of a file; byte strings of more than 256 bytes are `Part`s of it.

    Those of protocols below 3 are text and read whole.

    Args:
        source: The file.
        calls: As `read_pickle` takes it.

    Raises:
        TruncatedPickle: The file ends before the pickle does.
        RefusedError: As `read_pickle` raises it.
        BudgetError: Even without its byte strings the pickle is more than the job may hold.
        FormatError: The bytes aren't a pickle.
    """
    place = source.place
    head = bytes_at(source, 0, min(2, source.size))
    if head[:1] != b"\x80" or head[1:] < b"\x03":
        data = record(source, 0, source.size, None, "A pickle")
        return read_pickle(data, place, calls=calls, account=source.account)
    thin = _Thinning(source)
    extents = thin.extents
    read = read_pickle(
        thin.run(),
        f"{place} (positions without arrays)",
        calls=calls,
        persistent=lambda number: extents[number],
        account=source.account,
    )
    return replace(read, end=thin.at)


class _Thinning:
    """Goes over the opcodes of a file once."""

    def __init__(self, source: Source) -> None:
        self.source, self.at = source, 0
        self.extents: list[Part] = []
        self._window, self._start = b"", 0

    def run(self) -> bytes:
        """Returns the pickle without its long byte strings."""
        out, taken, opcodes = bytearray(), 0, 0
        while True:
            code = self._peek(1)[0]
            if code in _OUTSIDE or code not in _ARGUMENTS:
                opcode = f"opcode {code:#04x}"
                raise FormatError(
                    "A pickle doesn't follow its format.", place=byte_of(self.source, self.at), found=opcode
                )
            run = _FIXED.match(self._window, self.at - self._start)
            head, body = (run.end() - run.start(), 0) if run else self._sizes(code)
            opcodes += head // 8 if run else 1
            if opcodes >= _ASKED:
                self.source.account.step(opcodes // 4, _WHAT, byte_of(self.source, self.at))
                opcodes = 0
            if code in _BYTES and body > KEPT_BYTES:
                out += b"J" + len(self.extents).to_bytes(4, "little") + b"Q"
                self.extents.append(self._extent(self.at + head, body))
            else:
                if len(out) + head + body > taken:
                    more = max(min(_AT_ONCE, self.source.size), len(out) + head + body - taken)
                    hold(self.source, self.at, more, _WHAT)
                    taken += more
                if body > _AT_ONCE:
                    self._add_long(out, head + body)
                else:
                    out += self._peek(head + body)
            self.at += head + body
            if code == _STOP:
                with self.source.account.passing() as passing:
                    passing.hold(len(out), _WHAT, byte_of(self.source, self.at))
                    return bytes(out)

    def _add_long(self, out: bytearray, count: int) -> None:
        """Adds what is long but no byte string, which lies in the window, too, and cut out of it."""
        with self.source.account.passing() as passing:
            passing.hold(2 * count, _WHAT, byte_of(self.source, self.at))
            out += self._peek(count)
            self._window = b""

    def _sizes(self, code: int) -> tuple[int, int]:
        """Returns how many bytes an opcode takes before its counted ones, and how many those are."""
        kind = _ARGUMENTS[code]
        if kind >= 0:
            return 1 + kind, 0
        if kind in _WIDTHS:
            width = _WIDTHS[kind]
            return 1 + width, int.from_bytes(self._peek(1 + width)[1:], "little")
        end = 0
        for _ in range(2 if code in _TWO_LINES else 1):
            end = self._peek(min(MAX_LINE, self.source.size - self.at)).find(b"\n", end) + 1
            if not end:
                raise self._truncated()
        return end, 0

    def _extent(self, start: int, count: int) -> Part:
        if start + count > self.source.size:
            raise self._truncated()
        return Part(self.source, start, count)

    def _peek(self, count: int) -> bytes:
        """Returns the next bytes."""
        have = self.at - self._start
        if not 0 <= have <= len(self._window) - count:
            size = min(max(count, _WINDOW), self.source.size - self.at)
            if size < count:
                raise self._truncated()
            self._window, self._start, have = bytes_at(self.source, self.at, size), self.at, 0
        return self._window[have : have + count]

    def _truncated(self) -> TruncatedPickle:
        size = f"{self.source.size} bytes"
        return TruncatedPickle("A pickle is cut off.", place=byte_of(self.source, self.at), found=size)
