"""What is drawn: runs of every kind, with settings, shapes, dtypes, groups, gradients, and what is checked beside."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from living.originals import SIZES, Case
from statekit.tensors.tensor import Shape

KINDS: dict[tuple[str, str, str], tuple[float, int]] = {
    ("torch", "adamw", "eager"): (3000, 4),
    ("torch", "adamw", "foreach"): (2500, 4),
    ("torch", "adamw", "fused"): (3500, 4),
    ("torch", "adamw", "compiled"): (26, 0),
    ("torch", "adafactor", "eager"): (3200, 4),
    ("torch", "adafactor", "foreach"): (2500, 4),
    ("torch", "adafactor", "compiled"): (26, 0),
    ("transformers", "adafactor", "eager"): (4000, 4),
    ("optax", "adamw", "eager"): (150, 16),
    ("optax", "adamw", "compiled"): (190, 16),
    ("optax", "lamb", "eager"): (100, 16),
    ("optax", "lamb", "compiled"): (150, 16),
    ("optax", "adafactor", "eager"): (100, 16),
    ("optax", "adafactor", "compiled"): (150, 16),
    ("keras", "adamw", "eager"): (200, 16),
    ("keras", "adamw", "compiled"): (26, 0),
    ("keras", "lamb", "eager"): (200, 16),
    ("keras", "lamb", "compiled"): (26, 0),
    ("keras", "adafactor", "eager"): (200, 16),
    ("keras", "adafactor", "compiled"): (26, 0),
}
"""Library, family and mode: cases of 20 000, since what compiles costs seconds; and which share of these is checked
beside in other ways (one in so many, 0 for none): by our class in the original's framework, by a conversion there and
back, and one in ten times so many in another backend."""
SHAPES: tuple[Shape, ...] = ((), (1,), (7,), (4, 4), (6, 8), (33, 5), (1, 9), (3, 4, 5), (2, 3, 4, 5), (0, 3))
GRADIENTS = (*SIZES, "zeros", "one_hot", "rows", "nan")
"""Kinds of gradients: sizes, one element alone, rows of which some are repeated, one element that isn't a number."""


def rates() -> st.SearchStrategy[float]:
    return st.sampled_from([1e-5, 1e-3, 0.02, 0.3])


def chosen(**options: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the options, each with one of its values."""
    return st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in options.items()}
    )


BETAS = [(0.9, 0.999), (0.95, 0.98), (0.0, 0.9), (0.8, 0.5)]
DECAYS = [0.0, 0.01, 0.3]


LOW = ("bfloat16", "float16")
REFUSED_LOW = (("keras", "lamb"), ("keras", "adafactor"))
"""Where slots are of the parameter's dtype too, and statekit refuses a step of low precision by name."""


@st.composite
def arguments(draw: st.DrawFn, library: str, family: str) -> dict[str, Any]:
    """Arguments of an original's constructor."""
    b1, b2 = draw(st.sampled_from(BETAS))
    rate = draw(rates())
    if library == "torch" and family == "adamw":
        more = chosen(eps=[1e-8, 1e-6, 0.1], weight_decay=DECAYS, amsgrad=[True], maximize=[True])
        return {"lr": rate, "betas": (b1, b2), **draw(more)}
    if library == "torch":
        epsilons = [(None, 1e-3), (1e-6, 0.1)]
        more = chosen(beta2_decay=[-0.8, -0.5], eps=epsilons, d=[1.0, 0.3], weight_decay=DECAYS)
        return {"lr": rate, **draw(more)}
    if library == "transformers":
        given_rate = draw(st.sampled_from([{}, {"lr": rate, "relative_step": False}]))
        more = chosen(clip_threshold=[1.0, 0.3], decay_rate=[-0.8, -0.5], beta1=[None, 0.9])
        return {**given_rate, **draw(more), **draw(chosen(weight_decay=DECAYS, scale_parameter=[False]))}
    if library == "optax" and family == "adafactor":
        low: dict[str, Any] = {"momentum": 0.9, "dtype_momentum": "bfloat16"}
        momentum = st.sampled_from([{}, {"momentum": 0.9}, low, low])
        more = chosen(decay_rate=[0.8, 0.5], clipping_threshold=[None, 1.0, 0.3])
        scale = chosen(multiply_by_parameter_scale=[False], weight_decay_rate=[None, 0.01], factored=[False])
        return {
            "learning_rate": rate,
            "min_dim_size_to_factor": 4,
            **draw(momentum),
            **draw(more),
            **draw(scale),
        }
    if library == "optax":
        more = chosen(eps=[1e-8, 1e-6, 0.1], eps_root=[0.0, 1e-6], weight_decay=DECAYS)
        chosen_options = (
            chosen(nesterov=[True], mu_dtype=["float32", "bfloat16"]) if family == "adamw" else st.just({})
        )
        return {"learning_rate": rate, "b1": b1, "b2": b2, **draw(more), **draw(chosen_options)}
    if family == "adafactor":
        more = chosen(beta_2_decay=[-0.8, -0.5], clip_threshold=[1.0, 0.3], relative_step=[True, False])
        return {"learning_rate": rate, **draw(more), **draw(chosen(weight_decay=[None, 0.01]))}
    more = chosen(epsilon=[1e-7, 0.1], weight_decay=[None, 0.01])
    return {"learning_rate": rate, "beta_1": b1, "beta_2": b2, **draw(more)}


EPSILON = {"adamw": 1e-8, "lamb": 1e-6}
"""Optax' own."""


def runs(case: Case) -> bool:
    """Tells whether an original does what is asked of it.

    PyTorch's Adafactor divides by the size of an empty parameter; its fused AdamW loses a NaN in the largest second
    moment (FusedAdamKernel.cpp takes the number). Keras refuses an update without any gradient. Squares that leave
    the range of float16 go other ways in each fusion of what Optax compiles; nothing is said of those,
    nor of quotients whose epsilon is 0 there. A file of
    Keras numbers its variables: those of Adafactor over one number alone are refused, as they may be several things.
    Keras' Adafactor fails itself on some gradients of rows (values_for_union in its sparse.py gathers out of range) and
    subtracts rows that meet one after the other, which rounds more often than our step. Rows beside low precision are
    refused for Keras.
    """
    kinds = {kind for grads in case.grads for kind in grads.values()}
    empty = any(0 in shape for shape in case.params.values())
    if case.library == "torch" and case.family == "adafactor" and empty:
        return False
    if case.library == "keras" and not all(case.grads):
        return False
    if (
        case.library == "keras"
        and "rows" in kinds
        and (case.family == "adafactor" or case.dtype != "float32")
    ):
        return False
    if case.back and (case.library, case.family) == ("keras", "adafactor") and not any(case.params.values()):
        return False
    if (case.library, case.mode, case.dtype) == ("optax", "compiled", "float16"):
        vanishes = case.family != "adafactor" and any(
            a.get("eps", EPSILON[case.family]) < 1e-6 for a, _ in case.groups
        )
        if vanishes or not kinds <= {"usual", "large"}:
            return False
    amsgrad = any(options.get("amsgrad") for options, _ in case.groups)
    return not (case.mode == "fused" and amsgrad and "nan" in kinds)


@st.composite
def cases(draw: st.DrawFn, library: str, family: str, mode: str) -> Case:
    """Runs of one kind."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    params = {f"layer{i}/w": shape for i, shape in enumerate(shapes)}
    paths = tuple(params)
    low = () if (library, family) in REFUSED_LOW else LOW
    dtype = draw(st.sampled_from(("float32", *low)))
    grouped = library in ("torch", "transformers")
    parts = [paths[:1], paths[1:]] if grouped and len(paths) > 1 and draw(st.booleans()) else [paths]
    groups = tuple((draw(arguments(library, family)), part) for part in parts)
    may_miss = library != "optax" and mode != "compiled"
    grads = tuple(
        {
            path: kind if (shape and 0 not in shape) or kind != "rows" else "usual"
            for path, shape in params.items()
            for kind in [draw(st.sampled_from(GRADIENTS))]
            if not may_miss or draw(st.integers(0, 6))
        }
        for _ in range(draw(st.sampled_from((1, 1, 2, 2, 3, 5))))
    )
    seldom = KINDS[library, family, mode][1]
    others = ("torch", "jax", "tensorflow")
    return Case(
        library, family, groups, params, dtype, grads, mode, draw(st.integers(0, 2**20)),
        draw(st.sampled_from(others)) if one_in(draw, 10 * seldom) else "numpy",
        one_in(draw, seldom),
        one_in(draw, 2 * seldom),
    )  # fmt: skip


def one_in(draw: st.DrawFn, number: int) -> bool:
    """Draws whether a case is one of so many; none is one of 0."""
    return bool(number) and draw(st.sampled_from((*[False] * (number - 1), True)))
