"""A run in memory, in whatever framework, as it is held against its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from statekit.attestation.attest import attest
from statekit.attestation.attestation import Attestation
from statekit.attestation.unknown_rule import attest_by_names
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.errors import UnknownFormatError
from statekit.files.checkpoint import Checkpoint


@dataclass(frozen=True)
class LiveRun:
    """A run in memory.

    Attributes:
        arguments: Those of `statekit.attestation.attest.attest` that are the run's.
        checkpoint: Gives it in the form in which a file is read.
        gathered: Returns what all processes say, each of itself; what this one says where it has all.
    """

    arguments: Mapping[str, Any]
    checkpoint: Callable[[], Checkpoint]
    gathered: Callable[[Callable[[], Attestation]], Attestation] = lambda here: here()

    def attested(
        self, path: CheckpointRef | str | PathLike[str], sample: int | None, seed: int, strict: bool = False
    ) -> Attestation:
        """Returns whether it is the run of a checkpoint; where no schema has the optimizer's rule, by names alone.

        Arguments and errors are those of `statekit.attestation.attest.attest`.
        """
        result = self.gathered(lambda: self._here(path, sample, seed))
        if strict:
            result.check()
        return result

    def _here(self, path: CheckpointRef | str | PathLike[str], sample: int | None, seed: int) -> Attestation:
        try:
            return attest(path, **self.arguments, sample=sample, seed=seed)
        except UnknownFormatError:
            result = self._by_names(ref_of(path).place, sample, seed)
            if result is None:
                raise
            return result

    def _by_names(self, path: Path, sample: int | None, seed: int) -> Attestation | None:
        """Returns what is found by names alone; None where either side doesn't say whose its tensors are."""
        hints = self.arguments["hints"]
        ordered = self.arguments.get("instead")
        if any(self.arguments.get(name) for name in ("names", "maps", "generators")):
            return None
        running = self.checkpoint()
        with registry.opened(registry.detect_container(path)[0], path, hints.step, hints) as checkpoint:
            right, said = registry.contents(checkpoint, hints.param_names), ""
            if right is not None and right.params and not right.slots and ordered:
                right, said = registry.contents(checkpoint, ordered[0][0].param_names), ordered[0][1]
            live = registry.contents(running)
            if right is None or live is None or not right.params or not (right.slots or live.slots):
                return None
            return attest_by_names(
                (checkpoint, right),
                (running, live),
                findings=list(self.arguments.get("findings", ())),
                elsewhere=self.arguments.get("elsewhere", ()),
                assumptions=[said] if said else [],
                sample=sample,
                seed=seed,
            )
