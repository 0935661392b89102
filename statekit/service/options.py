"""What may be said of a job beside its checkpoints, and of which form: no option names a file outside of the roots."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypedDict, get_type_hints

from statekit.conversion.checkpoint_ref import HintOptions, option
from statekit.errors import Faults, UsageError, meant
from statekit.service.records import KINDS, Kind

MOST_BYTES = 256 * 1024
"""Bytes of JSON that the options of a job take at most."""
MOST_SUBJECTS = 1000
"""Checkpoints that a job is about, at most."""
DEEPEST = 64
"""Lists and names within each other that a value of an option may have."""
BUDGET_BYTES = 8 * 2**30
"""What `budget` may be at most."""


class Option(NamedTuple):
    """Of which form an option is.

    Attributes:
        expected: The form in words.
        fits: Whether a value has it.
        schema: The form as JSON Schema, as far as that goes.
    """

    expected: str
    fits: Callable[[Any], bool]
    schema: Mapping[str, Any]


ENGINES = re.compile("processes:([1-9]|[1-5][0-9]|6[0-4])")
"""Where a job's workers may run. A task reaches no network, so that it reaches no cluster."""


def _is_text(value: Any) -> bool:
    """Tells whether it is text that can be written down and answered: halves of characters can't."""
    return (
        isinstance(value, str)
        and len(value) <= 4000
        and "\0" not in value
        and not any("\ud800" <= c <= "\udfff" for c in value)
    )


def _is_number(value: Any, most: int = 2**53) -> bool:
    return type(value) is int and abs(value) <= most


def _is_plain(value: Any, depth: int = DEEPEST) -> bool:
    if isinstance(value, list | tuple):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, Mapping):
        return depth > 0 and all(_is_text(key) and _is_plain(item, depth - 1) for key, item in value.items())
    return (
        value is None
        or isinstance(value, bool)
        or _is_text(value)
        or _is_number(value)
        or (isinstance(value, float) and math.isfinite(value))
    )


def _is_target(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.keys() == {"root", "path"}
        and _is_number(value["root"])
        and _is_text(value["path"])
    )


def _is_map(value: Any) -> bool:
    """Tells whether it is a map: its text as data, or the name of one of ours, never a file's."""
    if isinstance(value, Mapping):
        return _is_plain(value)
    return _is_text(value) and not value.endswith((".json", ".json:back")) and not {*value} & {*"/\\"}


def _one_of(*names: str) -> Option:
    return Option(f"one of {', '.join(names)}", lambda value: value in names, {"enum": list(names)})


_MOST = 2**53
_TEXT: Mapping[str, Any] = {"type": "string", "maxLength": 4000}
_WHOLE: Mapping[str, Any] = {"type": "integer", "minimum": -_MOST, "maximum": _MOST}
_OBJECT: Mapping[str, Any] = {"type": "object"}
_LIST: Mapping[str, Any] = {"type": "array", "items": _TEXT, "maxItems": 100_000}

FLAG = Option("true or false", lambda value: isinstance(value, bool), {"type": "boolean"})
TEXT = Option("text of at most 4000 characters", _is_text, _TEXT)
NUMBER = Option("a whole number", _is_number, _WHOLE)
COUNT = Option(
    "a whole number from 0 on", lambda value: _is_number(value) and value >= 0, {**_WHOLE, "minimum": 0}
)
REAL = Option(
    "a number",
    lambda value: not isinstance(value, bool) and isinstance(value, int | float) and _is_plain(value),
    {"type": "number"},
)
TEXTS = Option(
    "a list of texts",
    lambda value: isinstance(value, list | tuple) and len(value) <= 100_000 and all(map(_is_text, value)),
    _LIST,
)
VALUES = Option(
    "names with plain values", lambda value: isinstance(value, Mapping) and _is_plain(value), _OBJECT
)
WORDS = Option(
    "text, a list of texts, or names with texts",
    lambda value: _is_text(value) or TEXTS.fits(value) or VALUES.fits(value),
    {"anyOf": [_TEXT, _LIST, _OBJECT]},
)
RENAMING = Option(
    "patterns with replacements",
    lambda value: isinstance(value, Mapping) and all(_is_text(a) and _is_text(b) for a, b in value.items()),
    {**_OBJECT, "additionalProperties": _TEXT},
)
STEP = Option(
    "keep, reset or a whole number",
    lambda value: value in ("keep", "reset") or _is_number(value),
    {"anyOf": [{"enum": ["keep", "reset"]}, _WHOLE]},
)
TARGET = Option(
    '{"root": number, "path": relative path}',
    _is_target,
    {
        **_OBJECT,
        "properties": {"root": _WHOLE, "path": _TEXT},
        "required": ["root", "path"],
        "additionalProperties": False,
    },
)
CHECKPOINT = Option(
    "the number of a checkpoint", lambda value: _is_number(value) and value > 0, {**_WHOLE, "minimum": 1}
)
MAP = Option(
    "the name of a map that `statekit maps` lists, or a map as data", _is_map, {"anyOf": [_TEXT, _OBJECT]}
)
BYTES = Option(
    f"a number of bytes from 1 MiB to {BUDGET_BYTES}",
    lambda value: _is_number(value) and 2**20 <= value <= BUDGET_BYTES,
    {"type": "integer", "minimum": 2**20, "maximum": BUDGET_BYTES},
)
REGION = Option(
    "first row, row behind the last, first column, column behind the last",
    lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 4
        and all(_is_number(item) for item in value)
        and 0 <= value[0] < value[1]
        and 0 <= value[2] < value[3]
    ),
    {"type": "array", "items": {**_WHOLE, "minimum": 0}, "minItems": 4, "maxItems": 4},
)
THREADS = Option(
    "a whole number from 1 to 256",
    lambda value: _is_number(value) and 1 <= value <= 256,
    {"type": "integer", "minimum": 1, "maximum": 256},
)

ENGINE = Option(
    "processes:N with N from 1 to 64",
    lambda value: _is_text(value) and ENGINES.fullmatch(value) is not None,
    {"type": "string", "pattern": f"^{ENGINES.pattern}$"},
)


class Target(TypedDict):
    """Where a job writes: beneath which root, and the path relative to it."""

    root: int
    path: str


class SubjectOptions(HintOptions, total=False):
    """What a checkpoint's files don't say. The service knows each checkpoint's container, and follows no link."""

    optimizer: str | None


class InspectOptions(SubjectOptions, total=False):
    """Options of `inspect`."""

    layout: Annotated[str, TEXT]
    filter: Annotated[str, TEXT]
    stats: Annotated[bool, FLAG]


class _Parameter(TypedDict):
    path: Annotated[str, TEXT]


class ParameterOptions(_Parameter, SubjectOptions, total=False):
    """Options of `parameter`."""

    layout: Annotated[str, TEXT]
    slot: Annotated[str, TEXT]
    region: Annotated[Sequence[int], REGION]


class CheckOptions(TypedDict, total=False):
    """Options of `check`."""

    budget: Annotated[int, BYTES]


class SealOptions(TypedDict, total=False):
    """Options of `seal`."""

    renew: Annotated[Sequence[str], TEXTS]
    budget: Annotated[int, BYTES]


class DoctorOptions(SubjectOptions, total=False):
    """Options of `doctor`."""

    ignore: Annotated[Sequence[str], TEXTS]


class _MapOptions(TypedDict, total=False):
    map: Annotated[str | Mapping[str, Any], MAP]
    config: Annotated[Mapping[str, Any], VALUES]


class DiffOptions(_MapOptions, SubjectOptions, total=False):
    """Options of `diff`."""

    path: Annotated[str, TEXT]
    slot: Annotated[str, TEXT]


_Exactness: TypeAlias = Annotated[
    Literal["bitwise", "rounding", "statistics", "estimate", "lossy"],
    _one_of("bitwise", "rounding", "statistics", "estimate", "lossy"),
]
_Step: TypeAlias = Annotated[int | Literal["keep", "reset"], STEP]
_Words: TypeAlias = Annotated[str | Sequence[str] | Mapping[str, Any], WORDS]


class VerifyOptions(_MapOptions, SubjectOptions, total=False):
    """Options of `verify`."""

    steps: Annotated[int, COUNT]
    gradients: Annotated[Literal["all", "random", "adversarial"], _one_of("all", "random", "adversarial")]
    backend: Annotated[
        Literal["numpy", "torch", "jax", "tensorflow"], _one_of("numpy", "torch", "jax", "tensorflow")
    ]
    everything: Annotated[bool, FLAG]
    seed: Annotated[int, NUMBER]
    require: _Exactness
    step_offset: _Step


class _Convert(TypedDict):
    target: Annotated[Target, TARGET]


class ConvertOptions(_Convert, _MapOptions, SubjectOptions, total=False):
    """Options of `convert`."""

    to: Annotated[str, TEXT]
    layout: Annotated[str, TEXT]
    step_offset: _Step
    require: _Exactness
    like: Annotated[int, CHECKPOINT]
    rename: Annotated[Mapping[str, str], RENAMING]
    schedule_step: _Step
    slot_policy: _Words
    params_only: Annotated[bool, FLAG]
    state_only: Annotated[bool, FLAG]
    drop_slots_of: _Words
    param_dtype: Annotated[str, TEXT]
    slot_dtype: _Words
    loss_scale: Annotated[float, REAL]
    init_missing: Annotated[int, CHECKPOINT]
    replace: Annotated[bool, FLAG]
    replace_foreign: Annotated[bool, FLAG]
    threads: Annotated[int, THREADS]
    on: Annotated[str, ENGINE]
    dry_run: Annotated[bool, FLAG]
    verify: Annotated[bool, FLAG]


class ThinOptions(SubjectOptions, total=False):
    """Options of `thin`."""

    target: Annotated[Target, TARGET]
    to: Annotated[str, TEXT]
    dry_run: Annotated[bool, FLAG]


FORMS: Mapping[Kind, Any] = {
    "inspect": InspectOptions,
    "parameter": ParameterOptions,
    "check": CheckOptions,
    "seal": SealOptions,
    "doctor": DoctorOptions,
    "diff": DiffOptions,
    "verify": VerifyOptions,
    "convert": ConvertOptions,
    "thin": ThinOptions,
}
"""The options of each kind, as a client's type checker knows them; what follows is read off them."""
_FORMS: Mapping[str, Option] = {
    "text": TEXT,
    "number": COUNT,
    "flag": FLAG,
    "bytes": BYTES,
    "values": VALUES,
    "names": TEXTS,
    "call": TEXT,
}
"""The form of an option of `CheckpointRef`, by its kind."""


def _form(name: str, annotation: Any) -> Option:
    """Returns the form of an option: as it is written here, or as `CheckpointRef` has the field."""
    if hasattr(annotation, "__metadata__"):
        written: Option = annotation.__metadata__[0]
        return written
    declared = option(name)
    return _one_of(*declared.choices) if declared.choices else _FORMS[declared.kind]


OPTIONS: Mapping[Kind, Mapping[str, Option]] = {
    kind: {name: _form(name, part) for name, part in get_type_hints(form, include_extras=True).items()}
    for kind, form in FORMS.items()
}
FILES = ("like", "init_missing")
"""Options that name a further checkpoint, which the job reads."""
NEEDED: Mapping[Kind, tuple[str, ...]] = {
    kind: tuple(sorted(form.__required_keys__)) for kind, form in FORMS.items()
}


def schema(kind: Kind) -> dict[str, Any]:
    """Returns the options of a kind of job as JSON Schema; one that is null says nothing."""
    return {
        "type": "object",
        "description": f"Options of `{kind}`.",
        "properties": {
            name: {"description": option.expected, **option.schema}
            if name in NEEDED[kind]
            else {"description": option.expected, "anyOf": [option.schema, {"type": "null"}]}
            for name, option in OPTIONS[kind].items()
        },
        "required": list(NEEDED[kind]),
        "additionalProperties": False,
    }


def checked(kind: str, subjects: Collection[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options without those that say nothing, which fit a kind of job.

    Raises:
        UsageError: There is no such kind, it is about another number of checkpoints, or options don't fit; says all.
    """
    if kind not in KINDS:
        raise UsageError(
            "There is no such kind of job.",
            place="kind",
            expected=", ".join(KINDS),
            found=kind[:100],
            remedy=meant(kind, KINDS),
        )
    name: Kind = kind  # type: ignore[assignment]  # that is what was just checked
    least, most = KINDS[name]
    if len(subjects) < least or (most is not None and len(subjects) > most) or len(subjects) > MOST_SUBJECTS:
        raise UsageError(
            f"A job of the kind {kind} is about another number of checkpoints.",
            place="subjects",
            expected=f"{least}" if least == most else f"{least} to {MOST_SUBJECTS}",
            found=len(subjects),
        )
    given = {key: value for key, value in options.items() if value is not None}
    faults = Faults(_option_faults(name, given, len(subjects)))
    for number, times in Counter(subjects).items():
        if times > 1:
            faults.add(f"is named {times} times: a job is about each checkpoint once", f"subjects: {number}")
    if not faults and len(json.dumps(given)) > MOST_BYTES:
        faults.add(f"are longer than {MOST_BYTES} bytes", "options")
    faults.check(
        UsageError,
        f"The job can't be taken as it is asked for ({kind})",
        expected=", ".join(OPTIONS[name]),
        place="options",
    )
    return given


def _option_faults(kind: Kind, given: Mapping[str, Any], subjects: int) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with options of a job about some number of checkpoints, and where."""
    offered = OPTIONS[kind]
    for key, value in given.items():
        if key not in offered:
            yield "is no option of this kind of job", f"{key[:100]}"
        elif not offered[key].fits(value):
            yield f"isn't what it must be: {offered[key].expected}", key
    for key in NEEDED.get(kind, ()):
        if key not in given:
            yield f"is missing: {offered[key].expected}", key
    yield from _pair_faults(kind, given, subjects)


def _pair_faults(kind: Kind, given: Mapping[str, Any], subjects: int) -> Iterator[tuple[str, str]]:
    """Yields options that do not go together."""
    if given.get("verify") and given.get("dry_run"):
        yield "goes with what is written, not with dry_run", "verify"
    if "on" in given and given.keys() & {"replace", "replace_foreign", "threads"}:
        yield "goes with none of replace, replace_foreign and threads: workers write a new target", "on"
    # A region is of one tensor of one checkpoint.
    if kind == "parameter" and "slot" in given and "region" not in given:
        yield "says nothing without a region: all slots are looked at", "slot"
    if kind == "parameter" and "region" in given and subjects > 1:
        yield "is of one checkpoint alone", "region"
