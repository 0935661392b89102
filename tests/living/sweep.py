"""The long run beside the living originals: `make living`.

    python sweep.py FOLDER [--cases 20000] [--only torch-adamw-eager ...]

Cases are drawn in parts, each from a seed of its own; a part that is done is a line of `FOLDER/parts.jsonl` and isn't
run again, so the run may be stopped, go on, and run in several processes that take different kinds. What leaves the
bound is printed, and kept with its case. Exit code 1 if something does. `--table` writes docs/living.md of what is
there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from hypothesis import HealthCheck, Phase, given, seed, settings

from living.cases import KINDS, cases, runs
from living.judging import faults
from living.originals import Case

Kind = tuple[str, str, str]
WHOLE = sum(count for count, _ in KINDS.values())
"""Cases of the counts in `KINDS`."""
PARTS: dict[str, int] = {"compiled": 10}
"""Cases of a part, by mode."""
USUAL_PART = 100
PACKAGES = ("numpy", "torch", "transformers", "jax", "jaxlib", "optax", "flax", "keras", "hypothesis")
TARGET = ROOT / "docs" / "living.md"
TEXT = """# Living originals

Recordings hold what they recorded. Where an original installs beside us, hypothesis draws runs of it: settings, shapes,
dtypes, parameter groups, and gradients (usual, tiny, huge, zeros, one element alone, repeated rows, NaN, missing). Each
update of the original is held against our step from the original's own state before it, element by element, within the
interval that [bounds.md](bounds.md) derives. Beside that, of some cases:

- **class**: our optimizer class in the original's framework (`statekit.torch`, `statekit.jax`, `statekit.tensorflow`,
  with its fast paths) takes each update too, and is held to the same interval;
- **there and back**: the original saves with its own saving, the file goes into a statekit folder and back into the
  original's form, another original loads that; it holds the same bits, and again after one more update;
- **other backend**: our step runs in PyTorch, JAX or TensorFlow in the place of NumPy.

What isn't drawn because an original itself doesn't do it, or because statekit refuses it, stands with its reason in
`tests/living/cases.py`, `runs`. `make living` makes this run (`LIVING_CASES=1000` for fewer), and this page.
"""


def part_of(kind: Kind, number: int, size: int) -> list[Case]:
    """Returns the cases of a part: always the same ones."""
    case_of: dict[str, Case] = {}

    @seed(hash_of(kind) * 100_000 + number)
    @settings(
        max_examples=4 * size,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(*kind))
    def drawn(case: Case) -> None:
        if runs(case) and len(case_of) < size:
            case_of.setdefault(repr(case), case)

    drawn()
    return list(case_of.values())


def hash_of(kind: Kind) -> int:
    """Returns a number of a kind that doesn't change when others are added."""
    return sum(ord(letter) * (i + 1) for i, letter in enumerate("-".join(kind)))


def wanted(total: int, only: list[str]) -> Iterator[tuple[Kind, int, int]]:
    """Yields kind, number and size of each part."""
    for kind, (count, _) in KINDS.items():
        cases_left = max(round(count * total / WHOLE), 1)
        size = PARTS.get(kind[2], USUAL_PART)
        if not only or "-".join(kind) in only:
            for number, start in enumerate(range(0, cases_left, size)):
                yield kind, number, min(size, cases_left - start)


def judged(kind: Kind, number: int, size: int) -> dict[str, Any]:
    """Returns what a part showed."""
    began, counts, wrong = time.monotonic(), Counter[str](), []
    for case in part_of(kind, number, size):
        try:
            shown = faults(case)
        except (
            Exception
        ):  # a fault of the case, which its line of the table tells; others are judged all the same
            shown = [traceback.format_exc(limit=-4)]
        counts.update(cases=1, updates=len(case.grads))
        counts.update(drop_in=case.drop_in, back=case.back, backend=case.backend != "numpy")
        counts[case.dtype] += 1
        if shown:
            wrong.append({"case": repr(case), "faults": shown[:5]})
            print(f"{'-'.join(kind)} part {number}: {case}\n    " + "\n    ".join(shown[:5]), flush=True)
    return {
        "kind": "-".join(kind), "part": number, "size": size, **counts, "outside": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def done(folder: Path) -> list[dict[str, Any]]:
    """Returns what was shown before."""
    file = folder / "parts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def page(parts: list[dict[str, Any]]) -> str:
    """Returns docs/living.md."""
    by_kind: dict[str, Counter[str]] = {}
    for part in parts:
        counted = by_kind.setdefault(part["kind"], Counter())
        counted.update({k: v for k, v in part.items() if isinstance(v, int) and k not in ("part", "size")})
        counted["outside"] += len(part["outside"])
    columns = ("cases", "updates", "float32", "bfloat16", "float16", "drop_in", "back", "backend", "outside")
    lines = [
        "| library | family | mode | cases | updates | float32 | bfloat16 | float16 | class | there and back "
        "| other backend | outside |",
        "|---|---|---|" + "--:|" * len(columns),
    ]
    for kind in map("-".join, KINDS):
        if kind in by_kind:
            lines.append(f"| {' | '.join([*kind.split('-'), *(str(by_kind[kind][c]) for c in columns)])} |")
    total = sum(by_kind.values(), Counter())
    lines.append(f"| **all** | | | {' | '.join(str(total[c]) for c in columns)} |")
    compiled = sum(
        counted_of_kind["cases"] for kind, counted_of_kind in by_kind.items() if kind.endswith("-compiled")
    )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    made = f"{total['cases']} cases, {compiled} of them compiled, {total['outside']} outside. Made with {versions}."
    return f"{TEXT}\n{made}\n\n" + "\n".join(lines) + "\n"


def main() -> int:
    """Runs what isn't done yet; returns the exit code."""
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("folder", type=Path)
    asked.add_argument("--cases", type=int, default=20000)
    asked.add_argument("--only", nargs="*", default=[])
    asked.add_argument("--table", action="store_true")
    options = asked.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    known = {(part["kind"], part["part"], part["size"]) for part in done(options.folder)}
    for kind, number, size in wanted(options.cases, options.only):
        if ("-".join(kind), number, size) not in known:
            line = json.dumps(judged(kind, number, size))
            with (options.folder / "parts.jsonl").open("a") as file:
                file.write(line + "\n")
    parts = done(options.folder)
    for kind, count in sorted(Counter(p["kind"] for p in parts for _ in range(p["cases"])).items()):
        print(f"{kind:40} {count:6} cases")
    print(f"{'all':40} {sum(part['cases'] for part in parts):6} cases")
    if options.table:
        TARGET.write_text(page(parts))
    return int(any(part["outside"] for part in parts))


if __name__ == "__main__":
    sys.exit(main())
