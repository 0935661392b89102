"""What each kind of job does: one public verb of the library, with the options that the job has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statekit.service.task import Listener

KINDS: Mapping[str, Callable[[Mapping[str, Any], Listener], Any]] = {}
