"""A conversion's request as plain JSON, by which each worker makes the plan anew."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from statekit.conversion.changing.changes import Changes
from statekit.conversion.checkpoint_ref import CheckpointRef, RefOptions
from statekit.conversion.plan import Request
from statekit.errors import UsageError
from statekit.files.source import checkpoint_place
from statekit.files.tree import Place
from statekit.maps.model_map import maps_of
from statekit.state.exactness import Exactness


class MapsDocument(TypedDict):
    """How maps were asked for."""

    map: str | None
    config: dict[str, Any]
    rename: dict[str, str]


class RequestDocument(TypedDict):
    """What was asked for."""

    source: str
    options: RefOptions
    target: str
    to: str | None
    layout: str | None
    step_offset: str | int
    require: str
    like: NotRequired[str]
    maps: NotRequired[MapsDocument]
    changes: NotRequired[dict[str, Any]]


def to_json(request: Request) -> dict[str, Any]:
    """Returns a request as plain JSON, with whole paths.

    Raises:
        UsageError: It has maps, and nobody noted how they were asked for.
    """
    if request.maps and not request.map_options:
        raise UsageError(
            "Workers can't make the maps of this plan.",
            place="maps",
            remedy="make the plan by statekit.plan(..., map=..., config=..., rename=...)",
        )
    options = {name: value for name, value in request.ref.options().items() if name != "files"}
    document: dict[str, Any] = {
        "source": _whole(request.ref.place),
        "options": options,
        "target": _whole(request.target),
        "to": request.to,
        "layout": request.layout,
        "step_offset": request.step_offset,
        "require": request.require.name.lower(),
    }
    if request.like is not None:
        document["like"] = _whole(request.like)
    if request.maps:
        document["maps"] = _map_options(request.map_options)
    if request.changes is not None:
        document["changes"] = _changes(request.changes)
    return document


def from_json(document: RequestDocument) -> Request:
    """Returns the request that a document describes.

    Raises:
        UsageError: It makes no sense.
    """
    ref = CheckpointRef.given(document["source"], **document["options"])
    like, offset, maps = document.get("like"), document["step_offset"], document.get("maps")
    return Request(
        ref=ref,
        target=checkpoint_place(document["target"]),
        to=document["to"],
        layout=document["layout"],
        step_offset=offset if isinstance(offset, int) or offset == "reset" else "keep",  # type: ignore[arg-type]  # a literal
        require=Exactness.named(document["require"]),
        like=None if like is None else checkpoint_place(like),
        maps=()
        if maps is None
        else maps_of(maps["map"], maps["config"], maps["rename"], budget=ref.job_budget()),
        changes=Changes.of(document["changes"]) if "changes" in document else None,
        map_options=maps or {},
    )


def _whole(place: Place) -> str:
    """Returns a place as any process of any working directory names it."""
    return os.path.abspath(place) if isinstance(place, Path) else f"{place}"


def _map_options(request: Mapping[str, Any]) -> dict[str, Any]:
    name, config, rename = request.get("map"), request.get("config"), request.get("rename")
    if name is not None and name.endswith(".json"):
        name = os.path.abspath(name)
    return {"map": name, "config": dict(config or {}), "rename": dict(rename or {})}


def _changes(changes: Changes) -> dict[str, Any]:
    document = changes.to_json()
    if changes.init_missing is not None:
        document["init_missing"] = _whole(changes.init_missing)
    return document
