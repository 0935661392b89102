"""What a file of PyTorch holds that no layout decodes: weights alone, an optimizer alone, or one without a schema.

An optimizer is told by its slots and options (signatures.json), and its slots are shown by parameter where shapes or
names say whose they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from statekit.conversion.contracts import Contents
from statekit.converters.layouts.pytorch.networks import by_model_key
from statekit.converters.layouts.pytorch.param_order import found_order
from statekit.converters.layouts.pytorch.parts import (
    Parts,
    find_parts,
    model_place,
    networks,
    optimizers_in,
    path_of,
    possible_models,
)
from statekit.converters.layouts.pytorch.side_by_side import SideBySide, side_by_side
from statekit.errors import StateError, some
from statekit.files.checkpoint import MODEL_KEY, SORTED, Checkpoint
from statekit.state.run import BESIDE, run_of
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Path, at, loose, shipped_json, tensor_names, walk

STEP = "step"
_UNKNOWN = "an optimizer that isn't known by its slots and options"
WRAPPED = "__bnb_optimizer_quant_state__"


_TELLING = 5
"""How many options tell an optimizer that has lost slots; fewer are those of several."""
_OF_MANY = frozenset({"betas", "decoupled_weight_decay", "maximize"})
"""Options of several classes without a schema."""
_OF_TORCH = frozenset({"differentiable", "foreach", "maximize"})
"""Options that together only PyTorch's own classes have."""


@dataclass(frozen=True)
class Signature:
    """By what an optimizer is told, and how its dialect says what its schema's optimizer in PyTorch does.

    Attributes:
        name: What it is called.
        slots: Names that some parameter has, or the optimizer as a whole.
        options: Keys that every group has.
        schema: The schema of its state, if there is one.
        variant: The schema's variant.
        more: Names that its parameters may have besides; `*` is any.
        absent: Keys that no group has.
        fixed: Options that must have these values where they are there.
        inferred: Options that its groups don't have, as its release does it.
        assumed: Options that nothing says, with a default and whose that is.
        renamed: Slots and options of other names -> the names of PyTorch's own.
        private: Options that mean nothing to PyTorch's own.
        allowed: Options that its groups may have, though they change an update.
        beyond: Why no other system goes on with it; "" if others do.
        several: Optimizers of which any may have left such a state.
        called: The class under whose name the file has the state; without it the state is another's.
        asked: Whether its state is also another's: somebody has to say whose rule it is.
        shaped: Of an optimizer without a schema, the slots that have their parameter's shape in every state of it.
        switched: Options that demand a slot where they are on -> that slot.
    """

    name: str
    slots: tuple[str, ...]
    options: tuple[str, ...]
    schema: str | None = None
    variant: str | None = None
    more: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    inferred: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    private: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    beyond: str = ""
    several: tuple[str, ...] = ()
    called: str = ""
    asked: bool = False
    shaped: tuple[str, ...] = ()
    switched: Mapping[str, str] = field(default_factory=dict)

    def fits(self, slots: Collection[str], groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tells whether an optimizer has its slots and no others, and its options in every group.

        One that has made no update has no slots yet. Programs add options of their own to groups, as lr_scale; one that
        changes the update, as Lookahead's, is the sign of another optimizer.
        """
        names = {*self.slots, *self.more, STEP}
        return (
            not any(
                _elsewhere().intersection(group).difference(self.options, self.private, self.allowed)
                for group in groups
            )
            and ({*self.slots} <= {*slots} if slots else self._explains(groups))
            and ("*" in self.more or names.issuperset(slots))
            and all(group.keys() >= {*self.options} for group in groups)
            and not any(key in group for group in groups for key in self.absent)
            and all(group.get(key, value) == value for group in groups for key, value in self.fixed.items())
        )

    def _explains(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tells whether options suffice to tell it; few options of an optimizer without a schema are those of many."""
        options = {*_usual(), *self.options, *self.more, *self.private, *self.allowed}
        has_own = any(option not in _usual() for option in self.options)
        is_explained = has_own and all(options.issuperset(group) for group in groups)
        return self.schema is not None or not self.slots or is_explained


def contents_of(checkpoint: Checkpoint, names: Sequence[str] | None = None) -> Contents | None:
    """Returns what a file of PyTorch holds; None if it has neither an optimizer nor weights.

    Args:
        checkpoint: The file.
        names: Parameters in the optimizer's order, where it numbers them and somebody knows it.
    """
    if parts_apart := side_by_side(checkpoint, {}):
        return _several(checkpoint, parts_apart)
    if (parts := find_parts(checkpoint, {})) is not None:
        return _of_optimizer(checkpoint, parts, names)
    pairs = networks(checkpoint.tree)
    return _networks(checkpoint, pairs) if len(pairs) > 1 else _weights(checkpoint) or _schedule(checkpoint)


def _of_optimizer(checkpoint: Checkpoint, parts: Parts, names: Sequence[str] | None) -> Contents:
    """Returns what a file holds that has an optimizer."""
    slot_names = sorted({slot for record in parts.state.values() for slot, _ in _tensors(record)})
    signature = signature_of(parts)
    name = signature.name if signature else unknown(parts)
    listed = f"its slots by parameter: {', '.join(slot_names) or 'none'}"
    if not parts.model:
        return _without_weights(checkpoint, parts, name, listed)
    has_schema = signature and signature.schema
    summary = f"{name}: {'a state that fits no layout' if has_schema else 'no schema yet'}; {listed}"
    params = {path_of(key): tensor for key, tensor in parts.model.items()}
    order: list[tuple[str, Mapping[str, Tensor], Mapping[str, Any]]] = []
    try:
        order += _by_parameter(parts, bool(checkpoint.meta.get(SORTED)), names)
    except StateError as error:
        summary = f"{summary}; whose they are isn't known: {error.line}"
    slots = {path: tensors for path, tensors, _ in order}
    others = _untaken(checkpoint, params, slots)
    return Contents(summary, params, slots, others, {path: options for path, _, options in order})


def _untaken(
    checkpoint: Checkpoint, params: Mapping[str, Tensor], slots: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Returns the tensors of a file that are neither parameters nor slots."""
    taken = {id(tensor) for tensors in (params, *slots.values()) for tensor in tensors.values()}
    return {key: tensor for key, tensor in checkpoint.tensors.items() if id(tensor) not in taken}


def unknown(parts: Parts) -> str:
    """Returns the name of an optimizer that no signature fits: a wrapper, or a kin, keeps more than the one inside."""
    inner = signature_of(replace(parts, common={})) if parts.common else None
    if inner is not None:
        return (
            f"{_UNKNOWN}, or a wrapper, which keeps {some([*parts.common])} beside the slots of {inner.name}"
        )
    return f"{_UNKNOWN}, with {some([*parts.common])} beside its slots" if parts.common else _UNKNOWN


def _without_weights(checkpoint: Checkpoint, parts: Parts, name: str, listed: str) -> Contents:
    """Returns what a file holds whose optimizer's weights aren't there, or may be several parts."""
    if models := possible_models(checkpoint.tree):
        summary = f"{name}, and weights at {' or '.join(models)}: --model-key says which are the optimizer's; {listed}"
        return Contents(summary, {}, {}, checkpoint.tensors, remedy=by_model_key(models[0]))
    count = sum(len(group["params"]) for group in parts.groups)
    unnamed = unnamed_tensors(checkpoint)
    lacking = (
        f"whose weights have no names: {some(unnamed)} lie by position"
        if unnamed
        else "without their weights"
    )
    only = f"{name}, alone: the state of {count} parameters {lacking}; {listed}"
    return Contents(only, {}, {}, checkpoint.tensors)


def unnamed_tensors(checkpoint: Checkpoint) -> list[str]:
    """Returns the tensors that lie in tuples or lists by position, outside of an optimizer's state.

    Source: graphdeco-inria/gaussian-splatting, scene/gaussian_model.py, `GaussianModel.capture`.
    """
    optimizers = optimizers_in(checkpoint.tree)
    leaves = [path for path, leaf in walk(checkpoint.tree) if isinstance(leaf, Tensor) and path]
    outside = [path for path in leaves if not any(path[: len(place)] == place for place in optimizers)]
    return ["/".join(map(str, path)) for path in outside if isinstance(path[-1], int)]


def _several(checkpoint: Checkpoint, beside: SideBySide) -> Contents:
    """Returns what a file holds that has several optimizers."""
    if not beside.joint.model and (unpaired := _unpaired(checkpoint)):
        return unpaired
    summary = f"{len(beside.places)} optimizers: {'; '.join(_each_called(beside))}"
    params = {path_of(key): tensor for key, tensor in beside.joint.model.items()}
    try:
        order = _by_parameter(beside.joint, bool(checkpoint.meta.get(SORTED)))
        slots = {path: tensors for path, tensors, _ in order}
    except StateError as error:
        summary, slots = f"{summary}; whose their slots are isn't known: {error.line}", {}
    return Contents(summary, params, slots, _untaken(checkpoint, params, slots))


def _each_called(beside: SideBySide) -> Iterator[str]:
    """Yields the name, the place and the number of parameters of each of several optimizers."""
    for place, parts in zip(beside.places, beside.each, strict=True):
        signature, count = signature_of(parts), sum(len(group["params"]) for group in parts.groups)
        name = signature.name if signature else _UNKNOWN
        schema = "" if signature and signature.schema else ", no schema yet"
        yield f"{name} at {'/'.join(map(str, place))}{schema}: {count} parameters"


def _networks(checkpoint: Checkpoint, pairs: Mapping[Path, Path]) -> Contents:
    """Returns what a file holds that has several networks, each with an optimizer."""
    sentences = []
    for model, optimizer in pairs.items():
        key = "/".join(map(str, model))
        parts = find_parts(replace(checkpoint, meta={**checkpoint.meta, MODEL_KEY: key}), {})
        signature = signature_of(parts) if parts else None
        name = signature.name if signature else _UNKNOWN
        sentences.append(f"{key}, moved by {name} at {'/'.join(map(str, optimizer))}")
    summary = f"{len(pairs)} networks; --model-key names one of them: {'; '.join(sentences)}"
    first = "/".join(map(str, next(iter(pairs))))
    return Contents(summary, {}, {}, checkpoint.tensors, remedy=by_model_key(first))


def _unpaired(checkpoint: Checkpoint) -> Contents | None:
    """Returns what a file holds that has several optimizers, and names that pair them with no network.

    Source: jik876/hifi-gan, train.py: `do_` files have two discriminators, and an optimizer of both.
    """
    optimizers = ["/".join(map(str, path)) for path in optimizers_in(checkpoint.tree)]
    if len(optimizers) < 2:
        return None
    models = possible_models(checkpoint.tree)
    if not models:
        return None
    keys = "--model-key and --optimizer-key say which go together"
    summary = f"optimizers at {', '.join(optimizers)}, and weights at {', '.join(models)}: {keys}"
    remedy = f"name both, for example --model-key {models[0]} --optimizer-key {optimizers[0]}"
    return Contents(summary, {}, {}, checkpoint.tensors, remedy=remedy)


def signature_of(parts: Parts, variants: Mapping[str, str] = MappingProxyType({})) -> Signature | None:
    """Returns the signature that fits an optimizer, also if slots are lost; None if none fits.

    Args:
        parts: The optimizer.
        variants: Whose rule it is, by schema, if somebody says so.

    Groups without parameters say nothing, as torch.distributed takes their options. Slots are lost where a group's
    options are those of a schema's optimizer or of a class of PyTorch, and some of its slots, but not all, are there:
    decoding lists what is missing.
    """
    slots = {str(slot) for record in parts.state.values() for slot in unwrapped_record(record)}
    slots |= parts.common.keys()
    groups = [group for group in parts.groups if group["params"]] or parts.groups
    candidates = [
        candidate
        for candidate in _candidates(parts.places[1])
        if not candidate.asked or variants.get(candidate.schema or "", variants.get("")) == candidate.variant
    ]
    fits = [signature for signature in candidates if signature.fits(slots, groups)]
    if not fits:
        fits = [signature for signature in candidates if _has_lost(signature, slots, groups)]
    return max(
        fits, key=lambda candidate: len(slots & {*candidate.slots}) + len(candidate.options), default=None
    )


def _candidates(place: Path) -> list[Signature]:
    """Returns the signatures of the class whose name stands above a state; of all classes where none is known so.

    Source: mosaicml/composer, composer/core/state.py, `State.state_dict`: optimizers lie under their classes' names.
    """
    called = str(place[-1]) if place else ""
    named = [signature for signature in signatures() if signature.called and signature.called == called]
    return named or [signature for signature in signatures() if not signature.called]


def _has_lost(signature: Signature, slots: Collection[str], groups: Sequence[Mapping[str, Any]]) -> bool:
    left = {*slots} - {STEP}
    is_telling = signature.schema is not None and len(signature.options) + len(signature.fixed) >= _TELLING
    if signature.schema is None and signature.shaped:
        rare = {*signature.options} - _usual() - _OF_MANY
        is_telling = bool(rare) or (STEP in slots and all(group.keys() >= _OF_TORCH for group in groups))
    is_part = bool(left) and left <= {*signature.slots, *signature.more} and not left >= {*signature.slots}
    return is_telling and is_part and signature.fits(signature.slots, groups)


def unwrapped_record(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parameter's state without the part in which bitsandbytes keeps its tensors since 0.49.

    Source: bitsandbytes-foundation/bitsandbytes, bitsandbytes/optim/optimizer.py, `Optimizer8bit.state_dict`.
    """
    part = record.get(WRAPPED)
    if not isinstance(part, Mapping):
        return record
    return {**{key: value for key, value in record.items() if key != WRAPPED}, **part}


@cache
def signatures() -> tuple[Signature, ...]:
    """Returns all signatures, as signatures.json has them."""
    return tuple(map(_signature, shipped_json(__package__, "signatures.json")["optimizers"]))


@cache
def _elsewhere() -> frozenset[str]:
    """Returns the options that change an update, and are of no optimizer whose signature doesn't name them."""
    return frozenset(shipped_json(__package__, "signatures.json")["elsewhere"])


@cache
def _usual() -> frozenset[str]:
    """Returns the options that many optimizers share, and that tell none of them."""
    return frozenset(shipped_json(__package__, "signatures.json")["usual"])


def _signature(entry: Mapping[str, Any]) -> Signature:
    fields: dict[str, Any] = {
        key: tuple(part) if isinstance(part, list) else part for key, part in entry.items()
    }
    return Signature(**fields)


def _weights(checkpoint: Checkpoint) -> Contents | None:
    place = model_place(checkpoint.tree, checkpoint.meta.get(MODEL_KEY))
    models = possible_models(checkpoint.tree)
    if place is None and models:
        summary = f"weights at {' or '.join(models)}: --model-key says which; no optimizer"
        return Contents(summary, {}, {}, checkpoint.tensors, remedy=by_model_key(models[0]))
    if place is None:
        return None
    model = at(checkpoint.tree, place) if place else loose(checkpoint.tree)
    params = {path_of(str(name)): tensor for name, tensor in model.items()}
    taken = {id(tensor) for tensor in params.values()}
    others = {key: tensor for key, tensor in checkpoint.tensors.items() if id(tensor) not in taken}
    where = f"at {'/'.join(map(str, place))}" if place else "at the top"
    return Contents(f"weights alone, {where}; no optimizer", params, {}, others)


def _schedule(checkpoint: Checkpoint) -> Contents | None:
    """Returns what a file holds that is a learning-rate schedule's state alone; None if it is none."""
    schedules = () if checkpoint.tensors else run_of({BESIDE: {"scheduler": checkpoint.tree}}).schedules
    if not schedules or not checkpoint.tree.keys() & {"last_epoch", "_last_lr"}:
        return None
    summary = f"a learning-rate schedule alone ({schedules[0].kind}): no weights and no optimizer"
    return Contents(summary, {}, {}, {})


def _by_parameter(
    parts: Parts, is_sorted: bool, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Mapping[str, Tensor], Mapping[str, Any]]]:
    """Yields each parameter's path, slots, and options with what else its state holds."""
    shapes_of_model = {tensor.shape for tensor in parts.model.values()}
    shapes = [
        [shape_of(parts.state.get(i, {}), shapes_of_model) for i in group["params"]] for group in parts.groups
    ]
    order = found_order(parts.groups, shapes, parts.model, names, is_sorted)
    for group, indices in zip(parts.groups, order.groups, strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for index, name in zip(group["params"], indices, strict=True):
            record = parts.state.get(index, {})
            numbers = {f"state/{key}": item for key, item in record.items() if not isinstance(item, Tensor)}
            yield path_of(name), dict(_tensors(record)), {**options, **numbers}


def shape_of(record: Mapping[str, Any], shapes_of_model: set[Shape]) -> Shape | None:
    """Returns the shape of a parameter, if a slot has it: its largest one, if a parameter has that shape.

    Where slots of as many axes have others, they are halves or factors, and none shows the parameter's shape.
    """
    shapes = [tensor.shape for _, tensor in _tensors(record) if math.prod(tensor.shape)]
    largest = max(shapes, key=lambda shape: (len(shape), math.prod(shape)), default=None)
    is_one = all(shape == largest or len(shape) < len(largest or ()) for shape in shapes)
    return largest if is_one and largest in shapes_of_model else None


def _tensors(record: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    yield from tensor_names(dict(record)).items()
