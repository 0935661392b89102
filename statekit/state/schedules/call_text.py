"""Reads and writes the call of a schedule as it stands in a program: its name, and literals. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from statekit.errors import UsageError


def parse_call(text: str) -> dict[str, Any]:
    """Returns the record of a call: `function`, its name without modules, `arguments` and `whole`.

    Arguments are literals, or calls again, or lists of these; a bare name is its own text. Those told by their place
    stand under its number.

    Raises:
        UsageError: It is no such call.

    Example:
        >>> parse_call("optax.cosine_decay_schedule(0.1, decay_steps=100)")["arguments"]
        {'0': 0.1, 'decay_steps': 100}
    """
    try:
        return _call(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise UsageError(
            "A schedule isn't a call whose arguments are literals.",
            expected="optax.cosine_decay_schedule(0.1, decay_steps=1000), or a .gin file",
            found=text[:200],
            remedy="put the numbers in the place of names, and quote the whole for the shell",
        ) from error


def call_text(record: Mapping[str, Any]) -> str:
    """Returns the text of a call's record, which `parse_call` reads to the same record.

    Example:
        >>> call_text(parse_call("optax.cosine_decay_schedule(0.1, decay_steps=100)"))
        'cosine_decay_schedule(0.1, decay_steps=100)'
    """
    arguments = [
        _argument_text(value) if str(name).isdigit() else f"{name}={_argument_text(value)}"
        for name, value in record["arguments"].items()
    ]
    return f"{record['function']}({', '.join(arguments)})"


def _argument_text(value: Any) -> str:
    if isinstance(value, Mapping) and "function" in value:
        return call_text(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_argument_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument_text, value))}]"
    return repr(value)


def _call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    named = {keyword.arg: _argument(keyword.value) for keyword in node.keywords}
    if function is None or None in named:
        raise ValueError("no plain call")
    placed = {str(i): _argument(value) for i, value in enumerate(node.args)}
    return {"function": function, "arguments": {**placed, **named}, "whole": True}


def _argument(node: ast.expr) -> Any:
    match node:
        case ast.Call():
            return _call(node)
        case ast.List(elts) | ast.Tuple(elts):
            return [_argument(item) for item in elts]
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            return {_key(key): _argument(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(name):
            return name
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
        case ast.Constant(None | bool() | int() | float() | str() as value):
            return value
    raise ValueError(f"{type(node).__name__} is no literal")


def _key(node: ast.expr | None) -> int | str:
    key = node.value if isinstance(node, ast.Constant) else None
    if isinstance(key, (int, str)) and not isinstance(key, bool):
        return key
    raise ValueError("a key that is neither a number nor a name")
