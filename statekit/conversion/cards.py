"""What is known of a container or layout without loading it: its card.

The cards of our own formats lie in `converters/cards.json`, made from the formats themselves by `make tables`; those of
other packages are made when they are asked for, which loads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from statekit.conversion.contracts import Container, Layout


@dataclass(frozen=True)
class ContainerCard:
    """A container, as `Container` describes it."""

    name: str
    title: str
    suffixes: tuple[str, ...]
    target_kind: Literal["file", "folder"] | None


@dataclass(frozen=True)
class LayoutCard:
    """A layout, as `Layout` describes it."""

    name: str
    title: str
    containers: tuple[str, ...]
    variants: Mapping[str, tuple[str, ...]]


def of_container(container: Container) -> ContainerCard:
    """Returns the card of a loaded container."""
    return ContainerCard(container.name, container.title, tuple(container.suffixes), container.target_kind)


def of_layout(layout: Layout) -> LayoutCard:
    """Returns the card of a loaded layout."""
    variants = {schema: tuple(names) for schema, names in layout.variants.items()}
    return LayoutCard(layout.name, layout.title, tuple(layout.containers), variants)


def kept_container(name: str) -> ContainerCard | None:
    """Returns the card of one of our own containers; None if there is none."""
    card = _kept()["containers"].get(name)
    return card and ContainerCard(name, card["title"], tuple(card["suffixes"]), card["target_kind"])


def kept_layout(name: str) -> LayoutCard | None:
    """Returns the card of one of our own layouts; None if there is none."""
    card = _kept()["layouts"].get(name)
    if card is None:
        return None
    variants = {schema: tuple(names) for schema, names in card["variants"].items()}
    return LayoutCard(name, card["title"], tuple(card["containers"]), variants)


@cache
def _kept() -> Mapping[str, Mapping[str, Any]]:
    text = resources.files("statekit.converters").joinpath("cards.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
