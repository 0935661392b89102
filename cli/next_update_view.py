"""What the next update will use, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statekit.cli.output import Screen, plural
from statekit.conversion.resume import next_update


def show_next(stdout: Screen, state: Mapping[str, Any]) -> None:
    """Prints what the next update of each group will use."""
    groups = next_update(state)
    stdout.title("The next update will use:")
    for i, group in enumerate(groups):
        rate = group["learning_rate"]
        parts = [
            f"update {group['update'] + 1} ({group['update']} done)",
            f"learning rate {rate:g}" if isinstance(rate, float) else "the learning rate you give",
            f"a learning-rate schedule goes on at its step {group['schedule']}",
        ]
        if group.get("decay") is not None:
            parts.append(f"second-moment decay {group['decay']:.6g} (step_offset {group['step_offset']})")
        label = f"group {i}, {plural(group['parameters'], 'parameter')}: " if len(groups) > 1 else ""
        stdout.say(f"{label}{'; '.join(parts)}", indent=2)
