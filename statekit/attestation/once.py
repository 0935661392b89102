"""What the callbacks of all trainers share: they attest once, before a run's first update, and say what came of it."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

from statekit.attestation.attestation import Attestation
from statekit.attestation.each_save import tell


class AttestsOnce:
    """Attests a run before its first update, when all is loaded.

    Args:
        path: The checkpoint that the run goes on from.
        strict: Whether to raise what is wrong, or to print it alone.
        strict_schedule: Whether it is wrong that only updates after the next have another learning rate, as with
            another number of updates in all; a warning is printed otherwise.
        **options: Those of the framework's `attest`.

    Attributes:
        result: What was found; None before the first update.
    """

    def __init__(
        self, path: str | PathLike[str], *, strict: bool = True, strict_schedule: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.path, self.strict = path, strict
        self.options = {"strict_schedule": strict_schedule, **options}
        self.result: Attestation | None = None

    def _once(self, attest: Callable[[], Attestation], speaks: bool = True) -> None:
        """Attests, the first time.

        Args:
            attest: Attests.
            speaks: Whether this process prints what passed; what didn't, each does.
        """
        if self.result is not None:
            return
        self.result = attest()
        if speaks or not self.result.passed:
            tell(self.result)
        if self.strict:
            self.result.check()
