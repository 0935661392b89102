"""One line for Lightning's Trainer, which proves before the first update that a resumed run is its checkpoint's.

trainer = lightning.Trainer(callbacks=[statekit.lightning.AttestCallback("run/last.ckpt")])
"""

from __future__ import annotations

from typing import Any

from statekit.errors import MissingExtraError

try:
    from lightning.pytorch.callbacks import Callback

    from statekit.attestation.once import AttestsOnce
    from statekit.torch.attestation import attest
except ModuleNotFoundError as error:
    if error.name in ("torch", "lightning"):
        raise MissingExtraError(
            "Lightning isn't installed.", found=error, remedy="pip install lightning 'statekit[torch]'"
        ) from error
    raise

__all__ = ["AttestCallback"]


class AttestCallback(AttestsOnce, Callback):  # type: ignore[misc]  # its base is untyped
    """Attests a run of Lightning before its first update, when all is loaded.

    Args:
        path: The checkpoint that the run goes on from, as `fit(ckpt_path=...)` has it.
        strict: Whether to raise what is wrong, or to print it alone.
        **options: Those of `statekit.torch.attest`.

    Attributes:
        result: What was found; None before the first update.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Forgets what was said of an earlier run."""
        self.result = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Attests, the first time.

        Raises:
            StateError: With `strict`, the live run isn't the checkpoint's.
        """
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._once(
            lambda: attest(
                trainer.optimizers,
                trainer.model,
                self.path,
                scheduler=schedules,
                scaler=getattr(trainer.precision_plugin, "scaler", None),
                **self.options,
            ),
            trainer.is_global_zero,
        )
