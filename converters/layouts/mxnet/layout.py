"""The layouts of MXNet's optimizers: LANS, LAMB and Adam as a Trainer and an Updater save them.

    mxnet-lans  mxnet-lamb  mxnet-adam

The state of an index is (mean, var), beside the float32 weight where a float16 parameter has one. The optimizer stands
beside the states with all its attributes, unless only states were saved: then nothing tells whose they are, nor how
many updates there were. Multipliers of a Trainer's parameters are in no file.

Source: apache/mxnet, python/mxnet/optimizer/{lans,lamb,adam}.py, `create_state`; optimizer.py,
`create_state_multi_precision`, `__getstate__`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, dropped_from
from statekit.converters.layouts.mxnet.attributes import (
    ARGUMENTS,
    BASE,
    BY_DEVICE,
    CURRENT,
    MULTIPLIERS,
    Counted,
    attribute_faults,
    read_counts,
    shared_value,
    written_counts,
)
from statekit.converters.layouts.mxnet.lines import trainer_lines
from statekit.converters.layouts.mxnet.order import Numbered, numbered
from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.evidence import COUNT
from statekit.state.schema import load_schema
from statekit.state.stored_params import MASTER
from statekit.state.train_state import Counts, Group, KnownFrom, Optimizer, TrainState
from statekit.tensors.tensor import DTYPES, Cast, Shape, Tensor
from statekit.tensors.tree import Record
from statekit.tensors.typed import Name, Natural, fits, typed

HOME = "mxnet"
"""Key in `extra`: what MXNet's files hold besides."""
FIRST_RELEASE = "mxnet.optimizer.optimizer."
"""Where MXNet 1 has the classes of its optimizers."""
BEGIN = "begin_num_update"
_PREFIXES = ("arg:", "aux:")
_GPU = 2


@dataclass(frozen=True)
class MXNetOptimizer:
    """One optimizer.

    Attributes:
        schema: Its schema.
        cls: Its class.
        attributes: Those that only this optimizer has, in their order.
        fused: The variant of the fused kernels, on CPU and on GPU.
        unfused: The variant of the path in Python.
        decay: What the schema calls the rate of weight decay.
        dtypes: Of parameters that move without a master.
    """

    schema: str
    cls: str
    attributes: Mapping[str, Any]
    fused: tuple[str, str]
    unfused: str
    decay: str = "weight_decay_rate"
    dtypes: tuple[str, ...] = ("float32",)

    @property
    def makers(self) -> tuple[str, ...]:
        """The variants that it may be, the usual one first."""
        return tuple(dict.fromkeys((self.fused[0], self.unfused, self.fused[1])))

    def variant_of(self, attributes: Mapping[str, Any], device: int) -> str | None:
        """Returns the variant that a pickled optimizer was; None if it doesn't say."""
        is_fused = attributes.get("use_fused_step")
        if not isinstance(is_fused, bool):
            return None
        return self.fused[device == _GPU] if is_fused else self.unfused


def parts(entry: Any) -> dict[str, Tensor] | None:
    """Returns the state of an index by canonical slot; None if it isn't (mean, var) or that beside a weight."""
    if not isinstance(entry, (list, tuple)) or len(entry) != 2:
        return None
    first, rest = entry
    if isinstance(rest, (list, tuple)) and len(rest) == 2:
        slots = {MASTER: first, "m": rest[0], "v": rest[1]}
    else:
        slots = {"m": first, "v": rest}
    return slots if all(isinstance(part, Tensor) for part in slots.values()) else None


def usual_index(names: Mapping[str, str]) -> dict[str, Any]:
    """Returns path -> index as a Trainer of all parameters numbers them."""
    return {path: i for i, path in enumerate(sorted(names, key=lambda path: bare(names[path])))}


def bare(name: str) -> str:
    """Returns a name without what a Module puts before it."""
    return name[len(_PREFIXES[0]) :] if name.startswith(_PREFIXES) else name


def path_of(name: str) -> str:
    """Returns the path of a parameter's name."""
    return name.replace(".", "/")


def name_of(path: str) -> str:
    """Returns the name that Gluon gives the parameter of a path."""
    return path.replace("/", ".")


class Written(TypedDict, total=False):
    """How a file is written."""

    name: Name
    form: Literal["npz", "list", "npy"]
    generation: Natural
    device: Sequence[int]


class WrittenFiles(TypedDict, total=False):
    """How both files are written."""

    params: Written
    states: Written


class Trained(TypedDict):
    """What a file of states holds."""

    states: dict[int | Name, Any]
    optimizer: NotRequired[Record]


class Files(Trained):
    """What both files hold."""

    params: dict[Name, Tensor]
    files: WrittenFiles


class MXNetReading:
    """A checkpoint on its way to a state."""

    def __init__(self, kind: MXNetOptimizer, checkpoint: Checkpoint, hints: CheckpointRef) -> None:
        tree = typed(
            checkpoint.tree, Files, checkpoint.path, "These aren't files of MXNet's trainer", StateError
        )
        self.kind, self.hints, self.faults = kind, hints, Faults()
        self.schema, self.place = load_schema(kind.schema), checkpoint.path
        optimizer = tree.get("optimizer")
        record = optimizer.state if optimizer else {}
        subject = "The optimizer has no attributes by name"
        self.attributes: dict[str, Any] = {
            **typed(record, dict[Name, Any], checkpoint.path, subject, StateError)
        }
        self.cls = optimizer.name if optimizer else None
        self.files = tree["files"]
        device = self.files.get("states", {}).get("device", [1])[0]
        self.variant = hints.variant or kind.variant_of(self.attributes, device)
        self.native = {path_of(bare(name)): name for name in tree["params"]}
        self.params = {path: tree["params"][native] for path, native in self.native.items()}
        if len(self.params) != len(tree["params"]):
            self.faults.add("have the same path", "parameters")
        self.states = {index: parts(entry) for index, entry in tree["states"].items()}
        self.faults += [
            ("isn't (mean, var), nor that beside a weight", f"states/{index}")
            for index, slots in self.states.items()
            if slots is None
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
        self.faults.check(StateError, f"The files don't make a state of {self.kind.cls}", place=self.place)

    def _order(self) -> Numbered:
        shapes: dict[Any, Shape | None] = {
            i: slots["m"].shape if slots else None for i, slots in self.states.items()
        }
        by_optimizer = self.attributes.get("idx2name", {}).items()
        names = {i: bare(name) for i, name in by_optimizer if isinstance(name, str)}
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
        slots = {
            self.paths[index]: param_slots
            for index, param_slots in self.states.items()
            if param_slots is not None
        }
        # Before its first update an optimizer has no states; from then on who has none is frozen.
        moved = list(slots) if slots else list(dict.fromkeys(self.paths.values()))
        state = TrainState(
            self.params,
            slots,
            Optimizer(self.kind.schema, self.variant, tuple(self._groups(moved))),
            self._counts(),
            extra={HOME: self._home()},
            assumptions=tuple(self._assumptions()),
        )
        return self.hints.applied(state.with_facts(lambda facts: [*facts, *self.order.facts]))

    def _counts(self) -> Counts:
        begin = self.attributes.get(BEGIN, 0)
        if self.cls is None:
            return Counts(0, 0, says_schedule=False, says_updates=False)
        early = {i: n for i, n in self.counted.counts.items() if n < begin}
        self.faults += [
            (f"has a count of {n}, and {BEGIN} is {begin}", f"index {i}") for i, n in early.items()
        ]
        self.refuse()
        done = {self.paths[i]: n - begin for i, n in self.counted.counts.items() if i in self.paths}
        updates = max(done.values(), default=0)
        behind = {path: n for path, n in done.items() if n != updates}
        behind |= {self.paths[i]: 0 for i in self.states if done and self.paths[i] not in done}
        return Counts(updates, self.attributes.get("num_update", begin + updates), behind)

    def _groups(self, moved: Sequence[str]) -> Iterator[Group]:
        """Yields the groups: one; where the schema has no multipliers, one for each pair of them."""
        values, origins = self._hyperparameters()
        if self._has_multipliers:
            yield Group(tuple(moved), values, origins)
            return
        rates, decays = (self.factors[name] for name in MULTIPLIERS)
        members: dict[tuple[float, float], list[str]] = {}
        for path in moved:
            members.setdefault((rates.get(path, 1.0), decays.get(path, 1.0)), []).append(path)
        for (rate, decay), paths in members.items():
            multiplied = {"learning_rate": rate, self.kind.decay: decay}
            scaled = {
                name: values[name] * multiplied[name] for name in multiplied if values.get(name) is not None
            }
            yield Group(tuple(paths), {**values, **scaled}, origins)

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
        origins: dict[str, KnownFrom] = dict.fromkeys(values, "file")
        for name, factors in self.factors.items():
            if name in values:
                values[name] = factors
                origins[name] = "file" if factors else "assumed"
        return values, origins

    def _by_path(self, factors: Mapping[Any, float]) -> dict[str, float]:
        """Returns multipliers by path: they stand by index or by name."""
        names = {**self.order.names, **{name: name for name in self.order.names.values()}}
        by_path = {path_of(names.get(key, str(key))): value for key, value in factors.items()}
        return {path: value for path, value in by_path.items() if path in self.params}

    def _beside_masters(self) -> dict[str, str]:
        """Returns the dtypes of the parameters that have a float32 weight beside them, by path."""
        low = [path for index, path in self.paths.items() if MASTER in (self.states.get(index) or {})]
        return {path: self.params[path].dtype.name for path in low}

    def _other_attributes(self) -> dict[str, Any]:
        """Returns the attributes that no hyperparameter and no count is read from; a scheduled rate is one."""
        taken = {*self.offered, *MULTIPLIERS, BY_DEVICE, CURRENT, "num_update", "use_fused_step"}
        scheduled = self.attributes.get("lr_scheduler") is not None
        return {
            name: value
            for name, value in self.attributes.items()
            if ARGUMENTS.get(name, name) not in taken or (name == "lr" and scheduled)
        }

    def _home(self) -> dict[str, Any]:
        order = list(self.counted.counts)
        index = {path: i for i, path in self.paths.items()}
        usual = usual_index(self.native)
        home: dict[str, Any] = {
            "optimizer": self.cls,
            "attributes": self._other_attributes(),
            "factors": {}
            if self._has_multipliers
            else {n: factor for n, factor in self.factors.items() if factor},
            "names": {path: name for path, name in self.native.items() if name != name_of(path)},
            "index": {} if index == usual else index,
            "counted": [] if order == list(self.states) else order,
            "devices": list(self.counted.devices),
            "current": self.counted.current,
            "low": self._beside_masters(),
            "variant": self.variant,
            "apart": {device: dict(counts) for device, counts in self.counted.apart.items()},
            "files": self.files,
        }
        return {key: value for key, value in home.items() if key == "optimizer" or value}

    def _assumptions(self) -> Iterator[str]:
        if self.order.note:
            yield self.order.note
        if self.variant is None:
            yield f"The file doesn't say which variant ran: {', '.join(self.kind.makers)}. Name it with --variant."
        if self.cls is None:
            if not {BEGIN, COUNT} & self.hints.hparams.keys():
                yield f"The file holds no counts of updates. Give --hparams {COUNT}=<updates>."
            return
        if self.attributes.get("lr_scheduler") is not None:
            yield "The learning rate follows a schedule in the file, which statekit keeps and doesn't run."
        if not any(self.attributes.get(name) for name in MULTIPLIERS):
            yield "Multipliers of a Trainer's parameters are in no file of MXNet; 1 is assumed."
        if any(counts for counts in self.counted.apart.values()):
            yield "Devices have counted different updates; those of the first are taken."


def _multipliers(groups: Sequence[Group], name: str) -> dict[str, float]:
    """Returns by which factor each parameter's rate or decay is multiplied, where the groups say one."""
    return {path: f for group in groups for path, f in group.hyperparameters.get(name, {}).items()}


class Writing:
    """A state on its way to MXNet's files."""

    def __init__(self, kind: MXNetOptimizer, state: TrainState) -> None:
        self.kind, self.state, self.faults = kind, state, Faults()
        home = state.extra.get(HOME)
        self.home: Mapping[str, Any] = home if isinstance(home, Mapping) else {}
        names = self.home.get("names", {})
        self.names = {path: names.get(path) or name_of(path) for path in state.params}
        self.bare = {path: bare(name) for path, name in self.names.items()}
        self.index: Mapping[str, Any] = self.home.get("index") or usual_index(self.names)

    def tree(self) -> dict[str, Any]:
        """Returns the tree of both files."""
        state = self.state
        states = {self.index[path]: self._own(path, slots) for path, slots in state.slots.items() if slots}
        tree: dict[str, Any] = {
            "params": {self.names[path]: self._param(path) for path in state.params},
            "states": states,
        }
        if self.home.get("optimizer", "") is not None:
            cls = self.home.get("optimizer") or self.kind.cls
            tree["optimizer"] = Record(cls, (), self._attributes(list(states), cls))
        return {**tree, "files": self.home.get("files", {})}

    def _param(self, path: str) -> Tensor:
        """Returns a parameter; the rounding of its master where a system between had a place for the master alone."""
        param = self.state.params[path]
        return Cast(param, DTYPES[self.home["low"][path]]) if self._is_master(path) else param

    def _is_master(self, path: str) -> bool:
        """Tells whether a parameter was a master beside one of MXNet's low precision, and is one no more."""
        slots = self.state.slots.get(path)
        was_beside = path in self.home.get("low", {}) and slots and MASTER not in slots
        return bool(was_beside and self.state.params[path].dtype.name == "float32")

    @property
    def _has_masters(self) -> bool:
        """Whether there are float32 weights beside parameters of low precision."""
        return any(MASTER in slots or self._is_master(path) for path, slots in self.state.slots.items())

    def _own(self, path: str, slots: Mapping[str, Tensor]) -> Any:
        slots = {MASTER: self.state.params[path], **slots} if self._is_master(path) else slots
        param = self._param(path)
        unknown = [name for name in slots if name not in ("m", "v", MASTER)]
        missing = [name for name in ("m", "v") if name not in slots]
        if unknown or missing:
            self.faults.add(f"has slots {', '.join(slots)}, expected m, v and perhaps master", path)
            return None
        if MASTER in slots:
            if param.dtype.name != "float16":
                self.faults.add(f"is {param.dtype}; MXNet keeps a float32 weight beside float16 only", path)
            return (slots[MASTER], (slots["m"], slots["v"]))
        if param.dtype.name not in self.kind.dtypes:
            self.faults.add(f"is {param.dtype} without a float32 weight beside it", path)
        wanted = "float32" if self.kind.dtypes == ("float32",) else param.dtype.name
        self.faults += [
            (f"slot {name} is {slots[name].dtype}, expected {wanted}", path)
            for name in ("m", "v")
            if slots[name].dtype.name != wanted
        ]
        return (slots["m"], slots["v"])

    def _attributes(self, written: list[Any], cls: str) -> dict[str, Any]:
        kind = self.kind
        schema, variant = load_schema(kind.schema), self.state.optimizer.variant
        form = variant if variant in kind.makers else kind.makers[0]
        offered = {**schema.variant(form)["defaults"], "learning_rate": None} | self._settings()
        arguments = schema.native(form, offered)
        arguments |= {name: self._by_index(offered.get(name, {})) for name in MULTIPLIERS}
        attributes = {next((a for a, n in ARGUMENTS.items() if n == k), k): v for k, v in arguments.items()}
        begin = int(attributes.get(BEGIN, 0))
        counts, counted = self.state.counts, self.home.get("counted") or written
        done = {i: begin + counts.behind.get(p, counts.updates) for p, i in self.index.items()}
        stored_counts = Counted(
            {index: done[index] for index in counted if index in done and counts.updates},
            tuple(self.home.get("devices", (0,))),
            self.home.get("current", 0),
            self.home.get("apart", {}),
        )
        record = {
            **BASE,
            **kind.attributes,
            **attributes,
            **self.home.get("attributes", {}),
            **written_counts(stored_counts),
        }
        record |= {
            "wd": record["wd"] or 0.0,
            "num_update": max(begin + counts.updates, counts.schedule),
            "multi_precision": self._has_masters or record["multi_precision"],
            "use_fused_step": form != kind.unfused,
        }
        if variant is None and cls.startswith(FIRST_RELEASE):
            del record["use_fused_step"]
        return record

    def _settings(self) -> dict[str, Any]:
        """Returns one set of hyperparameters for all groups, with multipliers by path."""
        groups = self.state.optimizer.groups
        apart = {"lr_mult": "learning_rate", "wd_mult": self.kind.decay}
        skipped = {*apart, *apart.values()}
        settings = [{n: v for n, v in g.hyperparameters.items() if n not in skipped} for g in groups]
        if any(other != settings[0] for other in settings):
            self.faults.add("have different hyperparameters; MXNet's optimizer has one set", "groups")
        arguments = dict(settings[0]) if settings else {}
        for name, of in apart.items():
            values = {path: g.hyperparameters.get(of) for g in groups for path in g.paths}
            by_param = _multipliers(groups, name)
            shared = shared_value(values, self.home.get("factors", {}).get(name, {}))
            if shared is None:
                self.faults.add(f"have values of {of} that no multipliers make of one", "groups")
                continue
            base, factors = shared
            arguments |= {} if base is None and of != "learning_rate" else {of: base}
            arguments[name] = {p: by_param.get(p, 1.0) * factors.get(p, 1.0) for p in {**by_param, **factors}}
        return arguments

    def _by_index(self, factors: Mapping[str, float]) -> dict[Any, float]:
        """Returns multipliers by name where the optimizer holds names, else by index."""
        names = self.home.get("attributes", {}).get("idx2name", {})
        index = {path: self.index[path] for path in factors if path in self.index}
        return {self.bare[p] if names.get(i) == self.bare[p] else i: factors[p] for p, i in index.items()}


@dataclass(frozen=True)
class MXNetOptim:
    """One optimizer of MXNet."""

    name: str
    title: str
    kind: MXNetOptimizer
    containers: tuple[str, ...] = ("mxnet",)
    schedule_in: str = "num_update"

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:
        """The schema's variants that it may be."""
        return {self.kind.schema: self.kind.makers}

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at the optimizer's class; states alone may be any optimizer's that keeps a mean and a variance."""
        tree = checkpoint.tree
        if checkpoint.container != "mxnet" or not fits(tree, Trained):
            return None
        optimizer = tree.get("optimizer")
        if optimizer is None:
            paired = tree["states"] and all(parts(entry) is not None for entry in tree["states"].values())
            return Evidence(15, "pairs of states, and no optimizer that says whose") if paired else None
        is_own = optimizer.name.startswith("mxnet.") and _last(optimizer.name) == _last(self.kind.cls)
        return Evidence(20, f"an optimizer of {optimizer.name}") if is_own else None

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state.

        Of states alone, the hint `count` says how many updates there were.
        """
        tree = checkpoint.tree
        if fits(tree, dict[Name, Any]) and (not tree.get("params") or "states" not in tree):
            raise StateError(
                "MXNet's parameters or states lie alone: only both are the state of a run.",
                place=checkpoint.path,
                expected=".params and .states of the same step in one folder",
            )
        return MXNetReading(self.kind, checkpoint, hints).state()

    def encode(self, state: TrainState) -> Encoded:
        """Returns the tree of both files."""
        if state.optimizer.schema != self.kind.schema:
            raise InexactError(
                f"The layout {self.name} holds the state of {self.kind.schema} only.",
                expected=self.kind.schema,
                found=state.optimizer.schema,
            )
        writing = Writing(self.kind, state)
        tree = writing.tree()
        writing.faults.check(InexactError, f"{self.title} can't hold the state")
        return Encoded(tree, state.counts.updates, dropped=dropped_from(state.extra, (HOME,), "MXNet"))

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return trainer_lines(state, saved, _last(self.kind.cls).lower())


def _last(name: str) -> str:
    return name.rpartition(".")[2]
