"""Writes docs/reliability.md from the figures that the suites left in .reliability/ (`make tables`).

    python tests/reliability_table.py

A suite hands its figures to `note` as it goes, row by row, from any process:

    note("bombs", Row("zip of 1 GiB of zeros", cases=1, caught=1, seconds=0.4, peak=31.0))

A section of the page whose suite left no figures stays as it is: no run is asked to make all of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / ".reliability"
TARGET = ROOT / "docs" / "reliability.md"
TEXT = """# Reliability: the damage that was tried, and what statekit noticed

Damaged bytes, hostile bytes, mixed files, full disks and kills, with figures. Each suite makes its table; `make tables`
draws this page from their figures.

- **cases**: the number of cases.
- **caught**: cases that ended in an error of statekit, which names the file and the place.
- **harmless**: cases with the same result, bit for bit: the changed byte means nothing.
- **silent**: cases that went through with another result. Without a manifest and a checksum nothing can tell; the table
  names such formats.
- **untyped**: cases that ended in an error of another kind.
- **hung**: cases that took longer than 30 seconds.
- **seconds**, **peak**: the longest case, and the most memory beyond the program's own, in MiB.
"""


@dataclass(frozen=True)
class Row:
    """What a suite saw of one thing that it did many times; None where the suite doesn't look for it.

    Attributes:
        what: What was done, to what; a later row of the same name takes its place.
        cases: How many were tried.
        caught: Those that ended in a typed error.
        harmless: Those with the same result.
        silent: Those with another result, and no error.
        untyped: Those that ended in another error.
        hung: Those that took longer than 30 seconds.
        seconds: The longest of the cases.
        peak: The most memory that one took, in MiB.
        said: What else there is to say.
    """

    what: str
    cases: int
    caught: int | None = None
    harmless: int | None = None
    silent: int | None = None
    untyped: int | None = None
    hung: int | None = None
    seconds: float | None = None
    peak: float | None = None
    said: str = ""


@dataclass(frozen=True)
class Suite:
    """A section of the page: its heading, and what the suite does and how it is run, in a paragraph."""

    title: str
    text: str


SUITES = {
    "flips": Suite(
        "One bit flipped",
        "The suite flips one bit of one file and converts the checkpoint. It takes every format as statekit writes "
        "it, with its manifest; every format as its own system wrote it; and the latter sealed with a manifest, "
        "which may be the flipped file. It draws half of the places by byte, half by file. `pytest -m slow "
        "tests/test_bit_flips.py`; CI runs a sample.",
    ),
    "mixed": Suite(
        "A file of another step",
        "The suite puts a part of step 4 of a run into the place of that part in step 8, for every library that "
        "writes several files, without a manifest. Then it plans a conversion and reads the result. Caught: refused, "
        "or named as odd about the source. Silent: nothing in the files tells; `inspect` and `convert` name such "
        "files, and a manifest tells (`statekit seal`). A schedule that steps once an epoch, or a name that counts "
        "epochs, disagrees as well, and the message says so. A schedule that steps with evaluations "
        "(ReduceLROnPlateau), or a number behind a foreign prefix, proves nothing. `pytest "
        "tests/test_mixed_files.py`.",
    ),
    "soak": Suite(
        "Drawn conversions while things go wrong",
        "The suite converts drawn samples into drawn formats while one thing goes wrong: SIGKILL or SIGTERM at a "
        "random time, files that cannot grow, a call that fails once or from then on, or a source with a changed "
        "bit, a cut file or a missing file. Silent: a torn target, or remains that the next conversion does not "
        "remove. `make soak`; CI runs a sample.",
    ),
    "calls": Suite(
        "A system call fails",
        "strace makes one system call of a process `statekit convert` fail: each kind of call that opens, lists, "
        "reads, writes, cuts, syncs, renames or makes a file or folder of the source or the target, six times each, "
        "with EIO, and with ENOSPC where space is needed. Harmless: the target is complete all the same. `pytest -m "
        "slow tests/test_failing_calls.py`; CI runs a sample; it needs strace.",
    ),
    "power": Suite(
        "The power goes",
        "The suite converts into a file system that records every call. It cuts the power after each call and "
        "examines many possible disks: synced bytes and names are there; of the others none, all, or some are there, "
        "in any order. Harmless: the target is as it was before, or complete; a finished conversion is complete. The "
        "next conversion removes all other remains. `pytest -m '' tests/test_power_loss.py`; it needs /dev/fuse and "
        "Debian's python3-pyfuse3.",
    ),
    "fuzz": Suite(
        "Samples changed at random",
        "The suite changes the bytes of every format that statekit reads itself, bit by bit or in their structure, "
        "and the trees of every layout. The reader gets them and uses the result as a conversion does. Harmless: "
        "read, whatever was changed. `make fuzz` runs as long as you choose; CI runs a sample. The row `hdf5` has "
        "large files changed by structure (pointers, counts, messages; old and new format), `hdf5 pieces` small "
        "files with few kinds of structure each.",
    ),
    "bombs": Suite(
        "Files that demand much memory or time",
        "Small files that would take much memory or time. A process of its own opens each with the default budget, "
        "512 MiB, and ends within the budget and the blocks that it reads. What is not refused is read. Seconds are "
        "by the clock; no case took 30 s of the processor. `pytest -m slow tests/test_bombs.py`; CI runs a sample.",
    ),
    "scale": Suite(
        "Large checkpoints",
        "Listing 100 000 tensors takes less than a minute of computing and 1 GiB. statekit measures, seals and "
        "converts one tensor of 8 GiB, a sparse file, in less than 256 MiB. Seconds are of the processor. `pytest -m "
        "slow tests/test_bombs.py`.",
    ),
    "service": Suite(
        "The service under load and under fire",
        "`statekit serve` shows recorded checkpoints while clients read the catalogue and ask for jobs, some of them "
        "twice. The suite kills the service and its workers at random moments, sends signals while jobs run, fills "
        "the disk, and makes the data folder read-only. Harmless: every job ended exactly once with its one result, "
        "and a worker took an expired lease back within 5 seconds. Silent: a lost, doubled or stuck job. `make "
        "test-service`; CI runs a sample.",
    ),
    "attacks": Suite(
        "Attacks by hand",
        "On 2026-11-28 nine engineers who had not written the code attacked it with new scripts, for about 70, "
        "60, 40, 55, 30, 80, 70, 35 and 35 minutes: the first files and conversions, the second the service, "
        "callbacks and stores, the third graphs, databases and metadata by their structure, and files that "
        "contradict themselves, the fourth the stores of Azure and Google, the Hub, works, and the service's forms "
        "and rows, the fifth certificates, arrays in chunks, callbacks and optimizers without a schema, the sixth "
        "files and proofs again, the seventh callbacks, surroundings and the service, the eighth works in stores, "
        "and the ninth what had been mended, by honest runs. The table counts the cases, and those that statekit did "
        "not handle as it promises. The last column names the test that holds the mend. No suite repeats the attacks.",
    ),
}
"""The sections, in the page's order, by the names of the suites."""

_MARK = "<!-- {} -->"
_COLUMNS = tuple(field.name for field in fields(Row))


def note(suite: str, *rows: Row, folder: Path = FIGURES) -> None:
    """Adds rows to a suite's figures; of two with one name the later one counts.

    Raises:
        KeyError: `SUITES` has no such suite.
    """
    assert suite in SUITES, suite
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = {row.what: row for row in (*figures(suite, folder), *rows)}
        new = folder / f"{suite}.json.new"
        new.write_text(json.dumps([asdict(row) for row in known.values()], indent=1) + "\n", encoding="utf-8")
        os.replace(new, folder / f"{suite}.json")


def figures(suite: str, folder: Path = FIGURES) -> list[Row]:
    """Returns what a suite has noted."""
    path = folder / f"{suite}.json"
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def page(old: str, folder: Path = FIGURES) -> str:
    """Returns the page: sections of suites with figures anew, the others as the old page has them."""
    parts = [TEXT]
    for name, suite in SUITES.items():
        rows = figures(name, folder)
        body = f"{_made()}\n\n{table(rows)}" if rows else _body(old, name)
        parts.append(f"## {suite.title}\n\n{textwrap.fill(suite.text, 120)}\n\n{_MARK.format(name)}\n{body}")
    return "\n".join(parts)


def table(rows: Sequence[Row]) -> str:
    """Returns rows as a table in Markdown, with the columns that one of them has, and sums where there are several."""
    names = [name for name in _COLUMNS if any(getattr(row, name) not in (None, "") for row in rows)]
    titles = ["" if name in ("what", "said") else name for name in names]
    lines = [
        f"| {' | '.join(titles)} |",
        "|" + "|".join("---" if not title else "--:" for title in titles) + "|",
    ]
    lines += [_line(row, names) for row in sorted(rows, key=lambda row: row.what)]
    lines += [_line(_sum(rows), names)] if len(rows) > 1 else []
    return "\n".join(lines) + "\n"


def _line(row: Row, names: Iterable[str]) -> str:
    return f"| {' | '.join(_cell(getattr(row, name)) for name in names)} |"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return "" if value is None else str(value)


def _sum(rows: Sequence[Row]) -> Row:
    def total(name: str) -> int | None:
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        return sum(values) if values else None

    def most(name: str) -> float | None:
        return max((value for row in rows if (value := getattr(row, name)) is not None), default=None)

    return Row(
        "all",
        sum(row.cases for row in rows),
        total("caught"),
        total("harmless"),
        total("silent"),
        total("untyped"),
        total("hung"),
        most("seconds"),
        most("peak"),
    )


def _made() -> str:
    return f"Made with Python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores."


def _body(old: str, name: str) -> str:
    match = re.search(rf"{re.escape(_MARK.format(name))}\n(.*?)(?=\n## |\Z)", old, re.DOTALL)
    return match[1] if match else "Not run yet.\n"


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""), encoding="utf-8")
