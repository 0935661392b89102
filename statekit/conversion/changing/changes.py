"""What a user wants changed of a run as it goes on: slots, counts, dtypes, the scale of its loss; and what was.

Whatever reads such wishes, the command line, `statekit.convert` or a `load_optimizer`, goes through `Changes.of`; they
are carried out in `statekit.conversion.changing.changed`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

from statekit.errors import Faults, UsageError, check_name, some
from statekit.files.tree import Place
from statekit.state.exactness import Exactness
from statekit.state.train_state import StepOffset

Policy: TypeAlias = Literal["keep", "drop", "reset"]
POLICIES = ("keep", "drop", "reset")
COUNT = "count"
"""What `reset` of a slot policy may name beside slots: the updates done, from which bias corrections count."""
AT = "@"
"""Between a pattern of slots in a policy and the parameters, or the label, that it is for."""
FLOATS = ("float32", "bfloat16", "float16", "float64")
"""The dtypes that may be asked for."""


@dataclass(frozen=True)
class Changes:
    """What a user wants changed.

    Attributes:
        schedule_step: Where the learning-rate schedule stands: `keep`, `reset` (at its beginning), or a number.
        slot_policy: Pattern of canonical slot names, or `count` -> `keep`, `drop` or `reset`; later ones win.
            `v@encoder/*` is of the parameters that fit, or of the groups with such a label; `*@LABEL` is their count
            too.
        params_only: Whether the optimizer is left behind.
        state_only: Whether the parameters are left behind.
        drop_slots_of: Patterns of parameters that are frozen: they keep their values, and nothing moves them.
        param_dtype: The dtype of parameters; as they are if None.
        slot_dtype: Pattern of slot names -> their dtype.
        loss_scale: How many times as large gradients are from now on.
        init_missing: A file of the target's model: what it has and the source lacks begins anew, with its values.
    """

    schedule_step: StepOffset = "keep"
    slot_policy: Mapping[str, Policy] = field(default_factory=dict)
    params_only: bool = False
    state_only: bool = False
    drop_slots_of: tuple[str, ...] = ()
    param_dtype: str | None = None
    slot_dtype: Mapping[str, str] = field(default_factory=dict)
    loss_scale: float | None = None
    init_missing: Place | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Changes | None:
        """Returns what somebody says, as Python or the command line has it; None if that is nothing.

        A policy is `reset:v`, `drop:m` or `keep`, several of them joined by commas or in a list, or a mapping; a
        slot's dtype `bfloat16`, `m=bfloat16`, or a mapping.

        Args:
            options: Field -> value.

        Raises:
            UsageError: A value makes no sense; lists every one.

        Example:
            >>> Changes.of({"slot_policy": "reset:v*,drop:m"}).slot_policy
            {'v*': 'reset', 'm': 'drop'}
        """
        faults = Faults()
        values = {
            check_name("change", name, READ, "changes"): READ[name](name, value, faults)
            for name, value in options.items()
        }
        faults.check(UsageError, "What shall be changed of the run can't be read")
        changes = cls(**values)
        if changes == cls():
            return None
        if changes.params_only and (others := [name for name in changes.options if name not in _OF_PARAMS]):
            raise UsageError(
                "Without its slots nothing can be changed of an optimizer.",
                place="--params-only",
                found=", ".join(map(option, others)),
                remedy="leave it out",
            )
        return changes

    @property
    def options(self) -> list[str]:
        """The fields that say something."""
        usual = Changes()
        return [
            setting.name
            for setting in fields(self)
            if getattr(self, setting.name) != getattr(usual, setting.name)
        ]

    def words(self) -> list[str]:
        """Returns the words of the command line that say the same.

        Example:
            >>> Changes(slot_policy={"v*": "reset"}, params_only=True, slot_dtype={"m": "bfloat16"}).words()
            ['--slot-policy', 'reset:v*', '--params-only', '--slot-dtype', 'm=bfloat16']
        """
        words = []
        for name in self.options:
            value = getattr(self, name)
            if isinstance(value, Mapping):
                pairs = [
                    f"{to}:{slot}" if name == "slot_policy" else f"{slot}={to}" for slot, to in value.items()
                ]
            else:
                pairs = [*value] if isinstance(value, tuple) else [str(value)]
            words += (
                [option(name)] if value is True else [word for pair in pairs for word in (option(name), pair)]
            )
        return words

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.options}
        return {
            name: dict(value)
            if isinstance(value, Mapping)
            else list(value)
            if isinstance(value, tuple)
            else value.name  # a plan says nothing of this machine
            if isinstance(value, Path)
            else value
            for name, value in values.items()
        }


_OF_PARAMS = ("params_only", "param_dtype")


def patterns(name: str, value: Any) -> tuple[str, ...]:
    """Returns patterns of names, as an option has them: one, or several.

    Raises:
        UsageError: They aren't text.
    """
    faults = Faults()
    read = _patterns(name, value, faults)
    faults.check(UsageError, "What shall be changed of the run can't be read")
    return read


def option(name: str) -> str:
    """Returns what the command line calls a field."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Change:
    """A change of the run that an option of the user made.

    Attributes:
        asked: The option.
        said: What was done, and what follows from it, in a sentence.
        names: The parameters, slots or counts that it touches, by canonical names.
        exactness: How exactly the run goes on because of it, had nobody asked.
    """

    asked: str
    said: str
    names: tuple[str, ...]
    exactness: Exactness

    def __str__(self) -> str:
        return f"{self.asked}: {self.said}" + (f" ({some(self.names)})" if self.names else "")

    def to_json(self) -> dict[str, Any]:
        """Returns the change as it stands in a plan."""
        return {
            "asked": self.asked,
            "said": self.said,
            "names": list(self.names),
            "exactness": self.exactness.name.lower(),
        }


def _step(name: str, value: Any, faults: Faults) -> StepOffset:
    if value in ("keep", "reset") or (type(value) is int and value >= 0):
        return value  # type: ignore[no-any-return]  # one of the two words, or a number
    faults.add(f"is {value!r:.80}, expected keep, reset, or a number from 0", option(name))
    return "keep"


def _policies(name: str, value: Any, faults: Faults) -> dict[str, Policy]:
    ways: dict[str, Policy] = {}
    for slot, way in _pairs(name, value, ":", faults):
        if way not in POLICIES or (slot is None and way != "keep"):
            faults.add(f"is {way!r:.80}, expected keep, drop:SLOT or reset:SLOT", option(name))
        elif slot is not None:
            ways[slot] = way
    return ways


def _slot_dtypes(name: str, value: Any, faults: Faults) -> dict[str, str]:
    dtypes = {}
    for slot, dtype in _pairs(name, value, "=", faults):
        if (slot_dtype := _dtype(name, dtype, faults)) is not None:
            dtypes[slot or "*"] = slot_dtype
    return dtypes


def _pairs(name: str, value: Any, between: str, faults: Faults) -> Iterator[tuple[str | None, Any]]:
    """Yields slot and what is said of it; of all slots, None."""
    if isinstance(value, Mapping):
        yield from ((str(slot), word) for slot, word in value.items())
        return
    for part in (piece for text in _listed(name, value, faults) for piece in str(text).split(",")):
        first, word, second = part.strip().partition(between)
        if between == ":":
            yield (second, first) if word else (None, first)
        else:
            yield (first, second) if word else (None, first)


def _listed(name: str, value: Any, faults: Faults) -> list[Any]:
    """Returns what is said in one text or in several; nothing if that is None."""
    if value is None or isinstance(value, str):
        return [value] if value else []
    if isinstance(value, Iterable):
        return list(value)
    faults.add(f"is {value!r:.80}, expected text, or a list of it", option(name))
    return []


def _dtype(name: str, value: Any, faults: Faults) -> str | None:
    if value is None or value in FLOATS:
        return None if value is None else str(value)
    faults.add(f"is {value!r:.80}, expected {', '.join(FLOATS)}", option(name))
    return None


def _flag(name: str, value: Any, faults: Faults) -> bool:
    if not isinstance(value, bool):
        faults.add(f"is {value!r:.80}, expected true or false", option(name))
    return value is True


def _patterns(name: str, value: Any, faults: Faults) -> tuple[str, ...]:
    listed = _listed(name, value, faults)
    if not all(isinstance(pattern, str) and pattern for pattern in listed):
        faults.add("expected patterns of names", option(name))
    return tuple(map(str, listed))


def _scale(name: str, value: Any, faults: Faults) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        faults.add(f"is {value!r:.80}, expected a number above 0", option(name))
        return None
    return float(value)


def _path(name: str, value: Any, faults: Faults) -> Place | None:
    if isinstance(value, (str, PathLike)):
        return Path(value)
    if value is not None:
        faults.add(f"is {value!r:.80}, expected the path of a file", option(name))
    return None


READ: Mapping[str, Any] = {
    "schedule_step": _step,
    "slot_policy": _policies,
    "params_only": _flag,
    "state_only": _flag,
    "drop_slots_of": _patterns,
    "param_dtype": _dtype,
    "slot_dtype": _slot_dtypes,
    "loss_scale": _scale,
    "init_missing": _path,
}
"""How each field of `Changes` is read from what somebody says."""
