"""What converts without an option: recordings of the original systems into each container, counted by pair.

    python tests/converted_today.py > tests/converted_today.json

The counts are those of 9be8336, before statekit asked for anything. `tests/test_evidence.py` holds that none falls but
where it now asks for what no file says.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from goldens import COMPACT, GOLDEN
from statekit.conversion import registry
from statekit.conversion.convert import plan
from statekit.conversion.open_state import open_state
from statekit.errors import StatekitError
from statekit.state.schema import WEIGHTS

FIGURES = Path(__file__).with_name("converted_today.json")


def checkpoints(root: Path) -> Iterator[Path]:
    """Yields the checkpoints of a set of recordings."""
    for meta in sorted(root.glob("*/*/meta.json")):
        yield from sorted(meta.parent.glob("*checkpoint*"))
    yield from sorted((root / "t5x_checkpoints").glob("*/checkpoint_*"))


def layout_of(path: Path) -> str | None:
    """Returns the layout of a checkpoint with an optimizer's state that needs no option to be opened."""
    try:
        with open_state(path) as opened:
            return None if opened.state.optimizer.schema == WEIGHTS else opened.layout
    except StatekitError:
        return None


def targets() -> list[str]:
    """Returns the containers that can be written."""
    names = map(registry.container_card, registry.container_names())
    return [card.name for card in names if card.target_kind is not None]


def refusal(path: Path, container: str) -> str:
    """Returns why a checkpoint isn't converted into a container without an option; "" where it is."""
    try:
        plan(path, path.parent / "no-such-target", to=container)
    except StatekitError as error:
        return f"{error.subject} {error.expected or ''}"
    return ""


def counted(root: Path) -> dict[str, int]:
    """Returns how many checkpoints of a layout go into a container, by `layout -> container`."""
    counts: Counter[str] = Counter()
    for path in checkpoints(root):
        layout = layout_of(path)
        if layout is not None:
            counts.update(f"{layout} -> {one}" for one in targets() if not refusal(path, one))
    return dict(sorted(counts.items()))


if __name__ == "__main__":
    recordings = GOLDEN.parent / "recordings"
    sets = {"compact": COMPACT, "golden": GOLDEN, "recordings": recordings}
    json.dump({name: counted(root) for name, root in sets.items()}, sys.stdout, indent=2)
