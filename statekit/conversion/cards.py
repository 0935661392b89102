"""What is known of a container or layout without loading it: its card, and its signs.

The cards of our own formats lie in `converters/cards.json`, made from the formats themselves by `make tables`; those of
other packages are made when they are asked for, which loads them.

Signs are what is cheap to see of a path, or of the names in an opened checkpoint, and lets a format fit; they are data,
`converters/signs.json`. They leave out, they don't decide: a format without signs may always fit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any, Literal, TypeAlias

from statekit.conversion.contracts import (
    AlsoCalled,
    Container,
    HoldsSeveral,
    Layout,
    OnlyIfAsked,
    StandsIn,
    StoresValues,
)
from statekit.errors import StatekitError
from statekit.files.checkpoint import Checkpoint
from statekit.files.source import first_bytes
from statekit.files.tree import Place, StoredPlace

MayFit: TypeAlias = Callable[[str], bool]
"""Tells of a format's name whether its signs are there, or it has none."""

_HEAD = 64
"""Bytes of a file that signs are looked for in."""
_NUMBERED = re.compile(r"(\d{1,18})/$")


@dataclass(frozen=True)
class ContainerCard:
    """A container, as `Container` describes it."""

    name: str
    title: str
    suffixes: tuple[str, ...]
    target_kind: Literal["file", "folder"] | None
    schedule_in: str | None = None
    other_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutCard:
    """A layout, as `Layout` describes it; `schedule_in` as `StandsIn` has it, None where files don't say it.

    `stores_values` tells whether its files, or the constructors that read them, fill in every hyperparameter.
    `only_if_asked` tells whether no target gets it but by name, or from a source in it.
    """

    name: str
    title: str
    containers: tuple[str, ...]
    variants: Mapping[str, tuple[str, ...]]
    holds_several: bool | tuple[str, ...] = False
    schedule_in: str | None = None
    stores_values: bool = False
    only_if_asked: bool = False

    def holds(self, schemas: Iterable[str], container: str | None = None) -> bool:
        """Tells whether it holds the state of a run with optimizers of these schemas, in a container or in any."""
        names, several = list(schemas), self.holds_several
        fits = container in several if container and isinstance(several, tuple) else bool(several)
        return all(name in self.variants for name in names) and (fits or len(names) == 1)

    def keeps_rule(self, schema: str, makers: Collection[str]) -> bool:
        """Tells whether a run goes on here by its own rule, if it has to go by any.

        Args:
            schema: The optimizer's.
            makers: Variants that may have made the run; none where nobody knows.

        Example:
            >>> card = LayoutCard("torch-optim", "", (), {"adamw": ("torch",), "adafactor": ("hf", "torch")})
            >>> card.keeps_rule("adafactor", ["torch"]), card.keeps_rule("adafactor", ["t5x"])
            (True, False)
        """
        followed = self.variants.get(schema, ())
        return not followed or not makers or not set(makers).isdisjoint(followed)


def of_container(container: Container) -> ContainerCard:
    """Returns the card of a loaded container."""
    suffixes, kind = tuple(container.suffixes), container.target_kind
    others = tuple(container.other_names) if isinstance(container, AlsoCalled) else ()
    return ContainerCard(container.name, container.title, suffixes, kind, _schedule_in(container), others)


def of_layout(layout: Layout) -> LayoutCard:
    """Returns the card of a loaded layout."""
    variants = {schema: tuple(names) for schema, names in layout.variants.items()}
    several = layout.holds_several if isinstance(layout, HoldsSeveral) else False
    containers = tuple(layout.containers)
    stores = isinstance(layout, StoresValues) and layout.stores_values
    asked = isinstance(layout, OnlyIfAsked) and layout.only_if_asked
    schedule_in = _schedule_in(layout)
    return LayoutCard(layout.name, layout.title, containers, variants, several, schedule_in, stores, asked)


def _schedule_in(one: Container | Layout) -> str | None:
    return one.schedule_in if isinstance(one, StandsIn) else None


def kept_container(name: str) -> ContainerCard | None:
    """Returns the card of one of our own containers; None if there is none."""
    card = _kept()["containers"].get(name)
    return card and ContainerCard(
        name,
        card["title"],
        tuple(card["suffixes"]),
        card["target_kind"],
        card["schedule_in"],
        tuple(card.get("other_names", ())),
    )


def kept_layout(name: str) -> LayoutCard | None:
    """Returns the card of one of our own layouts; None if there is none."""
    card = _kept()["layouts"].get(name)
    if card is None:
        return None
    variants = {schema: tuple(names) for schema, names in card["variants"].items()}
    several = card.get("holds_several", False)
    several = tuple(several) if isinstance(several, list) else several
    containers = tuple(card["containers"])
    stores = bool(card.get("stores_values", False))
    asked = bool(card.get("only_if_asked", False))
    return LayoutCard(name, card["title"], containers, variants, several, card["schedule_in"], stores, asked)


def _kept() -> Mapping[str, Mapping[str, Any]]:
    return _data("cards.json")


def containers_for(path: Place) -> MayFit:
    """Returns which containers may fit a path: a file, a folder, or a prefix of file names."""
    if path.is_file():
        seen = {"name": path.name, "begins": _head(path)}
    elif path.is_dir():
        seen = {"holds": _entries(path)}
    else:
        seen = {"holds": _entries(path.parent, path.name)}
    return lambda name: _shows(_signs("containers").get(name), partial(_is_seen, seen))


def layouts_for(checkpoint: Checkpoint) -> MayFit:
    """Returns which layouts may fit the names of a checkpoint's tensors."""
    seen = {"names": "\n".join(checkpoint.tensors)}
    is_seen = cache(partial(_is_seen, seen))  # several layouts have one sign
    return lambda name: _shows(_signs("layouts").get(name), is_seen)


def _shows(signs: Mapping[str, str] | None, is_seen: Callable[[str, str], bool]) -> bool:
    return signs is None or any(is_seen(key, sign) for key, sign in signs.items())


def _is_seen(seen: Mapping[str, str], key: str, sign: str) -> bool:
    return key in seen and re.search(sign, seen[key], _FLAGS[key]) is not None


_FLAGS = {"name": re.DOTALL, "begins": re.DOTALL, "holds": re.MULTILINE, "names": re.MULTILINE}


def _head(path: Place) -> str:
    """Returns a file's first bytes, a character a byte; none of one that can't be read."""
    try:
        return first_bytes(path, _HEAD).decode("latin-1")
    except StatekitError:
        return ""


def _entries(folder: Place, start: str = "") -> str:
    """Returns the names in a folder that start so, folders with a slash, then those in its newest numbered folder."""
    names = _names(folder, start)
    numbered = {int(number[1]): name for name in names if (number := _NUMBERED.search(name))}
    newest = _names(folder / numbered[max(numbered)], "") if numbered and not start else []
    return "\n".join([*names, *newest])


def _names(folder: Place, start: str) -> list[str]:
    """Returns the names in a folder that start so; none of one that can't be read."""
    if isinstance(folder, StoredPlace):
        entries = [entry for entry in folder.entries() if entry.name.startswith(start)]
        return [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
    try:
        with os.scandir(folder) as items:
            return [f"{e.name}/" if e.is_dir() else e.name for e in items if e.name.startswith(start)]
    except OSError:
        return []


def _signs(kind: str) -> Mapping[str, Mapping[str, str]]:
    return dict(_data("signs.json")[kind])


@cache
def _data(name: str) -> Mapping[str, Mapping[str, Any]]:
    text = resources.files("statekit.converters").joinpath(name).read_text(encoding="utf-8")
    return dict(json.loads(text))
