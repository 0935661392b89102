"""Reads the plain settings of a YAML file: scalars and lists of scalars under the keys at its top; nothing else.

MaxText keeps its configuration so. Deeper values are left out: a library that reads all of YAML would be needed.
Source: YAML 1.2.2, chapters 6.6, 7.3, 8.2, 10.3; AI-Hypercomputer/maxtext 0.2.5 utils/gcs_utils.py.
"""

from __future__ import annotations

import re
from typing import Any

_LINE = re.compile(r"([A-Za-z_]\w*):(?:[ \t]+(.*))?")
_ITEM = re.compile(r"[ \t]*-[ \t]+(.*)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "none": None, "": None}
_COMMENT = re.compile(r"(?:^|\s)#")
_UNREAD = object()
_DEEP = "&*!|>{["


def flat_yaml(text: str) -> dict[str, Any]:
    r"""Returns the settings at the top of a file by name; the last of one name counts.

    Example:
        >>> flat_yaml("# base\nadam_b2: 0.95  # usual\nopt_type: 'adamw'\nadamw_mask:\n- scale\nrules: {a: 1}")
        {'adam_b2': 0.95, 'opt_type': 'adamw', 'adamw_mask': ['scale']}
    """
    values: dict[str, Any] = {}
    key = ""
    for line in map(str.rstrip, text.splitlines()):
        if (match := _LINE.fullmatch(line)) is not None:
            key = match[1]
            values[key] = _value(match[2] or "")
        elif line.strip() and not line.lstrip().startswith("#"):
            values[key] = _with_item(values.get(key, _UNREAD), _ITEM.fullmatch(line))
    return {name: value for name, value in values.items() if value is not _UNREAD}


def _with_item(before: Any, item: re.Match[str] | None) -> Any:
    """Returns a list with one scalar more; `_UNREAD` where something deeper stands."""
    text = "" if item is None else item[1]
    if item is None or before is _UNREAD or _LINE.fullmatch(text) or _ITEM.fullmatch(text):
        return _UNREAD
    value = _value(text)
    return _UNREAD if value is _UNREAD else [*(before or []), value]


def _value(text: str) -> Any:
    """Returns a scalar, or a list of scalars in brackets; `_UNREAD` for anything else."""
    text = text.strip()
    if text[:1] in ("'", '"'):
        end = text.find(text[0], 1)
        return text[1:end] if end > 0 and _bare(text[end + 1 :]) == "" else _UNREAD
    text = _bare(text)
    if text.startswith("[") and text.endswith("]"):
        items = [_value(item) for item in text[1:-1].split(",") if item.strip()]
        return _UNREAD if _UNREAD in items else items
    return _WORDS[text.lower()] if text.lower() in _WORDS else _number(text)


def _bare(text: str) -> str:
    """Returns text without a comment behind it."""
    return _COMMENT.split(text, maxsplit=1)[0].strip()


def _number(text: str) -> Any:
    """Returns a number, or the text itself where it is a plain word."""
    if _NUMBER.fullmatch(text) is None:
        return _UNREAD if text[:1] in _DEEP else text
    return float(text) if {*text} & {*".eE"} else int(text)
