"""All readers that are fuzzed, by name."""

from __future__ import annotations

from collections.abc import Mapping

from fuzz import binaries, documents, folders, trees
from fuzz.reader import Reader

FORMATS = (*binaries.READERS, *documents.READERS, trees.PLAN)
NOTED = (*FORMATS, *folders.READERS)
"""Those that have a row of their own among the figures."""
READERS: Mapping[str, Reader] = {reader.name: reader for reader in (*NOTED, *trees.READERS)}
