"""The layout `torch-optim`: AdamW and Adafactor of torch.optim, and Hugging Face's Adafactor, as state_dict() has them.

It also holds optimizers without a schema, under their own names (`native`).

State lies under an index, or under a name as FSDP and DCP gather it. A parameter's index is its place over all groups;
`param_order` says how names are found. torch's Adafactor keeps averaged axes with length 1; Hugging Face's averages the
last two axes of everything that has two. What each calls a slot (`exp_avg_sq_row`) is the schema's to say (`aliases`).

Source: pytorch/pytorch torch/optim/{adamw,_adafactor}.py; huggingface/transformers, optimization.py, `Adafactor`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import NO_HINTS, Contents, Encoded, Evidence, Hints, Unnamed
from statekit.converters.layouts.pytorch import lines, native
from statekit.converters.layouts.pytorch.architecture import (
    BY_CONFIG,
    as_in_file,
    has_config,
    names_beside,
    names_by_config,
    names_in_file,
    with_experts,
)
from statekit.converters.layouts.pytorch.contents import (
    STEP,
    Signature,
    contents_of,
    shape_of,
    signature_of,
    unknown,
    unnamed_tensors,
    unwrapped_record,
)
from statekit.converters.layouts.pytorch.flat_vector import unflattened
from statekit.converters.layouts.pytorch.networks import by_model_key, several_networks, unpaired_networks
from statekit.converters.layouts.pytorch.param_order import OF_GROUPS, REMEDY, Order, found_order
from statekit.converters.layouts.pytorch.parts import (
    GROUPS,
    MASTER_PARAM,
    MOST_PARTS,
    Form,
    Parts,
    StateDict,
    averaged_models,
    extra_of,
    find_parts,
    join_parts,
    looks_nested,
    names_of,
    networks,
    nodes,
    optimizers_in,
    path_of,
    possible_models,
    shared_paths,
    too_small_models,
    with_others,
)
from statekit.converters.layouts.pytorch.side_by_side import USUAL, join_side_by_side, side_by_side
from statekit.errors import Faults, InexactError, NamesError, StateError, plural, some
from statekit.files.checkpoint import MODEL_KEY, OPTIMIZER_KEY, OPTIMIZER_NAME, SORTED, Checkpoint
from statekit.lines.printing import SavedRun, State, torch_lines
from statekit.state.constants import variant_constants
from statekit.state.evidence import Fact, KnownFrom, beyond, fits_several, of_class, of_pieces
from statekit.state.factoring import FACTORED, by_shape, matrix_rule, stored_shape, turned_matrices
from statekit.state.facts import narrowed
from statekit.state.param_names import is_adapted
from statekit.state.run import SIDE_BY_SIDE, TRAINER_ARGUMENTS
from statekit.state.schema import is_native, load_schema, named_native
from statekit.state.stored_params import MASTER
from statekit.state.train_state import PER_PARAMETER, Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Shape, Tensor, in_memory, scalar
from statekit.tensors.tree import Path as TreePath
from statekit.tensors.tree import Tree, at
from statekit.tensors.typed import Finite, fits, typed
from statekit.tensors.views import Squeezed


@dataclass(frozen=True)
class TorchOptimizer:
    """One optimizer: what its groups must say, which names its slots have, and in what form it counts.

    Attributes:
        schema: The optimizer.
        variant: Whose rule.
        options: Keys that its groups have and no other optimizer's together.
        notes: What its state holds besides slots and `step`, for people, and no other's does: kept, never used.
        beside: What its state may hold besides: kept, never used.
        count: Dtype of `step` where it is a tensor; "" where it is a number.
        usual: Options of a new optimizer's groups: loading a distributed checkpoint asks for all of them.
        told: Options that only say which of a class' two rules moves a group.
        marked: What `use_muon` is in the state of each parameter, where that says which rule moves it.
        own_rate: An option with which it makes its rate itself; it looks for `lr` nevertheless, and finds None.
        signature: By what a file's optimizer was told; None of one that is written.
    """

    schema: str
    variant: str | None
    options: tuple[str, ...]
    count: str | None = "float32"
    notes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    usual: Mapping[str, Any] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    marked: bool | None = None
    own_rate: str = ""
    signature: Signature | None = None

    @property
    def names(self) -> dict[str, str]:
        """Canonical slot -> name in the state."""
        return load_schema(self.schema).slot_names(str(self.variant))

    @property
    def is_native(self) -> bool:
        """Whether it has no schema, so that its state stands under its own names."""
        return is_native(self.schema)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a group by which it is told."""
        return self.options if self.signature is None else self.signature.options

    @property
    def form(self) -> Mapping[str, Any]:
        """The variant's constants."""
        return variant_constants(self.schema, str(self.variant))

    def rule(self, shape: Shape) -> Rule:
        """Returns how the optimizer factors a parameter, or which of its axes make a matrix."""
        none = Rule((Axis.NONE,) * len(shape), "file")
        if self.is_native:
            return none
        if "v_row" in self.names:
            return Rule(by_shape(self.form, shape, True), "file")
        return matrix_rule(self.form, len(shape)) or none


_ADAMW = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
    "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip
_USE_MUON = "use_muon"
KINDS = (
    TorchOptimizer("adafactor", "torch", ("beta2_decay", "d"), usual={"foreach": None, "maximize": False}),
    TorchOptimizer(
        "adafactor", "hf", ("scale_parameter", "clip_threshold"), "", ("RMS",), own_rate="relative_step"
    ),
    TorchOptimizer(
        "adamw",
        "torch",
        ("betas", "amsgrad", "eps", "weight_decay"),
        usual=_ADAMW,
        beside=("grad_norm_exp_avg",),
    ),
    TorchOptimizer("muon", "torch", ("ns_coefficients", "adjust_lr_fn"), None),
    TorchOptimizer("muon", "keller", ("use_muon", "momentum"), None, told={_USE_MUON: True}),
    TorchOptimizer("adamw", "keller", ("use_muon", "betas"), "", told={_USE_MUON: False}),
    TorchOptimizer("muon", "emerging", ("extra_scale_factor",), None),
    TorchOptimizer("muon", "moonlight", ("adamw_betas", "momentum"), None, marked=True),
    TorchOptimizer("adamw", "moonlight", ("adamw_betas", "adamw_eps"), "", marked=False),
)
TOGETHER = ({("muon", "keller"), ("adamw", "keller")}, {("muon", "moonlight"), ("adamw", "moonlight")})
"""Rules of one class: its groups, or what it keeps of each parameter, say which of them moves it."""
_SAID = {"index": "by index", "name": "by name", "flat": "an entry for each parameter's option"}
_FORM_NOTES = {
    "flat": ("The options stand by parameter; parameters with equal ones are taken as one group.",)
}
ALONE = (
    "statekit.torch.load_optimizer(..., model.named_parameters()) goes on with it; to convert it, save it with them: "
    'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, ...)'
)
_BARE = "Only tensors were saved: the hyperparameters aren't known."
_AT_HOME = ("torch", "hf-trainer", "accelerate", "safetensors", "dcp", "dcp-safetensors", "fsdp1-ranks")
"""Containers in which any optimizer's state is one of PyTorch's."""
_TRAINER = "hf-trainer"
_ENGINE = "deepspeed"
"""A container whose engine moves weights of its own: its layout asks this one as if it were a file."""
_GATHERED = ("dcp",)
"""Containers in which an optimizer by name is nothing special."""
_LIMIT = "max_grad_norm"
_OF_GRADIENTS = (
    "gradient_accumulation_steps", "label_smoothing_factor", "neftune_noise_alpha", "average_tokens_across_devices",
)  # fmt: skip
CLIP, DECOUPLED = "global_norm_clip_threshold", "decoupled_weight_decay"
_DECOUPLES = {"adamw": True, "adam": False}
"""Whether an optimizer's weight decay is decoupled."""
_ADAM_OR_ADAMW = (
    "older releases of torch save torch.optim.Adam and AdamW alike, and weight decay makes a difference; --hparams"
    " decoupled_weight_decay=true or false says it too"
)
_ADAMW_NAMED = re.compile(r"(?i)fairseqadam|(paged_)?adamw.*")
"""What configurations call an optimizer whose weight decay is decoupled: FairseqAdam is one, in spite of its name."""
_BY_NAME = "torch_by_name"
"""Key in `extra`: whether the state lies under names."""
_INFORMATION = "torch_information"
"""Key in `extra`: entries of the state that no update reads, by path."""


@dataclass(frozen=True)
class TorchOptim:
    """AdamW and Adafactors in a torch file.

    Attributes:
        form: How the optimizer lies in the file; None for by index, or by name if it was so.
        names_from: Where else names may be taken from.
        holds_several: Containers in which it holds several optimizers, each in a state_dict of its own.
    """

    name: str = "torch-optim"
    title: str = "torch.optim's AdamW, Adafactor and Muon, Hugging Face's Adafactor: by index or by name"
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "adamw": ("torch", "keller", "moonlight"),
            "adafactor": ("hf", "torch"),
            "muon": ("torch", "keller", "moonlight", "emerging"),
            native.SCHEMA: (),
        }
    )
    containers: tuple[str, ...] = ("torch", "hf-trainer", "accelerate", "safetensors", "dcp", "fsdp1-ranks")
    stores_values: bool = True
    form: Form | None = None
    names_from: tuple[str, ...] = ("config",)
    holds_several: tuple[str, ...] = ()

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at the options of the groups, and at the names of the slots."""
        if parts_apart := side_by_side(checkpoint, {}):
            sides = [_kinds(_by_rule(parts)) for parts in parts_apart.each]
            if self.form or not all(sides):
                return None
            places = " and ".join("/".join(map(str, place)) for place in parts_apart.places)
            return Evidence(20, f"optimizers side by side at {places}")
        parts = find_parts(checkpoint, {})
        kinds = _kinds(_by_rule(parts)) if parts else []
        forms = (self.form,) if self.form else ("index", "name")
        if parts is None or not kinds or parts.form not in forms:
            return None
        if any(_is_elsewhere(kind, self.form, checkpoint.container) for kind in kinds):
            return None
        return _evidence(parts, kinds, self.form)

    def describe(self, checkpoint: Checkpoint, names: Sequence[str] | None = None) -> Contents | None:
        """Describes a file of PyTorch that isn't decoded. The layouts by name leave that to the layout by index."""
        contents = None if self.form else contents_of(checkpoint, names)
        program = tuple(lines.program_lines(checkpoint))
        return contents and replace(contents, unnamed=_unnamed(checkpoint), program=program)

    def names_are_near(self, checkpoint: Checkpoint) -> str:
        """Returns `config` where the model's configuration lies beside its weights."""
        return "config" if has_config(checkpoint) else ""

    def names_in_file(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        """Returns the file's name of each parameter that the model in its configuration has under another one."""
        parts = find_parts(checkpoint, {})
        return names_in_file(checkpoint, parts.model) if parts else {}

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        parts, kinds, said_of_groups, sides = _parts_and_kinds(checkpoint, hints)
        parts, said_of_vector = unflattened(parts, hints.param_names)
        parts = _with_experts(parts, checkpoint, hints)
        _refuse_merged(parts.model, hints.model, checkpoint)
        order, note_of_names = _order(parts, kinds, checkpoint, hints)
        moved = {name: None for names in order.groups for name in names}
        params = {path_of(name): tensor for name, tensor in parts.model.items() if name in moved}
        kind_of = {path_of(n): kind for kind, names in zip(kinds, order.groups, strict=True) for n in names}
        faults = Faults(_misplaced(parts, moved))
        form_notes = (_BARE,) if _says_no_options(parts) else _FORM_NOTES.get(parts.form, ())
        form_notes = (*form_notes, *_of_gradients(checkpoint), *native.of_averages(parts.groups))
        of_names = filter(None, (note_of_names, said_of_vector))
        notes = dict.fromkeys((*order.notes, *of_names, *form_notes, *said_of_groups))
        groups = _groups(kinds, parts, order.groups, _decoupled(checkpoint, hints))
        rules = {path: kind_of[path].rule(p.shape) for path, p in params.items()}
        slots, unread = {}, dict[str, Any]()
        records, bare = _records(parts, order, kind_of, faults)
        pieces: list[str] = []
        for path, record in records.items():
            kind = kind_of[path]
            if _saw_pieces(kind, record, rules[path]):
                rules[path] = Rule((Axis.NONE,) * len(params[path].shape), "file")
                pieces.append(path)
            slots[path] = dict(_slots(kind, record, rules[path], params[path].shape, path, faults))
            unread |= _unread(kind, record, path)
        counts, uncounted = _counted(records, kind_of, checkpoint, faults)
        faults.check(StateError, "The state doesn't fit the parameters", place=checkpoint.path)
        counting = _counting(kind_of, bare, uncounted)
        done = 0 if counting else native.stated_updates(parts.groups, parts.rest, checkpoint)
        aside = {_INFORMATION: unread, _BY_NAME: _is_by_name(parts), SIDE_BY_SIDE: sides}
        extra = {**_extra(parts, moved, kinds), **bare.extra, **_present(aside)}
        state = hints.applied(
            TrainState(
                params,
                {**slots, **bare.slots},
                Optimizer.of(
                    _in_pieces(_clipped(groups, parts, checkpoint), pieces),
                    [(kind.schema, kind.variant) for kind in kinds],
                ),
                _counts({**counts, **bare.counts}, counting, done),
                {path: rule for path, rule in rules.items() if kind_of[path].schema == "adafactor"},
                extra,
                (*notes, *_of_uncounted(uncounted)),
            )
        )
        state = replace(state, optimizer=_narrowed(state.optimizer, checkpoint))
        return state.with_facts(lambda facts: [*facts, *_facts_of(order, checkpoint)])

    def encode(self, state: TrainState) -> Encoded:
        """Returns the file's tree, by index."""
        if not state.optimizer.several or self.form or _of_one_class(state.optimizer.kinds):
            joined = self._encode(state, [((), list(state.optimizer.groups))])
            sides = [] if self.form else _as_they_lay(state)
            return replace(joined, side_by_side=self._encode(state, sides)) if sides else joined
        sides = _as_they_lay(state) or [
            ((USUAL, i), [group for group in state.optimizer.groups if state.optimizer.kind(group) == kind])
            for i, kind in enumerate(state.optimizer.kinds)
        ]
        return self._encode(state, sides)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return lines.with_given(state, saved, self._lines(state, saved))

    def _lines(self, state: State, saved: SavedRun) -> list[str]:
        match saved.container:
            case "hf-trainer":
                return lines.trainer_lines(state, saved)
            case "accelerate":
                return lines.accelerate_lines(state, saved)
            case "safetensors" if saved.halves:  # no call of their library loads both
                return torch_lines(state, saved)
            case "safetensors":
                return lines.pretrained_lines(state, saved)
            case "dcp":
                return lines.distributed_lines(state, saved, self.form)
            case "dcp-safetensors":
                return lines.distributed_safetensors_lines(state, saved)
            case "fsdp1-ranks":
                return lines.rank_lines(saved)
        return lines.torch_file_lines(state, saved, self.form)

    def _encode(self, state: TrainState, sides: Sequence[tuple[TreePath, list[Group]]]) -> Encoded:
        """Returns the file's tree with an optimizer at each of these places, or one for all at its usual one."""
        faults = Faults([*_unknown_numbers(state), *_turned(state)])
        kinds = [
            [_kind_of(*state.optimizer.kind(group), self.name) for group in groups] for _, groups in sides
        ]
        by_name = self.form is not None or bool(state.extra.get(_BY_NAME))
        optimizers = [
            self._optimizer(state, of_groups, groups, by_name, faults)
            for of_groups, (_, groups) in zip(kinds, sides, strict=True)
        ]
        faults.check(InexactError, f"The layout {self.name} can't hold the state")
        _check_objects(state)
        names = names_of(state.extra, state.params)
        params = {names[path]: tensor for path, tensor in state.params.items()}
        updates, placed = state.counts.updates, (_INFORMATION, _BY_NAME, native.FORM, PER_PARAMETER)
        if len(sides) == 1:
            ((groups, records),) = optimizers
            return join_parts(state.extra, updates, params, groups, records, placed, self.form or "index")
        full = iter(with_others(state.extra, [group for groups, _ in optimizers for group in groups]))
        dicts = [
            {"state": records, "param_groups": [next(full) for _ in groups]} for groups, records in optimizers
        ]
        places = [place for place, _ in sides]
        return join_side_by_side(state.extra, updates, params, dicts, places, (*placed, SIDE_BY_SIDE))

    def _options(self, kind: TorchOptimizer, state: TrainState, group: Group) -> dict[str, Any]:
        """Returns a group's options, without those that `extra` has for it."""
        stated: Sequence[Mapping[Any, Any]] = state.extra.get(GROUPS) or ()
        number = next(i for i, other in enumerate(state.optimizer.groups) if other is group)
        others = stated[number] if number < len(stated) else {}
        if kind.is_native:
            return native.native_options(group.hyperparameters, others)
        usual = {key: kind.usual[key] for key in kind.usual if self.form and key not in others}
        return {**usual, **_native_options(kind, state, group), **kind.told}

    def _optimizer(
        self,
        state: TrainState,
        kinds: Sequence[TorchOptimizer],
        canonical: Sequence[Group],
        by_name: bool,
        faults: Faults,
    ) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
        """Returns the groups and the state of an optimizer that moves some of a state's groups."""
        order = [path for group in canonical for path in group.paths]
        names = names_of(state.extra, order)
        index = {path: names[path] if by_name else i for i, path in enumerate(order)}
        records = _records_of(kinds, canonical, state, faults)
        groups = [
            {
                **self._options(kind, state, group),
                "params": [index[path] for path in group.paths],
                **({} if by_name else {"param_names": [names[path] for path in group.paths]}),
            }
            for kind, group in zip(kinds, canonical, strict=True)
        ]
        if kinds and kinds[0].marked is not None:
            groups = _as_one_group(groups, faults)
        return groups, {index[path]: record for path, record in records.items()}


def _check_objects(state: TrainState) -> None:
    """Refuses the state of an optimizer without a schema that keeps objects."""
    variants = [named_native(*kind) for kind in state.optimizer.kinds if is_native(kind[0])]
    Faults(native.foreign_objects(state) if variants else ()).check(
        InexactError,
        f"{some(variants)} keeps what a torch file can't hold",
        expected="dicts, lists, tuples, numbers, text, bytes and tensors",
        remedy="carry it into a folder of statekit (--to statekit), or go on in the program that wrote it",
    )


def _records_of(
    kinds: Sequence[TorchOptimizer], groups: Sequence[Group], state: TrainState, faults: Faults
) -> dict[str, dict[str, Any]]:
    """Returns what an optimizer keeps of each parameter, by path.

    What has no schema comes in the order of its birth, whatever its groups.
    """
    pairs = list(zip(kinds, groups, strict=True))
    bare = [path for kind, group in pairs if kind.is_native for path in group.paths]
    records = native.native_records(state, bare)
    for kind, group in pairs:
        records |= {} if kind.is_native else _records_of_group(kind, state, group, faults)
    return records


def _records_of_group(
    kind: TorchOptimizer, state: TrainState, group: Group, faults: Faults
) -> dict[str, dict[str, Any]]:
    """Returns what an optimizer keeps of each parameter of a group, by path; one that was never moved has none."""
    marks = {} if kind.marked is None else {_USE_MUON: kind.marked}
    kept = {path: state.slots.get(path) for path in group.paths}
    records = {
        path: {**marks, **(_native(kind, state, path, slots, faults) if slots else {})}
        for path, slots in kept.items()
    }
    return {path: record for path, record in records.items() if record}


def _as_they_lay(state: TrainState) -> list[tuple[TreePath, list[Group]]]:
    """Returns where each of several optimizers lay in a file of PyTorch, with its groups; none if it isn't so."""
    groups, stated = list(state.optimizer.groups), state.extra.get(SIDE_BY_SIDE) or []
    ends = list(itertools.accumulate(count for _, count in stated))
    if not ends or ends[-1] != len(groups):
        return []
    if any(isinstance(key, int) and not 0 <= key < MOST_PARTS for place, _ in stated for key in place):
        return []
    sides = [groups[end - count : end] for end, (_, count) in zip(ends, stated, strict=True)]
    if not all(_of_one_class({*map(state.optimizer.kind, side)}) for side in sides):
        return []
    return [(tuple(place), side) for (place, _), side in zip(stated, sides, strict=True)]


def _of_one_class(kinds: Collection[tuple[str, str | None]]) -> bool:
    """Tells whether one class of PyTorch has all these rules."""
    return len(kinds) == 1 or any({*kinds} <= together for together in TOGETHER)


def _as_one_group(groups: Sequence[dict[str, Any]], faults: Faults) -> list[dict[str, Any]]:
    """Returns the one group of a class that marks each parameter's rule in its state: Muon's parameters come first."""
    merged: dict[str, Any] = {}
    for group in groups:
        for key, value in group.items():
            if isinstance(value, list):
                merged[key] = [*merged.get(key, []), *value]
            elif merged.setdefault(key, value) != value:
                faults.add(
                    f"is {merged[key]!r} and {value!r}, and the class has one group for both rules", key
                )
    return [merged]


def _kind_of(schema: str, variant: str | None, layout: str) -> TorchOptimizer:
    """Returns the optimizer of torch of a rule."""
    if schema == native.SCHEMA:
        return TorchOptimizer(schema, variant, ())
    for kind in KINDS:
        if (kind.schema, kind.variant) == (schema, variant):
            return kind
    raise InexactError(
        f"The layout {layout} holds no optimizer of this rule.",
        expected="; ".join(f"{k.schema}, variant {k.variant}" for k in KINDS),
        found=f"{schema}, variant {variant or 'unknown'}",
    )


def _parts_and_kinds(
    checkpoint: Checkpoint, hints: CheckpointRef
) -> tuple[Parts, list[TorchOptimizer], list[str], list[Any]]:
    """Returns the parts of a checkpoint, whose each group is, what is said of how they lay, and where several do."""
    parts_apart = side_by_side(checkpoint, hints.model)
    if parts_apart is None:
        parts = find_parts(checkpoint, hints.model)
        parts = _by_rule(parts) if parts else None
        kinds = _kinds(parts, hints.variants) if parts else []
        if parts is None or not kinds:
            raise _incomplete(checkpoint)
        return _as_torch(parts, kinds[0]), kinds, _said_of_pair(checkpoint, parts), []
    sides = [_by_rule(parts) for parts in parts_apart.each]
    of_sides = [_kinds(parts, hints.variants) for parts in sides]
    places = ["/".join(map(str, place)) for place in parts_apart.places]
    Faults(_without_schema(places, of_sides, sides)).check(
        StateError,
        "Of the run's optimizers some can't be read",
        place=checkpoint.path,
        remedy=f"`statekit inspect` lists their slots; --optimizer-key {places[0]} takes one alone",
    )
    notes = (
        f"The file has {len(places)} optimizers, {' and '.join(places)}; their groups are numbered through."
    )
    counted = [[list(place), len(kinds)] for place, kinds in zip(parts_apart.places, of_sides, strict=True)]
    joint = replace(parts_apart.joint, groups=[group for parts in sides for group in parts.groups])
    return joint, [kind for kinds in of_sides for kind in kinds], [notes], counted


def _without_schema(
    places: Sequence[str], kinds: Sequence[Sequence[TorchOptimizer]], sides: Sequence[Parts]
) -> Iterator[tuple[str, str]]:
    """Yields the optimizers side by side that none is that statekit knows, by their names."""
    for place, of_side, parts in zip(places, kinds, sides, strict=True):
        if not of_side:
            signature = signature_of(parts)
            yield f"is {signature.name if signature else 'unknown'}, which has no schema yet", place


def _said_of_pair(checkpoint: Checkpoint, parts: Parts) -> list[str]:
    """Returns that a network's optimizer was told by its name, where it was."""
    if checkpoint.meta.get(OPTIMIZER_KEY) is not None and checkpoint.meta.get(MODEL_KEY) is not None:
        return []
    model, optimizer = parts.places
    if networks(checkpoint.tree).get(model) != optimizer:
        return []
    model_name, optimizer_name = ("/".join(map(str, place)) for place in (model, optimizer))
    return [f"{optimizer_name} moves {model_name}, as their names go together."]


def _unnamed(checkpoint: Checkpoint) -> Unnamed | None:
    """Returns what a checkpoint says without its parameters' names; None where its optimizer isn't one of these."""
    try:
        parts, kinds, _, sides = _parts_and_kinds(checkpoint, Hints.of_model(NO_HINTS, {}))
        numbers = [[str(index) for index in group["params"]] for group in parts.groups]
        if len({number for group in numbers for number in group}) != sum(map(len, numbers)):
            return None
        kind_of = {i: kind for kind, group in zip(kinds, parts.groups, strict=True) for i in group["params"]}
        counted = _updates_of(kind_of, parts.state, checkpoint)
        if counted is None:
            return None
        counts, uncounted = counted
        groups = _clipped(_groups(kinds, parts, numbers, _decoupled(checkpoint, NO_HINTS)), parts, checkpoint)
    except StateError:
        return None
    extra = extra_of(parts, parts.model, {name for kind in kinds for name in _options(kind)})
    extra |= {SIDE_BY_SIDE: sides} if sides else {}
    done = _stated_updates(kinds, parts, checkpoint)
    optimizer = _narrowed(Optimizer.of(groups, [(kind.schema, kind.variant) for kind in kinds]), checkpoint)
    return Unnamed(
        optimizer, _counts(counts, (), done), extra, (*_of_gradients(checkpoint), *_of_uncounted(uncounted))
    )


def _stated_updates(kinds: Sequence[TorchOptimizer], parts: Parts, checkpoint: Checkpoint) -> int | None:
    """Returns the updates that a run has done where no parameter has made any; None where nothing tells them."""
    is_counted = any(kind.count is not None and not kind.is_native for kind in kinds)
    return 0 if is_counted else native.stated_updates(parts.groups, parts.rest, checkpoint)


def _updates_of(
    kind_of: Mapping[Any, TorchOptimizer], records: Mapping[Any, Mapping[str, Any]], checkpoint: Checkpoint
) -> tuple[dict[Any, int], frozenset[Any]] | None:
    """Returns the counts of parameters, as `_counted`; None where one isn't told, or slots stand in no group."""
    if not records.keys() <= kind_of.keys():
        return None
    # An optimizer without a schema may count nothing, as SGD doesn't.
    counting = {
        index: record for index, record in records.items() if STEP in record or not kind_of[index].is_native
    }
    faults = Faults()
    counted = _counted(counting, kind_of, checkpoint, faults)
    return None if faults else counted


def _incomplete(checkpoint: Checkpoint) -> StateError:
    """Returns what is wrong with a checkpoint that hasn't both parts, or an optimizer that isn't known."""
    parts = find_parts(checkpoint, {})
    if parts is None and len(pairs := networks(checkpoint.tree)) > 1:
        return several_networks(pairs, checkpoint.path)
    if parts is not None and parts.model:
        signature = signature_of(parts)
        return StateError(
            "The checkpoint's optimizer is none that this layout knows.",
            place=checkpoint.path,
            expected="; ".join(f"{kind.schema}, variant {kind.variant}" for kind in KINDS),
            found=signature.name if signature else unknown(parts),
            remedy="`statekit inspect` lists its slots by parameter",
        )
    if parts is None:
        for path, node in nodes(checkpoint.tree, None):
            if looks_nested(node):
                place = "/".join(map(str, path)) or "the top"
                subject = f"What stands at {place} isn't the state_dict() of an optimizer"
                typed(node, StateDict, checkpoint.path, subject, StateError)
        if len(optimizers := optimizers_in(checkpoint.tree)) > 1:
            return unpaired_networks(optimizers, possible_models(checkpoint.tree), checkpoint.path)
        return StateError("The checkpoint has no optimizer of torch.optim.", place=checkpoint.path)
    return _without_model(checkpoint)


def _without_model(checkpoint: Checkpoint) -> StateError:
    """Returns what is wrong with a checkpoint whose optimizer has no model beside it, or may have several."""
    models = possible_models(checkpoint.tree)
    if models:
        return StateError(
            "Several parts of the checkpoint may be the model.",
            place=checkpoint.path,
            found=", ".join(models),
            remedy=by_model_key(models[0]),
        )
    averages, unnamed = averaged_models(checkpoint.tree), unnamed_tensors(checkpoint)
    if small := {} if averages or unnamed else too_small_models(checkpoint.tree):
        return StateError(
            "The checkpoint lacks weights of parameters that its optimizer moves.",
            place=checkpoint.path,
            found="; ".join(f"{plural(count, 'tensor')} at {place}" for place, count in small.items()),
            remedy=f"restore it from a copy; or {ALONE}",
        )
    has_average = f"an average of them at {', '.join(averages)}" if averages else None
    return NamesError(
        f"The checkpoint has an optimizer, but no weights{' that have names' if unnamed else ''}.",
        place=checkpoint.path,
        found=f"tensors by position alone: {some(unnamed)}" if unnamed else has_average,
        remedy=f"--model-key {averages[0]} takes the average for the weights; or {ALONE}"
        if averages
        else ALONE,
    )


def _with_experts(parts: Parts, checkpoint: Checkpoint, hints: CheckpointRef) -> Parts:
    """Joins the experts of each layer into one parameter of the model, if the optimizer moved them as one."""
    is_told = hints.names_from is not None or hints.param_names is not None
    shapes = {tensor.shape for tensor in parts.model.values()}
    slots = (tensor for record in parts.state.values() for tensor in record.values())
    lacks = any(
        isinstance(slot, Tensor) and len(slot.shape) == 3 and slot.shape not in shapes for slot in slots
    )
    if not (is_told and lacks and has_config(checkpoint)):
        return parts
    return replace(parts, model=with_experts(checkpoint, parts.model))


def _order(
    parts: Parts, kinds: Sequence[TorchOptimizer], checkpoint: Checkpoint, hints: CheckpointRef
) -> tuple[Order, str]:
    """Returns the names of each group's parameters, and a note on their source."""
    shapes = [
        [_shape_of(kind, parts.state.get(i, {}), parts.model) for i in group["params"]]
        for kind, group in zip(kinds, parts.groups, strict=True)
    ]
    given, note = _given_names(checkpoint, hints, shapes, parts)
    # Who loads into a model has asked load_optimizer already, and its order says nothing of groups.
    remedy = OF_GROUPS if hints.model else REMEDY
    remedy = f"{BY_CONFIG}; or: {remedy}" if has_config(checkpoint) else remedy
    if bare := [f"{kind.variant}" for kind in kinds if kind.is_native]:
        remedy = (
            f"{remedy} (slots of {some([*dict.fromkeys(bare)])} may have other shapes than its parameters)"
        )
    is_sorted = bool(checkpoint.meta.get(SORTED))
    return found_order(parts.groups, shapes, parts.model, given, is_sorted, hints.model, remedy), note


def _numbers_of(parts: Parts) -> set[Any]:
    """Returns what the groups call their parameters: numbers, or names."""
    return {index for group in parts.groups for index in group["params"]}


def _is_by_name(parts: Parts) -> bool:
    """Tells whether a parameter stands under a name in the state or in a group."""
    return any(isinstance(index, str) for index in (*parts.state, *_numbers_of(parts)))


def _misplaced(parts: Parts, moved: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields moved parameters that the model lacks or that share a path, and slots of no group."""
    yield from (("isn't in the model part", name) for name in moved if name not in parts.model)
    yield from shared_paths(moved)
    numbers = _numbers_of(parts)
    yield from (("has slots, and stands in no group", f"state/{i}") for i in parts.state if i not in numbers)


def _unread(kind: TorchOptimizer, record: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the entries of a parameter's state that no update reads, by its path; nothing where there are none."""
    entries = {key: record[key] for key in (*kind.notes, *kind.beside) if key in record}
    return {path: entries} if entries else {}


def _given_names(
    checkpoint: Checkpoint, hints: CheckpointRef, shapes: Sequence[Sequence[Shape | None]], parts: Parts
) -> tuple[Sequence[str] | None, str]:
    """Returns the names that a user, a file beside the run or a configuration gives, and a note on their source."""
    if hints.param_names is not None:
        return as_in_file(hints.param_names, checkpoint, parts.model), ""
    if hints.names_from is None:
        return names_beside(checkpoint, shapes)
    return names_by_config(checkpoint, shapes, parts.model)


def _facts_of(order: Order, checkpoint: Checkpoint) -> tuple[Fact, ...]:
    """Returns what the parameters' names rest on; Trainer makes its groups by its own rule, in the model's order."""
    return () if checkpoint.container == _TRAINER else order.facts


def _narrowed(optimizer: Optimizer, checkpoint: Checkpoint) -> Optimizer:
    """Returns one of several optimizers of bitsandbytes as that which Trainer's arguments name.

    Source: huggingface/transformers, training_args.py, `OptimizerNames`.
    """
    name = at(checkpoint.tree, (TRAINER_ARGUMENTS, "optim"))
    return narrowed(optimizer, *name.split("_")) if isinstance(name, str) else optimizer


def _refuse_merged(
    model: Mapping[str, Tensor], own_model: Mapping[str, Tensor] | None, checkpoint: Checkpoint
) -> None:
    """Refuses a model without adapters where the checkpoint is an adapter's."""
    if own_model is not None and any(map(is_adapted, model)) and not any(map(is_adapted, own_model)):
        raise StateError(
            "The checkpoint is an adapter's, and the model has no adapter.",
            place=checkpoint.path,
            expected=f"parameters as {next(filter(is_adapted, model))}",
            found=f"{len(own_model)} trained parameters, none of an adapter",
            remedy="give the PeftModel as it is before merge_and_unload(), or wrap the base model again: "
            "PeftModel.from_pretrained(model, CHECKPOINT, is_trainable=True); merged weights have no optimizer state",
        )


def _shown(parts: Parts, kinds: Sequence[TorchOptimizer]) -> str:
    """Returns the evidence for one optimizer, or several, in words."""
    if any(kind.is_native for kind in kinds):
        return "an optimizer's state and its groups"
    keys = dict.fromkeys(key for kind in kinds for key in kind.keys)
    return "slots of its names" if _is_bare(parts) else f"groups with {', '.join(keys)}"


def _records(
    parts: Parts, order: Order, kind_of: Mapping[str, TorchOptimizer], faults: Faults
) -> tuple[dict[str, Mapping[str, Any]], native.NativeRecords]:
    """Returns what optimizers keep of each parameter, by path, in the order in which that was born.

    What an optimizer without a schema keeps stands by itself.

    Args:
        parts: Model and optimizer.
        order: The parameters' names.
        kind_of: The optimizer of each parameter.
        faults: Gets what doesn't fit of an optimizer without a schema.
    """
    names = {
        index: name
        for group, numbers in zip(parts.groups, order.groups, strict=True)
        for index, name in zip(group["params"], numbers, strict=True)
    }
    pairs = ((names.get(index), record) for index, record in parts.state.items())
    records = {path_of(name): record for name, record in pairs if name is not None and name in parts.model}
    others = {path: record for path, record in records.items() if kind_of[path].is_native}
    options = {
        path_of(name): group
        for group, numbers in zip(parts.groups, order.groups, strict=True)
        for name in numbers
    }
    shapes = {path_of(name): tensor.shape for name, tensor in parts.model.items()}
    faults += _misfits(others, shapes, kind_of, options)
    return {path: record for path, record in records.items() if path not in others}, native.read_records(
        others
    )


def _misfits(
    records: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, Shape],
    kind_of: Mapping[str, TorchOptimizer],
    options: Mapping[str, Mapping[Any, Any]],
) -> Iterator[tuple[str, str]]:
    """Yields the slots with which classes without a schema can't go on, and whose they are."""
    counted = {id(kind_of[path]) for path, record in records.items() if STEP in record}
    for path, record in records.items():
        kind = kind_of[path]
        counts = id(kind) in counted
        for fault, slot in native.misfits_of(record, kind.signature, shapes[path], counts, options[path]):
            yield f"slot {slot} {fault}", path


def _counting(
    kind_of: Mapping[str, TorchOptimizer], bare: native.NativeRecords, uncounted: Collection[str]
) -> list[str]:
    """Returns the parameters whose updates are counted, but for those whose counts aren't read.

    An optimizer without a schema may count none.
    """
    return [
        path
        for path, kind in kind_of.items()
        if path not in uncounted and (path in bare.counts or not (kind.is_native or kind.count is None))
    ]


def _extra(parts: Parts, names: Iterable[str], kinds: Sequence[TorchOptimizer]) -> dict[str, Tree]:
    """Returns what a checkpoint holds beside parameters, slots, counts and hyperparameters."""
    schemas = {name for kind in kinds if not kind.is_native for name in _options(kind)}
    extra = extra_of(parts, names, schemas)
    if any(kind.is_native for kind in kinds):
        options = zip(kinds, parts.groups, extra.get(GROUPS) or [{} for _ in kinds], strict=True)
        others = [native.unlike_json(group) if kind.is_native else rest for kind, group, rest in options]
        extra = {key: part for key, part in extra.items() if key != GROUPS}
        extra |= {GROUPS: others} if any(others) else {}
    return extra


def _present(extra: Mapping[str, Tree]) -> dict[str, Tree]:
    """Returns the parts that aren't empty."""
    return {key: part for key, part in extra.items() if part}


def _kind(parts: Parts, variants: Mapping[str, str]) -> TorchOptimizer | None:
    """Returns the optimizer that parts are of, by their signature; None if it is none of these.

    One without a signature, or whose signature has no schema, has what it keeps under its own names.
    """
    slot_names = {key for record in parts.state.values() for key in record}
    signature = signature_of(parts, variants) if parts.groups else None
    if slot_names and _is_bare(parts) and signature is None and (kind := _kind_by_slots(slot_names)):
        return kind
    if signature is None or signature.schema is None:
        return _native_kind(parts, signature)
    kinds = ((kind.schema, kind.variant, kind) for kind in KINDS)
    same = (kind for *key, kind in kinds if key == [signature.schema, signature.variant])
    return next((replace(kind, signature=signature) for kind in same), None)


def _kinds(parts: Parts, variants: Mapping[str, str] = MappingProxyType({})) -> list[TorchOptimizer]:
    """Returns whose each group is; none if some is nobody's.

    Groups are of one optimizer, of the two rules of one class, or of several that torch.distributed has gathered.
    """
    kind = _kind(parts, variants)
    if kind is not None and not kind.is_native:
        return [kind] * len(parts.groups)
    kinds_of_groups = [_kind(_only(parts, group), variants) for group in parts.groups]
    kinds = [other for other in kinds_of_groups if other is not None and not other.is_native]
    if len(kinds) == len(kinds_of_groups) > 1:
        return kinds
    return [] if kind is None else [kind] * len(parts.groups)


def _only(parts: Parts, group: Mapping[str, Any]) -> Parts:
    """Returns the parts of an optimizer that had one of its groups alone."""
    records = {index: parts.state[index] for index in group["params"] if index in parts.state}
    return replace(parts, groups=[group], state=records)


def _by_rule(parts: Parts) -> Parts:
    """Returns parts in which each group is moved by one rule, where a class marks the rule in each parameter's state.

    Source: MoonshotAI/Moonlight, examples/toy_train.py, `Muon.__init__`.
    """
    groups = list[Mapping[str, Any]]()
    for group in parts.groups:
        marks = [scalar(parts.state.get(index, {}).get(_USE_MUON)) for index in group["params"]]
        if not (set(marks) <= {True, False} and len(set(marks)) > 1):
            groups.append(group)
            continue
        for mark in (True, False):
            chosen = [marked is mark for marked in marks]
            through = {
                key: list(itertools.compress(group[key], chosen))
                for key in ("params", "param_names")
                if key in group
            }
            groups.append({**group, **through})
    return replace(parts, groups=groups)


def _native_kind(parts: Parts, signature: Signature | None) -> TorchOptimizer | None:
    """Returns an optimizer without a schema; None where it keeps something of no parameter, which has no place."""
    name = None if signature is None else signature.name
    return None if parts.common else TorchOptimizer(native.SCHEMA, name, (), signature=signature)


def _evidence(parts: Parts, kinds: Sequence[TorchOptimizer], form: Form | None) -> Evidence:
    because = _shown(parts, kinds)
    return Evidence(21, f"{because}, {_SAID[parts.form]}") if form else Evidence(20, because)


def _is_elsewhere(kind: TorchOptimizer, form: Form | None, container: str) -> bool:
    """Tells whether a container has a layout of its own for what looks like a state of PyTorch."""
    is_numbered_there = form == "name" and container not in _GATHERED
    return is_numbered_there or container == _ENGINE or (kind.is_native and container not in _AT_HOME)


def _kind_by_slots(slot_names: set[str]) -> TorchOptimizer | None:
    """Returns the optimizer of a file that holds tensors alone; None if it is none of these.

    The notes of Hugging Face's Adafactor tell it from AdamW.
    """
    # A momentum buffer alone may be SGD's, or any Muon's.
    counted = [kind for kind in KINDS if kind.count is not None and kind.marked is None]
    fitting = [kind for kind in counted if slot_names <= {*kind.names.values(), STEP, *kind.notes}]
    return next((kind for kind in fitting if set(kind.notes) <= slot_names), None)


def _says_no_options(parts: Parts) -> bool:
    """Tells whether the groups have no options at all."""
    return all(group.keys() <= {"params", "param_names"} for group in parts.groups)


def _is_bare(parts: Parts) -> bool:
    """Tells whether the groups say nothing of their optimizer, beyond what schedules add to those of any."""
    return all(group.keys() <= {"params", "param_names", "lr", "initial_lr"} for group in parts.groups)


def _as_torch(parts: Parts, kind: TorchOptimizer) -> Parts:
    """Returns an optimizer's parts in the words of PyTorch's own, where they are of a dialect."""
    dialect = kind.signature
    if dialect is None or kind.count is None:
        return parts
    if not (dialect.renamed or dialect.private or dialect.assumed):
        return parts
    counts = {index: group.get(STEP) for group in parts.groups for index in group["params"]}
    state: dict[Any, Mapping[str, Any]] = {}
    for index, record in parts.state.items():
        plain = {dialect.renamed.get(key, key): value for key, value in unwrapped_record(record).items()}
        state[index] = plain if STEP in plain or not plain else {**plain, STEP: counts.get(index)}
    groups = [
        {key: value for key, value in group.items() if key not in dialect.private} for group in parts.groups
    ]
    return replace(parts, groups=groups, state=state)


def _shape_of(kind: TorchOptimizer, record: Mapping[str, Any], model: Mapping[str, Tensor]) -> Shape | None:
    """Returns the shape of a parameter as its slots show it."""
    if kind.is_native:
        return shape_of(record, {tensor.shape for tensor in model.values()})
    tensors = {
        name: record[native] for name, native in kind.names.items() if isinstance(record.get(native), Tensor)
    }
    if "v_row" in tensors and "v_col" in tensors:
        row, column = tensors["v_row"].shape, tensors["v_col"].shape
        if kind.form["reduced_axis"] == "kept":
            return (*row[:-1], column[-1]) if row and column else None
        return (*row, column[-1]) if column else None
    return next((tensor.shape for name, tensor in tensors.items() if name not in FACTORED), None)


def _slots(
    kind: TorchOptimizer, record: Mapping[str, Any], rule: Rule, shape: Shape, path: str, faults: Faults
) -> Iterator[tuple[str, Tensor]]:
    for name, stored_as in {**kind.names, MASTER: MASTER_PARAM}.items():
        tensor = record.get(stored_as)
        if not isinstance(tensor, Tensor):
            if name == MASTER and tensor is not None:
                faults.add(f"{stored_as} is no tensor", path)
            continue
        expected = rule.slot_shape(name, shape) if name in FACTORED else shape
        stored = stored_shape(str(kind.variant), name, rule, shape)
        if tensor.shape != stored:
            faults.add(f"{stored_as} has shape {tensor.shape}, expected {stored}", path)
        else:
            yield name, tensor if stored == expected else Squeezed(tensor, expected)


def _saw_pieces(kind: TorchOptimizer, record: Mapping[str, Any], rule: Rule) -> bool:
    """Tells whether a parameter that the optimizer would factor has a second moment that isn't."""
    return kind.schema == "adafactor" and rule.factored and isinstance(record.get(kind.names["v"]), Tensor)


def _in_pieces(groups: Iterable[Group], paths: Sequence[str]) -> Iterator[Group]:
    """Yields groups with the fact that the optimizer moved pieces of some parameters, each by its first."""
    for group in groups:
        first = next((path for path in paths if path in group.paths), None)
        yield group if first is None else replace(group, facts=(*group.facts, *of_pieces(first)))


def _turned(state: TrainState) -> Iterator[tuple[str, str]]:
    """Yields the matrices whose outputs and inputs the optimizer would take for each other."""
    for part in state.parts():
        for path in [] if part.optimizer.variant is None else turned_matrices(part):
            yield (
                "has its inputs where the optimizer looks for outputs, which changes the scale of its update",
                path,
            )


def _unknown_numbers(state: TrainState) -> Iterator[tuple[str, str]]:
    """Yields what the optimizer reads in its groups and can't do without, as its slots show, and nobody said."""
    for i, group in enumerate(state.optimizer.groups):
        specs = load_schema(state.optimizer.kind(group)[0]).hyperparameters
        for name, slot in state.switched_on(group).items():
            if "boolean" not in specs[name]["type"]:
                yield (
                    f"{name} isn't known, and {slot} is in use: name it (--hparams {name}=...)",
                    f"groups/{i}",
                )


def _native(
    kind: TorchOptimizer, state: TrainState, path: str, slots: Mapping[str, Tensor], faults: Faults
) -> dict[str, Any]:
    param, names = state.params[path], kind.names
    usual = kind.rule(param.shape)
    rule = state.rules.get(path, usual)
    updates = state.counts.behind.get(path, state.counts.updates)
    step: Any = in_memory(np.asarray(updates, kind.count), "step") if kind.count else updates
    record: dict[str, Any] = {} if kind.count is None else {STEP: step}
    # Pieces are cut anew from what lies under names; by index the optimizer itself would look for factored slots.
    pieces = not rule.factored and bool(state.extra.get(_BY_NAME))
    if rule.axes != usual.axes and not pieces and kind.schema != "muon":
        axes = ", ".join(axis.value for axis in rule.axes)
        faults.add(f"is factored by {axes}; this optimizer would: {[a.value for a in usual.axes]}", path)
        return record
    for name, tensor in slots.items():
        if name not in names:
            faults.add(f"has slot {name}, for which there is no place", path)
            continue
        stored = stored_shape(str(kind.variant), name, rule, param.shape)
        record[names[name]] = tensor if stored == tensor.shape else Squeezed(tensor, stored)
    return record | dict(state.extra.get(_INFORMATION, {}).get(path, {}))


def _groups(
    kinds: Sequence[TorchOptimizer],
    parts: Parts,
    names: Sequence[Sequence[str]],
    decoupled: tuple[bool, KnownFrom] | None,
) -> Iterator[Group]:
    for i, (kind, options, param_names) in enumerate(zip(kinds, parts.groups, names, strict=True)):
        if kind.is_native:
            shown = native.options_of(options)
            yield Group(tuple(map(path_of, param_names)), shown, dict.fromkeys(shown, "file"))
            continue
        schema = load_schema(kind.schema)
        renamed = {} if kind.signature is None else kind.signature.renamed
        stated = {renamed.get(key, key): value for key, value in options.items()}
        values = schema.canonical(str(kind.variant), stated, f"param_groups/{i}")
        # torch.optim takes a tensor as rate.
        numbers = {name: scalar(value) for name, value in values.items()}
        faults = Faults()
        for name, value in values.items():
            if value is not numbers[name] and (fault := schema.fault(name, numbers[name])):
                faults.add(f"is {numbers[name]!r}, {fault}", f"groups/{i}/{name}")
        faults.check(StateError, f"Hyperparameters of {schema.name} can't be these")
        origins: dict[str, KnownFrom] = dict.fromkeys(values, "file")
        yield _told_by_dialect(Group(tuple(map(path_of, param_names)), numbers, origins), kind, decoupled)


def _decoupled(checkpoint: Checkpoint, hints: CheckpointRef) -> tuple[bool, KnownFrom] | None:
    """Returns whether weight decay is AdamW's, where the user or what lies beside the optimizer tells it.

    Source: facebookresearch/fairseq, fairseq/trainer.py, `Trainer.state_dict`; huggingface/transformers,
    training_args.py, `OptimizerNames`.
    """
    if hints.optimizer in _DECOUPLES:
        return _DECOUPLES[hints.optimizer], "given"
    stated = next((v for k, v in hints.hyperparameters.items() if k.rpartition("/")[2] == DECOUPLED), None)
    if isinstance(stated, bool):
        return stated, "given"
    history = at(checkpoint.tree, ("optimizer_history",))
    last = history[-1] if isinstance(history, list) and history else None
    names = (
        at(checkpoint.tree, (TRAINER_ARGUMENTS, "optim")),
        last.get("optimizer_name") if isinstance(last, Mapping) else None,
        checkpoint.meta.get(OPTIMIZER_NAME),
    )
    is_adamw = any(isinstance(name, str) and _ADAMW_NAMED.fullmatch(name) for name in names)
    return (True, "inferred") if is_adamw else None


def _told_by_dialect(group: Group, kind: TorchOptimizer, decoupled: tuple[bool, KnownFrom] | None) -> Group:
    """Returns a group with what its optimizer's signature tells, and the facts that are open then."""
    dialect = kind.signature
    if dialect is None or DECOUPLED not in load_schema(kind.schema).variant(str(kind.variant))["defaults"]:
        return group
    values, origins = dict(group.hyperparameters), dict(group.known_from)
    facts = list(group.facts)
    for name, value in dialect.inferred.items():
        if name not in values:
            values[name], origins[name] = value, "inferred"
    decays = bool(values.get("weight_decay_rate"))
    for name, (value, whose) in dialect.assumed.items():
        values[name], origins[name] = value, "assumed" if decays else "inferred"
        facts += [Fact(name, value, "assumed", whose)] if decays else []
    if dialect.several:
        because = f"its groups have {', '.join(dialect.options)}, as those of several libraries"
        facts.append(fits_several(dialect.several, because))
    decay = _stated_decay(dialect, decoupled)
    if DECOUPLED not in values and decay:
        values[DECOUPLED], origins[DECOUPLED] = decay
    elif dialect.several:
        pass  # each has its own decay
    elif DECOUPLED not in values and not decays:
        values[DECOUPLED], origins[DECOUPLED] = True, "inferred"
    elif DECOUPLED not in values:
        facts.append(fits_several(tuple(_DECOUPLES), _ADAM_OR_ADAMW))
    facts += _of_own_class(dialect)
    return replace(group, hyperparameters=values, known_from=origins, facts=tuple(facts))


def _stated_decay(
    dialect: Signature, decoupled: tuple[bool, KnownFrom] | None
) -> tuple[bool, KnownFrom] | None:
    """Returns what is told of a decay; of several kin the user alone tells it, by the name of one."""
    return None if decoupled is None or (dialect.several and decoupled[1] != "given") else decoupled


def _of_own_class(dialect: Signature) -> Iterator[Fact]:
    """Yields the facts in which a dialect differs from PyTorch's own class."""
    if dialect.beyond:
        yield beyond(dialect.beyond)
    if dialect.private or dialect.beyond:
        yield of_class(dialect.name, dialect.options)


def _of_gradients(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields what of Trainer's arguments changes the gradients, and an optimizer's file doesn't show."""
    arguments = at(checkpoint.tree, (TRAINER_ARGUMENTS,))
    stated = arguments if isinstance(arguments, Mapping) else {}
    named = [f"{key}={stated[key]!r}" for key in _OF_GRADIENTS if key in stated]
    if named:
        yield (
            f"The run's gradients are made with {', '.join(named)}, as Trainer's arguments say: no optimizer's file"
            " holds that, and the program that goes on sets it."
        )


def _clipped(groups: Iterable[Group], parts: Parts, checkpoint: Checkpoint) -> list[Group]:
    """Returns groups with the limit of the gradients' norm that Trainer's arguments have, or OLMo's groups themselves.

    Source: huggingface/transformers, trainer.py, `Trainer._clip_grad_norm`: 0 clips nothing; allenai/OLMo,
    olmo/optim.py, `Optimizer.clip_grads_and_collect_metrics`. An optimizer without a schema, as timm's LAMB, has the
    limit as an option of its own, and its step clips.
    """
    groups, limit = list(groups), at(checkpoint.tree, (TRAINER_ARGUMENTS, _LIMIT))
    if limit is None and not any(_LIMIT in group.hyperparameters for group in groups):
        limits = [group.get(_LIMIT) for group in parts.groups if group["params"]]
        limit = limits[0] if limits and all(value == limits[0] for value in limits) else None
    if not fits(limit, Finite) or limit <= 0:
        return groups
    return [
        replace(
            group,
            hyperparameters={**group.hyperparameters, CLIP: float(limit)},
            known_from={**group.known_from, CLIP: "file"},
        )
        for group in groups
    ]


def _native_options(kind: TorchOptimizer, state: TrainState, group: Group) -> dict[str, Any]:
    values = {**dict.fromkeys(state.switched_on(group), True), **group.hyperparameters}
    options = load_schema(kind.schema).native(str(kind.variant), values)
    return {**({"lr": None} if options.get(kind.own_rate) else {}), **options}


def _options(kind: TorchOptimizer) -> tuple[str, ...]:
    """Returns the keys of a group that become hyperparameters, or say whose rule moves it."""
    marked = kind.marked is not None
    names = (
        load_schema(schema).arguments(str(kind.variant))
        for schema in (("muon", "adamw") if marked else (kind.schema,))
    )
    return (*(name for some in names for name in some), *kind.told)


def _count(step: Any, path: str, faults: Faults) -> int:
    value = scalar(step)
    if not fits(value, float):
        faults.add("has no step", path)
        return 0
    number = float(value)
    if not number.is_integer() or not 0 <= number < 2**53:
        faults.add(f"has made {number} updates", path)
        return 0
    return int(number)


def _counted(
    records: Mapping[Any, Mapping[str, Any]],
    kind_of: Mapping[Any, TorchOptimizer],
    checkpoint: Checkpoint,
    faults: Faults,
) -> tuple[dict[Any, int], frozenset[Any]]:
    """Returns the counts of parameters, and whose weren't read, where the first and the last are enough."""
    counting = [key for key in records if kind_of[key].count is not None]
    uncounted = frozenset(counting[1:-1] if checkpoint.few_counts else ())
    read = (key for key in counting if key not in uncounted)
    return {key: _count(records[key].get(STEP), f"{key}", faults) for key in read}, uncounted


def _of_uncounted(keys: Collection[object]) -> Iterator[str]:
    """Yields that counts weren't read."""
    if keys:
        yield (
            f"The counts of {plural(len(keys), 'parameter')} between the first and the last were not read: in this"
            " store each takes a request. They are taken for the larger of these; `statekit convert` reads all."
        )


def _counts(counts: Mapping[str, int], params: Iterable[str], done: int | None = 0) -> Counts:
    """Returns the counts of parameters that have their own; `done` are the updates where none has, if known."""
    updates = max(counts.values(), default=done or 0)
    behind = {path: counts.get(path, 0) for path in params if counts.get(path, 0) != updates}
    return Counts(
        updates, updates, behind, says_schedule=False, says_updates=bool(counts) or done is not None
    )


LAYOUT = TorchOptim(holds_several=("torch", "accelerate", "safetensors"))
