"""Learning-rate schedules of the original systems, as pure functions of the schedule's step.

All compute in float64 on the host and return the rate of one update, before parameter scale. `step` is what the system
calls its schedule with: updates done before the update for T5X, Mesh-TensorFlow and Adafactor's own rates, the number
of the update itself (1 for the first) for Eden, which icefall moves on before the optimizer's step.
"""

from __future__ import annotations

import math
from typing import Literal


def eden(
    base: float,
    batch: float,
    epoch: float,
    *,
    lr_batches: float,
    lr_epochs: float,
    warmup_batches: float = 500.0,
    warmup_start: float = 0.5,
) -> float:
    """Returns icefall's Eden rate: it falls with the fourth root of the square of batches and of epochs.

    Args:
        base: base_lr of the group.
        batch: Batches since the start of the training.
        epoch: Epochs done.
        lr_batches: Batches after which the rate begins to fall.
        lr_epochs: Epochs after which the rate begins to fall.
        warmup_batches: Batches of linear warm-up.
        warmup_start: Factor of the rate at batch 0; pruned_transducer_stateless7 has 0.5 fixed.

    Source: k2-fsa/icefall, egs/librispeech/ASR/zipformer/optim.py, `Eden.get_lr`.

    Example:
        >>> round(eden(0.045, 500, 0, lr_batches=7500, lr_epochs=3.5, warmup_start=0.1), 11)
        0.04495013843
    """
    factor = math.pow(_fall(batch, lr_batches), -0.25) * math.pow(_fall(epoch, lr_epochs), -0.25)
    return base * factor * _warmup(batch, warmup_batches, warmup_start)


def eden2(
    base: float,
    batch: float,
    *,
    lr_batches: float,
    warmup_batches: float = 500.0,
    warmup_start: float = 0.5,
) -> float:
    """Returns icefall's Eden2 rate, which knows no epochs; arguments are those of `eden`.

    Source: k2-fsa/icefall, egs/librispeech/ASR/zipformer/optim.py, `Eden2.get_lr`.
    """
    return base * math.pow(_fall(batch, lr_batches), -0.5) * _warmup(batch, warmup_batches, warmup_start)


def _fall(done: float, scale: float) -> float:
    return (done**2 + scale**2) / scale**2


def _warmup(batch: float, batches: float, start: float) -> float:
    return 1.0 if batch >= batches else start + (1.0 - start) * (batch / batches)


def t5x_rsqrt(
    step: int,
    *,
    base: float = 1.0,
    warmup_steps: int = 10_000,
    linear_warmup: bool = False,
    floor: float = 1e-8,
) -> float:
    """Returns T5X's `constant * [linear_warmup *] rsqrt_decay`: constant for `warmup_steps`, then base / sqrt(step).

    Args:
        step: Updates done.
        base: base_learning_rate.
        warmup_steps: Length of the constant part, and of a linear warm-up.
        linear_warmup: Whether the rate rises from 0 over the constant part.
        floor: min_learning_rate.

    Source: google-research/t5x, t5x/utils.py, `create_learning_rate_scheduler`.

    Example:
        >>> t5x_rsqrt(0), t5x_rsqrt(40_000)
        (0.01, 0.005)
    """
    rise = min(1.0, step / warmup_steps) if linear_warmup else 1.0
    return max(base * rise / math.sqrt(max(step, warmup_steps)), floor)


def gpt_neo(
    step: int,
    *,
    base: float,
    train_steps: int,
    decay: Literal["linear", "cosine"] | None,
    warmup_steps: int = 0,
    decay_end: int | None = None,
) -> float:
    """Returns GPT-Neo's rate on Mesh-TensorFlow: a decay to 10 %, times a linear warm-up that starts at 0.

    Args:
        step: global_step before the update.
        base: lr.
        train_steps: Where the decay ends, unless `decay_end` says so.
        decay: lr_decay; None keeps the rate.
        warmup_steps: The *decayed* rate is multiplied with step / warmup_steps before this step.
        decay_end: lr_decay_end.

    Source: EleutherAI/gpt-neo, optimizers.py, `get_optimizer`.
    """
    done = min(step, decay_end or train_steps) / (decay_end or train_steps)
    fall = {"linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    rate = base if decay is None else base * (0.9 * fall[decay] + 0.1)
    return rate * (step / warmup_steps) if step < warmup_steps else rate


def adafactor_rsqrt(step: int, *, scaled: bool = True) -> float:
    """Returns the rate of Tensor2Tensor's and Mesh-TensorFlow's Adafactor when none is given.

    Args:
        step: global_step before the update.
        scaled: multiply_by_parameter_scale; without it the rate is a twentieth.

    Source: tensorflow/tensor2tensor, tensor2tensor/utils/adafactor.py, `AdafactorOptimizer._learning_rate_default`.
    """
    return min(1.0 / math.sqrt(step + 1.0), 0.01) * (1.0 if scaled else 0.05)


def adafactor_relative(step: int, *, warmup_init: bool = False) -> float:
    """Returns the relative step size of fairseq's and Hugging Face's Adafactor.

    Args:
        step: Updates done before.
        warmup_init: Whether it rises by 1e-6 an update instead of starting at 0.01.

    Source: huggingface/transformers, optimization.py, `Adafactor._get_lr`.
    """
    return min(1e-6 * (step + 1) if warmup_init else 1e-2, 1.0 / math.sqrt(step + 1))


def adafactor_capped(rate: float, step: int) -> float:
    """Returns the rate of torch's and Keras' Adafactor: what is given, but at most 1 / sqrt(t).

    Source: pytorch/pytorch, torch/optim/_adafactor.py, `_single_tensor_adafactor`.
    """
    return min(rate, 1.0 / math.sqrt(step + 1))
