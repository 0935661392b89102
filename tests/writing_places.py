"""Converts a sample of every container that is written, and prints as JSON what each opened for writing elsewhere.

    TMPDIR=/nonexistent python writing_places.py FOLDER [careless CONTAINER]

`careless` keeps a temporary file where Python keeps them, to show that it is seen, for one container.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from samples import target_name, writable

from statekit.conversion.convert import convert, plan
from statekit.files.stage import Stage

MAKING = {"os.mkdir", "os.rename", "os.link", "os.symlink", "tempfile.mkstemp", "tempfile.mkdtemp"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def elsewhere(folder: Path, only: Sequence[str]) -> dict[str, list[str]]:
    """Returns, by container, all unless some are named, where its conversion made or wrote anything elsewhere."""
    places: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        makes = event in MAKING or (event == "open" and (arguments[2] or 0) & WRITING)
        if makes and isinstance(arguments[0], str | bytes | os.PathLike):
            places.append(os.path.abspath(os.fsdecode(arguments[0])))

    sys.addaudithook(note)
    foreign = {}
    for name, row in writable().items():
        if only and name not in only:
            continue
        source, parent = folder / name / "source", folder / name / "parent"
        source.mkdir(parents=True)
        parent.mkdir()
        planned = plan(
            row.sample_in(source).path,
            parent / target_name(name),
            to=name,
            layout=row.layout,
            hints=row.hints,
        )
        places.clear()
        convert(planned)
        foreign[name] = [place for place in places if not Path(place).is_relative_to(parent)]
        assert len(foreign[name]) < len(places), f"nothing is seen of {name}"
    return foreign


def carelessly() -> None:
    """Has every file that is written kept in another one first."""
    plain = Stage.file

    @contextmanager
    def careless(
        self: Stage, relative: str = "", synced: bool = True, seeks: bool = False
    ) -> Iterator[BinaryIO]:
        with tempfile.TemporaryFile(), plain(self, relative, synced, seeks) as output:
            yield output

    Stage.file = careless  # type: ignore[method-assign]


if __name__ == "__main__":
    if "careless" in sys.argv:
        carelessly()
    print(json.dumps(elsewhere(Path(sys.argv[1]), sys.argv[3:])))
