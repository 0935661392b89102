"""The layout `torch-weights`: a model's state_dict without an optimizer, bare or under a key.

Input: what `torch.save(model.state_dict(), ...)`, safetensors, or `torch.distributed.checkpoint` hold of a model;
output: a state of all its tensors, as nothing tells parameters from buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, dropped_from
from statekit.converters.layouts.pytorch.parts import (
    MODELS,
    NAMES,
    find_parts,
    is_plain,
    model_place,
    names_of,
    not_plain,
    path_of,
    shared_paths,
    stated_names,
    tied,
)
from statekit.converters.layouts.pytorch.side_by_side import optimizer_places
from statekit.converters.layouts.weights.lines import torch_lines
from statekit.converters.layouts.weights.state import VARIANTS, not_weights, require_weights, weights_state
from statekit.errors import Faults, RefusedError, StateError
from statekit.files.checkpoint import MODEL_KEY, Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.run import BESIDE
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import TIES, Tensor, ties_of
from statekit.tensors.tree import Path, Tree, at, loose, put, without

READ = ("torch", "safetensors", "dcp", "dcp-safetensors", "hf-trainer", "accelerate")
"""Containers in which a model may lie alone; those that are written are fewer, as the others' libraries want more."""
_OF_FSDP = "param_to_group_meta"
"""What Megatron-FSDP keeps beside each parameter's slots: the options of its group."""
PLACE = "torch_weights_place"
"""Key in `extra`: where the model lies in the file."""


@dataclass(frozen=True)
class TorchWeights:
    """A state_dict."""

    name: str = "torch-weights"
    title: str = "weights: a PyTorch model's state_dict, bare or under a key"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: VARIANTS)
    containers: tuple[str, ...] = ("torch", "safetensors", "dcp")

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for a model, and that there is no optimizer."""
        place = _place(checkpoint) if checkpoint.container in READ else None
        if place is None:
            return None
        where = f"at {'/'.join(map(str, place))}" if place else "at the top"
        return Evidence(5, f"tensors by name {where}, and no optimizer")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        place = _place(checkpoint)
        if place is None:
            raise not_weights(checkpoint)
        tree = checkpoint.tree
        _refuse_fsdp_dtensor(checkpoint)
        model: Mapping[str, Tensor] = at(tree, place) if place else loose(tree)
        rest = (
            without(tree, place) if place else {key: part for key, part in tree.items() if key not in model}
        )
        ties = ties_of(model, model)
        extra: dict[str, Tree] = {
            TIES: {path_of(name): path_of(tie) for name, tie in ties.items()},
            NAMES: stated_names(map(str, model)),
            BESIDE: rest,
            PLACE: list(place),
        }
        faults = Faults(shared_paths(map(str, model)))
        faults.check(StateError, "Parameters can't be told apart", place=checkpoint.path)
        params = {path_of(str(name)): tensor for name, tensor in model.items() if name not in ties}
        return weights_state(params, {key: part for key, part in extra.items() if part}, checkpoint, hints)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the file's tree: the model under a key, `model` unless the source had another."""
        require_weights(state, self.name)
        place = tuple(state.extra.get(PLACE) or MODELS[0])
        names = names_of(state.extra, state.params)
        params = {names[path]: tensor for path, tensor in state.params.items()}
        extra = state.extra.get(BESIDE) or {}
        kept = {key: part for key, part in extra.items() if is_plain(part)}
        dropped = not_plain(extra, f"extra/{BESIDE}")
        dropped |= dropped_from(state.extra, (BESIDE, PLACE, TIES, NAMES), "the file")
        tree = put(kept, place, {**params, **tied(state.extra, params)})
        return Encoded(tree, state.counts.updates, dropped=dropped, parts={"model": place})

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return torch_lines(saved, _saved_place(saved))


def _refuse_fsdp_dtensor(checkpoint: Checkpoint) -> None:
    """Refuses Megatron-FSDP's folders: their optimizer has other names and groups than any that is read.

    Source: NVIDIA/Megatron-LM megatron/core/distributed/fsdp, `optimizer.param_to_group_meta`; none was run.
    """
    optimizer = at(checkpoint.tree, ("optimizer",))
    keys = [f"optimizer.{key}" for key in optimizer] if isinstance(optimizer, Mapping) else []
    if any(str(key).startswith(f"optimizer.{_OF_FSDP}") for key in (*keys, *checkpoint.tree)):
        raise RefusedError(
            "This is fsdp_dtensor, the format of Megatron-FSDP, whose optimizer isn't read.",
            place=checkpoint.path,
            found=f"optimizer/{_OF_FSDP}",
            remedy="load it with Megatron-LM and save it with --ckpt-format torch_dist",
        )


def _place(checkpoint: Checkpoint) -> Path | None:
    if not isinstance(checkpoint.tree, Mapping):
        return None
    if find_parts(checkpoint, {}) is not None or optimizer_places(checkpoint.tree):
        return None
    return model_place(checkpoint.tree, checkpoint.meta.get(MODEL_KEY))


def _saved_place(saved: SavedRun) -> str | None:
    """Returns where a saved model lies, keys joined by `/`; None where its tensors stand at the top."""
    if saved.ref is not None and saved.ref.model_key is not None:
        return saved.ref.model_key
    places = dict.fromkeys(name.rpartition("/")[0] for name in saved.tensors)
    usual = ["/".join(map(str, path)) for path in MODELS]
    usual_place = next((place for place in usual if place in places), None)
    if usual_place is None and len(places) == 1:
        usual_place = next(iter(places))
    return usual_place or None


LAYOUT = TorchWeights()
