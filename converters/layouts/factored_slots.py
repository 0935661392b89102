"""What the shapes of Adafactor's slots prove about how parameters were chosen for factoring."""

from __future__ import annotations

from collections.abc import Sequence

from statekit.converters.layouts.told import Settings

MINIMUM = "min_dim_size_to_factor"


def with_minimum(
    found: Settings, factored: Sequence[int], unfactored: Sequence[int]
) -> tuple[Settings, list[str]]:
    """Returns settings whose min_dim_size_to_factor fits the slots, and what is open about it.

    Args:
        found: Settings with the usual minimum.
        factored: The deciding size of each parameter that is factored.
        unfactored: That of each that could be and isn't.
    """
    low, high = max(unfactored, default=-1) + 1, min(factored, default=None)
    if low <= found.values[MINIMUM] and (high is None or found.values[MINIMUM] <= high):
        return found, []
    if high is None:
        return found.over({MINIMUM: low}, "assumed"), [f"{MINIMUM} is at least {low}; {low} is assumed."]
    if low == high:
        return found.over({MINIMUM: high}, "file"), []
    if low < high:
        return found.over({MINIMUM: high}, "assumed"), [
            f"{MINIMUM} is from {low} to {high}; {high} is assumed."
        ]
    return found, [
        f"{MINIMUM} is open: a parameter with a size of {high} is factored, one with {low - 1} isn't."
    ]
