"""Makes a conversion for every container that is written, in the folder of the recording file system.

    python conversions.py FOLDER SOURCES [OPTION]...

Each has a folder of its own, and stands in the journal between the folders `begin <name>` and `end <name>`. Options:
the names of containers, all if there are none; `replace` puts the target in the place of something else, `empty` of an
empty folder; `plain` does without renameat2; `large` takes every file for a large one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from samples import target_name, writable

from statekit.conversion import registry
from statekit.conversion.convert import convert, plan
from statekit.files import durable, integrity, stage

OPTIONS = {"replace", "empty", "plain", "large"}


def main(folder: Path, sources: Path, options: set[str]) -> None:
    rows = writable()
    if "plain" in options:
        durable._renameat2 = lambda *_: False
    if "large" in options:
        for module in (stage, integrity):
            setattr(module, "SMALL_BYTES", 0)  # noqa: B010  # mypy refuses =, it is a constant
    for name in sorted(options - OPTIONS) or rows:
        card, row = registry.container_card(name), rows[name]
        if "empty" in options and card.target_kind == "file":
            continue
        (folder / name).mkdir()
        (sources / name).mkdir()
        target = folder / name / target_name(name)
        if "empty" in options or ("replace" in options and card.target_kind == "folder"):
            target.mkdir()
        if "replace" in options:
            (target / "old" if target.is_dir() else target).write_text("what was there before")
        source = row.sample_in(sources / name).path
        planned = plan(source, target, to=name, layout=row.layout, hints=row.hints)
        (folder / f"begin {name}").mkdir()
        convert(planned, replace_foreign="replace" in options)
        (folder / f"end {name}").mkdir()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), set(sys.argv[3:]))
