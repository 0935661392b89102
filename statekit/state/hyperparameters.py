"""What one update needs to know of its group: hyperparameters, settled by the variant where nobody can set them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from statekit.errors import StateError, UnknownRuleError
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, TrainState
from statekit.tensors.patterns import is_found

T = TypeVar("T")


def settled(kind: type[T], schema: str, variant: str, group: Group) -> T:
    """Returns a group's hyperparameters as a record; options that the variant lacks have the value that describes it.

    Args:
        kind: A dataclass whose fields are canonical names; others have a default, which stays. A field of type
            `float` may not be None.
        schema: Name of the schema.
        variant: Name of the variant in it.
        group: The group.

    Raises:
        UnknownRuleError: A hyperparameter that the variant offers is unknown; lists all that are.
    """
    rules, given = load_schema(schema), group.hyperparameters
    offered, values = rules.variant(variant)["defaults"], {**rules.settings(variant), **given}
    needed = [field for field in fields(kind) if field.default is MISSING]  # type: ignore[arg-type]  # a dataclass
    missing = [
        field.name
        for field in needed
        if (field.name in offered and field.name not in given)
        or (field.type == "float" and values[field.name] is None)
    ]
    if missing:
        raise UnknownRuleError(
            "The step needs hyperparameters that the checkpoint doesn't say.",
            place=next(iter(group.paths), None),
            expected=", ".join(missing),
            remedy=f"give them: --hparams {missing[0]}=VALUE, or load_optimizer(..., {missing[0]}=VALUE)",
        )
    return kind(**{field.name: values[field.name] for field in needed})


Alike: TypeAlias = Literal["equal", "off", "as float32"]
"""How values of a hyperparameter are alike. `off`: with either it does nothing; `as float32`: as some keep it."""


def alike(spec: Mapping[str, Any], left: Any, right: Any) -> Alike | None:
    """Returns how two values of a hyperparameter are alike; None if they aren't.

    It is the one comparison of hyperparameters: of a live run with its checkpoint, of two checkpoints, of a conversion
    with its source, and of a rule with another. What it comes to is theirs to judge.

    Args:
        spec: What the schema says of the hyperparameter; nothing where there is none.
        left: A value.
        right: Another.

    Example:
        >>> decay = load_schema("adamw").hyperparameters["weight_decay_rate"]
        >>> alike(decay, None, 0.0), alike(decay, 0.1, 0.10000000149011612), alike(decay, 0.1, 0.2)
        ('off', 'as float32', None)
    """
    if _is_same(left, right):
        return "equal"
    off = spec.get("off", ())
    if among(left, off) and among(right, off):
        return "off"
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        ways = {alike(spec, *pair) for pair in zip(left, right, strict=True)}
        return None if None in ways else next(iter(ways - {"equal"}), "equal")
    if not (isinstance(left, float) and isinstance(right, float)):
        return None
    with np.errstate(over="ignore"):
        rounded = float(np.float32(left)) == right or left == float(np.float32(right))
    return "as float32" if rounded else None


def among(value: Any, values: Iterable[Any]) -> bool:
    """Tells whether a value is one of some; True isn't 1."""
    return any(_is_same(value, other) for other in values)


def _is_same(left: Any, right: Any) -> bool:
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


Exclusion = Sequence[str] | Mapping[str, bool] | None


def _by_name(path: str, excluded: Exclusion) -> bool:
    return _by_path(path, excluded, path)


def _by_last_name(path: str, excluded: Exclusion) -> bool:
    return _by_path(path, excluded, last_name(path))


def last_name(path: str) -> str:
    """Returns the last part of a path."""
    return path.rpartition("/")[2]


def _by_path(path: str, excluded: Exclusion, name: str) -> bool:
    """Tells whether a parameter is excluded, by its path or by a pattern that matches its name."""
    if not isinstance(excluded, Mapping):
        patterns = excluded if isinstance(excluded, Sequence) else [excluded] if excluded else []
        return any(is_found(pattern, name, "exclude_from_weight_decay") for pattern in patterns)
    if path not in excluded:
        raise UnknownRuleError(
            "Nothing tells whether a parameter is kept from weight decay.",
            place=path,
            expected=f"exclude_from_weight_decay with true or false for {path}",
        )
    return bool(excluded[path])


IS_EXCLUDED: Mapping[str, Callable[[str, Exclusion], bool]] = {
    "name_regex": _by_name,
    "last_name_regex": _by_last_name,
    "mask": _by_name,
    "groups": lambda path, excluded: False,
    "absent": lambda path, excluded: False,
}
"""Whether a parameter is kept from weight decay, by `decay_exclusions` and `exclude_from_weight_decay`.

What is said by path goes by path, and regexes go by the name, whichever of them the variant itself has.

Raises:
    UnknownRuleError: It is said by path, and not of this one.
    StateError: It is a list of something else than regexes.
"""


def require_float32(state: TrainState, path: str) -> None:
    """Raises UnknownRuleError if a parameter isn't float32."""
    dtype = state.params[path].dtype.name
    if dtype != "float32":
        raise UnknownRuleError(
            "The step doesn't reproduce this variant's rounding in other dtypes than float32 yet.",
            place=path,
            expected="float32",
            found=dtype,
            remedy="step the float32 masters, if the run kept them",
        )


def require_slots(state: TrainState, path: str, names: Iterable[str]) -> None:
    """Raises StateError if a parameter lacks one of the slots that the step moves."""
    slots = state.slots.get(path, {})
    missing = [name for name in names if name not in slots]
    if missing:
        raise StateError(
            "A parameter lacks slots that its optimizer moves.",
            place=path,
            expected=", ".join(missing),
            found=", ".join(slots) or "none",
            remedy="check that the variant and its switches are those of the run",
        )


def require_whole_updates(micro_batches: int | None) -> None:
    """Raises UnknownRuleError if the optimizer accumulates gradients over several calls."""
    if micro_batches:
        raise UnknownRuleError(
            "The step updates with every gradient; it doesn't accumulate them.",
            expected="gradient_accumulation_steps null",
            found=micro_batches,
            remedy="give it the mean of the accumulated gradients",
        )
