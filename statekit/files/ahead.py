"""Reads a tree in few and large requests: the simple cache between readers and a store.

A first read of a file brings a little more than was asked for. Reads that go on where the last one ended bring twice as
much each time, many requests under way; any other read begins small again. What was brought is kept for the next
reads. Values are the same however they are brought.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from statekit.files.tree import Facts, FileTree

REQUEST_BYTES = 2**23
"""Bytes of one request at most."""
MOST_REQUESTS = 16
"""Requests of one tree that are under way at once."""
_FIRST, _WHOLE, _MOST = 2**16, 2**18, 2**26
"""Bytes that a read brings at least; of a file that is read at once; and that a window grows to."""
_KEPT = 2**27
"""Bytes of windows that are kept in all."""


@dataclass(frozen=True)
class _Window:
    """Bytes of a file that were brought."""

    start: int
    data: memoryview

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


class ReadAhead:
    """A tree that asks another one for more than it is asked for itself."""

    def __init__(self, tree: FileTree) -> None:
        self._tree = tree
        self._windows: OrderedDict[tuple[str, int], _Window] = OrderedDict()
        self._last: dict[str, _Window] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        return self._tree.place

    def facts(self, name: str) -> Facts | None:
        with self._lock:
            return self._tree.facts(name)

    def names(self, folder: str) -> Sequence[str]:
        with self._lock:
            return self._tree.names(folder)

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        with self._lock:
            lock = self._locks.setdefault(facts.name, threading.Lock())
        while into:
            with lock:
                window = self._at(facts.name, start) or self._brought(facts, start, len(into))
            part = window.data[start - window.start :][: len(into)]
            into[: len(part)] = part
            start, into = start + len(part), into[len(part) :]

    def _at(self, name: str, start: int) -> _Window | None:
        with self._lock:
            for key, window in self._windows.items():
                if key[0] == name and window.start <= start < window.stop:
                    self._windows.move_to_end(key)
                    return window
        return None

    def _brought(self, facts: Facts, start: int, count: int) -> _Window:
        """Brings a window of a file, and keeps it."""
        last = self._last.get(facts.name)
        goes_on = last is not None and last.stop <= start <= last.stop + _FIRST
        size = min(2 * len(last.data), _MOST) if last and goes_on else _FIRST
        first = start if goes_on else start // _FIRST * _FIRST
        stop = min(max(first + size, start + count), first + _MOST, facts.size)
        if facts.size <= _WHOLE:
            first, stop = 0, facts.size
        window = _Window(first, self._read(facts, first, stop - first))
        with self._lock:
            self._last[facts.name] = window
            self._windows[facts.name, first] = window
            while sum(len(kept.data) for kept in self._windows.values()) > _KEPT and len(self._windows) > 1:
                self._windows.popitem(last=False)
        return window

    def _read(self, facts: Facts, start: int, count: int) -> memoryview:
        whole = memoryview(bytearray(count))
        starts = range(0, count, REQUEST_BYTES)

        def read(at: int) -> None:
            self._tree.read_into(facts, start + at, whole[at : at + REQUEST_BYTES])

        if len(starts) == 1:
            read(0)
        else:
            list(self._threads.map(read, starts))
        return whole

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(MOST_REQUESTS, "statekit-store")
