"""The lines by which TensorFlow's savers restore the state of an optimizer.

Source: tensorflow/tensorflow tensorflow/python/training/saver.py, `Saver.restore`;
tensorflow/python/checkpoint/checkpoint.py, `Checkpoint.restore`; tensorflow/mesh mesh_tensorflow/utils.py,
`MtfRestoreHook`.
"""

from __future__ import annotations

from statekit.lines.printing import SavedRun, State, has_several, native_arguments, quoted

STEP = "model.ckpt-{step}"


def graph_lines(state: State, saved: SavedRun, trainer: str = "") -> list[str]:
    """Returns the lines for a graph of TensorFlow 1, which has the optimizer already.

    Args:
        state: The state.
        saved: Its checkpoint.
        trainer: The command that goes on with a run's folder, with `{folder}` for it.
    """
    path = saved.step_path(STEP)
    arguments = [] if has_several(state) else native_arguments(state)[0]
    command = f"  # or {trainer.format(folder=quoted(path.parent))}" if trainer else ""
    return [
        f"# into a graph whose optimizer has these arguments: {', '.join(arguments)}",
        f"tf.compat.v1.train.Saver().restore(session, {quoted(path)}){command}",
    ]


def object_lines(saved: SavedRun) -> list[str]:
    """Returns the lines for objects of TensorFlow 2."""
    path = quoted(saved.step_path(STEP))
    return [
        "checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)",
        f"checkpoint.restore({path}).assert_existing_objects_matched()",
    ]
