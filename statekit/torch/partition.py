"""Several optimizers in one, as a torch.optim.Optimizer: each group is moved by its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from statekit.errors import UsageError
from statekit.optim.run import steps_for
from statekit.state.options import CLASSES
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.torch.groups import ParamGroup
from statekit.torch.optimizer import GroupedOptimizer, Rate
from statekit.torch.slots import Changes


@final
class Partition(GroupedOptimizer):
    """Moves each group of parameters by an optimizer of its own, as `optax.partition` does.

    State and options of a group are those of the class for its schema: `statekit.torch.Adafactor`, `AdamW`, ...

    Args:
        params: Groups: `params` of (name, parameter), `schema` (adafactor, adamw, lamb, lans, muon or scaled_adam),
            `variant` in that schema, and options by their canonical names or the variant's own; those that aren't given
            are as the variant has them. Groups of Keller Jordan's Muon may say `use_muon` instead of both.
        lr: Learning rate of groups without one of their own: a number, a 0-d array, or None if it is given later.
        foreach: Whether equal parameters are moved together; if not, each by itself, bit for bit as replay does.

    Raises:
        StateError: There is no such variant, or it can't be stepped.
        UsageError: A group without schema or variant, parameters without names, or options that can't be.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(4, 3)
        >>> names = dict(linear.named_parameters())
        >>> optimizer = Partition(
        ...     [
        ...         {"params": [("weight", names["weight"])], "schema": "adafactor", "variant": "hf", "lr": 1e-2},
        ...         {"params": [("bias", names["bias"])], "schema": "adamw", "variant": "torch", "weight_decay": 0.0},
        ...     ],
        ...     lr=1e-3,
        ... )
        >>> linear(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[linear.weight]), sorted(optimizer.state[linear.bias])
        (['v_col', 'v_row'], ['m', 'v'])
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: Rate = None, *, foreach: bool = True) -> None:
        self._plans, self._direct, self._changes = {}, {}, Changes()
        super().__init__(params, {"lr": lr, "step": 0, "foreach": foreach})

    def _schemas(self) -> tuple[str, ...]:
        return tuple(CLASSES)

    def _kind(self, group: ParamGroup) -> tuple[OptimizerSchema, str]:
        if isinstance(use_muon := group.get("use_muon"), bool):
            group.setdefault("schema", "muon" if use_muon else "adamw")
            group.setdefault("variant", "keller")
        schema, variant = group.get("schema"), group.get("variant")
        if schema not in CLASSES or not isinstance(variant, str):
            raise UsageError(
                "A group doesn't say by which optimizer it is moved.",
                place="schema, variant",
                expected=f"schema: {', '.join(CLASSES)}; variant: one of that schema's",
                found=f"schema {schema!r:.80}, variant {variant!r:.80}",
            )
        steps_for(schema, variant)
        return load_schema(schema), variant
