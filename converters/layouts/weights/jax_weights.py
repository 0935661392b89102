"""The layout `jax-weights`: a tree of arrays without an optimizer's state, under `params` or bare.

Input: what Flax or Orbax hold of a model alone. Beside `params` there may be what models keep (`batch_stats`) and a
step; anything else may be an optimizer's, and the layout doesn't fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, dropped_from
from statekit.converters.layouts.weights.lines import jax_lines
from statekit.converters.layouts.weights.state import VARIANTS, not_weights, require_weights, weights_state
from statekit.errors import Faults, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import nested
from statekit.tensors.typed import Name, fits

PARAMS = "params"
BESIDE = frozenset({"batch_stats", "step", "epoch", "rng", "metadata"})
"""What a model's file may hold beside its parameters."""
OF_OPTIMIZERS = frozenset({
    "opt_state", "optimizer", "optimizer_state", "state", "mu", "nu", "count", "trace", "momentum", "v_row", "v_col",
})  # fmt: skip
"""Keys that a bare tree with an optimizer's state has somewhere.

Source: google-deepmind/optax, optax/_src/transform.py; google/flax, flax/training/train_state.py.
"""
_READ = ("npz", "pickle")
"""Containers that such trees are read from beside those that have them as their own."""
HOME = "jax_weights"
"""Key in `extra`: what lies beside the parameters."""
KEYS = "jax_weights_keys"
"""Key in `extra`: the keys of parameters by path, where some have slashes, as Haiku's modules do."""


@dataclass(frozen=True)
class JaxWeights:
    """A tree of arrays."""

    name: str = "jax-weights"
    title: str = "weights: a tree of arrays, under params or bare"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: VARIANTS)
    containers: tuple[str, ...] = ("orbax", "flax")

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for a tree of arrays, and that nothing in it may be an optimizer's."""
        if (
            checkpoint.container not in (*self.containers, *_READ)
            or (params := _params(checkpoint.tree)) is None
        ):
            return None
        where = "under params" if params is not checkpoint.tree else "at the top"
        return Evidence(5, f"a tree of arrays {where}, and no optimizer")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        tree = checkpoint.tree
        node = _params(tree)
        if node is None:
            raise not_weights(checkpoint)
        params: dict[str, Tensor] = {}
        stated: dict[str, list[str]] = {}
        faults = Faults()
        for keys, tensor in _leaves(node):
            path = "/".join(keys)
            if path in params:
                faults.add("is the path of two parameters", path)
            params[path] = tensor
            if any("/" in key for key in keys):
                stated[path] = list(keys)
        faults.check(StateError, "Parameters can't be told apart", place=checkpoint.path)
        rest = {key: part for key, part in tree.items() if key != PARAMS} if node is not tree else {}
        extra = {HOME: rest, KEYS: stated}
        return weights_state(params, {key: part for key, part in extra.items() if part}, checkpoint, hints)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the tree, parameters under `params`."""
        require_weights(state, self.name)
        stated: Any = state.extra.get(KEYS)
        keys: Mapping[str, list[str]] = stated if fits(stated, dict[Name, list[Name]]) else {}
        tree = nested(
            {tuple(keys.get(path, path.split("/"))): tensor for path, tensor in state.params.items()}
        )
        home = state.extra.get(HOME) or {}
        dropped = dropped_from(state.extra, (HOME, KEYS), "the tree")
        return Encoded({PARAMS: tree, **home}, state.counts.updates, dropped=dropped)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return jax_lines(saved)


def _params(tree: Any) -> Mapping[str, Any] | None:
    """Returns the parameters of a tree that holds nothing else; the tree itself if they stand bare."""
    if not isinstance(tree, Mapping):
        return None
    part = tree.get(PARAMS)
    if isinstance(part, Mapping):
        return part if _is_model(part) and tree.keys() - {PARAMS} <= BESIDE else None
    return tree if _is_model(tree) else None


def _is_model(tree: Mapping[str, Any]) -> bool:
    leaves = list(_leaves(tree))
    return bool(leaves) and all(
        isinstance(leaf, Tensor) and not OF_OPTIMIZERS & {*keys} for keys, leaf in leaves
    )


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, part in tree.items():
        if isinstance(part, Mapping):
            yield from _leaves(part, (*above, str(key)))
        else:
            yield (*above, str(key)), part


LAYOUT = JaxWeights()
