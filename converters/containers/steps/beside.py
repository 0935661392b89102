"""What lies around a step's arrays: its manifest, the run's gin file, and files that are neither."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.converters.containers.steps.find import StepFolder
from statekit.converters.formats.hparams import find_gin, read_gin, read_text
from statekit.errors import FormatError
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.files.manifest import FILE, files_below, find_manifest, tensor_faults
from statekit.tensors.tree import Tree, tensor_names

_MAX_NAMED = 10_000


def step_checkpoint(
    container: str,
    found: StepFolder,
    tree: Tree,
    meta: Mapping[str, Any],
    known: set[str],
    findings: tuple[Finding, ...],
) -> Checkpoint:
    """Returns the checkpoint of a step, with what lies around its arrays.

    Args:
        container: Name of the container.
        found: The step's folder or file.
        tree: What it holds.
        meta: What the container knows besides.
        known: Names of the folder's entries that belong to the arrays.
        findings: What was odd.
    """
    gin, gin_findings = gin_settings(found.path)
    manifest, manifest_findings = trusted_manifest(found.path, found.step, tree)
    beside = files_beside(found.path, known) if found.path.is_dir() else []
    around = {"steps": list(found.steps), "files_beside": beside, "gin": gin}
    findings = (*found.findings, *findings, *gin_findings, *manifest_findings)
    return Checkpoint(container, found.path, tree, {**meta, **around}, found.step, manifest, findings)


def files_beside(folder: Path, known: set[str]) -> list[str]:
    """Returns the relative names of files in a step's folder that don't belong to its arrays.

    Args:
        folder: The step's folder.
        known: Names of its entries that do belong to them.
    """
    names: list[str] = []
    for entry in sorted(folder.iterdir()):
        if entry.name in known or entry.name == FILE:
            continue
        below = [f"{entry.name}/{name}" for name in files_below(entry)] if entry.is_dir() else [entry.name]
        names += below[: _MAX_NAMED - len(names)]
    return names


def gin_settings(step: Path) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Reads the gin file in a step's folder or in its run's.

    Returns:
        File, values, references and what was left out; empty if there is none. What was odd.
    """
    folder = step if step.is_dir() else step.parent
    path = find_gin([folder, folder.parent])
    if path is None:
        return {}, ()
    try:
        settings = read_gin(read_text(path), path)
    except (FormatError, OSError) as error:
        return {}, (Finding(f"the gin file can't be read: {' '.join(str(error).split())}", str(path)),)
    return {
        "file": str(path),
        "values": dict(settings.values),
        "references": dict(settings.references),
        "left_out": list(settings.left_out),
    }, ()


def trusted_manifest(
    step: Path, number: int | None, tree: Tree
) -> tuple[Mapping[str, Any] | None, tuple[Finding, ...]]:
    """Reads `statekit.json` in a step's folder or in its run's, if it is about this step and these tensors."""
    for folder in (step, step.parent) if step.is_dir() else (step.parent,):
        manifest, findings = find_manifest(folder)
        if manifest is None:
            if findings:
                return None, findings
        elif manifest["target"].get("step") in (number, None):
            faults = tensor_faults(manifest, tensor_names(tree))
            if not faults:
                return manifest, findings
            return None, (
                Finding(f"the manifest isn't trusted: {faults[0][0]} @ {faults[0][1]}", str(folder / FILE)),
            )
    return None, ()
