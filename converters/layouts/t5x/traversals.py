"""What a user says of a T5X MultiOptimizer: which parameters each of its optimizers moves, and by what.

Source: T5X t5x/optimizers.py, `MultiOptimizer`; flax/traverse_util.py, `ModelParamTraversal`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from statekit.converters.layouts.hyperparameters import Hyperparameters, OptimizerSpec
from statekit.errors import UsageError
from statekit.tensors.patterns import is_found

TRAVERSALS = "traversals_and_optimizers"


def traversed(
    traversals: Any,
    specified: Hyperparameters,
    slots_by_path: Mapping[str, object],
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> list[OptimizerSpec]:
    """Returns the optimizers of a MultiOptimizer, each with the parameters that its regular expression selects.

    Args:
        traversals: What the user says of them: a list of a regular expression and hyperparameters each.
        specified: What is known of all.
        slots_by_path: The slots of each parameter; None where it has none.
        read: Checks the hyperparameters of one.

    Raises:
        UsageError: They have another form, or don't select exactly the parameters that have slots; lists every one.
        StateError: A pattern may take too long.
    """
    entries = list(_entries(traversals, read))
    owners = {
        path: [i for i, (regex, _) in enumerate(entries) if is_found(regex, path, TRAVERSALS)]
        for path in slots_by_path
    }
    if faults := _selection_faults(owners, slots_by_path):
        raise UsageError(f"{TRAVERSALS} doesn't fit the checkpoint.", found="; ".join(faults)[:2000])
    return [
        OptimizerSpec(
            tuple(path for path, owning in owners.items() if owning == [i]), specified.over(values, "given")
        )
        for i, (_, values) in enumerate(entries)
    ]


def _selection_faults(owners: Mapping[str, Sequence[int]], slots_by_path: Mapping[str, object]) -> list[str]:
    """Returns the parameters that aren't selected once, or whose slots contradict the selection."""
    faults = [f"{path} is selected {len(owning)} times" for path, owning in owners.items() if len(owning) > 1]
    faults += [
        f"{path} is selected but has no slots"
        for path, owning in owners.items()
        if owning and slots_by_path[path] is None
    ]
    faults += [
        f"{path} has slots but isn't selected"
        for path, owning in owners.items()
        if not owning and slots_by_path[path]
    ]
    return faults


def _entries(
    traversals: Any, read: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for entry in traversals if isinstance(traversals, Sequence) else [traversals]:
        fields: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
        regex, values = fields.get("path_regex_search"), fields.get("hyperparameters", {})
        try:
            if not isinstance(regex, str):
                raise TypeError
            re.compile(regex)
        except (re.error, TypeError, RecursionError) as error:
            raise UsageError(
                f"{TRAVERSALS} has another form.",
                expected='[{"path_regex_search": "kernel$", "hyperparameters": {...}}, ...]',
                found=repr(entry)[:200],
            ) from error
        if not isinstance(values, dict):
            raise UsageError(f"{TRAVERSALS} has hyperparameters that aren't a map.", found=repr(values)[:200])
        yield regex, read(values)
