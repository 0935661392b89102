"""Holds JSON to a JSON Schema, as far as those of maps and certificates go: all faults at once, with their places.

Source: JSON Schema 2020-12, https://json-schema.org/draft/2020-12.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
Faulty = Iterator[tuple[str, str]]
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
}
_CHECKED = {
    "type", "const", "minimum", "pattern", "properties", "required", "additionalProperties", "propertyNames",
    "minProperties", "maxProperties", "items", "minItems", "maxItems", "uniqueItems", "oneOf", "$ref", "enum", "if",
    "then", "else",
}  # fmt: skip
_SAID = {"$schema", "$id", "$defs", "title", "description"}


def faults(value: Any, schema: Schema, root: Schema | None = None, place: str = "") -> Faulty:
    """Yields the faults of a value by a schema, each with its place.

    Args:
        value: The value, as JSON gives it.
        schema: The schema.
        root: The schema that `$ref` refers to; this one if None.
        place: Where the value stands.

    Raises:
        ValueError: The schema has a word that isn't checked here.
    """
    root = schema if root is None else root
    if unknown := schema.keys() - _CHECKED - _SAID:
        raise ValueError(f"not checked: {', '.join(unknown)}")
    if "$ref" in schema:
        yield from faults(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, place)
    if "const" in schema and value != schema["const"]:
        yield f"is {value!r:.80}, expected {schema['const']!r}", place
    if value not in schema.get("enum", [value]):
        yield f"is {value!r:.80}, expected one of {', '.join(schema['enum'])}", place
    if "if" in schema:
        branch = "else" if any(faults(value, schema["if"], root, place)) else "then"
        yield from faults(value, schema[branch], root, place)
    if "type" in schema and not _KINDS[schema["type"]](value):
        yield f"is {value!r:.80}, expected of type {schema['type']}", place
        return
    if "oneOf" in schema:
        forms = [list(faults(value, part, root, place)) for part in schema["oneOf"]]
        if all(forms):
            yield from min(forms, key=len)
    yield from _of_content(value, schema, root, place)


def _of_content(value: Any, schema: Schema, root: Schema, place: str) -> Faulty:
    if isinstance(value, dict):
        yield from _of_object(value, schema, root, place)
    elif isinstance(value, list):
        yield from _of_array(value, schema, root, place)
    elif isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"is {value!r:.80}, expected text like {schema['pattern']}", place
    elif isinstance(value, int) and value < schema.get("minimum", value):
        yield f"is {value}, expected {schema['minimum']} or more", place


def _of_object(value: Mapping[str, Any], schema: Schema, root: Schema, place: str) -> Faulty:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield "is missing", _below(place, name)
    for name, child in value.items():
        yield from faults(name, schema.get("propertyNames", {}), root, _below(place, name))
        if name in properties:
            one_schema = properties[name]
        elif others is False:
            yield "isn't known here", _below(place, name)
            continue
        else:
            one_schema = others
        if isinstance(one_schema, Mapping):
            yield from faults(child, one_schema, root, _below(place, name))
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
        yield f"has {len(value)} entries", place


def _of_array(value: list[Any], schema: Schema, root: Schema, place: str) -> Faulty:
    if len(value) > schema.get("maxItems", len(value)):  # what is in them would only be work
        yield f"has {len(value)} entries, expected {schema['maxItems']} or fewer", place
        return
    if len(value) < schema.get("minItems", 0):
        yield f"has {len(value)} entries, expected {schema['minItems']} or more", place
    if schema.get("uniqueItems") and any(item in value[:i] for i, item in enumerate(value)):
        yield "has an entry twice", place
    for i, item in enumerate(value):
        yield from faults(item, schema.get("items", {}), root, _below(place, i))


def _below(place: str, name: object) -> str:
    return f"{place}/{name}" if place else str(name)
