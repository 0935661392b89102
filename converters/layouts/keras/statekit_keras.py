"""The layout `statekit-keras`: optimizers of statekit.tensorflow in Keras' files.

    optimizer/vars/iteration, learning_rate, net:dense:kernel:m, groups:0:model_norms ...

Slots have names, with `:` for the slashes of a path; the model's variables are numbered as Keras does it, and found by
the names of their layers. Settings stand in the config of a `.keras` file; a `.weights.h5` file has none of them.

Source: statekit/tensorflow/optimizer.py, `Engine.save_own_variables`, `get_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from statekit.conversion.contracts import Encoded, Evidence, Hints
from statekit.converters.formats.hdf5.reader import ATTRIBUTES
from statekit.converters.layouts.hyperparameters import manifest_state
from statekit.converters.layouts.keras.layout import (
    OPTIMIZER,
    attribute,
    config_of,
    frozen_of,
    home_in,
    home_of,
    left_out,
    model_tree,
    optimizer_variables,
    saved_order,
    with_config,
)
from statekit.converters.layouts.keras.state import HOME
from statekit.converters.layouts.keras.statekit_keras_state import (
    CLASSES,
    MODULE,
    Own,
    arguments,
    named_slots,
    own_by_config,
    own_by_name,
    own_state,
    own_variables,
    paths_of,
)
from statekit.converters.layouts.keras.variables import VARIABLES, Order, Variable, by_names, variables
from statekit.errors import StateError
from statekit.files.checkpoint import Checkpoint
from statekit.optim.run import stepped_variants
from statekit.state.train_state import TrainState


@dataclass(frozen=True)
class StatekitKeras:
    """Keras' files of statekit.tensorflow's optimizers."""

    name: str = "statekit-keras"
    title: str = "a run with an optimizer of statekit.tensorflow, in Keras' files"
    containers: tuple[str, ...] = ("keras-h5", "keras")
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {schema: stepped_variants(schema) for schema in CLASSES}
    )

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for slots by name."""
        found = next((key for key in optimizer_variables(checkpoint.tree) if ":" in key), None)
        return Evidence(30, f"{OPTIMIZER}/{VARIABLES} has {found}") if found else None

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the canonical state; hints are canonical.

        Raises:
            StateError: Nothing tells which optimizer it is, or names don't fit the variables; lists every fault.
            UsageError: A hint that the schema doesn't know.
        """
        tree, config = checkpoint.tree, config_of(checkpoint.tree)
        named = named_slots(optimizer_variables(tree))
        own = own_by_config(config) or own_by_name(attribute(tree, OPTIMIZER, "name"), named)
        if own is None:
            raise StateError(
                "The file doesn't say which optimizer of statekit.tensorflow it is about.",
                place=checkpoint.path,
                expected=", ".join(CLASSES.values()),
                found=attribute(tree, OPTIMIZER, "name") or "no name",
                remedy="read the .keras file, which has the model's config",
            )
        every = variables(tree, config)
        paths = paths_of(named)
        order = saved_order(tree, every)
        if order is None or {*order.moved} != {*paths}:
            found = by_names(every, [own.variable_of(path) for path in paths])
            order = _as_in_model(dict(zip(paths, found.moved.values(), strict=True)), every)
        frozen = frozen_of(tree, every, order)
        return own_state(
            own,
            named,
            {path: variable.tensor for path, variable in order.moved.items()},
            {path: variable.tensor for path, variable in frozen.items()},
            {HOME: home_of(tree, {**order.moved, **frozen})},
            manifest_state(checkpoint, own.schema),
            hints,
        )

    def encode(self, state: TrainState) -> Encoded:
        """Returns the file's tree.

        Raises:
            InexactError: No optimizer of statekit.tensorflow goes on with the state.
        """
        home = home_in(state)
        kind = CLASSES[state.optimizer.schema]
        own = own_variables(state, home)
        tree = model_tree(state, home, {"class": kind})
        before = own_by_config(config_of(home.get("tree", {})))
        same = before is not None and before.kind == kind
        name = attribute(home.get("tree", {}), OPTIMIZER, "name") if same else None
        held = {ATTRIBUTES: {"name": name or Own(kind).usual_name}, **own}
        tree[OPTIMIZER] = {**tree.get(OPTIMIZER, {}), VARIABLES: held}
        if config_of(tree) is not None:
            with_config(tree, MODULE, kind, f"statekit>{kind}", arguments(state, before))
        return Encoded(tree, state.counts.updates, dropped=left_out(state))


def _as_in_model(moved: Mapping[str, Variable], every: Sequence[Variable]) -> Order:
    """Returns parameters in the model's order, where that is known; slots stand in the order of groups."""
    if not all(variable.ordered for variable in moved.values()):
        return Order(moved)
    number = {variable.place: i for i, variable in enumerate(every)}
    return Order(dict(sorted(moved.items(), key=lambda item: number[item[1].place])))


LAYOUT = StatekitKeras()
