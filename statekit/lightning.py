"""Two callbacks for Lightning's Trainer.

lightning.Trainer(callbacks=[statekit.lightning.AttestCallback("run/last.ckpt")]) proves before the first update that a
resumed run is its checkpoint's. statekit.lightning.SealCallback() seals each save and lets doctor examine it.
"""

from __future__ import annotations

from typing import Any

from statekit.errors import MissingExtraError, extra, printable

try:
    from lightning.pytorch.callbacks import Callback

    from statekit.attestation.each_save import OnSave, SealsEachSave, tell, written_at
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
"""Attributes in which `ModelCheckpoint` keeps its saves' paths."""


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
        self._paths: set[str] = set()
        self._is_pending = self._is_told = False

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Notes that a file is about to be written, maybe over another: batches without one ask no disk."""
        self._is_pending = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins to seal what was written since the batch before."""
        if self._is_pending or _written(trainer) != self._paths:
            self._look(trainer, False)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Waits for the last seal."""
        self._look(trainer, True)
        self.wait()

    def _look(self, trainer: Any, is_last: bool) -> None:
        self._paths = _written(trainer)
        far = {path for path in self._paths if "://" in path}
        if far and not self._is_told:
            tell(f"statekit: {printable(min(far))}: saves in a store aren't sealed")
            self._is_told = True
        saves = {(path, written_at(path)) for path in self._paths - far}
        self._is_pending = any(
            moment is None for _, moment in saves
        )  # another thread writes it, or it is gone
        for path, moment in sorted(saves - self._seen):
            if moment is not None or is_last:
                self._seen.add((path, moment))
                self.begin(path)


def _written(trainer: Any) -> set[str]:
    """Returns the paths that `ModelCheckpoint` names, in the process that writes; other callbacks have none."""
    callbacks = trainer.checkpoint_callbacks if trainer.is_global_zero else ()
    paths = {getattr(callback, name, "") for callback in callbacks for name in _WRITTEN}
    paths |= {path for callback in callbacks for path in getattr(callback, "best_k_models", ())}
    return {str(path) for path in paths if path}
