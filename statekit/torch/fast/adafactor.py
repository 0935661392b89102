"""Adafactor on stacks of equal parameters, in place; `statekit.optim.adafactor` has the rule.

What is gained over the text: the preconditioned gradient of a matrix, g_ij a_i b_j, is never there with both factors.
One product g_ij b_j is kept; its rows' norms give the root mean square for clipping, and a_i joins the step size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from statekit.arrays.backend import Value, backend
from statekit.optim import adafactor_forms as forms
from statekit.optim.adafactor import ParamConfig
from statekit.optim.steps import Scene
from statekit.state.constants import variant_constants
from statekit.state.train_state import Axis, Rule
from statekit.tensors.tensor import Shape
from statekit.torch.fast.batching import (
    Followed,
    Slots,
    Stacked,
    Stacks,
    Tensors,
    along,
    by_name,
    in_stacks,
    pieces,
    plain,
    squares,
)
from statekit.torch.fast.numba_runner import Items, in_reach

FOLLOWED = Followed(
    hyper=dict.fromkeys(
        (
            "beta1", "decay_rate", "decay_type", "beta2", "second_moment_decay", "step_offset", "clipping_threshold",
            "weight_decay_rate", "weight_decay_rate_lr_exponent", "multiply_by_parameter_scale", "epsilon1", "epsilon2",
            "dtype_momentum", "max_parameter_scale", "relative_step", "warmup_init", "own_rate_scaled",
            "use_ema", "ema_momentum", "ema_overwrite_frequency",
        )
    ),
    forms={
        **dict.fromkeys(("step_scope", "repeated_rows", "lr_source", "weight_decay_form")),
        "nan_norm": ("spreads",),
        "second_moment_update": ("weighted_sum",),
        "epsilon1_place": ("added_to_square",),
        "statistic": ("mean",),
        "bias_correction": ("none",),
        "normaliser": ("mean",),
        "precondition_form": ("powers", "rsqrts", "rsqrts_first", "estimate_sqrt"),
        "parameter_scale_over": ("non_batch", "tensor", "non_stacked"),
        "parameter_scale_reads": ("before_decay", "activation_copy", "after_decay"),
        "clipping_over": ("non_batch", "tensor"),
        "xla_perturbation": (False, None),
    },
    slots=("v_row", "v_col", "v", "m", "average"),
)  # fmt: skip


@dataclass(frozen=True)
class FastAdafactor:
    """The update of parameters that share what they depend on.

    Attributes:
        config: What `settle` returned.
        variant: Whose rule.
        item: The shape that the mathematics sees, BATCH axes aside: a matrix, or a vector where nothing is factored.
        sides: The slots along a matrix's rows and columns; none for a vector.
    """

    config: ParamConfig
    variant: str
    item: Shape
    sides: tuple[str, ...]

    def __call__(self, scene: Scene, params: Tensors, grads: Tensors, slots: Slots, common: None) -> None:
        form = variant_constants("adafactor", self.variant)
        xp, hyper = backend("torch"), self.config.hyper
        s = forms.Setting(xp, form, hyper, self.config.rule, "float32", "compiled")
        given = None if scene.rate is None else xp.widen(scene.rate)
        decay, mix = forms.DECAY[hyper.decay_type](s, scene.step)
        rate = forms.LEARNING_RATE[form["lr_source"]](s, given, scene.step).to(params[0].device)
        update = _Update(self, s, given, float(decay), float(mix), rate)
        items = [params, [grad.contiguous() for grad in grads]]
        items += [] if self.sides else by_name(slots, ("v",)).values()
        if update.bare and in_reach(items):
            update.in_loops(items, slots)
            return
        kernel = update.matrices if self.sides else update.vectors
        names = (*(self.sides or ("v",)), *(("m",) if s.momentum else ()))
        in_stacks(kernel, {"param": params, **by_name(slots, names)}, {"grad": grads})


def fast_adafactor(variant: str, config: ParamConfig, param: torch.Tensor) -> FastAdafactor | None:
    """Returns the fast path of a parameter, or None if it hasn't one."""
    form, hyper = variant_constants("adafactor", variant), config.hyper
    s = forms.Setting(backend("torch"), form, hyper, config.rule, "float32", "compiled")
    item = item_of(config.rule, tuple(param.shape))
    apart = "tensor" not in (form["clipping_over"], form["parameter_scale_over"])
    if (
        item is None
        or not plain(param)
        or not FOLLOWED.fits("adafactor", variant, hyper)
        or (s.momentum and s.momentum_dtype != "float32")
        or (config.rule.dims(Axis.BATCH) and not apart)
        or config.place is not None  # each finds the effective rate of the one before
    ):
        return None
    return FastAdafactor(config, variant, *item)


def item_of(rule: Rule, shape: Shape) -> tuple[Shape, tuple[str, ...]] | None:
    """Returns the shape behind leading BATCH axes as a matrix or a vector, and the slots along its axes; or None."""
    runs = [
        (label, [i for i, _ in run]) for label, run in groupby(enumerate(rule.axes), lambda pair: pair[1])
    ]
    if runs and runs[0][0] is Axis.BATCH:
        runs = runs[1:]
    labels, sizes = [label for label, _ in runs], [math.prod(shape[i] for i in run) for _, run in runs]
    if labels == [Axis.ROW, Axis.COLUMN]:
        return (sizes[0], sizes[1]), ("v_row", "v_col")
    if labels == [Axis.COLUMN, Axis.ROW]:
        return (sizes[0], sizes[1]), ("v_col", "v_row")
    return ((math.prod(sizes),), ()) if labels in ([Axis.NONE], []) else None


@dataclass(frozen=True)
class _Update:
    """One update of stacks. `decay` and `mix` are the weights of the second moment's old and new value."""

    path: FastAdafactor
    s: forms.Setting
    given: torch.Tensor | None
    decay: float
    mix: float
    rate: torch.Tensor

    @property
    def bare(self) -> bool:
        """Whether there is neither momentum nor weight decay."""
        hyper = self.s.hyper
        return not (self.s.momentum or hyper.weight_decay_rate or hyper.weight_decay_rate_lr_exponent)

    @property
    def scales(self) -> bool:
        """Whether step sizes follow the size of the parameters."""
        return self.s.hyper.multiply_by_parameter_scale or self.s.form["parameter_scale"] == "always"

    def in_loops(self, items: Sequence[Tensors], slots: Slots) -> None:
        """Moves `bare` parameters where they lie: those first, then gradients, and `v` if they aren't factored."""
        from statekit.torch.fast import numba_kernels

        hyper = self.s.hyper
        most, threshold = hyper.max_parameter_scale, hyper.clipping_threshold
        scalars = (
            self.decay, self.mix, self.s.epsilon1, self.scales, threshold is not None, float(self.rate),
            hyper.epsilon2, math.inf if most is None else most, 1.0 if threshold is None else threshold,
        )  # fmt: skip
        if not self.path.sides:
            Items.of(items, self.path.item).run(numba_kernels.adafactor_vectors, *scalars)
            return
        sides = [Stacked([arrays[name] for arrays in slots], len(slots)) for name in self.path.sides]
        left, right = (side.read().view(-1, size) for side, size in zip(sides, self.path.item, strict=True))
        rows_are_left = self.path.sides[0] == "v_row"
        loops = Items.of(items, self.path.item)
        loops.run(numba_kernels.adafactor_matrices, left, right, rows_are_left, *scalars)
        for side in sides:
            side.write()

    def matrices(self, part: slice, stacks: Stacks, rooms: Tensors) -> None:
        """Moves a stack of factored parameters."""
        p, g, y = (x.view(-1, *self.path.item) for x in (stacks["param"], stacks["grad"], rooms[0]))
        height, width = self.path.item
        left, right = (stacks[name].view(len(p), -1) for name in self.path.sides)
        torch.mul(g, g, out=y)
        floor = self.mix * self.s.epsilon1
        left.mul_(self.decay).add_(y.sum(2), alpha=self.mix / width).add_(floor)
        right.mul_(self.decay).add_(_over_rows(y), alpha=self.mix / height).add_(floor)
        row = self.path.sides.index("v_row")
        factors = [left, right]
        factors[row] = factors[row] / factors[row].mean(1, keepdim=True)
        a, b = (factor.rsqrt() for factor in factors)
        torch.mul(g, b.unsqueeze(1), out=y)
        total = squares(torch.linalg.vector_norm(y, dim=2).mul_(a))
        self._move(p, y, a.unsqueeze(2), total, stacks)

    def vectors(self, part: slice, stacks: Stacks, rooms: Tensors) -> None:
        """Moves a stack of parameters that aren't factored."""
        stacked = (stacks["param"], stacks["grad"], stacks["v"], rooms[0])
        p, g, v, y = (x.view(-1, *self.path.item) for x in stacked)
        epsilon1, total = self.rate.new_full((), self.s.epsilon1), g.new_zeros(len(g))
        for g_, v_, y_ in pieces(g, v, y):
            v_.mul_(self.decay).add_(torch.addcmul(epsilon1, g_, g_, out=y_), alpha=self.mix)
            total += squares(torch.rsqrt(v_, out=y_).mul_(g_))
        self._move(p, y, None, total, stacks)

    def _move(
        self, p: torch.Tensor, y: torch.Tensor, a: torch.Tensor | None, total: torch.Tensor, stacks: Stacks
    ) -> None:
        """Moves parameters.

        Args:
            p: The parameters.
            y: Their directions, which are used up, still without a factor for each row.
            a: That factor, used up; None where there is none.
            total: The sum of squares of each parameter's direction.
            stacks: For the momentum.
        """
        size, late = self._sizes(p, total)
        size = size if a is None else a.mul_(size)
        if not self.s.momentum and late is None:
            p.addcmul_(y, size, value=-1.0)
            return
        y.mul_(size)
        if self.s.momentum:
            beta1 = self.s.hyper.beta1 or 0.0
            y = stacks["m"].view(p.shape).mul_(beta1).add_(y, alpha=1.0 - beta1)
        p.sub_(y if late is None else y + p * late)

    def _sizes(self, p: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, Value | None]:
        """Returns what directions are multiplied with, and weight decay if it joins them; else applies it."""
        hyper, form, count = self.s.hyper, self.s.form, p[0].numel()
        if form["weight_decay_place"] == "first":
            self._decay(p, self.rate)
        size, late = self.rate, None
        if self.scales:
            rms = squares(p).div_(count).sqrt_()
            size = along(rms.clamp_(hyper.epsilon2, hyper.max_parameter_scale).mul_(self.rate), p)
        if form["weight_decay_expression"] == "sum":
            late = self._lost(size)
        elif form["weight_decay_place"] != "first":
            self._decay(p, size if form["weight_decay_place"] == "last" else self.rate)
        if hyper.clipping_threshold is not None:
            rms = total.div_(count).sqrt_().div_(hyper.clipping_threshold)
            size = size / along(rms.clamp_min_(1.0), p)
        return size, late

    def _decay(self, p: torch.Tensor, step_size: torch.Tensor) -> None:
        w = self._lost(step_size)
        if w is not None:
            p.mul_(1.0 - w)

    def _lost(self, step_size: torch.Tensor) -> Value | None:
        """Returns what parameters lose of themselves; None where that is nothing."""
        hyper = self.s.hyper
        if hyper.weight_decay_rate == 0 and not hyper.weight_decay_rate_lr_exponent:
            return None
        return forms.weight_decay(self.s, self.given, step_size)


def _over_rows(stack: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the rows of each matrix; of a single one by way of a product, which is faster."""
    if len(stack) > 1:
        return stack.sum(1)
    return torch.mv(stack[0].t(), stack.new_ones(stack.shape[1])).unsqueeze(0)
