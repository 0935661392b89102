"""One law of what may be said to an optimizer: torch, JAX and TensorFlow take the same and refuse in the same words."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.jax,
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on NumPy 2
]
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

# Imported only where the frameworks are.
from tensorflow_driving import variable

import statekit.jax
import statekit.tensorflow
import statekit.torch
from formats import save
from statekit.dropin.options import OPTIONS
from statekit.errors import StatekitError
from statekit.optim.run import initial
from statekit.state.options import CLASSES, native_options, taken
from statekit.state.schema import OptimizerSchema, Spelling, load_schema
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import in_memory

SHAPES = {"wide": (5, 8), "bias": (8,)}
Say = Callable[[str, str, Mapping[str, Any]], Any]


def by_torch(schema: str, variant: str, options: Mapping[str, Any]) -> Any:
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    return getattr(statekit.torch, CLASSES[schema])(params.items(), variant=variant, **options)


def by_jax(schema: str, variant: str, options: Mapping[str, Any]) -> Any:
    make = getattr(statekit.jax, schema)(variant=variant, **options)
    return make.init({name: jax.numpy.zeros(shape) for name, shape in SHAPES.items()})


def by_tensorflow(schema: str, variant: str, options: Mapping[str, Any]) -> Any:
    made = getattr(statekit.tensorflow, CLASSES[schema])(variant=variant, **options)
    made.build([keras.Variable(np.zeros(shape, np.float32), name=name) for name, shape in SHAPES.items()])
    return made


def into_torch(path: Path, options: Mapping[str, Any]) -> Any:
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    made = statekit.torch.load_optimizer(path, params.items(), lr=0.1, **options)
    return {name: sorted(made.state[param]) for name, param in params.items()}


def into_jax(path: Path, options: Mapping[str, Any]) -> Any:
    params = {name: jax.numpy.zeros(shape) for name, shape in SHAPES.items()}
    _, state = statekit.jax.load_optimizer(path, params, learning_rate=0.1, **options)
    trees = {slot: tree for slot, tree in state._asdict().items() if isinstance(tree, dict)}
    return {
        name: sorted(slot for slot, tree in trees.items() if isinstance(tree[name], jax.Array))
        for name in SHAPES
    }


def into_tensorflow(path: Path, options: Mapping[str, Any]) -> Any:
    variables = [variable(name, np.zeros(shape, np.float32)) for name, shape in SHAPES.items()]
    made = statekit.tensorflow.load_optimizer(path, variables, 0.1, **options)
    averages = made.averages()
    return {name: sorted({*made.slots()[name], *averages.get(name, {})}) for name in SHAPES}


CONSTRUCTORS = (by_torch, by_jax, by_tensorflow)
LOADERS = (into_torch, into_jax, into_tensorflow)


def verdict(say: Callable[[], Any]) -> Any:
    """Returns what an attempt leads to: what was made, or the error's class and text, but for the framework's names."""
    try:
        return say()
    except StatekitError as error:
        text = re.sub(r"statekit\.\w+\.\w+\(\.\.\.\)(\.init\(params\))?", "OPTIMIZER", str(error))
        return type(error).__name__, re.sub(r"\b(learning_rate|lr)=\.\.\.", "RATE=...", text)


def made(say: Callable[[], Any]) -> Any:
    """Returns the verdict, without what was made."""
    reached = verdict(say)
    return reached if isinstance(reached, tuple) and isinstance(reached[0], str) else "made"


# --- the constructors ---

WRONG: Mapping[str, Any] = {
    "another type": object(),
    "text": "much",
    "None": None,
    "NaN": float("nan"),
    "below": -1e9,
    "above": 1e9,
    "a bool": True,
}


def usual_cases() -> Iterator[tuple[str, str, str]]:
    for schema in CLASSES:
        variants = load_schema(schema).stepped
        for i, variant in enumerate(variants):
            seen = {name for other in variants[:i] for name in taken(schema, other)}
            yield from ((schema, variant, name) for name in taken(schema, variant) if name not in seen)


@cache
def needed(schema: str, variant: str) -> Mapping[str, Any]:
    """Returns options without which nothing can be made."""
    paper = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "wd": 0.0}
    return paper if (schema, variant) == ("lans", "paper") else {}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schema", "variant", "name"), [pytest.param(*c, id="-".join(c)) for c in usual_cases()]
)
def test_every_option_is_refused_alike_and_as_the_schema_says(schema: str, variant: str, name: str) -> None:
    rules = load_schema(schema)
    for kind, value in WRONG.items():
        given = {**needed(schema, variant), name: value}
        verdicts = [made(partial(say, schema, variant, given)) for say in CONSTRUCTORS]
        refused = [one != "made" for one in verdicts]
        assert refused in ([True] * 3, [False] * 3), (kind, verdicts)
        assert refused[0] >= (name != "factor_map" and bool(rules.fault(name, value))), kind
        if refused[0]:
            assert verdicts[0] == verdicts[1] == verdicts[2], kind
            assert verdicts[0][0] == "UsageError" and name in verdicts[0][1]


SAID = [
    ("adafactor", "t5x", {"clipping_treshold": None},
     r"isn't an option of variant t5x @ clipping_treshold\n  do: did you mean clipping_threshold\?"),
    ("adafactor", "t5x", {"relative_step": True}, r"isn't an option of variant t5x @ relative_step$"),
    ("adafactor", "t5x", {"weight_decay": 0.1}, r"another optimizer's name for weight_decay_rate @ weight_decay$"),
    ("adafactor", "t5x", {"beta1": 1.0, "decay_rate": "x"}, r"2 faults(.|\n)*@ beta1\n.*@ decay_rate"),
    ("adafactor", "hf", {"scale_parameter": True, "multiply_by_parameter_scale": True},
     "is said twice: as scale_parameter and as multiply_by_parameter_scale"),
    ("adafactor", "hf", {"eps": 1e-30}, r"is 1e-30, expected 2 values: epsilon1, epsilon2 @ eps$"),
    ("adamw", "torch", {"betas": ()}, r"is \(\), expected 2 values: beta1, beta2 @ betas$"),
    ("adamw", "torch", {"betas": 5}, r"is 5, expected 2 values: beta1, beta2 @ betas$"),
    ("adamw", "torch", {"betas": (0.9, 1.5)}, r"is 1.5, as beta2, expected .* @ betas\[1\]$"),
    ("adamw", "torch", {"betas": (0.9, 0.98), "beta1": 0.9}, "is said twice: as betas.0. and as beta1 @ beta1"),
    ("adamw", "optax", {"betas": (0.9, 0.98)}, "another optimizer's name for beta1, beta2 @ betas"),
    ("adamw", "optax", {"mask": {"bias": True}}, "@ mask"),
    ("scaled_adam", "zip2025", {"betas": (0.9,)}, r"is \(0.9,\), expected .*2 numbers @ betas$"),
    ("scaled_adam", "zip2025", {"betas": ("a", "b")}, r"@ betas$"),
    ("lamb", "keras", {"exclude_from_weight_decay": {"bias": True}}, "expected a list of regexes"),
    ("lamb", "keras", {"exclude_from_weight_decay": ["("]}, "expected a list of regexes"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "variant", "options", "text"), SAID, ids=lambda v: str(v)[:40])
def test_what_cant_be_said_has_one_text(
    schema: str, variant: str, options: Mapping[str, Any], text: str
) -> None:
    verdicts = [verdict(partial(say, schema, variant, options)) for say in CONSTRUCTORS]
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert verdicts[0][0] == "UsageError" and re.search(text, verdicts[0][1]), verdicts[0]


@pytest.mark.parametrize("say", CONSTRUCTORS)
@pytest.mark.parametrize("value", ["x", float("nan"), float("inf"), -1.0, True])
def test_a_learning_rate_is_a_finite_number_from_zero_on(say: Say, value: Any) -> None:
    rate_name = "lr" if say is by_torch else "learning_rate"
    kind, text = verdict(lambda: say("adamw", "torch", {rate_name: value}))
    assert (
        kind == "UsageError" and "expected a finite number from 0 on, " in text and f"@ {rate_name}" in text
    )


@pytest.mark.parametrize("say", CONSTRUCTORS)
@pytest.mark.parametrize("schema", CLASSES)
def test_a_learning_rate_has_one_name(say: Say, schema: str) -> None:
    rate_name, other = ("lr", "learning_rate") if say is by_torch else ("learning_rate", "lr")
    variant = load_schema(schema).stepped[0]
    kind, text = verdict(lambda: say(schema, variant, {other: 0.1}))
    assert kind == "UsageError" and f"isn't an option: the learning rate is {rate_name} @ {other}" in text


# --- the variants' own names ---

NATIVE: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("adamw", "torch", {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01},
     {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-6, "weight_decay_rate": 0.01}),
    ("adamw", "optax", {"b1": 0.8, "b2": 0.9, "eps_root": 1e-9}, {"beta1": 0.8, "beta2": 0.9, "epsilon_root": 1e-9}),
    ("adamw", "keras", {"beta_1": 0.8, "weight_decay": 0.1}, {"beta1": 0.8, "weight_decay_rate": 0.1}),
    ("adafactor", "hf", {"scale_parameter": False, "decay_rate": -0.7, "eps": (1e-20, 1e-2)},
     {"multiply_by_parameter_scale": False, "decay_rate": 0.7, "epsilon1": 1e-20, "epsilon2": 1e-2}),
    ("adafactor", "hf", {"decay_rate": 0.7}, {"decay_rate": 0.7}),
    ("adafactor", "torch", {"beta2_decay": -0.7, "d": 2.0}, {"decay_rate": 0.7, "clipping_threshold": 2.0}),
    ("lamb", "keras", {"beta_2": 0.9}, {"beta2": 0.9}),
    ("lans", "apex_fused", {"betas": [0.8, 0.9], "weight_decay": 0.5}, {"beta1": 0.8, "beta2": 0.9, "wd": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "variant", "native", "canonical"), NATIVE, ids=lambda v: str(v)[:30])
def test_a_drop_in_takes_its_variants_own_names(
    schema: str, variant: str, native: Mapping[str, Any], canonical: Mapping[str, Any]
) -> None:
    group = by_torch(schema, variant, native).param_groups[0]
    assert {name: group[name] for name in canonical} == canonical
    assert group == {**by_torch(schema, variant, canonical).param_groups[0], "params": group["params"]}
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    in_group = getattr(statekit.torch, CLASSES[schema])(
        [{"params": params.items(), **native}], variant=variant
    )
    assert {name: in_group.param_groups[0][name] for name in canonical} == canonical
    spec = by_tensorflow(schema, variant, native).spec
    assert (
        spec == by_tensorflow(schema, variant, canonical).spec
        and spec.hyperparameters.keys() <= canonical.keys()
    )
    grads = {name: jax.numpy.full(shape, 0.5) for name, shape in SHAPES.items()}
    start = {name: jax.numpy.ones(shape) for name, shape in SHAPES.items()}
    moved = []
    for options in (native, canonical):
        rule = getattr(statekit.jax, schema)(0.1, variant=variant, **options)
        moved.append(rule.update(grads, rule.init(start), start)[0])
    assert all(np.array_equal(moved[0][name], moved[1][name]) for name in SHAPES)


# --- loading ---

STATES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "t5x": ("adafactor", "t5x", {"min_dim_size_to_factor": 4}),
    "momentum": ("adafactor", "t5x", {"min_dim_size_to_factor": 4, "beta1": 0.9}),
    "hf": ("adafactor", "hf", {}),
    "torch": ("adamw", "torch", {}),
    "amsgrad": ("adamw", "torch", {"amsgrad": True}),
    "keras": ("adamw", "keras", {}),
    "lans": ("lans", "mxnet_fused", {}),
    "lamb": ("lamb", "keras", {}),
    "clipped": ("scaled_adam", "zip2025", {"clipping_scale": 2.0}),
    "unclipped": ("scaled_adam", "zip2025", {}),
}
CHANGE = "would change which slots there are"
ROWS = {"bias": ["v"], "wide": ["v_col", "v_row"]}
OVERRIDES: list[tuple[str, dict[str, Any], Any]] = [
    ("t5x", {"clipping_treshold": None}, r"@ clipping_treshold=None\n  do: did you mean clipping_threshold\?"),
    ("t5x", {"clipping_threshold": None}, ROWS),
    ("t5x", {"decay_rate": None}, r"is None, expected number @ decay_rate=None"),
    ("t5x", {"decay_rate": "x"}, r"is 'x', expected number @ decay_rate='x'"),
    ("t5x", {"decay_rate": -1.0}, "expected minimum 0 @ decay_rate=-1.0"),
    ("t5x", {"decay_rate": float("nan")}, "expected minimum 0 @ decay_rate=nan"),
    ("t5x", {"relative_step": True}, "isn't an option of variant t5x @ relative_step=True"),
    ("t5x", {"weight_decay": 0.1}, "another optimizer's name for weight_decay_rate @ weight_decay=0.1"),
    ("t5x", {"factored": False}, f"{CHANGE} @ factored=False(.|\n)*begin anew: OPTIMIZER"),
    ("t5x", {"factored": True}, ROWS),
    ("t5x", {"min_dim_size_to_factor": 100}, f"{CHANGE} @ min_dim"),
    ("t5x", {"min_dim_size_to_factor": 5}, ROWS),
    ("t5x", {"factor_map": {"wide": ["BATCH", "NONE"], "bias": ["NONE"]}}, f"{CHANGE} @ factor_map="),
    ("t5x", {"factor_map": {"wide": ["ROW", "COLUMN"]}}, ROWS),
    ("t5x", {"factor_map": "ROW"}, "factor_map isn't a list of pairs"),
    ("t5x", {"beta1": 0.9}, {"bias": ["m", "v"], "wide": ["m", "v_col", "v_row"]}),
    ("t5x", {"beta1": 1.0}, "@ beta1=1.0"),
    ("t5x", {"step_offset": "reset"}, ROWS),
    ("t5x", {"step_offset": -1}, "@ step_offset=-1"),
    ("t5x", {"step_offset": 9}, "step_offset isn't usable"),
    ("t5x", {"multiply_by_parameter_scale": {"wide": False, "bias": True}}, ROWS),
    ("t5x", {"multiply_by_parameter_scale": {"wide": False}}, "has no true or false for it @ bias"),
    ("t5x", {"factored": False, "decay_rate": "x"}, "2 faults"),
    ("momentum", {"beta1": None}, ROWS),
    ("momentum", {"dtype_momentum": "bfloat16"}, {"bias": ["m", "v"], "wide": ["m", "v_col", "v_row"]}),
    ("hf", {"decay_rate": -0.7, "clip_threshold": 2.0}, ROWS),
    ("hf", {"step_offset": "reset"}, "isn't an option of variant hf @ step_offset='reset'"),
    ("hf", {"factored": False}, "isn't an option of variant hf @ factored=False"),
    ("torch", {"amsgrad": True}, f"{CHANGE} @ amsgrad=True"),
    ("torch", {"amsgrad": False}, {"bias": ["m", "v"], "wide": ["m", "v"]}),
    ("torch", {"betas": (0.8, 0.9)}, {"bias": ["m", "v"], "wide": ["m", "v"]}),
    ("torch", {"betas": 5}, "@ betas=5"),
    ("torch", {"betas": (0.8, 2.0)}, r"as beta2, .* @ betas=\(0.8, 2.0\)"),
    ("torch", {"betas": (0.8, 0.9), "beta2": 0.9}, "is said twice"),
    ("torch", {"weight_decay_rate": None}, {"bias": ["m", "v"], "wide": ["m", "v"]}),
    ("torch", {"epsilon": None}, "@ epsilon=None"),
    ("amsgrad", {"amsgrad": False}, f"{CHANGE} @ amsgrad=False"),
    ("amsgrad", {"amsgrad": 1}, "expected boolean @ amsgrad=1"),
    ("keras", {"use_ema": True}, f"{CHANGE} @ use_ema=True"),
    ("keras", {"clipnorm": 1.0}, {"bias": ["m", "v"], "wide": ["m", "v"]}),
    ("lans", {"multi_precision": True}, f"{CHANGE} @ multi_precision=True"),
    ("lans", {"lower_bound": None, "wd_mult": {"bias": 0.0}}, {"bias": ["m", "v"], "wide": ["m", "v"]}),
    ("lans", {"wd_mult": {"nowhere": 0.0}}, "@ nowhere"),
    ("lamb", {"exclude_from_weight_decay": ["bias"]}, {"bias": ["m", "v"], "wide": ["m", "v"]}),
    ("lamb", {"exclude_from_weight_decay": {"bias": True}}, "expected a list of regexes"),
    ("clipped", {"clipping_scale": None}, f"{CHANGE} @ clipping_scale=None"),
    ("clipped", {"clipping_scale": 3.0}, None),
    ("clipped", {"clipping_update_period": 7}, f"{CHANGE} @ clipping_update_period=7"),
    ("unclipped", {"clipping_scale": 2.0}, f"{CHANGE} @ clipping_scale=2.0"),
    ("unclipped", {"size_update_period": 8}, f"{CHANGE} @ size_update_period=8"),
    ("unclipped", {"size_update_period": 4, "betas": [0.8, 0.9]}, None),
]  # fmt: skip


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("states")

    @cache
    def path(name: str) -> Path:
        return save(begun(*STATES[name]), folder / name)

    return path


def begun(schema: str, variant: str, said: Mapping[str, Any]) -> TrainState:
    """Returns a state after no update, with all hyperparameters known."""
    rules = load_schema(schema)
    names = [
        n for n in taken(schema, variant) if n != "factor_map" or n in rules.variant(variant)["defaults"]
    ]
    known = {**{name: rules.settings(variant)[name] for name in names}, **said}
    params = {name: in_memory(np.ones(shape, np.float32), name) for name, shape in SHAPES.items()}
    axes = {"wide": (Axis.ROW, Axis.COLUMN), "bias": (Axis.NONE,)}
    group = Group(tuple(params), known, dict.fromkeys(known, "file"))
    factor = {name: Rule(labels, "file") for name, labels in axes.items()} if schema == "adafactor" else {}
    return initial(TrainState(params, {}, Optimizer(schema, variant, (group,)), Counts(5, 5), factor))


@pytest.mark.parametrize(
    ("name", "override", "expected"), [pytest.param(*o, id=f"{o[0]}-{o[1]}"[:60]) for o in OVERRIDES]
)
def test_the_law_of_overrides(
    stored: Callable[[str], Path], name: str, override: Mapping[str, Any], expected: Any
) -> None:
    verdicts = [verdict(partial(say, stored(name), override)) for say in LOADERS]
    assert verdicts[0] == verdicts[1] == verdicts[2]
    if isinstance(expected, str):
        assert verdicts[0][0] == "UsageError" and re.search(expected, verdicts[0][1]), verdicts[0][1]
    else:
        assert isinstance(verdicts[0], dict), verdicts[0]
        assert expected in (None, verdicts[0])


@pytest.mark.parametrize("say", LOADERS)
def test_a_learning_rate_has_an_argument_of_its_own_when_loading(say: Any, stored: Any) -> None:
    other = "learning_rate" if say is into_torch else "lr"
    kind, text = verdict(lambda: say(stored("torch"), {other: 0.1}))
    assert (
        kind == "UsageError" and "isn't an option: the learning rate is" in text and f"@ {other}=0.1" in text
    )


# --- the TypedDicts ---

KINDS: Mapping[Any, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null",
    Sequence: "array", Mapping: "object",
}  # fmt: skip


def kinds_of(hint: Any) -> set[str]:
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return {KINDS[get_origin(part) or part] for part in parts}


def said_by(rules: OptimizerSchema, name: str, spelling: Spelling) -> set[str]:
    """Returns the kinds of value that a variant's own argument may have, as one of its meanings; none: any."""
    if spelling.parts or spelling.index is not None:
        return {"number"} if spelling.parts else {"array"}
    if spelling.otherwise is not None:
        return set()
    kinds = {type(None): "null", str: "string"}
    words = {kinds.get(type(word), "array") for word, _ in spelling.words}
    return words | {*rules.hyperparameters[name]["type"]}


@pytest.mark.parametrize("schema", CLASSES)
def test_the_typed_options_are_those_of_the_schema(schema: str) -> None:
    rules, hints = load_schema(schema), get_type_hints(OPTIONS[schema])
    expected: dict[str, set[str]] = {}
    for variant in load_schema(schema).stepped:
        for name in taken(schema, variant):
            expected[name] = {*rules.hyperparameters[name]["type"]}
    for variant in load_schema(schema).stepped:
        for argument, meanings in native_options(schema, variant).items():
            if argument not in rules.hyperparameters:
                all_of = [said_by(rules, name, spelling) for name, spelling in meanings.items()]
                parts = [part for spelling in meanings.values() for part in spelling.parts]
                for part in parts or [argument]:
                    expected.setdefault(part, set()).update(set.intersection(*filter(None, all_of)))
    assert {name: kinds_of(hint) for name, hint in hints.items()} == expected
