"""The layout `mxnet-native`: MXNet's optimizers without a schema, as a Trainer saves them, under their own names.

    states/<index>      None, an array, or a tuple of what the optimizer keeps; beside a float16 parameter
                        (weight32, that)
    optimizer           the object with all its attributes

What a class keeps, `_SLOTS` names; what another class keeps is numbered. The tree of a state and the attributes stay
in `extra`, so that the files come back as they were.

Source: apache/mxnet 2.0.0b1, python/mxnet/optimizer/*.py, `create_state`; optimizer.py,
`create_state_multi_precision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, dropped_from
from statekit.converters.layouts.mxnet.attributes import (
    BY_DEVICE,
    CURRENT,
    Attributes,
    Counted,
    read_counts,
    written_counts,
)
from statekit.converters.layouts.mxnet.layout import (
    FIRST_RELEASE,
    HOME,
    Files,
    Trained,
    bare,
    name_of,
    path_of,
)
from statekit.converters.layouts.mxnet.lines import trainer_lines
from statekit.converters.layouts.mxnet.order import Numbered, numbered
from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.stored_params import MASTER
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Record
from statekit.tensors.typed import Name, fits, typed

SCHEMA = "mxnet_native"
_WITH_SCHEMA = ("LANS", "LAMB", "Adam")
_SLOTS: Mapping[str, tuple[str, ...]] = {
    "SGD": ("mom",), "NAG": ("mom",), "Signum": ("mom",), "LARS": ("mom",), "LBSGD": ("mom",),
    "DCASGD": ("mom", "previous_weight"), "AdaGrad": ("history",), "GroupAdaGrad": ("history",),
    "AdaDelta": ("acc_g", "acc_delta"), "RMSProp": ("mean_square", "mean", "mom"), "Ftrl": ("z", "n"),
    "FTML": ("d", "v", "z"), "Adamax": ("m", "v"), "Nadam": ("m", "v"), "AdaBelief": ("m", "v"), "AdamW": ("m", "v"),
    "BERTAdam": ("m", "v"),
}  # fmt: skip
"""What a class keeps, in its order; an option may leave the last ones out."""
_COUNTS = (BY_DEVICE, CURRENT, "num_update")


class Home(TypedDict):
    """What the files hold besides parameters, slots, settings and counts, as `extra` carries it."""

    optimizer: Name
    frames: dict[str, Any]
    index: dict[str, Any]
    attributes: NotRequired[dict[str, Any]]
    order: NotRequired[Sequence[Any]]
    devices: NotRequired[Sequence[Any]]


@dataclass(frozen=True)
class MXNetNative:
    """The state of any optimizer of MXNet."""

    name: str = "mxnet-native"
    title: str = "optimizers of MXNet without a schema, under their own names"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {SCHEMA: ()})
    containers: tuple[str, ...] = ("mxnet",)
    schedule_in: str = "num_update"
    stores_values: bool = True

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for parameters beside the states of an optimizer of a class that no schema describes."""
        tree = checkpoint.tree
        if checkpoint.container not in self.containers or not fits(tree, Trained) or not tree.get("params"):
            return None
        optimizer = tree.get("optimizer")
        if optimizer is None or _class_of(optimizer) in _WITH_SCHEMA:
            return None
        return Evidence(15, f"an optimizer of {optimizer.name}")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the state, under the optimizer's own names.

        Raises:
            StateError: Nothing tells which parameters are meant; lists every fault.
        """
        if self.detect(checkpoint) is None:
            raise StateError(
                "These aren't parameters and states of MXNet with their optimizer.",
                place=checkpoint.path,
                expected=".params and .states of the same step, saved by Trainer.save_states",
            )
        tree = typed(
            checkpoint.tree, Files, checkpoint.path, "These aren't files of MXNet's trainer", StateError
        )
        subject = "The optimizer has no attributes by name, of MXNet's types"
        named = typed(tree["optimizer"].state, dict[Name, Any], checkpoint.path, subject, StateError)
        record = dict(typed(named, Attributes, checkpoint.path, subject, StateError))
        kind, order = _class_of(tree["optimizer"]), _order(tree, hints.param_names)
        params = {path_of(bare(name)): tensor for name, tensor in tree["params"].items()}
        paths = {path_of(name): i for i, name in order.names.items()}
        index = {path: i for path, i in paths.items() if path in params and i in tree["states"]}
        slots = {path: dict(_slots(kind, params[path], tree["states"][i])) for path, i in index.items()}
        settings = {name: value for name, value in record.items() if _is_setting(name, value)}
        counted = read_counts(record)
        state = TrainState(
            params,
            {path: named for path, named in slots.items() if named},
            Optimizer(SCHEMA, kind, (Group(tuple(index), settings, dict.fromkeys(settings, "file")),)),
            _counts(record, counted, index),
            extra={HOME: _home(tree, index, settings, counted)},
            assumptions=(order.note,) if order.note else (),
        )
        return hints.applied(state.with_facts(lambda facts: [*facts, *order.facts]))

    def encode(self, state: TrainState) -> Encoded:
        """Returns the tree of both files, in the form in which it was read.

        Raises:
            InexactError: The state wasn't read from MXNet, or has other slots than it had; lists every one.
        """
        home: Any = state.extra.get(HOME)
        if state.optimizer.schema != SCHEMA or not fits(home, Home):
            raise InexactError(
                "An optimizer without a schema goes back into the files that it came from, and the state has none.",
                place=f"extra/{HOME}",
                expected="a state that was read from MXNet",
                found=state.optimizer.schema,
            )
        faults = Faults()
        entries = {path: _entry(home, state, path, faults) for path in home["frames"]}
        for path in state.slots.keys() - entries.keys():
            faults.add("has slots, for which there is no place", path)
        faults.check(InexactError, "MXNet's optimizer keeps other states")
        settings = state.optimizer.groups[0].hyperparameters if state.optimizer.groups else {}
        every = {**home.get("attributes", {}), **settings, **_written(home, state)}
        record = {name: every[name] for name in home.get("order", ()) if name in every}
        names = home.get("names", {})
        tree = {
            "params": {names.get(path) or name_of(path): tensor for path, tensor in state.params.items()},
            "states": {home["index"][path]: entry for path, entry in entries.items()},
            "optimizer": Record(home["optimizer"], (), record),
            "files": home.get("files", {}),
        }
        return Encoded(tree, state.counts.updates, dropped=dropped_from(state.extra, (HOME,), "MXNet"))

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return trainer_lines(state, saved, str(state["variant"]).lower())


def _class_of(optimizer: Record) -> str:
    return optimizer.name.rpartition(".")[2]


def _order(tree: Any, given: Sequence[str] | None) -> Numbered:
    """Returns which parameters the indices mean."""
    native = {path_of(bare(name)): bare(name) for name in tree["params"]}
    by_optimizer = tree["optimizer"].state.get("idx2name", {})
    names = {i: bare(name) for i, name in by_optimizer.items() if isinstance(name, str)}
    return numbered(
        {i: next((t.shape for _, t in _leaves(entry)), None) for i, entry in tree["states"].items()},
        {bare(name): tensor.shape for name, tensor in tree["params"].items()},
        names if len(set(names.values())) == len(names) else {},
        None if given is None else [native.get(path_of(name), name) for name in given],
        tree["optimizer"].name.startswith(FIRST_RELEASE),
    )


def _home(
    tree: Any, index: Mapping[str, Any], settings: Mapping[str, Any], counted: Counted
) -> dict[str, Any]:
    """Returns what the files hold besides parameters, slots, settings and counts."""
    record, apart = tree["optimizer"].state, (*settings, *_COUNTS)
    native = {path_of(bare(name)): name for name in tree["params"]}
    home = {
        "optimizer": tree["optimizer"].name,
        "attributes": {name: value for name, value in record.items() if name not in apart},
        "counted": list(counted.counts),
        "order": list(record),
        "names": {path: name for path, name in native.items() if name != name_of(path)},
        "index": dict(index),
        "frames": {path: _frame(tree["states"][i]) for path, i in index.items()},
        "files": tree.get("files", {}),
        "devices": list(counted.devices),
        "current": counted.current,
    }
    return {key: part for key, part in home.items() if part or key == "current"}


def _leaves(entry: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields the arrays of an index's state, by their places in its tuples."""
    if isinstance(entry, Tensor):
        yield place, entry
    elif isinstance(entry, (list, tuple)):
        for i, part in enumerate(entry):
            yield from _leaves(part, (*place, i))


def _slots(kind: str, param: Tensor, entry: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the slots of a parameter by name: first a float32 weight beside one of few bits."""
    arrays = [tensor for _, tensor in _leaves(entry)]
    if _has_master(param, entry):
        yield MASTER, arrays.pop(0)
    names = _SLOTS.get(kind, ())
    if len(arrays) > len(names):
        names = tuple(f"state_{i}" for i in range(len(arrays)))
    yield from zip(names, arrays, strict=False)


def _has_master(param: Tensor, entry: Any) -> bool:
    is_pair = isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[0], Tensor)
    return is_pair and param.dtype.itemsize < entry[0].dtype.itemsize and entry[0].shape == param.shape


def _frame(entry: Any) -> Any:
    """Returns a state with True in place of its arrays."""
    if isinstance(entry, (list, tuple)):
        return tuple(map(_frame, entry))
    return True if isinstance(entry, Tensor) else entry


def _entry(home: Mapping[str, Any], state: TrainState, path: str, faults: Faults) -> Any:
    """Returns the state of a parameter's index: its frame with its slots."""
    slots = list(state.slots.get(path, {}).values())

    def filled(frame: Any) -> Any:
        if isinstance(frame, (list, tuple)):
            return tuple(map(filled, frame))
        if frame is not True:
            return frame
        if not slots:
            faults.add("lacks a slot", path)
            return None
        return slots.pop(0)

    entry = filled(home["frames"][path])
    if slots:
        faults.add(f"has {len(slots)} slots more than it had", path)
    return entry


def _is_setting(name: str, value: Any) -> bool:
    return (
        name not in (*_COUNTS, "begin_num_update")
        and not name.startswith("_")
        and isinstance(value, (bool, int, float, str))
    )


def _counts(record: Mapping[str, Any], counted: Counted, index: Mapping[str, Any]) -> Counts:
    begin = record.get("begin_num_update", 0)
    done = {path: counted.counts.get(i, begin) - begin for path, i in index.items()}
    updates = max(done.values(), default=0)
    behind = {path: number for path, number in done.items() if number != updates}
    return Counts(updates, record.get("num_update", begin + updates), behind)


def _written(home: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """Returns the attributes that count."""
    counts, begin = state.counts, home.get("attributes", {}).get("begin_num_update", 0)
    done = {i: begin + counts.behind.get(path, counts.updates) for path, i in home["index"].items()}
    order = [*home.get("counted", ()), *done]
    stored = {i: done[i] for i in order if i in done and counts.updates}
    counted = Counted(stored, tuple(home.get("devices", ())), home.get("current", 0))
    return {**written_counts(counted), "num_update": max(begin + counts.updates, counts.schedule)}


LAYOUT = MXNetNative()
