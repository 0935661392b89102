"""The pipeline: buffers that nobody refers to any more are used again, stages end with what one thread would return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from statekit.errors import UsageError
from statekit.pipeline import ahead, cores, empty, in_turn, job, lane, passage, passed, threads

MIB = 2**20
Array = np.ndarray[Any, np.dtype[Any]]


def address(array: Array) -> int:
    return array.ctypes.data


VIEWS: dict[str, Callable[[Array], Any]] = {
    "itself": lambda array: array,
    "a slice": lambda array: array[5:9],
    "a slice of a slice": lambda array: array[5:9][1:2],
    "another dtype": lambda array: array.view(np.uint16),
    "another shape": lambda array: array.reshape(-1, 2).T,
    "its bytes": lambda array: array.reshape(-1).view(np.uint8).data,
    "a slice of its bytes": lambda array: array.data[3:4],
    "an array over its bytes": lambda array: np.frombuffer(array.data, np.uint8),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_buffer_isnt_lent_twice_while_something_refers_to_it(view: str) -> None:
    with job():
        array = empty((MIB,), np.uint8)
        place, kept = address(array), VIEWS[view](array)
        del array
        others = [empty((MIB,), np.uint8) for _ in range(20)]
        assert place not in map(address, others)
        del kept


def test_a_buffer_is_used_again_and_begins_at_a_page() -> None:
    places = set()
    with job():
        for _ in range(5):
            array = empty((3, MIB), np.float16)
            places.add(address(array))
            del array
    assert len(places) == 1
    assert not places.pop() % 4096


def counted(most: int) -> Iterator[int]:
    yield from range(most)
    raise ValueError("the end")


@pytest.mark.parametrize("count", [1, 4])
def test_blocks_read_ahead_come_in_order_and_then_what_was_raised(count: int) -> None:
    seen = []
    with job(count), pytest.raises(ValueError, match="the end"):
        for block in ahead(counted(20)):
            seen.append(block)
    assert seen == list(range(20))


def test_who_gives_up_waits_for_the_block_that_is_being_read() -> None:
    """What it reads from, it closes next."""
    begun, going_on, ends = threading.Event(), threading.Event(), []

    def read() -> Iterator[int]:
        yield 0
        begun.set()
        going_on.wait()
        ends.append("read")
        yield 1

    with job(2):
        blocks = ahead(read())
        next(blocks)
        begun.wait()
        threading.Timer(0.05, going_on.set).start()
        blocks.close()  # type: ignore[attr-defined]  # it is a generator
        ends.append("given up")
    assert ends == ["read", "given up"]


def test_who_gives_up_waits_for_the_pieces_that_are_under_way() -> None:
    going_on, ends = threading.Event(), []

    def work(piece: int) -> None:
        if piece == 0:
            threading.Timer(0.05, going_on.set).start()
            raise ValueError("the first")
        going_on.wait()
        ends.append("read")

    with job(2):
        with pytest.raises(ValueError, match="the first"):
            list(in_turn(work, range(2)))
        ends.append("given up")
    assert ends == ["read", "given up"]


@pytest.mark.parametrize("count", [1, 4])
def test_what_a_lane_raises_comes_out_where_its_result_is_asked_for(count: int) -> None:
    def fail() -> None:
        raise ValueError("in the lane")

    with job(count), pytest.raises(ValueError, match="in the lane"):
        lane("digest", fail)()


def test_a_lane_that_needs_a_lane_does_it_itself() -> None:
    def nested() -> list[int]:
        return lane("read", lambda: [*ahead(iter([1, 2]))])()

    with job(4):
        assert lane("read", nested)() == [1, 2]


def test_a_passage_compares_at_its_end() -> None:
    done: list[str] = []

    def read() -> Iterator[int]:
        checks = passage()
        assert checks is not None
        checks["a"] = lambda: done.append("compared")
        yield 1
        assert passage() is checks
        yield 2

    blocks = passed(read())
    assert (next(blocks), passage(), next(blocks), done) == (1, None, 2, [])
    assert (next(blocks, None), done) == (None, ["compared"])


def test_a_job_has_as_many_threads_as_it_is_given() -> None:
    with job(3) as times:
        assert (threads(), times.threads) == (3, 3)
    assert threads() == cores()


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_what_is_no_number_of_threads_is_refused(count: Any) -> None:
    with pytest.raises(UsageError, match="number of threads"), job(count):
        pass
