"""The hyperparameters of an Optax run: given, found in the state or a manifest, inferred from its links, or assumed.

Optax stores none of them, but those that inject_hyperparams was asked to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.converters.layouts.hyperparameters import MINIMUM, Hyperparameters, with_minimum
from statekit.converters.layouts.optax.factoring import Factoring
from statekit.converters.layouts.optax.links import SLOT_TREES, Link, is_tensor, leaves, sequence, under
from statekit.errors import UsageError
from statekit.state.options import checked_hparams
from statekit.state.schema import OptimizerSchema
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path, Tree

VARIANT = "optax"
OPTIMIZER = "optimizer"
"""A hint of its own: which optimizer the Adam-like state is of, `adamw` or `lamb`."""
_ADAM_LIKE = {2: "adamw", 3: "lamb"}
"""Which function of Optax puts so many links behind scale_by_adam."""
_CLIPS = ("clipvalue", "global_norm_clip_threshold")
_DECAY = ("weight_decay_rate", "exclude_from_weight_decay")
_AFTER = (
    "Links stand behind its chain whose settings aren't stored: with a mask, a factor or a schedule of theirs its "
    "updates are others."
)
_LINKS = ("clipping_threshold", "multiply_by_parameter_scale", "weight_decay_rate")
_SUMMED, _INJECTED = "acc_grads", "hyperparams"
"""The fields of MultiSteps and inject_hyperparams that are no statistics of a link's own."""
_OTHERWISE = ("exclude_from_weight_decay", "amsgrad")
"""Hyperparameters that Optax' argument of that meaning says in another way."""


@dataclass(frozen=True)
class CoreLink:
    """A link that an optimizer is known by, and what is beside it.

    Attributes:
        link: The link.
        before: How many links without slots stand before it in its chains.
        behind: The states behind it in its own chain; None if it isn't in one.
        after: How many stand behind that in the chains around it.
        momentum: The link of Adafactor's momentum behind it.
        injected: Values of inject_hyperparams around it, by Optax' names.
        others: What else keeps something like its parameters around it, and belongs to no optimizer known here.
    """

    link: Link
    before: int
    behind: tuple[Tree, ...] | None
    after: int
    momentum: Link | None
    injected: Mapping[str, Tensor]
    others: tuple[str, ...]

    @property
    def links(self) -> tuple[Link, ...]:
        """Its own link and its momentum's."""
        return (self.link, *((self.momentum,) if self.momentum else ()))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Their paths."""
        return tuple(link.path for link in self.links)

    @property
    def masked(self) -> bool:
        """Whether a masked link without slots stands behind it: weight decay with a mask."""
        masks: tuple[Tree, ...] = ({"inner_state": None}, {"inner_state": {}})
        return any(state in masks for state in self.behind or ())


def core_link(link: Link, all_links: Sequence[Link], tree: Tree, params: Path) -> CoreLink:
    """Returns a core link with what is beside it.

    Args:
        link: Its link.
        all_links: All links of the tree.
        tree: The tree.
        params: Where the parameters are.
    """
    before, behind, own_chain, after, top = 0, None, None, 0, link.path
    injected: dict[str, Tensor] = {}
    others: list[str] = []
    momentum, moved = None, _paths(link)
    for depth in reversed(range(len(link.path))):
        outer = link.path[:depth]
        node = under(tree, outer)
        if params[:depth] == outer:
            break
        injected = {**_injected(node), **injected}
        top = outer
        chain = sequence(node)
        if chain is None:
            continue
        position = int(link.path[depth])
        before += position
        if behind is None and depth == len(link.path) - 1:
            behind, own_chain = tuple(chain[position + 1 :]), outer
        else:
            after += len(chain) - position - 1
        for other in all_links:
            same = other.path[:depth] == outer and other.path[: depth + 1] != link.path[: depth + 1]
            if (
                same
                and other.kind == "ema"
                and link.kind == "adafactor"
                and outer == own_chain
                and not momentum
            ):
                momentum = other
            elif same and other.kind in ("ema", "adam", "adafactor") and not _paths(other).isdisjoint(moved):
                others.append(other.kind)
    known = [one.path for one in all_links if one.kind in SLOT_TREES]
    others += _strange(under(tree, top), top, known, under(tree, params), moved)
    return CoreLink(link, before, behind, after, momentum, injected, tuple(others))


def _strange(node: Tree, top: Path, known: Sequence[Path], params: Tree, moved: set[Path]) -> Iterator[str]:
    """Yields the fields around a core link, apart from those of known links, that hold tensors like its parameters.

    Gradients that MultiSteps sums up are none: they become the updates of the same rule.
    """
    shapes = {keys: under(params, keys).shape for keys in moved}
    fields: dict[Path, None] = {}
    for below, leaf in leaves(node):
        keys = (*top, *below)
        at = next((i for i in range(len(top), len(keys)) if keys[i:] in shapes), None)
        if (
            at is None
            or not is_tensor(leaf)
            or leaf.dtype.kind not in "fV"
            or leaf.shape != shapes[keys[at:]]
        ):
            continue
        if keys[at - 1] not in (_SUMMED, _INJECTED) and not any(keys[: len(one)] == one for one in known):
            fields[keys[:at]] = None
    yield from (str(field[-1]) for field in fields)


def _paths(link: Link) -> set[Path]:
    """Returns the parameters that a link has slots for."""
    return {keys for _, own_tree in link.trees() for keys, leaf in leaves(own_tree) if is_tensor(leaf)}


def _injected(node: Tree) -> dict[str, Tensor]:
    """Returns the values of inject_hyperparams but those that a schedule makes: they are the last update's."""
    states = node.get("hyperparams_states") if isinstance(node, Mapping) else None
    scheduled = [name for name, state in states.items() if state] if isinstance(states, Mapping) else []
    record = node.get("hyperparams") if isinstance(node, Mapping) else None
    scalars = record.items() if isinstance(record, Mapping) else ()
    return {
        str(name): value
        for name, value in scalars
        if is_tensor(value) and value.shape == () and value.dtype.kind in "fiubV" and name not in scheduled
    }


def schema_of(core: CoreLink, asked: Any) -> tuple[str, str]:
    """Returns the schema of a core link, and in a sentence what was assumed for that; "" if nothing.

    Args:
        core: The core link.
        asked: The schema that the user names; None if none is named.

    Raises:
        UsageError: It can't be that.
    """
    choices: tuple[str, ...] = ("adafactor",)
    schema_name, why = "adafactor", ""
    if core.link.kind != "adafactor":
        count = None if core.behind is None else len(core.behind)
        choices, schema_name = ("adamw", "lamb"), _ADAM_LIKE.get(count or 0, "adamw")
        shown = "no chain" if count is None else f"{count} links behind it"
        why = (
            f"A file doesn't say which optimizer its Adam-like state is of; with {shown} it is taken for {schema_name}"
            f" ({OPTIMIZER}={'lamb' if schema_name == 'adamw' else 'adamw'} says otherwise)."
        )
    if asked is None:
        return schema_name, why
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


def canonical(schema: OptimizerSchema, said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns hyperparameters under their canonical names, from those or from Optax'.

    Raises:
        UsageError: There is no such hyperparameter, it can't have its value, or is said twice; lists every one.
    """
    return checked_hparams(schema.name, VARIANT, said, also=native_names(schema))


def inferred(
    core: CoreLink, schema: OptimizerSchema, factorings: Sequence[Factoring], specified: Collection[str]
) -> tuple[Hyperparameters, list[str]]:
    """Returns Optax' defaults as corrected by what the links prove, and what is open.

    Args:
        core: The core link.
        schema: Its schema.
        factorings: What its parameters' slots show, of Adafactor.
        specified: Names of the hyperparameters that are known better.
    """
    usual = {k: v for k, v in schema.variant(VARIANT)["defaults"].items() if k != "learning_rate"}
    hyperparameters = Hyperparameters().over(usual, "assumed")
    hyperparameters, unknown = (
        _adafactor(core, hyperparameters) if core.link.kind == "adafactor" else _adam(core, hyperparameters)
    )
    if core.before or core.behind is None:
        unknown["Links stand before it whose settings aren't stored: clipping, if they clip."] = _CLIPS
    if core.masked:
        unknown["A masked link decays the weights; a step needs its rate and its mask."] = _DECAY
    hyperparameters = hyperparameters.without(*(name for names in unknown.values() for name in names))
    hyperparameters, notes = (
        _with_factoring(hyperparameters, factorings)
        if core.link.kind == "adafactor"
        else (hyperparameters, [])
    )
    injected = dict(_values(core.injected, schema))
    open_points = [why for why, names in unknown.items() if not {*names} <= {*specified, *injected}]
    open_points += [_AFTER] if core.after else []
    return hyperparameters.over(injected, "file"), [*open_points, *notes]


def _values(injected: Mapping[str, Tensor], schema: OptimizerSchema) -> Iterator[tuple[str, Any]]:
    """Yields canonical name and value of what inject_hyperparams holds."""
    names = native_names(schema)
    for native, tensor in injected.items():
        name = names.get(native, native)
        if {"number", "integer", "boolean"} & {*schema.hyperparameters.get(name, {}).get("type", ())}:
            stored = tensor.read()
            yield name, stored.astype(np.float64).item() if stored.dtype.kind in "fV" else stored.item()


def _adam(
    core: CoreLink, hyperparameters: Hyperparameters
) -> tuple[Hyperparameters, dict[str, Sequence[str]]]:
    """Reads an Adam-like link: whether it has a maximum, and how it stores the first moment."""
    if "amsgrad" in hyperparameters.values:
        hyperparameters = hyperparameters.over({"amsgrad": "nu_max" in core.link.state}, "file")
    first, second = _dtypes(core.link, "mu"), _dtypes(core.link, "nu")
    if "dtype_momentum" in hyperparameters.values and len(first) == 1 and first != second:
        hyperparameters = hyperparameters.over({"dtype_momentum": first.pop()}, "file")
    if core.behind is None or len(core.behind) == 1:  # scale_by_adam alone, or Optax' adam
        hyperparameters = hyperparameters.over({"weight_decay_rate": 0.0}, "assumed")
    return hyperparameters, {}


def _adafactor(
    core: CoreLink, hyperparameters: Hyperparameters
) -> tuple[Hyperparameters, dict[str, Sequence[str]]]:
    """Reads Adafactor's chain: statistics, clipping, rate, parameter scale, momentum, decay, sign; some are absent."""
    unknown: dict[str, Sequence[str]] = {}
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
    yes = [one.decides for one in factorings if one.factored]
    no = [one.decides for one in factorings if not one.factored and one.decides]
    if yes or not no:
        return with_minimum(hyperparameters.over({"factored": True}, "file" if yes else "assumed"), yes, no)
    if max(no) >= hyperparameters.values[MINIMUM]:
        hyperparameters = hyperparameters.over({"factored": False}, "assumed")
    return hyperparameters, []


def _dtypes(link: Link, field: str) -> set[str]:
    return {leaf.dtype.name for _, leaf in leaves(link.state[field]) if is_tensor(leaf)}
