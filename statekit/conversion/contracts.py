"""The two contracts of a converter: a container knows bytes, a layout knows names.

n containers and k layouts make n * k formats: everything goes native -> canonical -> native.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from statekit.budget import Budget, Limits
from statekit.errors import Faults, UsageError
from statekit.files.checkpoint import MODEL_KEY, OPTIMIZER_KEY, Checkpoint, Finding
from statekit.files.stage import Stage
from statekit.state.exactness import Exactness as Exactness  # noqa: PLC0414 - part of the contract
from statekit.state.options import checked_hparams, is_known
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import Tree


@dataclass(frozen=True)
class Evidence:
    """Why a format fits. The largest `specificity` wins: 10 a plain file type, 20 a system's own, 30 statekit's."""

    specificity: int
    because: str


@dataclass(frozen=True)
class Hints:
    """What the user says about a checkpoint that the checkpoint doesn't say.

    Attributes:
        hyperparameters: The original system's own names and values; where a run has several optimizers, a name that
            more than one of them has begins with the schema: `adamw/weight_decay_rate`.
        variant: Variant of the schema; where a run has several optimizers, of each: `adafactor/optax,adamw/torch`.
        param_names: Names of the parameters, in the order of an optimizer that only numbers them.
        model: The parameters of the model that goes on with the state, in its order, by their names in the checkpoint.
            They tell what the checkpoint leaves open: the order of what an optimizer only numbers, or the shapes of
            weights that aren't there. Their values aren't read.
        model_key: Path of the model's part in the checkpoint's tree, keys joined by `/`; found if None.
        optimizer_key: Path of the optimizer's part; found if None.
        names_from: Where else the order of parameters shall be taken from, a way that the layout offers: `config`.
        schedule: The call that makes the schedule of the learning rate, as `state.schedules.called` has it.
        accept_damaged: Whether to go on with a checkpoint that its manifest contradicts.
        follow_links: Whether to read what links out of it lead to.
        budget: Bytes that the job may hold; the usual ones if None.
    """

    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    variant: str | None = None
    param_names: tuple[str, ...] | None = None
    model: Mapping[str, Tensor] | None = None
    model_key: str | None = None
    optimizer_key: str | None = None
    names_from: str | None = None
    schedule: Mapping[str, Any] | None = None
    accept_damaged: bool = False
    follow_links: bool = False
    budget: int | None = None

    @classmethod
    def given(
        cls,
        hparams: Mapping[str, Any] | None = None,
        variant: str | None = None,
        param_names: Sequence[str] | None = None,
        **others: Any,
    ) -> Hints:
        """Returns hints as a caller gives them: any sequence of names, and None for what isn't said.

        Args:
            hparams: `hyperparameters`.
            variant: As the field.
            param_names: `param_names`.
            **others: The other fields by name.

        Example:
            >>> Hints.given(None, "hf", ["w", "b"]).param_names
            ('w', 'b')
        """
        names = None if param_names is None else tuple(param_names)
        return cls(dict(hparams or {}), variant, names, **others)

    def job_budget(self) -> Budget:
        """Returns a new budget for the job that these hints are for."""
        limits = None if self.budget is None else Limits(self.budget)
        return Budget(limits, follow_links=self.follow_links)

    def keyed(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns a checkpoint that knows where its parts were said to lie."""
        keys = {MODEL_KEY: self.model_key, OPTIMIZER_KEY: self.optimizer_key}
        said = {name: key for name, key in keys.items() if key is not None}
        return replace(checkpoint, meta={**checkpoint.meta, **said}) if said else checkpoint

    @property
    def variants(self) -> dict[str, str]:
        """The variants that were said, by schema; under "" one that was said of whatever optimizer it is.

        Raises:
            UsageError: Two were said of the same.
        """
        said = [] if self.variant is None else self.variant.split(",")
        pairs = [one.strip().rpartition("/") for one in said]
        by_schema = {schema: name for schema, _, name in pairs}
        if len(by_schema) < len(pairs):
            raise UsageError(
                "An optimizer has one variant, and several are said.",
                place="--variant",
                expected="one for each optimizer of the run: SCHEMA/VARIANT,SCHEMA/VARIANT",
                found=self.variant,
            )
        return by_schema

    def of(self, schemas: Iterable[str]) -> dict[str, Hints]:
        """Returns what is said of each of a run's optimizers, by schema.

        Raises:
            UsageError: Something is said of none, or may be of several; lists every one.
        """
        names = list(dict.fromkeys(schemas))
        values: dict[str, dict[str, Any]] = {name: {} for name in names}
        variants: dict[str, str | None] = dict.fromkeys(names)
        faults = Faults()
        for key, value in self.hyperparameters.items():
            schema, _, name = key.rpartition("/")
            having = [one for one in names if not schema or one == schema]
            if len(having) > 1:
                having = [one for one in having if is_known(one, name)]
            if len(having) == 1:
                values[having[0]][name] = value
            else:
                faults.add(f"is said of {' or '.join(having)}" if having else "is said of none", key)
        for schema, name in self.variants.items():
            if schema in variants or (not schema and len(names) == 1):
                variants[schema or names[0]] = name
            else:
                faults.add(f"is said of {' or '.join(names)}" if not schema else "is said of none", name)
        pairs = ", ".join(f"{name}/NAME=VALUE" for name in names)
        faults.check(
            UsageError,
            f"The run has the optimizers {' and '.join(names)}, and it isn't said which is meant"
            if len(names) > 1
            else f"The run's optimizer is {names[0]}",
            place="--hparams, --variant",
            expected=f"{pairs}; {','.join(f'{name}/VARIANT' for name in names)}",
        )
        return {name: replace(self, hyperparameters=values[name], variant=variants[name]) for name in names}

    def applied(self, state: TrainState) -> TrainState:
        """Returns a state with the hints in force: hyperparameters by their canonical names, or the variant's own.

        Raises:
            UsageError: A hyperparameter doesn't exist, can't have its value, or is said twice; lists every one.
        """
        said = self.of(schema for schema, _ in state.optimizer.kinds)
        return state.each(lambda part: said[part.optimizer.schema]._applied(part))

    def _applied(self, state: TrainState) -> TrainState:
        optimizer = state.optimizer
        values = checked_hparams(optimizer.schema, self.variant or optimizer.variant, self.hyperparameters)
        if values:
            state = state.with_hyperparameters(**values)
        if self.variant is None:
            return state
        return replace(state, optimizer=replace(state.optimizer, variant=self.variant))


NO_HINTS = Hints()


@dataclass(frozen=True)
class Paced:
    """Where a run's schedule stands.

    Attributes:
        at: What it is asked for the next update: the updates done, as it counts them.
        rates: The rate that it gives each group then; None where it doesn't tell.
    """

    at: int
    rates: tuple[float | None, ...]


@dataclass(frozen=True)
class Encoded:
    """A state in native form.

    Attributes:
        tree: What the container shall write, Tensors at the leaves.
        step: The step for containers that name their files by it.
        exactness: For native tensor names that aren't bitwise: how exact, and why in one sentence.
        dropped: What the target has no place for: canonical name, or that of all below it -> reason.
        place: Where the layout's own system keeps a step's tree below a run's folder, with `{step}` for its number and
            `{item}` where each key of the tree is an item of its own; "" leaves it to the container.
        parts: Where in the tree its parts lie, for containers with a file for each: path by part, `model` and
            `optimizer`; a part that isn't said lies at the top, under its own key.
        by_name: The same state with parameters under their names where `tree` numbers them, for containers that gather
            what many processes hold; None if `tree` has no numbers, or nobody knows the names.
        side_by_side: The same state with a record for each of the run's optimizers where `tree` has joined them to one,
            for containers in which a program finds its own again; None if the run has one, or `tree` has them all.
        assumptions: What was made up because the target can't do without it, one sentence each.
        paced: Where the run's schedule stands, and the rate of each group's next update, as far as it tells.
    """

    tree: Tree
    step: int
    exactness: Mapping[str, tuple[Exactness, str]] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    place: str = ""
    parts: Mapping[str, Keys] = field(default_factory=dict)
    by_name: Encoded | None = None
    side_by_side: Encoded | None = None
    assumptions: tuple[str, ...] = ()
    paced: Paced | None = None


class Container(Protocol):
    """How arrays and records lie in files. Knows names, shapes, dtypes and bytes, nothing about optimizers."""

    @property
    def name(self) -> str:
        """The name for `--from` and `--to`."""

    @property
    def title(self) -> str:
        """One line for people."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of targets that mean this container, e.g. `.pt`."""

    @property
    def target_kind(self) -> Literal["file", "folder"] | None:
        """What `write` makes; None if the container can only be read."""

    def detect(self, path: Path) -> Evidence | None:
        """Looks at file names and first bytes only; None if it isn't this container."""

    def open(self, path: Path, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses headers and returns the checkpoint; of a run's folder, the newest step or the given one.

        Files are read through `statekit.files.source.opening`, which refuses links out of `path`, and draws on
        `budget`, the job's; None if this is all of it.

        Raises:
            NotFoundError: No checkpoint, or no such step.
            FormatError: The bytes don't follow the format or can't be trusted.
        """

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes a tree below `stage.path`, passing every tensor through `stage.stream`."""


@runtime_checkable
class Fitting(Protocol):
    """A container that has a place of its own for some parts of a tree, as a layout can't know."""

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns a state with its parts in the container's places, and with what the container can't do without."""


@runtime_checkable
class ForTarget(Protocol):
    """A container whose files are another library's by the target's name."""

    def for_target(self, target: Path) -> Container:
        """Returns the container as it writes a target."""


@runtime_checkable
class LikeModel(Protocol):
    """A layout whose files lie as the classes of a model's layers have it, which its own file of the model says."""

    def like(self, state: TrainState, model: Checkpoint) -> TrainState:
        """Returns a state that `encode` lays out as a file of the same model.

        Raises:
            StateError: The file isn't one of this state's model; lists every fault.
        """


APART = "apart"
"""Where a schedule stands in files that have a place of its own for it."""


@runtime_checkable
class StandsIn(Protocol):
    """A layout or container whose files say where a run's schedule stands; others leave that to the program."""

    @property
    def schedule_in(self) -> str | None:
        """`apart`, or the name of the one number in which its system counts updates and the schedule's steps."""


@runtime_checkable
class FindsNames(Protocol):
    """A layout that can take the order of parameters from elsewhere, if it is asked to."""

    @property
    def names_from(self) -> tuple[str, ...]:
        """The ways that it offers, for `--names-from`."""


@runtime_checkable
class HoldsSeveral(Protocol):
    """A layout that holds the states of several optimizers, each for parameters of its own."""

    @property
    def holds_several(self) -> bool | tuple[str, ...]:
        """Whether it does, or in which containers."""


@runtime_checkable
class KeepsMasters(Protocol):
    """A layout with a place for masters beside parameters of lower precision, whoever keeps them."""

    keeps_masters: bool


@runtime_checkable
class KeepsEncoding(Protocol):
    """A layout whose parameters may be stored encoded; `keeps_encoding` says whether this one's are."""

    keeps_encoding: bool


@runtime_checkable
class KeepsManifest(Protocol):
    """A container of one file with the manifest inside it; a folder has it beside its files anyway."""

    keeps_manifest: bool


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds that no layout makes a state of.

    Attributes:
        what: What it is, in a few words that name the optimizer if there is one.
        params: Weights by path.
        slots: For each path, the optimizer's slots by their own names, where it is known whose they are.
        others: All other tensors, by their own names.
        options: For each path, the optimizer's options by their own names, and what its state holds besides tensors,
            where they are known.
    """

    what: str
    params: Mapping[str, Tensor]
    slots: Mapping[str, Mapping[str, Tensor]]
    others: Mapping[str, Tensor]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@runtime_checkable
class Describes(Protocol):
    """A layout that can say what a checkpoint of its family holds, even if it can't decode that."""

    def describe(self, checkpoint: Checkpoint, names: Sequence[str] | None = None) -> Contents | None:
        """Looks at names and shapes; None if nothing can be said.

        Args:
            checkpoint: The checkpoint.
            names: Parameters in the optimizer's order, where it numbers them; None if nobody knows it.
        """


@runtime_checkable
class Examines(Protocol):
    """A layout whose files say something twice, once beside the state, so that they may contradict it."""

    def examine(self, checkpoint: Checkpoint, state: TrainState) -> Iterator[Finding]:
        """Yields what contradicts the state; reads scalars only. `kind` is the name of the fault."""


class Layout(Protocol):
    """What the names mean for one optimizer implementation. Knows nothing about files."""

    @property
    def name(self) -> str:
        """The name for `--layout`."""

    @property
    def title(self) -> str:
        """One line for people."""

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:
        """Schemas whose states it can hold, each with the variants that its own optimizers are, the usual one first."""

    @property
    def containers(self) -> tuple[str, ...]:
        """Containers it is at home in, the usual one first."""

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at names and shapes only."""

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the canonical state; reads no values but scalars such as the step.

        Raises:
            StateError: Names or shapes break the layout; lists every fault.
        """

    def encode(self, state: TrainState) -> Encoded:
        """Returns the native form of a state.

        Raises:
            InexactError: The layout can't hold it.
        """
