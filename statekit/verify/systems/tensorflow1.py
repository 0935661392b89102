"""What recordings of TensorFlow 1 have in common: how exact its roots are, and how its Adafactors are told their decay.

TensorFlow 1's square root on x86 is Eigen's: an approximate reciprocal root, whose relative error is below
1.5 * 2^-12, and one Newton step, which leaves 1.5 (1.5 * 2^-12)^2 = 3.4 u and whose five operations round by 4 u
together (docs/bounds.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from statekit.errors import NotFoundError
from statekit.state.schema import load_schema

SQRT_UNITS = 8.0
"""Source: Eigen, Eigen/src/Core/arch/AVX/MathFunctions.h, `psqrt<Packet8f>` with EIGEN_FAST_MATH, of 2019."""


def adafactor_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the constructor's arguments with the decay under its canonical names.

    The argument `decay_rate` is the decay itself: a number, or what one of two functions of the step makes.

    Source: tensor2tensor/utils/adafactor.py and mesh_tensorflow/optimize.py, `adafactor_decay_rate_pow`,
    `adafactor_decay_rate_adam`.

    Raises:
        NotFoundError: The decay is described in unknown words.

    Example:
        >>> adafactor_arguments({"decay_rate": "adafactor_decay_rate_adam(0.98)"})["beta2"]
        0.98
    """
    usual = load_schema("adafactor").settings(VARIANT)
    decay_arguments = {
        name: usual[name] for name in ("decay_rate", "decay_type", "beta2", "second_moment_decay")
    }
    decay = arguments.get("decay_rate")
    if isinstance(decay, int | float):
        decay_arguments |= {"decay_type": "given", "second_moment_decay": decay}
    elif decay is not None:
        decay_arguments |= _called(decay)
    return {**arguments, **decay_arguments}


VARIANT = "t2t_late"
"""Mesh-TensorFlow's decay, and that of older releases, is the same if nothing is said."""
DECAYS: Mapping[str, Mapping[str, str]] = {
    "pow": {"exponent": "decay_rate", "offset": "step_offset"},
    "adam": {"beta2": "beta2"},
}
"""Arguments of `adafactor_decay_rate_<name>`, in order, by their canonical names."""


def _called(decay: str) -> dict[str, Any]:
    """Returns what a call says in words: `adafactor_decay_rate_pow(exponent=0.7, offset=0)`."""
    called = re.fullmatch(r"adafactor_decay_rate_(pow|adam)\(([^()]*)\)", decay)
    values: dict[str, Any] = {"decay_type": called[1]} if called else {}
    names = dict(DECAYS[called[1]]) if called else {}
    for place, argument in enumerate(called[2].split(",") if called else ()):
        name, _, number = argument.strip().rpartition("=")
        canonical = names.get(name.strip() or [*names][place] if place < len(names) or name else "")
        if canonical is None or not re.fullmatch(r"[\d.eE+-]+", number.strip()):
            called = None
            break
        values[canonical] = int(number) if canonical == "step_offset" else float(number)
    if called is None:
        raise NotFoundError(
            "A decay is described in unknown words.",
            expected=", ".join(f"adafactor_decay_rate_{n}({', '.join(a)})" for n, a in DECAYS.items()),
            found=decay,
        )
    return values


def own_rate(arguments: Mapping[str, Any]) -> bool:
    """Tells whether the optimizer computes its learning rate from the step: nobody gave it one."""
    return arguments.get("learning_rate") is None
