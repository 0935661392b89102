"""Writes converters/cards.json: what is known of each format without loading it (`make tables`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from statekit.conversion import registry
from statekit.conversion.registry import of_container, of_layout

TARGET = Path(__file__).parents[1] / "converters" / "cards.json"


def cards() -> dict[str, Any]:
    """Returns the cards of all formats, as JSON holds them."""
    containers = [vars(of_container(registry.container(name))) for name in registry.container_names()]
    layouts = [vars(of_layout(registry.layout(name))) for name in registry.layout_names()]
    known = {"containers": containers, "layouts": layouts}
    return {kind: {card.pop("name"): card for card in some} for kind, some in known.items()}


def page() -> str:
    """Returns the whole file, a format a line."""
    sections = []
    for kind, some in cards().items():
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(card)}" for name, card in some.items())
        sections.append(f"  {json.dumps(kind)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
