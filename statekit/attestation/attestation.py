"""The verdict on a live run, its findings, and a list of what statekit could not compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from statekit.errors import StateError, listed, plural, printable, some
from statekit.state.constants import execution
from statekit.state.evidence import Fact, headline


@dataclass(frozen=True)
class Finding:
    """A fault of a live run, or of files.

    Attributes:
        name: Which, as docs/resume_bugs.md lists them.
        subject: What is wrong, one sentence.
        where: Everything that it concerns, by canonical name.
        expected: What the checkpoint has, of the first of these.
        found: What is live there.
        remedy: What to do.
        why: What becomes of a run that goes on with it.
    """

    name: str
    subject: str
    where: tuple[str, ...]
    expected: str
    found: str
    remedy: str
    why: str

    def to_json(self) -> dict[str, Any]:
        """Returns the finding as plain data."""
        return {**vars(self), "where": list(self.where)}

    def __str__(self) -> str:
        rows = [
            f"{self.name}: {self.subject}",
            f"  at: {some(self.where)}",
            f"  expected: {self.expected}",
            f"  found: {self.found}",
            f"  why it matters: {self.why}",
            f"  do: {self.remedy}",
        ]
        return "\n".join(map(printable, rows))


@dataclass(frozen=True, repr=False)
class Attestation:
    """Whether a live run is the run of its checkpoint.

    Attributes:
        checkpoint: The checkpoint's path.
        updates: Updates done, as the checkpoint says; None where it doesn't count them.
        findings: What is wrong with the live run; none if it is the checkpoint's.
        unchecked: What wasn't compared, and why, a sentence each.
        assumptions: What was assumed of the checkpoint because it doesn't say, a sentence each.
        params: How many parameters there are.
        tensors: How many tensors were compared by value.
        bytes_read: Bytes of the checkpoint's values that were read for it.
        stepped: Of how many parameters the next update was compared too.
        execution: As which execution that update was judged, where the run's device and kernel tell: a name of
            `statekit.state.constants`.
        warnings: What will be otherwise later in the run, and may be meant so, a sentence each.
        facts: What the checkpoint's updates depend on and it doesn't say, as the live run has it.
    """

    checkpoint: str
    updates: int | None
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...]
    assumptions: tuple[str, ...]
    params: int
    tensors: int
    bytes_read: int
    stepped: int = 0
    warnings: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    execution: str | None = None

    @property
    def headline(self) -> str:
        """The verdict with the weakest facts that it rests on."""
        done = "" if self.updates is None else f", after {self.updates} updates"
        if self.passed:
            return headline(f"The live run is the checkpoint's{done}", self.facts)
        return f"The live run isn't the checkpoint's: {plural(len(self.findings), 'finding')}"

    @property
    def passed(self) -> bool:
        """Whether no finding speaks against the run."""
        return not self.findings

    def of_all(self, findings: Sequence[Sequence[Finding]]) -> Attestation:
        """Returns the attestation with the findings of every process; a finding of some names their ranks."""
        every = list(dict.fromkeys(item for finding in findings for item in finding))
        ranks = {item: [i for i, finding in enumerate(findings) if item in finding] for item in every}
        merged = tuple(
            item
            if len(ranks[item]) == len(findings)
            else replace(item, where=tuple(f"{place} on rank {ranks[item][0]}" for place in item.where))
            for item in every
        )
        return replace(self, findings=merged)

    def to_json(self) -> dict[str, Any]:
        """Returns the attestation as plain data."""
        return {
            "format": "statekit.attestation/1",
            "passed": self.passed,
            "headline": self.headline,
            **vars(self),
            "facts": [fact.to_json() for fact in self.facts],
            "findings": [finding.to_json() for finding in self.findings],
            "unchecked": list(self.unchecked),
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
        }

    def json(self) -> str:
        """Returns the attestation as JSON text."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False)

    def check(self) -> None:
        """Raises the findings as an error.

        Raises:
            StateError: The live run isn't the checkpoint's; has every finding.
        """
        if self.passed:
            return
        error = StateError(
            "The live run isn't the checkpoint's.",
            place=self.checkpoint,
            found=listed(
                f"{finding.name}: {finding.subject} @ {some(finding.where)}; "
                f"expected {finding.expected}, found {finding.found}"
                for finding in self.findings
            ),
            remedy="; ".join(dict.fromkeys(finding.remedy for finding in self.findings)),
        )
        error.faults = tuple(
            (f"{finding.name}: {finding.subject}", some(finding.where)) for finding in self.findings
        )
        raise error

    def __str__(self) -> str:
        compared = (
            f"{self.params} parameters; {self.tensors} tensors compared by value with {self.checkpoint}."
        )
        how = "" if self.execution is None else f" with {self.execution}: {execution(self.execution).title}"
        updates = f" The next update of {self.stepped} parameters was compared{how}." if self.stepped else ""
        rows = [printable(f"{self.headline}. {compared}{updates}")]
        rows += [str(finding) for finding in self.findings]
        rows += [printable(f"Warning: {warning}.") for warning in self.warnings]
        rows += [printable(f"Not compared: {omission}.") for omission in self.unchecked]
        rows += [printable(f"Assumed: {assumption}") for assumption in self.assumptions]
        return "\n".join(rows)

    def __repr__(self) -> str:
        return printable(
            f"<Attestation of {self.checkpoint}: {'passed' if self.passed else f'{len(self.findings)} findings'}>"
        )
