"""The layouts of MXNet's optimizers: LANS, LAMB and Adam as a Trainer and an Updater save them.

    mxnet-lans  mxnet-lamb  mxnet-adam

The state of an index is (mean, var), beside the float32 weight where a float16 parameter has one. The optimizer stands
beside the states with all its attributes, unless only states were saved: then nothing tells whose they are, nor how
many updates there were. Multipliers of a Trainer's parameters are in no file.

Source: apache/mxnet, python/mxnet/optimizer/{lans,lamb,adam}.py, `create_state`; optimizer.py,
`create_state_multi_precision`, `__getstate__`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from statekit.checkpoint import Checkpoint
from statekit.converters.layouts.mxnet_attributes import (
    ARGUMENTS,
    BASE,
    BY_DEVICE,
    CURRENT,
    MULTIPLIERS,
    Counted,
    read_counts,
    written_counts,
)
from statekit.converters.layouts.mxnet_order import Numbered, numbered
from statekit.converters.layouts.unplaced import unplaced
from statekit.errors import InexactError, StateError, fault_list
from statekit.format import Encoded, Evidence, Hints
from statekit.schema import load_schema
from statekit.state import Counts, Group, KnownFrom, Optimizer, TrainState
from statekit.tensor import Shape, Tensor
from statekit.tree import Record

HOME = "mxnet"
"""Key in `extra`: what MXNet's files hold besides."""
_PREFIXES = ("arg:", "aux:")
_FIRST_RELEASE = "mxnet.optimizer.optimizer."
_GPU = 2
_SHOWN = 20
_COUNT = "begin_num_update"


@dataclass(frozen=True)
class MXNetOptim:
    """One optimizer of MXNet.

    Attributes:
        name: The name for `--layout`.
        title: One line for people.
        schema: The optimizer.
        cls: Its class.
        own: Attributes that only this optimizer has, in their order.
        fused: The variant of the fused kernels, on CPU and on GPU.
        unfused: The variant of the path in Python.
        dtypes: Of parameters that move without a master.
    """

    name: str
    title: str
    schema: str
    cls: str
    own: Mapping[str, Any]
    fused: tuple[str, str]
    unfused: str
    dtypes: tuple[str, ...] = ("float32",)
    containers: tuple[str, ...] = ("mxnet",)

    @property
    def makers(self) -> tuple[str, ...]:
        """The variants that it may be, the usual one first."""
        return tuple(dict.fromkeys((self.fused[0], self.unfused, self.fused[1])))

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:
        """The schema's variants that it may be."""
        return {self.schema: self.makers}

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at the optimizer's class; states alone may be any optimizer's that keeps a mean and a variance."""
        tree = checkpoint.tree
        if not isinstance(tree, Mapping) or "states" not in tree or checkpoint.container != "mxnet":
            return None
        optimizer = tree.get("optimizer")
        if optimizer is None:
            fits = tree["states"] and all(_parts(own) is not None for own in tree["states"].values())
            return Evidence(15, "pairs of states, and no optimizer that says whose") if fits else None
        is_own = optimizer.name.startswith("mxnet.") and optimizer.name.rpartition(".")[2] == self._word
        return Evidence(20, f"an optimizer of {optimizer.name}") if is_own else None

    @property
    def _word(self) -> str:
        return self.cls.rpartition(".")[2]

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the canonical state.

        Of states alone, the hint `begin_num_update` says how many updates there were.

        Raises:
            StateError: Nothing tells which parameters are meant, or shapes break the layout; lists every fault.
            UsageError: A hint that the schema doesn't know.
        """
        tree = checkpoint.tree
        if not isinstance(tree, Mapping) or not tree.get("params"):
            raise StateError(
                "MXNet's states lie alone: without parameters they are no state of a run.",
                place=checkpoint.path,
                remedy="put the .params file of the same step into the folder",
            )
        reading = _Reading(self, checkpoint, hints)
        if reading.faults:
            raise StateError(
                f"The files don't make a state of {self.title}: {len(reading.faults)} faults.",
                place=checkpoint.path,
                found=fault_list(reading.faults[:_SHOWN]),
            )
        return reading.state()

    def variant_of(self, attributes: Mapping[str, Any], device: int) -> str | None:
        """Returns the variant that a pickled optimizer was; None if it doesn't say."""
        is_fused = attributes.get("use_fused_step")
        if not isinstance(is_fused, bool):
            return None
        return self.fused[device == _GPU] if is_fused else self.unfused

    def encode(self, state: TrainState) -> Encoded:
        """Returns the tree of both files.

        Raises:
            InexactError: The layout can't hold the state; lists every reason.
        """
        if state.optimizer.schema != self.schema:
            raise InexactError(
                f"The layout {self.name} holds the state of {self.schema} only.",
                expected=self.schema,
                found=state.optimizer.schema,
            )
        writing = _Writing(self, state)
        tree = writing.tree()
        if writing.faults:
            raise InexactError(
                f"{self.title} can't hold the state: {len(writing.faults)} faults.",
                found=fault_list(writing.faults[:_SHOWN]),
            )
        return Encoded(tree, state.counts.updates, dropped=unplaced(state.extra, (HOME,), "MXNet"))


class _Reading:
    """A checkpoint on its way to a state."""

    def __init__(self, layout: MXNetOptim, checkpoint: Checkpoint, hints: Hints) -> None:
        tree = checkpoint.tree
        self.layout, self.hints, self.faults = layout, hints, list[tuple[str, str]]()
        optimizer = tree.get("optimizer")
        held = optimizer.state if isinstance(optimizer, Record) else {}
        self.attributes: dict[str, Any] = dict(held) if isinstance(held, Mapping) else {}
        self.cls = optimizer.name if isinstance(optimizer, Record) else None
        self.files = tree["files"]
        device = self.files.get("states", {}).get("device", [1])[0]
        self.variant = hints.variant or layout.variant_of(self.attributes, device)
        bare = {_bare(name): name for name in tree["params"]}
        self.native = {_path(name): native for name, native in bare.items()}
        self.params = {path: tree["params"][native] for path, native in self.native.items()}
        if len(self.params) != len(tree["params"]):
            self.faults.append(("have the same path", "parameters"))
        self.states = {index: _parts(own) for index, own in tree["states"].items()}
        self.faults += [
            ("isn't (mean, var), nor that beside a weight", f"states/{index}")
            for index, own in self.states.items()
            if own is None
        ]
        self.counted = read_counts(self.attributes)
        self.order = self._order()
        self.paths = {
            index: _path(name) for index, name in self.order.names.items() if _path(name) in self.params
        }

    def _order(self) -> Numbered:
        shapes: dict[Any, Shape | None] = {
            i: own["m"].shape if own else None for i, own in self.states.items()
        }
        told = self.attributes.get("idx2name", {})
        names = {i: _bare(name) for i, name in told.items() if isinstance(name, str)}
        given = self.hints.param_names
        by_path = {path: _bare(native) for path, native in self.native.items()}
        return numbered(
            shapes,
            {_bare(self.native[path]): tensor.shape for path, tensor in self.params.items()},
            names if len(set(names.values())) == len(names) else {},
            None if given is None else [by_path.get(_path(name), name) for name in given],
            (self.cls or "").startswith(_FIRST_RELEASE),
        )

    def state(self) -> TrainState:
        """Returns the state."""
        slots = {self.paths[index]: own for index, own in self.states.items() if own is not None}
        counts, hints = self._counts()
        # Before its first update an optimizer has no states; from then on who has none is frozen.
        moved = list(slots) if slots else list(dict.fromkeys(self.paths.values()))
        values, known = self._hyperparameters()
        group = Group(tuple(moved), values, known)
        return hints.applied(
            TrainState(
                self.params,
                slots,
                Optimizer(self.layout.schema, self.variant, (group,)),
                counts,
                extra={HOME: self._home()},
                assumptions=tuple(self._assumptions()),
            )
        )

    def _counts(self) -> tuple[Counts, Hints]:
        hints, begin = self.hints, self.attributes.get(_COUNT, 0)
        if self.cls is None:
            told = dict(hints.hyperparameters)
            updates = told.pop(_COUNT, 0)
            return Counts(updates, updates), replace(hints, hyperparameters=told)
        done = {self.paths[i]: n - begin for i, n in self.counted.counts.items() if i in self.paths}
        updates = max(done.values(), default=0)
        behind = {path: n for path, n in done.items() if n != updates}
        behind |= {self.paths[i]: 0 for i in self.states if done and self.paths[i] not in done}
        return Counts(updates, self.attributes.get("num_update", begin + updates), behind), hints

    def _hyperparameters(self) -> tuple[dict[str, Any], dict[str, KnownFrom]]:
        schema, variant = load_schema(self.layout.schema), self.variant or self.layout.makers[0]
        arguments = {ARGUMENTS.get(name, name): value for name, value in self.attributes.items()}
        if arguments.get("lr_scheduler") is not None:
            del arguments["learning_rate"]
        values = schema.canonical(variant, arguments)
        if self.variant is None:
            values.pop("use_fused_step", None)
        known: dict[str, KnownFrom] = dict.fromkeys(values, "file")
        for name in MULTIPLIERS:
            if name in values:
                values[name] = self._by_path(values[name])
                known[name] = "file" if values[name] else "assumed"
        return values, known

    def _by_path(self, factors: Mapping[Any, float]) -> dict[str, float]:
        """Returns multipliers by path: they stand by index or by name."""
        names = {**self.order.names, **{name: name for name in self.order.names.values()}}
        found = {_path(names.get(key, str(key))): value for key, value in factors.items()}
        return {path: value for path, value in found.items() if path in self.params}

    def _home(self) -> dict[str, Any]:
        schema = load_schema(self.layout.schema)
        offered = schema.native(self.layout.makers[0], dict.fromkeys(schema.hyperparameters, 0))
        taken = {*offered, BY_DEVICE, CURRENT, "num_update", "use_fused_step"}
        scheduled = self.attributes.get("lr_scheduler") is not None
        rest = {
            name: value
            for name, value in self.attributes.items()
            if ARGUMENTS.get(name, name) not in taken or (name == "lr" and scheduled)
        }
        order = list(self.counted.counts)
        index = {path: i for i, path in self.paths.items()}
        usual = _usual_index(self.native)
        found: dict[str, Any] = {
            "optimizer": self.cls,
            "attributes": rest,
            "names": {path: name for path, name in self.native.items() if name != _name(path)},
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
            yield f"The file doesn't say which variant ran: {', '.join(self.layout.makers)}. Name it with --variant."
        if self.cls is None:
            if _COUNT not in self.hints.hyperparameters:
                yield f"The file holds no counts of updates: 0 are assumed. Give --hparams {_COUNT}=<updates>."
            return
        if self.attributes.get("lr_scheduler") is not None:
            yield "The learning rate follows a schedule in the file, which statekit keeps and doesn't run."
        if not any(self.attributes.get(name) for name in MULTIPLIERS):
            yield "Multipliers of a Trainer's parameters are in no file of MXNet; 1 is assumed."
        if any(held for held in self.counted.apart.values()):
            yield "Devices have counted different updates; those of the first are taken."


class _Writing:
    """A state on its way to MXNet's files."""

    def __init__(self, layout: MXNetOptim, state: TrainState) -> None:
        self.layout, self.state, self.faults = layout, state, list[tuple[str, str]]()
        home = state.extra.get(HOME)
        self.home: Mapping[str, Any] = home if isinstance(home, Mapping) else {}
        names = self.home.get("names", {})
        self.names = {path: names.get(path) or _name(path) for path in state.params}
        self.bare = {path: _bare(name) for path, name in self.names.items()}
        self.index: Mapping[str, Any] = self.home.get("index") or _usual_index(self.names)

    def tree(self) -> dict[str, Any]:
        """Returns the tree of both files."""
        state = self.state
        states = {self.index[path]: self._own(path, own) for path, own in state.slots.items() if own}
        tree: dict[str, Any] = {
            "params": {self.names[path]: tensor for path, tensor in state.params.items()},
            "states": states,
        }
        if self.home.get("optimizer", "") is not None:
            cls = self.home.get("optimizer") or self.layout.cls
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
        if param.dtype.name not in self.layout.dtypes:
            self.faults.append((f"is {param.dtype} without a float32 weight beside it", path))
        wanted = "float32" if self.layout.dtypes == ("float32",) else param.dtype.name
        self.faults += [
            (f"slot {name} is {own[name].dtype}, expected {wanted}", path)
            for name in ("m", "v")
            if own[name].dtype.name != wanted
        ]
        return (own["m"], own["v"])

    def _attributes(self, written: list[Any], cls: str) -> dict[str, Any]:
        layout, groups = self.layout, self.state.optimizer.groups
        values = dict(groups[0].hyperparameters) if groups else {}
        if any(dict(group.hyperparameters) != values for group in groups):
            self.faults.append(("have different hyperparameters; MXNet's optimizer has one set", "groups"))
        schema, variant = load_schema(layout.schema), self.state.optimizer.variant
        form = variant if variant in layout.makers else layout.makers[0]
        offered = {**schema.variant(form)["defaults"], "learning_rate": None} | values
        arguments = schema.native(form, offered)
        for name in MULTIPLIERS:
            if name in arguments:
                arguments[name] = self._by_index(arguments[name])
        attributes = {next((a for a, n in ARGUMENTS.items() if n == k), k): v for k, v in arguments.items()}
        begin = int(attributes.get(_COUNT, 0))
        counts, counted = self.state.counts, self.home.get("counted") or written
        done = {i: begin + counts.behind.get(p, counts.updates) for p, i in self.index.items()}
        own = Counted(
            {index: done[index] for index in counted if index in done and counts.updates},
            tuple(self.home.get("devices", (0,))),
            self.home.get("current", 0),
            self.home.get("apart", {}),
        )
        masters = any("master" in slots for slots in self.state.slots.values())
        found = {**BASE, **layout.own, **attributes, **self.home.get("attributes", {}), **written_counts(own)}
        found |= {
            "wd": found["wd"] or 0.0,
            "num_update": max(begin + counts.updates, counts.schedule),
            "multi_precision": masters or found["multi_precision"],
            "use_fused_step": form != layout.unfused,
        }
        if variant is None and cls.startswith(_FIRST_RELEASE):
            del found["use_fused_step"]
        return found

    def _by_index(self, factors: Mapping[str, float]) -> dict[Any, float]:
        """Returns multipliers by name where the optimizer holds names, else by index."""
        known = self.home.get("attributes", {}).get("idx2name", {})
        index = {path: self.index[path] for path in factors if path in self.index}
        return {self.bare[p] if known.get(i) == self.bare[p] else i: factors[p] for p, i in index.items()}


def _parts(own: Any) -> dict[str, Tensor] | None:
    """Returns the state of an index by canonical slot; None if it isn't (mean, var) or that beside a weight."""
    if not isinstance(own, (list, tuple)) or len(own) != 2:
        return None
    first, rest = own
    if isinstance(rest, (list, tuple)) and len(rest) == 2:
        found = {"master": first, "m": rest[0], "v": rest[1]}
    else:
        found = {"m": first, "v": rest}
    return found if all(isinstance(part, Tensor) for part in found.values()) else None


def _usual_index(names: Mapping[str, str]) -> dict[str, Any]:
    """Returns path -> index as a Trainer of all parameters numbers them."""
    return {path: i for i, path in enumerate(sorted(names, key=lambda path: _bare(names[path])))}


def _bare(name: str) -> str:
    return name[len(_PREFIXES[0]) :] if name.startswith(_PREFIXES) else name


def _path(name: str) -> str:
    return name.replace(".", "/")


def _name(path: str) -> str:
    return path.replace("/", ".")


_MOMENTS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-06}
_BOUNDS = {"lower_bound": None, "upper_bound": None}


LANS = MXNetOptim(
    "mxnet-lans", "MXNet's LANS", "lans", "mxnet.optimizer.lans.LANS", {**_MOMENTS, **_BOUNDS},
    ("mxnet_fused", "mxnet_gpu"), "mxnet_unfused",
)  # fmt: skip
LAMB = MXNetOptim(
    "mxnet-lamb", "MXNet's LAMB", "lamb", "mxnet.optimizer.lamb.LAMB",
    {**_MOMENTS, **_BOUNDS, "bias_correction": True}, ("mxnet_fused", "mxnet_fused"), "mxnet_unfused",
)  # fmt: skip
ADAM = MXNetOptim(
    "mxnet-adam", "MXNet's Adam", "adamw", "mxnet.optimizer.adam.Adam",
    {"lazy_update": False, **_MOMENTS, "epsilon": 1e-08}, ("mxnet_fused", "mxnet_fused"), "mxnet_unfused",
    ("float32", "float16", "float64"),
)  # fmt: skip
