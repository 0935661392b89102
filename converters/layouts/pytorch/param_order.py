"""Which parameter an optimizer's index means: by names in its groups, by names that were given, or by shapes.

An index says nothing by itself. Shapes decide where they can; parameters of one shape in one group are taken in the
order of the model part, or of the names that were given, which is said. The shapes of a group have to stand in that
order too: where they stand in the alphabet's, as minGPT sorts names, that one is taken, and in no other. A file that
sorts by name still tells the order of a shape whose names differ in their numbers alone: layers stand in the order of
their numbers. Where equal shapes stand in several groups, nothing decides, unless each parameter has a group of its
own, as detectron2 and mmengine make them. Nor does it where the model has more tensors of a shape than the optimizer.
The running statistics of a batch norm are no parameters, which their names say.

Source: pytorch/pytorch torch/nn/modules/batchnorm.py, `_NormBase.__init__`; karpathy/minGPT mingpt/model.py,
`configure_optimizers`; facebookresearch/detectron2 detectron2/solver/build.py, `get_default_optimizer_params`;
open-mmlab/mmengine mmengine/optim/optimizer/default_constructor.py, `add_params`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from statekit.converters.layouts.pytorch.parts import is_average
from statekit.errors import Faults, NamesError, StateError
from statekit.state.evidence import Fact, ordered
from statekit.state.param_names import as_named, is_adapted, is_trained_with_adapter
from statekit.tensors.tensor import Shape, Tensor, apart

_NUMBER = re.compile(r"[0-9]{1,9}")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
OWN_MODEL = "the model's parameters"
MODEL_PART, _GIVEN = "the model part", "the names given"
ORDERS = {
    MODEL_PART: "the model's order",
    OWN_MODEL: "the order of the given model",
    "their layers": "the order of their layers",
    _GIVEN: "",
}
"""What a fact calls an order that was taken, by whose it is; what a user gives is no assumption."""
BY_NAME = "and the model's file sorts them by name"
REMEDY = (
    "statekit.torch.load_optimizer(..., model.named_parameters()) knows their order; or give the names in the order of "
    "the parameters: --param-names FILE, in Python param_names=[...]"
)

OF_GROUPS = (
    "the model's order says nothing of the optimizer's groups: give the names in the order of the optimizer's "
    "parameters, param_names=[...]; statekit.hf.NamesCallback writes them at each save"
)
"""What helps a caller whose model doesn't tell the order either."""


@dataclass(frozen=True)
class Order:
    """The parameters of an optimizer.

    Attributes:
        groups: Names in each group, in the order of its indices.
        notes: What was assumed, a sentence each.
        assumed: The order in which parameters of one shape were taken, where neither names nor shapes tell it.
    """

    groups: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    assumed: str = ""

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What the names of the parameters rest on, where nothing proves them."""
        return (ordered(self.assumed),) if self.assumed else ()


def _order_by_shapes(
    shapes: Sequence[Sequence[Shape | None]],
    model_shapes: Mapping[str, Shape],
    is_sorted: bool,
    own_model: Iterable[str],
    remedy: str,
) -> Order:
    """Returns the order that shapes alone tell, else that of the caller's model; arguments are as in `found_order`."""
    try:
        return _by_shapes(shapes, model_shapes, is_sorted, remedy)
    except StateError:
        names = dict.fromkeys(name for name in as_named(own_model, model_shapes) if name in model_shapes)
        if not names:
            raise
        trained = {name: model_shapes[name] for name in names}
        others = [name for name in model_shapes if name not in trained]
        order = _with_slots(shapes, trained, others, OWN_MODEL, False, remedy)
        return order or shaped_order(shapes, trained, OWN_MODEL, remedy=remedy)


def found_order(
    groups: Sequence[Mapping[str, Any]],
    shapes: Sequence[Sequence[Shape | None]],
    model: Mapping[str, Tensor],
    given: Sequence[str] | None,
    is_sorted: bool,
    own_model: Iterable[str] | None = None,
    remedy: str = REMEDY,
) -> Order:
    """Returns the order by what tells it.

    Args:
        groups: The optimizer's groups.
        shapes: For each group the shape of each of its parameters, as its slots have it; None where it has none.
        model: By name.
        given: Names in the order of the optimizer's parameters, or all of the model in its order (`named_parameters()`,
            the keys of `state_dict()`), with dots or slashes.
        is_sorted: Whether the model part is sorted by name.
        own_model: Names of the caller's model, in its order, which is asked only where the checkpoint tells nothing: it
            says nothing of groups.
        remedy: What helps where nothing tells it.

    Raises:
        NamesError: Nothing tells it; names every case.
        StateError: Names were given that don't fit.
    """
    named = named_order(groups, model, None)
    if named is not None:
        return named
    statistics = set(running_statistics(model))
    model_shapes = {name: tensor.shape for name, tensor in apart(model).items() if name not in statistics}
    if given is None:
        order = _order_by_shapes(shapes, model_shapes, is_sorted, own_model or (), remedy)
        _check_ends(order, groups, remedy)
        return order
    names = _known(given, model)
    flat = [shape for group in shapes for shape in group]
    listed = len(names) == len(flat) and all(
        shape in (None, model[name].shape) for name, shape in zip(names, flat, strict=True)
    )
    if listed or len(names) < len(flat):
        return _cut(groups, names)
    given_shapes = {name: model_shapes[name] for name in names if name in model_shapes}
    return _of_adapter(shapes, given_shapes, False, _GIVEN) or shaped_order(shapes, given_shapes, _GIVEN)


def _by_shapes(
    shapes: Sequence[Sequence[Shape | None]], model: Mapping[str, Shape], is_sorted: bool, remedy: str
) -> Order:
    """Returns the order that shapes tell, of the whole model or of a part of it."""
    try:
        return shaped_order(shapes, model, MODEL_PART, is_sorted, remedy)
    except StateError:
        ways = (_without_averages, _of_adapter, _by_adapted_modules, _in_turn, _by_modules)
        orders = (way(shapes, model, is_sorted) for way in ways)
        if order := next(filter(None, orders), None):
            return order
        raise


def _without_averages(
    shapes: Sequence[Sequence[Shape | None]], model: Mapping[str, Shape], is_sorted: bool
) -> Order | None:
    """Returns the order of the parameters that aren't called averages; None where there are none, or shapes don't tell.

    Source: CompVis/latent-diffusion, ldm/modules/ema.py, `LitEma`: averages are buffers of `model_ema`.
    """
    averages = [name for name in model if is_average(name.partition(".")[0])]
    if not averages:
        return None
    averaged = {*averages}
    moved = {name: shape for name, shape in model.items() if name not in averaged}
    try:
        order = shaped_order(shapes, moved, MODEL_PART, is_sorted)
    except StateError:
        return None
    note = (
        f"{len(averages)} tensors of the model part are averages, as {averages[0]}: no optimizer moves them."
    )
    return replace(order, notes=(*order.notes, note))


def _of_adapter(
    shapes: Sequence[Sequence[Shape | None]],
    model: Mapping[str, Shape],
    is_sorted: bool,
    source: str = MODEL_PART,
) -> Order | None:
    """Returns the order of the parameters that PEFT trains: of adapters, and of modules that it saves whole.

    It is None where a model has no adapter, or where the optimizer moves other parameters too.

    Source: huggingface/peft src/peft/utils/other.py, `ModulesToSaveWrapper`.
    """
    trained = {name: shape for name, shape in model.items() if is_trained_with_adapter(name)}
    if not any(map(is_adapted, trained)) or len(trained) != sum(map(len, shapes)):
        return None
    try:
        order = shaped_order(shapes, trained, source, is_sorted)
    except StateError:
        return None
    if len(trained) == len(model):
        return order
    note = f"An adapter's {len(trained)} parameters are moved, and {len(model) - len(trained)} others stand still."
    return replace(order, notes=(*order.notes, note))


_OF_ADAPTER = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\..+)?"
)
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def _by_adapted_modules(
    shapes: Sequence[Sequence[Shape | None]], model: Mapping[str, Shape], is_sorted: bool
) -> Order | None:
    """Returns the order of adapters; those of a module follow one another. None where modules fit in several ways.

    Source: huggingface/peft src/peft/tuners/lora/layer.py, `LoraLayer.__init__`: the parts of a module in their order.
    """
    moved = [group for group in shapes if group]
    matches = [match for name in model if (match := _OF_ADAPTER.fullmatch(name))]
    if not is_sorted or len(moved) != 1 or not len(matches) == len(moved[0]) == len(model):
        return None
    if names := _in_turn_by_shapes(_modules_by_template(matches), model, moved[0]):
        return _taken(tuple(tuple(names) if group else () for group in shapes), len(names), "their layers")
    return None


def _in_turn_by_shapes(
    waiting: Sequence[list[list[str]]], model: Mapping[str, Shape], shapes: Sequence[Shape | None]
) -> list[str]:
    """Returns the parameters' names, module by module; none unless the shapes fit exactly one next module."""
    names: list[str] = []
    while len(names) < len(shapes):
        left = list(shapes[len(names) :])
        fitting = [some for some in waiting if some and left[: len(some[0])] == [model[n] for n in some[0]]]
        if len(fitting) != 1:
            return []
        names += fitting[0].pop(0)
    return names


def _modules_by_template(matches: Iterable[re.Match[str]]) -> list[list[list[str]]]:
    """Returns the parameters of adapted modules, those that differ in numbers alone together, by these numbers."""
    modules: dict[str, list[tuple[int, str]]] = {}
    for match in matches:
        modules.setdefault(match["module"], []).append((_PARTS.index(match["part"]), match[0]))
    templates: dict[tuple[str, ...], list[tuple[list[int], list[str]]]] = {}
    for module, parts in modules.items():
        keys = module.split(".")
        numbers = [int(key) for key in keys if _NUMBER.fullmatch(key)]
        template = tuple("0" if _NUMBER.fullmatch(key) else key for key in keys)
        templates.setdefault(template, []).append((numbers, [name for _, name in sorted(parts)]))
    return [[names for _, names in sorted(alike)] for alike in templates.values()]


def _in_turn(
    shapes: Sequence[Sequence[Shape | None]], model: Mapping[str, Shape], is_sorted: bool
) -> Order | None:
    """Returns the order of a part of the model, where one way alone is left to take its shapes from the model in turn.

    The first that fits from the front and the first from the back are the same then. None where they aren't, or where
    groups would share a parameter.
    """
    if is_sorted:
        return None
    forward, backward = list(model.items()), list(model.items())[::-1]
    groups = [_first_fitting(group, forward) for group in shapes]
    again = [_first_fitting(group[::-1], backward)[::-1] for group in shapes]
    names = [name for group in groups for name in group]
    whole = [len(group) for group in groups] == [len(group) for group in shapes]
    if groups != again or not whole or len(names) != len({*names}):
        return None
    note = f"The optimizer names no parameters; its {len(names)} fit the model part's order in one way alone."
    return Order(tuple(map(tuple, groups)), (note,), ORDERS[MODEL_PART])


def _first_fitting(shapes: Sequence[Shape | None], model: Sequence[tuple[str, Shape]]) -> list[str]:
    """Returns the first names that have these shapes in turn; fewer where the model ends before."""
    left = iter(model)
    names = (next((name for name, other in left if other == shape), None) for shape in shapes)
    return [name for name in names if name is not None]


def _by_modules(
    shapes: Sequence[Sequence[Shape | None]], model: Mapping[str, Shape], is_sorted: bool
) -> Order | None:
    """Returns the order of groups that move one module each; None where a group fits no module, or several.

    Such are the optimizers of a generator and of a discriminator that stand in one model. Each group has the shapes of
    one module alone, and together they are the whole model.
    """
    if is_sorted or len(shapes) < 2:
        return None
    by_shapes: dict[tuple[Shape | None, ...], list[tuple[str, ...]]] = {}
    for names in dict.fromkeys(_modules_in(model)):
        by_shapes.setdefault(tuple(model[name] for name in names), []).append(names)
    fitting = [by_shapes.get(tuple(group), []) for group in shapes]
    if any(len(modules) != 1 for modules in fitting):
        return None
    groups = tuple(modules[0] for modules in fitting)
    moved = [name for names in groups for name in names]
    if len(moved) != len(model) or len({*moved}) != len(moved):
        return None
    note = f"Each of {len(shapes)} groups has the shapes of one module of the model, and of no other."
    order = _taken(groups, len(moved), MODEL_PART)
    return replace(order, notes=(note, *order.notes))


def _modules_in(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yields the names of the parameters in each module, level by level: no more is held than the names' own bytes."""
    ends = {name: name.find(".") for name in names}
    while ends := {name: end for name, end in ends.items() if end >= 0}:
        inside: dict[str, list[str]] = {}
        for name, end in ends.items():
            inside.setdefault(name[:end], []).append(name)
        yield from map(tuple, inside.values())
        ends = {name: name.find(".", end + 1) for name, end in ends.items()}


def running_statistics(names: Iterable[str]) -> Iterator[str]:
    """Yields the names of buffers that batch norms keep, whatever module they stand in.

    Example:
        >>> list(running_statistics(["1.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"]))
        ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    every = {*names}
    for name in names:
        module, _, last = name.rpartition(".")
        around = f"{module}." if module else ""
        if last in _STATISTICS and {f"{around}{statistic}" for statistic in _STATISTICS[:2]} <= every:
            yield name


def named_order(
    groups: Sequence[Mapping[str, Any]], model: Mapping[str, Any], given: Sequence[str] | None
) -> Order | None:
    """Returns the order that the groups themselves or the user names; None if neither does.

    Args:
        groups: The optimizer's groups.
        model: By name.
        given: Names in the order of all parameters, with dots or slashes.

    Raises:
        StateError: There are more or fewer names than parameters, or one that the model hasn't.
    """
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return Order(tuple(tuple(group["params"]) for group in groups))
    if all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        names = [str(name) for group in groups for name in group["param_names"]]
        dotted = as_named(names, model)  # the model may be saved without the wrapper that it was trained in
        if (len({*dotted}) == len(dotted) and {*dotted} <= model.keys()) or not _are_of_parts(names, model):
            return _cut(groups, dotted)
    if given is None:
        return None
    return _cut(groups, _known(given, model))


def _are_of_parts(names: Sequence[str], model: Mapping[str, Any]) -> bool:
    """Tells whether names are those within parts of the model, from which nobody can tell the parts."""
    ends = {name[at + 1 :] for name in model for at, letter in enumerate(name) if letter == "."}
    return {*names} <= {*ends}


def _check_ends(order: Order, groups: Sequence[Mapping[str, Any]], remedy: str) -> None:
    """Refuses an order that names within parts of the model, which the groups have, contradict."""
    pairs = zip(order.groups, groups, strict=True)
    Faults(
        (f"is {end} to its optimizer", name)
        for names, group in pairs
        for name, end in zip(names, group.get("param_names", names), strict=False)
        if name != end and not name.endswith(f".{end}")
    ).check(StateError, "The optimizer's own names contradict the order of its parameters", remedy=remedy)


def _known(given: Sequence[str], model: Mapping[str, Any]) -> list[str]:
    """Returns names as the model has them."""
    # Millions of names that no model of a few has need no partners.
    dotted = as_named(given, model) if len(given) <= len(model) else list(given)
    unknown = Faults(("isn't in the model part", name) for name in dotted if name not in model)
    unknown.check(StateError, "Names were given that the model hasn't")
    return dotted


def _cut(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Order:
    """Returns the order in which names follow one another over the groups."""
    count = sum(len(group["params"]) for group in groups)
    if len(names) != count:
        raise StateError(
            "Names were given for another number of parameters.", expected=count, found=len(names)
        )
    left = iter(names)
    return Order(tuple(tuple(next(left) for _ in group["params"]) for group in groups))


def _groups_by_shape(groups: Sequence[Sequence[Shape | None]]) -> dict[Shape, list[int]]:
    """Returns for each shape the numbers of its parameters' groups."""
    numbers: dict[Shape, list[int]] = {}
    for number, group in enumerate(groups):
        for shape in (shape for shape in group if shape is not None):
            numbers.setdefault(shape, []).append(number)
    return numbers


def shaped_order(
    groups: Sequence[Sequence[Shape | None]],
    model: Mapping[str, Shape],
    source: str = MODEL_PART,
    is_sorted: bool = False,
    remedy: str = REMEDY,
) -> Order:
    """Returns the order that shapes tell.

    Args:
        groups: For each group the shape of each of its parameters, as its slots have it; None where it has none.
        model: Shape by name, in the order of the model part.
        source: What has this order, for people.
        is_sorted: Whether that is the order of the alphabet.
        remedy: What helps where they don't.

    Raises:
        NamesError: Shapes don't decide; names every case.
    """
    if any(shape is None for group in groups for shape in group):
        return _whole_order(groups, model, source, is_sorted, remedy)
    if not is_sorted and (of_each := _order_of_each(groups, model, source)):
        return of_each
    names = _names_by_shape(groups, model, is_sorted, remedy)
    several = sum(len(some) for some in names.values() if len(some) > 1)
    if is_sorted or not several:
        if several:
            return _taken(_in_turn_of(groups, names), several, "their layers")
        return Order(_in_turn_of(groups, names))
    orders = {source: [*model], f"the alphabet, as the shapes of {source} stand": sorted(model)}
    for whose, in_order in orders.items():
        order = _in_turn_of(groups, names, in_order)
        if all(_stands_in(of_group, in_order) for of_group in order):
            return _taken(order, several, whose)
    raise NamesError(
        "The optimizer's parameters don't stand in the order of the model, and several have one shape.",
        expected=f"the shapes of each group in the order of {source}",
        found=f"{several} of equal shapes",
        remedy=remedy,
    )


def _names_by_shape(
    groups: Sequence[Sequence[Shape | None]], model: Mapping[str, Shape], is_sorted: bool, remedy: str
) -> dict[Shape, list[str]]:
    """Returns the names of each shape that the optimizer has."""
    names: dict[Shape, list[str]] = {}
    for name, shape in model.items():
        names.setdefault(shape, []).append(name)
    faults, alike = Faults(), dict[Shape, list[str]]()
    for shape, numbers in _groups_by_shape(groups).items():
        alike[shape] = names.get(shape, [])
        if len(alike[shape]) != len(numbers):
            faults.add(f"{len(numbers)} in the optimizer, {len(alike[shape])} in the model", f"shape {shape}")
        elif len(set(numbers)) > 1:
            faults.add(f"stands in groups {sorted(set(numbers))}", f"shape {shape}")
        elif is_sorted and len(numbers) > 1:
            alike[shape] = _by_number(alike[shape])
            faults += [(f"{len(numbers)} parameters have it, {BY_NAME}", f"shape {shape}")] * (
                not alike[shape]
            )
    faults.check(NamesError, "Shapes don't tell which parameters the optimizer's indices mean", remedy=remedy)
    return alike


def _in_turn_of(
    groups: Sequence[Sequence[Shape | None]],
    names: Mapping[Shape, Sequence[str]],
    ordered: Sequence[str] = (),
) -> tuple[tuple[str, ...], ...]:
    """Returns the names of each group: those of a shape in turn, in the given order if there is one."""
    place = {name: i for i, name in enumerate(ordered)}
    left = {shape: iter(sorted(some, key=lambda name: place.get(name, 0))) for shape, some in names.items()}
    return tuple(tuple(next(left[shape]) for shape in group if shape is not None) for group in groups)


def _stands_in(names: Sequence[str], ordered: Sequence[str]) -> bool:
    """Tells whether names follow one another as in an order."""
    place = {name: i for i, name in enumerate(ordered)}
    return all(place[name] < place[after] for name, after in pairwise(names))


def _order_of_each(
    groups: Sequence[Sequence[Shape | None]], model: Mapping[str, Shape], source: str
) -> Order | None:
    """Returns the order of parameters that each have a group of their own; None where their shapes show none."""
    names = [group[0] for group in groups if len(group) == 1]
    if len(names) != len(groups) or len({*names}) < 2:
        return None
    try:
        order = shaped_order([names], model, source)
    except NamesError:
        return None
    notes = (f"Each of {len(names)} parameters has a group of its own.", *order.notes) if order.notes else ()
    return Order(tuple((name,) for name in order.groups[0]), notes, order.assumed)


def _by_number(names: Sequence[str]) -> list[str]:
    """Returns names in the order of their layers' numbers; none if they differ in something else.

    Example:
        >>> _by_number(["layers.10.q.weight", "layers.2.q.weight"]), _by_number(["fc2.weight", "fc1.weight"])
        (['layers.2.q.weight', 'layers.10.q.weight'], [])
    """
    parts = {name: name.split(".") for name in names}
    templates = {tuple("0" if _NUMBER.fullmatch(key) else key for key in keys) for keys in parts.values()}
    if len(templates) > 1:
        return []
    return sorted(names, key=lambda name: [int(key) for key in parts[name] if _NUMBER.fullmatch(key)])


def _whole_order(
    groups: Sequence[Sequence[Shape | None]],
    model: Mapping[str, Shape],
    source: str,
    is_sorted: bool,
    remedy: str,
) -> Order:
    """Takes all of the model in its order, where some parameters have no slots to show a shape."""
    if is_sorted and (order := _partly_moved(groups, model, source, remedy)):
        return order
    if len(groups) != 1 or len(groups[0]) != len(model) or (is_sorted and len(model) > 1):
        raise NamesError(
            "Some parameters have no slots, so that nothing tells which the optimizer's indices mean.",
            expected=f"one group of {len(model)} parameters, all that the model has, in their order",
            found=f"{len(groups)} groups of {[len(group) for group in groups]}",
            remedy=remedy,
        )
    wrong = Faults(
        (f"has shape {shape}, its slots {slot_shape}", name)
        for (name, shape), slot_shape in zip(model.items(), groups[0], strict=True)
        if slot_shape not in (None, shape)
    )
    wrong.check(NamesError, "The optimizer's parameters don't stand in the order of the model", remedy=remedy)
    if all(shape is None for shape in groups[0]):  # what has no slots goes on the same in any order
        return Order((tuple(model),))
    return _taken((tuple(model),), len(model), source)


def _partly_moved(
    groups: Sequence[Sequence[Shape | None]], model: Mapping[str, Shape], source: str, remedy: str
) -> Order | None:
    """Returns the order where slots have shapes of their own, in a file that sorts by name; None where they haven't."""
    shapes = {shape for group in groups for shape in group}
    moved = {name: shape for name, shape in model.items() if shape in shapes}
    others = [name for name in model if name not in moved]
    return _with_slots(groups, moved, others, source, True, remedy)


def _with_slots(
    groups: Sequence[Sequence[Shape | None]],
    model: Mapping[str, Shape],
    others: Sequence[str],
    source: str,
    is_sorted: bool,
    remedy: str,
) -> Order | None:
    """Returns the order of one group in which some parameters are frozen; None where counts don't fit.

    Args:
        groups: As in `shaped_order`; None is the shape of a parameter without slots.
        model: Shape by name, of the parameters that have slots.
        others: Names of those without, which go on the same in any order.
        source: As in `shaped_order`.
        is_sorted: As in `shaped_order`.
        remedy: As in `shaped_order`.
    """
    slotted = [shape for group in groups for shape in group if shape is not None]
    count = sum(map(len, groups))
    if len(groups) != 1 or len(slotted) != len(model) or count != len(model) + len(others):
        return None
    order = shaped_order([slotted], model, source, is_sorted, remedy)
    moved, still = iter(order.groups[0]), iter(others)
    names = tuple(next(still if shape is None else moved) for shape in groups[0])
    return replace(order, groups=(names,))


def _taken(groups: tuple[tuple[str, ...], ...], count: int, source: str) -> Order:
    """Returns groups in which parameters of equal shapes were taken in some order, and says in which."""
    note = f"The optimizer names no parameters; {count} of equal shapes are taken in the order of {source}."
    return Order(groups, (note,), ORDERS.get(source, "the order of the alphabet"))
