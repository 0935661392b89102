"""`make bench`: the most memory that conversions take beyond what they import, of checkpoints with one matrix.

    python tests/benchmarks/memory.py [--side 8192] [--pairs torch:torch,orbax:orbax | every]

Each conversion is made once, in a process of its own, of one parameter with its slots: at the default side a tensor has
0.27 GB, at 32768 it has 4.3. By default each container goes to itself; `every` takes every container to every other,
by the layouts of `limit.py`, or where the target's rule isn't the source's by our optimizers'; what can't is said.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from limit import DROP_INS, GB, LAYOUTS, converted, layout_of, neutral, removed
from rich.console import Console

LIMIT = 256
"""MiB at most."""


def main() -> None:
    """Prints a row for each pair, and ends with 1 if one takes more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument(
        "--pairs", default="", help="SOURCE:TARGET,...; 'every' for all; each to itself if none"
    )
    parser.add_argument("--folder", help="where to put the files (default: a temporary folder)")
    arguments = parser.parse_args()
    texts = arguments.pairs.split(",") if arguments.pairs else [f"{name}:{name}" for name in LAYOUTS]
    if arguments.pairs == "every":
        texts = [f"{one}:{other}" for one in LAYOUTS for other in LAYOUTS]
    out, highest = Console(width=200), 0.0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for text in texts:
            source, _, target = text.partition(":")
            peak = _peak(Path(folder), (source, target), arguments.side)
            highest = max(highest, peak or 0.0)
            size = 4 * arguments.side**2 / GB
            said = "refused: the one's state isn't the other's" if peak is None else f"{peak:.0f}"
            out.print(f"| {source} to {target} | {size:.2f} | {said} |", markup=False)
    sys.exit(highest > LIMIT)


def _peak(work: Path, pair: tuple[str, str], side: int) -> float | None:
    """Returns the MiB that a pair takes beyond imports; None if the target's layout can't hold the state."""
    made = source = neutral(work, pair, 0, side)
    native, target = work / f"source-{pair[0]}", work / f"target-{pair[1]}"
    try:
        if pair[0] != "statekit":
            source = native
            converted(made, source, pair[0], layout_of(pair[0], pair))
        with suppress(subprocess.CalledProcessError):
            return converted(source, target, pair[1], layout_of(pair[1], pair)).peak
        return converted(source, target, pair[1], DROP_INS[pair[1]]).peak
    except (subprocess.CalledProcessError, KeyError):
        return None
    finally:
        for path in (native, target):
            if path.exists():
                removed(path)


if __name__ == "__main__":
    main()
