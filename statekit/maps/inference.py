"""Proposes a map between two versions of one codebase from the names and shapes of both.

A parameter of the new version is settled where its name stands, where shapes leave one, or where names tell one from
the others. What neither tells is a question, with what fits; the user answers it by a pair. Values aren't read, so a
square matrix that was transposed looks as if it stood as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from statekit.errors import UsageError
from statekit.tensors.tensor import Shape

JOINS = "+"
"""Stands between the old parameters of a pair that are joined, in their order."""
_WORD = re.compile(r"[A-Za-z]+|\d+")
_LAYER = "layer"


@dataclass(frozen=True)
class Inferred:
    """What one new parameter is made of.

    Attributes:
        target: Its path.
        sources: The old paths, in their order.
        operations: As a map's file has them.
        because: What shows it.
    """

    target: str
    sources: tuple[str, ...]
    operations: tuple[Mapping[str, Any], ...]
    because: str


@dataclass(frozen=True)
class Question:
    """A new parameter that names and shapes leave open.

    Attributes:
        target: Its path.
        fitting: What it may be made of, each as the left side of a pair.
    """

    target: str
    fitting: tuple[str, ...]


@dataclass(frozen=True)
class Proposal:
    """A map between two versions of a model, which may lack some parameters.

    Attributes:
        inferred: The new parameters that are settled, in the new version's order.
        questions: Those that aren't.
        left: Old parameters of which nothing is made yet.
    """

    inferred: tuple[Inferred, ...]
    questions: tuple[Question, ...]
    left: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every parameter of both versions is settled."""
        return not self.questions and not self.left

    def to_json(self, old: str, new: str) -> dict[str, Any]:
        """Returns the file of the map."""
        words: dict[str, dict[str, str]] = {}
        parameters = [dict(entry) for entry in _folded([_entry(link, words) for link in self.inferred])]
        facts = ["names and shapes of both checkpoints, by statekit maps --infer"]
        whole = {
            "title": f"{old} and {new}",
            "facts": facts,
            "source": {"title": old},
            "target": {"title": new},
        }
        return {**whole, **({"words": words} if words else {}), "parameters": parameters}


@dataclass
class _Pool:
    """What is left of both versions while pairs are found."""

    old: dict[str, Shape]
    new: dict[str, Shape]
    inferred: dict[str, Inferred] = field(default_factory=dict)

    def settle(
        self, target: str, sources: Sequence[str], steps: Sequence[Mapping[str, Any]], why: str
    ) -> None:
        self.inferred[target] = Inferred(target, tuple(sources), tuple(steps), why)
        del self.new[target]
        for path in sources:
            del self.old[path]

    def fitting(self, target: str) -> dict[str, list[Mapping[str, Any]]]:
        """Returns the old parameters whose shapes and numbers fit, each with what becomes of its axes."""
        steps = {path: _steps(shape, self.new[target]) for path, shape in self.old.items()}
        return {p: step for p, step in steps.items() if step is not None and _numbers(p) == _numbers(target)}


def infer(old: Mapping[str, Shape], new: Mapping[str, Shape], pairs: Sequence[str] = ()) -> Proposal:
    """Returns the map that names and shapes of two versions show.

    Args:
        old: Shape by path, of the version that a checkpoint is in.
        new: The same of the version that shall go on.
        pairs: What the user says: `old/path=new/path`, with `+` between old ones that are joined. A pair with one
            number is of all layers that have such names.

    Raises:
        UsageError: A pair names something else, or its shapes don't fit.

    Example:
        >>> proposal = infer({"enc/w": (3, 1, 4), "b": (4,)}, {"encoder/w": (3, 4), "b": (4,)})
        >>> proposal.inferred[0].sources, proposal.inferred[0].operations, proposal.complete
        (('enc/w',), ({'op': 'merge', 'axis': 1, 'outer': 1},), True)
    """
    pool = _Pool(dict(old), dict(new))
    for pair in pairs:
        _answer(pool, pair)
        for other in list(_of_other_layers(pool, pair)):
            _answer(pool, other)
    for path in [path for path, shape in new.items() if path in pool.new and pool.old.get(path) == shape]:
        pool.settle(path, [path], [], "its name")
    while _settled_by_shape(pool) or _settled_by_name(pool):
        pass
    questions = tuple(Question(target, tuple(_candidates(pool, target))) for target in pool.new)
    inferred = tuple(pool.inferred[path] for path in new if path in pool.inferred)
    return Proposal(inferred, questions, tuple(pool.old))


def _answer(pool: _Pool, pair: str) -> None:
    """Settles what the user says."""
    left, _, target = pair.rpartition("=")
    sources = left.split(JOINS)
    unknown = [path for path in sources if path not in pool.old] + [target] * (target not in pool.new)
    shapes = [pool.old[path] for path in sources if path in pool.old]
    steps = None if unknown else _joined(shapes, pool.new[target])
    if steps is None:
        raise UsageError(
            "A pair can't be taken.",
            place="--pair",
            expected="OLD=NEW, or OLD+OLD=NEW in their order, of shapes that fit",
            found=f"{pair}: {', '.join(unknown) + ' is not there' if unknown else shapes}",
        )
    pool.settle(target, sources, steps, "you say it")


def _of_other_layers(pool: _Pool, pair: str) -> Iterator[str]:
    """Yields the same pair of other layers, where one number stands in it and both versions have such names."""
    if len({*_numbers(pair)}) != 1:
        return
    left, _, target = pair.rpartition("=")
    for other in pool.new:
        if _numbers(other)[:1] and re.sub(r"\d+", _numbers(other)[0], target) == other:
            sources = re.sub(r"\d+", _numbers(other)[0], left)
            if all(path in pool.old for path in sources.split(JOINS)):
                yield f"{sources}={other}"


def _settled_by_shape(pool: _Pool) -> bool:
    """Settles pairs of a new and an old parameter that fit each other alone; tells whether there were any."""
    fits = {target: pool.fitting(target) for target in pool.new}
    settled = [
        (target, path, steps)
        for target, fitting in fits.items()
        if len(fitting) == 1 and not _joins(pool, target)
        for path, steps in fitting.items()
        if sum(path in others for others in fits.values()) == 1
    ]
    for target, path, steps in settled:
        pool.settle(target, [path], steps, "no other shape fits")
    return bool(settled)


def _settled_by_name(pool: _Pool) -> bool:
    """Settles a pair whose names have more in common than either has with any other; tells whether there was one."""
    fits = {target: pool.fitting(target) for target in pool.new}
    scores = {(target, path): _alike(target, path) for target, fitting in fits.items() for path in fitting}
    for (target, path), score in sorted(scores.items(), key=lambda entry: -entry[1]):
        others = {pair: likeness for pair, likeness in scores.items() if pair != (target, path)}
        rivals = [likeness for pair, likeness in others.items() if pair[0] == target or pair[1] == path]
        if score > max(rivals, default=0) and not _joins(pool, target):
            pool.settle(target, [path], fits[target][path], "no other name is as near")
            return True
    return False


def _candidates(pool: _Pool, target: str) -> Iterator[str]:
    """Yields what an open parameter may be made of, the nearest names first."""
    fitting = [*pool.fitting(target), *_joins(pool, target)]
    yield from sorted(fitting, key=lambda source: -_alike(target, source))


def _joins(pool: _Pool, target: str) -> list[str]:
    """Returns the pairs of neighbours of the old version that may be joined to a new parameter, in either order."""
    shape, numbers = pool.new[target], _numbers(target)
    near = [path for path in pool.old if _numbers(path) == numbers and len(pool.old[path]) == len(shape)]
    return [
        JOINS.join(pair)
        for pair in permutations(near, 2)
        if _template(pair) is not None and _joined([pool.old[path] for path in pair], shape) is not None
    ]


def _joined(shapes: Sequence[Shape], shape: Shape) -> list[Mapping[str, Any]] | None:
    """Returns how parameters of some shapes become one; None if they can't."""
    if len(shapes) == 1:
        return _steps(shapes[0], shape)
    for axis in range(len(shape)):
        if any(_without(piece, axis) != _without(shape, axis) for piece in shapes):
            continue
        lengths = [piece[axis] for piece in shapes]
        if sum(lengths) == shape[axis]:
            shares = {"shares": lengths} if len({*lengths}) > 1 else {}
            return [{"op": "concatenate", "axis": axis, "over": "part", **shares}]
    return None


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _steps(old: Shape, new: Shape) -> list[Mapping[str, Any]] | None:
    """Returns what makes one shape another: nothing, an axis of length 1 gone or new, two axes turned; None if not."""
    if old == new:
        return []
    if len(old) == len(new) == 2 and old[::-1] == new:
        return [{"op": "permute", "order": [1, 0]}]
    if (axis := _singleton(old, new)) is not None:
        return [{"op": "merge", **_of_singleton(old, axis)}]
    if (axis := _singleton(new, old)) is not None:
        return [{"op": "part", **_of_singleton(new, axis)}]
    return None


def _singleton(longer: Shape, shorter: Shape) -> int | None:
    """Returns the axis of length 1 without which one shape is another."""
    axes = (i for i, length in enumerate(longer) if length == 1 and _without(longer, i) == shorter)
    return next(axes, None) if len(longer) > 1 else None


def _of_singleton(shape: Shape, axis: int) -> dict[str, int]:
    """Returns the merge that removes an axis of length 1: with the axis behind it, or else before it."""
    first = min(axis, len(shape) - 2)
    return {"axis": first, "outer": shape[first]}


def _numbers(path: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", path))


def _alike(target: str, path: str) -> int:
    """Returns how many words two names share; those that stand last count twice, as they say what a tensor is."""
    target_words, path_words = _WORD.findall(target), _WORD.findall(path)
    return len({*target_words} & {*path_words}) + (target_words[-1:] == path_words[-1:])


def _template(paths: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Returns a template with `{part}` for paths that differ in one part, and their parts; None for other paths."""
    parts = [path.split("/") for path in paths]
    if len({len(part) for part in parts}) > 1:
        return None
    apart = [i for i, words in enumerate(zip(*parts, strict=True)) if len({*words}) > 1]
    if len(apart) != 1:
        return None
    (place,) = apart
    whole = [*parts[0][:place], "{part}", *parts[0][place + 1 :]]
    return "/".join(whole), tuple(part[place] for part in parts)


def _entry(inferred: Inferred, words: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Returns the entry of a parameter in a map's file; the words that it needs are put in."""
    source, steps = inferred.sources[0], [dict(step) for step in inferred.operations]
    if len(inferred.sources) > 1:
        template = _template(inferred.sources)
        if template is None:
            raise UsageError(
                "A map can't join these: their paths differ in more than one part.",
                place="--pair",
                found=" and ".join(inferred.sources),
                remedy="give them paths that differ in one part first: --rename PATTERN=REPLACEMENT",
            )
        source, parts = template
        meaning = {part: part for part in parts}
        name = next(
            (name for name, meaning_of in words.items() if list(meaning_of) == list(meaning)),
            f"part{len(words) or ''}",
        )
        words[name] = meaning
        source = source.replace("{part}", f"{{{name}}}")
        steps[0]["over"] = name
    operations = {"operations": steps} if steps else {}
    return {"source": source, "target": inferred.target, **operations}


def _folded(entries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields entries, those of all layers as one; layers count from 0."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        kinds.setdefault(repr(_without_number(entry)), []).append(entry)
    for same in kinds.values():
        numbers = [_numbers(entry["target"]) for entry in same]
        counted = numbers == [(str(i),) for i in range(len(same))]
        if counted and all(_numbers(entry["source"]) == _numbers(entry["target"]) for entry in same):
            yield _without_number(same[0])
        else:
            yield from same


def _without_number(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **entry,
        **{side: re.sub(r"\d+", f"{{{_LAYER}}}", entry[side], count=1) for side in ("source", "target")},
    }
