"""Adafactor on stacks of equal parameters, in place; `statekit.optim.adafactor` has the rule.

What is gained over the text: the preconditioned gradient of a matrix, g_ij a_i b_j, is never there with both factors.
One product g_ij b_j is kept; its rows' norms give the root mean square for clipping, and a_i joins the step size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from statekit.backends import backend
from statekit.optim import adafactor_forms as forms
from statekit.optim.adafactor import Own
from statekit.optim.steps import Scene
from statekit.schema import load_schema
from statekit.state import Axis, Rule
from statekit.tensor import Shape
from statekit.torch.stacks import Slots, along, blocks, in_stacks, plain, squares

_FITS: Mapping[str, tuple[Any, ...]] = {
    "second_moment_update": ("weighted_sum",),
    "epsilon1_place": ("inside_square",),
    "normaliser": ("mean",),
    "precondition_form": ("powers", "rsqrts", "rsqrts_first", "estimate_sqrt"),
    "xla_perturbation": (False, None),
}
"""The forms that this path computes; where none is named, all are the same in float32 up to rounding."""


@dataclass(frozen=True)
class FastAdafactor:
    """The update of parameters that share what they depend on.

    Attributes:
        own: What `settle` returned.
        variant: Whose rule.
        item: The shape that the mathematics sees, BATCH axes aside: a matrix, or a vector where nothing is factored.
        sides: The slots along a matrix's rows and columns; none for a vector.
    """

    own: Own
    variant: str
    item: Shape
    sides: tuple[str, ...]

    def __call__(
        self,
        scene: Scene,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        slots: Sequence[dict[str, torch.Tensor]],
        common: None,
    ) -> None:
        """Moves parameters and slots, as `statekit.torch.fast.FastMove`."""
        form = load_schema("adafactor").variant(self.variant)["constants"]
        xp, hyper = backend("torch"), self.own.hyper
        s = forms.Setting(xp, form, hyper, self.own.rule, "float32", scene.execution)
        given = None if scene.rate is None else xp.widen(scene.rate)
        decay, mix = forms.DECAY[hyper.decay_type](s, scene.step)
        rate = forms.LEARNING_RATE[form["lr_source"]](s, given, scene.step)
        decay, mix, rate = (number.to(params[0].device) for number in (decay, mix, rate))
        update = _Update(self, s, given, decay, mix, rate)
        in_stacks(update.matrices if self.sides else update.vectors, params, grads, slots)


def fast_adafactor(variant: str, own: Own, param: torch.Tensor) -> FastAdafactor | None:
    """Returns the fast path of a parameter, or None if it hasn't one."""
    form, hyper = load_schema("adafactor").variant(variant)["constants"], own.hyper
    s = forms.Setting(backend("torch"), form, hyper, own.rule, "float32", "compiled")
    item = _item(own.rule, tuple(param.shape))
    apart = "tensor" not in (form["clipping_over"], form["parameter_scale_over"])
    if (
        item is None
        or not plain(param)
        or any(form[name] not in values for name, values in _FITS.items())
        or hyper.maximize or hyper.skip_nan_updates or hyper.use_ema or hyper.simulated_quantize_bits
        or hyper.activation_dtype != "float32"
        or (s.momentum and s.momentum_dtype != "float32")
        or (own.rule.dims(Axis.BATCH) and not apart)
    ):  # fmt: skip
        return None
    return FastAdafactor(own, variant, *item)


def _item(rule: Rule, shape: Shape) -> tuple[Shape, tuple[str, ...]] | None:
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
    """One update of stacks. Learning rates and the weights of the second moment's old and new value are 0-d."""

    path: FastAdafactor
    s: forms.Setting
    given: torch.Tensor | None
    decay: torch.Tensor
    mix: torch.Tensor
    rate: torch.Tensor

    def matrices(self, params: torch.Tensor, grads: torch.Tensor, slots: Slots, room: torch.Tensor) -> None:
        """Moves a stack of factored parameters."""
        p, g, y = (x.view(-1, *self.path.item) for x in (params, grads, room))
        left, right = (slots[name].view(len(p), -1) for name in self.path.sides)
        rows, columns = _sums(g, y)
        self._blend(left, rows, g.shape[2])
        self._blend(right, columns, g.shape[1])
        row = left if self.path.sides[0] == "v_row" else right
        a, b = (torch.rsqrt(v / v.mean(1, keepdim=True) if v is row else v) for v in (left, right))
        b = b.unsqueeze(1)
        for part in blocks(g):
            torch.mul(g[:, part], b, out=y[:, part])
            torch.linalg.vector_norm(y[:, part], dim=2, out=rows[:, part])
        size = along(self._size(p, squares(rows.mul_(a))), p)
        self._move(p, y, a.unsqueeze(2) * size, slots)

    def vectors(self, params: torch.Tensor, grads: torch.Tensor, slots: Slots, room: torch.Tensor) -> None:
        """Moves a stack of parameters that aren't factored."""
        p, g, v, y = (x.view(-1, *self.path.item) for x in (params, grads, slots["v"], room))
        total = g.new_zeros(len(g))
        for part in blocks(g):
            self._blend(v[:, part], torch.mul(g[:, part], g[:, part], out=y[:, part]), 1)
            total += squares(torch.rsqrt(v[:, part], out=y[:, part]).mul_(g[:, part]))
        self._move(p, y, along(self._size(p, total), p), slots)

    def _blend(self, v: torch.Tensor, total: torch.Tensor, count: int) -> None:
        """Moves an average of squares, given their sum, which is used up."""
        torch.addcmul(self.mix * self.s.epsilon1, total, self.mix / count, out=total)
        torch.addcmul(total, v, self.decay, out=v)

    def _size(self, p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Returns what directions are multiplied with, for each parameter; applies weight decay.

        Args:
            p: The parameters.
            total: The sum of squares of each one's direction.
        """
        hyper, place, count = self.s.hyper, self.s.form["weight_decay_place"], p[0].numel()
        if place == "first":
            self._decay(p, self.rate)
        size = self.rate
        if hyper.multiply_by_parameter_scale or self.s.form["parameter_scale"] == "always":
            rms = squares(p).div_(count).sqrt_()
            size = rms.clamp_(hyper.epsilon2, hyper.max_parameter_scale).mul_(self.rate)
        if place != "first":
            self._decay(p, size if place == "last" else self.rate)
        if hyper.clipping_threshold is None:
            return size
        return size / total.div_(count).sqrt_().div_(hyper.clipping_threshold).clamp_min_(1.0)

    def _decay(self, p: torch.Tensor, step_size: torch.Tensor) -> None:
        if self.s.hyper.weight_decay_rate == 0 and not self.s.hyper.weight_decay_rate_lr_exponent:
            return
        w = forms.weight_decay(self.s, self.given, step_size)
        if w is not None:
            p.mul_(1.0 - (along(w, p) if isinstance(w, torch.Tensor) else w))

    def _move(self, p: torch.Tensor, y: torch.Tensor, factor: torch.Tensor, slots: Slots) -> None:
        """Takes factor * y off the parameters, by way of the momentum if there is one; y is used up."""
        if not self.s.momentum:
            p.addcmul_(y, factor, value=-1.0)
            return
        beta1 = self.s.hyper.beta1 or 0.0
        m = slots["m"].view(p.shape)
        m.mul_(beta1).add_(y.mul_(factor), alpha=1.0 - beta1)
        p.sub_(m)


def _sums(g: torch.Tensor, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sums of squares over each row, and over each column."""
    count, height, width = g.shape
    rows, columns = g.new_empty((count, height)), g.new_zeros((count, 1, width))
    one = g.new_ones((1, 1, height)).expand(count, 1, height)
    for part in blocks(g):
        q = room[:, : g[:, part].shape[1]]
        torch.mul(g[:, part], g[:, part], out=q)
        torch.sum(q, 2, out=rows[:, part])
        columns.baddbmm_(one[..., part], q)
    return rows, columns[:, 0]
