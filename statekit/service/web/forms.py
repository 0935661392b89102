"""What people fill in, as the options of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import FormData

from statekit.errors import UsageError
from statekit.service.web.addresses import record_number

_TEXTS = ("to", "layout", "map", "require", "step_offset", "path", "slot")
_TICKS = ("params_only", "dry_run", "stats")
_PAIRS = ("config", "hparams")


def options(form: FormData) -> dict[str, Any]:
    """Returns the options of a job that a form asks for; fields that were left empty say nothing.

    Raises:
        UsageError: A line that should be `name=value` isn't, or a root's number is none.
    """
    said: dict[str, Any] = {name: text for name in _TEXTS if (text := _text(form, name))}
    said |= {name: True for name in _TICKS if _text(form, name)}
    said |= {name: pairs for name in _PAIRS if (pairs := _pairs(_text(form, name), name))}
    region = [_text(form, name) for name in ("top", "bottom", "left", "right")]
    if any(region):
        said["region"] = [one if (number := record_number(one)) is None else number for one in region]
    root, path = _text(form, "target_root"), _text(form, "target_path")
    if root or path:
        number = record_number(root)
        if number is None:
            raise UsageError("That is no root's number.", place="target_root", found=root[:100])
        said["target"] = {"root": number, "path": path}
    return said


def subjects_of(form: FormData) -> tuple[int, ...]:
    """Returns the numbers of the checkpoints that a form is about.

    Raises:
        UsageError: One is none.
    """
    said = form.getlist("subject")
    numbers = [record_number(one) if isinstance(one, str) else None for one in said]
    for one, number in zip(said, numbers, strict=True):
        if number is None:
            raise UsageError("That is no checkpoint's number.", place="subject", found=f"{one}"[:100])
    return tuple(number for number in numbers if number is not None)


def _text(form: FormData, name: str) -> str:
    value = form.get(name)
    return value.strip() if isinstance(value, str) else ""


def _pairs(text: str, place: str) -> Mapping[str, Any]:
    pairs = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, value = (part.strip() for part in line.partition("="))
        if not name or not value:
            raise UsageError(
                "A line isn't a name with its value.",
                place=place,
                expected="num_heads=12, a line each",
                found=line[:500],
            )
        pairs[name] = _value(value)
    return pairs


def _value(text: str) -> Any:
    """Returns what JSON has as a number, a list, ...; anything else is text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
