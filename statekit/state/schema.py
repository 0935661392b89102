"""Optimizer schemas: what each optimizer keeps, read from `schemas/*.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from statekit.errors import NotFoundError, meant


@dataclass(frozen=True)
class SlotSchema:
    """One slot of an optimizer.

    Attributes:
        name: Canonical name, e.g. `v_row`.
        symbol: How papers write it.
        shape: Shape rule: `parameter`, `row` (parameter's axes minus COLUMN), `column` (minus ROW),
            `scalar_per_parameter` ((1,)*rank), `scale_history`, `group`, `group_history`. `optimizer.schema.json`
            says what each means.
        dtype: A dtype, `parameter`, or the name of the hyperparameter or difference that says it.
        init: Initial value: a number, a formula, or None where the slot first exists with the value of its recurrence.
        recurrence: Its update, in plain mathematics.
        aliases: Variant -> native name.
        switch: Hyperparameter that is on where the slot exists; "" if none decides.
    """

    name: str
    symbol: str
    shape: str
    dtype: str
    init: float | str | None
    recurrence: str
    aliases: Mapping[str, str]
    switch: str = ""


@dataclass(frozen=True)
class OptimizerSchema:
    """One optimizer: slots, hyperparameters, variants, step rule and sources, as `data` has them in full."""

    name: str
    slots: Mapping[str, SlotSchema]
    hyperparameters: Mapping[str, Mapping[str, Any]]
    variants: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Any]

    def variant(self, name: str) -> Mapping[str, Any]:
        """Returns one variant: its constants, defaults, notes and sources.

        Raises:
            NotFoundError: No variant of that name.
        """
        if name not in self.variants:
            known = ", ".join(self.variants)
            raise NotFoundError(
                f"{self.name} has no such variant.",
                expected=known,
                found=name,
                remedy=meant(name, self.variants),
            )
        return self.variants[name]

    def settings(self, variant: str) -> dict[str, Any]:
        """Returns every hyperparameter as a variant has it unless told otherwise.

        One that the variant doesn't offer has the value that describes what the variant does.

        Raises:
            NotFoundError: No variant of that name.

        Example:
            >>> load_schema("adafactor").settings("torch")["multiply_by_parameter_scale"]
            True
        """
        own = {**self.variant(variant)["fixed"], **self.variant(variant)["defaults"]}
        return {
            name: own[name] if name in own else spec["if_absent"]
            for name, spec in self.hyperparameters.items()
        }

    def canonical(self, variant: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns hyperparameters in canonical names, from a system's own arguments or from canonical ones.

        Example:
            >>> load_schema("adamw").canonical("torch", {"betas": [0.9, 0.95], "eps": 1e-08, "foreach": None})
            {'beta1': 0.9, 'beta2': 0.95, 'epsilon': 1e-08}
        """
        found = {}
        for name in self.variant(variant)["defaults"]:
            argument, index, sign = self._spelling(variant, name)
            if argument in arguments:
                value = arguments[argument] if index is None else arguments[argument][index]
                found[name] = -value if sign < 0 and value is not None else value
            elif name in arguments:
                found[name] = arguments[name]
        return found

    def native(self, variant: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a variant's own arguments for canonical hyperparameters; those that it doesn't offer are left out.

        Example:
            >>> load_schema("adamw").native("torch", {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-08, "nesterov": False})
            {'betas': (0.9, 0.95), 'eps': 1e-08}
        """
        found: dict[str, Any] = {}
        for name in self.variant(variant)["defaults"]:
            if name not in values:
                continue
            argument, index, sign = self._spelling(variant, name)
            value = -values[name] if sign < 0 and values[name] is not None else values[name]
            found[argument] = value if index is None else (*found.get(argument, ()), value)
        return found

    def _spelling(self, variant: str, name: str) -> tuple[str, int | None, int]:
        """Returns a variant's argument for a hyperparameter, the place in it if it is a sequence, and the sign."""
        spelling = self.hyperparameters[name]["native"].get(variant, {})
        own = name if "note" in spelling else str(spelling.get("name", name))
        argument, _, index = own.rstrip("]").partition("[")
        return argument, int(index) if index else None, -1 if "sign" in spelling else 1

    def fault(self, name: str, value: Any) -> str:
        """Returns what is wrong with a hyperparameter's value, by its type and range; "" if nothing is.

        Example:
            >>> load_schema("adafactor").fault("decay_rate", "0.8")
            'expected number'
        """
        if name not in self.hyperparameters:
            return f"{self.name} has no such hyperparameter"
        kinds, limits = self.hyperparameters[name]["type"], self.hyperparameters[name].get("range", {})
        is_bool = isinstance(value, bool)
        if not any(isinstance(value, _KINDS[kind]) and is_bool == (kind == "boolean") for kind in kinds):
            return f"expected {' or '.join(kinds)}"
        if "values" in limits and value is not None and value not in limits["values"]:
            return f"expected one of {', '.join(map(str, limits['values']))}"
        if is_bool or not isinstance(value, (int, float)):
            return ""
        inside = (
            limits.get("minimum", value) <= value <= limits.get("maximum", value)
            and value > limits.get("exclusive_minimum", -math.inf)
            and value < limits.get("exclusive_maximum", math.inf)
        )
        return "" if inside else f"expected {', '.join(f'{k} {v}' for k, v in limits.items())}"


_KINDS: dict[str, tuple[type, ...]] = {
    "number": (int, float), "integer": (int,), "boolean": (bool,), "string": (str,),
    "null": (type(None),), "array": (list, tuple), "object": (dict,),
}  # fmt: skip


def schema_names() -> list[str]:
    """Returns the names of all schemas."""
    files = resources.files("statekit.schemas").iterdir()
    return sorted(
        f.name[:-5] for f in files if f.name.endswith(".json") and not f.name.endswith(".schema.json")
    )


def all_variants(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the variants of schemas, for layouts that hold the state of any."""
    return {name: tuple(load_schema(name).variants) for name in names}


@cache
def load_schema(name: str) -> OptimizerSchema:
    """Reads one schema.

    Raises:
        NotFoundError: No schema of that name.
    """
    if name not in schema_names():
        raise NotFoundError(
            "There is no such optimizer schema.",
            expected=", ".join(schema_names()),
            found=name,
            remedy=meant(name, schema_names()),
        )
    text = resources.files("statekit.schemas").joinpath(f"{name}.json").read_text(encoding="utf-8")
    data = json.loads(text)
    slots = {
        slot: SlotSchema(
            slot,
            s["symbol"],
            s["shape"],
            s["dtype"],
            s["init"],
            s["recurrence"],
            s["aliases"],
            s.get("switch", ""),
        )
        for slot, s in data["slots"].items()
    }
    return OptimizerSchema(name, slots, data["hyperparameters"], data["variants"], data)
