"""The lines by which Keras goes on from its own files and from objects of TensorFlow 2.

Source: keras-team/keras keras/src/saving/saving_api.py, `load_weights`, `load_model`; tensorflow/tensorflow
tensorflow/python/checkpoint/checkpoint.py, `Checkpoint.restore`.
"""

from __future__ import annotations

from collections.abc import Mapping

from statekit.converters.layouts.keras import muon
from statekit.lines.printing import (
    RATE,
    UNKNOWN,
    SavedRun,
    State,
    given_options,
    has_several,
    kind_of,
    native_arguments,
    quoted,
    tensorflow_lines,
)

CLASSES: Mapping[tuple[str, str | None], str] = {
    ("adamw", "keras"): "keras.optimizers.AdamW",
    ("adafactor", "keras"): "keras.optimizers.Adafactor",
    ("lamb", "keras"): "keras.optimizers.Lamb",
    muon.MATRICES: "keras.optimizers.Muon",
}
KERAS2 = "import tf_keras as keras  # Keras 2, which Keras 3 does not replace: its optimizers number other variables"
_PLACED = ("keras-h5", "keras")
"""Containers that say where a model of Keras has its parameters."""


def model_file_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a file that holds the whole model."""
    path = quoted(saved.path)
    if _is_keras2(saved):
        return [KERAS2, f"model = keras.models.load_model({path})"]
    schedule, after, _ = _schedule_lines(state, saved)
    load = f"model = keras.saving.load_model({path})"
    return [
        "import keras",
        load,
        *([] if saved.rates(state).in_keras else schedule),
        *(["model.optimizer.learning_rate = schedule"] if after else []),
        *_given_lines(state, saved, "model.optimizer", is_made=False),
    ]


def weights_file_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a file of weights, with the optimizer's among them."""
    path = quoted(saved.path)
    if lies_by_path(saved):
        return [by_path_comment(saved), *statekit_lines(state, saved)]
    schedule, after, arguments = _schedule_lines(state, saved)
    before = saved.rates(state).in_keras
    if _is_keras2(saved):
        optimizer = _call(state, arguments)
        return [KERAS2, f"model.compile(optimizer={optimizer}, loss=loss)", f"model.load_weights({path})"]
    return [
        "import keras",
        *_not_arguments(state),
        *(schedule if before else []),
        f"model.compile(optimizer={_scaled(saved, _call(state, arguments))}, loss=loss)",
        "model.optimizer.build(model.trainable_variables)  # a slot that isn't there yet would be passed over",
        f"model.load_weights({path})",
        *([] if before else schedule),
        *(["model.optimizer.learning_rate = schedule"] if after else []),
        *_given_lines(state, saved, "model.optimizer"),
    ]


def _is_keras2(saved: SavedRun) -> bool:
    return (saved.version or "").startswith("2.")


def object_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a model and an optimizer of Keras as objects of TensorFlow."""
    schedule, after, arguments = _schedule_lines(state, saved)
    before = saved.rates(state).in_keras
    return [
        "import keras",
        "import tensorflow as tf",
        *_not_arguments(state),
        *(schedule if before else []),
        f"optimizer = {_scaled(saved, _call(state, arguments))}",
        "optimizer.build(model.trainable_variables)",
        "checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)",
        f"checkpoint.restore({quoted(saved.step_path('model.ckpt-{step}'))}).assert_existing_objects_matched()",
        *([] if before else schedule),
        *(["optimizer.learning_rate = schedule"] if after else []),
        *_given_lines(state, saved, "optimizer"),
    ]


def _given_lines(state: State, saved: SavedRun, optimizer: str, *, is_made: bool = True) -> list[str]:
    """Returns the lines that keep what the user gave: loading brings the file's rate, and a whole model's options."""
    if saved.is_converted or len(state["groups"]) != 1:
        return []
    given = given_options(state, state["groups"][0], *_NOT_ARGUMENTS)
    if saved.rates(state).keras_lines():
        given.pop(RATE, None)  # the schedule's
    optimizer += ".inner_optimizer" if _is_scaled(saved) else ""
    return [
        f"{optimizer}.{name} = {value!r}  # you gave it; loading brings the file's"
        for name, value in given.items()
        if name == RATE or not is_made
    ]


def keras2_object_lines(saved: SavedRun) -> list[str]:
    """Returns the lines for a model and an optimizer of Keras 2 as objects of TensorFlow 2."""
    path = quoted(saved.step_path("ck-{step}"))
    return [
        KERAS2,
        "import tensorflow as tf",
        "optimizer = ...  # the run's own: its arguments are in no checkpoint of TensorFlow",
        "checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)",
        f"checkpoint.restore({path}).assert_existing_objects_matched()",
    ]


def statekit_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for an optimizer of statekit.tensorflow under a model of Keras."""
    return [*tensorflow_lines(state, saved), "model.compile(optimizer=optimizer, loss=loss)"]


def lies_by_path(saved: SavedRun) -> bool:
    """Tells whether nothing said where Keras has the parameters: neither the source nor a model's file."""
    return saved.source not in (None, *_PLACED) and "like" not in saved.options


def by_path_comment(saved: SavedRun) -> str:
    """Returns a line about a file that Keras itself can't load."""
    load = f"model.load_weights({quoted(saved.path)})"
    return f"# {load} needs a conversion with --like, or a model with attributes of these names"


def _schedule_lines(state: State, saved: SavedRun) -> tuple[list[str], bool, str]:
    """Returns what is known of the run's schedule.

    Returns:
        The lines that make it, or a comment; whether it is put into an optimizer that its file gave a rate; the
        arguments of the optimizer's class.
    """
    rates = saved.rates(state)
    lines = rates.keras_lines()
    arguments = _muon_arguments(state) if _is_muons(state) else _arguments(state)[0]
    if lines and rates.in_keras:
        arguments = [f"{RATE}=schedule" if name.startswith(f"{RATE}=") else name for name in arguments]
    return lines or rates.comment(), bool(lines) and not rates.in_keras, ", ".join(arguments)


_NOT_ARGUMENTS = ("exclude_from_weight_decay",)


def _arguments(state: State) -> tuple[list[str], list[str]]:
    return ([], []) if has_several(state) else native_arguments(state, _NOT_ARGUMENTS)


def _muon_parts(state: State) -> list[muon.Part]:
    kinds = [(kind["schema"], kind["variant"]) for kind in (kind_of(state, g) for g in state["groups"])]
    return [
        (kind, group["hyperparameters"], group["paths"])
        for kind, group in zip(kinds, state["groups"], strict=True)
    ]


def _is_muons(state: State) -> bool:
    kinds = {kind for kind, _, _ in _muon_parts(state)}
    return muon.MATRICES in kinds and kinds <= {muon.MATRICES, muon.REST}


def _muon_arguments(state: State) -> list[str]:
    """Returns the arguments of Keras' Muon that aren't its defaults."""
    arguments, usual = muon.arguments(_muon_parts(state)), muon.usual_arguments()
    rate = arguments.pop(RATE, None)
    scheduled = any(fact["name"] == RATE for group in state["groups"] for fact in group.get("facts", ()))
    open_names = muon.BY_RATIO if scheduled else ()
    others = [
        f"{name}={value!r}"
        for name, value in arguments.items()
        if value != usual.get(name) and name not in open_names
    ]
    left = [f"{name}={UNKNOWN}" for name in open_names]
    return [f"{RATE}={UNKNOWN if rate is None else rate}", *others, *left]


def _not_arguments(state: State) -> list[str]:
    others = _arguments(state)[1]
    return [f"# not an argument of {_class(state)}: {', '.join(others)}"] if others else []


def _call(state: State, arguments: str) -> str:
    name = _class(state)
    return UNKNOWN if name == UNKNOWN else f"{name}({arguments})"


def _scaled(saved: SavedRun, call: str) -> str:
    """Returns the call of an optimizer, inside LossScaleOptimizer if its file has one."""
    return f"keras.optimizers.LossScaleOptimizer({call})" if _is_scaled(saved) else call


def _is_scaled(saved: SavedRun) -> bool:
    return not saved.is_converted and any(
        name.startswith("optimizer/inner_optimizer/") for name in saved.tensors
    )


def _class(state: State) -> str:
    if _is_muons(state):
        return CLASSES[muon.MATRICES]
    return CLASSES.get((state["schema"], state["variant"]), UNKNOWN)
