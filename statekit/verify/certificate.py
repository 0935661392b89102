"""The certificate of a conversion: the comparisons, their results, and a digest over both."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statekit.errors import Faults, FormatError, StatekitError, printable
from statekit.files.durable import replace_file
from statekit.files.homes import check_name
from statekit.files.source import read_small
from statekit.maps import json_schema
from statekit.tensors.digest import json_digest
from statekit.tensors.tree import shipped_json, strict_json
from statekit.verify.identity import VERDICTS, Verdict

FORMAT, VERSION = "statekit-certificate", 1


@dataclass(frozen=True, repr=False)
class Certificate:
    """The result of a verification.

    Attributes:
        data: Everything but the digest, as `schemas/statekit-certificate.schema.json` has it.
    """

    data: Mapping[str, Any]

    @property
    def verdict(self) -> Verdict:
        """The verdict of the whole."""
        whole: Verdict = self.data["verdict"]["whole"]
        return whole

    @property
    def passed(self) -> bool:
        """Whether the run goes on as exactly as was required."""
        return bool(self.data["verdict"]["passed"])

    @property
    def digest(self) -> str:
        """The BLAKE3 digest of its canonical JSON."""
        return json_digest(self.data)

    @property
    def tensors(self) -> Mapping[str, Verdict]:
        """The verdict of each tensor of the target, by canonical name."""
        return {row["name"]: row["verdict"] for row in self.data["map"]["tensors"]}

    def counts(self) -> dict[str, int]:
        """Returns how many tensors have each verdict, from the best to the worst."""
        counts = Counter(self.tensors.values())
        return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}

    def to_json(self) -> dict[str, Any]:
        """Returns the certificate as plain data."""
        return {**self.data, "digest": self.digest}

    def text(self) -> str:
        """Returns the text of the certificate's file: each record of a list has a line of its own."""
        return _laid_out(self.to_json()) + "\n"

    def save(self, path: Path) -> None:
        """Writes the certificate to a file; an earlier file stays until the new one is on the disk.

        Raises:
            UsageError: The name is a manifest's.
            CommitError: It can't be written.
        """
        check_name(path)
        replace_file(path, self.text().encode("utf-8"))

    def __repr__(self) -> str:
        asked = self.data["asked"]
        return printable(f"<Certificate {asked['source']} -> {asked['target']}: {self.verdict}>")


def is_certificate(path: Path) -> bool:
    """Tells whether a file is a certificate, of any version, changed or not."""
    try:
        data = strict_json(read_small(path), path)
    except StatekitError:
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def read_certificate(path: Path) -> Certificate:
    """Reads a certificate, and proves its digest.

    Raises:
        NotFoundError: There is none.
        FormatError: It isn't one, or was changed.
    """
    data = strict_json(read_small(path), path)
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise FormatError(
            "The file isn't a certificate of this version.", place=path, expected=f"{FORMAT} {VERSION}"
        )
    schema = shipped_json("statekit.schemas", "statekit-certificate.schema.json")
    Faults(json_schema.faults(data, schema)).check(
        FormatError, "A certificate has another form than its schema gives it", place=path
    )
    stated = data.pop("digest", None)
    certificate = Certificate(data)
    if certificate.digest != stated:
        raise FormatError(
            "A certificate was changed since it was made.",
            place=path,
            expected=stated,
            found=certificate.digest,
        )
    return certificate


def _laid_out(node: Any, depth: int = 0) -> str:
    """Returns JSON in which what fits into a line, and each record of a list, has one."""
    flat = json.dumps(node, ensure_ascii=True, allow_nan=False)
    inside, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    if depth >= 3 or len(flat) < 100:
        return flat
    if isinstance(node, dict):
        parts = [f"{json.dumps(key)}: {_laid_out(value, depth + 1)}" for key, value in node.items()]
        return "{" + inside + ("," + inside).join(parts) + end + "}"
    if isinstance(node, list) and all(isinstance(part, (dict, list)) for part in node):
        return (
            "[" + inside + ("," + inside).join(json.dumps(part, allow_nan=False) for part in node) + end + "]"
        )
    return flat
