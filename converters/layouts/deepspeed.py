"""Layout `deepspeed`: torch.optim's AdamW as DeepSpeed's ZeRO keeps it, and Adafactors, which are read alone.

What the optimizer moves is the float32 weight `fp32`. Beside a parameter of lower precision it is that parameter's
master; where the model itself is of float32 it is the parameter, and the model's copy of it is passed over, as
DeepSpeed does when it loads a checkpoint.

ZeRO hands flat vectors to the optimizer. AdamW, which moves each element by itself, doesn't notice. Adafactor doesn't
factor them, and takes its means over what a rank holds of a group: no variant does that, so none is said.
Source: deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py, `step`, `load_state_dict`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, Exactness
from statekit.converters.layouts.hyperparameters import require_optimizer
from statekit.converters.layouts.pytorch.lines import deepspeed_lines, with_given
from statekit.converters.layouts.pytorch.param_order import MODEL_PART, ORDERS, Order, found_order
from statekit.converters.layouts.pytorch.parts import find_parts, names_of, path_of
from statekit.converters.layouts.pytorch.torch_fqn import LAYOUT as BY_NAME
from statekit.converters.layouts.pytorch.torch_optim import LAYOUT as TORCH_OPTIM
from statekit.errors import Faults, InexactError, StateError, some
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.schema import is_native, load_schema
from statekit.state.stored_params import BEGUN_MASTER, MASTER, Proven, in_full, is_low, said_of_masters
from statekit.state.train_state import Axis, Counts, Rule, TrainState
from statekit.tensors.tensor import Filled, Shape, Tensor, scalar
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import at, put
from statekit.tensors.typed import Name, fits, typed

_WEIGHT, _FILE = "fp32", "torch"
_UNFACTORED = ("variance", "exp_avg_sq")
"""What torch's and Hugging Face's Adafactor call the second moment of what they don't factor."""
_NOT_STORED = 3
"""The stage of ZeRO whose checkpoints hold no model apart from the optimizer's weights."""
_FLAT = (
    "Adafactor moved the flat pieces that ranks hold, and took its means over them: no variant does that, so a step"
    " with one is another run."
)
_AHEAD = (
    "DeepSpeed's wrapper made a first step with gradients of zero: the optimizer's count is one ahead of the run's and"
    " stays so; the schedule stands at the run's."
)
_DEFECT = "save the run again after deepspeed loaded its weights, which refreshes the optimizer's copy"


class Numbered(TypedDict):
    """The optimizer of a run without ZeRO whose groups aren't the model's order."""

    state: dict[int, dict[str, Any]]
    param_groups: list[NumberedGroup]


class NumberedGroup(TypedDict):
    """A group, by numbers."""

    params: list[int]


class ParamRecord(TypedDict):
    """What is kept of a parameter: its float32 weight beside the optimizer's slots."""

    fp32: Tensor


class ParamGroup(TypedDict):
    """A group, by names."""

    params: list[Name]


class StateDict(TypedDict):
    """The optimizer, by name."""

    state: dict[Name, ParamRecord]
    param_groups: list[ParamGroup]


class Tree(TypedDict):
    """The parts that the container puts together."""

    model: dict[Name, Tensor]
    optimizer: StateDict


def _counts_behind(counts: Counts, ahead: int) -> Counts:
    """Returns counts whose schedule stands at the run's step, behind the optimizer's count."""
    if not ahead:
        return counts
    return replace(counts, schedule=max(counts.updates - ahead, 0), says_schedule=True)


def _with_masters(
    slots: Mapping[str, Mapping[str, Tensor]],
    weights: Mapping[str, Tensor],
    stored_params: Mapping[str, Tensor],
) -> dict[str, dict[str, Tensor]]:
    """Returns slots with the masters of those parameters that are stored in another precision."""
    return {
        path: {**param_slots, **({MASTER: weights[path]} if path in stored_params else {})}
        for path, param_slots in slots.items()
    }


def _has_numbers(checkpoint: Checkpoint) -> bool:
    """Tells whether the optimizer of a run without ZeRO numbers its parameters, and names none."""
    optimizer: Any = at(checkpoint.tree, ("optimizer",))
    if checkpoint.meta.get("zero_stage") != 0:
        return False
    return fits(optimizer, Numbered) and any(group["params"] for group in optimizer["param_groups"])


def _with_names(checkpoint: Checkpoint, hints: CheckpointRef) -> tuple[Checkpoint, Order]:
    """Returns a checkpoint whose optimizer names its parameters, and what the names of a run without ZeRO rest on."""
    tree: Any = checkpoint.tree
    if not _has_numbers(checkpoint):
        typed(tree, Tree, checkpoint.path, "The checkpoint has no optimizer of DeepSpeed", StateError)
        return checkpoint, _taken_order(checkpoint)
    optimizer = tree["optimizer"]
    shapes = [
        [_moved_shape(optimizer["state"].get(i, {})) for i in group["params"]]
        for group in optimizer["param_groups"]
    ]
    buffers = {*(at(tree, ("deepspeed", "buffer_names")) or ())}
    moved = {name: tensor for name, tensor in tree["model"].items() if name not in buffers}
    order = found_order(optimizer["param_groups"], shapes, moved, hints.param_names, False, hints.model)
    return replace(checkpoint, tree=_named(tree, order)), order


def _taken_order(checkpoint: Checkpoint) -> Order:
    """Returns that the numbers of a run without ZeRO were taken in the model's order, where shapes don't prove it."""
    is_numbered = checkpoint.meta.get("zero_stage") == 0 and not checkpoint.meta.get("universal")
    shapes = [weight.shape for weight in _weights(checkpoint.tree).values()] if is_numbered else []
    return Order((), assumed=ORDERS[MODEL_PART] if len({*shapes}) < len(shapes) else "")


def _numbered(tree: Any) -> dict[str, Any]:
    """Returns a run without ZeRO as torch.optim numbers it, without the float32 weights."""
    optimizer = tree["optimizer"]
    state = {
        i: {key: value for key, value in record.items() if key != _WEIGHT}
        for i, record in optimizer["state"].items()
    }
    return {**tree, "optimizer": {**optimizer, "state": state}}


def _moved_shape(record: Mapping[str, Any]) -> Shape | None:
    """Returns the shape of a parameter's weight and slots; None if there is no such tensor."""
    shapes = [value.shape for value in record.values() if isinstance(value, Tensor) and value.shape]
    return shapes[0] if shapes else None


def _named(tree: Any, order: Order) -> dict[str, Any]:
    """Returns a run whose optimizer names its parameters, with the weight of each beside its slots."""
    optimizer, model = tree["optimizer"], tree["model"]
    numbers = [i for group in optimizer["param_groups"] for i in group["params"]]
    name_of = dict(zip(numbers, (name for names in order.groups for name in names), strict=True))
    records = {name: {_WEIGHT: model[name], **optimizer["state"].get(i, {})} for i, name in name_of.items()}
    groups = [
        {**group, "params": list(names)}
        for group, names in zip(optimizer["param_groups"], order.groups, strict=True)
    ]
    return {**tree, "optimizer": {"state": records, "param_groups": groups}}


@dataclass(frozen=True)
class DeepSpeed:
    """The optimizers of PyTorch under ZeRO."""

    name: str = "deepspeed"
    title: str = "AdamW and Adafactor of torch.optim and Hugging Face under DeepSpeed's ZeRO, with masters"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"adamw": ("torch",)})
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"adafactor": ("hf", "torch")})
    containers: tuple[str, ...] = ("deepspeed",)
    stores_values: bool = True
    keeps_masters: bool = True

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for a float32 weight beside the slots of every parameter."""
        if find_parts(checkpoint) is None:
            return None
        if is_numbered := _has_numbers(checkpoint):
            bare = _numbered(checkpoint.tree)
        elif fits(checkpoint.tree, Tree) and checkpoint.tree["optimizer"]["state"]:
            bare = _bare(checkpoint.tree)
        else:
            return None
        why = TORCH_OPTIM.detect(replace(checkpoint, tree=bare, container=_FILE))
        if why is None:
            return None
        form = "numbers without names" if is_numbered else f"{_WEIGHT} beside each parameter's slots"
        return Evidence(20, f"{why.because}, and {form}")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        checkpoint, order = _with_names(checkpoint, hints)
        tree, weights = _bare(checkpoint.tree), _weights(checkpoint.tree)
        state, flat = _decoded(replace(checkpoint, tree=tree), hints)
        state = state.with_facts(lambda facts: [*facts, *order.facts])
        lost = Faults((f"has no {_WEIGHT}", path) for path in state.params if path not in weights)
        lost.check(StateError, "Parameters have no weight that the optimizer moves", place=checkpoint.path)
        model = {path_of(name): tensor for name, tensor in tree["model"].items()}
        stored_params = {path: t for path, t in model.items() if t.dtype != weights.get(path, t).dtype}
        copies = {} if checkpoint.meta.get("zero_stage") == _NOT_STORED else model
        slots = _whole(state, checkpoint.tree) if flat else state.slots
        ahead = at(checkpoint.tree, ("deepspeed", "first_steps")) or 0
        return replace(
            state,
            counts=_counts_behind(state.counts, ahead),
            params={
                path: stored_params.get(path) or _proven(weights[path], copies.get(path), path)
                for path in state.params
            },
            slots=_with_masters(slots, weights, stored_params),
            rules={path: Rule((Axis.NONE,) * len(weights[path].shape), "file") for path in state.rules},
            optimizer=replace(state.optimizer, variant=hints.variant) if flat else state.optimizer,
            assumptions=(
                *state.assumptions,
                *order.notes,
                *([_FLAT] if flat else []),
                *([_AHEAD] if ahead else []),
            ),
        )

    def encode(self, state: TrainState) -> Encoded:
        """Returns the optimizer by name, with the float32 weight of each parameter beside its slots."""
        require_optimizer(state, ("adamw",), self.name)
        _refuse_uneven(state)
        bare = {path: {k: t for k, t in slots.items() if k != MASTER} for path, slots in state.slots.items()}
        encoded = BY_NAME.encode(replace(state, slots=bare))
        place = encoded.parts["optimizer"]
        optimizer = at(encoded.tree, place)
        name_of = names_of(state.extra, state.params)
        weights = {
            name_of[path]: slots.get(MASTER) or in_full(state.params[path])
            for path, slots in state.slots.items()
        }
        records = {name: {**record, _WEIGHT: weights[name]} for name, record in optimizer["state"].items()}
        groups = [{key: scalar(value) for key, value in group.items()} for group in optimizer["param_groups"]]
        low = [path for path, slots in state.slots.items() if is_low(state.params[path], slots)]
        return replace(
            encoded,
            tree=put(encoded.tree, place, {"state": records, "param_groups": groups}),
            exactness={**encoded.exactness, **_begun_masters(place, [name_of[path] for path in low])},
            assumptions=(*encoded.assumptions, *said_of_masters(low)),
        )

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return with_given(state, saved, deepspeed_lines(state, saved))


def _begun_masters(place: Keys, names: Sequence[str]) -> dict[str, tuple[Exactness, str]]:
    """Returns how exact the masters are that a run without any begins with, by their names in the tree."""
    keys = ["/".join(map(str, (*place, "state", name, _WEIGHT))) for name in names]
    return dict.fromkeys(keys, (Exactness.ROUNDING, BEGUN_MASTER))


def _refuse_uneven(state: TrainState) -> None:
    """Refuses parameters whose counts aren't the run's: ranks share flat vectors, which have one count."""
    uneven = [f"{path}: {count}" for path, count in state.counts.behind.items()]
    moved = list(state.optimizer.paths)
    uneven += [
        f"{path}: no slots" for path in moved if not state.slots.get(path) and path not in state.counts.behind
    ]
    if uneven:
        raise InexactError(
            "DeepSpeed has one count for all parameters of a group, and zeros where a gradient is missing.",
            expected=f"{state.counts.updates} updates of each",
            found=some(uneven),
            remedy="freeze untrained parameters before the optimizer is made, and save the run again",
        )


def _proven(weight: Tensor, copy: Tensor | None, path: str) -> Tensor:
    """Returns the weight that the optimizer moves, held to the copy that the model part has of it, if any."""
    return weight if copy is None or copy is weight else Proven(weight, copy, path, _DEFECT)


def _bare(tree: Any) -> dict[str, Any]:
    """Returns a checkpoint as torch.optim numbers it, without the float32 weights."""
    optimizer = tree["optimizer"]
    numbers = {
        name: i for i, name in enumerate(n for group in optimizer["param_groups"] for n in group["params"])
    }
    state = {
        numbers.get(name, name): {key: value for key, value in record.items() if key != _WEIGHT}
        for name, record in optimizer["state"].items()
    }
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]], "param_names": list(group["params"])}
        for group in optimizer["param_groups"]
    ]
    return {**tree, "optimizer": {"state": state, "param_groups": groups}}


def _weights(tree: Any) -> dict[str, Tensor]:
    return {path_of(name): record[_WEIGHT] for name, record in tree["optimizer"]["state"].items()}


def _decoded(checkpoint: Checkpoint, hints: CheckpointRef) -> tuple[TrainState, bool]:
    """Returns the state of parameters as the optimizer saw them, and whether they were vectors to it."""
    records = checkpoint.tree["optimizer"]["state"].values()
    # Whatever the parameter's shape, the slots are Adafactor's of a vector.
    if any("exp_avg" not in record and not record.keys().isdisjoint(_UNFACTORED) for record in records):
        flat = TORCH_OPTIM.decode(replace(checkpoint, tree=_flattened(checkpoint.tree)), hints)
        if not any(map(is_native, flat.optimizer.schemas)):  # or another rule keeps such a slot
            return flat, True
    return TORCH_OPTIM.decode(checkpoint, hints), False


def _flattened(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint whose parameters are vectors, as the optimizer saw them; shapes only."""
    optimizer = tree["optimizer"]
    moved = {name for group in optimizer["param_groups"] for name in group["param_names"]}
    state = {
        i: {key: _vector(value) for key, value in record.items()} for i, record in optimizer["state"].items()
    }
    model = {name: _vector(tensor) if name in moved else tensor for name, tensor in tree["model"].items()}
    return {**tree, "optimizer": {**optimizer, "state": state}, "model": model}


def _vector(value: Any) -> Any:
    if isinstance(value, Tensor) and value.shape:
        return Filled((math.prod(value.shape),), value.dtype)
    return value


def _whole(state: TrainState, tree: Any) -> dict[str, dict[str, Tensor]]:
    """Returns the slots of a state with flat ones, as the checkpoint has them."""
    schema, records = load_schema(state.optimizer.schema), tree["optimizer"]["state"]
    native = {name: slot.aliases.get(str(state.optimizer.variant)) for name, slot in schema.slots.items()}
    names = {path_of(name): name for name in records}
    return {
        path: {name: records[names[path]][native[name]] for name in slots}
        for path, slots in state.slots.items()
    }


LAYOUT = DeepSpeed()
