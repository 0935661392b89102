"""A conversion's result is the same to the bit with one thread and with four, whatever is read and written."""

from __future__ import annotations

from pathlib import Path

import pytest
from limit import LAYOUTS, made_state
from synthetic import write_neutral

from statekit.conversion.convert import Report, convert, plan
from statekit.tensors.tensor import BLOCK_BYTES

SIDE = 1500
"""Of a matrix that is more than one block, and no whole number of them."""
ANEW = {"orbax"}
"""Their files say when they were written."""


def files(path: Path) -> dict[str, bytes]:
    """Returns the files at a path."""
    places = [place for place in path.rglob("*") if place.is_file()] or [path]
    return {place.relative_to(path).as_posix(): place.read_bytes() for place in places}


@pytest.mark.torch
@pytest.mark.parametrize("container", [name for name in LAYOUTS if name != "statekit"])
def test_any_number_of_threads_writes_and_reads_the_same(container: str, tmp_path: Path) -> None:
    assert BLOCK_BYTES < 4 * SIDE * SIDE
    source = tmp_path / "source"
    write_neutral(source, made_state((container, "statekit"), 0, SIDE))

    def both(number: int) -> tuple[Report, Report, Path, Path]:
        folder = tmp_path / f"{number}"
        folder.mkdir()
        native, back = folder / "native", folder / "back"
        there = convert(plan(source, native, to=container, layout=LAYOUTS[container]), threads=number)
        return there, convert(plan(native, back, to="statekit"), threads=number), native, back

    one, four = both(1), both(4)
    assert one[0].source_digest == four[0].source_digest
    assert one[1].source_digest == four[1].source_digest
    assert files(one[3]) == files(four[3])
    if container not in ANEW:
        assert files(one[2]) == files(four[2])
