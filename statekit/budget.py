"""The budget of a job: the memory and the work that reading may take, however many files and readers there are.

The budget is one number of bytes; `--budget` raises it. A job counts what it holds (headers, indices, pickles, trees)
before it allocates it, and returns it when the checkpoint is closed. Values of tensors are streamed and do not count.
Work is counted in steps, which may grow with the bytes that were read. Decompressed bytes may grow with the stored
bytes. Small chunks, each of which takes more work than its values, may grow with them too. Time does not count: an
honest file on a slow disk passes. A cache, as of decoded chunks, is kept while nothing else needs the room. Every
reader asks this module and has no limit of its own, so that limits cannot multiply.
"""

from __future__ import annotations

import atexit
import gc
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from statekit.errors import BudgetError, UsageError

DEFAULT = 512 * 2**20
"""Bytes that a job may hold unless it is told otherwise."""
NODE_BYTES = 128
"""What one value of a tree is taken to need, in bytes: its object, and its place in a dict or list."""
EXPANSION = 32
"""Bytes that one stored byte may become, over all that a job opens; a byte of zeros becomes a thousand."""
CHUNK_BYTES, CHUNK_SHARE = 8, 512
"""Stored bytes that explain a small chunk: in HDF5 and OCDBT one takes 10 to 40, and few files have nothing else."""
CHUNK_STEPS = 128
"""Steps of work that a chunk takes which is absent, or of which a block has next to nothing."""
TINY = 256
"""Values of a chunk from which on they explain the work themselves."""
_NEW_OBJECTS = 1_000_000
"""Objects between two searches for cycles: of a checkpoint of 10 000 tensors stay 300 000."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)


def bytes_of(text: str, option: str = "--budget") -> int:
    """Returns the bytes that a size such as `2GiB`, `800 MB` or `4096` names; K, M, G and T count in powers of 1024.

    Raises:
        UsageError: It names none.

    Example:
        >>> bytes_of("1.5GiB")
        1610612736
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError("This isn't a size.", place=option, expected="such as 2GiB", found=text)
    return int(float(match[1]) * _UNITS[match[2].upper()])


@contextmanager
def collecting_rarely(for_good: bool = False) -> Iterator[None]:
    """Has Python look for cycles less often: what a checkpoint's names become stays, and is looked at in vain.

    A caller who never looks for cycles, or as rarely, keeps that.

    Args:
        for_good: Whether the process ends with the work, before which Python would look through all once more.
    """
    usual = gc.get_threshold()
    if for_good:
        atexit.register(gc.freeze)
    changes = 0 < usual[0] < _NEW_OBJECTS
    if changes:
        gc.set_threshold(_NEW_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        # A thread that found another one's setting leaves it to that one.
        if changes and not for_good:
            gc.set_threshold(*usual)


@dataclass(frozen=True)
class Limits:
    """What one job may take.

    Attributes:
        held: Bytes of headers, indices, pickles, documents and trees that are held at a time; while a conversion
            reads its target again, as many for that.
    """

    held: int = DEFAULT

    def steps(self, read: int) -> int:
        """Returns how many steps of work are allowed once so many bytes were read.

        That is a million by default, and one for two bytes: a tensor of an optimizer takes about 22 opcodes in 70
        bytes of a pickle. No more are explained by bytes than a sixteenth of those that may be held.
        """
        return self.held // 512 + min(read, self.held // 8) // 2

    @property
    def carried(self) -> int:
        """Bytes of one file at most that goes from folder to folder without being understood; 64 MiB by default.

        A larger one is no remainder of a run, but a model or an export, and is named instead.
        """
        return self.held // 8

    def decoded(self, stored: int) -> int:
        """Returns how many bytes may come out of compression, or out of nothing, where so many are stored.

        That is 2 GiB by default, and 32 for each byte: an optimizer's first state is zeros beside its parameters.
        """
        return 4 * self.held + EXPANSION * stored

    def chunks(self, stored: int, files: int) -> int:
        """Returns how many small chunks may be read one after the other where so many bytes lie in so many files.

        That is 65 536 by default: of equal ones a compressed index takes next to nothing. To that comes one for each
        file, one for `CHUNK_BYTES` until that are as many again, and one for `CHUNK_SHARE` of all bytes.
        """
        some = self.held // 2**13
        return some + files + min(stored // CHUNK_BYTES, some) + stored // CHUNK_SHARE


class Budget:
    """What a job has taken of its limits. Made once for a job, which may open several checkpoints, by any thread.

    Args:
        limits: What it may take.
        follow_links: Whether it may read what links out of its checkpoints lead to (statekit/files/source.py).
    """

    def __init__(self, limits: Limits | None = None, *, follow_links: bool = False) -> None:
        self.limits = limits or Limits()
        self.follow_links = follow_links
        self._held = self._steps = self._read = self._decoded = self._stored = self._files = 0
        self._chunks = 0
        self._sides = 1
        self._opened: set[str] = set()
        self.sources: set[str] = set()
        """Paths of the files that were opened to be read."""
        self._in_chunks: set[str] = set()
        self._unmeasured: list[Callable[[], tuple[int, int]]] = []
        self._kept: OrderedDict[tuple[Account, Hashable], tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.few_counts = self.counts_apart = False
        """Whether few of the counts that lie apart in a store are enough for the job, and whether there are such."""
        self.listeners: dict[Hashable, Callable[[int, memoryview], None]] = {}
        """Who is told of bytes of a file when they have been read, and where they stand, by its identity."""

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._held

    def hold(self, count: int, what: str, place: str) -> None:
        """Takes `count` bytes to hold, before they are allocated.

        Args:
            count: How many.
            what: What they are, as an error begins: `The header of an archive`.
            place: The file, and the byte in it.

        Raises:
            BudgetError: That is more than the job may hold.
        """
        with self._lock:
            most = self._sides * self.limits.held
            while self._kept and self._held + count > most:
                self._held -= self._kept.popitem(last=False)[1][1]
            if self._held + count > most:
                raise BudgetError(
                    f"{what} is more than this job may hold in memory.",
                    place=place,
                    expected=f"at most {most} bytes held (the budget's limit `held`)",
                    found=f"{count} bytes beside {self._held} that are held already",
                    remedy=_raised(self._held + count),
                )
            self._held += count

    @contextmanager
    def reading_again(self) -> Iterator[None]:
        """Gives a job's written target as much budget as its source, while both are open."""
        with self._lock:
            self._sides += 1
        try:
            yield
        finally:
            with self._lock:
                self._sides -= 1

    def free(self, count: int) -> None:
        """Gives bytes back."""
        with self._lock:
            self._held -= count

    def keep(self, key: tuple[Account, Hashable], value: Any, count: int) -> None:
        """Keeps what was held, for an account, until its bytes are needed."""
        with self._lock:
            self._held -= self._kept.pop(key, (None, 0))[1]
            self._kept[key] = value, count

    def kept(self, key: tuple[Account, Hashable]) -> tuple[Any, int]:
        """Takes out what was kept, and how many bytes that is, which stay held; None if it is gone."""
        with self._lock:
            return self._kept.pop(key, (None, 0))

    def forget(self, account: Account) -> None:
        """Gives back what was kept for an account."""
        with self._lock:
            for key in [key for key in self._kept if key[0] is account]:
                self._held -= self._kept.pop(key)[1]

    def read(self, count: int) -> None:
        """Notes that so many bytes were read, which explain work."""
        with self._lock:
            self._read += count

    def stored(self, place: str, measure: Callable[[], tuple[int, int]]) -> None:
        """Notes a checkpoint, whose stored bytes explain what is decoded, also before they are read.

        Args:
            place: Where it is; it counts once.
            measure: Returns how many bytes are stored there, and in how many files; asked once, and only if what was
                read doesn't explain it.
        """
        with self._lock:
            if place not in self._opened:
                self._opened.add(place)
                self._unmeasured.append(measure)

    def decode(self, count: int, what: str, place: str) -> None:
        """Takes `count` bytes that something stored becomes, or something that isn't stored at all.

        Args:
            count: How many.
            what: What they come from, as an error begins: `A chunk`.
            place: The file, and the byte in it.

        Raises:
            BudgetError: That is more than the bytes explain that are stored, and those that were read.
        """
        with self._lock:
            self._decoded += count
        self.explain(0, what, place)

    def explain(self, count: int, what: str, place: str) -> None:
        """Asks, before anything is read, whether `count` bytes could be decoded, as in `decode`."""
        count += self._decoded
        if count <= self.limits.decoded(self._stored + self._read):
            return
        explaining = self._measured()[0] + self._read
        most = self.limits.decoded(explaining)
        if count > most:
            raise BudgetError(
                f"{what} becomes more than its bytes explain.",
                place=place,
                expected=f"at most {most} bytes from {explaining} (the budget's limit `decoded`)",
                found=f"{count} bytes",
                remedy=_raised(max(2 * self.limits.held, count // 4)),
            )

    def chunks(self, count: int, what: str, place: str) -> None:
        """Takes the small chunks of an array that are read as a whole, one after the other.

        Args:
            count: How many the array has.
            what: What reads them, as an error begins: `Reading an array in chunks`.
            place: The array; it counts once, however often it is read.

        Raises:
            BudgetError: There are more than the bytes explain that are stored.
        """
        with self._lock:
            if place in self._in_chunks:
                return
            self._in_chunks.add(place)
            self._chunks += count
        if self._chunks <= self.limits.chunks(0, 0):
            return
        stored, files = self._measured()
        most = self.limits.chunks(stored, files)
        if self._chunks > most:
            raise BudgetError(
                f"{what} takes more work than its bytes explain.",
                place=place,
                expected=f"at most {most} small chunks in {stored} bytes (the budget's limit `chunks`)",
                found=f"{self._chunks} chunks of less than {TINY} values",
                remedy=_raised(max(2 * self.limits.held, 2**13 * self._chunks)),
            )

    def _measured(self) -> tuple[int, int]:
        """Returns how many bytes all checkpoints of the job have stored, and in how many files."""
        with self._lock:
            while self._unmeasured:
                size, files = self._unmeasured.pop()()
                self._stored, self._files = self._stored + size, self._files + files
            return self._stored, self._files

    def step(self, count: int, what: str, place: str) -> None:
        """Takes `count` steps of work.

        Args:
            count: How many.
            what: What is at work, as an error begins: `A pickle`.
            place: The file, and the byte in it.

        Raises:
            BudgetError: That is more than the bytes explain that were read so far.
        """
        with self._lock:
            self._steps += count
            most = self.limits.steps(self._read)
            if self._steps > most:
                raise BudgetError(
                    f"{what} takes more work than its bytes explain.",
                    place=place,
                    expected=f"at most {most} steps for {self._read} bytes (the budget's limit `steps`)",
                    found=f"{self._steps} steps",
                    remedy=_raised(2 * self.limits.held),
                )


def _raised(least: int) -> str:
    """Returns what to do about a limit, with a budget of at least so many bytes."""
    gigabytes = 1
    while gigabytes * 2**30 < least:
        gigabytes *= 2
    option = f"--budget {gigabytes}GiB (in Python budget={gigabytes} * 2**30)"
    return f"if you know who made this checkpoint, allow it more: {option}"


class Account:
    """What one checkpoint, or one part of the work on it, takes of a job's budget; all is given back when it is closed.

    Args:
        budget: The job's; a new one if this is all of it.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self._held = 0
        self._lock = threading.Lock()

    def hold(self, count: int, what: str, place: str) -> None:
        """Takes bytes, as `Budget.hold` does."""
        self.budget.hold(count, what, place)
        with self._lock:
            self._held += count

    def nodes(self, count: int, what: str, place: str) -> None:
        """Takes the bytes that so many values of a tree are taken to need.

        Raises:
            BudgetError: That is more than the job may hold.
        """
        if count * NODE_BYTES > self.budget.limits.held:
            raise BudgetError(
                f"{what} is too large to be a checkpoint.",
                place=place,
                expected=f"at most {self.budget.limits.held // NODE_BYTES} values (the budget's limit `held`)",
                found=f"{count} values of {NODE_BYTES} bytes",
                remedy=_raised(count * NODE_BYTES),
            )
        self.hold(count * NODE_BYTES, what, place)

    def step(self, count: int, what: str, place: str) -> None:
        """Takes steps of work, as `Budget.step` does."""
        self.budget.step(count, what, place)

    def chunks(self, count: int, what: str, place: str) -> None:
        """Takes the small chunks of an array, as `Budget.chunks` does."""
        self.budget.chunks(count, what, place)

    def read(self, count: int) -> None:
        """Notes that so many bytes were read."""
        self.budget.read(count)

    def decode(self, count: int, what: str, place: str) -> None:
        """Takes bytes that something stored becomes, as `Budget.decode` does."""
        self.budget.decode(count, what, place)

    def explain(self, count: int, what: str, place: str) -> None:
        """Asks whether so many bytes could be decoded, as `Budget.explain` does."""
        self.budget.explain(count, what, place)

    def keep(self, key: Hashable, value: Any, count: int) -> None:
        """Keeps what saves work if it is asked for again, until something else needs its `count` bytes.

        Args:
            key: What it is.
            value: What is kept.
            count: Its bytes, which this account held so far.
        """
        with self._lock:
            self._held -= count
        self.budget.keep((self, key), value, count)

    def kept(self, key: Hashable) -> Any:
        """Takes out what was kept under a key, and holds its bytes again; None if it is gone."""
        value, count = self.budget.kept((self, key))
        with self._lock:
            self._held += count
        return value

    def free(self, count: int) -> None:
        """Gives some of the bytes back that are held."""
        with self._lock:
            self._held -= count
        self.budget.free(count)

    @contextmanager
    def passing(self) -> Iterator[Account]:
        """Gives an account for what is held only while something is parsed."""
        taken = Account(self.budget)
        try:
            yield taken
        finally:
            taken.close()

    def close(self) -> None:
        """Gives back what is held."""
        with self._lock:
            taken, self._held = self._held, 0
        self.budget.free(taken)
        self.budget.forget(self)
