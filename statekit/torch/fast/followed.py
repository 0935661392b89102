"""What a fast path follows of a rule: only that it computes, and whatever else there is goes the reference text's way.

A path lists the hyperparameters, forms and slots that it follows. So one that a schema gets later is left to the text
until a path lists it: silence never means that it may be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema

Values: TypeAlias = tuple[Any, ...] | None
"""Those that are followed; None: all that there may be."""
_UP_TO_ROUNDING = ("none", "rounding")
"""Effects of a difference that a path may leave out of account: it is held to the text up to rounding."""


@dataclass(frozen=True)
class Followed:
    """What a fast path follows.

    Attributes:
        hyper: Hyperparameter -> values. One that isn't here must be as in a variant that doesn't have it, by
            `if_absent` of the schema.
        forms: Constant of the variant -> forms. One that isn't here may make no difference but in rounding, by `effect`
            of the schema.
        slots: Slots that it moves, or that only exist with hyperparameters which it leaves to the text. A variant whose
            parameters may have others is the text's.
    """

    hyper: Mapping[str, Values]
    forms: Mapping[str, Values]
    slots: tuple[str, ...]

    def fits(self, schema: str, variant: str, hyper: Any) -> bool:
        """Tells whether the path follows a variant's rule with hyperparameters as the optimizer's `settle` has them."""
        rules, constants = load_schema(schema), variant_constants(schema, variant)
        hyperparameters, differences = rules.hyperparameters, rules.data["differences"]
        return (
            {*rules.kept(variant)} <= {*self.slots}
            and all(
                _among(getattr(hyper, field.name), self.hyper[field.name])
                if field.name in self.hyper
                else _is_absent(hyperparameters.get(field.name, {}), getattr(hyper, field.name))
                for field in fields(hyper)
            )
            and all(
                _among(form, self.forms[name])
                if name in self.forms
                else differences.get(name, {}).get("effect") in _UP_TO_ROUNDING
                for name, form in constants.items()
            )
        )


def _among(value: Any, values: Values) -> bool:
    return values is None or value in values


def _is_absent(spec: Mapping[str, Any], value: Any) -> bool:
    return "if_absent" in spec and bool(value == spec["if_absent"])
