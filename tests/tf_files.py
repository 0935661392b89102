"""Writes TensorFlow checkpoints for tests."""

from __future__ import annotations

from pathlib import Path

from statekit.conversion.contracts import Encoded
from statekit.converters.containers.tf_bundle import CONTAINER
from statekit.files.stage import staged, unknown_fields
from statekit.tensors.tree import Tree


def save(tree: Tree, target: Path, step: int = 3) -> Path:
    """Writes a checkpoint and returns its prefix."""
    fields = {**unknown_fields({}), "target": {"container": "tf-bundle", "step": step}}
    with staged(target, "folder", fields=lambda tensors: fields) as stage:
        CONTAINER.write(Encoded(tree, step), stage)
        stage.commit(CONTAINER.open)
    return target / f"model.ckpt-{step}"
