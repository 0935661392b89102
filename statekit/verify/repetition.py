"""A certificate made again: whether the same comes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef, option
from statekit.conversion.contracts import NO_HINTS
from statekit.errors import UsageError, some
from statekit.files.tree import Place
from statekit.verify.certificate import Certificate, read_certificate
from statekit.verify.verification import Asked, OnProgress, certificate

_PLACES = ("source", "target")


@dataclass(frozen=True)
class Repetition:
    """A certificate beside one that was made now.

    Attributes:
        again: The new one.
        differs: What speaks against the old one: other content, or another verdict.
        notes: What another machine, or another version of a library, may make otherwise within the bound.
        old_passed: Whether it is of 0.2.0, and passed then.
    """

    again: Certificate
    differs: tuple[str, ...]
    notes: tuple[str, ...]
    old_passed: bool = False

    @property
    def same(self) -> bool:
        """Whether everything that the certificate claims came out again."""
        return not self.differs

    @property
    def passed(self) -> bool:
        """Whether the run goes on; a certificate of 0.2.0 asked nobody for what the target holds."""
        verdict = self.again.data["verdict"]
        return self.again.passed or (self.old_passed and verdict["whole"] != "refuted")


def repeated(
    path: Path,
    source: Place | None = None,
    target: Place | None = None,
    on_progress: OnProgress = lambda phase, name, size: None,
    hints: CheckpointRef = NO_HINTS,
) -> Repetition:
    """Does again what a certificate says.

    Args:
        path: The certificate.
        source: Where its source lies now; as it says if None.
        target: Where its target lies now.
        on_progress: As in `verify`.
        hints: What neither checkpoint says, and the certificate doesn't either: all but hyperparameters and variant.

    Raises:
        NotFoundError, FormatError: It can't be read, or was changed.
        UsageError: The hints say what the certificate says.
        As `verify`.
    """
    old = read_certificate(path)
    asked = Asked.from_json(old.data["asked"])
    given = {name: value for name, value in hints.options("place", "meaning").items() if name != "hparams"}
    if twice := sorted(given.keys() & asked.ref.options("place", "meaning").keys()):
        raise UsageError(
            "A certificate is repeated as it was asked for.",
            place=path,
            found=f"{', '.join(option(name).flag for name in twice)} too",
            remedy="leave it out, or verify source and target anew",
        )
    ref = replace(asked.ref, **given, **hints.options("trust"), path=source or asked.source)
    again = certificate(replace(asked, ref=ref, target=target or asked.target), on_progress)
    old_passed = old.passed and "nobody_gave" not in old.data["verdict"]
    return Repetition(again, tuple(differences(old, again)), tuple(_notes(old, again)), old_passed)


def differences(old: Certificate, again: Certificate) -> Iterator[str]:
    """Yields what speaks against a certificate that was made again: other content, or another verdict."""
    for side in _PLACES:
        digest, new_digest = (paper.data["identity"][side]["root"] for paper in (old, again))
        if digest != new_digest:
            yield f"the {side}'s content has the digest {new_digest}, {digest} in the certificate"
    given, now = (paper.data["replay"].get("gradients_file") for paper in (old, again))
    if given is not None and now is not None and given["digest"] != now["digest"]:
        yield f"the gradients' file has the digest {now['digest']}, {given['digest']} in the certificate"
    if not _is_same(old.verdict, again.verdict):
        yield f"the verdict is {again.verdict}, {old.verdict} in the certificate"
    before, after = old.tensors, again.tensors
    for name in {**before, **after}:
        if not _is_same(before.get(name), after.get(name)):
            yield f"{name}: {after.get(name)}, {before.get(name)} in the certificate"
    yield from _undetected(old, again)
    yield from _claims(old, again)


_CLAIMS = (
    ("verdict", "passed"), ("verdict", "exactness"), ("verdict", "nobody_gave"), ("rule", "from"), ("rule", "to"),
    ("rule", "exactness"), ("map", "kept"), ("replay", "stepped"), ("replay", "updates"),
)  # fmt: skip
"""What a certificate claims that no other processor and no other version of a library makes otherwise."""


def _claims(old: Certificate, again: Certificate) -> Iterator[str]:
    """Yields what a certificate claims beside its verdicts and doesn't come out again."""
    for part, name in _CLAIMS:
        before, now = (paper.data[part].get(name) for paper in (old, again))
        if before != now and name in old.data[part]:
            yield f"the {part}'s {name} is {now!r:.200}, {before!r:.200} in the certificate"
    if gone := {*old.data["map"].get("dropped", ())} ^ {*again.data["map"]["dropped"]}:
        yield f"left behind by one of both alone: {some(sorted(map(str, gone)))}"


def _undetected(old: Certificate, again: Certificate) -> Iterator[str]:
    """Yields the faults that a certificate's controls detected, and those of the new one don't."""
    before, after = (
        {control["name"]: control["detected"] for control in paper.data["controls"]} for paper in (old, again)
    )
    for name, detected in before.items():
        if detected and not after.get(name):
            yield f"the fault {name!r} isn't seen any more"


_ROUNDED = {"bit-exact", "within the rounding bound"}
"""Verdicts between which one conversion may change where another processor's kernels round updates otherwise.

What it wrote has digests, which are compared.
"""


def _is_same(first: str | None, other: str | None) -> bool:
    return first == other or {first, other} == _ROUNDED


def _notes(old: Certificate, again: Certificate) -> Iterator[str]:
    before, after = old.tensors, again.tensors
    for name, verdict in before.items():
        if {verdict, after.get(name)} == _ROUNDED:
            yield f"{name}: {after[name]}, {verdict} in the certificate; processors may round updates so"
    yield from _notes_of_runs(old.data, again.data)


def _notes_of_runs(old: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[str]:
    for name in {**old["versions"], **again["versions"]}:
        before, other = old["versions"].get(name), again["versions"].get(name)
        if before != other:
            yield f"{name} {other}, {before} in the certificate"
    probes = zip(old["replay"].get("probes", ()), again["replay"].get("probes", ()), strict=False)
    for before, other in probes:
        if before != other:
            yield f"on gradients {before['name']}: up to {other['ulps']} ULP, {before['ulps']} in the certificate"
