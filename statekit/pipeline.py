"""The pipeline of a job: its threads, its buffers, and the time of each stage.

The bytes of a checkpoint pass through stages: read, digest, decode or compress, write, sync, read and digest again. A
stage runs on its own thread, a lane, one piece of work after the other. Results and errors therefore come in the order
of one thread. A job with one thread has no lanes. Blocks lie in a few buffers, which are reused once nobody refers to
them, because fresh memory costs a third of the time. The pipeline takes functions and iterators and yields their
results in order.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from statekit.errors import UsageError

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

StageName: TypeAlias = Literal["read", "digest", "decompress", "compress", "write", "sync"]
_P = ParamSpec("_P")
_T = TypeVar("_T")
_A = TypeVar("_A")
_POOL = "work"
_AT_ONCE = 3
"""Pieces of shared work at once at most: each may hold blocks of its own, however many threads there are."""

_BUFFER_BYTES = 2**23
_PAGE = 2**12
_WORTH = 2**20
"""Bytes from which on memory is taken from the buffers; what is smaller has no fresh pages each time anyway."""
_KEPT = 8
_AHEAD = 2
"""Blocks that are read ahead of whoever takes them."""


class Times:
    """How long the stages of a job worked, in seconds of the clock, summed over threads.

    Attributes:
        threads: How many threads the job may use.
        worked: Seconds by stage.
        seconds: How long the job took, once it is done.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.worked: dict[StageName, float] = {}
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._lock = threading.Lock()

    def add(self, stage: StageName, seconds: float) -> None:
        """Notes that a stage worked."""
        with self._lock:
            self.worked[stage] = self.worked.get(stage, 0.0) + seconds

    def end(self) -> None:
        """Notes that the job is done."""
        self.seconds = time.perf_counter() - self._began

    def lines(self) -> Iterator[str]:
        """Yields how long each stage worked and waited for others, that which worked longest first."""
        yield f"{self.seconds:.2f} s on {self.threads} thread{'s' * (self.threads > 1)}:"
        for stage, worked in sorted(self.worked.items(), key=lambda item: -item[1]):
            yield f"  {stage:<10} worked {worked:.2f} s, waited {max(0.0, self.seconds - worked):.2f} s"


def cores() -> int:
    """Returns how many cores this process may use."""
    asked = getattr(os, "sched_getaffinity", None)
    return len(asked(0)) if asked else os.cpu_count() or 1


_jobs: list[Times] = []
_lanes: dict[str, ThreadPoolExecutor] = {}
_here = threading.local()
os.register_at_fork(after_in_child=_lanes.clear)  # a fork has none of its parent's threads


@contextmanager
def job(threads: int | None = None) -> Iterator[Times]:
    """Measures a job, and says how many threads it may use: as many as there are cores if None.

    Raises:
        UsageError: That is no number of threads.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise UsageError(
            "The number of threads must be a positive integer.",
            place="threads",
            expected="a whole number from 1 on",
            found=threads,
        )
    times = Times(cores() if threads is None else threads)
    _jobs.append(times)
    try:
        yield times
    finally:
        times.end()
        _jobs.remove(times)
        _free.clear()


def threads() -> int:
    """Returns how many threads the job at hand may use."""
    return _jobs[-1].threads if _jobs else cores()


@contextmanager
def working(stage: StageName) -> Iterator[None]:
    """Measures what a stage does, without what it has another stage do meanwhile on the same thread."""
    start, outer = time.perf_counter(), getattr(_here, "inner", 0.0)
    _here.inner = 0.0
    try:
        yield
    finally:
        spent = time.perf_counter() - start
        if _jobs:
            _jobs[-1].add(stage, spent - _here.inner)
        _here.inner = outer + spent


def can_share() -> bool:
    """Tells whether work that nobody waits for yet may go to another thread: not what such a one does itself."""
    return threads() > 1 and getattr(_here, "lane", "") != _POOL


def shared(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Callable[[], _T]:
    """Begins a piece of work that depends on no other, and returns what waits for its result."""
    if not can_share():
        result = work(*args, **kwargs)
        return lambda: result
    return _executor(_POOL, threads()).submit(work, *args, **kwargs).result


def in_turn(work: Callable[[_A], _T], items: Iterable[_A]) -> Iterator[_T]:
    """Yields what work makes of each item, in their order; a few are under way at once."""
    coming: deque[Callable[[], _T]] = deque()
    try:
        for item in items:
            coming.append(shared(work, item))
            if len(coming) >= min(threads(), _AT_ONCE):
                yield coming.popleft()()
        while coming:
            yield coming.popleft()()
    finally:
        for result in coming:  # whoever gives up closes the files next, which one of them may be reading
            with suppress(Exception):
                result()


def lane(name: str, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Callable[[], _T]:
    """Begins a piece of work behind what its lane has to do, and returns what waits for its result.

    Without another thread, or on one of the pipeline's own, it is done at once.
    """
    if threads() == 1 or hasattr(_here, "lane"):
        result = work(*args, **kwargs)
        return lambda: result
    return _executor(name, 1).submit(work, *args, **kwargs).result


def _executor(name: str, count: int) -> ThreadPoolExecutor:
    key = f"{name}-{count}"
    if key not in _lanes:
        from concurrent.futures import ThreadPoolExecutor  # brings logging, which most calls have no use for

        _lanes[key] = ThreadPoolExecutor(count, f"statekit-{name}", _enter, (name,))
    return _lanes[key]


def _enter(name: str) -> None:
    _here.lane = name


def ahead(blocks: Iterator[_T]) -> Iterator[_T]:
    """Yields what an iterator yields, which goes ahead on a lane while the last block is used."""
    if threads() == 1 or hasattr(_here, "lane"):
        yield from blocks
        return
    end: Any = object()
    coming: deque[Future[_T]] = deque()
    reader = _executor("read", 1)
    try:
        while True:
            while len(coming) < _AHEAD:
                coming.append(reader.submit(next, blocks, end))
            if (block := coming.popleft().result()) is end:
                return
            yield block
            del block  # its buffer is free for the next
    finally:
        for future in coming:  # whoever gives up closes the file next, which one of them may be reading
            if not future.cancel():
                future.exception()


Checks: TypeAlias = dict[Hashable, Callable[[], object]]
"""What has to be compared when a passage ends, by what it is about."""


def passage() -> Checks | None:
    """Returns what a passage that is going on has to compare at its end; None if there is none on this thread.

    Who reads in a passage reads to the end, or throws away what it has read: a checksum may be taken on the way, and
    what it covers be given out before it was compared.
    """
    return getattr(_here, "passage", None)


def passed(blocks: Iterator[_T]) -> Iterator[_T]:
    """Yields what an iterator reads, as one passage.

    Raises:
        CorruptError: At the end, what was read isn't what its checksums say.
    """
    checks: Checks = {}
    end: Any = object()
    while True:
        outer, _here.passage = passage(), checks
        try:
            block = next(blocks, end)
        finally:
            _here.passage = outer
        if block is end:
            break
        yield block
        del block
    for check in checks.values():
        check()


def give_back() -> None:
    """Has the C library give memory back to the system that was freed: of each thread it keeps some for that thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_free: deque[bytearray] = deque()
_lent: dict[int, weakref.ref[npt.NDArray[Any]]] = {}


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns an array whose values aren't set, as `numpy.empty`: in a job in a buffer of the job's, if it fits one.

    The buffer is taken back when neither the array nor a view of it is referred to any more.
    """
    count = math.prod(shape) * np.dtype(dtype).itemsize
    if not _jobs or not _WORTH <= count <= _BUFFER_BYTES:
        return np.empty(shape, dtype)
    try:
        memory = _free.pop()
    except IndexError:
        # Views of an array over it refer to that array, as none of NumPy's.
        memory = bytearray(_BUFFER_BYTES + _PAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % _PAGE
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, memory, start)

    def take_back(_: object) -> None:
        del _lent[id(memory)]
        if _jobs and len(_free) < _KEPT:
            _free.append(memory)

    _lent[id(memory)] = weakref.ref(array, take_back)
    return array


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
