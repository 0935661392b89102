"""What every optimizer of statekit.torch is: groups, steps, states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, ClassVar, TypeAlias, final

import torch
from torch._compile import _disable_dynamo

from statekit.dropin.options import refuse_options
from statekit.errors import Faults, UnknownRuleError, UsageError
from statekit.optim.run import steps_for
from statekit.state.options import LOGICAL, offered, read_options
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.train_state import next_decay
from statekit.torch.fast.batching import in_own_memory, laid_together
from statekit.torch.groups import ParamGroup, check_named, rate_fault, read_group, settle_group
from statekit.torch.kernels.direct import DirectUpdate, refuse_capture
from statekit.torch.slots import Changes, Slots, WatchedSlots, first_group_slots, first_slots
from statekit.torch.state_matching import match, taken_over
from statekit.torch.step import move
from statekit.torch.update_plan import GroupPlan, plan_group

Params: TypeAlias = Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]
Rate: TypeAlias = float | torch.Tensor | None


class GroupedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose groups say by whose rule they are moved: `schema` and `variant`."""

    _plans: dict[int, GroupPlan]
    _direct: dict[int, DirectUpdate]
    _changes: Changes

    @abstractmethod
    def _schemas(self) -> tuple[str, ...]:
        """Returns the schemas that its groups may have."""

    @abstractmethod
    def _kind(self, group: ParamGroup) -> tuple[OptimizerSchema, str]:
        """Returns schema and variant of a group that is to be added."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over what a copy or a pickle holds."""
        super().__setstate__(state)
        self._plans, self._direct, self._changes = {}, {}, Changes()
        self._hold([*self.state], [*self.state.values()])

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group of (name, parameter) with its own options and a count of its own.

        Raises:
            UsageError: As for the optimizer itself; the group isn't added then.
        """
        schema, variant = self._kind(param_group)
        check_named(param_group, self.param_groups)
        read_group(param_group, schema, variant)
        for name, value in usual_options(schema.name, variant).items():
            param_group.setdefault(name, self.defaults.get(name, value))
        super().add_param_group(param_group)
        try:
            settle_group(param_group, schema, variant)
            slots = list(first_slots(param_group))
            whole = first_group_slots(param_group)
        except BaseException:
            self.param_groups.pop()
            raise
        self._hold(param_group["params"], slots)
        if whole:
            param_group["slots"] = whole

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one update.

        Args:
            closure: Computes the gradients again and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            UnknownRuleError: A group has no learning rate, or a rule or hyperparameter is unknown; lists every one.
            StateError: A parameter has been resized since its slots were made; lists every one.
            UsageError: A gradient is sparse, or `step_offset` lies beyond the count. No parameter was changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy or a pickle holds."""
        whole = super().__getstate__()
        return {
            **whole,
            "state": defaultdict(dict, {key: _unshared(slots) for key, slots in whole["state"].items()}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns slots by index and the groups, as `torch.optim.Optimizer` does.

        Small slots of equal parameters are copies: in the optimizer they share their memory.
        """
        for i, direct in self._direct.items():
            direct.settle(self.param_groups[i])
        state = super().state_dict()
        if "state" in state:  # a hook may return anything
            state["state"] = {index: _unshared(slots) for index, slots in state["state"].items()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, or the `optimizer` part of a converted checkpoint, by parameter name.

        Parameters and groups may stand in another order than in the state. Hyperparameters come from the state; one
        that the state leaves unknown stays as it is. Tensors are copied and keep their dtype.

        Raises:
            StateError: Parameters are missing, left over, of other shapes or grouped otherwise; lists every one.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        fitted = match(self._schemas(), type(self).__name__, self.param_groups, state_dict)
        # All that may fail comes first: memory that ends leaves the optimizer as it was.
        self._hold([p for p, _ in fitted.slots], [taken_over(p, sources) for p, sources in fitted.slots])
        self.param_groups, self._plans, self._direct = list(fitted.groups), {}, {}
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _hold(self, params: Sequence[torch.Tensor], slots: Sequence[Slots]) -> None:
        watched = (WatchedSlots(arrays, self._changes) for arrays in laid_together(slots))
        self.state.update(zip(params, watched, strict=True))

    @_disable_dynamo  # a compiled caller runs it as it is: the fast paths leave nothing to fuse
    def _update(self) -> None:
        if self._directly():
            return
        refuse_capture(self.param_groups)
        self._settle_counts()
        if not self._unscaled():
            return
        plans = [self._plan_of(i, group) for i, group in enumerate(self.param_groups)]
        self._watch()
        self._check_ready(plans)
        for group, plan in zip(self.param_groups, plans, strict=True):
            move(group, plan, self.state)
        self._direct = {
            i: direct
            for i, (group, plan) in enumerate(zip(self.param_groups, plans, strict=True))
            if (direct := DirectUpdate.of(group, plan, self.state))
        }

    def _directly(self) -> bool:
        """Has kernels move all groups as they did before; tells whether they have."""
        if len(self._direct) < len(self.param_groups) or not self._keeps_slots():
            return False
        for i, group in enumerate(self.param_groups):
            rated = group["lr"] is not None or not self._direct[i].plan.rate_needed
            if not rated or not self._direct[i].ready(group):
                return False
        self._check_offsets()
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for i, group in enumerate(self.param_groups):
            self._direct[i].run(group, scale, overflow)
        return True

    def _watch(self) -> None:
        """Notices from now on who replaces slots."""
        for param, slots in self.state.items():
            if type(slots) is not WatchedSlots:  # somebody has put them there
                self.state[param] = WatchedSlots(slots, self._changes)
        self._watched = self._changes.count, [*self.state.values()]

    def _keeps_slots(self) -> bool:
        """Tells whether every parameter has the very slots that it had."""
        count, slots = self._watched
        same = self._changes.count == count and len(self.state) == len(slots)
        return same and all(map(is_, self.state.values(), slots))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` leaves it to kernels to divide gradients, and to skip the update."""
        return len(self._direct) == len(self.param_groups) > 0

    def _unscaled(self) -> bool:
        """Divides gradients by what a gradient scaler left to kernels; tells whether the update is to be made."""
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            for group in self.param_groups:
                grads = [param.grad for param in group["params"] if param.grad is not None]
                torch._foreach_div_(grads, scale)
        return overflow is None or not bool(overflow)

    def _settle_counts(self) -> None:
        for i, direct in self._direct.items():
            direct.settle(self.param_groups[i])
        self._direct = {}

    def _plan_of(self, index: int, group: ParamGroup) -> GroupPlan:
        plan = self._plans.get(index)
        if plan is None or not plan.holds(group):
            for param in group["params"]:  # a model may have moved since
                slots = self.state[param]
                self.state[param] = {name: value.to(param.device) for name, value in slots.items()}
            _follow(group)
            plan = self._plans[index] = plan_group(group, self.state)
        return plan

    def _check_ready(self, plans: Sequence[GroupPlan]) -> None:
        faults, sparse = Faults(), Faults()
        for i, (group, plan) in enumerate(zip(self.param_groups, plans, strict=True)):
            if group["lr"] is None and plan.rate_needed:
                faults.add("no learning rate: set lr", f"group {i}")
            for name, path, param in zip(
                group["param_names"], plan.group.paths, group["params"], strict=True
            ):
                if param.grad is None:
                    continue
                if param.grad.layout != torch.strided:
                    sparse.add(f"has a gradient of layout {param.grad.layout}", name)
                if path in plan.faults:
                    faults.add(plan.faults[path], name)
        faults.check(
            UnknownRuleError,
            "The optimizer doesn't know all that a step needs",
            remedy="set lr in optimizer.param_groups, or give load_optimizer(..., lr=..., hparams={...}) what the "
            "run was configured with",
        )
        sparse.check(
            UsageError,
            f"Gradients are sparse, and {type(self).__name__} needs them dense",
            remedy="use sparse=False in the embedding",
        )
        self._check_offsets()

    def _check_offsets(self) -> None:
        for group in self.param_groups:
            if "step_offset" in group and "decay_rate" in group:
                next_decay(group["step"], group["step_offset"], group["decay_rate"])


class SchemaOptimizer(GroupedOptimizer, ABC):
    """An optimizer of one schema: its classes differ in their signature alone.

    Args:
        params: `model.named_parameters()`, or groups whose `params` are (name, parameter); options of a group
            outweigh those below.
        lr: Learning rate, or None if it is given later.
        variant: Whose rule; a variant of the schema.
        foreach: Whether equal parameters are moved together, and by fast paths where there are some. If not, each
            is moved by itself by the reference text, bit for bit as replay does.
        options: Hyperparameters by their canonical names or the variant's own; the others are as the variant has them.

    Raises:
        StateError: There is no such variant, or it can't be stepped.
        UsageError: Parameters without names, of a rank that needs a rule and without one, or options that can't be.
    """

    SCHEMA: ClassVar[str]
    """The schema's name."""

    def __init__(
        self, params: Params, lr: Rate, variant: str, foreach: bool, options: Mapping[str, Any]
    ) -> None:
        steps_for(self.SCHEMA, variant)
        stated = read_options(self.SCHEMA, variant, options, rate="lr")
        fault = rate_fault(lr)
        refuse_options([*stated.faults, *([(fault, "lr")] if fault else [])], stated.remedy)
        usual = usual_options(self.SCHEMA, variant)
        kept = {"lr": lr, "step": 0, "schema": self.SCHEMA, "variant": variant, "foreach": foreach}
        self._plans, self._direct, self._changes = {}, {}, Changes()
        super().__init__(params, {**kept, **usual, **stated.values})

    @final
    def _schemas(self) -> tuple[str, ...]:
        return (self.SCHEMA,)

    @final
    def _kind(self, group: ParamGroup) -> tuple[OptimizerSchema, str]:
        return load_schema(self.SCHEMA), self.defaults["variant"]


def usual_options(schema: str, variant: str) -> dict[str, Any]:
    """Returns the options of a group, as the variant has them."""
    return {name: value for name, value in offered(schema, variant).items() if name != LOGICAL}


def _follow(group: ParamGroup) -> None:
    """Moves the slots of a group as a whole to where its parameters live by now."""
    devices = [param.device for param in group["params"]]
    if devices and "slots" in group:
        group["slots"] = {
            name: value if value.device in devices else value.to(devices[0])
            for name, value in group["slots"].items()
        }


def _unshared(slots: Slots) -> Slots:
    return {name: in_own_memory(value) for name, value in slots.items()}
