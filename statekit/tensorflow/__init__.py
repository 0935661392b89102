"""TensorFlow: every optimizer as a Keras 3 optimizer, and resuming from any checkpoint statekit reads.

`load_optimizer` takes a model or its variables and a checkpoint of any system that holds them. It returns a Keras
optimizer that continues where the original stopped:

import statekit.tensorflow

statekit.tensorflow.load_params("checkpoint_1000000", model)
optimizer = statekit.tensorflow.load_optimizer("checkpoint_1000000", model, learning_rate=1e-3)
model.compile(optimizer=optimizer, loss=...)
"""

from statekit.errors import MissingExtraError, UsageError, extra


def _require_tensorflow() -> None:
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


_require_tensorflow()  # before what follows (hence E402) imports Keras, which settles its backend for good

from statekit.tensorflow.attestation import AttestCallback, SealCallback, attest  # noqa: E402 - after the backend
from statekit.tensorflow.from_checkpoint import load_optimizer, load_params  # noqa: E402 - after the backend
from statekit.tensorflow.optimizers import LAMB, LANS, Adafactor, AdamW, Muon, ScaledAdam  # noqa: E402 - after it
from statekit.tensorflow.step_attestation import attested_step  # noqa: E402 - after the backend

__all__ = [
    "LAMB", "LANS", "Adafactor", "AdamW", "AttestCallback", "Muon", "ScaledAdam", "SealCallback", "attest",
    "attested_step", "load_optimizer", "load_params",
]  # fmt: skip
