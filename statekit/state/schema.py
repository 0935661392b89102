"""Optimizer schemas: what each optimizer keeps, read from `schemas/*.json`."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from numbers import Real
from typing import Any

from statekit.errors import Faults, InexactError, NotFoundError, StateError, UnknownRuleError, meant
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import shipped_json
from statekit.tensors.typed import fits

OF_GROUPS = ("group", "group_history")
"""Shape rules of slots that a group has as a whole."""
NATIVE_SHAPE = "native"
"""The shape rule of slots that no schema describes: any shape."""


BESIDE_NARROW = {"master"}
"""Slots that only parameters of low precision have, whatever their group says."""


@dataclass(frozen=True)
class SlotSchema:
    """One slot of an optimizer.

    Attributes:
        name: Canonical name, e.g. `v_row`.
        symbol: How papers write it.
        shape: Shape rule: `parameter`, `row` (parameter's axes minus COLUMN), `column` (minus ROW),
            `scalar_per_parameter` ((1,)*rank), `scale_history`, `group`, `group_history`; `optimizer.schema.json`
            says what each means. `native` is any.
        dtype: A dtype, `parameter`, or the name of the hyperparameter or difference that says it.
        init: Initial value: a number, a formula, or None where the slot first exists with the value of its recurrence.
        recurrence: Its update, in plain mathematics.
        aliases: Variant -> native name.
        fused: Of one number for a parameter: how those of parts make that of a fused one; None of other slots.
        is_always: Whether every parameter that was updated has it.
    """

    name: str
    symbol: str
    shape: str
    dtype: str
    init: float | str | None
    recurrence: str
    aliases: Mapping[str, str]
    fused: str | None = None
    is_always: bool = False


@dataclass(frozen=True)
class OverTensor:
    """What an update computes over a whole parameter, and another once it is fused with others or split.

    Attributes:
        what: What that is, in words.
        enters: Averages of gradients that have taken it in.
        but_for_batch: Whether each place along BATCH axes goes by itself.
    """

    what: str
    enters: tuple[str, ...]
    but_for_batch: bool = False


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
            names = ", ".join(self.variants)
            raise NotFoundError(
                f"{self.name} has no such variant.",
                expected=names,
                found=name,
                remedy=meant(name, self.variants),
            )
        return self.variants[name]

    def kept(self, *variants: str) -> tuple[str, ...]:
        """Returns the slots that parameters may have in one of some variants, those of whole groups left out."""
        return self._kept(variants, of_groups=False)

    def kept_by_groups(self, *variants: str) -> tuple[str, ...]:
        """Returns the slots that groups as a whole may have in one of some variants."""
        return self._kept(variants, of_groups=True)

    def _kept(self, variants: Collection[str], of_groups: bool) -> tuple[str, ...]:
        return tuple(
            name
            for name, slot in self.slots.items()
            if (slot.shape in OF_GROUPS) == of_groups and not slot.aliases.keys().isdisjoint(variants)
        )

    @property
    def stepped(self) -> tuple[str, ...]:
        """The variants by whose rule statekit steps."""
        return tuple(name for name, variant in self.variants.items() if variant["stepped"])

    def settings(self, variant: str) -> dict[str, Any]:
        """Returns every hyperparameter as a variant has it unless told otherwise.

        One that the variant doesn't offer has the value that describes what the variant does.

        Raises:
            NotFoundError: No variant of that name.

        Example:
            >>> load_schema("adafactor").settings("torch")["multiply_by_parameter_scale"]
            True
        """
        values = {**self.variant(variant)["fixed"], **self.variant(variant)["defaults"]}
        return {
            name: values[name] if name in values else spec["if_absent"]
            for name, spec in self.hyperparameters.items()
        }

    def over_tensor(self, variant: str | None, settings: Mapping[str, Any]) -> tuple[OverTensor, ...]:
        """Returns the computations of an update over a whole parameter that these hyperparameters allow.

        Args:
            variant: Whose update; where nobody knows, BATCH axes may be as any other.
            settings: Hyperparameters.

        Example:
            >>> settings = {"clipnorm": None, "clipping_threshold": None}
            >>> load_schema("adafactor").over_tensor("t5x", settings)
            (OverTensor(what='the parameter scale', enters=(), but_for_batch=True),)
        """
        constants = {} if variant is None else self.variant(variant)["constants"]
        steps = (step["over_tensor"] for step in self.data.get("steps", ()) if "over_tensor" in step)
        return tuple(
            OverTensor(
                step["what"],
                tuple(step["enters"]),
                any(constants.get(key) in forms for key, forms in step.get("but_for_batch", {}).items()),
            )
            for step in steps
            if not any(settings.get(name, ...) in values for name, values in step.get("unless", {}).items())
        )

    def rescaled(
        self,
        variant: str | None,
        settings: Mapping[str, Any],
        number: float,
        names: Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """Returns hyperparameters by which parameters times a number move as they moved before.

        Args:
            variant: Whose update.
            settings: Hyperparameters of the parameters as they were.
            number: The number.
            names: Those to return; None for all.

        Example:
            >>> load_schema("adamw").rescaled("torch", {"learning_rate": 0.5, "beta1": 0.9, "epsilon": 8.0}, 4.0)
            {'learning_rate': 2.0, 'beta1': 0.9, 'epsilon': 2.0}
        """
        powers = self.data.get("rescaled", {}).get("hyperparameters", {})
        everything = {**({} if variant is None else self.settings(variant)), **settings}
        values = {name: settings[name] for name in (settings if names is None else names)}
        for name in values.keys() & powers.keys():
            spec = powers[name]
            idle = any(everything.get(key) in off for key, off in spec.get("unless", {}).items())
            if number != 1 and type(values[name]) in (int, float):
                values[name] *= number ** (spec.get("otherwise", 0) if idle else spec["power"])
        return values

    def canonical(self, variant: str, arguments: Mapping[str, Any], place: str = "") -> dict[str, Any]:
        """Returns hyperparameters in canonical names, from a system's own arguments or from canonical ones.

        Args:
            variant: Whose arguments.
            arguments: Name -> value.
            place: Where they stand, for errors.

        Raises:
            StateError: An argument that several hyperparameters share isn't a sequence of that many; lists every one.

        Example:
            >>> load_schema("adamw").canonical("torch", {"betas": [0.9, 0.95], "eps": 1e-08, "foreach": None})
            {'beta1': 0.9, 'beta2': 0.95, 'epsilon': 1e-08}
        """
        values: dict[str, Any] = {}
        faults = {}
        for name in self.variant(variant)["defaults"]:
            spelling = self.spelling(variant, name)
            if spelling.argument in arguments:
                value = spelling.gathered(arguments)
                if fault := spelling.fault(value):
                    faults[spelling.argument] = f"is {value!r:.80}, {fault}"
                else:
                    values[name] = spelling.canonical(value)
            elif name in arguments:
                values[name] = arguments[name]
        Faults((fault, f"{place}/{name}".lstrip("/")) for name, fault in faults.items()).check(
            StateError, f"Hyperparameters of {self.name} can't be read"
        )
        return values

    def gradient_power(self, slot: str, settings: Mapping[str, Any]) -> int:
        """Returns the power of the gradient with which a slot grows: 2 where gradients times c make it times c^2.

        Raises:
            UnknownRuleError: The optimizer has no schema.

        Example:
            >>> adafactor = load_schema("adafactor")
            >>> adafactor.gradient_power("v_row", {}), adafactor.gradient_power("m", {})
            (2, 0)
        """
        if is_native(self.name):
            raise UnknownRuleError(
                "Nothing says how a slot follows from the gradients: statekit has no step of its optimizer.",
                place=slot,
                expected="an optimizer that has a schema",
                remedy="carry its state as it is",
            )
        spec = self.data["slots"][slot]["gradient_power"]
        idle = any(settings.get(name) in values for name, values in spec.get("unless", {}).items())
        return 0 if idle else int(spec["power"])

    def slot_names(self, variant: str) -> dict[str, str]:
        """Returns what a variant calls its slots: canonical name -> its own; one that it doesn't have is absent."""
        return {name: slot.aliases[variant] for name, slot in self.slots.items() if variant in slot.aliases}

    def native(self, variant: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a variant's own arguments for canonical hyperparameters; those that it doesn't offer are left out.

        Example:
            >>> load_schema("adamw").native("torch", {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-08, "nesterov": False})
            {'betas': (0.9, 0.95), 'eps': 1e-08}
        """
        arguments: dict[str, Any] = {}
        offered = [name for name in self.variant(variant)["defaults"] if name in values]
        worded: dict[str, dict[Spelling, Any]] = {}
        for name in offered:
            spelling = self.spelling(variant, name)
            value = spelling.signed(values[name])
            argument = spelling.argument
            if spelling.words:
                worded.setdefault(argument, {})[spelling] = value
            elif spelling.parts:
                arguments |= zip(spelling.parts, value or [None] * len(spelling.parts), strict=False)
            else:
                arguments[argument] = (
                    value if spelling.index is None else (*arguments.get(argument, ()), value)
                )
        return arguments | {argument: _in_words(means) for argument, means in worded.items()}

    def arguments(self, variant: str) -> tuple[str, ...]:
        """Returns the names of a variant's own arguments that say hyperparameters.

        Example:
            >>> load_schema("adamw").arguments("moonlight")
            ('lr', 'adamw_betas', 'adamw_eps', 'wd')
        """
        spellings = [self.spelling(variant, name) for name in self.variant(variant)["defaults"]]
        return tuple(
            dict.fromkeys(name for spelling in spellings for name in spelling.parts or (spelling.argument,))
        )

    def spelling(self, variant: str, name: str) -> Spelling:
        """Returns how a variant's own argument says a hyperparameter; by its canonical name where that differs more."""
        if variant not in self._spellings:
            self._spellings[variant] = self._spelled(variant)
        return self._spellings[variant][name]

    @cached_property
    def _spellings(self) -> dict[str, Mapping[str, Spelling]]:
        """How each variant that was asked for says each hyperparameter: recordings ask thousands of times."""
        return {}

    def _spelled(self, variant: str) -> Mapping[str, Spelling]:
        native = {name: spec["native"].get(variant, {}) for name, spec in self.hyperparameters.items()}
        parts = {
            name: (name if "note" in spelling else str(spelling.get("name", name))).rstrip("]").partition("[")
            for name, spelling in native.items()
        }
        names = [str(spelling.get("name", "")) for spelling in native.values()]
        shared = Counter(name.partition("[")[0] for name in names if "[" in name)
        return {
            name: Spelling(
                argument,
                int(index) if index else None,
                shared[argument],
                "sign" in native[name],
                tuple(
                    (_hashable(word), _hashable(canonical))
                    for word, canonical in native[name].get("values", ())
                ),
                native[name].get("otherwise"),
                tuple(native[name].get("parts", ())),
            )
            for name, (argument, _, index) in parts.items()
        }

    def shown_by(self, slots: Collection[str]) -> dict[str, str]:
        """Returns the hyperparameters that slots prove to be on: name -> the first slot that shows it.

        Example:
            >>> load_schema("adafactor").shown_by(["v_row", "v_col", "m"])
            {'beta1': 'm'}
        """
        shown = (
            (
                name,
                next((slot for slot in spec.get("decides", {}).get("existence", ()) if slot in slots), None),
            )
            for name, spec in self.hyperparameters.items()
        )
        return {name: slot for name, slot in shown if slot is not None}

    def needed(self, slots: Collection[str], values: Mapping[str, Any]) -> set[str]:
        """Returns the slots that an updated parameter must have, given its other slots and its group.

        Example:
            >>> sorted(load_schema("adamw").needed(["m"], {"amsgrad": True}))
            ['m', 'v', 'v_max']
            >>> sorted(load_schema("adafactor").needed(["v_row"], {}))
            ['v_col', 'v_row']
        """
        needed = {name for name, slot in self.slots.items() if slot.is_always}
        for name, spec in self.hyperparameters.items():
            if values.get(name) is True and "boolean" in spec["type"]:
                needed.update({*spec.get("decides", {}).get("existence", ())} - BESIDE_NARROW)
        if {"v_row", "v_col"} <= self.slots.keys():
            needed |= {"v_row", "v_col"} if {"v_row", "v_col"} & {*slots} else {"v"}
        return {name for name in needed if name in self.slots and self.slots[name].shape not in OF_GROUPS}

    def fault(self, name: str, value: Any) -> str:
        """Returns what is wrong with a hyperparameter's value, by its type and range; "" if nothing is.

        A 0-d tensor passes for a number; its value isn't read.

        Example:
            >>> load_schema("adafactor").fault("decay_rate", "0.8")
            'expected number'
        """
        if name not in self.hyperparameters:
            return f"{self.name} has no such hyperparameter"
        kinds, limits = self.hyperparameters[name]["type"], self.hyperparameters[name].get("range", {})
        if not any(_is_of(value, kind) for kind in kinds):
            return f"expected {' or '.join(kinds)}"
        if "values" in limits and value is not None and value not in limits["values"]:
            return f"expected one of {', '.join(map(str, limits['values']))}"
        if not _are_inside(value, limits):
            return f"expected {_described(limits)}" if limits else "expected a number"
        return ""


@dataclass(frozen=True)
class Spelling:
    """How a variant's own argument says a hyperparameter.

    Attributes:
        argument: Its name there.
        index: Its place, where the argument is a sequence: 1 in `betas[1]`.
        length: How long that sequence is.
        turned: Whether the sign is the opposite one.
        words: Values there, each with what it means here.
        otherwise: What every other value there means; None: itself.
        parts: The arguments that make up an array here.
    """

    argument: str
    index: int | None
    length: int
    turned: bool
    words: tuple[tuple[Any, Any], ...] = ()
    otherwise: Any = None
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = "" if self.index is None else f"[{self.index}]"
        return f"{'-' if self.turned else ''}{self.argument}{place}"

    def fault(self, value: Any) -> str:
        """Returns what is wrong with the argument's form; "" if nothing is."""
        if self.turned and isinstance(value, Tensor):
            return "expected a number"
        if self.index is None or (isinstance(value, (list, tuple)) and len(value) == self.length):
            return ""
        return f"expected {self.length} values"

    def gathered(self, arguments: Mapping[str, Any]) -> Any:
        """Returns the argument's value, of several parts those together."""
        if self.parts and all(part in arguments for part in self.parts):
            return [arguments[part] for part in self.parts]
        return arguments[self.argument]

    def canonical(self, value: Any) -> Any:
        """Returns the hyperparameter's value from the argument's, whose form is right.

        Example:
            >>> load_schema("muon").spelling("torch", "scale_factor").canonical("match_rms_adamw")
            0.2
        """
        if self.words:
            values = {repr(word): canonical for word, canonical in self.words}
            return values.get(repr(_hashable(value)), value if self.otherwise is None else self.otherwise)
        return self.signed(value if self.index is None else value[self.index])

    def signed(self, value: Any) -> Any:
        """Returns a value with the sign of the other spelling; what isn't a number stays."""
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return -value if self.turned and is_number else value


def _in_words(means: Mapping[Spelling, Any]) -> Any:
    """Returns the value of an argument that says several things at once, from what each of them is."""
    words = [text for spelling in means for text, _ in spelling.words]
    for word in (*words, *means.values()):
        if all(_hashable(spelling.canonical(word)) == _hashable(value) for spelling, value in means.items()):
            return word
    argument = next(iter(means)).argument
    raise InexactError(
        "No value of an argument says what the run's hyperparameters are together.",
        place=argument,
        expected=", ".join(map(str, dict.fromkeys(words))),
        found=" and ".join(map(str, means.values())),
    )


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _is_of(value: Any, kind: str) -> bool:
    if kind == "number" and isinstance(value, Tensor):
        return value.shape == ()
    if isinstance(value, int) and not fits(value, float) and not isinstance(value, bool):
        return False  # too large for any number of an optimizer
    return isinstance(value, _KINDS[kind]) and isinstance(value, bool) == (kind == "boolean")


_KINDS: dict[str, tuple[type, ...]] = {
    "number": (int, float), "integer": (int,), "boolean": (bool,), "string": (str,),
    "null": (type(None),), "array": (list, tuple), "object": (Mapping,),
}  # fmt: skip


def _are_inside(value: Any, limits: Mapping[str, Any]) -> bool:
    """Tells whether a number, all of an array whose numbers have a range, or all of an object keep to it."""
    if "rows" in limits and isinstance(value, (list, tuple)):
        return _are_rows_inside(value, limits)
    if isinstance(value, (Mapping, list, tuple)):
        # Without a range it holds no numbers: rules, masks, scales by pattern.
        items = [*value.values()] if isinstance(value, Mapping) else value
        has_length = len(items) == limits.get("length", len(items))
        return not limits or (has_length and all(_is_number_inside(item, limits) for item in items))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    return not math.isnan(value) and all(
        _LIMITS[key](value, limit) for key, limit in limits.items() if key in _LIMITS
    )


def _are_rows_inside(value: Sequence[Any], limits: Mapping[str, Any]) -> bool:
    """Tells whether an array, or each array in it, has the numbers that a range names."""
    of_row = {**{key: limit for key, limit in limits.items() if key != "rows"}, "length": limits["rows"]}
    table = value if value and isinstance(value[0], (list, tuple)) else [value]
    return all(isinstance(row, (list, tuple)) and _are_inside(row, of_row) for row in table)


def _is_number_inside(value: Any, limits: Mapping[str, Any]) -> bool:
    return fits(value, float) and _are_inside(value, limits)


_LIMITS: Mapping[str, Callable[[float, float], bool]] = {
    "minimum": operator.ge,
    "exclusive_minimum": operator.gt,
    "maximum": operator.le,
    "exclusive_maximum": operator.lt,
    "finite": lambda value, _: math.isfinite(value),
}


def _described(limits: Mapping[str, Any]) -> str:
    """Returns a range in words."""
    words = {
        "finite": "a finite number",
        "length": f"{limits.get('length')} numbers",
        "rows": f"{limits.get('rows')} numbers, or rows of so many",
    }
    return ", ".join(words.get(key, f"{key} {limit}") for key, limit in limits.items())


EXECUTIONS = "executions.json"
"""What lies beside the schemas and is none: how originals ran."""


def schema_names() -> list[str]:
    """Returns the names of all schemas."""
    files = resources.files("statekit.schemas").iterdir()
    return sorted(
        f.name[:-5]
        for f in files
        if f.name.endswith(".json") and not f.name.endswith(".schema.json") and f.name != EXECUTIONS
    )


def all_variants(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the variants of schemas, for layouts that hold the state of any."""
    return {name: tuple(load_schema(name).variants) for name in names}


WEIGHTS = "weights"
"""The schema of a state without an optimizer, which keeps nothing: weights alone. It isn't among `schema_names`."""
NO_OPTIMIZER = "weights alone: there is no optimizer's state to go on from"
_NOTHING: Mapping[str, Any] = {
    "name": WEIGHTS, "title": "Weights alone", "slots": {}, "hyperparameters": {}, "variants": {}, "steps": [],
    "differences": {}, "bridges": [],
}  # fmt: skip


NATIVE: Mapping[str, str] = {
    "torch_native": "PyTorch",
    "optax_native": "Optax",
    "keras_native": "Keras",
    "mxnet_native": "MXNet",
}
"""Schemas of states whose optimizer has none, by whose they are: any slot and any option fits, and nothing steps.

Slots and options have the optimizer's own names. The variant is its name, None where nothing tells it. They
aren't among `schema_names`.
"""


def is_native(name: str) -> bool:
    """Tells whether a schema is of optimizers that have none, of which only the state is known."""
    return name in NATIVE


def named_native(name: str, variant: str | None) -> str:
    """Returns what an optimizer without a schema is called, for people.

    Example:
        >>> named_native("torch_native", "torch NAdam"), named_native("torch_native", None)
        ('torch NAdam', 'an optimizer of PyTorch')
    """
    return variant or f"an optimizer of {NATIVE[name]}"


def named_kinds(kinds: Iterable[tuple[str, str | None]]) -> str:
    """Returns what optimizers are called, for people: the schema's name, or their own where they have none.

    Example:
        >>> named_kinds([("adamw", "torch"), ("torch_native", "torch NAdam")])
        'adamw and torch NAdam'
    """
    return " and ".join(named_native(*kind) if is_native(kind[0]) else kind[0] for kind in kinds)


@dataclass(frozen=True)
class _Open(Mapping[str, Any]):
    """A table that has an entry for any name, and lists none."""

    entry: Callable[[str], Any]

    def __getitem__(self, name: str) -> Any:
        return self.entry(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _native_schema(name: str) -> OptimizerSchema:
    """Returns a schema that any state fits, for a framework's optimizers without one."""
    variant = {"stepped": False, "defaults": {}, "fixed": {}, "constants": {}}
    data = {**_NOTHING, "name": name, "title": f"Optimizers of {NATIVE[name]} without a schema"}
    slots = _Open(lambda slot: SlotSchema(slot, slot, NATIVE_SHAPE, NATIVE_SHAPE, None, "", {}))
    return OptimizerSchema(name, slots, {}, _Open(lambda _: variant), data)


@cache
def load_schema(name: str) -> OptimizerSchema:
    """Reads one schema.

    Raises:
        NotFoundError: No schema of that name.
        StateError: It is what several optimizers of a run are called together.
    """
    if "+" in name:
        raise StateError(
            "The run has several optimizers, each for parameters of its own, and this goes by one.",
            expected="one optimizer",
            found=" and ".join(name.split("+")),
            remedy="save each with its own parameters, and go on with these",
        )
    if name == WEIGHTS:
        return OptimizerSchema(WEIGHTS, {}, {}, {}, _NOTHING)
    if is_native(name):
        return _native_schema(name)
    if name not in schema_names():
        raise NotFoundError(
            "There is no such optimizer schema.",
            expected=", ".join(schema_names()),
            found=name,
            remedy=meant(name, schema_names()),
        )
    data = shipped_json("statekit.schemas", f"{name}.json")
    slots = {
        slot: SlotSchema(
            name=slot,
            symbol=s["symbol"],
            shape=s["shape"],
            dtype=s["dtype"],
            init=s["init"],
            recurrence=s["recurrence"],
            aliases=s["aliases"],
            fused=s.get("fused"),
            is_always=s["exists"] == "always",
        )
        for slot, s in data["slots"].items()
    }
    return OptimizerSchema(name, slots, data["hyperparameters"], data["variants"], data)
