"""The table of all conversions: how exactly a run of each variant goes on in each layout.

It goes by the rules alone, with hyperparameters as each variant has them unless told otherwise. What the shapes and
settings of a checkpoint change, such as matrices that only one side factors, `statekit convert --dry-run` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from statekit.conversion import registry
from statekit.conversion.contracts import Exactness
from statekit.conversion.rule_change import RuleChange, best_rule_change
from statekit.state.schema import load_schema, schema_names
from statekit.state.train_state import Counts, Group, Optimizer, TrainState


@dataclass(frozen=True)
class Cell:
    """One conversion.

    Attributes:
        schema: The optimizer.
        variant: Whose run it is.
        layout: Where it goes on.
        rule_change: Under which rule; None if under its own.
    """

    schema: str
    variant: str
    layout: str
    rule_change: RuleChange | None

    @property
    def exactness(self) -> Exactness:
        """How exactly the run goes on."""
        return self.rule_change.exactness if self.rule_change else Exactness.BITWISE

    @property
    def reasons(self) -> list[str]:
        """Why it isn't equal in real arithmetic, a sentence each."""
        differences = self.rule_change.differences if self.rule_change else ()
        return [str(difference) for difference in differences if difference.exactness > Exactness.ROUNDING]

    def to_json(self) -> dict[str, Any]:
        """Returns the cell as plain JSON."""
        return {
            "schema": self.schema,
            "variant": self.variant,
            "layout": self.layout,
            "rule": self.rule_change.target if self.rule_change else self.variant,
            "exactness": self.exactness.name.lower(),
            "reasons": self.reasons,
            "made_up": list(self.rule_change.compensated_by) if self.rule_change else [],
        }


def cells() -> Iterator[Cell]:
    """Yields every conversion between a variant that some layout reads and a layout that holds its optimizer."""
    layouts = [registry.layout_card(name) for name in registry.layout_names()]
    for schema in schema_names():
        homes = [layout for layout in layouts if schema in layout.variants]
        for variant in load_schema(schema).variants:
            for layout in homes:
                keeps = layout.keeps_rule(schema, (variant,))
                state, followed = bare(schema, variant), layout.variants[schema]
                change = None if keeps else best_rule_change(state, (variant,), followed)
                yield Cell(schema, variant, layout.name, change)


def bare(schema: str, variant: str) -> TrainState:
    """Returns a state without parameters, as a variant's run has it."""
    settings = load_schema(schema).variant(variant)["defaults"]
    group = Group((), settings, dict.fromkeys(settings, "assumed"))
    return TrainState({}, {}, Optimizer(schema, variant, (group,)), Counts(1, 1))
