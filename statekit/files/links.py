"""Links in a checkpoint: the one rule, for all formats, of which are followed.

A symbolic link may lead from one place of a checkpoint to another. Out of it, it may lead within one repository of
Hugging Face's cache, whose snapshots are made of links, or where the user said so; no other is followed. The path that
the user gives may itself be a link, or lie below one: as `latest` does, it says which checkpoint is meant.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from statekit.errors import RefusedError


@dataclass(frozen=True)
class Links:
    """The links of one checkpoint.

    Attributes:
        checkpoint: What is opened: a folder, or a file, whose folder its other files lie in. None for a file that is
            read by itself, as one that the user names.
        follow: Whether the user has said that all are followed.
    """

    checkpoint: Path | None = None
    follow: bool = False
    _inside: set[Path] = field(default_factory=set, repr=False, compare=False)

    def check(self, path: Path) -> None:
        """Refuses a path that leads out of the checkpoint.

        A file in a folder above the checkpoint, where some formats keep what belongs to a run, stays in that folder.

        Raises:
            RefusedError: It does, by a link that isn't followed.
        """
        if self.follow or self.checkpoint is None or path == self.checkpoint:
            return
        if path.parent in self._inside and not path.is_symlink():
            return
        root = os.path.realpath(self._folder if _below(path, self._folder) else path.parent)
        real = os.path.realpath(path)
        if _within(real, root):
            if _within(os.path.realpath(path.parent), root):
                self._inside.add(path.parent)
        elif not _of_one_repository(path, real):
            raise RefusedError(
                "A link leads out of the checkpoint.",
                place=_leading_out(path, root),
                expected=f"a file below {root}",
                found=real,
                remedy="if you trust it, --follow-links (in Python follow_links=True) reads what it leads to",
            )

    @cached_property
    def _folder(self) -> Path:
        assert self.checkpoint is not None
        return self.checkpoint if self.checkpoint.is_dir() else self.checkpoint.parent


def _below(path: Path, folder: Path) -> bool:
    """Tells whether a path is written as one below a folder, where either may be relative."""
    return path.is_relative_to(folder) or Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _within(real: str, root: str) -> bool:
    return os.path.commonpath((root, real)) == root


def _of_one_repository(path: Path, real: str) -> bool:
    """Tells whether a path in a snapshot of Hugging Face's cache leads to a blob of the same repository.

    Source: huggingface_hub, "Understand caching": `models--<name>/snapshots/<revision>/<file>` is a link to
    `models--<name>/blobs/<digest>`.
    """
    folder = Path(os.path.realpath(path.parent))
    snapshots = next((one for one in folder.parents if one.name == "snapshots"), None)
    if snapshots is None or not snapshots.parent.name.startswith("models--"):
        return False
    return Path(real).parent == snapshots.parent / "blobs"


def _leading_out(path: Path, root: str) -> Path:
    """Returns the link on the way to a path at which the way leaves a folder."""

    def leaves(at: Path) -> bool:
        inside = _within(os.path.realpath(at.parent), root)
        return inside and at.is_symlink() and not _within(os.path.realpath(at), root)

    return next(filter(leaves, (*reversed(path.parents), path)), path)
