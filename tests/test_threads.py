"""A conversion's result is the same to the bit with one thread and with four, whatever is read and written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from limit import LAYOUTS, made_state
from synthetic import write_neutral

from statekit.conversion.convert import Report, convert, plan
from statekit.errors import CorruptError, StatekitError
from statekit.tensors.digest import bytes_digest
from statekit.tensors.tensor import BLOCK_BYTES

SIDE = 1500
"""Of a matrix that is more than one block, and no whole number of them."""
TWO_CHUNKS = 2200
"""Of one that Orbax has in two chunks, each more than a block."""
LARGE = 600
"""Of one that makes a file which isn't digested whenever it is opened."""
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
    side = TWO_CHUNKS if container == "orbax" else SIDE
    write_neutral(source, made_state((container, "statekit"), 0, side))

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


def refused(source: Path, folder: Path, number: int) -> StatekitError:
    """Converts, and returns why that failed; nothing may be left."""
    folder.mkdir()
    with pytest.raises(StatekitError) as caught:
        convert(plan(source, folder / "target", to="torch"), threads=number)
    assert not [*folder.iterdir()]
    return caught.value


@pytest.mark.torch
def test_damage_is_refused_in_the_same_words_and_nothing_is_left(tmp_path: Path) -> None:
    neutral, source = tmp_path / "neutral", tmp_path / "t5x"
    write_neutral(neutral, made_state(("t5x", "statekit"), 0, SIDE))
    convert(plan(neutral, source, to="t5x"))
    chunk = max((file for file in source.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    one, four = (refused(source, tmp_path / f"{number}", number) for number in (1, 4))
    assert (type(one), str(one)) == (CorruptError, str(four))


@pytest.mark.torch
@pytest.mark.parametrize("call", ["write", "preadv", "fsync"])
def test_a_failing_call_ends_all_stages_in_the_same_words(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    write_neutral(source, made_state(("statekit", "torch"), 0, SIDE))
    whole = getattr(os, call)

    def failing(number: int, *args: Any) -> Any:
        if is_large(number):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(number, *args)

    def is_large(number: int) -> bool:
        return os.fstat(number).st_size > BLOCK_BYTES

    errors = []
    for threads in (1, 4):
        monkeypatch.setattr(os, call, failing)
        errors.append(str(refused(source, tmp_path / f"{threads}", threads)).replace(f"/{threads}/", "/"))
        monkeypatch.setattr(os, call, whole)
    assert errors[0] == errors[1]


@pytest.mark.torch
@pytest.mark.parametrize(("container", "times"), [("dcp", 2), ("keras-h5", 4), ("torch", 2)])
def test_the_source_and_what_was_written_are_read_once(
    container: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Keras the target once more, whose manifest stands at its beginning, and to find it."""
    neutral, source = tmp_path / "neutral", tmp_path / "source"
    write_neutral(neutral, made_state((container, "statekit"), 0, SIDE))
    convert(plan(neutral, source, to=container, layout=LAYOUTS[container]))
    count, preadv = 0, os.preadv

    def counted(number: int, buffers: Any, start: int) -> int:
        nonlocal count
        count += (got := preadv(number, buffers, start))
        return got

    monkeypatch.setattr(os, "preadv", counted)
    report = convert(plan(source, tmp_path / "target", to=container, layout=LAYOUTS[container]))
    assert times <= count / report.plan.bytes < times + 0.1


@pytest.mark.torch
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("container", ["flax", "keras-h5", "mxnet", "statekit", "t5x", "torch"])
def test_every_file_is_synced_with_what_it_holds_in_the_end(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut shows it; where none can be made, as on most machines, the calls do."""
    source, target, synced = tmp_path / "source", tmp_path / "target", dict[str, bytes]()
    write_neutral(source, made_state((container, "statekit"), 0, LARGE))
    sync = os.fsync

    def noted(number: int) -> None:
        _, below, name = os.readlink(f"/proc/self/fd/{number}").partition(f"/{target.name}")
        if below and os.path.isfile(number):
            synced[name.removeprefix("/")] = Path(f"/proc/self/fd/{number}").read_bytes()
        sync(number)

    monkeypatch.setattr(os, "fsync", noted)
    convert(plan(source, target, to=container, layout=LAYOUTS[container]))
    there = files(target)
    assert {name: bytes_digest(data) for name, data in synced.items()} == {
        name.removeprefix("."): bytes_digest(data) for name, data in there.items()
    }
