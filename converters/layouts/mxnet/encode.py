"""A state on its way to MXNet's files: indices for names, one optimizer for all groups, counts by device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statekit.converters.layouts.mxnet.attributes import (
    ARGUMENTS,
    BASE,
    MULTIPLIERS,
    Counted,
    shared_value,
    written_counts,
)
from statekit.converters.layouts.mxnet.kinds import (
    COUNT,
    FIRST_RELEASE,
    HOME,
    Kind,
    bare,
    name_of,
    usual_index,
)
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Record


class Writing:
    """A state on its way to MXNet's files."""

    def __init__(self, kind: Kind, state: TrainState) -> None:
        self.kind, self.state, self.faults = kind, state, list[tuple[str, str]]()
        home = state.extra.get(HOME)
        self.home: Mapping[str, Any] = home if isinstance(home, Mapping) else {}
        names = self.home.get("names", {})
        self.names = {path: names.get(path) or name_of(path) for path in state.params}
        self.bare = {path: bare(name) for path, name in self.names.items()}
        self.index: Mapping[str, Any] = self.home.get("index") or usual_index(self.names)

    def tree(self) -> dict[str, Any]:
        """Returns the tree of both files."""
        state = self.state
        states = {self.index[path]: self._own(path, own) for path, own in state.slots.items() if own}
        tree: dict[str, Any] = {
            "params": {self.names[path]: tensor for path, tensor in state.params.items()},
            "states": states,
        }
        if self.home.get("optimizer", "") is not None:
            cls = self.home.get("optimizer") or self.kind.cls
            tree["optimizer"] = Record(cls, (), self._attributes(list(states), cls))
        return {**tree, "files": self.home.get("files", {})}

    def _own(self, path: str, own: Mapping[str, Tensor]) -> Any:
        param = self.state.params[path]
        unknown = [name for name in own if name not in ("m", "v", "master")]
        missing = [name for name in ("m", "v") if name not in own]
        if unknown or missing:
            self.faults.append((f"has slots {', '.join(own)}, expected m, v and perhaps master", path))
            return None
        if "master" in own:
            if param.dtype.name != "float16":
                self.faults.append(
                    (f"is {param.dtype}; MXNet keeps a float32 weight beside float16 only", path)
                )
            return (own["master"], (own["m"], own["v"]))
        if param.dtype.name not in self.kind.dtypes:
            self.faults.append((f"is {param.dtype} without a float32 weight beside it", path))
        wanted = "float32" if self.kind.dtypes == ("float32",) else param.dtype.name
        self.faults += [
            (f"slot {name} is {own[name].dtype}, expected {wanted}", path)
            for name in ("m", "v")
            if own[name].dtype.name != wanted
        ]
        return (own["m"], own["v"])

    def _attributes(self, written: list[Any], cls: str) -> dict[str, Any]:
        kind = self.kind
        schema, variant = load_schema(kind.schema), self.state.optimizer.variant
        form = variant if variant in kind.makers else kind.makers[0]
        offered = {**schema.variant(form)["defaults"], "learning_rate": None} | self._settings()
        arguments = schema.native(form, offered)
        arguments |= {name: self._by_index(offered.get(name, {})) for name in MULTIPLIERS}
        attributes = {next((a for a, n in ARGUMENTS.items() if n == k), k): v for k, v in arguments.items()}
        begin = int(attributes.get(COUNT, 0))
        counts, counted = self.state.counts, self.home.get("counted") or written
        done = {i: begin + counts.behind.get(p, counts.updates) for p, i in self.index.items()}
        own = Counted(
            {index: done[index] for index in counted if index in done and counts.updates},
            tuple(self.home.get("devices", (0,))),
            self.home.get("current", 0),
            self.home.get("apart", {}),
        )
        masters = any("master" in slots for slots in self.state.slots.values())
        found = {**BASE, **kind.own, **attributes, **self.home.get("attributes", {}), **written_counts(own)}
        found |= {
            "wd": found["wd"] or 0.0,
            "num_update": max(begin + counts.updates, counts.schedule),
            "multi_precision": masters or found["multi_precision"],
            "use_fused_step": form != kind.unfused,
        }
        if variant is None and cls.startswith(FIRST_RELEASE):
            del found["use_fused_step"]
        return found

    def _settings(self) -> dict[str, Any]:
        """Returns one set of hyperparameters for all groups, with multipliers by path."""
        groups = self.state.optimizer.groups
        apart = {"lr_mult": "learning_rate", "wd_mult": self.kind.decay}
        skipped = {*apart, *apart.values()}
        settings = [{n: v for n, v in g.hyperparameters.items() if n not in skipped} for g in groups]
        if any(own != settings[0] for own in settings):
            self.faults.append(("have different hyperparameters; MXNet's optimizer has one set", "groups"))
        found = dict(settings[0]) if settings else {}
        for name, of in apart.items():
            values = {path: g.hyperparameters.get(of) for g in groups for path in g.paths}
            own = {p: f for g in groups for p, f in g.hyperparameters.get(name, {}).items()}
            shared = shared_value(values, self.home.get("factors", {}).get(name, {}))
            if shared is None:
                self.faults.append((f"have values of {of} that no multipliers make of one", "groups"))
                continue
            base, factors = shared
            found |= {} if base is None and of != "learning_rate" else {of: base}
            found[name] = {p: own.get(p, 1.0) * factors.get(p, 1.0) for p in {**own, **factors}}
        return found

    def _by_index(self, factors: Mapping[str, float]) -> dict[Any, float]:
        """Returns multipliers by name where the optimizer holds names, else by index."""
        known = self.home.get("attributes", {}).get("idx2name", {})
        index = {path: self.index[path] for path in factors if path in self.index}
        return {self.bare[p] if known.get(i) == self.bare[p] else i: factors[p] for p, i in index.items()}
