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
TEXT = """# Reliability: what was done to it, and what it noticed

Damaged bytes, hostile bytes, mixed files, full disks and kills, with figures: each table is made by its suite
(`make tables` draws this page from what they leave).

- **cases**: how many were tried.
- **caught**: those that ended in an error of statekit, which names the file and the place.
- **harmless**: those after which the result was the same, bit for bit: what changed says nothing.
- **silent**: those that went through with another result. Where there is no manifest and no checksum, nothing can tell;
  such formats are listed by name.
- **untyped**: those that ended in an error which isn't statekit's own.
- **hung**: those that took longer than 30 seconds.
- **seconds**, **peak**: the longest of the cases, and the most memory beyond the program's own, in MiB.
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
        "Every format that statekit writes, with its manifest; every format as its own system wrote it; and so, sealed "
        "with a manifest: in which one bit of one file is flipped, the manifest's among them; then it is converted. "
        "Half of the places are drawn by byte, half by file. "
        "`pytest -m slow tests/test_bit_flips.py`; a sample of it in every run.",
    ),
    "mixed": Suite(
        "A file of another step",
        "A part of step 4 of a run in its place in step 8, of every library that writes several files, without a "
        "manifest; then it is planned and read. Caught: refused, or said under what is odd about the source. Silent: "
        "nothing in any of the files tells; `inspect` and `convert` name them, and a manifest does tell (`statekit "
        "seal`). A schedule that steps once an epoch, "
        "or a name that counts epochs, disagrees as well, and what is said names that too; a schedule that steps with "
        "evaluations (ReduceLROnPlateau), or a number behind a prefix that isn't the library's own, says nothing. "
        "`pytest tests/test_mixed_files.py`.",
    ),
    "soak": Suite(
        "Drawn conversions while things go wrong",
        "Drawn samples into drawn formats, with SIGKILL or SIGTERM at some time, files that can't grow, a call that "
        "fails once or from there on, or a source with a bit changed, a file cut off or missing. Silent: a torn "
        "target, or something left that the next conversion doesn't remove. `make soak`; a sample in every run.",
    ),
    "calls": Suite(
        "A system call fails",
        "`statekit convert` as a process of its own, in which strace makes one call fail: each way to open, list, "
        "read, write, cut, sync, rename or make a file or folder of the source or the target, six times on each, "
        "with EIO, and with ENOSPC where space is needed. Harmless: the target is complete all the same. "
        "`pytest -m slow tests/test_failing_calls.py`; a sample of it in every run; it needs strace.",
    ),
    "power": Suite(
        "The power goes",
        "Conversions into a file system that writes down every call. The power is cut after each, and each time many "
        "disks are looked at: what was synced is there; of names and bytes that weren't, none, all, or some, in any "
        "order. Harmless: the target is as it was before or complete, and complete if the conversion was done; what "
        "else is left the next conversion removes. `pytest -m '' tests/test_power_loss.py`; it needs /dev/fuse and "
        "Debian's python3-pyfuse3.",
    ),
    "fuzz": Suite(
        "Samples changed at random",
        "Bytes of every format that statekit reads itself, changed bit by bit or in their structure, and trees of "
        "every layout, given to its reader, which uses what it gets as a conversion does. Harmless: read, whatever was "
        "changed. `make fuzz` goes on as long as told; a sample in every run. HDF5 is read by statekit's own parser "
        "since the million cases of the reader before it. Its row `hdf5` is large files changed by structure "
        "(pointers, counts, messages; old and new format), `hdf5 pieces` small ones with few kinds of structure each. "
        "A million cases of them were not run.",
    ),
    "bombs": Suite(
        "Files that ask for much",
        "Small files that would take much memory or time: each is opened in a process of its own, with the budget that "
        "there is by default, 512 MiB, and ends within it and the blocks that are read. What isn't refused is read. "
        "Seconds are by the clock; none took 30 of the processor. "
        "`pytest -m slow tests/test_bombs.py`; a sample of it in every run.",
    ),
    "scale": Suite(
        "What is large",
        "Listing 100 000 tensors takes less than a minute of computing and 1 GiB; one tensor of 8 GiB, a file nearly "
        "all of which lies nowhere, is measured, sealed and converted in less than 256 MiB. Seconds are those of the "
        "processor. `pytest -m slow tests/test_bombs.py`.",
    ),
    "service": Suite(
        "The service under load and under fire",
        "`statekit serve` over recorded checkpoints, with clients of its interface that read the catalogue and ask for "
        "jobs, some of them twice; SIGKILL for it and its workers at random moments; signals while jobs run; a disk "
        "that is full, and a data folder that can't be written to. Harmless: every job ended exactly once, with its "
        "one result, and no lease was over for more than 5 seconds before somebody took the job back. Silent: a job "
        "that was lost, doubled or stuck. `make test-service`; a sample in every run.",
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
