"""What people fill in, as the options of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import FormData
from starlette.requests import Request

from statekit.errors import UsageError, printable
from statekit.service.web.addresses import record_number

_TEXTS = ("to", "layout", "map", "require", "step_offset", "path", "slot")
_TICKS = ("params_only", "dry_run", "stats")
_PAIRS = ("config", "hparams")
_ENCODING = "application/x-www-form-urlencoded"
"""How browsers send our forms. A form in parts would name a codec of its own, some of which take minutes."""


async def form_of(request: Request) -> FormData:
    """Returns the form that a request brings.

    Raises:
        UsageError: It isn't sent as ours are.
    """
    encoding = request.headers.get("content-type", _ENCODING).partition(";")[0].strip().lower()
    if encoding != _ENCODING:
        raise UsageError(
            "The form can't be read.",
            place="Content-Type",
            expected=_ENCODING,
            found=printable(encoding[:100]),
        )
    return await request.form()


def options(form: FormData) -> dict[str, Any]:
    """Returns the options of a job that a form asks for; fields that were left empty say nothing.

    Raises:
        UsageError: A line that should be `name=value` isn't, or a root's number is none.
    """
    given: dict[str, Any] = {name: text for name in _TEXTS if (text := _text(form, name))}
    given |= {name: True for name in _TICKS if _text(form, name)}
    given |= {name: pairs for name in _PAIRS if (pairs := _pairs(_text(form, name), name))}
    region = [_text(form, name) for name in ("top", "bottom", "left", "right")]
    if any(region):
        given["region"] = [edge if (number := record_number(edge)) is None else number for edge in region]
    root, path = _text(form, "target_root"), _text(form, "target_path")
    if root or path:
        number = record_number(root)
        if number is None:
            raise UsageError("The number is not of a root.", place="target_root", found=root[:100])
        given["target"] = {"root": number, "path": path}
    return given


def subjects_of(form: FormData) -> tuple[int, ...]:
    """Returns the numbers of the checkpoints that a form is about.

    Raises:
        UsageError: One is none.
    """
    texts = form.getlist("subject")
    numbers = [record_number(text) if isinstance(text, str) else None for text in texts]
    for text, number in zip(texts, numbers, strict=True):
        if number is None:
            raise UsageError("The number is not of a checkpoint.", place="subject", found=f"{text}"[:100])
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
