"""T5X's Adafactor as a torch.optim.Optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from statekit.backends import backend
from statekit.errors import UnknownRuleError, UsageError, fault_list
from statekit.optim.adafactor import check_rule, hyperparameters, init, next_decay
from statekit.optim.adafactor import settle as settled
from statekit.optim.run import move_group, settled_group, steps_for
from statekit.optim.steps import Scene
from statekit.state import Group
from statekit.torch.groups import ParamGroup, canonical, check_named, path_of, rules_of, settle
from statekit.torch.loading import match, taken_over


class Adafactor(torch.optim.Optimizer):
    """Moves parameters as T5X's Adafactor does.

    The state of a parameter is `v_row` and `v_col`, or `v`, and with momentum `m`: float32, `m` in `dtype_momentum`,
    zeros from the moment the parameter is added, so leave frozen parameters out. Each group counts its updates in
    `step`; every call of `step` counts, whatever the gradients are.

    The learning rate is the one before parameter scale. T5X never steps without a schedule, so there is no default:
    `step` raises until every group has an `lr`. With `multiply_by_parameter_scale` steps are relative to the size of
    the parameter, without it they are absolute. T5X's usual schedule, for an optimizer with lr=1.0:
    `LambdaLR(optimizer, lambda step: max(step, 10_000) ** -0.5)`.

    Args:
        params: `model.named_parameters()`, or groups whose `params` are (name, parameter); options of a group
            outweigh those below.
        lr: Learning rate: a number, a 0-d tensor, or None if it is given later.
        beta1: Decay of the momentum; None for none.
        decay_rate: Exponent of the second moment's decay, 1 - t^-decay_rate.
        step_offset: The count at which that decay starts again.
        clipping_threshold: Largest root mean square of a parameter's preconditioned gradient; None for no clipping.
        weight_decay_rate: What every update takes off the parameter, not scaled by the learning rate; None for none.
        weight_decay_rate_lr_exponent: Exponent of the learning rate that the weight decay is multiplied with.
        multiply_by_parameter_scale: Whether steps are relative: one bool, or by name, as {name: bool} or
            [(regex, bool), ...].
        min_dim_size_to_factor: The smallest second-largest axis of a matrix that is factored.
        factored: Whether second moments are factored at all.
        epsilon1: What is added to squared gradients.
        epsilon2: Floor of the parameter scale.
        dtype_momentum: Dtype of `m`, by name.
        factor_map: Which axes are factored: [(regex, labels), ...], where the first regex found in the name counts and
            must be there, or {name: labels}. Labels are one of ROW, COLUMN, BATCH, NONE per axis, or "HEURISTIC".
            For rank 0 to 2, labels without BATCH are ignored in favour of the heuristic; rank 3 and more need some.
        global_norm_clip_threshold: Largest norm of all gradients of a group together.
        max_parameter_scale: Ceiling of the parameter scale.
        skip_nan_updates: Whether elements that would become NaN keep their value.

    Raises:
        UsageError: Parameters without names, of rank 3 and more without a rule, or options that can't be.

    Source: T5X t5x/adafactor.py, `Adafactor`.

    Example:
        >>> linear = torch.nn.Linear(4, 3)
        >>> optimizer = Adafactor(linear.named_parameters(), lr=1e-3)
        >>> linear(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["step"]
        1
    """

    def __init__(
        self,
        params: Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor | None = None,
        *,
        beta1: float | None = None,
        decay_rate: float = 0.8,
        step_offset: int = 0,
        clipping_threshold: float | None = 1.0,
        weight_decay_rate: float | None = None,
        weight_decay_rate_lr_exponent: float | None = None,
        multiply_by_parameter_scale: bool | dict[str, bool] | Sequence[tuple[str, bool]] = True,
        min_dim_size_to_factor: int = 128,
        factored: bool = True,
        epsilon1: float = 1e-30,
        epsilon2: float = 1e-3,
        dtype_momentum: str = "float32",
        factor_map: dict[str, Any] | Sequence[tuple[str, Any]] | None = None,
        global_norm_clip_threshold: float | None = None,
        max_parameter_scale: float | None = None,
        skip_nan_updates: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "step": 0,
            "beta1": beta1,
            "decay_rate": decay_rate,
            "step_offset": step_offset,
            "clipping_threshold": clipping_threshold,
            "weight_decay_rate": weight_decay_rate,
            "weight_decay_rate_lr_exponent": weight_decay_rate_lr_exponent,
            "multiply_by_parameter_scale": multiply_by_parameter_scale,
            "min_dim_size_to_factor": min_dim_size_to_factor,
            "factored": factored,
            "epsilon1": epsilon1,
            "epsilon2": epsilon2,
            "dtype_momentum": dtype_momentum,
            "factor_map": factor_map,
            "global_norm_clip_threshold": global_norm_clip_threshold,
            "max_parameter_scale": max_parameter_scale,
            "skip_nan_updates": skip_nan_updates,
        }
        super().__init__(params, options)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group of (name, parameter) with its own options and a count of its own.

        Raises:
            UsageError: As for the optimizer itself; the group isn't added then.
        """
        check_named(param_group, self.param_groups)
        super().add_param_group(param_group)
        try:
            settle(param_group)
        except BaseException:
            self.param_groups.pop()
            raise
        xp, group, rules = backend("torch"), canonical(param_group), rules_of(param_group)
        for path, param in zip(group.paths, param_group["params"], strict=True):
            self.state[param] = init(xp, param, settled(group, path, rules[path], "t5x"), "t5x")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one update.

        Args:
            closure: Computes the gradients again and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            UnknownRuleError: A group has no learning rate, or a rule or hyperparameter is unknown; lists every one.
            UsageError: A gradient is sparse, or `step_offset` lies beyond the count. No parameter was changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_ready()
        for group in self.param_groups:
            self._move(group)
            group["step"] += 1
        return loss

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
        found = match(self.param_groups, state_dict)
        self.param_groups = list(found.groups)
        for param, slots in found.slots:
            self.state[param] = taken_over(param, slots)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _check_ready(self) -> None:
        faults, sparse = [], []
        for i, group in enumerate(self.param_groups):
            if group["lr"] is None:
                faults.append(("no learning rate: set lr", f"group {i}"))
            known, rules = canonical(group), rules_of(group)
            for name, param in zip(group["param_names"], group["params"], strict=True):
                if param.grad is None:
                    continue
                if param.grad.layout != torch.strided:
                    sparse.append((f"has a gradient of layout {param.grad.layout}", name))
                try:
                    check_rule(rules.get(path_of(name)), name, param.dim())
                    hyperparameters(known, path_of(name))
                except UnknownRuleError as error:
                    faults.append((f"unknown: {error.expected}", name))
        if faults:
            raise UnknownRuleError(
                "The optimizer doesn't know all that a step needs.",
                found=fault_list(faults),
                remedy="set lr in optimizer.param_groups, or give load_optimizer(..., lr=..., hparams={...}) what the "
                "run was configured with",
            )
        if sparse:
            raise UsageError(
                "Gradients are sparse, and Adafactor needs them dense.",
                found=fault_list(sparse),
                remedy="use sparse=False in the embedding",
            )
        for group in self.param_groups:
            if "step_offset" in group and "decay_rate" in group:
                next_decay(group["step"], group["step_offset"], group["decay_rate"])

    def _move(self, group: ParamGroup) -> None:
        known, rules = canonical(group), rules_of(group)
        params = dict(zip(known.paths, group["params"], strict=True))
        grads = {path: param.grad for path, param in params.items() if param.grad is not None}
        # Only a common norm ties parameters together. Else one after the other, so that the new values of one are held.
        together = bool(known.hyperparameters.get("global_norm_clip_threshold"))
        for part in [grads] if together else [{path: grad} for path, grad in grads.items()]:
            self._update({path: params[path] for path in part}, part, known, rules, group)

    def _update(
        self,
        params: dict[str, torch.Tensor],
        grads: dict[str, torch.Tensor],
        known: Group,
        rules: dict[str, Any],
        group: ParamGroup,
    ) -> None:
        slots = {  # where the parameter lives now: a model may have moved since
            path: {slot: value.to(param.device) for slot, value in self.state[param].items()}
            for path, param in params.items()
        }
        steps = steps_for("adafactor", "t5x")
        scene = Scene(backend("torch"), "t5x", group["lr"], group["step"])
        after, kept, _ = move_group(
            steps, scene, known, settled_group(steps, known, rules, "t5x"), params, grads, slots, {}
        )
        for path, param in params.items():
            param.copy_(after[path])
            for slot, value in kept[path].items():
                slots[path][slot].copy_(value)
            self.state[param] = slots[path]
