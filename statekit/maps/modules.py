"""Maps by modules: what becomes of a layer's tensors, wherever in a model of one's own it stands.

A module is what stands under one path: `fc1/kernel` and `fc1/bias`. A map has kinds of modules, each with its tensors'
names and ranks on both sides, and what lies between. Names and ranks tell which kind a module is of; what they leave
open the model that goes on shows, or the user says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NoReturn

from statekit.errors import Faults, UsageError
from statekit.maps.along_axis import Reorder
from statekit.maps.links import Link
from statekit.maps.operations import Merge, Operation, Part, Permute
from statekit.state.hyperparameters import last_name
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import walk

FLATTEN, KINDS, HEADS = "flatten", "kinds", "num_heads"
"""What a map by modules is told of a model: images that dense layers read as rows, kinds of modules by name, heads."""
SAME = "same"
"""The kind of what keeps its name and axes."""
_SHOWN = 6


@dataclass(frozen=True)
class Leaf:
    """One tensor of a kind of module, in the direction in which the map is gone.

    Attributes:
        source: Its name below the module's path.
        target: That on the other side.
        rank: How many axes it has.
        operations: What is done to it, as the map's file has it.
        optional: Whether modules of the kind may be without it.
    """

    source: str
    target: str
    rank: int
    operations: tuple[Mapping[str, Any], ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of module.

    Attributes:
        name: What it is called in the map.
        leaves: Its tensors.
        image: Whether it gives images, whose channels the two sides have along other axes.
        classes: Names of the target's classes that are of this kind; empty where the map doesn't say.
        names: Patterns of modules' names, in lower case, that distinguish this kind from others of the same ranks.
        members: Names of modules that are of this kind where an attention's modules stand together.
        of_heads: Whether one side has heads along an axis of their own, so that the other's modules don't show it.
    """

    name: str
    leaves: tuple[Leaf, ...]
    image: bool = False
    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    of_heads: bool = False

    def fits(self, ranks: Mapping[str, int]) -> bool:
        """Tells whether a module of these tensors, name -> rank, may be of this kind."""
        ranks_by_leaf = {leaf.source: leaf.rank for leaf in self.leaves}
        needed = {leaf.source for leaf in self.leaves if not leaf.optional}
        return needed <= ranks.keys() and all(ranks_by_leaf.get(name) == rank for name, rank in ranks.items())

    def is_called(self, name: str) -> bool:
        """Tells whether a module's name distinguishes this kind from others."""
        return any(fnmatchcase(name.lower(), pattern) for pattern in self.names)

    @property
    def reads_rows(self) -> bool:
        """Whether it may read an image that was flattened."""
        return any(operation["op"] == "flattened" for leaf in self.leaves for operation in leaf.operations)


@dataclass(frozen=True)
class TargetModel:
    """A model that is there already and goes on.

    Attributes:
        paths: Its tensors.
        classes: Its modules' classes where they are the framework's own: path -> name.
    """

    paths: frozenset[str]
    classes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Modules:
    """The kinds of modules of a map.

    Attributes:
        kinds: Them.
        beside: Where in a state's `extra` further tensors of modules lie, such as statistics, by slashes.
        left: Names of tensors that the other side hasn't, each with the reason.
        refused: Patterns of modules' paths that the target can't hold, each with the reason.
    """

    kinds: tuple[Kind, ...]
    beside: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, data: Mapping[str, Any], source: str, target: str, turned: Turned) -> Modules | None:
        """Reads the modules of a map's file, gone from one of its sides to the other; None if it has none."""
        if "modules" not in data:
            return None
        kinds = [
            Kind(
                module["kind"],
                tuple(_leaf_of(leaf, source, target, turned(leaf)) for leaf in module["parameters"]),
                module.get("image", False),
                tuple(module.get("classes", {}).get(target, ())),
                tuple(module.get("names", {}).get(source, ())),
                tuple(module.get("attention", {}).get(source, ())),
                "attention" in module,
            )
            for module in data["modules"]
        ]
        return cls(
            tuple(kinds),
            tuple(data[source].get("beside", ())),
            {entry[source]: entry["because"] for entry in data.get("left", ()) if source in entry},
            tuple((entry[source], entry["because"]) for entry in data.get("refused", ()) if source in entry),
        )

    def gathered(self, state: TrainState) -> TrainState:
        """Returns a state with the tensors of modules that lie beside its parameters among these, without slots.

        What the other side hasn't is left out, and said.
        """
        extra, params = dict(state.extra), dict(state.params)
        gone: dict[str, list[str]] = {}
        for place in self.beside:
            part = _taken(extra, place.split("/"))
            for path, tensor in _tensors(part):
                if path in params:
                    gone.setdefault("a parameter has its name", []).append(f"{place}/{path}")
                params.setdefault(path, tensor)
            for keys, leaf in walk(part):
                if _is_other(leaf):
                    gone.setdefault("no tensor of a module", []).append("/".join(map(str, (place, *keys))))
        for path in [path for path in params if last_name(path) in self.left and path not in state.slots]:
            gone.setdefault(self.left[last_name(path)], []).append(path)
            del params[path]
        words = [f"{', '.join(_few(names))} ({why})" for why, names in gone.items()]
        return replace(
            state,
            params=params,
            extra=extra,
            assumptions=(*state.assumptions, *(f"The map leaves behind {word}." for word in words)),
        )

    def links(
        self,
        shapes: Mapping[str, Shape],
        config: Mapping[str, Any],
        model: TargetModel | None,
        faults: Faults,
    ) -> tuple[list[Link], tuple[str, ...]]:
        """Returns the links of all parameters, and the assumed kinds of modules; adds faults.

        Args:
            shapes: The parameters' shapes, by path.
            config: What was said of the model.
            model: The target's, where it is there already.
            faults: What doesn't fit is added to it.

        Raises:
            UsageError: Nothing tells what kind a module is of, or whether a dense one reads an image.
        """
        kinds = dict(self._kinds(shapes, config.get(KINDS, {}), model, faults))
        asked = [name for name, kind in kinds.items() if kind.reads_rows]
        images = [name for name, kind in kinds.items() if kind.image]
        if images and asked and FLATTEN not in config:
            self._ask(images, asked)
        flatten: Mapping[str, Sequence[int]] = config.get(FLATTEN, {})
        faults += [
            ("is no dense module, but flatten names it", name) for name in flatten if name not in asked
        ]
        links = []
        for path, shape in shapes.items():
            name = _module(path)
            if (kind := kinds.get(name)) is not None:
                links.append(self._link(path, shape, kind, config, faults))
            elif _said(config.get(KINDS, {}), path, name) == SAME:
                links.append(Link((path,), path))
        return links, _convolution_notes(images, model)

    def _link(self, path: str, shape: Shape, kind: Kind, config: Mapping[str, Any], faults: Faults) -> Link:
        """Returns what becomes of one parameter of a module of a kind."""
        name = _module(path)
        leaf = next(leaf for leaf in kind.leaves if leaf.source == last_name(path))
        image: Sequence[int] | None = config.get(FLATTEN, {}).get(name)
        steps: list[Operation] = []
        lengths = shape  # what the axes are before the next step
        for operation in leaf.operations:
            axis = operation.get("axis", 0)
            if operation["op"] == "permute":
                steps.append(Permute(tuple(operation["order"])))
                lengths = tuple(lengths[i] for i in operation["order"])
            elif operation["op"] == "merge":
                steps.append(Merge(axis))
                lengths = (*lengths[:axis], lengths[axis] * lengths[axis + 1], *lengths[axis + 2 :])
            elif operation["op"] == "part":
                heads = self._heads_of(name, config)
                steps.append(Part(axis, heads))
                lengths = (*lengths[:axis], heads, lengths[axis] // heads, *lengths[axis + 1 :])
            elif image is not None:
                if prod(image) != lengths[operation["axis"]]:
                    rows = lengths[operation["axis"]]
                    faults.add(f"reads {rows} values, but flatten says an image of {list(image)}", name)
                steps.append(_flattened(operation, image))
        return Link((path,), "/".join((*path.split("/")[:-1], leaf.target)), tuple(steps))

    def _kinds(
        self,
        shapes: Mapping[str, Shape],
        stated: Mapping[str, str],
        model: TargetModel | None,
        faults: Faults,
    ) -> Iterator[tuple[str, Kind]]:
        """Yields the kind of each module."""
        faults += self._unfit_kinds(shapes, stated)
        modules: dict[str, dict[str, Shape]] = {}
        for path, shape in shapes.items():
            if _said(stated, path, _module(path)) != SAME:
                modules.setdefault(_module(path), {})[last_name(path)] = shape
        attention = dict(self._attention(modules))
        ambiguous: dict[str, list[str]] = {}
        for name, leaves in modules.items():
            ranks = {leaf: len(shape) for leaf, shape in leaves.items()}
            kinds = self._kinds_of(name, ranks, _said(stated, name), attention.get(name), model, faults)
            if len(kinds) == 1:
                yield name, kinds[0]
            elif kinds:
                ambiguous[name] = [kind.name for kind in kinds]
        if ambiguous:
            self._ask_kinds(ambiguous)

    def _unfit_kinds(
        self, shapes: Mapping[str, Shape], stated: Mapping[str, str]
    ) -> Iterator[tuple[str, str]]:
        """Yields what the user says of kinds that can't be: no such kind, or no such module."""
        kinds = (*(kind.name for kind in self.kinds), SAME)
        for pattern, kind in stated.items():
            if kind not in kinds:
                yield f"is said to be of kind {kind}, expected one of {', '.join(kinds)}", pattern
        names = [name for path in shapes for name in (path, _module(path))]
        for pattern in stated:
            if not any(fnmatchcase(name, pattern) for name in names):
                yield "is said to be of a kind, and there is no such module", pattern

    def _kinds_of(
        self,
        name: str,
        ranks: Mapping[str, int],
        stated: str | None,
        attention: Kind | None,
        model: TargetModel | None,
        faults: Faults,
    ) -> list[Kind]:
        """Returns the kinds that a module may have; adds a fault if there is none."""
        if why := next((why for pattern, why in self.refused if fnmatchcase(name, pattern)), None):
            faults.add(f"can't be held by the target: {why}", name)
            return []
        # Modules that stand together as an attention's prove their kinds, unless the user says another.
        kinds = [attention] if attention and stated is None else self._fitting(name, ranks, stated)
        if not kinds and (model is None or name not in model.classes):
            has = ", ".join(f"{leaf} of rank {rank}" for leaf, rank in ranks.items())
            faults.add(f"is of no kind that the map knows: it has {has}", name or "the model itself")
        return kinds if model is None else _of_model(kinds, name, ranks, model, faults)

    def _ask_kinds(self, ambiguous: Mapping[str, Sequence[str]]) -> NoReturn:
        shown = "; ".join(f"{name}: {' or '.join(kinds)}" for name, kinds in ambiguous.items())
        first, kinds = next(iter(ambiguous.items()))
        raise UsageError(
            f"Names and shapes don't tell which kind these modules are of: {shown}.",
            place="--config",
            remedy=f"""say it, by patterns: --config '{KINDS}={{"{first}": "{kinds[-1]}", "*": "{kinds[0]}"}}'""",
        )

    def _fitting(self, name: str, ranks: Mapping[str, int], stated: str | None) -> list[Kind]:
        """Returns the kinds that a module may be of by its tensors, and by its name where these leave several open."""
        fitting = [kind for kind in self.kinds if kind.fits(ranks)]
        if stated is not None:
            return [kind for kind in fitting if kind.name == stated]
        if len(fitting) > 1:
            fitting = [kind for kind in fitting if kind.members or not kind.of_heads]
        return [kind for kind in fitting if kind.is_called(last_name(name))] or fitting

    def _attention(self, modules: Mapping[str, Mapping[str, Shape]]) -> Iterator[tuple[str, Kind]]:
        """Yields the modules that stand together as an attention's, whose heads are axes of their own.

        Queries and keys have heads of one size, and the last module reads what the others make: shapes prove it.
        """
        count = sum(len(kind.members) for kind in self.kinds)
        for around in dict.fromkeys(name.rpartition("/")[0] for name in modules):
            at = f"{around}/" if around else ""
            parts = {name: (kind, kernel) for name, kind, kernel in self._members(at, modules)}
            if len(parts) == count == 4:
                query, key, value, out = (kernel for _, kernel in parts.values())
                if query[2] == key[2] and key[1] == value[1] and out[:2] == (query[1], value[2]):
                    yield from ((at + name, kind) for name, (kind, _) in parts.items())

    def _members(
        self, at: str, modules: Mapping[str, Mapping[str, Shape]]
    ) -> Iterator[tuple[str, Kind, Shape]]:
        """Yields the modules below a place that may be an attention's, each with its kind and its kernel's shape."""
        for kind in self.kinds:
            for name in kind.members:
                shapes = modules.get(at + name, {})
                if kind.fits({leaf: len(shape) for leaf, shape in shapes.items()}):
                    yield name, kind, max(shapes.values(), key=len)

    def _heads_of(self, name: str, config: Mapping[str, Any]) -> int:
        if HEADS not in config:
            raise UsageError(
                f"Nothing tells how many heads stand along an axis of {name}.",
                place="--config",
                remedy=f"say it: --config {HEADS}=8",
            )
        return int(config[HEADS])

    def _ask(self, images: Sequence[str], asked: Sequence[str]) -> NoReturn:
        raise UsageError(
            f"The model has convolutions ({', '.join(_few(images))}), and nothing tells whether one of the dense "
            f"layers ({', '.join(_few(asked))}) reads a flattened image: torch flattens channels first, the other side "
            "last.",
            place="--config",
            remedy=f"""say the image's shape, channels last: --config '{FLATTEN}={{"{asked[0]}": [4, 4, 8]}}'; or """
            f"--config '{FLATTEN}={{}}' if none reads one, or torch's model puts channels last before it flattens",
        )


def _leaf_of(
    data: Mapping[str, Any], source: str, target: str, operations: tuple[Mapping[str, Any], ...]
) -> Leaf:
    """Reads a tensor of a kind; a map's file has its rank on the source's side."""
    joined = sum(operation["op"] == "merge" for operation in data.get("operations", ()))
    rank = data["rank"] - (joined if source == "target" else 0)
    return Leaf(data[source], data[target], rank, operations, data.get("optional", False))


def kind_faults(kind: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what a schema can't say of a kind in a map's file: axes that its tensors haven't."""
    for i, leaf in enumerate(kind["parameters"]):
        rank = leaf["rank"]
        for operation in leaf.get("operations", ()):
            if operation["op"] == "permute" and sorted(operation["order"]) != list(range(rank)):
                yield f"has order {operation['order']} for rank {rank}", f"parameters/{i}"
            if operation["op"] == "flattened" and operation["axis"] >= rank:
                yield f"has no axis {operation['axis']} for rank {rank}", f"parameters/{i}"
            if operation["op"] == "merge":
                rank -= 1
                if operation["axis"] >= rank:
                    yield (
                        f"has no axes {operation['axis']} and {operation['axis'] + 1} to merge",
                        f"parameters/{i}",
                    )


Turned = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], ...]]


def said_faults(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what in a configuration a map by modules can't take."""
    kinds, flatten, heads = config.get(KINDS, {}), config.get(FLATTEN, {}), config.get(HEADS, 1)
    if type(heads) is not int or heads < 1:
        yield f"is {heads!r:.80}, expected a number from 1 on", HEADS
    if not isinstance(kinds, Mapping) or not all(isinstance(kind, str) for kind in kinds.values()):
        yield f"is {kinds!r:.80}, expected module -> kind", KINDS
    if not isinstance(flatten, Mapping) or not all(map(_is_image, flatten.values())):
        yield f"is {flatten!r:.80}, expected module -> lengths of the image's axes, channels last", FLATTEN


def _is_image(shape: object) -> bool:
    return isinstance(shape, list | tuple) and len(shape) > 1 and all(type(n) is int and n > 0 for n in shape)


def _flattened(record: Mapping[str, Any], image: Sequence[int]) -> Operation:
    """Returns what puts the channels of a flattened image first or last along an axis."""
    n, first = len(image), record["channels"] == "first"
    sizes = tuple(image) if first else (image[-1], *image[:-1])
    return Reorder(record["axis"], sizes, (n - 1, *range(n - 1)) if first else (*range(1, n), 0))


def _made(kind: Kind, module: str, leaves: Iterable[str]) -> set[str]:
    """Returns the paths that a module of some kind has on the other side."""
    at = f"{module}/" if module else ""
    return {at + leaf.target for leaf in kind.leaves if leaf.source in leaves}


def _of_model(
    kinds: list[Kind], name: str, ranks: Mapping[str, int], model: TargetModel, faults: Faults
) -> list[Kind]:
    """Returns the module's kinds that the target's model has too; adds a fault if it has another."""
    cls = model.classes.get(name)
    fitting = [kind for kind in kinds if cls is None or not kind.classes or cls in kind.classes]
    if cls is not None and not fitting:
        faults.add(f"is a {cls} in the model, which is of no kind that the map knows", name)
    if len(fitting) > 1:
        fitting = [kind for kind in fitting if _made(kind, name, ranks) <= model.paths] or fitting
    return fitting


def _said(kinds: Mapping[str, str], *names: str) -> str | None:
    """Returns the kind that the first pattern says which fits one of the names."""
    return next(
        (kind for pattern, kind in kinds.items() if any(fnmatchcase(n, pattern) for n in names)), None
    )


def _module(path: str) -> str:
    return path.rpartition("/")[0]


def _convolution_notes(images: Sequence[str], model: TargetModel | None) -> tuple[str, ...]:
    """Returns which modules are taken for convolutions, where the target's model doesn't tell."""
    if not images or (model is not None and model.classes):
        return ()
    few = ", ".join(_few(images))
    return (f"Names don't tell convolutions from transposed ones; taken for convolutions: {few}.",)


def _few(names: Sequence[str]) -> list[str]:
    return [*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])]


def _taken(extra: dict[str, Any], keys: Sequence[str]) -> Any:
    """Takes a part out of `extra`, which is left without it; the other parts stay what they are."""
    key, *below = keys
    part = extra.get(key)
    if not isinstance(part, Mapping):
        return {}
    if not below:
        return extra.pop(key)
    extra[key] = inner = dict(part)
    return _taken(inner, below)


def _is_other(leaf: Any) -> bool:
    """Tells whether a leaf holds something that is no tensor."""
    return leaf is not None and not isinstance(leaf, (Tensor, Mapping, list, tuple))


def _tensors(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _tensors(part, (*path, *str(key).split(".")))
    elif isinstance(tree, Tensor):
        yield "/".join(path), tree
