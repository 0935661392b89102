"""What the catalogue's address says: which checkpoints are shown and in which order, so that a view can be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from statekit.service.records import SORTS, Query

WHOLE = Query()
"""All that is there."""
MOST_TEXT = 500
_FILTERS = {
    "optimizer": "optimizer",
    "container": "container",
    "layout": "layout",
    "seal": "seal",
    "verdict": "doctor",
    "tag": "tag",
    "status": "still there",
}


@dataclass(frozen=True)
class Filter:
    """What can be chosen of the catalogue.

    Attributes:
        name: The field of the query.
        label: What it is called.
        chosen: What is chosen; None for anything.
        options: What there is, each with how many have it.
    """

    name: str
    label: str
    chosen: str | None
    options: tuple[tuple[str, int], ...]


def query_of(parameters: Mapping[str, str]) -> Query:
    """Returns which checkpoints an address asks for: `q`, and the fields of a query by their names.

    What isn't understood leaves none out.

    Example:
        >>> query_of({"q": "t5", "run": "3", "sort": "nothing"})
        Query(text='t5', root=None, run=3, container=None, layout=None, optimizer=None, tag=None, seal=None, \
verdict=None, status='present', readable=None, sort='-modified')
    """
    fields: dict[str, Any] = {name: parameters[name] for name in _FILTERS if parameters.get(name)}
    for name in ("run", "root"):
        if (number := record_number(parameters.get(name, ""))) is not None:
            fields[name] = number
    if parameters.get("sort", "").removeprefix("-") in SORTS:
        fields["sort"] = parameters["sort"]
    if parameters.get("readable") in {"yes", "no"}:
        fields["readable"] = parameters["readable"] == "yes"
    return Query(text=parameters.get("q", "")[:MOST_TEXT], **fields)


def record_number(text: str) -> int | None:
    """Returns the number of a record that somebody writes; None of what no record's can be.

    Example:
        >>> record_number("12"), record_number("-1"), record_number("9" * 5000)
        (12, None, None)
    """
    return int(text) if text.isdecimal() and len(text) < 19 else None


def address(query: Query, cursor: str | None = None, **changes: Any) -> str:
    """Returns the address that asks for a query with changes.

    Example:
        >>> address(Query(text="t5", seal="sealed"), seal=None, sort="step")
        '/?q=t5&sort=step'
    """
    words = {True: "yes", False: "no"}
    values = {
        "q" if name == "text" else name: words[value] if isinstance(value, bool) else value
        for name, value in {**vars(query), **changes}.items()
        if value not in (None, "") and value != getattr(WHOLE, name)
    }
    if cursor is not None:
        values["cursor"] = cursor
    return f"/?{urlencode(values)}" if values else "/"


def filters(query: Query, facets: Mapping[str, Mapping[str, int]]) -> list[Filter]:
    """Returns what can be chosen, and how many have it; where there is only one choice, it is left out."""
    listed = []
    for name, label in _FILTERS.items():
        chosen, options = getattr(query, name), tuple(facets.get(name, {}).items())
        if len(options) > 1 or chosen != getattr(WHOLE, name):
            listed.append(Filter(name, label, chosen, options))
    return listed
