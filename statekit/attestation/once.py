"""What the callbacks of all trainers share: they attest once, before a run's first update, and say what came of it."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from statekit.attestation.attestation import Attestation
from statekit.attestation.each_save import tell
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.dropin.loading import Call

_ARGUMENTS = ("generators", "sample", "seed", "scaler", "scheduler")
"""Options of an `attest` that say nothing of the checkpoint."""


class AttestsOnce:
    """Attests a run before its first update, when all is loaded.

    Args:
        path: The checkpoint that the run goes on from.
        strict: Whether to raise what is wrong, or to print it alone.
        strict_schedule: Whether it is wrong that only updates after the next have another learning rate, as with
            another number of updates in all; a warning is printed otherwise.
        **options: Those of the framework's `attest`.

    Attributes:
        result: What was found; None before the first update, and where a run couldn't be attested.

    Raises:
        UsageError: There is no such option.
    """

    def __init__(
        self,
        path: CheckpointRef | str | PathLike[str],
        *,
        strict: bool = True,
        strict_schedule: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        refs = {name: value for name, value in options.items() if name not in _ARGUMENTS}
        Call.of(path if isinstance(path, CheckpointRef) else Path(path), refs).alone()  # asks no store or Hub
        self.path, self.strict = path, strict
        self.options = {"strict_schedule": strict_schedule, **options}
        self._forget()

    def _forget(self) -> None:
        """Forgets what was said of an earlier run."""
        self.result: Attestation | None = None
        self._is_over = False

    def _once(self, attest: Callable[[], Attestation], speaks: bool = True) -> None:
        """Attests, the first time.

        Args:
            attest: Attests.
            speaks: Whether this process prints what passed; what didn't, each does.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            self.result = attest()
        except Exception as error:  # a cut file, a store that doesn't answer
            if self.strict:
                raise
            tell(f"statekit: not attested: {error}")
            return
        if speaks or not self.result.passed:
            tell(self.result)
        if self.strict:
            self.result.check()
