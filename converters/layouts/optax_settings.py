"""The hyperparameters of an Optax run: given, found in the state or a manifest, inferred from its links, or assumed.

Optax stores none of them, but those that inject_hyperparams was asked to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.converters.layouts.factored_slots import MINIMUM, with_minimum
from statekit.converters.layouts.optax_tree import Link, is_tensor, leaves, sequence, under
from statekit.converters.layouts.told import Settings
from statekit.errors import UsageError
from statekit.schema import OptimizerSchema
from statekit.tensor import Tensor
from statekit.tree import Path, Tree

VARIANT = "optax"
OPTIMIZER = "optimizer"
"""A hint of its own: which optimizer the Adam-like state is of, `adamw` or `lamb`."""
FACTOR_MAP = "factor_map"
_ADAM_LIKE = {2: "adamw", 3: "lamb"}
"""Which function of Optax puts so many links behind scale_by_adam."""
_OTHERWISE = ("exclude_from_weight_decay", "amsgrad")
"""Hyperparameters that Optax' argument of that meaning says in another way."""


@dataclass(frozen=True)
class Engine:
    """A link that an optimizer is known by, and what is beside it.

    Attributes:
        link: The link.
        before: How many links without slots stand before it in its chains.
        behind: The states behind it in its own chain; None if it isn't in one.
        momentum: The link of Adafactor's momentum behind it.
        injected: Values of inject_hyperparams around it, by Optax' names.
        others: Kinds of links with slots in its chains that belong to no optimizer known here.
    """

    link: Link
    before: int
    behind: tuple[Tree, ...] | None
    momentum: Link | None
    injected: Mapping[str, Tensor]
    others: tuple[str, ...]

    @property
    def links(self) -> tuple[Path, ...]:
        """The paths of its own link and of its momentum's."""
        return (self.link.path, *((self.momentum.path,) if self.momentum else ()))

    @property
    def masked(self) -> bool:
        """Whether a masked link without slots stands behind it: weight decay with a mask."""
        masks: tuple[Tree, ...] = ({"inner_state": None}, {"inner_state": {}})
        return any(state in masks for state in self.behind or ())


def engine(link: Link, found: Sequence[Link], tree: Tree, params: Path) -> Engine:
    """Returns an engine with what is beside it.

    Args:
        link: Its link.
        found: All links of the tree.
        tree: The tree.
        params: Where the parameters are.
    """
    before, behind, own_chain = 0, None, None
    injected: dict[str, Tensor] = {}
    others: list[str] = []
    momentum = None
    for depth in reversed(range(len(link.path))):
        outer = link.path[:depth]
        node = under(tree, outer)
        if params[:depth] == outer:
            break
        injected = {**_injected(node), **injected}
        chain = sequence(node)
        if chain is None:
            continue
        position = int(link.path[depth])
        before += position
        if behind is None and depth == len(link.path) - 1:
            behind, own_chain = tuple(chain[position + 1 :]), outer
        for other in found:
            same = other.path[:depth] == outer and other.path[: depth + 1] != link.path[: depth + 1]
            if (
                same
                and other.kind == "ema"
                and link.kind == "adafactor"
                and outer == own_chain
                and not momentum
            ):
                momentum = other
            elif same and other.kind in ("ema", "adam", "adafactor"):
                others.append(other.kind)
    return Engine(link, before, behind, momentum, injected, tuple(others))


def _injected(node: Tree) -> dict[str, Tensor]:
    held = node.get("hyperparams") if isinstance(node, Mapping) else None
    scalars = held.items() if isinstance(held, Mapping) else ()
    return {str(k): v for k, v in scalars if is_tensor(v) and v.shape == () and v.dtype.kind in "fiubV"}


def schema_of(own: Engine, hints: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the schema of an engine, and in a sentence what was assumed for that; "" if nothing.

    Raises:
        UsageError: The hint names none that it can be.
    """
    asked = hints.get(OPTIMIZER)
    choices: tuple[str, ...] = ("adafactor",)
    found, why = "adafactor", ""
    if own.link.kind != "adafactor":
        count = None if own.behind is None else len(own.behind)
        choices, found = ("adamw", "lamb"), _ADAM_LIKE.get(count or 0, "adamw")
        shown = "no chain" if count is None else f"{count} links behind it"
        why = (
            f"A file doesn't say which optimizer its Adam-like state is of; with {shown} it is taken for {found}"
            f" ({OPTIMIZER}={'lamb' if found == 'adamw' else 'adamw'} says otherwise)."
        )
    if asked is None:
        return found, why
    if asked not in choices:
        raise UsageError(
            "The optimizer can't be that.", place=OPTIMIZER, expected=", ".join(choices), found=asked
        )
    return str(asked), ""


def native_names(schema: OptimizerSchema) -> dict[str, str]:
    """Returns Optax' name of a hyperparameter -> its canonical name."""
    names = {}
    for canonical, spec in schema.hyperparameters.items():
        if canonical not in _OTHERWISE and VARIANT in spec.get("native", {}):
            names[str(spec["native"][VARIANT]["name"])] = canonical
    return names


def canonical(schema: OptimizerSchema, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns hyperparameters under their canonical names, from those or from Optax'.

    Raises:
        UsageError: There is no such hyperparameter, or it can't have its value; lists every one.
    """
    names = native_names(schema)
    found = {names.get(name, name): value for name, value in values.items() if name != OPTIMIZER}
    faults = {name: fault for name, value in found.items() if (fault := _fault(schema, name, value))}
    if faults:
        raise UsageError(
            f"Optax' {schema.name} doesn't take these hyperparameters.",
            expected=", ".join([*schema.variant(VARIANT)["defaults"], *names]),
            found="; ".join(f"{name}={found[name]!r}: {fault}" for name, fault in faults.items())[:2000],
        )
    return found


def _fault(schema: OptimizerSchema, name: str, value: Any) -> str:
    by_path = name in ("exclude_from_weight_decay", FACTOR_MAP) and isinstance(value, (Mapping, list))
    return "" if by_path else schema.fault(name, value)


def inferred(own: Engine, schema: OptimizerSchema, held: Sequence[Any]) -> tuple[Settings, list[str]]:
    """Returns Optax' defaults as corrected by what the links prove, and what is open.

    Args:
        own: The engine.
        schema: Its schema.
        held: Its parameters' slots, of Adafactor `optax_slots.Factoring`s.
    """
    usual = {k: v for k, v in schema.variant(VARIANT)["defaults"].items() if k != "learning_rate"}
    found = Settings().over(usual, "assumed")
    notes: list[str] = []
    if own.link.kind == "adafactor":
        found, notes = _adafactor(own, found, held)
    else:
        found = found.over({"amsgrad": "nu_max" in own.link.state}, "file") if "amsgrad" in usual else found
        dtypes = {leaf.dtype.name for _, leaf in leaves(own.link.state["mu"]) if is_tensor(leaf)}
        seconds = {leaf.dtype.name for _, leaf in leaves(own.link.state["nu"]) if is_tensor(leaf)}
        if "dtype_momentum" in usual and len(dtypes) == 1 and dtypes != seconds:
            found = found.over({"dtype_momentum": dtypes.pop()}, "file")
        if own.before or own.others or own.behind is None:
            found = found.without("clipvalue", "global_norm_clip_threshold")
            notes.append(
                "Links stand around the optimizer whose settings aren't stored: clipping, if they clip."
            )
        if own.behind is None or len(own.behind) == 1:  # scale_by_adam alone, or Optax' adam
            found = found.over({"weight_decay_rate": 0.0}, "assumed")
    if own.before or own.behind is None:
        found = found.without("clipvalue", "global_norm_clip_threshold")
        notes.append("Links stand before the optimizer whose settings aren't stored: clipping, if they clip.")
    if own.masked:
        found = found.without("weight_decay_rate", "exclude_from_weight_decay")
        notes.append(
            "A masked link decays the weights; a step needs weight_decay_rate and exclude_from_weight_decay."
        )
    names = native_names(schema)
    return found.over({names.get(n, n): v for n, v in _values(own.injected, schema)}, "file"), notes


def _values(injected: Mapping[str, Tensor], schema: OptimizerSchema) -> Iterator[tuple[str, Any]]:
    names = native_names(schema)
    for name, tensor in injected.items():
        stored = tensor.read()
        value = stored.astype(np.float64).item() if stored.dtype.kind in "fV" else stored.item()
        kinds = schema.hyperparameters.get(names.get(name, name), {}).get("type", ())
        if "number" in kinds or "integer" in kinds or "boolean" in kinds:
            yield name, value


def _adafactor(own: Engine, found: Settings, held: Sequence[Any]) -> tuple[Settings, list[str]]:
    """Reads Adafactor's chain: statistics, clipping, rate, parameter scale, momentum, decay, sign; some are absent."""
    notes: list[str] = []
    behind = own.behind or ()
    if own.momentum is None:
        found = found.over({"beta1": None}, "file")
    else:
        dtypes = {leaf.dtype.name for _, leaf in leaves(own.momentum.state["ema"]) if is_tensor(leaf)}
        found = found.without("beta1").over(
            {"dtype_momentum": dtypes.pop()} if len(dtypes) == 1 else {}, "file"
        )
        notes.append("beta1 isn't stored: a link keeps momentum; a step needs its value.")
    usual = 4 + (own.momentum is not None)
    if own.before or own.others or len(behind) not in (usual - 1, usual, usual + own.masked):
        found = found.without("clipping_threshold", "multiply_by_parameter_scale", "weight_decay_rate")
        notes.append(
            "The chain isn't that of optax.adafactor with its defaults: which of its links are on isn't stored."
        )
    yes = [one.decides for one in held if one.factored]
    no = [one.decides for one in held if not one.factored and one.decides]
    if yes or not no:
        found, note = with_minimum(found.over({"factored": True}, "file" if yes else "assumed"), yes, no)
        notes += note
    elif max(no) >= found.values[MINIMUM]:
        found = found.over({"factored": False}, "assumed")
    return found, notes
