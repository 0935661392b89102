"""The lines by which TensorFlow's savers restore the state of an optimizer.

Source: tensorflow/tensorflow tensorflow/python/training/saver.py, `Saver.restore`;
tensorflow/python/checkpoint/checkpoint.py, `Checkpoint.restore`; tensorflow/mesh mesh_tensorflow/utils.py,
`MtfRestoreHook`.
"""

from __future__ import annotations

import shlex

from statekit.errors import printable
from statekit.lines.printing import RATE, SavedRun, State, has_several, native_arguments, quoted

STEP = "model.ckpt-{step}"


def graph_lines(state: State, saved: SavedRun, trainer: str = "") -> list[str]:
    """Returns the lines for a graph of TensorFlow 1, which has the optimizer already.

    Args:
        state: The state.
        saved: Its checkpoint.
        trainer: The command that goes on with a run's folder, with `{folder}` for it.
    """
    path, rates = saved.step_path(STEP), saved.rates(state)
    code = rates.python_function()
    schedule = [f"# its learning rate, of the updates done: {code}"] if code else rates.comment()
    arguments = [] if has_several(state) or state["variant"] is None else native_arguments(state)[0]
    arguments = [name for name in arguments if not schedule or name.partition("=")[0] not in (RATE, "lr")]
    # A trainer's graph has more variables than the source of another system.
    is_foreign = saved.source not in (None, "tf-bundle")
    folder = shlex.quote(printable(str(path.parent)))
    command = f"  # or {trainer.format(folder=folder)}" if trainer and not is_foreign else ""
    optimizer = "has the run's own arguments: nothing here says them"
    if arguments:
        optimizer = f"has these arguments: {', '.join(arguments)}"
    elif state["variant"] is None and not has_several(state):
        optimizer = "is the run's own: nothing here says its variant, which --variant names"
    return [
        f"# into a graph whose optimizer {optimizer}",
        *schedule,
        "import tensorflow as tf",
        f"tf.compat.v1.train.Saver().restore(session, {quoted(path)}){command}",
    ]


def object_lines(saved: SavedRun) -> list[str]:
    """Returns the lines for objects of TensorFlow 2."""
    path = quoted(saved.step_path(STEP))
    return [
        "import tensorflow as tf",
        "checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)",
        f"checkpoint.restore({path}).assert_existing_objects_matched()",
    ]
