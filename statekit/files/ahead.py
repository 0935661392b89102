"""Reads a tree in few and large requests: the simple cache between readers and a store.

A first read of a file brings a little more than was asked for. Reads that go on where the last one ended bring twice as
much each time, and from a size on what comes next is asked for while the reader works on what came; any other read
begins small again. What was brought is kept for the next reads. Values are the same however they are brought.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from statekit.errors import UsageError
from statekit.files.tree import Facts, FileTree

REQUEST_BYTES = 2**22
"""Bytes of one request at most."""
MOST_REQUESTS = 24
"""Requests of one tree that are under way at once."""
_FIRST, _WHOLE, _MOST = 2**16, 2**18, MOST_REQUESTS * REQUEST_BYTES
"""Bytes that a read brings at least; of a file that is read at once; and that may be under way behind a reader."""
_AHEAD = 2**20
"""Bytes of a window from which on the next one is asked for before it is needed."""
_NEAR = 2**20
"""Bytes between two headers that come with them, in a file whose headers lie among its values."""
_MOST_RUNS = 4
"""Places of a file from which it is read in order, by as many readers, of which the last ones are remembered."""
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


@dataclass
class _Run:
    """Where a reader goes on in a file.

    Attributes:
        begin: Where the reader began.
        stop: The first byte that wasn't asked for yet.
        size: Bytes that are asked for ahead of it.
        coming: What is under way: first byte -> number of bytes, and what waits for them.
    """

    begin: int
    stop: int
    size: int
    coming: dict[int, tuple[int, Future[memoryview]]] = field(default_factory=dict)


class ReadAhead:
    """A tree that asks another one for more than it is asked for itself."""

    def __init__(self, tree: FileTree) -> None:
        self._tree = tree
        self._kept: OrderedDict[tuple[str, int], _Window] = OrderedDict()
        self._starts: dict[str, list[int]] = {}
        self._bytes = 0
        self._runs: dict[str, list[_Run]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._scattered: set[str] = set()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._left: int | None = None

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
        check_not_forked(self._process, self.place)
        with self._lock:
            lock = self._locks.setdefault(facts.name, threading.Lock())
        while into:
            with lock:
                window = self._at(facts.name, start) or self._brought(facts, start, len(into))
            part = window.data[start - window.start :][: len(into)]
            into[: len(part)] = part
            start, into = start + len(part), into[len(part) :]
            with self._lock:
                self._left = None if self._left is None else max(0, self._left - len(part))

    def recheck(self, facts: Facts) -> None:
        """Asks the store once more whether a file is the one that was listed.

        Raises:
            CorruptError: It isn't.
        """
        self._tree.read_into(facts, 0, memoryview(bytearray(min(facts.size, 1))))

    def bring(self, facts: Facts, runs: Iterable[tuple[int, int]]) -> None:
        """Brings runs of a file, first byte and count of each, many requests at once; they are read later."""
        check_not_forked(self._process, self.place)

        def read(run: tuple[int, int]) -> None:
            self._keep(facts.name, _Window(run[0], self._read_once(facts, *run)))

        wanted = joined(runs, facts.size, _NEAR if facts.name in self._scattered else _FIRST)
        missing = ((self._past(facts.name, start, stop), stop) for start, stop in wanted)
        pieces = (
            (at, min(REQUEST_BYTES, stop - at))
            for start, stop in missing
            for at in range(start, stop, REQUEST_BYTES)
        )
        list(self._threads.map(read, pieces))

    def brought(self) -> list[tuple[Facts, int, memoryview]]:
        """Returns what was brought and is kept: the file, the first byte, and the bytes; the smallest first."""
        with self._lock:
            kept = [
                (self._tree.facts(name), start, window.data) for (name, start), window in self._kept.items()
            ]
        runs = [(facts, start, data) for facts, start, data in kept if facts is not None]
        return sorted(runs, key=lambda run: (len(run[2]), run[0].name, run[1]))

    def put(self, facts: Facts, start: int, data: memoryview) -> None:
        """Keeps bytes of a file that another tree has brought, of the same identity."""
        self._keep(facts.name, _Window(start, data))

    def expect(self, count: int | None) -> None:
        """Has no more asked for ahead than so many bytes, which are all that will be read from now on; None: any."""
        self._left = count

    def expect_scattered(self, facts: Facts) -> None:
        """Has a reader who leaves out less than a request has in a file count as one who reads in order."""
        self._scattered.add(facts.name)

    def _past(self, name: str, start: int, stop: int) -> int:
        """Returns the first byte of a run that wasn't brought yet; the last are as if they weren't."""
        while start < stop and (window := self._at(name, start)):
            start = window.stop
        return start

    def _at(self, name: str, start: int) -> _Window | None:
        """Returns the nearest window that begins at a byte or before, if the byte is in it."""
        with self._lock:
            starts = self._starts.get(name, [])
            after = bisect_right(starts, start)
            if not after:
                return None
            key = name, starts[after - 1]
            self._kept.move_to_end(key)
            window = self._kept[key]
        return window if start < window.stop else None

    def _keep(self, name: str, window: _Window) -> None:
        """Keeps a window, and lets those go that lie in it, and those that were used least lately.

        No window lies in another, so that the nearest one that begins before a byte ends last.
        """
        with self._lock:
            starts = self._starts.setdefault(name, [])
            after = bisect_right(starts, window.start)
            if after and self._kept[name, starts[after - 1]].stop >= window.stop:
                return
            first = bisect_left(starts, window.start)
            while first < len(starts) and self._kept[name, starts[first]].stop <= window.stop:
                self._drop(name, starts[first])
            insort(starts, window.start)
            self._kept[name, window.start] = window
            self._bytes += len(window.data)
            while self._bytes > _KEPT and len(self._kept) > 1:
                self._drop(*next(iter(self._kept)))

    def _drop(self, name: str, start: int) -> None:
        self._starts[name].remove(start)
        self._bytes -= len(self._kept.pop((name, start)).data)

    def _brought(self, facts: Facts, start: int, count: int) -> _Window:
        """Brings a window of a file, and keeps it."""
        runs = self._runs.setdefault(facts.name, [])
        gap = REQUEST_BYTES if facts.name in self._scattered else _FIRST
        run = next((run for run in runs if _goes_on(run, start, gap)), None)
        if run is None:
            run, first = _Run(start, start, _FIRST), start if count >= _FIRST else start // _FIRST * _FIRST
            if facts.size - start < _FIRST:  # archives have their directories before their ends
                first = max(0, facts.size - 2 * _FIRST)
                run.size = facts.size - first
            runs.append(run)
            for gone in runs[:-_MOST_RUNS]:
                self._forget(facts.name, gone)
            del runs[:-_MOST_RUNS]
        else:
            runs.append(runs.pop(runs.index(run)))
            # Who reads a page twice in a row may be anywhere next; who reads blocks of a tensor reads more of it. What
            # is asked for ahead is no more than what was read: a process may need a part of each tensor alone.
            wanted = max(2 * run.size, 4 * count if count >= _AHEAD else 0)
            run.size, first = min(wanted, start - run.begin + 2 * count, _MOST), start
        if run.size >= _AHEAD:
            window = self._next(facts, run, start, count)
        else:
            stop = min(max(first + run.size, start + count), first + _MOST, facts.size)
            if facts.size <= _WHOLE:
                first, stop = 0, facts.size
            window = _Window(first, self._read(facts, first, stop - first))
            run.stop = stop
        self._keep(facts.name, window)
        return window

    def _next(self, facts: Facts, run: _Run, start: int, needed: int) -> _Window:
        """Waits for the block of a run with a byte in it, and asks for what comes behind."""
        covers = any(first <= start < first + count for first, (count, _) in run.coming.items())
        if not covers or any(_has_failed(future) for _, future in run.coming.values()):
            self._forget(facts.name, run)
            run.stop = start
        left = facts.size if self._left is None else max(self._left, needed)
        stop = min(start + min(run.size, left), facts.size)
        while (at := self._past(facts.name, run.stop, stop)) < stop:
            count = min(REQUEST_BYTES, stop - at)
            run.coming[at] = count, self._threads.submit(self._read_once, facts, at, count)
            run.stop = at + count
        first = next((at for at, (count, _) in run.coming.items() if at <= start < at + count), None)
        if first is None:  # it came meanwhile, by a request that was given up
            return self._at(facts.name, start) or _Window(start, self._read(facts, start, needed))
        for passed in [other for other in run.coming if other < first]:
            self._leave(facts.name, passed, run.coming.pop(passed)[1])
        return _Window(first, run.coming.pop(first)[1].result())

    def _forget(self, name: str, run: _Run) -> None:
        """Gives up what is under way."""
        for start, (_, future) in run.coming.items():
            self._leave(name, start, future)
        run.coming.clear()

    def _leave(self, name: str, start: int, future: Future[memoryview]) -> None:
        """Gives up a request; what is on its way already is kept when it comes."""

        def keep(future: Future[memoryview]) -> None:
            if not future.cancelled() and not _has_failed(future):
                self._keep(name, _Window(start, future.result()))

        if not future.cancel():
            future.add_done_callback(keep)

    def _read_once(self, facts: Facts, start: int, count: int) -> memoryview:
        whole = np.empty(count, np.uint8).data
        self._tree.read_into(facts, start, whole)
        return whole

    def _read(self, facts: Facts, start: int, count: int) -> memoryview:
        whole = np.empty(count, np.uint8).data
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


def check_not_forked(process: int, place: str) -> None:
    """Refuses to wait for threads that only another process has, as libraries of stores do in a fork of it.

    Args:
        process: The process that began to read.
        place: What it read.

    Raises:
        UsageError: This process is another.
    """
    if process != os.getpid():
        raise UsageError(
            "This process was forked from one that had read from a store, so that its own requests would hang.",
            place=place,
            remedy="start processes by spawn (multiprocessing.set_start_method), or read from stores in these alone",
        )


def joined(runs: Iterable[tuple[int, int]], size: int, gap: int = _FIRST) -> list[tuple[int, int]]:
    """Returns what is asked for to get runs of a file, where what lies near comes in one request.

    Args:
        runs: First byte and count of each.
        size: That of the file.
        gap: Bytes between two runs that come with them.

    Returns:
        First and last byte of each request, the last as if it weren't in it.
    """
    wanted: list[tuple[int, int]] = []
    for start, count in sorted(runs):
        stop = min(start + count, size)
        if wanted and start <= wanted[-1][1] + gap and stop - wanted[-1][0] <= REQUEST_BYTES:
            wanted[-1] = wanted[-1][0], max(stop, wanted[-1][1])
        elif start < stop:
            wanted.append((start, stop))
    return wanted


def _has_failed(future: Future[memoryview]) -> bool:
    """Tells whether a request failed, which may be asked for again."""
    return future.done() and not future.cancelled() and future.exception() is not None


def _goes_on(run: _Run, start: int, gap: int) -> bool:
    """Tells whether a read goes on where a run's reader is, or at most so many bytes behind."""
    return min(run.coming, default=run.stop) <= start <= run.stop + gap
