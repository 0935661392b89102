"""How exactly a state goes on after something was done to it: by a conversion, a map, or another rule."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, TypeAlias, get_args

from statekit.errors import check_name

Level: TypeAlias = Literal["bitwise", "rounding", "statistics", "estimate", "lossy"]
"""The least exactness that somebody may ask for."""


class Exactness(IntEnum):
    """How exact a converted tensor is; lower is better."""

    BITWISE = 0
    """Every bit is kept."""
    ROUNDING = 1
    """Equal in real arithmetic: the target continues the same run."""
    STATISTICS = 2
    """What the target's rule would hold had it run from the start; but that rule makes another update."""
    ESTIMATE = 3
    """The current second-moment estimate is kept, its later evolution isn't."""
    LOSSY = 4
    """A best approximation with a measured size."""
    REFUSED = 5
    """Can't be done."""

    @classmethod
    def named(cls, level: str) -> Exactness:
        """Returns the least exactness that somebody asks for.

        Raises:
            UsageError: There is no such level.

        Example:
            >>> Exactness.named("rounding").name
            'ROUNDING'
        """
        return cls[check_name("level", level, get_args(Level), "require").upper()]
