"""Writes docs/accuracy.md: how close to the originals every backend is, and how close the bound is to that.

    python tests/accuracy_table.py            # or: make tables
    python tests/accuracy_table.py numpy      # a table of some backends, printed only

Each figure comes from `statekit replay --json --start init`, run on all recordings.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from goldens import COMPACT, GOLDEN
from statekit.cli.main import main as statekit
from statekit.verify.recording import open_recording

BACKENDS = ("numpy", "torch", "jax", "tensorflow")
TARGET = Path(__file__).parents[1] / "docs" / "accuracy.md"
PACKAGES = ("numpy", "torch", "jax", "jaxlib", "tensorflow")
HEAD = "| optimizer | recorded by | recordings | backend | elements | equal | largest | typical | grain |"
TEXT = """# Accuracy: observed error and bound

Every recording of an original is replayed from its first state in every backend, and every element of every update is
compared with what the original did. docs/bounds.md derives the interval that the element must lie in; no element of
this table lies outside of its own. `statekit replay --start init` prints the same for one recording, `--json` the rows
of every tensor, from which this table is made (`make tables`).

- **elements**: compared values: parameters and slots, over all updates.
- **equal**: share of them that has the original's value, bit for bit but for the sign of zero.
- **largest**: the largest difference over the width of its interval, of parameters and of slots. 1 means that the two
  sides sit at opposite ends. For most that is no coincidence: the interval of a stored value often holds two
  neighbouring numbers alone, and each side has one of them.
- **typical**: the median of the same among elements that differ (the median over tensors of their medians).
- **grain**: median width of the interval of a parameter, as a fraction of the largest movement of that parameter in the
  update: the part of an update that the bound can't see. A rule that differs by more than that is told apart. Where
  updates are tiny beside the parameter, as in Hugging Face's warm-up, it is the spacing of float32 itself.

Where *typical* is small the interval is wide for one of three reasons, all of them in its derivation:

- a power may be 4 units off, as CUDA and the vector libraries declare, where most err by less than one. Adafactor takes
  two of them, one upon the other;
- a sum may run in any order, so that its bound grows with the root of its length, 6 sqrt(n) units for n terms, while
  the orders that frameworks choose (blocks, vectors, trees) err by a few;
- 1 - beta^t, taken in float32, divides the 4 units of the power by as little as 0.001. Keras' Adam and LAMB and MXNet's
  fused LANS do that; the variants that take it in float64, or don't correct, have a grain ten times finer.

Where *equal* is near 100 % the original ran the same operations in the same order.
"""


class Rule(NamedTuple):
    """What one line of the table is about."""

    optimizer: str
    system: str


@dataclass(frozen=True)
class Line:
    """One backend's figures for a rule, over all recordings of it."""

    rule: Rule
    recordings: int
    backend: str
    elements: int
    equal: float
    largest: tuple[float, float]
    typical: float
    grain: float
    outside: int

    def text(self) -> str:
        """Returns it as a line of the table."""
        param, slot = self.largest
        return (
            f"| {self.rule.optimizer} | {self.rule.system} | {self.recordings} | {self.backend} | {self.elements} "
            f"| {100 * self.equal:.1f} % | {param:.2g}, {slot:.2g} | {self.typical:.1g} | {self.grain:.1e} |"
        )


def bundles() -> list[Path]:
    """Returns every folder that may be a recording: the shared ones, and those of systems that are recorded here."""
    shared = {path.name for path in GOLDEN.iterdir()}
    systems = [
        path
        for path in (*GOLDEN.iterdir(), *COMPACT.iterdir())
        if path.parent == GOLDEN or path.name not in shared
    ]
    return sorted(path.parent for system in systems for path in system.glob("*/trajectory.safetensors"))


@cache
def rule_of(folder: Path) -> Rule | None:
    """Returns whose rule a recording shows; None if it can't be replayed."""
    try:
        with open_recording(folder) as recording:
            first = recording.first
            optimizer = recording.state(first, recording.trajectories[0], first + 1).optimizer
    except FileNotFoundError:
        return None
    return Rule(f"{optimizer.schema} {optimizer.variant}", folder.parent.name)


def replayed(folders: Sequence[Path], backends: Sequence[str]) -> dict[str, Any]:
    """Returns what `statekit replay --json` says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        statekit(
            [
                "replay",
                "--json",
                "--start",
                "init",
                *(f"--backend={name}" for name in backends),
                *map(str, folders),
            ]
        )
    data: dict[str, Any] = json.loads(said.getvalue())
    return data


def line(rule: Rule, results: Sequence[Mapping[str, Any]]) -> Line:
    """Returns the figures of one rule in one backend."""
    rows = [row for result in results for judged in result["judged"] for row in judged["rows"]]
    size = sum(row["size"] for row in rows)
    params = [row for row in rows if row["tensor"] == "param"]
    typical = [row["typical"] for row in rows if row["unequal"]]
    return Line(
        rule,
        len({result["recording"] for result in results}),
        results[0]["backend"],
        size,
        1.0 - sum(row["unequal"] for row in rows) / size,
        (_largest(params), _largest(row for row in rows if row["tensor"] != "param")),
        float(np.median(typical)) if typical else 0.0,
        float(np.median([row["grain"] for row in params if row["grain"]])),
        sum(row["outside"] for row in rows),
    )


def _largest(rows: Iterable[Mapping[str, Any]]) -> float:
    return max((float(row["ratio"]) for row in rows), default=0.0)


def lines(backends: Sequence[str]) -> Iterator[Line]:
    """Replays everything, rule by rule."""
    grouped: dict[Rule, list[Path]] = {}
    for folder in bundles():
        rule = rule_of(folder)
        if rule is not None:
            grouped.setdefault(rule, []).append(folder)
    for rule in sorted(grouped):
        results = replayed(grouped[rule], backends)["results"]
        for name in backends:
            yield line(rule, [result for result in results if result["backend"] == name])


def table(lines: Iterable[Line]) -> str:
    """Returns lines as a table in Markdown."""
    return "\n".join([HEAD, "|---|---|--:|---|--:|--:|--:|--:|--:|", *(one.text() for one in lines)]) + "\n"


def page(lines: Sequence[Line]) -> str:
    """Returns the whole page."""
    versions = ", ".join(
        f"{name} {metadata.version(name.replace('tensorflow', TENSORFLOW))}" for name in PACKAGES
    )
    outside = sum(one.outside for one in lines)
    missing = [f"`{'/'.join(path.parts[-2:])}`" for path in bundles() if rule_of(path) is None]
    made = (
        f"Made with Python {platform.python_version()} on {platform.machine()}, CPU, {versions}. "
        f"Elements outside of their interval: {outside}. "
        f"Not in it, because no step can follow them (`statekit replay` says why): {', '.join(missing) or 'none'}."
    )
    return f"{TEXT}\n{made}\n\n{table(lines)}"


TENSORFLOW = next(
    (name for name in ("tensorflow", "tensorflow-cpu") if list(metadata.distributions(name=name))),
    "tensorflow",
)
"""The package that brings TensorFlow here."""


def main(backends: Sequence[str]) -> None:
    """Prints the table of some backends, or writes the page with all."""
    measured = []
    for one in lines(backends or BACKENDS):
        print(one.text(), flush=True)
        measured.append(one)
    if not backends:
        TARGET.write_text(page(measured), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(sys.argv[1:])
