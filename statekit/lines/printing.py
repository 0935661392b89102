"""What a layout prints lines with: a saved run, quoted paths, an optimizer's arguments, and statekit's own lines.

`...` stands for what a run needs and nobody knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from statekit.files.manifest import FILE
from statekit.files.tree import Place
from statekit.lines.rates import RatesOf
from statekit.maps.pretrained import Pretrained
from statekit.optim.adafactor_forms import AdafactorHyperparameters
from statekit.state.hyperparameters import alike
from statekit.state.run import RunState
from statekit.state.schema import WEIGHTS, is_native, load_schema, named_native

RATE = "learning_rate"
UNKNOWN = "..."
RULES = ("factor_map", "logical_factor_rules")
_ADAM = ("weight_decay_rate",)
_NEEDED = {
    "adafactor": tuple(entry.name for entry in fields(AdafactorHyperparameters)),
    **dict.fromkeys(("adamw", "lamb"), _ADAM),
}
"""Schema -> hyperparameters without which nobody can step."""
_MODEL = "model"
"""Where a conversion puts a model that lay at another place."""
_INDEX = re.compile(r"0|[1-9][0-9]*")
State = Mapping[str, Any]
"""A state without its tensors, as `TrainState.to_json` gives it."""


class Told(Protocol):
    """What a user said of a checkpoint, as `statekit.CheckpointRef` has it."""

    @property
    def model_key(self) -> str | None:
        """Where the model lies, keys joined by `/`; None where it is unknown."""

    @property
    def optimizer_key(self) -> str | None:
        """Where the optimizer's state lies; None where it is unknown."""

    def keywords(self) -> dict[str, str]:
        """Returns the keywords of a function of statekit, each with the code of its value."""


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint that a run goes on from.

    Attributes:
        container: Its container.
        layout: Its layout.
        path: The checkpoint, or a run's folder that holds it.
        step: Its step, where `path` may be the run's folder.
        files: Names of its files, where they are known.
        tensors: Names of its tensors, where they are known.
        empty: Names of its leaves that hold nothing.
        run: What is known of the run.
        converted: Whether statekit wrote it; None where its step or a manifest in its folder tells.
        folder: The folder that `files` are named in, where `path` is one of them.
        items: Names of the trees that it holds beside one another, as Orbax has them.
        variables: Its parts that are states of nnx, as `Encoded.variables` has them.
        source: The container that it was converted from; None if unknown.
        options: What its conversion was asked for.
        ref: What the user said of it; None of a conversion's target, which says it itself.
        own_name: The name of the checkpoint, where `path` stands for any place.
        version: The version of the library that wrote it, where its file says that.
        halves: Part -> file of a folder whose files are one checkpoint of torch.save.
        classes: What its pickle names that `torch.load(weights_only=True)` refuses.
    """

    container: str
    layout: str
    path: Place
    step: int | None
    files: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    run: RunState = field(default_factory=RunState)
    converted: bool | None = None
    folder: Place | None = None
    items: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    source: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    own_name: str | None = None
    ref: Told | None = None
    version: str | None = None
    halves: Mapping[str, str] = field(default_factory=dict)
    classes: str = ""

    def step_path(self, name: str) -> Place:
        """Returns the step's own folder or file, which may be the checkpoint itself or lie in it.

        Args:
            name: What the system calls it, with `{step}` for the number.

        Example:
            >>> from pathlib import Path
            >>> SavedRun("orbax", "optax", Path("run"), 4).step_path("{step}").as_posix()
            'run/4'
        """
        if self.step is None:
            return self.path
        name = name.format(step=self.step)
        if self.own_name == name:
            return self.path.with_name(name)
        return self.path if self.path.name == name else self.path / name

    def rates(self, state: State) -> RatesOf:
        """Returns the run's learning rates, which print themselves for every system."""
        return RatesOf(self.run.schedules, state)

    def code(self, *between: str, path: Place | None = None) -> str:
        """Returns the arguments of a function of statekit that opens it again: its path, and what the user said.

        Args:
            *between: Code of further arguments, which stand behind the path.
            path: The path, where `path` is a run's folder.
        """
        keywords = {} if self.ref is None else self.ref.keywords()
        # The path is the step's own.
        options = [f"{name}={value}" for name, value in keywords.items() if name != "step"]
        return ", ".join([quoted(path or self.path), *filter(None, between), *options])

    def torch_load(self, file: str) -> str:
        """Returns the call that loads a file of torch.save; only code that is trusted may run."""
        if not self.classes:
            return f"torch.load({file}, weights_only=True)"
        return f"torch.load({file}, weights_only=False)  # it runs code of {self.classes}: only of a file you trust"

    @property
    def is_converted(self) -> bool:
        """Whether statekit wrote it."""
        if self.converted is not None:
            return self.converted
        return self.step is not None or self.manifest.is_file()

    @property
    def manifest(self) -> Place:
        """The manifest's file: in the target's folder, which holds a step's, or is one."""
        folders = [self.path, *self.path.parents[:2]] if self.step is None else [self.path]
        return next((folder / FILE for folder in folders if (folder / FILE).is_file()), self.path / FILE)

    @property
    def map_name(self) -> str:
        """The map that made its model; "" without one."""
        names = [record["name"] for record in self._maps if "name" in record]
        return str(names[-1]) if names else ""

    @property
    def map_knows(self) -> frozenset[str]:
        """The settings that maps were told of its model, or had beside the source."""
        settings = [record.get("config", {}) for record in self._maps]
        settings += [values for record in self._maps for values in record.get("beside", {}).values()]
        return frozenset(key for values in settings for key in values)

    @property
    def _maps(self) -> list[Mapping[str, Any]]:
        return [record for record in self.options.get("maps", ()) if isinstance(record, Mapping)]

    @property
    def model_class(self) -> str:
        """The class of the model that an earlier map made; "" where none is known."""
        name = self.options.get("model_class")
        return name if isinstance(name, str) else ""

    @property
    def loss_scale(self) -> float | None:
        """How many times as large the loss is from there on, as its moments were rescaled for; None if not."""
        scale = self._changes.get("loss_scale")
        return float(scale) if isinstance(scale, (int, float)) else None

    @property
    def state_only(self) -> bool:
        """Whether it holds an optimizer's state without parameters."""
        return self._changes.get("state_only") is True

    @property
    def _changes(self) -> Mapping[str, Any]:
        changes = self.options.get("changes")
        return changes if isinstance(changes, Mapping) else {}


@runtime_checkable
class Printing(Protocol):
    """A layout that prints the lines by which its own system goes on from a checkpoint."""

    def lines(self, state: State, saved: SavedRun, /) -> list[str]:
        """Returns lines of Python, or of what else the system reads: gin, options of a command.

        A line is complete, or contains `...` for what nobody has told. Paths stand in it as `quoted` has them.

        Args:
            state: The state without its tensors, as `TrainState.to_json` gives it.
            saved: The checkpoint.
        """


def quoted(path: object) -> str:
    r"""Returns a path as a literal of Python and of gin.

    Example:
        >>> print(quoted("a/b"))
        "a/b"
        >>> print(quoted("\U0001f600"))
        "\U0001f600"
    """
    # JSON writes a character above U+FFFF as two halves, which are two characters in Python.
    parts = (json.dumps(c)[1:-1] if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in str(path))
    return f'"{"".join(parts)}"'


def listed(name: str, items: Sequence[str]) -> list[str]:
    """Returns the lines that make a list, an item a line."""
    return [f"{name} = [", *(f"    {item}," for item in items), "]"]


def has_several(state: State) -> bool:
    """Tells whether a run has several optimizers."""
    return any("schema" in group for group in state["groups"])


def kind_of(state: State, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns schema and variant of a group."""
    whose = group if "schema" in group else state
    return {"schema": whose["schema"], "variant": whose["variant"]}


def own_call(kind: Mapping[str, Any]) -> str:
    """Returns `...` for the call of an optimizer whose class isn't known, and the name that `inspect` has for it.

    Example:
        >>> own_call({"schema": "torch_native", "variant": "torch Adagrad"})
        "...  # the run's own optimizer: torch Adagrad"
    """
    schema, variant = kind["schema"], kind["variant"]
    name = named_native(schema, variant) if is_native(schema) else f"{schema}, variant {variant or 'unknown'}"
    return f"{UNKNOWN}  # the run's own optimizer: {name}"


def paths_of(state: State) -> list[str]:
    """Returns the parameters that the run's groups have, in their order."""
    return [path for group in state["groups"] for path in group["paths"]]


def model_place(saved: SavedRun, paths: Collection[str]) -> str | None:
    """Returns where a file's model lies, keys joined by `/`; None where it is unknown and no tensor's name tells."""
    if saved.ref is not None and saved.ref.model_key is not None:
        return saved.ref.model_key
    ends = tuple("/" + path.replace("/", ".") for path in paths)
    places = (name.removesuffix(end) for name in saved.tensors for end in ends if name.endswith(end))
    models = dict.fromkeys(place for place in places if "/state" not in place)
    # Another network, or an average, has parameters of the same names.
    marked = (place for place in (*saved.run.places[:1], _MODEL) if place in models)
    return next(marked, next(iter(models), None))


def subscripts(place: str) -> str:
    """Returns keys joined by `/` as Python's subscripts.

    Example:
        >>> subscripts("optimizer/0")
        '["optimizer"][0]'
    """
    return "".join(f"[{key if _INDEX.fullmatch(key) else quoted(key)}]" for key in place.split("/"))


def native_arguments(
    state: State, outside: Collection[str] = (), open_rate: str = UNKNOWN
) -> tuple[list[str], list[str]]:
    """Returns arguments of a variant's own class that aren't its defaults, and settings that it doesn't take.

    Where groups differ in one, or it isn't known and the variant has no default, it is left open.

    Args:
        state: The state, of one optimizer.
        outside: Settings that the class doesn't take.
        open_rate: What stands for a learning rate that isn't known.
    """
    if state["variant"] is None:
        return [UNKNOWN], []
    schema = load_schema(state["schema"])
    usual = schema.native(state["variant"], schema.settings(state["variant"]))
    groups = [schema.native(state["variant"], settings_of(group)) for group in state["groups"]]
    arguments: list[str] = []
    others: list[str] = []
    for name, default in usual.items():
        values = {json.dumps(group.get(name, default), default=str) for group in groups}
        value = groups[0].get(name, default) if groups else default
        argument = f"{name}={value!r}" if len(values) == 1 else f"{name}={UNKNOWN}"
        if name in (RATE, "lr"):
            has_rate = len(values) == 1 and any(RATE in group["hyperparameters"] for group in state["groups"])
            arguments.append(argument if has_rate and value is not None else f"{name}={open_rate}")
        elif len(values) > 1 or alike({}, value, default) != "equal":
            (others if name in outside else arguments).append(argument)
    return arguments + _needed(state), others


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's hyperparameters as Python has them, without its rules."""
    return {name: _plain(value) for name, value in group["hyperparameters"].items() if name not in RULES}


def given_options(state: State, group: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Returns the options of a group that the user gave, as its class has them; loading puts the file's in their place.

    Args:
        state: The state.
        group: One of its groups.
        *without: Hyperparameters that are no option of the class.
    """
    kind = kind_of(state, group)
    if kind["variant"] is None or is_native(kind["schema"]):
        return {}
    schema, variant = load_schema(kind["schema"]), kind["variant"]
    offered = schema.variant(variant)["defaults"].keys() - {*without}
    given = [name for name, origin in group["known_from"].items() if origin == "given" and name in offered]
    names = {schema.spelling(variant, name).argument for name in given}
    options = schema.native(variant, settings_of(group))
    return {name: value for name, value in options.items() if name in names & {*schema.arguments(variant)}}


def _plain(value: Any) -> Any:
    """Returns a hyperparameter as Python's value: plain data marks tuples."""
    return tuple(value["$tuple"]) if isinstance(value, Mapping) and value.keys() == {"$tuple"} else value


def _needed(state: State) -> list[str]:
    """Returns the arguments whose value nobody has told, although the slots show that they were used."""
    schema = load_schema(state["schema"])
    used = {name for group in state["groups"] for name in missing_of(state, group) if name != RATE}
    native = schema.native(state["variant"], dict.fromkeys(used))
    return [f"{name}={UNKNOWN}" for name in native]


def missing_of(state: State, group: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of what a step of a group needs and nobody has told."""
    hyperparameters, kind = group["hyperparameters"], kind_of(state, group)
    if hyperparameters.get(RATE) is None and not hyperparameters.get("relative_step"):
        yield RATE
    needed = _NEEDED.get(kind["schema"], ())
    if needed and kind["variant"]:
        defaults = load_schema(kind["schema"]).variant(kind["variant"])["defaults"]
        yield from (name for name in defaults if name in needed and name not in hyperparameters)


def missing_arguments(state: State, rate: str | None) -> str:
    """Returns the arguments of `load_optimizer` for what a step needs and nobody has told.

    Args:
        state: The state.
        rate: What the learning rate is called there; None where a schedule gives it.

    Returns:
        Code that follows other arguments: it begins with a comma, or is empty.
    """
    pairs = dict.fromkeys(
        (kind_of(state, group)["schema"], name)
        for group in state["groups"]
        for name in missing_of(state, group)
        if name != RATE or rate is not None
    )
    if not has_several(state):
        names = dict.fromkeys(rate if name == RATE else name for _, name in pairs)
        return "".join(f", {name}={UNKNOWN}" for name in names)
    rates = ", ".join(f'"{schema}": {UNKNOWN}' for schema, name in pairs if name == RATE)
    others = ", ".join(f'"{schema}/{name}": {UNKNOWN}' for schema, name in pairs if name != RATE)
    return f", {rate}={{{rates}}}" * bool(rates) + f", hparams={{{others}}}" * bool(others)


def torch_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines that go on from any checkpoint with an optimizer of statekit.torch."""
    schedule, is_made = _schedule(state, saved, RatesOf.torch_lines)
    # A schedule whose state lies in the file sets the rate only once the layout's own lines load it.
    rated = is_made and not saved.rates(state).torch_call()
    load = _load(
        saved, "torch", "model.named_parameters()", missing_arguments(state, None if rated else "lr")
    )
    return [
        "import statekit.torch",
        f"statekit.torch.load_params({saved.code('model')})",
        *after_loading(state, saved),
        *([] if state["schema"] == WEIGHTS else [f"optimizer = {load}"]),
        *schedule,
    ]


def state_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a file that holds an optimizer's state without the weights, which the model has."""
    lines = torch_lines(state, saved)
    load = next(line for line in lines if line.startswith("optimizer = "))
    after = lines[lines.index(load) + 1 :]
    return [lines[0], f"{load}  # the model has its weights", *after]


def jax_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines that go on from any checkpoint with an optimizer of statekit.jax."""
    schedule, is_made = _schedule(state, saved, RatesOf.jax_lines)
    load = _load(saved, "jax", "params", _rated(state, is_made))
    return [
        "import statekit.jax",
        f"params = statekit.jax.load_params({saved.code('params')})",
        *schedule,
        *([] if state["schema"] == WEIGHTS else [f"optimizer, state = {load}"]),
    ]


def tensorflow_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines that go on from any checkpoint with an optimizer of statekit.tensorflow."""
    schedule, is_made = _schedule(state, saved, RatesOf.keras_lines)
    load = _load(saved, "tensorflow", "model.trainable_variables", _rated(state, is_made))
    return [
        "import statekit.tensorflow",
        f"statekit.tensorflow.load_params({saved.code('model')})",
        *schedule,
        *([] if state["schema"] == WEIGHTS else [f"optimizer = {load}"]),
    ]


def _schedule(
    state: State, saved: SavedRun, printed: Callable[[RatesOf], list[str]]
) -> tuple[list[str], bool]:
    """Returns the lines that make the run's schedule, or say why they don't; and whether they make it."""
    if not saved.run.schedules:
        return [], False
    rates = saved.rates(state)
    lines = printed(rates)
    return lines or rates.comment(), bool(lines)


def _rated(state: State, is_made: bool) -> str:
    """Returns the arguments of `load_optimizer` beside a `schedule`, if the lines before have made one."""
    return f", {RATE}=schedule{missing_arguments(state, None)}" if is_made else missing_arguments(state, RATE)


def _load(saved: SavedRun, framework: str, params: str, arguments: str) -> str:
    return f"statekit.{framework}.load_optimizer({saved.code(params + arguments)})"


def after_loading(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines that a model which a map made needs once its weights are loaded."""
    pretrained, paths = pretrained_of(saved), {*paths_of(state)}
    lines = {} if pretrained is None else pretrained.after_loading
    return [line for path, line in lines.items() if path in paths]


def pretrained_of(saved: SavedRun) -> Pretrained | None:
    """Returns how a library builds the model that a map made; None if no map made it."""
    if not saved.map_name and not saved.model_class:
        return None
    from statekit.maps import model_map

    of_map = model_map.pretrained_of(saved.map_name) if saved.map_name else None
    return of_map or model_map.pretrained_class(saved.model_class)
