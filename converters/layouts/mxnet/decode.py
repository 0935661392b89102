"""MXNet's files on their way to a state: names for indices, counts, hyperparameters, and what stays beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from statekit.conversion.contracts import Hints
from statekit.converters.layouts.mxnet.attributes import (
    ARGUMENTS,
    BY_DEVICE,
    CURRENT,
    MULTIPLIERS,
    attribute_faults,
    read_counts,
)
from statekit.converters.layouts.mxnet.kinds import (
    COUNT,
    FIRST_RELEASE,
    HOME,
    Kind,
    bare,
    name_of,
    parts,
    path_of,
    usual_index,
)
from statekit.converters.layouts.mxnet.order import Numbered, numbered
from statekit.errors import StateError, fault_list
from statekit.files.checkpoint import Checkpoint
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, KnownFrom, Optimizer, TrainState
from statekit.tensors.tensor import Shape
from statekit.tensors.tree import Record

_SHOWN = 20


class Reading:
    """A checkpoint on its way to a state."""

    def __init__(self, kind: Kind, checkpoint: Checkpoint, hints: Hints) -> None:
        tree = checkpoint.tree
        self.kind, self.hints, self.faults = kind, hints, list[tuple[str, str]]()
        self.schema, self.place = load_schema(kind.schema), checkpoint.path
        optimizer = tree.get("optimizer")
        held = optimizer.state if isinstance(optimizer, Record) else {}
        self.attributes: dict[str, Any] = dict(held) if isinstance(held, Mapping) else {}
        self.cls = optimizer.name if isinstance(optimizer, Record) else None
        self.files = tree["files"]
        device = self.files.get("states", {}).get("device", [1])[0]
        self.variant = hints.variant or kind.variant_of(self.attributes, device)
        self.native = {path_of(bare(name)): name for name in tree["params"]}
        self.params = {path: tree["params"][native] for path, native in self.native.items()}
        if len(self.params) != len(tree["params"]):
            self.faults.append(("have the same path", "parameters"))
        self.states = {index: parts(own) for index, own in tree["states"].items()}
        self.faults += [
            ("isn't (mean, var), nor that beside a weight", f"states/{index}")
            for index, own in self.states.items()
            if own is None
        ]
        self.offered = self.schema.native(kind.makers[0], dict.fromkeys(self.schema.hyperparameters, 0))
        self.faults += attribute_faults(self.attributes, self.offered)
        self.refuse()
        self.counted = read_counts(self.attributes)
        self.order = self._order()
        self.paths = {
            index: path_of(name) for index, name in self.order.names.items() if path_of(name) in self.params
        }
        self.factors = {name: self._by_path(self.attributes.get(name, {})) for name in MULTIPLIERS}

    def refuse(self) -> None:
        """Raises StateError if there are faults."""
        if self.faults:
            raise StateError(
                f"The files don't make a state of {self.kind.cls}: {len(self.faults)} faults.",
                place=self.place,
                found=fault_list(self.faults[:_SHOWN]),
            )

    def _order(self) -> Numbered:
        shapes: dict[Any, Shape | None] = {
            i: own["m"].shape if own else None for i, own in self.states.items()
        }
        told = self.attributes.get("idx2name", {}).items()
        names = {i: bare(name) for i, name in told if isinstance(name, str)}
        given = self.hints.param_names
        by_path = {path: bare(native) for path, native in self.native.items()}
        return numbered(
            shapes,
            {bare(self.native[path]): tensor.shape for path, tensor in self.params.items()},
            names if len(set(names.values())) == len(names) else {},
            None if given is None else [by_path.get(path_of(name), name) for name in given],
            (self.cls or "").startswith(FIRST_RELEASE),
        )

    def state(self) -> TrainState:
        """Returns the state."""
        slots = {self.paths[index]: own for index, own in self.states.items() if own is not None}
        counts, hints = self._counts()
        # Before its first update an optimizer has no states; from then on who has none is frozen.
        moved = list(slots) if slots else list(dict.fromkeys(self.paths.values()))
        return hints.applied(
            TrainState(
                self.params,
                slots,
                Optimizer(self.kind.schema, self.variant, tuple(self._groups(moved))),
                counts,
                extra={HOME: self._home()},
                assumptions=tuple(self._assumptions()),
            )
        )

    def _counts(self) -> tuple[Counts, Hints]:
        hints, begin = self.hints, self.attributes.get(COUNT, 0)
        if self.cls is None:
            told = dict(hints.hyperparameters)
            updates = told.pop(COUNT, 0)
            return Counts(updates, updates), replace(hints, hyperparameters=told)
        done = {self.paths[i]: n - begin for i, n in self.counted.counts.items() if i in self.paths}
        updates = max(done.values(), default=0)
        behind = {path: n for path, n in done.items() if n != updates}
        behind |= {self.paths[i]: 0 for i in self.states if done and self.paths[i] not in done}
        return Counts(updates, self.attributes.get("num_update", begin + updates), behind), hints

    def _groups(self, moved: Sequence[str]) -> Iterator[Group]:
        """Yields the groups: one; where the schema has no multipliers, one for each pair of them."""
        values, known = self._hyperparameters()
        if self._has_multipliers:
            yield Group(tuple(moved), values, known)
            return
        rates, decays = (self.factors[name] for name in MULTIPLIERS)
        members: dict[tuple[float, float], list[str]] = {}
        for path in moved:
            members.setdefault((rates.get(path, 1.0), decays.get(path, 1.0)), []).append(path)
        for (rate, decay), paths in members.items():
            own = {"learning_rate": rate, self.kind.decay: decay}
            scaled = {name: values[name] * own[name] for name in own if values.get(name) is not None}
            yield Group(tuple(paths), {**values, **scaled}, known)

    @property
    def _has_multipliers(self) -> bool:
        return MULTIPLIERS[0] in self.schema.hyperparameters

    def _hyperparameters(self) -> tuple[dict[str, Any], dict[str, KnownFrom]]:
        arguments = {ARGUMENTS.get(name, name): value for name, value in self.attributes.items()}
        if arguments.get("lr_scheduler") is not None:
            arguments.pop("learning_rate", None)
        values = self.schema.canonical(self.variant or self.kind.makers[0], arguments)
        if self.variant is None:
            values.pop("use_fused_step", None)
        known: dict[str, KnownFrom] = dict.fromkeys(values, "file")
        for name, factors in self.factors.items():
            if name in values:
                values[name] = factors
                known[name] = "file" if factors else "assumed"
        return values, known

    def _by_path(self, factors: Mapping[Any, float]) -> dict[str, float]:
        """Returns multipliers by path: they stand by index or by name."""
        names = {**self.order.names, **{name: name for name in self.order.names.values()}}
        found = {path_of(names.get(key, str(key))): value for key, value in factors.items()}
        return {path: value for path, value in found.items() if path in self.params}

    def _home(self) -> dict[str, Any]:
        taken = {*self.offered, *MULTIPLIERS, BY_DEVICE, CURRENT, "num_update", "use_fused_step"}
        scheduled = self.attributes.get("lr_scheduler") is not None
        rest = {
            name: value
            for name, value in self.attributes.items()
            if ARGUMENTS.get(name, name) not in taken or (name == "lr" and scheduled)
        }
        order = list(self.counted.counts)
        index = {path: i for i, path in self.paths.items()}
        usual = usual_index(self.native)
        found: dict[str, Any] = {
            "optimizer": self.cls,
            "attributes": rest,
            "factors": {} if self._has_multipliers else {n: own for n, own in self.factors.items() if own},
            "names": {path: name for path, name in self.native.items() if name != name_of(path)},
            "index": {} if index == usual else index,
            "counted": [] if order == list(self.states) else order,
            "devices": list(self.counted.devices),
            "current": self.counted.current,
            "apart": {device: dict(held) for device, held in self.counted.apart.items()},
            "files": self.files,
        }
        return {key: value for key, value in found.items() if key == "optimizer" or value}

    def _assumptions(self) -> Iterator[str]:
        if self.order.note:
            yield self.order.note
        if self.variant is None:
            yield f"The file doesn't say which variant ran: {', '.join(self.kind.makers)}. Name it with --variant."
        if self.cls is None:
            if COUNT not in self.hints.hyperparameters:
                yield f"The file holds no counts of updates: 0 are assumed. Give --hparams {COUNT}=<updates>."
            return
        if self.attributes.get("lr_scheduler") is not None:
            yield "The learning rate follows a schedule in the file, which statekit keeps and doesn't run."
        if not any(self.attributes.get(name) for name in MULTIPLIERS):
            yield "Multipliers of a Trainer's parameters are in no file of MXNet; 1 is assumed."
        if any(held for held in self.counted.apart.values()):
            yield "Devices have counted different updates; those of the first are taken."
