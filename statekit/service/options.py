"""What may be said of a job beside its checkpoints, and of which form: no option names a file outside of the roots."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, cast, get_args, get_type_hints

import typing_extensions
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    create_model,
    with_config,
)
from pydantic.fields import FieldInfo

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
_MOST = 2**53
_MOST_CHARACTERS = 4000
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _is_text(value: Any) -> bool:
    """Tells whether it is text that can be written down and answered; lone surrogates cannot."""
    return (
        isinstance(value, str)
        and len(value) <= _MOST_CHARACTERS
        and "\0" not in value
        and not any("\ud800" <= c <= "\udfff" for c in value)
    )


def _is_plain(value: Any, depth: int = DEEPEST) -> bool:
    if isinstance(value, list | tuple):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, Mapping):
        return depth > 0 and all(_is_text(key) and _is_plain(item, depth - 1) for key, item in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or _is_text(value) or (isinstance(value, int) and abs(value) <= _MOST)


def _is_of_others(value: Any) -> bool:
    """Tells whether a list or names have anything but texts."""
    items = (*value, *value.values()) if isinstance(value, Mapping) else value
    return isinstance(value, Mapping | list | tuple) and not all(map(_is_text, items))


def _names_file(value: Any) -> bool:
    """Tells whether it names a file: a map is its text as data, or the name of one of ours."""
    return isinstance(value, str) and (value.endswith((".json", ".json:back")) or bool({*value} & {*"/\\"}))


def _refusing(is_odd: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Returns what refuses an odd value as one fault, where pydantic makes one of each item."""

    def validated(value: Any) -> Any:
        if is_odd(value):
            raise ValueError
        return value

    return validated


_plain = _refusing(lambda value: not _is_plain(value))
_of_texts = _refusing(_is_of_others)
_short = _refusing(lambda value: isinstance(value, Sized) and len(value) > 4)
_Number: TypeAlias = Annotated[int, Field(ge=-_MOST, le=_MOST, description="a whole number")]
_Text: TypeAlias = Annotated[
    str,
    Field(max_length=_MOST_CHARACTERS, pattern=r"^[^\x00]*$", description="text of at most 4000 characters"),
]
_Flag: TypeAlias = Annotated[bool, Field(description="true or false")]
_Count: TypeAlias = Annotated[int, Field(ge=0, le=_MOST, description="a whole number from 0 on")]
_Real: TypeAlias = Annotated[float, AfterValidator(_plain), Field(description="a number")]
_Texts: TypeAlias = Annotated[
    Sequence[_Text], BeforeValidator(_of_texts), Field(max_length=100_000, description="a list of texts")
]
_Values: TypeAlias = Annotated[
    Mapping[str, Any], BeforeValidator(_plain), Field(description="names with plain values")
]
_Words: TypeAlias = Annotated[
    _Text | _Texts | _Values, Field(description="text, a list of texts, or names with texts")
]
_Renaming: TypeAlias = Annotated[
    Mapping[_Text, _Text], BeforeValidator(_of_texts), Field(description="patterns with replacements")
]
_Step: TypeAlias = Annotated[
    _Number | Literal["keep", "reset"], Field(description="keep, reset or a whole number")
]
_Checkpoint: TypeAlias = Annotated[int, Field(ge=1, le=_MOST, description="the number of a checkpoint")]
_Map: TypeAlias = Annotated[
    _Text | _Values,
    AfterValidator(_refusing(_names_file)),
    Field(description="the name of a map that `statekit maps` lists, or a map as data"),
]
_Bytes: TypeAlias = Annotated[
    int,
    Field(ge=2**20, le=BUDGET_BYTES, description=f"a number of bytes from 1 MiB to {BUDGET_BYTES}"),
]
_Region: TypeAlias = Annotated[
    Sequence[_Count],
    BeforeValidator(_short),
    Field(
        min_length=4,
        max_length=4,
        description="first row, row behind the last, first column, column behind the last",
    ),
    AfterValidator(_refusing(lambda value: value[0] >= value[1] or value[2] >= value[3])),
]
_Threads: TypeAlias = Annotated[int, Field(ge=1, le=256, description="a whole number from 1 to 256")]
_Engine: TypeAlias = Annotated[
    str,
    Field(pattern="^processes:([1-9]|[1-5][0-9]|6[0-4])$", description="processes:N with N from 1 to 64"),
]
"""Where a job's workers may run. A task reaches no network, so that it reaches no cluster."""
_Exactness: TypeAlias = Literal["bitwise", "rounding", "statistics", "estimate", "lossy"]


@with_config(_STRICT)
class Target(typing_extensions.TypedDict):
    """Where a job writes: beneath which root, and the path relative to it."""

    root: _Number
    path: _Text


_Target: TypeAlias = Annotated[
    Target,
    BeforeValidator(_short),
    Field(description='{"root": number, "path": relative path}'),
    WithJsonSchema(TypeAdapter(Target).json_schema()),
]


class SubjectOptions(HintOptions, total=False):
    """What a checkpoint's files don't say. The service knows each checkpoint's container, and follows no link."""

    optimizer: _Text


class InspectOptions(SubjectOptions, total=False):
    """Options of `inspect`."""

    layout: _Text
    filter: _Text
    stats: _Flag


class _Parameter(TypedDict):
    path: _Text


class ParameterOptions(_Parameter, SubjectOptions, total=False):
    """Options of `parameter`."""

    layout: _Text
    slot: _Text
    region: _Region


class CheckOptions(TypedDict, total=False):
    """Options of `check`."""

    budget: _Bytes


class SealOptions(TypedDict, total=False):
    """Options of `seal`."""

    renew: _Texts
    budget: _Bytes


class DoctorOptions(SubjectOptions, total=False):
    """Options of `doctor`."""

    ignore: _Texts


class _MapOptions(TypedDict, total=False):
    map: _Map
    config: _Values


class DiffOptions(_MapOptions, SubjectOptions, total=False):
    """Options of `diff`."""

    path: _Text
    slot: _Text


class VerifyOptions(_MapOptions, SubjectOptions, total=False):
    """Options of `verify`."""

    steps: _Count
    gradients: Literal["all", "random", "adversarial"]
    backend: Literal["numpy", "torch", "jax", "tensorflow"]
    everything: _Flag
    seed: _Number
    require: _Exactness
    step_offset: _Step


class _Convert(TypedDict):
    target: _Target


class ConvertOptions(_Convert, _MapOptions, SubjectOptions, total=False):
    """Options of `convert`."""

    to: _Text
    layout: _Text
    step_offset: _Step
    require: _Exactness
    like: _Checkpoint
    rename: _Renaming
    schedule_step: _Step
    slot_policy: _Words
    params_only: _Flag
    state_only: _Flag
    drop_slots_of: _Words
    param_dtype: _Text
    slot_dtype: _Words
    loss_scale: _Real
    init_missing: _Checkpoint
    replace: _Flag
    replace_foreign: _Flag
    threads: _Threads
    on: _Engine
    dry_run: _Flag
    verify: _Flag


class ThinOptions(SubjectOptions, total=False):
    """Options of `thin`."""

    target: _Target
    to: _Text
    dry_run: _Flag


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
_KINDS: Mapping[str, Any] = {
    "text": _Text,
    "number": _Count,
    "flag": _Flag,
    "bytes": _Bytes,
    "values": _Values,
    "names": _Texts,
    "call": _Text,
}
"""The form of an option of `CheckpointRef`, by its kind."""
_HINTS = get_type_hints(HintOptions)


def _field(name: str, annotation: Any, needed: bool) -> tuple[Any, Any]:
    """Returns the field of an option: in the form that is written here, or that `CheckpointRef` has."""
    if name in _HINTS:
        declared, one_of = option(name), cast(Any, Literal)
        annotation = one_of[declared.choices] if declared.choices else _KINDS[declared.kind]
    described = FieldInfo.from_annotation(annotation).description
    described = described or f"one of {', '.join(get_args(annotation))}"  # a Literal describes itself
    if needed:
        return annotation, Field(description=described)
    return annotation | None, Field(default=None, description=described)


def _model(form: Any) -> type[BaseModel]:
    fields: dict[str, Any] = {
        name: _field(name, annotation, name in form.__required_keys__)
        for name, annotation in get_type_hints(form, include_extras=True).items()
    }
    return create_model(form.__name__, __config__=_STRICT, __doc__=form.__doc__, **fields)


MODELS: Mapping[Kind, type[BaseModel]] = {kind: _model(form) for kind, form in FORMS.items()}
"""The same, as they are checked and described."""
_LONG = (f"are longer than {MOST_BYTES} bytes", "options")
FILES = ("like", "init_missing")
"""Options that name a further checkpoint, which the job reads."""


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
    faults = Faults(_option_faults(name, given, len(subjects)) if _is_small(given) else [_LONG])
    for number, times in Counter(subjects).items():
        if times > 1:
            faults.add(f"is named {times} times: a job is about each checkpoint once", f"subjects: {number}")
    faults.check(
        UsageError,
        f"The job can't be taken as it is asked for ({kind})",
        expected=", ".join(MODELS[name].model_fields),
        place="options",
    )
    return given


def _is_small(options: Mapping[str, Any]) -> bool:
    try:
        return len(json.dumps(options, default=repr)) <= MOST_BYTES
    except (RecursionError, ValueError):  # lists within lists, and in themselves
        return False


def _option_faults(kind: Kind, given: Mapping[str, Any], subjects: int) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with options of a job about some number of checkpoints, and where."""
    fields = MODELS[kind].model_fields
    yield from (("is no option of this kind of job", name[:100]) for name in given if name not in fields)
    try:
        MODELS[kind].model_validate({name: given[name] for name in fields if name in given})
    except ValidationError as error:
        faults = {str(fault["loc"][0]): fault["type"] for fault in error.errors()}
        for name, fault in faults.items():
            if fault == "missing" and name not in given:
                yield f"is missing: {fields[name].description}", name
            else:
                yield f"isn't what it must be: {fields[name].description}", name
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
