"""An opened checkpoint: its canonical state, with tensors that read when asked."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

from statekit.budget import Budget, collecting_rarely
from statekit.conversion import registry
from statekit.conversion.belonging import contents_without_optimizer, disagreements, unread
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.contracts import NO_HINTS, Container, Evidence, FindsNames, Layout
from statekit.conversion.target import agreed_layout, source_container
from statekit.errors import (
    CorruptError,
    Faults,
    FormatError,
    MissingExtraError,
    NamesError,
    StateError,
    StatekitError,
    UnknownFormatError,
    UsageError,
    printable,
)
from statekit.files.checkpoint import Checkpoint
from statekit.files.source import listing
from statekit.files.tree import Place
from statekit.state.run import run_of
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import Counts, Group, KnownFrom, Optimizer, TrainState
from statekit.tensors.tensor import Tensor, dtype_name
from statekit.tensors.tree import going_over, tensor_names

MOST_ROWS = 100
"""More parameters than this are counted in a notebook, not listed."""


class Hyperparameter(NamedTuple):
    """A hyperparameter's value, and how it is known: from the `file`, `given` by the user, or `assumed`."""

    value: Any
    known_from: KnownFrom | None


@dataclass(frozen=True, repr=False)
class OpenState:
    """An opened checkpoint with the state it decodes to. Use it as a context manager, or call `close`.

    Attributes:
        checkpoint: The checkpoint, with its own names; closed when the context is left.
        layout: Name of its layout.
        evidence: Why its container, then why its layout fits.
        state: The canonical state.
        budget: What the job that it was opened for may take; what that opens next draws on it too.
        ref: What the user said about it, its path among that.
    """

    checkpoint: Checkpoint
    layout: str
    evidence: tuple[Evidence, Evidence]
    state: TrainState
    budget: Budget = field(default_factory=Budget)
    ref: CheckpointRef = NO_HINTS

    @property
    def params(self) -> Mapping[str, Tensor]:
        """Parameter by path, in the checkpoint's order."""
        return self.state.params

    @property
    def makers(self) -> tuple[str, ...]:
        """The variants that may have made the state: its own, or all of its layout if it has none."""
        variants = registry.layout_card(self.layout).variants
        descriptions = [
            (variant,) if variant else tuple(variants.get(schema, ()))
            for schema, variant in self.state.optimizer.kinds
        ]
        return tuple(dict.fromkeys(name for names in descriptions for name in names))

    @property
    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        """For each parameter's path, its slots by canonical name."""
        return self.state.slots

    @property
    def groups(self) -> tuple[Group, ...]:
        """The parameter groups: their paths, hyperparameters and slots."""
        return self.state.optimizer.groups

    @property
    def counts(self) -> Counts:
        """The updates done, and where the learning-rate schedule stands."""
        return self.state.counts

    @property
    def hyperparameters(self) -> tuple[dict[str, Hyperparameter], ...]:
        """For each group, its hyperparameters by canonical name; one that is missing is unknown."""
        return tuple(
            {
                name: Hyperparameter(value, group.known_from.get(name))
                for name, value in group.hyperparameters.items()
            }
            for group in self.groups
        )

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor: `params/<path>`, `slots/<path>/<slot>`, `groups/<i>/<slot>`, `extra/...`. `read()` reads it."""
        groups = {str(i): dict(group.slots) for i, group in enumerate(self.groups)}
        slots = {path: dict(named) for path, named in self.slots.items()}
        return tensor_names(
            {"params": dict(self.params), "slots": slots, "groups": groups, "extra": dict(self.state.extra)}
        )

    def close(self) -> None:
        """Closes the files behind the tensors."""
        self.checkpoint.close()

    def __enter__(self) -> OpenState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.checkpoint.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<OpenState {printable(str(self.checkpoint.path))}: {self._summary}>"

    @property
    def _summary(self) -> str:
        kinds = " and ".join(
            f"{schema}, variant {variant or 'unknown'}" for schema, variant in self.state.optimizer.kinds
        )
        slots = sum(map(len, self.slots.values()))
        done = "an unknown number of" if self.counts.done is None else self.counts.done
        content = f"{kinds}, {done} updates done, {len(self.params)} parameters, {slots} slots"
        if self.state.optimizer.schema == WEIGHTS:
            holds = contents_without_optimizer(self.checkpoint.findings, run_of(self.state.extra))
            content = f"{holds.partition(':')[0]}, {len(self.params)} tensors"
        return f"{content}, container {self.checkpoint.container}, layout {self.layout}"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: a summary, the groups' hyperparameters, and the parameters with slots."""
        parts = [f"<p><b>{_shown(self.checkpoint.path)}</b><br>{_shown(self._summary)}</p>"]
        for i, settings in enumerate(self.hyperparameters):
            group = self.groups[i]
            title = f"group {i}: {len(group.paths)} parameters"
            title += f" of {group.schema}, variant {group.variant or 'unknown'}" if group.schema else ""
            rows = [(name, repr(entry.value), entry.known_from or "") for name, entry in settings.items()]
            parts.append(_table(title, ("hyperparameter", "value", "known from"), rows))
        parts.append(_table("", ("parameter", "shape", "dtype", "slots"), self._rows()))
        more = len(self.params) - MOST_ROWS
        return "".join([*parts, f"<p>and {more} more parameters</p>" if more > 0 else ""])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for path in list(self.params)[:MOST_ROWS]:
            param = self.params[path]
            slots = ", ".join(f"{name} {list(slot.shape)}" for name, slot in self.slots.get(path, {}).items())
            yield path, str(list(param.shape)), dtype_name(param.dtype), slots


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    caption = f"<caption>{_shown(title)}</caption>" if title else ""
    first = "".join(f"<th>{_shown(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{_shown(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{caption}<thead><tr>{first}</tr></thead><tbody>{body}</tbody></table>"


def _shown(text: object) -> str:
    from html import escape

    return escape(printable(str(text)))


_NAMED = Evidence(0, "it was named")


def chosen_container(ref: CheckpointRef) -> tuple[CheckpointRef, Container, Evidence]:
    """Returns the container that is named, or else the one that fits best, and why.

    The ref that comes back has the layout that a shorthand names, and the path of the only checkpoint in a folder that
    is none itself.

    Args:
        ref: A checkpoint, or a run's folder.

    Raises:
        NotFoundError: Nothing is there.
        FormatError: No container fits.
        UsageError: No such container.
    """
    if ref.container is not None:
        named, implied = source_container(ref.container)
        return replace(ref, layout=agreed_layout(ref.layout, implied, "--from")), named, _NAMED
    try:
        return ref, *registry.detect_container(ref.place)
    except UnknownFormatError:
        inside = registry.checkpoints_inside(ref.place) if ref.place.is_dir() else {}
        folders = {entry.name for entry in listing(ref.place) if entry.is_dir()} if inside else set()
        # Another folder may hold further checkpoints below it.
        if len(inside) != 1 or folders - inside.keys():
            raise
    only = ref.place / next(iter(inside))
    container, evidence = registry.detect_container(only)
    because = f"{only.name} is the only checkpoint in the folder: {evidence.because}"
    return replace(ref, path=only), container, replace(evidence, because=because)


def chosen_layout(checkpoint: Checkpoint, layout: str | None) -> tuple[Layout, Evidence]:
    """Returns the layout that was named, or else the one that fits best, and why.

    Raises:
        UnknownFormatError: No layout fits.
        UsageError: No such layout.
    """
    return registry.detect_layout(checkpoint) if layout is None else (registry.layout(layout), _NAMED)


@collecting_rarely()
def open_state(
    source: CheckpointRef | Place,
    *,
    container: str | None = None,
    layout: str | None = None,
    step: int | None = None,
    hints: CheckpointRef = NO_HINTS,
    budget: Budget | None = None,
    builds: bool = False,
) -> OpenState:
    """Opens a checkpoint and decodes it; reads headers and scalars only.

    Args:
        source: A checkpoint, a run's folder, or a ref, which says all that follows.
        container: Name of its container; found by its content if None.
        layout: Name of its layout; found by its names if None.
        step: Which step of a run's folder; the newest if None.
        hints: What the checkpoint doesn't say.
        budget: The job's that it is opened for; its own if None.
        builds: Whether the names of parameters may be asked of the model's configuration where nothing else tells them:
            a process of its own builds the architecture.

    Raises:
        NotFoundError: Nothing is there, or no such step or name.
        FormatError: The bytes can't be trusted, or no format fits.
        CorruptError: The checkpoint isn't what its manifest says.
        StateError: The names break the layout.
    """
    ref = ref_of(source, hints, container=container, layout=layout, step=step)
    ref, named, seen = chosen_container(ref)
    budget = budget or ref.job_budget()
    checkpoint = registry.opened(named, ref.place, ref.step, ref, budget)
    try:
        with going_over(ref.place):
            return _decoded(checkpoint, seen, ref.layout, ref, budget, builds)
    except BaseException:
        checkpoint.close()
        raise


def _decoded(
    checkpoint: Checkpoint,
    seen: Evidence,
    layout: str | None,
    ref: CheckpointRef,
    budget: Budget,
    builds: bool,
) -> OpenState:
    meaning, why = chosen_layout(checkpoint, layout)
    try:
        state = registry.decoded(meaning, checkpoint, ref)
    except NamesError as error:
        if not builds or (near := _named_near(meaning, checkpoint, ref, error)) is None:
            raise
        state = near
    odd = (*disagreements(checkpoint, state), *unread(checkpoint, state, ref, budget))
    checkpoint = replace(checkpoint, findings=(*checkpoint.findings, *odd))
    return OpenState(checkpoint, meaning.name, (seen, why), state, budget, ref)


def _named_near(
    layout: Layout, checkpoint: Checkpoint, hints: CheckpointRef, error: NamesError
) -> TrainState | None:
    """Returns the state with names from what lies beside the checkpoint's weights; None if that has none."""
    if hints.names_from is not None or not isinstance(layout, FindsNames):
        return None
    way = layout.names_are_near(checkpoint)
    if not way:
        return None
    try:
        state = registry.decoded(layout, checkpoint, replace(hints, names_from=way))
    except (StateError, FormatError, MissingExtraError) as failed:
        shapes = "; ".join(line.strip() for line in f"{error.found or ''}".splitlines() if line.strip())
        raise NamesError(
            error.subject,
            place=error.place or checkpoint.path,
            expected=error.expected,
            found=f"{shapes}; names from {way} were tried: {failed.line}".removeprefix("; "),
            remedy=failed.remedy or error.remedy,
        ) from error
    sentence = f"The order of the parameters is that of names_from={way}, as nothing else in the checkpoint tells it."
    return replace(state, assumptions=(*state.assumptions, sentence))


def open_beside(path: Place, ref: CheckpointRef, budget: Budget | None = None) -> OpenState:
    """Opens a checkpoint beside a source: what was made of it, or a file of its model.

    What a user says of the source is the source's. Another checkpoint is trusted as far; it gets the places of its
    parts and the names of its parameters from there only where it can't be opened without.

    Args:
        path: The other checkpoint.
        ref: The source, with what the user says of it.
        budget: The job's; that of the ref if None.

    Raises:
        As `open_state`.
    """
    trust = CheckpointRef(path, **ref.options("trust"))
    keyed = replace(trust, model_key=ref.model_key, optimizer_key=ref.optimizer_key)
    faults: list[StatekitError] = []
    for tried in (trust, keyed, replace(keyed, param_names=ref.param_names)):
        try:
            return open_state(tried, budget=budget, builds=True)
        except (UnknownFormatError, StateError, UsageError) as error:
            faults.append(error)
    raise faults[0]


def open_params(ref: CheckpointRef) -> OpenState:
    """Opens a checkpoint for its parameters alone: where no layout decodes the optimizer, they are read without it.

    Raises:
        As `open_state`.
    """
    try:
        return open_state(ref, builds=True)
    except (StateError, UnknownFormatError) as error:
        ref, named, seen = chosen_container(ref)
        checkpoint = registry.opened(named, ref.place, ref.step, ref)
        opened = _params_of(checkpoint, seen, error, ref)
        if opened is None:
            checkpoint.close()
            raise
        return opened


def _params_of(
    checkpoint: Checkpoint, seen: Evidence, error: StatekitError, ref: CheckpointRef
) -> OpenState | None:
    """Returns the parameters that a checkpoint holds besides what no layout decodes; None if none are known."""
    described = registry.contents(checkpoint, ref.param_names)
    if described is None or not described.params:
        return None
    cards = {name: registry.layout_card(name) for name in registry.layout_names()}
    of_weights = [
        name
        for name, card in cards.items()
        if WEIGHTS in card.variants and checkpoint.container in card.containers
    ]
    if not of_weights:
        return None
    done = checkpoint.step or 0
    state = TrainState(
        described.params,
        {},
        Optimizer(WEIGHTS, None, ()),
        Counts(done, done, says_schedule=False),
        assumptions=(f"The optimizer is left unread: {error.subject}",),
    )
    why = Evidence(0, f"the parameters alone were asked for; there is {described.what}")
    return OpenState(checkpoint, of_weights[0], (seen, why), state, ref.job_budget(), ref)


def require_whole(state: TrainState, place: Place) -> None:
    """Refuses a state that no original goes on from: slots that the rule needs are missing, or are whole numbers.

    Raises:
        StateError: Lists every such slot.
    """
    Faults(state.gaps()).check(
        StateError,
        "The optimizer's state isn't whole",
        place=place,
        expected="the slots that its rule needs of every parameter that was updated",
        remedy="take another step of the run, or the weights alone (--params-only, load_params)",
    )


@contextmanager
def state_to_load(ref: CheckpointRef, *, params_only: bool = False) -> Iterator[OpenState]:
    """Opens a checkpoint to load it into a run: every byte that is used is proven, if a manifest has its digest.

    What was read in part is proven when the context is left without an error. It warns of files that may be of another
    step, of what looks like a part of the run and isn't read, and of damage that is accepted.

    Args:
        ref: The checkpoint, with what a user says of it.
        params_only: Whether parameters alone are loaded, which need no optimizer that a layout decodes.

    Raises:
        As `open_state`.
        CorruptError: What is read isn't what its manifest says.
    """
    from statekit.files.proving import proving  # conversions prove their source otherwise

    ref, named, seen = chosen_container(ref)
    budget = ref.job_budget()
    with registry.opened(named, ref.place, ref.step, ref, budget) as checkpoint:
        used = proving(checkpoint, budget, accept=ref.accept_damaged)
        try:
            opened = _decoded(used.checkpoint, seen, ref.layout, ref, budget, builds=True)
        except (StateError, UnknownFormatError) as error:
            without = _params_of(used.checkpoint, seen, error, ref) if params_only else None
            if without is None:
                raise
            opened = without
        if not params_only:
            require_whole(opened.state, opened.checkpoint.path)
        new = opened.checkpoint.findings[len(checkpoint.findings) :]
        doubts = [finding.what for finding in new]
        if doubts:  # to whoever called load_...
            _warn_once(printable(f"{'; '.join(doubts)} @ {checkpoint.path}"))
        yield opened
        used.finish()
        damage = [finding for finding in checkpoint.findings if finding.damage] + used.damage
        if damage:
            listed = "; ".join(f"{finding.what} @ {finding.place}" for finding in damage)
            warnings.warn(printable(f"loaded as it is, though damaged: {listed}"), stacklevel=5)


_WARNED: set[str] = set()
"""What loaders have warned of in this process."""


def _warn_once(text: str) -> None:
    """Warns whoever called a loader, once: parameters and optimizer of one checkpoint are loaded by two calls."""
    if text not in _WARNED:
        warnings.warn(text, stacklevel=6)
        _WARNED.add(text)


@contextmanager
def changing(what: str) -> Iterator[None]:
    """Says of values that turn out to be damaged while others have been copied already, where these went.

    Args:
        what: What is changed in place, as the remedy says it: `the model`.

    Raises:
        CorruptError: That of the values.
    """
    try:
        yield
    except CorruptError as error:
        more = f"; {error.remedy}" if error.remedy else ""
        partly = CorruptError(
            error.subject,
            place=error.place,
            expected=error.expected,
            found=error.found,
            remedy=f"don't go on with {what}: it has other values of the checkpoint by now{more}",
        )
        partly.faults = error.faults
        raise partly from error
