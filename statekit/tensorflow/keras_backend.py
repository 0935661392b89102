"""Keras runs on one backend, which is settled when it is first imported."""

from __future__ import annotations

from statekit.errors import MissingExtraError, UsageError, extra


def require_tensorflow() -> None:
    """Checks that Keras is there and runs on TensorFlow.

    Raises:
        MissingExtraError: TensorFlow or Keras isn't installed.
        UsageError: Keras runs on another backend.
    """
    try:
        import keras
        import tensorflow  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise MissingExtraError(
            "TensorFlow isn't installed.", found=error, remedy=extra("tensorflow")
        ) from error
    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            "Keras runs on another backend than TensorFlow.",
            expected="tensorflow",
            found=keras.backend.backend(),
            remedy="set KERAS_BACKEND=tensorflow before keras is imported",
        )
