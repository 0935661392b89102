"""A run in memory, of any framework, as `attest` compares it with its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from statekit.attestation.attestation import Attestation, Finding
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.open_state import OpenState
from statekit.files.checkpoint import Checkpoint
from statekit.maps.links import StateMap
from statekit.state.comparison import Rate
from statekit.state.exactness import Level
from statekit.state.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A run in memory.

    Attributes:
        live: Gives the canonical state of the live run, with parameters by the names of the caller.
        checkpoint: Gives the run in the form in which a file is read.
        hints: What the checkpoint doesn't say.
        gathered: Returns what all processes say, each of itself; what this one says where it has all.
        findings: What is wrong with the live run apart from its state.
        unchecked: What the caller couldn't compare, a sentence each.
        generators: Compares the random generators, and says what it can't; None if that isn't asked for.
        names: Names in the checkpoint by the caller's, where they differ.
        remembered: Names in the checkpoint that the live run was loaded from, by the caller's; those that this one has
            are taken where no names are given.
        maps: From the checkpoint's model to that of another codebase.
        require: The least exactness that the maps may have.
        shows_schedule: Whether the live state has its schedule if there is one, so that none is a fault.
        live_rates: Learning rate of the update after so many, by the number of a live group, where a function that no
            state says makes it.
        live_length: Updates of the live run in all, as far as its schedule knows it.
        strict_schedule: Whether a rate of a later update than the next that differs is a finding, or a warning.
        whole_model: Whether all of the model is given, so that what isn't trained is missing if it isn't there.
        instead: What the live run makes of the hints where the checkpoint can't be decoded otherwise, and what is
            assumed then, one sentence, or none; the first that can be is taken.
        elsewhere: Parameters of which this process has nothing, and others have all.
    """

    live: Callable[[OpenState], TrainState]
    checkpoint: Callable[[], Checkpoint]
    hints: CheckpointRef
    gathered: Callable[[Callable[[], Attestation]], Attestation] = lambda here: here()
    findings: Iterable[Finding] = ()
    unchecked: Iterable[str] = ()
    generators: Callable[[OpenState], tuple[Sequence[Finding], Sequence[str]]] | None = None
    names: Mapping[str, str] | None = None
    remembered: Mapping[str, str] = field(default_factory=dict)
    maps: Sequence[StateMap] = ()
    require: Level = "rounding"
    shows_schedule: bool = False
    live_rates: Mapping[int, Rate] = field(default_factory=dict)
    live_length: int | None = None
    strict_schedule: bool = True
    whole_model: bool = False
    instead: Sequence[tuple[CheckpointRef, str]] = ()
    elsewhere: Collection[str] = ()
