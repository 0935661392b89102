"""Layout `statekit-torch`: a torch checkpoint whose optimizer part is the state of an optimizer of statekit.torch.

    model              {name: tensor}: parameters and buffers; a name is the path with dots for slashes
    optimizer          state         {index: {slot: tensor}}
                       param_groups  [{schema, variant, lr, step, behind, slots, rules, known_from, hyperparameters...,
                                      param_names, params}]
    step               updates done
    optimizer_class    statekit.torch.Adafactor, ...
    variant            whose rule it follows
    schedule           where the learning-rate schedule stands
    paths              {name: path} of every parameter
    assumptions        what a conversion assumed
    extra              what else the state holds

A file that a user writes after more training needs only `model` and `optimizer`; what else it holds is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from statekit.conversion.contracts import Encoded, Evidence, Hints
from statekit.converters.layouts.optimizer_forms import by_index
from statekit.converters.layouts.own.torch_groups import (
    Found,
    Kind,
    Names,
    decode_groups,
    encode_groups,
    frozen_names,
    integer,
    looks_ours,
    moved_names,
)
from statekit.errors import InexactError, StateError, fault_list
from statekit.files.checkpoint import Checkpoint
from statekit.optim.run import stepped_variants
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Optimizer, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree, holds_records, walk

CLASSES = {
    "adafactor": "statekit.torch.Adafactor",
    "scaled_adam": "statekit.torch.ScaledAdam",
    "lans": "statekit.torch.LANS",
    "lamb": "statekit.torch.LAMB",
    "adamw": "statekit.torch.AdamW",
}
"""Schema -> the class whose state its files hold."""
BUFFERS, GROUPS, BESIDE = "buffers", "param_groups", "torch"
"""Parts of `extra` that lie elsewhere in the file: in `model`, in the groups, and at the top."""

_FORMS: dict[str, Any] = {
    "optimizer_class": str, "variant": str | None, "schedule": int,
    "paths": Mapping, "assumptions": list, "extra": Mapping,
}  # fmt: skip
_PLAIN = (bool, int, float, str, bytes, type(None), Tensor)
_SHOWN = 3


@dataclass(frozen=True)
class StatekitTorch:
    """The checkpoint of a run with an optimizer of statekit.torch."""

    name: str = "statekit-torch"
    title: str = "model, optimizer and step of a run with an optimizer of statekit.torch, by parameter name"
    containers: tuple[str, ...] = ("torch", "dcp", "hf-trainer", "accelerate", "safetensors")

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:
        """Those that statekit steps."""
        return {schema: stepped_variants(schema) for schema in CLASSES}

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at the keys of the parameter groups."""
        if not isinstance(checkpoint.tree, Mapping) or not looks_ours(checkpoint.tree.get("optimizer")):
            return None
        return Evidence(
            30, "optimizer/param_groups with param_names, rules and step, as statekit.torch has them"
        )

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the canonical state; hints override hyperparameters by their canonical names.

        Raises:
            StateError: The parts don't fit each other; lists every fault.
            UsageError: A hint that the schema doesn't know.
        """
        faults: list[tuple[str, str]] = []
        state = _decoded(checkpoint.tree, faults)
        if state is None or faults:
            raise StateError(
                f"The checkpoint isn't one of statekit.torch: {len(faults)} faults.",
                place=checkpoint.path,
                found=fault_list(faults),
                remedy="save a dict with model: model.state_dict() and optimizer: optimizer.state_dict()",
            )
        return hints.applied(state)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the file's tree; every tensor as it is.

        Raises:
            StateError: Two paths have the same name in torch; lists all such pairs.
            InexactError: No class of statekit.torch steps by the optimizer's rule.
        """
        optimizer = state.optimizer
        steppable = stepped_variants(optimizer.schema)
        if optimizer.variant not in (*steppable, None):
            raise InexactError(
                f"{CLASSES[optimizer.schema]} can't go on with this optimizer.",
                expected=f"{optimizer.schema}, variant {', '.join(steppable)}",
                found=f"{optimizer.schema}, variant {optimizer.variant}",
            )
        names = _names(state.params)
        extra = dict(state.extra)
        buffers, others = extra.pop(BUFFERS, {}), extra.pop(BESIDE, {})
        beside = {key: part for key, part in others.items() if key not in ("model", "optimizer")}
        of_groups = extra.pop(GROUPS, [])
        dropped = {
            name: "a torch file that loads with weights_only can't hold it"
            for key, part in [*extra.items(), *((f"{BESIDE}/{key}", part) for key, part in beside.items())]
            if not is_plain(part)
            for name in _leaf_names(key, part)
        }
        tree = {
            "model": {**{names[path]: tensor for path, tensor in state.params.items()}, **buffers},
            "optimizer": encode_groups(state, names, of_groups),
            "step": state.counts.updates,
            "optimizer_class": CLASSES[optimizer.schema],
            "variant": optimizer.variant,
            "schedule": state.counts.schedule,
            "paths": {name: path for path, name in names.items()},
            "assumptions": list(state.assumptions),
            "extra": {key: part for key, part in extra.items() if is_plain(part)},
            **{key: part for key, part in beside.items() if is_plain(part)},
        }
        return Encoded(tree, state.counts.updates, dropped=dropped)


def torch_name(path: str) -> str:
    """Returns the torch name of a path."""
    return path.replace("/", ".")


def _names(paths: Iterable[str]) -> Names:
    taken: dict[str, str] = {}
    faults = []
    for path in paths:
        if (other := taken.setdefault(torch_name(path), path)) != path:
            faults.append((f"has the torch name {torch_name(path)}, as has {other}", path))
    if faults:
        raise StateError(
            f"Parameters have the same name in torch: {len(faults)} pairs.",
            found=fault_list(faults),
            remedy="rename one of each pair",
        )
    return {path: name for name, path in taken.items()}


def _decoded(tree: Any, faults: list[tuple[str, str]]) -> TrainState | None:
    if not isinstance(tree, Mapping) or "optimizer" not in tree:
        faults.append(("there is none", "optimizer"))
        return None
    ours = tree.get("optimizer_class") in CLASSES.values()
    own = {key: tree[key] for key in _FORMS if ours and key in tree}
    model, optimizer = tree.get("model"), by_index(tree["optimizer"])
    faults += [("has another form", key) for key, part in own.items() if not isinstance(part, _FORMS[key])]
    if not isinstance(model, Mapping):
        faults.append(("there are no parameters", "model"))
    if faults or not isinstance(model, Mapping):
        return None
    stated = own.get("paths", {})
    known = {*moved_names(optimizer), *frozen_names(optimizer), *stated}
    paths = {name: str(stated.get(name, name.replace(".", "/"))) for name in model if name in known}
    params = {paths[name]: leaf for name, leaf in model.items() if name in paths}
    faults += [("is no tensor", f"model/{name}") for name in paths if not isinstance(model[name], Tensor)]
    faults += _collisions(paths)
    kind = _kind(optimizer["param_groups"][0], own, faults)
    found = decode_groups(optimizer, kind, paths, faults) if kind else Found()
    if kind is None or faults:
        return None
    buffers = {name: leaf for name, leaf in model.items() if name not in paths}
    beside = _beside(tree, own, found.updates)
    parts = {BUFFERS: buffers, GROUPS: list(found.others), BESIDE: beside}
    notes = [*own.get("assumptions", ()), *found.notes]
    if buffers and not ours:
        shown = ", ".join(list(buffers)[:_SHOWN]) + (" ..." if len(buffers) > _SHOWN else "")
        notes.append(f"Entries of model that stand in no parameter group are taken for buffers: {shown}.")
    return TrainState(
        params=params,
        slots=found.slots,
        optimizer=Optimizer(kind.schema, kind.variant, found.groups),
        counts=Counts(found.updates, own.get("schedule", found.updates), found.behind),
        rules=found.rules,
        extra={**own.get("extra", {}), **{key: part for key, part in parts.items() if any(part)}},
        assumptions=tuple(notes),
    )


def _kind(group: Mapping[str, Any], own: Mapping[str, Any], faults: list[tuple[str, str]]) -> Kind | None:
    """Returns whose state a file holds, by its first group; files from when there was only one name no schema."""
    schema = group.get("schema", "adafactor")
    variant = group.get("variant", own.get("variant", "t5x"))
    if schema not in CLASSES or (variant is not None and variant not in load_schema(schema).variants):
        faults.append((f"is of {schema!r:.80}, variant {variant!r:.80}", "optimizer/param_groups/0"))
        return None
    return Kind(schema, variant)


def _collisions(paths: Mapping[str, str]) -> list[tuple[str, str]]:
    first: dict[str, str] = {}
    return [
        (f"has the path {path}, as has {first[path]}", f"model/{name}")
        for name, path in paths.items()
        if first.setdefault(path, name) != name
    ]


def _beside(tree: Mapping[str, Any], own: Mapping[str, Any], updates: int) -> dict[str, Tree]:
    """Returns the user's own entries; `step` is one if it counts something else than updates."""
    rest = {key: part for key, part in tree.items() if key not in ("model", "optimizer", *own)}
    if integer(rest.get("step")) == updates:
        del rest["step"]
    return rest


def is_plain(part: Tree) -> bool:
    """Tells whether a file that loads with weights_only can hold a part."""
    return not holds_records(part) and all(
        isinstance(leaf, _PLAIN) or leaf in ({}, [], ()) for _, leaf in walk(part)
    )


def _leaf_names(key: str, part: Tree) -> Iterable[str]:
    return ["/".join(map(str, ("extra", key, *path))) for path, _ in walk(part)]


LAYOUT = StatekitTorch()
