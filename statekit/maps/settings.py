"""What codebases call the settings of their models, in a map's words: from a config of theirs, said or lying there.

A map takes Hugging Face's names, or its own. `converters/settings.json` says which of them a codebase's own names mean,
in what files it keeps these, and where they stand in the state of a checkpoint that has them itself.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from statekit.errors import Faults
from statekit.tensors.tree import shipped_json

Word = str | Mapping[str, Any] | None
"""The map's name for a setting; with `values`, theirs and ours, where these differ too; None where it needs none.

Of a record that a codebase wrote, `if` says which other settings switch it on; where they don't, it is that of `else`.
`unless` names one that says the same and counts; `begins`, whose beginning makes which value. `only` has the values
with which a model is one that maps know: it has no name of theirs, and any other value is refused."""


@dataclass(frozen=True)
class Settings:
    """How a codebase says what its model is.

    Attributes:
        keys: Its name for a setting -> the map's.
        gin: The configurables that a gin file of its binds them to.
        places: Where a record of them stands in a state's `extra`, by slashes.
        beside: Whether its program's configuration lies beside a checkpoint.
    """

    keys: Mapping[str, Word] = field(default_factory=dict)
    gin: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    beside: bool = False

    def key(self, name: str) -> str | None:
        """Returns the map's name for a setting; None if it has none."""
        word = self.keys.get(name)
        return word.get("key") if isinstance(word, Mapping) else word

    @property
    def meant(self) -> frozenset[str]:
        """All names of the map that the codebase has one for."""
        return frozenset(key for name in self.keys if (key := self.key(name)) is not None)

    def holding(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a codebase's own record says of a model, without what other settings in it decide otherwise."""
        carried = {name: self._held(name, values) for name in values}
        return {name: value for name, value in carried.items() if value is not _UNKNOWN}

    def of_config(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the whole configuration of a program says of its model."""
        return {name: value for name, value in self.holding(values).items() if name in self.keys}

    def _held(self, name: str, values: Mapping[str, Any]) -> Any:
        """Returns the value that counts: of `else` without all of `if`, of `begins` by another's beginning."""
        word = self.keys.get(name)
        if not isinstance(word, Mapping):
            return values[name]
        if word.get("unless") in values:
            return _UNKNOWN
        for other, (start, value) in word.get("begins", {}).items():
            if str(values.get(other, "")).startswith(start):
                return value
        needed = word.get("if", {})
        holds = all(values.get(other, value) == value for other, value in needed.items())
        return values[name] if holds else values.get(word["else"])

    def translated(self, values: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
        """Returns settings by the map's names; those that it doesn't know stay as they are.

        Args:
            values: The settings, by this codebase's names or the map's.
            faults: What the map has no word for is added to it, and what is said twice.
        """
        canonical: dict[str, Any] = {}
        for name, value in values.items():
            if name in self.keys and self.key(name) is None:
                self._check(name, value, faults)
                continue
            key, setting = self.key(name) or name, self._value(name, value)
            if setting is _UNKNOWN:
                why = why_unmapped(str(value))
                because = f": {why}" if why else f", which the map has no word for; say {key}"
                faults.add(f"is {value!r:.80}{because}", name)
            elif canonical.setdefault(key, setting) != setting:
                faults.add(f"is {value!r:.80}, and {key} is said to be {canonical[key]!r:.80}", name)
        return canonical

    def _check(self, name: str, value: Any, faults: Faults) -> None:
        """Adds a setting that makes another model than maps know."""
        word = self.keys[name]
        if isinstance(word, Mapping) and value not in word["only"]:
            of = " or ".join(repr(usual) for usual in word["only"])
            faults.add(f"is {value!r:.80}, which makes another model: maps know {of} alone", name)

    def _value(self, name: str, value: Any) -> Any:
        word = self.keys.get(name)
        if not isinstance(word, Mapping) or "values" not in word:
            return value
        return next((meaning for word_value, meaning in word["values"] if word_value == value), _UNKNOWN)

    def of_gin(
        self, bound: Mapping[str, Mapping[str, Any]], faults: Faults, said: Container[str] = ()
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns what a gin file says of a model, by the map's names, and what of it is no plain value.

        Args:
            bound: Configurable -> `values` and `references` that the file binds, by name.
            faults: What the map has no word for is added to it, and what the configurables don't agree on.
            said: The map's names for what nobody needs to look up.
        """
        values: dict[str, Any] = {}
        unread: dict[str, str] = {}
        for part in (bound[name] for name in self.gin if name in bound):
            settings = {name: setting for name, setting in part["values"].items() if name in self.keys}
            asked = {name: setting for name, setting in settings.items() if self.key(name) not in said}
            for key, setting in self.translated(asked, faults).items():
                if values.setdefault(key, setting) != setting:
                    faults.add(f"is {values[key]!r:.80} and {setting!r:.80}", key)
            for name, text in part["references"].items():
                if (meant := self.key(name)) is not None:
                    unread[meant] = text
        return values, unread


_UNKNOWN = object()


def why_unmapped(name: str) -> str:
    """Returns why a named model has no map; "" if no reason is known."""
    reasons = _data()["unmapped"]
    return next((str(reasons[word]) for word in reasons if word in name.lower()), "")


def settings_of(*names: str | None) -> Settings:
    """Returns how codebases say what their models are: the first in its checkpoints too, all of them by `--config`."""
    settings_by_name = [Settings() if name is None else _known()[name] for name in names]
    keys: dict[str, Word] = {}
    for settings in reversed(settings_by_name):
        keys |= settings.keys
    gin = dict.fromkeys(name for settings in settings_by_name for name in settings.gin)
    return Settings(
        keys,
        tuple(gin),
        settings_by_name[0].places if settings_by_name else (),
        any(part.beside for part in settings_by_name[:1]),
    )


def gin_configurables() -> tuple[str, ...]:
    """Returns what gin files bind the settings of a model to, of all codebases."""
    return tuple(name for settings in _known().values() for name in settings.gin)


def known_settings() -> Iterator[str]:
    """Yields the names of the codebases whose settings are known."""
    yield from _known()


@cache
def _data() -> dict[str, Any]:
    return dict(shipped_json("statekit.converters", "settings.json"))


@cache
def _known() -> dict[str, Settings]:
    return {
        name: Settings(
            record["keys"],
            tuple(record.get("gin", ())),
            tuple(record.get("places", ())),
            record.get("beside", False),
        )
        for name, record in _data().items()
        if name not in ("facts", "unmapped")
    }
