"""The law of printed code: the arguments that are printed for a ref reopen the same ref, in a fresh process.

Printed are calls of statekit's functions (`statekit.torch.load_optimizer(...)`) and commands (`statekit resume ...`).
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from statekit.cli.arguments import checkpoint_options, ref_of_words
from statekit.cli.main import statekit
from statekit.conversion.checkpoint_ref import OPTIONS, CheckpointRef

_COMMAND = re.compile(r"^\s*statekit \w.*$|(?<=: )statekit \w.*$", re.MULTILINE)
"""Matches a printed command: a line of its own, or the end of a sentence behind a colon."""
_OPENING = ("open", "load_optimizer", "load_params")
"""The functions of statekit that printed code calls with a checkpoint."""

_FRESH = """
import sys
from statekit.testing.printed_code import read_back
print(*read_back(sys.argv[1], sys.argv[2:]), sep="\\n")
"""


def check_printed_code(ref: CheckpointRef, *, fresh: bool = True) -> None:
    """Checks that the code of a ref, in Python's spelling and a shell's, reopens the same ref.

    Args:
        ref: A ref with a path.
        fresh: Whether a process of its own reads the code.

    Raises:
        AssertionError: Another ref is opened; names the fields that differ.
    """
    words = [str(ref.path), *ref.words()]
    if fresh:
        command = [sys.executable, "-c", _FRESH, ref.code(), *words]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        assert lines == [repr(ref)] * 2, f"a fresh process reads {lines}, expected {ref!r}"
        return
    for spelling, other in zip(("Python", "shell"), _read(ref.code(), words), strict=True):
        lost = [option.name for option in OPTIONS if getattr(other, option.name) != getattr(ref, option.name)]
        assert not lost and other.path == ref.path, f"{spelling} code doesn't tell {', '.join(lost)}"


def read_back(code: str, words: Sequence[str]) -> list[str]:
    """Returns the refs that arguments of Python, and words of a command line, make; as their text."""
    return [repr(ref) for ref in _read(code, words)]


def _read(code: str, words: Sequence[str]) -> list[CheckpointRef]:
    command: Any = click.command()(checkpoint_options(lambda ref: ref))
    ref: CheckpointRef = command.main(list(words), standalone_mode=False)
    scope = {"CheckpointRef": CheckpointRef}
    return [eval(f"CheckpointRef({code})", scope), ref]


def check_printed_lines(printed: Sequence[tuple[CheckpointRef, str]]) -> None:
    """Checks that every call and every command in printed texts opens the ref that was told, in a fresh process.

    Args:
        printed: What was told of a checkpoint, at the path that is printed; and what a verb printed of it, which is
            Python or a sentence with commands.

    Raises:
        AssertionError: A text opens nothing, or another ref; names both.
    """
    texts = json.dumps([text for _, text in printed])
    command = [sys.executable, "-c", _FRESH_LINES]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, input=texts)
    for (ref, text), refs in zip(printed, json.loads(answer.stdout), strict=True):
        assert refs, f"nothing is opened by {text!r}"
        assert set(refs) == {repr(ref)}, f"{text!r} opens {refs}, expected {ref!r}"


_FRESH_LINES = """
import json, sys
from statekit.testing.printed_code import printed_refs
print(json.dumps([[repr(ref) for ref in printed_refs(text)] for text in json.load(sys.stdin)]))
"""


def printed_refs(text: str) -> list[CheckpointRef]:
    """Returns the refs that the calls in Python's text open; those of the commands in a text that isn't Python's."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return [_ref_of(shlex.split(command[0])) for command in _COMMAND.finditer(text)]
    return [*_called(tree)]


def _called(tree: ast.AST) -> Iterator[CheckpointRef]:
    """Yields the refs that calls of statekit's functions make of their path and keywords."""
    options = {option.name for option in OPTIONS}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        if node.func.attr in _OPENING and ast.unparse(node.func).startswith("statekit."):
            keywords = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg in options}
            yield CheckpointRef(ast.literal_eval(node.args[0]), **keywords)


def _ref_of(words: Sequence[str]) -> CheckpointRef:
    """Returns the ref of the first checkpoint that a command of statekit is given."""
    verb = statekit.get_command(click.Context(statekit), words[1])
    assert verb is not None, f"there is no verb {words[1]}"
    params = verb.make_context(words[1], list(words[2:])).params
    path = next(params[param.name or ""] for param in verb.params if isinstance(param, click.Argument))
    # What --layout tells convert is of the target.
    names = [
        option.name
        for option in OPTIONS
        if option.name in params and (words[1], option.name) != ("convert", "layout")
    ]
    return ref_of_words(path, {name: params[name] for name in names})
