"""The two contracts of a converter: a container knows bytes, a layout knows names.

Every conversion goes native -> canonical -> native, so that n containers and k layouts make n * k formats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, runtime_checkable

from statekit.budget import Budget
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import UsageError
from statekit.files.checkpoint import FILES_BESIDE, Checkpoint, Finding
from statekit.files.sections import CutPoints, Section
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.state.exactness import Exactness as Exactness  # noqa: PLC0414 - part of the contract
from statekit.state.train_state import Counts, Optimizer, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import Tree, leaf_names


@dataclass(frozen=True)
class Evidence:
    """Why a format fits. The largest `specificity` wins: 10 a plain file type, 20 a system's own, 30 statekit's."""

    specificity: int
    because: str


@dataclass(frozen=True, init=False)
class Hints(CheckpointRef):
    """What a layout decodes by: what the user says about a checkpoint, and the model that goes on with it.

    Attributes:
        model: The parameters of the model that goes on with the state, in its order, by their names in the checkpoint.
            They tell what the checkpoint leaves open: the order of what an optimizer only numbers, or the shapes of
            weights that aren't there. Their values aren't read.
    """

    model: Mapping[str, Tensor] | None = field(default=None, repr=False)

    def __init__(
        self,
        hyperparameters: Mapping[str, Any] | None = None,
        variant: str | None = None,
        param_names: Sequence[str] | None = None,
        model: Mapping[str, Tensor] | None = None,
        **others: Any,
    ) -> None:
        """Takes `hparams` by its earlier name too, and the fields in their earlier order."""
        if hyperparameters is not None:
            others["hparams"] = hyperparameters
        super().__init__(
            variant=variant, param_names=None if param_names is None else tuple(param_names), **others
        )
        object.__setattr__(self, "model", model)

    @classmethod
    def of_model(cls, ref: CheckpointRef, model: Mapping[str, Tensor]) -> Hints:
        """Returns a ref with the model that goes on."""
        return cls(model=model, **{part.name: getattr(ref, part.name) for part in fields(ref) if part.init})


NO_HINTS = CheckpointRef()


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
        variables: The parts of `tree` whose arrays lie under `value` in files, as flax.nnx.State has its variables: an
            item, a key at the top, or an item and a key; "" is the whole tree.
        custom: What a system keeps with a step beside its trees, as Orbax' `custom_metadata`.
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
    variables: tuple[str, ...] = ()
    custom: Mapping[str, Any] = field(default_factory=dict)


def dropped_from(extra: Mapping[str, Tree], placed: Collection[str], system: str) -> dict[str, str]:
    """Returns canonical name -> reason of everything in `extra` that isn't placed, tensor or not.

    Args:
        extra: The state's.
        placed: Its keys that the target holds.
        system: What the target is called.
    """
    others = {key: part for key, part in extra.items() if key not in (*placed, FILES_BESIDE)}
    dropped = {f"extra/{name}": f"{system} has no place for it" for name in leaf_names(others)}
    for name in extra.get(FILES_BESIDE, ()):
        dropped[f"extra/{FILES_BESIDE}/{name}"] = (
            "a file beside the arrays; copy it yourself if the run shall go on with it"
        )
    return dropped


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

    def detect(self, path: Place) -> Evidence | None:
        """Looks at file names and first bytes only; None if it isn't this container."""

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses headers and returns the checkpoint; of a run's folder, the newest step or the given one.

        Files are read through `statekit.files.source.opening`, which refuses links out of `path`, and draws on
        `budget`, the job's; None if this is all of it.

        Raises:
            NotFoundError: No checkpoint, or no such step; a single file has no steps.
            FormatError: The bytes don't follow the format or can't be trusted.
            CorruptError: Checksums, sizes or headers disagree with the data, or files of it are missing.
            RefusedError: It calls for code, for files outside, or for absurd memory.
        """

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes a tree below `stage.path`, passing every tensor through `stage.stream`.

        Raises:
            UsageError: The target is named for another step, or the tree holds what its reader refuses.
            FormatError: The format can't hold a name, a dtype or an array; lists every one.
        """


class ReadOnly:
    """What containers that statekit only reads have in common: no suffix, no target, and a `write` that refuses."""

    name: str
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = None

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Refuses.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"statekit only reads {self.name}.",
            place=stage.target,
            remedy="choose another container with --to",
        )


@runtime_checkable
class Cuttable(Protocol):
    """A container of many files, each of which a process can write by itself; its `write` is `write_cut`."""

    def image(self, encoded: Encoded, target: Place, cut: CutPoints) -> Sequence[Section]:
        """Returns the sections of a target, in their order, without reading a value.

        Raises:
            UsageError, FormatError: As of `write`.
        """

    def join(self, encoded: Encoded, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Writes what is left when all sections lie below `stage.path`: indexes, metadata, small records.

        Args:
            encoded: As in `image`.
            stage: Where; `stage.tensors` has the tensors of all sections.
            cut: As in `image`.
            records: What writing each section returned, by the section's name.
        """


def write_cut(
    container: Cuttable,
    encoded: Encoded,
    stage: Stage,
    cut: CutPoints = CutPoints(),  # noqa: B008 - frozen
) -> None:
    """Writes a target of many files in one process: each section, one after the other, then what joins them."""
    sections = container.image(encoded, stage.target, cut)
    container.join(encoded, stage, cut, {section.name: section.write(stage) for section in sections})


@runtime_checkable
class Fitting(Protocol):
    """A container that has a place of its own for some parts of a tree, as a layout can't know."""

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns a state with its parts in the container's places, and with what the container can't do without."""


@runtime_checkable
class ForTarget(Protocol):
    """A container whose files are another library's by the target's name."""

    def for_target(self, target: Place) -> Container:
        """Returns the container as it writes a target."""


@runtime_checkable
class HasEntries(Protocol):
    """A container of folders that readers find by certain files; without one, its checkpoint isn't there.

    They are patterns of names, as `fnmatch` has them, the first to be written first, after all other files.
    """

    entries: tuple[str, ...]


@runtime_checkable
class AlsoCalled(Protocol):
    """A container with further names for `--from` and `--to`, such as the name of the form that it writes."""

    other_names: tuple[str, ...]


@runtime_checkable
class LikeModel(Protocol):
    """A layout that orders a file by the classes of a model's layers, which a file of that model tells."""

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

    def names_are_near(self, checkpoint: Checkpoint) -> str:
        """Returns the `names_from` that the checkpoint has the files for; "" if there is none."""

    def names_in_file(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        """Returns the file's name of each parameter that its model has under another one, by the model's.

        Raises:
            StatekitError: Nothing tells what the model calls them.
        """


@runtime_checkable
class HoldsSeveral(Protocol):
    """A layout that holds the states of several optimizers, each for parameters of its own."""

    @property
    def holds_several(self) -> bool | tuple[str, ...]:
        """Whether it does, or in which containers."""


@runtime_checkable
class NamesLosses(Protocol):
    """A layout whose files may hold what no other system goes on with."""

    def losses(self, checkpoint: Checkpoint) -> Iterator[Finding]:
        """Yields what a run loses that leaves the layout's system; reads scalars only."""


@runtime_checkable
class ReadsOthers(Protocol):
    """A layout in whose form other systems write too, by rules of their own."""

    @property
    def reads(self) -> Mapping[str, tuple[str, ...]]:
        """By schema, the variants of those systems: a file doesn't tell them, `--variant` does."""


@runtime_checkable
class StoresValues(Protocol):
    """A layout whose files, or the constructors that read them, fill in every hyperparameter: none stays open."""

    stores_values: bool


@runtime_checkable
class OnlyIfAsked(Protocol):
    """A layout that a target gets by name alone, or from a source that has it."""

    only_if_asked: bool


@runtime_checkable
class OnlyReads(Protocol):
    """A layout that reads what another system writes into some containers, and isn't written there.

    Attributes:
        only_reads: Container -> why not, and what to write instead.
    """

    only_reads: Mapping[str, tuple[str, str]]


@runtime_checkable
class GoesBack(Protocol):
    """A layout that writes a state only into the form of the file that it came from, and refuses any other state."""

    only_goes_back: bool


@runtime_checkable
class BuildsOptimizer(Protocol):
    """A container whose program builds the usual optimizer itself: a layout that asks isn't passed over there."""

    builds_optimizer: bool


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
class Unnamed:
    """What is known of a run whose optimizer numbers its parameters, and nobody knows which they are.

    Attributes:
        optimizer: Its groups have numbers in the place of paths.
        counts: The steps.
        extra: What else the checkpoint holds, as a state's.
        assumptions: What the run does that no optimizer's file shows, as a state's.
    """

    optimizer: Optimizer
    counts: Counts
    extra: Mapping[str, Tree]
    assumptions: tuple[str, ...] = ()


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
        unnamed: The state without parameters, where the layout knows everything but which is which: its optimizer,
            counts and extra, with numbers in the place of paths; None elsewhere.
        remedy: What its user can do to get a state.
        program: The lines by which the program that saved it goes on all the same; none where it needs more.
    """

    what: str
    params: Mapping[str, Tensor]
    slots: Mapping[str, Mapping[str, Tensor]]
    others: Mapping[str, Tensor]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unnamed: Unnamed | None = None
    remedy: str = "`statekit inspect` lists its tensors"
    program: tuple[str, ...] = ()


@runtime_checkable
class Describes(Protocol):
    """A layout that describes checkpoints of its family, even those that it can't decode."""

    def describe(self, checkpoint: Checkpoint, names: Sequence[str] | None = None) -> Contents | None:
        """Looks at names and shapes; None if nothing can be said.

        Args:
            checkpoint: The checkpoint.
            names: Parameters in the optimizer's order, where it numbers them; None if it is unknown.
        """


@runtime_checkable
class Examines(Protocol):
    """A layout whose files store a fact twice, in the state and beside it, so that the two may disagree."""

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
        """The schemas that it can hold, each with the variants of its own optimizers, the usual one first."""

    @property
    def containers(self) -> tuple[str, ...]:
        """Containers it is at home in, the usual one first."""

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at names and shapes only."""

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state; reads no values but scalars such as the step.

        Raises:
            StateError: Nothing tells whose the tensors are, or names or shapes break the layout; lists every fault.
            UsageError: A hint has a name or value that the optimizer doesn't take.
        """

    def encode(self, state: TrainState) -> Encoded:
        """Returns the native form of a state.

        Raises:
            InexactError: The layout can't hold it; lists every reason.
        """
