"""The words in the names of networks, optimizers and schedules that say whose they are."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_GENERIC = frozenset({
    "state", "states", "dict", "model", "models", "net", "nets", "network", "networks", "module", "weights", "params",
    "opt", "opts", "optim", "optims", "optimizer", "optimizers", "optimiser",
    "lr", "sched", "scheds", "scheduler", "schedulers", "schedule", "schedules",
})  # fmt: skip
"""Words that don't say whose something is."""


def words_of(path: Iterable[object]) -> tuple[str, ...]:
    """Returns the words of a path that say whose it is.

    Example:
        >>> words_of(["optimizerG"]), words_of(["critic", "scheduler"])
        (('g',), ('critic',))
    """
    words = [word.lower() for key in path for word in _WORDS.findall(str(key))]
    return tuple(word for word in words if word not in _GENERIC)
