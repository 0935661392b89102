"""Model maps: from the names of one codebase's model to another's, and how the axes of each differ.

A map is a JSON file below `converters/models`, held to `schemas/statekit-map.schema.json`. Its templates are paths with
fields: `{word}` of a table of words that both sides know by other names, and `{number}`, which counts, as layers do;
`{number:3}` has zeros before it, to three digits. It is read in both directions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from itertools import chain, pairwise, product
from pathlib import Path
from string import digits as DIGITS
from typing import Any, overload

from statekit.budget import Account, Budget
from statekit.errors import Faults, FormatError, StateError, UsageError, check_name
from statekit.files.checkpoint import PRETRAINED
from statekit.files.source import Files, read_small
from statekit.maps import json_schema, live
from statekit.maps.along_axis import REST, Concatenate, Reorder, Split
from statekit.maps.links import Carried, Link, StateMap, carried, twice
from statekit.maps.modules import FLATTEN, HEADS, KINDS, Modules, TargetModel, kind_faults, said_faults
from statekit.maps.operations import Merge, Operation, Part, Permute, Stack, Unstack
from statekit.maps.pretrained import Model, Pretrained, Rule
from statekit.maps.scale import Scale
from statekit.maps.settings import Settings, known_settings, settings_of, why_unmapped
from statekit.maps.sizes import Factor, KeepFirst, Recast, Replicate, Resize, Unfactor
from statekit.state.run import BESIDE, BUFFERS
from statekit.state.train_state import Axis, TrainState
from statekit.tensors.patterns import renamed_apart
from statekit.tensors.tensor import TIES, Shape
from statekit.tensors.tree import Tree, at, nested, put, shipped_json, strict_json, walk

_APART, _JOINING = ("unstack", "split", "replicate"), ("stack", "concatenate", "keep_first")
_FIELD = re.compile(r"\{(\w+)(?::(\d))?\}")
_NUMBER, _MOST_DIGITS = r"0|[1-9]\d{0,5}", 6
_MOST_WAYS = 1000
"""In how many ways a name may fit a path, at most."""
Binding = Mapping[str, str | int]
"""What the fields of a template stand for: a word of the first side, or a number."""


@dataclass(frozen=True, eq=False)
class Template:
    """A path with fields, of one side of a map.

    Attributes:
        text: The path.
        words: For each field that is no number: the first side's word -> this side's.
    """

    text: str
    words: Mapping[str, Mapping[str, str]]

    def __post_init__(self) -> None:
        """Refuses a path that a name may fit in too many ways, as one of many numbers with nothing between them.

        Raises:
            FormatError: It is such a path.
        """
        if math.prod(map(self._ways, _FIELD.finditer(self.text))) > _MOST_WAYS:
            raise FormatError(
                "A name can fit a path of the map in too many ways.",
                place=self.text[:80],
                expected="text between the fields that no value of them holds",
                remedy="part the fields by / or .",
            )

    def _ways(self, match: re.Match[str]) -> int:
        """Returns in how many ways a field may end, where what follows doesn't tell."""
        after, words = self.text[match.end() :][:1], self.words.get(match[1])
        if after == "{" or any(after in text for text in (words.values() if words else (DIGITS,)) if after):
            return len(words) if words else _MOST_DIGITS
        return 1

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, each once."""
        return tuple(dict.fromkeys(name for name, _ in _FIELD.findall(self.text)))

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of those that count."""
        return tuple(name for name in self.fields if name not in self.words)

    def binding(self, path: str) -> dict[str, str | int] | None:
        """Returns what the fields stand for in a path, or None if it doesn't fit."""
        match = self._pattern.fullmatch(path)
        if match is None:
            return None
        first = {name: {key: word for word, key in table.items()} for name, table in self.words.items()}
        return {
            name: first[name][text] if name in first else int(text)
            for name, text in match.groupdict().items()
        }

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        text, end, seen = "", 0, set[str]()
        for match in _FIELD.finditer(self.text):
            name, digits = match.groups()
            text += re.escape(self.text[end : match.start()])
            words = self.words.get(name)
            number = rf"\d{{{digits}}}|[1-9]\d{{{digits},5}}" if digits else _NUMBER
            of_field = "|".join(map(re.escape, words.values())) if words else number
            text += f"(?P={name})" if name in seen else f"(?P<{name}>{of_field})"
            end = match.end()
            seen.add(name)
        return re.compile(text + re.escape(self.text[end:]))

    def path(self, binding: Binding) -> str:
        """Returns the path with the binding's fields filled in; other fields stay."""
        return _FIELD.sub(lambda m: self._word(m, binding) if m[1] in binding else m[0], self.text)

    def _word(self, match: re.Match[str], binding: Binding) -> str:
        name, digits = match.groups()
        value = str(binding[name])
        return self.words[name][value] if name in self.words else value.zfill(int(digits or 0))


@dataclass(frozen=True, eq=False)
class Entry:
    """One line of a map, in the direction in which it is gone.

    Attributes:
        source: Template of the parameters that are read.
        target: Template of those that are made.
        operations: As the map's file has them, first to last in this direction.
        when: The choices, each with the alternative that the line is for, such as `mlp`, `gated`; none if for all.
        origin: The line as the map has it, where this is without operations for other alternatives.
    """

    source: Template
    target: Template
    operations: tuple[Mapping[str, Any], ...] = ()
    when: Mapping[str, str] = field(default_factory=dict)
    origin: Entry | None = None

    def of(self, chosen: Mapping[str, str]) -> Entry:
        """Returns the line with the operations for what a model has."""
        steps = tuple(step for step in self.operations if _holds(step.get("when"), chosen))
        return replace(self, operations=steps, origin=self)

    @property
    def unstacked(self) -> str | None:
        """The number that counts what is unstacked from each source; None if nothing is."""
        return next(iter(self._over("unstack")), None)

    @property
    def apart(self) -> tuple[str, ...]:
        """The fields by which one source becomes several targets."""
        return self._over(*_APART)

    @property
    def joined(self) -> tuple[str, ...]:
        """The fields by which several sources become one target, the first joined first."""
        return self._over(*_JOINING)

    @property
    def copying(self) -> list[Mapping[str, Any]]:
        """The operations that make a counted number of copies, or keep one of them."""
        return [
            operation
            for operation in self.operations
            if operation["op"] in ("replicate", "keep_first") and "over" in operation
        ]

    def unstacked_length(self, shape: Shape) -> tuple[int, int]:
        """Returns the axis along which a source is unstacked, and its length; 0 where the source lacks it."""
        axis: int = next(operation["axis"] for operation in self.operations if operation["op"] == "unstack")
        return axis, shape[axis] if axis < len(shape) else 0

    def ranges(self, counts: Mapping[str, int]) -> dict[str, Sequence[str | int]]:
        """Returns what each field goes through: numbers as far as `counts` says, or words."""
        return {
            name: range(counts[name]) if name in counts else tuple(self.source.words[name])
            for name in (*self.source.fields, *self.apart)
        }

    def _over(self, *kinds: str) -> tuple[str, ...]:
        return tuple(
            str(operation["over"])
            for operation in self.operations
            if operation["op"] in kinds and "over" in operation
        )


def _holds(when: Mapping[str, str] | None, chosen: Mapping[str, str]) -> bool:
    """Tells whether a model has the alternatives that something is for."""
    return all(chosen.get(choice) == alternative for choice, alternative in (when or {}).items())


def words(where: Mapping[str, str]) -> str:
    """Says the alternatives of choices in a few words."""
    return ", ".join(f"{choice} {alternative}" for choice, alternative in where.items())


@dataclass(frozen=True)
class ModelMap:
    """A map from one codebase's model to another's.

    Attributes:
        name: `<source>:<target>`.
        titles: What the two sides are, for people.
        entries: The lines.
        choices: What a model may have one way or another: its name -> the alternatives.
        ties: Further names that the target has for some of its parameters.
        old_ties: Those that the source has.
        refused: Names of the source that the target can't hold, each with the reason.
        refused_where: Alternatives of choices which together can't go over, each with the reason.
        asked: The choices that neither names nor anything else tells: `what` each is, and `when` it matters.
        notes: What to say of a model with some alternatives.
        one_rule: Why the target can't move some parameters at a rate of their own; "" if it can.
        needed: Names of the configuration that the operations take, each with what it is.
        config: What was said of them, and of the target's model.
        beside: What stands beside a checkpoint of them, by the map's names; `config` goes before it.
        beside_in: The file that has it.
        settings: What both sides call them, and where the source has them.
        pretrained: What the target's library builds its model from.
        keys: All names of the configuration that its file knows, of either side.
        modules: The kinds of modules that it knows instead of lines; None if it has lines.
        model: The target's model, where it is there already.
        budget: The job's, which all that a map's counts and a checkpoint's axes make draws on; one of its own if None.
    """

    name: str
    titles: tuple[str, str]
    entries: tuple[Entry, ...]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    old_ties: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[tuple[Template, str], ...] = ()
    refused_where: tuple[tuple[Mapping[str, str], str], ...] = ()
    asked: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[tuple[Mapping[str, str], str], ...] = ()
    one_rule: str = ""
    needed: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    beside_in: str = ""
    settings: Settings = field(default_factory=Settings)
    pretrained: Pretrained | None = None
    keys: frozenset[str] = frozenset()
    modules: Modules | None = None
    model: TargetModel | None = None
    budget: Budget | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        companions = {"beside": {self.beside_in: dict(self.beside)}} if self.beside else {}
        return {"name": self.name, "config": dict(self.config), **companions}

    def with_beside(self, values: Mapping[str, Any], file: str) -> ModelMap:
        """Returns the map with those values from beside a checkpoint that it needs and the user did not give.

        Raises:
            UsageError: One isn't a value that the map takes.
        """
        takes = (
            self.needed.keys() | self.choices.keys() | (self.pretrained.keys if self.pretrained else set())
        )
        takes |= set() if self.modules is None else {FLATTEN}
        companions = {key: value for key, value in values.items() if key in takes and key not in self.config}
        Faults(_no_lengths(companions, self.needed)).check(
            UsageError,
            f"The map {self.name} can't take what lies beside the checkpoint",
            place=file,
            remedy="say it: --config KEY=VALUE",
        )
        return replace(self, beside=companions, beside_in=file)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is known of the model: what was said, and what stands beside the checkpoint."""
        return {**self.beside, **self.config}

    @overload
    def apply(self, state: TrainState) -> Carried: ...

    @overload
    def apply(self, state: Mapping[str, Any]) -> dict[str, Any]: ...

    def apply(self, state: TrainState | Mapping[str, Any]) -> Carried | dict[str, Any]:
        """Returns a state under the other side's names; or live parameters, as a state_dict or a tree of arrays.

        Live arrays stay those of their framework; names come back as they were given: nested, with dots or slashes.

        Raises:
            StateError: Names of either side aren't covered, or what they name doesn't fit; lists every fault.
            InexactError: The state doesn't tell what the target would hold; lists every such parameter.
            UsageError: What the map needs to know wasn't said; lists every name.
        """
        if not isinstance(state, TrainState):
            return self._live(state)
        state = self._with_frozen(state) if self.modules is None else self.modules.gathered(state)
        shapes = {path: param.shape for path, param in state.params.items()}
        faults = Faults(folds=False)
        links, model = self._links(shapes, faults)
        if self.modules is None:
            state = self._without_buffers(state, faults)
        state = replace(state, assumptions=(*state.assumptions, *model.taken))
        for name, path in state.extra.get(TIES, {}).items():
            if self.old_ties.get(name) != path:
                faults.add(f"is a further name of {path}, which the map doesn't know", name)
        self._check(faults)
        model = replace(model, before=shapes)
        result = carried(state, links, self._ties_of(links), self.name, self.one_rule)
        return result if self.pretrained is None else self._with_files(result, self.pretrained, model)

    def _with_frozen(self, state: TrainState) -> TrainState:
        """Returns a state with those buffers among its parameters that the map names: they are frozen, and go along."""
        buffers: Mapping[str, Any] = state.extra.get(BUFFERS) or {}
        frozen = {
            name: path
            for name in buffers
            if (path := _path_of(name)) not in state.params
            and any(entry.source.binding(path) is not None for entry in self.entries)
        }
        if not frozen:
            return state
        rest = {name: buffer for name, buffer in buffers.items() if name not in frozen}
        params = {**state.params, **{path: buffers[name] for name, path in frozen.items()}}
        return replace(state, params=params, extra={**state.extra, BUFFERS: rest})

    def _without_buffers(self, state: TrainState, faults: Faults) -> TrainState:
        """Returns a state without buffers, whose names are the source's, and says so; adds those that are refused."""
        buffers = state.extra.get(BUFFERS) or {}
        for name in buffers:
            for template, why in self.refused:
                if template.binding(name.replace(".", "/")) is not None:
                    faults.add(f"can't be held by the target: {why}", name)
        if not buffers:
            return state
        sentence = (
            f"The map leaves behind what no optimizer moves and it has no name for: {', '.join(buffers)}."
        )
        extra = {key: record for key, record in state.extra.items() if key != BUFFERS}
        return replace(state, extra=extra, assumptions=(*state.assumptions, sentence))

    def _live(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Returns live arrays under the other side's names."""
        arrays, named = live.flat(tree)
        arrays = live.apart(arrays, self.old_ties)
        faults = Faults(folds=False)
        links, model = self._links({path: tuple(array.shape) for path, array in arrays.items()}, faults)
        self._check(faults)
        result = live.made(arrays, links)
        if self.pretrained is not None:
            before, shapes = (
                {path: tuple(array.shape) for path, array in side.items()} for side in (arrays, result)
            )
            self.pretrained.check(replace(model, before=before, shapes=shapes), self.facts, self.name)
        return named({**result, **{name: result[path] for name, path in self._ties_of(links).items()}})

    def _ties_of(self, links: Sequence[Link]) -> dict[str, str]:
        """Returns the further names that the target has of what was made."""
        targets = {link.target for link in links}
        return {name: path for name, path in self.ties.items() if path in targets and name not in targets}

    def _check(self, faults: Faults) -> None:
        faults.check(
            StateError,
            f"The map {self.name} doesn't fit the checkpoint",
            place=f"from {self.titles[0]} to {self.titles[1]}",
            remedy=f"name the map of its model: {', '.join(map_names())}; or rename its parameters: --rename",
        )

    def _with_files(self, result: Carried, pretrained: Pretrained, model: Model) -> Carried:
        """Returns a state with what the target's library builds its model from, instead of the source's such files."""
        state = result.state
        model = replace(model, shapes={path: param.shape for path, param in state.params.items()})
        files, taken = pretrained.made(model, self.facts, self.name, self.beside_in)
        companions = {**state.extra.get(BESIDE, {}), PRETRAINED: files}
        extra = {**state.extra, BESIDE: companions}
        return replace(result, state=replace(state, extra=extra, assumptions=(*state.assumptions, *taken)))

    def _links(self, shapes: Mapping[str, Shape], faults: Faults) -> tuple[list[Link], Model]:
        """Returns what becomes of each parameter, and what kind of model the names show; adds what doesn't fit."""
        if self.modules is not None:
            links, sentences = self.modules.links(shapes, self.facts, self.model, faults)
            return links, Model(taken=sentences)
        refused = {
            path: why
            for path in shapes
            for template, why in self.refused
            if template.binding(path) is not None
        }
        if refused:  # the rest of such a model wouldn't fit either
            faults += [(f"can't be held by the target: {why}", path) for path, why in refused.items()]
            return [], Model()
        taken: list[str] = []
        active, bound, chosen = self._active(shapes, faults, taken)
        counts = self._counts(active, bound, shapes, faults)
        links = [link for entry in active for link in self._of_entry(entry, bound[entry], counts, faults)]
        order = {path: i for i, path in enumerate(shapes)}
        return sorted(links, key=lambda link: order[link.sources[0]]), Model({}, counts, chosen, tuple(taken))

    def _active(
        self, shapes: Mapping[str, Shape], faults: Faults, taken: list[str]
    ) -> tuple[list[Entry], dict[Entry, dict[str, dict[str, str | int]]], Mapping[str, str]]:
        """Returns the lines for the model, the names that fit each, and what the model has; adds what doesn't fit."""
        bound = {
            entry: {path: b for path in shapes if (b := entry.source.binding(path)) is not None}
            for entry in self.entries
        }
        covered = {path for paths in bound.values() for path in paths}
        faults += [("isn't a name that the map knows", path) for path in shapes if path not in covered]
        chosen = self._chosen(bound, faults, taken)
        faults += [(f"can't go over: {why}", words(where)) for where, why in self._refused_for(chosen)]
        taken += [note for where, note in self.notes if _holds(where, chosen)]
        active = [entry.of(chosen) for entry in self.entries if _holds(entry.when, chosen)]
        return active, {entry: bound[entry.origin or entry] for entry in active}, chosen

    def _refused_for(self, chosen: Mapping[str, str]) -> Iterator[tuple[Mapping[str, str], str]]:
        return ((where, why) for where, why in self.refused_where if _holds(where, chosen))

    def _chosen(
        self, bound: Mapping[Entry, Mapping[str, Binding]], faults: Faults, taken: list[str]
    ) -> dict[str, str]:
        """Returns each choice with the alternative that the names show; one without names if none show another.

        Where names leave several open, it is the one that was said. Else it is the first, which is told in `taken`,
        or asked for by name where it matters and nothing but the source's code knows it.
        """
        chosen: dict[str, str] = {}
        missing = Faults(folds=False)
        for choice, alternatives in self.choices.items():
            seen, named = self._shown(choice, bound, faults)
            shown, open_ones = _left_open(alternatives, seen, named)
            given, asked = self.facts.get(choice), self.asked.get(choice)
            # What was said counts where the names leave it open; else it contradicts them.
            if given is not None and given not in open_ones:
                expected = f"and the names show {' or '.join(seen) or shown}"
                if not named:
                    expected = f"expected {' or '.join(alternatives)}"
                faults.add(f"is said to be {given!r:.80}, {expected}", choice)
            elif given is None and asked is not None and len(open_ones) > 1:
                if "assumed" in asked:
                    taken.append(f"Nothing says {choice} of the model; it has {shown}: {asked['assumed']}.")
                elif _holds(asked.get("when"), chosen):
                    missing.add(f"is {' or '.join(open_ones)}: {asked['what']}", choice)
            elif given is None and len(seen) > 1:
                taken.append(
                    f"Nothing says {choice} of the target; it has {shown}: --config {choice}=... says others."
                )
            chosen[choice] = str(given) if given in open_ones else shown
        if faults:  # names that the map doesn't know come first
            return chosen
        missing.check(
            UsageError,
            f"The map {self.name} needs to know what no checkpoint says",
            place="--config",
            remedy="say it: --config KEY=VALUE, or --config FILE with the model's own configuration",
        )
        return chosen

    def _shown(
        self, choice: str, bound: Mapping[Entry, Mapping[str, Binding]], faults: Faults
    ) -> tuple[Mapping[str, Mapping[str, None]], set[str]]:
        """Returns the alternatives of a choice that the names show, and those that have names; adds contradictions."""
        seen: dict[str, dict[str, None]] = {}
        for entry, paths in bound.items():
            if choice in entry.when and paths:
                seen.setdefault(entry.when[choice], {}).update(dict.fromkeys(paths))
        if len(seen) > 1 and len({frozenset(paths) for paths in seen.values()}) > 1:
            (first, of_one), (other, _) = list(seen.items())[:2]
            path = next(iter(of_one))
            faults.add(f"is of a model with {choice} {first}, and others are of one with {other}", path)
            seen = {first: of_one}
        return seen, {entry.when[choice] for entry in bound if choice in entry.when}

    def _counts(
        self,
        entries: Sequence[Entry],
        bound: Mapping[Entry, Mapping[str, Binding]],
        shapes: Mapping[str, Shape],
        faults: Faults,
    ) -> dict[str, int]:
        """Returns the count of each number of the map, by the names or by the length of a stacked axis."""
        counts: dict[str, int] = {}
        for entry in entries:
            for path, binding in bound[entry].items():
                for name in entry.source.numbers:
                    number = int(binding[name])
                    # Every number up to this one is listed: a name may not make that more work than there are names.
                    if number >= len(shapes):
                        faults.add(f"has number {number}, and there are {len(shapes)} parameters", path)
                    else:
                        counts[name] = max(counts.get(name, 0), number + 1)
                if (over := entry.unstacked) is not None:
                    axis, length = entry.unstacked_length(shapes[path])
                    if counts.setdefault(over, length) != length:
                        faults.add(f"has {length} along axis {axis}, others have {counts[over]}", path)
        for entry in entries:
            for operation in entry.copying if bound[entry] else ():
                copies = self._size(operation["count"])
                if counts.setdefault(operation["over"], copies) != copies:
                    faults.add(f"has {counts[operation['over']]} copies, not {copies}", entry.source.text)
        return counts

    def _of_entry(
        self, entry: Entry, bound: Mapping[str, Binding], counts: Mapping[str, int], faults: Faults
    ) -> Iterator[Link]:
        for name in {*entry.source.numbers, *entry.target.numbers}:
            if not counts.get(name):
                faults.add("is missing in the checkpoint, in every number", entry.source.text)
                return
        ranges = entry.ranges(counts)
        # What is joined first stands together.
        fields = [*(name for name in entry.source.fields if name not in entry.joined), *entry.joined[::-1]]
        self._draw(entry, fields, ranges)
        bindings = _bindings(fields, ranges)
        paths = {entry.source.path(binding): binding for binding in bindings}
        missing = [path for path in paths if path not in bound]
        faults += [
            (f"is missing in the checkpoint; the target needs it for {entry.target.path(paths[path])}", path)
            for path in missing
        ]
        if missing:
            return
        for part in _bindings(entry.apart, ranges):
            places = {name: ranges[name].index(value) for name, value in part.items()}
            lengths = {name: len(ranges[name]) for name in (*entry.joined, *entry.apart)}
            operations = tuple(self._operation(operation, places, lengths) for operation in entry.operations)
            targets = {path: entry.target.path({**binding, **part}) for path, binding in paths.items()}
            yield from _links(targets, operations)

    def _draw(self, entry: Entry, fields: Sequence[str], ranges: Mapping[str, Sequence[str | int]]) -> None:
        """Counts what a line makes, before anything is made: names, parts of each, and what is done to them."""
        names, parts = (math.prod(len(ranges[name]) for name in part) for part in (fields, entry.apart))
        with Account(self.budget).passing() as passing:
            count = names * (_NAME_NODES + parts * _LINK_NODES * (1 + len(entry.operations)))
            passing.nodes(count, f"The line {entry.source.text} of the map {self.name}", self.titles[1])

    def _told(self, size: int | str) -> int | None:
        """Returns a size that stands in the map's file, or in the configuration; None where it is unknown."""
        return size if isinstance(size, int) else self.facts.get(size)

    def _operation(
        self, record: Mapping[str, Any], places: Mapping[str, int], lengths: Mapping[str, int]
    ) -> Operation:
        """Returns an operation of the map's file."""
        axis, over = record.get("axis", 0), record.get("over", "")
        match record["op"]:
            case "permute":
                return Permute(tuple(record["order"]))
            case "merge":
                return Merge(axis, self._told(record["outer"]))
            case "part":
                return Part(axis, self._said(record["outer"]))
            case "unstack":
                return Unstack(axis, places[over])
            case "stack":
                return Stack(axis, lengths[over])
            case "reorder":
                return Reorder(axis, tuple(map(self._size, record["sizes"])), tuple(record["order"]))
            case "replicate" | "keep_first":
                kind = Replicate if record["op"] == "replicate" else KeepFirst
                return kind(self._size(record["count"]), record.get("axis"))
            case "resize":
                lengths_of = self._size(record["from"]), self._size(record["to"])
                return Resize(axis, *lengths_of, record["param"], record["slots"])
            case "scale" | "cast" | "factor" | "unfactor":
                return _of_values(record)
        turns = self._size(record.get("turns", 1))
        shares = record.get("shares", [1] * lengths[over])
        if record["op"] == "split":
            return Split(axis, tuple(map(self._size, shares)), places[over], turns)
        is_said = all(size in self.facts for size in shares if isinstance(size, str))
        return Concatenate(axis, lengths[over], tuple(map(self._size, shares)) if is_said else None, turns)

    def _size(self, size: int | str) -> int:
        if isinstance(size, int):
            return size
        return REST if size in _REST else self._said(size)

    def _said(self, name: str) -> int:
        if name not in self.facts:
            raise UsageError(
                f"The map {self.name} needs to know {name}, which no checkpoint says: {self.needed[name]}.",
                place="--config",
                remedy=f"say it: --config {name}=..., or --config config.json with the model's",
            )
        return int(self.facts[name])


def _of_values(record: Mapping[str, Any]) -> Operation:
    """Returns an operation of the map's file on values, whatever the model's sizes."""
    match record["op"]:
        case "scale":
            return Scale.read(record)
        case "cast":
            return Recast(record["from"], record["to"])
        case "factor":
            return Factor(tuple(map(Axis, record["axes"])))
    return Unfactor(tuple(map(Axis, record["axes"])))


def _bindings(fields: Sequence[str], ranges: Mapping[str, Sequence[str | int]]) -> list[dict[str, str | int]]:
    """Returns every combination of what fields may stand for, the last fastest."""
    return [dict(zip(fields, values, strict=True)) for values in product(*(ranges[name] for name in fields))]


_NAME_NODES = 4
"""Values that the name of a source's parameter counts for, with what its fields stand for."""
_LINK_NODES = 8
"""Values that a parameter of the target and its slots count for, and each operation on them once more."""
_OTHER_CHANNELS = {"first": "last", "last": "first"}
_SIZES = ("outer", "turns", "count", "from", "to")
_REST = ("rest", "all")
"""Sizes that stand for what is left."""
_INVERSE = {
    "merge": "part", "part": "merge", "unstack": "stack", "stack": "unstack",
    "split": "concatenate", "concatenate": "split", "replicate": "keep_first", "keep_first": "replicate",
    "factor": "unfactor", "unfactor": "factor",
}  # fmt: skip


def _inverse(record: Mapping[str, Any]) -> dict[str, Any]:
    if record["op"] == "flattened":
        return {**record, "channels": _OTHER_CHANNELS[record["channels"]]}
    if record["op"] == "scale":
        return {**record, "divides": not record.get("divides", False)}
    if record["op"] in ("resize", "cast"):
        return {**record, "from": record["to"], "to": record["from"]}
    if record["op"] not in ("permute", "reorder"):
        return {**record, "op": _INVERSE[record["op"]]}
    order = record["order"]
    sizes = {"sizes": [record["sizes"][i] for i in order]} if "sizes" in record else {}
    return {**record, **sizes, "order": [order.index(i) for i in range(len(order))]}


def map_names() -> tuple[str, ...]:
    """Returns the names of the maps there are, in both directions."""
    sides = sorted(tuple(file[:-5].split(".")) for file in _files())
    return tuple(name for a, b in sides for name in (f"{a}:{b}", f"{b}:{a}"))


def _files() -> set[str]:
    folder = resources.files("statekit.converters").joinpath("models")
    return {file.name for file in folder.iterdir() if file.name.endswith(".json")}


BACK = ":back"
"""Ends the path of a map's file that shall be gone from its target to its source."""


def load(name: str, config: Mapping[str, Any] | None = None, files: Files | None = None) -> ModelMap:
    """Returns a map by its name, `<source>:<target>`, or from a file of the user's.

    Args:
        name: The name; or the path of a `.json` file, with `:back` behind it for the other direction.
        config: What no checkpoint says of the model, such as `num_heads`; a model's whole config.json may be given.
        files: The job's files, whose budget holds the map's; one of its own if None.

    Raises:
        UsageError: There is no such map, or a value isn't one that it takes.
        NotFoundError: There is no such file.
        FormatError: The file isn't a map; lists every fault.
        BudgetError: The file is more than the job may hold.
    """
    data, turned = data_of(name, files)
    return _read(Path(name).name, data, turned, config or {})


def data_of(name: str, files: Files | None = None) -> tuple[Mapping[str, Any], bool]:
    """Returns a map's file as it is, and whether the name means the way from its target to its source.

    Raises:
        UsageError, NotFoundError, FormatError, BudgetError: As `load` raises them.
    """
    path = name.removesuffix(BACK)
    if path.endswith(".json"):
        return _users(Path(path), files), path != name
    check_name("map", name, map_names(), "--map", why_unmapped)
    a, b = name.split(":")
    turned = f"{a}.{b}.json" not in _files()
    file = f"{b}.{a}.json" if turned else f"{a}.{b}.json"
    return shipped_json("statekit.converters", "models", file), turned


def _users(path: Path, files: Files | None) -> Mapping[str, Any]:
    """Reads a user's map, and holds it to the published schema and to what its templates say of each other."""
    data = strict_json(read_small(path, files), path)
    schema = shipped_json("statekit.schemas", "statekit-map.schema.json")
    faults = Faults(json_schema.faults(data, schema))
    if not faults:
        faults += _unfitting(data)
    faults.check(
        FormatError,
        "A map's file has another form than its schema gives it",
        place=path,
        remedy="schemas/statekit-map.schema.json says what may stand where; `statekit maps NAME --json` shows one",
    )
    return data  # type: ignore[no-any-return]  # that is what the schema proved


def _unfitting(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields faults that the JSON schema can't find: fields of one side alone, unknown choices, lost axes."""
    for i, line in enumerate(data.get("parameters", ())):
        yield from ((fault, f"parameters/{i}") for fault in _unfitting_line(line, data))
    for i, kind in enumerate(data.get("modules", ())):
        yield from ((fault, f"modules/{i}/{place}") for fault, place in kind_faults(kind))
    for side in _SIDES:
        if (codebase := data[side].get("settings")) is not None and codebase not in known_settings():
            yield f"is {codebase!r:.80}, expected one of {', '.join(known_settings())}", f"{side}/settings"
        for fault, place in _unmade(data, data[side].get("pretrained", {}).get("files", {})):
            yield fault, f"{side}/pretrained/files/{place}"


def _unfitting_line(line: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with one line of parameters."""
    choices, config, words = (data.get(key, {}) for key in ("choices", "config", "words"))
    steps = line.get("operations", [])
    if not _is_counted(line, steps):
        yield "has fields that the other side hasn't, and that nothing counts"
    if any(step["op"] == "unstack" for step in steps[1:]):
        yield "has unstack behind another operation"
    if any(step["op"] == "stack" for step in steps[:-1]):
        yield "has stack before another operation"
    for name, alternative in (pair for part in (line, *steps) for pair in part.get("when", {}).items()):
        if alternative not in choices.get(name, ()):
            yield f"is for {name} {alternative}, which isn't among the choices"
    for step in steps:
        yield from _unsound(step, config, words)


def _is_counted(line: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Tells whether each field that one side alone has is counted by one operation."""
    source, target = ({name for name, _ in _FIELD.findall(line[side])} for side in ("source", "target"))
    joined, apart = (
        [step["over"] for step in steps if step["op"] in kinds and "over" in step]
        for kinds in (_JOINING, _APART)
    )
    is_once = all(len(names) == len({*names}) for names in (joined, apart))
    return is_once and {*joined} == source - target and {*apart} == target - source


def _unsound(record: Mapping[str, Any], config: Mapping[str, Any], words: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with one operation."""
    sizes = [*map(record.get, _SIZES), *record.get("shares", ()), *record.get("sizes", ())]
    for name in () if record["op"] == "cast" else sizes:
        if isinstance(name, str) and name not in config and name not in _REST:
            yield f"{record['op']}s by {name}, which config doesn't explain"
    if "order" in record and sorted(record["order"]) != list(range(len(record["order"]))):
        yield f"has order {record['order']}, which isn't one of axes 0 to n"
    if "sizes" in record and (
        len(record["sizes"]) != len(record["order"]) or record["sizes"].count("rest") > 1
    ):
        yield f"has sizes {record['sizes']}, which aren't one for each of the order with one rest"
    if record["op"] in ("split", "concatenate"):
        parts = words.get(record["over"], {})
        if len(parts) != len(record.get("shares", parts)) or len(parts) < 2:
            yield f"{record['op']}s over {record['over']}, which hasn't a word for each share"


def _unmade(data: Mapping[str, Any], files: Mapping[str, Mapping[str, Rule]]) -> Iterator[tuple[str, str]]:
    """Yields the keys of a model's files whose rules name what the map hasn't, or what stands behind them."""
    choices, counted, before = data.get("choices", {}), _counted(data), set[str]()
    for file, key, rule in ((file, *item) for file, rules in files.items() for item in rules.items()):
        place = f"{file}/{key}"
        if "choice" in rule and (fault := _choice_fault(rule, choices)):
            yield fault, place
        if "count" in rule and rule["count"] not in counted:
            yield f"counts {rule['count']}, which no parameter has", place
        for other in (rule[word] for word in ("same", "per") if word in rule):
            if other not in before:
                yield f"is by the key {other}, which doesn't stand before it", place
        before.add(key)


def _choice_fault(rule: Rule, choices: Mapping[str, Sequence[str]]) -> str | None:
    """Returns what is wrong with the choice by which a rule goes."""
    choice = rule["choice"]
    if choice not in choices:
        return f"is by {choice}, which isn't among the choices"
    lacking = [alternative for alternative in choices[choice] if alternative not in rule["of"]]
    return f"has no value for {choice} {', '.join(lacking)}" if lacking else None


def _counted(data: Mapping[str, Any]) -> set[str]:
    """Returns what the templates of a map's file count: their fields that are no words."""
    lines = [line[side] for line in data.get("parameters", ()) for side in ("source", "target")]
    return {name for line in lines for name, _ in _FIELD.findall(line)}.difference(data.get("words", {}))


def pretrained_of(name: str) -> Pretrained | None:
    """Returns what a map's target builds its model from; None if it doesn't say, or there is no such map."""
    return load(name).pretrained if name in map_names() else None


def pretrained_class(name: str) -> Pretrained | None:
    """Returns what builds a class of a library, by its name; None if no map is of it."""
    classes = (pretrained_of(name) for name in map_names())
    return next(
        (model_map for model_map in classes if model_map is not None and model_map.class_name == name), None
    )


def _given_values(values: Mapping[str, Any], keys: Collection[str] | None) -> dict[str, Any]:
    """Returns the values that a configuration gives, of some keys; of all if that is None."""
    return {
        key: value for key, value in values.items() if value is not None and (keys is None or key in keys)
    }


def _no_lengths(values: Mapping[str, Any], needed: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the settings that operations need and can't take."""
    for key in needed:
        if key in values and (type(values[key]) is not int or values[key] < 1):
            yield f"is {values[key]!r:.80}, expected a number from 1 on", key


def _refusals(
    data: Mapping[str, Any], source: str, words_of: Mapping[str, Mapping[str, str]], by_modules: bool
) -> tuple[tuple[tuple[Template, str], ...], tuple[tuple[Mapping[str, str], str], ...]]:
    """Returns the names of a side that a map refuses, and the alternatives, each with the reason."""
    listed = () if by_modules else data.get("refused", ())
    names = tuple(
        (Template(entry[source], words_of), str(entry["because"])) for entry in listed if source in entry
    )
    return names, tuple((rule["when"], str(rule["because"])) for rule in listed if "when" in rule)


def _read(name: str, data: Mapping[str, Any], turned: bool, config: Mapping[str, Any]) -> ModelMap:
    """Reads a map in one of its directions."""
    source, target = ("target", "source") if turned else ("source", "target")
    words = data.get("words", {})
    tables = {
        "source": {name: {word: word for word in table} for name, table in words.items()},
        "target": words,
    }

    def steps(line: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        listed = [dict(operation) for operation in line.get("operations", ())]
        return tuple(map(_inverse, reversed(listed))) if turned else tuple(listed)

    entries = [
        Entry(
            Template(line[source], tables[source]),
            Template(line[target], tables[target]),
            steps(line),
            line.get("when", {}),
        )
        for line in data.get("parameters", ())
    ]
    modules = Modules.read(data, source, target, steps)
    needed = {key: str(meaning) for key, meaning in data.get("config", {}).items()}
    of_modules = {FLATTEN, KINDS, HEADS} if modules else set()
    choices = data.get("choices", {})
    pretrained = Pretrained.read(data[target].get("pretrained"))
    settings = settings_of(data[source].get("settings"), data[target].get("settings"))
    faults = Faults()
    keys = None if pretrained else {*needed, *of_modules, *choices}
    values = _given_values(settings.translated(config, faults), keys)
    faults += _no_lengths(values, needed)
    faults += said_faults(values) if modules else ()
    faults.check(UsageError, f"The map {name} can't take its configuration", place="--config")
    refused, refused_where = _refusals(data, source, tables[source], bool(modules))
    return ModelMap(
        name=name,
        titles=(data[source]["title"], data[target]["title"]),
        entries=tuple(entries),
        choices={choice: tuple(alternatives) for choice, alternatives in choices.items()},
        ties=data[target].get("ties", {}),
        old_ties=data[source].get("ties", {}),
        refused=refused,
        refused_where=refused_where,
        asked=data.get("asked", {}),
        notes=tuple((note["when"], str(note["says"])) for note in data.get("notes", ())),
        one_rule=data[target].get("one_rule", ""),
        needed=needed,
        config=values,
        beside={},
        beside_in="",
        settings=settings,
        pretrained=pretrained,
        keys=frozenset(needed).union(
            of_modules,
            choices,
            *(
                built.keys
                for side in (source, target)
                if (built := Pretrained.read(data[side].get("pretrained")))
            ),
        ),
        modules=modules,
    )


@dataclass(frozen=True)
class Renaming:
    """Other names by regular expressions, of all that is called after a module; nothing else changes.

    Attributes:
        pairs: Each a pattern, searched in every path, and its replacement as `re.sub` takes it; one after the other.
            Buffers, batch statistics and further names of tied parameters have paths too.
        is_recorded: Whether a manifest says them, whoever wrote it.
    """

    pairs: tuple[tuple[str, str], ...]
    is_recorded: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"rename": [list(pair) for pair in self.pairs]}

    def apply(self, state: TrainState) -> Carried:
        """Returns a state under the other names.

        Raises:
            UsageError: A pattern can't be read, or fits no name.
            StateError: Two parameters would have one name.
        """
        buffers: Mapping[str, Tree] = state.extra.get(BUFFERS) or {}
        ties: Mapping[str, str] = state.extra.get(TIES) or {}
        kept = _statistics(state)
        other_paths = [*map(_path_of, buffers), *map(_joined, chain(*kept.values()))]
        faults = Faults()
        names = self._renamed((*state.params, *ties, *other_paths))
        moved = {name: names[_path_of(name)] for name in buffers}
        tied = dict.fromkeys((names[name], names[path]) for name, path in ties.items())
        further = [(name, path) for name, path in tied if name != path]
        faults += twice(
            [*(names[path] for path in state.params), *moved.values(), *(name for name, _ in further)]
        )
        extra: Any = dict(state.extra)
        if buffers:
            extra[BUFFERS] = _renamed_buffers(buffers, moved)
        for place, part in kept.items():
            faults += twice(names[_joined(keys)] for keys in part)
            extra = put(extra, place, nested({tuple(names[_joined(k)].split("/")): part[k] for k in part}))
        faults.check(StateError, "The map doesn't fit the state", place="--rename")
        links = [Link((path,), names[path]) for path in state.params]
        return carried(replace(state, extra=extra), links, dict(further), "--rename")

    def _renamed(self, paths: Iterable[str]) -> dict[str, str]:
        """Returns the new path of each path."""
        names, faults = {path: path for path in paths}, Faults()
        if self.is_recorded:
            return dict(zip(names, renamed_apart(self.pairs, list(names), "options/maps"), strict=True))
        for pattern, replacement in self.pairs:
            try:
                after = {path: re.sub(pattern, replacement, name) for path, name in names.items()}
            except (re.error, IndexError, RecursionError) as error:
                faults.add(f"can't be read: {error}", f"{pattern}={replacement}")
                continue
            if all(re.search(pattern, name) is None for name in names.values()):
                faults.add("fits no name", pattern)
            names = after
        faults.check(UsageError, "The names can't be changed so", place="--rename")
        return names


def _statistics(state: TrainState) -> dict[tuple[str, ...], dict[Any, Tree]]:
    """Returns the statistics of a state's norms: leaf by keys, by where they lie."""
    return {place: dict(walk(part)) for place in _STATISTICS if (part := at(state.extra, place))}


def _renamed_buffers(buffers: Mapping[str, Tree], paths: Mapping[str, str]) -> dict[str, Tree]:
    """Returns buffers under the names of their new paths, with dots as buffers have them."""
    return {
        name if path == _path_of(name) else path.replace("/", "."): buffers[name]
        for name, path in paths.items()
    }


def _joined(keys: Sequence[Any]) -> str:
    return "/".join(map(str, keys))


def _path_of(name: str) -> str:
    return name.replace(".", "/")


_STATISTICS = (("optax", "tree", "batch_stats"), ("jax_weights", "batch_stats"))
"""Where a state's `extra` has what Flax' norms keep beside their parameters, by module."""


def _with_choices(maps: Sequence[ModelMap]) -> list[ModelMap]:
    """Returns a chain's maps, each without an alternative that is another's: several may have a choice of one name."""
    choices: dict[str, set[Any]] = {}
    for model_map in maps:
        for choice, alternatives in model_map.choices.items():
            choices.setdefault(choice, set()).update(alternatives)
    return [
        replace(
            model_map,
            config={
                key: value
                for key, value in model_map.config.items()
                if key not in model_map.choices
                or value in model_map.choices[key]
                or value not in choices[key]
            },
        )
        for model_map in maps
    ]


def maps_of(
    name: str | None,
    config: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    builds: bool = True,
    model: TargetModel | None = None,
    budget: Budget | None = None,
) -> tuple[StateMap, ...]:
    """Returns what was asked for: other names first, then a model map.

    Args:
        name: The model map's name, or several joined, as `mesh-tf-t5:t5x-t5:hf-t5`; None without.
        config: What it is told of the model.
        rename: Patterns and replacements.
        builds: Whether what the target's library builds its model from is made too; not where the model is there.
        model: The model where it is there, under the names that the map gives.
        budget: That of the job, which a map's file draws on; one of its own if None.

    Raises:
        UsageError: There is no such map, it can't take its configuration, or there is none to take it.
        BudgetError: A map's file is more than the job may hold.
    """
    if config and name is None:
        raise UsageError(
            "No map is given that takes a configuration.", place="--config", remedy="name it: --map"
        )
    renaming = (Renaming(tuple(rename.items())),) if rename else ()
    with Files(budget) as files:
        settings = settings_in(name, files) if config else None
        if settings is not None:
            config = settings.translated(config or {}, faults := Faults())
            faults.check(UsageError, f"The map {name} can't take its configuration", place="--config")
        maps = [load(link, config, files) for link in chained(name)]
    maps = _with_choices([replace(model_map, budget=budget) for model_map in maps])
    maps = _building(maps, builds)
    if maps and model is not None:
        maps[-1] = replace(maps[-1], model=model)
    if settings and config:
        _check_used(name, config, settings, maps)
    return (*renaming, *maps)


def _building(maps: Sequence[ModelMap], builds: bool) -> list[ModelMap]:
    """Returns maps of which the last alone makes what its library builds the model from, if any does."""
    return [
        model_map if builds and model_map is maps[-1] else replace(model_map, pretrained=None)
        for model_map in maps
    ]


def _check_used(
    name: str | None, config: Mapping[str, Any], settings: Settings, maps: Sequence[ModelMap]
) -> None:
    """Refuses what was said of the model and no map takes; a model's whole configuration is passed over."""
    if _MODEL_TYPE in config or any(model_map.pretrained for model_map in maps):
        return
    keys = set[str]().union(*(model_map.keys for model_map in maps), settings.meant)
    unused = Faults(("isn't used, nor known to the map", key) for key in config if key not in keys)
    unused.check(
        UsageError,
        f"The map {name} doesn't take what was said of the model",
        place="--config",
        remedy=f"leave it out; known are {', '.join(sorted(keys)) or 'none'}",
    )


def settings_in(name: str | None, files: Files | None = None) -> Settings:
    """Returns what the codebases of a map, or of several joined, call the settings of their models."""
    links_as_data = [data_of(link, files)[0] for link in chained(name)]
    return settings_of(*(data[side].get("settings") for data in links_as_data for side in _SIDES))


_SIDES = ("source", "target")
_MODEL_TYPE = "model_type"
"""What a model's whole config.json has, most of which a map passes over. Source: transformers, `PretrainedConfig`."""


def chained(name: str | None) -> Iterator[str]:
    """Yields the maps of a name such as `mesh-tf-t5:t5x-t5:hf-t5`, one after the other."""
    sides = [] if name is None else name.split(":")
    if name is None or len(sides) < 3 or name.removesuffix(BACK).endswith(".json"):
        yield from () if name is None else (name,)
        return
    yield from (f"{a}:{b}" for a, b in pairwise(sides))


def _left_open(
    alternatives: Sequence[str], seen: Collection[str], named: Collection[str]
) -> tuple[str, Sequence[str]]:
    """Returns the alternative of a choice that the names show, and those that they leave open."""
    unnamed = [alternative for alternative in alternatives if alternative not in named]
    shown = next(iter(seen), (unnamed or list(alternatives))[0])
    if len(seen) > 1:
        return shown, (*seen,)
    return shown, (shown,) if named else alternatives


def _links(targets: Mapping[str, str], operations: tuple[Operation, ...]) -> Iterator[Link]:
    """Yields a link for each target, from all the sources that it is the target of."""
    sources_of: dict[str, list[str]] = {}
    for source, target in targets.items():
        sources_of.setdefault(target, []).append(source)
    for target, sources in sources_of.items():
        yield Link(tuple(sources), target, operations)
