"""Two callbacks for Lightning's Trainer.

lightning.Trainer(callbacks=[statekit.lightning.AttestCallback("run/last.ckpt")]) proves before the first update that a
resumed run is its checkpoint's. statekit.lightning.SealCallback() seals each save and lets doctor examine it.
"""

from __future__ import annotations

from typing import Any

from statekit.errors import MissingExtraError, extra

try:
    from lightning.pytorch.callbacks import Callback

    from statekit.attestation.each_save import OnSave, SealsEachSave, written_at
    from statekit.attestation.once import AttestsOnce
    from statekit.torch.attestation import attest
except ModuleNotFoundError as error:
    if error.name in ("torch", "lightning"):
        raise MissingExtraError(
            "Lightning isn't installed.", found=error, remedy=f"pip install lightning; {extra('torch')}"
        ) from error
    raise

__all__ = ["AttestCallback", "SealCallback"]


_WRITTEN = ("best_model_path", "last_model_path", "_last_checkpoint_saved")
"""Where `ModelCheckpoint` keeps what it wrote; the last is neither, where it is the second best."""


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
        self._forget()

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


class SealCallback(SealsEachSave, Callback):  # type: ignore[misc]  # its base is untyped
    """Seals each checkpoint that `ModelCheckpoint` writes, and has doctor look into it.

    No batch waits for it; the end of the fit does. What is written over or removed meanwhile is said and stops nothing.

    Args:
        on_save: Told what came of each checkpoint, by another thread; what didn't pass is printed if None.

    Attributes:
        saves: What came of the checkpoints so far.
    """

    def __init__(self, on_save: OnSave | None = None) -> None:
        super().__init__(on_save)
        self._seen: set[tuple[str, int | None]] = set()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins to seal what was written since the batch before."""
        self._look(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Waits for the last seal."""
        self._look(trainer)
        self.wait()

    def _look(self, trainer: Any) -> None:
        # Other callbacks that save have none of these.
        written = {getattr(kept, name, "") for kept in trainer.checkpoint_callbacks for name in _WRITTEN}
        for path in sorted(filter(None, written)) if trainer.is_global_zero else ():
            save = (path, written_at(path))
            if save not in self._seen:
                self._seen.add(save)
                self.begin(path)
