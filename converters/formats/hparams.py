"""Reads hyperparameters as people write them: KEY=VALUE, JSON files, gin files. Nothing is evaluated.

Of gin, literals and plain macros are read (`X = 3`, `%X`, `adafactor.Adafactor.decay_rate = 0.8`, indented blocks).
References (`@f`) and what hangs on them are left out and named.
Source: google/gin-config, gin/config_parser.py, docs/index.md ("Syntax quick reference").
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from statekit.budget import Account
from statekit.converters.formats.flat_yaml import flat_yaml
from statekit.errors import FormatError, UsageError
from statekit.files.source import Files, read_small
from statekit.files.tree import Place
from statekit.tensors.tree import loose_json

_CONSTANTS = {"null": None, "true": True, "false": False}
_WORD = re.compile(r"[A-Za-z_][\w./:-]*")
_NAME = re.compile(r"([a-z_]+/)?[A-Za-z_]\w*")
"""A name, after that of an optimizer where a run has several."""
_CALL = re.compile(r"@(?:(.*)/)?(?:[\w.]*\.)?(\w+)\(\)")
_INCLUDE = "include"
_SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING)
_MAX_MACROS = 100
"""Macros that name one another. More have no end, as `X = %X`; the value stays as it is, and isn't refused."""
_STEPS = 2
"""Steps of work that a character of gin takes."""
_WHAT = "A gin file"


@dataclass(frozen=True)
class Settings:
    """Hyperparameters that were read.

    Attributes:
        values: Value by name, in the original system's own names.
        references: Name -> text, such as `@adafactor.standard_logical_factor_rules()`, of what isn't a literal.
        left_out: What couldn't be read, one sentence each.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    references: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A call that a file speaks of, with the arguments that it says.

    Attributes:
        function: What is called, without its modules.
        arguments: Value by name; the text of what isn't a literal.
        whole: Whether nothing else may say further arguments: the file includes no other, and says the call itself.
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = True


def read_hparams(
    arguments: Sequence[str], configurable: str = "Adafactor", files: Files | None = None
) -> Settings:
    """Reads the values of `--hparams`; later ones win.

    Args:
        arguments: Each a `KEY=VALUE`, or the path of a `.json`, `.yml` or `.gin` file.
        configurable: Whose bindings count in a gin file.
        files: As in `read_text`.

    Raises:
        UsageError: An argument is neither, or its value isn't a literal.
        NotFoundError: No such file.
        FormatError: A file doesn't follow its format.
        BudgetError: A file is more than the job may hold.
    """
    values: dict[str, Any] = {}
    references: dict[str, str] = {}
    left_out: list[str] = []
    for argument in arguments:
        read = _file_settings(Path(argument), configurable, files) if _is_file(argument) else _pair(argument)
        references = {k: v for k, v in {**references, **read.references}.items() if k not in read.values}
        values.update(read.values)
        left_out += read.left_out
    return Settings(values, references, tuple(left_out))


def parse_value(text: str) -> Any:
    """Returns the value of a Python, JSON or gin literal; a bare word is a string.

    Example:
        >>> parse_value("[null, true, ROW, 1e-3]")
        [None, True, 'ROW', 0.001]

    Raises:
        UsageError: It isn't a literal.
    """
    try:
        return _plain(_literal(text.strip()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        if _WORD.fullmatch(text.strip()):
            return text.strip()
        raise UsageError(
            "A value isn't a literal.",
            expected="a number, string, list, {...}, true, false or null",
            found=text[:200],
            remedy='quote strings, and the whole argument for the shell: --hparams \'factor_map={"kernel": ["ROW"]}\'',
        ) from error


def _literal(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return ast.literal_eval(_Words().visit(ast.parse(text, mode="eval")))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no literal")


class _Words(ast.NodeTransformer):
    """Turns bare words into what they mean in JSON, or into strings."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_CONSTANTS.get(node.id, node.id))


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(f"a value of type {type(value).__name__}")


def _is_file(argument: str) -> bool:
    return argument.endswith((".json", ".gin", ".yml", ".yaml")) and "=" not in Path(argument).name


def _pair(argument: str) -> Settings:
    key, separator, text = argument.partition("=")
    name = key.strip().rpartition(".")[2]
    if not separator or not _NAME.fullmatch(name):
        raise UsageError(
            "A hyperparameter isn't given as KEY=VALUE, nor as a .json, .yml or .gin file.",
            place="--hparams",
            found=argument[:200],
        )
    return Settings({name: parse_value(text)})


def _file_settings(path: Place, configurable: str, files: Files | None) -> Settings:
    text, account = read_text(path, files), files.account if files else None
    if path.suffix == ".gin":
        return read_gin(text, path, configurable, account)
    if path.suffix in (".yml", ".yaml"):
        return Settings(flat_yaml(text))
    values = loose_json(text, path, account)
    if not isinstance(values, dict):
        raise FormatError(
            "A file of hyperparameters isn't a JSON object.", place=path, found=type(values).__name__
        )
    return Settings(values)


def read_text(path: Place, files: Files | None = None) -> str:
    """Reads a small text file.

    Args:
        path: The file.
        files: Those of the checkpoint that it belongs to, or those that the user named for a job, whose budget it
            draws on; one of its own if None.

    Raises:
        NotFoundError: No such file.
        FormatError: It is no regular file, or not UTF-8.
        BudgetError: It is more than the job may hold.
    """
    return decoded(read_small(path, files), path)


def decoded(data: bytes, place: object) -> str:
    """Returns the text of a text file.

    Raises:
        FormatError: It isn't UTF-8.
    """
    try:
        return data.decode()
    except ValueError as error:
        raise FormatError("A text file isn't UTF-8.", place=place, found=str(error)) from error


def read_gin(
    text: str, place: object, configurable: str = "Adafactor", account: Account | None = None
) -> Settings:
    """Reads the bindings of one configurable from a gin file.

    Args:
        text: The file's.
        place: Where it is.
        configurable: The name of what is bound.
        account: What it draws on; one of its own if None.

    Raises:
        FormatError: The text isn't gin.
        BudgetError: It takes more work than its bytes explain, or says more than the job may hold.
    """
    return _settings(_lines(text, place, account), configurable)


def read_gin_call(
    text: str, place: object, parameter: str, function: str, account: Account | None = None
) -> Call | None:
    """Reads the call that a parameter is bound to, `parameter = @scope/module.function()`.

    Args:
        text: The file's.
        place: Where it is.
        parameter: The parameter's name.
        function: What is called where the parameter isn't bound, but arguments of this are.
        account: As in `read_gin`.

    Returns:
        None if there is neither.

    Raises:
        FormatError: The text isn't gin.
        BudgetError: As `read_gin`.
    """
    lines = _lines(text, place, account)
    values = (tokens for selector, tokens in lines.bindings if selector.rpartition(".")[2] == parameter)
    bound = {lines.expanded(tokens).replace(" ", "") for tokens in values}
    names = {match[2]: match[1] or "" for binding in bound if (match := _CALL.fullmatch(binding))}
    if len(bound) > 1 or (bound and not names):
        return Call(" or ".join(sorted(bound)), whole=False)
    named, scope = next(iter(names.items()), (function, ""))
    settings = _settings(lines, named, scope)
    arguments = {**settings.values, **settings.references}
    if not bound and not arguments:
        return None
    included = any(selector == _INCLUDE for selector, _ in lines.bindings)
    return Call(named, arguments, bool(bound) and not included)


def read_gin_schedule(path: Place, files: Files | None = None) -> Call:
    """Reads the call that makes the learning rate's schedule from a gin file of T5X.

    Args:
        path: The file.
        files: As in `read_text`.

    Raises:
        UsageError: The gin file says none.
        NotFoundError: No such file.
        FormatError: The file isn't gin.
        BudgetError: It is more than the job may hold.
    """
    account = files.account if files else None
    call = read_gin_call(read_text(path, files), path, *SCHEDULE_IN_GIN, account)
    if call is None:
        raise UsageError(
            "The gin file says no schedule.", place=path, expected=f"{SCHEDULE_IN_GIN[0]} = @...()"
        )
    return call


SCHEDULE_IN_GIN = ("learning_rate_fn", "create_learning_rate_scheduler")
"""The parameter of T5X's trainer that a schedule is bound to, and its usual function. Source: T5X t5x/trainer.py."""


@dataclass(frozen=True)
class _Lines:
    """What a gin file binds.

    Attributes:
        bindings: Selector and value tokens of each.
        length: The text's, in characters.
        place: Where it is.
        account: What its values draw on.
    """

    bindings: Sequence[tuple[str, list[str]]]
    length: int
    place: object
    account: Account

    @cached_property
    def macros(self) -> Mapping[str, Sequence[str]]:
        return {name: tokens for name, tokens in self.bindings if "." not in name}

    def expanded(self, tokens: Sequence[str], depth: int = 0) -> str:
        """Returns a value's text with macros put in.

        An unknown or endless one stays as it is, and so do those that make a value longer than the whole file; neither
        is a literal then.
        """
        parts: list[str] = []
        size = 0
        for before, word in zip(("", *tokens), tokens, strict=False):
            if before == "%" and word in self.macros and depth < _MAX_MACROS and size < self.length:
                parts[-1] = self.expanded(self.macros[word], depth + 1)
            else:
                parts.append(word)
            size += len(parts[-1])
        self.account.step(size, _WHAT, f"{self.place}")
        return " ".join(parts)


def _lines(text: str, place: object, account: Account | None) -> _Lines:
    account = account or Account()
    account.step(_STEPS * len(text), _WHAT, f"{place}")
    account.nodes(len(text) // 4, _WHAT, f"{place}")
    return _Lines(list(_bindings(text, place)), len(text), place, account)


def _settings(lines: _Lines, configurable: str, scope: str | None = None) -> Settings:
    """Returns the bindings of one configurable: in a scope, or, if that is None, in whatever scope all agree."""
    place, account = lines.place, lines.account
    bindings: dict[str, dict[str, list[str]]] = {}
    for selector, tokens in lines.bindings:
        named, _, path = selector.rpartition("/")
        parts = path.split(".")
        applies = not named or scope is None or f"{scope}/".startswith(f"{named}/")
        if len(parts) >= 2 and parts[-2] == configurable and applies:
            bindings.setdefault(parts[-1], {})[named] = tokens
    values: dict[str, Any] = {}
    references: dict[str, str] = {}
    left_out = []
    for name, scopes in bindings.items():
        inner = max(scopes, key=len) if scope is not None else ""
        chosen = [scopes[inner]] if inner in scopes else list(scopes.values())
        texts = {lines.expanded(tokens) for tokens in chosen}
        if len(texts) > 1:
            left_out.append(
                f"{name} differs between the scopes {', '.join(scopes)} of {place}, so none is taken."
            )
            continue
        value = texts.pop()
        account.nodes(len(value) // 2, _WHAT, f"{place}")
        try:
            values[name] = _plain(ast.literal_eval(value))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            references[name] = value.replace(" ", "")
            left_out.append(
                f"{configurable}.{name} is {references[name][:200]} in {place}, which isn't a literal."
            )
    return Settings(values, references, tuple(left_out))


def _bindings(text: str, place: object) -> Iterator[tuple[str, list[str]]]:
    """Yields selector and value tokens of every binding, `include` and a name of every other file; no imports."""
    if (at := text.find("\0")) >= 0:  # Python 3.13's tokenizer ends in a SystemError
        raise FormatError("A gin file holds a NUL.", place=place, found=f"at character {at}")
    prefix = ""
    words: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.DEDENT:
                prefix = ""
            elif token.type == tokenize.NEWLINE:
                if words[-1:] == [":"] and "=" not in words:
                    prefix = "".join(words[:-1]) + "."
                elif "=" in words:
                    at = words.index("=")
                    yield prefix + "".join(words[:at]), words[at + 1 :]
                elif words[:1] == [_INCLUDE]:
                    yield _INCLUDE, words[1:]
                words = []
            elif token.type not in (*_SKIPPED, tokenize.INDENT, tokenize.ENDMARKER):
                words.append(token.string)
    except (tokenize.TokenError, SyntaxError, UnicodeDecodeError) as error:  # the last from Python 3.13 on
        raise FormatError("A gin file can't be read.", place=place, found=str(error)) from error
