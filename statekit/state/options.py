"""What people may say to an optimizer of ours, in any framework: options, factor rules, whose learning rate counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from statekit.state.constants import variant_constants
from statekit.state.factoring import PathPattern, by_shape, effective, first_entry, labels
from statekit.state.schema import load_schema
from statekit.state.train_state import Rule
from statekit.tensors.tensor import Shape

RATE_NAMES = ("learning_rate", "lr")
"""Hyperparameters that are the learning rate, which every framework has its own place for."""
KERAS = {
    "clipnorm": None, "clipvalue": None, "global_clipnorm": None, "use_ema": False, "ema_momentum": 0.99,
    "ema_overwrite_frequency": None, "loss_scale_factor": None, "gradient_accumulation_steps": None,
}  # fmt: skip
"""Options of every Keras optimizer that ours take too, with their defaults. Keras' own base class does what they say,
before or after our step, whatever the variant is."""
FACTOR = "learning_rate_factor"
"""What a group of an optimizer in Keras multiplies the learning rate by."""
_BY_PARAMETER = ("multiply_by_parameter_scale", "factor_map")
"""Options that may be said for each parameter; their form is checked when the parameters are known."""


def offered(schema: str, variant: str) -> dict[str, Any]:
    """Returns the options of a variant with their defaults; the learning rate isn't one of them."""
    defaults = load_schema(schema).variant(variant)["defaults"]
    return {name: value for name, value in defaults.items() if name not in RATE_NAMES}


def option_faults(schema: str, variant: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with options, each with the option's name."""
    rules, known = load_schema(schema), {*offered(schema, variant), "factor_map"}
    theirs = {
        str(native.get("name", name)).partition("[")[0]: name
        for name, spec in rules.hyperparameters.items()
        for native in spec["native"].values()
    }
    for name, value in options.items():
        if name not in rules.hyperparameters and name in theirs:
            yield f"is another optimizer's name for {theirs[name]}", name
        elif name not in known:
            yield f"isn't an option of variant {variant}", name
        elif name not in _BY_PARAMETER and (fault := rules.fault(name, value)):
            yield f"is {value!r}, {fault}", name


def rule_of(
    path: str, shape: Shape, variant: str, settings: Mapping[str, Any], entries: Sequence[PathPattern]
) -> tuple[Rule | None, str]:
    """Returns how an Adafactor factors a parameter, or None and why nobody can say.

    Args:
        path: The parameter; its name in a framework may have dots for the slashes.
        shape: Its shape.
        variant: Whose rule.
        settings: The group's hyperparameters; `factored` and `min_dim_size_to_factor` count.
        entries: Lines of its `factor_map`.
    """
    known = {**load_schema("adafactor").settings(variant), **settings}
    factored, minimum = known["factored"], known["min_dim_size_to_factor"]
    entry = first_entry(entries, path, path.replace(".", "/"))
    if entry is None and factored and entries and entries[0].is_regex:
        return None, "is found by no regex of factor_map"
    said = labels(entry.value) if entry else None
    if variant_constants("adafactor", variant)["factored_rank"] == "two_or_rule":
        axes = effective(said, shape, factored, minimum)
    else:
        axes = said or by_shape(variant_constants("adafactor", variant), shape, factored, minimum)
    if axes is None:
        return None, f"has shape {shape} and no factor rule"
    if len(axes) != len(shape):
        return None, f"has shape {shape}, but a factor rule for {len(axes)} axes"
    return Rule(axes, "given"), ""


def rate_needed(schema: str, variant: str, settings: Mapping[str, Any]) -> bool:
    """Tells whether a step needs a learning rate, or has one of its own if none is given."""
    own = _OWN_RATE.get(variant_constants(schema, variant).get("lr_source", "given"))
    return own is None or not own({**load_schema(schema).settings(variant), **settings})


_OWN_RATE: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "given_or_rsqrt": lambda settings: True,
    "given_or_relative": lambda settings: bool(settings["relative_step"]),
    "given_or_relative_compounding": lambda settings: bool(settings["relative_step"]),
}
"""Whether an optimizer has a learning rate of its own, by `lr_source`."""
