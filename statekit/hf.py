"""One line for transformers' Trainer, which proves before the first update that a resumed run is its checkpoint's.

trainer.add_callback(statekit.hf.AttestCallback("run/checkpoint-500"))
"""

from __future__ import annotations

from typing import Any

from statekit.errors import MissingExtraError

try:
    from transformers.trainer_callback import TrainerCallback

    from statekit.attestation.once import AttestsOnce
    from statekit.torch.attestation import attest
except ModuleNotFoundError as error:
    if error.name in ("torch", "transformers"):
        raise MissingExtraError(
            "Transformers isn't installed.", found=error, remedy="pip install 'statekit[hf]'"
        ) from error
    raise

__all__ = ["AttestCallback"]


class AttestCallback(AttestsOnce, TrainerCallback):  # type: ignore[misc]  # its base is untyped
    """Attests a run of Trainer before its first update, when all is loaded.

    Args:
        path: The checkpoint that the run goes on from, as `train(resume_from_checkpoint=...)` has it.
        strict: Whether to raise what is wrong, or to print it alone.
        **options: Those of `statekit.torch.attest`.

    Attributes:
        result: What was found; None before the first update.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Forgets what was said of an earlier run."""
        self.result = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attests, the first time.

        Raises:
            StateError: With `strict`, the live run isn't the checkpoint's.
        """
        optimizer = given["optimizer"]
        self._once(
            lambda: attest(
                optimizer,
                given["model"],
                self.path,
                scheduler=given.get("lr_scheduler"),
                scaler=getattr(optimizer, "scaler", None),
                **self.options,
            ),
            state.is_world_process_zero,
        )
