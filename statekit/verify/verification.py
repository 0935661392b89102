"""verify: whether a checkpoint that was made of another goes on with the same run.

Everything passes through what `convert` would do: the plan is made anew from the source, and what the target holds is
held against it, by name and bit by bit; then both are stepped. What a fault looks like is asked of this very state.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

from statekit.arrays.backend import backend
from statekit.conversion import registry
from statekit.conversion.changing.changes import Changes
from statekit.conversion.checkpoint_ref import OPTIONS, CheckpointRef, ref_of
from statekit.conversion.contracts import NO_HINTS, Exactness
from statekit.conversion.open_state import OpenState, open_beside
from statekit.conversion.plan import Plan, Request
from statekit.conversion.prepared import SCHEDULE, Prepared, carried_out, prepare
from statekit.conversion.rule_change import Bridge, Compared, RuleChange
from statekit.conversion.target import is_carried, unsaid
from statekit.errors import StatekitError, UsageError, some
from statekit.files.source import checkpoint_place
from statekit.files.tree import Place
from statekit.maps.links import StateMap
from statekit.maps.model_map import BACK, Renaming, load
from statekit.state.comparison import Difference, compare_states, with_still
from statekit.state.constants import variant_constants
from statekit.state.evidence import BEYOND, OPTIMIZER, headline
from statekit.state.factoring import by_shape, swapped
from statekit.state.facts import coupled_decay
from statekit.state.options import RATE_NAMES
from statekit.state.run import BUFFERS
from statekit.state.schema import WEIGHTS, is_native, load_schema, named_native
from statekit.state.stored_params import as_params
from statekit.state.train_state import StepOffset, TrainState
from statekit.tensors.digest import json_digest
from statekit.tensors.tree import from_json, report_json, to_json
from statekit.tensors.typed import typed
from statekit.verify.certificate import FORMAT, VERSION, Certificate
from statekit.verify.identity import VERDICTS, Bijection, Reader, Row, Verdict, bijection, compared
from statekit.verify.natives import installed
from statekit.verify.side_by_side import SideBySide

STEPS = 3
"""Updates of each probe, unless somebody says another number."""


@dataclass(frozen=True)
class Asked:
    """What a verification compares, and how; a certificate can be repeated from it.

    Attributes:
        ref: The checkpoint that was converted, and what its files don't say.
        target: What it became.
        steps: Updates of each probe; 0 leaves them out.
        gradients: Kinds of probes, `all`, `random` or `adversarial`; or a file of gradients.
        backend: Where our steps run.
        everything: Whether every element of every parameter is stepped.
        seed: Of all that is drawn.
        require: The least exactness that passes.
        map: The map that was used, where the target doesn't say it.
        config: What the map was told.
        step_offset: Where the decay of the second moment was made to start, where the target doesn't say it.
    """

    ref: CheckpointRef
    target: Place
    steps: int = STEPS
    gradients: str = "all"
    backend: str = "numpy"
    everything: bool = False
    seed: int = 0
    require: Exactness = Exactness.ROUNDING
    map: str | None = None
    config: Mapping[str, Any] | None = None
    step_offset: StepOffset = "keep"

    @property
    def source(self) -> Place:
        """The path of the checkpoint that was converted."""
        return self.ref.place

    def to_json(self) -> dict[str, Any]:
        """Returns the request for certificates: the user's options, without those of a single run."""
        data = {name: value for name, value in vars(self).items() if name != "ref"}
        places = {"step": self.ref.step, **self.ref.options("place")}
        data |= {"source": str(self.source), "target": str(self.target), **places, **self.ref.stored()}
        return {**to_json(data), "require": self.require.name.lower()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Asked:
        """Returns the request of a certificate."""
        values = {name: from_json(value) for name, value in data.items()}
        names = [option.name for option in OPTIONS]
        options = {name: values.pop(name) for name in names if name in values}
        ref = CheckpointRef(values.pop("source"), **options)
        paths = {
            "target": checkpoint_place(values["target"]),
            "require": Exactness[values["require"].upper()],
        }
        return Asked(ref, **{**values, **paths})

    @property
    def command(self) -> str:
        """The command that repeats the verification; it names the certificate for what only files say."""
        if self.ref.param_names is not None or self.ref.schedule is not None:
            return shlex.join(
                ["statekit", "verify", "--repeat", "CERTIFICATE.json", str(self.source), str(self.target)]
            )
        usual = Asked(self.ref, self.target)
        words = ["statekit", "verify", str(self.source), str(self.target)]
        for name, value in vars(self).items():
            if name in ("ref", "target") or value == getattr(usual, name) or value in (None, {}):
                continue
            if name == "everything":
                words.append("--all")
            elif isinstance(value, Mapping):
                words += [word for key, item in value.items() for word in (f"--{name}", f"{key}={item}")]
            else:
                text = value.name.lower() if isinstance(value, Exactness) else str(value)
                words += [f"--{name.replace('_', '-')}", text]
        return shlex.join([*words, *self.ref.words("place", "meaning")])


OnProgress = Callable[[str, str, int], object]
"""Told a phase, what is at hand, and its size in bytes; 0 of what is no tensor."""


def verify(
    source: CheckpointRef | str | PathLike[str],
    target: str | PathLike[str],
    *,
    step: int | None = None,
    hints: CheckpointRef = NO_HINTS,
    on_progress: OnProgress = lambda phase, name, size: None,
    **asked: Any,
) -> Certificate:
    """Proves that a checkpoint goes on with the run of another, or says where it doesn't.

    Args:
        source: The checkpoint that was converted; a ref says what its files don't.
        target: What it became, by statekit or by anyone.
        step: Step of the source's folder.
        hints: What the source doesn't say.
        on_progress: As `OnProgress`.
        **asked: The other fields of `Asked`.

    Raises:
        NotFoundError, FormatError, StateError: One of them can't be read, or has no canonical form.
        UnknownRuleError: A step needs what nobody said; names it.
        UsageError: The options don't go together.
    """
    asked_for = Asked(ref_of(source, hints, step=step), checkpoint_place(target), **asked)
    if asked_for.steps < 0:
        raise UsageError(
            "A number of updates is wanted.", place="--steps", expected="0 or more", found=asked_for.steps
        )
    if asked_for.steps == 0 and asked_for.gradients != Asked.gradients:
        raise UsageError(
            "No update is done, so nothing takes the gradients.",
            place="--gradients",
            found=f"{asked_for.gradients}, with --steps 0",
            remedy="leave out --gradients, or ask for steps",
        )
    return certificate(asked_for, on_progress)


def certificate(asked: Asked, on_progress: OnProgress = lambda *progress: None) -> Certificate:
    """Returns the certificate of a request; errors are those of `verify`."""
    with _opened(asked) as (prepared, plan, target, notes):
        return _Verification(asked, prepared, plan, target, notes, on_progress).certificate()


@contextmanager
def _opened(asked: Asked) -> Iterator[tuple[Prepared, Plan, OpenState, list[str]]]:
    """Opens the target, and prepares the conversion of the source to a target of the same form."""
    with ExitStack() as stack:
        target = stack.enter_context(open_beside(asked.target, asked.ref))
        card = registry.container_card(target.checkpoint.container)
        if card.target_kind is None:
            raise UsageError(
                f"statekit only reads {card.name}, so nothing tells the expected values.",
                place=asked.target,
                remedy="convert it to a container that is written, and verify that",
            )
        request, notes = _request(asked, target)
        plan = prepare(request)
        prepared = stack.enter_context(carried_out(plan))
        yield prepared, plan, target, notes


def _request(asked: Asked, target: OpenState) -> tuple[Request, list[str]]:
    """Returns the request that makes such a target, from its manifest or from the user's options, and notes."""
    notes: list[str] = []
    stored = from_json((target.checkpoint.manifest or {}).get("options") or {})
    options = typed(stored, _Options, f"the manifest of {asked.target}")
    maps, offset, changes = _maps(asked), asked.step_offset, None
    if options:
        records = options.get("maps", ())
        if len(records) > _MOST_MAPS:
            raise UsageError("The target's manifest names more maps than are read.", found=len(records))
        # maps that are said again replace all but renamings, which the manifest alone says
        maps = (*(_map_of(record) for record in records if not maps or "rename" in record), *maps)
        if offset == "keep":
            offset = (options.get("step_offset") or {}).get("asked", "keep")
        if (record := options.get("changes")) is not None:
            if "init_missing" in record:
                raise UsageError(
                    "The manifest does not list the parameters that came from a file of the model.",
                    place=asked.target,
                )
            changes = Changes.of(record)
        notes.append("what was asked for is as the target's manifest has it")
    request = Request(
        asked.ref.over(target.checkpoint.manifest),
        _unwritten(asked.target, asked.target.name),
        target.checkpoint.container,
        target.layout,
        offset,
        Exactness.LOSSY,  # what is less exact is named here, and not refused before it is looked at
        maps=maps,
        changes=changes,
        asks=False,
    )
    return request, notes


def _maps(asked: Asked) -> tuple[StateMap, ...]:
    if asked.map is None and not asked.config:
        return ()
    from statekit.maps.model_map import maps_of

    return maps_of(asked.map, dict(asked.config or {}), budget=asked.ref.job_budget())


_MOST_MAPS = 64
"""Maps that a manifest may name: each is read, and a renaming is a process."""


class _MapRecord(TypedDict, total=False):
    """A map in a plan's options: pairs of changed names, or the name of a model map."""

    rename: list[tuple[str, str]]
    name: str
    config: dict[str, Any] | None


class _OffsetRecord(TypedDict, total=False):
    """What was asked for of the decay's start."""

    asked: StepOffset


class _Options(TypedDict, total=False):
    """The options of a manifest that say how a target came to be."""

    maps: list[_MapRecord]
    step_offset: _OffsetRecord | None
    changes: dict[str, Any]


def _map_of(record: _MapRecord) -> StateMap:
    """Returns a map as a plan's options have it; a manifest may be anybody's, and names no file of this machine."""
    if (name := record.get("name", "")).removesuffix(BACK).endswith(".json"):
        raise UsageError(
            "The target was made by a map of a file, which no manifest alone has read.",
            place="--map",
            found=name,
            remedy="name the file: --map FILE",
        )
    if "rename" not in record:
        return load(name, dict(record.get("config") or {}))
    return Renaming(tuple((pattern, other) for pattern, other in record["rename"]), is_recorded=True)


@dataclass(frozen=True)
class _Replayed:
    """What stepping showed."""

    data: Mapping[str, Any]
    verdicts: Mapping[str, tuple[Verdict, str]]
    controls: Sequence[Mapping[str, Any]]
    why_not: str = ""


class _Verification:
    """Two checkpoints that are held against each other."""

    def __init__(
        self,
        asked: Asked,
        prepared: Prepared,
        plan: Plan,
        target: OpenState,
        notes: list[str],
        tell: OnProgress,
    ) -> None:
        self._asked, self._plan, self._tell = asked, plan, tell
        self._source, self._target = prepared.opened, target
        assert prepared.carried is not None  # `prepare` made it
        self._carried = as_params(prepared.carried)[0]
        expected, actual = as_params(prepared.state)[0], as_params(target.state)[0]
        self._expected = with_still(expected, actual)
        self._nobody_gave = _made_up(prepared, plan, target)
        self._unknown = _without_value(prepared.carried)
        self._said = [*notes, *(f"changed, as was asked for: {change}" for change in plan.changed)]
        self._actual, self._unsaid = _completed(with_still(actual, expected), self._expected)

    def certificate(self) -> Certificate:
        asked, plan = self._asked, self._plan
        reader = Reader(lambda name, size: self._tell("reading", name, size))
        sides = [reader.digests(opened.checkpoint) for opened in (self._source, self._target)]
        rows = compared(self._expected, self._actual, plan, reader)
        pairs = bijection(rows, self._expected, self._source.checkpoint, self._target.checkpoint)
        there_and_back = self._round_trip(reader)
        differences = compare_states(
            self._expected,
            self._actual,
            by_value=lambda path: path not in self._expected.params,
            on_tensor=lambda name, size: self._tell("reading", name, size),
            sides=("the source", "the target"),
        )
        other_differences, alone = _beside(differences.differences, plan)
        replayed = self._replay(reader)
        verdict, tensors = self._verdict(rows, other_differences, pairs, there_and_back, replayed)
        data = {
            "format": FORMAT,
            "version": VERSION,
            "asked": asked.to_json(),
            "command": asked.command,
            "versions": _versions(),
            "verdict": verdict,
            "identity": {
                "root": json_digest([side.root for side in sides]),
                **{
                    name: {
                        **_side(side_opened),
                        "bytes": digests.bytes,
                        "root": digests.root,
                        "tensors": dict(digests.entries),
                    }
                    for name, side_opened, digests in zip(
                        ("source", "target"), (self._source, self._target), sides, strict=True
                    )
                },
            },
            "map": {
                "tensors": tensors,
                "bijection": pairs.to_json(),
                "round_trip": there_and_back,
                "dropped": dict(plan.dropped),
                "kept": list(plan.kept),
            },
            "rule": {**self._rule(), "settings": [neighbour.to_json() for neighbour in other_differences]},
            "replay": dict(replayed.data),
            "controls": list(replayed.controls),
            "not_compared": [*differences.unsaid, *alone, *self._unsaid],
            "assumptions": list(dict.fromkeys((*plan.assumptions, *self._said))),
            "facts": [fact.to_json() for fact in plan.facts],
        }
        return Certificate(report_json(data))

    def _round_trip(self, reader: Reader) -> dict[str, Any]:
        """Takes the target back to the source's form, and compares bits, where every tensor is said to keep them."""
        source = self._source
        if self._plan.exactness > Exactness.BITWISE:
            worst = self._plan.exactness.name.lower()
            return {
                "done": False,
                "because": f"the conversion is of the class {worst}, which claims no way back",
            }
        if registry.container_card(source.checkpoint.container).target_kind is None:
            return {"done": False, "because": f"statekit only reads {source.checkpoint.container}"}
        if self._plan.changed:
            return {"done": False, "because": "what was changed, as was asked for, isn't changed back"}
        try:
            with _back(self._plan.request, self._asked, source, self._target) as prepared:
                state = as_params(prepared.state)[0]
                origin = as_params(source.state)[0]
                rows = compared(with_still(origin, state), with_still(state, origin), self._plan, reader)
        except StatekitError as error:
            return {"done": False, "because": error.line}
        wrong = [row.name for row in rows if row.verdict == "refuted"]
        return {"done": True, "tensors": len(rows), "differ": wrong}

    def _rule(self) -> dict[str, Any]:
        change = self._plan.rule_change
        fields: list[dict[str, Any]] = []
        equal = 0
        for part, other in zip(self._carried.parts(), self._expected.parts(), strict=True):
            for entry in _fields(part, other, change):
                if entry.fate == "equal":
                    equal += 1
                else:
                    fields.append({**to_json(vars(entry)), "schema": part.optimizer.schema})
        kinds = [
            " and ".join(f"{s}/{v or 'unknown'}" for s, v in x.optimizer.kinds)
            for x in (self._carried, self._expected)
        ]
        return {
            "from": change.source if change else kinds[0],
            "to": change.target if change else kinds[1],
            "exactness": (change.exactness if change else Exactness.BITWISE).name.lower(),
            "equal": equal,
            "fields": [dict(entry) for entry in {json_digest(field): field for field in fields}.values()],
            "compensated": list(change.compensated_by) if change else [],
        }

    def _why_not_asked(self) -> str:
        """Returns why no update is compared, whatever more is told; "" where updates are."""
        if self._asked.steps == 0:
            return "no updates were asked for"
        if any(schema == WEIGHTS for schema, _ in self._expected.optimizer.kinds):
            return "there is no optimizer"
        if {*self._expected.params} != {*self._actual.params}:
            return "the target has other parameters"
        return _besides(self._carried)

    def _replay(self, reader: Reader) -> _Replayed:
        if why := self._why_not_asked():
            return _unstepped(why)
        if self._unknown:
            options = " ".join(f"--hparams {name}=..." for name in self._unknown)
            return _unstepped(f"nobody knows {', '.join(self._unknown)}; say it: {options}")
        if why := _of_several(self._carried):
            return _unstepped(why)
        carried, notes = _decided(_settled(self._carried, self._plan.rule_change))
        self._said += notes
        expected, actual = (_as_decided(side, carried) for side in (self._expected, self._actual))
        if why := _without_step(carried, self._expected):
            return _unstepped(why)
        asked = self._asked
        unborn = _without_slots(carried, expected, actual)
        stepped = [path for path in expected.params if path not in unborn]
        if not expected.only(stepped).slots:
            return _unstepped("no parameter has slots yet")
        self._unsaid += [
            f"{path}: it has no slots yet, so none of its updates is compared" for path in unborn
        ]
        carried, expected, actual = (state.only(stepped) for state in (carried, expected, actual))
        both = SideBySide(carried, expected, actual, self._layouts, self._rule_exactness)
        return _Replayed(
            *both.run(
                asked.gradients,
                asked.steps,
                backend(asked.backend),
                asked.seed,
                asked.everything,
                lambda name: self._tell("stepping", name, 0),
                self._target.budget,
            )
        )

    @property
    def _layouts(self) -> tuple[str, str]:
        return self._source.layout, self._target.layout

    @property
    def _rule_exactness(self) -> Exactness:
        change = self._plan.rule_change
        return change.exactness if change is not None else Exactness.BITWISE

    def _verdict(
        self,
        rows: list[Row],
        beside: list[Difference],
        pairs: Bijection,
        there_and_back: Mapping[str, Any],
        replayed: _Replayed,
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        because, verdicts, tensors = list[str](), list[Verdict](), list[dict[str, Any]]()
        for row in rows:
            stepped, why = replayed.verdicts.get(row.name, (row.verdict, ""))
            worst = max((row.verdict, stepped), key=VERDICTS.index)
            reason = row.reason if worst == row.verdict and row.reason else why
            tensors.append({**row.to_json(), "verdict": worst, **({"reason": reason} if reason else {})})
            verdicts.append(worst)
            if worst == "refuted":
                because.append(f"{row.name}: {reason}")
        for sentence in beside:
            values = f"{_shown(sentence.actual)} in the target, {_shown(sentence.expected)} by the source"
            apart = f"other values than the source: {sentence.distance}"
            because.append(f"{sentence.place}: {apart if sentence.what == 'values' else values}")
        because += [
            f"back in the source's form {name} is another" for name in there_and_back.get("differ", ())
        ]
        because += pairs.faults
        worst_tensor: Verdict = max(verdicts, key=VERDICTS.index, default="bit-exact")
        whole = "refuted" if because else self._whole(worst_tensor, replayed)
        allowed = max(self._rule_exactness, self._plan.exactness) <= self._asked.require
        # Of what is refuted nothing more has to be said.
        facts = () if whole == "refuted" else self._plan.facts
        data = {
            "whole": whole,
            "headline": headline(whole.upper(), facts),
            "nobody_gave": self._nobody_gave,
            "passed": whole != "refuted" and allowed and not self._open_points,
            "exactness": max(self._rule_exactness, self._plan.exactness).name.lower(),
            "because": list(dict.fromkeys(because)),
            "not_stepped": replayed.why_not,
            "proves_nothing_about": [
                control["name"] for control in replayed.controls if not control["detected"]
            ],
        }
        return data, tensors

    @property
    def _open_points(self) -> list[str]:
        """The values that the target holds and nobody gave, and those that a step needs and nobody knows."""
        return [*self._nobody_gave, *(self._unknown if self._asked.steps else ())]

    def _whole(self, worst_tensor: Verdict, replayed: _Replayed) -> Verdict:
        """Returns the verdict on the whole where nothing refutes it."""
        if self._rule_exactness > Exactness.ROUNDING or self._plan.exactness > Exactness.ROUNDING:
            return "semantic difference"
        if replayed.why_not and self._expected.optimizer.schema != WEIGHTS:
            return "not comparable"
        if self._rule_exactness == Exactness.ROUNDING and worst_tensor == "bit-exact":
            return "within the rounding bound"
        return worst_tensor


def _made_up(prepared: Prepared, plan: Plan, target: OpenState) -> list[str]:
    """Returns what the target's file holds and neither the source nor a user says, as `name=value`."""
    assert prepared.carried is not None  # `prepare` made it
    card, home = (registry.layout_card(layout) for layout in (target.layout, plan.source.layout))
    if not card.stores_values or is_carried(prepared.carried, home.name, card, home):
        return []
    stored = {
        name: value
        for group in target.state.optimizer.groups
        for name, value in group.hyperparameters.items()
        if group.known_from.get(name) == "file"
    }
    missing = {
        fact.name.rpartition("/")[2] for fact in unsaid(prepared.carried, prepared.state, plan.request.ref)
    }
    return [f"{name}={value}" for name, value in stored.items() if name in missing]


def _without_value(state: TrainState) -> list[str]:
    """Returns the hyperparameters that the files show to be in use, and whose values nobody says.

    A step with their defaults would contradict the files. A rate is none of them: both sides are stepped with ours.
    """
    facts = (fact for group in state.optimizer.groups for fact in group.facts)
    unknown = (fact.name for fact in facts if fact.source == "unknown")
    return [*dict.fromkeys(name for name in unknown if name not in (OPTIMIZER, *RATE_NAMES))]


def _beside(differences: Sequence[Difference], plan: Plan) -> tuple[list[Difference], list[str]]:
    """Returns the differences beside parameters and slots, and the parts that one side alone has.

    What the target has no place for isn't among it: that stands in the plan.
    """
    wrong, alone = list[Difference](), list[str]()
    for difference in differences:
        is_buffer = difference.place.startswith(f"{BUFFERS}/")
        if difference.what in ("schedule", "part"):
            has = difference.expected is not None, difference.actual is not None
            if not all(has):
                alone.append(
                    f"the {difference.item or difference.what}: only the {'source' if has[0] else 'target'} has it"
                )
            elif difference.place != "schedule/count" or SCHEDULE not in plan.dropped:
                wrong.append(difference)
        elif is_buffer and difference.what == "extra":
            alone.append(f"{difference.place}: only the target has it")
        elif is_buffer and difference.what == "missing" and f"extra/{difference.place}" in plan.dropped:
            continue
        elif _is_beside(difference):
            wrong.append(difference)
    return wrong, alone


def _is_beside(difference: Difference) -> bool:
    """Tells whether a difference is in buffers, in other tensors beside the parameters, or in what moves them."""
    is_buffer = difference.place.startswith((f"{BUFFERS}/", "extra/"))
    return is_buffer or difference.what in ("updates", "option", "moved", "rule")


def _completed(actual: TrainState, expected: TrainState) -> tuple[TrainState, list[str]]:
    """Returns a target's state with the source's values where its file has none, and notes of each."""
    by_path = expected.optimizer.group_of
    notes: dict[str, None] = {}
    groups = []
    for group in actual.optimizer.groups:
        other = by_path.get(group.paths[0]) if group.paths else None
        if other is None:
            groups.append(group)
            continue
        missing = {n: v for n, v in other.hyperparameters.items() if n not in group.hyperparameters}
        notes.update(
            {f"{name}: the target doesn't say it; it is stepped with the source's": None for name in missing}
        )
        groups.append(replace(group, hyperparameters={**group.hyperparameters, **missing}))
    variant = actual.optimizer.variant or expected.optimizer.variant
    rules = {**expected.rules, **actual.rules} if {*expected.params} == {*actual.params} else actual.rules
    rules = {path: _known(rules[path], expected.rules.get(path)) for path in rules}
    optimizer = replace(actual.optimizer, variant=variant, groups=tuple(groups))
    return replace(actual, optimizer=optimizer, rules=rules), list(notes)


def _of_several(state: TrainState) -> str:
    """Returns a sentence if several optimizers fit a state; "" if one does."""
    facts = [fact for group in state.optimizer.groups for fact in group.facts]
    is_open = any(fact.name == OPTIMIZER and fact.source == "unknown" for fact in facts)
    return "the state may be of several optimizers; name it: --optimizer NAME" if is_open else ""


def _besides(state: TrainState) -> str:
    """Returns what a run does beside its optimizer's steps, so that these alone show nothing; "" if nothing."""
    facts = [fact for group in state.optimizer.groups for fact in group.facts]
    return next(
        (f"the run does more than its optimizer's steps: {f.because}" for f in facts if f.name == BEYOND), ""
    )


def _without_step(*states: TrainState) -> str:
    """Returns why a state can't be stepped; "" where each can."""
    for schema, variant in [kind for state in states for kind in state.optimizer.kinds]:
        if is_native(schema):
            return f"statekit has no step of {named_native(schema, variant)}"
        if variant is None:
            raise UsageError(
                "A step needs the variant of its rule, and the files do not tell it.",
                place="--variant",
                expected=", ".join(load_schema(schema).stepped),
                remedy="name it, or leave the steps out with --steps 0",
            )
        if variant not in load_schema(schema).stepped:
            return f"statekit has no step of {schema}'s variant {variant}"
    return next(filter(None, map(coupled_decay, states)), "")


def _without_slots(*states: TrainState) -> list[str]:
    """Returns the parameters for which no state has slots: those that never had a gradient."""
    moved = list(states[0].optimizer.paths)
    return [path for path in moved if not any(state.slots.get(path) for state in states)]


def _known(rule: Any, other: Any) -> Any:
    """Returns a rule that is known where the source's is, and says the same."""
    return other if other is not None and other.axes == rule.axes else rule


def _settled(state: TrainState, change: RuleChange | None) -> TrainState:
    """Returns a state with the variant and the hyperparameters that the plan took it to have."""
    if change is None or state.optimizer.several:
        return state
    schema, variant = load_schema(state.optimizer.schema), change.source
    usual = schema.settings(variant)
    offered = schema.variant(variant)["defaults"]
    groups = []
    for group in state.optimizer.groups:
        on = state.switched_on(group)
        taken = {n: usual[n] for n in offered if n not in group.hyperparameters and n not in on}
        groups.append(replace(group, hyperparameters={**taken, **group.hyperparameters}))
    return replace(state, optimizer=replace(state.optimizer, variant=variant, groups=tuple(groups)))


def _decided(state: TrainState) -> tuple[TrainState, list[str]]:
    """Returns a state whose factor rules are known where its variant's own rule by shape is what was assumed."""
    rules, paths = dict(state.rules), list[str]()
    for part in state.parts():
        schema, variant = part.optimizer.schema, part.optimizer.variant
        form = variant_constants(schema, str(variant)) if variant is not None else {}
        if "factored_axes" not in form or form["factored_rank"] == "two_or_rule":
            continue
        for group in part.optimizer.groups:
            least = group.hyperparameters.get("min_dim_size_to_factor") or 0
            factored = group.hyperparameters.get("factored", True)
            for path in group.paths:
                rule = part.rules.get(path)
                if rule is None or rule.known_from != "assumed":
                    continue
                if by_shape(form, part.params[path].shape, factored, least) == rule.axes:
                    rules[path] = replace(rule, known_from="given")
                    paths.append(path)
    notes = [f"factored as the variant does it by shape: {some(paths)}"] if paths else []
    return replace(state, rules=rules), notes


def _as_decided(state: TrainState, carried: TrainState) -> TrainState:
    """Returns a state whose rules are known where the source's are, and average the same axes."""
    rules = dict(state.rules)
    for path, rule in state.rules.items():
        other = carried.rules.get(path)
        alike = other is not None and rule.axes in (other.axes, swapped(other.axes))
        if other is not None and alike and other.known_from != "assumed":
            rules[path] = replace(rule, known_from="given")
    return replace(state, rules=rules)


def _fields(source: TrainState, target: TrainState, change: RuleChange | None) -> Iterator[Compared]:
    """Yields every respect in which the rules of two states may part; none where nobody knows whose they are."""
    names = source.optimizer.variant or (change.source if change else None), target.optimizer.variant
    if None in names or source.optimizer.schema == WEIGHTS:
        return
    before, after = map(str, names)
    has = {
        "batch_axes": any("BATCH" in rule.to_json()["axes"] for rule in source.rules.values()),
        "behind": bool(source.counts.behind),
    }
    bridge = Bridge(load_schema(source.optimizer.schema), before, after, has)
    for group in source.optimizer.groups:
        yield from bridge.compared(group, source.switched_on(group))


def _unwritten(place: Place, name: str) -> Path:
    """Returns a path beside a place, of this machine, for a plan by which nothing is written."""
    return place.with_name(name) if isinstance(place, Path) else Path(name)


@contextmanager
def _back(request: Request, asked: Asked, source: OpenState, target: OpenState) -> Iterator[Prepared]:
    """Opens a target as the source of a conversion back; nothing is written."""
    backward = Request(
        replace(target.ref, container=target.checkpoint.container, layout=target.layout),
        _unwritten(asked.source, f"{asked.source.name}-again"),
        source.checkpoint.container,
        source.layout,
        require=Exactness.LOSSY,
        maps=tuple(_turned(model_map) for model_map in reversed(request.maps)),
    )
    with carried_out(prepare(backward)) as prepared:
        yield prepared


def _turned(model_map: StateMap) -> StateMap:
    """Returns a map the other way."""
    record = model_map.to_json()
    if "name" not in record:
        raise UsageError("Names that patterns changed have no way back.", place="--rename")
    first, _, second = str(record["name"]).partition(":")
    return load(f"{second}:{first}", dict(record["config"]))


def _side(opened: OpenState) -> dict[str, Any]:
    checkpoint = opened.checkpoint
    return {"container": checkpoint.container, "layout": opened.layout, "step": checkpoint.step}


def _unstepped(why: str) -> _Replayed:
    return _Replayed({"stepped": False, "because": why}, {}, (), why)


def _versions() -> dict[str, str]:
    packages = ["statekit", "numpy", "ml_dtypes"]
    return {"python": platform.python_version(), **{name: installed(name) for name in packages}}


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)
