"""The lines by which each system loads a model's weights alone.

Source: pytorch/pytorch torch/nn/modules/module.py, `Module.load_state_dict`; torch/distributed/checkpoint,
`load`; huggingface/safetensors bindings/python/py_src/safetensors/torch.py, `load_model`; tensorflow/tensorflow
tensorflow/python/training/saver.py, `Saver.restore`; tensorflow/python/checkpoint/checkpoint.py, `Checkpoint.restore`;
google/orbax `StandardCheckpointer.restore`; google/flax flax/training/checkpoints.py, `restore_checkpoint`;
keras-team/keras keras/src/saving/saving_api.py.
"""

from __future__ import annotations

from statekit.converters.layouts.keras.lines import by_path_comment, lies_by_path
from statekit.converters.layouts.optax.lines import orbax_item
from statekit.converters.layouts.tensorflow.lines import STEP
from statekit.lines.printing import SavedRun, State, quoted, subscripts, tensorflow_lines


def torch_lines(saved: SavedRun, key: str | None) -> list[str]:
    """Returns the lines for PyTorch: a file, a folder of safetensors, or one of torch.distributed.checkpoint.

    Args:
        saved: The checkpoint.
        key: Where the model lies in it, keys joined by `/`; None where it is all.
    """
    path = quoted(saved.path)
    if saved.container == "safetensors":
        if any(file.endswith(".index.json") for file in saved.files):
            return [
                f"model = type(model).from_pretrained({path})  # with the model's config.json in the folder"
            ]
        is_file = saved.path.suffix == ".safetensors"
        file = saved.path if is_file else saved.path / "model.safetensors"
        return ["import safetensors.torch", f"safetensors.torch.load_model(model, {quoted(file)})"]
    if saved.container == "dcp":
        part = quoted(key or "model")
        return [
            "import torch.distributed.checkpoint as dcp",
            f"parts = {{{part}: model.state_dict()}}",
            f"dcp.load(parts, checkpoint_id={path})",
            f"model.load_state_dict(parts[{part}])",
        ]
    return [
        "import torch",
        f"checkpoint = {saved.torch_load(path)}",
        f"model.load_state_dict(checkpoint{'' if key is None else subscripts(key)})",
    ]


def jax_lines(saved: SavedRun) -> list[str]:
    """Returns the lines for a tree of arrays in Orbax or Flax."""
    if saved.container == "flax":
        restore = f"checkpoints.restore_checkpoint({quoted(saved.path.absolute())}, "
        return ["from flax.training import checkpoints", f'params = {restore}{{"params": params}})["params"]']
    restore = f"ocp.StandardCheckpointer().restore({quoted(orbax_item(saved))}, "
    return ["import orbax.checkpoint as ocp", f'params = {restore}{{"params": params}})["params"]']


def graph_lines(saved: SavedRun) -> list[str]:
    """Returns the lines for the variables of a graph of TensorFlow 1."""
    saver = "tf.compat.v1.train.Saver(tf.compat.v1.trainable_variables())"
    return ["import tensorflow as tf", f"{saver}.restore(session, {quoted(saved.step_path(STEP))})"]


def object_lines(saved: SavedRun) -> list[str]:
    """Returns the lines for objects of TensorFlow 2."""
    objects = "model=model" if any(name.startswith("model/") for name in saved.tensors) else "model"
    return [
        "import tensorflow as tf",
        f"checkpoint = tf.train.Checkpoint({objects})",
        f"checkpoint.restore({quoted(saved.step_path(STEP))}).assert_existing_objects_matched()",
    ]


def keras_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a model of Keras, or its weights."""
    path = quoted(saved.path)
    if saved.container == "keras":
        return ["import keras", f"model = keras.saving.load_model({path})"]
    if lies_by_path(saved):
        return [by_path_comment(saved), *tensorflow_lines(state, saved)]
    return [f"model.load_weights({path})"]
