"""The layout `keras`: Adafactor, LAMB, Adam and AdamW of Keras 3 in `.weights.h5` and `.keras` files.

    layers/<class>/vars/0, 1 ...   the variables of a layer       optimizer/vars/0, 1 ...   those of the optimizer

Nothing there has a name of its own; `variables` says how names and order are found. What statekit writes says
them in an attribute, `statekit_keras`. A state that doesn't come from Keras is laid out by its paths:
`encoder/dense/kernel` is the first variable of the object `dense` of the object `encoder`, as in a model whose
attributes have these names.

Source: keras-team/keras, keras/src/saving/saving_lib.py; keras/src/optimizers/base_optimizer.py, `save_own_variables`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NotRequired, TypedDict

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, Exactness, dropped_from
from statekit.converters.layouts.hyperparameters import manifest_state
from statekit.converters.layouts.keras import muon, native
from statekit.converters.layouts.keras.home import (
    INNER,
    LOSS_SCALE,
    OPTIMIZER,
    SAYINGS,
    config_of,
    home_in,
    home_of,
    is_keras2,
    with_loss_scale,
    without_loss_scale,
)
from statekit.converters.layouts.keras.like import laid_out_like
from statekit.converters.layouts.keras.lines import model_file_lines, weights_file_lines
from statekit.converters.layouts.keras.named_rows import config_signature
from statekit.converters.layouts.keras.orbax_checkpoint import as_numbered, is_orbax_checkpoint
from statekit.converters.layouts.keras.state import (
    AROUND,
    HOME,
    HOMES,
    NO_RATE,
    SCHEMAS,
    VARIANT,
    Kept,
    Named,
    Parts,
    by_config,
    by_name,
    by_user,
    called,
    kind_of,
    numbered,
    order_of,
    origin_in_keras2,
    rate_of,
    state_of,
    unknown_class,
    usual_name,
    variables_of,
)
from statekit.converters.layouts.keras.variables import (
    CONFIG,
    VARIABLES,
    Order,
    Variable,
    by_names,
    group_faults,
    in_order,
    is_group,
    variables,
)
from statekit.errors import Faults, StateError
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.typed import Name, fits, misfits


@dataclass(frozen=True)
class Keras:
    """Keras' own optimizers."""

    name: str = "keras"
    title: str = "Keras 3's Adafactor, LAMB, Adam and AdamW"
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            **dict.fromkeys(("adafactor", "lamb", "adamw", "muon"), (VARIANT,)),
            native.SCHEMA: (),
        }
    )
    holds_several: bool = True
    containers: tuple[str, ...] = ("keras-h5", "keras")
    schedule_in: str = "iterations"
    stores_values: bool = True
    only_reads: Mapping[str, tuple[str, str]] = field(
        default_factory=lambda: {
            _ORBAX: (
                "What Keras' OrbaxCheckpoint writes is read only: Keras loads it by the names of a model's variables "
                "and passes over every name that doesn't fit, without an error.",
                "write .keras or .weights.h5, load that in Keras, and let the callback go on from there",
            )
        }
    )

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for an optimizer with numbered variables."""
        if checkpoint.container == _ORBAX and is_orbax_checkpoint(checkpoint.tree):
            return Evidence(
                30, "variables of a model and of an optimizer, as Keras' OrbaxCheckpoint has them"
            )
        entries = optimizer_variables(checkpoint.tree)
        if not entries or not all(key.isdecimal() for key in entries) or not is_group(checkpoint.tree):
            return None
        return Evidence(20, f"{OPTIMIZER}/{VARIABLES} has {len(entries)} numbered variables")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state.

        `hints.param_names` are the paths of the model's trainable variables, in their order.
        """
        if checkpoint.container == _ORBAX:
            tree = as_numbered(checkpoint.tree, checkpoint.path)
            state = self._decode(checkpoint, tree, hints)
            # The places of its variables are those of no file of Keras.
            home = {key: part for key, part in home_in(state).items() if key not in ("tree", "places")}
            return replace(state, extra={**state.extra, HOME: home})
        tree, scale = without_loss_scale(file_tree(checkpoint))
        state = self._decode(checkpoint, tree, hints)
        if not scale:
            return state
        around = {AROUND: scale.pop(AROUND)} if AROUND in scale else {}
        return replace(state, extra={**state.extra, LOSS_SCALE: scale, HOME: {**home_in(state), **around}})

    def _decode(self, checkpoint: Checkpoint, tree: Mapping[str, Any], hints: CheckpointRef) -> TrainState:
        """Returns the canonical state of a file's tree, as `decode`."""
        config = config_of(tree)
        named = _named(tree, config, hints.optimizer)
        if named is None and (signature := _native_signature(tree, config, hints.optimizer)) is not None:
            return _native_state(checkpoint, tree, signature, hints)
        if named is None:
            raise unknown_class(config, attribute(tree, OPTIMIZER, "name"), checkpoint.path)
        manifest = manifest_state(checkpoint, named.schema)
        every = variables(tree, config)
        trained = [variable.tensor for variable in every if variable.trained]
        rows = _rows(tree)
        numbered_slots = numbered(named.schema, rows, named.known_kept(hints), trained)
        order = _order(tree, every, hints, numbered_slots.shapes, config)
        frozen = frozen_of(tree, every, order)
        parts = Parts(
            named,
            numbered_slots,
            {path: variable.tensor for path, variable in order.moved.items()},
            {path: variable.tensor for path, variable in frozen.items()},
            order.notes,
            home_of(tree, {**order.moved, **frozen}),
        )
        state = state_of(parts, HOME, manifest, hints)
        return state.with_facts(lambda facts: [*facts, *order.facts])

    def like(self, state: TrainState, model: Checkpoint) -> TrainState:
        return laid_out_like(state, model)

    def encode(self, state: TrainState) -> Encoded:
        home = home_in(state)
        if muon.is_of_its_class(state):
            _, config = called(_record(config_of(home.get("tree", {})), muon.CLASS))
            of_class = muon.class_arguments(state, home, config or {})
            state = muon.together(state, home)
            return self._encode_native(state, home_in(state), of_class)
        if state.optimizer.schema == native.SCHEMA:
            return self._encode_native(state, home)
        kept, numbers = variables_of(state, home, self.name)
        entries = {str(i): tensor for i, (_, _, tensor) in enumerate(numbers)}
        kind = kind_of(state, home)
        tree = model_tree(state, home, {"class": kind, "kept": asdict(kept)})
        named = tree.get(OPTIMIZER, {}).get(VARIABLES, {}).get(ATTRIBUTES)
        name = named if home.get("class") == kind and named else {"name": usual_name(kind)}
        tree[OPTIMIZER] = {**tree.get(OPTIMIZER, {}), VARIABLES: {ATTRIBUTES: name, **entries}}
        if INNER in tree[OPTIMIZER] and origin_in_keras2(home) == self.name:
            tree[OPTIMIZER][INNER] = {VARIABLES: entries}
        tree_before = home.get("tree", {})
        before = by_config(config_of(tree_before), is_keras2(tree_before))
        with_config(tree, "keras.optimizers", kind, None, arguments(state, before, kind))
        unknown = kept.rate and rate_of(state) is None
        exactness = {RATE_PLACE: (Exactness.ROUNDING, NO_RATE)} if unknown else {}
        tree, others = with_loss_scale(tree, home), left_out(state, "tree", "places", AROUND)
        return Encoded(tree, state.counts.updates, exactness, others)

    def _encode_native(
        self, state: TrainState, home: Mapping[str, Any], arguments_given: Mapping[str, Any] | None = None
    ) -> Encoded:
        """Returns the file's tree for an optimizer as its class has it; the given arguments may differ."""
        rows = native.native_rows(state, home, self.name)
        kind = str(state.optimizer.variant)
        tree = model_tree(state, home, {"class": kind, native.ROWS: home[native.ROWS]})
        group = tree.get(OPTIMIZER, {}).get(VARIABLES, {})
        named = group.get(ATTRIBUTES) if home.get("class") == kind else None
        name = named or {"name": native.usual_name(kind)}
        entries = {str(number): tensor for number, (_, _, tensor) in enumerate(rows)}
        tree[OPTIMIZER] = {**tree.get(OPTIMIZER, {}), VARIABLES: {ATTRIBUTES: name, **entries}}
        if INNER in tree[OPTIMIZER] and origin_in_keras2(home) == self.name:
            tree[OPTIMIZER][INNER] = {VARIABLES: entries}
        if arguments_given is not None:
            with_config(tree, "keras.optimizers", kind, None, arguments_given)
        tree, others = with_loss_scale(tree, home), left_out(state, "tree", "places", AROUND)
        return Encoded(tree, state.counts.updates, {}, others)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        whole = saved.container == "keras"
        return model_file_lines(state, saved) if whole else weights_file_lines(state, saved)


def _record(config: Any, kind: str) -> Mapping[str, Any]:
    """Returns what a model's config has of its optimizer; nothing where that is of another class."""
    compiled = config.get("compile_config") if isinstance(config, Mapping) else None
    record = compiled.get(OPTIMIZER) if isinstance(compiled, Mapping) else None
    return record if isinstance(record, Mapping) and record.get("class_name") == kind else {}


def _rows(tree: Mapping[str, Any]) -> list[Tensor]:
    """Returns the optimizer's variables in their order."""
    entries = optimizer_variables(tree)
    rows = [entries[key] for key in map(str, range(len(entries))) if key in entries]
    if len(rows) != len(entries):
        raise StateError("The optimizer's variables aren't numbered from 0 on.", place=OPTIMIZER)
    return rows


def _native_signature(tree: Mapping[str, Any], config: Any, given: str | None) -> native.Signature | None:
    """Returns which optimizer without a schema a file is about; of Keras 2 the config says it alone."""
    if is_keras2(tree):
        return config_signature(config, True)
    return native.signature_in(config, attribute(tree, OPTIMIZER, "name"), sayings(tree).get("class"), given)


def _native_state(
    checkpoint: Checkpoint, tree: Mapping[str, Any], signature: native.Signature, hints: CheckpointRef
) -> TrainState:
    """Returns the state of an optimizer without a schema."""
    config = config_of(tree)
    rows, every = _rows(tree), variables(tree, config)
    rows_said = sayings(tree).get(native.ROWS)
    shapes = [variable.tensor.shape for variable in every if variable.trained]
    told_apart = native.numbered(signature, rows, shapes) if rows_said is None else None
    order = _order(tree, every, hints, shapes if told_apart is None else told_apart.shapes, config)
    paths, frozen = [*order.moved], frozen_of(tree, every, order)
    owners: list[tuple[str | None, str]] = (
        [(path or None, slot) for path, slot in rows_said or ()]
        if told_apart is None
        else [(None if i is None else paths[i], slot) for i, slot in told_apart.rows]
    )
    if len(owners) != len(rows):
        raise StateError("The file names other variables of its optimizer than it has.", place=SAYINGS)
    moved = {path: variable.tensor for path, variable in order.moved.items()}
    state = muon.class_state(
        signature,
        [(path, slot, tensor) for (path, slot), tensor in zip(owners, rows, strict=True)],
        (moved, {path: variable.tensor for path, variable in frozen.items()}),
        home_of(tree, {**order.moved, **frozen}),
        checkpoint,
        hints,
        (*order.notes, *getattr(told_apart, "notes", ())),
    )
    return state.with_facts(lambda facts: [*facts, *order.facts])


_ORBAX = "orbax"
"""The container of what Keras' OrbaxCheckpoint writes; it is read, and Keras' own files are written."""
RATE_PLACE = f"{OPTIMIZER}/{VARIABLES}/1"
"""Where the learning rate lies if it does."""


def left_out(state: TrainState, *kept: str) -> dict[str, str]:
    """Returns what a file of Keras has no place for.

    Args:
        state: The state.
        kept: The keys of the home that this form of file holds.
    """
    home = home_in(state)
    scale = (LOSS_SCALE,) if AROUND in kept and AROUND in home else ()
    dropped = dropped_from(state.extra, (HOME, *scale), "a file of Keras")
    return dropped | {
        f"extra/{HOME}/{key}": why for key, why in HOMES.items() if key in home and key not in kept
    }


def optimizer_variables(tree: Any) -> dict[str, Tensor]:
    """Returns the optimizer's variables by their keys."""
    optimizer = tree.get(OPTIMIZER) if isinstance(tree, Mapping) else None
    node = optimizer.get(VARIABLES) if isinstance(optimizer, Mapping) else None
    node = node if isinstance(node, Mapping) else {}
    return {key: leaf for key, leaf in node.items() if isinstance(leaf, Tensor) and fits(key, Name)}


class KeptRecord(TypedDict):
    """What an optimizer keeps, as a file of statekit says it."""

    rate: bool
    average: NotRequired[bool]
    accumulate: NotRequired[bool]
    amsgrad: NotRequired[bool]
    placeholders: NotRequired[bool]


class Saying(TypedDict, total=False):
    """What statekit says in a file that it wrote."""

    kept: KeptRecord
    rows: list[tuple[Name, Name]]
    variables: list[tuple[list[Name], Name, bool]]


class FileAttributes(TypedDict, total=False):
    """What stands at the whole file beside what Keras wrote there."""

    statekit_keras: Saying


def file_tree(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns a checkpoint's tree, which has groups, tensors and attributes by name.

    Raises:
        StateError: It hasn't; lists every fault.
    """
    tree, faults = checkpoint.tree, Faults(group_faults(checkpoint.tree))
    if not faults:
        faults += misfits(tree.get(ATTRIBUTES, {}), FileAttributes, (ATTRIBUTES,))
    faults.check(StateError, "The checkpoint isn't as files of Keras are", place=checkpoint.path)
    return dict(tree)


def attribute(tree: Mapping[str, Any], key: str, name: str) -> Any:
    """Returns an attribute of what a key holds."""
    node = tree.get(key, {}).get(VARIABLES, {})
    return node.get(ATTRIBUTES, {}).get(name)


def frozen_of(tree: Mapping[str, Any], every: Sequence[Variable], order: Order) -> dict[str, Variable]:
    """Returns the variables that the optimizer doesn't move: parameters, and statistics of batches."""
    taken = {variable.place for variable in order.moved.values()}
    saved = {tuple(place): name for place, name, _ in saved_names(tree)}
    frozen: dict[str, Variable] = {}
    for variable in every:
        if variable.place not in taken and variable.tensor.dtype.kind in "fV":
            name = saved.get(variable.place, variable.name)
            clash = name in order.moved or name in frozen
            frozen["/".join(variable.place) if clash else name] = variable
    return frozen


def sayings(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns statekit's own records in a file; empty if another program wrote it."""
    records: Mapping[str, Any] = tree.get(ATTRIBUTES, {}).get(SAYINGS, {})
    return records


def saved_names(tree: Mapping[str, Any]) -> list[tuple[list[str], str, bool]]:
    """Returns place, name and whether the optimizer moves it, of each variable in a file of statekit."""
    return [(list(place), name, moved) for place, name, moved in sayings(tree).get("variables", ())]


def saved_order(tree: Mapping[str, Any], every: Sequence[Variable]) -> Order | None:
    """Returns the order that a file of statekit says; None if it says none that fits."""
    by_place = {variable.place: variable for variable in every}
    saved = [(tuple(place), name) for place, name, moved in saved_names(tree) if moved]
    if not saved or any(place not in by_place for place, _ in saved):
        return None
    return Order({name: by_place[place] for place, name in saved})


def _named(tree: Mapping[str, Any], config: Any, optimizer: str | None) -> Named | None:
    names = sayings(tree)
    named = by_config(config, is_keras2(tree)) or (
        Named(names["class"])
        if fits(names.get("class"), Name) and names["class"] in SCHEMAS
        else by_name(attribute(tree, OPTIMIZER, "name")) or by_user(optimizer)
    )
    if named is None or "kept" not in names:
        return named
    options = {key: value for key, value in names["kept"].items() if key in KeptRecord.__annotations__}
    return replace(named, kept=Kept(**options))


def given_order(
    every: Sequence[Variable], names: Sequence[str], shapes: Sequence[Any], has_config: bool
) -> Order:
    """Returns the variables of these names, which somebody gave: by name, or else in the model's order."""
    if len(names) != len(shapes):
        return by_names(every, names, shapes)
    try:
        return by_names(every, names, shapes)
    except StateError:  # layers may have been numbered anew since: the names are right if the order is
        order = in_order(every, shapes, has_config)
        return Order(dict(zip(names, order.moved.values(), strict=True)), order.notes)


def _order(
    tree: Mapping[str, Any], every: Sequence[Variable], ref: CheckpointRef, shapes: Sequence[Any], config: Any
) -> Order:
    if ref.param_names is not None:
        return given_order(every, ref.param_names, shapes, config is not None)
    saved = saved_order(tree, every)
    if saved is None or [v.tensor.shape for v in saved.moved.values()] != list(shapes):
        return in_order(every, shapes, config is not None)
    return saved


def model_tree(
    state: TrainState, home: Mapping[str, Any], own_attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the tree of a model's variables, without the optimizer's.

    Args:
        state: The state.
        home: What it has from a file of Keras.
        own_attributes: What statekit shall say in the file besides the names of variables.
    """
    skeleton = home.get("tree", {})
    placed = {path: tuple(place) for path, place in home.get("places", {}).items()}
    tree: dict[str, Any] = {}
    moved = order_of(state)
    names = []
    counted: dict[tuple[str, ...], int] = {}
    for path in dict.fromkeys((*moved, *state.params)):
        place = placed.get(path)
        if place is None:
            above = tuple(path.split("/")[:-1])
            number = counted[above] = counted.get(above, -1) + 1
            place = (*above, VARIABLES, str(number))
        names.append([list(place), path, path in {*moved}])
        put(tree, place, state.params[path], () if path in placed else place[:-2])
    whole = merged(skeleton, tree)
    attributes = {**whole.get(ATTRIBUTES, {}), SAYINGS: {**own_attributes, "variables": names}}
    return {ATTRIBUTES: attributes, **{key: part for key, part in whole.items() if key != ATTRIBUTES}}


def put(tree: dict[str, Any], place: Sequence[str], leaf: Tensor, named: Sequence[str]) -> None:
    """Puts a leaf at a place, below groups that are made on the way; `named` gives the last group its name."""
    node = tree
    for key in place[:-1]:
        node = node.setdefault(key, {})
    if named:
        node.setdefault(ATTRIBUTES, {"name": named[-1]})
    node[place[-1]] = leaf


def merged(skeleton: Any, tree: Any) -> Any:
    """Returns a tree in the order of a skeleton, with what it lacks; numbers in their order."""
    if not isinstance(skeleton, Mapping) or not isinstance(tree, Mapping):
        return tree
    keys = [*skeleton, *(key for key in tree if key not in skeleton)]
    whole = {
        key: merged(skeleton[key], tree[key])
        if key in skeleton and key in tree
        else tree.get(key, skeleton.get(key))
        for key in keys
    }
    if not all(key.isdecimal() for key in whole if key != ATTRIBUTES):
        return whole
    return {key: whole[key] for key in sorted(whole, key=lambda key: int(key) if key.isdecimal() else -1)}


def with_config(
    tree: dict[str, Any], module: str, kind: str, registered: str | None, arguments: Mapping[str, Any]
) -> None:
    """Puts an optimizer into the config of the model, if the tree has one."""
    config = config_of(tree)
    if not isinstance(config, Mapping):
        return
    stated = config.get("compile_config")
    compiled = {"loss": None, **(stated if isinstance(stated, Mapping) else {})}
    optimizer = {
        "module": module,
        "class_name": kind,
        "config": dict(arguments),
        "registered_name": registered,
    }
    tree[ATTRIBUTES] = {
        **tree[ATTRIBUTES],
        CONFIG: {**config, "compile_config": {**compiled, OPTIMIZER: optimizer}},
    }


def arguments(state: TrainState, before: Named | None, kind: str) -> dict[str, Any]:
    """Returns the arguments of a class for a state: those that a file had, with the state's values over them."""
    same = dict(before.config or {}) if before and before.kind == kind else {"name": usual_name(kind)}
    groups = state.optimizer.groups
    values = dict(groups[0].hyperparameters) if groups else {}
    native = load_schema(state.optimizer.schema).native(VARIANT, values)
    native.pop("exclude_from_weight_decay", None)
    if before and before.is_keras2:  # which has no arguments that came later
        native = {name: value for name, value in native.items() if name in same}
    return same | {name: value for name, value in native.items() if value != same.get(name, name)}


LAYOUT = Keras()
