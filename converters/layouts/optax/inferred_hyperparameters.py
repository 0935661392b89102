"""The hyperparameters of an Optax run: given, found in the state or a manifest, inferred from its links, or assumed.

Optax stores none of them, but those that inject_hyperparams was asked to. A default is assumed only where nothing
speaks against it: a mask, a schedule or a link of unknown settings leaves what it acts on unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from statekit.converters.layouts.hyperparameters import MINIMUM, Hyperparameters, with_minimum
from statekit.converters.layouts.optax.factoring import Factoring
from statekit.converters.layouts.optax.links import Link, is_tensor, leaves
from statekit.converters.layouts.optax.recognition import Recognised
from statekit.converters.layouts.optax.surroundings import CoreLink
from statekit.state.options import checked_hparams
from statekit.state.schema import OptimizerSchema
from statekit.tensors.tensor import Tensor

VARIANT = "optax"
_CLIPS = ("clipvalue", "global_norm_clip_threshold")
_RATE = ("weight_decay_rate",)
_DECAY = ("weight_decay_rate", "exclude_from_weight_decay")
_AFTER = (
    "Links stand behind its chain whose settings aren't stored: with a mask, a factor or a schedule of theirs its "
    "updates are others."
)
_LINKS = ("clipping_threshold", "multiply_by_parameter_scale", "weight_decay_rate")
_OTHERWISE = ("exclude_from_weight_decay", "amsgrad")
"""Hyperparameters that Optax' argument of that meaning says in another way."""


def native_names(schema: OptimizerSchema) -> dict[str, str]:
    """Returns Optax' name of a hyperparameter -> its canonical name."""
    names = {}
    for canonical, spec in schema.hyperparameters.items():
        if canonical not in _OTHERWISE and VARIANT in spec.get("native", {}):
            names[str(spec["native"][VARIANT]["name"])] = canonical
    return names


def canonical(schema: OptimizerSchema, values: Mapping[str, Any], usual: str = VARIANT) -> dict[str, Any]:
    """Returns hyperparameters under their canonical names, from those, from Optax', or from another variant's.

    Raises:
        UsageError: There is no such hyperparameter, it can't have its value, or is said twice; lists every one.
    """
    return checked_hparams(schema.name, usual, values, also=native_names(schema))


def inferred(
    core: CoreLink,
    recognised: Recognised,
    schema: OptimizerSchema,
    factorings: Sequence[Factoring],
    specified: Mapping[str, Any],
    usual: str = VARIANT,
) -> tuple[Hyperparameters, dict[str, tuple[str, ...]]]:
    """Returns Optax' defaults as corrected by what the links prove, and what is open: why, and the names.

    Args:
        core: The core link.
        recognised: What it is of.
        schema: Its schema.
        factorings: What its parameters' slots show, of Adafactor.
        specified: The hyperparameters that are known better.
        usual: The variant of the program's optimizers.
    """
    variant = recognised.alias.variant or usual
    defaults = {k: v for k, v in schema.variant(variant)["defaults"].items() if k != "learning_rate"}
    hyperparameters = Hyperparameters().over(defaults, "assumed")
    if schema.name == "adafactor":
        hyperparameters, unknown = _adafactor(core, hyperparameters)
    elif schema.name == "muon":
        hyperparameters, unknown = _muon(core, hyperparameters)
    else:
        hyperparameters, unknown = _adam(core, recognised, hyperparameters, usual)
    if any(link.kind in ("stateless", "masked") for link in core.before):
        unknown["Links stand before it whose settings aren't stored: clipping, if they clip."] = _CLIPS
    if core.masked and not _decays_nothing(specified):
        unknown["A masked link decays the weights; a step needs its rate and its mask."] = _DECAY
    hyperparameters = hyperparameters.without(*(name for names in unknown.values() for name in names))
    if schema.name == "adafactor":
        hyperparameters, notes = _with_factoring(hyperparameters, factorings)
        unknown |= dict.fromkeys(notes, ())
    injected = dict(_values(core.injected, schema))
    unknown = _still_unknown(unknown, {*specified, *injected})
    if any(link.kind in ("stateless", "masked") for link in core.after):
        unknown[_AFTER] = ()
    return hyperparameters.over(injected, "file"), unknown


def _decays_nothing(specified: Mapping[str, Any]) -> bool:
    """Tells whether the user says that no weight decays: a mask decides nothing then."""
    return _RATE[0] in specified and not specified[_RATE[0]]


def _still_unknown(
    unknown: Mapping[str, tuple[str, ...]], settled: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Returns what is open beside hyperparameters that are known from elsewhere."""
    return {why: names for why, names in unknown.items() if not names or not {*names} <= {*settled}}


def _values(injected: Mapping[str, Tensor], schema: OptimizerSchema) -> Iterator[tuple[str, Any]]:
    """Yields canonical name and value of what inject_hyperparams holds."""
    names = native_names(schema)
    for native, tensor in injected.items():
        name = names.get(native, native)
        if {"number", "integer", "boolean"} & {*schema.hyperparameters.get(name, {}).get("type", ())}:
            stored = tensor.read()
            yield name, stored.astype(np.float64).item() if stored.dtype.kind in "fV" else stored.item()


def _adam(
    core: CoreLink, recognised: Recognised, hyperparameters: Hyperparameters, usual: str
) -> tuple[Hyperparameters, dict[str, tuple[str, ...]]]:
    """Reads an Adam-like link: whether it has a maximum, how it stores the first moment, and what decays.

    A program with a variant of its own has one chain, whatever it wraps around it.
    """
    unknown: dict[str, tuple[str, ...]] = {}
    offered = hyperparameters.values
    if "amsgrad" in offered:
        hyperparameters = hyperparameters.over({"amsgrad": "nu_max" in core.link.state}, "file")
    first, second = _dtypes(core.link, "mu"), _dtypes(core.link, "nu")
    if "dtype_momentum" in offered and len(first) == 1 and first != second:
        hyperparameters = hyperparameters.over({"dtype_momentum": first.pop()}, "file")
    settings = _of_name(core, recognised)
    hyperparameters = hyperparameters.over(settings, "given" if recognised.is_named else "assumed")
    if recognised.decay is not None:
        unknown["The weight decay follows a schedule; a step needs its next value."] = _RATE
    elif (
        recognised.alias.variant is None
        and usual == VARIANT
        and _RATE[0] not in settings
        and not (recognised.exact and recognised.settled and _is_whole(core))
    ):
        unknown["The weight decay isn't stored, and the chain isn't the one that a default is known of."] = (
            _RATE
        )
    return hyperparameters, unknown


def _muon(
    core: CoreLink, hyperparameters: Hyperparameters
) -> tuple[Hyperparameters, dict[str, tuple[str, ...]]]:
    """Reads Muon's link: its coefficients, and how it stores the momentum.

    The state holds coefficients as float32: the shortest decimal that is the same float32 is what was written.
    """
    table = core.link.state["ns_coeffs"].read().astype(np.float32)
    shown = (
        np.array([float(np.format_float_positional(value)) for value in table.flat])
        .reshape(table.shape)
        .tolist()
    )
    values: dict[str, Any] = {"ns_coefficients": shown}
    first = _dtypes(core.link, "mu")
    if len(first) == 1 and first != {"float32"}:
        values["dtype_momentum"] = first.pop()
    unknown: dict[str, tuple[str, ...]] = {}
    if core.behind is None or not _is_whole(core):
        unknown["The weight decay isn't stored, and the chain isn't the one that a default is known of."] = (
            _RATE
        )
    return hyperparameters.over(values, "file"), unknown


def _of_name(core: CoreLink, recognised: Recognised) -> dict[str, Any]:
    """Returns what the optimizer's name says of its hyperparameters."""
    settings = {name: value for name, value in recognised.alias.settings.items() if name != "amsgrad"}
    is_short = len(core.kinds_behind) == 1 and not core.gaps  # the one link behind it is the rate
    return {**settings, _RATE[0]: 0.0} if recognised.name == "amsgrad" and is_short else settings


def _is_whole(core: CoreLink) -> bool:
    """Tells whether a chain has the links of optax.adamw or lamb, and so their default of weight decay."""
    return len(core.kinds_behind) in (2, 3) and {*core.kinds_behind} <= {"stateless", "masked", "schedule"}


def _adafactor(
    core: CoreLink, hyperparameters: Hyperparameters
) -> tuple[Hyperparameters, dict[str, tuple[str, ...]]]:
    """Reads Adafactor's chain: statistics, clipping, rate, parameter scale, momentum, decay, sign; some are absent."""
    unknown: dict[str, tuple[str, ...]] = {}
    if core.momentum is None:
        hyperparameters = hyperparameters.over({"beta1": None}, "file")
    else:
        dtypes = _dtypes(core.momentum, "ema")
        hyperparameters = hyperparameters.over(
            {"dtype_momentum": dtypes.pop()} if len(dtypes) == 1 else {}, "file"
        )
        unknown["beta1 isn't stored: a link keeps momentum; a step needs its value."] = ("beta1",)
    usual = 4 + len(core.links) - 1
    if core.before or core.others or len(core.behind or ()) not in (usual - 1, usual, usual + core.masked):
        why = "The chain isn't optax.adafactor's with its defaults; which of its links are on isn't stored."
        unknown[why] = _LINKS
    return hyperparameters, unknown


def _with_factoring(
    hyperparameters: Hyperparameters, factorings: Sequence[Factoring]
) -> tuple[Hyperparameters, list[str]]:
    yes = [factoring.decides for factoring in factorings if factoring.factored]
    no = [factoring.decides for factoring in factorings if not factoring.factored and factoring.decides]
    if yes or not no:
        return with_minimum(hyperparameters.over({"factored": True}, "file" if yes else "assumed"), yes, no)
    if max(no) >= hyperparameters.values[MINIMUM]:
        hyperparameters = hyperparameters.over({"factored": False}, "assumed")
    return hyperparameters, []


def _dtypes(link: Link, field: str) -> set[str]:
    return {leaf.dtype.name for _, leaf in leaves(link.state[field]) if is_tensor(leaf)}
