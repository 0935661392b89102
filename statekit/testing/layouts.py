"""The laws that every layout obeys; whoever writes a layout inherits them.

    from statekit.testing.layouts import LAWS, MADE, Making, Trial

    @pytest.mark.parametrize("law", LAWS)
    def test_my_layout_obeys(law: str) -> None:
        with MyContainer().open(Path("checkpoint-of-the-original.xyz")) as checkpoint:
            LAWS[law](Trial(MyLayout(), checkpoint))

`LAWS` are about checkpoints that the original system wrote, `MADE` about states that nobody wrote, through a container.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import NO_HINTS, Container, Encoded, Hints, Layout
from statekit.conversion.kept import by_leaf
from statekit.conversion.registry import decoded
from statekit.errors import InexactError, StateError, StatekitError
from statekit.files.checkpoint import Checkpoint
from statekit.files.stage import staged
from statekit.state.constants import variant_constants
from statekit.state.factoring import by_shape
from statekit.state.schema import WEIGHTS, is_native, load_schema, schema_names
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array, DType, Index, Shape, Tensor, in_memory
from statekit.tensors.tree import Tree, mapped, tensor_names, to_json, walk
from statekit.testing.container_trials import open_proven
from statekit.testing.leaves import unread, unwritten
from statekit.testing.step_cases import TABLE, case, plain_paths
from statekit.verify.stepping import tensors_of

_EMPTY: tuple[Any, ...] = (None, {}, [], ())
SCALAR = 1
"""Elements of a tensor that decoding may read: a step, a learning rate."""


@dataclass(frozen=True)
class Watched:
    """A tensor that notes when it is read."""

    name: str
    source: Tensor
    reads: set[str] = field(compare=False)

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def grain(self) -> Shape:
        return self.source.grain

    def read(self, index: Index | None = None) -> Array:
        self.reads.add(self.name)
        return self.source.read(index)

    def to_json(self) -> dict[str, Any]:
        return {"op": "watched", "name": self.name}


@dataclass(frozen=True)
class Trial:
    """A layout and a checkpoint of its names.

    Attributes:
        layout: The layout.
        checkpoint: An open checkpoint that the original system wrote.
        hints: What the layout must be told.
        peers: The layouts that it is distinguished from.
        only_read: Whether none of its containers can be written, so that it has no form of its own.
    """

    layout: Layout
    checkpoint: Checkpoint
    hints: CheckpointRef = NO_HINTS
    peers: tuple[Layout, ...] = ()
    only_read: bool = False

    @cached_property
    def state(self) -> TrainState:
        """What the checkpoint decodes to."""
        return self.layout.decode(self.checkpoint, self.hints)

    @cached_property
    def encoded(self) -> Encoded:
        """The state in native form again."""
        return self.layout.encode(self.state)

    def watched(self) -> tuple[Checkpoint, set[str]]:
        """Returns the checkpoint with tensors that note when they are read, and the names of those that were."""
        names = {id(tensor): name for name, tensor in self.checkpoint.tensors.items()}
        reads = set[str]()
        watched: dict[int, Watched] = {}

        def watch(leaf: Any) -> Any:
            if id(leaf) not in names:
                return leaf
            return watched.setdefault(id(leaf), Watched(names[id(leaf)], leaf, reads))

        return replace(self.checkpoint, tree=mapped(self.checkpoint.tree, watch)), reads


Law: TypeAlias = Callable[[Trial], None]


def is_told_from_others(trial: Trial) -> None:
    """Its checkpoint is detected by names and shapes, with a reason, and no other layout is as sure of it."""
    checkpoint, reads = trial.watched()
    evidence = trial.layout.detect(checkpoint)
    assert evidence is not None, "doesn't detect its own checkpoint"
    assert evidence.specificity > 0 and evidence.because, f"detects it without a reason: {evidence}"
    for peer in trial.peers:
        other = peer.detect(checkpoint) if peer.name != trial.layout.name else None
        surer = other is not None and other.specificity >= evidence.specificity
        assert not surer, f"{peer.name} is as sure: {other}, and {trial.layout.name}: {evidence}"
    assert not reads, f"detection reads {sorted(reads)}"


def passes_over_what_is_not_its(trial: Trial) -> None:
    """Other trees are not detected, and decoding them all the same is a typed error."""
    tensor, parts = in_memory(np.zeros(3, np.float32)), ("params", "model", "target", "state", "optimizer")
    foreign: list[Any] = [{}, [], None, "text", tensor, dict.fromkeys(parts, 1)]
    # Weights, to these.
    foreign += [] if trial.layout.variants.keys() == {WEIGHTS} else [{"a": {"b": tensor}}]
    for tree in foreign:
        checkpoint = replace(trial.checkpoint, tree=tree, manifest=None)
        assert trial.layout.detect(checkpoint) is None, f"takes {tree} for its own"
        try:
            decoded(trial.layout, checkpoint, Hints())
        except StatekitError:
            continue
        raise AssertionError(f"decodes {tree}")


def decodes_names_and_scalars(trial: Trial) -> None:
    """Decoding reads no values but scalars, and so do encoding and the description of what comes of it."""
    checkpoint, reads = trial.watched()
    state = trial.layout.decode(checkpoint, trial.hints)
    if not trial.only_read:
        json.dumps(to_json(trial.layout.encode(state).tree), allow_nan=False)
    large = {name: checkpoint.tensors[name].shape for name in reads}
    large = {name: shape for name, shape in large.items() if np.prod(shape, dtype=int) > SCALAR}
    assert not large, f"reads {large}"


def fits_its_optimizer(trial: Trial) -> None:
    """The state is of an optimizer and a variant that the layout says it holds, with slots; or of weights alone."""
    optimizer = trial.state.optimizer
    if optimizer.schema == WEIGHTS:
        assert WEIGHTS in trial.layout.variants and not optimizer.groups and not trial.state.slots
        assert trial.state.params, "has no parameters"
        return
    for schema, variant in optimizer.kinds:
        variants = trial.layout.variants.get(schema, ())
        fits = variants and (variant is None or variant in variants)
        fits = fits or (is_native(schema) and schema in trial.layout.variants)
        assert fits, f"decodes {schema} {variant}, says {dict(trial.layout.variants)}"
    assert trial.state.params, "has no parameters"
    assert any(trial.state.slots.values()), "has no slots"


def nothing_vanishes(trial: Trial) -> None:
    """Every tensor of the checkpoint is in the state, or was read, or is made again by encoding."""
    checkpoint, reads = trial.watched()
    state = trial.layout.decode(checkpoint, trial.hints)
    in_state = [*tensors_of(state).values(), *tensor_names(dict(state.extra)).values()]
    kept = {name for tensor in in_state for name in _sources(tensor.to_json())}
    written = set() if trial.only_read else tensor_names(trial.encoded.tree).keys()
    identities = {id(checkpoint.tensors[name]) for name in kept | reads}  # a tensor may have several names
    lost = [
        n for n, tensor in checkpoint.tensors.items() if id(tensor) not in identities and n not in written
    ]
    assert not lost, f"vanish: {lost[:10]}"


def comes_back_as_it_was(trial: Trial) -> None:
    """Encoding what was decoded gives every tensor again, bit for bit, but for those that are said to be dropped."""
    if trial.only_read:
        return
    old, new = trial.checkpoint.tensors, tensor_names(trial.encoded.tree)
    dropped = set(_dropped(trial))
    lost = [name for name in old if name not in new and name not in dropped]
    assert not lost, f"vanish: {lost[:10]}"
    added = [name for name in new if name not in old]
    assert not added, f"come from nowhere: {added[:10]}"
    changed = [name for name, tensor in new.items() if _bits(tensor) != _bits(old[name])]
    assert not changed, f"change: {changed[:10]}"
    if not trial.encoded.dropped:
        gone = _gone(trial)
        assert not gone, f"records beside the tensors vanish or change: {gone[:10]}"


def _gone(trial: Trial) -> list[tuple[Any, ...]]:
    """Returns where the encoded tree says something else than the checkpoint's, or nothing, beside the tensors."""
    leaves = dict(walk(trial.encoded.tree))
    return [path for path, leaf in walk(trial.checkpoint.tree) if not _is_same(leaf, leaves.get(path))]


def _is_same(leaf: Any, other: Any) -> bool:
    """Tells whether two leaves of trees say the same; nothing in a place says as much as something empty there."""
    if isinstance(leaf, Tensor):
        return True
    return to_json(leaf) == to_json(other) or (leaf in _EMPTY and other in _EMPTY)


def _dropped(trial: Trial) -> Iterator[str]:
    """Yields the native names of what stands in the state under a name that is dropped."""
    checkpoint, _ = trial.watched()
    state = trial.layout.decode(checkpoint, trial.hints)
    extra = {f"extra/{name}": tensor for name, tensor in tensor_names(dict(state.extra)).items()}
    for name, tensor in extra.items():
        if any(name == gone or name.startswith(f"{gone}/") for gone in trial.encoded.dropped):
            yield from _sources(tensor.to_json())


def _sources(expression: Any) -> Iterator[str]:
    if isinstance(expression, Mapping):
        if expression.get("op") == "watched":
            yield expression["name"]
        for part in expression.values():
            yield from _sources(part)
    elif isinstance(expression, list):
        for part in expression:
            yield from _sources(part)


def _bits(tensor: Tensor) -> tuple[str, Shape, bytes]:
    return tensor.dtype.name, tensor.shape, tensor.read().tobytes()


def exactness_is_of_its_tensors(trial: Trial) -> None:
    """What is said of exactness is said of tensors that are there, with a reason; so with what is dropped."""
    if trial.only_read:
        return
    unknown = trial.encoded.exactness.keys() - tensor_names(trial.encoded.tree).keys()
    assert not unknown, f"speaks of tensors that aren't there: {sorted(unknown)}"
    mute = [name for name, (_, reason) in trial.encoded.exactness.items() if not reason]
    mute += [name for name, reason in trial.encoded.dropped.items() if not reason]
    assert not mute, f"says no reason: {mute}"


def says_what_it_drops(trial: Trial) -> None:
    """What the state holds that no system has a place for is written, or said to be dropped."""
    thing = in_memory(np.arange(3, dtype=np.float32))
    state = replace(trial.state, extra={**trial.state.extra, "a_foreign_thing": {"inside": thing}})
    if trial.only_read:
        return _require_refusal(trial.layout, state, "what it can't write")
    encoded = trial.layout.encode(state)
    written = any(tensor is thing for tensor in tensor_names(encoded.tree).values())
    named = any(name.startswith("extra/a_foreign_thing") for name in encoded.dropped)
    assert written or named, "a foreign thing vanishes"
    assert not (written and named), "a foreign thing is written, and said to be dropped"


def every_record_is_read(trial: Trial) -> None:
    """What a checkpoint holds beside tensors is in the state: another value makes another state, or a refusal."""
    hints = replace(trial.hints, variant=None)
    try:
        trial.layout.decode(trial.checkpoint, hints)
    except StatekitError:
        hints = trial.hints

    def decode(tree: Tree) -> TrainState:
        return trial.layout.decode(replace(trial.checkpoint, tree=tree), hints)

    silent = unread(trial.checkpoint.tree, decode)
    assert not silent, f"vanish: {silent[:10]}"


def every_record_is_written_or_named(trial: Trial) -> None:
    """What a state holds beside tensors is written, or said to be dropped by its name, here and in other layouts."""
    for layout in (trial.layout, *(peer for peer in trial.peers if peer.name != trial.layout.name)):
        if trial.state.optimizer.schema not in layout.variants:
            continue
        try:
            dropped = by_leaf(layout.encode(trial.state).dropped, trial.state.extra)
        except (InexactError, StateError):
            continue
        is_own = layout.name == trial.layout.name and trial.checkpoint.manifest is None
        silent = unwritten(trial.state, layout.encode, dropped, is_own)
        assert not silent, f"vanish in {layout.name}: {silent}"


LAWS: Mapping[str, Law] = {
    law.__name__: law
    for law in (
        is_told_from_others,
        passes_over_what_is_not_its,
        decodes_names_and_scalars,
        fits_its_optimizer,
        nothing_vanishes,
        comes_back_as_it_was,
        exactness_is_of_its_tensors,
        says_what_it_drops,
        every_record_is_read,
        every_record_is_written_or_named,
    )
}
"""Laws about checkpoints that the original system wrote."""


def made_state(schema: str, variant: str, *, full: bool = False) -> TrainState:
    """Makes a state that nobody wrote, of small parameters of every kind, as a variant would factor them.

    Args:
        schema: Name of the schema.
        variant: Name of the variant; of one that statekit doesn't step, the state has another one's slots.
        full: Whether all is switched on that brings slots of its own, in a variant that statekit steps.
    """
    stepped = load_schema(schema).stepped
    stepping = variant if variant in stepped else stepped[0]
    table = {path: TABLE[path] for path in plain_paths(schema)}
    changes: dict[str, Any] = {}
    if schema == "adafactor":
        form = variant_constants("adafactor", stepping)
        changes = {"min_dim_size_to_factor": 1} if form["factored_minimum"] != "none" else {}
        table = {path: (shape, by_shape(form, shape, True, 1)) for path, (shape, _) in table.items()}
    state = case(schema, stepping, full=full and stepping == variant, table=table, **changes).before(2)
    return replace(state, optimizer=replace(state.optimizer, variant=variant))


@dataclass(frozen=True)
class Making:
    """A layout, a container that it is at home in, and a state that nobody wrote.

    Attributes:
        layout: The layout.
        container: A container that can be written.
        state: The state.
        work: A folder to write into.
    """

    layout: Layout
    container: Container
    state: TrainState
    work: Path


def comes_through_files(making: Making) -> None:
    """A state comes back from files: parameters, slots, rules and the step; unless the layout says it can't hold it."""
    encoded = making.layout.encode(making.state)
    target = making.work / f"made{next(iter(making.container.suffixes), '')}"
    assert making.container.target_kind is not None
    with staged(target, making.container.target_kind) as stage:
        making.container.write(encoded, stage)
        stage.commit(making.container.open)
    with open_proven(making.container, target) as checkpoint:
        back = making.layout.decode(checkpoint, Hints(variant=making.state.optimizer.variant))
        _require_same(making.state, back, encoded)


def refuses_what_it_cannot_hold(making: Making) -> None:
    """A state of another optimizer is refused, and so is a slot without a place, unless it is said to be dropped."""
    optimizer = making.state.optimizer
    others = [name for name in schema_names() if name not in making.layout.variants]
    for other in others:
        foreign = made_state(other, load_schema(other).stepped[0])
        _require_refusal(making.layout, foreign, f"a state of {other}")
    for name, slot in load_schema(optimizer.schema).slots.items():
        if slot.shape == "parameter" and not any(name in slots for slots in making.state.slots.values()):
            more = {
                path: {**slots, name: making.state.params[path]} for path, slots in making.state.slots.items()
            }
            _require_kept(making, replace(making.state, slots=more), name)


def _require_refusal(layout: Layout, state: TrainState, subject: str) -> None:
    try:
        layout.encode(state)
    except (InexactError, StateError):
        return
    raise AssertionError(f"takes {subject}")


def _require_kept(making: Making, state: TrainState, name: str) -> None:
    try:
        encoded = making.layout.encode(state)
    except (InexactError, StateError):
        return
    native = [id(tensor) for tensor in tensor_names(encoded.tree).values()]
    for path, slots in state.slots.items():
        is_stored = native.count(id(slots[name])) > 1  # once as the parameter
        named = any(gone.endswith(f"{path}/{name}") for gone in encoded.dropped)
        assert is_stored or named, f"slot {name} of {path} vanishes"


def _have_one_count(meant: TrainState, back: TrainState) -> bool:
    """Tells whether counts agree; the files of an optimizer that counts nothing have none."""
    constants = load_schema(meant.optimizer.schema).variant(str(meant.optimizer.variant))["constants"]
    return bool(constants.get("step_scope") == "absent") or back.counts.updates == meant.counts.updates


def _require_same(meant: TrainState, back: TrainState, encoded: Encoded) -> None:
    old, new = ({key: _bits(t) for key, t in tensors_of(state).items()} for state in (meant, back))
    lost = [key for key in old if key not in new and not _is_dropped(*key, encoded)]
    assert not lost, f"vanish: {lost}"
    added = [key for key in new if key not in old]
    assert not added, f"come from nowhere: {added}"
    changed = [key for key in new if new[key] != old[key]]
    assert not changed, f"change: {[(key, old[key][:2], new[key][:2]) for key in changed]}"
    assert _have_one_count(meant, back), f"{back.counts} updates, meant {meant.counts}"
    _require_same_rules(meant, back)


def _is_dropped(path: str, name: str, encoded: Encoded) -> bool:
    """Tells whether an encoding says that it leaves a tensor behind."""
    return any(dropped.endswith((f"params/{path}", f"{path}/{name}")) for dropped in encoded.dropped)


def _require_same_rules(meant: TrainState, back: TrainState) -> None:
    factored = {path: rule.axes for path, rule in meant.rules.items() if rule.factored}
    turned = [path for path, axes in factored.items() if back.rules[path].axes != axes]
    assert not turned, f"are factored otherwise: {turned}"


MADE: Mapping[str, Callable[[Making], None]] = {
    law.__name__: law for law in (comes_through_files, refuses_what_it_cannot_hold)
}
"""Laws about states that nobody wrote."""
