"""What may be said of a job beside its checkpoints, and of which form: no option names a file outside of the roots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from statekit.errors import Faults, UsageError, meant
from statekit.service.records import KINDS, Kind

MOST_BYTES = 256 * 1024
"""Bytes of JSON that the options of a job take at most."""
BUDGET_BYTES = 8 * 2**30
"""What `budget` may be at most."""


class Option(NamedTuple):
    """Of which form an option is.

    Attributes:
        expected: The form in words.
        fits: Whether a value has it.
    """

    expected: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 4000 and "\0" not in value


def _is_number(value: Any, most: int = 2**53) -> bool:
    return type(value) is int and abs(value) <= most


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(_is_text(key) and _is_plain(one) for key, one in value.items())
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
    return Option(f"one of {', '.join(names)}", lambda value: value in names)


FLAG = Option("true or false", lambda value: isinstance(value, bool))
TEXT = Option("text of at most 4000 characters", _is_text)
NUMBER = Option("a whole number", _is_number)
COUNT = Option("a whole number from 0 on", lambda value: _is_number(value) and value >= 0)
REAL = Option(
    "a number",
    lambda value: not isinstance(value, bool) and isinstance(value, int | float) and _is_plain(value),
)
TEXTS = Option(
    "a list of texts",
    lambda value: isinstance(value, list | tuple) and len(value) <= 100_000 and all(map(_is_text, value)),
)
VALUES = Option("names with plain values", lambda value: isinstance(value, Mapping) and _is_plain(value))
WORDS = Option(
    "text, a list of texts, or names with texts",
    lambda value: _is_text(value) or TEXTS.fits(value) or VALUES.fits(value),
)
RENAMING = Option(
    "patterns with replacements",
    lambda value: isinstance(value, Mapping) and all(_is_text(a) and _is_text(b) for a, b in value.items()),
)
STEP = Option("keep, reset or a whole number", lambda value: value in ("keep", "reset") or _is_number(value))
TARGET = Option('{"root": number, "path": relative path}', _is_target)
CHECKPOINT = Option("the number of a checkpoint", lambda value: _is_number(value) and value > 0)
MAP = Option("the name of a map that `statekit maps` lists, or a map as data", _is_map)
BYTES = Option(
    f"a number of bytes from 1 MiB to {BUDGET_BYTES}",
    lambda value: _is_number(value) and 2**20 <= value <= BUDGET_BYTES,
)

_HINTS: Mapping[str, Option] = {
    "hparams": VALUES,
    "variant": TEXT,
    "param_names": TEXTS,
    "names_from": _one_of("config"),
    "schedule": TEXT,
    "model_key": TEXT,
    "optimizer_key": TEXT,
    "accept_damaged": FLAG,
    "budget": BYTES,
}
_EXACTNESS = _one_of("bitwise", "rounding", "statistics", "estimate", "lossy")

OPTIONS: Mapping[Kind, Mapping[str, Option]] = {
    "inspect": {**_HINTS, "layout": TEXT, "filter": TEXT, "stats": FLAG},
    "parameter": {**_HINTS, "layout": TEXT, "path": TEXT},
    "check": {"budget": BYTES},
    "seal": {"renew": TEXTS, "budget": BYTES},
    "doctor": {**_HINTS, "ignore": TEXTS},
    "diff": {**_HINTS, "map": MAP, "config": VALUES, "path": TEXT, "slot": TEXT},
    "verify": {
        **_HINTS,
        "steps": COUNT,
        "gradients": _one_of("all", "random", "adversarial"),
        "backend": _one_of("numpy", "torch", "jax", "tensorflow"),
        "everything": FLAG,
        "seed": NUMBER,
        "require": _EXACTNESS,
        "map": MAP,
        "config": VALUES,
        "step_offset": STEP,
    },
    "convert": {
        **_HINTS,
        "target": TARGET,
        "to": TEXT,
        "layout": TEXT,
        "step_offset": STEP,
        "require": _EXACTNESS,
        "like": CHECKPOINT,
        "map": MAP,
        "config": VALUES,
        "rename": RENAMING,
        "schedule_step": STEP,
        "slot_policy": WORDS,
        "params_only": FLAG,
        "state_only": FLAG,
        "drop_slots_of": WORDS,
        "param_dtype": TEXT,
        "slot_dtype": WORDS,
        "loss_scale": REAL,
        "init_missing": CHECKPOINT,
        "replace": FLAG,
        "replace_foreign": FLAG,
        "threads": Option(
            "a whole number from 1 to 256", lambda value: _is_number(value) and 1 <= value <= 256
        ),
        "dry_run": FLAG,
    },
    "thin": {**_HINTS, "target": TARGET, "to": TEXT, "dry_run": FLAG},
}
NEEDED: Mapping[Kind, tuple[str, ...]] = {"convert": ("target",), "parameter": ("path",)}


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
    if len(subjects) < least or (most is not None and len(subjects) > most) or len(subjects) > 1000:
        raise UsageError(
            f"A job of the kind {kind} is about another number of checkpoints.",
            place="subjects",
            expected=f"{least}" if least == most else f"{least} or more",
            found=len(subjects),
        )
    known, faults = OPTIONS[name], Faults()
    given = {key: value for key, value in options.items() if value is not None}
    for key, value in given.items():
        if key not in known:
            faults.add("is no option of this kind of job", f"{key[:100]}")
        elif not known[key].fits(value):
            faults.add(f"isn't what it must be: {known[key].expected}", key)
    for key in NEEDED.get(name, ()):
        if key not in given:
            faults.add(f"is missing: {known[key].expected}", key)
    if not faults and len(json.dumps(given)) > MOST_BYTES:
        faults.add(f"are longer than {MOST_BYTES} bytes", "options")
    faults.check(
        UsageError,
        f"The options of the job can't be taken ({kind})",
        expected=", ".join(known),
        place="options",
    )
    return given
